"""One peer's protocol, assembled: messages in, messages out, over any transport, clock and arithmetic.

The daemon runs it over libp2p and torch; the simulator runs the same code in virtual time. A step goes
*running* (microbatches) -> *closing* (agreement, the rest of the sums) -> *averaging* -> *updating*, and on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from peer import spread
from peer.agreement import REMEMBERED_CLOSES, Agreement
from peer.averaging import Averaging
from peer.closing import Closing
from peer.context import Backend, Batches, Context, StepRules, draw_order
from peer.donor import Donor
from peer.facts import DONE_TOPIC, TOPICS, WITNESS_TOPIC
from peer.held import Held
from peer.inbox import Handler, Inbox, plain
from peer.join import Joiner
from peer.ledger import Closed, Ledger, apply
from peer.liveness import Liveness
from peer.mover import Mover
from peer.neighbour import LivenessLimits
from peer.newcomers import Newcomers
from peer.origin import Origin
from peer.paces import Paces
from peer.planner import Planner
from peer.rates import Rates
from peer.restore import NO_DISK, Disk, Recalled
from peer.router import Router
from peer.standing import Standings
from peer.wanted import Wanted
from peer.worker import Executor, TaskKind, Worker
from scheduler.gossip import Gossip, GossipConfig
from scheduler.hashtree import Fact
from scheduler.store import GossipStore
from swarm import messages as m
from swarm.clock import Clock, Timer
from swarm.events import EventLog
from swarm.transport.base import PeerId, Transport

FOUNDING_PATIENCE_S = 20.0
"""Step 0 waits no longer than this for founding members that cannot be reached."""


TRACED = {
    TaskKind.FORWARD: "forward",
    TaskKind.BACKWARD: "backward",
    TaskKind.WEIGHT: "weight",
    TaskKind.LOSS: "loss",
}
"""Tasks of one microbatch: the event log tells how long each took."""


@dataclass(frozen=True)
class CoreOptions:
    """What a daemon, a test or the simulator chooses."""

    stage: int
    incarnation: int
    run_id: str
    seed: int
    activation_bytes: int
    plan_iterations: int = 8
    """Changes of a plan that one search tries."""
    liveness: LivenessLimits = field(default_factory=LivenessLimits)
    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(fanout=2))


class Core:
    """One peer. ``begin`` makes it a member from a given step on, ``join`` a newcomer."""

    def __init__(
        self,
        options: CoreOptions,
        rules: StepRules,
        *,
        transport: Transport,
        clock: Clock,
        executor: Executor,
        backend: Backend,
        batches: Batches,
        events: EventLog,
        rng: random.Random,
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        on_step: Callable[[], None] = lambda: None,
        on_finished: Callable[[], None] = lambda: None,
        on_failed: Callable[[Exception], None],
        disk_for: Callable[[int], Disk] = lambda stage: NO_DISK,
        backend_for: Callable[[int], Backend] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._on_step = on_step
        self._on_finished = on_finished
        self._failed = on_failed
        self._disk_for = disk_for
        self._begun: int | None = None
        """The newest step that this life was a member of: the backend holds its parameters."""
        self.context = context = Context(
            me=transport.peer_id,
            stage=options.stage,
            incarnation=options.incarnation,
            rules=rules,
            clock=clock,
            transport=transport,
            worker=Worker(executor, clock, failed=self._compute_failed, told=self._computed),
            backend=backend,
            events=events,
            say=say,
        )
        context.liveness = self.liveness = Liveness(
            transport,
            clock,
            events,
            beat=self._beat,
            incarnation=lambda: context.incarnation,
            on_lost=self._lost,
            on_gone=self._gone,
            on_back=self._back,
            on_vouched=self._vouched,
            sure=lambda: not context.active or context.majority_heard,
            rng=rng,
            limits=options.liveness,
        )
        self.standings = Standings(clock, events, on_ban=self._ban, on_pardon=self.liveness.pardon)
        context.strike = self.standings.strike
        self.rates = Rates(clock, self.liveness.round_trip_s)
        """Fed by a transport that measures; without one the planner takes all links for fast."""
        self.paces = Paces(clock)
        self.planner = Planner(
            context,
            rates=self.rates,
            paces=self.paces,
            activation_bytes=options.activation_bytes,
            seed=options.seed,
            iterations=options.plan_iterations,
        )
        context.routes = self.planner
        self.router = Router(
            context,
            on_loss=self._loss,
            on_home=self._home,
            on_late=self._late,
            on_full=lambda: self.wanted.ask(),
            on_pace=self.paces.add,
        )
        self.origin = Origin(
            context, self.router, batches, on_done=self._origin_done, on_more=self._origin_has_more
        )
        self.wanted = Wanted(context, self.router.held, mine=self.origin.waits_for)
        self.newcomers = Newcomers(context)
        self.gossip = Gossip(
            context.me,
            GossipStore(TOPICS, keep=self._listens_to),
            context=options.run_id.encode(),
            base_version=options.incarnation << 32,
            call_later=clock.call_later,
            rng=rng,
            neighbours=self.liveness.linked,
            push=partial(spread.push, context),
            ask=partial(spread.ask, context),
            sign=sign,
            verify=verify,
            on_fact=self._fact,
            config=options.gossip,
        )
        self.closing = Closing(context, self.gossip, self.newcomers)
        self.agreement = Agreement(
            context,
            ready=self.closing.ready,
            objection=self.closing.objection,
            on_decided=self._decided,
        )
        self.averaging = Averaging(context, on_done=self._averaged, on_stuck=self._fall_out)
        self.donor = Donor(context)
        self.mover = Mover(context, backend_for, disk_for, on_ready=self._move, on_missed=self._cannot_follow)
        self._next: tuple[m.Member, ...] | None = None
        """The members of the next step, which waits until this peer can begin it in another stage."""
        self.joiner: Joiner | None = None
        self.finished = False
        self.left = False
        self.newest_epoch = 0
        """That anybody named; unchecked, a reason to look into the directory."""
        self.loss_of_last_step: float | None = None
        self.validation_loss: float | None = None
        self.digest = ""
        """SHA-256 of this peer's parameters after its last update."""
        self.tokens_total = 0
        self.committed_total = 0
        self.summed_total = 0
        """Microbatches that this peer computed and that counted."""
        self._life: int | None = None
        self._founding: set[PeerId] | None = None
        self._patience: Timer | None = None
        self.inbox = Inbox(
            context,
            self.standings,
            self.averaging,
            self.mover,
            lambda: self.joiner,
            self._handlers(),
        )
        self.on_message, self.admit = self.inbox.on_message, self.inbox.admit
        transport.start(self)
        self.gossip.start()
        self.planner.start(self.gossip)

    # -- life ----------------------------------------------------------------------------------------------

    def found(
        self, members: tuple[m.Member, ...], *, epoch: int = 0, step: int = 0, lineage: str = ""
    ) -> None:
        """Be one of those who begin ``step`` on the researcher's word: at the run's birth, or in a new epoch.

        The backend holds the parameters of ``step``, which ``lineage`` names. The step begins when all are
        linked, or after some patience. What this peer did in an older epoch is given up.
        """
        context = self.context
        self._drop_everything()
        if self.joiner is not None:
            self.joiner.close()
            self.joiner = None
        context.active = context.running = False
        context.epoch, context.step, context.lineage, context.members = epoch, step, lineage, members
        context.incarnation = next(o.incarnation for o in members if o.peer == context.me)
        self._tell_life()
        context.events.emit("founded", epoch=epoch, step=step, members=len(members))
        self._founding = {member.peer for member in members} - {context.me}
        self.liveness.watch({member.peer: member.incarnation for member in members})
        self.liveness.tell()
        self._patience = context.clock.call_later(FOUNDING_PATIENCE_S, self._begin_founded, True)
        self._begin_founded(False)

    def _tell_life(self) -> None:
        context = self.context
        if self._life != context.incarnation:
            self._life = context.incarnation
            context.events.emit("began", stage=context.stage, incarnation=context.incarnation)

    def begin_again(self, members: tuple[m.Member, ...], *, epoch: int, step: int) -> bool:
        """A new epoch that begins at this peer's own step: the majority was lost. False if it is at another
        step, and must come in as a newcomer."""
        context = self.context
        if not context.active or context.step != step:
            return False
        self.averaging.stop()
        context.running = False
        context.worker.clear()

        def cleared(_: None) -> None:
            if context.step == step:
                self.found(members, epoch=epoch, step=step, lineage=context.lineage)

        context.worker.submit(TaskKind.SYNC, (step,), context.backend.discard_gradient, cleared)
        return True

    def leave_epoch(self, members: tuple[m.Member, ...], epoch: int, step: int) -> None:
        """The run has begun again at ``step`` without this peer: come in anew."""
        if self._begun is not None and self._begun > step + 1:
            self._begun = None  # given up; one step more is what the others were about to make
        if self.joiner is None:
            self._fall_out(f"the run goes on in epoch {epoch}, without this peer")
        self.context.epoch, self.context.step = epoch, 0
        self.join({member.peer for member in members} - {self.context.me})

    def _begin_founded(self, impatient: bool) -> None:
        if self._founding is None or not (impatient or self._founding <= set(self.liveness.linked())):
            return
        self._founding = None
        if self._patience is not None:
            self._patience.cancel()
        self.begin(self.context.step, self.context.members)

    def begin(self, step: int, members: tuple[m.Member, ...]) -> None:
        """Be a member of ``step`` with the parameters that the backend holds."""
        context = self.context
        context.step = self._begun = step
        context.members = members
        self.router.held.forget(step - 1)  # and what others sent a newcomer too soon
        context.ledger = Ledger(step)
        context.origins_of_step = context.replicas(0)
        context.active = context.running = True
        self.closing.begin()
        self.newcomers.prune()
        self.gossip.store.prune()
        waiting: dict[PeerId, int | None] = dict.fromkeys(self.newcomers.known())
        self.liveness.watch(waiting | {m.peer: m.incarnation for m in members})
        if step >= context.rules.total_steps:
            context.running = False
            self.finished = True
            context.events.emit("finished", step=step)
            self._on_finished()
            return
        if context.leaving:
            self.leave()
            return
        self.agreement.begin()
        self.mover.review()
        self.planner.begin()
        self.donor.on_step()
        self.router.on_step()
        if context.stage == 0:
            self.origin.begin()

    def join(self, contacts: set[PeerId]) -> None:
        """Ask these members to be admitted; serve when the stage's state is here."""
        self.context.active = self.context.running = False
        if self.joiner is not None:
            self.joiner.close()
        self._tell_life()
        self.joiner = Joiner(
            self.context,
            on_ready=self._admitted,
            on_missed=self._fall_out,
            recalled=Recalled(self._disk_for(self.context.stage), self._begun),
        )
        self.joiner.begin(contacts)
        self.liveness.watch(dict.fromkeys(contacts))

    def meet(self, contacts: set[PeerId]) -> None:
        """More members whom a newcomer may ask, as long as none of those that it knows answers."""
        if self.joiner is not None and self.alone():
            self.joiner.contacts |= contacts
            self.liveness.watch(dict.fromkeys(self.joiner.contacts))

    def alone(self) -> bool:
        """Is this a newcomer that reaches none of the members it knows?"""
        return self.joiner is not None and not any(map(self.liveness.reachable, self.joiner.contacts))

    def all_linked(self) -> bool:
        """Is there a link to every member? A newcomer does not know them."""
        if self.joiner is not None:
            return False
        others = {member.peer for member in self.context.members} - {self.context.me}
        return others <= set(self.liveness.linked())

    def run_is_over(self) -> bool:
        """Has every member that answers this newcomer taken the last step?"""
        contacts = filter(self.liveness.reachable, self.joiner.contacts) if self.joiner is not None else ()
        steps = [self.liveness.step_of(peer) or 0 for peer in contacts]
        return bool(steps) and min(steps) >= self.context.rules.total_steps

    def others_finished(self) -> bool:
        """Every living member has taken the last step too, so nobody may ask us for it any more."""
        last = self.context.rules.total_steps
        others = {member.peer for member in self.context.members} - {self.context.me}
        return all((self.liveness.step_of(peer) or 0) >= last for peer in others if self.liveness.alive(peer))

    @property
    def stuck(self) -> bool:
        """Does this peer hold a whole state, and cannot finish the step: no majority is left that could close
        it, or those with whom it is to begin are not there yet?"""
        alone = self.agreement.without_majority_s > 0 and not self.agreement.decided
        return alone or self._founding is not None

    def drain(self) -> None:
        """Finish the step, take nothing of the next, then ``leave``."""
        self.context.leaving = True
        self.mover.give_up("this peer leaves")
        self.planner.tell()
        if not self.context.active:
            self.leave()

    def leave(self) -> None:
        """Say goodbye: what is held for us goes elsewhere at once."""
        if self.left:
            return
        self.left = True
        self.context.leaving, self.context.running, self.context.active = True, False, False
        goodbye = m.Goodbye(incarnation=self.context.incarnation)
        for peer in self.liveness.linked():
            self.context.transport.send(peer, goodbye)

    def close(self) -> None:
        """Stop every timer and the compute queue; the transport is its owner's to close."""
        self.agreement.close()
        self.liveness.close()
        self.gossip.stop()
        self.planner.close()
        if self._patience is not None:
            self._patience.cancel()
        if self.joiner is not None:
            self.joiner.close()
        self.mover.give_up("this peer ends")
        self.context.worker.close()

    # -- transport -----------------------------------------------------------------------------------------

    def _handlers(self) -> dict[type[m.Message], Handler]:
        agreement = self.agreement
        return {
            m.Heartbeat: plain(self._heartbeat),
            m.ProbeRequest: plain(self.liveness.probes.on_request),
            m.Probe: plain(self.liveness.probes.on_probe),
            m.ProbeAck: plain(self.liveness.probes.on_ack),
            m.Goodbye: plain(self._goodbye),
            m.Forward: self.router.on_forward,
            m.Backward: self.router.on_backward,
            m.Accept: plain(lambda sender, message: None),
            m.Arrived: plain(self.router.on_arrived),
            m.Refuse: plain(self.router.on_refuse),
            m.Restart: plain(self.origin.on_restart),
            m.TakenOver: plain(self.origin.on_taken_over),
            m.Release: plain(self.router.on_release),
            m.Holding: plain(self.wanted.on_holding),
            m.Commit: plain(self.router.on_commit),
            m.GossipPush: plain(partial(spread.on_push, self.gossip)),
            m.GossipDigest: plain(partial(spread.on_digest, self.gossip)),
            m.Prepare: plain(agreement.on_prepare),
            m.Promise: plain(agreement.on_promise),
            m.Propose: plain(agreement.on_propose),
            m.Accepted: plain(agreement.on_accepted),
            m.Rejected: plain(agreement.on_rejected),
            m.Decided: plain(self._decided_message),
            m.StepQuery: plain(agreement.on_query),
            m.JoinRequest: plain(self._join_request),
            m.StateRequest: plain(self.donor.on_request),
        }

    def on_link_up(self, peer: PeerId) -> None:
        self.liveness.on_link_up(peer)
        self._begin_founded(False)
        if self.joiner is not None:
            self.joiner.on_link_up(peer)

    def on_link_lost(self, peer: PeerId, reason: str) -> None:
        self.liveness.on_link_lost(peer, reason)

    # -- life of others ------------------------------------------------------------------------------------

    def _beat(self, **times: Any) -> m.Heartbeat:
        context = self.context
        return m.Heartbeat(
            incarnation=context.incarnation,
            step=context.step,
            progress=context.worker.progress,
            working=context.worker.working,
            epoch=context.epoch,
            state=context.state,
            **times,
        )

    def _heartbeat(self, sender: PeerId, message: m.Heartbeat) -> None:
        self.liveness.on_heartbeat(sender, message)
        self.newest_epoch = max(self.newest_epoch, message.epoch)
        here = self.context
        if self.joiner is not None and self.run_is_over():
            self._on_finished()
        if message.epoch == here.epoch and message.step > here.step and message.state == "active":
            self._late(sender)

    def _goodbye(self, sender: PeerId, message: m.Goodbye) -> None:
        self.context.events.emit("goodbye", other=sender)
        self.newcomers.forget(sender)
        self.liveness.forget(sender, message.incarnation)

    def _late(self, sender: PeerId) -> None:
        """Somebody is further than we are: ask what was decided, and while we average, whether the others
        still count on us."""
        averaging = self.context.active and self.agreement.decided
        self.context.transport.send(sender, m.StepQuery(step=self.context.step + averaging))

    def _lost(self, peer: PeerId, reason: str) -> None:
        """The one place where a peer leaves all routes, in the call that records its failure."""
        context = self.context
        self.router.on_lost(peer)
        self.origin.on_lost(peer)
        if self.joiner is not None:
            self.joiner.on_lost(peer)
        self.mover.on_lost(peer)
        self.newcomers.forget(peer)
        if peer in context.lives:
            self.standings.lost(peer)
        if context.active and context.running and any(member.peer == peer for member in context.members):
            self.planner.review_soon()

    def _gone(self, peer: PeerId) -> None:
        """The loss is certain: what waited for the peer goes on without it."""
        context = self.context
        self.averaging.on_gone(peer)
        if context.active and context.running:
            if peer in context.origins_of_step:
                self.closing.bear_witness(peer)
                if context.stage == 0:
                    self.origin.take_over()
            self.agreement.consider()

    def _vouched(self, peer: PeerId, lost_s: float) -> None:
        """Others reach a peer that we do not. With another stage that is a detour; with our own it holds the
        averaging, so one of both leaves, the sooner the more of its replicas it cannot reach."""
        context = self.context
        apart = [other for other in context.replicas(context.stage) if self.liveness.vouched(other)]
        if not context.active or peer not in apart:
            return
        stays = draw_order(0, (context.me, peer))[0] == context.me
        if lost_s >= self.liveness.limits.unreachable_s * (2 if stays else 1) / len(apart):
            self._fall_out(f"{peer} lives and cannot be reached from here")

    def _back(self, peer: PeerId) -> None:
        """It answers again: what was on its way when the link broke is sent once more."""
        self._begin_founded(False)
        self.router.on_back(peer)
        self.origin.on_back(peer)
        self.averaging.on_back(peer)
        if self.context.active and any(member.peer == peer for member in self.context.members):
            self.planner.review_soon()
            self.agreement.consider()

    def _ban(self, peer: PeerId) -> None:
        self.newcomers.forget(peer)
        self.liveness.ban(peer)

    # -- the step ------------------------------------------------------------------------------------------

    def _loss(self, message: m.Forward, output: Any) -> None:
        self.origin.on_loss(message, output)

    def _home(self, held: Held) -> None:
        self.origin.on_home(held)

    def _origin_done(self) -> None:
        self.closing.tell_done(tuple(self.origin.committed.values()))
        self.agreement.consider()

    def _origin_has_more(self) -> None:
        self.closing.tell_more(tuple(self.origin.committed.values()))

    def _decided_message(self, sender: PeerId, message: m.Decided) -> None:
        context, close = self.context, message.close
        if self.joiner is not None:
            if sender in self.joiner.contacts and close.epoch >= context.epoch:
                self.joiner.on_decided(close)
        elif sender not in context.lives:
            pass  # it was voted out, or is not yet known to be in: no fault of its own
        elif close.epoch != context.epoch:
            pass  # given up, or of an epoch that the directory will tell us of
        elif close.step > context.step and context.active:
            if not self._counts_on_us(close) or close.step >= context.step + REMEMBERED_CLOSES:
                self._fall_out(f"the others have closed step {close.step} without this peer")
        else:
            self.agreement.on_decided(sender, message)

    def _counts_on_us(self, close: m.StepClose) -> bool:
        context = self.context
        return any((o.peer, o.incarnation) == (context.me, context.incarnation) for o in close.members)

    def _decided(self, close: m.StepClose) -> None:
        context = self.context
        context.running = False
        context.ledger = apply(context.ledger, Closed(close))
        context.events.emit(
            "closed",
            step=close.step,
            counted=[
                [c.index, c.attempt, c.origin, [f"{h.stage}:{h.peer}" for h in c.path], c.tokens]
                for c in close.counted
            ],
            members=[f"{member.stage}:{member.peer}" for member in close.members],
            learners=[member.peer for member in close.members if member.learning],
        )
        if not self._counts_on_us(close):
            self._fall_out("the others closed the step without this peer")
            return
        for member in close.members:
            self.liveness.reconsider(member.peer)
        self.mover.on_decided(close)
        self.planner.decided(close.members)
        try:
            self.router.sums.settle(self._summed)
        except LookupError as error:
            self._fall_out(str(error))

    def _summed(self) -> None:
        context, close = self.context, self.context.ledger.close
        if self.joiner is not None:
            return  # this peer fell out while it computed
        assert close is not None
        goes_on = {(member.peer, member.incarnation) for member in close.members}
        group: list[PeerId] = []
        listeners: list[PeerId] = []
        for member in context.members:  # who moves to another stage takes part in this step's average yet
            if member.stage == context.stage and (member.peer, member.incarnation) in goes_on:
                (listeners if member.learning else group).append(member.peer)
        listeners += self._new_listeners(close)
        context.events.emit(
            "summed", step=close.step, order=[[c.index, c.attempt] for c in context.ledger.summed]
        )
        self.averaging.begin(close, tuple(sorted(group)), tuple(sorted(listeners)))

    def _new_listeners(self, close: m.StepClose) -> list[PeerId]:
        """Newcomers that the close admits: they have loaded, or load, the state that the average is for. Who
        moves loads the next."""
        context = self.context
        known = {(member.peer, member.incarnation) for member in context.members}
        here = (member for member in close.members if member.stage == context.stage)
        return [member.peer for member in here if (member.peer, member.incarnation) not in known]

    def _averaged(self) -> None:
        step = self.context.step
        self.context.worker.submit(TaskKind.SYNC, (step,), self.context.backend.update, self._updated)

    def _updated(self, result: tuple[str, dict[str, float]]) -> None:
        context, close = self.context, self.context.ledger.close
        if self.joiner is not None:
            return
        assert close is not None
        self.digest, figures = result
        self.donor.gradient_norm = figures.get("grad_norm", 0.0)
        tokens = sum(counted.tokens for counted in close.counted)
        self.tokens_total += tokens
        self.committed_total += len(close.counted)
        self.summed_total += len(context.ledger.summed)
        own = self.origin.figures
        if context.stage == 0 and own.tokens:
            self.loss_of_last_step = own.loss_sum / own.tokens
            if own.validation_loss is not None:
                self.validation_loss = own.validation_loss
        context.events.emit(
            "stepped",
            step=close.step,
            stage=context.stage,
            digest=self.digest,
            tokens=tokens,
            committed=len(close.counted),
            rerouted=self.router.rerouted,
            loss=self.loss_of_last_step,
            **figures,
        )
        if any(o.peer == context.me and o.stage == context.stage and not o.learning for o in close.members):
            self.begin(close.step + 1, close.members)
            self._on_step()
        else:
            self._next = close.members
            self._move()

    # -- moving --------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Begin the next step in another stage, when both have come to it."""
        context, close = self.context, self.context.ledger.close
        if self._next is None or close is None:
            return
        if self.mover.there is None:
            self._cannot_follow("the move was given up when the others had agreed on it")
        elif self.mover.ready_at == close.step + 1:
            members, self._next = self._next, None
            there = self.mover.arrived()
            context.events.emit("moved", step=close.step + 1, stage=context.stage, target=there.stage)
            context.say(f"now in stage {there.stage}")
            self._take_place(there)
            self.begin(close.step + 1, members)
            self._on_step()

    def _take_place(self, there: Context) -> None:
        context = self.context
        context.stage, context.backend, context.lineage = there.stage, there.backend, there.lineage
        self.donor.forget()
        self.planner.tell()

    def _cannot_follow(self, reason: str) -> None:
        """The others count on us in another stage, whose state we do not have."""
        if self._next is not None:
            self._next = None
            self._fall_out(reason)

    # -- joining -------------------------------------------------------------------------------------------

    def _join_request(self, sender: PeerId, message: m.JoinRequest) -> None:
        context = self.context
        if not context.active or message.stage >= context.rules.stages:
            return
        self.newcomers.on_request(sender, message)
        close = self.agreement.closes.get(context.step - 1)
        if close is not None and message.stage == context.stage and message.step < context.step:
            context.transport.send(sender, m.Decided(close=close))

    def _admitted(self, step: int, members: tuple[m.Member, ...]) -> None:
        """The newcomer holds the parameters of ``step`` and is a full member of it."""
        self.joiner = None
        self.context.events.emit("joined", step=step)
        self.begin(step, members)
        self._on_step()

    def _fall_out(self, reason: str) -> None:
        """Out of step with the others: become a newcomer and take their state again."""
        if self.left:
            return
        context = self.context
        context.events.emit("fell_out", step=context.step, reason=reason)
        close = context.ledger.close
        members = close.members if close is not None and self.joiner is None else context.members
        goodbye = m.Goodbye(incarnation=context.incarnation)
        for peer in self.liveness.linked():
            context.transport.send(peer, goodbye)  # nobody must wait for us in the averaging
        self._drop_everything()
        context.incarnation += 1
        self.join({member.peer for member in members} - {context.me})
        self.liveness.tell()

    def _drop_everything(self) -> None:
        """Nothing that is under way here counts any more."""
        self._founding = None
        if self._patience is not None:
            self._patience.cancel()
        self._next = None
        self.mover.give_up("this peer begins anew")
        self.averaging.stop()
        self.origin.stop()
        self.router.sums.stop()
        self.router.held.forget(self.context.step + 1)
        self.context.worker.clear()
        self.agreement.forget()

    def _computed(self, kind: TaskKind, order: tuple[int, ...], wait_s: float, run_s: float) -> None:
        if kind not in TRACED:
            return
        step, _, index, attempt = order
        self.context.events.emit(
            "computed",
            kind=TRACED[kind],
            step=step,
            index=index,
            attempt=attempt,
            wait_s=round(wait_s, 6),
            run_s=round(run_s, 6),
        )

    def _compute_failed(self, error: Exception) -> None:
        self.context.events.emit("compute_failed", reason=f"{type(error).__name__}: {error}")
        self._failed(error)

    def _listens_to(self, fact: Fact) -> bool:
        """Strangers could fill the store: anybody can sign as anybody new. A newcomer knows no members."""
        context = self.context
        return not context.active or fact.owner in context.lives or fact.owner in self.newcomers.known()

    def _fact(self, fact: Fact) -> None:
        if fact.topic in (DONE_TOPIC, WITNESS_TOPIC):
            self.closing.on_fact(fact, self.agreement.consider)
        else:
            self.planner.on_fact(fact)
