"""An exact event simulator of a step: paths and send order in, makespan and Gantt rows out.

The rules are those of the daemon. A peer computes one task at a time and never idles while it may compute:
backward work first (an input gradient, or the loss at the origin), then forwards, then the deferred weight
gradients of committed microbatches; among equals the one that stands first in the plan. A forward takes a
memory slot when it starts and gives it back when its backward ends; without a free slot it waits. What is
sent shares the sender's uplink, its link and the receiver's downlink, each first come first served. A
microbatch is committed when the origin's own backward ends, and the word of it travels one latency to each
hop. When every microbatch is done the replicas of each stage average.

What happens at one instant happens in order of the peers of the instance; first bytes that reach a downlink
at one instant are taken in the plan's order.

Nothing is polled and nobody is stranded: as paths go up through the stages, a peer of the last stage always
frees its slots, and so does each below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scheduler.errors import SchedulerError
from scheduler.instance import Instance
from scheduler.kernel import Floats, Ints, Scratch, averaging_s, play, scratch
from scheduler.plan import no_way

Path = tuple[str, ...]
"""Peers that a microbatch visits, its origin first."""


class Row(NamedTuple):
    """One bar of the Gantt chart. ``kind``: F forward, L loss, B input gradient, W weight gradient, A
    averaging (with ``microbatch`` -1)."""

    peer: str
    kind: str
    microbatch: int
    start_s: float
    end_s: float


class Split(NamedTuple):
    """Seconds of a microbatch from the step's begin to its commit."""

    compute_s: float
    transfer_s: float
    """Travelling, as if nothing else were sent."""
    waiting_s: float
    """For the rest: busy peers, memory slots, busy links."""


class Timeline(NamedTuple):
    """What a simulated step looks like; ``finish_s[i]`` is when microbatch i of the paths was committed."""

    makespan_s: float
    rows: tuple[Row, ...]
    busy_s: dict[str, float]
    """Seconds that each peer computes."""
    idle_s: dict[str, float]
    """Seconds that it does not, until the last task of the step has ended."""
    finish_s: tuple[float, ...]
    split: tuple[Split, ...]
    """What each microbatch's time went into."""


class Score(NamedTuple):
    """Orders schedules: makespan first, then the sum of all commit times."""

    makespan_s: float
    total_s: float


_KINDS = "BLFW"
_NO_LOG = np.empty((0, 3), np.int64), np.empty((0, 2), np.float64)


class Simulator:
    """An instance made ready for many evaluations."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.tables = instance.tables
        self.averaging_s = max((end_s for *_, end_s in self._averaging(0.0)), default=0.0)
        self._room: Scratch | None = None

    def indices(self, paths: Iterable[Path]) -> list[list[int]]:
        """Paths by position in ``instance.peers``. Raises SchedulerError if one cannot be walked."""
        index = self.instance.index
        walked = []
        for path in paths:
            try:
                hops = [index[peer] for peer in path]
            except KeyError as error:
                raise SchedulerError(
                    f"path names {error.args[0]}, which is not a peer of the instance"
                ) from None
            if not hops:
                raise SchedulerError("a path needs an origin")
            gap = self.instance.gap(hops)
            if gap is not None:
                raise SchedulerError(no_way(self.instance, gap))
            walked.append(hops)
        return walked

    def room(self, microbatches: int, hops: int) -> Scratch:
        """Room to play ``microbatches`` paths of up to ``hops`` peers; the last one again if it fits."""
        room = self._room
        if room is None or len(room.finish_s) != microbatches or len(room.arrives_s) != microbatches * hops:
            self._room = room = scratch(len(self.instance.peers), microbatches, hops)
        return room

    def score(self, paths: Sequence[Sequence[int]]) -> Score:
        """Makespan and total of ``paths``, given by position in ``instance.peers``.

        Raises SchedulerError if paths that go down through the stages block each other.
        """
        if not paths:
            return Score(self.averaging_s, 0.0)
        finish_s, last_s = self._play(paths, _NO_LOG)
        return Score(last_s + self.averaging_s, sum(finish_s))

    def _play(self, paths: Sequence[Sequence[int]], log: tuple[Ints, Floats]) -> tuple[list[float], float]:
        """(commit of each microbatch, end of the last task)"""
        table, lengths = as_table(paths)
        room = self.room(*table.shape)
        if play(table, lengths, self.tables, math.inf, room, *log) < len(paths):
            raise SchedulerError(
                "paths that do not go up through the stages wait for each other's memory slots"
            )
        finish_s: list[float] = room.finish_s.tolist()
        return finish_s, float(room.free_s.max())

    def timeline(self, paths: Iterable[Path]) -> Timeline:
        """The whole step of ``paths``. Raises SchedulerError if a path cannot be walked."""
        hops = self.indices(paths)
        peers = self.instance.peers
        bars: list[Row] = []
        finish_s: list[float] = []
        last_s = 0.0
        if hops:
            weights = sum(peers[p].weight_s > 0 for path in hops for p in path)
            tasks = sum(2 * len(path) + 1 for path in hops) + weights
            log = np.empty((tasks, 3), np.int64), np.empty((tasks, 2), np.float64)
            finish_s, last_s = self._play(hops, log)
            for (p, kind, mb), (start_s, end_s) in zip(log[0].tolist(), log[1].tolist(), strict=True):
                bars.append(Row(peers[p].peer, _KINDS[kind], mb, start_s, end_s))
        busy_s = dict.fromkeys((spec.peer for spec in peers), 0.0)
        for bar in bars:
            busy_s[bar.peer] += bar.end_s - bar.start_s
        bars += [Row(peers[p].peer, "A", -1, start, end) for p, start, end in self._averaging(last_s)]
        makespan_s = max((bar.end_s for bar in bars), default=0.0)
        idle_s = {peer: last_s - busy for peer, busy in busy_s.items()}
        split = tuple(self._split(path, at_s) for path, at_s in zip(hops, finish_s, strict=True))
        return Timeline(makespan_s, tuple(bars), busy_s, idle_s, tuple(finish_s), split)

    def _split(self, path: Sequence[int], finish_s: float) -> Split:
        peers = self.instance.peers
        compute_s = peers[path[0]].loss_s + sum(peers[p].forward_s + peers[p].backward_s for p in path)
        ring = [*pairwise(path), (path[-1], path[0])]
        transfer_s = sum(self.instance.hop_s[a][b] + self.instance.hop_s[b][a] for a, b in ring)
        return Split(compute_s, transfer_s, finish_s - compute_s - transfer_s)

    def _averaging(self, start_s: float) -> list[tuple[int, float, float]]:
        """(peer, start, end) of each member of each group of replicas that averages."""
        bars = []
        for stage, size in enumerate(self.instance.gradient_bytes):
            group = self.instance.by_stage[stage]
            if len(group) > 1 and size:
                end_s = start_s + averaging_s(np.array(group), float(size), self.tables)
                bars += [(p, start_s, end_s) for p in group]
        return bars


def as_table(paths: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """(``[m, hops]`` positions, padded with -1; ``[m]`` lengths) of ``paths``."""
    lengths = [len(path) for path in paths]
    table = np.full((len(paths), max(lengths)), -1, np.int64)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return table, np.array(lengths)


def simulate(instance: Instance, paths: Iterable[Path]) -> Timeline:
    """Play one step. ``paths`` are in send order. Raises SchedulerError if a path cannot be walked."""
    return Simulator(instance).timeline(paths)


def makespan(instance: Instance, paths: Iterable[Path]) -> float:
    """``simulate``'s makespan alone, without its rows. Raises SchedulerError if a path cannot be walked."""
    simulator = Simulator(instance)
    return simulator.score(simulator.indices(paths)).makespan_s
