"""What a schedule is measured against, in the same simulator: the full pipeline, and skipping at random."""

from __future__ import annotations

import random

from scheduler.instance import Instance
from scheduler.paths import construct, make_plan, send_order
from scheduler.plan import Plan
from scheduler.timeline import Simulator


def unskipped(instance: Instance) -> Instance:
    """The same problem with every microbatch through every stage."""
    return instance.model_copy(update={"path_length": instance.stages})


def full_pipeline(instance: Instance) -> Plan:
    """Every microbatch visits every living stage; replicas are chosen as the search chooses them.

    The plan is one for ``unskipped(instance)``.
    """
    whole = unskipped(instance)
    paths = construct(whole)
    return make_plan(whole, paths, Simulator(whole).score(paths).makespan_s, "full-pipeline")


def random_skip(instance: Instance, *, seed: int) -> Plan:
    """Every microbatch visits random stages, as many as it must, at random replicas: no balance, no
    foresight.

    A walk is drawn anew until its links can be used. If none was found in 1,000 draws, that of the search is
    taken.
    """
    rng = random.Random(seed)
    fallback = construct(instance)
    paths = []
    for i, origin in enumerate(send_order(instance.microbatches, instance)):
        length = instance.required_length(instance.peers[origin].peer)
        for _ in range(1000):
            stages = sorted(rng.sample(instance.alive_stages, length - 1))
            path = [origin, *(rng.choice(instance.by_stage[stage]) for stage in stages)]
            ring = zip(path, [*path[1:], origin], strict=True)
            if length == 1 or all(instance.usable[p][q] for p, q in ring):
                paths.append(path)
                break
        else:
            paths.append(fallback[i])
    return make_plan(instance, paths, Simulator(instance).score(paths).makespan_s, "random-skip")
