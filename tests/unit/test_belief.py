"""Whose claims are planned with: what others see of a peer against what it says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances

from scheduler.belief import DOUBT, NOISE_S, believed, witnessed
from scheduler.instance import Instance
from scheduler.paths import search
from scheduler.view import PeerView

HOP_S = 2 * (1 << 18) / 1e8 + 2 * 0.001
"""Two links of the demo's instance, each with an uplink and a downlink in a row."""


def view(peer: str, **seen: float) -> PeerView:
    return PeerView(
        peer=peer,
        incarnation=1,
        stage=0,
        state="active",
        step=0,
        forward_s=0.1,
        backward_s=0.1,
        memory_slots=4,
        up_bytes_per_s=1e9,
        down_bytes_per_s=1e9,
        seen=seen,
    )


class TestWitnesses:
    def test_nobody_is_believed_alone(self) -> None:
        assert witnessed([view("a", x=9.0)], {}, "me") == {}

    def test_but_everybody_believes_its_own_eyes(self) -> None:
        assert witnessed([view("a", y=1.0)], {"x": 9.0}, "me") == {"x": 9.0}

    def test_a_slanderer_is_outvoted_by_one_that_saw_better(self) -> None:
        assert witnessed([view("a", x=9.0), view("b", x=0.1)], {}, "me") == {"x": 0.1}
        assert witnessed([view("a", x=9.0)], {"x": 0.1}, "me") == {"x": 0.1}

    def test_two_of_three_have_it(self) -> None:
        said = [view("a", x=9.0), view("b", x=8.0), view("c", x=0.1)]
        assert witnessed(said, {}, "me") == {"x": 8.0}

    def test_what_a_peer_says_of_itself_counts_for_nothing(self) -> None:
        said = [view("x", x=0.001), view("a", x=9.0), view("b", x=8.0)]
        assert witnessed(said, {}, "me") == {"x": 8.0}

    def test_our_own_view_is_not_heard_twice(self) -> None:
        assert witnessed([view("me", x=9.0), view("a", x=0.1)], {"x": 9.0}, "me") == {"x": 0.1}


class TestClaims:
    instance = demo_instance()
    plan = search(instance, seed=0)

    def forward_s(self, instance: Instance, peer: str) -> float:
        return instance.peers[instance.index[peer]].forward_s

    def test_what_fits_is_believed(self) -> None:
        seen = {spec.peer: HOP_S + spec.forward_s for spec in self.instance.peers}
        assert believed(self.instance, self.plan, seen) == (self.instance, [])

    def test_who_is_slower_than_it_says_is_planned_as_it_was_seen(self) -> None:
        instance, (doubt,) = believed(self.instance, None, {"p3": HOP_S + 0.1})
        assert (doubt.peer, doubt.claimed_s, doubt.seen_s) == ("p3", 0.01, pytest.approx(0.1, rel=0.05))
        slow, before = (made.peers[made.index["p3"]] for made in (instance, self.instance))
        factor = doubt.seen_s / 0.01
        assert slow.backward_s == pytest.approx(factor * before.backward_s)
        assert slow.weight_s == pytest.approx(factor * before.weight_s)
        others = [(a, b) for a, b in zip(instance.peers, self.instance.peers, strict=True) if a.peer != "p3"]
        assert all(a == b for a, b in others)
        assert instance.epoch == self.instance.epoch

    def test_noise_is_no_lie(self) -> None:
        span_s = HOP_S + 0.01
        assert believed(self.instance, None, {"p3": DOUBT * span_s + 0.9 * NOISE_S})[1] == []
        assert believed(self.instance, None, {"p3": DOUBT * span_s + 1.1 * NOISE_S})[1] != []

    def test_strangers_are_passed_over(self) -> None:
        assert believed(self.instance, self.plan, {"nobody": 9.0}) == (self.instance, [])

    def test_a_plan_for_others_excuses_nobody(self) -> None:
        smaller = self.instance.without("p7")
        assert believed(smaller, self.plan, {"p3": 1.0})[1] == believed(smaller, None, {"p3": 1.0})[1]

    def test_waiting_where_the_plan_makes_it_wait_is_excused(self) -> None:
        """All microbatches through one peer of a stage: but for the first each waits for those before."""
        paths = tuple((origin, "p2", "p4") for origin in ("p0", "p1") for _ in range(6))
        slow = self.instance.peers[2].model_copy(update={"forward_s": 0.5, "weight_s": 0.5})
        peers = tuple(slow if spec.peer == "p2" else spec for spec in self.instance.peers)
        instance = self.instance.model_copy(update={"peers": peers, "coverage_tolerance": 12})
        plan = search(instance, seed=0, iterations=0).model_copy(update={"paths": paths})
        waits = {"p2": 2.5 * (HOP_S + 0.5)}
        assert believed(instance, None, waits)[1] != []
        assert believed(instance, plan, waits)[1] == []
        assert believed(instance, plan, {"p2": 20.0})[1] != []

    @given(instances(), st.floats(1.0, 100.0))
    def test_no_time_shrinks_and_nothing_else_changes(self, instance: Instance, taken_s: float) -> None:
        seen = {spec.peer: taken_s for spec in instance.peers}
        slower, doubts = believed(instance, search(instance, seed=0, iterations=0), seen)
        assert {doubt.peer for doubt in doubts} <= set(seen)
        for before, after in zip(instance.peers, slower.peers, strict=True):
            assert after.forward_s >= before.forward_s
            assert after.backward_s >= before.backward_s
            assert after.memory_slots == before.memory_slots
