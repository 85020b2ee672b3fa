"""Lost at once, gone when that is certain, back when it answers again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from peer.liveness import Liveness
from swarm.clock import SimClock
from swarm.events import NoEvents
from swarm.messages import Heartbeat, Message, ProbeAck


def beat(
    step: int = 0, *, life: int = 1, progress: int = 0, working: bool = False, hears: bool = True
) -> Heartbeat:
    return Heartbeat(
        sequence=1,
        incarnation=life,
        step=step,
        progress=progress,
        working=working,
        state="active",
        sent_s=0.0,
        echo_s=0.0 if hears else None,
    )


class Bench:
    """One liveness that watches the peer ``b``, and what it told."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.sure = True
        self.told: list[str] = []
        self.unreachable: list[tuple[str, float]] = []
        self.dialled: list[float] = []
        self.sent: list[tuple[str, Message]] = []
        transport = SimpleNamespace(
            peer_id="a",
            send=lambda to, message: self.sent.append((to, message)),
            connect=lambda peer: self.dialled.append(self.clock.now()),
            disconnect=lambda peer: None,
        )
        self.liveness = Liveness(
            transport,  # type: ignore[arg-type]
            self.clock,
            NoEvents(),
            beat=lambda **times: beat(),
            incarnation=lambda: 1,
            on_lost=lambda peer, reason: self.told.append("lost"),
            on_gone=lambda peer: self.told.append("gone"),
            on_back=lambda peer: self.told.append("back"),
            on_vouched=lambda peer, lost_s: self.unreachable.append((peer, lost_s)),
            sure=lambda: self.sure,
            rng=random.Random(0),
        )
        self.liveness.watch({"b": 1})
        self.liveness.on_link_up("b")
        self.liveness.on_heartbeat("b", beat(step=7))

    def beats(self, peer: str, count: int, **fields: Any) -> None:
        """So many heartbeats of a peer, a second apart."""
        for _ in range(count):
            self.clock.run_for(1.0)
            self.liveness.on_heartbeat(peer, beat(**fields))

    def helper(self, peer: str) -> None:
        """Somebody else who lives and may be asked."""
        self.liveness.on_link_up(peer)
        self.liveness.on_heartbeat(peer, beat())

    def asked(self) -> list[Message]:
        return [message for _, message in self.sent if message.kind == "probe_request"]


def test_a_broken_link_is_a_loss_at_once_and_certain_a_moment_later() -> None:
    bench = Bench()
    bench.liveness.on_link_lost("b", "reset")
    assert bench.told == ["lost"]
    assert not bench.liveness.alive("b")
    assert not bench.liveness.gone("b")
    bench.clock.run_for(2)
    assert bench.told == ["lost", "gone"]
    assert len(bench.dialled) >= 2


def test_who_may_be_cut_off_itself_takes_nobody_for_dead_until_it_is_sure() -> None:
    bench = Bench()
    bench.sure = False
    bench.liveness.on_link_lost("b", "reset")
    bench.clock.run_for(30)
    assert bench.told == ["lost"]
    bench.sure = True
    bench.clock.run_for(2)
    assert bench.told == ["lost", "gone"]


def test_a_peer_that_answers_again_is_back_and_was_never_gone() -> None:
    bench = Bench()
    bench.liveness.on_link_lost("b", "reset")
    bench.clock.run_for(0.5)
    bench.liveness.on_link_up("b")
    bench.liveness.on_heartbeat("b", beat())
    assert bench.told == ["lost", "back"]
    assert bench.liveness.alive("b")


def test_silence_beyond_what_is_borne_is_a_loss() -> None:
    bench = Bench()
    borne_s = bench.liveness.silence_borne_s("b")
    bench.clock.run_for(borne_s - 0.5)
    assert bench.told == []
    bench.clock.run_for(3)
    assert bench.told == ["lost", "gone"]
    assert bench.liveness.step_of("b") == 7


def test_a_goodbye_needs_no_confirmation() -> None:
    bench = Bench()
    bench.liveness.forget("b", 1)
    assert bench.told == ["lost", "gone"]
    assert bench.liveness.gone("b")


def test_a_peer_that_others_reach_is_lost_and_never_gone() -> None:
    bench = Bench()
    bench.helper("c")
    bench.liveness.on_link_lost("b", "reset")
    for _ in range(60):
        bench.clock.run_for(0.5)
        bench.liveness.on_heartbeat("c", beat())
        for request in bench.asked()[-1:]:
            ack = ProbeAck(peer="b", nonce=request.nonce, incarnation=1)  # type: ignore[attr-defined]
            bench.liveness.probes.on_ack("c", ack)
    assert bench.told == ["lost"]
    assert bench.liveness.vouched("b")
    assert {peer for peer, _ in bench.unreachable} == {"b"}
    assert bench.unreachable[-1][1] > 20
    bench.liveness.on_link_up("b")
    bench.liveness.on_heartbeat("b", beat())
    assert bench.told == ["lost", "back"]
    assert not bench.liveness.vouched("b")


def test_who_is_gone_for_us_and_named_by_the_others_is_asked_for_again() -> None:
    bench = Bench()
    bench.helper("c")
    bench.liveness.on_link_lost("b", "reset")
    bench.clock.run_for(3)
    assert bench.told == ["lost", "gone"]
    asked, dialled = len(bench.asked()), len(bench.dialled)
    bench.liveness.reconsider("b")
    assert not bench.liveness.gone("b")
    assert not bench.liveness.alive("b")
    assert (len(bench.asked()), len(bench.dialled)) == (asked + 1, dialled + 1)
    bench.liveness.on_heartbeat("c", beat())
    bench.clock.run_for(2)
    assert bench.told == ["lost", "gone", "gone"]


def test_a_peer_that_answers_in_another_life_is_gone() -> None:
    bench = Bench()
    bench.helper("c")
    bench.liveness.on_link_lost("b", "reset")
    bench.liveness.on_link_lost("b", "nobody there")
    (request,) = bench.asked()
    ack = ProbeAck(peer="b", nonce=request.nonce, incarnation=2)  # type: ignore[attr-defined]
    bench.liveness.probes.on_ack("c", ack)
    assert bench.told == ["lost", "gone"]


def test_a_compute_that_hangs_behind_living_heartbeats_is_a_loss_and_moving_again_a_return() -> None:
    bench = Bench()
    for progress in range(6):
        bench.beats("b", 1, progress=progress, working=True)
    borne_s = bench.liveness.hang_borne_s("b")
    assert borne_s < 10
    bench.beats("b", int(borne_s) - 1, progress=5, working=True)
    assert bench.told == []
    bench.beats("b", 3, progress=5, working=True)
    assert bench.told == ["lost"]
    bench.beats("b", 1, progress=6, working=True)
    assert bench.told == ["lost", "back"]
    bench.beats("b", 30, progress=6, working=True)
    assert bench.told == ["lost", "back", "lost", "gone"]


def test_a_peer_with_nothing_to_do_does_not_hang() -> None:
    bench = Bench()
    for progress in range(6):
        bench.beats("b", 1, progress=progress, working=True)
    bench.beats("b", 60, progress=5)
    bench.beats("b", 3, progress=5, working=True)
    assert bench.told == []


def test_a_peer_whose_pace_was_not_measured_is_judged_by_all_others_pace() -> None:
    bench = Bench()
    bench.helper("c")
    assert bench.liveness.hang_borne_s("b") == 60
    for progress in range(6):
        bench.liveness.on_heartbeat("b", beat())
        bench.beats("c", 1, progress=progress, working=True)
    assert bench.liveness.hang_borne_s("b") < 10


def test_nobody_is_suspected_for_the_time_in_which_we_stood_still_ourselves() -> None:
    bench = Bench()
    bench.beats("b", 5)
    bench.liveness._excuse(30.0)
    bench.clock.run_for(6.0)
    assert bench.told == []
    bench.clock.run_for(30.0)
    assert bench.told == ["lost", "gone"]


def test_a_ban_outlives_a_new_link_and_a_new_life() -> None:
    bench = Bench()
    bench.liveness.ban("b")
    assert bench.told == ["lost", "gone"]
    for life in (1, 2):
        bench.liveness.on_link_up("b")
        bench.liveness.watch({"b": life})
        bench.beats("b", 2, life=life)
        assert not bench.liveness.alive("b")
        assert not bench.liveness.reachable("b")
    bench.liveness.pardon("b")
    bench.beats("b", 1, life=2)
    assert bench.told == ["lost", "gone", "back"]


def test_phi_of_a_peer_rises_with_its_silence() -> None:
    bench = Bench()
    bench.beats("b", 6)
    assert bench.liveness.phi("b") < 0.1
    bench.clock.run_for(3.9)
    assert 2 < bench.liveness.phi("b") < 8


def test_a_peer_that_is_heard_and_hears_nothing_is_lost_until_it_hears() -> None:
    bench = Bench()
    bench.helper("c")

    def pass_s(seconds: int, *, hears: bool) -> None:
        for _ in range(seconds):
            bench.beats("b", 1, hears=hears)
            bench.liveness.on_heartbeat("c", beat())

    pass_s(5, hears=True)
    pass_s(4, hears=False)
    assert bench.told == []
    pass_s(2, hears=False)
    assert bench.told[0] == "lost"
    assert [request.peer for request in bench.asked()][:1] == ["b"]  # type: ignore[attr-defined]
    pass_s(1, hears=True)
    assert bench.told[-1] == "back"
