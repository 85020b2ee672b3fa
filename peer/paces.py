"""How long each next hop takes, as its neighbours see it: from our sending to the arrival of its output
at the hop after it, which says so (``ARRIVED``).

What a peer says of its own speed is a claim; this is a measurement in which it has no part. It holds what the
peer's queue and the links took, too, so only the least of the last ones says something of the peer itself.
"""

from __future__ import annotations

from collections import deque

from swarm.clock import Clock
from swarm.transport.base import PeerId

WINDOW = 16
"""Measurements remembered: some of so many, in a step's beginning or end, found no queue."""
LEAST = 3
"""Measurements before anything is said."""
OLD_S = 300.0
"""After so long without a new one nothing is said any more: a peer that is given no work for what was seen of
it is tried again."""


class Paces:
    """What this peer has seen of those that it sends to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._took_s: dict[PeerId, deque[float]] = {}
        self._last_s: dict[PeerId, float] = {}

    def add(self, peer: PeerId, took_s: float) -> None:
        """A tensor that went to ``peer`` came out of it, at the hop after it, in this time."""
        self._took_s.setdefault(peer, deque(maxlen=WINDOW)).append(took_s)
        self._last_s[peer] = self._clock.now()

    def seen_s(self) -> dict[PeerId, float]:
        """The least time that each peer needed of late."""
        oldest_s = self._clock.now() - OLD_S
        for peer in [peer for peer, last_s in self._last_s.items() if last_s < oldest_s]:
            del self._took_s[peer], self._last_s[peer]
        return {peer: min(took_s) for peer, took_s in self._took_s.items() if len(took_s) >= LEAST}
