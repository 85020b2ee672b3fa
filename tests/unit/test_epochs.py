"""When the researcher's node begins a run, and when it begins it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bootstrap
from bootstrap.epochs import PATIENCE_S, QUIET_S, RUNNING, Beginning, beginning
from bootstrap.known import NEAR_STEPS, Known
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.records import Genesis, PeerRecord, ProgressRecord

STAGES = 2
RESEARCHER = Identity(b"r" * 32)
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)


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


# -- survivors who cannot go on by themselves


def test_survivors_without_an_origin_come_back_to_the_newest_checkpoint_that_all_hold() -> None:
    """One waiting peer at step 105 does not hold up those who were restarted."""
    restarted = [record("a", 0, **holds(100, 50)), record("c", 1, **holds(100))]
    waiting = record("d", 1, "waiting", 105)
    peers = [*restarted, waiting]
    assert ask(peers, quiet_s=PATIENCE_S - 1) == "replicas"
    assert names(ask([*peers, record("b", 0, **holds(100))], quiet_s=QUIET_S)) == (100, ["a", "b", "c"])
    assert names(ask(peers, quiet_s=PATIENCE_S)) == (100, ["a", "c"])


def test_a_survivor_goes_on_where_it_stands_if_an_origins_checkpoint_is_of_that_step() -> None:
    """Its state is the stage's, whatever images others hold: of two lineages one would be out of step."""
    peers = [
        record("a", 0, **holds(105, 100)),
        record("c", 1, **holds(105)),
        record("d", 1, "waiting", 105),
    ]
    result = ask(peers)
    assert isinstance(result, Beginning)
    assert (result.step, result.after) == (105, 0)
    assert result.members == (
        Member(peer="a", stage=0, incarnation=7),
        Member(peer="d", stage=1, incarnation=8),
    )


def test_the_newest_step_at_which_an_origin_survives_is_taken() -> None:
    peers = [record("a", 0, "waiting", 9), record("b", 0, "waiting", 8), record("c", 1, "waiting", 10)]
    assert names(ask(peers)) == (9, ["a"])
    assert names(ask([*peers, record("d", 1, "waiting", 9)])) == (9, ["a", "d"])


# -- histories


def genesis(epoch: int, step: int, *members: str, before: Genesis | None = None) -> Genesis:
    founders = tuple(Member(peer=name, stage=0, incarnation=7) for name in members or ("a",))
    return Genesis.sign(MANIFEST, founders, RESEARCHER, epoch=epoch, step=step, before=before)


def test_states_of_two_histories_are_never_put_together() -> None:
    peers = [
        record("a", 0, **holds(110, epoch=1)),
        record("b", 0, **holds(110, epoch=1)),
        record("c", 1, **holds(110)),
        record("d", 1, **holds(110)),
    ]
    assert ask(peers, quiet_s=QUIET_S) == "checkpoints of one step in every stage"
    assert names(ask(peers, quiet_s=PATIENCE_S)) == (110, ["a", "b"])


def test_what_a_later_epoch_gave_up_is_not_begun_from() -> None:
    """Epoch 0 came to 150; epoch 1 began again at 100 and came to 110."""
    first = genesis(0, 0)
    known = NOTHING.with_genesis(genesis(1, 100, before=first), now=False)
    old = [record(name, stage, **holds(150, 140, 100)) for name, stage in (("b", 0), ("d", 1))]
    checkpoints = {"checkpoints": ((1, 110, "d"), (0, 150, "d"), (0, 100, "d"))}
    peers = [record("a", 0, **checkpoints), record("c", 1, **checkpoints), *old]
    result = ask(peers, known=known)
    assert names(result) == (110, ["a", "c"])
    assert isinstance(result, Beginning)
    assert result.after == 1
    assert names(ask([*old, record("a", 0), record("c", 1)], known=known)) == (100, ["b", "d"])


def test_survivors_of_an_older_epoch_come_in_anew() -> None:
    known = NOTHING.with_genesis(genesis(1, 5, "a", "c"))
    peers = [
        record("a", 0, "waiting", 7, epoch=1),
        record("c", 1, "waiting", 7, epoch=1),
        record("b", 0, "waiting", 9),
    ]
    assert names(ask(peers, known=known)) == (7, ["a", "c"])


# -- whom the node believes


def progress(peer: str, *members: str, step: int = 100) -> ProgressRecord:
    return ProgressRecord(
        peer=peer, step=step, members=len(members), membership=tuple((name, 0) for name in members)
    )


ACTIVE = [record("a", 0, "active", 100), record("c", 1, "active", 100)]
KNOWN = NOTHING.with_genesis(genesis(0, 0, "a", "b")).seeing(
    ACTIVE, [progress("a", "a", "c"), progress("z", "z", "y")]
)


def test_the_node_knows_whom_the_origins_that_it_knows_name() -> None:
    assert (KNOWN.members, KNOWN.step) == ({"a", "c"}, 100)
    assert KNOWN.former == {"a", "b", "c"}
    lied = KNOWN.seeing(ACTIVE, [progress("a", "a", "c"), progress("c", "z", "a")])
    assert lied.members == {"a"}  # more than half must say it
    too_many = KNOWN.seeing(ACTIVE, [ProgressRecord(peer="a", step=101, members=300)])
    assert too_many.believes(record("z", 0, "active"))


def test_a_stranger_who_says_that_it_trains_holds_nobody_up() -> None:
    waiting = [record("a", 0, "waiting", 101), record("c", 1, "waiting", 101)]
    stranger = record("z", 0, "active", 101)
    assert names(ask([*waiting, stranger], known=KNOWN)) == (101, ["a", "c"])
    assert ask([*waiting, record("c", 1, "active", 101)], known=KNOWN) == RUNNING
    assert ask([*waiting, stranger]) == RUNNING  # to a node that knows nobody the run may live


@pytest.mark.parametrize("step", [102, 100 + NEAR_STEPS + 1, 10**9])
def test_a_stranger_who_says_that_it_waits_begins_nothing(step: int) -> None:
    lie = record("z", 0, "waiting", step)
    assert ask([lie], known=KNOWN) == "replicas"
    waiting = [record("a", 0, "waiting", 101), record("c", 1, "waiting", 101)]
    assert names(ask([*waiting, lie], known=KNOWN)) == (101, ["a", "c"])


@pytest.mark.parametrize("step", [103, 100 + NEAR_STEPS + 1, 10_001, 10**9])
def test_a_member_cannot_have_come_much_further_than_the_others(step: int) -> None:
    waiting = [record(name, 0, "waiting", 101) for name in ("a", "d")]
    known = KNOWN.seeing([], [progress("a", "a", "c", "d")])
    assert names(ask([*waiting, record("c", 0, "waiting", step)], known=known)) == (101, ["a", "d"])


@pytest.mark.parametrize("step", [100 + NEAR_STEPS + 1, 10_001, 10**9])
def test_nor_if_it_is_the_only_one(step: int) -> None:
    assert ask([record("a", 0, "waiting", step)], known=KNOWN) == "replicas"


def test_false_checkpoints_begin_nothing() -> None:
    honest = [record("a", 0, **holds(100)), record("c", 1, **holds(100))]
    too_far = [record(name, stage, **holds(10**9)) for name, stage in (("x", 0), ("y", 1))]
    assert names(ask([*honest, *too_far], known=KNOWN)) == (100, ["a", "c"])
    of_strangers = [record(name, stage, **holds(105)) for name, stage in (("x", 0), ("y", 1))]
    assert names(ask([*honest, *of_strangers], known=KNOWN)) == (100, ["a", "c"])
    assert names(ask([honest[0], record("d", 1, **holds(100)), *of_strangers], known=KNOWN)) == (
        100,
        ["a", "d"],  # where no member holds a stage, whoever holds it at their step
    )
    # Where no member has come back, whoever holds states may go on with them, but not at once.
    members = [record("a", 0), record("c", 1)]
    assert isinstance(ask([*members, *of_strangers], known=KNOWN, quiet_s=PATIENCE_S - 1), str)
    assert names(ask([*members, *of_strangers], known=KNOWN, quiet_s=PATIENCE_S)) == (105, ["x", "y"])


def test_one_who_says_that_it_holds_a_state_does_not_hold_up_a_runs_birth() -> None:
    assert names(ask([record("z", 0, **holds(50)), *WHOLE], begun=False)) == (0, ["z", "a", "b", "c", "d"])
