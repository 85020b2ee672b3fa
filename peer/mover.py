"""A member's way to another stage: it loads the other's state while it works on in its own.

Who moves is a function of the agreed membership (``scheduler.assignment.moves``), so that of all who see the
same need one goes. It is admitted as a learner of the other stage beside its membership of its own; that
entry is its lease, and lapses when it asks no more. When it has caught up, a close names it a member of the
other stage only; it still averages that step in the old one, and begins the next in the new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from peer.context import Backend, Context
from peer.join import Joiner
from peer.ledger import Ledger
from peer.restore import Disk, Recalled
from peer.worker import TaskKind
from scheduler.assignment import Move, Replica, moves
from swarm.clock import Timer
from swarm.messages import Member, StepClose
from swarm.transport.base import PeerId

MOVE_PATIENCE_S = 20.0
"""A stage must have needed the move for so long: a peer that restarts is back by then."""
URGENT_PATIENCE_S = 5.0
"""The same where the stage has no replica at all."""
MOVE_LIMIT_S = 300.0
"""A move that takes longer is given up."""
COOL_DOWN_S = 600.0
"""After a move, or one that was given up, a peer stays where it is."""
PASS_OVER_S = 15.0
PASS_OVER_REVIEWS = 4
"""When one that should go has not gone so long after its patience, and in so many steps, it rests or was told
to stay: the next one is to go."""


def snapshot(members: tuple[Member, ...], staying: frozenset[PeerId] = frozenset()) -> tuple[Replica, ...]:
    """The membership as moves are decided from it: who is learning a stage counts there, and stays, and so
    do those of ``staying``."""
    learning = {member.peer: member.stage for member in members if member.learning}
    full = {member.peer: member.stage for member in members if not member.learning}
    stay = learning.keys() | staying
    return tuple(
        Replica(peer, learning.get(peer, full.get(peer, 0)), movable=peer not in stay)
        for peer in sorted(learning.keys() | full.keys())
    )


@dataclass
class Due:
    """Since when a move is due, and in how many steps it was."""

    since_s: float
    reviews: int = 0


class Mover:
    """One peer's moves, one at a time. ``on_ready`` is called when the next step can begin in the new stage,
    ``on_missed`` when the others count on us there and we cannot follow."""

    def __init__(
        self,
        context: Context,
        backend_for: Callable[[int], Backend] | None,
        disk_for: Callable[[int], Disk],
        *,
        on_ready: Callable[[], None],
        on_missed: Callable[[str], None],
    ) -> None:
        self._context = context
        self._backend_for = backend_for
        self._disk_for = disk_for
        self._on_ready = on_ready
        self._on_missed = on_missed
        self._due: dict[Move, Due] = {}
        """The moves that the membership needs, ours and others'."""
        self._stay_until_s: dict[PeerId, float] = {}
        """Others that were to go and did not."""
        self._rests_until_s = 0.0
        self._limit: Timer | None = None
        self.there: Context | None = None
        """Our place in the other stage, while a move goes on."""
        self.joiner: Joiner | None = None
        self.ready_at: int | None = None
        """The step that can begin in the new stage."""

    # -- whether -------------------------------------------------------------------------------------------

    def review(self) -> None:
        """A step begins: is it time to move?"""
        context = self._context
        now = context.clock.now()
        if (
            self._backend_for is None
            or self.there is not None
            or context.leaving
            or now < self._rests_until_s
        ):
            return
        for peer, until_s in list(self._stay_until_s.items()):
            if now >= until_s:
                del self._stay_until_s[peer]
        self._due = {move: self._due.get(move, Due(now)) for move in self._moves()}
        for move, due in self._due.items():
            due.reviews += 1
            patience_s = MOVE_PATIENCE_S if context.replicas(move.target) else URGENT_PATIENCE_S
            late_s = now - due.since_s - patience_s
            if move.peer == context.me:
                # Nobody can make the embedding and the head anew.
                if late_s >= 0 and (move.target != 0 or context.replicas(0)):
                    self._begin(move.target)
                    return
            elif late_s >= PASS_OVER_S and due.reviews >= PASS_OVER_REVIEWS:
                self._stay_until_s[move.peer] = now + COOL_DOWN_S

    def _moves(self) -> tuple[Move, ...]:
        context, rules = self._context, self._context.rules
        return moves(
            snapshot(context.members, frozenset(self._stay_until_s)),
            stages=rules.stages,
            path_length=rules.path_length,
            start_replicas=rules.start_replicas,
            work_s=rules.work_s,
        )

    # -- the move ------------------------------------------------------------------------------------------

    def _begin(self, target: int) -> None:
        context, backend_for = self._context, self._backend_for
        assert backend_for is not None
        context.events.emit("moving", step=context.step, stage=context.stage, target=target)
        context.say(f"stage {target} needs a peer more than stage {context.stage}: loading its state")
        self.there = there = replace(
            context, stage=target, active=False, running=False, lineage="", ledger=Ledger(context.step)
        )
        self._limit = context.clock.call_later(MOVE_LIMIT_S, self.give_up, "it took too long")

        def made(backend: Backend) -> None:
            if self.there is not there:
                return
            there.backend = backend
            there.members, there.step, there.epoch = context.members, context.step, context.epoch
            self.joiner = Joiner(
                there,
                on_ready=self._caught_up,
                on_missed=self._missed,
                recalled=Recalled(self._disk_for(target)),
                moving=True,
            )
            self.joiner.begin({member.peer for member in context.members} - {context.me})

        context.worker.submit(TaskKind.BACKGROUND, (target,), lambda: backend_for(target), made)

    def _caught_up(self, step: int, members: tuple[Member, ...]) -> None:
        self.ready_at = step
        self._on_ready()

    def _missed(self, reason: str) -> None:
        self.give_up(reason)
        self._on_missed(reason)

    def give_up(self, reason: str) -> None:
        """Stay where we are; our entry in the other stage lapses by itself."""
        if self.there is not None:
            self._context.events.emit("move_given_up", target=self.there.stage, reason=reason)
            self._end()

    def arrived(self) -> Context:
        """The move is made: our place in the new stage."""
        there = self.there
        assert there is not None
        self._end()
        return there

    def _end(self) -> None:
        if self.joiner is not None:
            self.joiner.close()
        if self._limit is not None:
            self._limit.cancel()
        self.there = self.joiner = self._limit = self.ready_at = None
        self._due = {}
        self._rests_until_s = self._context.clock.now() + COOL_DOWN_S

    # -- what comes for us as a learner ----------------------------------------------------------------------

    def on_decided(self, close: StepClose) -> None:
        if self.joiner is not None:
            self.joiner.on_decided(close)

    def on_lost(self, peer: PeerId) -> None:
        if self.joiner is not None:
            self.joiner.on_lost(peer)

    def hosts(self, stage: int) -> bool:
        """Is that the stage whose state we load?"""
        return self.joiner is not None and self.there is not None and self.there.stage == stage
