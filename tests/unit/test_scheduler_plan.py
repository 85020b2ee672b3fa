"""Instances and plans: what is refused, what comes back unchanged, which plan holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances

from scheduler.errors import SchedulerError
from scheduler.instance import Instance, Link
from scheduler.paths import search
from scheduler.plan import Plan, validate


@given(instances(cut_links=True))
@settings(max_examples=50, deadline=None)
def test_instances_and_plans_come_back_unchanged(instance: Instance) -> None:
    again = Instance.from_json(instance.to_json())
    assert again == instance
    assert list(again.microbatches) == list(instance.microbatches)
    assert again.epoch == instance.epoch
    plan = search(instance, seed=0, iterations=0, proposer="p7")
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_bytes(plan.to_bytes()) == plan
    assert Plan.from_bytes(plan.to_bytes()).digest() == plan.digest()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"path_length": 5}, "path_length 5 exceeds the 4 stages"),
        ({"stages": 3}, "peer p6 hosts stage 3, the last is 2"),
        ({"microbatches": {"p0": 1, "p2": 1}}, "origin p2 is not a peer of stage 0"),
        ({"microbatches": {"nobody": 1}}, "origin nobody is not a peer of stage 0"),
        ({"microbatches": {"p0": -1}}, "microbatches.p0: Input should be greater than"),
        ({"links": [["p0", "p9", 0.0, 1.0]]}, "link p0 -> p9 does not join"),
        ({"links": [["p0", "p0", 0.0, 1.0]]}, "link p0 -> p0 does not join"),
        ({"links": [["p0", "p1", 0.0, 1.0]] * 2}, "link p0 -> p1 is listed twice"),
        ({"links": [["p0", "p1", -1.0, 1.0]]}, "links.0.2: Input should be greater than or equal to 0"),
        ({"gradient_bytes": [1]}, "gradient_bytes needs one size for each of the 4 stages"),
        ({"what": 1}, "what: Extra inputs"),
    ],
)
def test_bad_instances_are_refused_in_one_line(changes: dict[str, Any], reason: str) -> None:
    text = json.dumps({**json.loads(demo_instance().to_json()), **changes})
    with pytest.raises(SchedulerError) as caught:
        Instance.from_json(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_peer_listed_twice_is_refused() -> None:
    fields = json.loads(demo_instance().to_json())
    fields["peers"].append(fields["peers"][0])
    with pytest.raises(SchedulerError, match="peer p0 is listed twice"):
        Instance.from_json(json.dumps(fields))


def test_a_copy_forgets_what_was_cached() -> None:
    instance = demo_instance()
    assert instance.required_length("p0") == 3
    longer = instance.model_copy(update={"path_length": 4})
    assert longer.required_length("p0") == 4
    assert longer.epoch != instance.epoch
    with pytest.raises(ValueError, match="exceeds"):
        instance.model_copy(update={"path_length": 5})


@given(st.text(max_size=200))
def test_texts_that_are_no_plan(text: str) -> None:
    with pytest.raises(SchedulerError):
        Plan.from_text(text)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_plan_is_refused_or_another_plan(data: st.DataObject) -> None:
    good = search(demo_instance(2), seed=0, iterations=0).to_bytes()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    bad = good[:start] + data.draw(st.binary(max_size=8)) + good[end:]
    try:
        plan = Plan.from_bytes(bad)
    except SchedulerError:
        return
    assert Plan.from_bytes(plan.to_bytes()) == plan


def test_a_plan_has_paths_for_more_microbatches_than_it_was_made_for() -> None:
    plan = Plan(paths=(("a", "x"), ("b", "x"), ("a", "y")), makespan_s=1.0)
    assert plan.take("a", 5) == (("a", "x"), ("a", "y"), ("a", "x"), ("a", "y"), ("a", "x"))
    assert plan.take("a", 1) == (("a", "x"),)
    assert plan.take("c", 2) == ()


def changed(plan: Plan, at: int, path: tuple[str, ...]) -> Plan:
    paths = list(plan.paths)
    paths[at] = path
    return plan.model_copy(update={"paths": tuple(paths)})


def test_which_plans_hold() -> None:
    instance = demo_instance(3)
    plan = search(instance, seed=0)
    assert validate(plan, instance) is None
    first = plan.paths[0]
    a, b = sorted(instance.peers[instance.index[p]].stage for p in first[1:])
    cases = {
        "is not among the living peers": changed(plan, 0, (first[0], "nobody", first[2])),
        "does not go up through the stages": changed(plan, 0, (first[0], first[2], first[1])),
        "visits 2 stages instead of 3": changed(plan, 0, first[:2]),
        "visits 4 stages instead of 3": changed(plan, 0, (first[0], "p2", "p4", "p6")),
        "2 paths for the 3 microbatches of": plan.model_copy(update={"paths": plan.paths[1:]}),
        "4 paths for the 3 microbatches of": plan.model_copy(update={"paths": (*plan.paths, first)}),
        "stages are visited between": plan.model_copy(
            update={"paths": tuple((path[0], "p2", "p4") for path in plan.paths)}
        ),
        "a path starts at a peer that has no": plan.model_copy(
            update={"paths": (*plan.paths, ("p2", "p4", "p6"))}
        ),
    }
    assert (a, b) != (0, 0)
    for reason, bad in cases.items():
        assert reason in (validate(bad, instance) or "holds")
        # Saying that it is degraded excuses nothing here: all links work.
        assert validate(bad.model_copy(update={"degraded": True}), instance) is not None
    dead = first[1]
    assert dead in (validate(plan, instance.without(dead)) or "holds")


def test_a_path_over_a_link_that_works_one_way_does_not_hold() -> None:
    instance = demo_instance(1)
    plan = search(instance, seed=0)
    a, b, c = plan.paths[0]
    for link in (Link(a, b, 0.0, 0.0), Link(b, a, 0.0, 0.0), Link(c, b, 0.0, 0.0), Link(a, c, 0.0, 0.0)):
        cut = instance.model_copy(update={"links": (link,)})
        assert "no way between" in (validate(plan, cut) or "holds")


def test_a_path_that_visits_a_peer_twice_is_no_plan() -> None:
    with pytest.raises(ValueError, match="visits a peer twice"):
        Plan(paths=(("a", "x", "x"),), makespan_s=0.0)
