"""A swarm of real processes over p2pd, held against a single-process reference trainer.

Two runs of 20 steps and 8 peers: one without faults, one in which a peer of every stage is killed, each at
another point of a step, and three of them come back. What they must show is the same: replicas bit-identical
after every step, every microbatch counted once, and gradients and parameters that a reference trainer
reproduces from the committed paths alone.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bootstrap.create import example_toml
from bootstrap.faults.control import write_settings
from bootstrap.faults.plan import FaultPlan, Kill
from bootstrap.faults.processes import ProcessFaults
from peer import checkpoint
from swarm.manifest import Manifest
from swarm.model.layout import build_stage, layout_of
from swarm.model.state import unpack
from tests.network.swarms import happens, opened
from tests.reference import CountedMicrobatch, ReferenceTrainer

STEPS = 20
STAGES = 4
PEERS = [(f"peer{number}", number % STAGES) for number in range(2 * STAGES)]
KILLS = (
    FaultPlan(seed=1)
    .add("kill", peer="peer6", returns_after_s=0.5)
    .at_message("forward", step=3)
    .add("kill", peer="peer3", returns_after_s=0.5)
    .at_message("backward", step=5)
    .add("kill", peer="peer1", returns_after_s=0.5)
    .at_message("commit", step=7, nth=2)
    .add("kill", peer="peer4")
    .at_message("average_part", step=9)
)
"""In forward, in backward, between a commit and the averaging, and an origin in the averaging."""


@dataclass
class Run:
    """What a finished swarm left behind."""

    directory: Path
    manifest: Manifest
    names: dict[str, str]
    """peer id -> process name"""
    codes: dict[str, int | None]
    plan: FaultPlan
    fired: Counter[int]

    def lives(self, name: str) -> list[list[dict[str, Any]]]:
        """All that ``name`` wrote down, each of its lives by itself."""
        path = self.directory / "events" / f"{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        starts = [number for number, line in enumerate(lines) if line["event"] == "began"]
        return [lines[start:end] for start, end in pairwise([*starts, len(lines)])]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [line for life in self.lives(name) for line in life if line["event"] == event]

    def joined_again(self, name: str) -> bool:
        """Whether ``name``'s last life became a member: one begun too late finds the run finished."""
        return any(line["event"] == "joined" for line in self.lives(name)[-1])

    def victims(self) -> list[str]:
        """Peers that were killed, whether or not they came back."""
        return [
            str(fault.target.peer)
            for number, fault in enumerate(self.plan.faults)
            if isinstance(fault, Kill) and self.fired[number]
        ]

    def survivors(self) -> list[str]:
        """Peers that lived through it all."""
        return [name for name in self.codes if name not in self.victims()]

    def applied(self, name: str) -> dict[int, str]:
        """step -> digest of the parameters after it, in all lives."""
        return {
            event["step"]: event["digest"]
            for kind in ("stepped", "followed")
            for event in self.events(name, kind)
        }


def small_manifest() -> str:
    """The demo's model with half its microbatches, 20 steps long."""
    return example_toml(
        total_steps=STEPS, microbatch_size=2, validation_every=10, warmup_steps=4, checkpoint_every=0
    )


async def train(directory: Path, plan: FaultPlan) -> Run:
    """A whole run in which ``plan`` is carried out."""
    async with opened(directory, small_manifest()) as run:
        swarm, made, clock = run.swarm, run.made, run.clock

        def start(name: str, stage: int) -> None:
            settings = write_settings(directory, name)
            trace = directory / "trace"
            swarm.start_peer(name, join=run.join, stage=stage, trace=trace, emulate=settings)

        for name, stage in PEERS:
            start(name, stage)
        async with ProcessFaults(swarm, plan, dict(PEERS), start, clock) as faults:
            await happens(clock, lambda: (not faults.active and not swarm.living_peers()) or None)
        peers = [swarm.processes[name] for name, _ in PEERS]
        logs = {peer.name: peer.log.read_text()[-2000:] for peer in peers}
        codes = {peer.name: peer.code for peer in peers}
    gone = {str(fault.target.peer) for fault in plan.faults if fault.returns_after_s is None}
    expected = {name: -signal.SIGKILL if name in gone else 0 for name, _ in PEERS}
    assert codes == expected, logs
    names = {peer: name for name, peer in faults.ids.items()}
    return Run(directory, made.manifest, names, codes, plan, faults.fired)


@pytest.fixture(scope="module", params=[FaultPlan(), KILLS], ids=["clean", "killed"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return asyncio.run(train(tmp_path_factory.mktemp("swarm"), request.param))


def test_every_step_has_one_history_and_loses_no_microbatch(run: Run) -> None:
    closes: dict[int, Any] = {}
    for name in run.survivors():
        for event in run.events(name, "closed"):
            close = closes.setdefault(event["step"], event)
            assert close["counted"] == event["counted"], f"two histories of step {event['step']}"
    assert sorted(closes) == list(range(STEPS))
    origins = sum(stage == 0 for _, stage in PEERS)
    for step in range(STEPS):
        counted = closes[step]["counted"]
        drawn = run.manifest.microbatches_per_origin * origins
        assert [entry[0] for entry in counted] == list(range(drawn)), step
        assert all(len(entry[3]) >= run.manifest.path_length - 1 for entry in counted)
        origins = sum(member.startswith("0:") for member in closes[step]["members"])


def test_replicas_are_bit_identical_after_every_step(run: Run) -> None:
    for stage in range(STAGES):
        replicas = {name: run.applied(name) for name, hosted in PEERS if hosted == stage}
        for step in range(STEPS):
            held = {name: history[step] for name, history in replicas.items() if step in history}
            assert set(held) >= set(replicas) & set(run.survivors())
            assert len(set(held.values())) == 1, (stage, step, held)
        members = set(run.survivors()) | {name for name in run.victims() if run.joined_again(name)}
        assert all(STEPS - 1 in replicas[name] for name in members & set(replicas))


def test_the_kills_were_seen_and_survived(run: Run) -> None:
    assert all(times <= 1 for times in run.fired.values())
    if not run.plan.faults:
        assert not [e for name in run.survivors() for e in run.events(name, "rerouted")]
        return
    # Which peers a step's microbatches visit is the planner's affair: one may pass a victim by.
    assert len(run.victims()) >= 2
    assert run.fired[len(run.plan.faults) - 1] == 1
    assert [e for name, _ in PEERS for e in run.events(name, "rerouted")]
    ids = {name: peer for peer, name in run.names.items()}
    for name in run.survivors():
        assert {ids[victim] for victim in run.victims()} <= {e["other"] for e in run.events(name, "lost")}
        assert not run.events(name, "fell_out")


def test_a_reference_trainer_reproduces_gradients_and_parameters(run: Run) -> None:
    torch.set_num_threads(1)
    reference = ReferenceTrainer(run.manifest)
    ids = {name: peer for peer, name in run.names.items()}
    orders = {
        (name, event["step"]): [index for index, _ in event["order"]]
        for name, _ in PEERS
        for event in run.events(name, "summed")
    }
    for step in range(STEPS):
        (closed, *_) = (e for n in run.survivors() for e in run.events(n, "closed") if e["step"] == step)
        counted, members = [], {}
        for index, _, _, path, _ in closed["counted"]:
            stages, peers = zip(*(hop.split(":") for hop in path), strict=True)
            counted.append(CountedMicrobatch(index, tuple(map(int, stages)), tuple(peers)))
        for stage in range(STAGES):
            rosters = [
                event["members"]
                for name, hosted in PEERS
                if hosted == stage and name in run.survivors()
                for event in run.events(name, "averaged")
                if event["step"] == step
            ]
            # A survivor that was answered by one which had finished names a smaller roster.
            members[stage] = max(rosters, key=len)
        order = {
            (stage, ids[name]): orders[name, step]
            for name, stage in PEERS
            if ids[name] in members[stage] and (name, step) in orders
        }
        averages = reference.step(counted, order, members)
        for name, stage in PEERS:
            if name in run.survivors():
                file = run.directory / "trace" / ids[name] / f"step-{step:06d}.safetensors"
                average = load_file(file)["average"]
                difference = (average - averages[stage]).norm() / averages[stage].norm()
                assert difference <= 1e-6, (name, step, float(difference))
    for name, stage in PEERS:
        if name in run.survivors():
            described, image = checkpoint.newest(
                run.directory / name / "checkpoints", run.manifest.run_id, stage
            ) or pytest.fail(f"{name} left no checkpoint")
            assert described.step == STEPS
            layout = layout_of(build_stage(run.manifest, stage))
            tensors = unpack(image, layout)
            flat = torch.cat([tensors[slot.name].flatten() for slot in layout.slots])
            assert (flat - reference.parameters(stage)).abs().max() <= 1e-5
