"""Small runs for the tests of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.manifest import Manifest
from swarm.model.stage import StageRuntime


def small_manifest(stages: tuple[int, ...] = (1, 2, 1), **changes: Any) -> Manifest:
    """A run whose stages compute in a millisecond. ``changes`` go to the model, or whole tables by name."""
    model: dict[str, Any] = {
        "layers": sum(stages),
        "width": 48,
        "heads": 6,
        "kv_heads": 2,
        "ffn_width": 80,
        "context": 24,
    }
    table: dict[str, Any] = {
        "name": "small",
        "path_length": len(stages),
        "microbatches_per_origin": 2,
        "microbatch_size": 3,
        "optimizer": {
            "learning_rate": 3e-3,
            "min_learning_rate": 3e-4,
            "warmup_steps": 2,
            "total_steps": 8,
        },
        "data": {"corpus": "kjv"},
        "seed": 7,
        "researcher": "0" * 64,
    }
    for key, value in changes.items():
        (model if key in model or key in ("rope_theta", "norm_eps", "dtype") else table)[key] = value
    return Manifest.from_table(table | {"model": model, "stages": list(stages)})


def some_tokens(manifest: Manifest, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, int64 ``[B, T]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (manifest.microbatch_size, manifest.model.context)
    tokens = torch.randint(manifest.model.vocabulary, shape, generator=generator)
    return tokens, torch.randint(manifest.model.vocabulary, shape, generator=generator)


def some_activation(manifest: Manifest, seed: int = 0) -> Tensor:
    """Random floats ``[B, T, D]``."""
    shape = (manifest.microbatch_size, manifest.model.context, manifest.model.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def average_alone(runtime: StageRuntime, tokens: int) -> None:
    """The averaging of a stage with one replica."""
    runtime.set_average(0, 1, runtime.combine([runtime.gradient_part(0, 1)], tokens))


def bits(tensor: Tensor) -> bytes:
    """The memory of a tensor, so that -0.0 is not 0.0."""
    return tensor.detach().contiguous().numpy().tobytes()
