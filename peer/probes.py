"""Indirect probes: before a silent peer is taken for dead, two others are asked whether it answers them.

SWIM (Das, Gupta, Motivala, DSN 2002, section 3.1), with the negative answers of Lifeguard (Dadgar, Phillips,
Currey, 2018): a helper that has lost the peer too says so at once, so that a real death is not waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.clock import Clock, Timer
from swarm.messages import Probe, ProbeAck, ProbeRequest
from swarm.transport.base import PeerId, Transport

HELPERS = 2
PROBE_S = 1.0
"""An indirect answer that takes longer is none: it is two round trips between peers that are linked."""
MAX_ASKED = 256
"""Probes for others that are under way here; a bound against a flood."""


@dataclass
class Inquiry:
    """Our question for one peer."""

    nonce: int
    waiting: set[PeerId]
    timer: Timer


@dataclass
class Probes:
    """Asks, and answers for others. ``on_answer(peer, life)`` or ``on_silence(peer)`` ends a question."""

    transport: Transport
    clock: Clock
    rng: random.Random
    helpers: Callable[[], list[PeerId]]
    """Peers that are linked and alive."""
    incarnation: Callable[[], int]
    """Our own."""
    on_answer: Callable[[PeerId, int], None]
    on_silence: Callable[[PeerId], None]
    _inquiries: dict[PeerId, Inquiry] = field(default_factory=dict)
    _asked: dict[PeerId, set[tuple[PeerId, int]]] = field(default_factory=dict)
    """The peer that is probed -> (who asked us, its nonce)."""
    _nonce: int = 0

    def ask(self, peer: PeerId) -> None:
        """Find out through others whether ``peer`` lives, unless that is being done."""
        if peer in self._inquiries:
            return
        candidates = [helper for helper in self.helpers() if helper != peer]
        chosen = self.rng.sample(candidates, min(HELPERS, len(candidates)))
        if not chosen:
            self.on_silence(peer)
            return
        self._nonce += 1
        timer = self.clock.call_later(PROBE_S, self._over, peer)
        self._inquiries[peer] = Inquiry(self._nonce, set(chosen), timer)
        for helper in chosen:
            self.transport.send(helper, ProbeRequest(peer=peer, nonce=self._nonce))

    def settle(self, peer: PeerId) -> None:
        """The question has answered itself."""
        inquiry = self._inquiries.pop(peer, None)
        if inquiry is not None:
            inquiry.timer.cancel()

    def _over(self, peer: PeerId) -> None:
        if peer in self._inquiries:
            self.settle(peer)
            self.on_silence(peer)

    # -- for others ----------------------------------------------------------------------------------------

    def on_request(self, sender: PeerId, message: ProbeRequest) -> None:
        """Somebody has lost ``message.peer``: ask it, or say that we have lost it as well."""
        peer = message.peer
        if peer == self.transport.peer_id:
            self._tell(sender, peer, message.nonce, self.incarnation())
        elif peer not in self.helpers():
            self._tell(sender, peer, message.nonce, None)
        elif sum(map(len, self._asked.values())) < MAX_ASKED:
            self._asked.setdefault(peer, set()).add((sender, message.nonce))
            self.transport.send(peer, Probe(nonce=message.nonce, asker=sender))
            self.clock.call_later(PROBE_S, self._forget, peer, sender, message.nonce)

    def _forget(self, peer: PeerId, asker: PeerId, nonce: int) -> None:
        asked = self._asked.get(peer, set())
        asked.discard((asker, nonce))
        if not asked:
            self._asked.pop(peer, None)

    def _tell(self, to: PeerId, peer: PeerId, nonce: int, incarnation: int | None) -> None:
        self.transport.send(to, ProbeAck(peer=peer, nonce=nonce, incarnation=incarnation))

    def on_probe(self, sender: PeerId, message: Probe) -> None:
        """We are asked for, through ``sender``."""
        ack = ProbeAck(
            peer=self.transport.peer_id,
            nonce=message.nonce,
            incarnation=self.incarnation(),
            asker=message.asker,
        )
        self.transport.send(sender, ack)

    def on_ack(self, sender: PeerId, message: ProbeAck) -> None:
        """An answer to our question, or one to pass on."""
        peer = message.peer
        if message.asker is not None and message.asker != self.transport.peer_id:
            if sender == peer and (message.asker, message.nonce) in self._asked.get(peer, ()):
                self._forget(peer, message.asker, message.nonce)
                self._tell(message.asker, peer, message.nonce, message.incarnation)
            return
        inquiry = self._inquiries.get(peer)
        if inquiry is None or message.nonce != inquiry.nonce or sender not in inquiry.waiting:
            return
        inquiry.waiting.discard(sender)
        if message.incarnation is not None:
            self.settle(peer)
            self.on_answer(peer, message.incarnation)
        elif not inquiry.waiting:
            self.settle(peer)
            self.on_silence(peer)

    def on_lost(self, peer: PeerId) -> None:
        """We have lost ``peer``: whoever asked us for it need not wait, nor do we wait for its answers."""
        for asker, nonce in self._asked.pop(peer, set()):
            self._tell(asker, peer, nonce, None)
        for other, inquiry in list(self._inquiries.items()):
            if peer in inquiry.waiting:
                inquiry.waiting.discard(peer)
                if not inquiry.waiting:
                    self.settle(other)
                    self.on_silence(other)
