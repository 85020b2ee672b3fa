"""What a peer tells those whom it finished an averaging without, and what it hears from such a peer.

Under a roster of its own, ``answer``, come the names of those who made the average, its parts and its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from peer.context import Context
from peer.rounds import Answer, Average, roster_of
from swarm.messages import AverageDone, AverageMessage, AverageResult, AverageStart
from swarm.transport.base import PeerId


def send_parts(context: Context, to: PeerId, average: Average, roster: str, numbers: Iterable[int]) -> None:
    """Parts of an average that the backend holds."""
    parts = len(average.members)
    for part in numbers:
        message = AverageResult(
            step=average.step,
            stage=context.stage,
            roster=roster,
            part=part,
            parts=parts,
            tensor=context.backend.part_spec(part, parts),
        )
        context.transport.send(to, message, context.backend.average_part(part, parts))


class Answers:
    """Those that this peer gave in a step, and those that come to it."""

    def __init__(self, context: Context) -> None:
        self._context = context
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
        context, roster = self._context, self.roster(average.step, self._context.me)
        start = AverageStart(step=average.step, stage=context.stage, roster=roster, members=average.members)
        context.transport.send(to, start)
        send_parts(context, to, average, roster, range(len(average.members)))
        self._end(to, average.step, average.digest)

    def refuse(self, to: PeerId, step: int) -> None:
        """There is no average for it here."""
        self._end(to, step, "")

    def _end(self, to: PeerId, step: int, digest: str) -> None:
        context = self._context
        roster = self.roster(step, context.me)
        context.transport.send(to, AverageDone(step=step, stage=context.stage, roster=roster, digest=digest))

    def hear(
        self, sender: PeerId, message: AverageMessage, tensor: Any, refused: Callable[[], None]
    ) -> Answer | None:
        """The sender's answer, when all of it has come."""
        answer = self._coming.setdefault(sender, Answer())
        if isinstance(message, AverageStart):
            answer.members = message.members
        elif isinstance(message, AverageResult):
            answer.parts[message.part] = tensor
        elif isinstance(message, AverageDone):
            if not message.digest:
                refused()
                return None
            answer.digest = message.digest
        return answer if answer.whole else None
