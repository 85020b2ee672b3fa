"""Who is alive: heartbeats on every link, lost links at once, indirect probes before a death is believed.

A peer is *lost* (suspected) from the moment its link breaks, its heartbeats stay away (``peer/phi.py``), or
they say that its compute hangs or that it does not hear us; it is *back* when it answers again. Being lost
takes it out of all routes at once. It is *gone* when that is confirmed: a broken link is made again for
``grace_s``, then two others are asked (``peer/probes.py``); only if none of them reaches it either do the
averaging, the membership and an origin's samples go on without it. While others vouch for it, it stays lost
and is never gone. So a connection which breaks and is made again costs a reroute and no more, and one that
fails between two peers alone votes nobody out. A peer that answers in another life (incarnation) than the one
that is watched stays lost, and a slow one refutes a suspicion by answering in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from peer.neighbour import LivenessLimits, Neighbour
from peer.phi import Arrivals
from peer.probes import Probes
from swarm.clock import Clock
from swarm.events import EventLog
from swarm.messages import Heartbeat
from swarm.transport.base import PeerId, Transport


class Liveness:
    """Watches the peers it is told to ``watch``; calls ``on_lost``, then perhaps ``on_gone``, and ``on_back``
    once for each change."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        events: EventLog,
        *,
        beat: Callable[..., Heartbeat],
        incarnation: Callable[[], int],
        on_lost: Callable[[PeerId, str], None],
        on_gone: Callable[[PeerId], None],
        on_back: Callable[[PeerId], None],
        on_vouched: Callable[[PeerId, float], None],
        sure: Callable[[], bool] = lambda: True,
        rng: random.Random,
        limits: LivenessLimits | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._events = events
        self._beat = beat
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._on_back = on_back
        self._on_vouched = on_vouched
        self._sure = sure
        """May silence be taken for death? Not by one that hears few: it may be itself that is cut off."""
        self.limits = limits or LivenessLimits()
        self._neighbours: dict[PeerId, Neighbour] = {}
        self._watched: dict[PeerId, int | None] = {}
        self._left: dict[PeerId, int] = {}
        """Said goodbye in that life, and have not linked to us again."""
        self._banned: set[PeerId] = set()
        self._gaps = Arrivals(self.limits.hang)
        """Of all peers."""
        self.probes = Probes(
            transport,
            clock,
            rng,
            helpers=self.linked,
            incarnation=incarnation,
            on_answer=self._vouched,
            on_silence=self._unanswered,
        )
        self._sequence = 0
        self._closed = False
        self._due_s = clock.now() + self.limits.interval_s
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

    def why_lost(self, peer: PeerId) -> str:
        """The reason of the peer's last loss; empty if there was none."""
        neighbour = self._neighbours.get(peer)
        return neighbour.reason if neighbour else ""

    def gone(self, peer: PeerId) -> bool:
        """Lost for certain, as far as one peer can tell: work goes on without it."""
        neighbour = self._neighbours.get(peer)
        return peer in self._left or (neighbour is not None and neighbour.gone)

    def vouched(self, peer: PeerId) -> bool:
        """Lost to us, and others reach it."""
        neighbour = self._neighbours.get(peer)
        return neighbour is not None and neighbour.vouched

    def reconsider(self, peer: PeerId) -> None:
        """A majority counts on a peer that is gone for us, so it may live: ask for it again."""
        neighbour = self._neighbours.get(peer)
        if neighbour is None or not neighbour.gone or peer in self._left or peer in self._banned:
            return
        if neighbour.incarnation is None or self._right_life(neighbour):
            neighbour.gone = False
            neighbour.lost_since_s = self._clock.now()
            if not neighbour.up:
                self._transport.connect(peer)
            self._inquire(neighbour)

    def reachable(self, peer: PeerId) -> bool:
        """Answers, whatever life it is in."""
        neighbour = self._neighbours.get(peer)
        return neighbour is not None and neighbour.answers and peer not in self._banned

    def stale(self, peer: PeerId, life: int) -> bool:
        """Is what comes from the peer known to be of another life than ``life``?"""
        neighbour = self._neighbours.get(peer)
        return neighbour is not None and neighbour.incarnation not in (None, life)

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
        neighbour.silent = neighbour.hung = neighbour.deaf = False
        neighbour.incarnation = None
        neighbour.redial_s = 0.0
        self._left.pop(peer, None)
        neighbour.last_heard_s = neighbour.progress_s = neighbour.echo_s = self._clock.now()
        neighbour.beats.clear()
        neighbour.heard_beat_s = None
        self._send_beat(neighbour)

    def on_link_lost(self, peer: PeerId, reason: str) -> None:
        """The link broke, or a dial failed: after the first it is dialled, after the second asked for."""
        neighbour = self._neighbour(peer)
        was_up, neighbour.up = neighbour.up, False
        neighbour.incarnation = None
        self._lose(neighbour, reason)
        if not was_up:
            self._inquire(neighbour)
        else:
            self._unless_back(neighbour, self.limits.grace_s, self._inquire)
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
            neighbour.beats.add(now - neighbour.heard_beat_s)
        self._watch_progress(neighbour, heartbeat, now)
        neighbour.heartbeat = heartbeat
        neighbour.incarnation = heartbeat.incarnation
        neighbour.heard_beat_s = now
        neighbour.to_echo = True
        self._watch_echo(neighbour, heartbeat, now)
        self.on_heard(peer)

    def _watch_echo(self, neighbour: Neighbour, heartbeat: Heartbeat, now: float) -> None:
        """A peer that does not hear us can do nothing for us, however alive its heartbeats look."""
        if heartbeat.echo_s is not None:
            neighbour.echo_s = now
            neighbour.deaf = False
            round_trip_s = now - heartbeat.echo_s - heartbeat.held_s
            if 0 <= round_trip_s < 60:
                neighbour.round_trip_s = round_trip_s
        elif not neighbour.deaf and now - neighbour.echo_s > self.silence_borne_s(neighbour.peer):
            neighbour.deaf = True
            self._lose(neighbour, f"has not heard us for {now - neighbour.echo_s:.1f} s")
            self._inquire(neighbour)

    def _watch_progress(self, neighbour: Neighbour, heartbeat: Heartbeat, now: float) -> None:
        """A compute that hangs is known by heartbeats which go on and a progress which does not."""
        before = neighbour.heartbeat
        moved = before is None or heartbeat.progress != before.progress
        if moved or not heartbeat.working:
            if moved and before is not None and before.working:
                neighbour.gaps.add(now - neighbour.progress_s)
                self._gaps.add(now - neighbour.progress_s)
            neighbour.progress_s = now
            neighbour.hung = False
        elif not neighbour.hung and now - neighbour.progress_s > self.hang_borne_s(neighbour.peer):
            neighbour.hung = True
            self._lose(neighbour, f"computes nothing for {now - neighbour.progress_s:.1f} s")
            self._unless_back(neighbour, self.limits.hung_s, self._confirm)

    def silence_borne_s(self, peer: PeerId) -> float:
        """How long the peer may stay silent before it is lost."""
        neighbour = self._neighbours.get(peer)
        return neighbour.beats.borne_s() if neighbour else self.limits.silence.unmeasured_s

    def hang_borne_s(self, peer: PeerId) -> float:
        """How long the peer may work on without finishing anything before it is lost."""
        neighbour = self._neighbours.get(peer)
        own = neighbour is not None and neighbour.gaps.measured
        return neighbour.gaps.borne_s() if neighbour and own else self._gaps.borne_s()

    def phi(self, peer: PeerId) -> float:
        """How sure it is that the peer's heartbeats have ended (``Arrivals.phi``)."""
        neighbour = self._neighbours.get(peer)
        return neighbour.beats.phi(self._clock.now() - neighbour.last_heard_s) if neighbour else 0.0

    def tell(self) -> None:
        """Our life has changed: everyone hears it before anything that we send in the new one."""
        for neighbour in self._neighbours.values():
            if neighbour.up:
                self._send_beat(neighbour)

    def ban(self, peer: PeerId) -> None:
        """Lost and gone, in whatever life it comes, until ``pardon``."""
        self._banned.add(peer)
        neighbour = self._neighbour(peer)
        self._lose(neighbour, "banned")
        self._confirm(neighbour)

    def pardon(self, peer: PeerId) -> None:
        """The ban is over: the peer is back when it is heard."""
        self._banned.discard(peer)

    def forget(self, peer: PeerId, life: int) -> None:
        """A clean leave: the peer is gone, and is not dialled again unless it links to us or a later life of
        it is watched."""
        self._left[peer] = life
        self._transport.disconnect(peer)
        neighbour = self._neighbour(peer)
        neighbour.up, neighbour.incarnation = False, None
        self._settle(neighbour)
        self.probes.on_lost(peer)
        if not neighbour.lost:
            neighbour.lost, neighbour.reason = True, "left"
            self._on_lost(peer, "left")
        if not neighbour.gone:
            neighbour.gone = True
            self._on_gone(peer)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()

    def _neighbour(self, peer: PeerId) -> Neighbour:
        if peer not in self._neighbours:
            self._neighbours[peer] = Neighbour(
                peer,
                Arrivals(self.limits.silence),
                Arrivals(self.limits.hang),
                last_heard_s=self._clock.now(),
            )
        return self._neighbours[peer]

    def _tick(self) -> None:
        if self._closed:
            return
        now = self._clock.now()
        self._excuse(now - self._due_s)
        self._due_s = now + self.limits.interval_s
        self._timer = self._clock.call_later(self.limits.interval_s, self._tick)
        self._sequence += 1
        for neighbour in list(self._neighbours.values()):
            if neighbour.up:
                self._send_beat(neighbour)
                self._check_silence(neighbour)

    def _excuse(self, late_s: float) -> None:
        """We stood still ourselves, and others' heartbeats wait to be read: nobody was silent meanwhile."""
        if late_s > self.limits.interval_s:
            for neighbour in self._neighbours.values():
                neighbour.last_heard_s += late_s
                neighbour.progress_s += late_s
                neighbour.echo_s += late_s

    def _check_silence(self, neighbour: Neighbour) -> None:
        if self._closed or not neighbour.up or neighbour.silent:
            return
        silence_s = self._clock.now() - neighbour.last_heard_s
        if silence_s <= self.limits.interval_s:
            return
        left_s = neighbour.beats.borne_s() - silence_s
        if left_s <= 0:
            neighbour.silent = True
            self._lose(neighbour, f"silent for {silence_s:.1f} s")
            self._inquire(neighbour)
        elif left_s < self.limits.interval_s:
            self._clock.call_later(left_s + 1e-3, self._check_silence, neighbour)

    def _send_beat(self, neighbour: Neighbour) -> None:
        now = self._clock.now()
        echo_s, held_s = None, 0.0
        if neighbour.to_echo and neighbour.heartbeat is not None and neighbour.heard_beat_s is not None:
            neighbour.to_echo = False
            echo_s, held_s = neighbour.heartbeat.sent_s, now - neighbour.heard_beat_s
        beat = self._beat(sequence=self._sequence, sent_s=now, echo_s=echo_s, held_s=held_s)
        self._transport.send(neighbour.peer, beat)

    def _right_life(self, neighbour: Neighbour) -> bool:
        if neighbour.peer in self._banned:
            return False
        expected = self._watched.get(neighbour.peer)
        return expected is None or neighbour.incarnation == expected

    def _check(self, neighbour: Neighbour) -> None:
        """Something was heard, or another life is watched: is the peer lost, or back?"""
        if neighbour.incarnation is None:
            return
        if not self._right_life(neighbour):
            banned = neighbour.peer in self._banned
            self._lose(neighbour, "banned" if banned else "has begun another life")
            self._confirm(neighbour)
        elif neighbour.lost and neighbour.answers:
            neighbour.lost = neighbour.gone = neighbour.vouched = False
            self._settle(neighbour)
            self._events.emit("back", other=neighbour.peer)
            self._on_back(neighbour.peer)

    def _unanswered(self, peer: PeerId) -> None:
        """Nobody who was asked reaches the peer either."""
        neighbour = self._neighbours.get(peer)
        if neighbour is None:
            return
        if self._sure():
            self._confirm(neighbour)
        else:
            self._unless_back(neighbour, self.limits.ask_again_s, self._inquire)

    def _lose(self, neighbour: Neighbour, reason: str) -> None:
        if neighbour.lost:
            return
        neighbour.lost, neighbour.reason = True, reason
        neighbour.lost_since_s = self._clock.now()
        self._events.emit("lost", other=neighbour.peer, reason=reason)
        self.probes.on_lost(neighbour.peer)
        self._on_lost(neighbour.peer, reason)

    def _unless_back(self, neighbour: Neighbour, delay_s: float, act: Callable[[Neighbour], None]) -> None:
        """The next thing that befalls a lost peer, if nothing is to befall it yet."""
        if not neighbour.gone and neighbour.confirm is None:
            neighbour.confirm = self._clock.call_later(delay_s, act, neighbour)

    def _inquire(self, neighbour: Neighbour) -> None:
        """Ask others for a lost peer, before it is taken for dead."""
        neighbour.confirm = None
        if neighbour.lost and not neighbour.gone and not self._closed:
            self.probes.ask(neighbour.peer)

    def _vouched(self, peer: PeerId, incarnation: int) -> None:
        """Others reach a peer that we have lost: it refutes its death by the life it is in."""
        neighbour = self._neighbours.get(peer)
        if neighbour is None or not neighbour.lost or neighbour.gone:
            return
        self._events.emit("vouched", other=peer, incarnation=incarnation)
        if self._watched.get(peer) not in (None, incarnation):
            self._confirm(neighbour)
            return
        neighbour.vouched = True
        self._unless_back(neighbour, self.limits.ask_again_s, self._inquire)
        self._on_vouched(peer, self._clock.now() - neighbour.lost_since_s)

    def _confirm(self, neighbour: Neighbour) -> None:
        self._settle(neighbour)
        known = self._neighbours.get(neighbour.peer) is neighbour
        if known and neighbour.lost and not neighbour.gone and not self._closed:
            neighbour.gone, neighbour.vouched = True, False
            self._events.emit("gone", other=neighbour.peer)
            self._on_gone(neighbour.peer)

    def _settle(self, neighbour: Neighbour) -> None:
        self.probes.settle(neighbour.peer)
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
