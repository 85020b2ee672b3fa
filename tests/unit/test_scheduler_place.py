"""Places and paths searched for together, search by the clock, and the benchmark's problems."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances

from benchmarks.problems import INSTANCES, load, random_problem
from scheduler.assignment import place
from scheduler.bounds import bounds
from scheduler.errors import SchedulerError
from scheduler.instance import Instance, Link
from scheduler.paths import search
from scheduler.plan import validate
from scheduler.timeline import makespan, simulate


@given(instances(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_what_a_search_says_is_what_the_simulator_says(instance: Instance, seed: int) -> None:
    plan = search(instance, seed=seed, iterations=2500)
    assert validate(plan, instance) is None
    assert makespan(instance, plan.paths) == plan.makespan_s


@given(instances(cut_links=True), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_placement_holds(instance: Instance, seed: int) -> None:
    placed, plan = place(instance, seed=seed, iterations=60)
    assert all(
        # A path of the start may be short for want of links; a better place may allow more.
        "instead of" in fault
        for fault in [validate(plan, placed)]
        if fault is not None
    )
    assert simulate(placed, plan.paths).makespan_s == pytest.approx(plan.makespan_s)
    assert Counter(spec.stage for spec in placed.peers) == Counter(spec.stage for spec in instance.peers)
    drawn = [sorted(n for n in each.microbatches.values() if n) for each in (placed, instance)]
    assert drawn[0] == drawn[1]
    fresh = search(instance, seed=seed, iterations=0)
    assert plan.makespan_s <= fresh.makespan_s + 1e-9


def test_neighbours_are_put_on_one_path() -> None:
    """Two sites far apart, each with every second stage only: free places bring them together."""
    instance = demo_instance()
    site = {spec.peer: spec.stage % 2 for spec in instance.peers}
    links = tuple(Link(p, q, 0.001 if site[p] == site[q] else 0.2, 1e9) for p in site for q in site if p != q)
    instance = instance.model_copy(update={"links": links})
    placed, plan = place(instance, seed=0, iterations=3000)
    assert validate(plan, placed) is None
    assert plan.makespan_s < 0.8 * search(instance, seed=0, iterations=3000).makespan_s
    assert place(instance, seed=0, iterations=3000).plan == plan


def test_the_clock_ends_a_search() -> None:
    left = iter([1.0, 0.9, 0.6, 0.3, 0.0])
    plan = search(demo_instance(), seed=0, left_s=lambda: next(left))
    assert next(left, None) is None
    assert plan.makespan_s <= search(demo_instance(), seed=0, iterations=0).makespan_s
    assert search(demo_instance(), seed=0, left_s=lambda: -1.0) == search(
        demo_instance(), seed=0, iterations=0
    )


def test_a_search_of_what_cannot_change_ends() -> None:
    alone = demo_instance().model_copy(
        update={
            "stages": 1,
            "path_length": 1,
            "peers": demo_instance().peers[:1],
            "microbatches": {"p0": 1},
        }
    )
    assert search(alone, seed=0, left_s=lambda: 1.0).paths == (("p0",),)


@pytest.mark.parametrize("name", ["geo20", "clusters5", "single20"])
def test_a_short_search_beats_the_best_known_paths(name: str) -> None:
    problem = next(problem for problem in load(INSTANCES) if problem.name == name)
    instance = problem.instance
    plan = search(instance, seed=0, iterations=6000)
    assert validate(plan, instance) is None
    assert plan.makespan_s <= 1.04 * makespan(instance, problem.best_known_paths)
    assert plan.makespan_s >= bounds(instance).best_s
    if problem.reference_paths:
        assert plan.makespan_s <= 0.9 * makespan(instance, problem.reference_paths)


def test_instances_in_skippipes_form(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "two.json").write_text(
        '{"name": "two", "stages": [[1], [0]], "path_length": 2, "memory_slots": 3, "waves": 2,'
        ' "compute_s": [1.0, 2.0], "hop_s": [[0, 0.5], [0.5, 0]],'
        ' "best_known_paths": [[1, 0], [1, 0], [1, 0]]}'
    )
    (problem,) = load(tmp_path)
    assert problem.instance.microbatches == {"p1": 6}
    assert problem.best_known_paths == (("p1", "p0"),) * 6
    one = simulate(problem.instance, problem.best_known_paths[:1])
    assert one.makespan_s == 2 + 0.5 + 1 + 0.5 + 0.5 + 0.5 + 1.5 + 0.5 + 3
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SchedulerError, match=r"bad\.json"):
        load(tmp_path)


def test_random_problems_are_what_they_say() -> None:
    for seed in range(5):
        instance = random_problem(seed)
        assert 10 <= len(instance.peers) <= 60
        skipped = (instance.stages - instance.path_length) / (instance.stages - 1)
        assert 0.2 <= skipped <= 0.51
        assert random_problem(seed) == instance
