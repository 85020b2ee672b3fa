"""Newcomers in mid-training: learner, download, catching up, member; and members that come back."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.simulation.fake import WIDTH
from bootstrap.simulation.swarm import SimPeer, SimSwarm
from swarm.messages import Decided, StateChunk
from swarm.transport.memory import LinkModel


def members_of(swarm: SimSwarm, name: str = "s0r0") -> dict[str, bool]:
    """Peer -> is it a learner, as ``name`` knows it."""
    return {member.peer: member.learning for member in swarm.peers[name].core.context.members}


def served(peer: SimPeer) -> int:
    """Training microbatches that a peer computed forward."""
    return sum(peer.backend.forwards.values())


def comes_in(swarm: SimSwarm, peer: SimPeer, limit_s: float = 30.0, *, needed: bool = True) -> None:
    """The newcomer becomes a full member, serves if it is ``needed``, and the swarm goes on whole."""
    assert swarm.clock.run_until(lambda: bool(peer.events.of("joined")), limit_s)
    assert not needed or swarm.clock.run_until(lambda: served(peer) > 0, 30)
    target = max(p.step for p in swarm.living()) + 4
    assert swarm.run_to(target)
    swarm.whole()
    for other in swarm.living():
        if other.stage == peer.stage:
            mine, theirs = peer.applied(), other.applied()
            both = set(mine) & set(theirs)
            assert len(both) >= 4
            assert all(mine[step] == theirs[step] for step in both)


def happened(peer: SimPeer, *events: str) -> list[str]:
    """Which of ``events`` happened to a peer, in order."""
    return [event for _, event, _ in peer.events.entries if event in events]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("after", [0.0, 0.15, 0.28])
def test_a_newcomer_learns_downloads_catches_up_and_serves(stage: int, after: float) -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(2)
    swarm.clock.run_for(after)
    peer = swarm.newcomer("new", stage)
    comes_in(swarm, peer)
    order = happened(peer, "admitted", "loaded", "followed", "joined")
    assert sorted(order[:2]) == ["admitted", "loaded"]
    assert order[2:] == ["followed", "joined"]
    assert members_of(swarm)["new"] is False
    assert len(peer.events.of("loaded")) == 1
    for trouble in ("lost", "restarted", "fell_out", "strike"):
        assert swarm.of(trouble) == [], trouble


def test_a_newcomer_of_stage_0_draws_its_share_of_the_samples() -> None:
    swarm = SimSwarm((1, 2))
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 0)
    comes_in(swarm, peer)
    step = min(p.step for p in swarm.living()) - 1
    origins = [entry[2] for entry in swarm.close_of(step)["counted"]]
    assert sorted(origins) == ["new"] * 6 + ["s0r0"] * 6


def test_who_holds_the_state_at_the_close_is_named_a_member_by_it() -> None:
    """A step is long, the state short: it comes while the step goes on, and the step's average after it."""
    swarm = SimSwarm((2, 2, 2), pace=10)
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    assert swarm.run_to(3)
    (close,) = [fields for name, fields in swarm.of("closed") if name == "s0r0" and fields["step"] == 2]
    assert "1:new" in close["members"]
    assert close["learners"] == []
    assert swarm.clock.run_until(lambda: served(peer) > 0, 10)
    assert happened(peer, "admitted", "loaded", "followed", "joined") == [
        "loaded",
        "admitted",
        "followed",
        "joined",
    ]
    assert swarm.run_to(5)
    swarm.whole()
    assert peer.applied().keys() >= {(1, 2), (1, 3), (1, 4)}


def test_who_is_not_named_though_it_holds_the_state_takes_a_newer_one_later() -> None:
    """The members do not hear its requests for a step: the average that its state needs does not come."""
    swarm = SimSwarm((2, 2, 2), pace=10)
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    assert swarm.clock.run_until(lambda: bool(peer.events.of("loaded")), 5)
    for other in swarm.peers.values():
        other.core.newcomers.on_request = lambda sender, message: None  # type: ignore[method-assign]
        other.core.newcomers.forget("new")
    assert swarm.run_to(3)
    assert peer.events.of("admitted") == []
    for other in swarm.peers.values():
        del other.core.newcomers.on_request
    comes_in(swarm, peer, needed=False)  # the other stages have two, too
    steps = [fields["step"] for fields in peer.events.of("loaded")]
    assert steps[0] == 2
    assert steps[-1] > 3


def test_a_step_that_was_closed_before_it_asked_has_not_passed_a_newcomer_over() -> None:
    """It hears of two closes, the older first: it loads the state of the step that is under way all the
    same, and works from the next one on."""
    swarm = SimSwarm((2, 2, 2), pace=10)
    assert swarm.run_to(2)
    swarm.kill("s1r1")
    assert swarm.run_to(3)
    peer = swarm.newcomer("s1r1", 1, incarnation=1025)
    closes = [swarm.peers["s0r0"].core.agreement.closes[step] for step in (1, 2)]
    peer.core.on_message("s0r0", Decided(close=closes[0]), None)
    assert swarm.clock.run_until(lambda: peer.core.joiner.download is not None, 0.5)
    assert swarm.clock.run_until(lambda: bool(peer.events.of("loaded")), 1)
    assert swarm.run_to(5)
    assert [fields["step"] for fields in peer.events.of("joined")] == [4]
    swarm.whole()


def test_the_others_do_not_wait_for_a_newcomer() -> None:
    """Its link is so slow that the download lasts many steps; a step takes no longer for that."""
    alone, with_newcomer = SimSwarm((2, 2)), SimSwarm((2, 2))
    for swarm in (alone, with_newcomer):
        assert swarm.run_to(2)
    peer = with_newcomer.newcomer("new", 1)
    for other in list(with_newcomer.peers):
        if other != "new":
            with_newcomer.network.set_link("new", other, LinkModel(latency_s=0.01, bandwidth_bytes_per_s=150))
    for swarm in (alone, with_newcomer):
        swarm.clock.run_for(4)
    assert not peer.events.of("joined")
    assert members_of(with_newcomer)["new"] is True
    assert with_newcomer.peers["s0r0"].step >= alone.peers["s0r0"].step - 1


def test_a_learner_takes_no_work() -> None:
    swarm = SimSwarm((2, 2))
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    sent: list[str] = []
    swarm.sent.append(lambda a, b, m: sent.append(m.kind) if b == "new" else None)
    assert swarm.clock.run_until(lambda: members_of(swarm).get("new") is False, 20)
    assert "forward" not in sent
    assert "average_result" in sent
    assert served(peer) == 0


def test_two_newcomers_of_one_stage_at_once() -> None:
    swarm = SimSwarm((2, 1, 2))
    assert swarm.run_to(2)
    first, second = swarm.newcomer("new1", 1), swarm.newcomer("new2", 1)
    comes_in(swarm, first)
    comes_in(swarm, second)
    assert first.applied()[1, first.step - 2] == second.applied()[1, second.step - 2]


@pytest.mark.parametrize("lost", ["state_request", "state_chunk"])
def test_a_donor_that_dies_in_mid_download_is_followed_by_another(lost: str) -> None:
    swarm = SimSwarm((2, 3, 2))
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    donors: list[str] = []

    def kill(sender: str, to: str, message: Any) -> None:
        if message.kind == lost and not donors:
            donors.append(to if lost == "state_request" else sender)
            swarm.kill(donors[0])

    swarm.came.append(kill)
    comes_in(swarm, peer)
    assert swarm.peers[donors[0]].dead


def test_a_long_download_comes_from_all_replicas_and_goes_on_where_a_lost_one_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of 16 bytes; a donor dies after the fifth. Hardly a chunk is sent twice."""
    monkeypatch.setattr("peer.donor.CHUNK_BYTES", 16)
    swarm = SimSwarm((2, 3), pace=4)
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    chunks: list[tuple[str, int]] = []

    def watch(sender: str, to: str, message: Any) -> None:
        if message.kind == "state_chunk":
            chunks.append((sender, message.chunk))
            if len(chunks) == 5:
                swarm.kill(sender)

    swarm.came.append(watch)
    comes_in(swarm, peer, 40, needed=False)  # the origins have no more for so many replicas
    count = -(-8 * (WIDTH + 1) // 16)
    assert sorted({chunk for _, chunk in chunks}) == list(range(count))
    assert len(chunks) <= count + 5, "the download began anew"
    assert len({donor for donor, _ in chunks}) == 3
    sources = peer.events.of("loaded")[0]["sources"]
    assert len(sources) == 2
    assert min(sources.values()) > count // 4


def test_a_state_that_was_spoiled_on_its_way_is_taken_from_another_donor() -> None:
    swarm = SimSwarm((1, 3))
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    inner, spoiled = peer.core.inbox.handlers[StateChunk], []

    def spoil(sender: str, message: Any, chunk: Any) -> None:
        if message.kind == "state_chunk" and not spoiled:
            spoiled.append(sender)
            chunk = chunk ^ 1
        inner(sender, message, chunk)

    peer.core.inbox.handlers[StateChunk] = spoil
    comes_in(swarm, peer, needed=False)
    assert peer.core.standings.of(spoiled[0]).strikes == 1
    assert len(peer.events.of("loaded")) == 1


@pytest.mark.parametrize("event", ["admitted", "loaded", "joined"])
def test_a_newcomer_that_dies_on_its_way_in_leaves_no_trace(event: str) -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(2)
    peer = swarm.newcomer("new", 1)
    assert swarm.clock.run_until(lambda: bool(peer.events.of(event)), 20)
    swarm.kill("new")
    target = max(p.step for p in swarm.living()) + 4
    assert swarm.run_to(target)
    swarm.whole()
    assert "new" not in members_of(swarm)
    assert swarm.of("fell_out") == []


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("pause", [0.0, 0.3, 3.0])
def test_a_peer_restarted_under_the_same_name_is_a_newcomer(after: float, pause: float) -> None:
    """Its new process knows nothing of the step: nobody counts on what the old one held or had promised."""
    swarm = SimSwarm((2, 2, 2), pace=2)
    assert swarm.run_to(2)
    swarm.clock.run_for(2 * after)
    swarm.kill("s1r1")
    swarm.clock.run_for(pause)
    peer = swarm.newcomer("s1r1", 1, incarnation=1025)
    comes_in(swarm, peer)
    assert {m.incarnation for m in swarm.peers["s0r0"].core.context.members if m.peer == "s1r1"} == {1025}
    assert [name for name, _ in swarm.of("fell_out")] == []


@pytest.mark.parametrize("name", ["s0r1", "s1r1", "s2r0"])
def test_a_member_that_was_cut_off_for_some_steps_comes_back_alike(name: str) -> None:
    swarm = SimSwarm((2, 2, 2), pace=2)
    assert swarm.run_to(2)
    swarm.network.partition([[name], [other for other in swarm.peers if other != name]])
    swarm.clock.run_for(15)
    assert name not in members_of(swarm, "s0r0" if name != "s0r0" else "s0r1")
    swarm.network.heal()
    peer = swarm.peers[name]
    assert swarm.clock.run_until(lambda: bool(peer.events.of("joined")), 30)
    assert happened(peer, "fell_out", "loaded", "joined") == ["fell_out", "loaded", "joined"]
    target = max(p.step for p in swarm.living()) + 4
    assert swarm.run_to(target)
    swarm.whole()
    assert members_of(swarm)[name] is False


def test_a_leaver_finishes_its_step_and_nothing_is_computed_again() -> None:
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(2)
    swarm.clock.run_for(0.1)
    leaver = swarm.peers["s1r1"]
    leaver.core.drain()
    assert swarm.clock.run_until(lambda: leaver.core.left, 10)
    assert leaver.applied()[1, 2]
    swarm.kill("s1r1")
    target = max(p.step for p in swarm.living()) + 3
    assert swarm.run_to(target)
    swarm.whole()
    assert swarm.wasted(2) == {}
    assert "s1r1" not in members_of(swarm)


def test_a_newcomer_with_a_request_for_a_stage_that_is_not_there_stays_out() -> None:
    swarm = SimSwarm((2, 2))
    assert swarm.run_to(2)
    swarm.newcomer("new", 7)
    swarm.clock.run_for(5)
    assert "new" not in members_of(swarm)
    swarm.check()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "kind", ["join_request", "state_request", "state_chunk", "average_result", "average_done", "decided"]
)
def test_a_link_that_breaks_under_a_learner_costs_it_time_and_nothing_else(kind: str, number: int) -> None:
    """The link breaks just when the message number ``number`` of a kind was sent to it or by it."""
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(2)
    seen: list[str] = []

    def cut(sender: str, to: str, message: Any) -> None:
        if message.kind == kind and "new" in (sender, to):
            seen.append(sender)
            if len(seen) == number + 1:
                swarm.network.reset(sender, to)

    swarm.sent.append(cut)
    peer = swarm.newcomer("new", 2)
    comes_in(swarm, peer)
    assert len(seen) > number or kind.startswith("state")


def test_a_newcomer_of_a_run_that_ends_before_it_is_in_is_told_so() -> None:
    swarm = SimSwarm((2, 2), total_steps=6, pace=4)
    assert swarm.run_to(5)
    peer = swarm.newcomer("new", 1)
    ended: list[bool] = []
    peer.core._on_finished = lambda: ended.append(True)
    swarm.network.partition([["new"], [name for name in swarm.peers if name != "new"]])
    assert swarm.clock.run_until(lambda: swarm.peers["s0r0"].core.finished, 30)
    assert not ended
    swarm.network.heal()
    assert swarm.clock.run_until(lambda: bool(ended), 40)
    assert peer.core.run_is_over()
