"""The end of a demo: one model from the checkpoints, a sample of it, the loss curve, the figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bootstrap.collect import export_folders
from bootstrap.curve import draw_curve
from bootstrap.demo import Trained
from bootstrap.progress import Progress
from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.data.tokenizer import BytesTokenizer
from swarm.manifest import Manifest
from swarm.model.export import WholeModel, load_whole

PROMPT = "And the LORD said unto "
SAMPLED = 200
TEMPERATURE = 0.8


@dataclass(frozen=True)
class KillSummary:
    """The loss of a peer."""

    peer: str
    stage: int
    step: int
    next_step_closed_s: float | None
    """From the kill until the swarm closed its next step."""
    rerouted: int
    """Microbatches rerouted or started anew afterwards."""


@dataclass(frozen=True)
class Summary:
    """What a demo measured. Losses in nats a byte; times and rates of this machine."""

    run_id: str
    peers: int
    steps: int
    tokens: int
    tokens_per_s: float
    training_s: float
    first_step_s: float
    """From the start of the demo to the end of the first step."""
    validation_loss_first: float | None
    validation_loss_last: float
    """Of the exported model, by itself, on the samples that the swarm used."""
    train_loss_last: float
    committed: int
    rerouted: int
    restarted: int
    kill: KillSummary | None
    prompt: str
    sample: str
    notes: tuple[str, ...]
    directory: str
    model: str
    curve: str

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return asdict(self)


def finish(trained: Trained) -> Summary:
    """Export, sample and draw into the demo's folder. Raises ``UserError``: the checkpoints give no model."""
    manifest, progress, directory = trained.manifest, trained.progress, trained.directory
    collected = export_folders([directory], directory / "model")
    torch.set_num_threads(1)
    model = load_whole(manifest, collected.parameters)
    loss = _validation_loss(manifest, model)
    validation = [*progress.validation, (collected.step, loss)]
    draw_curve(
        directory / "loss.png",
        progress.train,
        validation,
        title=f"{len(progress.peers)} peers, {len(manifest.stages)} stages, "
        f"paths of {manifest.path_length}: {progress.tokens:,} tokens",
        killed_at=progress.kill.step if progress.kill else None,
    )
    sample = _sample(manifest, model)
    (directory / "sample.txt").write_text(PROMPT + sample + "\n")
    return Summary(
        run_id=manifest.run_id,
        peers=len(progress.peers),
        steps=collected.step,
        tokens=progress.tokens,
        tokens_per_s=progress.tokens_per_s,
        training_s=progress.training_s,
        first_step_s=(progress.first_step_s or progress.began_s) - progress.began_s,
        validation_loss_first=progress.validation[0][1] if progress.validation else None,
        validation_loss_last=loss,
        train_loss_last=progress.train[-1][1],
        committed=progress.committed,
        rerouted=progress.rerouted,
        restarted=progress.restarted,
        kill=_kill(progress),
        prompt=PROMPT,
        sample=sample,
        notes=collected.notes,
        directory=str(directory),
        model=str(directory / "model"),
        curve=str(directory / "loss.png"),
    )


def _kill(progress: Progress) -> KillSummary | None:
    kill = progress.kill
    if kill is None:
        return None
    return KillSummary(kill.name, kill.stage, kill.step, kill.next_close_s, kill.rerouted)


def _validation_loss(manifest: Manifest, model: WholeModel) -> float:
    sampler = Sampler(manifest, load_corpus(manifest.data.corpus))
    return model.loss(sampler.validation(number) for number in range(manifest.data.validation_microbatches))


def _sample(manifest: Manifest, model: WholeModel) -> str:
    tokenizer = BytesTokenizer()
    generator = torch.Generator().manual_seed(manifest.seed)
    return tokenizer.decode(model.generate(tokenizer.encode(PROMPT), SAMPLED, TEMPERATURE, generator))


def lines(summary: Summary, from_here: Path) -> Iterator[str]:
    """The summary for people."""
    first = "" if summary.validation_loss_first is None else f"{summary.validation_loss_first:.3f} -> "
    yield f"validation loss  {first}{summary.validation_loss_last:.3f} nats a byte"
    yield (
        f"training         {summary.steps} steps, {summary.tokens:,} tokens in {summary.training_s:.1f} s: "
        f"{summary.tokens_per_s:,.0f} tokens/s"
    )
    yield f"start            the first step was done after {summary.first_step_s:.1f} s"
    yield (
        f"microbatches     {summary.committed:,} committed, {summary.rerouted} rerouted, "
        f"{summary.restarted} started anew"
    )
    if (kill := summary.kill) is not None:
        after = "never" if kill.next_step_closed_s is None else f"{kill.next_step_closed_s:.2f} s later"
        yield (
            f"killed           {kill.peer} (stage {kill.stage}) in step {kill.step + 1}: "
            f"{kill.rerouted} went another way, the next step closed {after}"
        )
    for note in summary.notes:
        yield f"note             {note}"
    for what, path in (
        ("model", summary.model),
        ("loss curve", summary.curve),
        ("all files", summary.directory),
    ):
        yield f"{what:<16} {_short(Path(path), from_here)}"
    yield f"sample           {len(summary.sample)} characters after {summary.prompt!r}:"
    yield ""
    yield printable(summary.prompt + summary.sample)


def printable(text: str) -> str:
    """``text`` without what a terminal takes for commands: a model may say any byte."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _short(path: Path, from_here: Path) -> Path:
    return path.relative_to(from_here) if path.is_relative_to(from_here) else path
