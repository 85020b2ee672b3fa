"""Lower bounds on the makespan of any valid plan: how far a plan can be from the best one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from scheduler.instance import Instance
from scheduler.kernel import B, F, Floats


class Bounds(NamedTuple):
    """Seconds that no valid plan can beat, by what stands in its way."""

    busiest_stage_s: float
    """Computing the visits that coverage owes to a stage, split as well as its replicas allow, between the
    first that can reach it and the last that can still come home."""
    busiest_peer_s: float
    """An origin's own tasks for its microbatches."""
    busiest_uplink_s: float
    """Sending what those visits, or an origin's microbatches, send."""
    path_s: float
    """The capacity-aware critical path: an origin's microbatches, each at least as long as its quickest path,
    as many at once as it has slots."""

    @property
    def best_s(self) -> float:
        return max(self)


def bounds(instance: Instance) -> Bounds:
    """Lower bounds of ``instance``, averaging left out."""
    up_s: list[float] = instance.tables.up_s.tolist()
    stage_s, peer_s, uplink_s, path_s = 0.0, 0.0, 0.0, 0.0
    owed, steps_s = owed_visits(instance), _steps(instance)
    for stage in instance.alive_stages if owed else ():
        stage_s = max(stage_s, _stage_s(instance, stage, owed))
        uplink_s = max(uplink_s, _split([2 * up_s[p] for p in instance.by_stage[stage]], owed))
    for origin, count in instance.microbatches.items():
        if not count:
            continue
        p = instance.index[origin]
        spec = instance.peers[p]
        peer_s = max(peer_s, count * (spec.work_s + spec.loss_s))
        length = instance.required_length(origin)
        if length > 1:
            uplink_s = max(uplink_s, count * 2 * up_s[p])
        one_s = _quickest(instance, steps_s, p, length)
        # A microbatch holds its slot from its first forward to its last backward.
        path_s = max(path_s, spec.weight_s + max(one_s, count * one_s / spec.memory_slots))
    return Bounds(stage_s, peer_s, uplink_s, path_s)


def _stage_s(instance: Instance, stage: int, owed: int) -> float:
    """Until the replicas of ``stage`` have made ``owed`` visits, and the last of them is home."""
    specs = [instance.peers[p] for p in instance.by_stage[stage]]
    origins = [instance.peers[instance.index[origin]] for origin, n in instance.microbatches.items() if n]
    others = [q for s, group in enumerate(instance.by_stage) if s != stage for q in group]
    comes_s = min(instance.hop_s[q][p] for p in instance.by_stage[stage] for q in others)
    goes_s = min(instance.hop_s[p][q] for p in instance.by_stage[stage] for q in others)
    head_s = min(spec.forward_s for spec in origins) + comes_s
    tail_s = goes_s + min(spec.backward_s for spec in origins)
    committed_s = _split([spec.forward_s + spec.backward_s for spec in specs], owed) + tail_s
    return head_s + max(committed_s, _split([spec.work_s for spec in specs], owed))


def owed_visits(instance: Instance) -> int:
    """The least visits that a living stage other than 0 can have in a plan within the coverage tolerance."""
    alive = len(instance.alive_stages)
    if not alive or not instance.all_usable:
        return 0
    return max(0, math.ceil((instance.visits - (alive - 1) * instance.coverage_tolerance) / alive))


def _split(each_s: list[float], visits: int) -> float:
    """The least time in which servers that take ``each_s`` seconds a visit make whole ``visits`` together."""
    if not visits or min(each_s) == 0:
        return 0.0
    served = [0] * len(each_s)
    last_s = 0.0
    for _ in range(visits):
        i = min(range(len(each_s)), key=lambda i: (served[i] + 1) * each_s[i])
        served[i] += 1
        last_s = max(last_s, served[i] * each_s[i])
    return last_s


def _steps(instance: Instance) -> Floats:
    """``[n, n]``: seconds that going on from row to column adds to a path, there and back and its compute;
    infinite where no path may."""
    tables = instance.tables
    there_and_back_s = tables.hop_s + tables.hop_s.T
    computing_s = tables.task_s[:, F] + tables.task_s[:, B]
    up = tables.usable & (tables.stage[:, None] < tables.stage)
    return np.where(up, there_and_back_s + computing_s, np.inf)


def _quickest(instance: Instance, steps_s: Floats, origin: int, length: int) -> float:
    """From first forward to last backward of the quickest path of ``length`` stages, nothing else going
    on."""
    tables = instance.tables
    home = instance.peers[origin]
    alone_s = home.forward_s + home.loss_s + home.backward_s
    if length == 1:
        return alone_s
    reach_s = alone_s + steps_s[origin]
    for _ in range(length - 2):
        reach_s = (reach_s[:, None] + steps_s).min(axis=0)
    back_s = np.where(tables.usable[:, origin], tables.hop_s[:, origin] + tables.hop_s[origin], np.inf)
    return float((reach_s + back_s).min())
