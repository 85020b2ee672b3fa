"""What tests of real swarms share: small runs, and looking at what their processes write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootstrap.create import example_toml
from swarm.clock import LoopClock

LIMIT_S = 240.0


def changed_manifest(**changes: object) -> str:
    """The demo's manifest with other values; each key stands in it once."""
    text = example_toml()
    for key, value in changes.items():
        lines = [line for line in text.splitlines() if line.startswith(f"{key} =")]
        assert len(lines) == 1, key
        text = text.replace(lines[0], f"{key} = {value}")
    return text


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    """What a process has written by now, whole lines only."""
    path = directory / "events" / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def first(directory: Path, name: str, event: str, **fields: Any) -> dict[str, Any] | None:
    """The first such event of a process, if it has happened."""
    for found in events(directory, name):
        if found["event"] == event and all(found[key] == value for key, value in fields.items()):
            return found
    return None


async def happens(clock: LoopClock, look: Callable[[], Any]) -> Any:
    """Look at files that other processes write until there is something to see."""
    end_s = clock.now() + LIMIT_S
    while (seen := look()) is None:
        assert clock.now() < end_s, "the swarm did not get there in time"
        woken = asyncio.Event()
        clock.call_later(0.05, woken.set)
        await woken.wait()
    return seen
