"""How fast our tensors reach each neighbour: seen from when they were sent and when it said it has them.

A link's *busy* time is that in which the neighbour has not acknowledged all that we sent. What it has taken
since a busy time began, over the time that this took beyond one round trip, is what the link carried: several
tensors under way at once are not taken for several links. A rate that our other links shared, or for which we
had too little to send, is less than the link can do; so the greatest counts, and fades as new ones come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.transport.base import PeerId

FADE = 0.95
"""What each measurement leaves of those before: a link that has become ten times slower is known to be after
45 tensors, one that others shared for ten still has 60 % of its rate."""
RELAX = 1.01
"""By which the least round trip grows with each measurement, so that a longer way is believed in the end."""
LEAST_SHARE = 0.1
"""Of the time until an acknowledgement, counted as the transfer's own whatever the round trip: beyond that
the difference is noise."""


@dataclass
class _Line:
    """One neighbour. Sizes in bytes, times in s."""

    under_way: int = 0
    taken: int = 0
    """Since the busy time began."""
    busy_since_s: float = 0.0
    round_trip_s: float | None = None
    """The least; what is longer waited behind our own tensors."""
    bytes_per_s: float | None = None


class Rates:
    """Implements ``TransferWatch``. ``round_trip_s`` gives what heartbeats measured last, None before."""

    def __init__(self, clock: Clock, round_trip_s: Callable[[PeerId], float | None]) -> None:
        self._clock = clock
        self._round_trip_s = round_trip_s
        self._lines: dict[PeerId, _Line] = {}

    def sent(self, peer: PeerId, size: int) -> None:
        """A tensor of ``size`` bytes was queued for ``peer``."""
        line = self._lines.setdefault(peer, _Line())
        if not line.under_way:
            line.busy_since_s, line.taken = self._clock.now(), 0
        line.under_way += size

    def taken(self, peer: PeerId, size: int) -> None:
        """``peer`` has acknowledged a tensor of ``size`` bytes."""
        line = self._lines[peer]
        line.under_way -= size
        line.taken += size
        measured_s = self._round_trip_s(peer)
        if measured_s is None:
            return
        least_s = measured_s if line.round_trip_s is None else line.round_trip_s * RELAX
        line.round_trip_s = min(measured_s, least_s)
        waited_s = self._clock.now() - line.busy_since_s
        carried_s = max(waited_s - line.round_trip_s, LEAST_SHARE * waited_s)
        if carried_s > 0:
            line.bytes_per_s = max(line.taken / carried_s, FADE * (line.bytes_per_s or 0.0))

    def lost(self, peer: PeerId) -> None:
        """The links to ``peer`` broke: what was under way will not be acknowledged."""
        line = self._lines.get(peer)
        if line is not None:
            line.under_way = 0

    def bytes_per_s(self, peer: PeerId) -> float | None:
        """Towards ``peer``. Where nothing was sent yet, the most that we were seen to send to anybody: a link
        that looks good is tried, and then known. None: nothing was measured."""
        line = self._lines.get(peer)
        if line is not None and line.bytes_per_s is not None:
            return line.bytes_per_s
        return max((known.bytes_per_s for known in self._lines.values() if known.bytes_per_s), default=None)
