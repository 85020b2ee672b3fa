"""Answers about a timeline, for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swarm.timeline.merge import short
from swarm.timeline.summary import Summary
from swarm.timeline.why import Reroute, Why

WORST = 20
"""Losses shown; ``--json`` has them all."""


LEGEND = (
    "[dim]by: peers that knew. silent: seconds before that, since its own last line. back in: until all that "
    "was rerouted was committed. close in: until a step was closed.[/dim]"
)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def place(stage: int, peer: str) -> str:
    """A peer and its stage, as far as they are known."""
    return escape(f"stage {stage} {short(peer)}" if stage >= 0 else short(peer))


def show_why(answer: Why) -> None:
    """Print a microbatch's life, its reroutes and who computed what counts."""
    console = Console(highlight=False)
    how = "committed" if answer.committed else "not committed in these logs"
    console.print(
        f"[bold]microbatch {answer.index} of step {answer.step}[/bold]: {how}, {seconds(answer.total_s)} s: "
        + ", ".join(f"{what} {seconds(spent_s)}" for what, spent_s in answer.spent_s.items())
    )
    table = Table()
    for column in ("at s", "for s", "what", "where", ""):
        table.add_column(column, justify="right" if column.endswith(" s") else "left")
    for part in answer.slices:
        style = "yellow" if part.what == "waiting" else None
        row = (seconds(part.from_s), seconds(part.for_s), part.what, place(part.stage, part.peer))
        table.add_row(*row, escape(part.detail), style=style)
    console.print(table)
    for peer in answer.taken_over_from:
        console.print(f"taken over from origin {escape(short(peer))}, which was lost")
    for one in answer.attempts:
        if one.given_up is not None:
            console.print(
                f"attempt {one.attempt} by {escape(short(one.origin))}, begun at {seconds(one.at_s)} s, "
                f"was given up: {escape(one.given_up)}"
            )
    for reroute in answer.reroutes:
        console.print(_reroute(reroute), soft_wrap=True)
    if answer.counted:
        console.print("what counts was computed by:")
    for work in answer.counted:
        console.print(
            f"  {place(work.stage, work.peer)}: forward {seconds(work.forward_s)}, "
            f"backward {seconds(work.backward_s)}, weights {seconds(work.weight_s)} s"
        )


def _reroute(reroute: Reroute) -> str:
    by, lost = escape(short(reroute.by)), escape(short(reroute.lost))
    if reroute.instead is None:
        what = f"left stage {reroute.stage} out, where {lost} was to be,"
    else:
        stage, _, peer = reroute.instead.partition(":")
        there = "" if stage == str(reroute.stage) else f" of stage {escape(stage)}"
        what = f"put {escape(short(peer))}{there} in the place of {lost} (stage {reroute.stage})"
    known = f"; first lost {seconds(reroute.known_s)} s before" if reroute.known_s else ""
    return f"at {seconds(reroute.at_s)} s {by} {what} because it {_why(reroute)}{known}"


def _why(reroute: Reroute) -> str:
    verb = "was lost" if reroute.cause == "lost" else "refused"
    return f"{verb}: {escape(reroute.reason)}" if reroute.reason else verb


def show_summary(summary: Summary) -> None:
    """Print the counts, and each loss with its recovery."""
    console = Console(highlight=False)
    console.print(
        f"{summary.files} logs of {summary.peers} peers in {summary.lives} lives, "
        f"{summary.events:,} events in {summary.duration_s:,.1f} s"
    )
    step = "" if summary.step_s is None else f", one every {seconds(summary.step_s)} s"
    console.print(
        f"{summary.steps:,} steps, {summary.closed:,} closed{step}; {summary.committed:,} microbatches "
        f"committed, {summary.counted:,} counted"
    )
    for what, reasons in (("rerouted", summary.rerouted), ("restarted", summary.restarted)):
        console.print(f"{sum(reasons.values()):,} {what}")
        for reason, times in reasons.items():
            console.print(f"  {times:,} {escape(reason)}", soft_wrap=True)
    console.print(f"{summary.taken_over:,} taken over, {summary.fell_out:,} fell out")
    _show_losses(console, summary)
    for reason, times in summary.passed_over.items():
        console.print(f"[yellow]{times:,} lines passed over: {reason}[/yellow]")
    if len(summary.clocks) > 1:
        clocks = ", ".join(f"{escape(clock)} by {by}" for clock, by in summary.clocks.items())
        console.print(f"clocks: {clocks}", soft_wrap=True)


def _show_losses(console: Console, summary: Summary) -> None:
    if not summary.losses:
        console.print("no peer was lost")
        return
    table = Table()
    for column in ("lost at", "peer", "why", "by", "silent", "rerouted", "back in", "close in"):
        table.add_column(column, justify="left" if column in ("peer", "why") else "right")
    for loss in summary.losses[:WORST]:
        table.add_row(
            seconds(loss.at_s),
            place(-1 if loss.stage is None else loss.stage, loss.peer),
            escape(loss.reason[:60]),
            str(loss.told_by),
            seconds(loss.silent_s),
            str(loss.rerouted),
            seconds(loss.recovered_s),
            seconds(loss.next_close_s),
        )
    console.print(table)
    console.print(LEGEND)
    if len(summary.losses) > WORST:
        console.print(f"and {len(summary.losses) - WORST:,} more: --json has them all")
