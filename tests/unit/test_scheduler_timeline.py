"""The event simulator: cases worked out by hand, and what must hold of every schedule."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import demo_instance, instances
from slow_timeline import slow_rows

from scheduler.baselines import random_skip
from scheduler.bounds import bounds
from scheduler.errors import SchedulerError
from scheduler.instance import Instance, Link, PeerSpec
from scheduler.paths import search
from scheduler.timeline import Row, Simulator, Timeline, simulate


def peer(name: str, stage: int, forward_s: float, backward_s: float, **more: float) -> PeerSpec:
    return PeerSpec.model_validate(
        {"peer": name, "stage": stage, "forward_s": forward_s, "backward_s": backward_s, **more}
    )


def problem(*peers: PeerSpec, microbatches: dict[str, int], stages: int = 2, **more: object) -> Instance:
    fields = {"activation_bytes": 0, "path_length": stages, **more}
    return Instance.model_validate({"stages": stages, "peers": peers, "microbatches": microbatches, **fields})


def rows_of(timeline: Timeline, name: str) -> list[tuple[str, int, float, float]]:
    return [(r.kind, r.microbatch, r.start_s, r.end_s) for r in timeline.rows if r.peer == name]


def test_one_microbatch_by_hand() -> None:
    instance = problem(
        peer("o", 0, 1.0, 2.0, weight_s=0.5, loss_s=0.25),
        peer("a", 1, 3.0, 4.0, weight_s=1.0),
        microbatches={"o": 1},
        default_latency_s=0.5,
    )
    timeline = simulate(instance, [("o", "a")])
    assert rows_of(timeline, "o") == [
        ("F", 0, 0.0, 1.0),
        ("L", 0, 5.0, 5.25),
        ("B", 0, 10.25, 12.25),
        ("W", 0, 12.25, 12.75),
    ]
    # The word of the commit, at 12.25, takes one latency to a.
    assert rows_of(timeline, "a") == [("F", 0, 1.5, 4.5), ("B", 0, 5.75, 9.75), ("W", 0, 12.75, 13.75)]
    assert timeline.makespan_s == 13.75
    assert timeline.finish_s == (12.25,)
    assert timeline.busy_s == {"o": 3.75, "a": 8.0}


def test_a_path_of_the_origin_alone() -> None:
    instance = problem(peer("o", 0, 1.0, 2.0, loss_s=0.5), microbatches={"o": 2}, stages=1)
    # Backward work of the first goes before the forward of the second.
    assert [kind for kind, *_ in rows_of(simulate(instance, [("o",), ("o",)]), "o")] == list("FLBFLB")


def test_two_transfers_share_an_uplink() -> None:
    instance = problem(
        peer("o", 0, 0.125, 0.0, up_bytes_per_s=10.0),
        peer("a", 1, 1.0, 1.0),
        peer("b", 1, 1.0, 1.0),
        microbatches={"o": 2},
        activation_bytes=10,
    )
    timeline = simulate(instance, [("o", "a"), ("o", "b")])
    assert rows_of(timeline, "a")[0] == ("F", 0, 1.125, 2.125)
    assert rows_of(timeline, "b")[0] == ("F", 1, 2.125, 3.125)


def test_a_slow_link_holds_up_itself_and_not_the_uplink() -> None:
    instance = problem(
        peer("o", 0, 0.0, 0.0, up_bytes_per_s=10.0),
        peer("a", 1, 0.0, 0.0),
        peer("b", 1, 0.0, 0.0),
        microbatches={"o": 3},
        activation_bytes=10,
        links=(Link("o", "a", 0.5, 2.0),),
    )
    timeline = simulate(instance, [("o", "a"), ("o", "a"), ("o", "b")])
    # The link to a takes 5 s for each tensor; the uplink is free again after 1 s each.
    assert [start for kind, _, start, _ in rows_of(timeline, "a") if kind == "F"] == [5.5, 10.5]
    assert [start for kind, _, start, _ in rows_of(timeline, "b") if kind == "F"] == [3.0]


def test_two_senders_share_a_downlink() -> None:
    instance = problem(
        peer("o", 0, 0.0, 0.0),
        peer("u", 0, 0.0, 0.0),
        peer("a", 1, 0.0, 0.0, down_bytes_per_s=10.0),
        microbatches={"o": 1, "u": 1},
        activation_bytes=10,
        links=(Link("o", "a", 4.0, 1e15), Link("u", "a", 0.25, 1e15)),
    )
    # u is sent second and reaches a first: it does not wait for o's.
    timeline = simulate(instance, [("o", "a"), ("u", "a")])
    forwards = {mb: start for kind, mb, start, _ in rows_of(timeline, "a") if kind == "F"}
    assert forwards == pytest.approx({1: 1.25, 0: 5.0})
    # At the same latency the second has to wait for the first.
    level = instance.model_copy(update={"links": (), "default_latency_s": 0.25})
    timeline = simulate(level, [("o", "a"), ("u", "a")])
    assert [start for kind, _, start, _ in rows_of(timeline, "a") if kind == "F"] == [1.25, 2.25]


def test_a_forward_waits_for_a_memory_slot() -> None:
    instance = problem(
        peer("o", 0, 1.0, 1.0),
        peer("a", 1, 1.0, 1.0, memory_slots=1),
        microbatches={"o": 2},
        default_latency_s=3.0,
    )
    timeline = simulate(instance, [("o", "a"), ("o", "a")])
    # The first backward at a ends at 12; the second forward lay there since 5.
    assert rows_of(timeline, "a")[:3] == [("F", 0, 4.0, 5.0), ("B", 0, 11.0, 12.0), ("F", 1, 12.0, 13.0)]


def test_backward_goes_first_when_both_come_at_once() -> None:
    instance = problem(
        peer("o", 0, 1.0, 1.0),
        peer("u", 0, 7.0, 1.0),
        peer("a", 1, 1.0, 1.0),
        microbatches={"o": 1, "u": 1},
        default_latency_s=2.0,
        links=(Link("u", "a", 1.0, 1e15),),
    )
    # o's gradient comes to a at 1 + 2 + 1 + 2 + 2 = 8, and so does u's activation, at 7 + 1.
    timeline = simulate(instance, [("u", "a"), ("o", "a")])
    assert rows_of(timeline, "a")[1:3] == [("B", 1, 8.0, 9.0), ("F", 0, 9.0, 10.0)]


def test_weight_gradients_fill_the_gaps() -> None:
    instance = problem(
        peer("o", 0, 1.0, 1.0, weight_s=1.0, memory_slots=1),
        peer("a", 1, 1.0, 1.0),
        microbatches={"o": 2},
        default_latency_s=2.0,
    )
    timeline = simulate(instance, [("o", "a"), ("o", "a")])
    # With one slot the origin starts its second forward when the first is back, and then has time for W.
    assert rows_of(timeline, "o") == [
        ("F", 0, 0.0, 1.0),
        ("L", 0, 6.0, 6.0),
        ("B", 0, 11.0, 12.0),
        ("F", 1, 12.0, 13.0),
        ("W", 0, 13.0, 14.0),
        ("L", 1, 18.0, 18.0),
        ("B", 1, 23.0, 24.0),
        ("W", 1, 24.0, 25.0),
    ]


def test_averaging_comes_when_all_is_done() -> None:
    instance = problem(
        peer("o", 0, 1.0, 1.0, up_bytes_per_s=100.0),
        peer("u", 0, 1.0, 1.0, up_bytes_per_s=50.0),
        peer("a", 1, 1.0, 1.0),
        microbatches={"o": 1, "u": 0},
        default_latency_s=0.5,
        gradient_bytes=(1000, 1000),
    )
    timeline = simulate(instance, [("o", "a")])
    # Done at 6; then 2 (2-1)/2 x 1000 bytes at the slower uplink and two latencies. a is alone in its stage.
    assert [row for row in timeline.rows if row.kind == "A"] == [
        Row("o", "A", -1, 6.0, 27.0),
        Row("u", "A", -1, 6.0, 27.0),
    ]
    simulator = Simulator(instance)
    assert simulator.score(simulator.indices([("o", "a")])).makespan_s == timeline.makespan_s == 27.0


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (("o", "x"), "not a peer"),
        ((), "needs an origin"),
        (("o", "b"), "no way between o and b"),
    ],
)
def test_paths_that_cannot_be_walked(path: tuple[str, ...], reason: str) -> None:
    instance = problem(
        peer("o", 0, 1.0, 1.0),
        peer("a", 1, 1.0, 1.0),
        peer("b", 1, 1.0, 1.0),
        microbatches={"o": 1},
        links=(Link("b", "o", 0.0, 0.0),),
    )
    with pytest.raises(SchedulerError, match=reason):
        simulate(instance, [path])


def test_paths_that_wait_for_each_other_are_told() -> None:
    slot = {"memory_slots": 1}
    instance = problem(
        peer("o", 0, 0.0, 1.0),
        peer("u", 0, 0.0, 1.0),
        peer("a", 1, 1.0, 1.0, **slot),
        peer("b", 2, 1.0, 1.0, **slot),
        microbatches={"o": 1, "u": 1},
        stages=3,
    )
    with pytest.raises(SchedulerError, match="wait for each other"):
        simulate(instance, [("o", "a", "b"), ("u", "b", "a")])


@given(instances(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_holds_of_every_schedule(instance: Instance, seed: int, by_chance: bool) -> None:
    plan = random_skip(instance, seed=seed) if by_chance else search(instance, seed=seed, iterations=2)
    timeline = simulate(instance, plan.paths)
    by_peer: dict[str, list[Row]] = defaultdict(list)
    by_task: dict[tuple[str, str, int], Row] = {}
    for row in timeline.rows:
        assert row.end_s >= row.start_s >= 0
        if row.kind != "A":
            by_peer[row.peer].append(row)
            assert (row.peer, row.kind, row.microbatch) not in by_task, "computed twice"
            by_task[row.peer, row.kind, row.microbatch] = row
    spec_of = {spec.peer: spec for spec in instance.peers}
    for name, rows in by_peer.items():
        for before, after in pairwise(rows):
            assert before.end_s <= after.start_s, "one task at a time"
        assert timeline.busy_s[name] == pytest.approx(sum(row.end_s - row.start_s for row in rows))
        _check_slots(rows, spec_of[name].memory_slots)
    for mb, path in enumerate(plan.paths):
        order = [by_task[name, "F", mb] for name in path] + [by_task[path[0], "L", mb]]
        order += [by_task[name, "B", mb] for name in reversed(path)]
        places = [*path, path[0], *reversed(path)]
        for (before, after), (a, b) in zip(pairwise(order), pairwise(places), strict=True):
            i, j = instance.index[a], instance.index[b]
            travel_s = 0.0
            if a != b:
                rate = min(
                    spec_of[a].up_bytes_per_s,
                    spec_of[b].down_bytes_per_s,
                    float(instance.bandwidth_bytes_per_s[i, j]),
                )
                travel_s = float(instance.latency_s[i, j]) + instance.activation_bytes / rate
            assert after.start_s >= before.end_s + travel_s - 1e-9
        assert order[-1].end_s == timeline.finish_s[mb]
        for name in path:
            weight = by_task.get((name, "W", mb))
            assert (weight is not None) == (spec_of[name].weight_s > 0)
            assert weight is None or weight.start_s >= timeline.finish_s[mb]
    simulator = Simulator(instance)
    score = simulator.score(simulator.indices(plan.paths))
    assert score.makespan_s == timeline.makespan_s == plan.makespan_s
    assert score.total_s == sum(timeline.finish_s)
    if not by_chance:
        assert timeline.makespan_s >= bounds(instance).best_s - 1e-9


@given(instances(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_kernel_is_the_slow_simulator(instance: Instance, seed: int, shuffled: bool) -> None:
    plan = random_skip(instance, seed=seed)
    paths = [list(path) for path in plan.paths]
    if shuffled:
        # Any order of stages may be simulated, and may get stuck.
        rng = random.Random(seed)
        for path in paths:
            path[1:] = rng.sample(path[1:], len(path) - 1)
    hops = [[instance.index[p] for p in path] for path in paths]
    try:
        rows = slow_rows(instance, hops)
    except SchedulerError:
        with pytest.raises(SchedulerError):
            Simulator(instance).score(hops)
        return
    timeline = simulate(instance, paths)
    assert [row for row in timeline.rows if row.kind != "A"] == [
        Row(instance.peers[p].peer, *rest) for p, *rest in rows
    ]
    for finish_s, split in zip(timeline.finish_s, timeline.split, strict=True):
        assert sum(split) == pytest.approx(finish_s)
        assert split.waiting_s >= -1e-9


@given(instances(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_nobody_idles_and_the_right_task_goes_first(instance: Instance, seed: int) -> None:
    # Without bytes to send, the rows tell when each task could begin; that and the rules fix the schedule.
    instance = instance.model_copy(update={"activation_bytes": 0, "gradient_bytes": ()})
    plan = random_skip(instance, seed=seed)
    timeline = simulate(instance, plan.paths)
    ready_s = _ready(timeline, plan.paths, instance)
    for spec in instance.peers:
        rows = [row for row in timeline.rows if row.peer == spec.peer]
        held, free_s = 0, 0.0
        for i, row in enumerate(rows):
            waiting = [other for other in rows[i + 1 :] if ready_s[other] < row.start_s]
            if held == spec.memory_slots:
                waiting = [other for other in waiting if other.kind != "F"]
            assert all(_rank(row) < _rank(other) for other in waiting), "the first of those that wait"
            if row.start_s > free_s:
                # It was idle: what it does now has come this moment.
                assert row.start_s == ready_s[row]
            held += {"F": 1, "B": -1}.get(row.kind, 0)
            free_s = row.end_s


def _rank(row: Row) -> tuple[int, int, str]:
    return ({"B": 0, "L": 0, "F": 1, "W": 2}[row.kind], row.microbatch, row.kind)


def _ready(timeline: Timeline, paths: tuple[tuple[str, ...], ...], instance: Instance) -> dict[Row, float]:
    """When the input of each task was there."""
    by_task = {(row.peer, row.kind, row.microbatch): row for row in timeline.rows}
    ready_s: dict[Row, float] = {}

    def travel_s(a: str, b: str) -> float:
        return 0.0 if a == b else float(instance.latency_s[instance.index[a], instance.index[b]])

    for mb, path in enumerate(paths):
        order = [*((p, "F") for p in path), (path[0], "L"), *((p, "B") for p in reversed(path))]
        ready_s[by_task[path[0], "F", mb]] = 0.0
        for (a, kind), (b, next_kind) in pairwise(order):
            ready_s[by_task[b, next_kind, mb]] = by_task[a, kind, mb].end_s + travel_s(a, b)
        for peer in path:
            if (peer, "W", mb) in by_task:
                ready_s[by_task[peer, "W", mb]] = timeline.finish_s[mb] + travel_s(path[0], peer)
    return ready_s


def _check_slots(rows: list[Row], slots: int) -> None:
    held = 0
    for row in rows:
        if row.kind == "F":
            held += 1
            assert held <= slots
        elif row.kind == "B":
            held -= 1
    assert held == 0


def test_a_run_depends_on_its_arguments_alone() -> None:
    instance = demo_instance()
    paths = list(random_skip(instance, seed=3).paths)
    random.seed(1)
    first = simulate(instance, paths)
    random.seed(2)
    assert simulate(Instance.from_json(instance.to_json()), paths) == first
