"""A checkpoint is whole or not there, and nothing foreign or damaged is taken for one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peer import checkpoint

RUN = "ab" * 32


def write(folder: Path, step: int, image: bytes = b"state", epoch: int = 0, **keywords: Any) -> Path:
    return checkpoint.write(folder, RUN, 2, (epoch, step), image, "{}", **keywords)


def marks(folder: Path) -> list[tuple[int, int]]:
    return [(epoch, step) for epoch, step, _ in checkpoint.listed(folder, RUN, 2)]


def test_the_newest_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    for step in range(1, 6):
        write(tmp_path, step, b"state %d" % step)
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert (found[0].step, found[1]) == (5, b"state 5")
    assert len(list(tmp_path.rglob("*.safetensors"))) == checkpoint.KEPT
    assert not list(tmp_path.rglob("*.part"))


def test_a_state_of_a_later_epoch_is_newer_whatever_its_step(tmp_path: Path) -> None:
    for step in (130, 140, 150):
        write(tmp_path, step)
    write(tmp_path, 110, b"again", epoch=1)
    assert marks(tmp_path) == [(1, 110), (0, 150), (0, 140)]
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert (found[0].mark, found[1]) == ((1, 110), b"again")


def test_what_the_new_epoch_gave_up_goes_and_what_it_began_from_stays(tmp_path: Path) -> None:
    for step in (100, 110, 150):
        write(tmp_path, step)
    write(tmp_path, 110, b"again", epoch=1, gave_up=lambda epoch, step: epoch < 1 and step > 100)
    assert marks(tmp_path) == [(1, 110), (0, 100)]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_epochs_and_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for epoch, step in ((2, 99_999_999), (2, 100_000_000), (999, 1), (1000, 1)):
        write(tmp_path, step, epoch=epoch)
    assert marks(tmp_path) == [(1000, 1), (999, 1), (2, 100_000_000)]


@pytest.mark.parametrize("damage", [b"", b"stat", b"stAte", b"state and more"])
def test_a_damaged_image_falls_back_to_the_one_before(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2).write_bytes(damage)
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert found[0].step == 1


def interrupted(number: int, act: Callable[[], None]) -> Iterator[None]:
    """While it lasts, ``act`` comes before the disk's call of that number. Writing makes seven: temporary
    file, sync and rename for the image, the same for its manifest, and the folder's sync."""
    count = 0

    def counted(call: Any) -> Any:
        def instead(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                act()
            return call(*arguments, **keywords)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counted(Path.open))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(os, "fsync", counted(os.fsync))
        yield


@pytest.mark.parametrize("number", range(1, 8))
def test_a_full_disk_costs_this_checkpoint_alone(tmp_path: Path, number: int) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path, 1)
    with contextlib.contextmanager(interrupted)(number, full), pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert found[0].step == (2 if number == 7 else 1)  # the last call syncs the folder: all is there by then
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("number", range(1, 8))
def test_a_crash_at_any_point_of_writing_leaves_a_whole_checkpoint(tmp_path: Path, number: int) -> None:
    write(tmp_path, 1)
    child = os.fork()
    if child == 0:
        try:
            with contextlib.contextmanager(interrupted)(number, lambda: os._exit(9)):
                write(tmp_path, 2)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    found = checkpoint.newest(tmp_path, RUN, 2)
    assert found is not None
    assert found[0].step == (2 if number == 7 else 1)
    assert found[1] == b"state"
    assert marks(tmp_path)[0] == (0, found[0].step)
    write(tmp_path, 3)  # and the next one clears away what the crash left
    assert not list(tmp_path.rglob("*.part"))
    assert marks(tmp_path)[0] == (0, 3)


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
