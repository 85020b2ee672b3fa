"""The researcher's commands: ``create`` and ``bootstrap``."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.errors import UserError

if TYPE_CHECKING:
    from bootstrap.node import Waiting
    from swarm.joinstring import JoinString
    from swarm.records import Genesis

DEFAULT_PORT = 31330

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key", help="The researcher's key file.", show_default="researcher.key beside the manifest"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON, for scripts.")]


def create(
    manifest: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run's manifest.")] = None,
    key: KeyOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the signed manifest.", show_default="RUN.signed beside the manifest"
        ),
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented manifest and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a manifest and sign it; prints the run id. Makes your key when there is none.

    \b
    Example:
      skipswarm create --example > run.toml
      skipswarm create run.toml
    """
    from bootstrap.create import create_run, example_toml

    if example:
        typer.echo(example_toml(), nl=False)
        return
    if manifest is None:
        raise UserError("no manifest given; begin with: skipswarm create --example > run.toml")
    made = create_run(manifest, key=key, out=out)
    then = ["skipswarm", "bootstrap", str(made.signed_path if out else manifest)]
    if key is not None:
        then += ["--key", str(key)]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "run_id": made.manifest.run_id,
                    "signed": str(made.signed_path),
                    "key": str(made.key_path),
                    "next": shlex.join(then),
                }
            )
        )
        return
    new = " (new; keep it safe, nobody can open this run without it)" if made.key_is_new else ""
    typer.echo(f"run id   {made.manifest.run_id}")
    typer.echo(f"signed   {made.signed_path}")
    typer.echo(f"key      {made.key_path}{new}")
    typer.echo(f"next     {shlex.join(then)}")


def bootstrap(
    manifest: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The manifest, or RUN.signed.")],
    key: KeyOption = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            help="The node's identity file; made if absent.",
            show_default="bootstrap.identity beside the manifest",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 for any free one.")] = DEFAULT_PORT,
    host_maddr: Annotated[
        list[str] | None,
        typer.Option(help="Listen here instead, as a multiaddr.", show_default="/ip4/0.0.0.0/tcp/PORT"),
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddr to tell others instead of the ones listened on.")
    ] = None,
    initial_peer: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of another bootstrap node of this run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Open a run: serve its directory and print the join string for volunteers. Ctrl-C ends it.

    With --json it prints one object a line: the join string, then what it waits for, then the beginning.

    \b
    Example:
      skipswarm bootstrap run.toml --announce /ip4/203.0.113.7/tcp/31330
    """
    from bootstrap.create import (
        KEY_NAME,
        load_genesis,
        load_or_make_identity,
        load_researcher_key,
        load_signed,
    )

    signed = load_signed(manifest)
    checked = signed.verify()
    researcher = load_researcher_key(key or manifest.with_name(KEY_NAME), checked)
    genesis_path = manifest.with_suffix(".genesis")
    load_genesis(genesis_path, checked)

    # Seconds of imports, after what may go wrong at once.
    from bootstrap.node import BootstrapOptions, run_bootstrap
    from swarm.runtime import run

    options = BootstrapOptions(
        signed=signed,
        key=researcher,
        identity=load_or_make_identity(identity or manifest.with_name("bootstrap.identity")),
        host_maddrs=tuple(host_maddr or (f"/ip4/0.0.0.0/tcp/{port}",)),
        announce_maddrs=tuple(announce or ()),
        initial_peers=tuple(initial_peer or ()),
        genesis_path=genesis_path,
    )
    tell = _TellJson() if as_json else _TellPeople()

    async def main(stop: asyncio.Event) -> int:
        await run_bootstrap(
            options, stop, on_ready=tell.ready, on_waiting=tell.waiting, on_genesis=tell.genesis
        )
        return 0

    raise typer.Exit(run(main))


class _TellPeople:
    """What ``bootstrap`` prints."""

    def ready(self, join: JoinString) -> None:
        typer.echo(f"run {join.run_id} is open. Volunteers join with:\n\n  skipswarm join {join}\n")

    def waiting(self, waiting: Waiting) -> None:
        there = ", ".join(
            f"stage {stage}: {count}/{waiting.needed}" for stage, count in enumerate(waiting.replicas)
        )
        typer.echo(f"waiting for {waiting.lacking} ({there})")

    def genesis(self, genesis: Genesis) -> None:
        if genesis.epoch:
            typer.echo(
                f"the run goes on from step {genesis.step} with {len(genesis.members)} peers "
                f"(epoch {genesis.epoch})"
            )
            return
        typer.echo(
            f"the run has begun with {len(genesis.members)} peers. Ctrl-C ends this node, not the run."
        )


class _TellJson:
    """The same, one JSON object a line."""

    def ready(self, join: JoinString) -> None:
        typer.echo(json.dumps({"event": "ready", "run_id": join.run_id, "join": str(join)}))

    def waiting(self, waiting: Waiting) -> None:
        typer.echo(
            json.dumps(
                {
                    "event": "waiting",
                    "replicas": waiting.replicas,
                    "needed": waiting.needed,
                    "lacking": waiting.lacking,
                }
            )
        )

    def genesis(self, genesis: Genesis) -> None:
        members = [member.model_dump() for member in genesis.members]
        begun = {"event": "genesis", "epoch": genesis.epoch, "step": genesis.step, "members": members}
        typer.echo(json.dumps(begun))
