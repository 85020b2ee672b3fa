"""The loss on held-out text: microbatches through every stage that count nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peer.context import Batches, Context
from peer.worker import TaskKind
from swarm.clock import Timer
from swarm.messages import Forward, Hop
from swarm.transport.base import PeerId

EVALUATION_INDEX = 1 << 31
"""Validation microbatches are numbered from here, apart from those that train."""
EVALUATION_LIMIT_S = 20.0
"""A validation of which something was lost holds the step no longer than this."""


class Validation:
    """One origin's validation of one step; ``on_end(loss)`` follows, None if nothing came back.

    All microbatches take one path; when a peer of it is lost, those that are not back yet take another.
    """

    def __init__(self, context: Context, batches: Batches, *, on_end: Callable[[float | None], None]) -> None:
        self._context = context
        self._batches = batches
        self._on_end = on_end
        self._step = context.step
        self._waiting = set(range(context.rules.validation_microbatches))
        self._path: tuple[Hop, ...] = ()
        self._attempt = 0
        self._loss_sum = 0.0
        self._tokens = 0
        self._timer: Timer = context.clock.call_later(EVALUATION_LIMIT_S, self.end)
        self._ended = False
        self._send_all()

    def on_lost(self, peer: PeerId) -> None:
        """A peer is lost: if it was on the path, what is not back yet goes another way."""
        if not self._ended and any(hop.peer == peer for hop in self._path):
            self._attempt += 1
            self._send_all()

    def on_output(self, message: Forward, output: Any) -> None:
        """The last hop's output of one microbatch."""
        context = self._context
        number = message.index - EVALUATION_INDEX
        current = message.step == self._step and message.attempt == self._attempt
        if self._ended or not current or number not in self._waiting:
            return
        _, labels = self._batches.validation(number)

        def done(result: tuple[float, int]) -> None:
            if not self._ended and number in self._waiting:
                self._waiting.discard(number)
                self._loss_sum += result[0]
                self._tokens += result[1]
                if not self._waiting:
                    self.end()

        def refused(error: Exception) -> None:
            context.strike(self._path[-1].peer, f"unusable tensor: {error}")

        context.worker.submit(
            TaskKind.EVALUATE,
            message.key,
            lambda: context.backend.infer_loss(output, labels),
            done,
            refused,
        )

    def end(self) -> None:
        """All came back, or the step waits no longer."""
        if self._ended:
            return
        self.stop()
        loss = self._loss_sum / self._tokens if self._tokens else None
        if loss is not None:
            self._context.events.emit("validated", step=self._step, loss=loss, tokens=self._tokens)
        self._on_end(loss)

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._ended = True
        self._timer.cancel()

    def _send_all(self) -> None:
        self._path = self._context.routes.full_path()
        for number in sorted(self._waiting):
            self._send(number, self._batches.validation(number)[0])

    def _send(self, number: int, tokens: Any) -> None:
        context, path = self._context, self._path
        message = Forward(
            step=self._step,
            index=EVALUATION_INDEX + number,
            attempt=self._attempt,
            origin=context.me,
            path=path,
            hop=1,
            evaluate=True,
            tensor=context.rules.activation,
        )
        to = path[1].peer if len(path) > 1 else context.me

        def done(output: Any) -> None:
            if not self._ended and message.attempt == self._attempt:
                context.transport.send(to, message, output)

        context.worker.submit(TaskKind.EVALUATE, message.key, lambda: context.backend.infer(tokens), done)
