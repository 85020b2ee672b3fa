"""Arithmetic whose gradients are exact integers: what was counted, and how often, can be read off the sum."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from swarm.messages import TensorSpec

WIDTH = 64
"""Numbers in a gradient: number ``index`` of the sum counts the microbatch ``index``."""
SPEC = TensorSpec(dtype="int64", shape=(4,))


@dataclass(frozen=True)
class FakeDeferred:
    step: int
    index: int
    amount: int = 1


def bounds(part: int, parts: int) -> slice:
    """Where a part of a gradient lies."""
    return slice(WIDTH * part // parts, WIDTH * (part + 1) // parts)


@lru_cache(maxsize=4096)
def part_spec(part: int, parts: int) -> TensorSpec:
    span = bounds(part, parts)
    return TensorSpec(dtype="int64", shape=(span.stop - span.start,))


class FakeBackend:
    """One stage. An activation is ``[step, index, checksum of the stages visited, 0]``."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.step = 0
        self.sum = np.zeros(WIDTH, dtype=np.int64)
        self.average = np.zeros(WIDTH, dtype=np.int64)
        self.parameters = np.zeros(WIDTH, dtype=np.int64)
        self.history: list[tuple[int, np.ndarray]] = []
        """Every average that was applied, with its step."""
        self.forwards: Counter[tuple[int, int]] = Counter()
        """How often each (step, index) was computed forward."""

    def _mix(self, checksum: int) -> int:
        return (checksum * 31 + self.stage + 1) % (1 << 61)

    def forward(self, inputs: Any) -> tuple[Any, Any]:
        self.forwards[int(inputs[0]), int(inputs[1])] += 1
        return self.infer(inputs), inputs

    def infer(self, inputs: Any) -> Any:
        step, index, checksum, _ = (int(v) for v in inputs)
        return np.array([step, index, self._mix(checksum), 0], dtype=np.int64)

    def backward(self, saved: Any, gradient: Any) -> tuple[Any, Any]:
        assert (saved[:2] == gradient[:2]).all(), "a gradient of another microbatch"
        return gradient, FakeDeferred(int(saved[0]), int(saved[1]))

    def loss(self, output: Any, labels: Any) -> tuple[float, int, Any, Any]:
        assert (output[:2] == labels[:2]).all(), "an output of another microbatch"
        return 1.0, 1, output, FakeDeferred(int(output[0]), int(output[1]), 0)

    def infer_loss(self, output: Any, labels: Any) -> tuple[float, int]:
        return 1.0, 1

    def accumulate(self, deferred: FakeDeferred) -> None:
        assert deferred.step == self.step, f"step {deferred.step} counted in step {self.step}"
        self.sum[deferred.index] += deferred.amount

    def discard_gradient(self) -> None:
        self.sum = np.zeros(WIDTH, dtype=np.int64)

    def gradient_part(self, part: int, parts: int) -> Any:
        return self.sum[bounds(part, parts)].copy()

    def part_spec(self, part: int, parts: int) -> TensorSpec:
        return part_spec(part, parts)

    def combine(self, contributions: list[Any], tokens: int) -> Any:
        if not all(self.usable(values) for values in contributions):
            raise ValueError("a negative count")
        return np.sum(contributions, axis=0)

    @staticmethod
    def usable(values: Any) -> bool:
        return bool((values >= 0).all())

    def set_average(self, part: int, parts: int, values: Any) -> None:
        self.average[bounds(part, parts)] = values

    def average_part(self, part: int, parts: int) -> Any:
        return self.average[bounds(part, parts)].copy()

    def average_digest(self) -> str:
        return hashlib.sha256(self.average.tobytes()).hexdigest()

    def update(self) -> tuple[str, dict[str, float]]:
        self.history.append((self.step, self.average.copy()))
        self.parameters = self.parameters * 3 + self.average
        self.step += 1
        self.discard_gradient()
        return self.digest(), {}

    def digest(self) -> str:
        return hashlib.sha256(self.parameters.tobytes()).hexdigest()

    def image_bytes(self, stage: int | None = None) -> int:
        return 8 * (WIDTH + 1)

    def state_image(self) -> bytes:
        return np.concatenate([[self.step], self.parameters]).astype(np.int64).tobytes()

    def load_image(self, image: bytes) -> str:
        values = np.frombuffer(image, dtype=np.int64)
        if len(values) != WIDTH + 1:
            raise ValueError("not an image of this stage")
        self.step, self.parameters = int(values[0]), values[1:].copy()
        self.discard_gradient()
        return self.digest()

    def rebuild(self, neighbours: list[tuple[int, bytes, float]]) -> None:
        """The neighbours' sum, so that a test knows it again."""
        states = [np.frombuffer(image, dtype=np.int64) for _, image, _ in neighbours]
        self.parameters = np.sum([values[1:] for values in states], axis=0)

    def skip_to(self, step: int) -> str:
        self.step = step
        self.discard_gradient()
        return self.digest()

    @staticmethod
    def from_bytes(data: Any) -> Any:
        return np.frombuffer(bytes(data), dtype=np.uint8)

    @staticmethod
    def to_bytes(chunk: Any) -> Any:
        return chunk.tobytes()


class FakeBatches:
    def train(self, step: int, index: int) -> tuple[Any, Any]:
        sample = np.array([step, index, 0, 0], dtype=np.int64)
        return sample, sample

    def validation(self, index: int) -> tuple[Any, Any]:
        sample = np.array([0, index, 0, 0], dtype=np.int64)
        return sample, sample
