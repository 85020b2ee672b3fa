"""``skipswarm ...``: the shell around the commands.

Commands are entry points of the group ``skipswarm.commands`` (``setup.cfg``), because ``swarm`` imports
neither ``peer`` nor ``bootstrap``: functions, or typer applications where a command has commands of its own.
Their modules import torch and hivemind only when they run, so that ``--help`` is quick.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer

from swarm.errors import UserError

COMMANDS = "skipswarm.commands"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"skipswarm {version('skipswarm')}")
        raise typer.Exit


def build() -> typer.Typer:
    """The application with every installed command."""
    app = typer.Typer(
        help="Train one language model together, over the internet, on volunteers' machines.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
        ] = False,
        verbose: Annotated[
            bool, typer.Option("--verbose", help="Log what happens to standard error.")
        ] = False,
    ) -> None:
        _configure_logging(verbose)

    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        command: Any = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    return app


def _configure_logging(verbose: bool) -> None:
    # Read by hivemind when it is imported; it installs a handler of its own.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "INFO" if verbose else "ERROR")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def main() -> None:
    """The console script. A ``UserError`` is one line on standard error and exit code 2."""
    try:
        build()()
    except UserError as error:
        print(f"skipswarm: {error}", file=sys.stderr)
        sys.exit(2)
