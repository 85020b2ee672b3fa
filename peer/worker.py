"""The compute queue: one task at a time, the most urgent first, off the event loop."""

from __future__ import annotations

import asyncio
import heapq
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, Protocol

from swarm.clock import Clock
from swarm.errors import UserError


class TaskKind(IntEnum):
    """Kinds of work in order of urgency: what shortens the critical path goes first."""

    SYNC = 0
    LOSS = 1
    BACKWARD = 2
    FORWARD = 3
    EVALUATE = 4
    WEIGHT = 5
    BACKGROUND = 6


Done = Callable[[Any], None]
Told = Callable[[TaskKind, tuple[int, ...], float, float], None]
"""(kind, order, seconds in the queue, seconds of computing) of a task that was computed."""
Failed = Callable[[Exception], None]
UNUSABLE = (ValueError, ArithmeticError, UserError)
"""What arithmetic raises on input that should not have been sent."""


class Executor(Protocol):
    """Runs one piece of work and calls back on the thread that owns the clock."""

    def run(self, kind: TaskKind, work: Callable[[], Any], done: Done, failed: Failed) -> None: ...

    def close(self) -> None: ...


class ThreadExecutor:
    """One thread for torch; results come back to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def run(self, kind: TaskKind, work: Callable[[], Any], done: Done, failed: Failed) -> None:
        def call() -> None:
            try:
                result = work()
            except Exception as error:
                self._post(failed, error)
            else:
                self._post(done, result)

        self._pool.submit(call)

    def _post(self, callback: Callable[[Any], None], argument: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class SimExecutor:
    """Computes at once and answers after a nominal duration of virtual time."""

    def __init__(self, clock: Clock, duration_s: Callable[[TaskKind], float]) -> None:
        self._clock = clock
        self._duration_s = duration_s
        self._hung_until = 0.0
        self._closed = False

    def run(self, kind: TaskKind, work: Callable[[], Any], done: Done, failed: Failed) -> None:
        try:
            result = work()
        except Exception as error:
            self._clock.call_later(self._duration_s(kind), self._answer, failed, error)
        else:
            self._clock.call_later(self._duration_s(kind), self._answer, done, result)

    def hang(self, duration_s: float) -> None:
        """What runs answers only after this time, as when a GPU hangs and comes to again."""
        self._hung_until = max(self._hung_until, self._clock.now() + duration_s)

    def _answer(self, callback: Callable[[Any], None], argument: Any) -> None:
        left_s = self._hung_until - self._clock.now()
        if self._closed:
            return
        if left_s > 0:
            self._clock.call_later(left_s, self._answer, callback, argument)
        else:
            callback(argument)

    def close(self) -> None:
        self._closed = True


_Task = tuple[int, tuple[int, ...], int, float, Callable[[], Any], Done, Failed | None]


class Worker:
    """Hands the executor one task after another: the most urgent kind, then ``order``, then first come.

    ``progress`` counts finished tasks, so that a peer whose compute hangs is known though its loop answers.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        *,
        failed: Failed,
        told: Told = lambda kind, order, wait_s, run_s: None,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._failed = failed
        self._told = told
        self._heap: list[_Task] = []
        self._sequence = 0
        self._busy = False
        self._closed = False
        self._durations: dict[TaskKind, deque[float]] = {kind: deque(maxlen=31) for kind in TaskKind}
        self.busy_s: dict[TaskKind, float] = dict.fromkeys(TaskKind, 0.0)
        self.progress = 0

    def submit(
        self,
        kind: TaskKind,
        order: tuple[int, ...],
        work: Callable[[], Any],
        done: Done,
        refused: Failed | None = None,
    ) -> None:
        """Queue ``work``; ``done(result)`` follows on the loop.

        What the input of others caused (NaN, a wrong state: ``UNUSABLE``) goes to ``refused`` where that is
        given; any other exception is our own failure and goes to the worker's ``failed``.
        """
        self._sequence += 1
        heapq.heappush(self._heap, (int(kind), order, self._sequence, self._clock.now(), work, done, refused))
        self._next()

    def median_s(self, kind: TaskKind) -> float | None:
        """Median duration of the last tasks of ``kind``; None before the first."""
        durations = self._durations[kind]
        return statistics.median(durations) if durations else None

    @property
    def working(self) -> bool:
        """Is a task being computed?"""
        return self._busy

    def clear(self) -> None:
        """Drop what is queued: its results are of no use any more."""
        self._heap.clear()

    def close(self) -> None:
        """Drop what is queued; what runs is finished, its result is dropped."""
        self._closed = True
        self._heap.clear()
        self._executor.close()

    def _next(self) -> None:
        if self._busy or self._closed or not self._heap:
            return
        self._busy = True
        kind, order, _, queued, work, done, refused = heapq.heappop(self._heap)
        started = self._clock.now()

        def computed(result: Any) -> None:
            self._told(TaskKind(kind), order, started - queued, self._clock.now() - started)
            done(result)

        def failed(error: Exception) -> None:
            if refused is not None and isinstance(error, UNUSABLE):
                refused(error)
            else:
                self._failed(error)

        def finished(callback: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(result: Any) -> None:
                if self._closed:
                    return
                duration = self._clock.now() - started
                self._durations[TaskKind(kind)].append(duration)
                self.busy_s[TaskKind(kind)] += duration
                self.progress += 1
                self._busy = False
                try:
                    callback(result)
                finally:
                    self._next()

            return call

        self._executor.run(TaskKind(kind), work, finished(computed), finished(failed))
