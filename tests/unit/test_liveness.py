"""Lost at once, gone when that is certain, back when it answers again."""

from __future__ import annotations

import random
from types import SimpleNamespace

from peer.liveness import Liveness
from swarm.clock import SimClock
from swarm.events import NoEvents
from swarm.messages import Heartbeat


def beat(step: int = 0) -> Heartbeat:
    return Heartbeat(sequence=1, incarnation=1, step=step, progress=0, state="active", sent_s=0.0)


class Bench:
    """One liveness that watches the peer ``b``, and what it told."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.told: list[str] = []
        self.dialled: list[float] = []
        transport = SimpleNamespace(
            peer_id="a",
            send=lambda to, message: None,
            connect=lambda peer: self.dialled.append(self.clock.now()),
            disconnect=lambda peer: None,
        )
        self.liveness = Liveness(
            transport,  # type: ignore[arg-type]
            self.clock,
            NoEvents(),
            beat=beat,
            on_lost=lambda peer, reason: self.told.append("lost"),
            on_gone=lambda peer: self.told.append("gone"),
            on_back=lambda peer: self.told.append("back"),
            rng=random.Random(0),
        )
        self.liveness.watch({"b": 1})
        self.liveness.on_link_up("b")
        self.liveness.on_heartbeat("b", beat(step=7))


def test_a_broken_link_is_a_loss_at_once_and_certain_a_moment_later() -> None:
    bench = Bench()
    bench.liveness.on_link_lost("b", "reset")
    assert bench.told == ["lost"]
    assert not bench.liveness.alive("b")
    assert not bench.liveness.gone("b")
    bench.clock.run_for(2)
    assert bench.told == ["lost", "gone"]
    assert len(bench.dialled) >= 2


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
