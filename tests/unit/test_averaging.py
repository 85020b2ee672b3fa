"""One replica in an averaging: what it sends to whom, what is a strike, and how a smaller roster begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bootstrap.simulation.fake import WIDTH, bounds
from peer.averaging import POKE_S, Averaging
from peer.rounds import lineage_after, roster_of
from swarm.messages import (
    AverageDigest,
    AverageDone,
    AverageMessage,
    AveragePart,
    AverageResult,
    AverageStart,
    Counted,
    StepClose,
    TensorSpec,
)
from tests.unit.desk import Desk, hops

ALL = ("s1r0", "s1r1", "s1r2")
LEARNER = "s1r3"


def close_of(desk: Desk) -> StepClose:
    """Each of the three replicas computed one microbatch, of 10, 20 and 30 tokens."""
    counted = tuple(
        Counted(index=n, attempt=0, origin="s0r0", path=hops("s0r0", peer), tokens=10 * (n + 1))
        for n, peer in enumerate(ALL)
    )
    return StepClose(step=0, counted=counted, members=desk.context.members)


class Replica(Desk):
    """One of three; it has counted its own microbatch in its sum."""

    def __init__(self, me: str) -> None:
        super().__init__(me, (1, 4))
        self.done = 0
        self.stuck: list[str] = []
        self.backend: Any = self.context.backend
        self.backend.sum[ALL.index(me)] = 1
        self.averaging = Averaging(self.context, on_done=self._done, on_stuck=self.stuck.append)

    def _done(self) -> None:
        self.done += 1

    def begin(self, members: tuple[str, ...] = ALL) -> None:
        self.averaging.begin(close_of(self), members, (LEARNER,))

    def hear(
        self, sender: str, kind: type[AverageMessage], *, roster: str | None = None, **fields: Any
    ) -> None:
        """A message of another member; its tensor is ``values``."""
        values = fields.pop("values", None)
        roster = roster or roster_of(0, 0, ALL)
        self.averaging.on_message(sender, kind(step=0, stage=1, roster=roster, **fields), values)
        self.compute(3)

    def part_from(
        self, sender: str, *, part: int | None = None, tokens: int | None = None, **more: Any
    ) -> None:
        """The sender's gradient of our part."""
        number = ALL.index(sender)
        values = np.zeros(WIDTH, dtype=np.int64)
        values[number] = 1
        own = bounds(ALL.index(self.context.me), 3)
        self.hear(
            sender,
            AveragePart,
            part=ALL.index(self.context.me) if part is None else part,
            tokens=10 * (number + 1) if tokens is None else tokens,
            lineage=more.pop("lineage", ""),
            tensor=TensorSpec(dtype="int64", shape=(own.stop - own.start,)),
            values=values[own],
            **more,
        )

    def result_from(self, sender: str, *, part: int | None = None) -> None:
        """The sender's part of the average."""
        number = ALL.index(sender) if part is None else part
        self.hear(
            sender,
            AverageResult,
            part=number,
            parts=3,
            tensor=self.backend.part_spec(number, 3),
            values=AVERAGE[bounds(number, 3)],
        )

    def digest(self) -> str:
        return str(self.backend.average_digest())


AVERAGE = np.zeros(WIDTH, dtype=np.int64)
AVERAGE[:3] = 1


def leader_and_other() -> tuple[str, str]:
    """The replica that collects the digests, and one that does not."""
    finished = []
    for me in ALL:
        desk = Replica(me)
        desk.begin()
        for peer in ALL:
            if peer != me:
                desk.part_from(peer)
                desk.result_from(peer)
        finished.append((bool(desk.take(AverageDigest)), me))
    (leader,) = [me for told, me in finished if not told]
    return leader, next(me for told, me in finished if told)


def whole(me: str) -> Replica:
    """It has all parts of the average, and has told nobody yet that it is done."""
    desk = Replica(me)
    desk.begin()
    for peer in ALL:
        if peer != me:
            desk.part_from(peer)
            desk.result_from(peer)
    return desk


@pytest.fixture
def replica() -> Replica:
    return Replica("s1r0")


# -- a round -----------------------------------------------------------------------------------------------


def test_every_other_owner_gets_its_part_of_our_sum_with_our_tokens(replica: Replica) -> None:
    replica.begin()
    sums = {to: tensor.tolist() for to, message, tensor in replica.sent if isinstance(message, AveragePart)}
    parts = replica.take(AveragePart)
    assert [(to, message.part, message.tokens) for to, message in parts] == [("s1r1", 1, 10), ("s1r2", 2, 10)]
    assert {message.roster for _, message in parts} == {roster_of(0, 0, ALL)}
    assert sums == {to: replica.backend.sum[bounds(m.part, 3)].tolist() for to, m in parts}


def test_all_and_the_learners_get_the_same_bytes_of_our_part(replica: Replica) -> None:
    replica.begin()
    replica.part_from("s1r1")
    assert replica.take(AverageResult) == []
    replica.part_from("s1r2")
    results = [
        (to, tensor.tolist()) for to, message, tensor in replica.sent if message.kind == "average_result"
    ]
    assert [to for to, _ in results] == ["s1r1", "s1r2", LEARNER]
    assert [values for _, values in results] == [AVERAGE[bounds(0, 3)].tolist()] * 3


def test_nobody_applies_before_all_have_the_same_digest() -> None:
    leader, other = leader_and_other()
    desk = whole(leader)
    assert desk.done == 0
    for peer in ALL:
        if peer != leader:
            assert desk.take(AverageDone) == []
            desk.hear(peer, AverageDigest, digest=desk.digest())
    assert desk.done == 1
    assert [to for to, _ in desk.take(AverageDone)] == [p for p in (*ALL, LEARNER) if p != leader]

    desk = whole(other)
    to, told = desk.one(AverageDigest)
    assert (to, told.digest, desk.done) == (leader, desk.digest(), 0)
    desk.hear(leader, AverageDone, digest=told.digest)
    assert desk.done == 1
    assert desk.context.lineage == lineage_after("", told.digest)


def test_what_comes_before_we_average_waits_for_us(replica: Replica) -> None:
    for peer in ALL[1:]:
        replica.part_from(peer)
    assert replica.sent == []
    replica.begin()
    replica.compute(3)
    assert len(replica.take(AverageResult)) == 3


def test_a_doubled_contribution_counts_once(replica: Replica) -> None:
    replica.begin()
    replica.part_from("s1r1")
    replica.part_from("s1r1")
    assert replica.take(AverageResult) == []
    replica.part_from("s1r2")
    assert replica.backend.average[bounds(0, 3)].tolist() == AVERAGE[bounds(0, 3)].tolist()


# -- what no honest replica sends --------------------------------------------------------------------------


def test_strikes(replica: Replica) -> None:
    _, other = leader_and_other()
    replica.begin()
    replica.part_from("s1r1", part=1)
    replica.part_from("s1r1", tokens=11)
    replica.result_from("s1r1", part=2)
    replica.hear(other, AverageDone, digest="00")
    replica.hear(LEARNER, AverageDigest, digest="00")
    assert replica.strikes == [
        ("s1r1", "a part that is not ours"),
        ("s1r1", "a gradient whose tokens are not those of the close"),
        ("s1r1", "a part of the average that is not its own"),
        (other, "an averaging ended by another than its leader"),
        (LEARNER, "averaging from a peer outside the roster"),
    ]
    assert replica.take(AverageResult) == []
    assert replica.done == 0


@pytest.mark.parametrize("sender", ["stranger", "s0r0"])
def test_who_is_no_replica_of_the_stage_is_not_heard(sender: str, replica: Replica) -> None:
    replica.begin()
    sent = len(replica.sent)
    replica.hear(sender, AverageDigest, digest="00")
    replica.hear(sender, AverageStart, members=(sender,), roster="else")
    assert (len(replica.sent), replica.strikes) == (sent, [])


def test_an_unusable_gradient_is_left_out_with_a_strike_for_its_sender(replica: Replica) -> None:
    replica.begin()
    replica.part_from("s1r1")
    replica.backend.usable = lambda values: values[1] == 0  # type: ignore[method-assign]
    replica.part_from("s1r2")
    assert [peer for peer, _ in replica.strikes] == ["s1r1"]
    assert [(to, m.members) for to, m in replica.take(AverageStart)] == [("s1r2", ("s1r0", "s1r2"))]
    assert replica.take(AveragePart)[-1][0] == "s1r2"


# -- losses ------------------------------------------------------------------------------------------------


def test_the_survivors_of_a_loss_begin_again_from_what_they_hold(replica: Replica) -> None:
    replica.begin()
    replica.take(AveragePart)
    replica.averaging.on_gone("s1r2")
    rest = ALL[:2]
    to, start = replica.one(AverageStart)
    assert (to, start.members, start.roster) == ("s1r1", rest, roster_of(0, 0, rest))
    to, part = replica.one(AveragePart)
    assert (to, part.part, part.roster, part.tokens) == ("s1r1", 1, roster_of(0, 0, rest), 10)


def test_nothing_of_the_old_roster_counts_in_the_new_one(replica: Replica) -> None:
    replica.begin()
    replica.part_from("s1r1")
    replica.averaging.on_gone("s1r2")
    replica.part_from("s1r1")
    assert replica.take(AverageResult) == []


def told_and_left(holds: str) -> tuple[Replica, str]:
    """One that had told its digest when the leader was lost; the other survivor says what it holds."""
    leader, me = leader_and_other()
    other = next(peer for peer in ALL if peer not in (leader, me))
    desk = whole(me)
    digest = desk.digest()
    desk.sent.clear()
    desk.averaging.on_gone(leader)
    (_, part), rest = desk.one(AveragePart), tuple(sorted((me, other)))
    assert part.holds == digest
    own = rest.index(me)
    values = np.zeros(WIDTH, dtype=np.int64)
    values[ALL.index(other)] = 1
    desk.hear(
        other,
        AveragePart,
        roster=roster_of(0, 0, rest),
        part=own,
        tokens=10 * (ALL.index(other) + 1),
        holds=holds or digest,
        tensor=desk.backend.part_spec(own, 2),
        values=values[bounds(own, 2)],
    )
    return desk, digest


def test_survivors_that_have_all_told_the_digest_keep_the_average_of_the_larger_roster() -> None:
    desk, digest = told_and_left("")
    assert (desk.done, desk.stuck) == (1, [])
    assert desk.backend.average.tolist() == AVERAGE.tolist()
    (averaged,) = desk.events.of("averaged")
    assert (averaged["members"], averaged["digest"]) == (list(ALL), digest)
    leader, _ = leader_and_other()
    parts = [(to, m.part) for to, m in desk.take(AverageResult)]
    assert parts in ([(LEARNER, ALL.index(leader))], [])  # from the smaller roster's leader alone
    assert [(to, m.roster) for to, m in desk.take(AverageDone)] == [(LEARNER, roster_of(0, 0, ALL))]


def test_survivors_of_whom_one_had_not_told_it_average_anew() -> None:
    """So the lost one cannot have applied it."""
    desk, _ = told_and_left("00")
    assert desk.done == 0
    assert len(desk.take(AverageResult)) == 2  # to the other survivor and to the learner


def test_an_average_that_is_being_kept_needs_nobody_any_more() -> None:
    leader, me = leader_and_other()
    desk = whole(me)
    other = next(peer for peer in ALL if peer not in (leader, me))
    for gone in (leader, other):
        desk.averaging.on_gone(gone)
    desk.take(AverageStart)
    desk.averaging.on_gone(other)
    desk.averaging.on_back(other)
    assert desk.take(AverageStart) == []
    desk.compute(3)
    assert desk.done == 1
    assert desk.events.of("averaged")[0]["members"] == list(ALL)


def test_the_loss_of_somebody_else_changes_nothing(replica: Replica) -> None:
    replica.begin()
    replica.take(AveragePart)
    for peer in ("s0r0", LEARNER, "stranger"):
        replica.averaging.on_gone(peer)
    assert replica.sent == []


def test_another_ones_smaller_roster_is_entered(replica: Replica) -> None:
    replica.begin()
    replica.take(AveragePart)
    rest = ALL[:2]
    replica.hear("s1r1", AverageStart, members=rest, roster=roster_of(0, 0, rest))
    assert [(to, m.roster) for to, m in replica.take(AveragePart)] == [("s1r1", roster_of(0, 0, rest))]


def test_a_member_that_is_back_gets_what_was_sent_to_it_again(replica: Replica) -> None:
    replica.begin()
    for peer in ALL[1:]:
        replica.part_from(peer)
    replica.sent.clear()
    replica.averaging.on_back("s1r1")
    assert [(to, message.kind) for to, message, _ in replica.sent] == [
        ("s1r1", "average_part"),
        ("s1r1", "average_result"),
        ("s1r1", "average_start"),
    ]


def test_whoever_waits_shows_the_others_in_turn_where_it_stands(replica: Replica) -> None:
    replica.begin()
    replica.clock.run_for(2.5 * POKE_S)
    assert [to for to, _ in replica.take(AverageStart)] == ["s1r2", "s1r1"]


def test_one_that_was_left_out_gets_the_average_that_we_applied() -> None:
    leader, _ = leader_and_other()
    desk = whole(leader)
    for peer in ALL:
        if peer != leader:
            desk.hear(peer, AverageDigest, digest=desk.digest())
    desk.sent.clear()
    left = next(peer for peer in ALL if peer != leader)
    for _ in range(2):
        desk.hear(left, AverageStart, members=(left,), roster=roster_of(0, 0, (left,)))
    assert {to for to, _, _ in desk.sent} == {left}
    answer = roster_of(0, 0, ("answer", leader))
    assert [message.roster for _, message, _ in desk.sent] == [answer] * 5  # once, though it asked twice
    parts = [tensor for _, message, tensor in desk.sent if message.kind == "average_result"]
    assert np.concatenate(parts).tolist() == AVERAGE.tolist()
    assert desk.one(AverageDone)[1].digest == desk.digest()


def test_an_answer_is_applied_in_place_of_our_own_average(replica: Replica) -> None:
    replica.begin()
    answer = roster_of(0, 0, ("answer", "s1r1"))
    helper = Replica("s1r1")
    helper.backend.average = AVERAGE.copy()
    replica.hear("s1r1", AverageStart, roster=answer, members=("s1r1", "s1r2"))
    for part in range(2):
        replica.hear(
            "s1r1",
            AverageResult,
            roster=answer,
            part=part,
            parts=2,
            tensor=replica.backend.part_spec(part, 2),
            values=AVERAGE[bounds(part, 2)],
        )
    assert replica.done == 0
    replica.hear("s1r1", AverageDone, roster=answer, digest=helper.digest())
    assert (replica.done, replica.stuck, replica.strikes) == (1, [], [])
    assert replica.backend.average.tolist() == AVERAGE.tolist()
    assert replica.take(AverageDone) == []  # learners have no parts under an answer's roster


def test_an_empty_answer_says_that_there_is_no_average_for_us(replica: Replica) -> None:
    replica.begin()
    replica.hear("s1r1", AverageDone, roster=roster_of(0, 0, ("answer", "s1r1")), digest="")
    assert replica.stuck == ["the others have left this peer's step behind"]


def test_an_answer_that_does_not_hash_to_its_digest_is_a_strike(replica: Replica) -> None:
    replica.begin()
    answer = roster_of(0, 0, ("answer", "s1r1"))
    replica.hear("s1r1", AverageStart, roster=answer, members=("s1r1",))
    spec = replica.backend.part_spec(0, 1)
    replica.hear("s1r1", AverageResult, roster=answer, part=0, parts=1, tensor=spec, values=AVERAGE)
    replica.hear("s1r1", AverageDone, roster=answer, digest="00")
    assert replica.strikes == [("s1r1", "unusable average: it does not hash to its digest")]
    assert replica.stuck == ["no usable average came from those who finished"]
    assert replica.done == 0


def test_who_has_applied_another_average_before_leaves_when_the_others_are_more(replica: Replica) -> None:
    replica.begin()
    for peer in ALL[1:]:
        replica.part_from(peer, lineage="another")
    assert replica.stuck == ["this peer has applied another average than the others of its stage"]
    other = Replica("s1r1")
    other.context.lineage = "another"
    other.begin()
    other.part_from("s1r0")
    other.part_from("s1r2", lineage="another")
    assert other.stuck == []
    assert [(to, m.members) for to, m in other.take(AverageStart)] == [("s1r2", ALL[1:])]
