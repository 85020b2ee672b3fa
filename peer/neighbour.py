"""One peer as the failure detector sees it, and the detector's times."""

from __future__ import annotations

from dataclasses import dataclass, field

from peer.phi import Arrivals, PhiLimits
from swarm.clock import Timer
from swarm.messages import Heartbeat
from swarm.transport.base import PeerId


@dataclass(frozen=True)
class LivenessLimits:
    """Times of the failure detector."""

    interval_s: float = 1.0
    """Between two heartbeats on a link."""
    silence: PhiLimits = field(default_factory=PhiLimits)
    """Of the intervals between heartbeats."""
    hang: PhiLimits = field(
        default_factory=lambda: PhiLimits(
            pause_s=4.0, least_deviation_s=0.25, most_s=300.0, unmeasured_s=60.0
        )
    )
    """Of the time in which a peer that works finishes nothing. As long as the peer's own is not measured, it
    is what all others need."""
    hung_s: float = 8.0
    """A peer whose compute hangs for so much longer is gone."""
    grace_s: float = 1.0
    """A peer whose link broke is asked for after this, or as soon as a dial finds nobody."""
    ask_again_s: float = 1.0
    """While others vouch for a peer that we cannot reach, they are asked again."""
    unreachable_s: float = 8.0
    """Two replicas that others vouch for and that cannot reach each other for so long cannot average: one
    leaves its step, the other waits twice as long."""
    redial_s: float = 0.2
    """Before the first new dial of a lost member; doubles up to ``max_redial_s``."""
    max_redial_s: float = 5.0


@dataclass
class Neighbour:
    """What is known of one peer's life."""

    peer: PeerId
    beats: Arrivals
    gaps: Arrivals
    """Times between two progresses of its compute."""
    up: bool = False
    silent: bool = False
    hung: bool = False
    deaf: bool = False
    """Its heartbeats come, and say that none of ours do."""
    lost: bool = False
    """Not alive, as far as others were told."""
    reason: str = ""
    """Why it was lost last."""
    gone: bool = False
    """Lost, and that is confirmed."""
    vouched: bool = False
    """Lost, and others reach it."""
    incarnation: int | None = None
    """Of the last heartbeat on the link that is up; None before the first."""
    confirm: Timer | None = None
    last_heard_s: float = 0.0
    lost_since_s: float = 0.0
    heartbeat: Heartbeat | None = None
    round_trip_s: float | None = None
    redial_s: float = 0.0
    heard_beat_s: float | None = None
    """When the last heartbeat came, by our clock."""
    progress_s: float = 0.0
    """When its progress last was another, or it had nothing to do."""
    echo_s: float = 0.0
    """When it last said that it hears us."""
    to_echo: bool = False

    @property
    def answers(self) -> bool:
        """Up, and neither silent nor hung nor deaf."""
        return self.up and not (self.silent or self.hung or self.deaf)
