"""A stage's state on disk: safetensors beside a small manifest with its SHA-256, whole or not there at all.

``DIR/stage-002/epoch-003-step-00000100.safetensors`` and ``.json``. Written to a temporary file, synced,
renamed; the manifest comes last, so that a crash at any point leaves the checkpoint before it. Parameters,
moments and the step are all that a run needs to go on bit-equal: the sampler is a function of (step, index),
so the step is the position in the data.

A run may begin again at an earlier step, in a new epoch. So a state is named by (epoch, step), its *mark*:
the same step of two epochs is two states, and the later epoch's is the newer, whatever its step.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import UserError
from swarm.messages import MAX_STAGES, Count, Step

KEPT = 3
"""Checkpoints of a stage that stay; older ones are removed."""
Mark = tuple[int, int]
"""(epoch, step)"""
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; one line: cause, then what to try."""


class CheckpointManifest(BaseModel):
    """What stands beside the image."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    run_id: str = Field(pattern=r"^[0-9a-f]{64}$")
    stage: int = Field(ge=0, lt=MAX_STAGES)
    epoch: Count
    step: Step
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    manifest: str
    """The run's canonical manifest, so that a checkpoint can be exported by itself."""

    @property
    def mark(self) -> Mark:
        return (self.epoch, self.step)


def write(
    directory: Path,
    run_id: str,
    stage: int,
    mark: Mark,
    image: bytes,
    manifest: str,
    *,
    gave_up: Callable[[int, int], bool] = lambda epoch, step: False,
) -> Path:
    """Write a checkpoint and remove those that are too old; the path of its image.

    ``gave_up`` tells of (epoch, step) whether the run has begun again before it: such a state goes too, since
    nobody may begin from it.

    Raises:
        OSError: the disk is full or not writable; the checkpoints before stay.
    """
    folder = _folder(directory, stage)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.part"):  # by a crash
        left.unlink(missing_ok=True)
    path = _path(folder, mark).with_suffix(".safetensors")
    described = CheckpointManifest(
        run_id=run_id,
        stage=stage,
        epoch=mark[0],
        step=mark[1],
        bytes=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
        manifest=manifest,
    )
    _replace(path, image)
    _replace(path.with_suffix(".json"), described.model_dump_json().encode())
    _sync_directory(folder)
    there = _marks(folder)
    kept = {mark, *[one for one in there if not gave_up(*one)][:KEPT]}
    for old in set(there) - kept:
        _path(folder, old).unlink(missing_ok=True)
        _path(folder, old).with_suffix(".safetensors").unlink(missing_ok=True)
    return path


def _path(folder: Path, mark: Mark) -> Path:
    """The manifest's file."""
    return folder / f"epoch-{mark[0]:03d}-step-{mark[1]:08d}.json"


def _marks(folder: Path) -> list[Mark]:
    """What the names of the manifests say, the newest first."""
    names = map(_NAME.fullmatch, (path.stem for path in folder.glob("epoch-*.json")))
    return sorted(((int(name[1]), int(name[2])) for name in names if name), reverse=True)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def listed(directory: Path, run_id: str, stage: int) -> tuple[tuple[int, int, str], ...]:
    """(epoch, step, SHA-256) of each checkpoint of a stage that seems whole, the newest first; images are not
    read."""
    folder = _folder(directory, stage)
    found = []
    for mark in _marks(folder):
        try:
            described = _described(_path(folder, mark), run_id, stage)
        except CheckpointError:
            continue
        found.append((described.epoch, described.step, described.sha256))
    return tuple(found)


def at(directory: Path, run_id: str, stage: int, mark: Mark) -> tuple[CheckpointManifest, bytes]:
    """The checkpoint of ``mark``. Raises CheckpointError."""
    return read(_path(_folder(directory, stage), mark), run_id, stage)


def newest(directory: Path, run_id: str, stage: int) -> tuple[CheckpointManifest, bytes] | None:
    """The newest checkpoint of a stage whose bytes hash to what its manifest says; None without one."""
    folder = _folder(directory, stage)
    for mark in _marks(folder):
        try:
            return read(_path(folder, mark), run_id, stage)
        except CheckpointError:
            continue
    return None


def read(path: Path, run_id: str | None = None, stage: int | None = None) -> tuple[CheckpointManifest, bytes]:
    """The checkpoint whose manifest is ``path``.

    Raises:
        CheckpointError: unreadable, another run's or stage's, or its bytes do not hash to its digest.
    """
    described = _described(path, run_id, stage)
    image_path = path.with_suffix(".safetensors")
    try:
        image = image_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{image_path}: not readable ({error}); take another checkpoint") from None
    if hashlib.sha256(image).hexdigest() != described.sha256:
        raise CheckpointError(f"{path}: its bytes do not hash to its digest; take another checkpoint")
    return described, image


def _folder(directory: Path, stage: int) -> Path:
    return directory / f"stage-{stage:03d}"


def _described(path: Path, run_id: str | None, stage: int | None) -> CheckpointManifest:
    """What a checkpoint says of itself, and whether its image has the length that it says."""
    try:
        described = CheckpointManifest.model_validate_json(path.read_bytes())
        image_path = path.with_suffix(".safetensors")
        if image_path.stat().st_size != described.bytes:
            raise CheckpointError(f"{image_path}: {described.bytes} bytes expected; take another checkpoint")
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: not readable ({first}); take another checkpoint") from None
    if run_id is not None and described.run_id != run_id:
        raise CheckpointError(
            f"{path}: another run's checkpoint ({described.run_id[:12]}); give its own folder"
        )
    if stage is not None and described.stage != stage:
        raise CheckpointError(f"{path}: stage {described.stage}'s checkpoint, not stage {stage}'s")
    return described
