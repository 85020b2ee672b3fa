"""A peer's checkpoints: what it could begin from, and writing another without holding up anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peer import checkpoint
from peer.checkpoint import CheckpointError, Mark
from peer.restore import Disk
from swarm.events import EventLog
from swarm.manifest import Manifest
from swarm.records import Genesis

NONE: Mark = (-1, -1)
"""Before every mark."""


class Keeper:
    """The checkpoints of one run in one folder."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, events: EventLog, report: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._events = events
        self._report = report
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.store = checkpoint.write
        """Emulation puts a full disk here."""
        self._listed: dict[int, tuple[tuple[int, int, str], ...]] = {}
        """What stands on the disk, stage by stage: read once, and again when we have written."""
        self._taken: dict[int, Mark] = {}
        """Of the last state of each stage that this life has taken."""
        self._written: dict[int, Mark] = {}
        self.genesis: Genesis | None = None
        """The newest that is known: it says which states were given up."""

    def learn(self, genesis: Genesis) -> None:
        """The run has begun, or begun again, by this."""
        if genesis.supersedes(self.genesis):
            self.genesis = genesis

    def _gave_up(self, epoch: int, step: int) -> bool:
        return self.genesis is not None and self.genesis.gave_up(epoch, step)

    def newest_stage(self) -> int | None:
        """The stage of the newest checkpoint; None without any."""
        found = [
            (listed[0][:2], stage)
            for stage in range(len(self._manifest.stages))
            if (listed := self.listed(stage))
        ]
        return max(found)[1] if found else None

    def listed(self, stage: int) -> tuple[tuple[int, int, str], ...]:
        """(epoch, step, SHA-256) of each checkpoint of ``stage`` that counts, the newest first."""
        if stage not in self._listed:
            self._listed[stage] = checkpoint.listed(self._folder, self._manifest.run_id, stage)
        found = self._listed[stage]
        return tuple(one for one in found if not self._gave_up(*one[:2]))[: checkpoint.KEPT]

    def read(self, stage: int, step: int) -> tuple[str, bytes]:
        """(SHA-256, image) of ``step`` in the history that counts. Raises CheckpointError."""
        mark = next((one[:2] for one in self.listed(stage) if one[1] == step), None)
        if mark is None:
            raise CheckpointError(f"{self._folder}: no usable checkpoint of step {step} any more")
        described, image = checkpoint.at(self._folder, self._manifest.run_id, stage, mark)
        return described.sha256, image

    def disk(self, stage: int) -> Disk:
        """The newest checkpoint of ``stage``, for a stage that nobody else holds any more."""

        def read() -> bytes:
            for _, step, _ in self.listed(stage):
                with contextlib.suppress(CheckpointError):
                    return self.read(stage, step)[1]
            raise CheckpointError(f"{self._folder}: no usable checkpoint of stage {stage} any more")

        return Disk(lambda: next((step for _, step, _ in self.listed(stage)), None), read)

    def newest(self, stage: int) -> Mark:
        """Of the checkpoints of ``stage`` that this life has written; a later epoch's is the newer."""
        return self._written.get(stage, NONE)

    def due(self, stage: int, mark: Mark) -> bool:
        """Is a state of ``mark`` yet to be taken? Asked once for each: a life may come in anew, in a later
        epoch, at a step before those that it has kept."""
        if mark <= self._taken.get(stage, NONE):
            return False
        self._taken[stage] = mark
        return True

    def write(self, stage: int, mark: Mark, image: bytes) -> None:
        """Keep a state, in a thread of its own. A full disk costs this checkpoint and nothing else."""
        task = asyncio.get_running_loop().create_task(self._write(stage, mark, image))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, stage: int, mark: Mark, image: bytes) -> None:
        manifest = self._manifest
        described = manifest.canonical.decode("ascii")
        write = partial(
            self.store,
            self._folder,
            manifest.run_id,
            stage,
            mark,
            image,
            described,
            gave_up=self._gave_up,
        )
        epoch, step = mark
        async with self._writing:
            try:
                path = await asyncio.get_running_loop().run_in_executor(None, write)
            except OSError as error:
                self._events.emit("checkpoint_failed", step=step, reason=str(error.strerror))
                self._report(f"checkpoint not written: {error.strerror}; free space in {self._folder}")
                return
            finally:
                self._listed.pop(stage, None)
        self._written[stage] = max(self.newest(stage), mark)
        self._events.emit("checkpoint", epoch=epoch, step=step, path=str(path))
