"""A replica's side of a newcomer's download: its stage's state at exactly one step, in chunks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from peer.context import Context
from peer.worker import TaskKind
from swarm.messages import StateChunk, StateRefused, StateRequest, TensorSpec
from swarm.transport.base import PeerId

CHUNK_BYTES = 1 << 20
MAX_WAITING = 64
"""Requests that wait for a step that this replica has not come to yet."""


@dataclass
class Image:
    """A stage's state at one step, as bytes."""

    step: int
    data: bytes
    digest: str
    lineage: str


class Donor:
    """A member's answers to requests for its stage's state at exactly one step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._image: Image | None = None
        self._making = -1
        self._waiting: list[tuple[PeerId, StateRequest]] = []

    def on_step(self) -> None:
        """The parameters of a new step are in place: take their image if somebody waits for it."""
        waiting, self._waiting = self._waiting, []
        for sender, request in waiting:
            self.on_request(sender, request)

    def on_request(self, sender: PeerId, request: StateRequest) -> None:
        context = self._context
        if request.stage != context.stage:
            self._refuse(sender, request, "another stage is hosted here")
        elif self._image is not None and self._image.step == request.step:
            self._send(sender, request, self._image)
        elif request.step > context.step or self._making == request.step:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append((sender, request))
        elif request.step == context.step and context.running:
            self._waiting.append((sender, request))
            self._make(request.step)
        else:
            self._refuse(sender, request, "the state of that step is not held any more")

    def _make(self, step: int) -> None:
        self._making = step
        lineage = self._context.lineage

        def work() -> Image:
            data = self._context.backend.state_image()
            return Image(step, data, hashlib.sha256(data).hexdigest(), lineage)

        def done(image: Image) -> None:
            self._image, self._making = image, -1
            self.on_step()

        self._context.worker.submit(TaskKind.SYNC, (step,), work, done)

    def _send(self, to: PeerId, request: StateRequest, image: Image) -> None:
        if request.offset >= len(image.data):
            self._refuse(to, request, "the offset lies behind the end")
            return
        data = np.frombuffer(image.data, dtype=np.uint8)[request.offset : request.offset + CHUNK_BYTES]
        chunk = StateChunk(
            stage=request.stage,
            step=request.step,
            offset=request.offset,
            total=len(image.data),
            digest=image.digest,
            lineage=image.lineage,
            tensor=TensorSpec(dtype="uint8", shape=(len(data),)),
        )
        self._context.transport.send(to, chunk, self._context.backend.from_bytes(data))

    def _refuse(self, to: PeerId, request: StateRequest, reason: str) -> None:
        refused = StateRefused(stage=request.stage, step=request.step, reason=reason)
        self._context.transport.send(to, refused)
