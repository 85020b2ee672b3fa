"""The emulated WAN's arithmetic: profiles, queues, and what a piece of TCP takes on the wire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wan.compare import SKIPS, trainings
from benchmarks.wan.profiles import Profile, Wan
from benchmarks.wan.router import VNET_HEADER_BYTES, wire_bytes
from benchmarks.wan.shaper import Network, Shaper
from benchmarks.wan.training import POLICIES, Step, Training, steps_of
from scheduler.instance import UNLIMITED_BYTES_PER_S
from swarm.errors import UserError
from swarm.manifest import Manifest

HOSTS = 3
Sent = tuple[float, int, int, int]
"""(when, source, target, bytes)"""


def wan(**changes: object) -> Wan:
    """Three hosts, 10 ms from each other; nothing but latency unless ``changes`` say so."""
    values = {
        "one_way_s": [[0.01] * HOSTS for _ in range(HOSTS)],
        "pair_bytes_per_s": [[UNLIMITED_BYTES_PER_S] * HOSTS for _ in range(HOSTS)],
        "up_bytes_per_s": [UNLIMITED_BYTES_PER_S] * HOSTS,
        "down_bytes_per_s": [UNLIMITED_BYTES_PER_S] * HOSTS,
        "queue_s": 1e9,
    }
    return Wan(**{**values, **changes})  # type: ignore[arg-type]


def carried(network: Network, sent: list[Sent]) -> dict[int, float]:
    """Number of each packet that arrives -> when, from a loop that wakes exactly in time."""
    arrived: dict[int, float] = {}

    def arrive(until_s: float) -> None:
        while (due_s := network.next_due_s()) is not None and due_s <= until_s:
            arrived.update({int(packet): due_s for _, packet in network.due(due_s)})

    for number, (now_s, source, target, size) in enumerate(sent):
        arrive(now_s)
        network.enter(now_s, source, target, str(number).encode(), size)
    arrive(1e12)
    return arrived


traffic = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(1, 65536)), max_size=40
).map(sorted)


class TestShaper:
    def test_what_comes_into_an_empty_queue_takes_its_own_time(self) -> None:
        assert Shaper(1000.0, 1.0).offer(5.0, 500) == 5.5

    def test_what_comes_later_waits_for_what_came_before(self) -> None:
        shaper = Shaper(1000.0, 1.0)
        shaper.offer(5.0, 500)
        assert shaper.offer(5.1, 500) == 6.0

    def test_who_would_wait_too_long_is_dropped_and_takes_no_time(self) -> None:
        shaper = Shaper(1000.0, 0.4)
        shaper.offer(5.0, 500)
        assert shaper.offer(5.0, 500) is None
        assert shaper.dropped == 1
        assert shaper.offer(5.2, 500) == 6.0


class TestNetwork:
    @given(traffic)
    def test_rates_without_limit_leave_the_latency_alone(self, sent: list[Sent]) -> None:
        arrived = carried(Network(wan()), sent)
        assert len(arrived) == len(sent)
        for number, (now_s, *_) in enumerate(sent):
            assert arrived[number] == pytest.approx(now_s + 0.01)

    @given(traffic, st.floats(1e4, 1e7), st.floats(1e4, 1e7), st.floats(1e4, 1e7))
    def test_each_queue_gives_its_rate_and_no_more(
        self, sent: list[Sent], up: float, pair: float, down: float
    ) -> None:
        made = wan(
            up_bytes_per_s=[up] * HOSTS,
            down_bytes_per_s=[down] * HOSTS,
            pair_bytes_per_s=[[pair] * HOSTS] * HOSTS,
        )
        arrived = carried(Network(made), sent)
        assert len(arrived) == len(sent)
        up_free, down_free = [0.0] * HOSTS, [0.0] * HOSTS
        pair_free: dict[tuple[int, int], float] = {}
        at_target = []
        for number, (now_s, source, target, size) in enumerate(sent):
            up_free[source] = max(now_s, up_free[source]) + size / up
            free_s = max(up_free[source], pair_free.get((source, target), 0.0)) + size / pair
            pair_free[source, target] = free_s
            at_target.append((free_s + 0.01, number, target, size))
        for came_s, number, target, size in sorted(at_target):
            down_free[target] = max(came_s, down_free[target]) + size / down
            assert arrived[number] == pytest.approx(down_free[target], rel=1e-6)

    def test_a_near_source_does_not_wait_for_what_is_still_far_away(self) -> None:
        far = [[0.0, 0.01, 1.0], [0.01, 0.0, 0.01], [1.0, 0.01, 0.0]]
        network = Network(wan(one_way_s=far, down_bytes_per_s=[1000.0] * HOSTS))
        arrived = carried(network, [(0.0, 0, 2, 500), (0.1, 1, 2, 500)])
        assert arrived == pytest.approx({0: 1.5, 1: 0.61})

    def test_a_full_queue_drops(self) -> None:
        network = Network(wan(up_bytes_per_s=[1000.0] * HOSTS, queue_s=0.4))
        assert set(carried(network, [(0.0, 0, 1, 500), (0.0, 0, 1, 500), (0.0, 1, 2, 500)])) == {0, 2}
        assert network.dropped() == 1

    def test_a_cut_takes_what_is_on_its_way_in_one_direction(self) -> None:
        network = Network(wan())
        network.enter(0.0, 0, 1, b"lost", 4)
        network.enter(0.0, 1, 0, b"stays", 5)
        network.cut(0, 1)
        network.enter(0.001, 0, 1, b"lost too", 8)
        assert network.due(1.0) == [(0, b"stays")]
        network.heal(0, 1)
        network.enter(2.0, 0, 1, b"passes", 6)
        assert network.due(3.0) == [(1, b"passes")]

    def test_a_link_that_changes_does_so_in_one_direction(self) -> None:
        network = Network(wan())
        network.change(0, 1, one_way_s=0.5, bytes_per_s=1000.0)
        assert carried(network, [(0.0, 0, 1, 500), (0.0, 1, 0, 500)]) == pytest.approx({0: 1.0, 1: 0.01})


class TestProfile:
    @pytest.mark.parametrize("name", ["gcp12", "home"])
    def test_the_projects_own_have_twelve_regions_and_links_of_all_pairs(self, name: str) -> None:
        made = Profile.load(name).wan(Profile.load(name).regions)
        assert len(made.one_way_s) == 12
        for a in range(12):
            for b in range(12):
                assert 0 < made.one_way_s[a][b] == made.one_way_s[b][a] < 0.2
                assert 70e6 / 8 < made.rate_bytes_per_s(a, b) == made.rate_bytes_per_s(b, a)

    def test_gcp12_is_what_was_measured(self) -> None:
        made = Profile.load("gcp12").wan(["Australia", "Belgium", "Belgium"])
        assert made.one_way_s[0][1] == 0.129
        assert made.rate_bytes_per_s(1, 0) == 84.4e6 / 8
        assert made.one_way_s[1][2] == 0.001

    def test_home_is_held_up_by_its_uplink(self) -> None:
        assert Profile.load("home").wan(["Paris", "Paris"]).rate_bytes_per_s(0, 1) == 110e6 / 8

    def test_an_unknown_one_is_told_with_those_there_are(self) -> None:
        with pytest.raises(UserError, match="gcp12, home"):
            Profile.load("moon")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"regions": ["A", "B", "C"]}, "links"),
            ({"links": []}, "A - B"),
            ({"links": [{"a": "A", "b": "B", "one_way_ms": 1.0}] * 2}, "A - B"),
            ({"queue_ms": float("inf")}, "queue_ms"),
            ({"color": "blue"}, "color"),
        ],
    )
    def test_what_is_no_profile_is_refused_in_one_line(
        self, tmp_path: Path, change: dict[str, object], reason: str
    ) -> None:
        good = {
            "name": "two",
            "source": "made up",
            "regions": ["A", "B"],
            "same_region": {"one_way_ms": 1.0},
            "links": [{"a": "A", "b": "B", "one_way_ms": 5.0}],
        }
        path = tmp_path / "two.json"
        path.write_text(json.dumps(good))
        assert Profile.load(str(path)).between("B", "A").one_way_ms == 5.0
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=reason) as caught:
            Profile.load(str(path))
        assert "\n" not in str(caught.value)


class TestTraining:
    def test_a_path_leaves_out_whole_stages(self) -> None:
        plan = POLICIES["plan"]
        lengths = [Training(plan, stages=s, skip=k).path_length for s, k in ((4, 0.25), (6, 0.33), (6, 0.5))]
        assert lengths == [3, 4, 3]
        assert Training(POLICIES["full_pipeline"], skip=0.33).path_length == 6

    def test_each_ratio_is_compared_with_the_full_pipeline_of_as_many_stages(self) -> None:
        base = Training(POLICIES["plan"])
        asked = [(t.policy.name, t.path_length, t.stages) for t in trainings(base, SKIPS)]
        assert sorted(asked) == [
            ("full_pipeline", 4, 4),
            ("full_pipeline", 6, 6),
            ("plan", 3, 4),
            ("plan", 3, 6),
            ("plan", 4, 6),
        ]

    def test_the_manifest_has_activations_of_the_size_that_was_asked_for(self) -> None:
        training = Training(POLICIES["plan"], activation_bytes=1 << 19)
        manifest = Manifest.from_toml(training.manifest(), researcher="00" * 32)
        assert manifest.microbatch_size * manifest.model.context * manifest.model.width * 4 == 1 << 19

    def test_steps_are_told_from_the_peers_events(self) -> None:
        log = [
            ("planned", 0.5, {"step": 0, "makespan_s": 9.0}),
            ("started", 1.0, {"step": 0}),
            ("committed", 3.0, {"step": 0}),
            ("stepped", 4.0, {"step": 0, "tokens": 10}),
            ("started", 4.1, {"step": 1}),
            ("planned", 4.2, {"step": 1, "makespan_s": 2.0}),
            ("started", 4.3, {"step": 1}),
            ("stepped", 4.5, {"step": 0, "tokens": 10}),
            ("committed", 6.0, {"step": 1}),
            ("committed", 6.1, {"step": 1}),
            ("stepped", 7.0, {"step": 1, "tokens": 20}),
            ("started", 7.1, {"step": 2}),
        ]
        events = [("peer", {"event": kind, "t": t_s, **fields}) for kind, t_s, fields in log]
        assert steps_of(events) == [Step(3.0, pytest.approx(2.0), 9.0, 20)]


def piece(segmented: int, header: int, payload: int, size: int) -> bytes:
    """A packet of ``size`` bytes behind its ``virtio_net_hdr``."""
    start = bytes([1, segmented]) + header.to_bytes(2, "little") + payload.to_bytes(2, "little")
    return start.ljust(VNET_HEADER_BYTES, b"\0") + bytes(size)


@pytest.mark.parametrize(
    ("packet", "size"),
    [
        (piece(0, 0, 0, 60), 60),
        (piece(1, 52, 1448, 1500), 1500),
        (piece(1, 52, 1448, 1501), 1501 + 52),
        (piece(1, 52, 1448, 52 + 10 * 1448), 10 * 1500),
    ],
)
def test_each_segment_of_a_piece_has_a_header_on_the_wire(packet: bytes, size: int) -> None:
    assert wire_bytes(packet) == size
