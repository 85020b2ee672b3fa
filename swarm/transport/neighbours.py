"""The libp2p transport's books: neighbours, and streams that have not said yet what they belong to."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from swarm import wire
from swarm.transport.base import PeerId
from swarm.transport.link import Hello, Link, Session
from swarm.transport.stream import Stream
from swarm.wire import FrameKind, Preamble, WireError

_HELLO_BYTES = 4096


@dataclass
class PeerStats:
    """What went to and came from one peer."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class Neighbour:
    """What we know of one peer, and what waits for it."""

    def __init__(self, name: PeerId, generation: int) -> None:
        self.name = name
        self.addresses: tuple[str, ...] = ()
        self.links: list[Link] = []
        self.current: Link | None = None
        """The link that we send on."""
        self.session: Session | None = None
        self.generation = generation
        self.dial: asyncio.Task[None] | None = None
        self.awaited = False
        """A dial has begun: whoever asked for it is told how it ends."""
        self.queue: deque[tuple[bytes, memoryview | None]] = deque()
        self.queued_bytes = 0
        self.stats = PeerStats()


class Reception(Protocol):
    """Who takes a stream once its hello has come."""

    arrivals: dict[Stream, Arrival]

    def hello_came(self, stream: Stream, arrival: Arrival, hello: Hello) -> None:
        """Raises ``WireError`` to refuse it."""
        ...


class Arrival:
    """A stream that someone opened, until its hello has come."""

    def __init__(self, reception: Reception, peer: PeerId, since: float) -> None:
        self.max_header_bytes = _HELLO_BYTES
        self.peer = peer
        self.since = since
        self._reception = reception

    def frame_came(self, stream: Stream, frame: Preamble, header: bytes) -> memoryview | None:
        if frame.kind is not FrameKind.HELLO:
            raise WireError(f"a {frame.kind.name} frame before the hello")
        self._reception.hello_came(stream, self, wire.validated(Hello, wire.unpack(header)))
        return memoryview(bytearray())

    def payload_came(self, stream: Stream, frame: Preamble) -> None:
        """A hello has no payload."""

    def stream_lost(self, stream: Stream, reason: str, *, ours: bool) -> None:
        self._reception.arrivals.pop(stream, None)
        if ours:
            stream.close(wire.bye_frame(reason))
