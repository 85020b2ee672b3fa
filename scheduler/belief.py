"""Which of the speeds that peers claim are planned with: those that others do not contradict.

Each peer tells in its view how fast those that it sends to passed on what they got (``PeerView.seen``), as
the hops after them saw it. A peer that claims to be faster than that is planned with what was seen. Nobody is
believed alone, but each its own eyes: a slanderer needs a second one. Who claims to be slower than it is gets
less to do, and nobody else is harmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from scheduler.instance import Instance, PeerSpec
from scheduler.plan import Plan, validate
from scheduler.timeline import simulate
from scheduler.view import PeerView

DOUBT = 2.0
"""How many times longer than it claims a peer may take before it is doubted: noise is within."""
NOISE_S = 0.02
"""Seconds by which any measurement may be off."""


class Doubt(NamedTuple):
    """A claim that was not believed."""

    peer: str
    claimed_s: float
    """For a forward."""
    seen_s: float
    """What a forward is planned with instead."""


class _Visit(NamedTuple):
    """Seconds from one hop's sending to the arrival at the hop after the next."""

    span_s: float
    links_s: float
    """Of it, what the links take."""


def believed(
    instance: Instance, plan: Plan | None, seen: Mapping[str, float]
) -> tuple[Instance, list[Doubt]]:
    """``instance`` with the speeds of those slowed down that claim to be faster than was ``seen`` (peer ->
    seconds, ``witnessed``), and who they are. A peer that ``plan`` loads until work waits before it is
    excused as long as the simulator says that it waits."""
    suspects = {
        peer: taken_s
        for peer, taken_s in seen.items()
        if peer in instance.index and _doubtful(taken_s, _unhindered(instance, instance.index[peer]))
    }
    if not suspects:
        return instance, []
    planned = _short_visits(instance, plan) if plan is not None and not validate(plan, instance) else {}
    doubts: list[Doubt] = []
    for peer, taken_s in sorted(suspects.items()):
        p = instance.index[peer]
        visit = planned.get(p) or _unhindered(instance, p)
        if _doubtful(taken_s, visit):
            doubts.append(Doubt(peer, instance.peers[p].forward_s, taken_s - visit.links_s))
    if not doubts:
        return instance, []
    slower = {doubt.peer: _slowed(instance.peers[instance.index[doubt.peer]], doubt) for doubt in doubts}
    peers = tuple(slower.get(spec.peer, spec) for spec in instance.peers)
    return instance.model_copy(update={"peers": peers}), doubts


def witnessed(views: Iterable[PeerView], own: Mapping[str, float], me: str) -> dict[str, float]:
    """What ``views`` and our ``own`` measurements say of each peer: the lower median, which at least half of
    those contradict who would have it slower."""
    said: dict[str, list[float]] = {peer: [taken_s] for peer, taken_s in own.items()}
    for view in views:
        if view.peer != me:
            for peer, taken_s in view.seen.items():
                if peer != view.peer:
                    said.setdefault(peer, []).append(taken_s)
    return {peer: median_low(times) for peer, times in said.items() if len(times) > 1 or peer in own}


def _doubtful(taken_s: float, visit: _Visit) -> bool:
    return taken_s > DOUBT * visit.span_s + NOISE_S


def _slowed(spec: PeerSpec, doubt: Doubt) -> PeerSpec:
    """All of a peer's times grow as its forward does, the only one that others can see."""
    factor = doubt.seen_s / max(spec.forward_s, 1e-6)
    times = ("forward_s", "backward_s", "weight_s", "loss_s")
    return spec.model_copy(update={name: min(1e6, factor * getattr(spec, name)) for name in times})


def _unhindered(instance: Instance, p: int) -> _Visit:
    """A visit of peer ``p`` by links as they mostly are, with nothing before it."""
    stage = instance.peers[p].stage
    ways = [
        instance.hop_s[q][p] + instance.hop_s[p][q]
        for q, spec in enumerate(instance.peers)
        if spec.stage != stage and instance.usable[q][p]
    ]
    links_s = median(ways) if ways else 0.0
    return _Visit(links_s + instance.peers[p].forward_s, links_s)


def _short_visits(instance: Instance, plan: Plan) -> dict[int, _Visit]:
    """Of each peer's visits in ``plan``, queues included, one that only a quarter is shorter than."""
    ends: dict[tuple[str, int], float] = {}
    for row in simulate(instance, plan.paths).rows:
        if row.kind == "F":
            ends[row.peer, row.microbatch] = row.end_s
    visits: dict[int, list[_Visit]] = {}
    for number, path in enumerate(plan.paths):
        ring = [*path, path[0]]
        for (before, peer), after in zip(pairwise(ring), ring[2:], strict=False):
            a, p, b = (instance.index[name] for name in (before, peer, after))
            links_s = instance.hop_s[a][p] + instance.hop_s[p][b] + float(instance.latency_s[b][a])
            stay_s = ends[peer, number] - ends[before, number] - instance.hop_s[a][p]
            visits.setdefault(p, []).append(_Visit(stay_s + links_s, links_s))
    return {p: sorted(made)[len(made) // 4] for p, made in visits.items()}
