"""A replica's side of a newcomer's download: its stage's state at exactly one step, an index and chunks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from peer.context import Context
from peer.worker import TaskKind
from swarm.messages import StateChunk, StateIndex, StateRefused, StateRequest, TensorSpec
from swarm.transport.base import PeerId

CHUNK_BYTES = 1 << 20
MAX_WAITING = 64
"""Requests that wait for a step that this replica has not come to yet."""
MAX_IMAGES = 2
"""States of different steps that are held for downloads."""
IMAGE_IDLE_S = 30.0
"""A state that nobody asked for in this time is held no longer."""


@dataclass
class Image:
    """A stage's state at one step, as bytes."""

    data: bytes
    index: StateIndex
    used_s: float = field(default=0.0, compare=False)


class Donor:
    """A member's answers to requests for its stage's state at exactly one step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._images: dict[int, Image] = {}
        self._making: set[int] = set()
        self._waiting: list[tuple[PeerId, StateRequest]] = []
        self.gradient_norm = 0.0
        """Of the last average, before it was clipped."""

    def on_step(self) -> None:
        """The parameters of a new step are in place: take their image if somebody waits for it."""
        waiting, self._waiting = self._waiting, []
        for sender, request in waiting:
            self.on_request(sender, request)

    def forget(self) -> None:
        """This peer hosts another stage now."""
        self._images.clear()
        self._making.clear()
        self._waiting.clear()

    def on_request(self, sender: PeerId, request: StateRequest) -> None:
        context = self._context
        image = self._images.get(request.step)
        if request.stage != context.stage:
            self._refuse(sender, request, "another stage is hosted here")
        elif image is not None:
            self._send(sender, request, image)
        elif request.step > context.step or request.step in self._making:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append((sender, request))
        elif request.step == context.step and context.running:
            self._waiting.append((sender, request))
            self._make(request.step)
        else:
            self._refuse(sender, request, "the state of that step is not held any more")

    def _make(self, step: int) -> None:
        self._making.add(step)
        stage, lineage, norm = self._context.stage, self._context.lineage, self.gradient_norm

        def work() -> Image:
            data = self._context.backend.state_image()
            view = memoryview(data)
            starts = range(0, len(data), CHUNK_BYTES)
            index = StateIndex(
                stage=stage,
                step=step,
                total=len(data),
                chunk_bytes=CHUNK_BYTES,
                digests=tuple(hashlib.sha256(view[start : start + CHUNK_BYTES]).digest() for start in starts),
                lineage=lineage,
                gradient_norm=norm,
            )
            return Image(data, index)

        def done(image: Image) -> None:
            self._making.discard(step)
            if stage != self._context.stage:
                return
            while len(self._images) >= MAX_IMAGES:
                del self._images[min(self._images, key=lambda held: self._images[held].used_s)]
            self._images[step] = image
            image.used_s = self._context.clock.now()
            self._context.clock.call_later(IMAGE_IDLE_S, self._drop_idle, step)
            self.on_step()

        self._context.worker.submit(TaskKind.SYNC, (step,), work, done)

    def _drop_idle(self, step: int) -> None:
        image = self._images.get(step)
        if image is None:
            return
        left_s = image.used_s + IMAGE_IDLE_S - self._context.clock.now()
        if left_s <= 0:
            del self._images[step]
        else:
            self._context.clock.call_later(left_s, self._drop_idle, step)

    def _send(self, to: PeerId, request: StateRequest, image: Image) -> None:
        context, index, number = self._context, image.index, request.chunk
        image.used_s = context.clock.now()
        if number is None:
            context.transport.send(to, index)
            return
        if number >= len(index.digests):
            self._refuse(to, request, "there is no such chunk")
            return
        start = number * index.chunk_bytes
        length = min(index.chunk_bytes, index.total - start)
        data = np.frombuffer(image.data, dtype=np.uint8, count=length, offset=start)
        chunk = StateChunk(
            stage=request.stage,
            step=request.step,
            chunk=number,
            tensor=TensorSpec(dtype="uint8", shape=(length,)),
        )
        context.transport.send(to, chunk, context.backend.from_bytes(data))

    def _refuse(self, to: PeerId, request: StateRequest, reason: str) -> None:
        refused = StateRefused(stage=request.stage, step=request.step, reason=reason)
        self._context.transport.send(to, refused)
