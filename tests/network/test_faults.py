"""What befalls a swarm of real processes besides the kills of ``test_swarm.py``: one long story, then what
its logs say.

A peer in the middle of a path freezes, the compute of another hangs, an origin dies, the only bootstrap node
dies and a newcomer comes all the same, three peers leave at once.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.runs import SwarmRun, manifest_text
from bootstrap.faults.plan import FaultPlan
from bootstrap.faults.processes import ProcessFaults
from bootstrap.progress import Event

PEERS = 8
PER_ORIGIN = 3
FREEZE_S = 9.0
"""Longer than the others bear silence: 4 s, some more on a busy machine."""
HANG_S = 40.0
ORIGIN = "peer4"
LEAVING = ("peer1", "peer2", "peer3")
"""The replica of each remains."""


@dataclass
class Story:
    """What happened: the events of all peers, and of each chapter what it was about."""

    events: list[tuple[str, Event]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    frozen: str = ""
    hung: str = ""
    fired: Counter[str] = field(default_factory=Counter)
    codes: dict[str, int | None] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    """When the chapters began."""

    def of(self, *kinds: str, name: str | None = None, since_s: float = 0.0) -> list[Event]:
        return [
            event
            for who, event in self.events
            if event["event"] in kinds and name in (None, who) and event["t"] >= since_s
        ]


def busy(run: SwarmRun, stages: set[int]) -> str:
    """The peer of these stages that most of the newest paths lead through: plans leave slow ones out."""
    hops = [hop.split(":") for _, event in run.of("started")[-12:] for hop in event["path"][1:]]
    names = {peer: name for name, peer in run.ids.items()}
    return names[Counter(peer for stage, peer in hops if int(stage) in stages).most_common(1)[0][0]]


async def suffer(run: SwarmRun, story: Story, plan: FaultPlan, there: Any) -> float:
    """Carry ``plan`` out until ``there(when it happened)`` has something; when it happened."""
    async with ProcessFaults(run.swarm, plan, run.stages, run.start, run.clock) as faults:
        await run.until(lambda: faults.log)
        began_s = faults.log[0][0]
        await run.until(lambda: there(began_s))
        if plan.faults[0].kind == "freeze":
            await run.until(lambda: not faults.active)
        story.fired += faults.fired_kinds()
    return began_s


async def tell() -> Story:
    story = Story()
    text = manifest_text(total_steps=1_000_000, microbatches_per_origin=PER_ORIGIN, microbatch_size=2)
    async with SwarmRun(text, PEERS) as run:

        def rerouted(name: str) -> Any:
            lost = {"lost": run.ids[name], "cause": "lost"}
            return lambda since_s: [
                e for _, e in run.of("rerouted", since_s=since_s) if lost.items() <= e.items()
            ]

        await run.settled()
        story.frozen = busy(run, {1, 2})
        plan = FaultPlan().add("freeze", peer=story.frozen, duration_s=FREEZE_S).at_message("forward")
        story.times["freeze"] = await suffer(run, story, plan, rerouted(story.frozen))
        await run.settled()

        story.hung = busy(run, {3})
        plan = FaultPlan().add("hang", peer=story.hung, duration_s=HANG_S).at_message("forward")
        story.times["hang"] = await suffer(run, story, plan, rerouted(story.hung))

        gone = run.ids[ORIGIN]
        plan = FaultPlan().add("kill", peer=ORIGIN).at_message("accept")
        story.times["origin"] = await suffer(
            run,
            story,
            plan,
            lambda since_s: [
                e for _, e in run.of("closed", since_s=since_s) if f"0:{gone}" not in e["members"]
            ],
        )
        del run.stages[ORIGIN]

        run.swarm.signal("node", signal.SIGKILL)
        await run.swarm.processes["node"].ended.wait()
        (run.directory / "newcomer").mkdir()
        shutil.copy(run.directory / "peer0" / "peers.json", run.directory / "newcomer")
        run.stages["newcomer"] = 0
        run.start("newcomer", 0)
        await run.settled()

        story.times["leave"] = run.clock.now()
        for name in LEAVING:
            run.swarm.signal(name, signal.SIGINT)
            del run.stages[name]
        for name in LEAVING:
            await asyncio.wait_for(run.swarm.processes[name].ended.wait(), 60)
            story.codes[name] = run.swarm.processes[name].code
        await run.settled()
        story.events, story.ids = run.events, run.ids
        story.stages = {**{f"peer{n}": n % 4 for n in range(PEERS)}, "newcomer": 0}
    return story


@pytest.fixture(scope="module")
def story() -> Story:
    return asyncio.run(tell())


def test_every_step_has_one_history_and_loses_no_microbatch(story: Story) -> None:
    closes: dict[int, Event] = {}
    for event in story.of("closed"):
        known = closes.setdefault(event["step"], event)
        assert known["counted"] == event["counted"], f"two histories of step {event['step']}"
        assert known["members"] == event["members"]
    assert sorted(closes) == list(range(len(closes)))
    origins = 2
    for _, close in sorted(closes.items()):
        assert [entry[0] for entry in close["counted"]] == list(range(PER_ORIGIN * origins))
        named = [hop.split(":") for hop in close["members"]]
        origins = sum(stage == "0" and peer not in close["learners"] for stage, peer in named)


def test_replicas_are_bit_identical_after_every_step(story: Story) -> None:
    digests: dict[tuple[int, int], set[str]] = {}
    for name, event in story.events:
        if event["event"] in ("stepped", "followed"):
            digests.setdefault((story.stages[name], event["step"]), set()).add(event["digest"])
    assert {key: found for key, found in digests.items() if len(found) > 1} == {}


def test_a_frozen_peer_is_routed_around_and_comes_back_in_another_life(story: Story) -> None:
    assert story.fired["freeze"] == 1
    since_s = story.times["freeze"]
    frozen = story.ids[story.frozen]
    reasons = {e["reason"] for e in story.of("lost", since_s=since_s) if e["other"] == frozen}
    assert any("silent" in reason for reason in reasons), reasons
    assert not story.of("opened", name=story.frozen, since_s=since_s)
    (first, *_) = story.of("fell_out", name=story.frozen, since_s=since_s)
    assert story.of("joined", name=story.frozen, since_s=first["t"])


def test_a_peer_whose_compute_hangs_is_routed_around_though_its_heartbeats_go_on(story: Story) -> None:
    assert story.fired["hang"] == 1
    since_s, hung = story.times["hang"], story.ids[story.hung]
    reasons = {e["reason"] for e in story.of("lost", since_s=since_s) if e["other"] == hung}
    assert any("computes nothing" in reason for reason in reasons), reasons


def test_the_samples_of_an_origin_that_died_are_drawn_by_the_other(story: Story) -> None:
    assert story.fired["kill"] == 1
    taken = story.of("taken_over", since_s=story.times["origin"])
    assert taken
    assert {event["lost"] for event in taken} == {story.ids[ORIGIN]}


def test_without_any_bootstrap_node_a_newcomer_joins_by_the_addresses_that_it_remembers(story: Story) -> None:
    assert story.of("joined", name="newcomer")
    assert story.of("stepped", name="newcomer")


def test_peers_that_leave_at_once_leave_cleanly(story: Story) -> None:
    assert story.codes == dict.fromkeys(LEAVING, 0)
    since_s = story.times["leave"]
    assert {e["other"] for e in story.of("goodbye", since_s=since_s)} >= {story.ids[n] for n in LEAVING}
