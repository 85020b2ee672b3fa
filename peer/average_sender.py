"""The messages of a stage's averaging, from this peer to one other."""

from __future__ import annotations

from typing import Any

from peer.context import Context
from peer.ledger import tokens_of
from peer.rounds import Average, Round
from swarm.messages import AverageDigest, AverageDone, AveragePart, AverageResult, AverageStart, StepClose
from swarm.transport.base import PeerId


class AverageSender:
    """Builds and sends them. A part's tensor has the shape and dtype of the backend's ``part_spec``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def start(
        self, to: PeerId, step: int, roster: str, members: tuple[PeerId, ...], lineage: str = ""
    ) -> None:
        """Who averages ``step`` under ``roster``."""
        context = self._context
        message = AverageStart(
            step=step, stage=context.stage, roster=roster, members=members, lineage=lineage
        )
        context.transport.send(to, message)

    def gradient(self, owner: PeerId, close: StepClose, current: Round) -> None:
        """Our gradients of the owner's part."""
        context = self._context
        part, parts = current.members.index(owner), len(current.members)
        message = AveragePart(
            step=close.step,
            stage=context.stage,
            roster=current.roster,
            part=part,
            tokens=tokens_of(close, context.me, context.stage),
            lineage=current.lineages[context.me],
            holds=current.holds[context.me],
            tensor=context.backend.part_spec(part, parts),
        )
        context.transport.send(owner, message, context.backend.gradient_part(part, parts))

    def result(self, to: PeerId, step: int, roster: str, part: int, parts: int, values: Any) -> None:
        """A part of the average."""
        context = self._context
        message = AverageResult(
            step=step,
            stage=context.stage,
            roster=roster,
            part=part,
            parts=parts,
            tensor=context.backend.part_spec(part, parts),
        )
        context.transport.send(to, message, values)

    def held(self, to: PeerId, average: Average, roster: str, part: int) -> None:
        """A part of an average that the backend holds."""
        parts = len(average.members)
        self.result(to, average.step, roster, part, parts, self._context.backend.average_part(part, parts))

    def digest(self, leader: PeerId, step: int, roster: str, digest: str) -> None:
        """What the average hashes to here."""
        message = AverageDigest(step=step, stage=self._context.stage, roster=roster, digest=digest)
        self._context.transport.send(leader, message)

    def done(self, to: PeerId, step: int, roster: str, digest: str) -> None:
        """All of the roster have told ``digest``."""
        message = AverageDone(step=step, stage=self._context.stage, roster=roster, digest=digest)
        self._context.transport.send(to, message)
