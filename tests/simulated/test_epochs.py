"""Most members are lost at once: the researcher's node begins the run again with those that are left."""

from __future__ import annotations

import pytest

from bootstrap.epochs import QUIET_S, Beginning, beginning
from bootstrap.known import Known
from bootstrap.simulation.swarm import SimSwarm
from peer.announce import WAITING_S
from peer.core import FOUNDING_PATIENCE_S
from swarm.messages import Member
from swarm.records import PeerRecord
from tests.simulated.test_faults import STEP, goes_on


def records(swarm: SimSwarm, seen: list[str]) -> list[PeerRecord]:
    """What the peers that the node sees say of themselves, as ``peer/announce.py`` does."""
    found = []
    for name in seen:
        core = swarm.peers[name].core
        alone = core.agreement.without_majority_s > WAITING_S
        state = "waiting" if alone else core.context.state
        found.append(
            PeerRecord(
                peer=name,
                stage=core.context.stage,
                step=core.context.step,
                epoch=core.context.epoch,
                state=state,  # type: ignore[arg-type]
                incarnation=core.context.incarnation,
            )
        )
    return found


def begin_again(swarm: SimSwarm, seen: list[str], epoch: int = 1) -> tuple[Member, ...]:
    """The node signs; those whom it names begin, the others that see it come in anew."""
    stages = swarm.rules.stages
    result = beginning(
        records(swarm, seen),
        stages=stages,
        start_replicas=1,
        begun=True,
        quiet_s=QUIET_S,
        known=Known(swarm.rules.total_steps),
    )
    assert isinstance(result, Beginning), result
    swarm.new_epoch(result.step, result.members)
    named = {member.peer for member in result.members}
    for name in seen:
        core = swarm.peers[name].core
        if name not in named or not core.begin_again(result.members, epoch=epoch, step=result.step):
            core.leave_epoch(result.members, epoch, result.step)
    return result.members


@pytest.mark.parametrize("seed", range(4))
def test_ten_of_twelve_die_at_once_and_the_run_goes_on(seed: int) -> None:
    """At any moment of a step: what was under way is drawn again, once."""
    swarm = SimSwarm((4, 4, 4), seed=seed)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(0.08 * seed)
    survivors = ["s0r1", "s2r3"]
    for name in list(swarm.peers):
        if name not in survivors:
            swarm.kill(name)
    swarm.clock.run_for(40)
    before = max(peer.step for peer in swarm.living())
    begin_again(swarm, survivors)
    goes_on(swarm)
    assert min(peer.step for peer in swarm.living()) > before + 2
    assert swarm.of("fell_out") == []
    again = swarm.close_of(before + 1)
    assert [entry[0] for entry in again["counted"]] == list(range(swarm.rules.microbatches_per_origin))
    assert {entry[2] for entry in again["counted"]} == {"s0r1"}


def test_a_founder_that_hears_of_a_later_epoch_meanwhile_does_not_begin_the_first() -> None:
    swarm = SimSwarm((2, 3))
    assert swarm.run_to(STEP)
    for name in ("s0r1", "s1r1", "s1r2"):
        swarm.kill(name)
    swarm.clock.run_for(40)
    here, there = (swarm.peers[name].core for name in ("s0r0", "s1r0"))
    step = here.context.step
    assert there.context.step == step
    members = tuple(
        Member(peer=core.context.me, stage=core.context.stage, incarnation=core.context.incarnation + 1)
        for core in (here, there)
    )
    swarm.new_epoch(step, members)
    swarm.network.partition([["s0r0"], ["s1r0"]])
    assert there.begin_again(members, epoch=1, step=step)
    swarm.clock.run_for(FOUNDING_PATIENCE_S / 2)
    assert not there.context.active  # the other one is not there
    there.leave_epoch(members[:1], 2, step)
    swarm.clock.run_for(FOUNDING_PATIENCE_S)
    assert not there.context.active  # nor does it begin without it
    swarm.network.heal()
    assert here.begin_again(members[:1], epoch=2, step=step)
    assert swarm.clock.run_until(lambda: there.context.active, 40)
    assert [name for name, _ in swarm.of("joined")] == ["s1r0"]
    goes_on(swarm)


@pytest.mark.parametrize(("further", "source"), [(0, "memory"), (1, "memory"), (2, "neighbours")])
def test_a_stage_whose_survivors_are_not_named_is_founded_from_what_was_not_given_up(
    further: int, source: str
) -> None:
    """``further``: steps by which the survivor had come beyond that at which the epoch begins."""
    swarm = SimSwarm((2, 3))
    assert swarm.run_to(STEP)
    for name in ("s0r1", "s1r1", "s1r2"):
        swarm.kill(name)
    swarm.clock.run_for(40)
    origin, survivor = (swarm.peers[name].core for name in ("s0r0", "s1r0"))
    step = origin.context.step
    members = (Member(peer="s0r0", stage=0, incarnation=origin.context.incarnation + 1),)
    swarm.new_epoch(step, members)
    assert origin.begin_again(members, epoch=1, step=step)
    survivor.leave_epoch(members, 1, step - further)
    assert swarm.clock.run_until(lambda: survivor.context.active, 60)
    (restored,) = swarm.peers["s1r0"].events.of("stage_restored")
    assert restored["source"] == source
    goes_on(swarm)


def test_newcomers_come_in_after_a_new_beginning() -> None:
    swarm = SimSwarm((2, 3))
    assert swarm.run_to(STEP)
    for name in ("s0r1", "s1r1", "s1r2"):
        swarm.kill(name)
    swarm.clock.run_for(40)
    begin_again(swarm, ["s0r0", "s1r0"])
    swarm.clock.run_for(2)
    peer = swarm.newcomer("new", 1)
    assert swarm.clock.run_until(lambda: peer.core.context.active, 30)
    goes_on(swarm)
    assert {name for name, _ in swarm.of("joined")} == {"new"}


def test_members_that_were_thought_dead_give_up_their_epoch_and_come_in() -> None:
    """They lived on the other side of a cut, as few as those who began again."""
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(STEP)
    here, there = ["s0r0", "s1r0", "s2r0"], ["s0r1", "s1r1", "s2r1"]
    swarm.network.partition([here, there])
    swarm.clock.run_for(60)
    members = begin_again(swarm, here)
    swarm.clock.run_for(10)
    assert min(swarm.peers[name].step for name in here) > STEP + 2
    assert max(swarm.peers[name].step for name in there) <= STEP + 1
    swarm.network.heal()
    cores = [swarm.peers[name].core for name in there]
    assert swarm.clock.run_until(lambda: all(core.newest_epoch == 1 for core in cores), 30)
    for core in cores:  # what they heard, the directory confirmed
        core.leave_epoch(members, 1, STEP)
    swarm.clock.run_for(20)
    goes_on(swarm)
    assert all(swarm.peers[name].core.context.active for name in there)


def test_one_who_stands_a_step_behind_the_others_comes_in_as_a_newcomer() -> None:
    swarm = SimSwarm((2, 3, 2))
    assert swarm.run_to(STEP)
    late = "s1r2"
    swarm.network.partition([[late], [name for name in swarm.peers if name != late]])
    step = swarm.peers["s0r0"].step
    assert swarm.clock.run_until(lambda: swarm.peers["s0r0"].step >= step + 2, 60)
    for name in ("s0r1", "s1r1", "s2r1", "s2r0"):
        swarm.kill(name)
    swarm.network.heal()
    survivors = ["s0r0", "s1r0", late]
    for name in survivors:
        swarm.peers[name].core._fall_out = lambda reason: None  # type: ignore[method-assign]
    swarm.clock.run_for(40)
    for name in survivors:
        del swarm.peers[name].core.__dict__["_fall_out"]
    begin_again(swarm, survivors)
    swarm.clock.run_for(20)
    goes_on(swarm)
    assert all(swarm.peers[name].core.context.active for name in survivors)
