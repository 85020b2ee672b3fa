"""When a run begins, and when it begins again: the rule of the researcher's node, a function of the records
and of what the node knows (``bootstrap.known``).

The node signs one genesis for each epoch. The first names those who wait when every stage has its replicas. A
later one is signed only when no member says that it trains: the run was stopped whole and its peers have come
back with checkpoints, or so many members were lost at once that no majority is left to agree on anything.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bootstrap.known import Known
from swarm.messages import Member
from swarm.records import PeerRecord

QUIET_S = 10.0
"""No record has said for so long that its peer trains. A record lives for 30 s, so the peers have been still
for 40: what a read overlooks, the next one finds."""
BEGINNING_S = 30.0
"""The members of a new epoch read of it, link up (``peer.core.FOUNDING_PATIENCE_S``) and say that they train
in this time; before it is over, or most of them have said so, that none says so means nothing."""
RUNNING = "the run goes on"
STILLNESS = "word from those that trained, or their silence"
PATIENCE_S = 60.0
"""A stopped run waits no longer than this for all the replicas that it began with, and for a state of every
stage."""


@dataclass(frozen=True)
class Beginning:
    """Who begins at which step, with states of which epoch (-1: with none)."""

    step: int
    members: tuple[Member, ...]
    after: int = -1


@dataclass(frozen=True)
class _State:
    """A stage's state that a peer could begin from."""

    mark: tuple[int, int]
    """(epoch, step)"""
    digest: str
    """Of its checkpoint's image; empty for a survivor's, which are equal."""
    record: PeerRecord


def trains(peers: Iterable[PeerRecord], known: Known) -> bool:
    """Does any member say so?"""
    return any(record.state == "active" and known.believes(record) for record in peers)


def mostly_trains(peers: Iterable[PeerRecord], known: Known) -> bool:
    """Do more than half of the members say so?"""
    names = {record.peer for record in peers if record.state == "active"} & known.members
    return 2 * len(names) > len(known.members)


def beginning(
    peers: Iterable[PeerRecord],
    *,
    stages: int,
    start_replicas: int,
    begun: bool,
    quiet_s: float,
    known: Known,
) -> Beginning | str:
    """The next genesis, or in a few words what it waits for.

    ``begun``: the run has begun before; then ``quiet_s`` is for how long no member said that it trains.
    """
    peers = list(peers)
    if trains(peers, known):
        return RUNNING
    survivors = _survivors(peers, known)
    joining = [record for record in peers if record.state == "joining"]
    if begun and quiet_s < QUIET_S and (survivors or joining):
        return STILLNESS
    again = _without_majority(survivors)
    if again is not None:
        return again
    replicas = Counter(record.stage for record in (*joining, *survivors))
    present = [replicas[stage] for stage in range(stages)]
    patient = quiet_s < PATIENCE_S
    if min(present) < start_replicas and not (begun and min(present) >= 1 and not patient):
        return "a peer of stage 0" if survivors and not present[0] else "replicas"
    states = _states(joining, survivors, known)
    holders = {state.record.peer for state in states}
    if not states or (not begun and 2 * len(holders) <= len(joining)):
        # None is left; or the run has not begun, and a few only say that it has.
        return Beginning(0, tuple(_member(record) for record in joining)) if joining else "replicas"
    result = _from_states(states, stages, patient, lambda state: state.record.peer in known.former)
    if isinstance(result, str) and (not known.former or not patient):
        return _from_states(states, stages, patient, lambda state: True)
    return result


def _survivors(peers: list[PeerRecord], known: Known) -> list[PeerRecord]:
    """Members of the last epoch that wait for the next one, at a step that can be."""
    waiting = [record for record in peers if record.state == "waiting" and known.believes(record)]
    if not waiting:
        return []
    epoch = known.genesis.epoch if known.genesis is not None else max(record.epoch for record in waiting)
    waiting = [r for r in waiting if r.epoch == epoch and known.plausible(r.epoch, r.step)]
    # No peer can be further than one step from most of the others, who would have to vote for it.
    near = statistics.median_high([record.step for record in waiting]) + 1 if waiting else 0
    return [record for record in waiting if record.step <= near]


def _without_majority(survivors: list[PeerRecord]) -> Beginning | None:
    """The survivors at the newest step that one of stage 0 stands at go on, each in a new life, which keeps
    out whoever was in the old."""
    steps = [record.step for record in survivors if record.stage == 0]
    if not steps:
        return None
    chosen = [record for record in survivors if record.step == max(steps)]
    return Beginning(max(steps), tuple(_reborn(record) for record in chosen), chosen[0].epoch)


def _states(joining: list[PeerRecord], survivors: list[PeerRecord], known: Known) -> list[_State]:
    """What could be begun from: checkpoints of those without a place, and where survivors stand."""
    held = [
        _State((epoch, step), digest, record)
        for record in joining
        for epoch, step, digest in record.checkpoints
        if digest and known.plausible(epoch, step)
    ]
    return held + [_State((record.epoch, record.step), "", record) for record in survivors]


def _from_states(
    states: list[_State], stages: int, patient: bool, trusted: Callable[[_State], bool]
) -> Beginning | str:
    """The newest (epoch, step) that every stage can begin from; to the impatient, that most stages can, stage
    0 among them. The others are founded by newcomers (``peer.restore``).

    Those who are trusted choose the step; where a stage has none of them, others that hold it take their
    place. Replicas of a stage have equal states; where some differ, survivors are taken, else the image that
    most hold.
    """
    choice = _by_stage(filter(trusted, states))
    usable = [mark for mark, by_stage in choice.items() if 0 in by_stage]
    mark = max(usable, key=lambda mark: (len(choice[mark]), mark), default=None)
    held = {**_by_stage(states)[mark], **choice[mark]} if mark is not None else {}
    if mark is None or (patient and len(held) < stages):
        lacking = set(range(stages)) - {state.record.stage for state in states}
        return (
            f"a checkpoint of stage {min(lacking)}" if lacking else "checkpoints of one step in every stage"
        )
    chosen: list[Member] = []
    for _, of_stage in sorted(held.items()):
        digests = Counter(state.digest for state in of_stage)
        best = min(digests, key=lambda digest: (digest != "", -digests[digest], digest))
        chosen += [_begins(state) for state in of_stage if state.digest == best]
    return Beginning(mark[1], tuple(chosen), mark[0])


def _by_stage(states: Iterable[_State]) -> dict[tuple[int, int], dict[int, list[_State]]]:
    held: dict[tuple[int, int], dict[int, list[_State]]] = {}
    for state in states:
        held.setdefault(state.mark, {}).setdefault(state.record.stage, []).append(state)
    return held


def _begins(state: _State) -> Member:
    return _member(state.record) if state.digest else _reborn(state.record)


def _member(record: PeerRecord) -> Member:
    return Member(peer=record.peer, stage=record.stage, incarnation=record.incarnation)


def _reborn(record: PeerRecord) -> Member:
    return Member(peer=record.peer, stage=record.stage, incarnation=record.incarnation + 1)
