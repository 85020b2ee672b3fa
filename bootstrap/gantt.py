"""A simulated step as a picture file: PNG and SVG by matplotlib, HTML by ``scheduler.simulate.page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler.simulate.chart import CRITICAL, KINDS, Chart, colour, told_s
from scheduler.simulate.page import page
from swarm.errors import UserError

FORMATS = (".svg", ".png", ".html")
HATCHES = {"W": "////", "A": "...."}
_LANE_IN = 0.24
_MOST_LABELLED = 120
"""Microbatches beyond which the cells of the lower panel hold no numbers."""


def check_format(path: Path) -> None:
    """Raises UserError for a name that says no format."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--gantt {path}: the name must end in {', '.join(FORMATS)}")


def draw(chart: Chart, path: Path, *, title: str, subtitle: str) -> None:
    """Write the picture. Raises UserError if the file cannot be written."""
    check_format(path)
    try:
        if path.suffix.lower() == ".html":
            path.write_text(page(chart, title=title, subtitle=subtitle), encoding="utf-8")
        else:
            from matplotlib import rc_context

            # Letters as text make a small SVG; the same picture is the same file.
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": "skipswarm"}):
                _figure(chart, title, subtitle).savefig(path, format=path.suffix[1:].lower())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another file with --gantt") from None


def _figure(chart: Chart, title: str, subtitle: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes_in = max(2.0, min(40.0, _LANE_IN * (len(chart.lanes) + chart.stages)))
    cells_in = max(1.0, min(12.0, 0.2 * chart.stages + 0.2))
    figure = Figure(figsize=(15, lanes_in + cells_in + 2.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, height_ratios=(lanes_in, cells_in))
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    upper.set_title(subtitle, loc="left", fontsize=9.5, color="#444444")
    y_of = _lanes(chart, upper)
    _bars(chart, upper, y_of)
    _ways(chart, upper, y_of)
    _axis(chart, upper)
    _cells(chart, lower)
    _legend(figure)
    return figure


def _lanes(chart: Chart, axes: Any) -> list[float]:
    """Where each lane is, counted downwards, stages apart; names and bands."""
    y_of = [number + 0.7 * lane.stage for number, lane in enumerate(chart.lanes)]
    end = chart.x(chart.makespan_s)
    for stage in range(chart.stages):
        ys = [y for y, lane in zip(y_of, chart.lanes, strict=True) if lane.stage == stage]
        if ys:
            axes.axhspan(ys[0] - 0.6, ys[-1] + 0.6, color=colour(stage, 0, "F"), alpha=0.08, linewidth=0)
            axes.text(
                end * 1.005,
                (ys[0] + ys[-1]) / 2,
                f"stage {stage}",
                color=colour(stage, 0, "B"),
                va="center",
                fontsize=9,
                fontweight="bold",
            )
    axes.set_yticks(y_of, [lane.peer for lane in chart.lanes], fontsize=8.5)
    for label, lane in zip(axes.get_yticklabels(), chart.lanes, strict=True):
        label.set_color(colour(lane.stage, 0, "B"))
    axes.set_ylim(y_of[-1] + 0.8, -0.8)
    axes.set_xlim(0, end or 1.0)
    return y_of


def _bars(chart: Chart, axes: Any, y_of: list[float]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    groups: dict[tuple[str, str, bool], list[Any]] = {}
    narrowest = chart.x(chart.makespan_s) / 160
    for bar in chart.bars:
        lane = chart.lanes[bar.lane]
        x, width = chart.x(bar.start_s), chart.x(bar.end_s) - chart.x(bar.start_s)
        height = 0.84 if bar.kind in "FB" else 0.56
        key = (colour(lane.stage, lane.replica, bar.kind), bar.kind, bar.critical)
        groups.setdefault(key, []).append(Rectangle((x, y_of[bar.lane] - height / 2), width, height))
        if bar.kind in "FB" and width > narrowest:
            axes.text(
                x + width / 2,
                y_of[bar.lane] + 0.02,
                str(bar.microbatch),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white",
                clip_on=True,
                zorder=6,
            )
    for (face, kind, critical), patches in groups.items():
        axes.add_collection(
            PatchCollection(
                patches,
                facecolor=face,
                # A hatch has the edge's colour; any other edge would hide the narrowest bars.
                edgecolor=CRITICAL if critical else "white" if kind in HATCHES else face,
                linewidth=1.5 if critical else 0.4,
                hatch=HATCHES.get(kind),
                zorder=5 if critical else 4,
            )
        )


def _ways(chart: Chart, axes: Any, y_of: list[float]) -> None:
    from matplotlib.collections import LineCollection

    for backward, critical in ((False, False), (True, False), (False, True), (True, True)):
        lines = [
            ((chart.x(way.start_s), y_of[way.source]), (chart.x(way.end_s), y_of[way.target]))
            for way in chart.ways
            if (way.backward, way.critical) == (backward, critical)
        ]
        axes.add_collection(
            LineCollection(
                lines,
                colors=CRITICAL if critical else "#5a6270",
                linewidths=1.8 if critical else 0.45,
                linestyles="--" if backward else "-",
                alpha=1.0 if critical else 0.45,
                zorder=7 if critical else 3,
            )
        )


def _axis(chart: Chart, axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    if chart.computed_s > 0:
        ticks = [
            float(tick)
            for tick in MaxNLocator(10).tick_values(0, chart.computed_s)
            if 0 <= tick <= 0.97 * chart.computed_s
        ]
        labels = [f"{tick:g}" for tick in ticks]
        if chart.makespan_s > chart.computed_s:
            ticks.append(chart.computed_s)
            labels.append(f"{chart.computed_s:.3g}")
            scale = "" if chart.squeeze == 1 else " (not to scale)"
            axes.text(
                (chart.x(chart.computed_s) + chart.x(chart.makespan_s)) / 2,
                -0.72,
                f"averaging{scale}",
                ha="center",
                va="bottom",
                fontsize=8,
                color="#444444",
            )
            axes.axvline(chart.computed_s, color="#444444", linewidth=0.8, linestyle=":", zorder=8)
        ticks.append(chart.x(chart.makespan_s))
        labels.append(told_s(chart.makespan_s))
        axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_xlabel("seconds since the step began", fontsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _cells(chart: Chart, axes: Any) -> None:
    """Which replica of each stage each microbatch visits, and what it skips."""
    from matplotlib.patches import Rectangle

    labelled = len(chart.visits) <= _MOST_LABELLED
    for mb, lanes in enumerate(chart.visits):
        for stage, number in enumerate(lanes):
            if number is None:
                axes.plot(mb, stage, marker="x", color="#b3b8bf", markersize=4, markeredgewidth=0.9)
                continue
            lane = chart.lanes[number]
            axes.add_patch(
                Rectangle(
                    (mb - 0.44, stage - 0.42),
                    0.88,
                    0.84,
                    facecolor=colour(stage, lane.replica, "F"),
                    linewidth=0,
                )
            )
            if labelled:
                axes.text(
                    mb, stage + 0.03, str(lane.replica), ha="center", va="center", fontsize=6.5, color="white"
                )
    axes.set_xlim(-0.6, max(1, len(chart.visits)) - 0.4)
    axes.set_ylim(chart.stages - 0.4, -0.6)
    axes.set_yticks(range(chart.stages), [f"stage {stage}" for stage in range(chart.stages)], fontsize=8.5)
    axes.set_title(
        "paths: the replica of each stage that a microbatch visits; × is skipped",
        loc="left",
        fontsize=9,
        color="#444444",
    )
    axes.set_xlabel("microbatch, in send order", fontsize=8.5)
    axes.tick_params(axis="both", length=0, labelsize=8)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=colour(0, 0, kind), hatch=HATCHES.get(kind), edgecolor="white", label=name)
        for kind, name in KINDS.items()
    ]
    handles += [
        Line2D([], [], color="#5a6270", linewidth=1, label="sent forward"),
        Line2D([], [], color="#5a6270", linewidth=1, linestyle="--", label="sent back"),
        Line2D([], [], color=CRITICAL, linewidth=2.2, label="critical path"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)
