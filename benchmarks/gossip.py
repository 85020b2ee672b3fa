"""How gossip grows from 10 peers to 10,000: rounds until all know a fact, bytes a second, memory.

Every peer runs the daemon's gossip and store over the wire's own bytes, in virtual time: 50 ms from any peer
to its neighbours, of whom it has 20 at most (a connected random graph). Each holds the directory from the
beginning: a view of every peer, with 20 links in it. Signatures are 64 bytes and not checked.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from functools import partial
from statistics import mean
from types import SimpleNamespace
from typing import Any

from benchmarks import report
from peer import spread
from peer.core import CoreOptions
from peer.facts import TOPICS
from scheduler.gossip import Gossip, GossipConfig
from scheduler.hashtree import Fact
from scheduler.store import GossipStore
from scheduler.view import VIEW_TOPIC, PeerView
from swarm import messages as m
from swarm import wire
from swarm.clock import SimClock

LATENCY_S = 0.05
NEIGHBOURS = 20
CONFIG: GossipConfig = CoreOptions(0, 0, "", 0, 0).gossip
DIGESTS_ONLY = CONFIG._replace(fanout=0, flood_neighbours=0)
QUIET_S = 10.0
CHANGES_PER_S = 2.0
CHANGE_S = 10.0
LIMIT_S = 120.0
SIGNATURE = bytes(64)


def name(number: int) -> str:
    """As long as a libp2p peer id."""
    return f"12D3KooW{number:044}"


def view(number: int, peers: int, step: int) -> bytes:
    """What a peer tells of itself, of 20 links at most."""
    others = range(number + 1, number + 1 + min(NEIGHBOURS, peers - 1))
    return PeerView(
        peer=name(number),
        incarnation=1,
        stage=number % 8,
        state="active",
        step=step,
        forward_s=0.123,
        backward_s=0.234,
        weight_s=0.1,
        memory_slots=8,
        up_bytes_per_s=1e7,
        down_bytes_per_s=5e7,
        links={name(other % peers): (0.05, 1e7) for other in others},
    ).to_bytes()


def directory(peers: int) -> GossipStore:
    """Every peer's view."""
    store = GossipStore(TOPICS)
    for number in range(peers):
        store.merge(Fact(VIEW_TOPIC, name(number), 1, view(number, peers, 0), SIGNATURE))
    return store


class Swarm:
    """Peers that all hold ``store`` and have neighbours at random."""

    def __init__(self, peers: int, store: GossipStore, config: GossipConfig, seed: int) -> None:
        self.clock = SimClock()
        self.rng = random.Random(seed)
        self.sent = [0] * peers
        self.received = [0] * peers
        self.learned = 0
        self.number = {name(number): number for number in range(peers)}
        self.neighbours = self._graph(peers)
        self.gossips = [self._gossip(number, store.copy(), config) for number in range(peers)]
        for gossip in self.gossips:
            gossip.start()

    def _graph(self, peers: int) -> list[list[str]]:
        links: list[set[int]] = [set() for _ in range(peers)]
        for number in range(peers):
            others = self.rng.sample(range(peers), min(peers, NEIGHBOURS // 2))
            for other in {(number + 1) % peers, *others} - {number}:
                links[number].add(other)
                links[other].add(number)
        return [[name(other) for other in sorted(some)] for some in links]

    def _gossip(self, number: int, store: GossipStore, config: GossipConfig) -> Gossip:
        context: Any = SimpleNamespace(transport=SimpleNamespace(send=partial(self._send, number)))
        return Gossip(
            name(number),
            store,
            context=b"run",
            base_version=1 << 32,
            call_later=self.clock.call_later,
            rng=random.Random(self.rng.random()),
            neighbours=lambda: self.neighbours[number],
            push=partial(spread.push, context),
            ask=partial(spread.ask, context),
            sign=lambda payload: SIGNATURE,
            verify=lambda owner, payload, signature: True,
            on_fact=self._learn,
            config=config,
        )

    def _learn(self, fact: Fact) -> None:
        self.learned += 1

    def _send(self, number: int, to: str, message: m.Message) -> None:
        data = wire.encode_header(message)
        size = wire.PREAMBLE_BYTES + len(data)
        target = self.number[to]
        self.sent[number] += size
        self.received[target] += size
        self.clock.call_later(LATENCY_S, self._deliver, target, name(number), data)

    def _deliver(self, target: int, sender: str, data: bytes) -> None:
        message = wire.decode_header(data)
        if isinstance(message, m.GossipPush):
            spread.on_push(self.gossips[target], sender, message)
        elif isinstance(message, m.GossipDigest):
            spread.on_digest(self.gossips[target], sender, message)

    def publish(self) -> None:
        """Somebody's view has changed."""
        number = self.rng.randrange(len(self.gossips))
        value = view(number, len(self.gossips), self.rng.randrange(1 << 20))
        self.gossips[number].publish(VIEW_TOPIC, value)

    def told_s(self) -> float:
        """Seconds until all know a new view."""
        began_s, self.learned = self.clock.now(), 0
        self.publish()
        if not self.clock.run_until(lambda: self.learned == len(self.gossips) - 1, LIMIT_S):
            raise AssertionError(f"a fact was not known to all after {LIMIT_S:.0f} s")
        return self.clock.now() - began_s

    def rates(self, duration_s: float) -> tuple[float, float]:
        """Bytes a second, there and back, of a peer in the mean and of the busiest, from now on."""
        before = [*map(sum, zip(self.sent, self.received, strict=True))]
        self.clock.run_for(duration_s)
        after = map(sum, zip(self.sent, self.received, strict=True))
        each = [(now - then) / duration_s for now, then in zip(after, before, strict=True)]
        return mean(each), max(each)


def newcomer(store: GossipStore, peers: int) -> tuple[float, int]:
    """Seconds until a peer that knows nothing has the directory, and the bytes that it took."""
    swarm = Swarm(2, store, DIGESTS_ONLY, 0)
    swarm.gossips[1].store = GossipStore(TOPICS)
    if not swarm.clock.run_until(lambda: len(swarm.gossips[1].store) == peers, LIMIT_S):
        raise AssertionError(f"a newcomer lacked something after {LIMIT_S:.0f} s")
    return swarm.clock.now(), swarm.sent[1] + swarm.received[1]


def measure(peers: int, facts: int) -> dict[str, float]:
    """All figures for one size of swarm; ``facts`` are told one after the other."""
    tracemalloc.start()
    store = directory(peers)
    stored_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    swarm = Swarm(peers, store, CONFIG, seed=peers)
    swarm.clock.run_for(CONFIG.period_s)
    quiet, quiet_most = swarm.rates(QUIET_S)
    told_s = [swarm.told_s() for _ in range(facts)]
    for number in range(int(CHANGES_PER_S * CHANGE_S)):
        swarm.clock.call_later(number / CHANGES_PER_S, swarm.publish)
    change, change_most = swarm.rates(CHANGE_S)
    del swarm
    alone = Swarm(peers, store, DIGESTS_ONLY, seed=peers)
    rounds = [alone.told_s() / DIGESTS_ONLY.period_s for _ in range(max(1, facts // 2))]
    joined_s, joined_bytes = newcomer(store, peers)
    return {
        "log2": math.log2(peers),
        "rounds_by_digests": mean(rounds),
        "rounds_by_digests_most": max(rounds),
        "told_s": mean(told_s),
        "told_s_most": max(told_s),
        "quiet_bytes_per_s": quiet,
        "quiet_bytes_per_s_most": quiet_most,
        "change_bytes_per_s": change,
        "change_bytes_per_s_most": change_most,
        "newcomer_s": joined_s,
        "newcomer_bytes_a_peer": joined_bytes / peers,
        "memory_bytes_a_peer": stored_bytes / peers,
    }


def main() -> None:
    options = report.options(__doc__ or "")
    figures: dict[str, float] = {}
    for peers, facts in ((10, 10), (100, 10), (1000, 4)) if options.quick else SIZES:
        found = measure(peers, facts)
        figures |= {f"n{peers}_{key}": value for key, value in found.items()}
        print(f"{peers} peers: all told after {found['told_s']:.1f} s", flush=True)
    report.write("gossip", figures, options.json)


SIZES = ((10, 20), (100, 20), (1000, 10), (10_000, 4))

if __name__ == "__main__":
    main()
