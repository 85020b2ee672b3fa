"""Peers that lie about speeds: the real planner, views and gossip in virtual time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bootstrap.simulation.swarm import SimPeer, SimSwarm

LIAR = "s1r0"
STEPS = 12
LATER = 8
"""By this step each peer has been seen at work, and the origins have planned with it."""


def says(peer: SimPeer, **lies: Any) -> None:
    """Each of its views tells ``lies``: numbers are factors, anything else stands in the field's place."""
    honest = peer.core.planner._own_view

    def own_view() -> Any:
        view = honest()
        told = {
            name: getattr(view, name) * lie if isinstance(lie, float) else lie for name, lie in lies.items()
        }
        return view.model_copy(update=told)

    vars(peer.core.planner)["_own_view"] = own_view


def run(swarm: SimSwarm) -> list[float]:
    """Seconds of each step."""
    begun_s = [swarm.clock.now()]
    for step in range(1, STEPS + 1):
        assert swarm.run_to(step, 600)
        begun_s.append(swarm.clock.now())
    swarm.check()
    return [end - begin for begin, end in itertools.pairwise(begun_s)]


def a_swarm(seed: int = 1) -> SimSwarm:
    """Two origins and three replicas of each other stage; 16 microbatches, tasks of about 0.1 s."""
    return SimSwarm((2, 3, 3, 3), seed=seed, microbatches_per_origin=8, pace=10.0)


def visits(swarm: SimSwarm, peer: str, step: int) -> int:
    return sum(f"1:{peer}" in path for _, _, _, path, _ in swarm.close_of(step)["counted"])


@pytest.mark.parametrize("factor", [4.0, 16.0])
def test_who_claims_to_be_fast_and_is_not_gets_little_to_do(factor: float) -> None:
    honest_s = run(a_swarm())
    swarm = a_swarm()
    liar = swarm.peers[LIAR]
    liar.pace *= 4
    says(liar, forward_s=1 / factor, backward_s=1 / factor, weight_s=1 / factor)
    lied_s = run(swarm)
    assert max(lied_s[:LATER]) > 2 * honest_s[0]
    assert max(lied_s[LATER:]) < 1.25 * honest_s[0]
    assert max(visits(swarm, LIAR, step) for step in range(LATER, STEPS)) <= 3
    doubts = [fields for _, fields in swarm.of("doubted") if fields["claimed_s"] < fields["seen_s"] / 2]
    assert {fields["other"] for fields in doubts} >= {LIAR}


def test_a_slanderer_alone_changes_nothing() -> None:
    honest_s = run(a_swarm())
    swarm = a_swarm()
    says(swarm.peers["s2r0"], seen={LIAR: 500.0, "s1r1": 500.0, "s3r0": 500.0})
    slandered_s = run(swarm)
    assert max(slandered_s[LATER:]) < 1.05 * max(honest_s[LATER:])
    assert all(visits(swarm, LIAR, step) >= 3 for step in range(LATER, STEPS))


def test_honest_peers_of_unlike_speeds_lose_nothing_by_it() -> None:
    """What was seen of a slow one while it had too much to do may count against it for a while."""
    swarm = a_swarm()
    for name, pace in (("s1r0", 30.0), ("s2r1", 20.0), ("s3r2", 5.0)):
        swarm.peers[name].pace = pace
    took_s = run(swarm)
    assert max(took_s[LATER:]) < 1.25 * min(took_s)
