"""Which stage a newcomer should host, from what it can see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from scheduler.errors import SchedulerError


class Hosted(NamedTuple):
    """A peer that hosts a stage; ``work_s``: its seconds for one microbatch in all, 0 if not known."""

    stage: int
    work_s: float = 0.0


def visits_per_microbatch(stage: int, *, stages: int, path_length: int) -> float:
    """How often a microbatch visits ``stage`` in the mean: always stage 0, the others in their turn."""
    return 1.0 if stage == 0 else (path_length - 1) / (stages - 1)


def choose_stage(
    hosted: Iterable[Hosted],
    *,
    stages: int,
    path_length: int,
    start_replicas: int = 1,
    work_s: Iterable[float] = (),
    ahead: int = 0,
) -> int:
    """The stage most in need: one with fewer than ``start_replicas`` first, the emptiest before others; then
    the one with most visits for its capacity.

    ``work_s[s]`` is the relative work of a visit to stage s (its layers, or seconds on one machine; equal if
    left out), which weighs the need of uneven stages. ``ahead`` newcomers are known to choose at the same
    time and come first, in an order that all agree on: they are given their stages before ours is chosen.
    Ties go to the lowest stage. Raises SchedulerError if a stage is out of range.
    """
    weights = tuple(work_s) or (1.0,) * stages
    if len(weights) != stages or not 1 <= path_length <= stages:
        raise SchedulerError(f"{len(weights)} weights and a path_length of {path_length} for {stages} stages")
    speeds: list[list[float]] = [[] for _ in range(stages)]
    for peer in hosted:
        if not 0 <= peer.stage < stages:
            raise SchedulerError(f"a peer hosts stage {peer.stage} of {stages}")
        # A peer's speed is what it does of its own stage's work in a second; 0 stands for not known.
        speeds[peer.stage].append(weights[peer.stage] / peer.work_s if peer.work_s > 0 else 0.0)
    known = sorted(speed for stage in speeds for speed in stage if speed > 0)
    usual = known[len(known) // 2] if known else 1.0
    count = [len(stage) for stage in speeds]
    capacity = [sum(speed or usual for speed in stage) for stage in speeds]
    demand = [
        visits_per_microbatch(stage, stages=stages, path_length=path_length) * weights[stage]
        for stage in range(stages)
    ]

    def need(stage: int) -> tuple[int, float, int]:
        load = demand[stage] / capacity[stage] if count[stage] else demand[stage]
        return (min(count[stage], start_replicas), -load, stage)

    for _ in range(ahead):
        chosen = min(range(stages), key=need)
        count[chosen] += 1
        capacity[chosen] += usual
    return min(range(stages), key=need)
