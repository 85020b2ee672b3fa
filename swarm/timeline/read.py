"""Peers' event logs, read as what they are: files from strangers, cut short, or of a later version."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from swarm.errors import UserError
from swarm.timeline.base import Event
from swarm.timeline.schema import EVENTS, SCHEMA_VERSION, Began, Opened

MAX_LINE_BYTES = 1 << 22
"""A close of a thousand microbatches on paths of fifty stages is 3 MB."""
MAX_FILES = 10_000
MAX_EVENTS = 2_000_000
"""At a kilobyte each."""
LINES_A_REPORT = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of one peer. ``at_s``: on the writer's clock, later on the timeline's."""

    at_s: float
    peer: str
    stage: int
    """-1 before the peer had one."""
    name: str
    event: Event


@dataclass
class Section:
    """What one process wrote to one file, all on one clock."""

    clock: str
    unix_at_zero_s: float | None
    """Unix time when its clock was zero; None if it does not say."""
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Reading:
    """All sections, and how many lines were passed over, by reason."""

    sections: list[Section] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    files: int = 0
    events: int = 0


Progress = Callable[[int, int, int], None]
"""(files read, files, events) now and then."""


def find(place: Path) -> list[Path]:
    """The logs in a folder and those below it, by name. Raises ``UserError``."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UserError(f"{place} does not exist; pass the folder that holds the peers' event logs")
    found = sorted(path for path in place.rglob("*.jsonl") if path.is_file())
    if not found:
        raise UserError(
            f"{place} holds no event log (*.jsonl); peers write them with skipswarm join --events FILE"
        )
    if len(found) > MAX_FILES:
        raise UserError(f"{place} holds {len(found):,} logs, more than {MAX_FILES:,}; pass a smaller folder")
    return found


def read(
    place: Path,
    progress: Progress = lambda read, files, events: None,
    steps: range | None = None,
) -> Reading:
    """Every log at or below ``place``; of what names a step, that of ``steps``, where those are given.

    Raises ``UserError``: nothing to read, or too much.
    """
    paths = find(place)
    reading = Reading()
    for path in paths:
        try:
            with path.open("rb") as file:
                for _ in _read_file(file, str(path), reading, steps):
                    progress(reading.files, len(paths), reading.events)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; leave it out") from None
        reading.files += 1
    return reading


def _read_file(file: BinaryIO, name: str, reading: Reading, steps: range | None) -> Iterator[None]:
    """Yields after every so many lines."""
    section = Section(name, None)
    reading.sections.append(section)
    stage = -1
    for number, line in enumerate(_lines(file, reading.passed_over), start=1):
        if number % LINES_A_REPORT == 0:
            yield
        entry = _entry(line, stage, reading.passed_over, steps)
        if entry is None:
            continue
        reading.events += 1
        if reading.events > MAX_EVENTS:
            raise UserError(
                f"more than {MAX_EVENTS:,} events; choose fewer steps (--from-step, --to-step) or fewer logs"
            )
        if isinstance(entry.event, Opened):
            if entry.event.version > SCHEMA_VERSION:
                reading.passed_over["logs of a later version, read as far as known"] += 1
            stage = -1
            section = Section(entry.event.clock or name, entry.event.unix_s - entry.at_s)
            reading.sections.append(section)
        elif isinstance(entry.event, Began):
            stage = entry.event.stage
            entry = Entry(entry.at_s, entry.peer, stage, entry.name, entry.event)
        section.entries.append(entry)


def _lines(file: BinaryIO, passed_over: Counter[str]) -> Iterator[bytes]:
    """Whole lines of bounded length."""
    too_long = False
    while line := file.readline(MAX_LINE_BYTES):
        whole = line.endswith(b"\n")
        if too_long or (not whole and len(line) == MAX_LINE_BYTES):
            passed_over["too long"] += not too_long
            too_long = not whole
        elif not whole:
            passed_over["broken"] += 1  # the writer was killed in the middle of it
        elif line.strip():
            yield line


def _entry(line: bytes, stage: int, passed_over: Counter[str], steps: range | None) -> Entry | None:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        passed_over["broken"] += 1
        return None
    if not isinstance(values, dict):
        passed_over["broken"] += 1
        return None
    at_s, peer, name = values.pop("t", None), values.pop("peer", None), values.pop("event", None)
    known = isinstance(at_s, int | float) and isinstance(peer, str) and isinstance(name, str)
    if not known or not 0 < len(peer) <= 128 or not math.isfinite(at_s) or abs(at_s) > 1e12:
        passed_over["broken"] += 1
        return None
    step = values.get("step")
    if steps is not None and isinstance(step, int) and step not in steps:
        return None
    if name not in EVENTS:
        passed_over["unknown event"] += 1
        return None
    try:
        return Entry(float(at_s), peer, stage, name, EVENTS[name].model_validate(values))
    except ValidationError:
        passed_over["malformed"] += 1
        return None
