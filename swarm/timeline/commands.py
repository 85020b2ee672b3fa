"""``skipswarm events ...``: what happened in a swarm, from its peers' event logs."""

from __future__ import annotations

import typer

events = typer.Typer(
    help="What happened: one timeline of all peers' event logs, and answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@events.command()
def schema() -> None:
    """Print every event and its fields, as a table in Markdown.

    \b
    Example:
      skipswarm events schema
    """
    from swarm.timeline.table import table

    typer.echo(table(), nl=False)
