"""Same-stage reduction: all or nothing, from gradients that are still held, with the same bytes for all.

Butterfly reduce-scatter and all-gather over a known roster: the owner of a part adds the contributions in the
roster's order, divides by the tokens that the step's close gives them, and sends the same bytes to everyone.
When a peer is lost, whoever has not finished starts again among the rest, in a new roster; a peer that has
finished answers with the average that it applied. Nobody applies half a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peer.context import Context, draw_order
from peer.ledger import tokens_of
from peer.worker import TaskKind
from swarm.messages import (
    AverageDigest,
    AverageDone,
    AverageMessage,
    AveragePart,
    AverageResult,
    AverageStart,
    StepClose,
)
from swarm.transport.base import PeerId

MAX_EARLY = 4096
"""Messages kept for a roster that this peer has not come to yet; a bound against a flood."""


def roster_of(step: int, members: tuple[PeerId, ...]) -> str:
    """The name of a set of peers that average ``step`` together."""
    return hashlib.sha256("|".join([str(step), *members]).encode()).hexdigest()[:16]


@dataclass
class Round:
    """Averaging among one roster."""

    roster: str
    members: tuple[PeerId, ...]
    contributions: dict[PeerId, Any] = field(default_factory=dict)
    combining: bool = False
    parts: set[int] = field(default_factory=set)
    whole: bool = False
    """All parts are in place and the digest is being taken or known."""
    digest: str | None = None
    digests: dict[PeerId, str] = field(default_factory=dict)
    done_digest: str | None = None


class Averaging:
    """One step's average of this peer's stage; ``on_done`` follows when it stands in the backend.

    ``on_stuck`` is called when this peer's own sum is what cannot be averaged.
    """

    def __init__(
        self, context: Context, *, on_done: Callable[[], None], on_stuck: Callable[[str], None]
    ) -> None:
        self._context = context
        self._on_done = on_done
        self._on_stuck = on_stuck
        self._close: StepClose | None = None
        self._listeners: tuple[PeerId, ...] = ()
        self._round: Round | None = None
        self._finished: tuple[int, str] | None = None
        """(step, digest) of the last average that was applied, as long as the backend holds it."""
        self._early: dict[tuple[int, str], list[tuple[PeerId, AverageMessage, Any]]] = {}
        self._early_count = 0

    def begin(self, close: StepClose, members: tuple[PeerId, ...], listeners: tuple[PeerId, ...]) -> None:
        """Average ``close.step`` among ``members`` (sorted, this peer among them).

        ``listeners`` are learners of the stage: they get the result and are not waited for.
        """
        self._close = close
        self._listeners = listeners
        self._finished = None
        self._enter(members)
        for peer in members:
            if not self._context.liveness.alive(peer):
                self.on_lost(peer)

    @property
    def active(self) -> bool:
        return self._round is not None

    # -- a round -------------------------------------------------------------------------------------------

    def _enter(self, members: tuple[PeerId, ...]) -> None:
        context = self._context
        assert self._close is not None
        step = self._close.step
        current = Round(roster_of(step, members), members)
        self._round = current
        count = len(members)
        tokens = tokens_of(self._close, context.me, context.stage)
        for part, owner in enumerate(members):
            values = context.backend.gradient_part(part, count)
            if owner == context.me:
                current.contributions[owner] = values
            else:
                message = AveragePart(
                    step=step,
                    stage=context.stage,
                    roster=current.roster,
                    part=part,
                    tokens=tokens,
                    tensor=context.backend.part_spec(part, count),
                )
                context.transport.send(owner, message, values)
        early = self._early.pop((step, current.roster), [])
        self._early_count -= len(early)
        self._combine_if_whole(current)
        for sender, came, tensor in early:
            self.on_message(sender, came, tensor)

    def on_message(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        """Any message of an averaging of this peer's stage."""
        context = self._context
        if message.stage != context.stage:
            return
        if isinstance(message, AverageStart):
            self._on_start(sender, message)
            return
        current = self._round
        if current is None or self._close is None or message.roster != current.roster:
            self._keep_early(sender, message, tensor)
        elif sender not in current.members:
            context.strike(sender, "averaging from a peer outside the roster")
        elif isinstance(message, AveragePart):
            self._on_part(current, sender, message, tensor)
        elif isinstance(message, AverageResult):
            self._on_result(current, sender, message, tensor)
        elif isinstance(message, AverageDigest):
            current.digests[sender] = message.digest
            self._judge(current)
        elif isinstance(message, AverageDone):
            current.done_digest = message.digest
            self._finish_if_agreed(current)

    def _keep_early(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        """A faster replica's message waits for us; anything older than our step is of no use."""
        step = self._context.step
        over = self._close is not None and self._round is None and message.step <= self._close.step
        if over or message.step < step or message.step > step + 1 or self._early_count >= MAX_EARLY:
            return
        self._early_count += 1
        self._early.setdefault((message.step, message.roster), []).append((sender, message, tensor))

    def _on_part(self, current: Round, sender: PeerId, message: AveragePart, values: Any) -> None:
        context = self._context
        assert self._close is not None
        if current.members[message.part % len(current.members)] != context.me:
            context.strike(sender, "a part that is not ours")
        elif message.tokens != tokens_of(self._close, sender, context.stage):
            context.strike(sender, "a gradient whose tokens are not those of the close")
        else:
            current.contributions.setdefault(sender, values)
            self._combine_if_whole(current)

    def _combine_if_whole(self, current: Round) -> None:
        context = self._context
        if current.combining or len(current.contributions) < len(current.members):
            return
        assert self._close is not None
        current.combining = True
        close = self._close
        part, parts = current.members.index(context.me), len(current.members)
        ordered = [current.contributions[peer] for peer in current.members]
        tokens = sum(tokens_of(close, peer, context.stage) for peer in current.members)

        def work() -> Any:
            values = context.backend.combine(ordered, tokens)
            context.backend.set_average(part, parts, values)
            return values

        def done(values: Any) -> None:
            if self._round is not current:
                return
            message = AverageResult(
                step=close.step,
                stage=context.stage,
                roster=current.roster,
                part=part,
                parts=parts,
                tensor=context.backend.part_spec(part, parts),
            )
            for peer in (*current.members, *self._listeners):
                if peer != context.me:
                    context.transport.send(peer, message, values)
            self._have_part(current, part)

        def refused(error: Exception) -> None:
            if self._round is current:
                sound = tuple(
                    peer for peer in current.members if context.backend.usable(current.contributions[peer])
                )
                for peer in set(current.members) - set(sound):
                    context.strike(peer, f"unusable gradient: {error}")
                if context.me in sound and len(sound) < len(current.members):
                    self._start_again(sound)
                else:
                    self._on_stuck(f"no usable average: {error}")

        context.worker.submit(TaskKind.SYNC, (close.step,), work, done, refused)

    def _on_result(self, current: Round, sender: PeerId, message: AverageResult, values: Any) -> None:
        context = self._context
        parts = len(current.members)
        if message.parts != parts or message.part >= parts or message.part in current.parts:
            return
        part = message.part

        def done(_: None) -> None:
            if self._round is current:
                self._have_part(current, part)

        context.worker.submit(
            TaskKind.SYNC,
            (message.step,),
            lambda: context.backend.set_average(part, parts, values),
            done,
            lambda error: context.strike(sender, f"unusable average: {error}"),
        )

    def _have_part(self, current: Round, part: int) -> None:
        current.parts.add(part)
        if current.whole or len(current.parts) < len(current.members):
            return
        current.whole = True
        context = self._context
        assert self._close is not None
        step = self._close.step

        def done(digest: str) -> None:
            if self._round is not current:
                return
            current.digest = digest
            leader = draw_order(step, current.members)[0]
            if leader == context.me:
                current.digests[context.me] = digest
                self._judge(current)
            else:
                message = AverageDigest(step=step, stage=context.stage, roster=current.roster, digest=digest)
                context.transport.send(leader, message)
            self._finish_if_agreed(current)

        context.worker.submit(TaskKind.SYNC, (step,), context.backend.average_digest, done)

    def _judge(self, current: Round) -> None:
        """The leader's part: all digests are in. Those that stand apart are left out."""
        context = self._context
        if current.digest is None or len(current.digests) < len(current.members):
            return
        assert self._close is not None
        same = tuple(peer for peer in current.members if current.digests[peer] == current.digest)
        if len(same) < len(current.members):
            context.events.emit("digests_differ", step=self._close.step, digests=current.digests)
            self._start_again(same)
            return
        message = AverageDone(
            step=self._close.step, stage=context.stage, roster=current.roster, digest=current.digest
        )
        for peer in (*current.members, *self._listeners):
            if peer != context.me:
                context.transport.send(peer, message)
        current.done_digest = current.digest
        self._finish_if_agreed(current)

    def _finish_if_agreed(self, current: Round) -> None:
        if self._round is not current or current.digest is None or current.digest != current.done_digest:
            return
        assert self._close is not None
        context = self._context
        self._finished = (self._close.step, current.digest)
        self._round = None
        context.events.emit(
            "averaged", step=self._close.step, members=list(current.members), digest=current.digest
        )
        self._on_done()

    # -- losses --------------------------------------------------------------------------------------------

    def on_lost(self, peer: PeerId) -> None:
        """A peer of the round is gone: the survivors average again from what they still hold."""
        current = self._round
        if current is not None and peer in current.members:
            self._start_again(tuple(member for member in current.members if member != peer))

    def _start_again(self, survivors: tuple[PeerId, ...]) -> None:
        context = self._context
        assert self._close is not None
        context.events.emit("averaging_again", step=self._close.step, members=list(survivors))
        message = AverageStart(
            step=self._close.step,
            stage=context.stage,
            roster=roster_of(self._close.step, survivors),
            members=survivors,
        )
        for peer in survivors:
            if peer != context.me:
                context.transport.send(peer, message)
        self._enter(survivors)

    def _on_start(self, sender: PeerId, message: AverageStart) -> None:
        context = self._context
        if self._finished is not None and self._finished[0] == message.step:
            self._answer(sender, message, self._finished[1])
            return
        current = self._round
        if current is None or self._close is None or message.step != self._close.step:
            return  # we come to this step later, and will see the loss ourselves
        if sender not in current.members or context.me not in message.members:
            return
        common = tuple(member for member in current.members if member in message.members)
        if common == current.members:
            return
        if common == tuple(sorted(message.members)):
            self._enter(common)
        else:
            self._start_again(common)

    def _answer(self, sender: PeerId, message: AverageStart, digest: str) -> None:
        """We applied this average already: the one that asks must apply the same."""
        context = self._context
        parts = len(message.members)
        if sender not in message.members or not 0 < parts <= len(context.members):
            return
        for part in range(parts):
            result = AverageResult(
                step=message.step,
                stage=context.stage,
                roster=message.roster,
                part=part,
                parts=parts,
                tensor=context.backend.part_spec(part, parts),
            )
            context.transport.send(sender, result, context.backend.average_part(part, parts))
        done = AverageDone(step=message.step, stage=context.stage, roster=message.roster, digest=digest)
        context.transport.send(sender, done)
