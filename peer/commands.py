"""The volunteer's command: ``join``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def join(
    join_string: Annotated[
        str, typer.Argument(metavar="JOINSTRING", help="What `skipswarm bootstrap` printed.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Keeps your identity and checkpoints.", show_default="~/.skipswarm/<run id>"
        ),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Host this stage.", show_default="the one most in need")
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(help="Identity file; made if absent.", show_default="identity.key in --dir"),
    ] = None,
    host_maddr: Annotated[
        list[str] | None,
        typer.Option(help="Listen here, as a multiaddr.", show_default="/ip4/0.0.0.0/tcp/0"),
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddr to tell others instead of the ones listened on.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for computing.")] = 1,
    device: Annotated[str, typer.Option(help="torch device, as cpu or cuda:0.")] = "cpu",
    move: Annotated[
        bool, typer.Option(help="Go to another stage when that needs a peer more; needs memory for two.")
    ] = True,
    events: Annotated[
        Path | None, typer.Option(help="Append what happens to this file, as JSON lines.")
    ] = None,
    emulate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For benchmarks and tests: compute at a nominal pace and obey faults (peer/emulation.py).",
        ),
    ] = None,
) -> None:
    """Give this machine to a run: find it, take the stage most in need, train. Ctrl-C leaves cleanly.

    \b
    Example:
      skipswarm join skipswarm:3f0c...@/ip4/203.0.113.7/tcp/31330/p2p/12D3KooW...
    """
    from swarm.joinstring import JoinString

    target = JoinString.parse(join_string)

    from peer.daemon import DaemonOptions, run_daemon
    from swarm.runtime import run

    options = DaemonOptions(
        join=target,
        directory=directory or Path.home() / ".skipswarm" / target.run_id[:16],
        stage=stage,
        identity=identity,
        host_maddrs=tuple(host_maddr or ("/ip4/0.0.0.0/tcp/0",)),
        announce_maddrs=tuple(announce or ()),
        events=events,
        emulate=emulate,
        threads=threads,
        device=device,
        move=move and stage is None,
    )

    async def main(stop: asyncio.Event) -> int:
        return await run_daemon(options, stop, report=typer.echo)

    raise typer.Exit(run(main))
