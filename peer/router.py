"""A hop's work: take a microbatch, pass it on, take its gradient, pass that back, and route around the lost.

Everything that a reroute may need (input, output, gradient) is held until the origin's COMMIT or the step's
close. A hop that is lost is replaced by its predecessor, which still has its output; the successor, which
still has its gradient, answers the replacement at once. docs/design.md, "When a peer drops".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from peer.context import Context
from peer.held import Held, Holdings, Phase, outdated, stages_of
from peer.ledger import Committed, apply, counted_of
from peer.sums import Sums
from peer.worker import TaskKind
from swarm.messages import (
    Accept,
    Arrived,
    Backward,
    Commit,
    Forward,
    Hop,
    Refuse,
    Release,
    Restart,
)
from swarm.transport.base import PeerId

BUSY_RETRY_S = 0.05
"""Before a hop that every replica refused asks again: about one microbatch of a small model."""

STRANDED_S = 0.5
"""When the first are back that were lost with most others, the rest are given so long to be back as well."""

WITNESSED = 4
"""Of so many outputs from one peer the hop before it hears of one: enough to know its pace."""

MAX_EARLY_EVALUATIONS = 64
"""Validation microbatches that came before this peer was at their step."""


class Router:
    """Forward, backward, weight gradients and rerouting of one peer's microbatches."""

    def __init__(
        self,
        context: Context,
        *,
        on_loss: Callable[[Forward, Any], None],
        on_home: Callable[[Held], None],
        on_late: Callable[[PeerId], None],
        on_full: Callable[[], None],
        on_pace: Callable[[PeerId, float], None] = lambda peer, took_s: None,
    ) -> None:
        self._context = context
        self._on_pace = on_pace
        self._witnessed: Counter[PeerId] = Counter()
        self._on_loss = on_loss
        self._on_home = on_home
        self._on_late = on_late
        self._on_full = on_full
        self.held = Holdings()
        self.sums = Sums(context, self.held)
        self._early: list[tuple[Forward, Any]] = []
        self.rerouted = 0
        self._looking = False

    # -- a microbatch comes --------------------------------------------------------------------------------

    def start(self, held: Held) -> None:
        """The origin's own hop 0 of a new attempt."""
        self.held[held.key] = held
        self._compute_forward(held)

    def on_forward(self, sender: PeerId, message: Forward, inputs: Any) -> None:
        context = self._context
        if sender != message.path[message.hop - 1].peer:
            context.strike(sender, "FORWARD from a peer that is not the hop before")
            return
        if message.hop == len(message.path):
            if message.origin == context.me:
                self._witness(sender, message)
                self._on_loss(message, inputs)
            return
        here = message.path[message.hop]
        if here.peer != context.me or here.stage != context.stage:
            self._refuse(sender, message, "wrong stage")
        elif message.evaluate:
            self._evaluate(message, inputs)
        elif message.step < context.step:
            self._refuse(sender, message, "wrong step")
        elif message.step > context.step + 1:
            self._refuse(sender, message, "behind")
            self._on_late(sender)
        elif message.key in self.held:
            self._reply(sender, Accept, message)
            self._meet_again(self.held[message.key], message, inputs)
        elif context.leaving and message.step > context.step:
            self._refuse(sender, message, "leaving")
        elif self.held.occupied(context.liveness.gone) >= context.rules.memory_slots:
            self._refuse(sender, message, "busy")
            self._on_full()
        else:
            held = Held(message.key, message.origin, message.path, message.hop, message.revision, inputs)
            held.taken_over = context.drawn_by(message.step, message.index) not in (None, message.origin)
            self.held[held.key] = held
            self._reply(sender, Accept, message)
            self._witness(sender, message)
            self._compute_forward(held)
            if not held.submitted:
                context.events.emit("received", **held.fields(), other=sender)

    def _witness(self, sender: PeerId, message: Forward) -> None:
        """Let the hop before ``sender`` know when the output came, now and then."""
        if message.evaluate or message.hop < 2:
            return
        self._witnessed[sender] += 1
        if self._witnessed[sender] % WITNESSED == 0:
            step, index, attempt = message.key
            before = message.path[message.hop - 2].peer
            arrived = Arrived(step=step, index=index, attempt=attempt, peer=sender)
            if before == self._context.me:
                self.on_arrived(before, arrived)
            else:
                self._context.transport.send(before, arrived)

    def on_arrived(self, sender: PeerId, message: Arrived) -> None:
        """The next hop's output is at the hop after it, as far as we know which that is."""
        held = self.held.get(message.key)
        if held is None or held.sent_s is None or held.next_hop != message.peer:
            return
        after = held.path[held.hop + 2].peer if held.hop + 2 < len(held.path) else held.origin
        if sender == after:
            self._on_pace(message.peer, self._context.clock.now() - held.sent_s)
            held.sent_s = None

    def _meet_again(self, held: Held, message: Forward, inputs: Any) -> None:
        """A rerouting before us brings a microbatch that we already hold."""
        ours, theirs = held.path[: held.hop], message.path[: message.hop]
        if outdated(theirs, ours):
            return
        if stages_of(ours) == stages_of(theirs):
            # Our own place too: what was sent under its old version must not release the new one.
            here = max(held.path[held.hop], message.path[message.hop], key=lambda hop: hop.version)
            held.path = (*theirs, here, *held.path[held.hop + 1 :])
            held.revision = max(held.revision, message.revision)
            if held.phase is Phase.RETURNED and not held.summing:
                self._send_back(held)
        elif message.revision >= held.revision and not held.summing:
            # Other stages came before: what was computed here belongs to another function.
            held.path = message.path[: message.hop + 1] + held.path[held.hop + 1 :]
            held.hop, held.revision, held.inputs = message.hop, message.revision, inputs
            held.generation += 1
            held.phase, held.submitted = Phase.QUEUED, False
            held.output = held.saved = held.gradient = held.returned = None
            held.trail, held.deferred = (), []
            self._compute_forward(held)

    def on_step(self) -> None:
        """The parameters of the context's step are in place: compute what came early."""
        for held in list(self.held.values()):
            if held.phase is Phase.QUEUED and not held.submitted:
                self._compute_forward(held)
        early, self._early = self._early, []
        for message, inputs in early:
            self._evaluate(message, inputs)

    def _compute_forward(self, held: Held) -> None:
        context = self._context
        if held.key[0] != context.step or not context.running:
            return
        held.submitted = True
        generation = held.generation

        def done(result: tuple[Any, Any]) -> None:
            if self.held.get(held.key) is not held or held.generation != generation:
                return
            held.output, held.saved = result
            held.phase = Phase.FORWARDED
            self._pass_on(held)

        def refused(error: Exception) -> None:
            self._spoiled(held, generation, held.path[held.hop - 1].peer, error)

        inputs = held.inputs
        context.worker.submit(
            TaskKind.FORWARD,
            held.order,
            lambda: context.backend.forward(inputs),
            done,
            None if held.hop == 0 else refused,
        )

    def _spoiled(self, held: Held, generation: int, sender: PeerId, error: Exception) -> None:
        """What came cannot be computed with (NaN, say): a strike for its sender, another try for the rest."""
        if self.held.get(held.key) is held and held.generation == generation:
            self._context.strike(sender, f"unusable tensor: {error}")
            self.held.drop(held)
            self._give_up(held, f"unusable tensor from {sender}")

    # -- passing on, and around the lost -------------------------------------------------------------------

    def _pass_on(self, held: Held) -> None:
        if held.hop + 1 < len(held.path) and not self._reachable(held, held.next_hop):
            self._reroute(held)
            return
        message = Forward(
            step=held.key[0],
            index=held.key[1],
            attempt=held.key[2],
            origin=held.origin,
            path=held.path,
            hop=held.hop + 1,
            revision=held.revision,
            tensor=self._context.rules.activation,
        )
        held.sent_s = self._context.clock.now()
        self._context.transport.send(held.next_hop, message, held.output)

    def _reachable(self, held: Held, peer: PeerId) -> bool:
        return peer not in held.refused and self._context.liveness.alive(peer)

    def _reroute(self, held: Held) -> None:
        """Put another peer, another stage, or nothing, in the place of the next hop. Not while most members
        seem lost: it may be we who are cut off, and another goes around us."""
        context = self._context
        if not context.majority_heard:
            return
        place = held.hop + 1
        lost = held.path[place]
        peer = context.routes.replacement(lost.stage, {*held.refused, lost.peer})
        if peer is None and held.refused:
            self._ask_again(held)
            return
        before, after = held.path[:place], held.path[place + 1 :]
        if not context.liveness.alive(lost.peer):
            held.replaced[lost.peer] = lost.version
        if peer is not None:
            held.path = (*before, Hop(stage=lost.stage, peer=peer, version=lost.version + 1), *after)
        else:
            other = self._other_stage(held, place)
            if other is not None:
                held.path = (*before, other, *after)
            elif len(held.path) - 1 >= context.rules.min_path_length:
                held.path = before + _newer(after, lost.version + 1)
            else:
                self._give_up(held, f"stage {lost.stage} has no living replica")
                return
            held.revision += 1
        self.rerouted += 1
        context.events.emit(
            "rerouted",
            **held.fields(),
            stage=lost.stage,
            lost=lost.peer,
            cause="refused" if context.liveness.alive(lost.peer) else "lost",
            reason=held.refused.get(lost.peer) or context.liveness.why_lost(lost.peer),
            path=[f"{h.stage}:{h.peer}" for h in held.path],
        )
        self._pass_on(held)

    def _other_stage(self, held: Held, place: int) -> Hop | None:
        """A living peer of a stage that the path has not visited and that keeps the stages in order."""
        context = self._context
        first = held.path[place - 1].stage + 1
        last = held.path[place + 1].stage if place + 1 < len(held.path) else context.rules.stages
        for stage in range(first, last):
            if stage != held.path[place].stage:
                peer = context.routes.replacement(stage, set(held.refused))
                if peer is not None:
                    return Hop(stage=stage, peer=peer, version=held.path[place].version + 1)
        return None

    def _ask_again(self, held: Held) -> None:
        """All replicas are full: the work waits here, where it holds one slot, and asks again."""

        def ask() -> None:
            held.retry = None
            if self.held.get(held.key) is held and held.phase is Phase.FORWARDED:
                held.refused.clear()
                self._tell_sent(held, held.next_hop, "forward")
                self._pass_on(held)

        if held.retry is None:
            held.retry = self._context.clock.call_later(BUSY_RETRY_S, ask)

    def _give_up(self, held: Held, reason: str) -> None:
        held.given_up = reason
        step, index, attempt = held.key
        restart = Restart(step=step, index=index, attempt=attempt, reason=reason)
        self._context.transport.send(held.origin, restart)

    def on_refuse(self, sender: PeerId, message: Refuse) -> None:
        held = self.held.get(message.key)
        if held is None or held.phase is not Phase.FORWARDED or held.next_hop != sender:
            return
        if message.reason == "wrong step":
            self._on_late(sender)
            return
        held.refused[sender] = message.reason
        self._context.events.emit("refused", **held.fields(), other=sender, reason=message.reason)
        if held.hop + 1 < len(held.path):
            self._pass_on(held)

    def on_lost(self, peer: PeerId) -> None:
        """Route every microbatch that waits on ``peer`` around it, in this same call."""
        for held in list(self.held.values()):
            if held.next_hop == peer and self._stranded(held):
                self._reroute(held)

    def on_back(self, peer: PeerId) -> None:
        """A lost peer answers again. What was under way between us may have been lost with the link, on one
        side only: the receiver takes what it misses and passes over the rest."""
        for held in list(self.held.values()):
            version = held.replaced.pop(peer, None)
            if version is not None and held.next_hop != peer:
                step, index, attempt = held.key
                release = Release(step=step, index=index, attempt=attempt, version=version)
                self._context.transport.send(peer, release)
            if held.summing:
                continue
            if held.given_up is not None and held.origin == peer:
                self._give_up(held, held.given_up)
            if held.phase is Phase.FORWARDED and held.next_hop == peer:
                self._tell_sent(held, peer, "forward")
                self._pass_on(held)
            elif self._stranded(held) and not self._looking:
                self._looking = True
                self._context.clock.call_later(STRANDED_S, self._go_around)
            if held.phase is Phase.RETURNED and held.hop > 0 and held.path[held.hop - 1].peer == peer:
                self._tell_sent(held, peer, "backward")
                self._send_back(held)

    def _stranded(self, held: Held) -> bool:
        """Does it wait for a lost hop? For longer than a moment only if we could not tell who is cut off."""
        waits = held.phase is Phase.FORWARDED and held.hop + 1 < len(held.path)
        return waits and not self._context.liveness.alive(held.next_hop)

    def _go_around(self) -> None:
        """We were cut off, and some are back; who is not by now is lost."""
        self._looking = False
        for held in list(self.held.values()):
            if self._stranded(held):
                self._reroute(held)

    def _tell_sent(self, held: Held, peer: PeerId, kind: str) -> None:
        self._context.events.emit("sent", **held.fields(), other=peer, kind=kind)

    # -- the gradient comes --------------------------------------------------------------------------------

    def on_backward(self, sender: PeerId, message: Backward, gradient: Any) -> None:
        context = self._context
        held = self.held.get(message.key)
        if held is None or held.phase is not Phase.FORWARDED:
            return
        after = message.path[message.hop + 1].peer if message.hop + 1 < len(message.path) else message.origin
        if sender != after or message.origin != held.origin:
            context.strike(sender, "BACKWARD from a peer that is not the hop after")
            return
        if stages_of(message.path[: message.hop + 1]) != stages_of(held.path[: held.hop + 1]):
            return
        if message.revision < held.revision:
            return  # of stages that we went around since: later hops compute for the new ones by now
        held.path = held.path[: held.hop + 1] + message.path[message.hop + 1 :]
        held.phase, held.gradient, held.trail = Phase.RETURNING, gradient, message.trail
        generation, saved = held.generation, held.saved
        held.saved = None

        def done(result: tuple[Any, Any]) -> None:
            if self.held.get(held.key) is not held or held.generation != generation:
                return
            held.returned, deferred = result
            held.deferred.append(deferred)
            held.phase = Phase.RETURNED
            if held.hop == 0:
                self._on_home(held)
            else:
                self._send_back(held)

        context.worker.submit(
            TaskKind.BACKWARD,
            held.order,
            lambda: context.backend.backward(saved, gradient),
            done,
            lambda error: self._spoiled(held, generation, sender, error),
        )

    def _send_back(self, held: Held) -> None:
        previous = held.path[held.hop - 1].peer
        if not self._context.liveness.alive(previous):
            return  # its replacement will come for the gradient
        message = Backward(
            step=held.key[0],
            index=held.key[1],
            attempt=held.key[2],
            origin=held.origin,
            path=held.path,
            hop=held.hop - 1,
            revision=held.revision,
            trail=(*held.trail, held.path[held.hop]),
            tensor=self._context.rules.activation,
        )
        self._context.transport.send(previous, message, held.returned)

    # -- what counts ---------------------------------------------------------------------------------------

    def on_commit(self, sender: PeerId, message: Commit) -> None:
        if sender != message.origin:
            self._context.strike(sender, "COMMIT in another origin's name")
            return
        if message.step != self._context.step or self._context.ledger.close is not None:
            return
        if sender not in self._context.origins_of_step or message.index >= self._context.microbatches:
            self._context.strike(sender, "COMMIT of what is not this origin's to commit")
            return
        counted = counted_of(message)
        self._context.ledger = apply(self._context.ledger, Committed(counted))
        self.sums.add(counted)

    def on_release(self, sender: PeerId, message: Release) -> None:
        held = self.held.get(message.key)
        if held is None or held.summing:
            return
        of_origin = sender == held.origin and message.version is None
        # Or it was routed around us while we could not be reached, and nobody waits for this copy.
        replaced = (
            held.hop > 0
            and held.phase is not Phase.RETURNED
            and sender == held.path[held.hop - 1].peer
            and message.version == held.path[held.hop].version
        )
        if of_origin or replaced:
            self.held.drop(held)
            self._release_next(held)

    def _release_next(self, held: Held) -> None:
        """Where a dropped microbatch was passed on to, perhaps without its origin's knowledge, nobody waits
        for it either."""
        if held.phase in (Phase.FORWARDED, Phase.RETURNING) and held.hop + 1 < len(held.path):
            step, index, attempt = held.key
            version = held.path[held.hop + 1].version
            release = Release(step=step, index=index, attempt=attempt, version=version)
            self._context.transport.send(held.next_hop, release)

    # -- validation ----------------------------------------------------------------------------------------

    def _evaluate(self, message: Forward, inputs: Any) -> None:
        context = self._context
        if message.step != context.step or not context.running:
            late = message.step < context.step or context.ledger.close is not None
            if len(self._early) < MAX_EARLY_EVALUATIONS and (message.step == context.step + 1 or not late):
                self._early.append((message, inputs))
            return

        def done(output: Any) -> None:
            onward = message.model_copy(update={"hop": message.hop + 1})
            last = onward.hop == len(onward.path)
            context.transport.send(message.origin if last else onward.path[onward.hop].peer, onward, output)

        def refused(error: Exception) -> None:
            context.strike(message.path[message.hop - 1].peer, f"unusable tensor: {error}")

        context.worker.submit(
            TaskKind.EVALUATE, message.key, lambda: context.backend.infer(inputs), done, refused
        )

    def _reply(self, to: PeerId, kind: type[Accept], message: Forward) -> None:
        step, index, attempt = message.key
        self._context.transport.send(to, kind(step=step, index=index, attempt=attempt, hop=message.hop))

    def _refuse(self, to: PeerId, message: Forward, reason: Any) -> None:
        if message.evaluate:
            return
        step, index, attempt = message.key
        refuse = Refuse(step=step, index=index, attempt=attempt, hop=message.hop, reason=reason)
        self._context.transport.send(to, refuse)


def _newer(path: tuple[Hop, ...], version: int) -> tuple[Hop, ...]:
    """``path``, its first hop in the place of one that was skipped (``held.outdated``)."""
    return tuple(hop.model_copy(update={"version": max(version, hop.version)}) for hop in path[:1]) + path[1:]
