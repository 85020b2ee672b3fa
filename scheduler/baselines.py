"""What a schedule is measured against, in the same simulator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from scheduler.anneal import Hops
from scheduler.instance import Instance
from scheduler.kernel import Floats
from scheduler.paths import construct, make_plan, send_order
from scheduler.plan import Plan
from scheduler.timeline import Simulator

_CUT_S = 1e9
"""Stands for the time of a link that cannot be used, where infinity could not be summed."""


def unskipped(instance: Instance) -> Instance:
    """The same problem with every microbatch through every stage."""
    return instance.model_copy(update={"path_length": instance.stages})


def full_pipeline(instance: Instance) -> Plan:
    """Every microbatch visits every living stage, replicas by the cheapest matching of stage to stage.

    DT-FM's objective (Yuan et al. 2022, Decentralized Training of Foundation Models in Heterogeneous
    Environments, section 3): between each two neighbour stages the matching whose longest hop is shortest, of
    those the one with the least sum; or the least sum alone where that gives a shorter step, and all
    microbatches at once or some. Each replica gets as many as its speed allows. The plan is one for
    ``unskipped(instance)``.
    """
    whole = unskipped(instance)
    order = send_order(whole.microbatches, whole)
    origins = max(1, len(set(order)))
    # What is matched at once: with fewer, what starts together is spread over the replicas.
    plans = [
        _plan_of(whole, _matched(whole, order, batch, least_sum), "full-pipeline")
        for batch in (origins, 2 * origins, max(1, len(order)))
        for least_sum in (False, True)
    ]
    return min(plans, key=lambda plan: plan.makespan_s)


def _matched(whole: Instance, order: Hops, batch: int, least_sum: bool) -> list[Hops]:
    """Paths through all living stages, ``batch`` of them matched at once."""
    paths: list[Hops] = [[origin] for origin in order]
    there_and_back_s = np.minimum(whole.tables.hop_s, _CUT_S) + np.minimum(whole.tables.hop_s.T, _CUT_S)
    for stage in whole.alive_stages:
        seats = _seats(whole, stage, len(order))
        for begin in range(0, len(order), batch):
            now = slice(begin, begin + batch)
            cost_s = there_and_back_s[np.ix_([path[-1] for path in paths[now]], seats[now])]
            if stage == whole.alive_stages[-1]:
                cost_s = cost_s + there_and_back_s[np.ix_(seats[now], order[now])].T
            matched = _least_sum_matching(cost_s) if least_sum else _bottleneck_matching(cost_s)
            for path, seat in zip(paths[now], matched, strict=True):
                path.append(seats[now][seat])
    return paths


def random_skip(instance: Instance, *, seed: int) -> Plan:
    """Every microbatch visits random stages, as many as it must, at random replicas: no balance, no
    foresight.

    A walk is drawn anew until its links can be used. If none was found in 1,000 draws, that of the search is
    taken.
    """
    rng = random.Random(seed)
    return _wired(instance, rng, lambda path, stage: rng.choice(instance.by_stage[stage]), "random-skip")


def stochastic_wiring(instance: Instance, *, seed: int) -> Plan:
    """Random stages; replicas by SWARM's interleaved weighted round robin (Ryabinin et al. 2023, SWARM
    Parallelism, section 3.2): each origin takes the replica with the least time given to it so far, and adds
    what a microbatch takes there."""
    rng = random.Random(seed)
    given_s: dict[tuple[int, int], float] = {}

    def choose(path: Hops, stage: int) -> int:
        origin = path[0]
        ways = [q for q in instance.by_stage[stage] if instance.usable[origin][q]]
        q = min(
            ways or instance.by_stage[stage],
            key=lambda q: (given_s.get((origin, q), 0.0) + _answer_s(instance, origin, q), rng.random()),
        )
        given_s[origin, q] = given_s.get((origin, q), 0.0) + _answer_s(instance, origin, q)
        return q

    return _wired(instance, rng, choose, "stochastic-wiring")


def greedy_router(instance: Instance) -> Plan:
    """No plan: each hop sends on to the peer that seems nearest, by the way there and the work that this
    origin has given it so far. Nobody sees to it that stages are visited evenly."""
    given_s: dict[tuple[int, int], float] = {}
    fallback = construct(instance)
    paths = []
    for i, origin in enumerate(send_order(instance.microbatches, instance)):
        length = instance.required_length(instance.peers[origin].peer)
        path = [origin]
        while len(path) < length:
            later = [s for s in instance.alive_stages if s > instance.peers[path[-1]].stage]
            able = later[: len(later) - (length - len(path)) + 1]
            ways = [q for s in able for q in instance.by_stage[s] if instance.usable[path[-1]][q]]
            if not ways:
                break
            seems_s = {q: given_s.get((origin, q), 0.0) + instance.hop_s[path[-1]][q] for q in ways}
            path.append(min(ways, key=seems_s.__getitem__))
        if len(path) < length or instance.gap(path):
            path = fallback[i]
        for q in path[1:]:
            given_s[origin, q] = given_s.get((origin, q), 0.0) + instance.peers[q].work_s
        paths.append(path)
    return _plan_of(instance, paths, "greedy-router")


_FLOW_MOVES = 3000
"""Local moves of ``decentralised_flow``: more brought no shorter steps on SkipPipe's instances."""


def decentralised_flow(instance: Instance, *, seed: int) -> Plan:
    """GWTF's flow (Go With The Flow, churn-tolerant decentralised training): peers change the next hops of
    the flows through them where that lowers the sum of edge costs, by annealing, each within its capacity.

    An edge costs (c_i + c_j) / 2 + (l_ij + l_ji) / 2 + 2 size / (b_ij + b_ji).
    """
    rng = random.Random(seed)
    visits = [0] * len(instance.peers)
    capacity = _capacity(instance)

    def choose(path: Hops, stage: int) -> int:
        open_ = [q for q in instance.by_stage[stage] if visits[q] < capacity[q]]
        q = min(open_ or instance.by_stage[stage], key=lambda q: _edge_s(instance, path[-1], q))
        visits[q] += 1
        return q

    plan = _wired(instance, rng, choose, "decentralised-flow")
    paths = [[instance.index[p] for p in path] for path in plan.paths]
    heat_s = max((_flow_s(instance, path) for path in paths), default=0.0) / 10
    for move in range(_FLOW_MOVES if len(paths) > 1 else 0):
        one, other = rng.sample(paths, 2)
        if len(one) < 2 or len(other) < 2:
            continue
        a = rng.randrange(1, len(one))
        stage = instance.peers[one[a]].stage
        b = next((b for b, q in enumerate(other) if b and instance.peers[q].stage == stage), None)
        if b is None or one[a] == other[b]:
            continue
        before_s = _flow_s(instance, one) + _flow_s(instance, other)
        one[a], other[b] = other[b], one[a]
        worse_s = _flow_s(instance, one) + _flow_s(instance, other) - before_s
        warm_s = heat_s * (1 - move / _FLOW_MOVES)
        if not math.isfinite(worse_s) or (
            worse_s > 0 and rng.random() >= math.exp(-worse_s / max(warm_s, 1e-9))
        ):
            one[a], other[b] = other[b], one[a]
    return _plan_of(instance, paths, "decentralised-flow")


def _wired(instance: Instance, rng: random.Random, choose: Callable[[Hops, int], int], proposer: str) -> Plan:
    """Random stages for each microbatch, and of each stage the replica that ``choose`` takes for a path."""
    fallback = construct(instance)
    paths = []
    for i, origin in enumerate(send_order(instance.microbatches, instance)):
        length = instance.required_length(instance.peers[origin].peer)
        for _ in range(1000):
            path = [origin]
            for stage in sorted(rng.sample(instance.alive_stages, length - 1)):
                path.append(choose(path, stage))
            if not instance.gap(path):
                paths.append(path)
                break
        else:
            paths.append(fallback[i])
    return _plan_of(instance, paths, proposer)


def _plan_of(instance: Instance, paths: list[Hops], proposer: str) -> Plan:
    """The plan of ``paths``; in the place of one that cannot be walked, the search's."""
    if any(instance.gap(path) for path in paths):
        pairs = zip(paths, construct(instance), strict=True)
        paths = [other if instance.gap(path) else path for path, other in pairs]
    return make_plan(instance, paths, Simulator(instance).score(paths).makespan_s, proposer)


def _answer_s(instance: Instance, p: int, q: int) -> float:
    """What a microbatch at q takes, as p sees it."""
    return instance.peers[q].work_s + instance.hop_s[p][q] + instance.hop_s[q][p]


def _edge_s(instance: Instance, p: int, q: int) -> float:
    both = instance.tables.rate[p, q] + instance.tables.rate[q, p]
    if both == 0:
        return math.inf
    computing_s = (instance.peers[p].work_s + instance.peers[q].work_s) / 2
    travelling_s = float(instance.latency_s[p, q] + instance.latency_s[q, p]) / 2
    return computing_s + travelling_s + 2 * instance.activation_bytes / float(both)


def _flow_s(instance: Instance, path: Hops) -> float:
    ring = zip(path, [*path[1:], path[0]], strict=True)
    return sum(_edge_s(instance, p, q) if instance.usable[p][q] else math.inf for p, q in ring)


def _capacity(instance: Instance) -> list[int]:
    """How many visits each peer takes, when all stages are visited alike."""
    each = math.ceil(instance.visits / max(1, len(instance.alive_stages)))
    capacity = [0] * len(instance.peers)
    for stage in instance.alive_stages:
        for q in _seats(instance, stage, each):
            capacity[q] += 1
    return capacity


def _seats(instance: Instance, stage: int, number: int) -> Hops:
    """``number`` visits to the replicas of ``stage`` one after the other, each to the one that would have
    done it first."""
    served = dict.fromkeys(instance.by_stage[stage], 0)
    seats = []
    for _ in range(number):
        q = min(served, key=lambda q: ((served[q] + 1) * instance.peers[q].work_s, served[q], q))
        served[q] += 1
        seats.append(q)
    return seats


def _bottleneck_matching(cost_s: Floats) -> list[int]:
    """Column of each row of ``cost_s`` ``[m, m]``: the matching whose greatest cost is least, of those one of
    least sum."""
    values = np.unique(cost_s)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        over = cost_s > values[middle]
        matched = _least_sum_matching(over.astype(np.float64))
        if over[np.arange(len(cost_s)), matched].any():
            low = middle + 1
        else:
            high = middle
    limit_s = values[low] if len(values) else 0.0
    return _least_sum_matching(np.where(cost_s > limit_s, len(cost_s) * _CUT_S, cost_s))


def _least_sum_matching(cost: Floats) -> list[int]:
    """Column of each row: the Hungarian method with potentials (Kuhn 1955; Jonker and Volgenant 1987)."""
    m = len(cost)
    row_of = np.full(m + 1, -1)
    u, v = np.zeros(m), np.zeros(m + 1)
    for i in range(m):
        row_of[m] = i
        column = m
        least, before = np.full(m, np.inf), np.full(m, m)
        seen = np.zeros(m + 1, bool)
        while row_of[column] >= 0:
            seen[column] = True
            row = row_of[column]
            reduced = cost[row] - u[row] - v[:m]
            closer = ~seen[:m] & (reduced < least)
            least[closer], before[closer] = reduced[closer], column
            open_ = np.where(seen[:m], np.inf, least)
            following = int(open_.argmin())
            delta = open_[following]
            u[row_of[seen]] += delta
            v[seen] -= delta
            least[~seen[:m]] -= delta
            column = following
        while column != m:
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    matched = [0] * m
    for column, row in enumerate(row_of[:m].tolist()):
        matched[row] = column
    return matched
