"""When a packet leaves an emulated network: rates as virtual clocks, latency as a heap of deadlines. No I/O.

A packet goes through three queues: its source's uplink, the pair's own rate, and, ``one_way_s`` later, its
target's downlink. Nothing sleeps: a queue of a given rate is the time at which it will be empty (the virtual
clock of Zhang, SIGCOMM 1990, for one flow).
"""

from __future__ import annotations

import heapq

from benchmarks.wan.profiles import Wan


class Shaper:
    """A first-in-first-out queue in front of a rate, with a limit on the time that is waited in it."""

    __slots__ = ("_free_s", "bytes_per_s", "dropped", "queue_s")

    def __init__(self, bytes_per_s: float, queue_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.queue_s = queue_s
        self.dropped = 0
        self._free_s = 0.0

    def offer(self, now_s: float, size: int) -> float | None:
        """When ``size`` bytes that come at ``now_s`` will have left; None: the queue is full, they are
        dropped. ``now_s`` never falls from one call to the next."""
        free_s = max(now_s, self._free_s)
        if free_s - now_s > self.queue_s:
            self.dropped += 1
            return None
        self._free_s = free_s + size / self.bytes_per_s
        return self._free_s


class Network:
    """Packets between ``n`` hosts, by the time that the caller tells."""

    def __init__(self, wan: Wan) -> None:
        hosts = range(len(wan.one_way_s))
        self._wan = wan
        self._up = [Shaper(rate, wan.queue_s) for rate in wan.up_bytes_per_s]
        self._down = [Shaper(rate, wan.queue_s) for rate in wan.down_bytes_per_s]
        self._pair = [[Shaper(wan.pair_bytes_per_s[a][b], wan.queue_s) for b in hosts] for a in hosts]
        self._cut: set[tuple[int, int]] = set()
        self._heap: list[tuple[float, int, bool, int, int, int, bytes]] = []
        """(due, order, has it passed the downlink, source, target, size, packet)"""
        self._order = 0

    def enter(self, now_s: float, source: int, target: int, packet: bytes, size: int) -> None:
        """A packet of ``size`` bytes on the wire has come from ``source``."""
        if (source, target) in self._cut:
            return
        left_s = self._up[source].offer(now_s, size)
        if left_s is not None:
            # Only this uplink feeds the pair's queue, in order: that may be reckoned ahead.
            left_s = self._pair[source][target].offer(left_s, size)
        if left_s is not None:
            arrives_s = left_s + self._wan.one_way_s[source][target]
            self._push(arrives_s, False, source, target, size, packet)

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """(target, packet) of all that have arrived by ``now_s``."""
        arrived = []
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due_s, _, passed, source, target, size, packet = heapq.heappop(heap)
            if (source, target) in self._cut:
                continue
            if not passed:
                # In the order of arrival: packets of other sources may have overtaken this one on the way.
                left_s = self._down[target].offer(due_s, size)
                if left_s is None:
                    continue
                if left_s > now_s:
                    self._push(left_s, True, source, target, size, packet)
                    continue
            arrived.append((target, packet))
        return arrived

    def next_due_s(self) -> float | None:
        """When ``due`` has something to do; None: not before the next packet enters."""
        return self._heap[0][0] if self._heap else None

    def cut(self, source: int, target: int) -> None:
        """Drop what is and what will be on its way from ``source`` to ``target``."""
        self._cut.add((source, target))

    def heal(self, source: int, target: int) -> None:
        """Undo a ``cut``; what came meanwhile stays lost."""
        self._cut.discard((source, target))

    def change(self, source: int, target: int, *, one_way_s: float, bytes_per_s: float) -> None:
        """Another latency and rate from now on; what waits already leaves when it was to leave."""
        self._wan.one_way_s[source][target] = one_way_s
        self._wan.pair_bytes_per_s[source][target] = bytes_per_s
        self._pair[source][target].bytes_per_s = bytes_per_s

    def dropped(self) -> int:
        """Packets that met a full queue so far."""
        shapers = [*self._up, *self._down, *(shaper for row in self._pair for shaper in row)]
        return sum(shaper.dropped for shaper in shapers)

    def _push(self, due_s: float, passed: bool, source: int, target: int, size: int, packet: bytes) -> None:
        self._order += 1
        heapq.heappush(self._heap, (due_s, self._order, passed, source, target, size, packet))
