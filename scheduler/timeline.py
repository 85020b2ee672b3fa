"""An exact event simulator of a step: paths and send order in, makespan and Gantt rows out.

The rules are those of the daemon. A peer computes one task at a time and never idles while it may compute:
backward work first (an input gradient, or the loss at the origin), then forwards, then the deferred weight
gradients of committed microbatches; among equals the one that stands first in the plan. A forward takes a
memory slot when it starts and gives it back when its backward ends; without a free slot it waits. What is
sent shares the sender's uplink, its link and the receiver's downlink, each first come first served. A
microbatch is committed when the origin's own backward ends, and the word of it travels one latency to each
hop. When every microbatch is done the replicas of each stage average.

Nothing is polled and nobody is stranded: as paths go up through the stages, a peer of the last stage always
frees its slots, and so does each below it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler.errors import SchedulerError
from scheduler.instance import UNLIMITED_BYTES_PER_S, Instance

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


class Timeline(NamedTuple):
    """What a simulated step looks like; ``finish_s[i]`` is when microbatch i of the paths was committed."""

    makespan_s: float
    rows: tuple[Row, ...]
    busy_s: dict[str, float]
    finish_s: tuple[float, ...]


class Score(NamedTuple):
    """Orders schedules: makespan first, then the sum of all commit times."""

    makespan_s: float
    total_s: float


_B, _L, _F, _W = 0, 1, 2, 3
_KINDS = "BLFW"
_QUEUE = (0, 0, 1, 2)
_DONE, _READY, _REACH = 0, 1, 2

_Event = tuple[float, int, int, int, int, int, int, float]
"""(time, sequence, what, peer, kind, microbatch, hop, seconds that the rest of a transfer takes)"""
_Task = tuple[int, int, int]
"""(microbatch, kind, hop): the least is computed first"""
_RowIndex = tuple[int, int, int, float, float]


class Simulator:
    """An instance made ready for many evaluations."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        peers = instance.peers
        size = instance.activation_bytes
        self.task_s = [(p.backward_s, p.loss_s, p.forward_s, p.weight_s) for p in peers]
        self.slots = [p.memory_slots for p in peers]
        self.up_s = [size / p.up_bytes_per_s for p in peers]
        self.down_s = [
            size / p.down_bytes_per_s if p.down_bytes_per_s < UNLIMITED_BYTES_PER_S else 0.0 for p in peers
        ]
        self.latency_s: list[list[float]] = instance.latency_s.tolist()
        rates: list[list[float]] = instance.bandwidth_bytes_per_s.tolist()
        self.link_s = [[size / rate if rate else float("inf") for rate in row] for row in rates]

    def indices(self, paths: Iterable[Path]) -> list[list[int]]:
        """Paths by position in ``instance.peers``. Raises SchedulerError if one cannot be walked."""
        index, usable = self.instance.index, self.instance.usable
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
            for a, b in zip(hops, [*hops[1:], hops[0]], strict=True):
                if len(hops) > 1 and not usable[a][b]:
                    raise SchedulerError(
                        f"no way between {self.instance.peers[a].peer} and {self.instance.peers[b].peer}"
                    )
            walked.append(hops)
        return walked

    def score(self, paths: Sequence[Sequence[int]]) -> Score:
        """Makespan and total of ``paths``, given by position in ``instance.peers``."""
        run = _Run(self, paths, None)
        last_s = run.run()
        if self.instance.gradient_bytes:
            last_s = max([last_s, *(end_s for *_, end_s in self._averaging(last_s))])
        return Score(last_s, sum(run.finish_s))

    def timeline(self, paths: Iterable[Path]) -> Timeline:
        """The whole step of ``paths``. Raises SchedulerError if a path cannot be walked."""
        rows: list[_RowIndex] = []
        run = _Run(self, self.indices(paths), rows)
        last_s = run.run()
        peers = self.instance.peers
        bars = [Row(peers[p].peer, _KINDS[kind], mb, start, end) for p, kind, mb, start, end in rows]
        bars += [Row(peers[p].peer, "A", -1, start, end) for p, start, end in self._averaging(last_s)]
        busy_s = dict.fromkeys((spec.peer for spec in peers), 0.0)
        for bar in bars:
            if bar.kind != "A":
                busy_s[bar.peer] += bar.end_s - bar.start_s
        makespan_s = max((bar.end_s for bar in bars), default=0.0)
        return Timeline(makespan_s, tuple(bars), busy_s, tuple(run.finish_s))

    def _averaging(self, start_s: float) -> list[tuple[int, float, float]]:
        """(peer, start, end) of each member of each group of replicas.

        A butterfly: each member sends and gets 2 (n-1)/n of the gradient, and waits twice for the farthest.
        """
        bars = []
        for stage, size in enumerate(self.instance.gradient_bytes):
            group = self.instance.by_stage[stage]
            if len(group) < 2 or not size:
                continue
            pairs = [(p, q) for p in group for q in group if p != q and self.instance.usable[p][q]]
            specs = [self.instance.peers[p] for p in group]
            rates = [min(spec.up_bytes_per_s, spec.down_bytes_per_s) for spec in specs]
            rate = min([*rates, *(float(self.instance.bandwidth_bytes_per_s[p, q]) for p, q in pairs)])
            wait_s = 2 * max((self.latency_s[p][q] for p, q in pairs), default=0.0)
            end_s = start_s + 2 * (len(group) - 1) / len(group) * size / rate + wait_s
            bars += [(p, start_s, end_s) for p in group]
        return bars


class _Run:
    """The moving parts of one simulated step."""

    def __init__(
        self, simulator: Simulator, paths: Sequence[Sequence[int]], rows: list[_RowIndex] | None
    ) -> None:
        n = len(simulator.slots)
        self.simulator = simulator
        self.paths = paths
        self.rows = rows
        self.events: list[_Event] = []
        self.sequence = 0
        self.queues: list[tuple[list[_Task], list[_Task], list[_Task]]] = [([], [], []) for _ in range(n)]
        self.busy = [False] * n
        self.slots = list(simulator.slots)
        self.up_free = [0.0] * n
        self.down_free = [0.0] * n
        self.pair_free: dict[tuple[int, int], float] = {}
        self.finish_s = [-1.0] * len(paths)

    def run(self) -> float:
        """Runs to the end; returns the time of the last event."""
        now = 0.0
        for mb, path in enumerate(self.paths):
            self.ready(path[0], _F, mb, 0)
        touched = {path[0] for path in self.paths}
        events = self.events
        while True:
            # All that happens at one instant is known before anyone chooses what to compute.
            for peer in sorted(touched) if len(touched) > 1 else touched:
                if not self.busy[peer]:
                    self.dispatch(peer, now)
            if not events:
                break
            touched.clear()
            now = events[0][0]
            while events and events[0][0] == now:
                _, _, what, peer, kind, mb, hop, rest_s = heapq.heappop(events)
                if what == _REACH:
                    self.receive(now, peer, kind, mb, hop, rest_s)
                    continue
                touched.add(peer)
                if what == _DONE:
                    self.busy[peer] = False
                    self.done(now, peer, kind, mb, hop)
                else:
                    self.ready(peer, kind, mb, hop)
        if any(end_s < 0 for end_s in self.finish_s):
            raise SchedulerError(
                "paths that do not go up through the stages wait for each other's memory slots"
            )
        return now

    def at(
        self, time: float, what: int, peer: int, kind: int, mb: int, hop: int, rest_s: float = 0.0
    ) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, what, peer, kind, mb, hop, rest_s))

    def ready(self, peer: int, kind: int, mb: int, hop: int) -> None:
        heapq.heappush(self.queues[peer][_QUEUE[kind]], (mb, kind, hop))

    def dispatch(self, peer: int, now: float) -> None:
        """Start the first task that ``peer`` may compute, if there is one."""
        back, forward, weight = self.queues[peer]
        if back:
            mb, kind, hop = heapq.heappop(back)
        elif forward and self.slots[peer]:
            mb, kind, hop = heapq.heappop(forward)
            self.slots[peer] -= 1
        elif weight:
            mb, kind, hop = heapq.heappop(weight)
        else:
            return
        end_s = now + self.simulator.task_s[peer][kind]
        self.busy[peer] = True
        self.at(end_s, _DONE, peer, kind, mb, hop)
        if self.rows is not None:
            self.rows.append((peer, kind, mb, now, end_s))

    def done(self, now: float, peer: int, kind: int, mb: int, hop: int) -> None:
        """A task has ended: send its result on."""
        path = self.paths[mb]
        if kind == _F:
            if hop + 1 < len(path):
                self.send(now, peer, path[hop + 1], _F, mb, hop + 1)
            else:
                self.send(now, peer, path[0], _L, mb, 0)
        elif kind == _L:
            self.send(now, peer, path[-1], _B, mb, len(path) - 1)
        elif kind == _B:
            self.slots[peer] += 1
            if hop:
                self.send(now, peer, path[hop - 1], _B, mb, hop - 1)
            else:
                self.commit(now, mb, path)

    def commit(self, now: float, mb: int, path: Sequence[int]) -> None:
        self.finish_s[mb] = now
        simulator = self.simulator
        latency_s = simulator.latency_s[path[0]]
        for hop, peer in enumerate(path):
            if simulator.task_s[peer][_W] > 0:
                self.at(now + (latency_s[peer] if hop else 0.0), _READY, peer, _W, mb, hop)

    def send(self, now: float, source: int, target: int, kind: int, mb: int, hop: int) -> None:
        """A tensor leaves ``source`` when its uplink and the link are free."""
        if source == target:
            self.at(now, _READY, target, kind, mb, hop)
            return
        simulator = self.simulator
        up_s, link_s = simulator.up_s[source], simulator.link_s[source][target]
        leaves = max(now, self.up_free[source])
        self.up_free[source] = leaves + up_s
        starts = max(leaves, self.pair_free.get((source, target), 0.0))
        self.pair_free[source, target] = starts + link_s
        reaches = starts + simulator.latency_s[source][target]
        rest_s = max(link_s, up_s)
        if simulator.down_s[target] > 0:
            self.at(reaches, _REACH, target, kind, mb, hop, rest_s)
        else:
            self.at(reaches + rest_s, _READY, target, kind, mb, hop)

    def receive(self, now: float, peer: int, kind: int, mb: int, hop: int, rest_s: float) -> None:
        """The first byte of a tensor has reached ``peer``, whose downlink takes one after the other."""
        self.down_free[peer] = max(now, self.down_free[peer]) + self.simulator.down_s[peer]
        self.at(max(now + rest_s, self.down_free[peer]), _READY, peer, kind, mb, hop)


def simulate(instance: Instance, paths: Iterable[Path]) -> Timeline:
    """Play one step. ``paths`` are in send order. Raises SchedulerError if a path cannot be walked."""
    return Simulator(instance).timeline(paths)


def makespan(instance: Instance, paths: Iterable[Path]) -> float:
    """``simulate``'s makespan alone, without its rows. Raises SchedulerError if a path cannot be walked."""
    simulator = Simulator(instance)
    return simulator.score(simulator.indices(paths)).makespan_s
