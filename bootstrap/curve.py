"""The loss curve as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[int, float]]
"""(step, loss in nats a token)."""


def draw_curve(path: Path, train: Points, validation: Points, *, title: str, killed_at: int | None) -> None:
    """Draw both losses over the steps into the PNG ``path``; a line marks the step of a kill. OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_columns(train), color="#4c9fc4", linewidth=1.0, alpha=0.8, label="training")
    axes.plot(
        *_columns(validation), color="#b0307a", linewidth=1.8, marker="o", markersize=4, label="held out"
    )
    if killed_at is not None:
        axes.axvline(killed_at, color="#d08020", linestyle="--", linewidth=1.2, label="a peer is killed")
    axes.set_xlabel("step of the swarm")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
