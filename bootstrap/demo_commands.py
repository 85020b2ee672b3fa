"""Commands that need no network: ``demo`` (a whole swarm on this machine) and ``export``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bootstrap.demo import DemoOptions
    from bootstrap.demo_summary import Summary


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="A new folder for all files.", show_default="runs/demo-N"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Optimizer steps.", show_default="as in `create --example`")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the model, the samples and the kill.", show_default="the example's"),
    ] = None,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill no peer half-way.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The summary as JSON on standard output; the rest on the other.")
    ] = False,
) -> None:
    """Train a small model with eight peers on this machine, and kill one of them half-way.

    One bootstrap node and 8 peers on loopback, 4 stages with 2 replicas each, each microbatch through 3 of
    the 4. Afterwards no process is left; the model, a sample of it and the loss curve are in --dir.

    \b
    Example:
      skipswarm demo
    """
    from bootstrap.demo import DemoOptions
    from swarm.runtime import run

    options = DemoOptions(directory=directory, steps=steps, seed=seed, kill=not no_kill)
    raise typer.Exit(run(lambda stop: _demo(options, stop, as_json=as_json)))


async def _demo(options: DemoOptions, stop: asyncio.Event, *, as_json: bool) -> int:
    from rich.console import Console

    from bootstrap.demo import make_directory, run_demo
    from bootstrap.demo_view import open_view
    from swarm.clock import LoopClock
    from swarm.manifest import short_run_id

    clock = LoopClock()
    began_s = clock.now()
    directory = make_directory(options.directory)
    console = Console(stderr=as_json)
    trained, view = await run_demo(
        directory,
        options,
        stop,
        clock=clock,
        open_view=lambda manifest: open_view(console, f"skipswarm {short_run_id(manifest.run_id)}", clock),
        began_s=began_s,
    )
    try:
        if trained is None:
            view.say(f"stopped; every process is gone; the logs are in {directory}")
            return 130
        view.say("every process is gone; collecting the model")

        # Seconds of imports.
        from bootstrap.demo_summary import finish

        summary = await asyncio.to_thread(finish, trained)
    finally:
        view.close()
    _tell(summary, as_json=as_json)
    return 0


def _tell(summary: Summary, *, as_json: bool) -> None:
    from bootstrap.demo_summary import lines

    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
        return
    for line in lines(summary, Path.cwd()):
        typer.echo(line)


def export(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders with checkpoints of every stage.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Take this step.", show_default="the newest of all stages")
    ] = None,
) -> None:
    """Make one model in Hugging Face's layout of the checkpoints that peers left in their --dir.

    Checks the checkpoints' hashes and that they are of one run and one step.

    \b
    Example:
      skipswarm export peer0/ peer1/ peer2/ peer3/ --out model/
    """
    from bootstrap.collect import export_folders
    from swarm.manifest import short_run_id

    collected = export_folders(folders, out, step=step)
    for note in collected.notes:
        typer.echo(f"note     {note}")
    count = sum(tensor.numel() for tensor in collected.parameters.values())
    typer.echo(f"run      {short_run_id(collected.manifest.run_id)}, step {collected.step}")
    typer.echo(f"model    {out}: {count:,} parameters")
