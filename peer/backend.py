"""One stage computed with torch, behind the protocol's ``Backend``: wire tensors in, wire tensors out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swarm.data.sampler import Sampler
from swarm.manifest import Manifest
from swarm.messages import TensorSpec
from swarm.model.finite import is_finite
from swarm.model.rebuild import max_image_bytes, mean_of_neighbours
from swarm.model.stage import StageRuntime

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def warm_up() -> None:
    """Take the first gradient of this process: torch imports sympy then (half a second, 30 MB)."""
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones(1))


class StageBackend:
    """``Backend`` over a ``StageRuntime``: activations ``[B, T, width]`` on the CPU in the wire dtype."""

    def __init__(self, runtime: StageRuntime) -> None:
        self.runtime = runtime
        self._wire = WIRE_DTYPES[runtime.manifest.sync.wire_dtype]

    def _out(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self._wire).contiguous()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Any]:
        output, saved = self.runtime.forward(inputs)
        return self._out(output), saved

    def infer(self, inputs: Tensor) -> Tensor:
        return self._out(self.runtime.infer(inputs))

    def backward(self, saved: Any, gradient: Tensor) -> tuple[Tensor | None, Any]:
        returned, deferred = self.runtime.backward(saved, gradient)
        return (None if returned is None else self._out(returned)), deferred

    def loss(self, output: Tensor, labels: Tensor) -> tuple[float, int, Tensor, Any]:
        result = self.runtime.loss(output, labels)
        return result.loss_sum, result.tokens, self._out(result.grad), result.deferred

    def infer_loss(self, output: Tensor, labels: Tensor) -> tuple[float, int]:
        return self.runtime.infer_loss(output, labels)

    def accumulate(self, deferred: Any) -> None:
        self.runtime.accumulate(deferred)

    def discard_gradient(self) -> None:
        self.runtime.discard_gradient()

    def gradient_part(self, part: int, parts: int) -> Tensor:
        return self.runtime.gradient_part(part, parts)

    def part_spec(self, part: int, parts: int) -> TensorSpec:
        whole, extra = divmod(self.runtime.parameter_count, parts)
        return TensorSpec(dtype="float32", shape=(whole + (part < extra),))

    def combine(self, contributions: list[Tensor], tokens: int) -> Tensor:
        return self.runtime.combine(contributions, tokens)

    @staticmethod
    def usable(values: Tensor) -> bool:
        return is_finite(values)

    def set_average(self, part: int, parts: int, values: Tensor) -> None:
        self.runtime.set_average(part, parts, values)

    def average_part(self, part: int, parts: int) -> Tensor:
        return self.runtime.average_part(part, parts)

    def average_digest(self) -> str:
        return self.runtime.average_digest()

    def update(self) -> tuple[str, dict[str, float]]:
        stats = self.runtime.update()
        figures = {"grad_norm": stats.grad_norm, "learning_rate": stats.learning_rate}
        return self.runtime.digest(), figures

    def image_bytes(self, stage: int | None = None) -> int:
        return (
            self.runtime.max_image_bytes if stage is None else max_image_bytes(self.runtime.manifest, stage)
        )

    def state_image(self) -> bytes:
        return self.runtime.state_image()

    def load_image(self, image: bytes) -> str:
        self.runtime.load_image(image)
        return self.runtime.digest()

    def rebuild(self, neighbours: list[tuple[int, bytes, float]]) -> None:
        self.runtime.load_state(mean_of_neighbours(self.runtime.manifest, self.runtime.stage, neighbours))

    def skip_to(self, step: int) -> str:
        self.runtime.skip_to(step)
        return self.runtime.digest()

    @staticmethod
    def from_bytes(data: Any) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def to_bytes(chunk: Tensor) -> Any:
        return chunk.contiguous().numpy().data


class TracingBackend(StageBackend):
    """Writes every average before it is applied, ``FOLDER/step-N.safetensors``, to compare with others."""

    def __init__(self, runtime: StageRuntime, folder: Path) -> None:
        super().__init__(runtime)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def update(self) -> tuple[str, dict[str, float]]:
        average = self.runtime.average_part(0, 1)
        save_file({"average": average.clone()}, self._folder / f"step-{self.runtime.step:06d}.safetensors")
        return super().update()


class CorpusBatches:
    """``Batches`` from the run's corpus."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def train(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        return self._sampler.training(step, index)

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        return self._sampler.validation(index)


def activation_spec(manifest: Manifest) -> TensorSpec:
    """What an activation or its gradient looks like on the wire."""
    shape = (manifest.microbatch_size, manifest.model.context, manifest.model.width)
    return TensorSpec(dtype=manifest.sync.wire_dtype, shape=shape)
