"""Where one microbatch spent its time, who rerouted it and why, and who computed what counted.

From its first start to its commit each moment gets one name: *compute* or *queue* where a task of it was
computed or waited for its peer, else *transfer*, else *waiting*: when the gap ended with somebody giving the
next peer up, what came before was spent on that peer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel

from swarm.errors import UserError
from swarm.timeline.about_peers import Lost
from swarm.timeline.merge import Timeline, short
from swarm.timeline.read import Entry
from swarm.timeline.schema import (
    Closed,
    Committed,
    Computed,
    Received,
    Refused,
    Rerouted,
    Restarted,
    Sent,
    Started,
    TakenOver,
)

LEAST_S = 1e-6
"""What is shorter is a matter of rounding."""

ONE_LOSS_S = 30.0
"""What peers tell of one lost peer within so long is about one loss."""

MAX_TASKS = 2_000
"""Of one microbatch: no honest swarm has so many stages and attempts."""

What = Literal["compute", "queue", "transfer", "waiting"]


class Slice(BaseModel):
    """A part of its life. ``from_s`` counts from the first start."""

    from_s: float
    for_s: float
    what: What
    peer: str
    """Who computed, had it in its queue, sent it, or waited."""
    stage: int
    detail: str
    """forward, backward or loss; to whom it was sent; what was waited for."""


class Reroute(BaseModel):
    """A hop that was replaced."""

    at_s: float
    by: str
    stage: int
    lost: str
    cause: str
    reason: str
    instead: str | None
    """The peer that took its place, as ``stage:peer``; None where the stage was left out."""
    known_s: float | None
    """How long before that anybody had lost the peer."""


class Attempt(BaseModel):
    """One start by an origin."""

    attempt: int
    origin: str
    at_s: float
    given_up: str | None = None


class Work(BaseModel):
    """What a peer of the path that counts computed, in seconds; None where its log does not say."""

    stage: int
    peer: str
    forward_s: float | None = None
    backward_s: float | None = None
    weight_s: float | None = None


class Why(BaseModel):
    """The answer."""

    step: int
    index: int
    committed: bool
    total_s: float
    spent_s: dict[What, float]
    slices: list[Slice]
    attempts: list[Attempt]
    reroutes: list[Reroute]
    taken_over_from: list[str]
    attempt: int | None
    """The one that counts, or that was committed."""
    counted: list[Work]
    """In the order of the path."""


class _Busy(NamedTuple):
    """A task of the microbatch on a peer."""

    came_s: float
    began_s: float
    ended_s: float
    peer: str
    stage: int
    kind: str
    counts: bool


class _Mark(NamedTuple):
    """Something that happened in a gap, with a name for the time before it; for that after it, perhaps."""

    at_s: float
    peer: str
    stage: int
    before: str | None
    after: str | None = None


def why(timeline: Timeline, step: int, index: int) -> Why:
    """Raises ``UserError`` if no log names the microbatch."""
    entries = timeline.of_microbatch(step, index)
    starts = [entry for entry in entries if isinstance(entry.event, Started)]
    if not entries:
        raise UserError(
            f"no log names microbatch {index} of step {step}; skipswarm events summary shows what there is"
        )
    begin_s = (starts or entries)[0].at_s
    path, attempt, commit = _outcome(timeline, entries, step, index)
    end_s = max(begin_s, commit.at_s if commit is not None else entries[-1].at_s)
    busy = _tasks(entries, attempt, path)
    slices = _merged(_slices(begin_s, end_s, busy, _marks(entries)))
    spent: dict[What, float] = {"compute": 0.0, "queue": 0.0, "transfer": 0.0, "waiting": 0.0}
    for part in slices:
        spent[part.what] += part.for_s
    return Why(
        step=step,
        index=index,
        committed=attempt is not None,
        total_s=end_s - begin_s,
        spent_s=spent,
        slices=slices,
        attempts=_attempts(entries, begin_s),
        reroutes=list(_reroutes(timeline, entries, begin_s)),
        taken_over_from=[e.event.lost for e in entries if isinstance(e.event, TakenOver)],
        attempt=attempt,
        counted=_work(entries, attempt, path),
    )


def _outcome(
    timeline: Timeline, entries: list[Entry], step: int, index: int
) -> tuple[list[str], int | None, Entry | None]:
    """(path and attempt that count, the commit): as the last close of the step has it, else as an origin
    said."""
    commits = [entry for entry in entries if isinstance(entry.event, Committed)]
    closes = [e.event for e in timeline.entries if isinstance(e.event, Closed) and e.event.step == step]
    for counted in closes[-1].counted if closes else ():
        if counted[0] == index:
            named = [c for c in commits if isinstance(c.event, Committed) and c.event.attempt == counted[1]]
            return counted[3], counted[1], named[0] if named else None
    if commits and isinstance(commits[-1].event, Committed):
        return commits[-1].event.path, commits[-1].event.attempt, commits[-1]
    return [], None, None


def _tasks(entries: list[Entry], attempt: int | None, path: list[str]) -> list[_Busy]:
    """Tasks before the commit; one on a peer that was given up ends when that was."""
    given_up = [
        (entry.at_s, entry.event.lost if isinstance(entry.event, Rerouted) else None)
        for entry in entries
        if isinstance(entry.event, Rerouted | Restarted)
    ]
    found = []
    for entry in entries:
        event = entry.event
        if not isinstance(event, Computed) or event.kind == "weight":
            continue
        began_s = entry.at_s - event.run_s
        came_s, ended_s = began_s - event.wait_s, entry.at_s
        counts = event.attempt == attempt and (f"{entry.stage}:{entry.peer}" in path or event.kind == "loss")
        if not counts:
            ends = [at_s for at_s, lost in given_up if at_s > came_s and lost in (None, entry.peer)]
            ended_s = min([ended_s, *ends])
        found.append(
            _Busy(came_s, min(began_s, ended_s), ended_s, entry.peer, entry.stage, event.kind, counts)
        )
    if len(found) > MAX_TASKS:
        raise UserError(f"the logs name {len(found):,} tasks of this microbatch; leave the false ones out")
    return found


def _at(mark: _Mark) -> float:
    return mark.at_s


def _marks(entries: list[Entry]) -> list[_Mark]:
    """What tells how a gap is to be understood."""
    marks = []
    refused: set[str] = set()
    for entry in entries:
        event, before, after = entry.event, None, None
        if isinstance(event, Rerouted):
            verb = "was lost" if event.cause == "lost" else "refused"
            before = f"{short(event.lost)} {verb}: {event.reason}"
        elif isinstance(event, Refused):
            refused.add(entry.peer)
            before = f"{short(event.other)} refused: {event.reason}"
        elif isinstance(event, Sent):
            room = entry.peer in refused
            before = "for room at the next stage" if room else f"for the link to {short(event.other)}"
            refused.discard(entry.peer)
        elif isinstance(event, Received):
            after = "for the step's parameters"
        elif isinstance(event, Restarted):
            before, after = f"given up: {event.reason}", "for a new attempt"
        elif isinstance(event, TakenOver):
            before, after = f"origin {short(event.lost)} was lost", "for a new attempt"
        elif isinstance(event, Started):
            before = "for a new attempt"
        else:
            continue
        marks.append(_Mark(entry.at_s, entry.peer, entry.stage, before, after))
    return marks


def _slices(begin_s: float, end_s: float, busy: list[_Busy], marks: list[_Mark]) -> Iterator[Slice]:
    """Cut the time at everything that happened, and name each piece."""
    cuts = {begin_s, end_s, *map(_at, marks)}
    named = [mark for mark in marks if mark.before is not None], [mark for mark in marks if mark.after]
    for task in busy:
        cuts |= {task.came_s, task.began_s, task.ended_s}
    ordered = sorted(cut for cut in cuts if begin_s <= cut <= end_s)
    before: _Busy | None = None
    for from_s, to_s in pairwise(ordered):
        middle_s = (from_s + to_s) / 2
        running = [task for task in busy if task.came_s <= middle_s < task.ended_s]
        if running:
            before = max(running, key=lambda task: (task.counts, task.began_s <= middle_s, task.ended_s))
            what: What = "compute" if before.began_s <= middle_s else "queue"
            peer, stage, detail = before.peer, before.stage, before.kind
        else:
            what, peer, stage, detail = _gap(from_s, to_s, busy, named, before)
        yield Slice(
            from_s=from_s - begin_s, for_s=to_s - from_s, what=what, peer=peer, stage=stage, detail=detail
        )


def _gap(
    from_s: float,
    to_s: float,
    busy: list[_Busy],
    marks: tuple[list[_Mark], list[_Mark]],
    before: _Busy | None,
) -> tuple[What, str, int, str]:
    """Nothing was done with it: it was on its way, or somebody waited for somebody."""
    coming = min((task for task in busy if task.came_s >= to_s), key=lambda task: task.came_s, default=None)
    next_s = coming.came_s if coming is not None else float("inf")
    enders, beginners = marks
    ahead = bisect_left(enders, to_s, key=_at)
    if ahead < len(enders) and enders[ahead].at_s <= next_s:
        return "waiting", enders[ahead].peer, enders[ahead].stage, str(enders[ahead].before)
    resent = ahead > 0 and (before is None or enders[ahead - 1].at_s >= before.ended_s)
    last_s = enders[ahead - 1].at_s if resent else before.ended_s if before is not None else float("-inf")
    behind = bisect_right(beginners, from_s, key=_at) - 1
    if behind >= 0 and beginners[behind].at_s >= last_s:
        return "waiting", beginners[behind].peer, beginners[behind].stage, str(beginners[behind].after)
    sender = enders[ahead - 1] if resent else before
    if sender is None or coming is None:
        return "transfer", sender.peer if sender else "", sender.stage if sender else -1, "to nobody known"
    detail = "to the next hop and back" if sender.peer == coming.peer else f"to {short(coming.peer)}"
    return "transfer", sender.peer, sender.stage, detail


def _merged(slices: Iterator[Slice]) -> list[Slice]:
    """Neighbours with one name are one; what is too short is nothing."""
    merged: list[Slice] = []
    for part in slices:
        if part.for_s < LEAST_S:
            continue
        last = merged[-1] if merged else None
        if last and (last.what, last.peer, last.detail) == (part.what, part.peer, part.detail):
            last.for_s = part.from_s + part.for_s - last.from_s
        else:
            merged.append(part)
    return merged


def _attempts(entries: list[Entry], begin_s: float) -> list[Attempt]:
    attempts: dict[int, Attempt] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, Started):
            attempts[event.attempt] = Attempt(
                attempt=event.attempt, origin=entry.peer, at_s=entry.at_s - begin_s
            )
        elif isinstance(event, Restarted) and event.attempt in attempts:
            attempts[event.attempt].given_up = event.reason
    return list(attempts.values())


def _reroutes(timeline: Timeline, entries: list[Entry], begin_s: float) -> Iterator[Reroute]:
    paths: dict[int, list[str]] = {}
    losses: dict[str, list[float]] = {}
    for entry in timeline.entries:
        if isinstance(entry.event, Lost):
            losses.setdefault(entry.event.other, []).append(entry.at_s)
    for entry in entries:
        event = entry.event
        if isinstance(event, Rerouted):
            known = [at_s for at_s in losses.get(event.lost, ()) if 0 <= entry.at_s - at_s <= ONE_LOSS_S]
            new = [hop for hop in event.path if hop not in paths.get(event.attempt, ())]
            yield Reroute(
                at_s=entry.at_s - begin_s,
                by=entry.peer,
                stage=event.stage,
                lost=event.lost,
                cause=event.cause,
                reason=event.reason,
                instead=new[0] if new else None,
                known_s=entry.at_s - known[0] if known and event.cause == "lost" else None,
            )
        if isinstance(event, Started | Rerouted):
            paths[event.attempt] = event.path


def _work(entries: list[Entry], attempt: int | None, path: list[str]) -> list[Work]:
    times: dict[tuple[str, str], float] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, Computed) and event.attempt == attempt:
            times[entry.peer, event.kind] = event.run_s
    work = []
    for hop in path:
        stage, _, peer = hop.partition(":")
        forward_s, backward_s, weight_s = (times.get((peer, k)) for k in ("forward", "backward", "weight"))
        work.append(
            Work(stage=int(stage), peer=peer, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
        )
    return work
