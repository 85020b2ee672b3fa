"""A stage that has lost its last replica begins again: from a checkpoint, else from its neighbours' weights.

The first newcomer that is admitted to such a stage founds it; the next ones download from the founder.
Without a checkpoint its layers become the mean of those of the stages before and after it, weighted by their
squared gradient norms: CheckFree (Blagoev, Chen, Ersoy, "All is Not Lost: LLM Recovery without Checkpoints",
arXiv 2506.15461, algorithm 1). Stage 0 also holds the embedding and the head, which are nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from peer.context import Context
from peer.download import Download
from peer.worker import TaskKind
from swarm.messages import StateIndex
from swarm.transport.base import PeerId


class Disk(NamedTuple):
    """The newest checkpoint of our stage from an earlier life."""

    step: Callable[[], int | None]
    read: Callable[[], bytes]
    """Its image, read on the compute thread. Raises ValueError."""


NO_DISK = Disk(lambda: None, lambda: b"")


@dataclass(frozen=True)
class Recalled:
    """What this peer still has of its stage's state."""

    disk: Disk = NO_DISK
    memory: int | None = None
    """The step that the backend's parameters are of, if this life was a member before."""

    @property
    def step(self) -> int | None:
        return self.memory if self.memory is not None else self.disk.step()


class Restoration:
    """Makes the backend hold a state of our stage at ``step``; ``on_done`` or ``on_failed`` ends it."""

    def __init__(
        self,
        context: Context,
        step: int,
        recalled: Recalled,
        *,
        on_done: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._context = context
        self._step = step
        self._recalled = recalled
        self._on_done = on_done
        self._on_failed = on_failed
        self.downloads: list[Download] = []
        self._images: dict[int, tuple[StateIndex, bytes]] = {}

    def begin(self) -> None:
        """From what this peer has itself if that is anything, else from the neighbours."""
        if self._recalled.step is not None:
            self._from_own()
        else:
            self._from_neighbours()

    def close(self) -> None:
        for download in self.downloads:
            download.close()

    def on_lost(self, peer: PeerId) -> None:
        for download in list(self.downloads):
            download.on_lost(peer)

    # -- from its own --------------------------------------------------------------------------------------

    def _from_own(self) -> None:
        backend, step, recalled = self._context.backend, self._step, self._recalled

        def work() -> str:
            if recalled.memory is None:
                backend.load_image(recalled.disk.read())
            return backend.skip_to(step)

        def spoiled(error: Exception) -> None:
            self._context.say(str(error))
            self._from_neighbours()

        source = "checkpoint" if recalled.memory is None else "memory"
        self._submit(work, {"source": source, "of_step": recalled.step}, spoiled)

    # -- from the neighbours -------------------------------------------------------------------------------

    def _from_neighbours(self) -> None:
        context = self._context
        beside = {
            stage: context.living(stage)
            for stage in (context.stage - 1, context.stage + 1)
            if 0 <= stage < context.rules.stages
        }
        beside = {stage: peers for stage, peers in beside.items() if peers}
        if context.stage == 0 or not beside:
            self._on_failed(
                "stage 0 needs a checkpoint: its embedding and head are nowhere else"
                if context.stage == 0
                else "neither neighbour stage has a replica"
            )
            return
        for stage in beside:
            download = Download(
                context,
                stage,
                self._step,
                largest=context.backend.image_bytes(stage),
                on_image=partial(self._came, len(beside)),
                on_failed=self._on_failed,
            )
            self.downloads.append(download)
        for download, peers in zip(list(self.downloads), beside.values(), strict=True):
            download.begin(peers)

    def _came(self, wanted: int, index: StateIndex, image: bytes) -> None:
        self._images[index.stage] = (index, image)
        if len(self._images) < wanted:
            return
        neighbours = [
            (stage, image, index.gradient_norm) for stage, (index, image) in sorted(self._images.items())
        ]
        backend, step = self._context.backend, self._step

        def work() -> str:
            backend.rebuild(neighbours)
            return backend.skip_to(step)

        def refused(error: Exception) -> None:
            self._on_failed(str(error))

        self._submit(work, {"source": "neighbours", "of_step": step}, refused)

    def _submit(
        self, work: Callable[[], str], fields: dict[str, Any], refused: Callable[[Exception], None]
    ) -> None:
        context = self._context

        def done(digest: str) -> None:
            context.events.emit(
                "stage_restored", stage=context.stage, step=self._step, digest=digest, **fields
            )
            context.say(
                f"stage {context.stage} had no replica left; it goes on at step {self._step} from "
                f"{fields['source']} of step {fields['of_step']}"
            )
            self._on_done(digest)

        context.worker.submit(TaskKind.SYNC, (self._step,), work, done, refused)
