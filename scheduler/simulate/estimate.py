"""What a step is predicted to take, what holds it up, and what other schedulers would make of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from scheduler.assignment import place
from scheduler.baselines import (
    decentralised_flow,
    full_pipeline,
    greedy_router,
    random_skip,
    stochastic_wiring,
    unskipped,
)
from scheduler.bounds import bounds
from scheduler.instance import Frozen, Instance
from scheduler.paths import search
from scheduler.plan import Plan
from scheduler.simulate.build import Swarm
from scheduler.simulate.critical import Segment, critical_path
from scheduler.simulate.model import ModelSizes
from scheduler.timeline import Simulator, Timeline

Budget = Callable[[float], Callable[[], float]]
"""Of so many seconds: tells how many are left."""


def wall_clock(seconds: float) -> Callable[[], float]:
    end_s = time.monotonic() + seconds
    return lambda: end_s - time.monotonic()


class Solved(NamedTuple):
    """A swarm with everybody at its place, its plan, and the step that the simulator plays of it."""

    instance: Instance
    plan: Plan
    timeline: Timeline
    critical: tuple[Segment, ...]


def solve(swarm: Swarm, *, seed: int, seconds: float, budget: Budget = wall_clock) -> Solved:
    """Places and paths, searched for in ``seconds``.

    If the file gives nobody a stage, half of the time goes to places and paths together
    (``scheduler.assignment.place``), else those without one stay where they come in. Raises SchedulerError.
    """
    stage_of = swarm.first_stages()
    instance = swarm.instance(stage_of)
    previous = None
    if not swarm.fixed:
        placed = place(instance, seed=seed, left_s=budget(seconds / 2))
        seconds /= 2
        # Stages may be of unlike sizes: what a peer takes in its new place is reckoned anew.
        instance = swarm.instance({spec.peer: spec.stage for spec in placed.instance.peers})
        previous = placed.plan
    plan = search(instance, seed=seed, previous=previous, left_s=budget(seconds), proposer="simulate")
    timeline = Simulator(instance).timeline(plan.paths)
    return Solved(instance, plan, timeline, critical_path(timeline, plan.paths))


class Use(Frozen):
    """How busy something is: seconds of the step, and as a share of it."""

    name: str
    busy_s: float
    share: float


class Compared(Frozen):
    """Another scheduler on the same peers at the same places."""

    name: str
    step_s: float
    tokens_per_s: float
    ours: float
    """Our step's time as a share of its."""


class PeerEstimate(Frozen):
    peer: str
    stage: int
    visits: int
    busy_share: float
    sending_share: float
    """Of the time until averaging begins."""


class Estimate(Frozen):
    """The prediction. Times in seconds; of one step."""

    step_s: float
    tokens_per_s: float
    tokens: int
    microbatches: int
    bound_s: float
    """No plan for these places takes less: ``scheduler.bounds``, and averaging."""
    bound_by: str
    efficiency: float
    """bound_s / step_s"""
    averaging_s: float
    bottleneck: str
    busiest_peer: Use
    busiest_stage: Use
    busiest_uplink: Use
    critical_s: dict[str, float]
    """The critical path by what it consists of: compute, transfer, averaging."""
    degraded: bool
    peers: tuple[PeerEstimate, ...]
    compared: tuple[Compared, ...]


_BOUND_NAMES = {
    "busiest_stage_s": "the busiest stage",
    "busiest_peer_s": "an origin's own work",
    "busiest_uplink_s": "the busiest uplink",
    "path_s": "the longest path",
}


def estimate(solved: Solved, sizes: ModelSizes, *, seed: int) -> Estimate:
    """Everything that ``solved`` says."""
    instance, plan, timeline = solved.instance, solved.plan, solved.timeline
    step_s = timeline.makespan_s
    averaging_s = Simulator(instance).averaging_s
    lower = bounds(instance)
    bound_s = lower.best_s + averaging_s
    tokens = len(plan.paths) * sizes.tokens
    sending_s = _sending_s(instance, plan)
    busiest_peer = _busiest(timeline.busy_s, step_s)
    stages_s = {
        f"stage {stage}": sum(timeline.busy_s[instance.peers[p].peer] for p in group) / len(group)
        for stage, group in enumerate(instance.by_stage)
        if group
    }
    stage, uplink = _busiest(stages_s, step_s), _busiest(sending_s, step_s)
    candidates = [
        (averaging_s / step_s if step_s else 0.0, "averaging, by the slowest line among the replicas"),
        (busiest_peer.share, f"computing at {busiest_peer.name}"),
        (uplink.share, f"the uplink of {uplink.name}"),
    ]
    until_s = max(1e-12, step_s - averaging_s)
    visits = Counter(peer for path in plan.paths for peer in path)
    critical_s = {"compute": 0.0, "transfer": 0.0, "averaging": 0.0}
    for segment in solved.critical:
        kind = {"T": "transfer", "A": "averaging"}.get(segment.kind, "compute")
        critical_s[kind] += segment.end_s - segment.start_s
    return Estimate(
        step_s=step_s,
        tokens_per_s=_rate(tokens, step_s),
        tokens=tokens,
        microbatches=len(plan.paths),
        bound_s=bound_s,
        bound_by=_BOUND_NAMES[max(lower._fields, key=lambda name: float(getattr(lower, name)))],
        efficiency=bound_s / step_s if step_s else 1.0,
        averaging_s=averaging_s,
        bottleneck=max(candidates)[1],
        busiest_peer=busiest_peer,
        busiest_stage=stage,
        busiest_uplink=uplink,
        critical_s=critical_s,
        degraded=plan.degraded,
        peers=tuple(
            PeerEstimate(
                peer=spec.peer,
                stage=spec.stage,
                visits=visits[spec.peer],
                busy_share=timeline.busy_s[spec.peer] / until_s,
                sending_share=sending_s[spec.peer] / until_s,
            )
            for spec in instance.peers
        ),
        compared=tuple(
            Compared(name=name, step_s=other_s, tokens_per_s=_rate(tokens, other_s), ours=step_s / other_s)
            for name, other_s in _baselines_s(instance, seed).items()
        ),
    )


def _baselines_s(instance: Instance, seed: int) -> dict[str, float]:
    """Steps of the baselines, averaging included, the slowest first."""
    whole = unskipped(instance)
    found_s = {
        "full pipeline": full_pipeline(instance).makespan_s,
        "random skip": random_skip(instance, seed=seed).makespan_s,
        "stochastic wiring (SWARM)": stochastic_wiring(instance, seed=seed).makespan_s,
        "decentralised flow (GWTF)": decentralised_flow(instance, seed=seed).makespan_s,
        "greedy router": greedy_router(instance).makespan_s,
    }
    if whole == instance:
        del found_s["random skip"]  # there is nothing to skip
    return dict(sorted(found_s.items(), key=lambda pair: -pair[1]))


def _rate(tokens: int, step_s: float) -> float:
    return tokens / step_s if step_s else 0.0


def _sending_s(instance: Instance, plan: Plan) -> dict[str, float]:
    """Seconds in which each peer's uplink is busy: two tensors for each visit, to the next hop and back."""
    up_s = instance.tables.up_s.tolist()
    sent: Counter[str] = Counter()
    for path in plan.paths:
        if len(path) > 1:
            sent.update(dict.fromkeys(path, 2))
    return {spec.peer: sent[spec.peer] * up_s[p] for p, spec in enumerate(instance.peers)}


def _busiest(busy_s: dict[str, float], step_s: float) -> Use:
    name = max(busy_s, key=lambda name: busy_s[name])
    return Use(name=name, busy_s=busy_s[name], share=busy_s[name] / step_s if step_s else 0.0)
