"""``skipswarm simulate``: what a run would do on given peers, before anybody joins it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.errors import UserError

if TYPE_CHECKING:
    from scheduler.simulate.estimate import Estimate, Solved
    from scheduler.simulate.model import ModelSizes
    from swarm.manifest import Manifest


def simulate(
    peers: Annotated[
        Path | None, typer.Argument(metavar="PEERS", help="TOML, or CSV: who would take part.")
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help="The run's manifest, or RUN.signed.",
            show_default="an example of 1 billion parameters in 6 stages",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=3600.0, help="How long to search.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the search, the baselines and the losses.")] = 0,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step: .svg, .png or .html.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented peers file and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Predict a step on these peers: time, tokens/s, the lower bound, what holds it up, other schedulers.

    Who hosts what is searched for where the file does not say it; nothing is sent anywhere.

    \b
    Example:
      skipswarm simulate --example > peers.toml
      skipswarm simulate peers.toml --manifest run.toml --gantt step.html
    """
    if example:
        typer.echo(_example("peers.toml"), nl=False)
        return
    if peers is None:
        raise UserError("no peers given; begin with: skipswarm simulate --example > peers.toml")
    if gantt is not None:
        from bootstrap.gantt import check_format

        check_format(gantt)
    sizes = sizes_of(_manifest(manifest))
    solved, found = _solve(peers, sizes, seed, seconds)
    written: list[Path] = []
    if gantt is not None:
        _draw(solved, found, gantt)
        written.append(gantt)
    if trace is not None:
        from bootstrap.simulated_trace import write_trace

        write_trace(solved, trace)
        written.append(trace)
    if as_json:
        typer.echo(json.dumps(_document(solved, found, written), indent=1))
        return
    from bootstrap.simulate_show import show

    show(found, sizes)
    for path in written:
        typer.echo(f"wrote {path}")


def sizes_of(manifest: Manifest) -> ModelSizes:
    """What the scheduler needs to know of a manifest."""
    from scheduler.simulate.model import ModelSizes

    model = manifest.model
    return ModelSizes(
        stages=manifest.stages,
        path_length=manifest.path_length,
        microbatches_per_origin=manifest.microbatches_per_origin,
        microbatch_size=manifest.microbatch_size,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn_width=model.ffn_width,
        context=model.context,
        vocabulary=model.vocabulary,
        dtype=model.dtype,
        wire_dtype=manifest.sync.wire_dtype,
        memory_slots=manifest.limits.memory_slots,
        start_replicas=manifest.sync.start_replicas,
        coverage_tolerance=manifest.coverage_tolerance,
    )


def _example(name: str) -> str:
    from importlib import resources

    return resources.files("bootstrap").joinpath("examples", name).read_text(encoding="utf-8")


def _manifest(path: Path | None) -> Manifest:
    from bootstrap.create import load_signed, load_unsigned
    from swarm.identity import KEY_BYTES
    from swarm.manifest import Manifest

    if path is None:
        return Manifest.from_toml(_example("run.toml"), researcher="00" * KEY_BYTES)
    return load_signed(path).verify() if path.suffix == ".signed" else load_unsigned(path)


def _solve(peers: Path, sizes: ModelSizes, seed: int, seconds: float) -> tuple[Solved, Estimate]:
    from scheduler.errors import SchedulerError
    from scheduler.simulate.build import Swarm
    from scheduler.simulate.estimate import estimate, solve
    from scheduler.simulate.peers import load_peers

    try:
        swarm = Swarm(load_peers(peers), sizes)
        with _working("searching for places and paths"):
            solved = solve(swarm, seed=seed, seconds=seconds)
            return solved, estimate(solved, sizes, seed=seed)
    except SchedulerError as error:
        raise UserError(str(error)) from None


def _draw(solved: Solved, found: Estimate, path: Path) -> None:
    from bootstrap.gantt import draw
    from scheduler.simulate.chart import chart, told_s

    draw(
        chart(solved.instance, solved.plan.paths, solved.timeline, solved.critical),
        path,
        title=(
            f"One step of {len(found.peers)} peers: {told_s(found.step_s)}, "
            f"{found.tokens_per_s:,.0f} tokens/s"
        ),
        subtitle=(
            f"{found.microbatches} microbatches; lower bound {told_s(found.bound_s)} "
            f"({100 * found.efficiency:.0f} % of the step); bottleneck: {found.bottleneck}"
        ),
    )


def _document(solved: Solved, found: Estimate, written: list[Path]) -> dict[str, Any]:
    return {
        **found.model_dump(mode="json"),
        "plan": solved.plan.to_text(),
        "written": [str(path) for path in written],
    }


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Says so on a terminal, until it is done."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield
