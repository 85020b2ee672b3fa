"""Where a stage's parameters stand in its one flat vector, and the bits that they start from."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from swarm.manifest import Manifest
from swarm.model.llama import Llama

_CHUNK = 1 << 20
_SUMMANDS = 16
_UNIFORM_MEAN = (2**16 - 1) / 2
_UNIFORM_VARIANCE = (2.0**32 - 1) / 12


@dataclass(frozen=True)
class Slot:
    """One parameter: elements ``[start, start + size)`` of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of ``flat`` in its own shape, without a copy."""
        return flat[self.start : self.start + self.size].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All slots of a stage, the matrices first: weight decay is for them alone, ``flat[:matrices]``."""

    slots: tuple[Slot, ...]
    matrices: int
    total: int


def stage_layers(manifest: Manifest, stage: int) -> range:
    """Numbers of the layers that ``stage`` holds."""
    ends = list(accumulate(manifest.stages, initial=0))
    return range(ends[stage], ends[stage + 1])


def build_stage(manifest: Manifest, stage: int) -> Llama:
    """The module of one stage, without storage for its parameters (device ``meta``)."""
    with torch.device("meta"):
        return Llama(manifest.model, stage_layers(manifest, stage), ends=stage == 0)


def build_whole(manifest: Manifest) -> Llama:
    """The module of all stages together, without storage for its parameters (device ``meta``)."""
    with torch.device("meta"):
        return Llama(manifest.model, range(manifest.model.layers), ends=True)


def layout_of(module: Llama) -> Layout:
    """Matrices in the order of the module, then the norms: the same for every replica."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    names = sorted(shapes, key=lambda name: len(shapes[name]) == 1)  # sorted() is stable
    sizes = [math.prod(shapes[name]) for name in names]
    starts = list(accumulate(sizes, initial=0))
    slots = tuple(
        Slot(name, shapes[name], start, size)
        for name, start, size in zip(names, starts[:-1], sizes, strict=True)
    )
    matrices = sum(slot.size for slot in slots if len(slot.shape) == 2)
    return Layout(slots, matrices, starts[-1])


def initialise(manifest: Manifest, layout: Layout, flat: Tensor) -> None:
    """Fill ``flat`` (float32 ``[total]``, CPU) with the starting parameters.

    Each matrix depends on (seed, name) alone, so any division into stages starts from the same model. Norms
    are 1; the outputs to the residual stream are scaled by 1/sqrt(2 * layers) (Radford et al. 2019).
    """
    for slot in layout.slots:
        part = flat[slot.start : slot.start + slot.size]
        if len(slot.shape) == 1:
            part.fill_(1.0)
            continue
        std = manifest.model.init_std
        if slot.name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * manifest.model.layers)
        _fill_normal(part.numpy(), f"{manifest.seed}:{slot.name}", std)


def _fill_normal(out: np.ndarray[tuple[int], np.dtype[np.float32]], key: str, std: float) -> None:
    """Normal values as sums of 16 uniform integers (Irwin-Hall; kurtosis 2.93, none beyond 6.9 std).

    Integer sums, one product and one rounding give the same bits on any machine. The logarithms and cosines
    of Box-Muller, in torch and elsewhere, differ in the last bit between instruction sets.
    """
    digest = hashlib.sha256(b"skipswarm parameter " + key.encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
    scale = std / math.sqrt(_SUMMANDS * _UNIFORM_VARIANCE)
    for start in range(0, len(out), _CHUNK):
        count = min(_CHUNK, len(out) - start)
        words = generator.random_raw(count * _SUMMANDS // 4).astype("<u8", copy=False)
        sums = words.view("<u2").reshape(count, _SUMMANDS).sum(axis=1, dtype=np.int64)
        out[start : start + count] = (sums - _SUMMANDS * _UNIFORM_MEAN) * scale
