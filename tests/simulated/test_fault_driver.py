"""Fault plans on the simulated swarm: each kind does what it says, when it should, the same every time."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.faults.plan import FaultPlan, FaultPlanError, Target
from bootstrap.faults.schedule import PHASES, random_plan
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.faults.trial import FAULTY_STEPS, Trial
from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Message
from swarm.transport.memory import LinkModel

ANYBODY = Target()


def driven(plan: FaultPlan, **options: Any) -> tuple[SimSwarm, SimulatedFaults]:
    swarm = SimSwarm((2, 2, 2), **options)
    assert swarm.run_to(1)
    return swarm, SimulatedFaults(swarm, plan)


@pytest.mark.parametrize("seed", [3, 11])
def test_one_plan_gives_one_history_to_the_last_event(seed: int) -> None:
    traces = []
    for _ in range(2):
        trial = Trial(seed)
        outcome = trial.run()
        assert trial.faults is not None
        traces.append((outcome, trial.plan, trial.faults.log, trial.swarm.trace()))
    assert traces[0] == traces[1]
    assert traces[0][0].fired
    assert Trial(seed + 1).plan != traces[0][1]


def test_a_kill_at_a_message_hits_the_peer_that_got_it_and_brings_it_back_in_another_life() -> None:
    plan = FaultPlan().add("kill", stage=1, returns_after_s=2).at_message("forward", step=2)
    swarm, faults = driven(plan)
    came: list[str] = []
    swarm.when("forward", lambda sender, to, message: swarm.peers[to].stage == 1 and came.append(to), step=2)
    assert swarm.clock.run_until(lambda: bool(faults.log), 10)
    (_, number, kind, whom) = faults.log[0]
    assert (number, kind, faults.fired, faults.active) == (0, "kill", {0: 1}, 1)
    assert whom == (came[0],)
    assert swarm.peers[whom[0]].dead
    assert swarm.clock.run_until(lambda: not faults.active, 3)
    back = swarm.peers[whom[0]]
    assert (back.dead, back.incarnation) == (False, 1025)
    assert swarm.clock.run_until(lambda: back.core.context.active, 20)
    assert faults.fired == {0: 1}


def test_frozen_and_hung_peers_do_nothing_for_their_time() -> None:
    plan = FaultPlan().add("freeze", peer="s1r0", duration_s=1.5).at_time(0.1)
    plan = plan.add("hang", peer=5, duration_s=1.5).at_time(0.1)
    swarm, faults = driven(plan)
    swarm.clock.run_for(0.2)
    assert faults.fired_kinds() == {"freeze": 1, "hang": 1}
    frozen, hung = swarm.peers["s1r0"], swarm.peers["s2r1"]
    before = (len(frozen.events.entries), hung.core.context.worker.progress)
    swarm.clock.run_for(1.35)
    assert (len(frozen.events.entries), hung.core.context.worker.progress) == before
    assert faults.active == 2
    swarm.clock.run_for(5)
    assert faults.active == 0
    assert len(frozen.events.entries) > before[0]
    assert hung.core.context.worker.progress > before[1]


def test_faults_of_one_link_add_up_and_leave_it_as_it_was() -> None:
    base = LinkModel(latency_s=0.02, loss=0.1)
    plan = FaultPlan().add("delay", peer="s0r0", other="s1r0", latency_s=0.3, jitter_s=0.1, duration_s=2)
    plan = plan.add("drop", peer="s1r0", other="s0r0", share=0.5, duration_s=4)
    plan = plan.add("slow", peer="s1r0", bytes_per_s=1000, duration_s=4)
    swarm, faults = driven(plan, default_link=base)
    swarm.clock.run_for(0.01)
    link = swarm.network.link("s0r0", "s1r0")
    assert link == swarm.network.link("s1r0", "s0r0")
    assert (link.latency_s, link.jitter_s, link.bandwidth_bytes_per_s) == (0.32, 0.1, 1000)
    assert link.loss == pytest.approx(0.55)
    assert swarm.network.link("s2r0", "s1r0").bandwidth_bytes_per_s == 1000
    assert swarm.network.link("s2r0", "s0r0") == base
    swarm.clock.run_for(2)
    assert swarm.network.link("s0r0", "s1r0").latency_s == 0.02
    swarm.clock.run_for(2)
    assert all(swarm.network.link(a, b) == base for a in swarm.peers for b in swarm.peers if a != b)
    assert faults.fired_kinds() == {"delay": 1, "drop": 1, "slow": 1}


def test_cuts_overlap_and_heal_one_by_one_and_newcomers_are_with_the_rest() -> None:
    side = ((Target(peer="s0r0"), Target(peer="s1r0")),)
    plan = FaultPlan().add("partition", groups=side, duration_s=1)
    plan = plan.add("one_way", peer="s2r0", other="s0r1", duration_s=2)
    swarm, _ = driven(plan)
    swarm.clock.run_for(0.01)
    network = swarm.network
    swarm.newcomer("new", 1)

    def reach(a: str, b: str) -> tuple[bool, bool]:
        return network._reaches(a, b), network._reaches(b, a)

    assert reach("s0r0", "s1r0") == (True, True)
    assert reach("s0r0", "s1r1") == (False, False)
    assert reach("new", "s1r1") == (True, True)
    assert reach("new", "s0r0") == (False, False)
    assert reach("s2r0", "s0r1") == (True, False)
    swarm.clock.run_for(1)
    assert reach("s0r0", "s1r1") == (True, True)
    assert reach("s2r0", "s0r1") == (True, False)
    swarm.clock.run_for(1)
    assert reach("s2r0", "s0r1") == (True, True)


def test_a_reset_breaks_the_link_of_the_message_that_pulled_it() -> None:
    plan = FaultPlan().add("reset", other=ANYBODY).at_message("accept", side="sent", step=2, nth=3)
    swarm, faults = driven(plan)
    assert swarm.clock.run_until(lambda: bool(faults.log), 10)
    swarm.clock.run_for(0.001)
    a, b = faults.log[0][3]
    lost = {(name, fields["other"]) for name, fields in swarm.of("lost")}
    assert lost == {(a, b), (b, a)}


def test_a_newcomer_comes_at_every_other_step_until_it_is_enough() -> None:
    plan = FaultPlan(seed=2).add("join", stage=1).at_step(probability=0.5, times=3)
    swarm, faults = driven(plan)
    assert swarm.run_to(16, 200)
    assert faults.fired == {0: 3}
    assert {name for name in swarm.peers if name.startswith("new")} == {"new0.0", "new0.1", "new0.2"}
    began = [time_s for time_s, *_ in faults.log]
    assert began == sorted(set(began))


def test_messages_pull_a_trigger_as_often_as_it_says() -> None:
    plan = FaultPlan(seed=5).add("reset", other=ANYBODY)
    plan = plan.at_message("backward", stage=0, side="sent", step=2, nth=2, probability=0.5, times=2)
    swarm, faults = driven(plan)
    sent: list[tuple[str, str, Message]] = []
    swarm.sent.append(lambda a, b, m: sent.append((a, b, m)) if m.kind == "backward" else None)
    assert swarm.run_to(4)
    assert faults.fired == {0: 2}
    assert all(whom[0].startswith("s0") for *_, whom in faults.log)


def test_nothing_fires_after_disarm_and_what_finds_nobody_does_not_count() -> None:
    plan = (
        FaultPlan()
        .add("kill", peer="s1r1")
        .at_time(0.1)
        .add("freeze", peer="s1r1", duration_s=1)
        .at_time(0.2)
    )
    plan = plan.add("kill", peer="s2r1").at_time(0.5)
    swarm, faults = driven(plan)
    swarm.clock.run_for(0.3)
    faults.disarm()
    swarm.clock.run_for(1)
    assert faults.fired == {0: 1}
    assert not swarm.peers["s2r1"].dead


def test_a_full_disk_is_refused_where_nothing_is_written() -> None:
    with pytest.raises(FaultPlanError, match=r"faults\[0\]: simulated peers write nothing"):
        driven(FaultPlan().add("disk_full", peer="s1r0", duration_s=1))


def test_random_plans_leave_a_majority_and_stage_0_alone() -> None:
    """Over many seeds: whoever may be taken for gone is a minority, and every kind and phase comes up."""
    peers = {
        f"s{stage}r{number}": stage for stage, count in enumerate((2, 3, 1, 2)) for number in range(count)
    }
    kinds, messages, whole_stages = set(), set(), 0
    for seed in range(400):
        plan = random_plan(seed, peers, spare_stages=1, steps=FAULTY_STEPS, step_s=1)
        assert FaultPlan.from_json(plan.to_json()) == plan
        killed = set()
        for fault in plan.faults:
            kinds.add(fault.kind)
            messages.add(getattr(fault.trigger, "message", ""))
            assert getattr(fault.trigger, "step", 1) in FAULTY_STEPS
            if fault.kind == "kill":
                killed.add(fault.target.peer)
        assert 2 * len(killed) < len(peers)
        assert not {"s0r0", "s0r1"} <= killed
        lost = [s for s in (1, 2, 3) if {name for name, stage in peers.items() if stage == s} <= killed]
        assert len(lost) <= 1
        whole_stages += len(lost)
    assert kinds == {
        "kill",
        "freeze",
        "hang",
        "reset",
        "drop",
        "delay",
        "slow",
        "one_way",
        "partition",
        "join",
    }
    assert {message for phase in PHASES.values() for message in phase} <= messages
    assert whole_stages > 20
