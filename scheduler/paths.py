"""Path search: a greedy dynamic programme with balanced visits, then annealing from there.

Everything here depends on its arguments alone, unless a search is told by the clock when to end: the same
instance, seed, previous plan and number of iterations give the same plan, on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from scheduler.anneal import Hops, improve
from scheduler.errors import SchedulerError
from scheduler.instance import Instance
from scheduler.kernel import route
from scheduler.plan import Plan, path_fault, validate
from scheduler.timeline import Simulator

_LOAD_WEIGHT = 0.25
"""What a peer's load costs beyond the waiting that is foreseen: queues form that a prediction from the
forwards alone does not see. Of 0 to 1 the best in the mean over the demo, SkipPipe's instances and random
ones."""
_FILL = 1 << 40
"""Parts of a quota: whole, so that equal sums compare equal."""
UNEVEN_GAIN = 0.98
"""Stages are visited unevenly only where that brings the makespan below this share of what it is otherwise:
every stage learns from its visits."""


def search(
    instance: Instance,
    *,
    seed: int,
    previous: Plan | None = None,
    iterations: int = 8,
    left_s: Callable[[], float] | None = None,
    proposer: str = "",
) -> Plan:
    """A plan for ``instance``; there always is one, ``degraded`` if too few stages live.

    ``previous`` is where the search starts if that, with its dead peers replaced, beats a fresh start. Each
    of the ``iterations`` is one evaluation of a changed plan; no plan is worse than the start's. Search again
    from the result, with another seed, to go on. With ``left_s``, which tells how many seconds are left, the
    search goes on until they are used up, however many evaluations that is.
    """
    simulator = Simulator(instance)
    paths = construct(instance)
    best = simulator.score(paths)
    quotas = _uneven_quotas(instance)
    if quotas:
        uneven = construct(instance, quotas)
        score = simulator.score(uneven)
        if score.makespan_s < UNEVEN_GAIN * best.makespan_s and _holds(uneven, instance):
            paths, best = uneven, score
    if previous is not None:
        repaired = repair(previous, instance, quotas)
        if repaired is not None:
            score = simulator.score(repaired)
            if score <= best:
                paths, best = repaired, score
    found = improve(simulator, paths, best, seed=seed, iterations=iterations, left_s=left_s)
    return make_plan(instance, found.paths, found.score.makespan_s, proposer)


def make_plan(
    instance: Instance, paths: Sequence[Sequence[int]], makespan_s: float, proposer: str = ""
) -> Plan:
    """The plan with ``paths`` given by position in ``instance.peers``; finds out whether it is degraded."""
    named = tuple(tuple(instance.peers[p].peer for p in path) for path in paths)
    plan = Plan(paths=named, makespan_s=makespan_s, epoch=instance.epoch, proposer=proposer)
    short = any(len(path) < instance.path_length for path in named)
    if short or validate(plan, instance) is not None:
        return plan.model_copy(update={"degraded": True})
    return plan


def send_order(microbatches: Mapping[str, int], instance: Instance) -> list[int]:
    """The origin of each microbatch in send order: each origin's first, each one's second, and so on."""
    most = max(microbatches.values(), default=0)
    return [instance.index[o] for i in range(most) for o, n in microbatches.items() if i < n]


def construct(instance: Instance, quotas: Sequence[int] = ()) -> list[Hops]:
    """One path for each microbatch, in send order, each with the earliest predicted finish when it is chosen.

    Each path takes the stages that were visited least, measured by their ``quotas`` (``visit_quotas``); so,
    without quotas, the visits of any two living stages differ by one at most, wherever the links allow it.
    """
    builder = _Builder(instance, quotas)
    return [builder.add(origin) for origin in send_order(instance.microbatches, instance)]


class _Builder:
    """Loads and visits so far, while paths are added one by one."""

    def __init__(self, instance: Instance, quotas: Sequence[int] = ()) -> None:
        self.instance = instance
        self.free_s = np.zeros(len(instance.peers))
        self.visits = np.zeros(instance.stages, np.int64)
        self.per_visit = np.array([_FILL // max(1, quota) for quota in quotas] or [2] * instance.stages)
        """How much of its quota, in whole parts, a visit fills of each stage."""

    def add(self, origin: int) -> Hops:
        """The next path of ``origin``, counted into the loads and visits.

        It has the least visits so far, then the least predicted time. The n least visited stages have the
        least sum of visits, so where no link is missing those of two stages never differ by more than one.
        """
        length = self.instance.required_length(self.instance.peers[origin].peer)
        # The middle of the next visit counts, so that a stage of a small quota is not begun with by all.
        filled = (2 * self.visits + 1) * self.per_visit // 2
        path = np.empty(length, np.int64)
        found = route(origin, self.instance.tables, filled, self.free_s, _LOAD_WEIGHT, path)
        assert found, "an origin's required length is that of a path which there is"
        hops: Hops = path.tolist()
        self.count(hops)
        return hops

    def count(self, path: Hops) -> None:
        for hop, p in enumerate(path):
            spec = self.instance.peers[p]
            self.free_s[p] += spec.work_s + (0.0 if hop else spec.loss_s)
            if hop:
                self.visits[spec.stage] += 1


def visit_quotas(instance: Instance) -> list[int]:
    """Visits for each stage, [0, visits of stage 1, ...], that make the busiest stage's load least within the
    coverage tolerance; as even as they can be for that."""
    alive = instance.alive_stages
    microbatches = sum(instance.microbatches.values())
    quotas = [0] * instance.stages
    if not alive:
        return quotas
    speed = {s: sum(1 / max(instance.peers[p].work_s, 1e-9) for p in instance.by_stage[s]) for s in alive}
    for number in range(instance.visits):
        quotas[alive[number % len(alive)]] += 1
    spread = max(1, instance.coverage_tolerance - 1)  # whole paths do not always come out to the visit
    while True:
        busiest = max(alive, key=lambda s: (quotas[s] / speed[s], s))
        least = min(*(quotas[s] for s in alive), quotas[busiest] - 1)
        room = [s for s in alive if s != busiest and quotas[s] < min(microbatches, least + spread)]
        idlest = min(room, key=lambda s: ((quotas[s] + 1) / speed[s], s), default=None)
        if idlest is None or (quotas[idlest] + 1) / speed[idlest] >= quotas[busiest] / speed[busiest]:
            return quotas
        quotas[busiest] -= 1
        quotas[idlest] += 1


def _uneven_quotas(instance: Instance) -> list[int]:
    """The quotas, if visits may be uneven and that takes something off the busiest stage; else none."""
    if instance.coverage_tolerance < 3 or not instance.all_usable or len(instance.alive_stages) < 2:
        return []
    quotas = visit_quotas(instance)
    counts = [quotas[stage] for stage in instance.alive_stages]
    return quotas if max(counts) - min(counts) > 1 else []


def _holds(paths: Sequence[Hops], instance: Instance) -> bool:
    return validate(make_plan(instance, paths, 0.0), instance) is None


def repair(plan: Plan, instance: Instance, quotas: Sequence[int] | None = None) -> list[Hops] | None:
    """The paths of ``plan`` that still hold, in its order, and new ones for those that a dead peer broke,
    by ``quotas`` of the stages: those of the instance if they are not given.

    Microbatches that origins draw beyond the plan get paths too, those that they no longer draw lose theirs.
    None if the result would not visit the stages evenly.
    """
    builder = _Builder(instance, _uneven_quotas(instance) if quotas is None else quotas)
    left = dict(instance.microbatches)
    kept: list[Hops] = []
    broken: list[int] = []
    for path in plan.paths:
        if not left.get(path[0]):
            continue
        left[path[0]] -= 1
        if path_fault(path, instance) is None:
            kept.append([instance.index[peer] for peer in path])
            builder.count(kept[-1])
        else:
            broken.append(len(kept))
            kept.append([instance.index[path[0]]])
    for place in broken:
        kept[place] = builder.add(kept[place][0])
    kept += [builder.add(origin) for origin in send_order(left, instance)]
    return kept if _holds(kept, instance) else None


def replacement(
    instance: Instance,
    path: Sequence[str],
    hop: int,
    dead: Collection[str],
    *,
    stage: int | None = None,
    load_s: Mapping[str, float] | None = None,
) -> str | None:
    """The replica that can take ``path[hop]`` with the least predicted finish; None if none lives or is in
    reach.

    ``dead`` are peers not to be taken: dead, suspect, full, or already tried. ``stage`` says what
    ``path[hop]`` hosts, needed if ``instance`` does not list that peer any more (else SchedulerError).
    ``load_s`` is the work that waits at each peer already. Neighbours on the path that the instance does not
    list cost nothing to reach.
    """
    if stage is None:
        if path[hop] not in instance.index:
            raise SchedulerError(f"{path[hop]} is not a peer of the instance: its stage must be given")
        stage = instance.peers[instance.index[path[hop]]].stage
    before = instance.index.get(path[hop - 1]) if hop else None
    after = instance.index.get(path[hop + 1] if hop + 1 < len(path) else path[0]) if hop else None
    ends = [end for end in (before, after) if end is not None]
    best: tuple[float, str] | None = None
    for p in instance.by_stage[stage]:
        spec = instance.peers[p]
        if spec.peer in dead or spec.peer in path or not all(instance.usable[p][q] for q in ends):
            continue
        waits_s = (load_s or {}).get(spec.peer, 0.0)
        travels_s = sum(instance.hop_s[p][q] + instance.hop_s[q][p] for q in ends)
        finish = (waits_s + spec.forward_s + spec.backward_s + travels_s, spec.peer)
        if best is None or finish < best:
            best = finish
    return best[1] if best else None
