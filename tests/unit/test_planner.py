"""One peer's planner: paths for the members that live, whose plans it takes, and whose words are a strike."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from peer.context import draw_order
from peer.paces import Paces
from peer.planner import (
    COPIES,
    LEAD_S,
    RATE_BYTES_PER_S,
    REVIEW_S,
    SOON_S,
    TOLD_LINKS,
    VIEWS_BYTES_PER_S,
    Planner,
)
from peer.rates import Rates
from scheduler.hashtree import Fact
from scheduler.plan import Plan
from scheduler.view import PLAN_TOPIC, VIEW_TOPIC, PeerView, PlanFact
from swarm.messages import Hop
from tests.unit.desk import Desk

EACH = 4


class Planning(Desk):
    """A planner whose gossip is kept in ``published``; nothing is planned before ``review``."""

    def __init__(self, me: str = "s0r0", replicas: tuple[int, ...] = (2, 2, 2), path_length: int = 3) -> None:
        super().__init__(me, replicas, each=EACH, path_length=path_length)
        self.published: list[tuple[str, bytes]] = []
        self.heard: set[str] = set()
        vars(self.context.liveness).update(linked=list, round_trip_s=lambda peer: None)
        self.rates = Rates(self.clock, lambda peer: 0.1)
        self.paces = Paces(self.clock)
        self.planner = Planner(
            self.context, rates=self.rates, paces=self.paces, activation_bytes=1000, seed=0, iterations=8
        )

    def start(self) -> None:
        """Gossip from now on, as a daemon does."""
        told: Any = SimpleNamespace(
            publish=lambda topic, value: self.published.append((topic, value)),
            store=SimpleNamespace(
                get=lambda topic, owner: owner in self.heard or owner == self.context.me or None
            ),
        )
        self.planner.start(told)

    def hear(self, topic: str, owner: str, value: bytes) -> None:
        self.heard.add(owner)
        self.planner.on_fact(Fact(topic, owner, 1, value))

    def view(self, peer: str, **fields: Any) -> PeerView:
        times = {"forward_s": 0.01, "backward_s": 0.01, "memory_slots": 4}
        rates = {"up_bytes_per_s": 1e9, "down_bytes_per_s": 1e9}
        about = {"peer": peer, "incarnation": 1, "stage": int(peer[1]), "state": "active", "step": 0}
        return PeerView.model_validate({**about, **times, **rates, **fields})

    def see(self, **slow: float) -> None:
        """A view of every member; those that are named need so many seconds for each task."""
        for member in self.context.members:
            view = self.view(member.peer)
            if member.peer in slow:
                times = {"forward_s": slow[member.peer], "backward_s": slow[member.peer]}
                view = self.view(member.peer, **times)
            self.hear(VIEW_TOPIC, member.peer, view.to_bytes())

    def paths(self, **more: Any) -> list[list[str]]:
        """Of this origin's microbatches."""
        return [names(self.planner.path(position, **more)) for position in range(EACH)]

    def told(self, topic: str) -> list[bytes]:
        return [value for kind, value in self.published if kind == topic]


def names(path: tuple[Hop, ...]) -> list[str]:
    return [hop.peer for hop in path]


def plan_of(desk: Planning, proposer: str, *paths: tuple[str, ...], epoch: str | None = None) -> bytes:
    """A plan with the same paths for each origin."""
    desk.planner.review()
    assert desk.planner.plan is not None
    plan = Plan(paths=paths, makespan_s=0.0, epoch=epoch or desk.planner.plan.epoch, proposer=proposer)
    return PlanFact(plan=plan).to_bytes()


@pytest.fixture
def desk() -> Planning:
    return Planning()


# -- what it says of its links -------------------------------------------------------------------------------


def test_a_view_tells_what_links_were_measured_to_carry(desk: Planning) -> None:
    vars(desk.context.liveness).update(linked=lambda: ["s1r0", "s1r1"], round_trip_s=lambda peer: 0.1)
    desk.start()
    desk.rates.sent("s1r0", 1_000_000)
    desk.clock.run_for(0.6)
    desk.rates.taken("s1r0", 1_000_000)
    desk.planner.tell()
    before, after = [PeerView.from_bytes(told, "s0r0").links for told in desk.told(VIEW_TOPIC)]
    assert before == {"s1r0": (0.05, RATE_BYTES_PER_S), "s1r1": (0.05, RATE_BYTES_PER_S)}
    assert after["s1r0"] == (0.05, pytest.approx(2e6))


# -- paths -------------------------------------------------------------------------------------------------


def test_paths_begin_here_visit_each_stage_once_and_share_the_load(desk: Planning) -> None:
    desk.see()
    paths = desk.paths()
    assert all([peer[:2] for peer in path] == ["s0", "s1", "s2"] for path in paths)
    assert {path[0] for path in paths} == {"s0r0"}
    assert desk.planner.plan is not None
    load = Counter(peer for path in desk.planner.plan.paths for peer in path)
    assert set(load.values()) == {EACH}  # both origins' microbatches, over two replicas of each stage


def test_more_microbatches_than_planned_go_round(desk: Planning) -> None:
    desk.see()
    assert names(desk.planner.path(EACH + 1)) == desk.paths()[1]


def test_a_slow_replica_gets_less(desk: Planning) -> None:
    desk.see(s1r1=0.05)
    load = Counter(peer for path in desk.paths() for peer in path)
    assert load["s1r0"] > load["s1r1"]


def test_nobodys_view_is_needed(desk: Planning) -> None:
    assert all(len(path) == 3 for path in desk.paths())


def test_paths_of_the_old_plan_go_around_the_lost_at_once(desk: Planning) -> None:
    desk.see()
    before = desk.paths()
    desk.lost.add("s1r0")
    assert desk.paths() == [[peer.replace("s1r0", "s1r1") for peer in path] for path in before]


def test_a_stage_that_nobody_hosts_is_replaced_by_one_that_was_to_be_skipped() -> None:
    desk = Planning(replicas=(1, 1, 1, 1), path_length=3)
    desk.see()
    assert {len(path) for path in desk.paths()} == {3}
    desk.lost.add("s2r0")
    assert desk.paths() == [["s0r0", "s1r0", "s3r0"]] * EACH


def test_a_path_gets_shorter_when_nothing_else_is_left() -> None:
    desk = Planning(replicas=(1, 1, 1), path_length=3)
    desk.see()
    desk.lost.add("s1r0")
    assert desk.paths() == [["s0r0", "s2r0"]] * EACH


def test_those_to_be_avoided_are_taken_only_where_there_is_nobody_else() -> None:
    desk = Planning(replicas=(1, 2, 1))
    desk.see()
    around = desk.paths(avoid=frozenset({"s1r0", "s2r0"}))
    assert around == [["s0r0", "s1r1", "s2r0"]] * EACH


def test_the_full_path_has_one_living_peer_of_every_stage() -> None:
    desk = Planning(replicas=(1, 2, 1, 1), path_length=2)
    desk.see()
    desk.lost.add("s1r0")
    assert names(desk.planner.full_path()) == ["s0r0", "s1r1", "s2r0", "s3r0"]


def test_a_replacement_is_the_living_replica_that_is_done_first(desk: Planning) -> None:
    desk = Planning(replicas=(1, 3, 1))
    desk.see(s1r0=0.05, s1r1=0.002)
    assert desk.planner.replacement(1, set()) == "s1r1"
    assert desk.planner.replacement(1, {"s1r1"}) == "s1r2"
    desk.lost |= {"s1r1", "s1r2"}
    assert desk.planner.replacement(1, set()) == "s1r0"
    assert desk.planner.replacement(1, {"s1r0"}) is None


# -- whose plan --------------------------------------------------------------------------------------------

UNEVEN = tuple((f"s0r{n % 2}", "s1r0", "s2r0") for n in range(2 * EACH))


def test_a_worse_plan_of_another_is_not_taken(desk: Planning) -> None:
    desk.see()
    mine = desk.paths()
    desk.hear(PLAN_TOPIC, "s0r1", plan_of(desk, "s0r1", *UNEVEN))
    assert desk.paths() == mine


def better_of_another(desk: Planning) -> Plan:
    """The desk holds an uneven plan, made while two peers were slow; another origin has an even one."""
    desk.see(s1r1=0.5, s2r1=0.5)
    assert desk.paths() == [["s0r0", "s1r0", "s2r0"]] * EACH
    desk.see()
    desk.planner.review()
    assert desk.paths() == [["s0r0", "s1r0", "s2r0"]] * EACH  # it holds; nothing is searched
    other = Planning("s0r1")
    other.see()
    other.planner.review()
    assert other.planner.plan is not None
    return other.planner.plan.model_copy(update={"makespan_s": 1e6})


def test_a_better_plan_of_another_is_taken_by_the_next_step_whatever_it_claims_of_itself(
    desk: Planning,
) -> None:
    """Not in mid-step: another origin may hear of it later, and a mixture of two even plans is not even."""
    plan = better_of_another(desk)
    desk.hear(PLAN_TOPIC, "s0r1", PlanFact(plan=plan).to_bytes())
    desk.planner.review()
    assert desk.planner.plan != plan
    desk.planner.begin()
    assert desk.planner.plan == plan


def test_a_plan_that_fits_again_after_a_return_is_taken_in_mid_step(desk: Planning) -> None:
    desk.see()
    desk.planner.review()
    assert desk.planner.plan is not None
    whole = desk.planner.plan.model_copy(update={"proposer": "s0r1"})
    desk.lost.add("s1r1")
    desk.planner.review_soon()
    desk.clock.run_for(SOON_S + 2 * LEAD_S)
    desk.hear(PLAN_TOPIC, "s0r1", PlanFact(plan=whole).to_bytes())
    assert desk.planner.plan != whole
    planned = len(desk.events.of("planned"))
    desk.lost.clear()
    desk.planner.review_soon()
    desk.clock.run_for(SOON_S)
    assert desk.planner.plan == whole
    assert len(desk.events.of("planned")) == planned


def first_and_second(step: int) -> tuple[str, str]:
    """In whose turn it is to plan for two origins."""
    first, second = draw_order(step, ("s0r0", "s0r1"))
    return first, second


def test_one_origin_plans_for_a_changed_membership_and_the_next_when_it_does_not() -> None:
    planned = {}
    for me in first_and_second(0):
        desk = Planning(me)
        desk.see()
        desk.start()
        desk.lost.add("s1r0")
        desk.planner.review_soon()
        desk.clock.run_for(2 * SOON_S)
        planned[me] = [len(desk.events.of("planned"))]
        desk.clock.run_for(LEAD_S)
        planned[me].append(len(desk.events.of("planned")))
    first, second = first_and_second(0)
    assert planned == {first: [2, 2], second: [1, 2]}


def test_the_first_origin_plans_for_the_next_step_while_the_others_average() -> None:
    first, second = first_and_second(1)
    desk, other = Planning(first), Planning(second)
    for each in (desk, other):
        each.see()
        each.planner.review()
        each.start()
        each.published.clear()
        less = tuple(member for member in each.context.members if member.peer != "s1r1")
        each.planner.decided(less)
    assert other.told(PLAN_TOPIC) == []
    (told,) = desk.told(PLAN_TOPIC)
    plan = PlanFact.from_bytes(told, first).plan
    assert "s1r1" not in {peer for path in plan.paths for peer in path}
    other.hear(PLAN_TOPIC, first, told)
    for each in (desk, other):
        assert each.planner.plan != plan  # the step that is under way keeps its own
        each.context.members, each.context.step = less, 1
        each.planner.begin()
        assert each.planner.plan == plan
    assert other.told(PLAN_TOPIC) == []


@pytest.mark.parametrize(
    "paths",
    [
        (("s0r0", "s1r0", "s2r9"),) * 8,
        (("s0r0", "s2r0", "s1r0"),) * 8,
        (("s0r0", "s1r0"),) * 8,
        (("s0r0", "s1r0", "s2r0"),),
    ],
    ids=["stranger", "wrong order", "too short", "too few"],
)
def test_a_plan_that_does_not_hold_is_passed_over(paths: tuple[tuple[str, ...], ...], desk: Planning) -> None:
    desk.see()
    mine = desk.paths()
    desk.hear(PLAN_TOPIC, "s0r1", plan_of(desk, "s0r1", *paths))
    assert desk.paths() == mine
    assert desk.strikes == []


def test_a_plan_for_another_membership_is_passed_over(desk: Planning) -> None:
    desk.see()
    desk.planner.review()
    held = desk.planner.plan
    desk.hear(PLAN_TOPIC, "s0r1", plan_of(desk, "s0r1", *UNEVEN, epoch="another"))
    assert desk.planner.plan is held


def test_words_that_nobody_honest_signs_are_strikes(desk: Planning) -> None:
    desk.see()
    desk.hear(VIEW_TOPIC, "s1r0", b"\xc1")
    desk.hear(VIEW_TOPIC, "s1r0", desk.view("s1r1", forward_s=9.0).to_bytes())
    desk.hear(PLAN_TOPIC, "s1r0", b"junk")
    desk.hear(PLAN_TOPIC, "s1r0", plan_of(desk, "s0r1", *UNEVEN))
    assert [peer for peer, _ in desk.strikes] == ["s1r0"] * 4
    view = desk.planner.view_of("s1r1")
    assert view is not None
    assert view.forward_s == 0.01


# -- what it says ------------------------------------------------------------------------------------------


def test_every_peer_tells_its_view_and_only_an_origin_plans() -> None:
    for me in ("s0r0", "s1r0"):
        desk = Planning(me)
        desk.see()
        desk.start()
        assert [PeerView.from_bytes(value, me).stage for value in desk.told(VIEW_TOPIC)] == [int(me[1])]
        plans = [PlanFact.from_bytes(value, me).plan for value in desk.told(PLAN_TOPIC)]
        assert len(plans) == (me == "s0r0")


def test_a_view_is_told_again_when_it_says_something_new() -> None:
    desk = Planning()
    links = {"s1r0": 0.1, "s1r1": 0.1}
    vars(desk.context.liveness).update(linked=lambda: sorted(links), round_trip_s=links.get)
    desk.start()
    for change, told in (
        (lambda: None, 1),
        (lambda: links.update(s1r0=0.103), 1),  # noise
        (lambda: links.update(s1r0=0.3), 2),
        (lambda: links.update(s1r2=0.1), 3),
        (lambda: setattr(desk.context, "leaving", True), 4),
        (desk.planner.close, 4),
        (lambda: setattr(desk.context, "leaving", False), 4),
    ):
        change()
        desk.clock.run_for(1.1 * REVIEW_S)
        assert len(desk.told(VIEW_TOPIC)) == told


def test_the_more_members_the_less_often_links_are_told() -> None:
    links = {f"s1r{number}": 0.1 for number in range(300)}
    desk = Planning(replicas=(2, 300, 2))
    vars(desk.context.liveness).update(linked=lambda: sorted(links), round_trip_s=links.get)
    desk.start()
    for n in range(60):
        links["s1r0"] = 0.01 + 0.001 * 2 ** (n % 6)  # another in each review
        desk.clock.run_for(REVIEW_S)
    views = desk.told(VIEW_TOPIC)
    sent_bytes = COPIES * len(desk.context.members) * sum(map(len, views[1:]))
    assert len(views) > 1
    assert sent_bytes / (60 * REVIEW_S) <= VIEWS_BYTES_PER_S
    nearest = PeerView.from_bytes(views[-1], "s0r0").links
    assert len(nearest) == TOLD_LINKS
    assert "s1r0" in nearest


def test_losses_that_come_together_are_planned_for_once(desk: Planning) -> None:
    desk.see()
    desk.start()
    for peer in ("s1r0", "s2r0", "s0r1"):
        desk.lost.add(peer)
        desk.planner.review_soon()
    assert len(desk.events.of("planned")) == 1
    desk.clock.run_for(2 * SOON_S)
    assert len(desk.events.of("planned")) == 2
    assert desk.paths() == [["s0r0", "s1r1", "s2r1"]] * EACH
    assert desk.planner.plan is not None
    assert {path[0] for path in desk.planner.plan.paths} == {"s0r0"}


def test_who_has_measured_nothing_is_taken_to_need_what_its_stage_needs() -> None:
    """Who seemed faster than the others of its stage got all their work."""
    desk = Planning(me="s1r2", replicas=(2, 3, 2))
    desk.start()
    for peer in ("s1r0", "s1r1"):
        desk.hear(VIEW_TOPIC, peer, desk.view(peer, forward_s=0.3, backward_s=0.4).to_bytes())
    desk.hear(VIEW_TOPIC, "s2r0", desk.view("s2r0", forward_s=0.7).to_bytes())
    views = [PeerView.from_bytes(value, "s1r2") for value in desk.told(VIEW_TOPIC)]
    assert len(views) == 2, "once at the start, once when it knew better"
    assert (views[-1].forward_s, views[-1].backward_s) == (0.3, 0.4)


def test_those_who_ask_for_replacements_get_them_evenly() -> None:
    desk = Planning(replicas=(2, 3, 2))
    desk.see()
    chosen = Counter(desk.planner.replacement(1, {"s1r1"}) for _ in range(8))
    assert chosen == {"s1r0": 4, "s1r2": 4}
