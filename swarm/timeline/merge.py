"""All peers' logs as one ordered timeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import UserError
from swarm.timeline.clocks import Alignment, align, entries_of
from swarm.timeline.read import Entry, Progress, read


@dataclass(frozen=True)
class Timeline:
    """What happened, in order; ``entries`` is not empty. Times are in seconds on one scale."""

    entries: list[Entry]
    clocks: dict[str, Alignment]
    passed_over: Counter[str]
    """Lines that could not be used, by reason."""
    files: int

    @property
    def stages(self) -> dict[str, int]:
        """The stage of each peer that wrote, in its last life."""
        return {entry.peer: entry.stage for entry in self.entries if entry.stage >= 0}

    def of_microbatch(self, step: int, index: int) -> list[Entry]:
        """Everything that names this microbatch alone."""
        return [
            entry
            for entry in self.entries
            if getattr(entry.event, "index", None) == index and getattr(entry.event, "step", None) == step
        ]


def merge(
    place: Path,
    progress: Progress = lambda read, files, events: None,
    steps: range | None = None,
) -> Timeline:
    """The logs at or below ``place``, of some steps only if they are given.

    Raises ``UserError``: nothing to read, nothing in it, or too much.
    """
    reading = read(place, progress, steps)
    clocks = align(reading.sections)
    entries = entries_of(reading.sections, clocks)
    if not entries:
        raise UserError(f"{place} holds no event; pass the folder that holds the peers' event logs")
    return Timeline(entries, clocks, reading.passed_over, reading.files)


def short(peer: str) -> str:
    """A peer id as people tell it apart."""
    return peer if len(peer) <= 12 else f"..{peer[-8:]}"
