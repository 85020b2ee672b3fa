"""What tests of real swarms share: small runs, and looking at what their processes write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.create import Created, create_run
from bootstrap.local import LocalSwarm
from swarm.clock import LoopClock

LIMIT_S = 240.0


@dataclass
class Opened:
    """A run whose bootstrap node serves; its peers are the test's to start."""

    swarm: LocalSwarm
    made: Created
    join: str
    clock: LoopClock


@asynccontextmanager
async def opened(directory: Path, manifest: str) -> AsyncIterator[Opened]:
    """``manifest`` signed, and its node started; afterwards no process is left."""
    (directory / "run.toml").write_text(manifest)
    made = create_run(directory / "run.toml")
    clock = LoopClock()
    async with LocalSwarm(directory, clock) as swarm:
        await swarm.open()
        swarm.start_node("node", signed=made.signed_path, key=made.key_path)
        ready = await happens(clock, lambda: first(directory, "node", "ready"))
        yield Opened(swarm, made, ready["join"], clock)


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
