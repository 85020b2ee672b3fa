"""Peers that live and do not work, that work and are not seen, and that come back as another."""

from __future__ import annotations

from typing import Any

from bootstrap.faults.plan import AtTime, FaultPlan, Hang, Target
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.swarm import SimSwarm
from peer.standing import BAN_STRIKES
from tests.simulated.test_faults import STEP, goes_on


def test_a_link_that_fails_between_two_peers_alone_votes_nobody_out() -> None:
    """Others vouch for both; work goes around the broken link until it is whole again."""
    swarm = SimSwarm((2, 2, 2), pace=4)
    assert swarm.run_to(STEP)
    swarm.network.one_way("s0r0", "s1r0")
    swarm.network.reset("s0r0", "s1r0")
    swarm.clock.run_for(8)
    assert {(name, f["other"]) for name, f in swarm.of("vouched")} == {("s0r0", "s1r0"), ("s1r0", "s0r0")}
    assert swarm.of("gone") == []
    swarm.network.heal()
    goes_on(swarm)
    assert swarm.of("gone") == []
    assert swarm.of("fell_out") == []


def test_a_zombie_that_wakes_after_it_was_voted_out_is_refused_by_its_life() -> None:
    swarm = SimSwarm((2, 2, 2), pace=4)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(0.4)
    swarm.network.freeze("s1r1")
    swarm.clock.run_for(30)
    swarm.network.thaw("s1r1")
    swarm.clock.run_for(12)
    goes_on(swarm)
    stale = [fields for _, fields in swarm.of("stale")]
    assert stale
    assert {fields["other"] for fields in stale} == {"s1r1"}
    assert {fields["message"] for fields in stale} <= {"forward", "backward", "accept"}
    peer = swarm.peers["s1r1"]
    assert peer.core.context.active
    assert peer.core.context.incarnation == 2


def test_a_hop_that_accepts_and_never_passes_on_is_got_around_by_the_origin() -> None:
    """All of its path live and answer: only the time that others need tells."""
    swarm = SimSwarm((1, 2, 2))
    assert swarm.run_to(STEP)
    hop = swarm.peers["s1r1"].core
    hop.router._pass_on = lambda held: None  # type: ignore[method-assign, assignment]
    step = swarm.peers["s0r0"].step
    assert swarm.run_to(step + 1, 40)
    restarted = [fields for _, fields in swarm.of("restarted")]
    assert restarted
    assert all(fields["reason"].startswith("not back after") for fields in restarted)
    swarm.whole()
    paths = [entry[3] for entry in swarm.close_of(step)["counted"]]
    assert all("1:s1r1" not in path for path in paths)


def test_a_peer_that_sends_nonsense_is_banned_in_whatever_life_it_comes_back() -> None:
    swarm = SimSwarm((2, 3, 2))
    assert swarm.run_to(STEP)
    for name in ("s0r0", "s0r1", "s1r0", "s1r1", "s2r0", "s2r1"):
        for _ in range(BAN_STRIKES):
            swarm.peers[name].core.standings.strike("s1r2", "nonsense")
    at = max(peer.step for peer in swarm.living())
    assert swarm.clock.run_until(lambda: swarm.peers["s0r0"].step >= at + 3, 60)

    def on_paths() -> bool:
        last = swarm.peers["s0r0"].step - 1
        return any("1:s1r2" in entry[3] for entry in swarm.close_of(last)["counted"])

    assert not on_paths()
    swarm.kill("s1r2")
    newcomer = swarm.newcomer("s1r2", 1, incarnation=5)
    swarm.clock.run_for(20)
    assert not newcomer.core.context.active
    assert not on_paths()
    swarm.check()


def test_no_honest_peer_is_ever_struck() -> None:
    """Whatever breaks: a strike says that somebody sent what no honest peer sends."""
    struck: list[Any] = []
    for seed in range(6):
        swarm = SimSwarm((2, 3, 2), seed=seed, pace=2)
        names = list(swarm.peers)
        assert swarm.run_to(STEP)
        swarm.clock.run_for(0.1 * seed)
        swarm.network.reset(names[seed % 7], names[(seed + 3) % 7])
        swarm.clock.run_for(0.2)
        swarm.kill(names[2 + seed % 5])
        swarm.network.freeze(names[(seed + 4) % 2])
        swarm.clock.run_for(15)
        swarm.network.thaw(names[(seed + 4) % 2])
        swarm.clock.run_for(10)
        goes_on(swarm)
        struck += swarm.of("strike")
    assert struck == []


def test_a_compute_that_hangs_is_routed_around_though_its_heartbeats_go_on() -> None:
    swarm = SimSwarm((2, 2, 2), pace=20)
    assert swarm.run_to(STEP + 1)
    plan = FaultPlan(
        seed=1,
        faults=(Hang(target=Target(peer="s1r1"), duration_s=60, trigger=AtTime(time_s=0.5)),),
    )
    driver = SimulatedFaults(swarm, plan)
    at = max(peer.step for peer in swarm.living())
    others = [peer for peer in swarm.living() if peer.name != "s1r1"]
    assert swarm.clock.run_until(lambda: all(peer.step >= at + 2 for peer in others), 50)
    assert driver.fired[0] == 1
    lost = {fields["reason"] for _, fields in swarm.of("lost") if fields["other"] == "s1r1"}
    assert lost
    assert all(reason.startswith("computes nothing") for reason in lost)
    assert [fields for _, fields in swarm.of("rerouted") if fields["lost"] == "s1r1"]
    swarm.clock.run_for(80)
    goes_on(swarm)
    assert swarm.peers["s1r1"].core.context.active
