"""Validation microbatches count nowhere, and hold a step no longer than it takes to go around a loss."""

from __future__ import annotations

import pytest

from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Forward


def test_validation_counts_nowhere_and_is_reported() -> None:
    swarm = SimSwarm((2, 2, 2), path_length=2, validation_every=2)
    assert swarm.run_to(5)
    swarm.check()
    validated = [event for peer in swarm.peers.values() for event in peer.events.of("validated")]
    assert sorted(event["step"] for event in validated) == [0, 2, 4]
    assert all(event["tokens"] == swarm.rules.validation_microbatches for event in validated)
    assert [swarm.counted(step) for step in range(5)] == [12] * 5


@pytest.mark.parametrize("seed", range(6))
def test_a_peer_lost_with_validation_microbatches_does_not_hold_the_step(seed: int) -> None:
    swarm = SimSwarm((2, 2, 2), path_length=3, validation_every=1, seed=seed)
    assert swarm.run_to(2)
    on_path: list[str] = []
    for peer in swarm.peers.values():
        inner = peer.core.router._evaluate

        def watch(message: Forward, inputs: object, name: str = peer.name, inner: object = inner) -> None:
            on_path.append(name)
            inner(message, inputs)  # type: ignore[operator]

        peer.core.router._evaluate = watch  # type: ignore[method-assign]
    assert swarm.clock.run_until(lambda: bool(on_path), 10)
    swarm.kill(on_path[0])
    before_s = swarm.clock.now()
    step = max(peer.step for peer in swarm.living())
    assert swarm.run_to(step + 2, 10)
    assert swarm.clock.now() - before_s < 5
    swarm.check()
    survivors = [event for peer in swarm.living() for event in peer.events.of("validated")]
    assert {event["step"] for event in survivors} >= {step}
    assert all(event["tokens"] == swarm.rules.validation_microbatches for event in survivors)
