"""A fault every 29 s: how much of the throughput that its living peers could have does a swarm keep?

16 peers, each computing at a nominal pace (``peer/emulation.py``), so that they are 16 machines though they
share a few cores; stage 0 has time to spare. A seeded plan kills a peer that comes back, freezes one, or cuts
one or two off, each in its turn. ``retained``: throughput with faults over that without (of the same swarm,
before and after), divided by the share of machine time that was up: neither dead nor frozen nor cut off.
``retained_members`` counts a peer as down until it takes work again; ``retained_stages`` besides weighs by
the narrowest stage, for all stages get the same number of visits; ``retained_plain`` does not weigh.
``--simulate`` does the same in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.runs import SwarmRun, manifest_text
from bootstrap.faults.control import pause
from bootstrap.faults.plan import FaultPlan, Freeze, Kill, Partition, Target
from bootstrap.faults.processes import ProcessFaults
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.swarm import SimSwarm

PEERS = 16
STAGES = 4
RETURN_S = 5.0
FREEZE_S = 10.0
CUT_S = 10.0

Entry = tuple[str, dict[str, Any]]
"""(name of the peer, event with its time ``t``)"""
Log = list[tuple[float, int, str, tuple[str, ...]]]


@dataclass(frozen=True)
class Sizes:
    """How long it takes. ``clean_s``: without faults, before and after."""

    faults_s: float
    every_s: float
    clean_s: float
    per_origin: int
    forward_s: float
    """Nominal, in a stage other than 0."""


def churn_plan(seed: int, names: list[str], sizes: Sizes) -> FaultPlan:
    """Kill, freeze and partition in turns, at even times, at peers that the seed draws."""
    rng = random.Random(seed)
    plan = FaultPlan(seed=seed)
    for number in range(int(sizes.faults_s / sizes.every_s)):
        kind = ("kill", "freeze", "partition")[number % 3]
        if kind == "kill":
            plan = plan.add(kind, peer=rng.choice(names), returns_after_s=RETURN_S)
        elif kind == "freeze":
            plan = plan.add(kind, peer=rng.choice(names), duration_s=FREEZE_S)
        else:
            cut_off = tuple(Target(peer=name) for name in rng.sample(names, rng.choice([1, 2])))
            plan = plan.add(kind, groups=(cut_off,), duration_s=CUT_S)
        plan = plan.at_time((number + 0.5) * sizes.every_s)
    return plan


# -- what came of it ---------------------------------------------------------------------------------------


@dataclass
class History:
    """What the logs of a whole run say."""

    ends: dict[int, float] = field(default_factory=dict)
    """step -> when the first peer had made it"""
    closes: dict[int, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=lambda: {"lost": 0, "double": 0, "diverged": 0})

    def tokens_per_s(self, since_s: float, until_s: float) -> tuple[float, float, float]:
        """(rate, from, to): over whole steps that ended within these times."""
        steps = sorted(step for step, t_s in self.ends.items() if since_s <= t_s <= until_s)
        if len(steps) < 2:
            raise RuntimeError(f"{len(steps)} steps within {until_s - since_s:.0f} s: too short a run")
        tokens = sum(entry[4] for step in steps[1:] for entry in self.closes[step]["counted"])
        began_s, ended_s = self.ends[steps[0]], self.ends[steps[-1]]
        return tokens / (ended_s - began_s), began_s, ended_s


def history_of(events: list[Entry], stages: Mapping[str, int], per_origin: int) -> History:
    """Fold the logs, and count what must not be: microbatches lost or doubled, histories that differ."""
    history = History()
    digests: dict[tuple[int, int], set[str]] = {}
    for name, event in events:
        kind, step = event["event"], event.get("step", -1)
        if kind == "closed":
            known = history.closes.setdefault(step, event)
            same = all(known[part] == event[part] for part in ("counted", "members"))
            history.wrong["diverged"] += not same
        elif kind in ("stepped", "followed"):
            digests.setdefault((stages[name], step), set()).add(event["digest"])
            if kind == "stepped":
                history.ends[step] = min(event["t"], history.ends.get(step, event["t"]))
    history.wrong["diverged"] += sum(len(found) > 1 for found in digests.values())
    for step, close in history.closes.items():
        indices = [entry[0] for entry in close["counted"]]
        history.wrong["double"] += len(indices) - len(set(indices))
        before = history.closes.get(step - 1)
        if before is not None:
            named = [hop.split(":") for hop in before["members"]]
            origins = sum(stage == "0" and peer not in before["learners"] for stage, peer in named)
            history.wrong["lost"] += origins * per_origin - len(set(indices))
    return history


@dataclass(frozen=True)
class Up:
    """Shares of a window: of machine time that was up, of peer time in which it could be given work, and of
    the time of the narrowest stage's peers, stage 0 left out, in which they could."""

    machines: float
    members: float
    narrowest: float


def up_in(
    plan: FaultPlan, log: Log, events: list[Entry], stages: Mapping[str, int], window: tuple[float, float]
) -> Up:
    """What could work within ``window``."""
    machines: dict[str, list[tuple[float, float]]] = {}
    members: dict[str, list[tuple[float, float]]] = {}
    for began_s, number, _, whom in log:
        fault = plan.faults[number]
        assert isinstance(fault, Kill | Freeze | Partition)
        duration_s = fault.returns_after_s if isinstance(fault, Kill) else fault.duration_s
        until_s = began_s + (window[1] if duration_s is None else duration_s)
        for name in whom:
            machines.setdefault(name, []).append((began_s, until_s))
            members.setdefault(name, []).append(
                (began_s, _works_again_s(name, fault, began_s, until_s, events))
            )
    all_s = len(stages) * (window[1] - window[0])
    return Up(
        1 - _total_s(machines, window) / all_s,
        1 - _total_s(members, window) / all_s,
        _narrowest(members, stages, window),
    )


def _narrowest(
    downs: Mapping[str, list[tuple[float, float]]], stages: Mapping[str, int], window: tuple[float, float]
) -> float:
    """The mean over ``window`` of the least share of a stage's peers that are up."""
    sizes = Counter(stage for stage in stages.values() if stage)
    edges = {t_s for spans in downs.values() for span in spans for t_s in span}
    times = sorted({*window, *(t_s for t_s in edges if window[0] < t_s < window[1])})
    total = 0.0
    for began_s, ended_s in itertools.pairwise(times):
        down = Counter(
            stages[name]
            for name, spans in downs.items()
            if any(first <= began_s and last >= ended_s for first, last in spans)
        )
        total += (ended_s - began_s) * min(1 - down[stage] / size for stage, size in sizes.items())
    return total / (window[1] - window[0])


def _works_again_s(
    name: str, fault: Kill | Freeze | Partition, began_s: float, until_s: float, events: list[Entry]
) -> float:
    """When it had joined again, if it lost its place."""
    own = [event for other, event in events if other == name and event["t"] >= began_s]
    fell_s = began_s if isinstance(fault, Kill) else None
    for event in own:
        if fell_s is None and event["event"] == "fell_out" and event["t"] <= until_s + 30:
            fell_s = event["t"]
        if fell_s is not None and event["event"] == "joined" and event["t"] >= fell_s:
            return max(until_s, float(event["t"]))
    return until_s if fell_s is None else float("inf")


def _total_s(spans: Mapping[str, list[tuple[float, float]]], window: tuple[float, float]) -> float:
    total = 0.0
    for each in spans.values():
        reached = window[0]
        for began_s, until_s in sorted(each):
            began_s, until_s = max(began_s, reached), min(until_s, window[1])
            if until_s > began_s:
                total += until_s - began_s
                reached = until_s
    return total


def figures_of(
    history: History,
    clean: list[tuple[float, float]],
    faulty: tuple[float, float],
    up: Callable[[tuple[float, float]], Up],
) -> dict[str, float]:
    """``clean``, ``faulty``: from when to when nothing, or faults, happened."""
    rates = [history.tokens_per_s(*span)[0] for span in clean]
    rate, began_s, ended_s = history.tokens_per_s(*faulty)
    share = up((began_s, ended_s))
    plain = rate * len(rates) / sum(rates)
    return {
        "retained": plain / share.machines,
        "retained_members": plain / share.members,
        "retained_stages": plain / share.narrowest,
        "retained_plain": plain,
        "up": share.machines,
        "clean_tokens_per_s": sum(rates) / len(rates),
        "clean_spread": max(rates) / min(rates) - 1,
        "tokens_per_s": rate,
        "seconds": ended_s - began_s,
        **history.wrong,
    }


# -- real processes ----------------------------------------------------------------------------------------


def settings_of(sizes: Sizes) -> Callable[[int], dict[str, Any]]:
    """The pace of a stage's peers: stage 0 has 0.4 of the work of others, so that it never is the narrow."""

    def settings(stage: int) -> dict[str, Any]:
        unit_s = sizes.forward_s * (0.4 if stage == 0 else 1.0)
        return {"pace": {"forward": unit_s, "backward": unit_s, "weight": unit_s / 2, "loss": unit_s / 4}}

    return settings


async def run_processes(sizes: Sizes, seed: int) -> dict[str, float]:
    """The whole story on this machine."""
    manifest = manifest_text(
        total_steps=1_000_000,
        microbatches_per_origin=sizes.per_origin,
        microbatch_size=1,
        width=64,
        heads=2,
        kv_heads=1,
        ffn_width=128,
        context=32,
        start_replicas=PEERS // STAGES,
        memory_slots=6,
    )
    async with SwarmRun(manifest, PEERS, settings=settings_of(sizes)) as run:
        await run.settled(2)
        print("the swarm is warm", flush=True)
        clean = [await _span(run, sizes.clean_s)]
        plan = churn_plan(seed, sorted(run.stages), sizes)
        cpu_s = run.cpu_s()
        async with ProcessFaults(
            run.swarm, plan, run.stages, run.start, run.clock, frozen_machines=True
        ) as faults:
            faulty = await _span(run, sizes.faults_s)
            print(f"fired: {dict(faults.fired_kinds())}", flush=True)
            await run.until(lambda: not faults.active)
        await run.settled(2)
        clean.append(await _span(run, sizes.clean_s))
        cpu_s = (run.cpu_s() - cpu_s) / (clean[-1][1] - faulty[0])
        events = run.of("closed", "stepped", "followed", "joined", "fell_out")
    history = history_of(events, run.stages, sizes.per_origin)
    figures = figures_of(
        history, clean, faulty, lambda window: up_in(plan, faults.log, events, run.stages, window)
    )
    return {**figures, "faults": sum(faults.fired.values()), "cpu_cores": cpu_s}


async def _span(run: SwarmRun, duration_s: float) -> tuple[float, float]:
    began_s = run.clock.now()
    while run.clock.now() < began_s + duration_s:
        run.look()
        await pause(run.clock, 0.5)
    return began_s, run.clock.now()


# -- virtual time ------------------------------------------------------------------------------------------


def run_simulated(sizes: Sizes, seed: int) -> dict[str, float]:
    """The same plan on the simulated swarm."""
    pace = sizes.forward_s / 0.010
    per_origin = min(sizes.per_origin, 64 // (PEERS // STAGES))
    swarm = SimSwarm(
        (PEERS // STAGES,) * STAGES,
        seed=seed,
        path_length=STAGES - 1,
        microbatches_per_origin=per_origin,
        total_steps=1_000_000,
        memory_slots=6,
        pace=(0.4 * pace, *(pace,) * (STAGES - 1)),
    )
    plan = churn_plan(seed, sorted(swarm.peers), sizes)

    def span(duration_s: float) -> tuple[float, float]:
        began_s = swarm.clock.now()
        swarm.clock.run_until(lambda: swarm.clock.now() >= began_s + duration_s, duration_s)
        return began_s, swarm.clock.now()

    def settled() -> None:
        swarm.clock.run_until(lambda: all(p.core.context.active for p in swarm.living()), 300.0)
        swarm.run_to(max(peer.step for peer in swarm.living()) + 2, 300.0)

    settled()
    clean = [span(sizes.clean_s)]
    faults = SimulatedFaults(swarm, plan)
    faulty = span(sizes.faults_s)
    swarm.clock.run_until(lambda: not faults.active, 120.0)
    settled()
    clean.append(span(sizes.clean_s))
    swarm.check()
    stages = {name: peer.stage for name, peer in swarm.peers.items()}
    events = sorted(
        ((p.name, {"t": t, "event": kind, **f}) for p in swarm.lives() for t, kind, f in p.events.entries),
        key=lambda entry: entry[1]["t"],
    )
    history = history_of(events, stages, per_origin)
    figures = figures_of(
        history, clean, faulty, lambda window: up_in(plan, faults.log, events, stages, window)
    )
    return {**figures, "faults": sum(faults.fired.values())}


def main() -> None:
    made: argparse.ArgumentParser = report.parser(__doc__ or "")
    made.add_argument("--minutes", type=float, default=10.0, help="of faults")
    made.add_argument("--simulate", action="store_true", help="in virtual time")
    made.add_argument("--seed", type=int, default=1)
    options = made.parse_args()
    sizes = Sizes(60 * options.minutes, every_s=29.0, clean_s=90.0, per_origin=24, forward_s=0.3)
    if options.quick:
        sizes = Sizes(70.0, every_s=10.0, clean_s=20.0, per_origin=8, forward_s=0.15)
    if options.simulate:
        report.write("churn_simulated", run_simulated(sizes, options.seed), options.json)
    else:
        report.write("churn", asyncio.run(run_processes(sizes, options.seed)), options.json)


if __name__ == "__main__":
    main()
