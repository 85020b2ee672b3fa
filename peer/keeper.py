"""A peer's checkpoints: what it could begin from, and writing another without holding up anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peer import checkpoint
from peer.restore import Disk
from swarm.events import EventLog
from swarm.manifest import Manifest


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
        self.step = -1
        """Of the last one that this life has written."""

    def newest_stage(self) -> int | None:
        """The stage of the newest checkpoint; None without any."""
        found = [
            (listed[0][0], stage)
            for stage in range(len(self._manifest.stages))
            if (listed := self.listed(stage))
        ]
        return max(found)[1] if found else None

    def listed(self, stage: int) -> tuple[tuple[int, str], ...]:
        """(step, SHA-256) of each checkpoint of ``stage``, the newest first."""
        return checkpoint.listed(self._folder, self._manifest.run_id, stage)

    def read(self, stage: int, step: int) -> tuple[str, bytes]:
        """(SHA-256, image). Raises CheckpointError."""
        described, image = checkpoint.at_step(self._folder, self._manifest.run_id, stage, step)
        return described.sha256, image

    def disk(self, stage: int) -> Disk:
        """The newest checkpoint of ``stage``, for a stage that nobody else holds any more."""
        folder, run_id = self._folder, self._manifest.run_id

        def read() -> bytes:
            found = checkpoint.newest(folder, run_id, stage)
            if found is None:
                raise checkpoint.CheckpointError(f"{folder}: no usable checkpoint of stage {stage} any more")
            return found[1]

        return Disk(lambda: next((step for step, _ in self.listed(stage)), None), read)

    def write(self, stage: int, step: int, image: bytes) -> None:
        """Keep a state, in a thread of its own. A full disk costs this checkpoint and nothing else."""
        task = asyncio.get_running_loop().create_task(self._write(stage, step, image))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, stage: int, step: int, image: bytes) -> None:
        manifest = self._manifest
        described = manifest.canonical.decode("ascii")
        write = partial(self.store, self._folder, manifest.run_id, stage, step, image, described)
        async with self._writing:
            try:
                path = await asyncio.get_running_loop().run_in_executor(None, write)
            except OSError as error:
                self._events.emit("checkpoint_failed", step=step, reason=str(error.strerror))
                self._report(f"checkpoint not written: {error.strerror}; free space in {self._folder}")
                return
        self.step = step
        self._events.emit("checkpoint", step=step, path=str(path))
