"""Losses as in EC2 spot traces, in bursts: our protocol against two older answers, in virtual time.

12 peers, 3 of each stage; losses at 0.13, 0.43 and 1.62 per node-hour, one to four machines at once, each
back after two minutes. ``retained_RATE``: throughput of the simulated swarm under these losses over that
without. The other two are reckoned on the same losses with the step times that the same simulator gives
for the peers that are left. ``restart_RATE``: all stop at a loss, and go on from the last checkpoint with
who is left (and stop once more to take in who is back). ``drop_RATE``: a lost peer takes its whole
pipeline, one peer of each stage, out of use until it is back, and what was under way in it.
"""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import dataclass
from functools import cache

from benchmarks import report
from bootstrap.faults.plan import FaultPlan
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.swarm import SimSwarm

STAGES, REPLICAS = 4, 3
PER_ORIGIN = 12
PACE = 30.0
RATES = (0.13, 0.43, 1.62)
BACK_S = 120.0
BURSTS = (1, 1, 2, 2, 3, 4)
CHECKPOINT_STEPS = 10
RESTART_S = 20.0
"""Until a swarm that was stopped has started again and loaded its state; generous to the restarting."""

Replicas = tuple[int, ...]


@dataclass(frozen=True)
class Burst:
    """Machines that go at once."""

    at_s: float
    names: tuple[str, ...]


def bursts_of(rate: float, seconds: float, seed: int) -> list[Burst]:
    """So many losses per node-hour, never a majority nor a whole stage away at once."""
    rng = random.Random(f"{seed}/{rate}")
    peers = [f"s{stage}r{number}" for stage in range(STAGES) for number in range(REPLICAS)]
    mean_s = 3600 * sum(BURSTS) / len(BURSTS) / (rate * len(peers))
    found, at_s = [], rng.expovariate(1 / mean_s)
    away: dict[str, float] = {}
    while at_s < seconds:
        away = {name: until_s for name, until_s in away.items() if until_s > at_s}
        names: list[str] = []
        for name in rng.sample(peers, rng.choice(BURSTS)):
            mates = [other for other in peers if other[:2] == name[:2]]
            left = [other for other in mates if other not in away and other not in names and other != name]
            if name not in away and left and 2 * (len(away) + len(names) + 1) < len(peers):
                names.append(name)
        away.update(dict.fromkeys(names, at_s + BACK_S))
        if names:
            found.append(Burst(at_s, tuple(names)))
        at_s += rng.expovariate(1 / mean_s)
    return found


def new_swarm(replicas: Replicas, path_length: int) -> SimSwarm:
    return SimSwarm(
        replicas,
        path_length=path_length,
        microbatches_per_origin=PER_ORIGIN,
        total_steps=1_000_000,
        memory_slots=16,
        pace=(0.4 * PACE, *(PACE,) * (STAGES - 1)),
    )


@cache
def rate_of(replicas: Replicas, path_length: int) -> float:
    """Microbatches a second without faults."""
    swarm = new_swarm(replicas, path_length)
    swarm.run_to(4, 1000.0)
    began_s = swarm.clock.now()
    swarm.run_to(9, 1000.0)
    return sum(swarm.counted(step) for step in range(4, 9)) / (swarm.clock.now() - began_s)


def ours(bursts: list[Burst], seconds: float) -> float:
    """Microbatches a second of the protocol itself."""
    swarm = new_swarm((REPLICAS,) * STAGES, STAGES - 1)
    swarm.run_to(1, 1000.0)
    plan = FaultPlan()
    for burst in bursts:
        for name in burst.names:
            plan = plan.add("kill", peer=name, returns_after_s=BACK_S).at_time(burst.at_s)
    faults = SimulatedFaults(swarm, plan)
    began_s = swarm.clock.now()
    swarm.clock.run_until(lambda: swarm.clock.now() >= began_s + seconds, seconds)
    assert sum(faults.fired.values()) == len(plan.faults)
    swarm.check()
    ends: dict[int, float] = {}
    for peer in swarm.lives():
        for t_s, event, fields in peer.events.entries:
            if event == "stepped":
                ends[fields["step"]] = min(t_s, ends.get(fields["step"], t_s))
    steps = sorted(ends)
    counted = sum(swarm.counted(step) for step in steps[1:])
    return counted / (ends[steps[-1]] - ends[steps[0]])


def pieces(bursts: list[Burst], seconds: float) -> list[tuple[float, float, Replicas, int, bool]]:
    """Between two changes: (from, to, replicas that live, whole pipelines, does it end in a loss?)."""
    changes = sorted({0.0, seconds, *(t for b in bursts for t in (b.at_s, b.at_s + BACK_S) if t < seconds)})
    losses = {burst.at_s for burst in bursts}
    made = []
    for began_s, ended_s in itertools.pairwise(changes):
        away = {n for b in bursts if b.at_s <= began_s < b.at_s + BACK_S for n in b.names}
        living = tuple(REPLICAS - sum(name[1] == str(stage) for name in away) for stage in range(STAGES))
        pipelines = REPLICAS - len({name[3:] for name in away})
        made.append((began_s, ended_s, living, pipelines, ended_s in losses))
    return made


def restarting(bursts: list[Burst], seconds: float) -> float:
    """Microbatches a second of a swarm that goes back to its checkpoint at each loss."""
    kept = since_checkpoint = 0.0
    down_s = 0.0
    for began_s, ended_s, living, _, loss in pieces(bursts, seconds):
        busy_s = max(0.0, ended_s - began_s - down_s)
        down_s = max(0.0, down_s - (ended_s - began_s))
        made = rate_of(living, STAGES - 1) * busy_s
        a_checkpoint = CHECKPOINT_STEPS * PER_ORIGIN * living[0]
        since_checkpoint += made
        whole = since_checkpoint // a_checkpoint * a_checkpoint
        kept, since_checkpoint = kept + whole, since_checkpoint - whole
        if loss:
            since_checkpoint = 0.0
        down_s = RESTART_S
    return (kept + since_checkpoint) / seconds


def dropping(bursts: list[Burst], seconds: float) -> float:
    """Microbatches a second of a swarm of fixed pipelines."""
    made = 0.0
    for began_s, ended_s, _, pipelines, _ in pieces(bursts, seconds):
        if pipelines:
            made += rate_of((pipelines,) * STAGES, STAGES - 1) * (ended_s - began_s)
    lost = sum(PER_ORIGIN / 2 for burst in bursts for _ in {name[3:] for name in burst.names})
    return max(0.0, made - lost) / seconds


def main() -> None:
    made: argparse.ArgumentParser = report.parser(__doc__ or "")
    made.add_argument("--hours", type=float, default=1.0, help="virtual, for each rate")
    made.add_argument("--seed", type=int, default=1)
    options = made.parse_args()
    seconds = 3600 * (0.25 if options.quick else options.hours)
    whole = rate_of((REPLICAS,) * STAGES, STAGES - 1)
    figures: dict[str, float] = {"microbatches_per_s": whole}
    for rate in RATES[-1:] if options.quick else RATES:
        bursts = bursts_of(rate, seconds, options.seed)
        name = f"{rate}".replace(".", "_")
        figures[f"losses_{name}"] = sum(len(burst.names) for burst in bursts)
        figures[f"retained_{name}"] = ours(bursts, seconds) / whole
        figures[f"restart_{name}"] = restarting(bursts, seconds) / whole
        figures[f"drop_{name}"] = dropping(bursts, seconds) / whole
        print(figures, flush=True)
    report.write("spot", figures, options.json)


if __name__ == "__main__":
    main()
