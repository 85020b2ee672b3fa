"""One decision a step: whatever is lost, doubled or late, and whoever proposes at the same time."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from peer.agreement import Agreement
from peer.context import Context
from swarm.clock import SimClock
from swarm.events import NoEvents
from swarm.messages import (
    Accepted,
    Decided,
    Member,
    Prepare,
    Promise,
    Propose,
    Rejected,
    StepClose,
    StepQuery,
)

NAMES = ("a", "b", "c", "d", "e")
MEMBERS = tuple(Member(peer=name, stage=0) for name in NAMES)


class Place(SimpleNamespace):
    """What an agreement needs of its context."""

    majority_heard = Context.majority_heard


class Toy:
    """Five real agreements on a bad network; each would close the step in its own way."""

    def __init__(self, seed: int, *, loss: float = 0.0, doubled: float = 0.0, delay_s: float = 0.05) -> None:
        self.clock = SimClock()
        self.rng = random.Random(seed)
        self.loss, self.doubled, self.delay_s = loss, doubled, delay_s
        self.down: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        self.decided: dict[str, StepClose] = {}
        self.objectors: set[str] = set()
        """They vote for no close but their own."""
        self.proposed: set[str] = set()
        self.strikes: dict[str, int] = defaultdict(int)
        self.agreements: dict[str, Agreement] = {}
        self.contexts: dict[str, Any] = {}
        for number, name in enumerate(NAMES):
            self.contexts[name] = context = Place(
                me=name,
                step=0,
                epoch=0,
                members=MEMBERS,
                clock=self.clock,
                active=True,
                transport=SimpleNamespace(send=lambda to, m, me=name: self.send(me, to, m)),
                liveness=SimpleNamespace(
                    alive=lambda peer: peer not in self.down, gone=lambda peer: peer in self.down
                ),
                events=NoEvents(),
                strike=lambda peer, reason: self.strikes.__setitem__(peer, self.strikes[peer] + 1),
            )
            own = StepClose(step=0, counted=(), members=MEMBERS[: 3 + number % 3])
            self.agreements[name] = Agreement(
                context,  # type: ignore[arg-type]
                ready=lambda own=own: own,  # type: ignore[misc]
                objection=lambda close, me=name, own=own: (  # type: ignore[misc]
                    "not mine" if me in self.objectors and close != own else None
                ),
                on_decided=lambda close, me=name: self.decided.__setitem__(me, close),  # type: ignore[misc]
            )
        for agreement in self.agreements.values():
            agreement.begin()

    def send(self, sender: str, to: str, message: Any) -> None:
        if isinstance(message, Propose):
            self.proposed.add(sender)
        if sender in self.down or (sender != to and self.rng.random() < self.loss):
            return
        for _ in range(2 if self.rng.random() < self.doubled else 1):
            self.clock.call_later(self.rng.uniform(0, self.delay_s), self.deliver, sender, to, message)

    def deliver(self, sender: str, to: str, message: Any) -> None:
        if to in self.down or frozenset((sender, to)) in self.cut:
            return
        agreement = self.agreements[to]
        handlers = {
            Prepare: agreement.on_prepare,
            Promise: agreement.on_promise,
            Propose: agreement.on_propose,
            Accepted: agreement.on_accepted,
            Rejected: agreement.on_rejected,
            Decided: agreement.on_decided,
            StepQuery: agreement.on_query,
        }
        handlers[type(message)](sender, message)

    def crash(self, name: str) -> None:
        self.down.add(name)
        self.agreements[name].close()

    def partition(self, *parts: tuple[str, ...]) -> None:
        side = {name: number for number, part in enumerate(parts) for name in part}
        self.cut = {frozenset((a, b)) for a in NAMES for b in NAMES if side[a] != side[b]}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2, 0.5]),
    doubled=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([0.01, 1.0, 6.0]),
    crashes=st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 15)), max_size=2),
    objectors=st.sets(st.sampled_from(NAMES)),
)
def test_never_two_decisions(
    seed: int,
    loss: float,
    doubled: float,
    delay_s: float,
    crashes: list[tuple[str, float]],
    objectors: set[str],
) -> None:
    toy = Toy(seed, loss=loss, doubled=doubled, delay_s=delay_s)
    toy.objectors = objectors
    for name, at_s in crashes:
        toy.clock.call_later(at_s, toy.crash, name)
    toy.clock.run_for(60)
    assert len({close.model_dump_json() for close in toy.decided.values()}) <= 1


@given(seed=st.integers(0, 2**32), dead=st.sets(st.sampled_from(NAMES), max_size=2))
@settings(max_examples=50, deadline=None)
def test_the_living_majority_decides(seed: int, dead: set[str]) -> None:
    toy = Toy(seed)
    for name in dead:
        toy.crash(name)
    living = set(NAMES) - dead
    assert toy.clock.run_until(lambda: living <= set(toy.decided), 60)
    assert not toy.strikes


def test_a_minority_never_decides_and_takes_the_majoritys_word_afterwards() -> None:
    toy = Toy(1)
    toy.partition(("a", "b"), ("c", "d", "e"))
    toy.clock.run_for(60)
    assert set(toy.decided) <= {"c", "d", "e"}
    toy.partition(NAMES)
    assert toy.clock.run_until(lambda: set(toy.decided) == set(NAMES), 60)
    assert len({close.model_dump_json() for close in toy.decided.values()}) == 1


def test_a_laggard_asks_and_hears() -> None:
    toy = Toy(2)
    toy.partition(("a",), ("b", "c", "d", "e"))
    assert toy.clock.run_until(lambda: len(toy.decided) == 4, 60)
    toy.partition(NAMES)
    toy.send("a", "b", StepQuery(step=0))
    assert toy.clock.run_until(lambda: "a" in toy.decided, 1)


def test_a_ballot_in_anothers_name_is_a_strike_and_changes_nothing() -> None:
    toy = Toy(3)
    forged = Propose(step=0, ballot=(9, "b"), close=StepClose(step=0, counted=(), members=MEMBERS[:1]))
    toy.deliver("c", "a", forged)
    assert toy.strikes == {"c": 1}
    toy.clock.run_for(60)
    assert toy.decided["a"] != forged.close


def test_what_a_majority_objects_to_is_not_decided_and_the_next_proposer_is_heard() -> None:
    """The first of the draw order would close with others than four voters see alive."""
    toy = Toy(4)
    first = toy.agreements["a"]._order[0]
    toy.objectors = set(NAMES) - {first}
    agree = toy.agreements[next(iter(toy.objectors))]._ready
    for name in toy.objectors:
        toy.agreements[name]._ready = agree
        toy.agreements[name]._objection = lambda close: None if close == agree() else "not ours"
    assert toy.clock.run_until(lambda: set(toy.decided) == set(NAMES), 60)
    assert {close.model_dump_json() for close in toy.decided.values()} == {agree().model_dump_json()}  # type: ignore[union-attr]


def test_who_hears_no_majority_proposes_nothing() -> None:
    toy = Toy(5)
    for name in ("a", "b", "c", "d"):
        toy.contexts[name].liveness.alive = lambda peer, me=name: peer in (me, "e")
    toy.clock.run_for(30)
    assert toy.proposed == {"e"}
