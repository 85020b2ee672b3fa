"""One origin: what it draws and starts, its loss and commits, and what it does about late and lost peers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bootstrap.simulation.fake import FakeBatches
from peer.context import draw_order
from peer.ledger import Committed, apply
from peer.origin import RESTART_PAUSE_S, Origin
from peer.router import Router
from swarm.messages import Backward, Commit, Counted, Forward, Hop, Release, Restart, TakenOver
from tests.unit.desk import Desk, activation, hops

ME = "s0r0"


class Stage0(Desk):
    """An origin with its own hop 0; all other peers are the test's."""

    def __init__(self, replicas: tuple[int, ...] = (1, 2, 2), me: str = ME, **options: Any) -> None:
        super().__init__(me, replicas, **options)
        self.done = 0
        self.late: list[str] = []
        self.router = Router(
            self.context,
            on_loss=lambda message, output: self.origin.on_loss(message, output),
            on_home=lambda held: self.origin.on_home(held),
            on_late=self.late.append,
            on_full=lambda: None,
        )
        self.origin = Origin(self.context, self.router, FakeBatches(), on_done=self._done, on_more=self._more)
        self.more = 0

    def _done(self) -> None:
        self.done += 1

    def _more(self) -> None:
        self.more += 1

    def begun(self) -> list[Forward]:
        """What the first hops get of the step, once the origin has computed it."""
        self.origin.begin()
        self.compute(len(self.origin.started))
        return [message for _, message in self.take(Forward)]

    def output(self, message: Forward, path: tuple[Hop, ...] | None = None, revision: int = 0) -> Forward:
        """The last hop sends its output to the origin."""
        path = path or message.path
        changed = {"path": path, "hop": len(path), "revision": revision}
        output = message.model_copy(update=changed)
        self.router.on_forward(path[-1].peer, output, activation(0, message.index))
        return output

    def home(self, message: Forward, path: tuple[Hop, ...] | None = None) -> None:
        """The gradient comes to hop 0, computed by all other peers of ``path``."""
        path = path or message.path
        back = Backward(
            step=message.step,
            index=message.index,
            attempt=message.attempt,
            origin=message.origin,
            path=path,
            hop=0,
            trail=tuple(reversed(path[1:])),
        )
        self.router.on_backward(path[1].peer, back, activation(0, message.index))
        self.compute(2)  # what runs is finished first

    def round(self, message: Forward) -> None:
        """All the way there and back."""
        self.output(message)
        self.compute(2)  # the weights of the one before may be first
        self.home(message)


@pytest.fixture
def origin() -> Stage0:
    return Stage0()


# -- what it starts ----------------------------------------------------------------------------------------


def test_all_origins_together_draw_each_index_once() -> None:
    drawn: list[int] = []
    for number in range(3):
        desk = Stage0((3, 1, 1), me=f"s0r{number}", slots=8)
        drawn += [message.index for message in desk.begun()]
    assert sorted(drawn) == list(range(12))


def test_no_more_than_the_memory_holds_are_under_way(origin: Stage0) -> None:
    desk = Stage0(slots=2)
    first, second = desk.begun()
    assert [first.index, second.index] == [0, 1]
    desk.round(first)
    desk.compute(2)
    assert [message.index for _, message in desk.take(Forward)] == [2]


def test_an_attempt_begins_at_the_first_hop_of_the_path(origin: Stage0) -> None:
    origin.origin.begin()
    origin.compute(4)
    to, message = origin.take(Forward)[0]
    assert (to, message.hop, message.origin) == ("s1r0", 1, ME)
    assert message.path == hops(ME, "s1r0", "s2r0")


def test_attempts_of_other_origins_and_epochs_have_other_numbers() -> None:
    numbers = []
    for me, epoch in (("s0r0", 0), ("s0r1", 0), ("s0r0", 1), ("s0r1", 1)):
        desk = Stage0((2, 1, 1), me=me)
        desk.context.epoch = epoch
        numbers.append(desk.begun()[0].attempt)
    assert len(set(numbers)) == 4


# -- what others have taken over ---------------------------------------------------------------------------


def test_an_origin_that_is_back_goes_on_with_what_it_has_under_way_and_leaves_the_rest() -> None:
    desk = Stage0((2, 2, 2), slots=2)
    under_way = [message.index for message in desk.begun()]
    queued = list(desk.origin._shares.queue)
    desk.origin.on_taken_over(
        "s0r1", TakenOver(step=0, indices=(under_way[0], queued[0]), committed=(queued[1],))
    )
    to, answer = desk.one(TakenOver)
    assert (to, answer.indices) == ("s0r1", (under_way[0],))
    assert list(desk.origin._shares.queue) == queued[2:]
    assert list(desk.origin.started) == under_way


def test_what_another_has_committed_meanwhile_is_released() -> None:
    desk = Stage0((2, 2, 2), slots=2)
    first, second = desk.begun()
    desk.origin.on_taken_over("s0r1", TakenOver(step=0, committed=(first.index,)))
    assert second.index in desk.origin.started
    assert first.index not in desk.origin.started
    assert {message.index for _, message in desk.take(Release)} == {first.index}


def test_who_took_over_drops_what_the_one_that_is_back_goes_on_with() -> None:
    desk = Stage0((2, 2, 2), slots=8)
    desk.begun()
    own = set(desk.origin.started)
    desk.gone.add("s0r1")
    desk.origin.take_over()
    taken = sorted(set(desk.origin.started) - own)
    assert len(taken) == 4
    desk.compute(8)
    desk.take(Forward)
    desk.gone.discard("s0r1")
    desk.origin.on_back("s0r1")
    to, told = desk.one(TakenOver)
    assert (to, list(told.indices), told.committed) == ("s0r1", taken, ())
    desk.origin.on_taken_over("s0r1", TakenOver(step=0, indices=tuple(taken[:2])))
    assert sorted(set(desk.origin.started) - own) == taken[2:]
    assert desk.take(TakenOver) == []


def test_an_origin_that_takes_over_when_it_was_done_says_that_it_goes_on() -> None:
    desk = Stage0((2, 1, 1), slots=8)
    for message in desk.begun():
        desk.round(message)
    desk.compute(8)
    assert (desk.done, desk.more) == (1, 0)
    desk.gone.add("s0r1")
    desk.origin.take_over()
    assert desk.more == 1


def test_a_cut_off_origin_starts_nothing() -> None:
    desk = Stage0((1, 2, 2), slots=1)
    (first,) = desk.begun()
    desk.lost |= {"s1r0", "s1r1", "s2r0"}
    desk.round(first)
    desk.compute(2)
    assert desk.take(Forward) == []
    desk.lost.clear()
    desk.origin.on_back("s1r0")
    desk.compute(2)
    assert len(desk.take(Forward)) == 1


# -- the loss ----------------------------------------------------------------------------------------------


def test_the_last_hop_gets_the_gradient_of_its_output(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.output(first)
    assert origin.take(Backward) == []
    origin.compute()
    to, message = origin.one(Backward)
    assert (to, message.hop, message.path, message.trail) == ("s2r0", 2, first.path, ())


def test_a_replaced_last_hop_gets_the_same_gradient_at_once(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.output(first)
    origin.compute()
    origin.take(Backward)
    path = (*first.path[:2], Hop(stage=2, peer="s2r1", version=1))
    origin.output(first, path)
    to, message = origin.one(Backward)
    assert (to, message.path) == ("s2r1", path)
    origin.output(first)  # the one that was given up is not heard any more
    origin.compute()
    assert origin.take(Backward) == []


def test_other_stages_before_the_loss_are_another_loss(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.output(first)
    origin.compute()
    origin.take(Backward)
    origin.output(first, first.path[:2], revision=1)
    assert origin.take(Backward) == []
    origin.compute()
    to, message = origin.one(Backward)
    assert (to, message.path, message.revision) == ("s1r0", first.path[:2], 1)
    origin.output(first)
    origin.compute()
    assert origin.take(Backward) == []


def test_a_last_hop_that_is_back_gets_its_gradient_again(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.output(first)
    origin.lost.add("s2r0")
    origin.compute()
    assert origin.take(Backward) == []
    origin.lost.clear()
    origin.origin.on_back("s2r0")
    assert origin.one(Backward)[0] == "s2r0"


def test_a_loss_that_is_not_finite_is_started_anew(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.context.backend.loss = lambda output, labels: (float("inf"), 1, output, None)  # type: ignore[method-assign]
    origin.output(first)
    origin.compute()
    assert origin.take(Backward) == []
    assert [fields["reason"] for fields in origin.events.of("restarted")] == ["the loss is not finite"]


def test_an_output_of_an_attempt_that_was_given_up_is_passed_over(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.origin.restart(first.index, "a test")
    origin.output(first)
    origin.compute()
    assert origin.take(Backward) == []


def test_a_hop_that_was_gone_around_does_not_bring_its_own_way_back_in(origin: Stage0) -> None:
    """It was cut off, took many for lost, and sends its output home past a stage that it could not reach."""
    first = origin.begun()[0]
    origin.lost.add("s1r0")
    origin.router.on_lost("s1r0")
    origin.lost.discard("s1r0")
    _, around = origin.take(Forward)[0]
    assert around.index == first.index
    assert around.path[1].peer == "s1r1"
    origin.output(first, first.path[:2], revision=1)
    origin.compute()
    assert origin.take(Backward) == []
    origin.output(around)
    origin.compute()
    to, message = origin.one(Backward)
    assert (to, message.path) == ("s2r0", around.path)


# -- the commit --------------------------------------------------------------------------------------------


def test_a_commit_goes_to_those_who_computed_and_a_release_to_the_others(origin: Stage0) -> None:
    first = origin.begun()[0]
    path = (*first.path[:2], Hop(stage=2, peer="s2r1", version=1))
    origin.output(first)
    origin.compute()
    origin.home(first, path)  # its last hop was replaced after that
    commits = origin.take(Commit)
    assert [to for to, _ in commits] == ["s1r0", "s2r1"]
    assert {message.path for _, message in commits} == {path}
    assert [to for to, _ in origin.take(Release)] == ["s2r0"]
    assert origin.context.ledger.commits.keys() == {first.index}


def test_a_lost_peer_hears_its_release_when_it_is_back(origin: Stage0) -> None:
    first = origin.begun()[0]
    path = (*first.path[:2], Hop(stage=2, peer="s2r1", version=1))
    origin.output(first)
    origin.compute()
    origin.lost.add("s2r0")
    origin.home(first, path)
    assert origin.take(Release) == []
    origin.lost.clear()
    origin.origin.on_back("s2r0")
    assert origin.one(Release)[0] == "s2r0"


def test_it_is_done_when_all_that_it_drew_is_committed(origin: Stage0) -> None:
    messages = origin.begun()
    for message in messages:
        assert not origin.origin.done
        origin.round(message)
    assert origin.origin.done
    assert origin.done == 1
    assert origin.origin.figures.committed == len(messages) == 4
    assert sorted(origin.context.ledger.commits) == [0, 1, 2, 3]


def test_its_own_weights_count_once_with_the_heads(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.round(first)
    origin.compute()
    assert [counted.index for counted in origin.context.ledger.summed] == [first.index]
    assert origin.context.backend.sum[first.index] == 1  # type: ignore[attr-defined]


# -- the late and the lost ---------------------------------------------------------------------------------


def restart(message: Forward, **fields: Any) -> Restart:
    about = {"step": message.step, "index": message.index, "attempt": message.attempt, "reason": "no way"}
    return Restart(**{**about, **fields})


def test_a_member_may_ask_for_a_new_attempt(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.origin.on_restart("s1r0", restart(first))
    assert [to for to, _ in origin.take(Release)] == ["s1r0", "s2r0"]
    origin.clock.run_for(RESTART_PAUSE_S)
    origin.compute()
    again = origin.one(Forward)[1]
    assert (again.index, again.attempt) == (first.index, first.attempt + 1)


@pytest.mark.parametrize(
    ("sender", "fields"), [("stranger", {}), ("s1r0", {"attempt": 1}), ("s1r0", {"step": 1})]
)
def test_nothing_else_starts_it_anew(sender: str, fields: dict[str, Any], origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.origin.on_restart(sender, restart(first, **fields))
    origin.clock.run_for(1)
    assert origin.sent == []
    assert origin.events.of("restarted") == []


def test_attempts_follow_each_other_ever_more_slowly(origin: Stage0) -> None:
    origin.origin.begin()
    started = [0.0]
    for _ in range(6):
        begun_s = [t for t, event, f in origin.events.entries if event == "started" and f["index"] == 0]
        started.append(begun_s[-1])
        origin.origin.restart(0, "no way")
        assert origin.clock.run_until(lambda: 0 in origin.origin.started, 10.0)
    gaps = [after - before for before, after in pairwise(started[1:])]
    assert gaps[1:] == pytest.approx([2 * gap for gap in gaps[:-1]])


def test_a_cut_off_origin_blames_nobody_for_what_does_not_come_home(origin: Stage0) -> None:
    origin.begun()
    origin.lost |= {"s1r0", "s1r1", "s2r0"}
    origin.clock.run_for(300)
    assert origin.events.of("restarted") == []
    origin.lost.clear()
    origin.origin.on_back("s1r0")
    assert origin.clock.run_until(lambda: len(origin.events.of("restarted")) == 4, 120.0)


def test_what_does_not_come_home_is_started_anew_around_its_path(origin: Stage0) -> None:
    first = origin.begun()[0]
    assert origin.clock.run_until(lambda: bool(origin.events.of("restarted")), 120.0)
    told = next(f for f in origin.events.of("restarted") if f["index"] == first.index)
    assert told["reason"].startswith("not back after ")
    assert origin.clock.run_until(lambda: len(origin.events.of("started")) > 4, 10.0)
    assert frozenset({"s1r0", "s2r0"}) in origin.avoided
    assert origin.events.of("started")[4]["path"] == ["0:s0r0", "1:s1r1", "2:s2r1"]


def test_lost_origins_microbatches_go_each_to_one_of_those_who_live() -> None:
    drawn = {number: Stage0((3, 1, 1), me=f"s0r{number}", slots=16) for number in range(3)}
    for desk in drawn.values():
        desk.origin.begin()
    victim = "s0r0"
    theirs = set(drawn[0].origin.started)
    taken: list[int] = []
    for number in (1, 2):
        drawn[number].gone.add(victim)
        before = set(drawn[number].origin.started)
        drawn[number].origin.take_over()
        taken += set(drawn[number].origin.started) - before
        assert {fields["lost"] for fields in drawn[number].events.of("taken_over")} <= {victim}
    assert sorted(taken) == sorted(theirs)


def test_what_is_known_to_be_committed_is_not_taken_over() -> None:
    desk = Stage0((2, 1, 1), slots=16)
    desk.origin.begin()
    order = draw_order(0, ("s0r0", "s0r1"))
    theirs = [index for index in range(8) if order[index % 2] == "s0r1"]
    known = Counted(index=theirs[0], attempt=0, origin="s0r1", path=hops("s0r1", "s1r0"), tokens=1)
    desk.context.ledger = apply(desk.context.ledger, Committed(known))
    desk.gone.add("s0r1")
    desk.origin.take_over()
    assert [fields["index"] for fields in desk.events.of("taken_over")] == theirs[1:]


def test_nothing_of_an_origin_that_stopped_goes_out_any_more(origin: Stage0) -> None:
    first = origin.begun()[0]
    origin.output(first)
    origin.origin.stop()
    origin.clock.run_for(200)
    assert origin.take(Backward) == []
    assert origin.take(Commit) == []
    assert not origin.origin.done


def test_the_fake_arithmetic_is_what_the_messages_carry(origin: Stage0) -> None:
    origin.origin.begin()
    origin.compute(4)
    outputs = [tensor for _, message, tensor in origin.sent if isinstance(message, Forward)]
    inputs = [np.array([0, index, 0, 0]) for index in range(4)]
    assert [o.tolist() for o in outputs] == [origin.context.backend.infer(i).tolist() for i in inputs]
