"""The simulated network's own promises: virtual time, faults, one trace for one seed."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from swarm.clock import SimClock
from swarm.messages import Message, TensorSpec
from swarm.transport.memory import LinkModel, SimNetwork, SimTransport


class Ping(Message):
    kind = "test_ping"
    number: int


class Load(Message):
    kind = "test_load"
    number: int


class Peer:
    def __init__(self, network: SimNetwork, name: str, transport: SimTransport | None = None) -> None:
        self.name = name
        self.clock = network.clock
        self.transport = transport or network.transport(name)
        self.trace: list[tuple[float, str, Any]] = []
        self.transport.start(self)

    def on_message(self, sender: str, message: Message, tensor: Any) -> None:
        self.trace.append((self.clock.now(), sender, message.number))  # type: ignore[attr-defined]

    def admit(self, sender: str, message: Message, spec: TensorSpec) -> str | None:
        return None

    def on_link_up(self, peer: str) -> None:
        self.trace.append((self.clock.now(), peer, "up"))

    def on_link_lost(self, peer: str, reason: str) -> None:
        self.trace.append((self.clock.now(), peer, "lost"))

    def ping(self, to: str, number: int = 0) -> None:
        self.transport.send(to, Ping(number=number))

    def load(self, to: str, nbytes: int, number: int = 0) -> None:
        spec = TensorSpec(dtype="uint8", shape=(nbytes,))
        self.transport.send(to, Load(number=number, tensor=spec), np.empty(nbytes, np.uint8))

    def got(self) -> list[Any]:
        return [what for _, _, what in self.trace]

    def when(self, what: Any) -> float:
        return next(at for at, _, each in self.trace if each == what)


def network(**link: float) -> SimNetwork:
    return SimNetwork(SimClock(), 1, LinkModel(**{"latency_s": 0.1, **link}))


def linked(net: SimNetwork, count: int = 2) -> list[Peer]:
    peers = [Peer(net, name) for name in "abcdef"[:count]]
    for one in peers:
        for other in peers:
            if one.name < other.name:
                one.transport.connect(other.name)
    net.clock.run_for(1.0)
    for peer in peers:
        assert len(peer.transport.links()) == count - 1
        peer.trace.clear()
    return peers


def test_times_are_the_models() -> None:
    net = network(bandwidth_bytes_per_s=1e6)
    a, b = Peer(net, "a"), Peer(net, "b")
    a.ping("b", 7)
    net.clock.run_for(10)
    assert b.when("up") == pytest.approx(0.1)
    assert a.when("up") == pytest.approx(0.2)
    assert b.when(7) == pytest.approx(0.3)
    start = net.clock.now()
    a.load("b", 1_000_000, 1)
    a.load("b", 1_000_000, 2)
    a.ping("b", 3)
    net.clock.run_for(10)
    assert b.when(3) == pytest.approx(start + 0.1)
    assert b.when(1) == pytest.approx(start + 1.1)
    assert b.when(2) == pytest.approx(start + 2.1)


def test_an_uplink_is_shared_by_what_it_sends() -> None:
    net = network()
    a, b, c = linked(net, 3)
    net.set_uplink("a", 1e6)
    start = net.clock.now()
    a.load("b", 1_000_000, 1)
    a.load("c", 1_000_000, 2)
    b.load("c", 1_000_000, 3)
    net.clock.run_for(10)
    assert b.when(1) == pytest.approx(start + 1.1)
    assert c.when(2) == pytest.approx(start + 2.1)
    assert c.when(3) == pytest.approx(start + 0.1)


def test_loss_delays_and_keeps_the_order() -> None:
    net = network(loss=0.2, jitter_s=0.05)
    a, b = linked(net)
    for number in range(500):
        net.clock.call_later(number * 0.01, a.ping, "b", number)
    net.clock.run_for(300)
    assert b.got() == list(range(500))
    late = sum(at - 1.0 - number * 0.01 > 0.2 for at, _, number in b.trace)
    assert 50 < late < 500
    slow, fast = LinkModel(0.1, 1e9, loss=0.01).bulk_rate(), LinkModel(0.1, 1e9).bulk_rate()
    assert slow == pytest.approx(4 * 1.22 * 1400 / (0.2 * 0.1))
    assert fast == 1e9


def test_a_crash_is_seen_after_one_latency_and_what_was_sent_before_comes() -> None:
    net = network()
    a, b, c = linked(net, 3)
    start = net.clock.now()
    a.ping("b", 1)
    net.crash("a")
    a.ping("b", 2)
    net.clock.run_for(10)
    assert b.got() == [1, "lost"]
    assert b.when("lost") == pytest.approx(start + 0.1)
    assert c.got() == ["lost"]
    assert a.trace == []
    b.ping("a", 3)
    net.clock.run_for(1)
    assert b.got() == [1, "lost", "lost"]
    again = Peer(net, "a", net.restart("a"))
    b.ping("a", 4)
    net.clock.run_for(1)
    assert again.got() == ["up", 4]
    assert a.trace == []


def test_a_restart_within_a_latency_is_a_loss_and_a_new_link() -> None:
    net = network()
    a, b = linked(net)
    again = Peer(net, "a", net.restart("a"))
    again.ping("b", 5)
    net.clock.run_for(10)
    assert b.got() == ["lost", "up", 5]
    assert again.got() == ["up"]
    assert a.trace == []


def test_a_frozen_peer_neither_hears_nor_acts_until_it_thaws() -> None:
    net = network()
    a, b = linked(net)
    ticks: list[float] = []
    net.clock_of("b").call_later(0.5, lambda: ticks.append(net.clock.now()))
    net.freeze("b")
    for number in range(3):
        a.ping("b", number)
    net.clock.run_for(60)
    assert b.trace == []
    assert ticks == []
    assert a.got() == []
    c = Peer(net, "c")
    c.transport.connect("b")
    net.clock.run_for(60)
    assert c.got() == ["lost"]
    net.thaw("b")
    net.clock.run_for(0.0)
    assert [what for what in b.got() if isinstance(what, int)] == [0, 1, 2]
    assert ticks == [net.clock.now()]


def test_timers_die_with_their_peer() -> None:
    net = network()
    linked(net)
    fired: list[str] = []
    old = net.clock_of("a")
    old.call_later(1.0, fired.append, "old")
    cancelled = net.clock_of("b").call_later(1.0, fired.append, "cancelled")
    cancelled.cancel()
    net.restart("a")
    net.clock_of("a").call_later(2.0, fired.append, "new")
    net.clock.run_for(5)
    assert fired == ["new"]


def test_a_short_partition_delays_and_a_long_one_cuts() -> None:
    net = network()
    a, b, c = linked(net, 3)
    net.partition([["a"], ["b", "c"]])
    for number in range(5):
        a.ping("b", number)
    b.ping("c", 9)
    net.clock.run_for(12)
    assert b.trace == []
    assert c.got() == [9]
    net.heal()
    a.ping("b", 5)
    net.clock.run_for(1)
    assert b.got() == [0, 1, 2, 3, 4, 5]
    net.partition([["a", "c"], ["b"]])
    a.ping("b", 6)
    net.clock.run_for(60)
    assert a.got() == ["lost"]
    assert b.got()[6:] == ["lost", "lost"]
    net.heal()
    a.ping("b", 7)
    net.clock.run_for(1)
    assert b.got()[8:] == ["up", 7]


def test_one_way_reachability() -> None:
    net = network()
    a, b = linked(net)
    net.one_way("a", "b")
    a.ping("b", 1)
    b.ping("a", 2)
    net.clock.run_for(10)
    assert b.got() == [1]
    assert a.got() == []
    net.clock.run_for(60)
    assert (a.got(), b.got()) == (["lost"], [1, "lost"])
    a.ping("b", 3)
    net.clock.run_for(60)
    assert a.got() == ["lost", "lost"]


def test_a_reset_is_told_to_both_and_loses_what_is_on_its_way() -> None:
    net = network()
    a, b = linked(net)
    a.ping("b", 1)
    net.reset("a", "b")
    net.clock.run_for(10)
    assert (a.got(), b.got()) == (["lost"], ["lost"])
    b.ping("a", 2)
    net.clock.run_for(10)
    assert a.got() == ["lost", "up", 2]


def scenario(seed: int) -> list[list[tuple[float, str, Any]]]:
    """Twenty peers, random traffic, every kind of fault."""
    net = SimNetwork(SimClock(), seed, LinkModel(0.03, 1e7, loss=0.05, jitter_s=0.02), outage_limit_s=5)
    rng = random.Random(seed)
    names = [f"p{number}" for number in range(20)]
    peers = {name: [Peer(net, name)] for name in names}

    frozen: set[str] = set()

    def thaw(name: str) -> None:
        frozen.discard(name)
        net.thaw(name)

    def act() -> None:
        one, two = rng.sample(names, 2)
        what = rng.random()
        if one in frozen and not 0.9 <= what < 0.94:
            return
        if what < 0.6:
            peers[one][-1].ping(two, rng.randrange(1000))
        elif what < 0.9:
            peers[one][-1].load(two, rng.randrange(100_000), rng.randrange(1000))
        elif what < 0.92:
            net.reset(one, two)
        elif what < 0.94:
            peers[one].append(Peer(net, one, net.restart(one)))
            frozen.discard(one)
        elif what < 0.96:
            net.freeze(one)
            frozen.add(one)
            net.clock.call_later(rng.random() * 3, thaw, one)
        elif what < 0.97:
            net.partition([names[: rng.randrange(20)], names[rng.randrange(20) :]])
        elif what < 0.98:
            net.one_way(one, two)
        elif what < 0.99:
            peers[one][-1].transport.disconnect(two)
            peers[one][-1].trace.append((net.clock.now(), two, "lost"))  # we know
        else:
            net.heal()

    for number in range(3000):
        net.clock.call_later(number * 0.01, act)
    net.clock.run_for(30)
    net.heal()
    net.clock.run_for(60)
    return [peer.trace for name in names for peer in peers[name]]


def test_one_seed_one_trace() -> None:
    assert scenario(4) == scenario(4)
    assert scenario(4) != scenario(5)


@pytest.mark.parametrize("seed", range(20))
def test_ups_and_losses_alternate_whatever_happens(seed: int) -> None:
    for trace in scenario(seed):
        up: set[str] = set()
        for _, peer, what in trace:
            if what == "up":
                assert peer not in up
                up.add(peer)
            elif what == "lost":
                up.discard(peer)
            else:
                assert peer in up, "a message without a link"


def test_it_is_fast() -> None:
    net = network()
    a, _ = linked(net)
    spec = TensorSpec(dtype="uint8", shape=(1000,))
    message, tensor = Load(number=1, tensor=spec), np.empty(1000, np.uint8)
    started = time.process_time()
    for _ in range(20_000):
        a.transport.send("b", message, tensor)
    net.clock.run_for(10)
    assert net.messages_delivered == 20_000
    assert (time.process_time() - started) / 20_000 < 100e-6
