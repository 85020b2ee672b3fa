"""A checkpoint is whole or not there, and nothing foreign or damaged is taken for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peer import checkpoint

RUN = "ab" * 32


def write(folder: Path, step: int, image: bytes = b"state") -> Path:
    return checkpoint.write(folder, RUN, 2, step, image, "{}")


def test_the_newest_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step, b"state %d" % step)
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert (found[0].step, found[1]) == (5, b"state 5")
    assert len(list(tmp_path.rglob("*.safetensors"))) == checkpoint.KEPT
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("damage", [b"", b"stat", b"stAte", b"state and more"])
def test_a_damaged_image_falls_back_to_the_one_before(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2).write_bytes(damage)
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert found[0].step == 1


@pytest.mark.parametrize("crash", [1, 2])
def test_a_crash_while_writing_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    write(tmp_path, 1)
    renames = 0
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == crash:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    monkeypatch.undo()
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert found[0].step == 1
    assert not list(tmp_path.rglob(f"*.{os.getpid()}.part"))


def test_another_runs_or_stages_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1).with_suffix(".json")
    assert checkpoint.read(path, RUN, 2)[1] == b"state"
    with pytest.raises(checkpoint.CheckpointError, match="another run"):
        checkpoint.read(path, "cd" * 32, 2)
    with pytest.raises(checkpoint.CheckpointError, match="not stage 1"):
        checkpoint.read(path, RUN, 1)
    path.write_text("{}")
    with pytest.raises(checkpoint.CheckpointError, match="not readable"):
        checkpoint.read(path)
