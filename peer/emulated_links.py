"""A transport whose links can be cut, slowed and broken from within, as ``peer/emulation.py`` is told.

A cut holds back what comes in, as TCP's other end would send it again and again; it arrives when the cut is
healed, or is lost with the link after ``OUTAGE_S``. A link cannot be made through a cut.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peer.held import Holdings
from swarm.clock import Clock, Timer
from swarm.messages import Forward, Message, TensorSpec
from swarm.transport.base import PeerId, TransportHandler

if TYPE_CHECKING:
    from swarm.transport.libp2p import Libp2pTransport

OUTAGE_S = 35.0
"""A link that was cut for so long breaks: what p2pd's TCP was measured to bear (31 to 40 s)."""
DIAL_S = 15.0
"""A dial into a cut fails after this."""
RESEND_S = 0.2
"""TCP's least retransmission timeout on Linux, doubling with each loss of the same packet."""


@dataclass(eq=False)
class Cut:
    """No new link to ``peers`` (None: all); ``deaf``: nothing comes from them on old ones either."""

    peers: frozenset[PeerId] | None
    deaf: bool


@dataclass(eq=False)
class Shape:
    """How late what is sent to ``peers`` (None: all) comes."""

    peers: frozenset[PeerId] | None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    loss: float = 0.0


def _hits(peers: frozenset[PeerId] | None, peer: PeerId) -> bool:
    return peers is None or peer in peers


class EmulatedTransport:
    """``inner`` with conditions; ``seen(side, other, message)`` is called for all that passes."""

    def __init__(
        self,
        inner: Libp2pTransport,
        clock: Clock,
        rng: random.Random,
        *,
        seen: Callable[[str, PeerId, Message], None],
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._rng = rng
        self._seen = seen
        self._handler: TransportHandler | None = None
        self._cuts: list[Cut] = []
        self._shapes: list[Shape] = []
        self._held: dict[PeerId, deque[tuple[Message, Any]]] = {}
        """What came through a cut, until it is healed."""
        self._unsent: dict[PeerId, list[tuple[Message, Any]]] = {}
        self._dials: dict[PeerId, Timer] = {}
        """Dials into a cut."""
        self._losses: dict[PeerId, int] = {}
        """How often the links to a peer broke: what was sent before is lost."""
        self._free_s: dict[PeerId, float] = {}
        self._due_s: dict[tuple[PeerId, bool], float] = {}
        self.holdings: Holdings | None = None
        """Where outputs are dropped as soon as they were sent."""

    # The Transport protocol

    @property
    def peer_id(self) -> PeerId:
        return self._inner.peer_id

    async def open(self) -> None:
        await self._inner.open()

    def start(self, handler: TransportHandler) -> None:
        self._handler = handler
        self._inner.start(self)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._inner.learn(peer, addresses)

    def send(self, to: PeerId, message: Message, tensor: Any = None) -> None:
        if to == self.peer_id:
            self._inner.send(to, message, tensor)
        elif self._parted(to) and to not in self._inner.links():
            self._dial_in_vain(to).append((message, tensor))
        else:
            self._send_in_time(to, message, tensor)
        if self.holdings is not None and isinstance(message, Forward):
            held = self.holdings.get(message.key)
            if held is not None:
                held.output = None
        if to != self.peer_id:
            self._seen("sent", to, message)

    def connect(self, peer: PeerId) -> None:
        if self._parted(peer) and peer not in self._inner.links():
            self._dial_in_vain(peer)
        else:
            self._inner.connect(peer)

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer)
        self._inner.disconnect(peer)

    def links(self) -> frozenset[PeerId]:
        return self._inner.links()

    async def close(self) -> None:
        for timer in self._dials.values():
            timer.cancel()
        await self._inner.close()

    # The TransportHandler protocol

    def on_message(self, sender: PeerId, message: Message, tensor: Any) -> None:
        if sender != self.peer_id and self._deaf(sender):
            self._held.setdefault(sender, deque()).append((message, tensor))
            return
        self._deliver(sender, message, tensor)

    def _deliver(self, sender: PeerId, message: Message, tensor: Any) -> None:
        assert self._handler is not None
        if sender != self.peer_id:
            self._seen("received", sender, message)
        self._handler.on_message(sender, message, tensor)

    def admit(self, sender: PeerId, message: Message, spec: TensorSpec) -> str | None:
        assert self._handler is not None
        return self._handler.admit(sender, message, spec)

    def on_link_up(self, peer: PeerId) -> None:
        assert self._handler is not None
        if self._parted(peer):
            self._inner.disconnect(peer)
            self._dial_in_vain(peer)
        else:
            self._handler.on_link_up(peer)

    def on_link_lost(self, peer: PeerId, reason: str) -> None:
        assert self._handler is not None
        self._forget(peer)
        self._handler.on_link_lost(peer, reason)

    # What is done to the links

    def reset(self, peers: frozenset[PeerId] | None) -> None:
        for peer in sorted(self._inner.links()):
            if _hits(peers, peer):
                self._inner.reset(peer)

    def cut(self, cut: Cut, duration_s: float) -> None:
        self._cuts.append(cut)
        self._clock.call_later(duration_s, self._heal, cut)
        if duration_s > OUTAGE_S:
            self._clock.call_later(OUTAGE_S, self.reset, cut.peers)

    def shape(self, shape: Shape, duration_s: float) -> None:
        self._shapes.append(shape)
        self._clock.call_later(duration_s, self._shapes.remove, shape)

    def _heal(self, cut: Cut) -> None:
        self._cuts.remove(cut)
        for peer in [peer for peer in self._held if not self._deaf(peer)]:
            held = self._held.pop(peer)
            while held:
                self._deliver(peer, *held.popleft())
        for peer in [peer for peer in self._dials if not self._parted(peer)]:
            self._dials.pop(peer).cancel()
            self._inner.connect(peer)
            for message, tensor in self._unsent.pop(peer, ()):
                self._inner.send(peer, message, tensor)

    def _parted(self, peer: PeerId) -> bool:
        return any(_hits(cut.peers, peer) for cut in self._cuts)

    def _deaf(self, peer: PeerId) -> bool:
        return any(cut.deaf and _hits(cut.peers, peer) for cut in self._cuts)

    def _forget(self, peer: PeerId) -> None:
        """The links to a peer are gone, and what was under way."""
        self._losses[peer] = self._losses.get(peer, 0) + 1
        self._held.pop(peer, None)
        self._unsent.pop(peer, None)
        if peer in self._dials:
            self._dials.pop(peer).cancel()

    def _dial_in_vain(self, peer: PeerId) -> list[tuple[Message, Any]]:
        """What is to be sent if the cut is healed before the dial fails."""
        if peer not in self._dials:
            reason = "cannot be reached: no answer"
            self._dials[peer] = self._clock.call_later(DIAL_S, self.on_link_lost, peer, reason)
        return self._unsent.setdefault(peer, [])

    def _send_in_time(self, to: PeerId, message: Message, tensor: Any) -> None:
        """Send when the shapes let it come; control messages keep their order, and so do tensors."""
        now, order = self._clock.now(), (to, tensor is not None)
        shapes = [shape for shape in self._shapes if _hits(shape.peers, to)]
        due_s = now + sum(self._late_s(to, shape, tensor) for shape in shapes)
        due_s = max(due_s, self._due_s.get(order, 0.0))
        if due_s <= now:
            self._inner.send(to, message, tensor)
            return
        self._due_s[order] = due_s
        losses = self._losses.get(to, 0)

        def later() -> None:
            if self._losses.get(to, 0) == losses:
                self._inner.send(to, message, tensor)

        self._clock.call_later(due_s - now, later)

    def _late_s(self, to: PeerId, shape: Shape, tensor: Any) -> float:
        late_s = shape.latency_s + shape.jitter_s * self._rng.random()
        resend_s = RESEND_S
        while shape.loss and self._rng.random() < shape.loss:
            late_s, resend_s = late_s + resend_s, 2 * resend_s
        if shape.bytes_per_s is not None and tensor is not None:
            now = self._clock.now()
            free_s = max(now, self._free_s.get(to, 0.0)) + tensor.nbytes / shape.bytes_per_s
            self._free_s[to] = free_s
            late_s += free_s - now
        return late_s
