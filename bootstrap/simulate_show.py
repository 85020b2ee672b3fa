"""What ``skipswarm simulate`` prints for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from scheduler.simulate.chart import told_s
from scheduler.simulate.estimate import Estimate
from scheduler.simulate.model import ModelSizes

_MOST_PEERS = 40
"""Beyond which only the busiest are listed."""


def show(found: Estimate, sizes: ModelSizes) -> None:
    """Print the figures, the peers and the comparison."""
    console = Console(highlight=False)
    parameters = sum(sizes.parameters(stage) for stage in range(len(sizes.stages)))
    console.print(
        f"[bold]{told_s(found.step_s)} a step, {found.tokens_per_s:,.0f} tokens/s[/bold]   "
        f"{parameters / 1e6:,.0f} million parameters in {len(sizes.stages)} stages, each microbatch visits "
        f"{sizes.path_length}; {found.microbatches} microbatches, {found.tokens:,} tokens a step"
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="left")
    table.add_row(
        "lower bound",
        f"{told_s(found.bound_s)} by {found.bound_by}, averaging included: efficiency "
        f"{100 * found.efficiency:.0f} %",
    )
    table.add_row("averaging", f"{told_s(found.averaging_s)} at the step's end")
    table.add_row("bottleneck", found.bottleneck)
    for label, use in (
        ("busiest peer", found.busiest_peer),
        ("busiest stage", found.busiest_stage),
        ("busiest uplink", found.busiest_uplink),
    ):
        table.add_row(label, f"{use.name}: {told_s(use.busy_s)}, {100 * use.share:.0f} % of the step")
    table.add_row(
        "critical path", ", ".join(f"{what} {told_s(seconds)}" for what, seconds in found.critical_s.items())
    )
    console.print(table)
    for warning in _warnings(found, sizes):
        console.print(f"[yellow]{warning}[/yellow]")
    console.print(_peers(found))
    console.print(_compared(found))


def _warnings(found: Estimate, sizes: ModelSizes) -> list[str]:
    hosts = [sum(peer.stage == stage for peer in found.peers) for stage in range(len(sizes.stages))]
    lacking = [stage for stage, count in enumerate(hosts) if count < sizes.start_replicas]
    warnings = []
    if lacking:
        warnings.append(
            f"the run would not begin: stage {lacking[0]} has {hosts[lacking[0]]} of the "
            f"{sizes.start_replicas} replicas that sync.start_replicas asks for"
        )
    if found.degraded:
        warnings.append("some paths are shorter than path_length, or some stages less trained than others")
    return warnings


def _peers(found: Estimate) -> Table:
    table = Table(title="peers" if len(found.peers) <= _MOST_PEERS else f"the {_MOST_PEERS} busiest peers")
    for column in ("stage", "peer", "visits", "computing", "sending"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    busiest = sorted(found.peers, key=lambda peer: -max(peer.busy_share, peer.sending_share))[:_MOST_PEERS]
    for peer in sorted(busiest, key=lambda peer: (peer.stage, peer.peer)):
        table.add_row(
            str(peer.stage),
            peer.peer,
            str(peer.visits),
            f"{100 * peer.busy_share:.0f} %",
            f"{100 * peer.sending_share:.0f} %",
        )
    table.caption = "shares of the time until averaging"
    return table


def _compared(found: Estimate) -> Table:
    table = Table(title="other schedulers, the same peers at the same places")
    for column in ("scheduler", "step", "tokens/s", "our step is"):
        table.add_column(column, justify="left" if column == "scheduler" else "right")
    for other in found.compared:
        table.add_row(
            other.name, f"{told_s(other.step_s)}", f"{other.tokens_per_s:,.0f}", f"{100 * other.ours:.0f} %"
        )
    table.add_row(
        "[bold]ours[/bold]", f"[bold]{told_s(found.step_s)}[/bold]", f"{found.tokens_per_s:,.0f}", "100 %"
    )
    table.add_row("lower bound", f"{told_s(found.bound_s)}", "", "")
    return table
