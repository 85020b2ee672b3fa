"""When a step can be closed, and with what: the facts that origins and witnesses gossip of it."""

from __future__ import annotations

from collections.abc import Callable

from peer.context import Context
from peer.facts import DONE_TOPIC, WITNESS_TOPIC, CommitsFact
from peer.ledger import settle
from peer.newcomers import Newcomers
from scheduler.gossip import Gossip
from scheduler.hashtree import Fact
from swarm.messages import Counted, StepClose
from swarm.transport.base import PeerId

INCOMPLETE_CLOSE_S = 10.0
"""When all living origins are done and a microbatch is still missing, the step closes without it."""


class Closing:
    """This peer's word on the step of its context, and what it would close it with."""

    def __init__(self, context: Context, gossip: Gossip, newcomers: Newcomers) -> None:
        self._context = context
        self._gossip = gossip
        self._newcomers = newcomers
        self._incomplete_since: float | None = None
        self._read: dict[tuple[str, PeerId], tuple[Fact, CommitsFact]] = {}
        """What facts say, by (topic, owner): they are looked at often and read once."""

    def begin(self) -> None:
        """A new step."""
        self._incomplete_since = None
        self._read.clear()

    def tell_done(self, committed: tuple[Counted, ...]) -> None:
        """We, an origin, have committed all that we drew."""
        step = self._context.step
        self._context.events.emit("done", step=step, committed=len(committed))
        self._gossip.publish(DONE_TOPIC, self._fact(committed))

    def tell_more(self, committed: tuple[Counted, ...]) -> None:
        """We have taken over more since we were done."""
        self._gossip.publish(DONE_TOPIC, self._fact(committed, done=False))

    def bear_witness(self, lost: PeerId) -> None:
        """A lost origin may have told only us of a commit: now everyone hears it."""
        heard = tuple(c for c in self._context.ledger.commits.values() if c.origin == lost)
        if heard:
            self._gossip.publish(WITNESS_TOPIC, self._fact(heard))

    def _fact(self, counted: tuple[Counted, ...], *, done: bool = True) -> bytes:
        context = self._context
        return CommitsFact(step=context.step, epoch=context.epoch, counted=counted, done=done).to_bytes()

    def _of_step(self, commits: CommitsFact) -> bool:
        return (commits.step, commits.epoch) == (self._context.step, self._context.epoch)

    def on_fact(self, fact: Fact, news: Callable[[], None]) -> None:
        """A ``done`` or ``witness`` fact has come; ``news`` is called if it is of our step."""
        try:
            commits = self._commits(fact)
        except ValueError as error:
            self._gossip.store.forget(lambda other: other == fact)
            self._context.strike(fact.owner, str(error))
            return
        if self._of_step(commits):
            news()

    def _commits(self, fact: Fact) -> CommitsFact:
        known = self._read.get(fact.key)
        if known is None or known[0] != fact:
            self._read[fact.key] = known = (fact, CommitsFact.from_bytes(fact.value))
        return known[1]

    def _facts_of_step(self, topic: str) -> dict[PeerId, CommitsFact]:
        found = {}
        for fact in self._gossip.store.of_kind(topic):
            commits = self._commits(fact)
            if self._of_step(commits):
                found[fact.owner] = commits
        return found

    def _told(self) -> dict[PeerId, CommitsFact]:
        """What the step's origins say, those too that were done and have taken over more."""
        origins = self._context.origins_of_step
        return {o: fact for o, fact in self._facts_of_step(DONE_TOPIC).items() if o in origins}

    def _at_work(self, told: dict[PeerId, CommitsFact]) -> list[PeerId]:
        """Origins that may still commit something."""
        liveness = self._context.liveness
        done = {origin for origin, fact in told.items() if fact.done}
        return [o for o in self._context.origins_of_step if not liveness.gone(o) and o not in done]

    def _known(self, told: dict[PeerId, CommitsFact]) -> dict[int, Counted]:
        """Every commit of the step that this peer knows of."""
        context = self._context
        origins, peers = set(context.origins_of_step), {member.peer for member in context.members}
        counted = [*context.ledger.commits.values()]
        counted += [c for o, fact in told.items() for c in fact.counted if c.origin == o]
        witnessed = {w: fact for w, fact in self._facts_of_step(WITNESS_TOPIC).items() if w in peers}
        counted += [c for w, f in witnessed.items() for c in f.counted if any(h.peer == w for h in c.path)]
        return settle(c for c in counted if c.index < context.microbatches and c.origin in origins)

    def objection(self, close: StepClose) -> str | None:
        """Why this peer does not vote for a close that another proposes; None if it does."""
        context = self._context
        named = {member.peer for member in close.members}
        for member in context.members:
            if not member.learning and member.peer not in named and context.liveness.alive(member.peer):
                return f"{member.peer} lives"
        missing = set(range(context.microbatches)) - {counted.index for counted in close.counted}
        if not missing:
            return None
        told = self._told()
        if working := self._at_work(told):
            return f"{working[0]} is at work"
        if known := missing & self._known(told).keys():
            return f"microbatch {min(known)} is committed"
        return None

    def ready(self) -> StepClose | None:
        """What this peer would close the step with; None as long as living origins are not done."""
        context = self._context
        if not context.running:
            return None
        if not context.origins_of_step:
            return self._close_of_none()
        told = self._told()
        if self._at_work(told):
            return None
        commits = self._known(told)
        if len(commits) < context.microbatches:
            now = context.clock.now()
            self._incomplete_since = self._incomplete_since or now
            if now - self._incomplete_since < INCOMPLETE_CLOSE_S:
                return None
        members = tuple(member for member in context.members if not context.liveness.gone(member.peer))
        liveness = context.liveness
        if not all(liveness.alive(member.peer) or liveness.vouched(member.peer) for member in members):
            return None  # lost a moment ago: back, or gone, a moment from now
        return StepClose(
            step=context.step,
            epoch=context.epoch,
            counted=tuple(commits.values()),
            members=self._newcomers.admit(members),
        )

    def _close_of_none(self) -> StepClose | None:
        """Nobody is left who draws: the step is closed, empty, only to let somebody in who will."""
        context = self._context
        living = tuple(member for member in context.members if not context.liveness.gone(member.peer))
        members = self._newcomers.admit(living)
        if members == living:
            return None
        return StepClose(step=context.step, epoch=context.epoch, counted=(), members=members)
