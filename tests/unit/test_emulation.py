"""A daemon emulated: its pace, its hangs, and links that are cut, slowed and broken from within."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.emulated_links import DIAL_S, Cut, EmulatedTransport, Shape
from peer.emulation import DiskFull, Emulation, EmulationSettings, PacedExecutor
from peer.worker import SimExecutor, TaskKind
from swarm.clock import SimClock
from swarm.errors import UserError
from swarm.events import NoEvents
from swarm.messages import Goodbye


class Network:
    """The real transport's part: what it is told to send, and whom it has links to."""

    def __init__(self, *links: str) -> None:
        self.peer_id = "me"
        self.sent: list[tuple[str, Any]] = []
        self.up = set(links)
        self.dialled: list[str] = []

    def start(self, handler: Any) -> None:
        self.handler = handler

    def send(self, to: str, message: Any, tensor: Any = None) -> None:
        self.sent.append((to, message))

    def connect(self, peer: str) -> None:
        self.dialled.append(peer)

    def links(self) -> frozenset[str]:
        return frozenset(self.up)

    def reset(self, peer: str) -> None:
        self.up.discard(peer)
        self.handler.on_link_lost(peer, "reset")


class Links:
    """An emulated transport between a network and a protocol that keeps what it is told."""

    def __init__(self, *links: str) -> None:
        self.clock = SimClock()
        self.network = Network(*links)
        self.came: list[tuple[str, Any]] = []
        self.lost: list[tuple[str, str]] = []
        inner: Any = self.network
        self.transport = EmulatedTransport(inner, self.clock, random.Random(1), seen=lambda *_: None)
        handler: Any = SimpleNamespace(
            on_message=lambda sender, message, tensor: self.came.append((sender, message)),
            on_link_lost=lambda peer, reason: self.lost.append((peer, reason)),
        )
        self.transport.start(handler)

    def run(self, duration_s: float) -> None:
        end_s = self.clock.now() + duration_s
        self.clock.run_until(lambda: self.clock.now() >= end_s, duration_s)


def word(number: int) -> Goodbye:
    return Goodbye(incarnation=number)


def test_a_task_takes_its_nominal_time_and_what_hangs_comes_later() -> None:
    clock = SimClock()
    executor = PacedExecutor(SimExecutor(clock, lambda kind: 0.01), clock, {TaskKind.FORWARD: 0.5})
    ends: list[float] = []

    def run(kind: TaskKind) -> None:
        executor.run(kind, lambda: 7, lambda result: ends.append(round(clock.now(), 6)), print)
        clock.run_until(lambda: False, 20.0)

    run(TaskKind.FORWARD)
    run(TaskKind.BACKWARD)
    executor.hang(3.0)
    run(TaskKind.BACKWARD)
    assert ends == [0.5, 20.01, 43.0]


def test_what_a_cut_holds_back_comes_in_order_when_it_is_healed() -> None:
    links = Links("a", "b")
    links.transport.cut(Cut(frozenset({"a"}), deaf=True), 5.0)
    for number in (1, 2):
        links.transport.on_message("a", word(number), None)
    links.transport.on_message("b", word(3), None)
    assert links.came == [("b", word(3))]
    links.run(5.0)
    assert links.came == [("b", word(3)), ("a", word(1)), ("a", word(2))]


def test_a_cut_that_is_not_deaf_hears_on_and_makes_no_new_link() -> None:
    links = Links("a")
    links.transport.cut(Cut(None, deaf=False), DIAL_S + 1)
    links.transport.on_message("a", word(1), None)
    links.transport.send("b", word(2))
    assert links.came == [("a", word(1))]
    assert links.network.sent == []
    links.run(DIAL_S)
    assert [peer for peer, _ in links.lost] == ["b"]


def test_a_link_that_breaks_loses_what_the_cut_held_back() -> None:
    links = Links("a")
    links.transport.cut(Cut(frozenset({"a"}), deaf=True), 5.0)
    links.transport.on_message("a", word(1), None)
    links.transport.reset(None)
    links.run(6.0)
    assert links.came == []
    assert links.lost == [("a", "reset")]


def test_a_delayed_link_keeps_its_order() -> None:
    links = Links("a", "b")
    links.transport.shape(Shape(frozenset({"a"}), latency_s=1.0, jitter_s=0.5), 1.2)
    for number in (1, 2):
        links.transport.send("a", word(number))
    links.transport.send("b", word(3))
    assert links.network.sent == [("b", word(3))]
    links.run(1.3)
    links.transport.send("a", word(4))
    links.run(1.0)
    assert [message for to, message in links.network.sent if to == "a"] == [word(1), word(2), word(4)]


def test_a_full_disk_takes_nothing_for_so_long() -> None:
    clock = SimClock()
    emulation = Emulation(EmulationSettings(), clock, NoEvents())
    emulation.executor(SimExecutor(clock, lambda kind: 0.0))
    inner: Any = Network()
    emulation.transport(inner)
    store = emulation.store(lambda *_: Path("kept"))
    emulation._obey(DiskFull(duration_s=2.0))
    with pytest.raises(OSError, match="No space left"):
        store()
    clock.run_until(lambda: clock.now() >= 2.0, 2.0)
    clock.call_later(2.0, lambda: None)
    clock.run_until(lambda: False, 3.0)
    assert store() == Path("kept")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2}', '{"pace": {"dance": 1}}', '{"pace": {"forward": NaN}}', '{"x": 1}']
)
def test_a_file_that_is_none_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "emulation.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        EmulationSettings.load(path)
    assert "\n" not in str(caught.value)
    assert "emulation settings" in str(caught.value)
