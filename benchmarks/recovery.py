"""How soon a microbatch moves again when a peer of its path dies or freezes: real processes over loopback.

The demo's swarm of 8 peers. One peer after another gets SIGKILL or SIGSTOP in the very call in which a
FORWARD or a BACKWARD comes to it; times are from there, by the event logs. ``KIND_WAY_ms``: until the peer
before it has sent the microbatch another way (or the origin has started it anew); ``.._detect_ms``: until the
victim was first taken for lost; ``.._commit_ms``: until the microbatch was committed. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.runs import SwarmRun, manifest_text
from bootstrap.faults.plan import FaultPlan
from bootstrap.faults.processes import ProcessFaults
from bootstrap.progress import Event

PEERS = 8
FREEZE_S = 9.0
"""Longer than silence is borne, so that the microbatch must go another way."""
RETURN_S = 0.5
RECOVERY_LIMIT_S = 60.0


@dataclass(frozen=True)
class Recovery:
    """Seconds from one fault; ``again``: microbatches that had to be computed again, in part."""

    detect_s: float
    moving_s: float
    commit_s: float
    again: int


def busy(run: SwarmRun, rng: random.Random) -> str:
    """A peer of a stage other than 0 that the newest paths lead through: plans leave slow peers out."""
    names = {peer: name for name, peer in run.ids.items()}
    hops = [hop.split(":")[1] for _, event in run.of("started")[-12:] for hop in event["path"][1:]]
    return names[rng.choice(sorted(hops))]


async def one(run: SwarmRun, kind: str, way: str, victim: str) -> Recovery:
    """Hit ``victim``, and wait until all is as before."""
    numbers: dict[str, Any] = {"returns_after_s": RETURN_S} if kind == "kill" else {"duration_s": FREEZE_S}
    plan = FaultPlan().add(kind, peer=victim, **numbers).at_message(way)
    async with ProcessFaults(run.swarm, plan, run.stages, run.start, run.clock) as faults:
        began_s = run.clock.now()

        def hit() -> Event | None:
            found = (
                event
                for name, event in run.of("emulated", since_s=began_s)
                if name == victim and event["do"] == "watch"
            )
            return next(found, None)

        fault = await run.until(hit)
        key = (fault["step"], fault["index"])

        def follows(*kinds: str) -> tuple[str, Event] | None:
            found = run.of(*kinds, since_s=fault["t"])
            return next(((n, e) for n, e in found if (e["step"], e["index"]) == key), None)

        await run.until(lambda: follows("committed"), RECOVERY_LIMIT_S)
        moved = follows("rerouted", "restarted")
        assert moved is not None, f"{key} was committed without {victim}, and nobody rerouted it"
        suspected = (e for _, e in run.of("lost", since_s=fault["t"]) if e["other"] == run.ids[victim])
        lost = next(suspected)
        commit = follows("committed")
        assert commit is not None
        again = {
            (event["step"], event["index"])
            for _, event in run.of("rerouted", "restarted", since_s=fault["t"])
            if event["t"] <= commit[1]["t"]
        }
        await run.until(lambda: not faults.active)
    await run.settled()
    return Recovery(
        lost["t"] - fault["t"], moved[1]["t"] - fault["t"], commit[1]["t"] - fault["t"], len(again)
    )


async def measure(times: int) -> dict[str, float]:
    """Every case ``times`` times, in turns."""
    cases = [(kind, way) for kind in ("kill", "freeze") for way in ("forward", "backward")]
    found: dict[tuple[str, str], list[Recovery]] = {case: [] for case in cases}
    async with SwarmRun(manifest_text(total_steps=1_000_000), PEERS) as run:
        rng = random.Random(1)
        await run.settled()
        for number in range(times * len(cases)):
            case = cases[number % len(cases)]
            result = await one(run, *case, busy(run, rng))
            found[case].append(result)
            print(f"{case[0]} in {case[1]}: {result}", flush=True)
    return figures_of(found)


def figures_of(found: dict[tuple[str, str], list[Recovery]]) -> dict[str, float]:
    """Medians in milliseconds; the worst of those until it moves."""
    figures = {}
    for (kind, way), results in found.items():
        name = f"{kind}_{way}"
        figures[f"{name}_ms"] = 1e3 * statistics.median(each.moving_s for each in results)
        figures[f"{name}_worst_ms"] = 1e3 * max(each.moving_s for each in results)
        figures[f"{name}_detect_ms"] = 1e3 * statistics.median(each.detect_s for each in results)
        figures[f"{name}_commit_ms"] = 1e3 * statistics.median(each.commit_s for each in results)
        figures[f"{name}_again"] = statistics.mean(each.again for each in results)
    return figures


def main() -> None:
    made: argparse.ArgumentParser = report.parser(__doc__ or "")
    made.add_argument("--times", type=int, default=5, help="faults of each kind")
    options = made.parse_args()
    report.write("recovery", asyncio.run(measure(1 if options.quick else options.times)), options.json)


if __name__ == "__main__":
    main()
