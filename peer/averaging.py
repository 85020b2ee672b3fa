"""Same-stage reduction: all or nothing, from gradients that are still held, with the same bytes for all.

Butterfly reduce-scatter and all-gather over a known roster: the owner of a part adds the contributions in the
roster's order, divides by the tokens that the step's close gives them, and sends the same bytes to everyone.
When a peer is gone, whoever has not finished starts again among the rest, in a new roster; a peer that has
finished answers those it finished without with the average that it applied, so that a peer which was left out
though it lives follows the others. Nobody applies half a step. Replicas that were cut off from each other in
the middle of an averaging may still finish it apart; their *lineages* (a chain of the averages that each has
applied) then differ in the next one, where the lesser party leaves and takes the others' state again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peer.context import Context, draw_order
from peer.ledger import tokens_of
from peer.rounds import Answer, Finished, Round, largest, lineage_after, roster_of
from peer.worker import TaskKind
from swarm.clock import Timer
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

POKE_S = 1.0
"""Whoever waits in an averaging shows one other where it stands, this often."""
MAX_EARLY = 4096
"""Messages kept for a roster that this peer has not come to yet; a bound against a flood."""


class Averaging:
    """One step's average of this peer's stage; ``on_done`` follows when it stands in the backend.

    ``on_stuck`` is called when this peer cannot come to the others' average.
    """

    def __init__(
        self, context: Context, *, on_done: Callable[[], None], on_stuck: Callable[[str], None]
    ) -> None:
        self._context = context
        self._on_done = on_done
        self._on_stuck = on_stuck
        self._close: StepClose | None = None
        self._listeners: tuple[PeerId, ...] = ()
        self._partners: tuple[PeerId, ...] = ()
        self._partners_before: tuple[PeerId, ...] = ()
        """Who averages the last step with us, and the one before: one of them may be named in another stage
        since, and not have come so far."""
        self._lineage = ""
        """Of the parameters that the average is for."""
        self._round: Round | None = None
        self._finished: Finished | None = None
        self._starts: dict[PeerId, AverageStart] = {}
        """Others' rosters that we cannot follow yet: of a later step, or of peers that we left out."""
        self._answers: dict[PeerId, Answer] = {}
        self._answered: set[PeerId] = set()
        self._cut: set[PeerId] = set()
        """Peers whose link to us broke since the averaging began."""
        self._early: dict[tuple[int, str], list[tuple[PeerId, AverageMessage, Any]]] = {}
        self._early_count = 0
        self._poke: Timer | None = None
        self._pokes = 0

    def begin(self, close: StepClose, members: tuple[PeerId, ...], listeners: tuple[PeerId, ...]) -> None:
        """Average ``close.step`` among ``members`` (sorted, this peer among them).

        ``listeners`` are learners of the stage: they get the result and are not waited for.
        """
        self.stop()
        self._close = close
        self._listeners = listeners
        self._partners_before, self._partners = self._partners, members
        self._lineage = self._context.lineage
        self._finished = None
        for step, roster in [key for key in self._early if key[0] < close.step]:
            self._early_count -= len(self._early.pop((step, roster)))
        self._poke = self._context.clock.call_later(POKE_S, self._poke_one)
        living = tuple(peer for peer in members if not self._context.liveness.gone(peer))
        if living == members:
            self._enter(members)
        else:
            self._start_again(living)
        for sender, message in list(self._starts.items()):
            if message.step <= close.step:
                del self._starts[sender]
                self._on_start(sender, message)

    def stop(self) -> None:
        """Give up what is under way."""
        self._round = None
        self._answers.clear()
        self._answered.clear()
        self._cut.clear()
        if self._poke is not None:
            self._poke.cancel()
            self._poke = None

    @property
    def active(self) -> bool:
        return self._round is not None

    # -- a round -------------------------------------------------------------------------------------------

    def _enter(self, members: tuple[PeerId, ...]) -> None:
        context = self._context
        assert self._close is not None
        step = self._close.step
        current = Round(roster_of(self._context.epoch, step, members), members)
        self._round = current
        own = members.index(context.me)
        current.contributions[context.me] = context.backend.gradient_part(own, len(members))
        current.lineages[context.me] = self._lineage
        for peer in members:
            if peer != context.me:
                self._send_part(current, peer)
        early = self._early.pop((step, current.roster), [])
        self._early_count -= len(early)
        self._combine_if_whole(current)
        for sender, came, tensor in early:
            self.on_message(sender, came, tensor)

    def _send_part(self, current: Round, owner: PeerId) -> None:
        context, close = self._context, self._close
        assert close is not None
        part, parts = current.members.index(owner), len(current.members)
        message = AveragePart(
            step=close.step,
            stage=context.stage,
            roster=current.roster,
            part=part,
            tokens=tokens_of(close, context.me, context.stage),
            lineage=self._lineage,
            tensor=context.backend.part_spec(part, parts),
        )
        context.transport.send(owner, message, context.backend.gradient_part(part, parts))

    def on_message(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        """Any message of an averaging of this peer's stage."""
        context = self._context
        if message.stage != context.stage:
            return
        replicas = {m.peer for m in context.members if m.stage == context.stage}
        if sender not in {*replicas, *self._partners, *self._partners_before}:
            return  # it was voted out, or is not yet known to be in: it shows up again
        current = self._round
        if message.roster == roster_of(self._context.epoch, message.step, ("answer", sender)):
            self._on_answer(sender, message, tensor)
        elif isinstance(message, AverageStart):
            self._on_start(sender, message)
        elif current is None or self._close is None or message.roster != current.roster:
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
            self._on_done_message(current, sender, message)

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
            current.lineages.setdefault(sender, message.lineage)
            self._combine_if_whole(current)

    def _combine_if_whole(self, current: Round) -> None:
        context = self._context
        if current.combining or len(current.contributions) < len(current.members):
            return
        assert self._close is not None
        current.combining = True
        if len(set(current.lineages.values())) > 1:
            self._part_ways(current)
            return
        close = self._close
        part, parts = current.members.index(context.me), len(current.members)
        ordered = [current.contributions[peer] for peer in current.members]
        tokens = sum(tokens_of(close, peer, context.stage) for peer in current.members)

        def work() -> Any:
            values = context.backend.combine(ordered, tokens)
            context.backend.set_average(part, parts, values)
            return values

        def done(values: Any) -> None:
            if self._round is current:
                current.result = values
                for peer in (*current.members, *self._listeners):
                    if peer != context.me:
                        self._send_result(current, peer)
                self._have_part(current, part)

        def refused(error: Exception) -> None:
            if self._round is current:
                self._leave_unusable_out(current, error)

        context.worker.submit(TaskKind.SYNC, (close.step,), work, done, refused)

    def _part_ways(self, current: Round) -> None:
        """Some have applied another average than the others: every owner sees the same, and decides alike."""
        assert self._close is not None
        stay = largest(current.lineages)
        self._context.events.emit("lineages_differ", step=self._close.step, stay=list(stay))
        if self._context.me in stay:
            self._start_again(stay)
        else:
            self._on_stuck("this peer has applied another average than the others of its stage")

    def _leave_unusable_out(self, current: Round, error: Exception) -> None:
        context = self._context
        sound = tuple(peer for peer in current.members if context.backend.usable(current.contributions[peer]))
        for peer in set(current.members) - set(sound):
            context.strike(peer, f"unusable gradient: {error}")
        if context.me in sound and len(sound) < len(current.members):
            self._start_again(sound)
        else:
            self._on_stuck(f"no usable average: {error}")

    def _send_result(self, current: Round, peer: PeerId) -> None:
        context, close = self._context, self._close
        assert close is not None
        part, parts = current.members.index(context.me), len(current.members)
        message = AverageResult(
            step=close.step,
            stage=context.stage,
            roster=current.roster,
            part=part,
            parts=parts,
            tensor=context.backend.part_spec(part, parts),
        )
        context.transport.send(peer, message, current.result)

    def _on_result(self, current: Round, sender: PeerId, message: AverageResult, values: Any) -> None:
        context = self._context
        part, parts = message.part, len(current.members)
        if message.parts != parts or part >= parts or current.members[part] != sender:
            context.strike(sender, "a part of the average that is not its own")
            return
        if part in current.parts:
            return

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
        assert self._close is not None

        def done(digest: str) -> None:
            if self._round is current:
                current.digest = digest
                self._tell_digest(current)
                self._finish_if_agreed(current)

        step = self._close.step
        self._context.worker.submit(TaskKind.SYNC, (step,), self._context.backend.average_digest, done)

    def _leader(self, current: Round) -> PeerId:
        assert self._close is not None
        return draw_order(self._close.step, current.members)[0]

    def _tell_digest(self, current: Round) -> None:
        context, close = self._context, self._close
        assert close is not None
        assert current.digest is not None
        leader = self._leader(current)
        if leader == context.me:
            current.digests[context.me] = current.digest
            self._judge(current)
        else:
            message = AverageDigest(
                step=close.step, stage=context.stage, roster=current.roster, digest=current.digest
            )
            context.transport.send(leader, message)

    def _judge(self, current: Round) -> None:
        """The leader's part: all digests are in. Those that stand apart are left out, the leader too; they
        get the others' average in the end."""
        context = self._context
        if current.digest is None or len(current.digests) < len(current.members):
            return
        assert self._close is not None
        same = largest(current.digests)
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

    def _on_done_message(self, current: Round, sender: PeerId, message: AverageDone) -> None:
        if sender != self._leader(current):
            self._context.strike(sender, "an averaging ended by another than its leader")
            return
        current.done_digest = message.digest
        self._finish_if_agreed(current)

    def _finish_if_agreed(self, current: Round) -> None:
        if self._round is not current or current.digest is None or current.digest != current.done_digest:
            return
        assert self._close is not None
        context, step = self._context, self._close.step
        self._finished = Finished(step, current.roster, current.members, current.digest)
        self._round = None
        context.lineage = lineage_after(self._lineage, current.digest)
        context.events.emit(
            "averaged",
            step=step,
            stage=context.stage,
            members=list(current.members),
            digest=current.digest,
        )
        for sender, message in list(self._starts.items()):
            if message.step == step:
                del self._starts[sender]
                self._on_start(sender, message)
        self._on_done()

    # -- losses --------------------------------------------------------------------------------------------

    def on_gone(self, peer: PeerId) -> None:
        """A peer of the round is gone: the survivors average again from what they still hold."""
        self._answers.pop(peer, None)
        self._starts.pop(peer, None)
        current = self._round
        if current is not None and peer in current.members:
            self._start_again(tuple(member for member in current.members if member != peer))

    def on_back(self, peer: PeerId) -> None:
        """What we had sent may have been lost with the link: send it again."""
        self._cut.add(peer)
        self._answered.discard(peer)
        self._answers.pop(peer, None)
        current = self._round
        if current is None or peer not in current.members:
            return
        self._send_part(current, peer)
        if current.result is not None:
            self._send_result(current, peer)
        if current.digest is not None and self._leader(current) == peer:
            self._tell_digest(current)
        self._send_start(peer, current)

    def _poke_one(self) -> None:
        """Show one of those we wait for where we stand: it may have finished without us."""
        current = self._round
        if current is None:
            return
        self._poke = self._context.clock.call_later(POKE_S, self._poke_one)
        others = [p for p in current.members if p != self._context.me and self._context.liveness.alive(p)]
        if others:
            self._pokes += 1
            self._send_start(others[self._pokes % len(others)], current)

    def _send_start(self, peer: PeerId, current: Round) -> None:
        assert self._close is not None
        message = AverageStart(
            step=self._close.step,
            stage=self._context.stage,
            roster=current.roster,
            members=current.members,
            lineage=self._lineage,
        )
        self._context.transport.send(peer, message)

    def _start_again(self, survivors: tuple[PeerId, ...]) -> None:
        context = self._context
        assert self._close is not None
        step = self._close.step
        context.events.emit("averaging_again", step=step, members=list(survivors))
        again = Round(roster_of(self._context.epoch, step, survivors), survivors)
        for peer in survivors:
            if peer != context.me:
                self._send_start(peer, again)
        if context.me in survivors:
            self._enter(survivors)

    def _on_start(self, sender: PeerId, message: AverageStart) -> None:
        context = self._context
        current, close, finished = self._round, self._close, self._finished
        if close is not None and message.step < close.step:
            self._send_done(sender, message.step, "")
        elif finished is not None and finished.step == message.step:
            if message.roster != finished.roster or sender in self._cut:
                self._answer(sender, message, finished)
        elif current is None or close is None or message.step != close.step:
            self._starts[sender] = message
        elif sender not in current.members:
            self._starts[sender] = message  # we left it out: it gets our average
        elif context.me in message.members:
            common = tuple(member for member in current.members if member in message.members)
            if common != current.members:
                if common == message.members:
                    self._enter(common)
                else:
                    self._start_again(common)
            elif message.members != current.members:
                self._send_start(sender, current)

    def _answer(self, sender: PeerId, message: AverageStart, finished: Finished) -> None:
        """We applied an average without the one that asks: it must apply the same."""
        context = self._context
        if sender in self._answered:
            return
        self._answered.add(sender)
        if message.lineage != self._lineage:
            self._send_done(sender, message.step, "")
            return
        roster, parts = (
            roster_of(self._context.epoch, message.step, ("answer", context.me)),
            len(finished.members),
        )
        start = AverageStart(step=message.step, stage=context.stage, roster=roster, members=finished.members)
        context.transport.send(sender, start)
        for part in range(parts):
            result = AverageResult(
                step=message.step,
                stage=context.stage,
                roster=roster,
                part=part,
                parts=parts,
                tensor=context.backend.part_spec(part, parts),
            )
            context.transport.send(sender, result, context.backend.average_part(part, parts))
        self._send_done(sender, message.step, finished.digest)

    def _send_done(self, to: PeerId, step: int, digest: str) -> None:
        """The end of an answer; an empty digest says that there is none."""
        context = self._context
        roster = roster_of(self._context.epoch, step, ("answer", context.me))
        context.transport.send(to, AverageDone(step=step, stage=context.stage, roster=roster, digest=digest))

    def _on_answer(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        close = self._close
        if self._round is None or close is None or message.step != close.step:
            return
        answer = self._answers.setdefault(sender, Answer())
        if isinstance(message, AverageStart):
            answer.members = message.members
        elif isinstance(message, AverageResult):
            answer.parts[message.part] = tensor
        elif isinstance(message, AverageDone):
            if not message.digest:
                self._on_stuck("the others have left this peer's step behind")
                return
            answer.digest = message.digest
        if answer.whole:
            self._take(sender, answer)

    def _take(self, sender: PeerId, answer: Answer) -> None:
        """Apply the answer in place of an average of our own."""
        context, close = self._context, self._close
        assert close is not None
        taken = Round(roster_of(self._context.epoch, close.step, ("answer", sender)), answer.members)
        self._round = taken
        values = [answer.parts.get(part) for part in range(len(answer.members))]

        def work() -> str:
            for part, value in enumerate(values):
                context.backend.set_average(part, len(values), value)
            return context.backend.average_digest()

        def done(digest: str) -> None:
            if self._round is taken:
                taken.digest, taken.done_digest = digest, answer.digest
                self._finish_if_agreed(taken)
                if self._round is taken:
                    refused(ValueError("it does not hash to its digest"))

        def refused(error: Exception) -> None:
            context.strike(sender, f"unusable average: {error}")
            if self._round is taken:
                self._on_stuck("no usable average came from those who finished")

        context.worker.submit(TaskKind.SYNC, (close.step,), work, done, refused)
