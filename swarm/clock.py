"""Time as an argument: a real event loop's clock, and a simulated one that jumps from event to event."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A pending call that can be taken back."""

    def cancel(self) -> None:
        """Take the call back; a second cancel, or one after the call was made, does nothing."""
        ...


class Clock(Protocol):
    """Everything that waits or measures takes one of these; nothing reads the system's time itself."""

    def now(self) -> float:
        """Seconds on a monotonic scale whose zero means nothing."""
        ...

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        """Call ``callback(*args)`` once after ``delay_s`` seconds, on the thread that owns the clock."""
        ...


class LoopClock:
    """The clock of a running asyncio (uvloop) event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        return self._loop.call_later(max(0.0, delay_s), callback, *args)


class _SimTimer:
    __slots__ = ("args", "callback", "cancelled")

    def __init__(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimClock:
    """Virtual time: events run in order of (time, insertion), so a run depends on its inputs alone."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, _SimTimer]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = _SimTimer(callback, args)
        self._sequence += 1
        heapq.heappush(self._heap, (self._now + max(0.0, delay_s), self._sequence, timer))
        return timer

    def step(self) -> bool:
        """Run the next event; False when nothing is left."""
        while self._heap:
            at, _, timer = heapq.heappop(self._heap)
            if timer.cancelled:
                continue
            self._now = at
            timer.callback(*timer.args)
            return True
        return False

    def run_until(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        """Run events until ``predicate()`` holds; False if ``limit_s`` of virtual time pass first."""
        end = self._now + limit_s
        while not predicate():
            while self._heap and self._heap[0][2].cancelled:
                heapq.heappop(self._heap)
            if not self._heap or self._heap[0][0] > end:
                self._now = end
                return predicate()
            self.step()
        return True

    def run_for(self, duration_s: float) -> None:
        """Run every event of the next ``duration_s`` seconds of virtual time."""
        self.run_until(lambda: False, duration_s)
