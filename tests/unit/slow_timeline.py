"""The event simulator, slow and obvious: what ``scheduler.timeline`` is held against."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from scheduler.errors import SchedulerError
from scheduler.instance import UNLIMITED_BYTES_PER_S, Instance

DONE, REACH, READY = "0 done", "1 reach", "2 ready"
"""What an event is; at one instant in this order."""


def slow_rows(instance: Instance, paths: Sequence[Sequence[int]]) -> list[tuple[int, str, int, float, float]]:
    """(peer, kind, microbatch, start, end) of each task, in the order in which they start.

    Raises SchedulerError if the paths wait for each other.
    """
    return _Step(instance, paths).run()


class _Step:
    def __init__(self, instance: Instance, paths: Sequence[Sequence[int]]) -> None:
        self.instance, self.paths = instance, paths
        n = len(instance.peers)
        self.events: list[tuple[Any, ...]] = []
        self.waiting: list[list[tuple[int, int, str, int]]] = [[] for _ in range(n)]
        """Of each peer (rank, microbatch, kind, hop)."""
        self.busy = [False] * n
        self.slots = [spec.memory_slots for spec in instance.peers]
        self.up_free: dict[int, float] = {}
        self.down_free: dict[int, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.rows: list[tuple[int, str, int, float, float]] = []
        self.commits = 0

    def run(self) -> list[tuple[int, str, int, float, float]]:
        for mb, path in enumerate(self.paths):
            self.ready(path[0], "F", mb, 0)
        now = 0.0
        while True:
            while self.events and self.events[0][0] == now:
                self.happen(*heapq.heappop(self.events))
            if not self.start_one(now):
                if not self.events:
                    break
                now = self.events[0][0]
        if self.commits < len(self.paths):
            raise SchedulerError("they wait for each other")
        return self.rows

    def at(
        self, time: float, what: str, mb: int, hop: int, peer: int, kind: str, rest_s: float = 0.0
    ) -> None:
        heapq.heappush(self.events, (time, what, mb, hop, peer, kind, rest_s))

    def happen(self, now: float, what: str, mb: int, hop: int, peer: int, kind: str, rest_s: float) -> None:
        if what == DONE:
            self.busy[peer] = False
            self.done(now, mb, hop, peer, kind)
        elif what == READY:
            self.ready(peer, kind, mb, hop)
        else:
            down_s = self.instance.activation_bytes / self.instance.peers[peer].down_bytes_per_s
            self.down_free[peer] = max(now, self.down_free.get(peer, 0.0)) + down_s
            self.at(max(now + rest_s, self.down_free[peer]), READY, mb, hop, peer, kind)

    def ready(self, peer: int, kind: str, mb: int, hop: int) -> None:
        self.waiting[peer].append(({"B": 0, "L": 0, "F": 1, "W": 2}[kind], mb, kind, hop))

    def start_one(self, now: float) -> bool:
        """The first peer that is free and may compute something begins with it."""
        for p, spec in enumerate(self.instance.peers):
            able = [task for task in self.waiting[p] if task[2] != "F" or self.slots[p]]
            if self.busy[p] or not able:
                continue
            task = min(able)
            self.waiting[p].remove(task)
            _, mb, kind, hop = task
            needs_s = {"F": spec.forward_s, "L": spec.loss_s, "B": spec.backward_s, "W": spec.weight_s}[kind]
            self.busy[p] = True
            self.slots[p] -= kind == "F"
            self.rows.append((p, kind, mb, now, now + needs_s))
            self.at(now + needs_s, DONE, mb, hop, p, kind)
            return True
        return False

    def done(self, now: float, mb: int, hop: int, peer: int, kind: str) -> None:
        path = self.paths[mb]
        last = len(path) - 1
        if kind == "F":
            self.send(now, peer, mb, *((hop + 1, "F") if hop < last else (0, "L")))
        elif kind == "L":
            self.send(now, peer, mb, last, "B")
        elif kind == "B":
            self.slots[peer] += 1
            if hop:
                self.send(now, peer, mb, hop - 1, "B")
                return
            self.commits += 1
            for h, p in enumerate(path):
                if self.instance.peers[p].weight_s > 0:
                    word_s = float(self.instance.latency_s[peer, p]) if h else 0.0
                    self.at(now + word_s, READY, mb, h, p, "W")

    def send(self, now: float, source: int, mb: int, hop: int, kind: str) -> None:
        target, size = self.paths[mb][hop], self.instance.activation_bytes
        if source == target:
            self.at(now, READY, mb, hop, target, kind)
            return
        link = source, target
        up_s = size / self.instance.peers[source].up_bytes_per_s
        link_s = size / float(self.instance.bandwidth_bytes_per_s[link])
        leaves = max(now, self.up_free.get(source, 0.0))
        self.up_free[source] = leaves + up_s
        starts = max(leaves, self.link_free.get(link, 0.0))
        self.link_free[link] = starts + link_s
        reaches = starts + float(self.instance.latency_s[link])
        down = self.instance.peers[target].down_bytes_per_s
        if size and down < UNLIMITED_BYTES_PER_S:
            self.at(reaches, REACH, mb, hop, target, kind, max(link_s, up_s))
        else:
            self.at(reaches + max(link_s, up_s), READY, mb, hop, target, kind)
