"""A simulated step as a picture, before anything draws it: lanes of peers, bars of tasks, ways between."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from scheduler.instance import Instance
from scheduler.simulate.critical import TRANSFER, Segment
from scheduler.timeline import Path, Row, Timeline

KINDS = {"F": "forward", "B": "backward", "W": "weight gradient", "L": "loss", "A": "averaging"}
CRITICAL = "#d1242f"
_HUES = ("#4477aa", "#ee8844", "#449966", "#aa5599", "#c9a227", "#3aa6b9", "#8a6d4b", "#7a7fd1")
_AVERAGING_SHARE = 0.15
"""Of the axis at most: an averaging of minutes would leave no room for what happens before it."""


def told_s(seconds: float) -> str:
    """A time for people: three digits, or whole seconds."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


class Lane(NamedTuple):
    """One peer, the ``replica``-th of its stage."""

    peer: str
    stage: int
    replica: int


class Bar(NamedTuple):
    """A task in a lane."""

    lane: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float
    critical: bool


class Way(NamedTuple):
    """What is sent from the end of one task to the begin of the next: it travels, then waits there."""

    microbatch: int
    source: int
    target: int
    start_s: float
    end_s: float
    backward: bool
    critical: bool


class Chart(NamedTuple):
    """Lanes in order of stage. ``visits[m][s]``: the lane that microbatch m visits in stage s, or None if it
    skips that stage."""

    lanes: tuple[Lane, ...]
    stages: int
    bars: tuple[Bar, ...]
    ways: tuple[Way, ...]
    visits: tuple[tuple[int | None, ...], ...]
    computed_s: float
    """When the last task but averaging has ended."""
    makespan_s: float

    @property
    def squeeze(self) -> float:
        """Seconds of averaging are drawn this much shorter than others."""
        averaging_s = self.makespan_s - self.computed_s
        room_s = _AVERAGING_SHARE * self.computed_s
        return min(1.0, room_s / averaging_s) if averaging_s > 0 and room_s > 0 else 1.0

    def x(self, at_s: float) -> float:
        """Where a time stands on the axis, in seconds as drawn."""
        return min(at_s, self.computed_s) + max(0.0, at_s - self.computed_s) * self.squeeze

    def tell(self, bar: Bar) -> str:
        """What a reader who points at ``bar`` wants to know."""
        lane = self.lanes[bar.lane]
        what = KINDS[bar.kind] + (f" of microbatch {bar.microbatch}" if bar.microbatch >= 0 else "")
        critical = "\non the critical path" if bar.critical else ""
        return (
            f"{what}\n{lane.peer}, stage {lane.stage}\n{bar.start_s:.3f} to {bar.end_s:.3f} s "
            f"({bar.end_s - bar.start_s:.3f} s){critical}"
        )


def chart(
    instance: Instance, paths: Sequence[Path], timeline: Timeline, critical: Sequence[Segment]
) -> Chart:
    """The picture of ``timeline``, which is that of ``paths``: a bar for each of its rows."""
    lanes = tuple(
        Lane(instance.peers[p].peer, stage, replica)
        for stage, group in enumerate(instance.by_stage)
        for replica, p in enumerate(group)
    )
    lane_of = {lane.peer: number for number, lane in enumerate(lanes)}
    marked = {(s.kind, s.peer, s.microbatch) for s in critical if s.kind != TRANSFER}
    sent = {(s.peer, s.target, s.microbatch, s.start_s) for s in critical if s.kind == TRANSFER}
    bars = tuple(
        Bar(
            lane_of[row.peer],
            row.kind,
            row.microbatch,
            row.start_s,
            row.end_s,
            (row.kind, row.peer, row.microbatch) in marked,
        )
        for row in timeline.rows
    )
    rows = {(row.kind, row.peer, row.microbatch): row for row in timeline.rows}
    visits: list[tuple[int | None, ...]] = []
    ways: list[Way] = []
    for mb, path in enumerate(paths):
        stage_of = {lanes[lane_of[peer]].stage: lane_of[peer] for peer in path}
        visits.append(tuple(stage_of.get(stage) for stage in range(instance.stages)))
        for before, after in pairwise(tasks_of(rows, path, mb)):
            if before.peer != after.peer:
                key = (before.peer, after.peer, mb, before.end_s)
                ways.append(
                    Way(
                        mb,
                        lane_of[before.peer],
                        lane_of[after.peer],
                        before.end_s,
                        after.start_s,
                        after.kind == "B",
                        key in sent,
                    )
                )
    computed_s = max((row.end_s for row in timeline.rows if row.kind != "A"), default=0.0)
    return Chart(lanes, instance.stages, bars, tuple(ways), tuple(visits), computed_s, timeline.makespan_s)


def tasks_of(rows: Mapping[tuple[str, str, int], Row], path: Path, mb: int) -> list[Row]:
    """One microbatch's tasks in order, without weight gradients. ``rows`` are by (kind, peer, microbatch)."""
    forwards = [rows["F", peer, mb] for peer in path]
    backwards = [rows["B", peer, mb] for peer in reversed(path)]
    return [*forwards, rows["L", path[0], mb], *backwards]


def colour(stage: int, replica: int, kind: str) -> str:
    """``#rrggbb``: a hue for each stage, a shade for each replica; backwards darker, weights paler."""
    if kind == "L":
        return "#8b929c"
    base = _HUES[stage] if stage < len(_HUES) else _spread(stage)
    red, green, blue = (int(base[i : i + 2], 16) / 255 for i in (1, 3, 5))
    lift = 0.10 * (replica % 4)  # of the way to white
    if kind == "B":
        lift -= 0.42
    elif kind == "W":
        lift += 0.50
    elif kind == "A":
        lift += 0.68
    target = 1.0 if lift > 0 else 0.0
    share = min(0.85, abs(lift))
    return "#" + "".join(f"{round(255 * (c + (target - c) * share)):02x}" for c in (red, green, blue))


def _spread(stage: int) -> str:
    """Hues as far apart as the golden angle makes them."""
    rgb = colorsys.hls_to_rgb((stage * 0.381966) % 1.0, 0.5, 0.45)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)
