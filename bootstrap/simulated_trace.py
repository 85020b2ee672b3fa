"""A simulated step as a Chrome trace: told as the event log that its peers would write."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from scheduler.simulate.chart import tasks_of
from scheduler.simulate.estimate import Solved
from scheduler.timeline import Row
from swarm.errors import UserError
from swarm.timeline import trace
from swarm.timeline.base import Event
from swarm.timeline.merge import Timeline
from swarm.timeline.read import Entry
from swarm.timeline.schema import Averaged, Began, Committed, Computed, Summed

_KINDS = {"F": "forward", "B": "backward", "W": "weight", "L": "loss"}


def write_trace(solved: Solved, path: Path) -> int:
    """Write the step's trace; how many rows it has. Raises UserError if the file cannot be written."""
    timeline = Timeline(_entries(solved), {}, Counter(), 0)
    try:
        with path.open("w", encoding="utf-8") as file:
            return trace.write(timeline, file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another file with --trace") from None


def _entries(solved: Solved) -> list[Entry]:
    instance, plan, timeline = solved.instance, solved.plan, solved.timeline
    stage_of = {spec.peer: spec.stage for spec in instance.peers}

    def entry(at_s: float, peer: str, event: Event) -> Entry:
        return Entry(at_s, peer, stage_of[peer], type(event).__name__.lower(), event)

    found = [entry(0.0, peer, Began(stage=stage, incarnation=1)) for peer, stage in stage_of.items()]
    waits = _waits(solved)
    for row in timeline.rows:
        if row.kind == "A":
            replicas = [instance.peers[p].peer for p in instance.by_stage[stage_of[row.peer]]]
            averaged = Averaged(step=0, stage=stage_of[row.peer], members=replicas, digest="")
            found.append(entry(row.start_s, row.peer, Summed(step=0, order=[])))
            found.append(entry(row.end_s, row.peer, averaged))
        else:
            found.append(
                entry(row.end_s, row.peer, _computed(row, waits[row.kind, row.peer, row.microbatch]))
            )
    for index, (path, at_s) in enumerate(zip(plan.paths, timeline.finish_s, strict=True)):
        hops = [f"{stage_of[peer]}:{peer}" for peer in path]
        found.append(entry(at_s, path[0], Committed(step=0, index=index, attempt=0, loss=0.0, path=hops)))
    found.sort(key=lambda entry: entry.at_s)
    return found


def _computed(row: Row, wait_s: float) -> Computed:
    return Computed.model_validate(
        {
            "step": 0,
            "index": row.microbatch,
            "attempt": 0,
            "kind": _KINDS[row.kind],
            "wait_s": wait_s,
            "run_s": row.end_s - row.start_s,
        }
    )


def _waits(solved: Solved) -> dict[tuple[str, str, int], float]:
    """How much later each task began than it could have if nothing else had been computed or sent."""
    instance, plan, timeline = solved.instance, solved.plan, solved.timeline
    index = instance.index
    rows = {(row.kind, row.peer, row.microbatch): row for row in timeline.rows}
    waits: dict[tuple[str, str, int], float] = {}
    for mb, path in enumerate(plan.paths):
        tasks = tasks_of(rows, path, mb)
        waits["F", path[0], mb] = tasks[0].start_s
        for before, after in pairwise(tasks):
            way_s = instance.hop_s[index[before.peer]][index[after.peer]]
            waits[after.kind, after.peer, mb] = max(0.0, after.start_s - before.end_s - way_s)
        for peer in path:
            weight = rows.get(("W", peer, mb))
            if weight is not None:
                told_s = timeline.finish_s[mb] + float(instance.latency_s[index[path[0]], index[peer]])
                waits["W", peer, mb] = max(0.0, weight.start_s - told_s)
    return waits
