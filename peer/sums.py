"""A hop's gradient sum: what is added on a commit, and what it must hold when the step is closed."""

from __future__ import annotations

from collections.abc import Callable

from peer.context import Context
from peer.held import Held, Holdings, Phase
from peer.ledger import SumDiscarded, Summed, apply, owed, unsound
from peer.worker import TaskKind
from swarm.messages import Counted


class Sums:
    """Adds each counted microbatch once; builds the sum anew where it holds what the close does not count."""

    def __init__(self, context: Context, held: Holdings) -> None:
        self._context = context
        self._held = held
        self._when_summed: Callable[[], None] | None = None

    def add(self, counted: Counted) -> bool:
        """Add a committed microbatch's weight gradients to the sum; False if it is not held here."""
        context = self._context
        held = self._held.get((context.ledger.step, counted.index, counted.attempt))
        if held is None or held.origin != counted.origin or held.phase is not Phase.RETURNED:
            return False
        if held.summing or not any(h.peer == context.me and h.stage == context.stage for h in counted.path):
            return held.summing
        held.summing = True
        held.output = held.returned = None
        deferred, held.deferred = held.deferred, []

        def done(_: None) -> None:
            if self._held.get(held.key) is held:
                context.ledger = apply(context.ledger, Summed(counted))
                self._check_summed()

        def work() -> None:
            for part in deferred:
                context.backend.accumulate(part)

        context.worker.submit(TaskKind.WEIGHT, held.order, work, done)
        return True

    def stop(self) -> None:
        """This peer takes part in its step no longer."""
        self._when_summed = None

    def settle(self, when_summed: Callable[[], None]) -> None:
        """The step is closed: bring the sum to exactly what the close counts here, then call back.

        Raises:
            LookupError: a counted microbatch is not held (any more): this peer cannot vouch for its sum.
        """
        context = self._context
        close = context.ledger.close
        assert close is not None
        for held in list(self._held.values()):
            if held.key[0] < close.step or (held.key[0] == close.step and held.phase is not Phase.RETURNED):
                self._held.drop(held)
        self._when_summed = when_summed
        for counted in owed(close, context.me, context.stage):
            if not self.add(counted):
                raise LookupError(f"microbatch {counted.index} of step {close.step} is not held")
        self._check_summed()

    def _check_summed(self) -> None:
        context = self._context
        close = context.ledger.close
        if self._when_summed is None or close is None:
            return
        due = owed(close, context.me, context.stage)
        if any(held.summing and held.key[0] == close.step for held in self._unsummed()):
            return
        if unsound(context.ledger, context.me, context.stage):
            self._rebuild(due)
        elif set(context.ledger.summed) == set(due):
            when_summed, self._when_summed = self._when_summed, None
            when_summed()

    def _unsummed(self) -> list[Held]:
        done = {(counted.index, counted.attempt, counted.origin) for counted in self._context.ledger.summed}
        return [h for h in self._held.values() if h.summing and (h.key[1], h.key[2], h.origin) not in done]

    def _rebuild(self, due: tuple[Counted, ...]) -> None:
        """The sum holds what the close does not count: compute it anew from the held inputs and gradients."""
        context = self._context
        context.events.emit("rebuilt", step=context.step, counted=len(due))
        step = context.ledger.step
        keys = [(step, counted.index, counted.attempt) for counted in due]
        held = [self._held[key] for key in keys]
        for other in [one for one in self._held.values() if one.summing and one.key not in keys]:
            self._held.drop(other)

        def work() -> None:
            context.backend.discard_gradient()
            for one in held:
                _, saved = context.backend.forward(one.inputs)
                context.backend.accumulate(context.backend.backward(saved, one.gradient)[1])
                if one.loss_inputs is not None:
                    context.backend.accumulate(context.backend.loss(*one.loss_inputs)[3])

        def done(_: None) -> None:
            if self._when_summed is None:
                return
            ledger = apply(context.ledger, SumDiscarded())
            for counted in due:
                ledger = apply(ledger, Summed(counted))
            context.ledger = ledger
            self._check_summed()

        context.worker.submit(TaskKind.SYNC, (step,), work, done)
