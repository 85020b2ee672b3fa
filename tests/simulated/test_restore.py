"""A stage loses its last replica, and gets a new one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bootstrap.simulation.fake import WIDTH
from bootstrap.simulation.swarm import SimPeer, SimSwarm
from peer.restore import Disk
from tests.simulated.test_faults import STEP, goes_on

STAGE = 2


def bereft() -> SimSwarm:
    """A swarm that has lost the only replica of a stage in the middle."""
    swarm = SimSwarm((2, 2, 1, 2), path_length=3)
    assert swarm.run_to(STEP)
    swarm.kill("s2r0")
    goes_on(swarm)
    return swarm


def comes_in(swarm: SimSwarm, peer: SimPeer, limit_s: float = 60.0) -> dict[str, Any]:
    """Until it serves; how its stage was restored."""
    assert swarm.clock.run_until(lambda: peer.core.context.active, limit_s)
    goes_on(swarm)
    last = peer.step - 1
    assert any(f"{STAGE}:{peer.name}" in entry[3] for entry in swarm.close_of(last)["counted"])
    (restored,) = peer.events.of("stage_restored")
    return restored


def test_its_neighbours_weights_found_it_anew() -> None:
    swarm = bereft()
    peer = swarm.newcomer("new", STAGE)
    sums: list[Any] = []

    def watch(sender: str, to: str, message: Any) -> None:
        if message.kind == "state_index" and to == "new":
            sums.append((message.stage, message.step))

    swarm.came.append(watch)
    restored = comes_in(swarm, peer)
    assert restored["source"] == "neighbours"
    assert {stage for stage, _ in sums} == {1, 3}
    assert {step for _, step in sums} == {restored["step"]}
    # The fake's neighbours sum up; every average afterwards is part of the history that check() compares.
    at = restored["step"]
    expected = np.zeros(WIDTH, dtype=np.int64)
    for neighbour in ("s1r0", "s3r0"):
        parameters = np.zeros(WIDTH, dtype=np.int64)
        for step, average in swarm.peers[neighbour].backend.history:
            if step < at:
                parameters = parameters * 3 + average
        expected += parameters
    for step, average in peer.backend.history:
        assert step >= at
        expected = expected * 3 + average
    assert (peer.backend.parameters == expected).all()


@pytest.mark.parametrize("count", [2, 3])
def test_of_several_newcomers_one_founds_it_and_the_others_take_it_from_there(count: int) -> None:
    swarm = bereft()
    peers = [swarm.newcomer(f"new{number}", STAGE) for number in range(count)]
    assert swarm.clock.run_until(lambda: all(peer.core.context.active for peer in peers), 60)
    goes_on(swarm)
    assert [len(peer.events.of("stage_restored")) for peer in peers].count(1) == 1
    assert len({peer.backend.digest() for peer in peers if peer.step == peers[0].step}) == 1


def test_whoever_holds_the_newest_checkpoint_founds_it() -> None:
    swarm = bereft()
    old = np.arange(WIDTH + 1, dtype=np.int64)
    images = {step: np.concatenate([[step], old[1:] + step]).tobytes() for step in (1, 2)}
    swarm.newcomer("a", STAGE)
    swarm.newcomer("b", STAGE, disk=Disk(lambda: 1, lambda: images[1]))
    peer = swarm.newcomer("c", STAGE, disk=Disk(lambda: 2, lambda: images[2]))
    restored = comes_in(swarm, peer)
    assert (restored["source"], restored["of_step"]) == ("checkpoint", 2)
    assert len(swarm.of("stage_restored")) == 1


def test_a_checkpoint_that_cannot_be_read_is_done_without() -> None:
    swarm = bereft()

    def spoiled() -> bytes:
        raise ValueError("its bytes do not hash to its digest")

    peer = swarm.newcomer("new", STAGE, disk=Disk(lambda: 2, spoiled))
    assert comes_in(swarm, peer)["source"] == "neighbours"


def test_the_founder_dies_on_its_way_and_the_next_one_founds_it() -> None:
    swarm = bereft()
    swarm.newcomer("a", STAGE)
    assert swarm.clock.run_until(lambda: bool(swarm.peers["a"].events.of("admitted")), 30)
    swarm.kill("a")
    comes_in(swarm, swarm.newcomer("b", STAGE))


def test_an_only_replica_that_was_thought_dead_goes_on_from_its_memory() -> None:
    swarm = SimSwarm((2, 2, 1, 2), path_length=3, pace=4)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(0.5)
    swarm.network.freeze("s2r0")
    swarm.clock.run_for(30)
    swarm.network.thaw("s2r0")
    restored = comes_in(swarm, swarm.peers["s2r0"])
    assert restored["source"] == "memory"
    assert restored["of_step"] < restored["step"]


def test_without_any_origin_the_swarm_waits_for_one_that_holds_the_embedding() -> None:
    swarm = SimSwarm((1, 3, 2))
    assert swarm.run_to(STEP)
    swarm.kill("s0r0")
    swarm.clock.run_for(60)
    waiting = max(peer.step for peer in swarm.living())
    assert waiting <= STEP + 2
    swarm.newcomer("poor", 0)
    swarm.clock.run_for(20)
    assert max(peer.step for peer in swarm.living()) == waiting
    swarm.kill("poor")
    image = np.concatenate([[STEP], np.ones(WIDTH)]).astype(np.int64).tobytes()
    peer = swarm.newcomer("rich", 0, disk=Disk(lambda: STEP, lambda: image))
    assert swarm.clock.run_until(lambda: peer.core.context.active, 60)
    at = peer.step
    assert swarm.run_to(at + 3, 30)
    swarm.check()
    assert all(len(swarm.close_of(step)["counted"]) == 6 for step in range(at, at + 3))
