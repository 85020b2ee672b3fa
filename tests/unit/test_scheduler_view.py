"""Views and plans as gossiped bytes, instances from views, and which of two plans stands."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance

from scheduler.errors import SchedulerError
from scheduler.instance import UNLIMITED_BYTES_PER_S, Instance
from scheduler.paths import search
from scheduler.plan import Plan
from scheduler.timeline import simulate
from scheduler.view import MAX_VIEW_BYTES, PeerView, PlanFact, rank


def view(peer: str, stage: int, **changes: object) -> PeerView:
    fields: dict[str, object] = {
        "peer": peer,
        "incarnation": 3,
        "stage": stage,
        "state": "active",
        "step": 7,
        "forward_s": 0.5,
        "backward_s": 0.25,
        "memory_slots": 4,
        "up_bytes_per_s": 1e6,
        "down_bytes_per_s": 2e6,
    }
    return PeerView.model_validate({**fields, **changes})


def test_a_view_comes_back_unchanged() -> None:
    said = view("a", 2, links={"b": (0.05, 1e6), "c": (0.5, 0.0)})
    assert PeerView.from_bytes(said.to_bytes(), "a") == said


def test_a_view_of_another_peer_is_refused() -> None:
    with pytest.raises(SchedulerError, match="another peer"):
        PeerView.from_bytes(view("a", 2).to_bytes(), "b")


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_s": float("nan")},
        {"forward_s": 0.0},
        {"backward_s": float("inf")},
        {"stage": -1},
        {"stage": "1"},
        {"memory_slots": 0},
        {"up_bytes_per_s": 0.0},
        {"state": "asleep"},
        {"links": {"b": [0.1, float("nan")]}},
        {"links": {"b": [0.1]}},
        {"links": {f"p{i}": [0.1, 1.0] for i in range(600)}},
        {"peer": "a b"},
        {"extra": 1},
    ],
)
def test_views_that_lie_about_their_form_are_refused(changes: dict[str, object]) -> None:
    fields = {**view("a", 1).model_dump(), **changes}
    with pytest.raises(SchedulerError) as caught:
        PeerView.from_bytes(msgpack.packb(fields), "a")
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_give_the_one_error(data: bytes) -> None:
    with pytest.raises(SchedulerError):
        PeerView.from_bytes(data, "a")
    with pytest.raises(SchedulerError):
        PlanFact.from_bytes(data, "a")


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\xff\x40" + b"\x91" * 255,
        b"\xc0" * (MAX_VIEW_BYTES + 1),
        b"",
    ],
    ids=["nested", "long array", "extension", "too long", "empty"],
)
def test_hostile_bytes_give_the_one_error(data: bytes) -> None:
    with pytest.raises(SchedulerError):
        PeerView.from_bytes(data, "a")


def test_a_plan_fact_is_its_owners() -> None:
    plan = search(demo_instance(1), seed=0, proposer="p0")
    assert PlanFact.from_bytes(PlanFact(plan=plan).to_bytes(), "p0").plan == plan
    with pytest.raises(SchedulerError, match="another proposer"):
        PlanFact.from_bytes(plan.to_bytes(), "p1")


class TestInstanceFromView:
    views = (
        view("a", 0, loss_s=0.125, links={"b": (0.05, 1e6), "gone": (0.1, 1.0)}),
        view("b", 1, forward_s=2.0, links={"c": (0.25, 0.0)}),
        view("c", 1, forward_s=1.0),
        view("d", 1, state="joining"),
    )

    def make(self, members: dict[str, int] | None = None, **more: int) -> Instance:
        return Instance.from_view(
            self.views,
            stages=2,
            path_length=2,
            microbatches={"a": 2, **more},
            activation_bytes=1000,
            members=members,
        )

    def test_what_is_said_is_taken(self) -> None:
        instance = self.make()
        assert [spec.peer for spec in instance.peers] == ["a", "b", "c"]
        a, b, c = (instance.index[name] for name in "abc")
        assert instance.peers[b].forward_s == 2.0
        assert instance.peers[a].loss_s == 0.125
        assert instance.peers[a].up_bytes_per_s == 1e6
        assert instance.latency_s[a, b] == instance.latency_s[b, a] == 0.05
        assert instance.bandwidth_bytes_per_s[a, b] == 1e6
        assert instance.bandwidth_bytes_per_s[b, a] == UNLIMITED_BYTES_PER_S
        assert not instance.usable[b][c]
        # Unmeasured links have the median latency.
        assert instance.latency_s[a, c] == 0.15

    def test_members_win_over_views(self) -> None:
        instance = self.make(members={"a": 0, "d": 1, "x": 1})
        assert {spec.peer: spec.stage for spec in instance.peers} == {"a": 0, "d": 1, "x": 1}
        # x has not spoken: it is taken for an ordinary one.
        assert instance.peers[instance.index["x"]].forward_s == 0.5

    def test_no_views_at_all(self) -> None:
        instance = Instance.from_view(
            (),
            stages=2,
            path_length=2,
            microbatches={"a": 2},
            activation_bytes=0,
            members={"a": 0, "b": 1},
        )
        assert search(instance, seed=0).paths == (("a", "b"), ("a", "b"))

    def test_an_origin_that_nobody_knows(self) -> None:
        with pytest.raises(SchedulerError, match="origin z is not a peer of stage 0"):
            self.make(z=1)


def best(plans: Sequence[Plan], instance: Instance) -> Plan:
    """The one that stands."""
    return min(plans, key=lambda plan: rank(plan, instance))


class TestWhichPlanStands:
    instance = demo_instance()
    fast = search(instance, seed=1, iterations=200)
    slow = search(instance, seed=1, iterations=0)

    def test_the_faster(self) -> None:
        assert self.fast.makespan_s < self.slow.makespan_s
        assert best([self.fast, self.slow], self.instance) == self.fast
        assert best([self.slow, self.fast], self.instance) == self.fast

    def test_a_claimed_makespan_changes_nothing(self) -> None:
        liar = self.slow.model_copy(update={"makespan_s": 0.0})
        assert best([liar, self.fast], self.instance) == self.fast
        assert rank(liar, self.instance)[2] == simulate(self.instance, liar.paths).makespan_s

    def test_the_one_that_covers_the_living(self) -> None:
        smaller = self.instance.without("p7")
        patched = search(smaller, seed=0, iterations=0)
        assert best([self.fast, patched], smaller) == patched
        short = self.fast.model_copy(update={"paths": tuple(path[:2] for path in self.fast.paths)})
        assert best([short, self.slow], self.instance) == self.slow

    def test_the_hash_decides_between_equals(self) -> None:
        mine = self.fast.model_copy(update={"proposer": "p0"})
        yours = self.fast.model_copy(update={"proposer": "p1"})
        winner = min(mine, yours, key=Plan.digest)
        assert best([mine, yours], self.instance) == best([yours, mine], self.instance) == winner

    def test_the_order_of_plans_changes_nothing(self) -> None:
        smaller = self.instance.without("p7")
        plans = [self.fast, self.slow, search(smaller, seed=0), search(self.instance.without("p5"), seed=0)]
        for instance in (self.instance, smaller):
            stands = best(plans, instance)
            assert best(plans[::-1], instance) == stands
            assert best([best(plans[:2], instance), best(plans[2:], instance)], instance) == stands
