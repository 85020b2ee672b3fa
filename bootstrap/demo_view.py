"""What the demo shows: a live picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bootstrap.progress import PeerProgress, Progress, State
from swarm.clock import Clock

CHART_HEIGHT = 10
ROWS_BESIDE_CHART = 15
"""Of the picture of four stages, and one for the cursor."""
PLAIN_EVERY_S = 5.0
REDRAW_S = 0.25
"""A picture takes 10 ms to draw, on processors that have something better to do."""

_MARKS: dict[State, tuple[str, str, str]] = {
    "starting": ("○", "o", "dim"),
    "training": ("●", "*", "green"),
    "finished": ("✔", "+", "cyan"),
    "killed": ("✗", "x", "bold red"),
    "ended": ("-", "-", "red"),
}
"""How a peer's state looks: mark, mark in ASCII, style."""


class View(Protocol):
    """Where the demo tells how it goes."""

    def update(self, progress: Progress, now_s: float) -> None:
        """Called several times a second; ``now_s`` is on the scale of the events' times."""
        ...

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def open_view(console: Console, title: str, clock: Clock) -> View:
    """The live picture if ``console`` is a terminal, else plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, title, clock)
    return PlainView(console, clock)


class PlainView:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._last_s = clock.now()
        self._news = ""

    def update(self, progress: Progress, now_s: float) -> None:
        if progress.news != self._news:
            self._news = progress.news
            self.say(self._news)
        if self._clock.now() - self._last_s >= PLAIN_EVERY_S:
            self._last_s = self._clock.now()
            self.say(line(progress))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveView:
    """One panel that is drawn anew in place."""

    def __init__(self, console: Console, title: str, clock: Clock) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._drawn_s = -math.inf
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        # The cursor stays visible: a second Ctrl-C ends the process where nothing can bring it back.
        console.show_cursor(True)

    def update(self, progress: Progress, now_s: float) -> None:
        if self._clock.now() - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = self._clock.now()
        self._live.update(picture(progress, now_s, self._title, self._console), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


# -- lines and pictures ------------------------------------------------------------------------------------


def line(progress: Progress) -> str:
    """How it goes, in one line."""
    living = sum(peer.state in ("training", "finished") for peer in progress.peers.values())
    if progress.step == 0 and progress.first_commit_s is None:
        return f"starting: {living} of {len(progress.peers)} peers are there"
    left = "" if progress.left_s is None else f", {clock_time(progress.left_s)} left"
    return (
        f"step {progress.step}/{progress.total_steps}: train {_last(progress.train)}, "
        f"validation {_last(progress.validation)}, {progress.recent_tokens_per_s:,.0f} tokens/s, "
        f"{living} peers, {progress.committed:,} microbatches committed, {progress.rerouted} rerouted{left}"
    )


def picture(progress: Progress, now_s: float, title: str, console: Console) -> RenderableType:
    """The whole view."""
    ascii_only = console.options.ascii_only
    width = max(20, min(100, console.width) - 14)
    height = max(4, min(CHART_HEIGHT, console.height - ROWS_BESIDE_CHART))
    parts: list[RenderableType] = [
        _bar(progress, now_s, width),
        Text(""),
        _figures(progress),
        Text(""),
        *_curve(progress, width, height, ascii_only),
        Text(""),
        _stages(progress, ascii_only),
        Text(""),
        Text(progress.news, style="bold yellow" if progress.kill else "dim"),
    ]
    return Panel(Group(*parts), title=title, title_align="left", width=min(100, console.width))


def _bar(progress: Progress, now_s: float, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    left = "-:--" if progress.left_s is None else clock_time(progress.left_s)
    grid.add_row(
        f"step [bold]{progress.step}[/]/{progress.total_steps}",
        ProgressBar(total=progress.total_steps, completed=progress.step, width=max(10, width - 40)),
        f"elapsed [bold]{clock_time(now_s - progress.began_s)}[/]  left [bold]{left}[/]",
    )
    return grid


def _figures(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    first = f" (from {progress.validation[0][1]:.2f})" if progress.validation else ""
    grid.add_row(
        f"train loss [bold cyan]{_last(progress.train)}[/]",
        f"validation loss [bold magenta]{_last(progress.validation)}[/]{first}",
        f"[bold]{progress.recent_tokens_per_s:,.0f}[/] tokens/s",
    )
    grid.add_row(
        f"committed [bold]{progress.committed:,}[/]",
        f"rerouted [bold]{progress.rerouted:,}[/]   started anew [bold]{progress.restarted:,}[/]",
        f"[bold]{progress.tokens:,}[/] tokens",
    )
    return grid


def _curve(progress: Progress, width: int, height: int, ascii_only: bool) -> list[RenderableType]:
    rows = chart(
        progress.train, progress.validation, progress.total_steps, width, height, ascii_only=ascii_only
    )
    return [Text.assemble((f"{label:>6} ", "dim"), *cells) for label, cells in rows]


def _stages(progress: Progress, ascii_only: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    stages = sorted({peer.stage for peer in progress.peers.values()})
    for stage in stages:
        peers = [peer for peer in progress.peers.values() if peer.stage == stage]
        name = f"stage {stage}" + (" (origins)" if stage == 0 else "")
        grid.add_row(name, *(_peer(peer, ascii_only) for peer in peers))
    return grid


def _peer(peer: PeerProgress, ascii_only: bool) -> Text:
    mark, plain, style = _MARKS[peer.state]
    return Text.assemble(
        (f"{plain if ascii_only else mark} {peer.name} {peer.state:<8}", style),
        (f" {peer.summed:>5,} done", "dim"),
    )


def _last(points: Sequence[tuple[int, float]]) -> str:
    return f"{points[-1][1]:.3f}" if points else "-"


def clock_time(duration_s: float) -> str:
    """Minutes and seconds, as 1:05."""
    seconds = max(0, round(duration_s))
    return f"{seconds // 60}:{seconds % 60:02d}"


# -- the curve ---------------------------------------------------------------------------------------------

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dots of a braille character: four rows of two."""

Row = tuple[str, list[tuple[str, str]]]


def chart(
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    total_steps: int,
    width: int,
    height: int,
    *,
    ascii_only: bool = False,
) -> list[Row]:
    """``height`` rows of ``width`` cells as (label, [(characters, style), ...]); steps to the right.

    The training loss is drawn in dots, each validation loss as one mark over them. The scale is logarithmic.
    """
    losses = [loss for _, loss in (*train, *validation)]
    low = max(0.5, math.floor(2 * min(losses, default=1.0)) / 2)
    high = max(low + 0.5, math.ceil(2 * max(losses, default=6.0)) / 2)

    def row_of(loss: float, rows: int) -> int:
        return _place(math.log(high / max(loss, low)), math.log(high / low), rows)

    dots = [[0] * width for _ in range(height)]
    for step, loss in train:
        column = _place(step, total_steps, 2 * width)
        row = row_of(loss, 4 * height)
        dots[row // 4][column // 2] |= _BRAILLE[row % 4][column % 2]
    marks = {(row_of(loss, height), _place(step, total_steps, width)) for step, loss in validation}
    rows: list[Row] = []
    for row in range(height):
        cells = []
        for column in range(width):
            if (row, column) in marks:
                cells.append(("o" if ascii_only else "●", "magenta"))
            else:
                bits = dots[row][column]
                drawn = "." if ascii_only else chr(0x2800 + bits)
                cells.append((drawn if bits else " ", "cyan"))
        edge = row in (0, height - 1)
        rows.append((f"{(high, low)[row > 0]:.1f}" if edge else "", cells))
    return rows


def _place(value: float, whole: float, count: int) -> int:
    """Which of ``count`` equal parts of [0, ``whole``] holds ``value``."""
    return min(count - 1, max(0, int(value / whole * count)))
