"""Strikes lead to a ban of the identity, and a ban ends."""

from __future__ import annotations

from peer.standing import BAN_S, BAN_STRIKES, FORGIVEN_S, Standings
from swarm.clock import SimClock
from swarm.events import ListEvents


class Bench:
    def __init__(self) -> None:
        self.clock = SimClock()
        self.events = ListEvents(self.clock)
        self.told: list[tuple[str, str]] = []
        self.standings = Standings(
            self.clock,
            self.events,
            on_ban=lambda peer: self.told.append(("ban", peer)),
            on_pardon=lambda peer: self.told.append(("pardon", peer)),
        )

    def strike(self, times: int) -> None:
        for _ in range(times):
            self.standings.strike("x", "nonsense")


def test_few_strikes_are_remembered_and_nothing_more() -> None:
    bench = Bench()
    bench.strike(BAN_STRIKES - 1)
    assert not bench.standings.banned("x")
    assert bench.standings.of("x").strikes == BAN_STRIKES - 1
    assert bench.standings.of("y").strikes == 0
    assert bench.told == []


def test_strikes_far_apart_are_forgiven() -> None:
    bench = Bench()
    for _ in range(3 * BAN_STRIKES):
        bench.strike(1)
        bench.clock.run_for(FORGIVEN_S / (BAN_STRIKES - 2))
    assert not bench.standings.banned("x")


def test_a_ban_ends_and_the_next_is_twice_as_long() -> None:
    bench = Bench()
    bench.strike(BAN_STRIKES)
    assert bench.standings.banned("x")
    assert bench.told == [("ban", "x")]
    bench.strike(20)  # a flood of its frames under way makes it no worse
    bench.clock.run_for(BAN_S + 1)
    assert bench.told == [("ban", "x"), ("pardon", "x")]
    assert not bench.standings.banned("x")
    bench.clock.run_for(FORGIVEN_S)
    bench.strike(BAN_STRIKES)
    bench.clock.run_for(BAN_S + 1)
    assert bench.standings.banned("x")
    bench.clock.run_for(BAN_S)
    assert not bench.standings.banned("x")
    assert [fields["duration_s"] for fields in bench.events.of("banned")] == [BAN_S, 2 * BAN_S]
