"""Checkpoints of all stages, wherever their peers left them, to one model in Hugging Face's layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from peer.checkpoint import CheckpointError, CheckpointManifest, read
from swarm.errors import UserError
from swarm.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestError, short_run_id
from swarm.model.export import export, merge_states
from swarm.model.layout import build_stage, layout_of
from swarm.model.state import StateError, max_image_bytes, unpack
from swarm.model.state import check as check_state

_DESCRIPTION_BYTES = 2 * MAX_MANIFEST_BYTES + 4096


class CollectError(UserError):
    """These folders give no model; one line."""


@dataclass(frozen=True)
class Found:
    """A checkpoint as its description has it; its bytes are not read yet."""

    path: Path
    described: CheckpointManifest


@dataclass(frozen=True)
class Collected:
    """One model: a run's parameters at one step, with their names in the whole model."""

    manifest: Manifest
    step: int
    parameters: dict[str, Tensor]
    notes: tuple[str, ...]
    """What the user should know: replicas that differ, checkpoints that were passed over."""


def collect(folders: Sequence[Path], *, step: int | None = None) -> Collected:
    """The newest model that the checkpoints below ``folders`` give, or that of ``step``. Of two epochs the
    later one's is the newer: the run has begun again since the other.

    Every image is held against its SHA-256, the run's manifest against the run id, every tensor against the
    manifest. Where a stage's replicas differ, what most of them hold is taken.

    Raises:
        CollectError: no checkpoints, several runs, or no step of which every stage has a sound one.
    """
    found, notes = _search(folders)
    manifest = _manifest_of(found, folders)
    marks = {one.described.mark for one in found if step in (None, one.described.step)}
    for mark in sorted(marks, reverse=True):
        candidate = mark[1]
        of_step = [one for one in found if one.described.mark == mark]
        if not set(range(len(manifest.stages))) <= {one.described.stage for one in of_step}:
            continue
        states = [_sound_state(manifest, stage, of_step, notes) for stage in range(len(manifest.stages))]
        if any(state is None for state in states):
            continue
        try:
            parameters = merge_states(manifest, [state for state in states if state is not None])
        except StateError as error:
            notes.append(f"step {candidate}: {error}")
            continue
        return Collected(manifest, candidate, parameters, tuple(notes))
    raise CollectError(_nothing(manifest, found, step, notes))


def export_folders(folders: Sequence[Path], out: Path, *, step: int | None = None) -> Collected:
    """``collect`` and write ``config.json`` and ``model.safetensors`` into ``out``. Raises ``UserError``."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CollectError(f"{out} is there already; give a new folder with --out")
    collected = collect(folders, step=step)
    try:
        export(collected.manifest, collected.parameters, out)
    except OSError as error:
        raise CollectError(f"cannot write {out}: {error.strerror}; give another folder with --out") from None
    return collected


def _search(folders: Sequence[Path]) -> tuple[list[Found], list[str]]:
    """Every checkpoint below ``folders`` that describes itself, and notes on those that do not."""
    found: dict[Path, Found] = {}
    notes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise CollectError(f"{folder} is no folder; give the --dir of `skipswarm join`")
        for path in _descriptions(folder):
            try:
                if path.stat().st_size > _DESCRIPTION_BYTES:
                    raise ValueError("too long")
                found[path] = Found(path, CheckpointManifest.model_validate_json(path.read_bytes()))
            except (OSError, ValueError, ValidationError) as error:
                notes.append(f"passed over {path}: not a checkpoint's description ({_first_line(error)})")
    if not found:
        where = ", ".join(map(str, folders))
        raise CollectError(f"no checkpoints in {where}; give the --dir of `skipswarm join`, of every stage")
    return list(found.values()), notes


def _descriptions(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("stage-*/epoch-*.json")):
        yield path.resolve()


def _manifest_of(found: Iterable[Found], folders: Sequence[Path]) -> Manifest:
    runs = Counter(one.described.run_id for one in found)
    if len(runs) > 1:
        listed = ", ".join(sorted(map(short_run_id, runs)))
        raise CollectError(f"checkpoints of {len(runs)} runs ({listed}); give the folders of one run")
    run_id = next(iter(runs))
    for one in found:
        try:
            manifest = Manifest.from_canonical(one.described.manifest.encode())
        except ManifestError:
            continue
        if manifest.run_id == run_id:
            return manifest
    raise CollectError(
        f"no checkpoint holds the manifest of its run {short_run_id(run_id)}; take other checkpoints"
    )


def _sound_state(
    manifest: Manifest, stage: int, of_step: list[Found], notes: list[str]
) -> dict[str, Tensor] | None:
    """The state that most replicas of ``stage`` hold and whose bytes are sound; None if none is."""
    mine = [one for one in of_step if one.described.stage == stage]
    digests = Counter(one.described.sha256 for one in mine)
    order = sorted(digests, key=lambda digest: (-digests[digest], digest))
    for digest in order:
        for one in mine:
            if one.described.sha256 != digest:
                continue
            try:
                state = _load(manifest, stage, one)
            except (CheckpointError, StateError) as error:
                notes.append(f"passed over {one.path}: {error}")
                continue
            if len(digests) > 1:
                notes.append(
                    f"the replicas of stage {stage} differ at step {one.described.step}; "
                    f"took what {digests[digest]} of {len(mine)} hold"
                )
            return state
    return None


def _load(manifest: Manifest, stage: int, one: Found) -> dict[str, Tensor]:
    """Read, hash and check one checkpoint. Raises CheckpointError or StateError."""
    layout = layout_of(build_stage(manifest, stage))
    if one.described.bytes > max_image_bytes(layout):
        raise StateError(f"{one.described.bytes} bytes are too many for stage {stage}; take another one")
    described, image = read(one.path, manifest.run_id, stage)
    state = unpack(image, layout)
    if (step := check_state(state, layout)) != described.step:
        raise StateError(f"it says step {described.step} and holds step {step}; take another one")
    return state


def _nothing(manifest: Manifest, found: list[Found], step: int | None, notes: list[str]) -> str:
    """Why no step gives a model."""
    wanted = "no step" if step is None else f"step {step} is not one"
    have = {
        stage: sorted({one.described.step for one in found if one.described.stage == stage})
        for stage in range(len(manifest.stages))
    }
    missing = [stage for stage, steps in have.items() if not steps]
    if missing:
        return f"no checkpoint of stage {missing[0]} is there; add the folder of one of its peers"
    listed = "; ".join(f"stage {stage}: {', '.join(map(str, steps))}" for stage, steps in have.items())
    bad = f"; {notes[-1]}" if notes else ""
    return f"{wanted} of which every stage has a sound checkpoint ({listed}); add folders of more peers{bad}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
