"""An emulated WAN, as long as an ``async with`` lasts: hosts to start processes on, links to cut and slow."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter

from benchmarks.wan.profiles import Wan
from benchmarks.wan.router import Change, Count, Cut, Heal, Setup
from bootstrap.local import Place
from swarm.errors import UserError

START_S = 60.0
END_S = 10.0
_PREFIX = "10.94"
"""Of the hosts' addresses; they exist inside the namespaces alone."""
_SETUP = TypeAdapter(Setup)


@dataclass(frozen=True)
class Host:
    """One machine of the WAN. A process is on it once it has entered ``place.namespace``."""

    number: int
    name: str
    region: str
    place: Place


@dataclass(frozen=True)
class Counts:
    """What the router did so far."""

    carried_bytes: int
    dropped: int
    """Packets that met a full queue, as TCP makes happen."""
    refused: int
    """Packets that a device did not take."""
    cpu_s: float


class WanTestbed:
    """Hosts ``names`` in ``regions`` with ``wan`` between them; nothing is left of it afterwards.

    ``async with`` raises UserError, in one line, where the machine lets nobody make network namespaces.
    """

    def __init__(self, wan: Wan, names: Sequence[str], regions: Sequence[str]) -> None:
        self.wan = wan
        self._names = names
        self._regions = regions
        self._router: asyncio.subprocess.Process | None = None
        self.hosts: dict[str, Host] = {}

    async def __aenter__(self) -> WanTestbed:
        self._router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "benchmarks.wan.router", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C reaches this process, which then ends the router
        )
        addresses = tuple(
            f"{_PREFIX}.{number // 250}.{number % 250 + 1}" for number in range(len(self._names))
        )
        self._write(_SETUP.dump_json(Setup(addresses=addresses, wan=self.wan)))
        try:
            answer = await self._answer(START_S)
            if answer["event"] != "ready":
                raise UserError(answer["reason"])
        except BaseException:
            await self._end()
            raise
        own = Path(f"/proc/{self._router.pid}/fd")
        rows = zip(self._names, self._regions, addresses, answer["namespaces"], strict=True)
        for number, (name, region, address, namespace) in enumerate(rows):
            self.hosts[name] = Host(number, name, region, Place(address, own / str(namespace)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        assert self._router is not None
        assert self._router.stdin is not None
        self._router.stdin.close()
        try:
            await asyncio.wait_for(self._router.wait(), END_S)
        except TimeoutError:
            self._router.kill()
            await self._router.wait()

    def place_of(self, name: str) -> Place:
        """Where a process of that name is to be. Raises KeyError."""
        return self.hosts[name].place

    def cut(self, source: int, target: int) -> None:
        """Drop everything from one host to another, what is on its way too; the other direction stays."""
        self._write(Cut(source=source, target=target).model_dump_json().encode())

    def heal(self, source: int, target: int) -> None:
        """Undo a ``cut``."""
        self._write(Heal(source=source, target=target).model_dump_json().encode())

    def change(self, source: int, target: int, *, one_way_s: float, bytes_per_s: float) -> None:
        """Another latency and rate from one host to another."""
        change = Change(source=source, target=target, one_way_s=one_way_s, bytes_per_s=bytes_per_s)
        self._write(change.model_dump_json().encode())

    async def counts(self) -> Counts:
        """What the router did so far, when it has obeyed all that it was told. Not to be called twice at
        once."""
        self._write(Count().model_dump_json().encode())
        answer = await self._answer(START_S)
        del answer["event"]
        return Counts(**answer)

    def _write(self, line: bytes) -> None:
        assert self._router is not None
        assert self._router.stdin is not None
        self._router.stdin.write(line + b"\n")

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._router is not None
        assert self._router.stdout is not None
        line = await asyncio.wait_for(self._router.stdout.readline(), limit_s)
        if not line:
            raise UserError("the router of the emulated WAN has ended; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer
