"""A swarm of real processes over p2pd, held against a single-process reference trainer.

Two runs of 20 steps and 8 peers: one without faults, one in which a peer is killed in mid-step. What they
must show is the same: replicas bit-identical after every step, every microbatch counted once, and gradients
and parameters that a reference trainer reproduces from the committed paths alone.
"""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bootstrap.create import create_run
from bootstrap.local import LocalSwarm
from peer import checkpoint
from swarm.clock import LoopClock
from swarm.manifest import Manifest
from swarm.model.layout import build_stage, layout_of
from swarm.model.state import unpack
from tests.network.swarms import changed_manifest, first, happens
from tests.reference import CountedMicrobatch, ReferenceTrainer

STEPS = 20
STAGES = 4
PEERS = [(f"peer{number}", number % STAGES) for number in range(2 * STAGES)]
KILL_STEP = 7
VICTIM = "peer6"


@dataclass
class Run:
    """What a finished swarm left behind."""

    directory: Path
    manifest: Manifest
    names: dict[str, str]
    """peer id -> process name"""
    codes: dict[str, int | None]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        path = self.directory / "events" / f"{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def survivors(self) -> list[str]:
        return [name for name, code in self.codes.items() if code == 0]


def small_manifest() -> str:
    """The demo's model with half its microbatches, 20 steps long."""
    return changed_manifest(
        total_steps=STEPS, microbatch_size=2, validation_every=10, warmup_steps=4, checkpoint_every=0
    )


async def train(directory: Path, kill: str | None) -> Run:
    """A whole run; ``kill`` gets SIGKILL when the first microbatch of ``KILL_STEP`` was started."""
    (directory / "run.toml").write_text(small_manifest())
    made = create_run(directory / "run.toml")
    clock = LoopClock()
    async with LocalSwarm(directory, clock) as swarm:
        await swarm.open()
        swarm.start_node("node", signed=made.signed_path, key=made.key_path)
        ready = await happens(clock, lambda: first(directory, "node", "ready"))
        for name, stage in PEERS:
            swarm.start_peer(name, join=ready["join"], stage=stage, trace=directory / "trace")
        if kill is not None:
            await happens(clock, lambda: first(directory, "peer0", "started", step=KILL_STEP))
            swarm.signal(kill, signal.SIGKILL)
        peers = [swarm.processes[name] for name, _ in PEERS]
        await happens(clock, lambda: all(peer.ended.is_set() for peer in peers) or None)
        logs = {peer.name: peer.log.read_text()[-2000:] for peer in peers}
        codes = {peer.name: peer.code for peer in peers}
    expected = {name: -signal.SIGKILL if name == kill else 0 for name, _ in PEERS}
    assert codes == expected, logs
    names = {}
    for name, _ in PEERS:
        for line in (directory / "events" / f"{name}.jsonl").read_text().splitlines()[:1]:
            names[json.loads(line)["peer"]] = name
    return Run(directory, made.manifest, names, codes)


@pytest.fixture(scope="module", params=[None, VICTIM], ids=["clean", "killed"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return asyncio.run(train(tmp_path_factory.mktemp("swarm"), request.param))


def test_every_step_has_one_history_and_loses_no_microbatch(run: Run) -> None:
    closes: dict[int, Any] = {}
    for name in run.survivors():
        for event in run.events(name, "closed"):
            counted = closes.setdefault(event["step"], event["counted"])
            assert counted == event["counted"], f"two histories of step {event['step']}"
    assert sorted(closes) == list(range(STEPS))
    everything = list(range(2 * run.manifest.microbatches_per_origin))
    for step, counted in closes.items():
        assert [entry[0] for entry in counted] == everything, step
        assert all(len(entry[3]) >= run.manifest.path_length - 1 for entry in counted)


def test_replicas_are_bit_identical_after_every_step(run: Run) -> None:
    for stage in range(STAGES):
        replicas = [name for name, hosted in PEERS if hosted == stage and name in run.survivors()]
        histories = [[(e["step"], e["digest"]) for e in run.events(name, "stepped")] for name in replicas]
        assert [step for step, _ in histories[0]] == list(range(STEPS))
        assert all(history == histories[0] for history in histories)


def test_the_kill_was_seen_and_survived(run: Run) -> None:
    if VICTIM in run.survivors():
        assert not [e for name in run.survivors() for e in run.events(name, "rerouted")]
        return
    (victim,) = (peer for peer, name in run.names.items() if name == VICTIM)
    for name in run.survivors():
        assert victim in {event["other"] for event in run.events(name, "lost")}
        assert not run.events(name, "fell_out")
        last = run.events(name, "closed")[-1]
        assert len(last["members"]) == len(PEERS) - 1


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
                if hosted == stage
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
