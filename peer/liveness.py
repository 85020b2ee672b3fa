"""Who is alive: heartbeats on every link, and lost links at once.

A peer is *lost* from the moment its link breaks or its heartbeats stay away, and back when it answers again;
being lost takes it out of all routes at once. It is *gone* when that is confirmed: nobody answers a new dial,
or it stays away for ``grace_s``; only then do the averaging, the membership and an origin's samples go on
without it, so that a connection which breaks and is made again costs a reroute and no more. A peer that comes
back in another life (incarnation) than the one that is watched stays lost. The silence that is borne adapts
to the intervals that were measured (median plus deviations; docs/timeouts.md).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm.clock import Clock, Timer
from swarm.events import EventLog
from swarm.messages import Heartbeat
from swarm.transport.base import PeerId, Transport


@dataclass(frozen=True)
class LivenessLimits:
    """Times of the failure detector."""

    interval_s: float = 1.0
    """Between two heartbeats on a link."""
    min_silence_s: float = 4.0
    """Silence that is always borne."""
    deviations: float = 12.0
    """Silence borne beyond the median interval, in median absolute deviations."""
    max_silence_s: float = 20.0
    """Silence that is never borne."""
    grace_s: float = 1.0
    """A peer whose link broke is gone after this, or as soon as a dial finds nobody."""
    redial_s: float = 0.2
    """Before the first new dial of a lost member; doubles up to ``max_redial_s``."""
    max_redial_s: float = 5.0


@dataclass
class Neighbour:
    """What is known of one peer's life."""

    peer: PeerId
    up: bool = False
    silent: bool = False
    lost: bool = False
    """Not alive, as far as others were told."""
    gone: bool = False
    """Lost, and that is confirmed."""
    incarnation: int | None = None
    """Of the last heartbeat on the link that is up; None before the first."""
    confirm: Timer | None = None
    last_heard_s: float = 0.0
    heartbeat: Heartbeat | None = None
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    round_trip_s: float | None = None
    redial_s: float = 0.0
    heard_beat_s: float | None = None
    """When the last heartbeat came, by our clock."""
    to_echo: bool = False


class Liveness:
    """Watches the peers it is told to ``watch``; calls ``on_lost``, then perhaps ``on_gone``, and ``on_back``
    once for each change."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        events: EventLog,
        *,
        beat: Callable[[], Heartbeat],
        on_lost: Callable[[PeerId, str], None],
        on_gone: Callable[[PeerId], None],
        on_back: Callable[[PeerId], None],
        limits: LivenessLimits | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._events = events
        self._beat = beat
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._on_back = on_back
        self.limits = limits or LivenessLimits()
        self._neighbours: dict[PeerId, Neighbour] = {}
        self._watched: dict[PeerId, int | None] = {}
        self._left: dict[PeerId, int] = {}
        """Said goodbye in that life, and have not linked to us again."""
        self._sequence = 0
        self._closed = False
        self._timer = clock.call_later(self.limits.interval_s, self._tick)

    def watch(self, peers: Mapping[PeerId, int | None]) -> None:
        """Keep links to exactly these peers; others that link to us are answered, not dialled.

        The value is the life (incarnation) that the peer must be in to count as alive; None for any.
        """
        self._watched = {peer: life for peer, life in peers.items() if peer != self._transport.peer_id}
        for peer in sorted(self._watched):
            neighbour = self._neighbour(peer)
            left = self._left.get(peer)
            anew = left is not None and self._watched[peer] not in (None, left)
            if anew:
                del self._left[peer]
            if anew or (left is None and not neighbour.up and not neighbour.lost):
                self._transport.connect(peer)
            self._check(neighbour)
        for peer in set(self._neighbours) - set(self._watched):
            if not self._neighbours[peer].up:
                self._settle(self._neighbours.pop(peer))

    def alive(self, peer: PeerId) -> bool:
        """Not known to be lost. A watched peer that was not reached yet counts as alive."""
        if peer == self._transport.peer_id:
            return True
        if peer in self._left:
            return False
        neighbour = self._neighbours.get(peer)
        return neighbour is None or not neighbour.lost

    def gone(self, peer: PeerId) -> bool:
        """Lost for certain, as far as one peer can tell: work goes on without it."""
        neighbour = self._neighbours.get(peer)
        return peer in self._left or (neighbour is not None and neighbour.gone)

    def reachable(self, peer: PeerId) -> bool:
        """Answers, whatever life it is in."""
        neighbour = self._neighbours.get(peer)
        return neighbour is not None and neighbour.up and not neighbour.silent

    def linked(self) -> list[PeerId]:
        """Peers with a link that is up and not lost, in a fixed order."""
        return sorted(p for p, n in self._neighbours.items() if n.up and not n.lost)

    def round_trip_s(self, peer: PeerId) -> float | None:
        """Last measured round-trip time."""
        neighbour = self._neighbours.get(peer)
        return neighbour.round_trip_s if neighbour else None

    def step_of(self, peer: PeerId) -> int | None:
        """The step of the peer's last heartbeat."""
        neighbour = self._neighbours.get(peer)
        return neighbour.heartbeat.step if neighbour and neighbour.heartbeat else None

    def on_link_up(self, peer: PeerId) -> None:
        neighbour = self._neighbour(peer)
        neighbour.up = True
        neighbour.silent = False
        neighbour.incarnation = None
        neighbour.redial_s = 0.0
        self._left.pop(peer, None)
        neighbour.last_heard_s = self._clock.now()
        neighbour.intervals_s.clear()
        neighbour.heard_beat_s = None
        self._send_beat(neighbour)

    def on_link_lost(self, peer: PeerId, reason: str) -> None:
        """The link broke, or a dial failed: the first makes a peer lost, the second makes it gone."""
        neighbour = self._neighbour(peer)
        was_up, neighbour.up = neighbour.up, False
        neighbour.incarnation = None
        self._lose(neighbour, reason)
        if not was_up:
            self._confirm(neighbour)
        elif not neighbour.gone and neighbour.confirm is None:
            neighbour.confirm = self._clock.call_later(self.limits.grace_s, self._confirm, neighbour)
        self._redial(neighbour)

    def on_heard(self, peer: PeerId) -> None:
        """Any message is a sign of life."""
        neighbour = self._neighbours.get(peer)
        if neighbour is not None:
            neighbour.last_heard_s = self._clock.now()
            neighbour.silent = False
            self._check(neighbour)

    def on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        neighbour = self._neighbour(peer)
        now = self._clock.now()
        if neighbour.heard_beat_s is not None:
            neighbour.intervals_s.append(now - neighbour.heard_beat_s)
        neighbour.heartbeat = heartbeat
        neighbour.incarnation = heartbeat.incarnation
        neighbour.heard_beat_s = now
        neighbour.to_echo = True
        if heartbeat.echo_s is not None:
            round_trip_s = now - heartbeat.echo_s - heartbeat.held_s
            if 0 <= round_trip_s < 60:
                neighbour.round_trip_s = round_trip_s
        self.on_heard(peer)

    def silence_borne_s(self, peer: PeerId) -> float:
        """How long the peer may stay silent before it is lost."""
        limits = self.limits
        neighbour = self._neighbours.get(peer)
        if neighbour is None or len(neighbour.intervals_s) < 4:
            return max(limits.min_silence_s, 2 * limits.interval_s)
        median = statistics.median(neighbour.intervals_s)
        deviation = statistics.median(abs(i - median) for i in neighbour.intervals_s)
        return min(limits.max_silence_s, max(limits.min_silence_s, median + limits.deviations * deviation))

    def forget(self, peer: PeerId, life: int) -> None:
        """A clean leave: the peer is gone, and is not dialled again unless it links to us or a later life of
        it is watched."""
        self._left[peer] = life
        self._transport.disconnect(peer)
        neighbour = self._neighbour(peer)
        neighbour.up, neighbour.incarnation = False, None
        self._settle(neighbour)
        if not neighbour.lost:
            neighbour.lost = True
            self._on_lost(peer, "left")
        if not neighbour.gone:
            neighbour.gone = True
            self._on_gone(peer)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()

    def _neighbour(self, peer: PeerId) -> Neighbour:
        if peer not in self._neighbours:
            self._neighbours[peer] = Neighbour(peer, last_heard_s=self._clock.now())
        return self._neighbours[peer]

    def _tick(self) -> None:
        if self._closed:
            return
        self._timer = self._clock.call_later(self.limits.interval_s, self._tick)
        self._sequence += 1
        now = self._clock.now()
        for neighbour in list(self._neighbours.values()):
            if not neighbour.up:
                continue
            self._send_beat(neighbour)
            silence = now - neighbour.last_heard_s
            if not neighbour.silent and silence > self.silence_borne_s(neighbour.peer):
                neighbour.silent = True
                self._lose(neighbour, f"silent for {silence:.1f} s")
                self._confirm(neighbour)

    def _send_beat(self, neighbour: Neighbour) -> None:
        now = self._clock.now()
        times: dict[str, float | int] = {"sequence": self._sequence, "sent_s": now}
        if neighbour.to_echo and neighbour.heartbeat is not None and neighbour.heard_beat_s is not None:
            neighbour.to_echo = False
            times |= {"echo_s": neighbour.heartbeat.sent_s, "held_s": now - neighbour.heard_beat_s}
        self._transport.send(neighbour.peer, self._beat().model_copy(update=times))

    def _right_life(self, neighbour: Neighbour) -> bool:
        expected = self._watched.get(neighbour.peer)
        return expected is None or neighbour.incarnation == expected

    def _check(self, neighbour: Neighbour) -> None:
        """Something was heard, or another life is watched: is the peer lost, or back?"""
        if neighbour.incarnation is None:
            return
        if not self._right_life(neighbour):
            self._lose(neighbour, "has begun another life")
            self._confirm(neighbour)
        elif neighbour.lost and neighbour.up and not neighbour.silent:
            neighbour.lost = neighbour.gone = False
            self._settle(neighbour)
            self._events.emit("back", other=neighbour.peer)
            self._on_back(neighbour.peer)

    def _lose(self, neighbour: Neighbour, reason: str) -> None:
        if neighbour.lost:
            return
        neighbour.lost = True
        self._events.emit("lost", other=neighbour.peer, reason=reason)
        self._on_lost(neighbour.peer, reason)

    def _confirm(self, neighbour: Neighbour) -> None:
        self._settle(neighbour)
        known = self._neighbours.get(neighbour.peer) is neighbour
        if known and neighbour.lost and not neighbour.gone and not self._closed:
            neighbour.gone = True
            self._events.emit("gone", other=neighbour.peer)
            self._on_gone(neighbour.peer)

    @staticmethod
    def _settle(neighbour: Neighbour) -> None:
        if neighbour.confirm is not None:
            neighbour.confirm.cancel()
            neighbour.confirm = None

    def _redial(self, neighbour: Neighbour) -> None:
        limits = self.limits
        neighbour.redial_s = min(limits.max_redial_s, max(limits.redial_s, 2 * neighbour.redial_s))

        def dial() -> None:
            wanted = neighbour.peer in self._watched and neighbour.peer not in self._left
            if wanted and not self._closed and not neighbour.up:
                self._transport.connect(neighbour.peer)

        self._clock.call_later(neighbour.redial_s, dial)
