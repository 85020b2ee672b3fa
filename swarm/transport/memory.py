"""A simulated network in virtual time: latency, bandwidth, loss and faults, all from one seed.

Plain events on a ``SimClock``, no asyncio: thousands of peers and fault schedules fit in a test. Messages
pass as objects. Links behave as the libp2p transport's: reliable and ordered while they last, and control
goes beside bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from swarm import wire
from swarm.clock import SimClock, Timer
from swarm.messages import Message
from swarm.transport.base import PeerId, TransportHandler
from swarm.transport.simfabric import Fabric, Host, LinkModel

__all__ = ["HostClock", "LinkModel", "SimNetwork", "SimTransport"]

_LEFT = "closed by the other side"


class SimNetwork(Fabric):
    """The simulated peers, and what befalls them.

    ``encode``: pass headers through ``swarm/wire.py`` and check tensors, as a real network would.
    ``outage_limit_s``: how long a connection stands a cut before both ends see it lost.
    """

    def __init__(
        self,
        clock: SimClock,
        seed: int,
        default_link: LinkModel | None = None,
        *,
        encode: bool = False,
        dial_timeout_s: float = 15.0,
        outage_limit_s: float = 35.0,
    ) -> None:
        super().__init__(clock, seed, default_link or LinkModel(), dial_timeout_s, outage_limit_s)
        self.encode = encode

    # Peers

    def transport(self, peer_id: PeerId, *, uplink_bytes_per_s: float = float("inf")) -> SimTransport:
        """Add a peer. ``uplink_bytes_per_s`` is shared by all tensors that it sends."""
        if peer_id in self._hosts and self._hosts[peer_id].alive:
            raise ValueError(f"{peer_id} is on the network already")
        host = self._hosts[peer_id] = Host(peer_id, uplink_bytes_per_s)
        return SimTransport(self, host)

    def clock_of(self, peer_id: PeerId) -> HostClock:
        """The clock of the peer's present life: its timers wait while it is frozen and die with it."""
        return HostClock(self.clock, self._hosts[peer_id])

    def set_link(self, a: PeerId, b: PeerId, model: LinkModel, *, both: bool = True) -> None:
        """What lies between ``a`` and ``b`` from now on; ``both=False``: only from ``a`` to ``b``."""
        self._models[a, b] = model
        if both:
            self._models[b, a] = model

    def link(self, a: PeerId, b: PeerId) -> LinkModel:
        """What lies between ``a`` and ``b``, in that direction."""
        return self._models.get((a, b), self._default)

    def set_uplink(self, peer_id: PeerId, bytes_per_s: float) -> None:
        self._hosts[peer_id].uplink = bytes_per_s

    # Faults

    def reset(self, a: PeerId, b: PeerId) -> None:
        """Break the connection of two peers; both see it now, and what is on its way is lost."""
        for here, there in ((a, b), (b, a)):
            connection = self._hosts[here].connections.get(there)
            if connection is not None:
                self.break_connection(connection, "stream reset")

    def partition(self, groups: Iterable[Iterable[PeerId]]) -> None:
        """Only peers of one group reach each other; a peer in no group is cut off from everybody."""
        self._group_of = {peer: number for number, group in enumerate(groups) for peer in group}
        for number, peer in enumerate(self._hosts):
            self._group_of.setdefault(peer, -1 - number)
        self.reachability_changed()

    def one_way(self, a: PeerId, b: PeerId) -> None:
        """Traffic from ``a`` to ``b`` still comes through; from ``b`` to ``a`` nothing does."""
        self._blocked.add((b, a))
        self.reachability_changed()

    def cut(self, group_of: Mapping[PeerId, Hashable], blocked: Iterable[tuple[PeerId, PeerId]]) -> None:
        """In place of every earlier cut: peers reach each other whose groups are equal (those without one
        have one of their own), except from the first to the second of each pair in ``blocked``."""
        self._group_of = dict(group_of)
        self._blocked = set(blocked)
        self.reachability_changed()

    def heal(self) -> None:
        """End every partition and one-way cut; connections that outlived it deliver what they held."""
        self.cut({}, ())

    def crash(self, peer_id: PeerId) -> None:
        """The process dies: its timers and queues are gone, others see the loss after one latency."""
        host = self._hosts[peer_id]
        host.alive = False
        host.handler = None
        host.deferred.clear()
        for connection in list(host.connections.values()):
            self.leave(host, connection, _LEFT)

    def restart(self, peer_id: PeerId) -> SimTransport:
        """The peer's next life, under the same id and uplink; it is crashed first if it lives."""
        host = self._hosts[peer_id]
        if host.alive:
            self.crash(peer_id)
        return self.transport(peer_id, uplink_bytes_per_s=host.uplink)

    def freeze(self, peer_id: PeerId) -> None:
        """As SIGSTOP: nothing is handled by it, and nobody is told."""
        self._hosts[peer_id].frozen = True

    def thaw(self, peer_id: PeerId) -> None:
        """As SIGCONT: what came meanwhile is handled now, in order."""
        host = self._hosts[peer_id]
        host.frozen = False
        while host.deferred and not host.frozen:
            host.deferred.popleft()()


class SimTransport:
    """``Transport`` on a ``SimNetwork``; made by ``SimNetwork.transport``."""

    def __init__(self, network: SimNetwork, host: Host) -> None:
        self._network = network
        self._host = host

    @property
    def peer_id(self) -> PeerId:
        return self._host.name

    def start(self, handler: TransportHandler) -> None:
        self._host.handler = handler

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Names are addresses here."""

    def send(self, to: PeerId, message: Message, tensor: Any = None) -> None:
        """See ``Transport.send``. ``tensor``: a torch tensor, a numpy array, or anything with ``nbytes``."""
        if (tensor is None) != (message.tensor is None):
            raise wire.WireError(f"{message.kind}: a tensor without its spec, or a spec without its tensor")
        if self._network.encode:
            if isinstance(tensor, torch.Tensor) and wire.spec_of(tensor) != message.tensor:
                raise wire.WireError(f"{message.kind}: the tensor is not {message.tensor}")
            message = wire.decode_header(wire.encode_header(message))
        if self._host.frozen:
            self._host.run(lambda: self._send(to, message, tensor))
        elif self._host.alive:
            self._send(to, message, tensor)

    def _send(self, to: PeerId, message: Message, tensor: Any) -> None:
        host = self._host
        if to == host.name:
            self._network.clock.call_later(0.0, host.run, lambda: self._to_self(message, tensor))
        else:
            self._network.send(host, to, message, tensor)

    def _to_self(self, message: Message, tensor: Any) -> None:
        if self._host.handler is not None:
            self._host.handler.on_message(self._host.name, message, tensor)

    def connect(self, peer: PeerId) -> None:
        if self._host.alive and peer != self._host.name:
            self._network.dial(self._host, peer)

    def disconnect(self, peer: PeerId) -> None:
        connection = self._host.connections.get(peer)
        if connection is not None:
            self._network.leave(self._host, connection, _LEFT)

    def links(self) -> frozenset[PeerId]:
        name = self._host.name
        return frozenset(
            peer for peer, connection in self._host.connections.items() if connection.sides[name].up
        )

    def run(self, call: Callable[[], None]) -> None:
        """Do something on this peer's machine: now, when it thaws if it is frozen, never if it is dead."""
        self._host.run(call)

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        """``close`` without asyncio: nothing here waits."""
        if self._host.alive:
            self._network.crash(self._host.name)


class _HostTimer:
    """A timer of a ``HostClock``."""

    __slots__ = ("args", "callback", "host", "timer")

    def __init__(self, host: Host, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.host = host
        self.callback: Callable[..., None] | None = callback
        self.args = args
        self.timer: Timer | None = None

    def due(self) -> None:
        if self.host.frozen:
            self.host.run(self.fire)
        elif self.host.alive:
            self.fire()

    def fire(self) -> None:
        if self.callback is not None:
            self.callback(*self.args)

    def cancel(self) -> None:
        self.callback = None
        if self.timer is not None:
            self.timer.cancel()


class HostClock:
    """One peer's ``Clock``: stops with its process, dies with it."""

    def __init__(self, clock: SimClock, host: Host) -> None:
        self._clock = clock
        self._host = host

    def now(self) -> float:
        return self._clock.now()

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = _HostTimer(self._host, callback, args)
        timer.timer = self._clock.call_later(delay_s, timer.due)
        return timer
