"""One peer's part of the protocol on a desk: what it sends is kept, and the test plays everyone else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from bootstrap.simulation.fake import SPEC, FakeBackend
from peer.context import Context, StepRules
from peer.ledger import Ledger
from peer.worker import SimExecutor, Worker
from swarm.clock import SimClock
from swarm.events import ListEvents
from swarm.messages import Hop, Member, Message

M = TypeVar("M", bound=Message)

TASK_S = 0.01


class Desk:
    """A context whose others are named ``s<stage>r<number>``; ``lost`` and ``gone`` are set by the test."""

    def __init__(
        self,
        me: str,
        replicas: tuple[int, ...],
        *,
        slots: int = 4,
        path_length: int | None = None,
        min_path_length: int = 1,
        each: int = 4,
    ) -> None:
        self.clock = SimClock()
        self.sent: list[tuple[str, Message, Any]] = []
        """(to, message, tensor), oldest first; ``take`` removes."""
        self.strikes: list[tuple[str, str]] = []
        self.failures: list[Exception] = []
        self.lost: set[str] = set()
        self.gone: set[str] = set()
        self.avoided: list[frozenset[str]] = []
        """What each path that was asked for was to avoid."""
        self.events = ListEvents(self.clock)
        members = tuple(
            Member(peer=f"s{stage}r{number}", stage=stage, incarnation=1)
            for stage, count in enumerate(replicas)
            for number in range(count)
        )
        self.context = Context(
            me=me,
            stage=int(me[1]),
            incarnation=1,
            rules=StepRules(
                stages=len(replicas),
                path_length=path_length or len(replicas),
                min_path_length=min_path_length,
                microbatches_per_origin=each,
                memory_slots=slots,
                total_steps=100,
                validation_every=0,
                validation_microbatches=0,
                activation=SPEC,
            ),
            clock=self.clock,
            transport=SimpleNamespace(  # type: ignore[arg-type]
                peer_id=me, send=lambda to, message, tensor=None: self.sent.append((to, message, tensor))
            ),
            worker=Worker(
                SimExecutor(self.clock, lambda kind: TASK_S), self.clock, failed=self.failures.append
            ),
            backend=FakeBackend(int(me[1])),
            events=self.events,
            members=members,
            origins_of_step=tuple(m.peer for m in members if m.stage == 0),
            running=True,
            active=True,
            ledger=Ledger(0),
            liveness=SimpleNamespace(  # type: ignore[arg-type]
                alive=lambda peer: peer not in self.lost,
                gone=lambda peer: peer in self.gone,
                why_lost=lambda peer: "reset" if peer in self.lost else "",
            ),
            routes=self,  # type: ignore[arg-type]
            strike=lambda peer, reason: self.strikes.append((peer, reason)),
        )

    # -- the routes ----------------------------------------------------------------------------------------

    def path(self, position: int, avoid: frozenset[str] = frozenset()) -> tuple[Hop, ...]:
        """This origin, then the first living peer of every other stage that is not to be avoided."""
        self.avoided.append(avoid)
        others = [self.replacement(stage, set(avoid)) for stage in range(1, self.context.rules.stages)]
        return hops(self.context.me, *[peer for peer in others if peer is not None])

    def replacement(self, stage: int, exclude: set[str]) -> str | None:
        return next((peer for peer in self.context.living(stage) if peer not in exclude), None)

    # -- what was sent -------------------------------------------------------------------------------------

    def take(self, kind: type[M]) -> list[tuple[str, M]]:
        """(to, message) of all messages of one kind since the last call, once what is queued is computed."""
        self.clock.run_for(0)
        found = [(to, message) for to, message, _ in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found

    def one(self, kind: type[M]) -> tuple[str, M]:
        """The only one of its kind."""
        (found,) = self.take(kind)
        return found

    def compute(self, tasks: int = 1) -> None:
        """As much time as so many tasks take."""
        self.clock.run_for(tasks * TASK_S)


def hops(*peers: str) -> tuple[Hop, ...]:
    """A path through these peers."""
    return tuple(Hop(stage=int(peer[1]), peer=peer) for peer in peers)


def activation(step: int, index: int, checksum: int = 0) -> Any:
    """What ``FakeBackend`` computes with."""
    return np.array([step, index, checksum, 0], dtype=np.int64)
