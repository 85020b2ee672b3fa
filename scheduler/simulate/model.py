"""What a stage costs: FLOPs, bytes on the wire and bytes of memory, from the model's sizes."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from scheduler.instance import Frozen

Positive = Annotated[int, Field(ge=1, le=2**31)]
STATE_BYTES = 16
"""A parameter's float32 weight, gradient and AdamW's two moments."""
_BYTES = {"float32": 4, "bfloat16": 2}


class Work(NamedTuple):
    """FLOPs of one microbatch in one stage."""

    forward: float
    backward: float
    """The input gradient."""
    weight: float
    loss: float
    """Head, and both gradients of it."""


class ModelSizes(Frozen):
    """A LLaMA-style transformer in stages, and how a step uses it: a manifest's figures."""

    stages: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1024)]
    """Layers of each."""
    path_length: Positive
    microbatches_per_origin: Positive
    microbatch_size: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive
    ffn_width: Positive
    context: Positive
    vocabulary: Positive
    dtype: Literal["float32", "bfloat16"]
    wire_dtype: Literal["float32", "bfloat16"]
    memory_slots: Positive
    start_replicas: Positive = 1
    """Of each stage, before the run begins."""
    coverage_tolerance: Annotated[float, Field(ge=0, le=1)]

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.microbatch_size * self.context

    @property
    def activation_bytes(self) -> int:
        return self.tokens * self.width * _BYTES[self.wire_dtype]

    @property
    def _layer_matrices(self) -> int:
        """Parameters of a layer that are in matrices."""
        attention = 2 * self.width * self.width * (self.heads + self.kv_heads) // self.heads
        return attention + 3 * self.width * self.ffn_width

    def parameters(self, stage: int) -> int:
        """Of one stage; stage 0 also has the embedding, the final norm and the head."""
        ends = 2 * self.vocabulary * self.width + self.width if stage == 0 else 0
        return self.stages[stage] * (self._layer_matrices + 2 * self.width) + ends

    def gradient_bytes(self, stage: int) -> int:
        """What its replicas average, in float32."""
        return 4 * self.parameters(stage)

    def work(self, stage: int | None = None) -> Work:
        """Of a microbatch in ``stage``; of a mean stage if None.

        A matrix takes 2 FLOPs for each parameter and token in the forward, as many for its input gradient
        and for its weight gradient; causal attention 2 x context x width a token in the forward (half of the
        square), twice that in the backward.
        """
        layers = sum(self.stages) / len(self.stages) if stage is None else self.stages[stage]
        matrices = 2.0 * self.tokens * layers * self._layer_matrices
        attention = 2.0 * self.tokens * layers * self.context * self.width
        head = 2.0 * self.tokens * self.vocabulary * self.width
        return Work(matrices + attention, matrices + 2 * attention, matrices, 3 * head)

    def slots_in(self, memory_bytes: float, stage: int) -> int:
        """Microbatches that a peer of ``stage`` can hold between their forward and their weight gradients.

        A tenth of the memory is left to the system. A layer keeps about 10 x width + 5 x ffn_width numbers a
        token: inputs of its matrices, and their output gradients until the commit.
        """
        numbers = self.tokens * self.stages[stage] * (10 * self.width + 5 * self.ffn_width)
        room = 0.9 * memory_bytes - STATE_BYTES * self.parameters(stage)
        return max(0, int(room // (numbers * _BYTES[self.dtype])))
