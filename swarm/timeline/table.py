"""The schema of the event log for people: ``docs/events.md``."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from swarm.timeline.base import Event
from swarm.timeline.schema import EVENTS, SCHEMA_VERSION


def field_types(event: type[Event]) -> dict[str, str]:
    """name -> type, as people read it."""
    hints = get_type_hints(event)
    return {name: _readable(hints[name]) for name in event.model_fields}


def _readable(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    parts = [_readable(part) for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) in (Union, UnionType):
        return f"{parts[0]} or null"
    name: str = (get_origin(hint) or hint).__name__
    return f"{name}[{', '.join(parts)}]" if parts else name


def table() -> str:
    """The schema for people: ``docs/events.md``."""
    lines = [
        "# The event log",
        "",
        "Made by `skipswarm events schema > docs/events.md`; the source is `swarm/timeline/schema.py`.",
        "",
        "`skipswarm join --events FILE` appends one JSON object a line:",
        '`{"t": seconds, "peer": id, "event": name, ...}`. `t` is on the monotonic scale of the writing',
        "machine, `opened` ties it to Unix time. A path is a list of `stage:peer`. Events marked * are",
        "frequent and written together, within a second; all others at once, and all in order. A peer whose",
        "disk is full goes on without its log. The simulator's peers tell exactly the same.",
        "",
        f"Version {SCHEMA_VERSION}. A reader passes over events and fields that it does not know.",
        "",
        "| event | fields | what it means |",
        "| --- | --- | --- |",
    ]
    for name, event in EVENTS.items():
        fields = ", ".join(f"`{key}: {kind}`" for key, kind in field_types(event).items())
        meaning = re.sub(r"\s+", " ", (event.__doc__ or "").replace("``", "`")).strip()
        star = " *" if event.frequent else ""
        lines.append(f"| {name}{star} | {fields} | {meaning} |")
    return "\n".join(lines) + "\n"
