"""A hostile peer: speaks to a transport in raw bytes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import PeerID

from swarm import wire
from swarm.identity import Identity
from swarm.transport.libp2p import PROTOCOL
from swarm.transport.link import Hello, Session, model_frame
from swarm.transport.p2phost import P2PHost
from swarm.wire import FrameKind, Preamble
from tests.contract.harness import Node


@dataclass
class RawStream:
    """One stream, as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> bytes:
        """Everything until the other side closed the stream."""
        return await asyncio.wait_for(self.reader.read(), 15)

    async def frame(self) -> tuple[Preamble, bytes]:
        start = await asyncio.wait_for(self.reader.readexactly(wire.PREAMBLE_BYTES), 15)
        preamble = wire.unpack_preamble(start, 0, wire.MAX_HEADER_BYTES)
        return preamble, await self.reader.readexactly(preamble.header_bytes)

    async def farewell(self) -> str:
        """The reason that the other side gives before it closes; empty if it gives none."""
        rest = await self.ended()
        if len(rest) < wire.PREAMBLE_BYTES:
            return ""
        preamble = wire.unpack_preamble(rest, 0, wire.MAX_HEADER_BYTES)
        assert preamble.kind is FrameKind.BYE
        return rest[wire.PREAMBLE_BYTES :].decode()


class RawPeer:
    """A p2pd and nothing else."""

    def __init__(self, host: P2PHost) -> None:
        self.host = host

    @classmethod
    async def start(cls, victim: Node) -> RawPeer:
        assert victim.host is not None
        host = await P2PHost.start(Identity.generate())
        await host.dial(victim.id, await victim.host.addresses())
        return cls(host)

    async def open(self, victim: Node) -> RawStream:
        _, reader, writer = await self.host.p2p.call_binary_stream_handler(
            PeerID.from_base58(victim.id), PROTOCOL
        )
        return RawStream(reader, writer)

    def hellos(self, **changes: Any) -> Callable[[Node, int], Awaitable[RawStream]]:
        """Opens a stream of one link of three by its number, and says hello on it."""
        fields = {
            "run_id": "run",
            "session": Session(instance=secrets.token_bytes(8), generation=0),
            "link": secrets.token_bytes(16),
            "data_streams": 2,
        }

        async def say_hello(victim: Node, index: int) -> RawStream:
            stream = await self.open(victim)
            hello = Hello(**{**fields, "stream": index, **changes})  # type: ignore[arg-type]
            stream.write(model_frame(FrameKind.HELLO, hello))
            return stream

        return say_hello

    async def link(self, victim: Node, **changes: Any) -> list[RawStream]:
        """Say hello properly on three streams, and read the welcomes."""
        say_hello = self.hellos(**changes)
        streams = [await say_hello(victim, index) for index in range(3)]
        for stream in streams:
            preamble, _ = await stream.frame()
            assert preamble.kind is FrameKind.WELCOME
        return streams
