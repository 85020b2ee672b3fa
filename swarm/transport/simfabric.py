"""What carries messages between simulated peers: connections, rates and delays, as events in virtual time.

``SimNetwork`` in ``memory.py`` adds the peers and the faults.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from swarm.clock import SimClock, Timer
from swarm.messages import Message
from swarm.transport.base import PeerId, TransportHandler

_SEGMENT_BYTES = 1400
_STREAMS = 4
_MIN_RTO_S = 0.2
_MAX_RTO_S = 10.0
_MATHIS = 1.22


@dataclass(frozen=True)
class LinkModel:
    """One direction between two peers."""

    latency_s: float = 0.01
    """One way."""
    bandwidth_bytes_per_s: float = float("inf")
    loss: float = 0.0
    """Share of packets lost. A reliable stream feels it as delay: retransmissions, and for bulk the rate of
    Mathis et al. 1997, 1.22 segments a round trip over sqrt(loss), on each of four streams."""
    jitter_s: float = 0.0
    """Each message is late by up to this, uniformly."""

    def bulk_rate(self) -> float:
        """Bytes/s that the data streams reach together."""
        if self.loss <= 0:
            return self.bandwidth_bytes_per_s
        round_trip_s = max(2 * self.latency_s, 1e-4)
        mathis = _STREAMS * _MATHIS * _SEGMENT_BYTES / (round_trip_s * math.sqrt(self.loss))
        return min(self.bandwidth_bytes_per_s, mathis)


@dataclass(slots=True)
class Parcel:
    """A message on its way."""

    message: Message
    tensor: Any
    nbytes: int
    admitted: bool


class Side:
    """One end of a connection: what its owner knows, and what it sends."""

    __slots__ = ("busy_until", "dial_timer", "gone", "held", "last_control", "owner", "queue", "up")

    def __init__(self, owner: PeerId) -> None:
        self.owner = owner
        self.up = False
        self.gone = False
        """It has dropped the connection."""
        self.dial_timer: Timer | None = None
        self.queue: list[tuple[Message, Any]] = []
        """Sent before the link was up."""
        self.held: list[Parcel] = []
        """Came for this side while it could not be reached."""
        self.last_control = 0.0
        self.busy_until = 0.0


class Connection:
    """A link between two peers, and the dials that may become one. Gone for good when it is broken."""

    __slots__ = ("broken", "cut_timer", "sides")

    def __init__(self, a: PeerId, b: PeerId) -> None:
        self.sides = {a: Side(a), b: Side(b)}
        self.broken = False
        self.cut_timer: Timer | None = None

    def other(self, peer: PeerId) -> Side:
        a, b = self.sides.values()
        return b if a.owner == peer else a


class Host:
    """A peer's machine, in one of its lives."""

    __slots__ = ("alive", "connections", "deferred", "frozen", "handler", "name", "uplink", "uplink_until")

    def __init__(self, name: PeerId, uplink: float) -> None:
        self.name = name
        self.handler: TransportHandler | None = None
        self.alive = True
        self.frozen = False
        self.deferred: deque[Callable[[], None]] = deque()
        self.connections: dict[PeerId, Connection] = {}
        self.uplink = uplink
        self.uplink_until = 0.0

    def run(self, call: Callable[[], None]) -> None:
        """Run something on this machine: never if it is dead, later if it is frozen."""
        if self.frozen and self.alive:
            self.deferred.append(call)
        elif self.alive:
            call()


class Fabric:
    """Dials, delivers and loses."""

    def __init__(
        self,
        clock: SimClock,
        seed: int,
        default_link: LinkModel,
        dial_timeout_s: float,
        outage_limit_s: float,
    ) -> None:
        self.clock = clock
        self.messages_delivered = 0
        self.bytes_delivered = 0
        self._rng = random.Random(seed)
        self._dial_timeout_s = dial_timeout_s
        self._outage_limit_s = outage_limit_s
        self._default = default_link
        self._models: dict[tuple[PeerId, PeerId], LinkModel] = {}
        self._hosts: dict[PeerId, Host] = {}
        self._blocked: set[tuple[PeerId, PeerId]] = set()
        self._group_of: dict[PeerId, Hashable] = {}

    def _latency_s(self, a: PeerId, b: PeerId) -> float:
        return self._models.get((a, b), self._default).latency_s

    def _reaches(self, a: PeerId, b: PeerId) -> bool:
        if self._blocked and (a, b) in self._blocked:
            return False
        return not self._group_of or self._group_of.get(a) == self._group_of.get(b)

    # Sending

    def send(self, host: Host, to: PeerId, message: Message, tensor: Any) -> None:
        """Put a message on the connection to ``to``; dial if there is none."""
        connection = self.connection(host, to)
        side = connection.sides[host.name]
        if not side.up:
            side.queue.append((message, tensor))
            self.dial(host, to)
        elif tensor is None:
            self._transmit_control(connection, side, to, message)
        else:
            self._transmit_tensor(connection, host, to, Parcel(message, tensor, int(tensor.nbytes), False))

    def _delay_s(self, model: LinkModel) -> float:
        """Latency, jitter, and time-outs before a packet gets through, doubling each time (RFC 6298)."""
        delay_s = model.latency_s
        if model.jitter_s:
            delay_s += model.jitter_s * self._rng.random()
        if model.loss:
            timeout_s = max(_MIN_RTO_S, 3 * model.latency_s)
            while self._rng.random() < model.loss and delay_s < self._outage_limit_s:
                delay_s += timeout_s
                timeout_s = min(2 * timeout_s, _MAX_RTO_S)
        return delay_s

    def _transmit_control(self, connection: Connection, side: Side, to: PeerId, message: Message) -> None:
        """Control has its own stream: it waits behind other control messages, never behind bulk."""
        now = self.clock.now()
        model = self._models.get((side.owner, to), self._default)
        # A microsecond apart, which no rounding of times can turn round.
        side.last_control = max(now + self._delay_s(model), side.last_control + 1e-6)
        self.clock.call_later(
            side.last_control - now, self._arrive, connection, to, Parcel(message, None, 0, True)
        )

    def _transmit_tensor(self, connection: Connection, host: Host, to: PeerId, parcel: Parcel) -> None:
        """The sender's uplink in turn with all else that it sends, then the link's own rate."""
        now = self.clock.now()
        model = self._models.get((host.name, to), self._default)
        side = connection.sides[host.name]
        delay_s = self._delay_s(model)
        begin = max(now, host.uplink_until)
        host.uplink_until = begin + parcel.nbytes / host.uplink
        begin = max(begin, side.busy_until)
        side.busy_until = max(host.uplink_until, begin + parcel.nbytes / model.bulk_rate())
        rest_s = side.busy_until - begin
        wait_s = begin + delay_s - now
        if rest_s > 0:
            self.clock.call_later(wait_s, self._head_arrives, connection, to, parcel, rest_s)
        else:
            self.clock.call_later(wait_s, self._arrive, connection, to, parcel)

    # Arriving

    def _head_arrives(self, connection: Connection, to: PeerId, parcel: Parcel, rest_s: float) -> None:
        """A tensor's header is there, its bytes follow: the receiver may refuse them now."""
        host = self._hosts[to]
        sender = connection.other(to).owner
        reached = host.alive and not host.frozen and connection.sides[to].up and self._reaches(sender, to)
        if not connection.broken and reached:
            self._admit(connection, host, sender, parcel)
        if not connection.broken:
            self.clock.call_later(rest_s, self._arrive, connection, to, parcel)

    def _arrive(self, connection: Connection, to: PeerId, parcel: Parcel) -> None:
        if connection.broken:
            return
        side = connection.sides[to]
        if side.held or not self._reaches(connection.other(to).owner, to):
            side.held.append(parcel)
            return
        host = self._hosts[to]
        if host.frozen:
            host.run(lambda: self._deliver(connection, host, parcel))
        else:
            self._deliver(connection, host, parcel)

    def _deliver(self, connection: Connection, host: Host, parcel: Parcel) -> None:
        if connection.broken or not connection.sides[host.name].up:
            return
        sender = connection.other(host.name).owner
        if not parcel.admitted:
            self._admit(connection, host, sender, parcel)
        if parcel.admitted and host.handler is not None:
            self.messages_delivered += 1
            self.bytes_delivered += parcel.nbytes
            host.handler.on_message(sender, parcel.message, parcel.tensor)

    def _admit(self, connection: Connection, host: Host, sender: PeerId, parcel: Parcel) -> None:
        spec = parcel.message.tensor
        if host.handler is None or spec is None:
            return
        refusal = host.handler.admit(sender, parcel.message, spec)
        if refusal is None:
            parcel.admitted = True
        else:
            self.break_connection(connection, f"{parcel.message.kind} refused: {refusal}")

    # Coming up

    def connection(self, host: Host, to: PeerId) -> Connection:
        """The host's connection to ``to``: its own, or the one that ``to`` is dialling, or a new one."""
        connection = host.connections.get(to)
        if connection is None:
            there = self._hosts.get(to)
            connection = there.connections.get(host.name) if there is not None else None
            if connection is None or connection.broken or connection.sides[host.name].gone:
                connection = Connection(host.name, to)
            host.connections[to] = connection
        return connection

    def dial(self, host: Host, to: PeerId) -> None:
        """Begin to bring the host's connection to ``to`` up, unless it is or is being."""
        connection = self.connection(host, to)
        side = connection.sides[host.name]
        if side.up or side.dial_timer is not None:
            return
        there = self._hosts.get(to)
        latency_s = self._latency_s(host.name, to)
        failed = self._dial_failed
        if (there is None or not there.alive) and self._reaches(host.name, to):
            side.dial_timer = self.clock.call_later(
                2 * latency_s, failed, connection, host, "connection refused"
            )
            return
        side.dial_timer = self.clock.call_later(self._dial_timeout_s, failed, connection, host, "no answer")
        self.clock.call_later(latency_s, self._hello, connection, host, to)

    def _hello(self, connection: Connection, dialler: Host, to: PeerId) -> None:
        there = self._hosts.get(to)
        name = dialler.name
        if there is not None and self._reaches(name, to) and self._reaches(to, name):
            there.run(lambda: self._answer(connection, dialler, there))

    def _answer(self, connection: Connection, dialler: Host, there: Host) -> None:
        if connection.broken or connection.sides[dialler.name].dial_timer is None:
            return
        old = there.connections.get(dialler.name)
        if old is not None and old is not connection:
            self._end_side(old, there, "it has dropped our link and dialled anew")
            self._forget(old)
        there.connections[dialler.name] = connection
        back_s = self._latency_s(there.name, dialler.name)
        # The answer goes out before anything that the other side sends on the link.
        self.clock.call_later(back_s, dialler.run, lambda: self._come_up(connection, dialler))
        self._come_up(connection, there)

    def _come_up(self, connection: Connection, host: Host) -> None:
        """The link is up for one side; what it had queued goes out."""
        side = connection.sides[host.name]
        if connection.broken or side.up or side.gone:
            return
        side.up = True
        if side.dial_timer is not None:
            side.dial_timer.cancel()
            side.dial_timer = None
        queue, side.queue = side.queue, []
        other = connection.other(host.name).owner
        for message, tensor in queue:
            self.send(host, other, message, tensor)
        if host.handler is not None:
            host.handler.on_link_up(other)

    def _dial_failed(self, connection: Connection, host: Host, reason: str) -> None:
        reason = f"cannot be reached: {reason}"
        there = self._hosts.get(connection.other(host.name).owner)
        self._end_side(connection, host, reason)
        other = connection.other(host.name)
        if other.up and there is not None:
            self._end_side(connection, there, "closed by the other side")
        if other.dial_timer is None:
            self._forget(connection)

    # Going down

    def break_connection(self, connection: Connection, reason: str) -> None:
        """Both sides see the loss now. Never called from within ``send`` or ``connect``."""
        if not connection.broken:
            for name in connection.sides:
                host = self._hosts.get(name)
                if host is not None:
                    self._end_side(connection, host, reason)
            self._forget(connection)

    def leave(self, host: Host, connection: Connection, reason: str) -> None:
        """One side drops the connection, untold; what it sent comes through until the other side sees it."""
        own, other = connection.sides[host.name], connection.other(host.name)
        self._close_side(connection, host)
        own.gone = True
        if not other.up and other.dial_timer is None:
            self._forget(connection)
            return
        delay_s = self._latency_s(host.name, other.owner)
        if not self._reaches(host.name, other.owner):
            delay_s = self._outage_limit_s
        self.clock.call_later(delay_s, self.break_connection, connection, reason)

    def _close_side(self, connection: Connection, host: Host) -> bool:
        """Take the connection from one side; whether that is a loss which its owner should hear of."""
        side = connection.sides[host.name]
        known = (side.up or side.dial_timer is not None) and not side.gone
        if side.dial_timer is not None:
            side.dial_timer.cancel()
            side.dial_timer = None
        side.up = False
        side.queue.clear()
        other = connection.other(host.name).owner
        if host.connections.get(other) is connection:
            del host.connections[other]
        return known

    def _end_side(self, connection: Connection, host: Host, reason: str) -> None:
        """One side sees the loss: now, or when it thaws."""

        def see() -> None:
            other = connection.other(host.name).owner
            if self._close_side(connection, host) and host.handler is not None:
                host.handler.on_link_lost(other, reason)

        host.run(see)

    def _forget(self, connection: Connection) -> None:
        connection.broken = True
        if connection.cut_timer is not None:
            connection.cut_timer.cancel()

    def reachability_changed(self) -> None:
        """Hold or release what is on its way, and give a cut connection until the outage limit."""
        seen = dict.fromkeys(c for host in self._hosts.values() for c in host.connections.values())
        for connection in seen:
            a, b = connection.sides
            whole = self._reaches(a, b) and self._reaches(b, a)
            if whole and connection.cut_timer is not None:
                connection.cut_timer.cancel()
                connection.cut_timer = None
            elif not whole and connection.cut_timer is None:
                connection.cut_timer = self.clock.call_later(
                    self._outage_limit_s, self.break_connection, connection, "no answer for too long"
                )
            for side in connection.sides.values():
                if side.held and self._reaches(connection.other(side.owner).owner, side.owner):
                    self._release(connection, side)

    def _release(self, connection: Connection, side: Side) -> None:
        """After a cut, TCP's next retransmission brings what was held, in order, and before what is newer."""
        other = connection.other(side.owner)
        delay_s = self._latency_s(other.owner, side.owner) + _MIN_RTO_S
        other.last_control = max(other.last_control, self.clock.now() + delay_s)
        held, side.held = side.held, []
        for parcel in held:
            self.clock.call_later(delay_s, self._arrive, connection, side.owner, parcel)
