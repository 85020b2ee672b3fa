"""A stage-0 peer's own microbatches: draw, start, take the loss, commit, and take over from a lost origin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer.context import Batches, Context, draw_order
from peer.held import Held, outdated, stages_of
from peer.ledger import Committed, apply
from peer.phi import Arrivals, PhiLimits
from peer.router import Router
from peer.shares import Shares
from peer.validation import Validation
from peer.worker import TaskKind
from swarm.clock import Timer
from swarm.messages import Backward, Commit, Counted, Forward, Hop, Release, Restart, TakenOver
from swarm.transport.base import PeerId

RESTART_PAUSE_S = 0.02
RESTART_PAUSE_MAX_S = 2.0
"""Before a microbatch is started anew: doubles, so that a stage without a replica is not asked in a loop."""
LATE = PhiLimits(pause_s=10.0, least_deviation_s=0.5, most_s=300.0, unmeasured_s=60.0)
"""Of the time from a microbatch's start to its commit. A later one is started anew on other peers, though all
of its path live: one of them accepted it and does not pass it on."""
ATTEMPTS_PER_ORIGIN = 1 << 16
"""Attempts of different origins at one index never share a number."""

EPOCHS_APART = 16
ATTEMPTS_PER_EPOCH = ATTEMPTS_PER_ORIGIN // EPOCHS_APART
"""Nor do attempts of one origin in epochs that follow each other."""


@dataclass
class Started:
    """An attempt of ours that is under way."""

    index: int
    attempt: int
    held: Held
    labels: Any
    stages: tuple[int, ...] = ()
    """Stages before the loss that the running or finished loss computation stands for."""
    path: tuple[Hop, ...] = ()
    revision: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    gradient: Any = None
    output: Any = None
    head: Any = None
    began_s: float = 0.0
    late: Timer | None = None


@dataclass
class StepFigures:
    """What an origin reports of a step."""

    loss_sum: float = 0.0
    tokens: int = 0
    committed: int = 0
    restarted: int = 0
    validation_loss: float | None = None


class Origin:
    """Starts and commits this peer's microbatches of each step; calls ``on_done`` when all are committed, and
    ``on_more`` when others came to it after that."""

    def __init__(
        self,
        context: Context,
        router: Router,
        batches: Batches,
        *,
        on_done: Callable[[], None],
        on_more: Callable[[], None],
    ) -> None:
        self._context = context
        self._router = router
        self._batches = batches
        self._on_done = on_done
        self._on_more = on_more
        self._told_done = False
        self._shares = _no_shares(context.me)
        self._attempts: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._released: dict[PeerId, list[Release]] = {}
        """What each peer was, or is to be, told to drop of this step."""
        self._late_peers: dict[int, frozenset[PeerId]] = {}
        """Those on whom an earlier attempt was late."""
        self._trips = Arrivals(LATE)
        self._validation: Validation | None = None
        self.started: dict[int, Started] = {}
        self.committed: dict[int, Counted] = {}
        self.figures = StepFigures()
        self.begun = -1

    # -- starting ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Draw this peer's microbatches of the context's step and start as many as fit."""
        context = self._context
        self.stop()
        self.figures = StepFigures()
        self.begun = context.step
        order = draw_order(context.step, context.origins_of_step)
        self._shares = Shares(context.me, order, context.microbatches)
        self._begin_validation(order)
        self.take_over()

    def stop(self) -> None:
        """What this peer drew is of no concern to it any more."""
        self.begun = -1
        self._told_done = False
        for started in self.started.values():
            _settle(started)
        self.started.clear()
        self.committed.clear()
        self._attempts.clear()
        self._late_peers.clear()
        self._waiting.clear()
        self._released.clear()
        self._shares = _no_shares(self._context.me)
        if self._validation is not None:
            self._validation.stop()
            self._validation = None

    def take_over(self) -> None:
        """Share the lost origins' microbatches, those not known to be committed, among the origins that
        live."""
        context, shares = self._context, self._shares
        if self.begun != context.step:
            return
        for index in shares.take_over(context.liveness.gone, context.ledger.commits):
            context.events.emit("taken_over", step=context.step, index=index, lost=shares.owner(index))
        self._fill()
        self._check_done()

    def on_taken_over(self, sender: PeerId, message: TakenOver) -> None:
        """We were lost for another origin, which has started some of ours: what we have under way goes on
        here, the rest there. Or the answer to that."""
        context, shares = self._context, self._shares
        if message.step != self.begun or sender not in context.origins_of_step:
            return
        for index in message.committed:
            if shares.owner(index) == context.me:
                self._give_up(index)
        goes_on = [i for i in message.indices if shares.owner(i) == context.me and self._under_way(i)]
        for index in shares.leave_to(sender, {*message.indices, *message.committed} - {*goes_on}):
            context.events.emit("left_to", step=context.step, index=index, other=sender)
        if goes_on:
            context.transport.send(sender, TakenOver(step=self.begun, indices=tuple(goes_on)))
        for index in message.indices:
            if shares.owner(index) == sender:
                self._give_up(index)
                shares.taken.discard(index)
        self._fill()
        self._check_done()

    def _under_way(self, index: int) -> bool:
        return index in self.started or index in self._waiting or index in self.committed

    def _give_back(self, owner: PeerId) -> None:
        """``owner`` is back: it starts what we have not, and hears what we have."""
        given, kept = self._shares.give_back(owner)
        for index in given:
            self._context.events.emit("given_back", step=self.begun, index=index, other=owner)
        if kept:
            committed = tuple(index for index in kept if index in self.committed)
            begun = tuple(index for index in kept if index not in self.committed)
            taken = TakenOver(step=self.begun, indices=begun, committed=committed)
            self._context.transport.send(owner, taken)

    def _fill(self) -> None:
        """Start as many as fit; none while most members are not heard: it may be we who are cut off, and what
        would be left of a path is no path."""
        context, shares = self._context, self._shares
        while shares.queue and len(self.started) < context.rules.memory_slots:
            if not context.majority_heard:
                return
            index = shares.queue.popleft()
            if index not in context.ledger.commits:
                self._start(index)

    def _start(self, index: int) -> None:
        context = self._context
        count = self._attempts.get(index, 0)
        self._attempts[index] = count + 1
        base = context.origins_of_step.index(context.me) * ATTEMPTS_PER_ORIGIN
        base += context.epoch % EPOCHS_APART * ATTEMPTS_PER_EPOCH
        attempt = base + min(count, ATTEMPTS_PER_EPOCH - 1)
        position = self._shares.position(index)
        path = context.routes.path(position, self._late_peers.get(index, frozenset()))
        tokens, labels = self._batches.train(context.step, index)
        held = Held((context.step, index, attempt), context.me, path, 0, 0, tokens)
        held.taken_over = self._shares.owner(index) != context.me
        self.started[index] = started = Started(index, attempt, held, labels, began_s=context.clock.now())
        borne_s = self._trips.borne_s() * 2 ** min(count, 5)
        started.late = context.clock.call_later(borne_s, self._late, started)
        context.events.emit("started", **held.fields(), path=[f"{h.stage}:{h.peer}" for h in path])
        self._router.start(held)

    def _late(self, started: Started) -> None:
        """It ought to have come home: somebody on its path holds it back, and nobody else sees it. Or we are
        cut off: then it is given as long again."""
        if self.started.get(started.index) is not started or not self._context.running:
            return
        if not self._context.majority_heard:
            started.late = self._context.clock.call_later(self._trips.borne_s(), self._late, started)
            return
        peers = {hop.peer for hop in (*started.held.path, *started.path)} - {self._context.me}
        index = started.index
        self._late_peers[index] = self._late_peers.get(index, frozenset()) | peers
        self.restart(index, f"not back after {self._context.clock.now() - started.began_s:.0f} s")

    def restart(self, index: int, reason: str) -> None:
        """Give an attempt up and start the microbatch anew on another path."""
        started = self._give_up(index)
        if started is None:
            return
        self.figures.restarted += 1
        self._context.events.emit("restarted", **started.held.fields(), reason=reason)
        self._waiting.add(index)
        pause_s = min(RESTART_PAUSE_MAX_S, RESTART_PAUSE_S * 2 ** min(10, self._attempts[index] - 1))
        self._context.clock.call_later(pause_s, self._start_again, self._context.step, index)

    def _give_up(self, index: int) -> Started | None:
        """Whoever holds something of our attempt drops it."""
        self._waiting.discard(index)
        started = self.started.pop(index, None)
        if started is not None:
            _settle(started)
            self._release(started, keep=())
            self._router.held.drop(started.held)
        return started

    def _start_again(self, step: int, index: int) -> None:
        if step == self._context.step and index in self._waiting:
            self._waiting.discard(index)
            self._shares.queue.append(index)
            self._fill()
            self._check_done()

    def on_restart(self, sender: PeerId, message: Restart) -> None:
        started = self.started.get(message.index)
        if started is None or started.attempt != message.attempt or message.step != self._context.step:
            return
        members = {member.peer for member in self._context.members}
        if sender in members or sender == self._context.me:
            self.restart(message.index, message.reason)

    # -- the loss ------------------------------------------------------------------------------------------

    def on_loss(self, message: Forward, output: Any) -> None:
        """The last hop's output: compute the loss, or answer a rerouted last hop with what was computed."""
        if message.evaluate:
            if self._validation is not None:
                self._validation.on_output(message, output)
            return
        started = self.started.get(message.index)
        if started is None or message.key != started.held.key:
            return
        stages = stages_of(message.path)
        ours = started.held.path
        if stages != stages_of(ours) and outdated(message.path, ours):
            return  # by a hop that we have gone around, of other stages: nobody brings its gradient home
        if started.stages == stages:
            if outdated(message.path, started.path):
                return
            started.path, started.revision = message.path, message.revision
            if started.gradient is not None:
                self._send_gradient(started)
            return
        if started.stages and message.revision < started.revision:
            return
        started.path, started.revision, started.stages = message.path, message.revision, stages
        started.gradient = None
        self._compute_loss(started, output)

    def _compute_loss(self, started: Started, output: Any) -> None:
        context = self._context
        stages, labels = started.stages, started.labels

        def done(result: tuple[float, int, Any, Any]) -> None:
            if self.started.get(started.index) is not started or started.stages != stages:
                return
            started.loss_sum, started.tokens, started.gradient, started.head = result
            if not math.isfinite(started.loss_sum):
                self.restart(started.index, "the loss is not finite")
                return
            started.output = output
            self._send_gradient(started)

        def refused(error: Exception) -> None:
            if self.started.get(started.index) is started and started.stages == stages:
                context.strike(started.path[-1].peer, f"unusable tensor: {error}")
                self.restart(started.index, str(error))

        context.worker.submit(
            TaskKind.LOSS, started.held.order, lambda: context.backend.loss(output, labels), done, refused
        )

    def _send_gradient(self, started: Started) -> None:
        last = started.path[-1].peer
        if not self._context.liveness.alive(last):
            return  # it comes back, or the hop before it brings a replacement, which asks again
        step, index, attempt = started.held.key
        message = Backward(
            step=step,
            index=index,
            attempt=attempt,
            origin=self._context.me,
            path=started.path,
            hop=len(started.path) - 1,
            revision=started.revision,
            trail=(),
            tensor=self._context.rules.activation,
        )
        self._context.transport.send(last, message, started.gradient)

    def on_back(self, peer: PeerId) -> None:
        """The gradient may have been lost on its way to a last hop, and a release on its way to any. An
        origin goes on with what it drew."""
        for release in self._released.get(peer, ()):
            self._context.transport.send(peer, release)
        for started in self.started.values():
            if started.gradient is not None and started.path[-1].peer == peer:
                self._context.events.emit("sent", **started.held.fields(), other=peer, kind="backward")
                self._send_gradient(started)
        if self.begun == self._context.step:
            self._give_back(peer)
            self.take_over()

    # -- the commit ----------------------------------------------------------------------------------------

    def on_home(self, held: Held) -> None:
        """A microbatch went through its own backward: commit it on the path that its gradient took."""
        context = self._context
        started = self.started.get(held.key[1])
        if started is None or started.held is not held or context.ledger.close is not None:
            return
        del self.started[started.index]
        _settle(started)
        self._trips.add(context.clock.now() - started.began_s)
        path = (held.path[0], *reversed(held.trail))
        counted = Counted(
            index=started.index,
            attempt=started.attempt,
            origin=context.me,
            path=path,
            tokens=started.tokens,
        )
        self.committed[started.index] = counted
        held.deferred.append(started.head)
        held.loss_inputs = (started.output, started.labels)
        self.figures.loss_sum += started.loss_sum
        self.figures.tokens += started.tokens
        self.figures.committed += 1
        loss = started.loss_sum / max(1, started.tokens)
        step = held.key[0]
        commit = Commit(
            step=step,
            index=started.index,
            attempt=started.attempt,
            origin=context.me,
            path=path,
            tokens=started.tokens,
            loss=loss,
        )
        context.events.emit(
            "committed", **held.fields(), loss=loss, path=[f"{h.stage}:{h.peer}" for h in path]
        )
        for peer in sorted({hop.peer for hop in path} - {context.me}):
            context.transport.send(peer, commit)
        self._release(started, keep=tuple(hop.peer for hop in path))
        context.ledger = apply(context.ledger, Committed(counted))
        self._router.sums.add(counted)
        self._fill()
        self._check_done()

    def _release(self, started: Started, keep: tuple[PeerId, ...]) -> None:
        """Tell the peers of an attempt that are not on its committed path to drop what they hold; those that
        are lost now hear it when they are back."""
        step, index, attempt = started.held.key
        release = Release(step=step, index=index, attempt=attempt)
        peers = {hop.peer for hop in (*started.held.path, *started.path)}
        for peer in sorted(peers - {self._context.me} - set(keep)):
            self._released.setdefault(peer, []).append(release)
            if self._context.liveness.alive(peer):
                self._context.transport.send(peer, release)

    def waits_for(self, index: int, attempt: int) -> bool:
        """Is this attempt under way, for all that this origin knows of it?"""
        started = self.started.get(index)
        return self.begun == self._context.step and started is not None and started.attempt == attempt

    @property
    def done(self) -> bool:
        """Everything that this origin drew for the context's step is committed."""
        return (
            self.begun == self._context.step
            and not self._shares.queue
            and not self._waiting
            and not self.started
            and self._validation is None
        )

    def _check_done(self) -> None:
        """Tell others, and tell them otherwise when something was taken over since."""
        if self.done:
            self._told_done = True
            self._on_done()
        elif self._told_done:
            self._told_done = False
            self._on_more()

    # -- validation ----------------------------------------------------------------------------------------

    def _begin_validation(self, order: tuple[PeerId, ...]) -> None:
        context = self._context
        every = context.rules.validation_every
        if every and context.step % every == 0 and order[0] == context.me:
            self._validation = Validation(context, self._batches, on_end=self._validated)

    def _validated(self, loss: float | None) -> None:
        self._validation = None
        if loss is not None:
            self.figures.validation_loss = loss
        self._check_done()

    def on_lost(self, peer: PeerId) -> None:
        """What is validated goes around a lost peer; the router does the same for what trains."""
        if self._validation is not None:
            self._validation.on_lost(peer)


def _settle(started: Started) -> None:
    """Nobody waits for this attempt any more."""
    if started.late is not None:
        started.late.cancel()


def _no_shares(me: PeerId) -> Shares:
    """Before a step, and after one."""
    return Shares(me, (me,), 0)
