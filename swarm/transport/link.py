"""One link between two peers: a control stream, and data streams over which large tensors are striped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from swarm.clock import Clock
from swarm.messages import Message, TensorSpec
from swarm.transport.stream import Stream
from swarm.wire import (
    ACKNOWLEDGED_BYTES,
    MAX_HEADER_BYTES,
    FrameKind,
    Preamble,
    WireError,
    bye_frame,
    check_payload,
    decode_header,
    empty_tensor,
    pack,
    part_bounds,
    unpack,
    validated,
)

MAX_DATA_STREAMS = 16
_NO_PAYLOAD = memoryview(bytearray())


@dataclass(frozen=True)
class Limits:
    """What a stranger may cost us, and how long anything may take."""

    max_frame_bytes: int = 1 << 28
    max_header_bytes: int = MAX_HEADER_BYTES
    stripe_bytes: int = 1 << 20
    """Tensors of at least this size are striped over all data streams; smaller ones take turns on them, which
    costs less CPU and on a warm stream no time."""
    max_open_bytes: int = 1 << 28
    """Tensors that a link receives at once; above that it reads no further headers."""
    max_queued_bytes: int = 1 << 24
    """Control messages that wait for one peer."""
    max_queued_tensors: int = 1024
    max_links_per_peer: int = 4
    max_waiting_streams: int = 512
    """Streams of others whose link is not up yet; a quarter of them for one peer."""
    dial_timeout_s: float = 15.0
    hello_timeout_s: float = 10.0
    header_timeout_s: float = 10.0
    transfer_timeout_s: float = 60.0
    min_rate_bytes_per_s: float = 16384.0
    """A tensor may take ``transfer_timeout_s`` and its size over this rate."""


class Session(BaseModel):
    """Which life of a peer a link belongs to; ``generation`` grows when it has dropped all links to us."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: Annotated[bytes, Field(min_length=8, max_length=8)]
    generation: Annotated[int, Field(ge=0, lt=2**62)]


class Hello(BaseModel):
    """The first frame on every stream, from the side that opened it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: Annotated[str, Field(max_length=128)]
    session: Session
    link: Annotated[bytes, Field(min_length=16, max_length=16)]
    stream: Annotated[int, Field(ge=0, le=MAX_DATA_STREAMS)]
    data_streams: Annotated[int, Field(ge=1, le=MAX_DATA_STREAMS)]


class Welcome(BaseModel):
    """The answer to a hello, on the same stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session: Session


def model_frame(kind: FrameKind, model: BaseModel) -> bytes:
    """A hello's or welcome's bytes."""
    header = pack(model.model_dump())
    return Preamble(kind, len(header)).pack() + header


class LinkOwner(Protocol):
    """What a link tells the transport."""

    def link_up(self, link: Link) -> None: ...
    def link_lost(self, link: Link, reason: str) -> None: ...
    def deliver(self, peer: str, message: Message, tensor: Any) -> None: ...
    def admit(self, peer: str, message: Message, spec: TensorSpec) -> str | None: ...
    def transfer_sent(self, peer: str, size: int) -> None: ...
    def transfer_taken(self, peer: str, size: int) -> None: ...


@dataclass
class _Incoming:
    """A tensor that is being received."""

    message: Message
    tensor: torch.Tensor
    memory: memoryview
    parts: int
    deadline: float
    seen: set[int] = field(default_factory=set)
    done: int = 0


class Link:
    """``data_streams`` + 1 streams to one peer. Stream 0 carries control messages, the others tensors.

    A tensor's header comes on the stream of its part 0. Each side queues transfers in one order, the same on
    every stream, so a part that waits for its header never waits for something behind itself.
    """

    def __init__(
        self,
        owner: LinkOwner,
        peer: str,
        link_id: bytes,
        data_streams: int,
        limits: Limits,
        clock: Clock,
        *,
        dialled: bool,
    ) -> None:
        self.peer = peer
        self.link_id = link_id
        self.data_streams = data_streams
        self.dialled = dialled
        self.up = False
        self.closed = False
        self.session: Session | None = None
        self.opened_at = clock.now()
        self.max_header_bytes = limits.max_header_bytes
        self.streams: dict[int, Stream] = {}
        self.lost_reason = ""
        self._owner = owner
        self._limits = limits
        self._clock = clock
        self._welcomed: set[Stream] = set()
        self._transfer = 0
        self._untaken: dict[int, int] = {}
        """Size of each transfer that the other side has still to acknowledge."""
        self._incoming: dict[int, _Incoming] = {}
        self._open_bytes = 0
        self._held: list[Stream] = []
        self._settled: asyncio.Future[None] | None = None

    # Coming up

    def when_settled(self, future: asyncio.Future[None]) -> None:
        """Resolve ``future`` when the link is up; ``WireError`` if it is lost before."""
        self._settled = future

    def _settle(self) -> None:
        if self._settled is not None and not self._settled.done():
            if self.up:
                self._settled.set_result(None)
            else:
                self._settled.set_exception(WireError(self.lost_reason or "closed"))
                self._settled.exception()  # it may have no reader any more

    def add(self, index: int, stream: Stream) -> None:
        """A stream that is part of this link. Raises ``WireError`` for a place that is taken."""
        if index > self.data_streams or index in self.streams:
            raise WireError(f"stream {index} is not one that this link lacks")
        self.streams[index] = stream
        stream.owner = self

    def complete(self) -> bool:
        return len(self.streams) == self.data_streams + 1

    def set_up(self, session: Session) -> None:
        """The other side has answered, or was answered, on every stream."""
        self.session = session
        self.up = True
        self._settle()
        self._owner.link_up(self)
        self._retry_held()

    # Sending

    def send(self, header: bytes, payload: memoryview | None) -> bool:
        """Queue a message; False when too much waits already."""
        if payload is None:
            control = self.streams[0]
            if control.queued_bytes > self._limits.max_queued_bytes:
                return False
            control.write(Preamble(FrameKind.MESSAGE, len(header)).pack() + header)
            return True
        # The least loaded first, and each in turn among equals.
        turn = self._transfer % self.data_streams
        data = [self.streams[1 + (index + turn) % self.data_streams] for index in range(self.data_streams)]
        data.sort(key=lambda stream: stream.queued_bytes)
        if data[0].queued_pieces > 2 * self._limits.max_queued_tensors:
            return False
        self._transfer += 1
        total = len(payload)
        parts = len(data) if total >= self._limits.stripe_bytes else 1
        for part, stream in enumerate(data[:parts]):
            start, end = part_bounds(total, part, parts)
            kind, head = (FrameKind.PART, b"") if part else (FrameKind.TENSOR, header)
            frame = Preamble(kind, len(head), end - start, self._transfer, part, parts)
            stream.write(frame.pack() + head, payload[start:end])
        if total >= ACKNOWLEDGED_BYTES:
            self._untaken[self._transfer] = total
            self._owner.transfer_sent(self.peer, total)
        return True

    # Receiving

    def frame_came(self, stream: Stream, frame: Preamble, header: bytes) -> memoryview | None:
        control = stream is self.streams[0]
        if frame.kind is FrameKind.BYE:
            self._lose(f"the other side: {header[:200].decode(errors='replace')}", tell=False)
            return _NO_PAYLOAD
        if not self.up:
            return self._early_frame_came(stream, frame, header)
        if frame.kind is FrameKind.MESSAGE and control:
            message = decode_header(header)
            if message.tensor is not None:
                raise WireError(f"{message.kind}: a tensor is announced but does not follow")
            self._owner.deliver(self.peer, message, None)
            return _NO_PAYLOAD
        if frame.kind is FrameKind.TENSOR and not control:
            return self._head_came(stream, frame, decode_header(header))
        if frame.kind is FrameKind.PART and not control:
            return self._part_came(stream, frame)
        if frame.kind is FrameKind.TAKEN and control:
            size = self._untaken.pop(frame.transfer, None)
            if size is None:
                raise WireError(f"transfer {frame.transfer} is acknowledged and was not under way")
            self._owner.transfer_taken(self.peer, size)
            return _NO_PAYLOAD
        raise WireError(f"a {frame.kind.name} frame is out of place")

    def payload_came(self, stream: Stream, frame: Preamble) -> None:
        incoming = self._incoming.get(frame.transfer)
        if incoming is None:
            return
        incoming.done += 1
        if incoming.done == incoming.parts:
            del self._incoming[frame.transfer]
            self._open_bytes -= len(incoming.memory)
            if len(incoming.memory) >= ACKNOWLEDGED_BYTES:
                self.streams[0].write(Preamble(FrameKind.TAKEN, transfer=frame.transfer).pack())
            self._owner.deliver(self.peer, incoming.message, incoming.tensor)
            self._retry_held()

    def _early_frame_came(self, stream: Stream, frame: Preamble, header: bytes) -> memoryview | None:
        if not self.dialled or frame.kind is FrameKind.HELLO:
            raise WireError(f"a {frame.kind.name} frame before the link is up")
        if frame.kind is not FrameKind.WELCOME:
            # The other side is up already; our other streams' welcomes are still on their way.
            self._held.append(stream)
            return None
        if stream in self._welcomed:
            raise WireError("a second welcome")
        self._welcomed.add(stream)
        if len(self._welcomed) == self.data_streams + 1:
            self.set_up(validated(Welcome, unpack(header)).session)
        return _NO_PAYLOAD

    def _retry_held(self) -> None:
        """Something changed for the frames that were held back: offer them again, oldest transfer first."""
        held, self._held = self._held, []
        for stream in sorted(held, key=lambda each: each.held_frame.transfer if each.held_frame else 0):
            stream.retry()

    def _head_came(self, stream: Stream, frame: Preamble, message: Message) -> memoryview | None:
        if message.tensor is None:
            raise WireError(f"{message.kind}: a tensor follows that was not announced")
        if frame.parts > self.data_streams or frame.transfer in self._incoming:
            raise WireError(f"transfer {frame.transfer} in {frame.parts} parts")
        total = check_payload(message.tensor, frame, self._limits.max_frame_bytes)
        if self._open_bytes and self._open_bytes + total > self._limits.max_open_bytes:
            self._held.append(stream)
            return None
        return self._open(frame, message, total)

    def _open(self, frame: Preamble, message: Message, total: int) -> memoryview:
        """Allocate what the handler admits, and let parts in that came before this header."""
        spec = message.tensor
        assert spec is not None
        refusal = self._owner.admit(self.peer, message, spec)
        if refusal is not None:
            raise WireError(f"{message.kind} refused: {refusal}")
        tensor, memory = empty_tensor(spec)
        deadline = (
            self._clock.now() + self._limits.transfer_timeout_s + total / self._limits.min_rate_bytes_per_s
        )
        self._incoming[frame.transfer] = _Incoming(message, tensor, memory, frame.parts, deadline)
        self._open_bytes += total
        target = self._target(frame)
        self._retry_held()
        return target

    def _target(self, frame: Preamble) -> memoryview:
        incoming = self._incoming[frame.transfer]
        if frame.parts != incoming.parts or frame.part in incoming.seen:
            raise WireError(f"part {frame.part} of {frame.parts} does not belong to its transfer")
        start, end = part_bounds(len(incoming.memory), frame.part, frame.parts)
        if frame.payload_bytes != end - start:
            raise WireError(f"part {frame.part} has {frame.payload_bytes} bytes, not {end - start}")
        incoming.seen.add(frame.part)
        return incoming.memory[start:end]

    def _part_came(self, stream: Stream, frame: Preamble) -> memoryview | None:
        if frame.transfer in self._incoming:
            return self._target(frame)
        self._held.append(stream)
        return None

    # Ending

    def overdue(self, now: float) -> str | None:
        """Why this link has waited long enough, if it has."""
        limits = self._limits
        if not self.up and now - self.opened_at > limits.hello_timeout_s and not self.dialled:
            return "its hello stayed incomplete"
        for stream in self.streams.values():
            if stream.partial_since is not None and now - stream.partial_since > limits.header_timeout_s:
                return f"a header stayed incomplete for {limits.header_timeout_s:g} s"
        # A header that waits for memory is our delay, and so is a part of its tensor.
        held = [stream.held_frame for stream in self._held]
        ours = {frame.transfer for frame in held if frame and frame.kind is FrameKind.TENSOR}
        for stream, frame in zip(self._held, held, strict=True):
            since = stream.held_since
            if frame is None or since is None or frame.transfer in ours:
                continue
            if now - since > limits.transfer_timeout_s:
                return f"a tensor's header did not come in {limits.transfer_timeout_s:g} s"
        if any(now > incoming.deadline for incoming in self._incoming.values()):
            return "a tensor came too slowly"
        return None

    def stream_lost(self, stream: Stream, reason: str, *, ours: bool) -> None:
        self._lose(reason, tell=ours)

    def fail(self, reason: str) -> None:
        """End the link, tell the other side why, and report it as lost."""
        self._lose(reason, tell=True)

    def _lose(self, reason: str, *, tell: bool) -> None:
        if self.closed:
            return
        self.lost_reason = reason
        self.close(reason if tell else "")
        self._owner.link_lost(self, reason)

    def close(self, farewell: str = "") -> None:
        """Close every stream without a report."""
        self.closed = True
        self._settle()
        for index, stream in self.streams.items():
            stream.close(bye_frame(farewell) if farewell and index == 0 else b"")
        self._incoming.clear()
        self._held.clear()
