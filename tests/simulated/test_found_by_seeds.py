"""What the random fault schedules brought to light, each as the smallest swarm that showed it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from bootstrap.faults.plan import FaultPlan, Target
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.fake import SPEC
from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Decided, Forward, Hop, StepClose
from swarm.transport.memory import LinkModel

EVERYONE = Target()


def suffers(swarm: SimSwarm, plan: FaultPlan, steps: int = 4, limit_s: float = 90.0) -> SimulatedFaults:
    """From step 1 on; every fault of the plan happens, and everyone makes that many more steps."""
    assert swarm.run_to(1)
    faults = SimulatedFaults(swarm, plan)
    assert swarm.clock.run_until(lambda: len(faults.fired) == len(plan.faults) and not faults.active, 60)
    assert swarm.run_to(max(peer.step for peer in swarm.living()) + steps, limit_s)
    swarm.whole()
    return faults


@pytest.mark.parametrize("nth", range(1, 5))
def test_the_output_of_a_hop_that_was_replaced_does_not_take_the_gradient_from_its_replacement(
    nth: int,
) -> None:
    """Its link breaks under it, comes back when it has computed, and both outputs reach the origin."""
    swarm = SimSwarm((2, 3), memory_slots=1, microbatches_per_origin=2, pace=10)
    suffers(swarm, FaultPlan().add("reset", stage=0, other=EVERYONE).at_message("accept", step=2, nth=nth))


def test_everyone_knows_at_once_of_the_new_life_of_a_peer_that_fell_out() -> None:
    """Also a peer that it has lost, and so tells no goodbye: what comes from it next is no zombie's."""
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(1)
    swarm.network.one_way("s0r1", "s1r0")
    core = swarm.peers["s0r1"].core
    assert swarm.clock.run_until(lambda: not core.liveness.alive("s1r0"), 10)
    members = tuple(member for member in core.context.members if member.peer != "s0r1")
    close = StepClose(step=core.context.step + 2, counted=(), members=members)
    core.on_message("s2r0", Decided(close=close), None)
    assert core.context.incarnation == 2
    swarm.clock.run_for(0.05)
    assert not swarm.peers["s1r0"].core.liveness.stale("s0r1", 2)


def test_an_attempt_that_a_blind_origin_gave_up_keeps_no_slot() -> None:
    """Nothing reaches it for a while, so it takes all others for gone and starts its microbatch anew; what it
    had under way fills the only slot of stage 2."""
    swarm = SimSwarm((3, 2, 1, 2), path_length=4, memory_slots=1, microbatches_per_origin=1, pace=10)
    plan = FaultPlan().add("one_way", peer="s0r0", duration_s=7.6).at_step(2, 0.15)
    faults = suffers(swarm, plan)
    assert faults.fired_kinds() == {"one_way": 1}


@pytest.mark.parametrize("offset_s", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_a_newcomer_that_is_named_a_member_and_misses_the_average_before_is_not_waited_for(
    offset_s: float,
) -> None:
    """The link to one of its replicas is cut, so that a part of the average never comes."""
    swarm = SimSwarm((2, 1, 3), pace=4)
    assert swarm.run_to(1)
    peer = swarm.newcomer("new", 2)
    assert swarm.clock.run_until(lambda: bool(peer.events.of("loaded")), 20)
    swarm.clock.run_for(offset_s)
    swarm.network.one_way("new", "s2r1")
    swarm.network.one_way("s2r1", "new")
    swarm.clock.run_for(12)
    swarm.network.heal()
    assert swarm.run_to(max(p.step for p in swarm.living()) + 3, 60)
    assert swarm.clock.run_until(lambda: peer.core.context.active, 60)
    swarm.whole()


@pytest.mark.parametrize("name", ["s0r1", "s2r1"])
def test_a_peer_that_hears_nobody_and_is_heard_does_not_close_the_step_alone(name: str) -> None:
    """It takes all others for gone, and its proposal has reached them when they can answer it again."""
    swarm = SimSwarm((3, 2, 2), pace=3, microbatches_per_origin=3, memory_slots=2)
    suffers(swarm, FaultPlan().add("one_way", peer=name, duration_s=18).at_step(1, 0.37))
    assert min(len(closed["members"]) for _, closed in swarm.of("closed")) >= 6


def test_a_voter_objects_to_a_close_that_leaves_out_what_it_knows_of() -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(1)
    core = swarm.peers["s1r0"].core
    assert swarm.clock.run_until(lambda: len(core.context.ledger.commits) > 2, 10)
    members = core.context.members
    objection = core.closing.objection
    assert objection(StepClose(step=1, counted=(), members=members[1:])) == "s0r0 lives"
    assert str(objection(StepClose(step=1, counted=(), members=members))).endswith("is at work")
    assert swarm.clock.run_until(lambda: not core.closing._at_work(core.closing._told()), 10)
    known = tuple(core.closing._known(core.closing._told()).values())
    assert [counted.index for counted in known] == list(range(12))
    assert objection(StepClose(step=1, counted=known[:-1], members=members)) == "microbatch 11 is committed"
    assert objection(StepClose(step=1, counted=known, members=members)) is None


@pytest.mark.parametrize("index", [1, 3])
def test_a_gradient_that_was_held_up_is_not_taken_after_its_hop_was_gone_around(index: int) -> None:
    """The cut-off origin skips a stage, so the last hop computes anew; then the old gradient comes."""
    links = LinkModel(latency_s=0.002, jitter_s=0.05)
    swarm = SimSwarm((2, 2, 3, 1), microbatches_per_origin=2, memory_slots=2, pace=16, default_link=links)
    assert swarm.run_to(1)
    rest = [name for name in swarm.peers if name != "s0r0"]

    def cut(sender: str, to: str, message: Any) -> bool:
        mine = to == "s0r0" and message.hop == 0 and message.index == index
        if mine:
            swarm.network.partition([["s0r0"], rest])
            swarm.clock.call_later(3.755, swarm.network.heal)
        return mine

    swarm.when("backward", cut, sent=True)
    assert swarm.run_to(5)
    swarm.whole()
    assert swarm.of("fell_out") == []


@pytest.mark.parametrize("stage", [0, 2])
def test_replicas_that_cannot_reach_each_other_never_average_apart(stage: int) -> None:
    """Both are alive to all others. One leaves its step, and stays a learner until they meet again."""
    swarm = SimSwarm((2, 2, 3), pace=4)
    assert swarm.run_to(2)
    pair = (f"s{stage}r0", f"s{stage}r1")
    swarm.network.one_way(*pair)
    swarm.network.one_way(*reversed(pair))
    swarm.clock.run_for(40)
    assert [name for name, _ in swarm.of("fell_out")] in ([pair[0]], [pair[1]])
    assert max(peer.step for peer in swarm.living()) > 10
    swarm.network.heal()
    assert swarm.run_to(max(peer.step for peer in swarm.living()) + 4, 60)
    assert swarm.clock.run_until(lambda: all(p.core.context.active for p in swarm.living()), 60)
    swarm.whole()


def test_a_member_that_woke_in_time_to_be_named_again_is_averaged_with() -> None:
    """Its replica took it for gone, and the majority, which saw it wake, counts on it."""
    swarm = SimSwarm((2, 2, 2), pace=10, microbatches_per_origin=2)
    plan = FaultPlan().add("freeze", peer="s0r1", duration_s=2.53).at_step(2, 0.86)
    plan = plan.add("reset", peer="s0r1", other="s0r0").at_step(2, 1.34)
    suffers(swarm, plan)
    assert swarm.of("averaging_again") == []


def test_a_newcomer_that_is_a_member_of_the_next_step_already_is_not_waited_for_in_it() -> None:
    """It came from a partition's other side to one replica alone, whose part of an average it never gets."""
    links = LinkModel(latency_s=0.15, jitter_s=0.05)
    swarm = SimSwarm((3, 4), microbatches_per_origin=3, memory_slots=1, pace=4.7, default_link=links)
    plan = FaultPlan().add("kill", peer="s1r0", returns_after_s=1.745).at_step(3, 0.063)
    plan = plan.add("partition", groups=((Target(peer="s1r1"),),), duration_s=2.637).at_step(3, 0.3211)
    suffers(swarm, plan)


def test_the_last_replica_lost_before_a_newcomer_has_its_average_leaves_a_stage_that_begins_again() -> None:
    """The others count on the newcomer, which waits for an average that nobody has."""
    swarm = SimSwarm((3, 2, 1), pace=4)
    assert swarm.run_to(1)
    peer = swarm.newcomer("new", 2)

    def kill(sender: str, to: str, message: Any) -> None:
        named = message.kind == "decided" and any(
            member.peer == "new" and not member.learning for member in message.close.members
        )
        if named and not swarm.peers["s2r0"].dead:
            swarm.kill("s2r0")

    swarm.came.append(kill)
    assert swarm.clock.run_until(lambda: swarm.peers["s2r0"].dead, 30)
    assert swarm.clock.run_until(lambda: peer.core.context.active, 40)
    assert swarm.run_to(max(p.step for p in swarm.living()) + 3, 60)
    swarm.whole()
    assert [name for name, _ in swarm.of("fell_out")] == ["new"]


@pytest.mark.parametrize(("replicas", "deaths"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_the_average_that_a_lost_replica_may_have_applied_is_everybodys(replicas: int, deaths: int) -> None:
    """The leader dies when it has applied it and before anybody hears so; then perhaps the next one."""
    swarm = SimSwarm((5, replicas), pace=4)
    stage = [f"s1r{number}" for number in range(replicas)]
    dead: list[str] = []

    def kill(name: str) -> bool:
        if name not in dead and len(dead) < deaths:
            dead.append(name)
            for other in set(stage) - {name}:
                swarm.network.one_way(other, name)
            swarm.clock.call_later(0.02, partial(swarm.kill, name))
        return len(dead) == deaths

    def told(sender: str, to: str, message: Any) -> bool:
        current = swarm.peers[to].core.averaging._round
        if message.stage != 1 or current is None:
            return False
        return len({*current.digests, sender} - {to}) == replicas - 1 and kill(to)

    swarm.when("average_digest", told)
    swarm.when("average_part", lambda sender, to, message: bool(dead) and message.stage == 1 and kill(sender))
    assert swarm.run_to(4)
    swarm.whole()
    averaged = [(name, f) for name, f in swarm.of("averaged") if f["stage"] == 1 and f["step"] == 1]
    assert {name for name, _ in averaged} >= set(stage) - set(dead)
    assert dead[0] in dict(averaged)
    assert {tuple(fields["members"]) for _, fields in averaged} == {tuple(stage)}


@pytest.mark.parametrize("kind", ["average_done", "average_digest"])
@pytest.mark.parametrize("offset_s", [0.0, 0.001, 0.05])
def test_a_learner_gets_the_average_that_the_survivors_kept(kind: str, offset_s: float) -> None:
    """Also the lost one's part of it, and the word that it is over."""
    swarm = SimSwarm((3, 2), pace=4)
    assert swarm.run_to(1)
    peer = swarm.newcomer("new", 1)
    assert swarm.clock.run_until(lambda: bool(peer.events.of("loaded")), 20)
    step = peer.events.of("loaded")[0]["step"]

    def kill(sender: str, to: str, message: Any) -> bool:
        if message.stage == 1:
            swarm.clock.call_later(offset_s, partial(swarm.kill, sender))
        return message.stage == 1

    swarm.when(kind, kill, step=step, sent=True)
    assert swarm.run_to(step + 3)
    swarm.whole()
    assert [fields["step"] for fields in peer.events.of("followed")] == [step]
    assert peer.events.of("missed_average") == []


def test_what_came_to_a_newcomer_too_soon_keeps_no_slot() -> None:
    """Others had counted on it before it was ready, and went around it by a message that it did not get."""
    swarm = SimSwarm((3, 1), memory_slots=1)
    assert swarm.run_to(1)
    peer = swarm.newcomer("new", 1)
    path = (Hop(stage=0, peer="s0r0"), Hop(stage=1, peer="new"))
    early = Forward(step=1, index=9, attempt=77, origin="s0r0", path=path, hop=1, tensor=SPEC)
    peer.core.on_message("s0r0", early, np.array([1, 9, 0, 0], dtype=np.int64))
    assert peer.core.router.held.occupied() == 1
    assert swarm.clock.run_until(lambda: peer.core.context.active, 40)
    assert early.key not in peer.core.router.held
    assert swarm.run_to(peer.step + 3)
    swarm.whole()
