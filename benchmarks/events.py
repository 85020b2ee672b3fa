"""The event log: CPU microseconds an event, its share of a core at 40 microbatch hops a second, merging.

A hop is a microbatch that one peer computes: forward, backward and weights, an event each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

from benchmarks import report
from swarm.clock import SimClock
from swarm.events import JsonLinesEvents
from swarm.timeline.merge import merge

PEER = "12D3KooW" + "x" * 44
HOPS_PER_S = 40
EVENTS_A_HOP = 3
ROUNDS = 7


def cpu_us(count: int, emit: Callable[[int], None]) -> float:
    """CPU microseconds a call, the best of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began_s = process_time()
        for number in range(count):
            emit(number)
        rounds.append((process_time() - began_s) / count * 1e6)
    return min(rounds)


def measure(folder: Path, count: int) -> dict[str, float]:
    """Writes below ``folder``, reads it again."""
    path = folder / "a.jsonl"
    clock = SimClock()
    log = JsonLinesEvents(path, PEER, clock)
    hops = [f"{stage}:{PEER}" for stage in range(3)]

    def frequent(number: int) -> None:
        log.emit(
            "computed",
            kind="forward",
            step=100,
            index=number,
            attempt=1 << 16,
            wait_s=0.012345,
            run_s=0.023456,
        )
        if number % (HOPS_PER_S * EVENTS_A_HOP) == 0:
            clock.run_for(1.0)

    def rare(number: int) -> None:
        log.emit("started", step=100, index=number, attempt=1 << 16, path=hops)

    frequent_us = cpu_us(count, frequent)
    log.close()
    bytes_each = path.stat().st_size / (count * ROUNDS)
    log = JsonLinesEvents(path, PEER, clock)
    rare_us = cpu_us(count, rare)
    log.close()
    began_s = process_time()
    merged = len(merge(folder).entries)
    return {
        "frequent_us": frequent_us,
        "rare_us": rare_us,
        "share_percent": HOPS_PER_S * EVENTS_A_HOP * frequent_us / 1e4,
        "bytes_a_frequent_event": bytes_each,
        "merged_events_per_s": merged / (process_time() - began_s),
    }


def main() -> None:
    options = report.options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), 2_000 if options.quick else 20_000)
    report.write("events", figures, options.json)


if __name__ == "__main__":
    main()
