"""Telling emulated peers what to do to themselves (``peer/emulation.py``)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from bootstrap.faults.plan import Delay, Drop, Slow
from bootstrap.local import LocalSwarm
from swarm.clock import Clock

RETRY_S = 0.05
ANSWER_S = 60.0
"""A frozen peer answers when it wakes."""
MAX_ANSWER_BYTES = 1 << 16


class ControlError(RuntimeError):
    """A peer refused a command: the driver's own mistake."""


def write_settings(directory: Path, name: str, **settings: Any) -> Path:
    """The emulation settings of a process of a local swarm in ``directory``, with a control socket."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "emulation.json"
    path.write_text(json.dumps({**settings, "control": str(socket_path(directory, name))}))
    return path


def socket_path(directory: Path, name: str) -> Path:
    """Where a process listens for commands."""
    return directory / name / "control"


async def pause(clock: Clock, duration_s: float) -> None:
    """Wait by the clock that was given."""
    woken = asyncio.Event()
    timer = clock.call_later(duration_s, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()


async def tell(swarm: LocalSwarm, name: str, clock: Clock, command: dict[str, Any]) -> bool:
    """Have a peer obey ``command``; False if its process ends before it has answered.

    Waits for a peer that has not come so far as to listen. Raises ControlError if it refuses.
    """
    process = swarm.processes[name]
    end_s = clock.now() + ANSWER_S
    line = json.dumps(command).encode() + b"\n"
    while not process.ended.is_set() and clock.now() < end_s:
        try:
            reader, writer = await asyncio.open_unix_connection(
                str(socket_path(swarm.directory, name)), limit=MAX_ANSWER_BYTES
            )
        except OSError:
            await pause(clock, RETRY_S)
            continue
        try:
            writer.write(line)
            answer = await asyncio.wait_for(reader.readline(), max(0.0, end_s - clock.now()))
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()
        if not answer:
            return False
        error = json.loads(answer).get("error")
        if error is not None:
            raise ControlError(f"{name}: {command['do']}: {error}")
        return True
    return False


def shape_of(fault: Drop | Delay | Slow) -> dict[str, Any]:
    """The command for what a fault does to a link."""
    if isinstance(fault, Drop):
        return {"do": "shape", "loss": fault.share}
    if isinstance(fault, Delay):
        return {"do": "shape", "latency_s": fault.latency_s, "jitter_s": fault.jitter_s}
    return {"do": "shape", "bytes_per_s": fault.bytes_per_s}


def children_of(pid: int | None) -> list[int]:
    """A process's children; none if it lives no more."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def signal_children(pid: int | None, number: signal.Signals) -> None:
    """To a peer's p2pd: a child that nobody but its stopped parent can reap, so its number stays its own."""
    for child in children_of(pid):
        os.kill(child, number)
