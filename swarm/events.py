"""The event log: what happened on one peer, one JSON object a line, the same for real and simulated runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, TextIO

from swarm.clock import Clock


class EventLog(Protocol):
    """Where components tell what happened."""

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event`` with plain JSON values."""
        ...


class ListEvents:
    """Events kept in memory as ``(time_s, event, fields)``, for tests and the simulator."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entries: list[tuple[float, str, dict[str, Any]]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.entries.append((self._clock.now(), event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of every ``event``, oldest first."""
        return [fields for _, name, fields in self.entries if name == event]


class NoEvents:
    """Forgets everything."""

    def emit(self, event: str, **fields: Any) -> None:
        pass


class JsonLinesEvents:
    """Appends each event to a file as a line ``{"t": seconds, "peer": id, "event": name, ...}``."""

    def __init__(self, path: Path, peer: str, clock: Clock) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._peer = peer
        self._clock = clock

    def emit(self, event: str, **fields: Any) -> None:
        line = {"t": round(self._clock.now(), 6), "peer": self._peer, "event": event, **fields}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()
