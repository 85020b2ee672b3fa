"""What a hop holds of each microbatch, from its FORWARD to the step's close."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from swarm.clock import Timer
from swarm.messages import Hop
from swarm.transport.base import PeerId

Key = tuple[int, int, int]
"""(step, index, attempt)"""


class Phase(Enum):
    """Where a held microbatch stands on this hop."""

    QUEUED = auto()
    FORWARDED = auto()
    RETURNING = auto()
    RETURNED = auto()


@dataclass
class Held:
    """One attempt at one microbatch on this hop."""

    key: Key
    origin: PeerId
    path: tuple[Hop, ...]
    hop: int
    revision: int
    inputs: Any
    taken_over: bool = False
    """Started by another origin than the one that drew it."""
    phase: Phase = Phase.QUEUED
    generation: int = 0
    submitted: bool = False
    output: Any = None
    saved: Any = None
    gradient: Any = None
    trail: tuple[Hop, ...] = ()
    returned: Any = None
    deferred: list[Any] = field(default_factory=list)
    refused: dict[PeerId, str] = field(default_factory=dict)
    """Next hops that would not take it, and why."""
    replaced: dict[PeerId, int] = field(default_factory=dict)
    """Next hops that were lost, and the version under which they may still hold the microbatch."""
    given_up: str | None = None
    retry: Timer | None = None
    asked_s: float = float("-inf")
    """When it was last asked whether this is still wanted (``wanted.py``)."""
    sent_s: float | None = None
    """When the output was sent to the next hop, until that hop's own was seen to arrive."""
    summing: bool = False
    loss_inputs: tuple[Any, Any] | None = None
    """At the origin: the last hop's output and the labels, to build the head's gradient anew."""

    @property
    def order(self) -> tuple[int, ...]:
        """What is computed first. An origin that was lost is often back with what it had under way: what
        others have begun in its place comes last, so that it costs little then."""
        step, index, attempt = self.key
        return step, int(self.taken_over), index, attempt

    @property
    def next_hop(self) -> PeerId:
        """Where the output goes: the next peer of the path, after the last one the origin."""
        return self.origin if self.hop + 1 == len(self.path) else self.path[self.hop + 1].peer

    def fields(self) -> dict[str, int]:
        """The event log's name of this microbatch."""
        return {"step": self.key[0], "index": self.key[1], "attempt": self.key[2]}


def stages_of(path: Iterable[Hop]) -> tuple[int, ...]:
    return tuple(hop.stage for hop in path)


def outdated(path: tuple[Hop, ...], other: tuple[Hop, ...]) -> bool:
    """Was ``path`` given up for ``other``? The first hop that was replaced, or skipped, in one of them
    decides: what came after it on the other way belongs to the lost one, whatever that changed further on."""
    versions = ((mine.version, theirs.version) for mine, theirs in zip(path, other, strict=False))
    return next((mine < theirs for mine, theirs in versions if mine != theirs), False)


class Holdings(dict[Key, Held]):
    """The microbatches that this hop holds."""

    def occupied(self, gone: Callable[[PeerId], bool] = lambda peer: False) -> int:
        """Those between their forward and their backward here: what memory slots count.

        Those of an origin that is gone wait for nothing any more. They stay until the step's close, in case
        it comes back, but must not keep others out.
        """
        return sum(held.phase is not Phase.RETURNED and not gone(held.origin) for held in self.values())

    def drop(self, held: Held) -> None:
        """Hold it no longer, if it is held; what is computed of it comes to nothing."""
        if held.retry is not None:
            held.retry.cancel()
        if self.get(held.key) is held:
            held.generation += 1
            del self[held.key]

    def forget(self, step: int) -> None:
        """The step is over: drop what is held for it and before it."""
        for held in list(self.values()):
            if held.key[0] <= step:
                self.drop(held)
