"""A whole swarm on one machine: each node and peer a process of its own, all gone when this one is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.clock import Clock
from swarm.errors import UserError

FORKER_START_S = 120.0
"""torch and hivemind are imported in this time, even on a slow and busy machine."""
FORKER_END_S = 15.0


class LocalSwarmError(UserError):
    """The swarm on this machine cannot be had; one line."""


@dataclass(frozen=True)
class Place:
    """Where in the network a process is."""

    address: str = "127.0.0.1"
    namespace: Path | None = None
    """The network namespace to enter first, as a file; None: the starter's own."""


@dataclass
class Process:
    """One process of the swarm; ``code`` is its exit code, negative for a signal, None while it lives."""

    name: str
    kind: str
    log: Path
    pid: int | None = None
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def last_line(self) -> str:
        """The last that it printed; empty if it printed nothing."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")[:300]
        return ""


class LocalSwarm:
    """Processes below ``directory``: state and log of each in ``NAME/``, events in ``events/NAME.jsonl``.

    An async context manager; afterwards, whatever went wrong, no process is left. That holds after SIGKILL of
    this process too: see ``bootstrap.forker``. ``place_of`` says where the process of a name is to be.
    """

    def __init__(
        self, directory: Path, clock: Clock, place_of: Callable[[str], Place] = lambda _: Place()
    ) -> None:
        self.directory = directory
        self._place_of = place_of
        self.processes: dict[str, Process] = {}
        self._clock = clock
        self._forker: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()

    async def __aenter__(self) -> LocalSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Start the forker and wait for its imports. Raises ``LocalSwarmError``."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Beside the peers' logs; what it writes there is a traceback, or nothing.
        log = self.directory / "forker.log"
        with log.open("ab") as errors:
            self._forker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "bootstrap.forker", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process, which then tells the others
            )
        self._reader = asyncio.ensure_future(self._read(self._forker))
        await wait(self._clock, self._ready, FORKER_START_S)
        if not self._ready.is_set() or self._gone.is_set():
            raise LocalSwarmError(f"the swarm's processes cannot be started; see {log}")

    async def _read(self, forker: asyncio.subprocess.Process) -> None:
        assert forker.stdout is not None
        while line := await forker.stdout.readline():
            answer = json.loads(line)
            if answer["event"] == "ready":
                self._ready.set()
            elif answer["event"] == "started":
                self.processes[answer["name"]].pid = answer["pid"]
            elif answer["event"] == "ended":
                process = self.processes[answer["name"]]
                process.code = answer["code"]
                process.ended.set()
        self._gone.set()
        self._ready.set()
        for process in self.processes.values():
            process.ended.set()

    def start_node(self, name: str, *, signed: Path, key: Path) -> Process:
        """The bootstrap node of a signed manifest; its event ``ready`` has the join string."""
        identity = self.directory / name / "identity.key"
        return self._start(name, "node", {"signed": str(signed), "key": str(key), "identity": str(identity)})

    def start_peer(
        self,
        name: str,
        *,
        join: str,
        stage: int | None = None,
        trace: Path | None = None,
        usage: Path | None = None,
        emulate: Path | None = None,
    ) -> Process:
        """A peer daemon; its checkpoints go to ``NAME/checkpoints``. A name whose process has
        ended may be started again: it is the same identity in another life.

        ``trace``, ``usage`` and ``emulate`` are ``DaemonOptions``'.
        """
        options = {
            "join": join,
            "stage": stage,
            "directory": str(self.directory / name),
            "trace": str(trace) if trace else None,
            "usage": str(usage) if usage else None,
            "emulate": str(emulate) if emulate else None,
        }
        return self._start(name, "peer", options)

    def _start(self, name: str, kind: str, options: dict[str, Any]) -> Process:
        before = self.processes.get(name)
        if before is not None and not before.ended.is_set():
            raise ValueError(f"{name} is started already")
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        process = Process(name, kind, folder / "log")
        self.processes[name] = process
        place = self._place_of(name)
        options["events"] = str(self.events_path(name))
        options["host_maddr"] = f"/ip4/{place.address}/tcp/0"
        options["namespace"] = str(place.namespace) if place.namespace else None
        self._tell(do="start", name=name, kind=kind, log=str(process.log), options=options)
        return process

    def events_path(self, name: str) -> Path:
        """Where the event log of a process is."""
        return self.directory / "events" / f"{name}.jsonl"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process; nothing happens if it has ended."""
        self._tell(do="signal", name=name, number=int(number))

    def _tell(self, **command: Any) -> None:
        if self._gone.is_set() or self._forker is None or self._forker.stdin is None:
            raise LocalSwarmError(f"the swarm's processes are gone; see {self.directory / 'forker.log'}")
        self._forker.stdin.write(json.dumps(command).encode() + b"\n")

    def living(self) -> list[Process]:
        """Processes that have not ended."""
        return [process for process in self.processes.values() if not process.ended.is_set()]

    def living_peers(self) -> list[Process]:
        """Those of them that are peers."""
        return [process for process in self.living() if process.kind == "peer"]

    async def stop(self, limit_s: float) -> bool:
        """Ask the peers to leave in their own time, then the nodes; False if ``limit_s`` was too short."""
        end_s = self._clock.now() + limit_s
        for kind in ("peer", "node"):
            asked = [process for process in self.living() if process.kind == kind]
            for process in asked:
                self.signal(process.name, signal.SIGTERM)
            for process in asked:
                await wait(self._clock, process.ended, end_s - self._clock.now())
        return not self.living()

    async def close(self) -> None:
        """Kill what is left, and wait until nothing is. A second call does nothing."""
        forker, self._forker = self._forker, None
        if forker is None:
            return
        assert forker.stdin is not None
        forker.stdin.close()
        if not await wait(self._clock, self._gone, FORKER_END_S):
            forker.kill()  # its children die with it
        await forker.wait()
        if self._reader is not None:
            await self._reader


async def wait(clock: Clock, event: asyncio.Event, limit_s: float) -> bool:
    """Until ``event`` is set, but no longer than ``limit_s``; whether it is."""
    late = asyncio.Event()
    timer = clock.call_later(limit_s, late.set)
    waits = [asyncio.ensure_future(one.wait()) for one in (event, late)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        for one in waits:
            one.cancel()
    return event.is_set()
