"""A stage's state from several replicas at once, in chunks whose hashes most of them agree on.

Every donor is asked for the index; the one that most of them send names the chunks. Each donor that sent it
serves chunks, a few at a time, so that the faster serves more; what a lost or silent one was asked for goes
to the others. The download stays pinned to its step as long as any donor holds it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from peer.context import Context
from swarm.clock import Timer
from swarm.messages import MAX_CHUNK_BYTES, StateChunk, StateIndex, StateRequest, TensorSpec
from swarm.transport.base import PeerId

WINDOW = 4
"""Chunks that one donor is asked for before the first of them has come."""
MAX_DONORS = 8
INDEX_S = 2.0
"""The indices that have come by then are compared; a single one is enough."""
STALL_S = 10.0
"""A donor that is asked for chunks and sends none for so long is left out."""
TICK_S = 1.0


def plain_chunk(spec: TensorSpec) -> str | None:
    """May a chunk be read that is not expected (any more)? It is small, whoever sent it."""
    small = spec.dtype == "uint8" and len(spec.shape) == 1 and spec.shape[0] <= MAX_CHUNK_BYTES
    return None if small else "a chunk of the wrong size"


@dataclass
class Source:
    """A donor, and what it was asked for."""

    index: StateIndex | None = None
    asked: set[int] = field(default_factory=set)
    heard_s: float = 0.0
    chunks: int = 0


class Download:
    """The state of ``stage`` at ``step``; ends in ``on_image(index, image)`` or ``on_failed(reason)``."""

    def __init__(
        self,
        context: Context,
        stage: int,
        step: int,
        *,
        largest: int,
        on_image: Callable[[StateIndex, bytes], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.stage = stage
        self.step = step
        self._context = context
        self._largest = largest
        self._on_image = on_image
        self._on_failed = on_failed
        self._sources: dict[PeerId, Source] = {}
        self._left_out: set[PeerId] = set()
        self._index: StateIndex | None = None
        self._data = bytearray()
        self._pending: deque[int] = deque()
        self._missing: set[int] = set()
        self._began_s = context.clock.now()
        self._ended = False
        self._timer: Timer = context.clock.call_later(TICK_S, self._tick)

    def begin(self, donors: Iterable[PeerId]) -> None:
        """Ask these; may be called again as more become known."""
        for peer in sorted(donors):
            if peer in self._sources or peer in self._left_out or len(self._sources) >= MAX_DONORS:
                continue
            self._sources[peer] = Source(heard_s=self._context.clock.now())
            self._context.transport.send(peer, StateRequest(stage=self.stage, step=self.step))
        self._fail_if_alone("no replica holds the state")

    def close(self) -> None:
        self._ended = True
        self._timer.cancel()

    @property
    def sources(self) -> dict[PeerId, int]:
        """Donor -> chunks that it has sent."""
        return {peer: source.chunks for peer, source in self._sources.items()}

    # -- the index -----------------------------------------------------------------------------------------

    def on_index(self, sender: PeerId, message: StateIndex) -> None:
        source = self._sources.get(sender)
        if source is None or source.index is not None or self._ended:
            return
        if message.total > self._largest:
            self._context.strike(sender, f"a state of {message.total} bytes, at most {self._largest} fit")
            self._leave_out(sender, "no honest replica")
            return
        source.index, source.heard_s = message, self._context.clock.now()
        if self._index is None:
            self._choose()
        elif message == self._index:
            self._ask(sender)

    def _choose(self) -> None:
        """Take the index that most have sent, once all have answered or time is up."""
        indices = [source.index for source in self._sources.values() if source.index is not None]
        late = self._context.clock.now() - self._began_s >= INDEX_S
        if self._index is not None or not indices or (len(indices) < len(self._sources) and not late):
            return
        # gradient_norm says nothing of the bytes, but replicas agree on it too.
        votes = Counter(indices)
        self._index = index = min(votes, key=lambda one: (-votes[one], one.digests))
        self._data = bytearray(index.total)
        self._pending = deque(range(len(index.digests)))
        self._missing = set(self._pending)
        for peer in list(self._sources):
            self._ask(peer)

    # -- chunks --------------------------------------------------------------------------------------------

    def admit(self, message: StateChunk, spec: TensorSpec) -> str | None:
        """Only a chunk of the size that the index gives is read."""
        index = self._index
        if index is None or message.chunk >= len(index.digests):
            return plain_chunk(spec)  # it was meant for an earlier download, and is passed over
        if spec.dtype != "uint8" or spec.shape != (self._length(index, message.chunk),):
            return "a chunk of the wrong size"
        return None

    @staticmethod
    def _length(index: StateIndex, chunk: int) -> int:
        return min(index.chunk_bytes, index.total - chunk * index.chunk_bytes)

    def _ask(self, peer: PeerId) -> None:
        source = self._sources[peer]
        if source.index != self._index or self._ended:
            return
        while len(source.asked) < WINDOW and (chunk := self._next_for(source)) is not None:
            if not source.asked:
                source.heard_s = self._context.clock.now()
            source.asked.add(chunk)
            self._context.transport.send(peer, StateRequest(stage=self.stage, step=self.step, chunk=chunk))

    def _next_for(self, source: Source) -> int | None:
        """The next chunk that nobody was asked for; in the end one of the slowest donor's, asked twice."""
        if self._pending:
            return self._pending.popleft()
        if source.asked:
            return None
        slowest = max(self._sources.values(), key=lambda other: len(other.asked))
        return max(slowest.asked - source.asked, default=None)

    def on_chunk(self, sender: PeerId, message: StateChunk, tensor: Any) -> None:
        source, index = self._sources.get(sender), self._index
        if self._ended or source is None or index is None or message.chunk not in source.asked:
            return
        source.asked.discard(message.chunk)
        source.heard_s = self._context.clock.now()
        values = self._context.backend.to_bytes(tensor)
        if hashlib.sha256(values).digest() != index.digests[message.chunk]:
            self._context.strike(sender, "a chunk that does not hash to its digest")
            self._pending.appendleft(message.chunk)
            self._leave_out(sender, "a spoiled state")
            return
        source.chunks += 1
        if message.chunk in self._missing:
            start = message.chunk * index.chunk_bytes
            self._data[start : start + len(values)] = values
            self._missing.discard(message.chunk)
        if self._missing:
            self._ask(sender)
        else:
            self.close()
            self._on_image(index, bytes(self._data))

    # -- losses --------------------------------------------------------------------------------------------

    def on_refused(self, sender: PeerId) -> None:
        """It does not hold the state of that step (any more)."""
        self._leave_out(sender, "the state of that step is not held any more")

    def on_lost(self, peer: PeerId) -> None:
        self._leave_out(peer, "every replica that held the state was lost")
        self._left_out.discard(peer)  # it may be asked again when it is back

    def _leave_out(self, peer: PeerId, reason: str) -> None:
        source = self._sources.pop(peer, None)
        if source is None or self._ended:
            return
        self._left_out.add(peer)
        elsewhere: set[int] = set().union(*(other.asked for other in self._sources.values()))
        self._pending.extendleft(sorted((source.asked - elsewhere) & self._missing, reverse=True))
        if self._fail_if_alone(reason):
            return
        self._choose()
        for other in list(self._sources):
            self._ask(other)

    def _fail_if_alone(self, reason: str) -> bool:
        if self._sources or self._ended:
            return self._ended
        self.close()
        self._on_failed(reason)
        return True

    def _tick(self) -> None:
        if self._ended:
            return
        self._timer = self._context.clock.call_later(TICK_S, self._tick)
        self._choose()
        now = self._context.clock.now()
        for peer, source in list(self._sources.items()):
            waits = source.index is None or bool(source.asked)
            if waits and now - source.heard_s > STALL_S:
                self._leave_out(peer, "no replica sends the state")
