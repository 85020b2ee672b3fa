"""Rates of links, from acknowledgements that a simple link of a known rate would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.rates import FADE, LEAST_SHARE, Rates
from swarm.clock import SimClock

ROUND_TRIP_S = 0.1
MB = 1_000_000


class Line:
    """Carries what is given one after the other at ``bytes_per_s``; acknowledged a round trip later."""

    def __init__(self, bytes_per_s: float, measured_s: float | None = ROUND_TRIP_S) -> None:
        self.clock = SimClock()
        self.bytes_per_s = bytes_per_s
        self.measured_s = measured_s
        self.rates = Rates(self.clock, lambda peer: self.measured_s)
        self._free_s = 0.0

    def give(self, *sizes: int) -> None:
        """All at once."""
        for size in sizes:
            self.rates.sent("a", size)
            self._free_s = max(self.clock.now(), self._free_s) + size / self.bytes_per_s
            taken_s = self._free_s + ROUND_TRIP_S
            self.clock.call_later(taken_s - self.clock.now(), self.rates.taken, "a", size)

    @property
    def measured(self) -> float | None:
        return self.rates.bytes_per_s("a")


def test_nothing_is_known_before_anything_was_acknowledged() -> None:
    line = Line(MB)
    line.give(MB)
    assert line.measured is None


def test_the_round_trip_is_not_the_links_rate() -> None:
    line = Line(10 * MB)
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.measured == pytest.approx(10 * MB)


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(1 << 16, 2 * MB)), min_size=1, max_size=20))
def test_a_link_is_never_taken_for_faster_than_it_is(given: list[tuple[float, int]]) -> None:
    line = Line(5 * MB)
    for pause_s, size in given:
        line.clock.run_for(pause_s)
        line.give(size)
    line.clock.run_for(60.0)
    assert line.measured is not None
    assert line.measured <= 5 * MB * (1 + 1e-9)


def test_what_waits_behind_others_of_ours_is_no_slower() -> None:
    line = Line(5 * MB)
    line.give(MB, MB, MB, MB)
    line.clock.run_for(5.0)
    assert line.measured == pytest.approx(5 * MB)


def test_a_rate_that_the_round_trip_hides_is_bounded() -> None:
    line = Line(1e12)
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.measured == pytest.approx(MB / (LEAST_SHARE * ROUND_TRIP_S), rel=0.01)


def test_a_link_that_became_slower_is_known_to_be_in_the_end() -> None:
    line = Line(10 * MB)
    line.give(MB)
    line.clock.run_for(1.0)
    line.bytes_per_s = MB
    for count in range(1, 60):
        line.give(MB)
        line.clock.run_for(3.0)
        assert line.measured == pytest.approx(max(MB, 10 * MB * FADE**count))


def test_a_round_trip_behind_our_own_tensors_does_not_count() -> None:
    line = Line(10 * MB)
    line.give(MB)
    line.clock.run_for(1.0)
    line.measured_s = 0.19
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.measured == pytest.approx(10 * MB, rel=0.02)


def test_without_a_round_trip_there_is_no_rate() -> None:
    line = Line(10 * MB, measured_s=None)
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.measured is None


def test_an_unused_link_is_taken_for_the_best_that_was_seen() -> None:
    line = Line(10 * MB)
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.rates.bytes_per_s("b") == line.measured


def test_what_was_under_way_on_a_lost_link_is_forgotten() -> None:
    line = Line(10 * MB)
    line.rates.sent("a", 50 * MB)
    line.rates.lost("a")
    line.rates.lost("b")
    line.clock.run_for(1.0)
    line.give(MB)
    line.clock.run_for(1.0)
    assert line.measured == pytest.approx(10 * MB)
