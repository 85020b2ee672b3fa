"""One face for both networks, so that one contract test runs over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm import wire
from swarm.clock import Clock, LoopClock, SimClock
from swarm.identity import Identity
from swarm.messages import Message, TensorSpec
from swarm.transport.base import Transport
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.link import Limits
from swarm.transport.memory import LinkModel, SimNetwork
from swarm.transport.p2phost import P2PHost

LIMIT_S = 30.0


class Note(Message):
    """A control message."""

    kind = "test_note"
    number: int


class Bulk(Message):
    """A message with a tensor."""

    kind = "test_bulk"
    number: int


class Recorder:
    """A handler that writes down what it is told."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.messages: list[tuple[str, Message, Any]] = []
        self.events: list[tuple[str, str]] = []
        self.reasons: list[str] = []
        self.admitted: list[TensorSpec] = []
        self.refuse: Callable[[str, Message, TensorSpec], str | None] = lambda *_: None
        self.on_each: Callable[[str, Message, Any], None] = lambda *_: None
        self._changed = changed

    def on_message(self, sender: str, message: Message, tensor: Any) -> None:
        self.messages.append((sender, message, tensor))
        self.on_each(sender, message, tensor)
        self._changed()

    def admit(self, sender: str, message: Message, spec: TensorSpec) -> str | None:
        self.admitted.append(spec)
        return self.refuse(sender, message, spec)

    def on_link_up(self, peer: str) -> None:
        self.events.append(("up", peer))
        self._changed()

    def on_link_lost(self, peer: str, reason: str) -> None:
        self.events.append(("lost", peer))
        self.reasons.append(reason)
        self._changed()

    def numbers(self) -> list[int]:
        """Of the numbered control messages, as they came."""
        return [message.number for _, message, _ in self.messages if isinstance(message, Note)]

    def tensors(self) -> list[Any]:
        return [tensor for _, _, tensor in self.messages if tensor is not None]

    def count(self, kind: str) -> int:
        return sum(1 for event, _ in self.events if event == kind)


@dataclass
class Node:
    """A peer of the test."""

    transport: Transport
    recorder: Recorder
    host: P2PHost | None = None
    identity: Identity = field(default_factory=Identity.generate)

    @property
    def id(self) -> str:
        return self.transport.peer_id

    def say(self, to: str, number: int) -> None:
        self.transport.send(to, Note(number=number))

    def give(self, to: str, tensor: torch.Tensor, number: int = 0) -> None:
        self.transport.send(to, Bulk(number=number, tensor=wire.spec_of(tensor)), tensor)


class MemoryHarness:
    """A simulated network in virtual time."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.network = SimNetwork(
            self.clock,
            seed=1,
            default_link=LinkModel(latency_s=0.02, bandwidth_bytes_per_s=1e8, jitter_s=0.005),
            encode=True,
        )
        self._made = 0

    async def node(self) -> Node:
        self._made += 1
        return self._node(self.network.transport(f"peer-{self._made}"))

    def _node(self, transport: Transport) -> Node:
        recorder = Recorder(lambda: None)
        transport.start(recorder)
        return Node(transport, recorder)

    async def introduce(self, *nodes: Node) -> None:
        for node in nodes:
            for other in nodes:
                node.transport.learn(other.id, (f"/memory/{other.id}",))

    async def until(self, predicate: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        assert self.clock.run_until(predicate, limit_s), "did not happen"

    async def settle(self) -> None:
        """Long enough for anything that is still on its way."""
        self.clock.run_for(1.0)

    async def die(self, node: Node) -> None:
        self.network.crash(node.id)

    async def revive(self, node: Node) -> Node:
        return self._node(self.network.restart(node.id))

    async def unknown(self) -> str:
        return "nobody"

    async def close(self) -> None:
        """Nothing is held."""


class Libp2pHarness:
    """Real p2pds on loopback, all in this process."""

    limits = Limits(dial_timeout_s=5.0)

    def __init__(self) -> None:
        self.clock: Clock = LoopClock()
        self.changed = asyncio.Event()
        self.hosts: list[P2PHost] = []
        self.transports: list[Transport] = []

    async def node(
        self, identity: Identity | None = None, limits: Limits | None = None, run_id: str = "run"
    ) -> Node:
        identity = identity or Identity.generate()
        host = await P2PHost.start(identity)
        self.hosts.append(host)
        transport = Libp2pTransport(host, self.clock, run_id=run_id, limits=limits or self.limits)
        self.transports.append(transport)
        recorder = Recorder(self.changed.set)
        transport.start(recorder)
        await transport.open()
        return Node(transport, recorder, host, identity)

    async def introduce(self, *nodes: Node) -> None:
        for node in nodes:
            assert node.host is not None
            addresses = await node.host.addresses()
            for other in nodes:
                if other is not node:
                    other.transport.learn(node.id, addresses)

    async def until(self, predicate: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(limit_s):
            while not predicate():
                await self.changed.wait()
                self.changed.clear()

    async def settle(self) -> None:
        """Real time enough for anything that is still on its way over loopback."""
        done = asyncio.Event()
        self.clock.call_later(0.3, done.set)
        await done.wait()

    async def die(self, node: Node) -> None:
        assert node.host is not None
        await node.host.close()

    async def revive(self, node: Node) -> Node:
        await node.transport.close()
        return await self.node(node.identity)

    async def unknown(self) -> str:
        return Identity.generate().peer_id

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        for host in self.hosts:
            await host.close()
