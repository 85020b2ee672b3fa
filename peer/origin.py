"""A stage-0 peer's own microbatches: draw, start, take the loss, commit, and take over from a lost origin."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer.context import Batches, Context, draw_order
from peer.held import Held, outdated, stages_of
from peer.ledger import Committed, apply
from peer.phi import Arrivals, PhiLimits
from peer.router import Router
from peer.validation import Validation
from peer.worker import TaskKind
from swarm.clock import Timer
from swarm.messages import Backward, Commit, Counted, Forward, Hop, Release, Restart
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
    """Starts and commits this peer's microbatches of each step; calls ``on_done`` when all are committed."""

    def __init__(
        self, context: Context, router: Router, batches: Batches, *, on_done: Callable[[], None]
    ) -> None:
        self._context = context
        self._router = router
        self._batches = batches
        self._on_done = on_done
        self._queue: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._positions: dict[int, int] = {}
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
        mine = order.index(context.me)
        self._queue = deque(range(mine, context.microbatches, len(order)))
        self._positions = {index: position for position, index in enumerate(self._queue)}
        self._begin_validation(order)
        self.take_over()

    def stop(self) -> None:
        """What this peer drew is of no concern to it any more."""
        self.begun = -1
        for started in self.started.values():
            _settle(started)
        self.started.clear()
        self.committed.clear()
        self._attempts.clear()
        self._positions.clear()
        self._late_peers.clear()
        self._waiting.clear()
        self._released.clear()
        self._queue.clear()
        if self._validation is not None:
            self._validation.stop()
            self._validation = None

    def take_over(self) -> None:
        """Share the lost origins' microbatches, those not known to be committed, among the origins that live.

        By rendezvous hashing, so that another loss moves only what the newly lost had. Two origins that see
        different losses may both start one: the close counts one of them.
        """
        context = self._context
        if self.begun != context.step:
            return
        order = draw_order(context.step, context.origins_of_step)
        living = tuple(origin for origin in order if not context.liveness.gone(origin))
        for index in range(context.microbatches):
            owner = order[index % len(order)]
            if owner in living or index in context.ledger.commits or index in self._positions:
                continue
            if draw_order(index, living)[0] == context.me:
                self._positions[index] = index // len(order)
                self._queue.append(index)
                context.events.emit("taken_over", step=context.step, index=index, lost=owner)
        self._fill()
        self._check_done()

    def _fill(self) -> None:
        while self._queue and len(self.started) < self._context.rules.memory_slots:
            index = self._queue.popleft()
            if index not in self._context.ledger.commits:
                self._start(index)

    def _start(self, index: int) -> None:
        context = self._context
        count = self._attempts.get(index, 0)
        self._attempts[index] = count + 1
        base = context.origins_of_step.index(context.me) * ATTEMPTS_PER_ORIGIN
        base += context.epoch % EPOCHS_APART * ATTEMPTS_PER_EPOCH
        attempt = base + min(count, ATTEMPTS_PER_EPOCH - 1)
        path = context.routes.path(self._positions[index], self._late_peers.get(index, frozenset()))
        tokens, labels = self._batches.train(context.step, index)
        held = Held((context.step, index, attempt), context.me, path, 0, 0, tokens)
        self.started[index] = started = Started(index, attempt, held, labels, began_s=context.clock.now())
        borne_s = self._trips.borne_s() * 2 ** min(count, 5)
        started.late = context.clock.call_later(borne_s, self._late, started)
        context.events.emit("started", **held.fields(), path=[f"{h.stage}:{h.peer}" for h in path])
        self._router.start(held)

    def _late(self, started: Started) -> None:
        """It ought to have come home: somebody on its path holds it back, and nobody else sees it."""
        if self.started.get(started.index) is not started or not self._context.running:
            return
        peers = {hop.peer for hop in (*started.held.path, *started.path)} - {self._context.me}
        index = started.index
        self._late_peers[index] = self._late_peers.get(index, frozenset()) | peers
        self.restart(index, f"not back after {self._context.clock.now() - started.began_s:.0f} s")

    def restart(self, index: int, reason: str) -> None:
        """Give an attempt up and start the microbatch anew on another path."""
        started = self.started.pop(index, None)
        if started is None:
            return
        _settle(started)
        self.figures.restarted += 1
        self._context.events.emit("restarted", **started.held.fields(), reason=reason)
        self._release(started, keep=())
        self._router.held.drop(started.held)
        self._waiting.add(index)
        pause_s = min(RESTART_PAUSE_MAX_S, RESTART_PAUSE_S * 2 ** min(10, self._attempts[index] - 1))
        self._context.clock.call_later(pause_s, self._start_again, self._context.step, index)

    def _start_again(self, step: int, index: int) -> None:
        if step == self._context.step and index in self._waiting:
            self._waiting.discard(index)
            self._queue.append(index)
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
            TaskKind.LOSS, started.held.key, lambda: context.backend.loss(output, labels), done, refused
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
        """The gradient may have been lost on its way to a last hop, and a release on its way to any."""
        for release in self._released.get(peer, ()):
            self._context.transport.send(peer, release)
        for started in self.started.values():
            if started.gradient is not None and started.path[-1].peer == peer:
                self._context.events.emit("sent", **started.held.fields(), other=peer, kind="backward")
                self._send_gradient(started)

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
            and not self._queue
            and not self._waiting
            and not self.started
            and self._validation is None
        )

    def _check_done(self) -> None:
        if self.done:
            self._on_done()

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
