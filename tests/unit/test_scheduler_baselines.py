"""Baselines that hold, and the matching of the full pipeline."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances

from scheduler import baselines
from scheduler.baselines import unskipped
from scheduler.instance import Instance, PeerSpec
from scheduler.plan import path_fault
from scheduler.timeline import makespan


@given(instances(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_baseline_can_be_walked(instance: Instance, seed: int) -> None:
    whole = unskipped(instance)
    plans = [
        (baselines.full_pipeline(instance), whole),
        (baselines.greedy_router(instance), instance),
        (baselines.random_skip(instance, seed=seed), instance),
        (baselines.stochastic_wiring(instance, seed=seed), instance),
        (baselines.decentralised_flow(instance, seed=seed), instance),
    ]
    for plan, problem in plans:
        assert len(plan.paths) == sum(instance.microbatches.values())
        assert all(path_fault(path, problem) is None for path in plan.paths)
        assert makespan(problem, plan.paths) == plan.makespan_s


@given(st.integers(1, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_matchings_are_the_best(m: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=m, max_size=m)
    cost = np.array(data.draw(st.lists(row, min_size=m, max_size=m)), float)
    each = [[cost[i, j] for i, j in enumerate(order)] for order in permutations(range(m))]
    least = baselines._least_sum_matching(cost)
    assert sorted(least) == list(range(m))
    assert sum(cost[i, j] for i, j in enumerate(least)) == min(map(sum, each))
    narrow = [cost[i, j] for i, j in enumerate(baselines._bottleneck_matching(cost))]
    assert (max(narrow), sum(narrow)) == min((max(costs), sum(costs)) for costs in each)


def test_wiring_gives_a_slow_replica_less() -> None:
    instance = demo_instance(12)
    slow = {"forward_s": 0.03, "backward_s": 0.03, "weight_s": 0.03}
    peers = tuple(s.model_copy(update=slow) if s.peer == "p2" else s for s in instance.peers)
    plan = baselines.stochastic_wiring(instance.model_copy(update={"peers": peers}), seed=0)
    visits = [sum(peer in path for path in plan.paths) for peer in ("p2", "p3")]
    assert visits[1] == pytest.approx(2.9 * visits[0], rel=0.3)


def test_the_flow_avoids_a_far_replica() -> None:
    """Two origins, each near one of the replicas of the only other stage."""
    peers = tuple(PeerSpec(peer=p, stage=int(p in "xy"), forward_s=1, backward_s=1) for p in "abxy")
    links = [(p, q, 0.1 if p + q in ("ax", "xa", "by", "yb") else 5.0, 1e9) for p in "abxy" for q in "abxy"]
    instance = Instance.model_validate(
        {
            "stages": 2,
            "path_length": 2,
            "peers": peers,
            "microbatches": {"a": 4, "b": 4},
            "activation_bytes": 0,
            "links": tuple(link for link in links if link[0] != link[1]),
        }
    )
    plan = baselines.decentralised_flow(instance, seed=0)
    assert set(plan.paths) == {("a", "x"), ("b", "y")}
