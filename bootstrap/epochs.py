"""When a run begins, and when it begins again: the rule of the researcher's node, a function of the records.

The node signs one genesis for each epoch. The first names those who wait when every stage has its replicas. A
later one is signed only when nobody says that it trains: the run was stopped whole and its peers have come
back with checkpoints, or so many members were lost at once that no majority is left to agree on anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from swarm.messages import Member
from swarm.records import PeerRecord

QUIET_S = 10.0
"""No record has said for so long that its peer trains. A record lives for 30 s, so the peers have been still
for 40: what a read overlooks, the next one finds."""
RUNNING = "the run goes on"
STILLNESS = "word from those that trained, or their silence"
PATIENCE_S = 60.0
"""A stopped run waits no longer than this for all the replicas that it began with."""


@dataclass(frozen=True)
class Beginning:
    """Who begins at which step."""

    step: int
    members: tuple[Member, ...]


def beginning(
    peers: Iterable[PeerRecord], *, stages: int, start_replicas: int, begun: bool, quiet_s: float
) -> Beginning | str:
    """The next genesis, or in a few words what it waits for.

    ``begun``: the run has begun before; then ``quiet_s`` is for how long no record said that its peer trains.
    """
    peers = list(peers)
    if any(record.state == "active" for record in peers):
        return RUNNING
    waiting = [record for record in peers if record.state == "waiting"]
    if waiting:
        return _without_majority(waiting, quiet_s)
    joining = [record for record in peers if record.state == "joining"]
    replicas = Counter(record.stage for record in joining)
    present = [replicas[stage] for stage in range(stages)]
    if min(present) < start_replicas and not (begun and min(present) >= 1 and quiet_s >= PATIENCE_S):
        return "replicas"
    if begun and quiet_s < QUIET_S:
        return STILLNESS
    return _from_checkpoints(joining, stages)


def _without_majority(waiting: list[PeerRecord], quiet_s: float) -> Beginning | str:
    """The survivors at the newest step go on; each in a new life, which keeps out whoever was in the old."""
    if quiet_s < QUIET_S:
        return STILLNESS
    step = max(record.step for record in waiting)
    chosen = [record for record in waiting if record.step == step]
    if all(record.stage != 0 for record in chosen):
        return "a peer of stage 0"
    return Beginning(
        step, tuple(Member(peer=r.peer, stage=r.stage, incarnation=r.incarnation + 1) for r in chosen)
    )


def _from_checkpoints(joining: list[PeerRecord], stages: int) -> Beginning | str:
    """The newest step that every stage can begin from. Without any checkpoint that is the first.

    Replicas of a stage have equal images; where some differ, those that most hold are taken.
    """
    held: list[dict[int, Counter[str]]] = [{} for _ in range(stages)]
    for record in joining:
        for step, digest in record.checkpoints:
            held[record.stage].setdefault(step, Counter())[digest] += 1
    if not any(held):
        return Beginning(0, tuple(_member(record) for record in joining))
    lacking = [stage for stage, steps in enumerate(held) if not steps]
    if lacking:
        return f"a checkpoint of stage {lacking[0]}"
    common = set.intersection(*(set(steps) for steps in held))
    if not common:
        return "checkpoints of one step in every stage"
    step = max(common)
    digests = [min(steps[step].items(), key=lambda item: (-item[1], item[0]))[0] for steps in held]
    chosen = [record for record in joining if (step, digests[record.stage]) in record.checkpoints]
    return Beginning(step, tuple(_member(record) for record in chosen))


def _member(record: PeerRecord) -> Member:
    return Member(peer=record.peer, stage=record.stage, incarnation=record.incarnation)
