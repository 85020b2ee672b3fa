"""What this peer holds against others: strikes, and bans that outlive a new announcement or a new life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.events import EventLog
from swarm.transport.base import PeerId

BAN_STRIKES = 5
"""So many strikes within ``FORGIVEN_S`` are no accident: a ban follows."""
FORGIVEN_S = 300.0
BAN_S = 600.0
MAX_BAN_S = 86_400.0
"""The first ban of an identity, and the longest: each is twice the one before."""


@dataclass
class Standing:
    """One identity's record with us. It is kept by peer id, so neither a goodbye nor another incarnation
    clears it."""

    strikes: int = 0
    recent: int = 0
    since_s: float = 0.0
    bans: int = 0
    banned: bool = False
    losses: int = 0
    """How often it was lost while it was a member."""


class Standings:
    """Counts strikes; calls ``on_ban`` and, when a ban is over, ``on_pardon``."""

    def __init__(
        self,
        clock: Clock,
        events: EventLog,
        *,
        on_ban: Callable[[PeerId], None],
        on_pardon: Callable[[PeerId], None],
    ) -> None:
        self._clock = clock
        self._events = events
        self._on_ban = on_ban
        self._on_pardon = on_pardon
        self._records: dict[PeerId, Standing] = {}

    def of(self, peer: PeerId) -> Standing:
        """The record of an identity, an empty one if there is nothing to say."""
        return self._records.get(peer, Standing())

    def banned(self, peer: PeerId) -> bool:
        return peer in self._records and self._records[peer].banned

    def lost(self, peer: PeerId) -> None:
        """It was lost while others counted on it."""
        self._records.setdefault(peer, Standing()).losses += 1

    def strike(self, peer: PeerId, reason: str) -> None:
        """It sent what no honest peer sends."""
        self._events.emit("strike", other=peer, reason=reason)
        record = self._records.setdefault(peer, Standing())
        record.strikes += 1
        now = self._clock.now()
        if now - record.since_s > FORGIVEN_S:
            record.recent, record.since_s = 0, now
        record.recent += 1
        if record.recent >= BAN_STRIKES and not record.banned:
            self._ban(peer, record, reason)

    def _ban(self, peer: PeerId, record: Standing, reason: str) -> None:
        duration_s = min(MAX_BAN_S, BAN_S * 2**record.bans)
        record.bans += 1
        record.banned, record.recent = True, 0
        self._events.emit("banned", other=peer, reason=reason, duration_s=duration_s)
        self._clock.call_later(duration_s, self._pardon, peer, record)
        self._on_ban(peer)

    def _pardon(self, peer: PeerId, record: Standing) -> None:
        record.banned = False
        self._events.emit("pardoned", other=peer)
        self._on_pardon(peer)
