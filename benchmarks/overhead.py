"""What fault tolerance costs a swarm without faults: the demo's swarm as it is, against the same one bare.

Bare (``peer/emulation.py``) sends no heartbeats, drops what it sent at once and logs nothing but its steps;
the ledger of what counts and the step's close stay, for without them there is no step. Both take turns.
``overhead``: share of tokens/s that is lost; ``cpu_overhead``: of CPU seconds for a token that are added, the
steadier figure on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import dataclass

from benchmarks import report
from benchmarks.runs import SwarmRun, manifest_text

PEERS = 8
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Rate:
    """Of one run: tokens/s, and CPU seconds of all peers and their p2pds for a million tokens."""

    tokens_per_s: float
    cpu_s: float


async def train(steps: int, *, bare: bool) -> Rate:
    """``steps`` steps after the warm-up."""
    async with SwarmRun(
        manifest_text(total_steps=1_000_000), PEERS, settings=lambda stage: {"bare": bare}
    ) as run:

        def made(count: int) -> bool:
            return len([name for name, _ in run.of("stepped") if name == "peer0"]) >= count

        await run.until(lambda: made(WARMUP_STEPS))
        cpu_s = run.cpu_s()
        await run.until(lambda: made(WARMUP_STEPS + steps))
        cpu_s = run.cpu_s() - cpu_s
        mine = [event for name, event in run.of("stepped") if name == "peer0"]
    timed = mine[WARMUP_STEPS:]
    tokens = sum(event["tokens"] for event in timed)
    return Rate(tokens / (timed[-1]["t"] - mine[WARMUP_STEPS - 1]["t"]), cpu_s / tokens * 1e6)


def figures_of(rounds: list[tuple[Rate, Rate]]) -> dict[str, float]:
    """Medians over pairs (as it is, bare)."""
    return {
        "overhead": statistics.median(1 - whole.tokens_per_s / bare.tokens_per_s for whole, bare in rounds),
        "cpu_overhead": statistics.median(whole.cpu_s / bare.cpu_s - 1 for whole, bare in rounds),
        "tokens_per_s": statistics.median(whole.tokens_per_s for whole, _ in rounds),
        "bare_tokens_per_s": statistics.median(bare.tokens_per_s for _, bare in rounds),
        "cpu_s_per_mtoken": statistics.median(whole.cpu_s for whole, _ in rounds),
        "bare_cpu_s_per_mtoken": statistics.median(bare.cpu_s for _, bare in rounds),
    }


def main() -> None:
    made: argparse.ArgumentParser = report.parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    steps, rounds = (20, 1) if options.quick else (80, options.rounds)
    results = []
    for number in range(rounds):
        pair = {}
        for bare in (False, True) if number % 2 == 0 else (True, False):
            pair[bare] = asyncio.run(train(steps, bare=bare))
            print(f"round {number + 1}, {'bare' if bare else 'whole'}: {pair[bare]}", flush=True)
        results.append((pair[False], pair[True]))
    report.write("overhead", figures_of(results), options.json)


if __name__ == "__main__":
    main()
