"""A stage's state from those of the stages beside it, when nobody holds its own any more."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from swarm.manifest import Manifest
from swarm.model import state
from swarm.model.layout import build_stage, layout_of, stage_layers

_LAYER = re.compile(r"(?P<before>.*\.layers\.)(?P<number>\d+)(?P<after>\..*)")


def max_image_bytes(manifest: Manifest, stage: int) -> int:
    """No honest image of that stage's state is longer."""
    return state.max_image_bytes(layout_of(build_stage(manifest, stage)))


@torch.no_grad()
def mean_of_neighbours(
    manifest: Manifest, stage: int, neighbours: list[tuple[int, bytes, float]]
) -> dict[str, Tensor]:
    """State of ``stage`` from (stage, image, gradient norm) of others: each layer the mean of those at its
    place, weighted by the squared norms (CheckFree, arXiv 2506.15461, algorithm 1); moments zero, step 0.

    A neighbour with fewer layers gives its last one for the places that it lacks. Raises StateError for an
    image that is not its stage's, ValueError for stage 0 or without a neighbour.
    """
    if stage == 0 or not neighbours:
        raise ValueError("this stage cannot be rebuilt from others")
    weights = _weights([norm for _, _, norm in neighbours])
    tensors: dict[str, Tensor] = {}
    slots = layout_of(build_stage(manifest, stage)).slots
    for (other, image, _), weight in zip(neighbours, weights, strict=True):
        layout = layout_of(build_stage(manifest, other))
        theirs = state.unpack(image, layout)
        state.check(theirs, layout)
        for slot in slots:
            part = theirs[_counterpart(manifest, slot.name, stage, other)] * weight
            tensors[slot.name] = tensors[slot.name] + part if slot.name in tensors else part
    for slot in slots:
        for moment in state.MOMENTS:
            tensors[state.moment_name(moment, slot.name)] = torch.zeros(slot.shape)
    tensors["step"] = torch.tensor(0)
    return tensors


def _weights(norms: list[float]) -> list[float]:
    squares = [norm * norm for norm in norms]
    total = sum(squares)
    if not math.isfinite(total) or total <= 0:
        return [1 / len(norms)] * len(norms)  # nobody has learned yet
    return [square / total for square in squares]


def _counterpart(manifest: Manifest, name: str, stage: int, other: int) -> str:
    """The name of the other stage's parameter that stands at the place of our ``name``."""
    match = _LAYER.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} belongs to no layer")
    ours, theirs = stage_layers(manifest, stage), stage_layers(manifest, other)
    place = min(int(match["number"]) - ours.start, len(theirs) - 1)
    return f"{match['before']}{theirs.start + place}{match['after']}"
