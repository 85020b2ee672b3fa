"""Path search: always an answer, even visits, deterministic, fast, no worse than the baselines."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances

from scheduler.baselines import full_pipeline, random_skip, unskipped
from scheduler.bounds import bounds, owed_visits
from scheduler.errors import SchedulerError
from scheduler.instance import Instance, Link, PeerSpec
from scheduler.paths import repair, replacement, search, visit_quotas
from scheduler.plan import Plan, validate
from scheduler.timeline import simulate


def visits(plan: Plan, instance: Instance) -> Counter[int]:
    return Counter(instance.peers[instance.index[p]].stage for path in plan.paths for p in path)


@given(instances(), st.integers(0, 2**32), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_there_is_a_plan_that_holds_whoever_is_dead(instance: Instance, seed: int, iterations: int) -> None:
    plan = search(instance, seed=seed, iterations=iterations)
    assert validate(plan, instance) is None
    assert plan.degraded == (
        instance.path_length > 1 + len(instance.alive_stages) and sum(instance.microbatches.values()) > 0
    )
    counts = [visits(plan, instance)[stage] for stage in instance.alive_stages]
    assert max(counts, default=0) - min(counts, default=0) <= 1
    assert min(counts, default=0) >= owed_visits(instance)
    assert plan.epoch == instance.epoch


@given(instances(cut_links=True), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_there_is_a_plan_whatever_links_are_cut(instance: Instance, seed: int) -> None:
    plan = search(instance, seed=seed, iterations=2)
    assert validate(plan, instance) is None
    simulate(instance, plan.paths)


@given(instances(), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_more_iterations_are_never_worse(instance: Instance, seed: int) -> None:
    makespans = [search(instance, seed=seed, iterations=n).makespan_s for n in (0, 5, 25)]
    assert makespans == sorted(makespans, reverse=True)


def test_the_same_arguments_give_the_same_plan() -> None:
    plan = search(demo_instance(), seed=7, iterations=30)
    again = Instance.from_json(demo_instance().to_json())
    assert search(again, seed=7, iterations=30).to_bytes() == plan.to_bytes()


def test_skipped_stages_alternate_and_replicas_share() -> None:
    instance = demo_instance(6)
    plan = search(instance, seed=0)
    assert visits(plan, instance) == {0: 12, 1: 8, 2: 8, 3: 8}
    each = Counter(peer for path in plan.paths for peer in path)
    assert set(each.values()) <= {3, 4, 5, 6}
    assert plan.makespan_s <= 1.25 * bounds(instance).best_s


def test_a_slow_replica_is_visited_less() -> None:
    instance = demo_instance()
    slow = tuple(
        spec.model_copy(update={"forward_s": 0.05, "backward_s": 0.05, "weight_s": 0.05})
        if spec.peer == "p2"
        else spec
        for spec in instance.peers
    )
    plan = search(instance.model_copy(update={"peers": slow}), seed=0, iterations=50)
    each = Counter(peer for path in plan.paths for peer in path)
    assert each["p2"] <= 2
    assert each["p3"] >= 6


def test_a_plan_goes_around_a_cut_link() -> None:
    instance = demo_instance()
    links = (Link("p2", "p0", 0.0, 0.0), Link("p2", "p1", 0.0, 0.0))
    plan = search(instance.model_copy(update={"links": links}), seed=0, iterations=20)
    assert all(path[1] != "p2" and path[-1] != "p2" for path in plan.paths)
    assert not plan.degraded


def test_a_stage_without_peers_is_skipped_and_short_paths_are_told() -> None:
    instance = demo_instance(2)
    one_gone = search(instance.without("p2", "p3"), seed=0)
    assert not one_gone.degraded
    assert {len(path) for path in one_gone.paths} == {3}
    two_gone = search(instance.without("p2", "p3", "p4", "p5"), seed=0)
    assert two_gone.degraded
    assert {len(path) for path in two_gone.paths} == {2}
    alone = search(instance.without("p2", "p3", "p4", "p5", "p6", "p7", "p1"), seed=0)
    assert alone.degraded
    assert alone.paths == (("p0",), ("p0",))


def test_a_search_goes_on_from_the_last_plan() -> None:
    instance = demo_instance()
    good = search(instance, seed=1, iterations=200)
    assert search(instance, seed=2, previous=good, iterations=0).makespan_s == good.makespan_s
    assert good.makespan_s < search(instance, seed=2, iterations=0).makespan_s


def test_a_bad_previous_plan_is_left_behind() -> None:
    instance = demo_instance()
    crowded = tuple(
        (path[0], *(f"p{int(p[1:]) // 2 * 2}" for p in path[1:])) for path in search(instance, seed=0).paths
    )
    bad = Plan(paths=crowded, makespan_s=0.0)
    assert validate(bad, instance) is None
    plan = search(instance, seed=0, previous=bad, iterations=0)
    assert plan.makespan_s == search(instance, seed=0, iterations=0).makespan_s
    assert plan.makespan_s < simulate(instance, crowded).makespan_s


def test_a_dead_peer_leaves_the_other_paths_as_they_are() -> None:
    instance = demo_instance()
    good = search(instance, seed=1, iterations=200)
    smaller = instance.without("p7")
    plan = search(smaller, seed=1, previous=good, iterations=0)
    assert validate(plan, smaller) is None
    fresh = search(smaller, seed=1, iterations=0)
    assert plan.makespan_s <= fresh.makespan_s
    repaired = repair(good, smaller)
    assert repaired is not None
    assert len(repaired) == len(good.paths)
    for path, hops in zip(good.paths, repaired, strict=True):
        now = tuple(smaller.peers[p].peer for p in hops)
        assert now == path if "p7" not in path else now[0] == path[0]
    fewer = instance.without("p1")
    plan = search(fewer, seed=1, previous=good, iterations=0)
    assert validate(plan, fewer) is None


@given(instances(), instances(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_any_previous_plan_may_be_given(old: Instance, new: Instance, seed: int) -> None:
    plan = search(new, seed=seed, previous=search(old, seed=seed), iterations=1)
    assert validate(plan, new) is None


def test_eight_peers_and_twelve_microbatches_take_less_than_10_ms() -> None:
    instance = demo_instance()
    times_s = []
    for seed in range(15):
        start = time.process_time()
        search(Instance.from_json(instance.to_json()), seed=seed)
        times_s.append(time.process_time() - start)
    assert min(times_s) < 0.010


def test_the_search_beats_the_baselines() -> None:
    instance = demo_instance()
    ours = search(instance, seed=0, iterations=50)
    by_chance = [random_skip(instance, seed=seed) for seed in range(5)]
    assert all(ours.makespan_s < plan.makespan_s for plan in by_chance)
    full = full_pipeline(instance)
    assert validate(full, unskipped(instance)) is None
    assert {len(path) for path in full.paths} == {4}
    assert ours.makespan_s < full.makespan_s
    assert full.makespan_s == simulate(unskipped(instance), full.paths).makespan_s
    assert by_chance[0] == random_skip(instance, seed=0)
    assert by_chance[0].paths != by_chance[1].paths


class TestReplacement:
    instance = demo_instance()
    path = ("p0", "p2", "p4")

    def test_the_other_replica(self) -> None:
        assert replacement(self.instance, self.path, 1, {"p2"}) == "p3"
        assert replacement(self.instance, self.path, 2, {"p4"}) == "p5"

    def test_nobody_left(self) -> None:
        assert replacement(self.instance, self.path, 1, {"p2", "p3"}) is None

    def test_a_peer_that_the_instance_has_forgotten(self) -> None:
        smaller = self.instance.without("p2")
        assert replacement(smaller, self.path, 1, {"p2"}, stage=1) == "p3"
        with pytest.raises(SchedulerError, match="stage must be given"):
            replacement(smaller, self.path, 1, {"p2"})

    def test_the_least_predicted_finish(self) -> None:
        third = self.instance.peers[2].model_copy(update={"peer": "p8"})
        more = self.instance.model_copy(update={"peers": (*self.instance.peers, third)})
        assert replacement(more, self.path, 1, {"p2"}) == "p3"
        assert replacement(more, self.path, 1, {"p2"}, load_s={"p3": 0.1}) == "p8"
        far = more.model_copy(update={"links": (Link("p4", "p3", 2.0, 1e9),)})
        assert replacement(far, self.path, 1, {"p2"}) == "p8"
        assert replacement(far, self.path, 1, {"p2", "p8"}) == "p3"

    def test_out_of_reach(self) -> None:
        cut = self.instance.model_copy(update={"links": (Link("p3", "p0", 0.0, 0.0),)})
        assert replacement(cut, self.path, 1, {"p2"}) is None


def test_a_stage_that_lacks_replicas_is_visited_less_within_the_tolerance() -> None:
    """Four origins, and stages 1 to 3 with 3, 4 and 4 equal replicas, each of which has as much to do."""
    peers = tuple(
        PeerSpec(peer=f"s{s}r{r}", stage=s, forward_s=0.4 if s else 0.1, backward_s=0.4 if s else 0.1)
        for s, count in enumerate((4, 3, 4, 4))
        for r in range(count)
    )
    instance = Instance(
        stages=4,
        path_length=3,
        peers=peers,
        microbatches={f"s0r{r}": 16 for r in range(4)},
        activation_bytes=1000,
        coverage_tolerance=16,
    )
    assert visit_quotas(instance)[1:] == [35, 47, 46]
    even = search(instance.model_copy(update={"coverage_tolerance": 1}), seed=0)
    plan = search(instance, seed=0)
    assert validate(plan, instance) is None
    seen = visits(plan, instance)
    assert [seen[s] for s in (1, 2, 3)] == pytest.approx([35, 47, 46], abs=1)
    assert plan.makespan_s < 0.9 * even.makespan_s
    narrow = instance.model_copy(update={"coverage_tolerance": 5})
    counts = [visits(search(narrow, seed=0), narrow)[s] for s in (1, 2, 3)]
    assert counts[0] < 42
    assert max(counts) - min(counts) <= 5
