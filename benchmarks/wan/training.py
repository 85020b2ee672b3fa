"""A real swarm on an emulated WAN: the real daemons, one on each host, computing at a nominal pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """One step of the swarm. Times in s."""

    duration_s: float
    """From the first peer's end of the step before to its end of this."""
    work_s: float
    """Thereof from the first microbatch's start to the last commit; the rest is the close and the average."""
    predicted_s: float
    """What the plan that stood then promised of the work."""
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
        await run.until(lambda: len(run.of("stepped")) > WARMUP_STEPS * training.peers)
        say(f"{WARMUP_STEPS} steps to warm up are made")
        began_s, cpu_s, before = run.clock.now(), run.cpu_s(), await testbed.counts()
        waited_s = _cpu_waited_s()
        await run.until(
            lambda: len(run.of("stepped")) > (WARMUP_STEPS + training.steps) * training.peers,
            training.steps * STEP_LIMIT_S,
        )
        counts = await testbed.counts()
        elapsed_s = run.clock.now() - began_s
        cores = (run.cpu_s() - cpu_s) / elapsed_s
        waiting = {key: (total_s - waited_s[key]) / elapsed_s for key, total_s in _cpu_waited_s().items()}
        steps = steps_of(run.of("planned", "started", "committed", "stepped"))[WARMUP_STEPS:]
        troubles = run.of("lost", "fell_out", "restarted", "rerouted", since_s=began_s)
    return {
        **figures_of(steps),
        "path_length": training.path_length,
        "troubles": len(troubles),
        "peers_cpu_cores": cores,
        **waiting,
        **_router_figures(before, counts, elapsed_s, len(steps)),
    }


def steps_of(events: Sequence[tuple[str, dict[str, Any]]]) -> list[Step]:
    """All steps but the first, from the events (name, event) of all peers in the order of their times."""
    ended_s: dict[int, float] = {}
    tokens: dict[int, int] = {}
    began_s: dict[int, float] = {}
    worked_s: dict[int, float] = {}
    promised_s: dict[int, float] = {}
    planned_s = math.nan
    for _, event in events:
        kind, step, t_s = event["event"], event["step"], event["t"]
        if kind == "planned":
            planned_s = event["makespan_s"]
        elif kind == "started":
            began_s.setdefault(step, t_s)
            promised_s.setdefault(step, planned_s)
        elif kind == "committed":
            worked_s[step] = t_s
        elif kind == "stepped":
            ended_s.setdefault(step, t_s)
            tokens[step] = event["tokens"]
    return [
        Step(
            ended_s[step] - ended_s[step - 1], worked_s[step] - began_s[step], promised_s[step], tokens[step]
        )
        for step in sorted(ended_s)
        if step - 1 in ended_s
    ]


def figures_of(steps: Sequence[Step]) -> dict[str, float]:
    """Medians over the steps, and how far they are spread."""
    durations = [step.duration_s for step in steps]
    return {
        "step_s": statistics.median(durations),
        "step_least_s": min(durations),
        "step_most_s": max(durations),
        "work_s": statistics.median(step.work_s for step in steps),
        "predicted_s": statistics.median(step.predicted_s for step in steps),
        "predicted_ratio": statistics.median(step.predicted_s / step.work_s for step in steps),
        "tokens_per_s": sum(step.tokens for step in steps) / math.fsum(durations),
        "steps": len(steps),
    }


def _cpu_waited_s() -> dict[str, float]:
    """For how long, since the machine started, some process has waited for a processor: the kernel's pressure
    stall information, empty where it keeps none. Where that is most of the time, nominal times do not hold.
    """
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return {}
    return {"cpu_waiting": int(some.rpartition("total=")[2]) / 1e6}


def _router_figures(before: Counts, after: Counts, elapsed_s: float, steps: int) -> dict[str, float]:
    return {
        "router_cpu_cores": (after.cpu_s - before.cpu_s) / elapsed_s,
        "wire_mb_per_step": (after.carried_bytes - before.carried_bytes) / 1e6 / steps,
        "packets_dropped": after.dropped - before.dropped,
    }
