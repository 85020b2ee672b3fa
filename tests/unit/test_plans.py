"""Which plan a step goes by: kept while it fits, and chosen alike by all when the next step begins."""

from __future__ import annotations

import pytest

from peer.plans import GAIN, Plans
from scheduler.instance import Instance
from scheduler.plan import Plan
from scheduler.timeline import makespan
from scheduler.view import PeerView

STAGES, REPLICAS, EACH = 3, 2, 4


def instance_of(*, without: str = "", slow: str = "", factor: float = 1.0) -> Instance:
    """3 stages of 2 replicas, of which one may be missing and one slower."""
    views = [
        PeerView(
            peer=f"s{stage}r{number}",
            incarnation=1,
            stage=stage,
            state="active",
            step=0,
            forward_s=0.01 * (factor if f"s{stage}r{number}" == slow else 1),
            backward_s=0.01,
            memory_slots=4,
            up_bytes_per_s=1e9,
            down_bytes_per_s=1e9,
        )
        for stage in range(STAGES)
        for number in range(REPLICAS)
    ]
    members = {view.peer: view.stage for view in views if view.peer != without}
    origins = {peer: EACH for peer, stage in members.items() if stage == 0}
    return Instance.from_view(
        views,
        stages=STAGES,
        path_length=STAGES,
        microbatches=origins,
        activation_bytes=1000,
        members=members,
        coverage_tolerance=EACH,
    )


def plan_of(instance: Instance, proposer: str, skew: int = 0) -> Plan:
    """Each origin goes through the replicas in turn; the first ``skew`` microbatches through replica 0."""
    paths = []
    for n in range(EACH):
        for origin in sorted(instance.microbatches):
            number = 0 if n < skew else (n + int(origin[-1])) % REPLICAS
            hosts = [
                f"s{stage}r{number}" if f"s{stage}r{number}" in instance.index else f"s{stage}r0"
                for stage in range(1, STAGES)
            ]
            paths.append((origin, *hosts))
    return Plan(paths=tuple(paths), makespan_s=0.0, epoch=instance.epoch, proposer=proposer)


WHOLE = instance_of()
EVEN, UNEVEN = plan_of(WHOLE, "s0r0"), plan_of(WHOLE, "s0r1", skew=EACH)


def test_the_fixtures_differ_by_more_than_is_noise() -> None:
    assert makespan(WHOLE, EVEN.paths) < (1 - GAIN) * makespan(WHOLE, UNEVEN.paths)


def test_the_first_plan_is_held_at_once_and_a_better_one_from_the_next_step_on() -> None:
    plans = Plans()
    plans.offer(UNEVEN, WHOLE)
    plans.offer(EVEN, WHOLE)
    assert plans.mend(WHOLE)
    assert plans.held == UNEVEN
    plans.begin(WHOLE)
    assert plans.held == EVEN


@pytest.mark.parametrize("first", [0, 1])
def test_of_equally_good_plans_all_choose_the_same_whichever_they_held(first: int) -> None:
    """Each reckons with a figure that is a little different."""
    twins = [EVEN, EVEN.model_copy(update={"proposer": "s0r1"})]
    for slow in ("s1r0", "s2r1"):
        plans, instance = Plans(), instance_of(slow=slow, factor=1 + GAIN / 4)
        plans.offer(twins[first], instance)
        plans.offer(twins[1 - first], instance)
        assert plans.held == twins[first]
        plans.begin(instance)
        assert plans.held == min(twins, key=Plan.digest)


def test_a_plan_that_does_not_fit_is_replaced_at_once_by_one_that_came_before() -> None:
    less = instance_of(without="s1r1")
    plans, rest = Plans(), plan_of(less, "s0r1")
    plans.offer(EVEN, WHOLE)
    plans.offer(rest, WHOLE)  # its proposer has lost s1r1, and we have not yet
    assert plans.held == EVEN
    assert plans.mend(less)
    assert plans.held == rest


def test_plans_for_another_membership_are_forgotten_when_a_step_begins() -> None:
    less = instance_of(without="s1r1")
    plans = Plans()
    plans.offer(plan_of(less, "s0r1"), WHOLE)
    plans.offer(EVEN, WHOLE)
    plans.begin(WHOLE)
    assert not plans.mend(less)
    assert plans.held == EVEN  # its paths go around who is missing


def test_only_what_would_change_the_choice_is_worth_telling() -> None:
    plans = Plans()
    assert plans.worth_telling(UNEVEN, WHOLE)
    plans.offer(UNEVEN, WHOLE)
    assert plans.worth_telling(EVEN, WHOLE)
    plans.offer(EVEN, WHOLE)
    assert not plans.worth_telling(EVEN.model_copy(update={"proposer": "s0r1"}), WHOLE)
    assert not plans.worth_telling(UNEVEN, WHOLE)
