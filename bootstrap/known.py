"""What the researcher's node has seen of its run, and which records it therefore believes.

Anybody may publish a record. Who trains, and who waits for a new epoch, is believed of members alone: of the
genesis, then of those whom more than half of the known origins name in their progress records. A node that
has just started believes any origins until it has seen some that it knows.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from swarm.records import Genesis, PeerRecord, ProgressRecord

NEAR_STEPS = 1000
"""Between the newest step at which members were seen to train and one that is believed: more than the fastest
run makes while a record lives."""
MAX_EPOCHS = 1 << 31
MAX_FORMER = 1 << 16


@dataclass(frozen=True)
class Known:
    """What a node knows; ``seeing`` and ``beginning`` give what it knows then."""

    total_steps: int
    genesis: Genesis | None = None
    members: frozenset[str] = frozenset()
    """The last known membership; empty where none is known."""
    former: frozenset[str] = frozenset()
    """Everybody who was ever known as a member."""
    step: int | None = None
    """The newest step at which most members that trained were, or None if none was seen."""

    def with_genesis(self, genesis: Genesis, *, now: bool = True) -> Known:
        """The run has begun, or begun again, by ``genesis``; ``now`` False: it did so at some time before."""
        names = frozenset(member.peer for member in genesis.members)
        known = replace(self, genesis=genesis, former=self._former(names))
        return replace(known, members=names, step=genesis.step) if now else known

    def seeing(self, peers: Iterable[PeerRecord], progress: Collection[ProgressRecord]) -> Known:
        """After a look into the directory."""
        known = self
        names = self.members or self._founders
        words = [record for record in progress if record.peer in names]
        if not self.members and not words:
            words = list(progress)
        if words:
            votes = Counter(name for record in words for name, _ in record.membership)
            members = frozenset(name for name, count in votes.items() if 2 * count > len(words))
            # Of too many members the records name none: then nobody is known, and everybody believed.
            known = replace(known, members=members, former=known._former(members))
        steps = [record.step for record in peers if record.state == "active" and known.believes(record)]
        if steps:
            known = replace(known, step=max(statistics.median_low(steps), known.step or 0))
        return known

    @property
    def _founders(self) -> frozenset[str]:
        return frozenset(m.peer for m in self.genesis.members) if self.genesis is not None else frozenset()

    def _former(self, names: frozenset[str]) -> frozenset[str]:
        return self.former | names if len(self.former) + len(names) <= MAX_FORMER else names

    def believes(self, record: PeerRecord) -> bool:
        """May it say that its peer trains, or waits for a new epoch?"""
        return not self.members or record.peer in self.members

    def plausible(self, epoch: int, step: int) -> bool:
        """Can the run have come to this state, and does it still count?"""
        if epoch >= MAX_EPOCHS or step > self.total_steps:
            return False
        if self.step is not None and step > self.step + NEAR_STEPS:
            return False
        genesis = self.genesis
        return genesis is None or (epoch <= genesis.epoch and not genesis.gave_up(epoch, step))
