"""One hop: what it takes and refuses, where it passes things on, and how it goes around the lost."""

from __future__ import annotations

from typing import Any

import pytest

from peer.held import outdated
from peer.router import BUSY_RETRY_S, WITNESSED, Router
from swarm.messages import Accept, Arrived, Backward, Commit, Forward, Hop, Message, Refuse, Release, Restart
from tests.unit.desk import Desk, activation, hops

PATH = hops("s0r0", "s1r0", "s2r0", "s3r0")
KEY = {"step": 0, "index": 2, "attempt": 0}


class Hop1(Desk):
    """``s1r0``, between the origin ``s0r0`` and stage 2."""

    def __init__(self, replicas: tuple[int, ...] = (2, 2, 2, 2), *, me: str = "s1r0", **options: Any) -> None:
        super().__init__(me, replicas, **options)
        self.late: list[str] = []
        self.full: list[int] = []
        """How much it held each time that it had no room."""
        self.paces: list[tuple[str, float]] = []
        """How long which peer was seen to take."""
        self.router = Router(
            self.context,
            on_loss=lambda message, output: None,
            on_home=lambda held: None,
            on_late=self.late.append,
            on_full=lambda: self.full.append(len(self.router.held)),
            on_pace=lambda peer, took_s: self.paces.append((peer, took_s)),
        )

    def forward(self, sender: str = "s0r0", *, tensor: Any = None, **fields: Any) -> None:
        message = Forward(**{**KEY, "origin": "s0r0", "path": PATH, "hop": 1, **fields})
        values = activation(message.step, message.index) if tensor is None else tensor
        self.router.on_forward(sender, message, values)

    def forwarded(self, **fields: Any) -> None:
        """It holds a microbatch whose output it has passed on."""
        self.forward(**fields)
        self.compute()
        self.take(Forward)
        self.take(Accept)

    def backward(self, sender: str = "s2r0", **fields: Any) -> None:
        message = Backward(
            **{**KEY, "origin": "s0r0", "path": PATH, "hop": 1, "trail": (PATH[3], PATH[2]), **fields}
        )
        self.router.on_backward(sender, message, activation(0, message.index))

    def lose(self, *peers: str) -> None:
        self.lost.update(peers)
        for peer in peers:
            self.router.on_lost(peer)

    def back(self, peer: str) -> None:
        self.lost.discard(peer)
        self.router.on_back(peer)


@pytest.fixture
def hop() -> Hop1:
    return Hop1()


def names(path: tuple[Hop, ...]) -> list[str]:
    return [place.peer for place in path]


# -- forward -----------------------------------------------------------------------------------------------


def test_it_accepts_at_once_and_sends_its_output_to_the_next_hop(hop: Hop1) -> None:
    hop.forward()
    assert hop.one(Accept)[0] == "s0r0"
    assert hop.take(Forward) == []
    hop.compute()
    output = hop.sent[0][2]
    to, message = hop.one(Forward)
    assert (to, message.hop, message.path) == ("s2r0", 2, PATH)
    assert output.tolist() == hop.context.backend.infer(activation(0, 2)).tolist()


def test_the_last_hop_sends_to_the_origin(hop: Hop1) -> None:
    hop.forward(path=PATH[:2])
    hop.compute()
    to, message = hop.one(Forward)
    assert (to, message.hop) == ("s0r0", 2)


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("wrong stage", {"path": hops("s0r0", "s1r1", "s2r0")}),
        ("wrong stage", {"path": (PATH[0], Hop(stage=2, peer="s1r0"))}),
        ("behind", {"step": 7}),
        ("wrong step", {"step": 4}),
    ],
)
def test_it_refuses_what_is_not_its_own(reason: str, fields: dict[str, Any], hop: Hop1) -> None:
    hop.context.step = 5
    hop.forward(**fields)
    assert hop.one(Refuse)[1].reason == reason
    assert hop.late == (["s0r0"] if reason == "behind" else [])
    hop.compute()
    assert hop.sent == []


def test_it_refuses_more_than_its_memory_holds_until_something_comes_back(hop: Hop1) -> None:
    for index in range(5):
        hop.forward(index=index)
    assert [message.index for _, message in hop.take(Accept)] == [0, 1, 2, 3]
    assert hop.one(Refuse)[1].reason == "busy"
    assert hop.full == [4]
    hop.compute(4)
    hop.backward(index=0)
    hop.compute()
    hop.forward(index=4)
    assert hop.one(Accept)[1].index == 4


def test_what_a_gone_origin_left_here_keeps_nobody_out(hop: Hop1) -> None:
    other = hops("s0r1", "s1r0", "s2r0", "s3r0")
    for index in range(4):
        hop.forward("s0r1", index=index, origin="s0r1", path=other)
    hop.forward(index=5)
    assert hop.one(Refuse)[1].reason == "busy"
    hop.gone.add("s0r1")
    hop.forward(index=5)
    assert hop.take(Accept)[-1][1].index == 5


def test_a_leaving_peer_takes_nothing_of_the_next_step(hop: Hop1) -> None:
    hop.context.leaving = True
    hop.forward(step=1)
    assert hop.one(Refuse)[1].reason == "leaving"
    hop.forward()
    assert hop.one(Accept)[1].step == 0


def test_what_comes_for_the_next_step_is_computed_when_that_begins(hop: Hop1) -> None:
    hop.forward(step=1)
    hop.compute(3)
    assert hop.take(Forward) == []
    assert hop.events.of("received") == [{"step": 1, "index": 2, "attempt": 0, "other": "s0r0"}]
    hop.context.step = 1
    hop.router.on_step()
    hop.compute()
    assert hop.one(Forward)[1].step == 1


def test_a_doubled_message_is_accepted_and_computed_once(hop: Hop1) -> None:
    hop.forward()
    hop.forward()
    hop.compute(2)
    assert len(hop.take(Accept)) == 2
    assert len(hop.take(Forward)) == 1
    assert hop.context.backend.forwards[0, 2] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("sender", ["s2r0", "s1r1", "stranger"])
def test_only_the_hop_before_may_send_forward(sender: str, hop: Hop1) -> None:
    hop.forward(sender)
    assert hop.strikes == [(sender, "FORWARD from a peer that is not the hop before")]
    assert hop.sent == []


def test_what_cannot_be_computed_with_strikes_its_sender_and_starts_anew(hop: Hop1) -> None:
    def spoiled(inputs: Any) -> Any:
        raise ValueError("not finite")

    hop.context.backend.forward = spoiled  # type: ignore[method-assign]
    hop.forward()
    hop.compute()
    assert hop.strikes == [("s0r0", "unusable tensor: not finite")]
    to, restart = hop.one(Restart)
    assert (to, restart.reason) == ("s0r0", "unusable tensor from s0r0")
    assert hop.failures == []


def test_our_own_failure_is_nobodys_fault(hop: Hop1) -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("out of memory")

    hop.context.backend.forward = broken  # type: ignore[method-assign]
    hop.forward()
    hop.compute()
    assert [str(error) for error in hop.failures] == ["out of memory"]
    assert hop.strikes == []


# -- around the lost ---------------------------------------------------------------------------------------


def test_a_lost_next_hop_is_replaced_by_its_replica_in_the_same_call(hop: Hop1) -> None:
    hop.forwarded()
    hop.lose("s2r0")
    to, message = hop.one(Forward)
    assert (to, names(message.path)) == ("s2r1", ["s0r0", "s1r0", "s2r1", "s3r0"])
    assert (message.path[2].version, message.revision) == (1, 0)
    (told,) = hop.events.of("rerouted")
    assert (told["lost"], told["cause"], told["reason"]) == ("s2r0", "lost", "reset")


def test_the_loss_of_others_changes_nothing(hop: Hop1) -> None:
    hop.forwarded()
    hop.lose("s2r1", "s3r0", "s0r1")
    assert hop.sent == []


def test_a_lost_stage_is_replaced_by_one_that_the_path_left_out() -> None:
    hop = Hop1(min_path_length=3)
    hop.forwarded(path=hops("s0r0", "s1r0", "s3r0"))
    hop.lose("s3r0", "s3r1")
    to, message = hop.take(Forward)[-1]
    assert (to, names(message.path), message.revision) == ("s2r0", ["s0r0", "s1r0", "s2r0"], 1)


def test_a_lost_stage_is_left_out_where_the_path_stays_long_enough() -> None:
    hop = Hop1((2, 2, 1, 2), min_path_length=3)
    hop.forwarded()
    hop.lose("s2r0")
    to, message = hop.one(Forward)
    assert (to, names(message.path), message.revision) == ("s3r0", ["s0r0", "s1r0", "s3r0"], 1)


def test_who_hears_no_majority_goes_around_nobody_and_around_the_lost_when_it_does_again(hop: Hop1) -> None:
    hop.forwarded()
    hop.lose("s2r1", "s3r0", "s3r1", "s0r1")
    hop.lose("s2r0")
    assert hop.sent == []
    for peer in ("s2r1", "s3r0"):
        hop.back(peer)
    assert hop.sent == []
    hop.clock.run_for(1)
    to, message = hop.one(Forward)
    assert (to, names(message.path)) == ("s2r1", ["s0r0", "s1r0", "s2r1", "s3r0"])


def test_who_was_cut_off_goes_on_as_before_with_those_that_are_back(hop: Hop1) -> None:
    hop.forwarded()
    hop.lose("s2r1", "s3r0", "s3r1", "s0r1", "s2r0")
    for peer in ("s2r1", "s3r0", "s2r0"):
        hop.back(peer)
    hop.clock.run_for(1)
    to, message = hop.one(Forward)
    assert (to, message.path) == ("s2r0", PATH)
    assert hop.events.of("rerouted") == []


def test_of_two_paths_the_first_hop_with_unlike_versions_tells_which_was_given_up() -> None:
    def path(*versions: int, stages: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Hop, ...]:
        return tuple(Hop(stage=s, peer=f"s{s}r0", version=v) for s, v in zip(stages, versions, strict=False))

    assert outdated(path(0, 0, 3), path(0, 1, 0))
    assert not outdated(path(0, 1, 0), path(0, 0, 3))
    assert not outdated(path(0, 1, 0), path(0, 1, 0))
    skipped = path(0, 1, 0, stages=(0, 2, 3))
    assert outdated(path(0, 0, 7), skipped)
    assert not outdated(skipped, path(0, 0, 7))
    assert not outdated(path(0, 0), path(0, 0, 4))


def test_what_takes_the_place_of_a_skipped_hop_has_a_newer_version() -> None:
    for replicas, given in (((2, 2, 1, 2), PATH), ((2, 2, 2, 1), hops("s0r0", "s1r0", "s3r0"))):
        hop = Hop1(replicas, min_path_length=3)
        hop.forwarded(path=given)
        hop.lose(given[2].peer)
        _, message = hop.one(Forward)
        assert message.path[2].stage != given[2].stage
        assert message.path[2].version == 1
        assert outdated(given, message.path)


def test_the_origin_hears_of_it_where_no_way_is_left() -> None:
    hop = Hop1((2, 2, 1, 2), min_path_length=4)
    hop.forwarded()
    hop.lose("s2r0")
    to, restart = hop.one(Restart)
    assert (to, restart.reason) == ("s0r0", "stage 2 has no living replica")
    assert hop.take(Forward) == []


def test_a_refusal_goes_to_the_other_replica_and_waits_when_both_are_full(hop: Hop1) -> None:
    hop.forwarded()
    refuse = Refuse(**KEY, hop=2, reason="busy")
    hop.router.on_refuse("s2r0", refuse)
    assert hop.one(Forward)[0] == "s2r1"
    (told,) = hop.events.of("rerouted")
    assert (told["cause"], told["reason"]) == ("refused", "busy")
    hop.router.on_refuse("s2r1", refuse)
    assert hop.take(Forward) == []
    hop.clock.run_for(BUSY_RETRY_S)
    assert hop.one(Forward)[0] == "s2r1"
    assert hop.take(Restart) == []


@pytest.mark.parametrize("sender", ["s2r1", "s3r0", "stranger"])
def test_a_refusal_by_somebody_else_is_passed_over(sender: str, hop: Hop1) -> None:
    hop.forwarded()
    hop.router.on_refuse(sender, Refuse(**KEY, hop=2, reason="busy"))
    assert hop.sent == []


def test_a_wrong_step_is_asked_about_and_not_routed_around(hop: Hop1) -> None:
    hop.forwarded()
    hop.router.on_refuse("s2r0", Refuse(**KEY, hop=2, reason="wrong step"))
    assert (hop.late, hop.sent) == (["s2r0"], [])


def test_a_next_hop_that_is_back_gets_it_again_and_a_replaced_one_may_drop_it(hop: Hop1) -> None:
    hop.forwarded()
    hop.lost.add("s3r0")
    hop.back("s2r0")
    assert hop.one(Forward)[0] == "s2r0"
    hop.lose("s2r0")
    hop.take(Forward)
    hop.back("s2r0")
    to, release = hop.one(Release)
    assert (to, release.version) == ("s2r0", 0)
    assert hop.take(Forward) == []


# -- backward ----------------------------------------------------------------------------------------------


def test_a_gradient_goes_to_the_hop_before_with_ourselves_in_the_trail(hop: Hop1) -> None:
    hop.forwarded()
    hop.backward()
    hop.compute()
    to, message = hop.one(Backward)
    assert (to, message.hop, message.trail) == ("s0r0", 0, (PATH[3], PATH[2], PATH[1]))


@pytest.mark.parametrize("sender", ["s3r0", "s0r0", "stranger"])
def test_only_the_hop_after_may_send_backward(sender: str, hop: Hop1) -> None:
    hop.forwarded()
    hop.backward(sender)
    hop.compute()
    assert hop.strikes == [(sender, "BACKWARD from a peer that is not the hop after")]
    assert hop.sent == []


def test_a_gradient_of_what_is_not_held_or_was_computed_through_other_stages_is_passed_over(
    hop: Hop1,
) -> None:
    hop.backward()
    hop.forwarded()
    other = hops("s0r0", "s2r0", "s1r0", "s3r0")
    hop.backward("s3r0", path=other, hop=2, trail=(other[3],))
    hop.compute(2)
    assert (hop.sent, hop.strikes) == ([], [])


def test_a_replacement_before_us_gets_our_gradient_at_once_and_nothing_is_computed_again() -> None:
    hop = Hop1()
    path = hops("s0r0", "s1r0")
    hop.forwarded(path=path)
    hop.lost.add("s0r0")
    hop.backward("s0r0", path=path, trail=())
    hop.compute()
    assert hop.take(Backward) == []  # who is to have it is lost
    hop.lost.clear()
    hop.forward(path=path)
    assert hop.one(Backward)[0] == "s0r0"
    hop.compute(2)
    assert hop.context.backend.forwards[0, 2] == 1  # type: ignore[attr-defined]


def test_a_hop_before_us_that_is_back_gets_the_gradient_again(hop: Hop1) -> None:
    hop.forwarded()
    hop.backward()
    hop.compute()
    hop.take(Backward)
    hop.lost.add("s0r0")
    hop.back("s0r0")
    assert hop.one(Backward)[0] == "s0r0"


def test_other_stages_before_us_make_it_another_function() -> None:
    desk = Desk("s2r0", (2, 2, 2, 2))
    router = Router(
        desk.context,
        on_loss=lambda message, output: None,
        on_home=lambda held: None,
        on_late=lambda peer: None,
        on_full=lambda: None,
    )
    long, brief = PATH, hops("s0r0", "s2r0", "s3r0")
    router.on_forward("s1r0", Forward(**KEY, origin="s0r0", path=long, hop=2), activation(0, 2, checksum=7))
    desk.compute()
    desk.take(Forward)
    router.on_forward(
        "s0r0", Forward(**KEY, origin="s0r0", path=brief, hop=1, revision=1), activation(0, 2, checksum=9)
    )
    desk.compute()
    output = desk.sent[-1][2]
    to, message = desk.one(Forward)
    assert (to, message.path, message.revision) == ("s3r0", brief, 1)
    assert output.tolist() == desk.context.backend.infer(activation(0, 2, checksum=9)).tolist()


# -- what counts -------------------------------------------------------------------------------------------


def commit(**fields: Any) -> Commit:
    return Commit(**{**KEY, "origin": "s0r0", "path": PATH, "tokens": 1, "loss": 1.0, **fields})


def returned(hop: Hop1) -> None:
    hop.forwarded()
    hop.backward()
    hop.compute()
    hop.take(Backward)


def test_weights_are_computed_on_the_commit_and_once(hop: Hop1) -> None:
    returned(hop)
    assert hop.context.backend.sum.sum() == 0  # type: ignore[attr-defined]
    for _ in range(2):
        hop.router.on_commit("s0r0", commit())
        hop.compute()
    assert hop.context.backend.sum[2] == 1  # type: ignore[attr-defined]
    assert [counted.index for counted in hop.context.ledger.summed] == [2]


@pytest.mark.parametrize(
    ("sender", "fields", "strike"),
    [
        ("s0r1", {}, "COMMIT in another origin's name"),
        ("s1r1", {"origin": "s1r1"}, "COMMIT of what is not this origin's to commit"),
        ("s0r0", {"index": 8}, "COMMIT of what is not this origin's to commit"),
    ],
)
def test_a_commit_that_is_nobodys_to_give_is_a_strike(
    sender: str, fields: dict[str, Any], strike: str, hop: Hop1
) -> None:
    returned(hop)
    hop.router.on_commit(sender, commit(**fields))
    hop.compute()
    assert hop.strikes == [(sender, strike)]
    assert hop.context.ledger.summed == ()


def test_the_origins_release_frees_the_slot_and_goes_on_to_the_next_hop(hop: Hop1) -> None:
    hop.forwarded()
    hop.router.on_release("s0r0", Release(**KEY))
    assert hop.router.held == {}
    to, release = hop.one(Release)
    assert (to, release.version) == ("s2r0", 0)


@pytest.mark.parametrize(("sender", "version"), [("s2r0", None), ("stranger", None), ("s0r0", 3)])
def test_nobody_else_can_release(sender: str, version: int | None, hop: Hop1) -> None:
    hop.forwarded()
    hop.router.on_release(sender, Release(**KEY, version=version))
    assert list(hop.router.held) == [(0, 2, 0)]
    assert hop.sent == []


def test_every_message_here_is_one_that_the_wire_takes(hop: Hop1) -> None:
    hop.forward()
    hop.compute()
    for _, message, _ in hop.sent:
        assert Message.registry[message.kind].model_validate(message.model_dump()) == message


# -- how fast the others are -------------------------------------------------------------------------------


def test_the_hop_before_the_sender_hears_of_some_arrivals() -> None:
    hop = Hop1(me="s2r0", slots=2 * WITNESSED)
    for index in range(2 * WITNESSED):
        hop.forward("s1r0", hop=2, index=index)
    told = hop.take(Arrived)
    assert [(to, message.index) for to, message in told] == [
        ("s0r0", WITNESSED - 1),
        ("s0r0", 2 * WITNESSED - 1),
    ]
    assert {message.peer for _, message in told} == {"s1r0"}


def test_the_origin_sends_nobody_word_of_its_own_output(hop: Hop1) -> None:
    for index in range(WITNESSED):
        hop.forward(index=index)
    assert hop.take(Arrived) == []


def test_the_time_until_the_next_hops_output_arrived_is_its_pace(hop: Hop1) -> None:
    hop.forwarded()
    hop.clock.run_for(0.25)
    hop.router.on_arrived("s3r0", Arrived(**KEY, peer="s2r0"))
    assert hop.paces == [("s2r0", pytest.approx(0.25))]
    hop.router.on_arrived("s3r0", Arrived(**KEY, peer="s2r0"))  # said twice, counted once
    assert len(hop.paces) == 1


@pytest.mark.parametrize(
    ("sender", "peer", "index"),
    [("s2r0", "s2r0", 2), ("s3r1", "s2r0", 2), ("s3r0", "s2r1", 2), ("s3r0", "s2r0", 3)],
)
def test_nobody_but_the_hop_after_says_what_arrived(hop: Hop1, sender: str, peer: str, index: int) -> None:
    hop.forwarded()
    hop.router.on_arrived(sender, Arrived(step=0, index=index, attempt=0, peer=peer))
    assert hop.paces == []
