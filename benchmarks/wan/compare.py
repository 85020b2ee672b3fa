"""The policies against the full pipeline, by the same daemons on the same emulated WAN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.wan.profiles import Profile
from benchmarks.wan.training import POLICIES, Training, train

SKIPS = (0.25, 0.33, 0.5)
STAGES = (6, 4, 5)
"""The first that can leave out whole stages in the ratio asked for."""
CLOSE = 0.01


def stages_for(skip: float) -> int:
    """How many stages there are to be. Raises StopIteration for a ratio that none of ``STAGES`` has."""
    return next(count for count in STAGES if abs(skip * count - round(skip * count)) < CLOSE * count)


def trainings(base: Training, skips: Sequence[float]) -> list[Training]:
    """Those to run: each ratio by each policy that skips, and the full pipeline of as many stages."""
    chosen: list[Training] = []
    for skip in skips:
        for policy in POLICIES.values():
            one = replace(base, policy=policy, stages=stages_for(skip), skip=skip if policy.skips else 0.0)
            if one not in chosen:
                chosen.append(one)
    return chosen


async def compare(
    profile: Profile, base: Training, *, skips: Sequence[float] = SKIPS, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Step times of all, and by how much each is less than the full pipeline's: ``gcp12_reduction_33`` for
    the daemons' own plans, with the policy's name behind for others. Raises as ``train``."""
    results = {}
    for training in trainings(base, skips):
        say(f"{training.policy.name}, {training.path_length} of {training.stages} stages")
        results[training] = await train(training, profile, say=say)
        say("  ".join(f"{key} {value:.4g}" for key, value in results[training].items()))
    figures = {}
    for training, result in results.items():
        name = f"{training.policy.name}_{training.path_length}of{training.stages}"
        for key in ("step_s", "step_least_s", "step_most_s", "work_s", "predicted_s", "tokens_per_s"):
            figures[f"{profile.name}_{name}_{key}"] = result[key]
        if training.policy.skips:
            whole = replace(training, policy=POLICIES["full_pipeline"], skip=0.0)
            behind = "" if training.policy.name == "plan" else f"_{training.policy.name}"
            key = f"{profile.name}_reduction_{round(100 * training.skip)}{behind}"
            figures[key] = 1 - result["step_s"] / results[whole]["step_s"]
    return figures
