"""The critical path of a step: which task waited for which, from the last that ended to the beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.timeline import Path, Row, Timeline

_SAME_S = 1e-9
"""Two times that differ by less, relative to the makespan, are one."""
TRANSFER = "T"


class Segment(NamedTuple):
    """A stretch of the critical path. ``kind``: a ``Row``'s, or T: on the way from ``peer`` to ``target``
    (which includes waiting for busy links)."""

    kind: str
    peer: str
    target: str
    microbatch: int
    start_s: float
    end_s: float


def critical_path(timeline: Timeline, paths: Sequence[Path]) -> tuple[Segment, ...]:
    """Segments from 0 to the makespan, each beginning where the one before ends.

    A task begins when its peer has ended what it did before, or when its input comes, whichever is later: a
    slot is freed by a task of the same peer. Averaging begins when the last task of all has ended. ``paths``
    are those that ``timeline`` was made of.
    """
    if not timeline.rows:
        return ()
    walk = _Walk(timeline, paths)
    segments: list[Segment] = []
    row: Row | None = max(timeline.rows, key=lambda row: (row.end_s, row.start_s))
    while row is not None:
        segments.append(Segment(row.kind, row.peer, row.peer, row.microbatch, row.start_s, row.end_s))
        before = walk.waited_for(row)
        if before is not None and row.kind != "A" and before.peer != row.peer:
            segments.append(
                Segment(TRANSFER, before.peer, row.peer, row.microbatch, before.end_s, row.start_s)
            )
        row = before
    return tuple(reversed(segments))


class _Walk:
    """What each task came after."""

    def __init__(self, timeline: Timeline, paths: Sequence[Path]) -> None:
        self.same_s = _SAME_S * max(1e-9, timeline.makespan_s)
        self._paths = paths
        self._of: dict[tuple[str, str, int], Row] = {}
        self._before: dict[Row, Row] = {}
        last: dict[str, Row] = {}
        # The simulator tells of tasks in an order in which none comes before what it waits for; it decides
        # between those that begin at one instant, some of which may take no time at all.
        for row in sorted(timeline.rows, key=lambda row: row.start_s):
            self._of[row.kind, row.peer, row.microbatch] = row
            if row.peer in last:
                self._before[row] = last[row.peer]
            last[row.peer] = row
        self._last = max(
            (row for row in timeline.rows if row.kind != "A"), key=lambda row: row.end_s, default=None
        )

    def waited_for(self, row: Row) -> Row | None:
        """The task whose end, or what it sent, let ``row`` begin; None at the step's beginning."""
        if row.kind == "A":
            return self._last
        before = self._before.get(row)
        if before is not None and row.start_s - before.end_s <= self.same_s:
            return before
        return self._input_of(row)

    def _input_of(self, row: Row) -> Row | None:
        path, mb = self._paths[row.microbatch], row.microbatch
        hop = path.index(row.peer)
        if row.kind == "F":
            return None if hop == 0 else self._of["F", path[hop - 1], mb]
        if row.kind == "L":
            return self._of["F", path[-1], mb]
        if row.kind == "B":
            return self._of["L", path[0], mb] if hop == len(path) - 1 else self._of["B", path[hop + 1], mb]
        return self._of["B", path[0], mb]
