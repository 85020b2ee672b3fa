"""``skipswarm events ...``: what happened in a swarm, from its peers' event logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swarm.timeline.merge import Timeline

BESIDE = 2
"""So many steps before and after it tell how the clocks differ."""

SILENT_S = 2.0
"""Work that takes longer says how far it is, as often."""

events = typer.Typer(
    help="What happened: one timeline of all peers' event logs, and answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Place = Annotated[Path, typer.Argument(metavar="DIR", help="Holds the peers' event logs, *.jsonl.")]
FromStep = Annotated[int, typer.Option(min=0, help="Leave out what is of earlier steps.")]
ToStep = Annotated[
    int | None, typer.Option(min=0, help="Leave out what is of later steps.", show_default="the last")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


@events.command()
def merge(
    place: Place,
    out: Annotated[
        Path | None, typer.Option(help="Write the trace here.", show_default="trace.json in DIR")
    ] = None,
    from_step: FromStep = 0,
    to_step: ToStep = None,
) -> None:
    """Make one Chrome trace of all logs, for https://ui.perfetto.dev: a row for each peer, grouped by stage.

    Logs of several machines are put on one scale by the messages between them, else by Unix time.

    \b
    Example:
      skipswarm events merge logs --out trace.json
    """
    from swarm.errors import UserError
    from swarm.timeline import trace

    progress = _Progress()
    timeline = _timeline(place, progress, from_step, to_step)
    target = out or (place if place.is_dir() else place.parent) / "trace.json"
    try:
        with target.open("w", encoding="utf-8") as file:
            rows = trace.write(timeline, file, lambda rows: progress.say(f"{rows:,} rows written"))
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}; choose another file with --out") from None
    typer.echo(f"{len(timeline.entries):,} events of {timeline.files} logs -> {target} ({rows:,} rows)")
    for clock, alignment in sorted(timeline.clocks.items()):
        if alignment.by != "reference":
            sure = "" if alignment.uncertainty_s is None else f", to within {alignment.uncertainty_s:.4f} s"
            typer.echo(f"clock {clock}: {alignment.offset_s:+.4f} s by {alignment.by}{sure}")
    for reason, times in sorted(timeline.passed_over.items()):
        typer.echo(f"{times:,} lines passed over: {reason}")


@events.command()
def why(
    place: Place,
    step: Annotated[int, typer.Option(min=0, help="The step.")],
    index: Annotated[int, typer.Option(min=0, help="The microbatch's index in it.")],
    as_json: AsJson = False,
) -> None:
    """Tell where one microbatch spent its time, who rerouted it and why, and who computed what counted.

    \b
    Example:
      skipswarm events why logs --step 12 --index 3
    """
    from swarm.timeline.show import show_why
    from swarm.timeline.why import why as answer

    timeline = _timeline(place, _Progress(), max(0, step - BESIDE), step + BESIDE)
    found = answer(timeline, step, index)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        show_why(found)


@events.command()
def summary(place: Place, from_step: FromStep = 0, to_step: ToStep = None, as_json: AsJson = False) -> None:
    """Count steps, commits, reroutes and restarts by cause, and each lost peer with its recovery.

    \b
    Example:
      skipswarm events summary logs
    """
    from swarm.timeline.show import show_summary
    from swarm.timeline.summary import summarise

    found = summarise(_timeline(place, _Progress(), from_step, to_step))
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        show_summary(found)


@events.command()
def schema() -> None:
    """Print every event and its fields, as a table in Markdown.

    \b
    Example:
      skipswarm events schema
    """
    from swarm.timeline.table import table

    typer.echo(table(), nl=False)


class _Progress:
    """Says on standard error how far work is that takes long."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told_s = now()

    def say(self, text: str) -> None:
        if self._now() - self._told_s >= SILENT_S:
            self._told_s = self._now()
            typer.echo(text, err=True)


def _timeline(place: Path, progress: _Progress, from_step: int, to_step: int | None) -> Timeline:
    from swarm.timeline.merge import merge as merged

    def told(read: int, files: int, count: int) -> None:
        progress.say(f"{read} of {files} logs read, {count:,} events")

    end = sys.maxsize if to_step is None else to_step + 1
    steps = None if (from_step, to_step) == (0, None) else range(from_step, end)
    return merged(place, told, steps)
