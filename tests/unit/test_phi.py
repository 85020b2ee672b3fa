"""How long silence is borne, from the intervals that were measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.phi import Arrivals, PhiLimits

LIMITS = PhiLimits()


def of(*intervals_s: float) -> Arrivals:
    arrivals = Arrivals(LIMITS)
    for interval_s in intervals_s:
        arrivals.add(interval_s)
    return arrivals


def test_nothing_is_judged_before_enough_was_measured() -> None:
    arrivals = of(1.0, 1.0, 1.0)
    assert not arrivals.measured
    assert arrivals.phi(1e6) == 0.0
    assert arrivals.borne_s() == LIMITS.unmeasured_s


def test_a_steady_peer_is_borne_for_its_interval_the_pause_and_a_few_deviations() -> None:
    arrivals = of(*[1.0] * 8)
    # 5.612 deviations leave 10^-8 of a normal distribution.
    assert arrivals.borne_s() == pytest.approx(1.0 + 2.5 + 5.612 * 0.1, abs=1e-3)


def test_an_unsteady_peer_is_borne_longer_and_one_long_pause_changes_nothing() -> None:
    steady = of(*[1.0] * 9)
    unsteady = of(*itertools.islice(itertools.cycle([0.5, 1.0, 1.6]), 9))
    assert unsteady.borne_s() > steady.borne_s() + 1
    assert of(*[1.0] * 8, 60.0).borne_s() == steady.borne_s()


def test_what_is_borne_has_an_end_and_forgetting_begins_anew() -> None:
    arrivals = of(*[50.0] * 5)
    assert arrivals.borne_s() == LIMITS.most_s
    arrivals.clear()
    assert arrivals.borne_s() == LIMITS.unmeasured_s


@given(st.lists(st.floats(0.1, 5.0), min_size=4, max_size=40))
def test_phi_grows_with_silence_and_reaches_its_threshold_where_the_wait_ends(intervals: list[float]) -> None:
    arrivals = of(*intervals)
    values = [arrivals.phi(silence_s / 4) for silence_s in range(100)]
    assert values == sorted(values)
    borne_s = arrivals.borne_s()
    if borne_s < LIMITS.most_s:
        assert arrivals.phi(borne_s) == pytest.approx(LIMITS.threshold, rel=1e-3)
