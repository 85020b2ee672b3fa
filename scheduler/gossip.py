"""The gossip that spreads the facts of a store (scheduler/store.py) among all peers.

New facts are pushed to some neighbours at once, who push what was new to them (infect and die); what that
misses, a periodic exchange of digests with one random neighbour brings (anti-entropy push-pull): Demers et
al. 1987, "Epidemic algorithms for replicated database maintenance". Where nothing is new, an exchange is one
message of a hash for each kind of facts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack

from scheduler.hashtree import Fact
from scheduler.store import Digest, GossipStore


class Timer(Protocol):
    """A pending call that can be taken back."""

    def cancel(self) -> None: ...


class CallLater(Protocol):
    """Calls once after a delay in seconds, on the thread that owns the gossip."""

    def __call__(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer: ...


class GossipConfig(NamedTuple):
    """How eagerly to gossip."""

    fanout: int = 3
    """Neighbours that a fact is pushed on to."""
    flood_neighbours: int = 16
    """Up to so many neighbours, one's own facts go to all of them."""
    forward_delay_s: float = 0.02
    """Others' facts wait up to this long, so that many go in one push, and those that all have need not
    go."""
    period_s: float = 1.0
    """Mean time between two exchanges of digests."""
    max_push_facts: int = 1024
    max_push_bytes: int = 1 << 18
    """A push holds no more (but always one fact)."""
    max_digest_bytes: int = 1 << 16
    max_answer_bytes: int = 1 << 22
    """What a digest holds, and what facts are sent in answer to one, at most; the next ones bring more."""


class Gossip:
    """Spreads the facts of a store among neighbours.

    ``push(peer, facts)`` and ``ask(peer, digest)`` send; what comes in goes to ``on_push`` and
    ``on_digest``. ``sign(payload)`` signs as ``me``, ``verify(owner, payload, signature)`` checks; payloads
    begin with ``context`` (the run's id), so that nothing of another run passes. ``base_version`` must be
    above every version that ``me`` used in an earlier life (the incarnation << 32). ``on_fact`` is called
    once for each fact of another peer that changed the store.
    """

    def __init__(
        self,
        me: str,
        store: GossipStore,
        *,
        context: bytes,
        base_version: int,
        call_later: CallLater,
        rng: random.Random,
        neighbours: Callable[[], Sequence[str]],
        push: Callable[[str, tuple[Fact, ...]], None],
        ask: Callable[[str, Digest], None],
        sign: Callable[[bytes], bytes],
        verify: Callable[[str, bytes, bytes], bool],
        on_fact: Callable[[Fact], None],
        config: GossipConfig = GossipConfig(),  # noqa: B008 - immutable
    ) -> None:
        self.me = me
        self.store = store
        self.counts: Counter[str] = Counter()
        """Pushes and digests sent, facts sent, new, stale (known, old or unwanted) and forged."""
        self._context = context
        self._version = base_version
        self._call_later = call_later
        self._rng = rng
        self._neighbours = neighbours
        self._push = push
        self._ask = ask
        self._sign = sign
        self._verify = verify
        self._on_fact = on_fact
        self._config = config
        self._own: dict[tuple[str, str], Fact] = {}
        self._own_timer: Timer | None = None
        self._foreign: dict[tuple[str, str], tuple[Fact, set[str]]] = {}
        self._foreign_timer: Timer | None = None
        self._tick_timer: Timer | None = None

    def start(self) -> None:
        """Begin to exchange digests; facts are pushed from the beginning."""
        if self._tick_timer is None:
            self._tick_timer = self._call_later(self._rng.uniform(0, self._config.period_s), self._tick)

    def stop(self) -> None:
        """Send nothing more of one's own accord."""
        for timer in (self._own_timer, self._foreign_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._own_timer = self._foreign_timer = self._tick_timer = None

    def publish(self, topic: str, value: bytes) -> Fact:
        """Say something; it goes out with all else that is said in the same turn of the loop.

        Raises ValueError if the store's limits or ``keep`` refuse it: then nobody else would take it either.
        """
        self._version += 1
        fact = Fact(topic, self.me, self._version, value)
        fact = fact._replace(signature=self._sign(self._payload(fact)))
        if not self.store.merge(fact):
            raise ValueError(f"fact {topic!r} of {len(value)} bytes is outside the limits of its topic")
        self._own[fact.key] = fact
        if self._own_timer is None:
            self._own_timer = self._call_later(0.0, self._flush_own)
        return fact

    def on_push(self, sender: str, facts: Iterable[Fact]) -> int:
        """Facts have come from ``sender``; those that are new and truly signed are kept and go on.

        Returns how many were forged, which no honest peer passes on.
        """
        forged = 0
        for fact in facts:
            waiting = self._foreign.get(fact.key)
            if waiting is not None and waiting[0] == fact:
                waiting[1].add(sender)
            if not self.store.wants(fact):
                self.counts["stale"] += 1
            elif not self._verify(fact.owner, self._payload(fact), fact.signature):
                forged += 1
            else:
                self._learn(sender, fact)
        self.counts["forged"] += forged
        return forged

    def on_digest(self, sender: str, digest: Digest) -> None:
        """``sender`` says what it knows: send what it lacks, and say where we differ or what we lack."""
        answer, missing = self.store.answer(digest, self._config.max_digest_bytes)
        budget = self._config.max_answer_bytes
        for i, fact in enumerate(missing):
            budget -= _size(fact)
            if budget < 0 and i:
                missing = missing[:i]
                break
        self._send(sender, missing)
        if any(answer):
            self._say(sender, answer)

    def _learn(self, sender: str, fact: Fact) -> None:
        if fact.owner == self.me:
            # Ours, from an earlier life whose versions ran ahead of this one's: never fall behind them.
            self._version = max(self._version, fact.version)
            current = self.store.get(fact.topic, self.me)
            if current is not None:
                self.publish(fact.topic, current.value)
                return
        self.store.merge(fact)
        self.counts["new"] += 1
        self._foreign[fact.key] = (fact, {sender, fact.owner, self.me})
        if self._foreign_timer is None:
            delay_s = self._rng.uniform(0.5, 1.0) * self._config.forward_delay_s
            self._foreign_timer = self._call_later(delay_s, self._flush_foreign)
        self._on_fact(fact)

    def _flush_own(self) -> None:
        self._own_timer = None
        facts, self._own = tuple(self._own.values()), {}
        neighbours = self._others()
        if len(neighbours) > self._config.flood_neighbours:
            neighbours = self._rng.sample(neighbours, self._config.fanout)
        for peer in neighbours:
            self._send(peer, facts)

    def _flush_foreign(self) -> None:
        self._foreign_timer = None
        waiting, self._foreign = list(self._foreign.values()), {}
        neighbours = self._others()
        for peer in self._rng.sample(neighbours, min(self._config.fanout, len(neighbours))):
            # A fact that was superseded or forgotten while it waited goes no further.
            facts = (f for f, holders in waiting if peer not in holders and self.store.get(*f.key) == f)
            self._send(peer, tuple(facts))

    def _tick(self) -> None:
        self._tick_timer = self._call_later(self._rng.uniform(0.5, 1.5) * self._config.period_s, self._tick)
        neighbours = self._others()
        if neighbours:
            self._say(self._rng.choice(neighbours), self.store.digest())

    def _say(self, peer: str, digest: Digest) -> None:
        self.counts["digests"] += 1
        self._ask(peer, digest)

    def _others(self) -> list[str]:
        return sorted(peer for peer in self._neighbours() if peer != self.me)

    def _send(self, peer: str, facts: Sequence[Fact]) -> None:
        """Pushes of bounded size."""
        start, size = 0, 0
        for i, fact in enumerate(facts):
            size += _size(fact)
            if i > start and (size > self._config.max_push_bytes or i - start >= self._config.max_push_facts):
                self._push_one(peer, facts[start:i])
                start, size = i, _size(fact)
        if start < len(facts):
            self._push_one(peer, facts[start:])

    def _push_one(self, peer: str, facts: Sequence[Fact]) -> None:
        self.counts["pushes"] += 1
        self.counts["facts sent"] += len(facts)
        self._push(peer, tuple(facts))

    def _payload(self, fact: Fact) -> bytes:
        payload: bytes = msgpack.packb(
            ("skipswarm fact", self._context, fact.topic, fact.owner, fact.version, fact.value)
        )
        return payload


def _size(fact: Fact) -> int:
    """About what a fact takes on the wire."""
    return len(fact.topic) + len(fact.owner) + len(fact.value) + 96
