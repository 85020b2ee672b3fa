"""The run manifest: what one training job is. Its hash is the run's name.

TOML in, strict frozen pydantic model, canonical bytes, ``run_id``, the researcher's signature.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of the manifest's tables: strict, frozen, nothing unknown."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


Positive = Annotated[int, Field(ge=1, le=2**31)]


class ModelSection(Section):
    """A LLaMA-style transformer."""

    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive
    ffn_width: Positive
    context: Positive
    vocabulary: Positive = 256
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    init_std: Annotated[float, Field(gt=0, lt=1)] = 0.02
    dtype: Literal["float32", "bfloat16"] = "float32"


class OptimizerSection(Section):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and cosine decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=10)]
    min_learning_rate: Annotated[float, Field(ge=0, le=10)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    total_steps: Positive
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class SyncSection(Section):
    """How replicas of a stage keep in step."""

    start_replicas: Positive = 1
    """Replicas that each stage needs before the first step."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints; 0 for none but the last."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """Activations and gradients on the wire between stages."""


class DataSection(Section):
    """The text, and how often the loss on its held-out part is taken."""

    corpus: str
    tokenizer: Literal["bytes"] = "bytes"
    validation_every: Annotated[int, Field(ge=0)] = 20
    validation_microbatches: Positive = 4


class LimitsSection(Section):
    """What a peer must be ready for, and what it may refuse."""

    max_frame_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 1 << 28
    max_memory_bytes: Annotated[int, Field(ge=1 << 24)] = 1 << 34
    memory_slots: Positive = 8
    """Microbatches that a peer holds between their forward and their backward."""


class Manifest(Section):
    """One run."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSection
    stages: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1024)]
    """Layers of each stage, first to last; their sum is ``model.layers``."""
    path_length: Positive
    """Stages that a microbatch visits, stage 0 included."""
    microbatches_per_origin: Positive
    microbatch_size: Positive
    optimizer: OptimizerSection
    sync: SyncSection = SyncSection()
    data: DataSection
    limits: LimitsSection = LimitsSection()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    researcher: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The researcher's Ed25519 public key, in hex."""
