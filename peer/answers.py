"""What a peer tells those whom it finished an averaging without, and what it hears from such a peer.

Under a roster of its own, ``answer``, come the names of those who made the average, its parts and its digest.
"""

from __future__ import annotations

from typing import Any

from peer.average_sender import AverageSender
from peer.context import Context
from peer.rounds import Answer, Average, roster_of
from swarm.messages import AverageDone, AverageMessage, AverageResult, AverageStart
from swarm.transport.base import PeerId


class Answers:
    """Those that this peer gave in a step, and those that come to it."""

    def __init__(self, context: Context, sender: AverageSender) -> None:
        self._context = context
        self._sender = sender
        self._given: set[PeerId] = set()
        self._coming: dict[PeerId, Answer] = {}

    def clear(self) -> None:
        self._given.clear()
        self._coming.clear()

    def forget(self, peer: PeerId) -> None:
        """Its link broke: what went or came over it may be lost."""
        self._given.discard(peer)
        self._coming.pop(peer, None)

    def roster(self, step: int, giver: PeerId) -> str:
        return roster_of(self._context.epoch, step, ("answer", giver))

    def give(self, to: PeerId, average: Average) -> None:
        """It must apply what we applied. Once to each, however often it asks."""
        if to in self._given:
            return
        self._given.add(to)
        step, roster = average.step, self.roster(average.step, self._context.me)
        self._sender.start(to, step, roster, average.members)
        for part in range(len(average.members)):
            self._sender.held(to, average, roster, part)
        self._sender.done(to, step, roster, average.digest)

    def refuse(self, to: PeerId, step: int) -> None:
        """There is no average for it here: the digest is empty."""
        self._sender.done(to, step, self.roster(step, self._context.me), "")

    def hear(self, sender: PeerId, message: AverageMessage, tensor: Any) -> Answer | None:
        """The sender's answer, when all of it has come."""
        answer = self._coming.setdefault(sender, Answer())
        if isinstance(message, AverageStart):
            answer.members = message.members
        elif isinstance(message, AverageResult):
            answer.parts[message.part] = tensor
        elif isinstance(message, AverageDone):
            answer.digest = message.digest
        return answer if answer.whole else None
