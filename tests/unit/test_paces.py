"""How long each next hop takes, as its neighbours see it."""

from __future__ import annotations

from peer.paces import LEAST, OLD_S, WINDOW, Paces
from swarm.clock import SimClock


def test_it_says_the_least_of_the_last_measurements() -> None:
    paces = Paces(SimClock())
    for took_s in [0.5] + [1.0 + n / 100 for n in range(WINDOW - 1)]:
        paces.add("a", took_s)
    assert paces.seen_s() == {"a": 0.5}
    paces.add("a", 3.0)  # the first one falls out
    assert paces.seen_s() == {"a": 1.0}


def test_it_says_nothing_of_few_measurements() -> None:
    paces = Paces(SimClock())
    for _ in range(LEAST - 1):
        paces.add("a", 1.0)
    assert paces.seen_s() == {}
    paces.add("a", 2.0)
    assert paces.seen_s() == {"a": 1.0}


def test_what_was_seen_long_ago_is_forgotten() -> None:
    clock = SimClock()
    paces = Paces(clock)
    for peer in ("a", "b"):
        for _ in range(LEAST):
            paces.add(peer, 1.0)
    clock.run_for(OLD_S - 1.0)
    paces.add("b", 4.0)
    clock.run_for(2.0)
    assert paces.seen_s() == {"b": 1.0}
    paces.add("a", 9.0)  # who is tried again begins anew
    assert paces.seen_s() == {"b": 1.0}
