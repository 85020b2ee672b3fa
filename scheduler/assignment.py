"""Which peer hosts which stage: a newcomer's choice, moves that repair a membership, all places at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from scheduler.anneal import improve
from scheduler.errors import SchedulerError
from scheduler.instance import Instance
from scheduler.paths import construct, make_plan
from scheduler.plan import Plan
from scheduler.timeline import Simulator


class Hosted(NamedTuple):
    """A peer that hosts a stage; ``work_s``: its seconds for one microbatch in all, 0 if not known."""

    stage: int
    work_s: float = 0.0


def visits_per_microbatch(stage: int, *, stages: int, path_length: int) -> float:
    """How often a microbatch visits ``stage`` in the mean: always stage 0, the others in their turn."""
    return 1.0 if stage == 0 else (path_length - 1) / (stages - 1)


def _demand(stages: int, path_length: int, work_s: Iterable[float]) -> tuple[tuple[float, ...], list[float]]:
    """(work of a visit to each stage, work that a microbatch brings it in the mean)."""
    weights = tuple(work_s) or (1.0,) * stages
    if len(weights) != stages or not 1 <= path_length <= stages:
        raise SchedulerError(f"{len(weights)} weights and a path_length of {path_length} for {stages} stages")
    visits = [visits_per_microbatch(stage, stages=stages, path_length=path_length) for stage in range(stages)]
    return weights, [times * weight for times, weight in zip(visits, weights, strict=True)]


def choose_stage(
    hosted: Iterable[Hosted],
    *,
    stages: int,
    path_length: int,
    start_replicas: int = 1,
    work_s: Iterable[float] = (),
    ahead: int = 0,
) -> int:
    """The stage most in need: one with fewer than ``start_replicas`` first, the emptiest before others; then
    the one with most visits for its capacity.

    ``work_s[s]`` is the relative work of a visit to stage s (its layers, or seconds on one machine; equal if
    left out), which weighs the need of uneven stages. ``ahead`` newcomers are known to choose at the same
    time and come first, in an order that all agree on: they are given their stages before ours is chosen.
    Ties go to the lowest stage. Raises SchedulerError if a stage is out of range.
    """
    weights, demand = _demand(stages, path_length, work_s)
    speeds: list[list[float]] = [[] for _ in range(stages)]
    for peer in hosted:
        if not 0 <= peer.stage < stages:
            raise SchedulerError(f"a peer hosts stage {peer.stage} of {stages}")
        # A peer's speed is what it does of its own stage's work in a second; 0 stands for not known.
        speeds[peer.stage].append(weights[peer.stage] / peer.work_s if peer.work_s > 0 else 0.0)
    known = sorted(speed for stage in speeds for speed in stage if speed > 0)
    usual = known[len(known) // 2] if known else 1.0
    count = [len(stage) for stage in speeds]
    capacity = [sum(speed or usual for speed in stage) for stage in speeds]

    def need(stage: int) -> tuple[int, float, int]:
        load = demand[stage] / capacity[stage] if count[stage] else demand[stage]
        return (min(count[stage], start_replicas), -load, stage)

    for _ in range(ahead):
        chosen = min(range(stages), key=need)
        count[chosen] += 1
        capacity[chosen] += usual
    return min(range(stages), key=need)


class Replica(NamedTuple):
    """A peer in the snapshot that moves are decided from."""

    peer: str
    stage: int
    movable: bool = True
    """False while it is on its way to another stage (it counts there already) or cools down after a move."""


class Move(NamedTuple):
    """``peer`` leaves stage ``source`` for ``target``."""

    peer: str
    source: int
    target: int


MARGIN = 0.75
"""A move that only balances must bring the greatest load of a stage below this share of what it was: small
gains are not worth a download, and would be taken back by the next peer that joins."""


def moves(
    replicas: Iterable[Replica],
    *,
    stages: int,
    path_length: int,
    start_replicas: int = 1,
    work_s: Iterable[float] = (),
) -> tuple[Move, ...]:
    """The fewest moves that repair a membership: first stages without a replica, then those with fewer than
    ``start_replicas`` where another has more, then a stage that is the bottleneck by a clear margin.

    A function of the snapshot alone, so that all who decide from one snapshot decide alike and each peer
    makes its own move and no other's. Nobody leaves a stage empty, and none moves twice. Of a stage's peers
    the first by name that may move does.
    """
    _, demand = _demand(stages, path_length, work_s)
    count = [0] * stages
    free: list[list[str]] = [[] for _ in range(stages)]
    for replica in sorted(replicas):
        if not 0 <= replica.stage < stages:
            raise SchedulerError(f"a peer hosts stage {replica.stage} of {stages}")
        count[replica.stage] += 1
        if replica.movable:
            free[replica.stage].append(replica.peer)
    made: list[Move] = []
    while (pair := _next_move(demand, count, free, start_replicas)) is not None:
        source, target = pair
        made.append(Move(free[source].pop(0), source, target))
        count[source] -= 1
        count[target] += 1
    return tuple(made)


def _next_move(
    demand: list[float], count: list[int], free: list[list[str]], start_replicas: int
) -> tuple[int, int] | None:
    """(source, target) of the move that helps most; None if none is worth while."""
    stages = range(len(demand))

    def load(stage: int, replicas: int) -> float:
        return demand[stage] / replicas if replicas else float("inf")

    def cheapest(least: int) -> int | None:
        """The stage that feels the loss of a peer least and keeps ``least``."""
        able = [stage for stage in stages if free[stage] and count[stage] > least]
        return min(able, key=lambda stage: (load(stage, count[stage] - 1), stage), default=None)

    for wanted, kept in ((1, 1), (start_replicas, start_replicas)):
        lacking = [stage for stage in stages if count[stage] < wanted]
        source = cheapest(kept)
        if lacking and source is not None:
            return source, max(lacking, key=lambda stage: (-count[stage], demand[stage], -stage))
    busiest = max(stages, key=lambda stage: (load(stage, count[stage]), -stage))
    source = cheapest(max(1, start_replicas))
    if source is None or source == busiest or not count[busiest]:
        return None
    before = load(busiest, count[busiest])
    after = max(load(stage, count[stage] + (stage == busiest) - (stage == source)) for stage in stages)
    return (source, busiest) if after < MARGIN * before else None


class Placement(NamedTuple):
    """``instance`` with every peer at its place, and the plan that was found for it."""

    instance: Instance
    plan: Plan


def place(
    instance: Instance,
    *,
    seed: int,
    iterations: int = 0,
    left_s: Callable[[], float] | None = None,
    proposer: str = "",
) -> Placement:
    """Which peer hosts which stage, and the paths: searched for together, averaging included, from the places
    that ``instance`` gives.

    Stages keep their numbers of replicas; an origin that leaves stage 0 hands its microbatches to the peer
    that takes its place. For a run that has not begun: moving later costs a download of the stage's state.
    ``iterations`` and ``left_s`` as in ``scheduler.paths.search``.
    """
    simulator = Simulator(instance)
    paths = construct(instance)
    found = improve(
        simulator,
        paths,
        simulator.score(paths),
        seed=seed,
        iterations=iterations,
        left_s=left_s,
        free=True,
    )
    peers = tuple(
        spec.model_copy(update={"stage": stage})
        for spec, stage in zip(instance.peers, found.stage, strict=True)
    )
    drawn = Counter(instance.peers[path[0]].peer for path in found.paths)
    placed = instance.model_copy(update={"peers": peers, "microbatches": dict(sorted(drawn.items()))})
    return Placement(placed, make_plan(placed, found.paths, found.score.makespan_s, proposer))
