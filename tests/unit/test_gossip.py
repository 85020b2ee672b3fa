"""Gossip: merging is a join, all peers come to know, and nothing hostile gets in."""

from __future__ import annotations

import hashlib
import hmac
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.gossip import Gossip, GossipConfig
from scheduler.hashtree import LEAF_FACTS, Fact, Held, Node, build, digest_of, put, under, without
from scheduler.store import Digest, GossipStore, TopicLimit
from swarm.clock import SimClock

LIMITS = {"view": TopicLimit(), "commit": TopicLimit(facts=3, value_bytes=8)}

facts = st.builds(
    Fact,
    topic=st.sampled_from(["view", "commit/1", "commit/2", "commit/3", "commit/4", "commit/5", "other"]),
    owner=st.sampled_from(["a", "b"]),
    version=st.integers(-1, 6),
    value=st.binary(max_size=9),
    signature=st.sampled_from([b"", b"s"]),
)
fact_lists = st.lists(facts, max_size=25)


def store_of(*lists: Sequence[Fact]) -> GossipStore:
    store = GossipStore(LIMITS, keep=lambda fact: fact.value != b"refused")
    for some in lists:
        for fact in some:
            store.merge(fact)
    return store


@given(fact_lists, fact_lists)
def test_merging_is_commutative(a: list[Fact], b: list[Fact]) -> None:
    assert store_of(a, b).facts() == store_of(b, a).facts()


@given(fact_lists, fact_lists, fact_lists)
def test_merging_is_associative(a: list[Fact], b: list[Fact], c: list[Fact]) -> None:
    left = store_of(store_of(a, b).facts(), c)
    right = store_of(a, store_of(b, c).facts())
    assert left.facts() == right.facts()


@given(fact_lists, st.randoms(use_true_random=False))
def test_merging_is_idempotent_and_knows_no_order(a: list[Fact], rng: random.Random) -> None:
    once = store_of(a)
    shuffled = a + rng.sample(a, len(a))
    rng.shuffle(shuffled)
    assert store_of(shuffled).facts() == once.facts()
    assert not any(once.merge(fact) for fact in once.facts())


@given(fact_lists)
def test_wants_says_what_merge_does(a: list[Fact]) -> None:
    store = GossipStore(LIMITS)
    for fact in a:
        before, wanted = store.facts(), store.wants(fact)
        assert store.merge(fact) == wanted == (store.facts() != before or (wanted and _too_old(store, fact)))


def _too_old(store: GossipStore, fact: Fact) -> bool:
    return store.get(fact.topic, fact.owner) is None


def exchange(mine: GossipStore, yours: GossipStore, max_bytes: int = 1 << 16) -> list[Digest]:
    """Carry digests and facts between the two until nobody has an answer; the digests that were sent."""
    said = [mine.digest()]
    listener, other = yours, mine
    while any(said[-1]):
        answer, missing = listener.answer(said[-1], max_bytes)
        for fact in missing:
            other.merge(fact)
        said.append(answer)
        listener, other = other, listener
    return said[:-1]


@given(fact_lists, fact_lists)
def test_an_exchange_of_digests_makes_two_stores_equal(a: list[Fact], b: list[Fact]) -> None:
    """Whoever begins, and even where an owner gave one version to two facts."""
    mine, yours = store_of(a), store_of(b)
    both = store_of(a, b).facts()
    exchange(mine, yours)
    assert mine.facts() == yours.facts() == both
    assert exchange(mine, yours) == [mine.digest()]


many = st.lists(
    st.builds(
        Fact,
        topic=st.just("view"),
        owner=st.integers(0, 400).map(str),
        version=st.integers(0, 2),
        value=st.sampled_from([b"", b"x"]),
    ),
    max_size=300,
)


@settings(max_examples=50, deadline=None)
@given(many, many, many)
def test_large_stores_that_differ_find_out_where(a: list[Fact], b: list[Fact], c: list[Fact]) -> None:
    mine, yours = store_of(a, b), store_of(a, c)
    both = store_of(a, b, c).facts()
    said = exchange(mine, yours)
    assert mine.facts() == yours.facts() == both
    assert len(said) <= 6


@given(many, st.randoms(use_true_random=False))
def test_a_tree_is_a_function_of_its_facts(facts: list[Fact], rng: random.Random) -> None:
    """However they came, and whatever was there in between."""
    held = {fact.key: Held.of(fact) for fact in facts}
    tree: Node | None = None
    for fact in rng.sample(facts, len(facts)):
        tree = put(tree, Held.of(fact))
    for entry in held.values():
        tree = put(tree, entry)
    gone = [entry for entry in held.values() if rng.random() < 0.7]
    for entry in gone:
        tree = without(tree, entry)
    left = build(entry for entry in held.values() if entry not in gone)
    assert digest_of(tree) == digest_of(left)
    assert shape(tree) == shape(left)
    for prefix in ("", "a", "3", "3f"):
        there = [entry for entry in held.values() if entry not in gone and entry.place.startswith(prefix)]
        assert digest_of(under(tree, prefix)) == digest_of(build(there, len(prefix)))


def shape(node: Node | None) -> object:
    if node is None:
        return None
    assert not node.branches or node.count > LEAF_FACTS
    return node.held, [shape(branch) for branch in node.branches]


def full(size: int, *more: Fact) -> GossipStore:
    return store_of([Fact("view", f"peer{i}", 1, b"x" * 100) for i in range(size)], more)


@pytest.mark.parametrize("size", [0, 10, 1_000, 5_000])
def test_a_digest_does_not_grow_with_the_store(size: int) -> None:
    one = full(size)
    assert exchange(one, full(size)) == [one.digest()]
    assert len(one.digest().nodes) == len(LIMITS)
    news = Fact("view", "peer0", 2, b"news")
    said = exchange(full(size), full(size, news))
    assert sum(len(digest.nodes) for digest in said) <= len(LIMITS) + 16 * 4
    assert sum(len(lines) for digest in said for _, lines in digest.held) <= LEAF_FACTS


def test_one_exchange_is_bounded_and_the_next_ones_go_on() -> None:
    """Two halves that knew nothing of each other."""
    mine = store_of([Fact("view", f"mine{i}", 1, b"") for i in range(1000)])
    yours = store_of([Fact("view", f"yours{i}", 1, b"") for i in range(1000)])
    exchanges = 0
    while len(mine) < 2000 or len(yours) < 2000:
        said = exchange(mine, yours, max_bytes=4000)
        assert all(len(str(digest)) < 5 * 4000 for digest in said)
        exchanges += 1
        assert exchanges < 100
    assert exchanges > 1


@pytest.mark.parametrize(
    "digest",
    [
        Digest(
            nodes=(("view", b"x"), ("view/g", b"x"), ("other/", b"x"), ("view/" + "0" * 65, b"x"), ("", b"x"))
        ),
        Digest(held=(("view", ()), ("/", ()), ("other/3", (("other/3", "a", 1, b""),)))),
        Digest(wanted=(("view", "stranger"), ("other", "a"))),
    ],
)
def test_what_no_store_would_say_is_passed_over(digest: Digest) -> None:
    assert full(100).answer(digest, 1 << 16) == (Digest(), ())


def test_a_place_that_is_asked_for_often_is_told_once() -> None:
    store = full(1_000)
    digest = Digest(nodes=(("view/", b""), ("view/", b"x"), ("view/", b"")), wanted=(("view", "peer1"),) * 9)
    _, facts = store.answer(digest, 1 << 16)
    assert len(facts) == 1_000


def test_the_newest_facts_of_an_owner_stay() -> None:
    store = GossipStore(LIMITS)
    for version in range(6):
        store.merge(Fact(f"commit/{version}", "a", version, b""))
    assert [fact.version for fact in store.of_kind("commit")] == [3, 4, 5]
    assert not store.wants(Fact("commit/9", "a", 2, b""))
    assert store.wants(Fact("commit/9", "b", 2, b""))


def test_what_is_forgotten_stays_away_if_keep_refuses_it() -> None:
    oldest = 0
    store = GossipStore(
        {"commit": TopicLimit(facts=100)}, keep=lambda f: int(f.topic.split("/")[1]) >= oldest
    )
    said = [Fact(f"commit/{step}", "a", step, b"x") for step in range(5)]
    for fact in said:
        store.merge(fact)
    oldest = 3
    assert store.prune() == 3
    assert [fact.topic for fact in store.facts()] == ["commit/3", "commit/4"]
    assert not any(store.merge(fact) for fact in said)
    lines = tuple((*fact.key, fact.version, Held.of(fact).mark) for fact in said)
    assert store.answer(Digest(held=(("commit/", lines),)), 1 << 16) == (Digest(), ())
    assert store.forget(lambda fact: fact.version == 4) == 1
    assert len(store) == 1


def signature(owner: str, payload: bytes) -> bytes:
    """Stands for a signature with the owner's key: the tests' adversaries do not call it for others."""
    return hmac.digest(owner.encode(), payload, hashlib.sha256)


class Swarm:
    """Peers on a simulated clock; one delay for every message, and no message across a partition."""

    def __init__(
        self,
        size: int,
        *,
        degree: int | None = None,
        seed: int = 0,
        latency_s: float = 0.05,
        config: GossipConfig = GossipConfig(),  # noqa: B008 - immutable
        limits: dict[str, TopicLimit] | None = None,
    ) -> None:
        self.clock = SimClock()
        self.rng = random.Random(seed)
        self.latency_s = latency_s
        self.names = [f"n{i:03d}" for i in range(size)]
        self.side = dict.fromkeys(self.names, 0)
        self.messages = 0
        self.lost_share = 0.0
        self.learned: dict[str, list[tuple[float, Fact]]] = {name: [] for name in self.names}
        self.links = self._graph(degree)
        self.peers = {name: self._peer(name, config, limits or {"view": TopicLimit()}) for name in self.names}

    def _graph(self, degree: int | None) -> dict[str, list[str]]:
        if degree is None:
            return {name: [other for other in self.names if other != name] for name in self.names}
        links: dict[str, set[str]] = {name: set() for name in self.names}
        for i, name in enumerate(self.names):
            others = {self.names[i - 1], *self.rng.sample(self.names, degree // 2)} - {name}
            for other in others:
                links[name].add(other)
                links[other].add(name)
        return {name: sorted(others) for name, others in links.items()}

    def _peer(self, name: str, config: GossipConfig, limits: dict[str, TopicLimit]) -> Gossip:
        def later(to: str, call: Callable[[Gossip], object]) -> None:
            self.messages += 1
            if self.rng.random() < self.lost_share or self.side[to] != self.side[name]:
                return
            self.clock.call_later(self.latency_s, lambda: call(self.peers[to]))

        def push(to: str, some: tuple[Fact, ...]) -> None:
            later(to, lambda peer: peer.on_push(name, some))

        def ask(to: str, digest: Digest) -> None:
            later(to, lambda peer: peer.on_digest(name, digest))

        return Gossip(
            name,
            GossipStore(limits),
            context=b"run",
            base_version=1 << 32,
            call_later=self.clock.call_later,
            rng=random.Random(self.rng.random()),
            neighbours=lambda: self.links[name],
            push=push,
            ask=ask,
            sign=lambda payload: signature(name, payload),
            verify=lambda owner, payload, signed: signature(owner, payload) == signed,
            on_fact=lambda fact: self.learned[name].append((self.clock.now(), fact)),
            config=config,
        )

    def start(self) -> None:
        for peer in self.peers.values():
            peer.start()

    def knowing(self, fact: Fact) -> int:
        return sum(peer.store.get(*fact.key) == fact for peer in self.peers.values())


@pytest.mark.parametrize("degree", [None, 10, 20])
@pytest.mark.parametrize("seed", range(3))
def test_all_of_64_know_within_a_few_rounds(degree: int | None, seed: int) -> None:
    size = 64
    swarm = Swarm(size, degree=degree, seed=seed)
    swarm.start()
    swarm.clock.run_for(2.0)
    config = GossipConfig()
    said = [swarm.peers[name].publish("view", name.encode()) for name in swarm.names[:5]]
    rounds = math.log2(size) + 2
    hop_s = swarm.latency_s + config.forward_delay_s
    # Pushing reaches most of them in a few hops, and digests the rest.
    swarm.clock.run_for(rounds * hop_s)
    assert all(swarm.knowing(fact) > 0.8 * size for fact in said)
    assert swarm.clock.run_until(
        lambda: all(swarm.knowing(f) == size for f in said), rounds * config.period_s
    )
    for name in swarm.names:
        mine = [fact for _, fact in swarm.learned[name]]
        assert len(mine) == len(set(mine)), "told twice"


@pytest.mark.parametrize("seed", range(4))
def test_digests_bring_what_is_missed_when_a_third_of_all_messages_is_lost(seed: int) -> None:
    swarm = Swarm(64, degree=10, seed=seed)
    swarm.lost_share = 0.33
    swarm.start()
    fact = swarm.peers["n007"].publish("view", b"hello")
    assert swarm.clock.run_until(lambda: swarm.knowing(fact) == 64, 20.0)


def test_eight_peers_know_after_one_latency() -> None:
    swarm = Swarm(8)
    fact = swarm.peers["n000"].publish("view", b"x")
    swarm.clock.run_for(swarm.latency_s)
    assert swarm.knowing(fact) == 8


def test_what_is_said_in_one_turn_goes_in_one_push() -> None:
    swarm = Swarm(8, limits={"commit": TopicLimit(facts=100)})
    for i in range(50):
        swarm.peers["n000"].publish(f"commit/{i}", b"x")
    swarm.clock.run_for(0.0)
    assert swarm.messages == 7
    swarm.clock.run_for(1.0)
    # And what is passed on goes together as well: at most fanout pushes from each of the others.
    assert swarm.messages <= 7 + 7 * GossipConfig().fanout
    assert all(len(peer.store) == 50 for peer in swarm.peers.values())


def test_nobody_is_told_what_it_said_itself() -> None:
    swarm = Swarm(12, seed=5)
    pushed: list[tuple[str, str, Fact]] = []
    for name, peer in swarm.peers.items():
        send = peer._push
        peer._push = lambda to, some, name=name, send=send: (  # type: ignore[misc]
            pushed.extend((name, to, fact) for fact in some),
            send(to, some),
        )
    for name in swarm.names:
        swarm.peers[name].publish("view", name.encode())
    swarm.clock.run_for(5.0)
    assert len(pushed) > 12 * 11
    assert all(to != fact.owner for _, to, fact in pushed)
    assert not any((to, name, fact) in pushed for name, to, fact in pushed if name == fact.owner)


def test_who_is_asked_asks_back_for_what_it_lacks() -> None:
    swarm = Swarm(2)
    swarm.side["n001"] = 1
    mine = swarm.peers["n000"].publish("view", b"mine")
    yours = swarm.peers["n001"].publish("view", b"yours")
    swarm.clock.run_for(1.0)
    swarm.side["n001"] = 0
    # One exchange that n000 begins brings each the other's.
    swarm.peers["n001"].on_digest("n000", swarm.peers["n000"].store.digest())
    swarm.clock.run_for(1.0)
    assert swarm.knowing(mine) == swarm.knowing(yours) == 2
    # And there it ends: who is told the same again says nothing.
    sent = swarm.messages
    swarm.peers["n001"].on_digest("n000", swarm.peers["n000"].store.digest())
    swarm.clock.run_for(1.0)
    assert swarm.messages == sent


def test_a_fact_dies_when_all_know() -> None:
    swarm = Swarm(64, degree=20)
    swarm.peers["n000"].publish("view", b"x")
    swarm.clock.run_for(60.0)
    assert swarm.messages <= 64 * GossipConfig().fanout
    assert not swarm.clock.step(), "something still waits, though nobody was started"


def test_a_partition_heals() -> None:
    swarm = Swarm(64, degree=20, seed=2)
    swarm.start()
    for name in swarm.names[::2]:
        swarm.side[name] = 1
    said = [swarm.peers[name].publish("view", name.encode()) for name in swarm.names]
    swarm.clock.run_for(20.0)
    assert all(swarm.knowing(fact) == 32 for fact in said)
    swarm.side = dict.fromkeys(swarm.names, 0)
    limit_s = 2 * (math.log2(64) + 2) * GossipConfig().period_s
    assert swarm.clock.run_until(lambda: all(swarm.knowing(fact) == 64 for fact in said), limit_s)
    stores = [peer.store.facts() for peer in swarm.peers.values()]
    assert all(store == stores[0] for store in stores)


def test_the_newest_version_wins_everywhere() -> None:
    swarm = Swarm(16, degree=6, seed=1)
    swarm.start()
    for i in range(20):
        last = swarm.peers["n003"].publish("view", b"%d" % i)
        swarm.clock.run_for(0.03)
    assert swarm.clock.run_until(lambda: swarm.knowing(last) == 16, 10.0)
    assert last.version == (1 << 32) + 20


def test_a_stopped_peer_says_nothing_more() -> None:
    swarm = Swarm(4)
    swarm.start()
    for peer in swarm.peers.values():
        peer.publish("view", b"x")
        peer.stop()
    swarm.clock.run_for(30.0)
    assert swarm.messages == 0


class TestHostile:
    def pair(self) -> tuple[Swarm, Gossip]:
        swarm = Swarm(3)
        return swarm, swarm.peers["n000"]

    def signed(self, owner: str, topic: str, version: int, value: bytes, context: bytes = b"run") -> Fact:
        maker = Swarm(1).peers["n000"]
        maker._context = context
        fact = Fact(topic, owner, version, value)
        return fact._replace(signature=signature(owner, maker._payload(fact)))

    def test_a_true_fact_passes(self) -> None:
        swarm, peer = self.pair()
        fact = self.signed("n001", "view", 5, b"x")
        assert peer.on_push("n002", [fact]) == 0
        assert [known for _, known in swarm.learned["n000"]] == [fact]

    @pytest.mark.parametrize(
        "change",
        [{"owner": "n002"}, {"version": 6}, {"value": b"y"}, {"signature": b""}, {"topic": "view/2"}],
    )
    def test_a_changed_fact_is_forged(self, change: dict[str, object]) -> None:
        swarm, peer = self.pair()
        fact = self.signed("n001", "view", 5, b"x")._replace(**change)
        assert peer.on_push("n002", [fact]) == 1
        assert peer.counts["forged"] == 1
        assert not swarm.learned["n000"]
        swarm.clock.run_for(1.0)
        assert swarm.messages == 0

    def test_a_fact_of_another_run_is_forged(self) -> None:
        _, peer = self.pair()
        assert peer.on_push("n002", [self.signed("n001", "view", 5, b"x", context=b"another run")]) == 1

    def test_old_facts_are_not_even_verified(self) -> None:
        _, peer = self.pair()
        peer.on_push("n001", [self.signed("n001", "view", 5, b"x")])
        checked: list[bytes] = []
        peer._verify = lambda owner, payload, signed: bool(checked.append(payload))  # type: ignore[func-returns-value]
        unwanted = [
            self.signed("n001", "view", 5, b"x"),
            self.signed("n001", "view", 4, b"z"),
            self.signed("n001", "unknown", 9, b"x"),
            self.signed("n001", "view", 9, b"x" * (1 << 17)),
            self.signed("n001", "view", 1 << 62, b"x"),
        ]
        assert peer.on_push("n001", unwanted) == 0
        assert checked == []
        assert peer.counts["stale"] == len(unwanted)

    def test_one_owner_cannot_fill_the_store(self) -> None:
        swarm = Swarm(2, limits=LIMITS)
        peer = swarm.peers["n000"]
        peer.on_push("n001", [self.signed("n001", f"commit/{i}", i, b"x") for i in range(1000)])
        assert len(peer.store) == 3

    def test_my_own_fact_of_a_life_that_ran_ahead(self) -> None:
        _, peer = self.pair()
        now = peer.publish("view", b"now")
        before = self.signed("n000", "view", now.version + 1000, b"before")
        peer.on_push("n001", [before])
        again = peer.store.get("view", "n000")
        assert again is not None
        assert again.value == b"now"
        assert again.version > before.version
        assert peer.publish("view", b"later").version > again.version

    def test_publishing_what_nobody_would_take(self) -> None:
        _, peer = self.pair()
        with pytest.raises(ValueError, match="outside the limits"):
            peer.publish("unknown", b"")


def test_pushes_and_answers_are_of_bounded_size() -> None:
    config = GossipConfig(max_push_facts=10, max_push_bytes=5000, max_answer_bytes=20_000)
    swarm = Swarm(2, config=config, limits={"big": TopicLimit(facts=1000, value_bytes=6000)})
    sent: list[tuple[Fact, ...]] = []
    peer = swarm.peers["n000"]
    peer._push = lambda to, some: sent.append(some)
    for i in range(40):
        peer.publish(f"big/{i}", b"x" * (6000 if i == 7 else 100))
    swarm.clock.run_for(0.0)
    assert sum(len(some) for some in sent) == 40
    assert all(len(some) <= 10 for some in sent)
    assert all(len(some) == 1 or sum(len(fact.value) for fact in some) <= 5000 for some in sent)
    sent.clear()
    peer.on_digest("n001", Digest(nodes=(("big/", b""),)))
    assert 0 < sum(len(fact.value) + 100 for some in sent for fact in some) <= 20_000


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 24), st.integers(0, 1000), st.integers(2, 8))
def test_any_swarm_comes_to_agree(size: int, seed: int, degree: int) -> None:
    swarm = Swarm(size, degree=min(degree, size - 1), seed=seed)
    swarm.start()
    for name in swarm.names:
        swarm.peers[name].publish("view", name.encode())
    assert swarm.clock.run_until(lambda: all(len(p.store) == size for p in swarm.peers.values()), 60.0)
