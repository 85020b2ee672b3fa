"""Indirect probes among a few peers whose messages a table of who hears whom lets through."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from peer.probes import MAX_ASKED, PROBE_S, Probes
from swarm.clock import SimClock
from swarm.messages import ProbeAck, ProbeRequest

PEERS = ("a", "b", "c", "x")


class Bench:
    """``a`` asks for ``x``; ``deaf`` holds the pairs between which nothing comes through."""

    def __init__(self, *deaf: tuple[str, str], lost: tuple[tuple[str, str], ...] = ()) -> None:
        self.clock = SimClock()
        self.deaf = {*deaf, *((b, a) for a, b in deaf)}
        self.lost = {*lost}
        """(who, has lost whom)"""
        self.told: list[Any] = []
        self.sent: list[tuple[str, str, Any]] = []
        self.peers = {name: self._probes(name) for name in PEERS}

    def _probes(self, name: str) -> Probes:
        return Probes(
            SimpleNamespace(peer_id=name, send=lambda to, message: self._send(name, to, message)),  # type: ignore[arg-type]
            self.clock,
            random.Random(name),
            helpers=lambda: [p for p in PEERS if p != name and (name, p) not in self.lost],
            incarnation=lambda: 7,
            on_answer=lambda peer, incarnation: self.told.append((peer, incarnation)),
            on_silence=lambda peer: self.told.append((peer, None)),
        )

    def _send(self, name: str, to: str, message: Any) -> None:
        self.sent.append((name, to, message))
        if (name, to) in self.deaf:
            return
        there = self.peers[to]
        handler = {"probe_request": there.on_request, "probe": there.on_probe, "probe_ack": there.on_ack}
        self.clock.call_later(0.01, handler[message.kind], name, message)


def test_a_peer_that_others_reach_answers_through_them_once() -> None:
    bench = Bench(("a", "x"))
    bench.peers["a"].ask("x")
    bench.clock.run_for(PROBE_S / 2)
    assert bench.told == [("x", 7)]
    bench.clock.run_for(2 * PROBE_S)
    assert bench.told == [("x", 7)]


def test_one_helper_that_reaches_it_is_enough() -> None:
    bench = Bench(("a", "x"), ("b", "x"), lost=(("c", "x"),))
    bench.peers["a"].ask("x")
    bench.clock.run_for(2 * PROBE_S)
    assert bench.told == [("x", None)]
    bench = Bench(("a", "x"), lost=(("c", "x"),))
    bench.peers["a"].ask("x")
    bench.clock.run_for(2 * PROBE_S)
    assert bench.told == [("x", 7)]


def test_nobody_is_waited_for_when_all_helpers_have_lost_it_too() -> None:
    bench = Bench(("a", "x"), ("b", "x"), ("c", "x"), lost=(("b", "x"), ("c", "x")))
    bench.peers["a"].ask("x")
    bench.clock.run_for(0.1)
    assert bench.told == [("x", None)]


def test_a_helper_that_loses_it_while_it_asks_says_so() -> None:
    bench = Bench(("a", "x"), ("b", "x"), ("c", "x"))
    bench.peers["a"].ask("x")
    bench.clock.run_for(0.05)
    assert bench.told == []
    for helper in "bc":
        bench.peers[helper].on_lost("x")
    bench.clock.run_for(0.05)
    assert bench.told == [("x", None)]


def test_a_lost_helper_is_not_waited_for() -> None:
    bench = Bench(("a", "b"), ("a", "c"))
    bench.peers["a"].ask("x")
    for helper in "bc":
        bench.peers["a"].on_lost(helper)
    assert bench.told == [("x", None)]


def test_silence_of_all_helpers_ends_in_time() -> None:
    bench = Bench(("b", "x"), ("c", "x"))
    bench.peers["a"].ask("x")
    bench.clock.run_for(PROBE_S - 0.01)
    assert bench.told == []
    bench.clock.run_for(0.02)
    assert bench.told == [("x", None)]


def test_without_anybody_to_ask_the_answer_is_no() -> None:
    bench = Bench(lost=(("a", "b"), ("a", "c")))
    bench.peers["a"].ask("x")
    assert bench.told == [("x", None)]


@pytest.mark.parametrize("sender", ["b", "x"])
def test_an_answer_that_nobody_asked_for_is_none(sender: str) -> None:
    bench = Bench(("b", "x"), ("c", "x"))
    bench.peers["a"].on_ack(sender, ProbeAck(peer="x", nonce=1, incarnation=3))
    bench.peers["a"].ask("x")
    bench.peers["a"].on_ack(sender, ProbeAck(peer="x", nonce=99, incarnation=3))
    bench.peers["a"].on_ack("x", ProbeAck(peer="x", nonce=1, incarnation=3))
    assert bench.told == []


def test_a_flood_of_requests_is_bounded() -> None:
    bench = Bench(("b", "x"))
    for nonce in range(2 * MAX_ASKED):
        bench.peers["b"].on_request("a", ProbeRequest(peer="x", nonce=nonce))
    assert len([m for _, to, m in bench.sent if to == "x"]) == MAX_ASKED
    bench.clock.run_for(2 * PROBE_S)
    bench.peers["b"].on_request("a", ProbeRequest(peer="x", nonce=0))
    assert len([m for _, to, m in bench.sent if to == "x"]) == MAX_ASKED + 1
