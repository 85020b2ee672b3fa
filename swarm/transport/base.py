"""The transport contract: what every part of the daemon may ask of the network, real or simulated.

One contract test (``tests/contract``) runs over every implementation.
"""

from __future__ import annotations

from typing import Any, Protocol

from swarm.messages import Message, TensorSpec

PeerId = str
"""A libp2p peer id in base58 (``12D3Koo...``)."""


class TransportHandler(Protocol):
    """What a transport calls; always on the thread that owns the clock, never re-entrantly from ``send``."""

    def on_message(self, sender: PeerId, message: Message, tensor: Any) -> None:
        """A whole message has come; ``tensor`` is None exactly when ``message.tensor`` is None."""
        ...

    def admit(self, sender: PeerId, message: Message, spec: TensorSpec) -> str | None:
        """May a tensor of this dtype and shape be read? None for yes, else the reason for the refusal.

        Called when the header has come and before anything is allocated. A refusal closes the link.
        """
        ...

    def on_link_up(self, peer: PeerId) -> None:
        """A link to ``peer`` answered our hello, or we answered its."""
        ...

    def on_link_lost(self, peer: PeerId, reason: str) -> None:
        """The last link to ``peer`` broke, or a dial that ``send`` or ``connect`` began has failed.

        What was queued for the peer and not yet delivered is lost; what was sent may or may not have come.
        Called once for each loss; not called after ``disconnect`` or ``close``.
        """
        ...


class TransferWatch(Protocol):
    """Who is told how tensors of at least ``wire.ACKNOWLEDGED_BYTES`` fare; sizes in bytes."""

    def sent(self, peer: PeerId, size: int) -> None:
        """One was queued on a link to ``peer``."""
        ...

    def taken(self, peer: PeerId, size: int) -> None:
        """``peer`` has one whole."""
        ...

    def lost(self, peer: PeerId) -> None:
        """A link to ``peer`` is gone, and all that was under way with it."""
        ...


class Transport(Protocol):
    """Messages between neighbours, by libp2p peer id.

    Control messages (``message.tensor is None``) to one peer keep their order and never wait behind tensors;
    messages with tensors may overtake each other and control messages. Delivery is at most once: a message
    either comes whole or is lost together with its link.
    """

    @property
    def peer_id(self) -> PeerId:
        """Our own id."""
        ...

    def start(self, handler: TransportHandler) -> None:
        """Deliver to ``handler`` from now on. Called once, before any ``send``."""
        ...

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember where ``peer`` may be dialled (multiaddrs without or with the ``/p2p`` part)."""
        ...

    def send(self, to: PeerId, message: Message, tensor: Any = None) -> None:
        """Queue a message and return at once; dials ``to`` if there is no link.

        ``tensor`` is sent from its own memory: it must not change until it was delivered. A message to
        ourselves is delivered without a network. Failure is told by ``on_link_lost``, never raised.
        """
        ...

    def connect(self, peer: PeerId) -> None:
        """Dial ``peer`` unless a link is up or being made; ``on_link_up`` or ``on_link_lost`` follows."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Drop all links to ``peer`` without a call of ``on_link_lost``."""
        ...

    def links(self) -> frozenset[PeerId]:
        """Peers with a link that is up."""
        ...

    async def close(self) -> None:
        """Close every link and release what the transport holds."""
        ...
