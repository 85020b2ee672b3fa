"""What counts in a step: a pure state machine of events, ``apply(ledger, event) -> ledger``.

The averaging's weights, the sample counts and the decision to rebuild a gradient sum come from here alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm.messages import Commit, Counted, StepClose

Key = tuple[int, int]
"""(index, attempt) of a microbatch in the ledger's step. The origin is part of what is compared at a tie."""


@dataclass(frozen=True)
class Ledger:
    """One peer's account of one step."""

    step: int
    commits: Mapping[int, Counted] = field(default_factory=dict)
    summed: tuple[Counted, ...] = ()
    close: StepClose | None = None


@dataclass(frozen=True)
class Committed:
    """An origin's word, heard from it or passed on."""

    counted: Counted


@dataclass(frozen=True)
class Summed:
    """This peer added the microbatch's weight gradients to its sum."""

    counted: Counted


@dataclass(frozen=True)
class SumDiscarded:
    """This peer threw its sum away, to build it anew."""


@dataclass(frozen=True)
class Closed:
    """The step's agreement."""

    close: StepClose


Event = Committed | Summed | SumDiscarded | Closed


def counted_of(commit: Commit) -> Counted:
    """The ledger's entry for an origin's COMMIT."""
    return Counted(
        index=commit.index,
        attempt=commit.attempt,
        origin=commit.origin,
        path=commit.path,
        tokens=commit.tokens,
    )


def rank(counted: Counted) -> bytes:
    """The order that settles two commits of one index: the same for everyone, and no one's choice."""
    parts = [str(counted.index), str(counted.attempt), counted.origin]
    parts += [f"{hop.stage}:{hop.peer}" for hop in counted.path]
    return hashlib.sha256("|".join(parts).encode()).digest()


def settle(commits: Iterable[Counted]) -> dict[int, Counted]:
    """One commit for each index: the one of least rank, whatever order they come in."""
    best: dict[int, Counted] = {}
    for counted in commits:
        other = best.get(counted.index)
        if other is None or (other != counted and rank(counted) < rank(other)):
            best[counted.index] = counted
    return dict(sorted(best.items()))


def apply(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after ``event``.

    Commits that come after the close change nothing: the close is the step's last word.

    Raises:
        ValueError: a close of another step, a second and different close, or a microbatch summed twice.
    """
    match event:
        case Committed(counted):
            if ledger.close is not None:
                return ledger
            known = ledger.commits.get(counted.index)
            if known is not None and (known == counted or rank(known) <= rank(counted)):
                return ledger
            return replace(ledger, commits={**ledger.commits, counted.index: counted})
        case Summed(counted):
            if any(other.index == counted.index and other == counted for other in ledger.summed):
                raise ValueError(f"microbatch {counted.index} of step {ledger.step} was summed twice")
            return replace(ledger, summed=(*ledger.summed, counted))
        case SumDiscarded():
            return replace(ledger, summed=())
        case Closed(close):
            if close.step != ledger.step:
                raise ValueError(f"a close of step {close.step} for the ledger of step {ledger.step}")
            if ledger.close is not None and ledger.close != close:
                raise ValueError(f"two histories of step {close.step}")
            return replace(ledger, close=close, commits={c.index: c for c in close.counted})


def owed(close: StepClose, peer: str, stage: int) -> tuple[Counted, ...]:
    """The microbatches of a closed step that ``peer`` must hold in its sum for ``stage``, by index."""
    return tuple(c for c in close.counted if any(h.peer == peer and h.stage == stage for h in c.path))


def tokens_of(close: StepClose, peer: str, stage: int) -> int:
    """Tokens that stand behind ``peer``'s gradient sum of ``stage``: its weight in the average."""
    return sum(counted.tokens for counted in owed(close, peer, stage))


def unsound(ledger: Ledger, peer: str, stage: int) -> bool:
    """Does the sum hold a microbatch that the close did not count? Then it must be built anew."""
    if ledger.close is None:
        return False
    return not set(ledger.summed) <= set(owed(ledger.close, peer, stage))
