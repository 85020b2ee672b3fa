"""The timeline as Chrome trace events, for https://ui.perfetto.dev (Google, "Trace Event Format", 2016).

A process for each stage, a thread for each peer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TextIO

from swarm.timeline.base import Event
from swarm.timeline.clocks import tasks_of
from swarm.timeline.merge import Timeline, short
from swarm.timeline.read import LINES_A_REPORT, Entry
from swarm.timeline.schema import Averaged, Committed, Computed, Summed

NO_INSTANTS = frozenset({"opened", "computed", "received", "sent", "stale", "planned", "summed", "averaged"})
"""They are slices, or of no use alone."""
BESIDE = 1 << 20
"""The process of peers whose stage is not known, as the bootstrap node."""

Row = dict[str, Any]
Task = tuple[tuple[int, int, int], str, str]
"""((step, index, attempt), peer, kind)"""


class _Slices:
    """Slices of the threads, none of which overlaps another of its thread, whatever a log says."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._ends: dict[tuple[int, int], int] = defaultdict(int)

    def us(self, at_s: float) -> int:
        """Microseconds since the timeline's beginning."""
        return max(0, round((at_s - self._begin_s) * 1e6))

    def row(self, thread: tuple[int, int], from_s: float, to_s: float, name: str, args: Row) -> Row:
        end = self.us(to_s)
        begin = min(max(self.us(from_s), self._ends[thread]), end)
        self._ends[thread] = end
        return {
            "ph": "X",
            "name": name,
            "cat": "compute",
            "ts": begin,
            "dur": end - begin,
            **_place(thread),
            "args": args,
        }


def _place(thread: tuple[int, int]) -> Row:
    return {"pid": thread[0], "tid": thread[1]}


def write(timeline: Timeline, out: TextIO, progress: Callable[[int], None] = lambda rows: None) -> int:
    """Write one JSON object, an event a line; how many events. ``progress`` hears of it now and then."""
    count = 0
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    for row in rows(timeline):
        out.write(("\n" if count == 0 else ",\n") + json.dumps(row, separators=(",", ":"), allow_nan=False))
        count += 1
        if count % LINES_A_REPORT == 0:
            progress(count)
    out.write("\n]}\n")
    return count


def rows(timeline: Timeline) -> Iterator[Row]:
    """Names of processes and threads, then slices and instants in order, then the arrows."""
    threads = _threads(timeline)
    yield from _names(threads)
    slices = _Slices(timeline.entries[0].at_s)
    places: dict[Task, Row | None] = {}
    summed_s: dict[str, float] = {}
    for entry in timeline.entries:
        event, thread = entry.event, threads[entry.peer, entry.stage]
        if isinstance(event, Computed):
            row = slices.row(
                thread,
                entry.at_s - event.run_s,
                entry.at_s,
                f"{event.kind} {event.index}",
                {
                    "step": event.step,
                    "index": event.index,
                    "attempt": event.attempt,
                    "queued_ms": event.wait_s * 1e3,
                },
            )
            task = ((event.step, event.index, event.attempt), entry.peer, event.kind)
            places[task] = None if task in places else row
            yield row
        elif isinstance(event, Summed):
            summed_s[entry.peer] = entry.at_s
        elif isinstance(event, Averaged):
            from_s = summed_s.pop(entry.peer, entry.at_s)
            yield slices.row(
                thread, from_s, entry.at_s, f"averaging {event.step}", {"members": len(event.members)}
            )
        if entry.name not in NO_INSTANTS:
            yield _instant(entry, thread, slices)
    yield from _arrows(timeline, places)


def _threads(timeline: Timeline) -> dict[tuple[str, int], tuple[int, int]]:
    """(peer, stage) -> (process, thread)."""
    stages = timeline.stages
    seen = sorted({(entry.peer, entry.stage) for entry in timeline.entries})
    numbers = {peer: number for number, peer in enumerate(sorted({peer for peer, _ in seen}), start=1)}
    return {
        (peer, stage): (
            (stage if stage >= 0 else min(stages.get(peer, BESIDE), BESIDE)) + 1,
            numbers[peer],
        )
        for peer, stage in seen
    }


def _names(threads: dict[tuple[str, int], tuple[int, int]]) -> Iterator[Row]:
    for process in sorted({process for process, _ in threads.values()}):
        name = "no stage" if process > BESIDE else f"stage {process - 1}"
        common = {"ph": "M", **_place((process, 0))}
        yield {"name": "process_name", **common, "args": {"name": name}}
        yield {"name": "process_sort_index", **common, "args": {"sort_index": process}}
    for thread, peer in sorted({(thread, peer) for (peer, _), thread in threads.items()}):
        yield {"ph": "M", "name": "thread_name", **_place(thread), "args": {"name": short(peer)}}


def _instant(entry: Entry, thread: tuple[int, int], slices: _Slices) -> Row:
    args = {key: value for key, value in _plain(entry.event).items() if not isinstance(value, list)}
    other = args.get("lost") or args.get("other")
    name = f"{entry.name} {short(other)}" if other else entry.name
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "cat": entry.name,
        "ts": slices.us(entry.at_s),
        **_place(thread),
        "args": args,
    }


def _plain(event: Event) -> Row:
    return event.model_dump(mode="json", exclude_none=True)


def _arrows(timeline: Timeline, places: dict[Task, Row | None]) -> Iterator[Row]:
    """From each task of a committed microbatch to the next."""
    arrow = 0
    for entry in timeline.entries:
        event = entry.event
        if not isinstance(event, Committed):
            continue
        key = (event.step, event.index, event.attempt)
        chain = [places.get((key, peer, kind)) for peer, kind in tasks_of(event.path)]
        for before, after in pairwise([row for row in chain if row is not None]):
            leaves, comes = before["ts"] + before["dur"], after["ts"]
            if comes < leaves or (before["pid"], before["tid"]) == (after["pid"], after["tid"]):
                continue  # a replacement computed later what its successor had computed before
            arrow += 1
            common = {"name": f"microbatch {event.index}", "cat": "hop", "id": arrow}
            there, here = (before["pid"], before["tid"]), (after["pid"], after["tid"])
            # Inside the slices, since an arrow is tied to the slice around its time.
            yield {"ph": "s", **common, "ts": max(before["ts"], leaves - 1), **_place(there)}
            yield {"ph": "f", "bp": "e", **common, "ts": comes, **_place(here)}
