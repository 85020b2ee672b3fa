"""Random fault schedules against the real protocol on the simulated network: is anything lost or doubled?

Each seed is one swarm of 6 to 30 peers and one plan of faults (``bootstrap/faults/trial.py``). ``lost``: a
microbatch that an origin drew and that no close counts; ``double``: one that counts twice; ``stuck``: the
survivors do not go on, or somebody who came back is not taken in; ``diverged``: replicas or histories differ;
``failed``: an error of our own. All must be 0; a seed that fails is shown by ``--seed S --count 1 --trace``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from types import FrameType

from benchmarks import report
from bootstrap.faults.trial import Outcome, Trial
from bootstrap.simulation.swarm import Broken

RULES = ("lost", "double", "stuck", "diverged", "failed")
CHUNK = 10
CPU_LIMIT_S = 120.0
"""A schedule that needs more has no end."""
PROGRESS_S = 2.0


def _no_end(signum: int, frame: FrameType | None) -> None:
    raise Broken("stuck", f"no end in {CPU_LIMIT_S:.0f} s of computing")


def run_chunk(seeds: range) -> tuple[list[Outcome], float]:
    """Their outcomes and the CPU seconds they took, in this process."""
    signal.signal(signal.SIGVTALRM, _no_end)
    gc.freeze()  # the modules; and nothing is collected within a schedule, which keeps all to its end
    gc.disable()
    began_s = process_time()
    outcomes = []
    for seed in seeds:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
        outcomes.append(Trial(seed).run())
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    gc.collect()
    return outcomes, process_time() - began_s


def run_all(first: int, count: int, workers: int) -> Iterator[tuple[list[Outcome], float]]:
    """Chunk after chunk, as they come to an end in order."""
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    if workers == 1 or len(chunks) == 1:
        yield from map(run_chunk, chunks)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_chunk, chunks)


def figures_of(results: Iterable[tuple[list[Outcome], float]], count: int) -> dict[str, float]:
    """Counts over all schedules; prints what fails, and how far it has come."""
    began_s = shown_s = perf_counter()
    broken: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    total: Counter[str] = Counter()
    cpu_s = 0.0
    for outcomes, chunk_s in results:
        cpu_s += chunk_s
        for outcome in outcomes:
            fired += outcome.fired
            total += Counter(schedules=1, peers=outcome.peers, steps=outcome.steps)
            if outcome.rule:
                broken[outcome.rule] += 1
                print(f"seed {outcome.seed}: {outcome.rule}: {outcome.why[:160]}", flush=True)
        now_s = perf_counter()
        if now_s - shown_s > PROGRESS_S:
            shown_s = now_s
            rate = total["schedules"] / (now_s - began_s)
            left_s = (count - total["schedules"]) / rate
            print(
                f"{total['schedules']} of {count}, {rate:.1f}/s, {left_s:.0f} s left, "
                f"{sum(fired.values())} faults, {sum(broken.values())} broken",
                file=sys.stderr,
                flush=True,
            )
    wall_s = perf_counter() - began_s
    return {
        "schedules": total["schedules"],
        **{rule: broken[rule] for rule in RULES},
        "faults_fired": sum(fired.values()),
        **{f"fired_{kind}": times for kind, times in sorted(fired.items())},
        "peers": total["peers"],
        "steps": total["steps"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "schedules_per_s": total["schedules"] / wall_s,
    }


def show(seed: int) -> None:
    """One schedule, event by event: its plan, then (virtual seconds, peer, event, fields)."""
    trial = Trial(seed)
    outcome = trial.run()
    print(trial.plan.to_json())
    events = [(t, name, event, fields) for name, t, event, fields in trial.swarm.trace()]
    if trial.faults is not None:
        events += [
            (t, "*", f"FAULT {kind}", {"n": n, "whom": list(whom)}) for t, n, kind, whom in trial.faults.log
        ]
    for time_s, name, event, fields in sorted(events, key=lambda entry: entry[0]):
        print(f"{time_s:9.3f} {name:8} {event:14} {fields}")
    print(outcome)


def main() -> int:
    made = report.parser(__doc__ or "")
    made.add_argument("--seed", type=int, default=0, metavar="FIRST", help="the first seed")
    made.add_argument("--count", type=int, metavar="N", help="how many seeds (default 10000; quick 300)")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    made.add_argument("--trace", action="store_true", help="print every event of the first seed instead")
    made.add_argument(
        "--logs", type=Path, metavar="DIR", help="write the first seed's event logs, for skipswarm events"
    )
    options = made.parse_args()
    if options.trace:
        show(options.seed)
        return 0
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        trial = Trial(options.seed)
        print(trial.run())
        trial.swarm.save_logs(options.logs)
        return 0
    count = options.count or (300 if options.quick else 10_000)
    figures = figures_of(run_all(options.seed, count, options.workers), count)
    report.write("faults", figures, options.json)
    return int(any(figures[rule] for rule in RULES))


if __name__ == "__main__":
    sys.exit(main())
