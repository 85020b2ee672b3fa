"""A stage needs a peer, another has one too many: it goes there while the swarm trains on."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.simulation.swarm import SimSwarm
from tests.simulated.test_faults import STEP, goes_on


def lacking(seed: int = 0, **options: Any) -> SimSwarm:
    """Stage 2 has lost all its replicas but one; stage 1 has three more than that."""
    swarm = SimSwarm((2, 4, 3), seed=seed, moves=True, pace=6, **options)
    assert swarm.run_to(STEP)
    swarm.kill("s2r1")
    swarm.kill("s2r2")
    return swarm


def moved(swarm: SimSwarm, limit_s: float = 120.0) -> list[tuple[str, dict[str, Any]]]:
    """Until somebody has moved."""
    assert swarm.clock.run_until(lambda: bool(swarm.of("moved")), limit_s)
    return swarm.of("moved")


def hosted(swarm: SimSwarm) -> list[int]:
    """Replicas of each stage, as everybody agrees."""
    members = swarm.peers["s0r0"].core.context.members
    return [sum(m.stage == s and not m.learning for m in members) for s in range(swarm.rules.stages)]


@pytest.mark.parametrize("seed", range(3))
def test_a_thin_stage_gets_a_peer_of_a_rich_one_and_everything_counts(seed: int) -> None:
    swarm = lacking(seed)
    before_s = swarm.clock.now()
    ((name, fields),) = moved(swarm)
    assert (fields["stage"], fields["target"]) == (1, 2)
    assert swarm.clock.now() - before_s < 60
    goes_on(swarm, 6)
    assert hosted(swarm) == [2, 3, 2]
    assert swarm.of("fell_out") == []
    assert swarm.of("restarted") == []
    peer = swarm.peers[name]
    # Until its last step in the old stage it worked there; from the next one on in the new.
    at = fields["step"]
    worked: dict[int, set[int]] = {step: set() for step in range(at - 2, at + 3)}
    for step, stages in worked.items():
        for entry in swarm.close_of(step)["counted"]:
            stages |= {int(hop.partition(":")[0]) for hop in entry[3] if hop.endswith(f":{name}")}
    assert worked[at - 1] <= {1}
    assert worked[at] <= {2}
    assert 2 in worked[at] | worked[at + 1] | worked[at + 2]
    other = swarm.peers["s2r0"]
    mine, theirs = peer.applied(), other.applied()
    assert {place: mine[place] for place in mine if place[0] == 2}.items() <= theirs.items()
    swarm.clock.run_for(60)
    assert len(swarm.of("moved")) == 1


def test_a_stage_without_any_replica_is_founded_by_a_mover() -> None:
    swarm = SimSwarm((2, 3, 1, 2), path_length=3, moves=True, pace=6)
    assert swarm.run_to(STEP)
    swarm.kill("s2r0")
    ((name, fields),) = moved(swarm)
    assert fields["target"] == 2
    goes_on(swarm, 4)
    ((founder, restored),) = swarm.of("stage_restored")
    assert (founder, restored["source"]) == (name, "neighbours")
    assert hosted(swarm) == [2, 2, 1, 2]


def test_nobody_moves_while_all_is_well_or_for_a_moment_only() -> None:
    swarm = SimSwarm((2, 3, 2), moves=True, pace=6)
    assert swarm.run_to(STEP)
    swarm.clock.run_for(60)
    swarm.network.freeze("s2r1")
    swarm.clock.run_for(12)
    swarm.network.thaw("s2r1")
    swarm.clock.run_for(40)
    goes_on(swarm)
    assert swarm.of("moving") == []


@pytest.mark.parametrize("when", ["moving", "admitted", "loaded"])
def test_a_mover_that_dies_on_its_way_is_followed_by_another(when: str) -> None:
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((first, _),) = swarm.of("moving")
    assert swarm.clock.run_until(lambda: bool(swarm.peers[first].events.of(when)), 30)
    swarm.kill(first)
    ((name, _),) = moved(swarm)
    assert name != first
    goes_on(swarm, 4)
    assert hosted(swarm) == [2, 2, 2]


def test_a_mover_whose_only_donor_dies_founds_the_stage() -> None:
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((name, _),) = swarm.of("moving")
    assert swarm.clock.run_until(lambda: bool(swarm.peers[name].events.of("admitted")), 30)
    swarm.kill("s2r0")
    moved(swarm)
    goes_on(swarm, 4)
    assert hosted(swarm)[2] >= 1


def test_a_mover_that_is_cut_off_on_its_way_comes_back_as_a_newcomer() -> None:
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((name, _),) = swarm.of("moving")
    swarm.network.partition([[name], [other for other in swarm.peers if other != name]])
    swarm.clock.run_for(30)
    swarm.network.heal()
    swarm.clock.run_for(60)
    goes_on(swarm, 4)
    assert swarm.peers[name].core.context.active
    assert min(hosted(swarm)) == 2


def test_a_move_that_cannot_be_made_is_given_up_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one donor never answers: after a while the mover stays where it is, and its entry lapses."""
    monkeypatch.setattr("peer.mover.MOVE_LIMIT_S", 30.0)
    swarm = lacking()
    swarm.peers["s2r0"].core.donor.on_request = lambda sender, request: None  # type: ignore[method-assign]
    assert swarm.clock.run_until(lambda: bool(swarm.of("move_given_up")), 100)
    ((name, fields),) = swarm.of("move_given_up")
    assert fields["reason"] == "it took too long"
    swarm.clock.run_for(15)
    goes_on(swarm)
    entries = [m for m in swarm.peers["s0r0"].core.context.members if m.peer == name]
    assert [(m.stage, m.learning) for m in entries] == [(1, False)]


def test_a_peer_that_leaves_gives_its_move_up() -> None:
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((name, _),) = swarm.of("moving")
    swarm.peers[name].core.drain()
    assert swarm.clock.run_until(lambda: swarm.peers[name].core.left, 20)
    swarm.kill(name)
    moved(swarm)
    goes_on(swarm)


def test_who_was_told_to_stay_is_passed_over() -> None:
    swarm = lacking()
    first = min(peer.name for peer in swarm.living() if peer.stage == 1)
    swarm.peers[first].core.mover._backend_for = None
    ((name, _),) = moved(swarm, 200)
    assert name != first
    goes_on(swarm, 4)
    assert hosted(swarm) == [2, 3, 2]


def test_a_newcomer_gets_the_last_average_that_a_mover_makes_in_its_old_stage() -> None:
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((_, going),) = swarm.of("moving")
    # The close that admits the mover to its new stage is over: the next one names both.
    assert swarm.clock.run_until(lambda: swarm.counted(going["step"] + 1) > 0, 30)
    new = swarm.newcomer("new", 1)
    ((_, gone),) = moved(swarm)
    goes_on(swarm, 4)
    assert [fields["step"] for fields in new.events.of("followed")] == [gone["step"] - 1]
    assert [fields["step"] for fields in new.events.of("joined")] == [gone["step"]]
    assert new.events.of("missed_average") == []


@pytest.mark.parametrize(("kind", "cut_s"), [("average_done", 0.0), ("average_digest", 3.0)])
def test_a_mover_that_misses_its_last_average_holds_nobody_up(kind: str, cut_s: float) -> None:
    """The others have begun the next step, in which it is not of their stage any more, when it asks them."""
    swarm = lacking()
    assert swarm.clock.run_until(lambda: bool(swarm.of("moving")), 60)
    ((name, going),) = swarm.of("moving")

    def cut(sender: str, to: str, message: Any) -> bool:
        about = to if kind == "average_done" else sender
        if sender == to or about != name or message.stage != 1:
            return False
        if cut_s:
            swarm.network.one_way(sender, to)
            swarm.clock.call_later(cut_s, swarm.network.heal)
        swarm.network.reset(sender, to)
        return True

    swarm.when(kind, cut, step=going["step"] + 2, sent=kind == "average_done")
    moved(swarm)
    goes_on(swarm, 4)
    assert hosted(swarm) == [2, 3, 2]
