"""Emulation: a daemon computes at a nominal pace and does to itself what a signal cannot. Off by default.

For benchmarks and tests of many peers on few cores (``skipswarm join --emulate FILE``). Each task is padded
by waiting until its nominal time is over, so that 16 peers on 2 cores are 16 machines, and a dead one does
not lend its core to the others. Over a unix socket, one JSON object a line, it obeys commands: hang, reset,
cut, shape, disk_full, watch; each is answered by a line and told to the event log (``emulated``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from peer.emulated_links import Cut, EmulatedTransport, Shape
from peer.held import Holdings
from peer.neighbour import LivenessLimits
from peer.worker import Done, Executor, Failed, TaskKind
from swarm.clock import Clock
from swarm.errors import UserError
from swarm.events import JsonLinesEvents, NoEvents
from swarm.manifest import one_line
from swarm.messages import Message, PeerName

if TYPE_CHECKING:
    from swarm.transport.libp2p import Libp2pTransport

MAX_FILE_BYTES = 1 << 16
MAX_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""
NEVER_S = 1e9

Seconds = Annotated[float, Field(ge=0, le=1e6)]
Name = Literal["sync", "loss", "backward", "forward", "evaluate", "weight", "background"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EmulationSettings(_Strict):
    """The file that ``--emulate`` names."""

    version: Literal[1] = 1
    pace: dict[Name, Seconds] = Field(default_factory=dict)
    """Nominal seconds of a task by its kind; those that are not named take what they take."""
    control: str | None = None
    """Path of the unix socket to obey; none without it."""
    bare: bool = False
    """No heartbeats, no output kept after it was sent, no event but ``stepped``: shows what these cost."""

    @classmethod
    def load(cls, path: Path) -> EmulationSettings:
        """Raises UserError, in one line, for a file that cannot be read or is none."""
        try:
            with path.open("rb") as file:
                settings = cls.model_validate_json(file.read(MAX_FILE_BYTES))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None
        except ValidationError as error:
            raise UserError(f"{path}: not emulation settings: {one_line(error)}") from None
        if settings.control is not None and len(os.fsencode(settings.control)) > MAX_SOCKET_PATH:
            raise UserError(f"{path}: the control socket's path is too long; choose a shorter one")
        return settings


# -- commands ----------------------------------------------------------------------------------------------


class Hang(_Strict):
    """What is computed from now on comes so much later; heartbeats go on."""

    do: Literal["hang"] = "hang"
    duration_s: Seconds


class ResetLinks(_Strict):
    """Links to these peers (None: to all) break; both sides see it at once."""

    do: Literal["reset"] = "reset"
    peers: frozenset[PeerName] | None = None


class CutOff(_Strict):
    """No new link to ``peers`` (None: to anybody); ``deaf``: nothing comes from them on old ones either."""

    do: Literal["cut"] = "cut"
    peers: frozenset[PeerName] | None = None
    deaf: bool = True
    duration_s: Seconds


class ShapeLinks(_Strict):
    """What is sent to ``peers`` (None: to anybody) comes late."""

    do: Literal["shape"] = "shape"
    peers: frozenset[PeerName] | None = None
    latency_s: Seconds = 0.0
    jitter_s: Seconds = 0.0
    bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    duration_s: Seconds


class DiskFull(_Strict):
    """Checkpoints fail with ENOSPC."""

    do: Literal["disk_full"] = "disk_full"
    duration_s: Seconds


class Watch(_Strict):
    """At the ``nth`` message of a kind in ``step`` (None: any): just after it was handed to the network, or
    before the protocol has seen it. ``then``: what this process does to itself in that very call; "tell": it
    only tells, at each such message from the ``nth`` on."""

    do: Literal["watch"] = "watch"
    number: Annotated[int, Field(ge=0)]
    """Named in the event."""
    message: PeerName
    side: Literal["sent", "received"] = "received"
    step: Annotated[int, Field(ge=0)] | None = None
    nth: Annotated[int, Field(ge=1)] = 1
    then: Literal["kill", "freeze", "tell"] = "tell"


Command = Annotated[Hang | ResetLinks | CutOff | ShapeLinks | DiskFull | Watch, Field(discriminator="do")]
_COMMANDS: TypeAdapter[Hang | ResetLinks | CutOff | ShapeLinks | DiskFull | Watch] = TypeAdapter(Command)
_THEN = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Emulation:
    """One daemon's emulation: wraps what the daemon is assembled from, then obeys."""

    def __init__(self, settings: EmulationSettings, clock: Clock, events: JsonLinesEvents | NoEvents) -> None:
        self._settings = settings
        self._clock = clock
        self._events = events
        self._rng = random.Random(0)
        self._executor: PacedExecutor | None = None
        self._transport: EmulatedTransport | None = None
        self._server: asyncio.Server | None = None
        self._full_until_s = 0.0
        self._watches: list[tuple[Watch, list[int]]] = []

    # What the daemon is assembled from

    def events(self) -> AnyEvents:
        """The event log that the daemon is to use."""
        return _OnlySteps(self._events) if self._settings.bare else self._events

    def liveness(self) -> LivenessLimits:
        """The failure detector's times."""
        return LivenessLimits(interval_s=NEVER_S) if self._settings.bare else LivenessLimits()

    def executor(self, inner: Executor) -> PacedExecutor:
        pace = {TaskKind[name.upper()]: pace_s for name, pace_s in self._settings.pace.items()}
        self._executor = PacedExecutor(inner, self._clock, pace)
        return self._executor

    def transport(self, inner: Libp2pTransport) -> EmulatedTransport:
        self._transport = EmulatedTransport(inner, self._clock, self._rng, seen=self._seen)
        return self._transport

    def store(self, write: Callable[..., Path]) -> Callable[..., Path]:
        """The call that writes a checkpoint, which fails while the disk is full."""

        def stored(*args: Any, **keywords: Any) -> Path:
            if self._clock.now() < self._full_until_s:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **keywords)

        return stored

    # The control socket

    async def open(self, holdings: Holdings) -> None:
        """Obey from now on. ``holdings``: what the peer keeps. Raises UserError if the socket cannot be
        made."""
        if self._settings.bare and self._transport is not None:
            self._transport.holdings = holdings
        path = self._settings.control
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier life
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; choose another control socket") from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                os.unlink(self._settings.control or "")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):  # a line beyond the reader's limit is a ValueError
            while line := await reader.readline():
                writer.write(json.dumps(self._answer(line)).encode() + b"\n")
                await writer.drain()
        writer.close()

    def _answer(self, line: bytes) -> dict[str, str]:
        try:
            command = _COMMANDS.validate_json(line)
        except ValidationError as error:
            return {"error": one_line(error)}
        self._obey(command)
        return {"done": command.do}

    def _obey(self, command: Hang | ResetLinks | CutOff | ShapeLinks | DiskFull | Watch) -> None:
        assert self._executor is not None
        assert self._transport is not None
        if isinstance(command, Watch):
            self._watches.append((command, [0]))
            return
        self._events.emit("emulated", **command.model_dump(mode="json"))
        if isinstance(command, Hang):
            self._executor.hang(command.duration_s)
        elif isinstance(command, ResetLinks):
            self._transport.reset(command.peers)
        elif isinstance(command, CutOff):
            self._transport.cut(Cut(command.peers, command.deaf), command.duration_s)
        elif isinstance(command, ShapeLinks):
            shape = Shape(
                command.peers, command.latency_s, command.jitter_s, command.bytes_per_s, command.loss
            )
            self._transport.shape(shape, command.duration_s)
        else:
            self._full_until_s = max(self._full_until_s, self._clock.now() + command.duration_s)

    def _seen(self, side: str, other: str, message: Message) -> None:
        close = getattr(message, "close", None)
        step = getattr(message, "step", None) if close is None else close.step
        for entry in list(self._watches):
            watch, count = entry
            if (watch.message, watch.side) != (message.kind, side) or watch.step not in (None, step):
                continue
            count[0] += 1
            if count[0] < watch.nth:
                continue
            self._events.emit(
                "emulated",
                do="watch",
                number=watch.number,
                other=other,
                step=step,
                index=getattr(message, "index", None),
                then=watch.then,
            )
            if watch.then != "tell":
                self._watches.remove(entry)
                os.kill(os.getpid(), _THEN[watch.then])


class PacedExecutor:
    """Answers no sooner than a task's nominal time is over, and not while it hangs."""

    def __init__(self, inner: Executor, clock: Clock, pace: dict[TaskKind, float]) -> None:
        self._inner = inner
        self._clock = clock
        self._pace = pace
        self._hung_until_s = 0.0
        self._closed = False

    def run(self, kind: TaskKind, work: Callable[[], Any], done: Done, failed: Failed) -> None:
        due_s = self._clock.now() + self._pace.get(kind, 0.0)

        def late(callback: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda result: self._answer(due_s, callback, result)

        self._inner.run(kind, work, late(done), late(failed))

    def hang(self, duration_s: float) -> None:
        self._hung_until_s = max(self._hung_until_s, self._clock.now() + duration_s)

    def _answer(self, due_s: float, callback: Callable[[Any], None], result: Any) -> None:
        if self._closed:
            return
        left_s = max(due_s, self._hung_until_s) - self._clock.now()
        if left_s > 0:
            self._clock.call_later(left_s, self._answer, due_s, callback, result)
        else:
            callback(result)

    def close(self) -> None:
        self._closed = True
        self._inner.close()


class _OnlySteps:
    """An event log that keeps the steps and forgets the rest."""

    def __init__(self, inner: JsonLinesEvents | NoEvents) -> None:
        self._inner = inner

    def emit(self, event: str, **fields: Any) -> None:
        if event == "stepped":
            self._inner.emit("stepped", **fields)

    def close(self) -> None:
        self._inner.close()


AnyEvents = JsonLinesEvents | NoEvents | _OnlySteps
