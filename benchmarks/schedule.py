"""How good the schedules are: ours, every baseline and the reference's own paths, in one simulator.

    python -m benchmarks.schedule [--quick] [--instances DIR] [--seeds N] [--long S] [--json FILE]

Times of search are CPU-seconds. Of every instance: makespans as shares of the reference's paths, of the best
known ones, of the lower bound, and of the full pipeline; each the mean of the seeds, and as ``..._spread``
the greatest less the least. ``half_...`` skips half of the stages; ``skip_alone`` is what skipping brings if
all stages' paths are searched for as long. The full run takes about 160 CPU-minutes, on all cores that there
are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from statistics import mean

from benchmarks import report
from benchmarks.problems import INSTANCES, Problem, load, random_problem
from scheduler.anneal import improve
from scheduler.assignment import place
from scheduler.baselines import (
    decentralised_flow,
    full_pipeline,
    greedy_router,
    random_skip,
    stochastic_wiring,
    unskipped,
)
from scheduler.bounds import bounds
from scheduler.instance import Instance
from scheduler.paths import construct, repair, search
from scheduler.plan import Plan, validate
from scheduler.timeline import Simulator, makespan

Figures = dict[str, float]
REPLAN_S = 0.2
RANDOM = 10
BY_SEED = {
    "random_skip": random_skip,
    "stochastic_wiring": stochastic_wiring,
    "decentralised_flow": decentralised_flow,
}


def cpu_clock(seconds: float) -> Callable[[], float]:
    """Tells how much is left of ``seconds`` of this process's own time."""
    end_s = time.process_time() + seconds
    return lambda: end_s - time.process_time()


def searched(instance: Instance, seed: int, cpu_s: float, previous: Plan | None = None) -> Plan:
    """Our plan after ``cpu_s``; checked, and simulated again."""
    plan = search(instance, seed=seed, previous=previous, left_s=cpu_clock(cpu_s))
    _check(plan, instance)
    return plan


def placed(instance: Instance, seed: int, cpu_s: float) -> tuple[float, float]:
    """(makespan, bound) with free placement."""
    instance, plan = place(instance, seed=seed, left_s=cpu_clock(cpu_s))
    _check(plan, instance)
    return plan.makespan_s, bounds(instance).best_s


def _check(plan: Plan, instance: Instance) -> None:
    fault = validate(plan, instance)
    if fault is not None or makespan(instance, plan.paths) != plan.makespan_s:
        raise AssertionError(fault or "the plan's makespan is not what the simulator says")


def searched_s(instance: Instance, seed: int, cpu_s: float) -> float:
    return searched(instance, seed, cpu_s).makespan_s


def removals(instance: Instance, seed: int, cpu_s: float) -> Figures:
    """Each peer that is no origin removed in turn from the plan of ``cpu_s``."""
    healthy = searched(instance, seed, cpu_s)
    shares, repairs_ms = [], []
    for spec in instance.peers:
        if spec.peer in instance.microbatches:
            continue
        rest = instance.without(spec.peer)
        rest.tables, rest.usable  # noqa: B018 - a daemon's instance is there before the peer dies
        begin_s = time.process_time()
        repair(healthy, rest)
        repairs_ms.append(1e3 * (time.process_time() - begin_s))
        shares.append(searched(rest, seed, REPLAN_S, healthy).makespan_s / healthy.makespan_s)
    return {
        "removed_vs_healthy": mean(shares),
        "removed_vs_healthy_worst": max(shares),
        "repair_ms": mean(repairs_ms),
    }


def baselines(instance: Instance, seeds: Sequence[int]) -> Figures:
    """Mean makespan of each baseline."""
    means = {
        name: mean(plan(instance, seed=seed).makespan_s for seed in seeds) for name, plan in BY_SEED.items()
    }
    return {
        "full_pipeline": full_pipeline(instance).makespan_s,
        "greedy_router": greedy_router(instance).makespan_s,
        **means,
    }


def random_swarm(seed: int, cpu_s: float) -> tuple[float, float, float]:
    """(ours against the best baseline, against the bound, and full pipeline against the bound)"""
    instance = random_problem(seed)
    ours_s = searched_s(instance, seed, cpu_s)
    best_s = min(baselines(instance, (seed,)).values())
    bound_s = bounds(instance).best_s
    return ours_s / best_s, ours_s / bound_s, best_s / bound_s


def large_swarm(peers: int, microbatches: int, cpu_s: float) -> Figures:
    """CPU-seconds of a whole search, construction included, and how far from the bound it ends."""
    instance = random_problem(peers, peers=peers, microbatches=microbatches)
    instance.tables, instance.usable  # noqa: B018 - kept up to date by whoever plans
    begin_s = time.process_time()
    paths = construct(instance)
    built_s = time.process_time() - begin_s
    start_s = Simulator(instance).score(paths).makespan_s
    begin_s = time.process_time()
    plan = searched(instance, 0, cpu_s)
    return {
        f"swarm{peers}_construct_s": built_s,
        f"swarm{peers}_search_s": time.process_time() - begin_s,
        f"swarm{peers}_gain": plan.makespan_s / start_s,
        f"swarm{peers}_vs_bound": plan.makespan_s / bounds(instance).best_s,
    }


def speed(instance: Instance) -> Figures:
    """Microseconds of an evaluation within the search, milliseconds of a construction."""
    simulator = Simulator(instance)
    begin_s = time.process_time()
    for _ in range(20):
        paths = construct(instance)
    built_ms = 1e3 * (time.process_time() - begin_s) / 20
    score = simulator.score(paths)
    count = 20000

    begin_s = time.process_time()
    improve(simulator, paths, score, seed=0, iterations=count)
    return {
        "construct_ms": built_ms,
        "evaluation_us": 1e6 * (time.process_time() - begin_s) / count,
    }


def solve(
    problem: Problem, pool: ProcessPoolExecutor, seeds: Sequence[int], long_s: float
) -> Callable[[], Figures]:
    """Starts everything that is to be known of ``problem``; the result waits for it."""
    instance, whole = problem.instance, unskipped(problem.instance)
    half = instance.model_copy(update={"path_length": 1 + (instance.stages - 1) // 2})
    short = [pool.submit(searched_s, instance, seed, min(1.0, long_s)) for seed in seeds]
    long = [pool.submit(searched_s, instance, seed, long_s) for seed in seeds]
    free = [pool.submit(placed, instance, seed, long_s) for seed in seeds]
    free_half = [pool.submit(placed, half, seed, long_s) for seed in seeds]
    free_whole = [pool.submit(placed, whole, seed, long_s) for seed in seeds[:3]]
    removed = [pool.submit(removals, instance, seed, min(1.0, long_s)) for seed in seeds[:3]]
    others = pool.submit(baselines, instance, seeds)

    def result() -> Figures:
        figures = {f"{name}_s": value for name, value in others.result().items()}
        full_s = figures["full_pipeline_s"]
        bound_s = bounds(instance).best_s
        figures["bound_s"] = bound_s
        short_s, long_found_s, free_s = _values(short), _values(long), [f.result()[0] for f in free]
        half_s = [f.result()[0] for f in free_half]
        label = f"{long_s:g}s"
        if problem.reference_paths:
            reference_s = makespan(instance, problem.reference_paths)
            figures["reference_s"] = reference_s
            _add(figures, "1s_vs_reference", short_s, reference_s)
        if problem.best_known_paths:
            best_s = makespan(instance, problem.best_known_paths)
            figures["best_known_s"] = best_s
            _add(figures, "1s_vs_best", short_s, best_s)
            _add(figures, f"{label}_vs_best", long_found_s, best_s)
            _add(figures, "free_vs_best", free_s, best_s)
        _add(figures, "vs_bound", long_found_s, bound_s)
        figures["free_vs_bound"] = mean(a / b for a, b in (f.result() for f in free))
        _add(figures, "vs_full_pipeline", free_s, full_s)
        _add(figures, "half_vs_full_pipeline", half_s, full_s)
        whole_s = mean(f.result()[0] for f in free_whole)
        figures["skip_alone"] = mean(free_s) / whole_s
        figures["half_skip_alone"] = mean(half_s) / whole_s
        gathered = [f.result() for f in removed]
        figures |= {name: mean(each[name] for each in gathered) for name in gathered[0]}
        return {f"{problem.name}_{name}": value for name, value in figures.items()}

    return result


def _values(futures: Sequence[Future[float]]) -> list[float]:
    return [future.result() for future in futures]


def _add(figures: Figures, name: str, found_s: Sequence[float], of_s: float) -> None:
    figures[name] = mean(found_s) / of_s
    figures[f"{name}_spread"] = (max(found_s) - min(found_s)) / of_s


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--instances", type=Path, metavar="DIR", default=INSTANCES)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--long", type=float, default=60.0, metavar="S", help="CPU-seconds of a long search")
    chosen = parser.parse_args()
    seeds, long_s = range(chosen.seeds), chosen.long
    if chosen.quick:
        seeds, long_s = range(1), 0.5
    problems = load(chosen.instances)
    figures: Figures = {}
    for problem in problems:
        figures |= {f"{problem.name}_{name}": value for name, value in speed(problem.instance).items()}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = [solve(problem, pool, seeds, long_s) for problem in problems]
        swarms = [pool.submit(random_swarm, seed, min(1.0, long_s)) for seed in range(100, 100 + RANDOM)]
        large = (
            []
            if chosen.quick
            else [pool.submit(large_swarm, 200, 300, 1.5), pool.submit(large_swarm, 1000, 1500, 15.0)]
        )
        for result in results:
            figures |= result()
        shares = [future.result() for future in swarms]
        figures["random_vs_best_baseline"] = mean(share for share, _, _ in shares)
        figures["random_vs_best_baseline_worst"] = max(share for share, _, _ in shares)
        figures["random_vs_bound"] = mean(share for _, share, _ in shares)
        figures["random_best_baseline_vs_bound"] = mean(share for _, _, share in shares)
        for future in large:
            figures |= future.result()
    report.write("schedule", figures, chosen.json)


if __name__ == "__main__":
    main()
