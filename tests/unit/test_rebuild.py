"""A lost stage's layers as the mean of its neighbours' (CheckFree)."""

from __future__ import annotations

import pytest
import torch

from bootstrap.create import example_toml
from swarm.manifest import Manifest
from swarm.model.rebuild import max_image_bytes, mean_of_neighbours
from swarm.model.stage import StageRuntime
from swarm.model.state import StateError

# Layers 0 | 1 2 | 3 4 | 5
MANIFEST = Manifest.from_toml(
    example_toml()
    .replace("stages = [1, 1, 1, 1]", "stages = [1, 2, 2, 1]")
    .replace("layers = 4", "layers = 6"),
    researcher="00" * 32,
)


def runtime(stage: int, seed: int) -> StageRuntime:
    made = StageRuntime(MANIFEST, stage)
    generator = torch.Generator().manual_seed(seed)
    made.flat_parameters().copy_(torch.randn(made.parameter_count, generator=generator))
    made.step = 40
    return made


def layer(made: StageRuntime, number: int) -> dict[str, torch.Tensor]:
    prefix = f"layers.{number}."
    return {
        name.partition(prefix)[2]: tensor
        for name, tensor in made.state_tensors().items()
        if prefix in name and not name.startswith("optimizer.")
    }


def test_each_layer_is_the_mean_of_those_at_its_place_weighted_by_squared_gradient_norms() -> None:
    before, after = runtime(1, 1), runtime(3, 3)
    lost = StageRuntime(MANIFEST, 2)
    images = [(1, before.state_image(), 3.0), (3, after.state_image(), 1.0)]
    lost.load_state(mean_of_neighbours(MANIFEST, 2, images))
    for ours, one, other in ((3, 1, 5), (4, 2, 5)):  # the last stage has one layer, which stands in twice
        assert layer(lost, ours)
        for name, tensor in layer(lost, ours).items():
            expected = 0.9 * layer(before, one)[name] + 0.1 * layer(after, other)[name]
            torch.testing.assert_close(tensor, expected)
    assert lost.step == 0
    moments = [t for name, t in lost.state_tensors().items() if name.startswith("optimizer.")]
    assert all(not tensor.any() for tensor in moments)
    lost.skip_to(41)
    assert lost.step == 41
    with pytest.raises(ValueError, match="after 40"):
        lost.skip_to(40)


def test_one_neighbour_is_copied_and_stage_0_gives_its_layers_only() -> None:
    first = runtime(0, 5)
    lost = StageRuntime(MANIFEST, 1)
    lost.load_state(mean_of_neighbours(MANIFEST, 1, [(0, first.state_image(), 0.0)]))
    for name, tensor in layer(lost, 2).items():
        torch.testing.assert_close(tensor, layer(first, 0)[name])


@pytest.mark.parametrize("norms", [(0.0, 0.0), (1e200, 1e200)])
def test_norms_that_say_nothing_weigh_alike(norms: tuple[float, float]) -> None:
    before, after = runtime(1, 1), runtime(3, 3)
    images = [(1, before.state_image(), norms[0]), (3, after.state_image(), norms[1])]
    tensors = mean_of_neighbours(MANIFEST, 2, images)
    lost = StageRuntime(MANIFEST, 2)
    lost.load_state(tensors)
    for name, tensor in layer(lost, 3).items():
        torch.testing.assert_close(tensor, (layer(before, 1)[name] + layer(after, 5)[name]) / 2)


def test_what_cannot_be_rebuilt_is_refused() -> None:
    image = runtime(1, 1).state_image()
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        mean_of_neighbours(MANIFEST, 0, [(1, image, 1.0)])
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        mean_of_neighbours(MANIFEST, 2, [])
    with pytest.raises(StateError):
        mean_of_neighbours(MANIFEST, 2, [(3, image, 1.0)])
    with pytest.raises(StateError):
        mean_of_neighbours(MANIFEST, 2, [(1, image[:-1], 1.0)])


def test_the_limit_of_another_stages_image_is_that_stages_own() -> None:
    for stage in range(4):
        made = StageRuntime(MANIFEST, stage)
        assert max_image_bytes(MANIFEST, stage) == made.max_image_bytes >= len(made.state_image())
