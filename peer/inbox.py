"""What comes from other peers: whether it may be read, whether it is stale, and whom it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peer.averaging import Averaging
from peer.context import Context
from peer.download import Download, plain_chunk
from peer.join import Joiner
from peer.mover import Mover
from peer.standing import Standings
from swarm import messages as m
from swarm.transport.base import PeerId

Handler = Callable[[PeerId, Any, Any], None]


def plain(handler: Callable[[PeerId, Any], None]) -> Handler:
    """A handler of messages without a tensor."""
    return lambda sender, message, tensor: handler(sender, message)


class Inbox:
    """Hands each message to its handler. What belongs to a stage's state or average goes to whoever of us
    hosts or loads that stage."""

    def __init__(
        self,
        context: Context,
        standings: Standings,
        averaging: Averaging,
        mover: Mover,
        joiner: Callable[[], Joiner | None],
        handlers: dict[type[m.Message], Handler],
    ) -> None:
        self._context = context
        self._standings = standings
        self._averaging = averaging
        self._mover = mover
        self._joiner = joiner
        self._downloaded = False
        """States were asked for in this life: a chunk that comes late is passed over."""
        self.handlers: dict[type[m.Message], Handler] = dict(handlers)
        for average in (m.AverageStart, m.AveragePart, m.AverageResult, m.AverageDigest, m.AverageDone):
            self.handlers[average] = self._average
        for state in (m.StateIndex, m.StateChunk, m.StateRefused):
            self.handlers[state] = self._state

    def on_message(self, sender: PeerId, message: m.Message, tensor: Any) -> None:
        """``TransportHandler.on_message``."""
        context = self._context
        if sender != context.me:
            if self._standings.banned(sender):
                return
            context.liveness.on_heard(sender)
            if isinstance(message, m.MicrobatchMessage) and self._stale(sender, message):
                context.events.emit("stale", other=sender, message=message.kind, step=message.step)
                return
        self.handlers[type(message)](sender, message, tensor)

    def _stale(self, sender: PeerId, message: m.MicrobatchMessage) -> bool:
        """Is it from a life that the step's agreed membership does not name: a zombie's, woken after it was
        voted out, or one that has begun anew? What is for a later step may be of members not yet known."""
        if message.step > self._context.step:
            return False
        life = self._context.lives.get(sender)
        return life is None or self._context.liveness.stale(sender, life)

    # -- what may be read ----------------------------------------------------------------------------------

    def admit(self, sender: PeerId, message: m.Message, spec: m.TensorSpec) -> str | None:
        """``TransportHandler.admit``: only tensors of exactly the shape that the step expects are read."""
        if isinstance(message, m.Forward | m.Backward):
            return None if spec == self._context.rules.activation else "not the shape of an activation"
        if isinstance(message, m.AveragePart | m.AverageResult):
            return self._admit_part(message, spec)
        if isinstance(message, m.StateChunk):
            return self._admit_chunk(message, spec)
        return "no tensor belongs to this message"

    def _admit_part(self, message: m.AveragePart | m.AverageResult, spec: m.TensorSpec) -> str | None:
        context = self._context
        if self._mover.there is not None and self._mover.hosts(message.stage):
            context = self._mover.there
        if message.stage != context.stage:
            return "a gradient of another stage"
        most = sum(member.stage == context.stage for member in context.members) + 1
        parts = range(1, most + 1)
        if isinstance(message, m.AverageResult):
            parts = range(message.parts, min(message.parts, most) + 1)
        for count in parts:
            if message.part < count and context.backend.part_spec(message.part, count) == spec:
                return None
        return "not the shape of a part of the gradient"

    def _admit_chunk(self, message: m.StateChunk, spec: m.TensorSpec) -> str | None:
        download = self._download_of(message)
        if download is not None:
            return download.admit(message, spec)
        return plain_chunk(spec) if self._downloaded else "no state was asked for"

    # -- whom it is for ------------------------------------------------------------------------------------

    def _average(self, sender: PeerId, message: m.AverageMessage, tensor: Any) -> None:
        mover, joiner = self._mover, self._joiner()
        if mover.joiner is not None and mover.hosts(message.stage):
            mover.joiner.on_average(sender, message, tensor)
        elif joiner is not None:
            joiner.on_average(sender, message, tensor)
        else:
            self._averaging.on_message(sender, message, tensor)

    def _download_of(self, message: m.StateMessage) -> Download | None:
        """The download that a message is for."""
        joiner = self._joiner() or self._mover.joiner
        self._downloaded = self._downloaded or joiner is not None
        return joiner.download_of(message.stage, message.step) if joiner is not None else None

    def _state(self, sender: PeerId, message: m.StateMessage, tensor: Any) -> None:
        download = self._download_of(message)
        if download is None:
            return
        if isinstance(message, m.StateIndex):
            download.on_index(sender, message)
        elif isinstance(message, m.StateChunk):
            download.on_chunk(sender, message, tensor)
        else:
            download.on_refused(sender)
