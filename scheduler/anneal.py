"""Simulated annealing of paths, send order and, if wanted, places, by number of evaluations or by a clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.kernel import MEAN_WEIGHT, Search, anneal
from scheduler.timeline import Score, Simulator, as_table

Hops = list[int]
"""A path by position in ``instance.peers``, origin first."""
_HOT, _COLD = 0.0015, 0.0002
"""Temperatures at the begin and the end, as shares of the makespan: the best in the mean of those tried on
SkipPipe's instances with one and with 60 CPU-seconds."""
_CLIMB_ONLY = 2000
"""With fewer evaluations than this there is no time to go downhill first."""
_STRETCH_S = 0.02
"""About how long is searched between two looks at the clock."""


class Found(NamedTuple):
    """``stage[p]`` is what peer p hosts: as in the instance, unless places were free."""

    paths: list[Hops]
    score: Score
    stage: list[int]
    evaluations: int


def improve(
    simulator: Simulator,
    paths: Sequence[Hops],
    score: Score,
    *,
    seed: int,
    iterations: int,
    left_s: Callable[[], float] | None = None,
    free: bool = False,
) -> Found:
    """The best schedule found in ``iterations`` evaluations from ``paths``, which ``score`` belongs to; or,
    with ``left_s``, until that says that no seconds are left.

    Visits of stages stay as even as they are, or within one. With ``free`` peers exchange places too, origins
    as well; ``paths`` are then those of the peers in their new places.
    """
    instance = simulator.instance
    stage = [spec.stage for spec in instance.peers]
    if not paths or not (iterations or left_s):
        return Found(list(paths), score, stage, 0)
    search = _begin(simulator, paths, score, seed)
    room = simulator.room(*search.paths.shape)
    tables = instance.tables
    evaluations = 0

    def go_on(count: int, share: float) -> None:
        nonlocal evaluations
        heat_s = score.makespan_s * _HOT * (_COLD / _HOT) ** share
        if left_s is None and iterations < _CLIMB_ONLY:
            heat_s = 0.0
        evaluations += anneal(search, tables, room, free, heat_s, count)

    if left_s is None:
        stretch = max(1, iterations // 100) if iterations >= _CLIMB_ONLY else iterations
        for done in range(0, iterations, stretch):
            go_on(min(stretch, iterations - done), done / iterations)
    else:
        whole_s = before_s = left_s()
        stretch = 1
        while before_s > 0:
            go_on(stretch, min(1.0, max(0.0, 1 - before_s / whole_s)))
            now_s = left_s()
            if not evaluations:
                break  # nothing can be changed
            stretch = max(1, int(stretch * _STRETCH_S / max(before_s - now_s, _STRETCH_S / 4)))
            before_s = now_s
    best = [row[:length].tolist() for row, length in zip(search.best_paths, search.best_lengths, strict=True)]
    return Found(
        best, Score(float(search.score[1]), float(search.score[2])), search.best_stage.tolist(), evaluations
    )


def _begin(simulator: Simulator, paths: Sequence[Hops], score: Score, seed: int) -> Search:
    table, lengths = as_table(paths)
    instance, tables = simulator.instance, simulator.tables
    visits = np.zeros(instance.stages, np.int64)
    for path in paths:
        for p in path[1:]:
            visits[tables.stage[p]] += 1
    alive = list(instance.alive_stages)
    counts = visits[alive]
    spread = max(1, int(counts.max() - counts.min())) if alive else 1
    cost_s = score.makespan_s + MEAN_WEIGHT * score.total_s / len(paths)
    digest = hashlib.sha256(str(seed).encode()).digest()
    return Search(
        paths=table,
        lengths=lengths,
        stage=tables.stage.copy(),
        replicas=tables.replicas.copy(),
        hosts=tables.hosts,
        visits=visits,
        spread=np.array([spread]),
        best_paths=table.copy(),
        best_lengths=lengths.copy(),
        best_stage=tables.stage.copy(),
        random=np.frombuffer(digest[:8], np.uint64) | np.uint64(1),
        score=np.array([cost_s, score.makespan_s, score.total_s, simulator.averaging_s]),
    )
