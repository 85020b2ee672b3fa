"""A swarm without faults against one process: tokens/s on the same cores, and where the CPU seconds go.

The swarm is the demo's: a bootstrap node and 8 peers with their p2pds, all on this machine. The one process
trains the same model on the same microbatches with one of the stages 1..3 skipped by each, with plain
autograd and torch's AdamW, on the number of threads that serves it best. Both take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

import torch

from benchmarks import report
from benchmarks.runs import SwarmRun, manifest_text
from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.manifest import Manifest
from swarm.model.layout import build_stage, initialise, layout_of
from swarm.model.llama import summed_loss

PEERS = 8
WARMUP_STEPS = 5
LIMIT_S = 600.0


def path_of(index: int, stages: int, length: int) -> tuple[int, ...]:
    """Stages of a microbatch: as many as the swarm visits, each of the others skipped in its turn."""
    others = list(range(1, stages))
    for turn in range(stages - length):
        others.remove(others[(index + turn) % len(others)])
    return (0, *others)


# -- one process -------------------------------------------------------------------------------------------


def train_alone(steps: int, threads: int) -> float:
    """Tokens/s of one process with so many torch threads."""
    torch.set_num_threads(threads)
    manifest = Manifest.from_toml(manifest_text(total_steps=steps), researcher="00" * 32)
    stages = []
    for stage in range(len(manifest.stages)):
        module = build_stage(manifest, stage)
        layout = layout_of(module)
        flat = torch.empty(layout.total)
        initialise(manifest, layout, flat)
        module.to_empty(device="cpu")
        module.load_state_dict({slot.name: slot.view(flat) for slot in layout.slots})
        stages.append(module)
    parameters = [parameter for module in stages for parameter in module.parameters()]
    rate = manifest.optimizer.learning_rate
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=manifest.optimizer.weight_decay)
    sampler = Sampler(manifest, load_corpus(manifest.data.corpus))
    count = 2 * manifest.microbatches_per_origin
    tokens_a_step = count * manifest.microbatch_size * manifest.model.context
    start_s = 0.0
    for step in range(steps):
        if step == WARMUP_STEPS:
            start_s = perf_counter()
        for index in range(count):
            tokens, labels = sampler.training(step, index)
            x = stages[0].embed(tokens)
            for stage in path_of(index, len(stages), manifest.path_length):
                x = stages[stage].blocks(x)
            (summed_loss(stages[0].head(x), labels) / tokens_a_step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, manifest.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return tokens_a_step * (steps - WARMUP_STEPS) / (perf_counter() - start_s)


def alone(steps: int, threads: int) -> float:
    """The same in a fresh process, as the swarm's peers are."""
    command = [sys.executable, "-m", "benchmarks.healthy", "--alone", str(steps), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


# -- the swarm ---------------------------------------------------------------------------------------------


async def train_swarm(steps: int) -> dict[str, Any]:
    """Tokens/s after the warm-up, seconds to the first step, CPU seconds by part, memory."""
    run = SwarmRun(manifest_text(total_steps=steps), PEERS, settings=None, usage=True)
    began_s = run.clock.now()
    async with run:
        await run.until(lambda: run.of("stepped"), LIMIT_S)
        first_step_s = run.clock.now() - began_s
        await run.until(lambda: not run.swarm.living_peers(), LIMIT_S)
        stepped = [event for name, event in run.of("stepped") if name == "peer0"]
        usages = [json.loads(run.usage_path(name).read_text()) for name in run.stages]
    if len(stepped) != steps:
        raise RuntimeError(f"the swarm made {len(stepped)} of {steps} steps")
    timed = stepped[WARMUP_STEPS:]
    tokens = sum(event["tokens"] for event in timed)
    return {
        "tokens_per_s": tokens / (timed[-1]["t"] - stepped[WARMUP_STEPS - 1]["t"]),
        "first_step_s": first_step_s,
        "tokens": sum(event["tokens"] for event in stepped[1:]),
        "usages": usages,
    }


def figures_of(rounds: list[tuple[float, dict[str, Any]]]) -> dict[str, float]:
    """Medians over the rounds; CPU seconds are for a million tokens, all 8 peers together."""
    swarm = [result for _, result in rounds]
    figures = {
        "ratio_1m": statistics.median(result["tokens_per_s"] / single for single, result in rounds),
        "swarm_tokens_per_s": statistics.median(result["tokens_per_s"] for result in swarm),
        "single_tokens_per_s": statistics.median(single for single, _ in rounds),
        "first_step_s": statistics.median(result["first_step_s"] for result in swarm),
    }
    keys = sorted({key for result in swarm for usage in result["usages"] for key in usage})
    for key in keys:
        if key.endswith("_mib"):
            figures[f"peer_{key}"] = statistics.median(u[key] for r in swarm for u in r["usages"])
        else:
            sums = [
                sum(usage.get(key, 0.0) for usage in result["usages"]) / result["tokens"] * 1e6
                for result in swarm
            ]
            figures[f"cpu_{key}_per_mtoken"] = statistics.median(sums)
    return figures


def main() -> None:
    made = report.parser(__doc__ or "")
    made.add_argument("--alone", type=int, metavar="STEPS", help="only the one process; prints tokens/s")
    made.add_argument("--threads", type=int, default=1)
    options = made.parse_args()
    if options.alone:
        print(train_alone(options.alone, options.threads))
        return
    steps, rounds = (25, 1) if options.quick else (80, 3)
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, cores})
    best = max(counts, key=lambda threads: alone(15, threads))
    print(f"one process does best with {best} of {cores} threads")
    results = []
    for number in range(rounds):
        single = alone(steps, best)
        result = asyncio.run(train_swarm(steps))
        print(f"round {number + 1}: one process {single:,.0f}, swarm {result['tokens_per_s']:,.0f} tokens/s")
        results.append((single, result))
    report.write("healthy", figures_of(results), options.json)


if __name__ == "__main__":
    main()
