"""What an averaging is made of: rosters, lineages, and how far a round or an answer has come."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from swarm.transport.base import PeerId


def roster_of(epoch: int, step: int, members: tuple[PeerId, ...]) -> str:
    """The name of a set of peers that average ``step`` of ``epoch`` together."""
    return hashlib.sha256("|".join([str(epoch), str(step), *members]).encode()).hexdigest()[:16]


def lineage_after(lineage: str, average_digest: str) -> str:
    """What names the parameters that come of applying an average to those that ``lineage`` names."""
    return hashlib.sha256(f"{lineage}|{average_digest}".encode()).hexdigest()[:16]


def largest(parties: dict[PeerId, str]) -> tuple[PeerId, ...]:
    """Those who say what most say; of equally many, those who say the least."""
    by_word: dict[str, list[PeerId]] = {}
    for peer, word in parties.items():
        by_word.setdefault(word, []).append(peer)
    word = min(by_word, key=lambda word: (-len(by_word[word]), word))
    return tuple(sorted(by_word[word]))


@dataclass(frozen=True)
class Average:
    """A whole average, as long as the backend holds it."""

    step: int
    roster: str
    members: tuple[PeerId, ...]
    digest: str


@dataclass
class Round:
    """Averaging among one roster."""

    roster: str
    members: tuple[PeerId, ...]
    held: Average | None = None
    """A larger roster's average that this peer held whole when it entered, and had told its digest of."""
    contributions: dict[PeerId, Any] = field(default_factory=dict)
    lineages: dict[PeerId, str] = field(default_factory=dict)
    holds: dict[PeerId, str] = field(default_factory=dict)
    """The digest of the average that each held when it entered, empty if none."""
    combining: bool = False
    result: Any = None
    """This peer's part of the average."""
    parts: set[int] = field(default_factory=set)
    whole: bool = False
    """All parts are in place and the digest is being taken or known."""
    digest: str | None = None
    digests: dict[PeerId, str] = field(default_factory=dict)
    done_digest: str | None = None
    settling: bool = False
    """The average is known and here, and needs nobody any more."""

    @property
    def made_in(self) -> str | None:
        """The roster under which learners have the parts; None if they have them from those who made it."""
        if not self.settling:
            return self.roster
        return self.held.roster if self.held is not None else None

    @property
    def held_by_all(self) -> bool:
        """Did everyone hold the same average? Then somebody outside of the roster may have applied it."""
        return self.held is not None and set(self.holds.values()) == {self.held.digest}


@dataclass
class Answer:
    """The average of somebody who finished without us, as far as it has come."""

    members: tuple[PeerId, ...] = ()
    parts: dict[int, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def whole(self) -> bool:
        return bool(self.digest and self.members) and len(self.parts) == len(self.members)
