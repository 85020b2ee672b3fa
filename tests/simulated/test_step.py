"""Steps of swarms in which nothing fails: the real protocol in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bootstrap.simulation.swarm import SimSwarm
from swarm.transport.memory import LinkModel

SHAPES = {
    "two replicas, one stage of four skipped": ((2, 2, 2, 2), 3),
    "one peer a stage, all visited": ((1, 1, 1), 3),
    "a path that visits stage 0 alone": ((1, 1), 1),
    "uneven": ((1, 3, 2, 1), 3),
    "three origins": ((3, 2, 2), 2),
    "one stage": ((2,), 1),
    "one peer": ((1,), 1),
}
STEPS = 20


def swarm_of(shape: str, **options: Any) -> SimSwarm:
    replicas, length = SHAPES[shape]
    return SimSwarm(replicas, path_length=length, total_steps=STEPS, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_microbatch_of_twenty_clean_steps_counts_once(shape: str) -> None:
    swarm = swarm_of(shape)
    length = SHAPES[shape][1]
    assert swarm.run_to(STEPS)
    swarm.whole()
    for step in range(STEPS):
        paths = [entry[3] for entry in swarm.close_of(step)["counted"]]
        assert {len(path) for path in paths} == {length}
        assert swarm.forwards(step) == sum(map(len, paths)), "something was computed that does not count"
    for trouble in ("rerouted", "restarted", "lost", "strike", "rebuilt", "averaging_again", "fell_out"):
        assert swarm.of(trouble) == [], trouble
    assert len(swarm.of("finished")) == len(swarm.peers)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stages_that_may_be_skipped_are_visited_equally_often(shape: str) -> None:
    """To one visit where all origins hold one plan; a new plan takes a moment to reach them all."""
    swarm = swarm_of(shape)
    replicas, length = SHAPES[shape]
    assert swarm.run_to(STEPS)
    total: Counter[int] = Counter()
    for step in range(STEPS):
        hops = [hop for entry in swarm.close_of(step)["counted"] for hop in entry[3]]
        visits = Counter(int(hop.partition(":")[0]) for hop in hops)
        assert visits[0] == swarm.counted(step)
        counts = [visits[stage] for stage in range(1, len(replicas))] or [0]
        assert max(counts) - min(counts) <= (1 if replicas[0] == 1 else replicas[0]), (step, visits)
        total += visits
    for stage in range(1, len(replicas)):
        expected = total[0] * (length - 1) / (len(replicas) - 1)
        assert abs(total[stage] - expected) <= 0.03 * expected


@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_apply_the_same_average_at_the_same_step(shape: str) -> None:
    swarm = swarm_of(shape)
    replicas, _ = SHAPES[shape]
    assert swarm.run_to(STEPS)
    for stage, count in enumerate(replicas):
        applied = [peer.applied() for peer in swarm.peers.values() if peer.stage == stage]
        assert len(applied) == count
        assert all(set(one) == {(stage, step) for step in range(STEPS)} for one in applied)
        assert all(one == applied[0] for one in applied)


def test_one_seed_gives_one_history_to_the_last_event() -> None:
    def run(seed: int) -> list[tuple[object, ...]]:
        links = LinkModel(latency_s=0.02, jitter_s=0.02, loss=0.02)
        swarm = swarm_of("two replicas, one stage of four skipped", seed=seed, default_link=links)
        assert swarm.run_to(3)
        swarm.kill("s2r1")
        assert swarm.run_to(6)
        return swarm.trace()

    first = run(3)
    assert first == run(3)
    assert first != run(4)


def test_a_path_never_goes_to_a_replica_that_is_busier_than_its_sibling_by_much() -> None:
    swarm = SimSwarm((2, 2, 2), total_steps=6)
    assert swarm.run_to(6)
    for step in range(6):
        hops = Counter(hop for entry in swarm.close_of(step)["counted"] for hop in entry[3])
        for stage in (1, 2):
            visits = sorted(hops[f"{stage}:s{stage}r{number}"] for number in range(2))
            assert visits[1] - visits[0] <= 2, hops


def test_headers_go_through_the_wire_unchanged() -> None:
    swarm = swarm_of("two replicas, one stage of four skipped", encode=True)
    assert swarm.run_to(3)
    swarm.whole()


def test_a_slow_jittery_lossy_network_delays_and_loses_nobody() -> None:
    links = LinkModel(latency_s=0.15, jitter_s=0.1, loss=0.05)
    swarm = SimSwarm((2, 2, 2), seed=5, default_link=links, total_steps=10, memory_slots=16)
    assert swarm.run_to(10, limit_s=300)
    swarm.whole()
    assert swarm.of("lost") == []
    assert swarm.of("rerouted") == []


def test_full_hops_make_the_work_wait_and_lose_none() -> None:
    swarm = SimSwarm((3, 1, 2), microbatches_per_origin=8, memory_slots=1, total_steps=4)
    assert swarm.run_to(4)
    swarm.whole()
    refusals = swarm.of("refused")
    assert refusals
    assert {fields["reason"] for _, fields in refusals} == {"busy"}
    assert swarm.of("restarted") == []
    for step in range(4):
        assert swarm.wasted(step) == {}


def test_a_hop_never_holds_more_microbatches_than_it_has_slots() -> None:
    swarm = SimSwarm((3, 1, 2), microbatches_per_origin=8, memory_slots=2, total_steps=3)
    most = 0

    def look(sender: str, to: str, message: Any) -> None:
        nonlocal most
        most = max(most, *(peer.core.router.held.occupied() for peer in swarm.peers.values()))

    swarm.came.append(look)
    assert swarm.run_to(3)
    assert most == 2


def test_no_origin_starts_more_microbatches_than_it_has_slots() -> None:
    swarm = SimSwarm((2, 2, 2), microbatches_per_origin=8, memory_slots=3, total_steps=3)
    most = 0

    def look(sender: str, to: str, message: Any) -> None:
        nonlocal most
        most = max(most, *(len(peer.core.origin.started) for peer in swarm.peers.values()))

    swarm.came.append(look)
    assert swarm.run_to(3)
    assert most == 3
