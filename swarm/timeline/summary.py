"""A swarm's life in numbers: steps, commits, what was lost, and how long it took to go on."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median

from pydantic import BaseModel

from swarm.timeline.about_peers import Lost
from swarm.timeline.merge import Timeline
from swarm.timeline.read import Entry
from swarm.timeline.schema import Closed, Committed, Finished, Rerouted, Restarted, Stepped
from swarm.timeline.why import ONE_LOSS_S

Microbatch = tuple[int, int]
"""(step, index)"""


class Loss(BaseModel):
    """A peer that others lost before it had finished. ``None``: it did not come to that in these logs."""

    peer: str
    stage: int | None
    at_s: float
    """Since the first event, when the first of the others knew."""
    reason: str
    told_by: int
    silent_s: float | None
    """Before that, since its own log's last line; None if it was alive, or its log is not here."""
    rerouted: int
    recovered_s: float | None
    """From then until all that was rerouted around it was committed."""
    next_close_s: float | None
    """From then until a step was closed."""


class Summary(BaseModel):
    """Counts over all logs."""

    files: int
    peers: int
    lives: int
    events: int
    duration_s: float
    steps: int
    closed: int
    step_s: float | None
    """Median time between two closes."""
    committed: int
    counted: int
    rerouted: dict[str, int]
    """By cause; numbers in a reason are left out."""
    restarted: dict[str, int]
    taken_over: int
    fell_out: int
    losses: list[Loss]
    passed_over: dict[str, int]
    clocks: dict[str, str]


def summarise(timeline: Timeline) -> Summary:
    """Everything in one pass, the losses in another."""
    names = Counter(entry.name for entry in timeline.entries)
    closes: dict[int, float] = {}
    counted: dict[int, int] = {}
    steps: set[int] = set()
    rerouted: Counter[str] = Counter()
    restarted: Counter[str] = Counter()
    for entry in timeline.entries:
        event = entry.event
        if isinstance(event, Closed):
            closes.setdefault(event.step, entry.at_s)
            counted[event.step] = len(event.counted)
        elif isinstance(event, Stepped):
            steps.add(event.step)
        elif isinstance(event, Rerouted):
            rerouted[f"{event.cause}: {kind_of(event.reason)}"] += 1
        elif isinstance(event, Restarted):
            restarted[kind_of(event.reason)] += 1
    times = sorted(closes.values())
    gaps = [after - before for before, after in pairwise(times)]
    return Summary(
        files=timeline.files,
        peers=len({entry.peer for entry in timeline.entries}),
        lives=names["began"],
        events=len(timeline.entries),
        duration_s=timeline.entries[-1].at_s - timeline.entries[0].at_s,
        steps=len(steps),
        closed=len(closes),
        step_s=median(gaps) if gaps else None,
        committed=names["committed"],
        counted=sum(counted.values()),
        rerouted=dict(rerouted.most_common()),
        restarted=dict(restarted.most_common()),
        taken_over=names["taken_over"],
        fell_out=names["fell_out"],
        losses=_losses(timeline, times),
        passed_over=dict(timeline.passed_over),
        clocks={clock: alignment.by for clock, alignment in timeline.clocks.items()},
    )


def kind_of(reason: str) -> str:
    """A reason without its numbers and peers, so that like ones are counted together."""
    return re.sub(r"\d[\d.,]*", "N", re.sub(r"\b12D3KooW\w+", "PEER", reason))[:200]


def _losses(timeline: Timeline, closes: list[float]) -> list[Loss]:
    told: dict[str, list[list[Entry]]] = defaultdict(list)
    own: dict[str, list[Entry]] = defaultdict(list)
    reroutes: dict[str, list[tuple[float, Microbatch]]] = defaultdict(list)
    commits: dict[Microbatch, float] = {}
    finished_s: dict[str, float] = {}
    for entry in timeline.entries:
        event = entry.event
        own[entry.peer].append(entry)
        if isinstance(event, Lost):
            spells = told[event.other]
            if not spells or entry.at_s - spells[-1][0].at_s > ONE_LOSS_S:
                spells.append([])
            spells[-1].append(entry)
        elif isinstance(event, Rerouted):
            reroutes[event.lost].append((entry.at_s, (event.step, event.index)))
        elif isinstance(event, Committed):
            commits[event.step, event.index] = entry.at_s
        elif isinstance(event, Finished):
            finished_s[entry.peer] = entry.at_s
    stages, begin_s = timeline.stages, timeline.entries[0].at_s
    losses = []
    for peer, spells in told.items():
        for spell in spells:
            assert isinstance(spell[0].event, Lost)
            at_s = spell[0].at_s
            if finished_s.get(peer, at_s) < at_s:
                continue
            around = {key for when_s, key in reroutes[peer] if at_s <= when_s <= at_s + ONE_LOSS_S}
            done = [commits[key] for key in around if key in commits]
            after = bisect_left(closes, at_s)
            losses.append(
                Loss(
                    peer=peer,
                    stage=stages.get(peer),
                    at_s=at_s - begin_s,
                    reason=spell[0].event.reason,
                    told_by=len({entry.peer for entry in spell}),
                    silent_s=_silent_s(own.get(peer, []), at_s),
                    rerouted=len(around),
                    recovered_s=max(done) - at_s if done and len(done) == len(around) else None,
                    next_close_s=closes[after] - at_s if after < len(closes) else None,
                )
            )
    return sorted(losses, key=lambda loss: loss.at_s)


def _silent_s(own: list[Entry], at_s: float) -> float | None:
    """Since the last line of a life that tells nothing later."""
    next_ = bisect_right(own, at_s, key=lambda entry: entry.at_s)
    ended = next_ == len(own) or own[next_].name == "opened"
    return at_s - own[next_ - 1].at_s if next_ and ended else None
