"""Lower bounds and the choice of a stage."""

from __future__ import annotations

from collections import Counter

import pytest
from scheduler_cases import demo_instance

from scheduler.assignment import Hosted, choose_stage
from scheduler.bounds import Bounds, bounds, owed_visits
from scheduler.errors import SchedulerError
from scheduler.instance import Instance, PeerSpec
from scheduler.paths import search


def test_bounds_by_hand() -> None:
    instance = Instance(
        stages=3,
        path_length=2,
        peers=(
            PeerSpec(
                peer="o",
                stage=0,
                forward_s=1,
                backward_s=2,
                loss_s=0.5,
                weight_s=0.25,
                memory_slots=2,
                up_bytes_per_s=100,
            ),
            PeerSpec(peer="a", stage=1, forward_s=10, backward_s=15),
            PeerSpec(peer="b", stage=1, forward_s=4, backward_s=6),
            PeerSpec(peer="c", stage=2, forward_s=8, backward_s=8, up_bytes_per_s=50),
        ),
        microbatches={"o": 9},
        activation_bytes=100,
        default_latency_s=0.125,
    )
    # 9 visits to two stages within one of each other: at least 4 each.
    assert owed_visits(instance) == 4
    # c computes 4 x 16 s; a takes 1 of 4 while b takes 3 in 30 s. Before c's first come the origin's forward
    # and a hop (from b, whose uplink is no limit), after its last a hop and the origin's backward.
    stage_s = 64 + (1 + 0.125) + (2.125 + 2)
    # The origin sends 18 tensors in 1 s each, c 8 in 2 s each.
    # The quickest path, over b: 3.5 + 10 s, 1.125 there and 0.125 back twice over (b's uplink is no limit).
    path_s = 0.25 + 9 / 2 * (3.5 + 10 + 2 * (1.125 + 0.125))
    assert bounds(instance) == Bounds(pytest.approx(stage_s), 9 * 3.75, 18.0, pytest.approx(path_s))
    assert bounds(instance).best_s == pytest.approx(path_s)


def test_a_plan_of_the_demo_is_near_the_bound() -> None:
    instance = demo_instance()
    plan = search(instance, seed=0, iterations=100)
    assert 1.0 <= plan.makespan_s / bounds(instance).best_s < 1.25


def test_bounds_of_nothing() -> None:
    nothing = demo_instance().model_copy(update={"microbatches": {"p0": 0}})
    assert bounds(nothing).best_s == 0.0


class TestChooseStage:
    def test_newcomers_one_by_one_fill_the_demo_evenly(self) -> None:
        hosted: list[Hosted] = []
        for _ in range(8):
            hosted.append(Hosted(choose_stage(hosted, stages=4, path_length=3)))
        assert Counter(peer.stage for peer in hosted) == {0: 2, 1: 2, 2: 2, 3: 2}
        # After that stage 0, which every microbatch visits, needs the next.
        assert choose_stage(hosted, stages=4, path_length=3) == 0

    def test_newcomers_all_at_once_too(self) -> None:
        chosen = [choose_stage((), stages=4, path_length=3, ahead=i) for i in range(8)]
        assert Counter(chosen) == {0: 2, 1: 2, 2: 2, 3: 2}

    def test_an_empty_stage_comes_first(self) -> None:
        hosted = [Hosted(0, 9.0), Hosted(1, 9.0), Hosted(3, 9.0), Hosted(3, 9.0)]
        assert choose_stage(hosted, stages=4, path_length=2) == 2

    def test_replicas_that_the_start_needs_come_before_load(self) -> None:
        hosted = [Hosted(0), Hosted(0), Hosted(1), Hosted(2), Hosted(2), Hosted(3), Hosted(3)]
        assert choose_stage(hosted, stages=4, path_length=2) == 0
        assert choose_stage(hosted, stages=4, path_length=2, start_replicas=2) == 1

    def test_the_weakest_stage(self) -> None:
        hosted = [Hosted(0, 0.1), Hosted(1, 1.0), Hosted(1, 1.0), Hosted(2, 3.0), Hosted(3, 0.5), Hosted(3)]
        assert choose_stage(hosted, stages=4, path_length=3) == 2

    def test_a_stage_of_more_layers_needs_more(self) -> None:
        hosted = [Hosted(stage) for stage in range(4)]
        assert choose_stage(hosted, stages=4, path_length=4, work_s=(1, 1, 3, 1)) == 2

    def test_one_stage(self) -> None:
        assert choose_stage([Hosted(0)], stages=1, path_length=1) == 0

    def test_what_makes_no_sense(self) -> None:
        with pytest.raises(SchedulerError, match="hosts stage 4 of 4"):
            choose_stage([Hosted(4)], stages=4, path_length=3)
        with pytest.raises(SchedulerError, match="path_length of 5"):
            choose_stage([], stages=4, path_length=5)
