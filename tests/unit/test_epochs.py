"""When the researcher's node begins a run, and when it begins it again."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.epochs import PATIENCE_S, QUIET_S, RUNNING, Beginning, beginning
from bootstrap.known import Known
from swarm.messages import Member
from swarm.records import PeerRecord

STAGES = 2


def record(peer: str, stage: int, state: str = "joining", step: int = 0, **fields: Any) -> PeerRecord:
    return PeerRecord.model_validate(
        {"peer": peer, "stage": stage, "step": step, "state": state, "incarnation": 7, **fields}
    )


def holds(*steps: int, digest: str = "d", epoch: int = 0) -> dict[str, Any]:
    return {"checkpoints": tuple((epoch, step, digest) for step in steps)}


NOTHING = Known(total_steps=10_000)


def ask(
    peers: list[PeerRecord], *, begun: bool = True, quiet_s: float = 1000.0, known: Known = NOTHING
) -> Beginning | str:
    return beginning(peers, stages=STAGES, start_replicas=2, begun=begun, quiet_s=quiet_s, known=known)


WHOLE = [record("a", 0), record("b", 0), record("c", 1), record("d", 1)]


def names(result: Beginning | str) -> tuple[int, list[str]]:
    assert isinstance(result, Beginning), result
    return result.step, [member.peer for member in result.members]


def test_the_first_beginning_waits_for_the_replicas_and_for_nothing_else() -> None:
    assert ask(WHOLE[:3], begun=False) == "replicas"
    assert names(ask(WHOLE, begun=False, quiet_s=0.0)) == (0, ["a", "b", "c", "d"])


@pytest.mark.parametrize("begun", [False, True])
def test_as_long_as_anyone_trains_nothing_begins(begun: bool) -> None:
    assert ask([*WHOLE, record("e", 1, "active", 9)], begun=begun) == RUNNING
    waiting = [record(p, s, "waiting", 9) for p, s in (("a", 0), ("c", 1))]
    assert ask([*waiting, record("e", 1, "active", 9)]) == RUNNING


def test_a_stopped_run_goes_on_from_the_newest_step_that_every_stage_holds() -> None:
    peers = [
        record("a", 0, **holds(30, 20, 10)),
        record("b", 0, **holds(20, 10)),
        record("c", 1, **holds(20, 10)),
        record("d", 1, **holds(10)),
    ]
    assert ask(peers, quiet_s=QUIET_S - 1) != RUNNING
    assert isinstance(ask(peers, quiet_s=QUIET_S - 1), str)
    assert names(ask(peers)) == (20, ["a", "b", "c"])


def test_a_stopped_run_does_not_wait_for_ever_for_a_machine_that_stays_away() -> None:
    peers = [record("a", 0, **holds(20)), record("c", 1, **holds(20))]
    assert ask(peers, quiet_s=PATIENCE_S - 1) == "replicas"
    assert names(ask(peers, quiet_s=PATIENCE_S)) == (20, ["a", "c"])


def test_replicas_with_another_image_come_in_as_newcomers() -> None:
    peers = [
        record("a", 0, **holds(20, digest="x")),
        record("b", 0, **holds(20, digest="y")),
        record("e", 0, **holds(20, digest="y")),
        record("c", 1, **holds(20)),
        record("d", 1, **holds(20)),
    ]
    assert names(ask(peers)) == (20, ["b", "e", "c", "d"])


def test_a_stage_without_a_checkpoint_is_waited_for_rather_than_all_work_lost() -> None:
    peers = [record("a", 0, **holds(20)), record("b", 0), record("c", 1), record("d", 1)]
    assert ask(peers, quiet_s=PATIENCE_S - 1) == "a checkpoint of stage 1"
    apart = [record("a", 0, **holds(20)), record("b", 0), record("c", 1, **holds(10)), record("d", 1)]
    assert ask(apart, quiet_s=PATIENCE_S - 1) == "checkpoints of one step in every stage"


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_at_its_first_step() -> None:
    assert names(ask(WHOLE)) == (0, ["a", "b", "c", "d"])


def test_survivors_without_a_majority_go_on_in_a_new_life_where_the_newest_of_them_stands() -> None:
    peers = [
        record("a", 0, "waiting", 9),
        record("c", 1, "waiting", 9),
        record("d", 1, "waiting", 8),
        record("e", 1),
    ]
    assert isinstance(ask(peers, quiet_s=QUIET_S - 1), str)
    result = ask(peers)
    assert isinstance(result, Beginning)
    assert result.step == 9
    assert result.members == (
        Member(peer="a", stage=0, incarnation=8),
        Member(peer="c", stage=1, incarnation=8),
    )


def test_without_an_origin_survivors_wait_on() -> None:
    assert ask([record("c", 1, "waiting", 9), record("d", 1, "waiting", 9)]) == "a peer of stage 0"


def test_a_state_of_every_stage_is_not_waited_for_for_ever() -> None:
    """Whoever lacks one comes in as a newcomer and founds its stage."""
    peers = [record("a", 0, **holds(20)), record("b", 0), record("c", 1), record("d", 1)]
    assert names(ask(peers, quiet_s=PATIENCE_S)) == (20, ["a"])
    apart = [record("a", 0, **holds(20)), record("b", 0), record("c", 1, **holds(10)), record("d", 1)]
    assert names(ask(apart)) == (20, ["a"])
    without_stage_0 = [record("a", 0), record("b", 0), record("c", 1, **holds(10)), record("d", 1)]
    assert ask(without_stage_0) == "a checkpoint of stage 0"
