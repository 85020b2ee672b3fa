"""Peers, links and halves of the swarm lost at every point of a step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Decided, StepClose
from swarm.transport.memory import LinkModel

STEP = 2
"""The step in which something happens."""

KINDS = [
    "forward",
    "accept",
    "backward",
    "commit",
    "propose",
    "accepted",
    "decided",
    "average_part",
    "average_result",
    "average_digest",
    "average_done",
    "heartbeat",
    "gossip_push",
]


def goes_on(swarm: SimSwarm, steps: int = 3, limit_s: float = 60.0) -> None:
    """Every living peer makes that many more steps, and nothing was lost or counted twice."""
    target = max(peer.step for peer in swarm.living()) + steps
    reached = swarm.run_to(target, limit_s)
    assert reached, {peer.name: (peer.step, peer.core.context.running) for peer in swarm.living()}
    swarm.whole()


def once(swarm: SimSwarm, kind: str, act: Any, *, sent: bool, stage: int | None = None) -> list[str]:
    """Do ``act(sender, receiver)`` at the first message of a kind whose sender (or, at its coming, receiver)
    hosts ``stage``; the names that it was done to."""
    done: list[str] = []

    def tap(sender: str, to: str, message: Any) -> bool:
        if sender == to or (stage is not None and swarm.peers[sender if sent else to].stage != stage):
            return False
        done.extend((sender, to))
        act(sender, to)
        return True

    swarm.when(kind, tap, step=STEP, sent=sent)
    return done


# A peer is lost


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_peer_killed_at_any_message_costs_nothing_but_itself(kind: str, side: str, stage: int) -> None:
    """The sender just after it sent, the receiver before it has seen what came."""
    swarm = SimSwarm((2, 2, 2), seed=stage)
    assert swarm.run_to(STEP)
    sent = side == "sender"
    done = once(swarm, kind, lambda a, b: swarm.kill(a if sent else b), sent=sent, stage=stage)
    swarm.clock.run_until(lambda: bool(done), 2.0)
    goes_on(swarm)
    assert len(swarm.living()) == (5 if done else 6)
    # Who accepts forwards, commits, proposes and leads is not of every stage; all else everyone does.
    assert done or kind in ("accept", "propose", "accepted", "decided", "commit")
    assert swarm.of("fell_out") == []


PHASES = {
    "it accepted": ("accept", True),
    "its output is on its way": ("forward", True),
    "its gradient has come": ("backward", False),
    "its gradient is on its way back": ("backward", True),
    "its commit has come": ("commit", False),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_only_the_lost_hop_is_computed_again(phase: str, stage: int) -> None:
    """First, middle and last hop: every living peer computes just what counts there, once."""
    kind, sent = PHASES[phase]
    for seed in range(2):
        swarm = SimSwarm((2, 2, 2, 2), seed=seed)
        assert swarm.run_to(STEP)
        done = once(swarm, kind, lambda a, b, s=swarm: s.kill(a if sent else b), sent=sent, stage=stage)
        goes_on(swarm)
        lost = done[0 if sent else 1]
        assert swarm.wasted(STEP) == {}
        assert swarm.of("restarted") == []
        around = [f for _, f in swarm.of("rerouted") if f["lost"] == lost]
        assert {fields["step"] for fields in around} <= {STEP}
        if kind in ("accept", "forward"):
            assert around


@pytest.mark.parametrize("seed", range(4))
def test_two_neighbours_on_a_path_lost_together(seed: int) -> None:
    swarm = SimSwarm((2, 2, 2, 2), seed=seed)
    assert swarm.run_to(STEP)

    def both(sender: str, to: str) -> None:
        swarm.kill(sender)
        swarm.kill(to)

    kind = ("forward", "backward")[seed % 2]
    done = once(swarm, kind, both, sent=True, stage=2 if kind == "backward" else 1)
    goes_on(swarm)
    assert [swarm.peers[name].dead for name in done] == [True, True]
    assert swarm.counted(STEP) == 12
    assert swarm.wasted(STEP) == {}
    assert swarm.of("restarted") == []


def test_the_only_replica_of_a_stage_is_skipped_where_the_path_stays_long_enough() -> None:
    swarm = SimSwarm((2, 1, 2))
    assert swarm.run_to(STEP)
    once(swarm, "forward", lambda a, b: swarm.kill(b), sent=False, stage=1)
    goes_on(swarm)
    assert swarm.peers["s1r0"].dead
    assert swarm.of("restarted") == []
    lengths = {len(entry[3]) for entry in swarm.close_of(STEP)["counted"]}
    assert lengths <= {2, 3}
    assert 2 in lengths


def test_another_stage_takes_the_place_of_one_without_a_replica() -> None:
    swarm = SimSwarm((2, 1, 2, 2), path_length=2)
    assert swarm.run_to(STEP)
    done = once(swarm, "forward", lambda a, b: swarm.kill(b), sent=False, stage=1)
    goes_on(swarm)
    assert done[1] == "s1r0"
    assert swarm.of("restarted") == []
    rerouted = [fields for _, fields in swarm.of("rerouted")]
    assert rerouted
    assert all(len(fields["path"]) == 2 and fields["path"][1][0] in "23" for fields in rerouted)
    assert all(len(entry[3]) == 2 for entry in swarm.close_of(STEP)["counted"])


def test_an_origin_starts_anew_what_cannot_be_finished() -> None:
    """Both stages behind it lose their only replica, so that a path on its way becomes too short."""
    swarm = SimSwarm((3, 1, 1))
    assert swarm.run_to(STEP)
    once(swarm, "forward", lambda a, b: (swarm.kill("s1r0"), swarm.kill("s2r0")), sent=False, stage=2)
    goes_on(swarm)
    assert swarm.of("restarted")
    assert swarm.counted(STEP) == 18


def test_a_swarm_without_a_majority_waits() -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(STEP)
    for name in ("s0r1", "s1r1", "s2r1"):
        swarm.kill(name)
    swarm.clock.run_for(60)
    assert {peer.step for peer in swarm.living()} <= {STEP, STEP + 1}
    swarm.check()


# An origin is lost


@pytest.mark.parametrize("after", [0.0, 0.03, 0.06, 0.1, 0.14, 0.18, 0.22])
def test_a_lost_origins_microbatches_are_drawn_by_the_others_in_the_same_step(after: float) -> None:
    swarm = SimSwarm((3, 2, 2))
    assert swarm.run_to(STEP)
    swarm.clock.run_for(after)
    swarm.kill("s0r1")
    goes_on(swarm)
    taken = [fields for _, fields in swarm.of("taken_over")]
    assert all(fields["step"] <= STEP + 1 and fields["lost"] == "s0r1" for fields in taken)
    assert swarm.counted(STEP) == 18
    if after < 0.1:
        assert taken
        assert len(taken) == len({(fields["step"], fields["index"]) for fields in taken})


@pytest.mark.parametrize("slots", [1, 2])
def test_what_a_lost_origin_left_in_the_hops_keeps_nobody_out(slots: int) -> None:
    """Its microbatches fill the only hop of a stage when it dies."""
    swarm = SimSwarm((3, 1, 2), memory_slots=slots)
    assert swarm.run_to(STEP)
    held: list[int] = []

    def tap(sender: str, to: str, message: Any) -> bool:
        if sender == "s1r0" and message.origin == "s0r0":
            held.append(message.index)
            if len(held) == slots:
                swarm.kill("s0r0")
        return len(held) == slots

    swarm.when("forward", tap, step=STEP, sent=True)
    goes_on(swarm)
    assert swarm.peers["s0r0"].dead
    assert swarm.counted(STEP) == 18


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_commit_that_reached_some_hops_counts_once_in_each_stage_that_lives(reached: int) -> None:
    swarm = SimSwarm((2, 2, 2, 2))
    assert swarm.run_to(STEP)
    sent: list[str] = []

    def tap(sender: str, to: str, message: Any) -> bool:
        if sender != "s0r0":
            return False
        sent.append(to)
        if len(sent) > reached:
            swarm.network.crash("s0r0")  # before the one after it is sent; what was sent may still come
            swarm.kill("s0r0")
            return True
        return False

    swarm.when("commit", tap, step=STEP, sent=True)
    goes_on(swarm)
    assert swarm.counted(STEP) == 12
    if reached:
        commits = [f for n, f in swarm.of("committed") if n == "s0r0" and f["step"] == STEP]
        index, attempt = commits[0]["index"], commits[0]["attempt"]
        entry = next(e for e in swarm.close_of(STEP)["counted"] if e[0] == index)
        assert entry[2] in ("s0r0", "s0r1")
        assert (entry[1] == attempt) == (entry[2] == "s0r0")


def test_commits_of_an_origin_that_was_cut_off_are_settled_and_sums_rebuilt() -> None:
    rebuilt = 0
    for seed in range(4):
        swarm = SimSwarm((3, 2, 2), seed=seed)
        names = list(swarm.peers)
        assert swarm.run_to(STEP)
        swarm.clock.run_for(0.12 + 0.02 * seed)
        swarm.network.partition([["s0r0"], [name for name in names if name != "s0r0"]])
        swarm.clock.run_for(4.0)
        swarm.clock.run_until(lambda s=swarm: bool(s.of("taken_over")), 10)
        swarm.network.heal()
        goes_on(swarm)
        assert swarm.counted(STEP) == 18
        rebuilt += len(swarm.of("rebuilt"))
    assert rebuilt


# A link is lost, and its ends live


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_lost_with_its_link_is_made_good(kind: str, stage: int) -> None:
    """The link breaks just when the message was sent. Both ends stay members and alike."""
    swarm = SimSwarm((2, 2, 2), seed=stage)
    assert swarm.run_to(STEP)
    done = once(swarm, kind, swarm.network.reset, sent=True, stage=stage)
    swarm.clock.run_until(lambda: bool(done), 2.0)
    goes_on(swarm)
    assert swarm.of("fell_out") == []
    assert swarm.of("gone") == []
    assert all(swarm.counted(step) == 12 for step in range(min(p.step for p in swarm.peers.values())))


@pytest.mark.parametrize("seed", range(6))
def test_many_resets_with_few_slots_leave_no_stale_copy_in_the_way(seed: int) -> None:
    rng = random.Random(seed)
    swarm = SimSwarm((2, 2, 2), seed=seed, memory_slots=1)
    names = list(swarm.peers)
    assert swarm.run_to(1)
    for _ in range(8):
        swarm.clock.run_for(rng.random() * 0.1)
        swarm.network.reset(*rng.sample(names, 2))
    goes_on(swarm)
    assert swarm.of("fell_out") == []


# A peer freezes


@pytest.mark.parametrize("frozen_s", [2.0, 6.0, 40.0])
@pytest.mark.parametrize("part", [0.2, 0.6, 0.8, 0.9])
def test_a_frozen_peer_is_lost_by_silence_and_comes_back(part: float, frozen_s: float) -> None:
    """Frozen in different parts of a step, and for as long as others bear, hardly bear, and cannot bear."""
    swarm = SimSwarm((2, 2, 2), pace=4)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(part * 4 * 0.33)
    swarm.network.freeze("s1r1")
    swarm.clock.run_for(frozen_s)
    silent = [fields for _, fields in swarm.of("lost") if fields["other"] == "s1r1"]
    assert bool(silent) == (frozen_s > 5)
    assert all(fields["reason"].startswith("silent") for fields in silent)
    if frozen_s > 5:
        assert min(p.step for p in swarm.living() if p.name != "s1r1") > STEP
    swarm.network.thaw("s1r1")
    swarm.clock.run_for(12)
    goes_on(swarm)
    assert swarm.peers["s1r1"].core.context.active
    assert any(m.peer == "s1r1" and not m.learning for m in swarm.peers["s0r0"].core.context.members)


# Halves


def test_the_minority_never_closes_a_step_and_the_majority_goes_on() -> None:
    swarm = SimSwarm((2, 3, 2), pace=4)
    minority = ["s0r1", "s1r2", "s2r1"]
    assert swarm.run_to(STEP)
    swarm.network.partition([minority, [n for n in swarm.peers if n not in minority]])
    swarm.clock.run_for(30)
    here = [peer for peer in swarm.living() if peer.name in minority]
    there = [peer for peer in swarm.living() if peer.name not in minority]
    assert max(peer.step for peer in here) <= STEP + 1
    assert min(peer.step for peer in there) > STEP + 8
    cut_off = max(fields["step"] for peer in here for fields in peer.events.of("closed"))
    assert cut_off <= STEP
    swarm.network.heal()
    swarm.clock.run_for(15)
    goes_on(swarm)
    assert all(peer.events.of("fell_out") and peer.events.of("joined") for peer in here)
    members = swarm.peers["s0r0"].core.context.members
    assert sum(not member.learning for member in members) == 7


def test_two_equal_halves_both_wait_and_go_on_when_they_see_each_other_again() -> None:
    swarm = SimSwarm((2, 2))
    assert swarm.run_to(STEP)
    swarm.network.partition([["s0r0", "s1r0"], ["s0r1", "s1r1"]])
    swarm.clock.run_for(25)
    assert max(peer.step for peer in swarm.living()) <= STEP + 1
    swarm.network.heal()
    swarm.clock.run_for(5)
    goes_on(swarm)


@pytest.mark.parametrize("stage", [0, 2])
def test_who_is_cut_off_from_most_in_the_averaging_applies_what_the_others_did(stage: int) -> None:
    """It hears too few to take anybody's silence for death, so it waits; the rest averages without it."""
    swarm = SimSwarm((2, 2, 2), seed=stage, pace=4)
    alone = f"s{stage}r1"
    rest = [name for name in swarm.peers if name != alone]
    assert swarm.run_to(STEP)

    def cut(sender: str, to: str, message: Any) -> bool:
        if message.stage == stage:
            swarm.network.partition([[alone], rest])
        return bool(message.stage == stage)

    swarm.when("average_part", cut, step=STEP, sent=True)
    other = swarm.peers[f"s{stage}r0"]
    assert swarm.clock.run_until(lambda: bool(other.events.of("averaging_again")), 20)
    swarm.clock.run_for(1)
    assert swarm.peers[alone].events.of("gone") == []
    assert swarm.peers[alone].events.of("averaging_again") == []
    swarm.network.heal()
    swarm.clock.run_for(12)
    goes_on(swarm)
    assert swarm.of("lineages_differ") == []
    assert swarm.of("fell_out") == []


def test_a_step_does_not_close_without_what_an_origin_took_over_when_it_was_done() -> None:
    """The microbatch takes longer than anybody waits for one that nobody is at work on."""
    swarm = SimSwarm((2, 2, 2), microbatches_per_origin=2, pace=300)
    assert swarm.run_to(1, 120)
    for name in ("s1r0", "s1r1", "s2r0", "s2r1"):
        swarm.network.set_link("s0r0", name, LinkModel(latency_s=4.0))
    assert swarm.clock.run_until(lambda: len(swarm.peers["s0r1"].events.of("done")) == 2, 120)
    assert not swarm.peers["s0r0"].core.origin.done
    swarm.kill("s0r0")
    assert swarm.run_to(2, 180)
    counted = swarm.close_of(1)["counted"]
    assert [entry[0] for entry in counted] == [0, 1, 2, 3]
    assert swarm.of("taken_over") != []


def test_a_cut_off_origin_starts_nothing_and_leaves_to_others_what_they_have_started() -> None:
    """What the others took over and had not begun goes back to it when it is back: little is done twice."""
    swarm = SimSwarm((3, 2, 2, 2), path_length=3, microbatches_per_origin=12, memory_slots=3, pace=20)
    assert swarm.run_to(1)
    swarm.clock.run_for(1.5)
    rest = [name for name in swarm.peers if name != "s0r0"]
    swarm.network.partition([["s0r0"], rest])
    assert swarm.clock.run_until(lambda: len(swarm.of("taken_over")) > 3, 20)
    own = swarm.peers["s0r0"].events
    begun = len(own.of("started"))
    swarm.clock.run_for(2)
    assert len(own.of("started")) == begun
    swarm.network.heal()
    assert swarm.run_to(3)
    swarm.whole()
    counted = swarm.of("closed")[-1][1]["counted"]
    assert min(len(path) for _, _, _, path, _ in counted) >= 2
    taken = {fields["index"] for _, fields in swarm.of("taken_over")}
    given = {fields["index"] for _, fields in swarm.of("given_back")}
    left = {fields["index"] for _, fields in swarm.of("left_to")}
    assert given
    assert given | left <= taken
    started = Counter(fields["index"] for _, fields in swarm.of("started") if fields["step"] == 1)
    assert sum(started.values()) - 36 == sum(count > 1 for count in started.values()) <= 6


@pytest.mark.parametrize("after", [0.1, 0.5, 0.8, 0.95, 1.1, 1.25])
def test_a_peer_that_falls_out_takes_nothing_of_its_old_step_along(after: float) -> None:
    """Told of a later close without it, at any point of a step: what it was computing counts nowhere."""
    swarm = SimSwarm((3, 3, 3), pace=4)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(after)
    for name in ("s0r1", "s1r1"):
        core = swarm.peers[name].core
        members = tuple(member for member in core.context.members if member.peer != name)
        core.on_message("s2r0", Decided(close=StepClose(step=STEP + 2, counted=(), members=members)), None)
    swarm.clock.run_for(12)
    goes_on(swarm)
    assert sorted(name for name, _ in swarm.of("fell_out")) == ["s0r1", "s1r1"]
    assert len(swarm.peers["s0r0"].core.context.replicas(0)) == 3
