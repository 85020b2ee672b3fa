"""The daemon's side of the scheduler: its view of the others, the plan it holds, and paths out of it."""

from __future__ import annotations

import statistics
from collections import Counter

from peer.context import Context, draw_order
from peer.paces import Paces
from peer.plans import Plans, fits
from peer.rates import Rates
from peer.worker import TaskKind
from scheduler.belief import Doubt, believed, witnessed
from scheduler.errors import SchedulerError
from scheduler.gossip import Gossip
from scheduler.hashtree import Fact
from scheduler.instance import Instance
from scheduler.paths import replacement, search
from scheduler.plan import Plan
from scheduler.view import PLAN_TOPIC, VIEW_TOPIC, PeerView, PlanFact
from swarm.clock import Timer
from swarm.messages import Hop, Member
from swarm.transport.base import PeerId

SOON_S = 0.1
"""From a loss or a return to the search for a plan that fits it: they often come several at a time, and until
then the old plan's paths go around the lost."""
LEAD_S = 0.5
"""One origin plans for a changed membership, so that all go by one plan. The next in the draw order does so
when none has come for so long, and so on; meanwhile the old plan's paths go around the lost."""
REVIEW_S = 10.0
"""Between two looks at whether measured speeds allow a better plan."""
NOMINAL_S = 0.01
"""What a task is taken to need before one was measured."""
CHANGED = 0.1
"""By which share a figure of our own must differ from what we told of it to be told anew."""
SEEN_CHANGED = 0.5
"""The same for what we saw others need: it holds their queues, too."""
NOISE_S = 0.002
"""Latencies differ by so much from one heartbeat to the next."""
TOLD_LINKS = 128
"""The nearest; the views of a large swarm are most of what its peers hold of each other."""
VIEWS_BYTES_PER_S = 20_000
"""What a peer sends and receives for changed links, all members' together: the more members, the less often
each tells of them."""
COPIES = 5
"""Of each fact that a peer sends or receives, measured (benchmarks/gossip.py)."""
RATE_BYTES_PER_S = 1e9
"""What a link is taken to carry before any was measured, and our line, which is not."""


class Planner:
    """Keeps the plan for the agreed membership; ``path`` and ``replacement`` answer from it at once."""

    def __init__(
        self,
        context: Context,
        *,
        rates: Rates,
        paces: Paces,
        activation_bytes: int,
        seed: int,
        iterations: int,
    ) -> None:
        self._context = context
        self._rates = rates
        self._paces = paces
        self._activation_bytes = activation_bytes
        self._seed = seed
        self._iterations = iterations
        self._views: dict[PeerId, PeerView] = {}
        self._links_told_s = float("-inf")
        self._instance: Instance | None = None
        self._doubted: dict[PeerId, Doubt] = {}
        self._looked = False
        """Is ``_instance`` the problem as it stood at the last review? Only who asks pays for it."""
        self._plans = Plans()
        self._found: Plan | None = None
        """The newest plan that we found, where the next search goes on."""
        self._planned: Counter[PeerId] = Counter()
        """Visits by ``_counted_plan``."""
        self._counted_plan: Plan | None = None
        self._given: Counter[PeerId] = Counter()
        """Visits beyond the plan that we have asked for in step ``_given_step``."""
        self._given_step = -1
        self._gossip: Gossip | None = None
        self._soon = False
        self._waits: Timer | None = None
        """Until it is our turn to plan for the membership as it is."""
        self._closed = False

    def start(self, gossip: Gossip) -> None:
        """Gossip what we know and find from now on."""
        self._gossip = gossip
        self._tick()

    def close(self) -> None:
        self._closed = True

    @property
    def plan(self) -> Plan | None:
        """The plan that this peer holds."""
        return self._plans.held

    # -- what others say -----------------------------------------------------------------------------------

    def on_fact(self, fact: Fact) -> None:
        """A view or a plan has come."""
        context = self._context
        try:
            if fact.topic == VIEW_TOPIC:
                self._views[fact.owner] = PeerView.from_bytes(fact.value, fact.owner)
                self._guess_again()
            elif fact.topic == PLAN_TOPIC:
                self._weigh(PlanFact.from_bytes(fact.value, fact.owner).plan)
        except SchedulerError as error:
            context.strike(fact.owner, str(error))

    def _known(self, peer: PeerId) -> bool:
        """Does the gossip still hold what the peer said?"""
        return self._gossip is None or self._gossip.store.get(VIEW_TOPIC, peer) is not None

    def view_of(self, peer: PeerId) -> PeerView | None:
        return self._views.get(peer)

    def _weigh(self, plan: Plan) -> None:
        """Only an origin takes paths from a plan; others pass it on."""
        if self._context.stage == 0:
            self._plans.offer(plan, self._problem() if self._context.active else None)

    # -- what we say ---------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._closed:
            return
        self._context.clock.call_later(REVIEW_S, self._tick)
        self._tell_changes()
        self.review(improve=True)

    def tell(self) -> None:
        """Gossip our own view."""
        if self._gossip is None:
            return
        view = self._own_view()
        self._views[view.peer] = view
        self._links_told_s = self._context.clock.now()
        self._gossip.publish(VIEW_TOPIC, view.to_bytes())

    def _tell_changes(self) -> None:
        """Gossip our own view if it says anything new. Links are many and change often, so they wait for
        their turn, and what they say of little changes goes with the next."""
        told, view = self._views.get(self._context.me), self._own_view()
        if told is None or changed(told, view):
            self.tell()
        elif links_changed(told, view):
            size = COPIES * len(self._context.members) * len(view.to_bytes())
            if self._context.clock.now() - self._links_told_s >= size / VIEWS_BYTES_PER_S:
                self.tell()

    def _own_view(self) -> PeerView:
        context = self._context

        links = {}
        for peer in context.liveness.linked():
            round_trip_s = context.liveness.round_trip_s(peer)
            if round_trip_s is not None:
                links[peer] = (round_trip_s / 2, self._rates.bytes_per_s(peer) or RATE_BYTES_PER_S)
        seen_s = {peer: max(1e-6, took_s) for peer, took_s in self._paces.seen_s().items()}
        nearest = sorted(links, key=lambda peer: (links[peer], peer))[:TOLD_LINKS]
        return PeerView(
            peer=context.me,
            incarnation=context.incarnation,
            stage=context.stage,
            state=context.state,
            step=context.step,
            forward_s=self._needed_s(TaskKind.FORWARD, "forward_s"),
            backward_s=self._needed_s(TaskKind.BACKWARD, "backward_s"),
            weight_s=self._needed_s(TaskKind.WEIGHT, "weight_s"),
            loss_s=self._needed_s(TaskKind.LOSS, "loss_s") if context.stage == 0 else 0.0,
            memory_slots=context.rules.memory_slots,
            up_bytes_per_s=RATE_BYTES_PER_S,
            down_bytes_per_s=RATE_BYTES_PER_S,
            links={peer: links[peer] for peer in nearest},
            seen=dict(sorted(seen_s.items(), key=lambda item: (-item[1], item[0]))[:TOLD_LINKS]),
        )

    def _needed_s(self, kind: TaskKind, field: str) -> float:
        """What a task takes here. Before the first was measured, what it takes the other replicas of our
        stage: who seems faster than they are gets all their work."""
        needed_s = self._context.worker.median_s(kind)
        if needed_s is None:
            mates = [
                getattr(view, field)
                for view in self._views.values()
                if view.stage == self._context.stage and view.peer != self._context.me
            ]
            needed_s = statistics.median_high(mates) if mates else NOMINAL_S
        return max(1e-6, needed_s)

    def _guess_again(self) -> None:
        """Others' views have come: what we said of ourselves without a measurement may be wrong."""
        told = self._views.get(self._context.me)
        unmeasured = self._context.worker.median_s(TaskKind.FORWARD) is None
        if (
            told is not None
            and unmeasured
            and told.forward_s != self._needed_s(TaskKind.FORWARD, "forward_s")
        ):
            self.tell()

    # -- planning ------------------------------------------------------------------------------------------

    def review_soon(self) -> None:
        """The membership has changed, and may change again in a moment."""
        self._looked = False
        if not self._soon:
            self._soon = True
            self._context.clock.call_later(SOON_S, self._review_now)

    def _review_now(self) -> None:
        self._soon = False
        if not self._closed and self._context.running:
            self.review()

    def review(self, *, improve: bool = False) -> None:
        """Look at the membership and the speeds again. If the plan does not fit them any more, an origin
        searches for one in its turn; one that may ``improve`` it goes on from the best that it knows."""
        instance = self._look_again()
        if instance is None:
            return
        if self._plans.mend(instance):
            if improve:
                self._search(instance, self._context.step)
            return
        place = self._place(self._context.step, self._context.members)
        if self.plan is None or place == 0:
            self._search(instance, self._context.step)
        elif self._waits is None:
            self._waits = self._context.clock.call_later(place * LEAD_S, self._our_turn)

    def begin(self) -> None:
        """A step begins: it goes by the best plan that we know of."""
        instance = self._look_again()
        if instance is not None:
            self._plans.begin(instance)
            self.review()

    def decided(self, members: tuple[Member, ...]) -> None:
        """The next step is ``members``'. Who is the first to plan for it does so while the others average."""
        context = self._context
        if context.stage != 0 or self._place(context.step + 1, members) != 0:
            return
        instance = self._look(members)
        if instance is not None and not self._plans.fit(instance):
            self._search(instance, context.step + 1)

    def _look_again(self) -> Instance | None:
        """The problem as it stands now, if it is for us to plan."""
        self._looked = False
        self._views = {peer: view for peer, view in self._views.items() if self._known(peer)}
        origin = self._context.stage == 0 and self._context.active
        return self._problem() if origin else None

    def _place(self, step: int, members: tuple[Member, ...]) -> int:
        """Before how many living origins of ``step`` is it not our turn? Those that are only to come have no
        turn."""
        context = self._context
        here = context.replicas(0)
        origins = tuple(m.peer for m in members if m.stage == 0 and not m.learning and m.peer in here)
        order = [peer for peer in draw_order(step, origins) if context.liveness.alive(peer)]
        return order.index(context.me) if context.me in order else len(order)

    def _our_turn(self) -> None:
        self._waits = None
        instance = self._look_again()
        if instance is None or not self._context.running or self._closed:
            return
        if not self._plans.mend(instance):
            self._search(instance, self._context.step)

    def _search(self, instance: Instance, step: int) -> None:
        """Tell the others of a plan that is better than what we know."""
        found = self._found
        plan = search(
            instance,
            seed=self._seed + step,
            previous=found if found is not None and fits(found, instance) else self.plan,
            iterations=self._iterations,
            proposer=self._context.me,
        )
        self._found = plan
        if not self._plans.worth_telling(plan, instance):
            return
        self._plans.offer(plan, instance if step == self._context.step else None)
        self._context.events.emit("planned", step=step, makespan_s=plan.makespan_s, epoch=plan.epoch)
        if self._gossip is not None:
            self._gossip.publish(PLAN_TOPIC, PlanFact(plan=plan).to_bytes())

    def _problem(self) -> Instance | None:
        """The scheduling problem as it stands since the last review; of before that if none comes of it."""
        if not self._looked:
            self._looked = True
            self._instance = self._look(self._context.members) or self._instance
        return self._instance

    def _look(self, members: tuple[Member, ...]) -> Instance | None:
        """The scheduling problem of those of ``members`` that live."""
        context = self._context
        living = {m.peer: m.stage for m in members if not m.learning and context.liveness.alive(m.peer)}
        rules = context.rules
        drawn = {peer: rules.microbatches_per_origin for peer in sorted(living) if living[peer] == 0}
        others = len({stage for stage in living.values() if stage})
        mean = sum(drawn.values()) * (rules.path_length - 1) / max(1, others)
        try:
            claimed = Instance.from_view(
                self._views.values(),
                stages=rules.stages,
                path_length=rules.path_length,
                microbatches=drawn,
                activation_bytes=self._activation_bytes,
                members=living,
                coverage_tolerance=max(1, int(mean * rules.coverage_tolerance)),
            )
        except SchedulerError as error:
            context.events.emit("no_plan", reason=str(error))
            return None
        views = [view for peer, view in self._views.items() if peer in living]
        instance, doubts = believed(claimed, self.plan, witnessed(views, self._paces.seen_s(), context.me))
        for doubt in doubts:
            if doubt.peer not in self._doubted:
                context.events.emit(
                    "doubted", other=doubt.peer, claimed_s=doubt.claimed_s, seen_s=doubt.seen_s
                )
        self._doubted = {doubt.peer: doubt for doubt in doubts}
        return instance

    # -- paths ---------------------------------------------------------------------------------------------

    def path(self, position: int, avoid: frozenset[PeerId] = frozenset()) -> tuple[Hop, ...]:
        """``Routes.path``, around peers that are lost by now."""
        context = self._context
        if self.plan is None:
            self.review()
        planned = self.plan.take(context.me, position + 1) if self.plan is not None else ()
        stages = {member.peer: member.stage for member in context.members if not member.learning}
        hops = [Hop(stage=context.stage, peer=context.me)]
        for peer in (planned[position] if planned else (context.me,))[1:]:
            stage = stages.get(peer)
            if stage is None:
                continue
            if peer in avoid:
                peer = self.replacement(stage, set(avoid)) or peer
            if not context.liveness.alive(peer):
                peer = self.replacement(stage, set()) or ""
            if peer:
                hops.append(Hop(stage=stage, peer=peer))
        return tuple(self._lengthened(hops))

    def _lengthened(self, hops: list[Hop]) -> list[Hop]:
        """Stages that the path has not visited fill the places of those that nobody alive hosts."""
        rules = self._context.rules
        for stage in range(1, rules.stages):
            if len(hops) >= rules.path_length:
                break
            if all(hop.stage != stage for hop in hops):
                peer = self.replacement(stage, set())
                if peer is not None:
                    hops.append(Hop(stage=stage, peer=peer))
        return sorted(hops, key=lambda hop: hop.stage)

    def full_path(self) -> tuple[Hop, ...]:
        """This origin and one living peer of every other stage."""
        hops = [Hop(stage=0, peer=self._context.me)]
        for stage in range(1, self._context.rules.stages):
            peer = self.replacement(stage, set())
            if peer is not None:
                hops.append(Hop(stage=stage, peer=peer))
        return tuple(hops)

    def replacement(self, stage: int, exclude: set[PeerId]) -> PeerId | None:
        """The living replica of ``stage`` with the least predicted finish, none of ``exclude``."""
        context = self._context
        candidates = [p for p in context.living(stage) if p not in exclude and p != context.me]
        if not candidates:
            return None
        instance = self._problem()
        listed = [p for p in candidates if instance is not None and p in instance.index]
        if instance is None or not listed:
            return candidates[0]
        dead = {spec.peer for spec in instance.peers if spec.peer not in listed}
        load_s = self._load_s(instance)
        chosen = replacement(instance, (context.me, ""), 1, dead, stage=stage, load_s=load_s)
        chosen = chosen or listed[0]
        self._given[chosen] += 1
        return chosen

    def _load_s(self, instance: Instance) -> dict[PeerId, float]:
        """What each peer has to do in this step: by the plan, and what we have put on it beyond that."""
        if self._given_step != self._context.step:
            self._given_step = self._context.step
            self._given.clear()
        if self.plan is not self._counted_plan:
            self._counted_plan = self.plan
            paths = self.plan.paths if self.plan is not None else ()
            self._planned = Counter(peer for path in paths for peer in path[1:])
        return {
            spec.peer: (self._planned[spec.peer] + self._given[spec.peer]) * spec.work_s
            for spec in instance.peers
        }


def _differ(told: float, now: float, noise: float = 0.0, share: float = CHANGED) -> bool:
    return abs(told - now) > max(noise, share * max(told, now))


def changed(told: PeerView, now: PeerView) -> bool:
    """Does a peer say something new of itself, its links left aside?"""
    plain = ("incarnation", "stage", "state", "memory_slots")
    times = ("forward_s", "backward_s", "weight_s", "loss_s")
    return any(getattr(told, name) != getattr(now, name) for name in plain) or any(
        _differ(getattr(told, name), getattr(now, name)) for name in times
    )


def links_changed(told: PeerView, now: PeerView) -> bool:
    """Does it say something new of its links, or of what it saw others need?"""
    if told.links.keys() != now.links.keys() or told.seen.keys() != now.seen.keys():
        return True
    if any(_differ(told.seen[peer], now.seen[peer], NOISE_S, SEEN_CHANGED) for peer in now.seen):
        return True
    pairs = [(told.links[peer], now.links[peer]) for peer in now.links]
    return any(_differ(a[0], b[0], NOISE_S) or _differ(a[1], b[1]) for a, b in pairs)
