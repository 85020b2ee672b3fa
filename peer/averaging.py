"""Same-stage reduction: all or nothing, from gradients that are still held, with the same bytes for all.

Butterfly reduce-scatter and all-gather over a known roster: the owner of a part adds the contributions in the
roster's order, divides by the tokens that the step's close gives them, and sends the same bytes to everyone.
When a peer is gone, whoever has not finished starts again among the rest, in a new roster; a peer that has
finished answers those it finished without with the average that it applied, so that a peer which was left out
though it lives follows the others. Nobody applies half a step, nor before all of its roster told a digest.
So where all of the rest have told the digest of a larger roster's average, the lost one may have applied it,
and they apply it too; where one of them has not, nobody can have.

Replicas that were cut off from each other in the middle of an averaging may still finish it apart; their
*lineages* (a chain of the averages that each has applied) then differ in the next one, where the lesser party
leaves and takes the others' state again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peer.answers import Answers
from peer.average_sender import AverageSender
from peer.context import Context, draw_order
from peer.ledger import tokens_of
from peer.rounds import Answer, Average, Round, largest, lineage_after, roster_of
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
        self._held: Average | None = None
        """The newest average of this step that the backend holds whole, and whose digest this peer told."""
        self._finished: Average | None = None
        self._starts: dict[PeerId, AverageStart] = {}
        """Others' rosters that we cannot follow yet: of a later step, or of peers that we left out."""
        self._send = AverageSender(context)
        self._answers = Answers(context, self._send)
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
        self._round = self._held = None
        self._answers.clear()
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
        current = Round(roster_of(self._context.epoch, step, members), members, self._held)
        self._round = current
        own = members.index(context.me)
        current.contributions[context.me] = context.backend.gradient_part(own, len(members))
        current.lineages[context.me] = self._lineage
        current.holds[context.me] = current.held.digest if current.held is not None else ""
        for peer in members:
            if peer != context.me:
                self._send.gradient(peer, self._close, current)
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
        replicas = {m.peer for m in context.members if m.stage == context.stage}
        if sender not in {*replicas, *self._partners, *self._partners_before}:
            return  # it was voted out, or is not yet known to be in: it shows up again
        current = self._round
        if message.roster == self._answers.roster(message.step, sender):
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
            current.holds.setdefault(sender, message.holds)
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
        if current.held_by_all:
            self._keep(current)
            return
        self._held = None
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
        assert self._close is not None
        part, parts = current.members.index(self._context.me), len(current.members)
        self._send.result(peer, self._close.step, current.roster, part, parts, current.result)

    def _on_result(self, current: Round, sender: PeerId, message: AverageResult, values: Any) -> None:
        context = self._context
        part, parts = message.part, len(current.members)
        if message.parts != parts or part >= parts or current.members[part] != sender:
            context.strike(sender, "a part of the average that is not its own")
            return
        if part in current.parts:
            return
        self._held = None  # its owner has seen that not all held it

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
                self._held = Average(step, current.roster, current.members, digest)
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
            self._send.digest(leader, close.step, current.roster, current.digest)

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
            self._held = None  # nobody has applied it: who stands apart shall have no part in it
            self._start_again(same)
            return
        for peer in current.members:
            if peer != context.me:
                self._send.done(peer, self._close.step, current.roster, current.digest)
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
        self._finished = Average(step, current.roster, current.members, current.digest)
        self._round = self._held = None
        context.lineage = lineage_after(self._lineage, current.digest)
        context.events.emit(
            "averaged",
            step=step,
            stage=context.stage,
            members=list(current.members),
            digest=current.digest,
        )
        if current.made_in is not None:
            for peer in self._listeners:  # from everybody, for the leader may be lost before it comes to it
                self._send.done(peer, step, current.made_in, current.digest)
        for sender, message in list(self._starts.items()):
            if message.step == step:
                del self._starts[sender]
                self._on_start(sender, message)
        self._on_done()

    # -- losses --------------------------------------------------------------------------------------------

    def on_gone(self, peer: PeerId) -> None:
        """A peer of the round is gone: the survivors average again from what they still hold."""
        self._answers.forget(peer)
        self._starts.pop(peer, None)
        current = self._round
        if current is not None and peer in current.members and not current.settling:
            self._start_again(tuple(member for member in current.members if member != peer))

    def on_back(self, peer: PeerId) -> None:
        """What we had sent may have been lost with the link: send it again."""
        self._cut.add(peer)
        self._answers.forget(peer)
        current = self._round
        if current is None or peer not in current.members or current.settling:
            return
        assert self._close is not None
        self._send.gradient(peer, self._close, current)
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
        if others and not current.settling:
            self._pokes += 1
            self._send_start(others[self._pokes % len(others)], current)

    def _send_start(self, peer: PeerId, current: Round) -> None:
        assert self._close is not None
        self._send.start(peer, self._close.step, current.roster, current.members, self._lineage)

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
            self._answers.refuse(sender, message.step)
        elif finished is not None and finished.step == message.step:
            if message.roster != finished.roster or sender in self._cut:
                if message.lineage == self._lineage:
                    self._answers.give(sender, finished)
                else:
                    self._answers.refuse(sender, message.step)
        elif current is None or close is None or message.step != close.step or current.settling:
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

    # -- an average that is known --------------------------------------------------------------------------

    def _on_answer(self, sender: PeerId, message: AverageMessage, tensor: Any) -> None:
        current, close = self._round, self._close
        if current is None or close is None or message.step != close.step or current.settling:
            return
        if isinstance(message, AverageDone) and not message.digest:
            self._on_stuck("the others have left this peer's step behind")
            return
        answer = self._answers.hear(sender, message, tensor)
        if answer is not None:
            self._take(sender, answer)

    def _take(self, sender: PeerId, answer: Answer) -> None:
        """Apply the answer in place of an average of our own."""
        backend, close = self._context.backend, self._close
        assert close is not None
        taken = Round(self._answers.roster(close.step, sender), answer.members)
        self._held = None

        def place() -> None:
            for part in range(len(answer.members)):
                backend.set_average(part, len(answer.members), answer.parts[part])

        def refused(error: Exception) -> None:
            self._context.strike(sender, f"unusable average: {error}")
            if self._round is taken:
                self._on_stuck("no usable average came from those who finished")

        self._settle(taken, answer.digest, place, refused)

    def _keep(self, current: Round) -> None:
        """All that are left hold the average of a larger roster: apply that, for the lost may have too."""
        held = current.held
        assert held is not None
        kept = Round(current.roster, held.members, held)

        def refused(error: Exception) -> None:
            if self._round is kept:
                self._on_stuck(f"the average that was held is no more: {error}")

        if self._leader(current) == self._context.me:  # the lost may not have come to sending it to learners
            lost = [part for part, owner in enumerate(held.members) if owner not in current.members]
            for peer in self._listeners:
                for part in lost:
                    self._send.held(peer, held, held.roster, part)
        self._settle(kept, held.digest, lambda: None, refused)

    def _settle(
        self,
        settled: Round,
        digest: str,
        place: Callable[[], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """Apply what ``place`` puts into the backend, if it hashes to ``digest``."""
        backend, close = self._context.backend, self._close
        assert close is not None
        settled.settling = True
        self._round = settled

        def work() -> str:
            place()
            return backend.average_digest()

        def done(found: str) -> None:
            if self._round is settled:
                settled.digest, settled.done_digest = found, digest
                self._finish_if_agreed(settled)
                if self._round is settled:
                    refused(ValueError("it does not hash to its digest"))

        self._context.worker.submit(TaskKind.SYNC, (close.step,), work, done, refused)
