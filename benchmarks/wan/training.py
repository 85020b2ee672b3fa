"""A real swarm on an emulated WAN: the real daemons, one on each host, computing at a nominal pace."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.runs import SwarmRun, manifest_text
from benchmarks.wan.profiles import Profile
from benchmarks.wan.testbed import Counts, WanTestbed

NODE = "node"
WARMUP_STEPS = 3
"""Until every origin plans with what was measured."""
STEP_LIMIT_S = 300.0
CONTEXT = 64
WIDTH = 64
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Policy:
    """How microbatches find their way: what it changes of the run."""

    name: str
    skips: bool
    """May paths leave stages out?"""


POLICIES = {
    policy.name: policy for policy in (Policy("plan", skips=True), Policy("full_pipeline", skips=False))
}
"""``plan``: the daemons' own. ``full_pipeline``: theirs too, of paths through all stages."""


@dataclass(frozen=True)
class Training:
    """One run. Times are nominal, for one microbatch in one stage."""

    policy: Policy
    peers: int = 12
    stages: int = 6
    skip: float = 1 / 3
    """Share of the stages, stage 0 included, that a path leaves out, as far as whole stages can."""
    microbatches_per_origin: int = 6
    memory_slots: int = 3
    activation_bytes: int = 1 << 20
    forward_s: float = 0.2
    steps: int = 8

    @property
    def path_length(self) -> int:
        """Stages that a microbatch visits."""
        if not self.policy.skips:
            return self.stages
        return max(1, round(self.stages * (1 - self.skip)))

    def manifest(self) -> str:
        """A narrow model with many tokens a microbatch: large activations at little arithmetic."""
        return manifest_text(
            stages=[1] * self.stages,
            layers=self.stages,
            path_length=self.path_length,
            total_steps=1_000_000,
            microbatches_per_origin=self.microbatches_per_origin,
            microbatch_size=max(1, self.activation_bytes // (CONTEXT * WIDTH * FLOAT_BYTES)),
            width=WIDTH,
            heads=2,
            kv_heads=1,
            ffn_width=WIDTH,
            context=CONTEXT,
            start_replicas=self.peers // self.stages,
            memory_slots=self.memory_slots,
        )

    def pace(self, stage: int) -> dict[str, Any]:
        """Backward and weight gradients are 1.5 forwards, the loss a quarter: the shares of SkipPipe's
        instances."""
        unit_s = self.forward_s
        return {"pace": {"forward": unit_s, "backward": unit_s, "weight": unit_s / 2, "loss": unit_s / 4}}


@dataclass(frozen=True)
class Step:
    """One step as the first peer made it."""

    duration_s: float
    tokens: int


async def train(
    training: Training, profile: Profile, *, regions: Sequence[str] = (), say: Callable[[str], None] = print
) -> dict[str, float]:
    """Figures of the steps after the warm-up. Peer n is in region n of ``regions`` (None: the profile's), the
    bootstrap node in the first. Raises UserError, and RuntimeError where the swarm does not train."""
    chosen = [
        (regions or profile.regions)[n % len(regions or profile.regions)] for n in range(training.peers)
    ]
    names = [NODE, *(f"peer{n}" for n in range(training.peers))]
    places = [chosen[0], *chosen]
    async with (
        WanTestbed(profile.wan(places), names, places) as testbed,
        SwarmRun(
            training.manifest(), training.peers, settings=training.pace, place_of=testbed.place_of
        ) as run,
    ):
        say(f"{training.peers} peers start in {', '.join(chosen)}")
        await run.until(lambda: len(_made(run)) > WARMUP_STEPS)
        say(f"{WARMUP_STEPS} steps to warm up are made")
        began_s, cpu_s, before = run.clock.now(), run.cpu_s(), await testbed.counts()
        whole = WARMUP_STEPS + training.steps
        await run.until(lambda: len(_made(run)) > whole, training.steps * STEP_LIMIT_S)
        counts = await testbed.counts()
        elapsed_s = run.clock.now() - began_s
        steps = steps_of(_made(run))[WARMUP_STEPS:whole]
        lost = run.of("lost", "fell_out", "restarted", since_s=began_s)
        predicted_s = [event["makespan_s"] for _, event in run.of("planned")][-1]
        cores = (run.cpu_s() - cpu_s) / elapsed_s
    return {
        **figures_of(steps),
        "path_length": training.path_length,
        "predicted_s": predicted_s,
        **{
            f"events_{kind}": sum(e["event"] == kind for _, e in lost)
            for kind in ("lost", "fell_out", "restarted")
        },
        "peers_cpu_cores": cores,
        **_router_figures(before, counts, elapsed_s, len(steps)),
    }


def _made(run: SwarmRun) -> list[dict[str, Any]]:
    return [event for name, event in run.of("stepped") if name == "peer0"]


def steps_of(stepped: Sequence[dict[str, Any]]) -> list[Step]:
    """From each ``stepped`` to the next."""
    return [Step(after["t"] - before["t"], after["tokens"]) for before, after in itertools.pairwise(stepped)]


def figures_of(steps: Sequence[Step]) -> dict[str, float]:
    """Medians over the steps, and how far they are spread."""
    durations = [step.duration_s for step in steps]
    return {
        "step_s": statistics.median(durations),
        "step_least_s": min(durations),
        "step_most_s": max(durations),
        "tokens_per_s": sum(step.tokens for step in steps) / math.fsum(durations),
        "steps": len(steps),
    }


def _router_figures(before: Counts, after: Counts, elapsed_s: float, steps: int) -> dict[str, float]:
    return {
        "router_cpu_cores": (after.cpu_s - before.cpu_s) / elapsed_s,
        "wire_mb_per_step": (after.carried_bytes - before.carried_bytes) / 1e6 / steps,
        "packets_dropped": after.dropped - before.dropped,
    }
