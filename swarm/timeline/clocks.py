"""One scale of time for logs of several machines.

Processes of one machine share a monotonic clock. Between two machines a message bounds the difference of
their clocks from one side, since nothing arrives before it was sent, and one in the other direction from the
other side; the estimate is the middle, as in NTP (Mills, RFC 5905, section 8), and half the distance its
uncertainty. Only microbatches that nothing happened to are used: of those it is known which task waited for
which. A clock without such messages in both directions is placed by Unix time, within what they allow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from swarm.timeline.read import Entry, Section
from swarm.timeline.schema import Committed, Computed, Received, Refused, Rerouted, Restarted, Sent

DISTURBED = (Refused, Rerouted, Restarted, Received, Sent)

Key = tuple[int, int, int]
"""(step, index, attempt)"""


@dataclass(frozen=True)
class Alignment:
    """How a clock was placed: add ``offset_s`` to its times."""

    offset_s: float
    by: Literal["reference", "messages", "unix time", "nothing"]
    uncertainty_s: float | None = None


@dataclass
class Bounds:
    """What is known of offset(second) - offset(first) of two clocks."""

    least_s: float = -math.inf
    most_s: float = math.inf

    @property
    def both(self) -> bool:
        return math.isfinite(self.least_s) and math.isfinite(self.most_s)


def align(sections: list[Section]) -> dict[str, Alignment]:
    """clock -> its place on the scale of the clock with the most events."""
    sizes: dict[str, int] = defaultdict(int)
    unix: dict[str, list[float]] = defaultdict(list)
    for section in (section for section in sections if section.entries):
        sizes[section.clock] += len(section.entries)
        if section.unix_at_zero_s is not None:
            unix[section.clock].append(section.unix_at_zero_s)
    if not sizes:
        return {}
    reference = max(sorted(sizes), key=lambda clock: sizes[clock])
    placed = {reference: Alignment(0.0, "reference", 0.0)}
    bounds = _bounds(sections) if len(sizes) > 1 else {}
    _place_by_messages(placed, bounds)
    at_zero = {clock: median(times) for clock, times in unix.items()}
    for clock in sizes.keys() - placed.keys():
        placed[clock] = _by_unix_time(clock, reference, at_zero, bounds)
    return placed


def _place_by_messages(placed: dict[str, Alignment], bounds: dict[tuple[str, str], Bounds]) -> None:
    """The surest pair of a placed clock and another first (Prim's tree)."""
    while True:
        edges = [
            (abs(known.most_s - known.least_s) / 2, first, second, known)
            for (first, second), known in bounds.items()
            if known.both and (first in placed) and (second not in placed)
        ]
        if not edges:
            return
        uncertainty_s, first, second, known = min(edges, key=lambda edge: edge[:3])
        offset_s = placed[first].offset_s + (known.least_s + known.most_s) / 2
        placed[second] = Alignment(offset_s, "messages", uncertainty_s + (placed[first].uncertainty_s or 0.0))


def _by_unix_time(
    clock: str, reference: str, at_zero: dict[str, float], bounds: dict[tuple[str, str], Bounds]
) -> Alignment:
    known = bounds.get((reference, clock), Bounds())
    if clock not in at_zero or reference not in at_zero:
        return Alignment(0.0, "nothing")
    offset_s = at_zero[clock] - at_zero[reference]
    return Alignment(min(max(offset_s, known.least_s), known.most_s), "unix time")


def _bounds(sections: list[Section]) -> dict[tuple[str, str], Bounds]:
    """(first clock, second clock) -> bounds, each pair in both orders."""
    found: dict[tuple[str, str], Bounds] = defaultdict(Bounds)
    for sender, sent_s, receiver, came_s in _messages(sections):
        if sender != receiver:
            there, back = found[sender, receiver], found[receiver, sender]
            there.least_s = max(there.least_s, sent_s - came_s)
            back.most_s = min(back.most_s, came_s - sent_s)
    return found


def _messages(sections: list[Section]) -> Iterator[tuple[str, float, str, float]]:
    """(sender's clock, when it sent, receiver's clock, when that came) of undisturbed microbatches."""
    tasks: dict[tuple[Key, str, str], tuple[str, float, float] | None] = {}
    commits: dict[Key, list[str]] = {}
    disturbed: set[tuple[int, int]] = set()
    for section in sections:
        for entry in section.entries:
            event = entry.event
            if isinstance(event, Computed):
                name = ((event.step, event.index, event.attempt), entry.peer, event.kind)
                came_s = entry.at_s - event.run_s - event.wait_s
                tasks[name] = None if name in tasks else (section.clock, came_s, entry.at_s)
            elif isinstance(event, Committed):
                commits[event.step, event.index, event.attempt] = event.path
            elif isinstance(event, DISTURBED):
                disturbed.add((event.step, event.index))
    for key, path in commits.items():
        if key[:2] in disturbed:
            continue
        chain = [tasks.get((key, peer, kind)) for peer, kind in tasks_of(path)]
        for before, after in pairwise(chain):
            if before is not None and after is not None:
                yield before[0], before[2], after[0], after[1]


def tasks_of(path: list[str]) -> list[tuple[str, str]]:
    """(peer, kind) of an undisturbed microbatch's tasks, in their order."""
    peers = [hop.partition(":")[2] for hop in path]
    forward = [(peer, "forward") for peer in peers]
    return [*forward, (peers[0], "loss"), *((peer, "backward") for peer in reversed(peers))] if peers else []


def entries_of(sections: list[Section], placed: dict[str, Alignment]) -> list[Entry]:
    """All entries on one scale, in order."""
    entries = [
        Entry(e.at_s + placed[section.clock].offset_s, e.peer, e.stage, e.name, e.event)
        for section in sections
        for e in section.entries
    ]
    entries.sort(key=lambda entry: entry.at_s)
    return entries
