"""``skipswarm status``: a run seen from outside, by DHT queries alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swarm.joinstring import JoinString
    from swarm.monitor.snapshot import SwarmSnapshot


def status(
    join_string: Annotated[
        str, typer.Argument(metavar="JOINSTRING", help="What `skipswarm bootstrap` printed.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Show a run: stages, replicas, step, loss, tokens/s. Takes part in nothing.

    The exit code is 0 when every stage has a replica, 1 when one has none, 2 when the run cannot be seen.

    \b
    Example:
      skipswarm status skipswarm:3f0c...@/ip4/203.0.113.7/tcp/31330/p2p/12D3KooW...
    """
    from swarm.joinstring import JoinString
    from swarm.runtime import run

    join = JoinString.parse(join_string)
    result: list[SwarmSnapshot] = []

    async def main(stop: asyncio.Event) -> int:
        looking = asyncio.ensure_future(look(join))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((looking, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            return 130
        result.append(looking.result())
        return 0 if result[0].complete else 1

    code = run(main)
    if result:
        if as_json:
            typer.echo(result[0].model_dump_json(indent=1))
        else:
            show(result[0])
    raise typer.Exit(code)


async def look(join: JoinString, *, timeout_s: float = 15.0) -> SwarmSnapshot:
    """Connect, ask, leave. Raises ``UserError`` when the run cannot be seen.

    ``timeout_s`` bounds the time until some node of the join string answers.
    """
    from swarm.clock import LoopClock
    from swarm.directory import Directory
    from swarm.identity import Identity
    from swarm.monitor.snapshot import snapshot
    from swarm.transport.p2phost import P2PHost

    clock = LoopClock()
    host = await P2PHost.start(
        Identity.generate(), initial_peers=join.addresses, bootstrap_timeout_s=timeout_s, clock=clock
    )
    try:
        directory = await Directory.start(
            host,
            host.identity,
            join.run_id,
            clock=clock,
            initial_peers=join.addresses,
            client_only=True,
        )
        try:
            return await snapshot(directory)
        finally:
            await directory.close()
    finally:
        await host.close()


def show(seen: SwarmSnapshot) -> None:
    """Print a snapshot for a person."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    console = Console(highlight=False)
    console.print(f"[bold]{seen.name}[/bold]  {seen.run_id}", soft_wrap=True)
    if seen.step is None:
        console.print("training" if seen.begun else "waiting until every stage has its replicas")
    else:
        console.print(
            f"step {seen.step} of {seen.total_steps}   train loss {number(seen.train_loss)}   "
            f"validation loss {number(seen.validation_loss)}   {seen.tokens_per_s:,.0f} tokens/s"
        )
        console.print(
            f"{seen.tokens_total:,} tokens, {seen.committed:,} microbatches committed, "
            f"{seen.rerouted:,} rerouted"
        )
    table = Table()
    for column in ("stage", "layers", "replicas", "steps", "tokens/s", "peers"):
        table.add_column(column, justify="left" if column == "peers" else "right")
    for stage in seen.stages:
        steps = sorted({peer.step for peer in stage.peers})
        table.add_row(
            str(stage.stage),
            str(stage.layers),
            str(stage.replicas) if stage.replicas else "[red]none[/red]",
            "-" if not steps else "/".join(map(str, steps[-3:])),
            f"{sum(peer.tokens_per_s for peer in stage.peers):,.0f}",
            " ".join(f"..{peer.peer[-8:]}" for peer in stage.peers[:6])
            + (" ..." if len(stage.peers) > 6 else ""),
        )
    console.print(table)
    if seen.refused:
        console.print(f"{seen.refused} records were refused")
