"""The demo's picture of a swarm, from event logs to the terminal."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bootstrap.demo_view import LiveView, PlainView, chart, clock_time, line, open_view, picture
from bootstrap.progress import Progress, Tail
from swarm.clock import SimClock

ORIGIN, HOP = "12D3KooWorigin", "12D3KooWhop"


class Swarm:
    """Two peers' events, as their logs have them."""

    def __init__(self, total_steps: int = 10) -> None:
        self.progress = Progress(total_steps, began_s=100.0)
        self.progress.started("p0", 0)
        self.progress.started("p1", 1)

    def event(self, name: str, event: str, t: float, **fields: Any) -> None:
        peer = ORIGIN if name == "p0" else HOP
        self.progress.apply(name, {"t": t, "peer": peer, "event": event, **fields})

    def start(self, step: int, index: int, t: float) -> None:
        path = [f"0:{ORIGIN}", f"1:{HOP}"]
        self.event("p0", "started", t, step=step, index=index, attempt=0, path=path)

    def commit(self, step: int, index: int, t: float, loss: float) -> None:
        self.event("p0", "committed", t, step=step, index=index, attempt=0, loss=loss)

    def step(self, step: int, t: float, losses: tuple[float, ...] = (2.0, 3.0)) -> None:
        """A whole step as both peers report it, its end at ``t``."""
        for index, loss in enumerate(losses):
            self.start(step, index, t - 0.5)
            self.commit(step, index, t - 0.2, loss)
        for name in ("p0", "p1"):
            self.event(name, "closed", t - 0.1, step=step)
            order = [[i, 0] for i in range(len(losses))]
            self.event(name, "summed", t - 0.1, step=step, order=order)
            self.event(name, "stepped", t, step=step, tokens=1000, committed=len(losses))


def drawn(swarm: Swarm, now_s: float, *, width: int = 100, height: int = 30, encoding: str = "utf-8") -> str:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(
        file=buffer,
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    console.print(picture(swarm.progress, now_s, "skipswarm test", console))
    buffer.flush()
    raw = buffer.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode(encoding)


# -- the fold ----------------------------------------------------------------------------------------------


def test_a_step_counts_once_however_many_report_it() -> None:
    swarm = Swarm()
    swarm.step(0, 102.0)
    swarm.step(1, 103.0, (1.0, 2.0))
    progress = swarm.progress
    assert (progress.step, progress.tokens, progress.committed) == (2, 2000, 4)
    assert progress.train == [(0, 2.5), (1, 1.5)]
    assert progress.peers["p1"].summed == 4
    assert progress.first_commit_s == 101.8
    assert progress.first_step_s == 102.0
    assert progress.training_s == pytest.approx(1.5)
    assert progress.tokens_per_s == pytest.approx(2000 / 1.5)


def test_a_step_that_is_under_way_is_not_in_the_curve() -> None:
    swarm = Swarm()
    swarm.step(0, 102.0)
    swarm.commit(1, 0, 102.5, 1.0)
    assert swarm.progress.train == [(0, 2.5)]


def test_the_recent_rate_forgets_the_beginning() -> None:
    swarm = Swarm(total_steps=40)
    for step in range(4):
        swarm.step(step, 110.0 + 10 * step)  # 100 tokens/s
    for step in range(4, 24):
        swarm.step(step, 140.0 + (step - 3))  # 1000 tokens/s
    progress = swarm.progress
    assert progress.recent_tokens_per_s == pytest.approx(1000)
    assert progress.tokens_per_s < 500
    assert progress.left_s == pytest.approx(16.0)


def test_nothing_is_predicted_before_the_first_step() -> None:
    swarm = Swarm()
    swarm.start(0, 0, 101.0)
    progress = swarm.progress
    assert progress.left_s is None
    assert (progress.tokens_per_s, progress.recent_tokens_per_s, progress.training_s) == (0.0, 0.0, 0.0)


def test_peers_at_work_are_those_of_uncommitted_paths() -> None:
    swarm = Swarm()
    assert swarm.progress.at_work() == []
    swarm.start(0, 0, 101.0)
    assert [peer.name for peer in swarm.progress.at_work()] == ["p0"]  # who is p1? it has said nothing yet
    swarm.event("p1", "planned", 101.0)
    assert [peer.name for peer in swarm.progress.at_work()] == ["p0", "p1"]
    swarm.commit(0, 0, 101.5, 2.0)
    assert swarm.progress.at_work() == []
    swarm.start(0, 1, 101.0)
    swarm.step(0, 102.0)
    assert swarm.progress.at_work() == []  # it was given up with its step


def test_a_kill_and_what_comes_after() -> None:
    swarm = Swarm()
    swarm.event("p0", "rerouted", 101.9)
    swarm.step(0, 102.0)
    swarm.progress.killed("p1", 102.3)
    swarm.event("p0", "closed", 102.2, step=0)  # a log that is read late
    kill = swarm.progress.kill
    assert kill is not None
    assert kill.next_close_s is None
    swarm.event("p0", "rerouted", 102.5)
    swarm.event("p0", "restarted", 102.6)
    swarm.event("p0", "closed", 103.3, step=1)
    swarm.event("p0", "closed", 104.3, step=2)
    assert (kill.name, kill.stage, kill.step, kill.rerouted) == ("p1", 1, 1, 2)
    assert kill.next_close_s == pytest.approx(1.0)
    assert (swarm.progress.rerouted, swarm.progress.restarted) == (2, 1)
    assert swarm.progress.news == "step 2 closed 1.00 s after p1 was killed"


def test_states_of_peers() -> None:
    swarm = Swarm()
    progress = swarm.progress
    progress.started("p2", 2)
    assert {peer.state for peer in progress.peers.values()} == {"starting"}
    swarm.event("p0", "planned", 101.0)
    assert progress.peers["p0"].state == "training"
    progress.killed("p1", 102.0)
    swarm.event("p1", "finished", 101.9, step=1)  # its last words, read after the kill
    progress.ended("p1")
    swarm.event("p0", "finished", 103.0, step=10)
    progress.ended("p0")
    progress.ended("p2")
    assert [peer.state for peer in progress.peers.values()] == ["finished", "killed", "ended"]


def test_strangers_and_unknown_events_change_nothing() -> None:
    swarm = Swarm()
    swarm.progress.apply("p9", {"event": "stepped", "step": 0, "t": 1.0})
    swarm.progress.apply("p0", {"event": "invented", "t": 1.0, "peer": ORIGIN})
    swarm.progress.apply("p0", {"t": 1.0, "peer": ORIGIN})
    assert swarm.progress.step == 0


# -- files -------------------------------------------------------------------------------------------------


def test_a_tail_yields_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    with path.open("w", buffering=1) as file:
        file.write('{"a": 1}\n{"a"')
        file.flush()
        assert list(tail.read()) == [{"a": 1}]
        assert list(tail.read()) == []
        file.write(": 2}\nnonsense\n[3]\n")
        file.flush()
        assert list(tail.read()) == [{"a": 2}]
        file.write(json.dumps({"a": 4}) + "\n")
        file.flush()
        assert list(tail.read()) == [{"a": 4}]
    tail.close()


# -- the picture -------------------------------------------------------------------------------------------


def test_the_curve_falls_from_left_to_right() -> None:
    train = [(step, 6.0 - step / 20) for step in range(100)]
    rows = chart(train, [], 100, 20, 8)
    assert [label for label, _ in rows] == ["6.0", "", "", "", "", "", "", "1.0"]
    columns = [
        [row for row, (_, cells) in enumerate(rows) if cells[column][0] != " "] for column in range(20)
    ]
    assert all(columns)
    assert columns[0][0] == 0
    assert columns[-1][-1] == 7
    assert all(min(a) <= min(b) for a, b in itertools.pairwise(columns))


def test_validation_losses_are_marks_at_their_steps() -> None:
    rows = chart([], [(0, 6.0), (50, 1.0)], 100, 20, 8)
    marks = [
        (row, column)
        for row, (_, cells) in enumerate(rows)
        for column, cell in enumerate(cells)
        if cell[0] == "●"
    ]
    assert marks == [(0, 0), (7, 10)]


@pytest.mark.parametrize("points", [[], [(0, 5.0)], [(100, 5.0)], [(0, 0.001), (5, 90.0)]])
def test_a_chart_has_its_size_whatever_is_in_it(points: list[tuple[int, float]]) -> None:
    rows = chart(points, points, 100, 20, 8)
    assert len(rows) == 8
    assert {sum(len(text) for text, _ in cells) for _, cells in rows} == {20}


def test_the_picture_tells_everything() -> None:
    swarm = Swarm()
    swarm.event("p0", "validated", 101.6, step=0, loss=5.5)
    for step in range(4):
        swarm.step(step, 102.0 + step)
    swarm.event("p0", "rerouted", 105.5)
    swarm.progress.killed("p1", 105.4)
    text = drawn(swarm, 165.0)
    for part in (
        "skipswarm test",
        "step 4/10",
        "elapsed 1:05",
        "train loss 2.500",
        "validation loss 5.500 (from 5.50)",
        "4,000 tokens",
        "committed 8",
        "rerouted 1",
        "stage 0 (origins)",
        "● p0 training",
        "✗ p1 killed",
        "killed p1 (stage 1) with SIGKILL in step 5",
    ):
        assert part in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_the_picture_fits(width: int, height: int) -> None:
    swarm = Swarm(total_steps=1000)
    for number in range(2, 8):
        swarm.progress.started(f"p{number}", number % 4)
    for peer in swarm.progress.peers.values():
        peer.summed = 12_345
    for step in range(300):
        swarm.step(step, 102.0 + step)
    rows = drawn(swarm, 4000.0, width=width, height=height).splitlines()
    assert {len(row) for row in rows} == {min(width, 100)}
    assert len(rows) < height


def test_a_terminal_without_unicode_gets_ascii() -> None:
    swarm = Swarm()
    swarm.event("p0", "validated", 101.6, step=0, loss=5.5)
    swarm.step(0, 102.0)
    text = drawn(swarm, 103.0, encoding="ascii")
    assert "* p0 training" in text


def test_no_terminal_gets_lines_and_no_escapes() -> None:
    buffer, clock, swarm = io.StringIO(), SimClock(), Swarm()
    view = open_view(Console(file=buffer, width=40), "title", clock)
    assert isinstance(view, PlainView)
    view.update(swarm.progress, 101.0)
    clock.run_for(6.0)
    view.update(swarm.progress, 106.0)
    view.update(swarm.progress, 106.1)
    swarm.step(0, 107.0)
    view.update(swarm.progress, 107.0)
    clock.run_for(6.0)
    view.update(swarm.progress, 112.0)
    view.close()
    assert buffer.getvalue().splitlines() == [
        "starting: 0 of 2 peers are there",
        "the first microbatch is committed, 6.8 s after the start",
        line(swarm.progress),
    ]
    assert "\x1b" not in buffer.getvalue()


def test_the_live_view_leaves_the_cursor_visible() -> None:
    buffer, clock, swarm = io.StringIO(), SimClock(), Swarm()
    view = open_view(Console(file=buffer, width=100, force_terminal=True), "title", clock)
    assert isinstance(view, LiveView)
    view.update(swarm.progress, 101.0)
    once = len(buffer.getvalue())
    view.update(swarm.progress, 101.1)
    assert len(buffer.getvalue()) == once  # not drawn anew at once
    # The process may be ended here by a second Ctrl-C.
    assert buffer.getvalue().rindex("\x1b[?25h") > buffer.getvalue().rindex("\x1b[?25l")
    view.say("a line that stays")
    view.close()
    assert "a line that stays" in buffer.getvalue()


def test_times() -> None:
    assert [clock_time(s) for s in (-1.0, 0.4, 59.6, 600.0)] == ["0:00", "0:00", "1:00", "10:00"]
