"""The event log: what happened on one peer, one JSON object a line, the same for real and simulated runs.

Every event is declared in ``swarm/timeline/schema.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from swarm.clock import Clock, Timer
from swarm.errors import UserError
from swarm.timeline.schema import FREQUENT, SCHEMA_VERSION

FLUSH_S = 1.0
"""Frequent events are on disk after so long; what is rarer takes them along."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog(Protocol):
    """Where components tell what happened."""

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event`` with plain JSON values."""
        ...


def line_of(t_s: float, peer: str, event: str, fields: dict[str, Any]) -> str:
    """An event as it stands in a log."""
    return _encode({"t": round(t_s, 6), "peer": peer, "event": event, **fields}) + "\n"


def opening(unix_s: float, clock: str) -> dict[str, Any]:
    """The fields of ``opened``, a log's first line."""
    return {"version": SCHEMA_VERSION, "unix_s": round(unix_s, 3), "clock": clock}


class ListEvents:
    """Events kept in memory as ``(time_s, event, fields)``, for tests and the simulator."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened_s = clock.now()
        self.entries: list[tuple[float, str, dict[str, Any]]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.entries.append((self._clock.now(), event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of every ``event``, oldest first."""
        return [fields for _, name, fields in self.entries if name == event]

    def lines(self, peer: str) -> Iterator[str]:
        """What ``JsonLinesEvents`` would have written."""
        yield line_of(self._opened_s, peer, "opened", opening(self._opened_s, "simulated"))
        for t_s, event, fields in self.entries:
            yield line_of(t_s, peer, event, fields)


class NoEvents:
    """Forgets everything."""

    def emit(self, event: str, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLinesEvents:
    """Appends each event to a file as a line ``{"t": seconds, "peer": id, "event": name, ...}``.

    Frequent events (``schema.FREQUENT``) wait for up to ``FLUSH_S`` or for the next rare one; the file is in
    the order of the calls. A disk that takes no more ends the log and nothing else: ``report`` gets one line.
    """

    def __init__(
        self,
        path: Path,
        peer: str,
        clock: Clock,
        *,
        report: Callable[[str], None] = print,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """Raises ``UserError`` if the file cannot be opened."""
        self._path = path
        self._peer = peer
        self._clock = clock
        self._report = report
        self._waiting: list[str] = []
        self._timer: Timer | None = None
        self._open = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; choose another file for the event log with --events"
            ) from None
        if self._torn():
            self._waiting.append("\n")
        self.emit("opened", **opening(unix(), clock_name()))

    def _torn(self) -> bool:
        """Does the file end in half a line of an earlier life?"""
        size = self._file.seek(0, 2)
        if size == 0:
            return False
        self._file.seek(size - 1)
        return self._file.read(1) != b"\n"

    def emit(self, event: str, **fields: Any) -> None:
        if not self._open:
            return
        self._waiting.append(line_of(self._clock.now(), self._peer, event, fields))
        if event not in FREQUENT:
            self._write()
        elif self._timer is None:
            self._timer = self._clock.call_later(FLUSH_S, self._write)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        data = "".join(self._waiting).encode()
        self._waiting.clear()
        try:
            while self._open and data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._shut()
            self._report(
                f"the event log {self._path} ends here: {error.strerror}; the work goes on without it"
            )

    def close(self) -> None:
        """Write what waits; what is told later is forgotten."""
        if self._open:
            self._write()
            self._shut()

    def _shut(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._file.close()


def clock_name() -> str:
    """Names the monotonic clock that this machine's processes share since it was started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = uuid4().bytes
    return hashlib.sha256(boot).hexdigest()[:12]
