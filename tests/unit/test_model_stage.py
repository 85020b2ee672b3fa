"""The stage's arithmetic after backward: averaging, update, and its state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from model_cases import average_alone, bits, small_manifest, some_activation, some_tokens
from safetensors.torch import load, save
from torch import Tensor

from swarm.manifest import Manifest
from swarm.messages import TensorSpec
from swarm.model.finite import NotFiniteError, is_finite
from swarm.model.optimizer import learning_rate
from swarm.model.stage import StageRuntime
from swarm.model.state import StateError


def train(runtime: StageRuntime, steps: int) -> None:
    """Steps of one microbatch with random inputs and gradients, the same for every replica."""
    for _ in range(steps):
        seed = 1000 + runtime.step
        x = (
            some_tokens(runtime.manifest, seed)[0]
            if runtime.stage == 0
            else some_activation(runtime.manifest, seed)
        )
        y, saved = runtime.forward(x)
        if runtime.stage == 0:
            runtime.accumulate(runtime.loss(y, x).deferred)
        _, deferred = runtime.backward(saved, some_activation(runtime.manifest, seed + 1))
        runtime.accumulate(deferred)
        average_alone(runtime, 72)
        runtime.update()


# -- one microbatch


def test_infer_is_forward_without_backward() -> None:
    manifest = small_manifest()
    first, second = StageRuntime(manifest, 0), StageRuntime(manifest, 1)
    tokens, labels = some_tokens(manifest)
    y, _ = first.forward(tokens)
    assert torch.equal(first.infer(tokens), y)
    assert torch.equal(second.infer(y), second.forward(y)[0])
    result = first.loss(y, labels)
    assert first.infer_loss(y, labels) == (result.loss_sum, result.tokens)
    assert result.loss_sum / result.tokens == pytest.approx(math.log(256), rel=0.05)
    assert not y.requires_grad
    assert not result.grad.requires_grad


def test_specs_are_the_shapes_on_the_wire() -> None:
    manifest = small_manifest(sync={"wire_dtype": "bfloat16"})
    assert StageRuntime(manifest, 0).input_spec(3) == TensorSpec(dtype="int64", shape=(3, 24))
    assert StageRuntime(manifest, 1).input_spec(3) == TensorSpec(dtype="bfloat16", shape=(3, 24, 48))
    assert StageRuntime(manifest, 0).output_spec(5) == TensorSpec(dtype="bfloat16", shape=(5, 24, 48))


def test_wrong_inputs_are_refused() -> None:
    manifest = small_manifest()
    first, second = StageRuntime(manifest, 0), StageRuntime(manifest, 1)
    tokens, _ = some_tokens(manifest)
    x = some_activation(manifest)
    for wrong in (tokens.int(), tokens[0], tokens + 256, tokens - 300, torch.cat((tokens, tokens), dim=1)):
        with pytest.raises(ValueError, match="token"):
            first.forward(wrong)
    for wrong in (x[0], x[:, :, :-1], x.long(), torch.cat((x, x), dim=1)):
        with pytest.raises(ValueError, match="activation"):
            second.forward(wrong)
    with pytest.raises(ValueError, match="stage 3"):
        StageRuntime(manifest, 3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_that_is_not_finite_gets_in(poison: float) -> None:
    manifest = small_manifest()
    first, second = StageRuntime(manifest, 0), StageRuntime(manifest, 1)
    before = second.state_image()
    x, grad_y = some_activation(manifest), some_activation(manifest, 1)
    bad = x.clone()
    bad[1, 5, 7] = poison
    _, saved = second.forward(x)
    for call in (
        lambda: second.forward(bad),
        lambda: second.infer(bad),
        lambda: second.backward(saved, bad),
        lambda: first.loss(bad, some_tokens(manifest)[1]),
        lambda: first.infer_loss(bad, some_tokens(manifest)[1]),
        lambda: second.combine([torch.ones(4), torch.tensor([1, 1, poison, 1])], 2),
        lambda: second.set_average(0, 1, second.gradient_part(0, 1) + poison),
    ):
        with pytest.raises(NotFiniteError):
            call()
    assert second.state_image() == before
    assert not second.gradient_part(0, 1).any()
    grad_x, _ = second.backward(saved, grad_y)  # a refused gradient did not use the microbatch up
    assert grad_x is not None


def test_absurd_sizes_are_neither_taken_nor_passed_on() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    x = some_activation(runtime.manifest)
    for large in (x * 1e30, torch.full_like(x, -3e38)):
        with pytest.raises(NotFiniteError, match="activation"):
            runtime.forward(large)
        _, saved = runtime.forward(x)
        with pytest.raises(NotFiniteError, match="gradient"):
            runtime.backward(saved, large)
    runtime.accumulate(runtime.backward(saved, x.sign() * 0.5e12)[1])  # the largest: no product overflows
    assert runtime.gradient_part(0, 1).isfinite().all()
    runtime.discard_gradient()
    _, saved = runtime.forward(x)
    runtime.flat_parameters().mul_(1e12)
    with pytest.raises(NotFiniteError, match="output"):
        runtime.forward(x)


def test_is_finite_sees_every_place() -> None:
    for size in (1, 7, 64, 1001):
        for place in {0, size // 2, size - 1}:
            for poison in (math.nan, math.inf, -math.inf):
                tensor = torch.full((size,), 3e38)
                assert is_finite(tensor)
                tensor[place] = poison
                assert not is_finite(tensor)
    assert is_finite(torch.empty(0))


def test_a_microbatch_of_another_step_does_not_count() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    _, saved = runtime.forward(some_activation(runtime.manifest))
    _, deferred = runtime.backward(saved, some_activation(runtime.manifest, 1))
    train(runtime, 1)
    with pytest.raises(RuntimeError, match="step 0 cannot count in step 1"):
        runtime.accumulate(deferred)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters() -> None:
    reduced = StageRuntime(small_manifest(dtype="bfloat16"), 1)
    full = StageRuntime(small_manifest(), 1)
    assert reduced.digest() == full.digest()
    for runtime in (reduced, full):
        train(runtime, 3)
    assert reduced.forward(some_activation(reduced.manifest))[0].dtype == torch.bfloat16
    assert reduced.flat_parameters().dtype == torch.float32
    start = StageRuntime(small_manifest(), 1).flat_parameters()
    moved = full.flat_parameters() - start
    difference = reduced.flat_parameters() - full.flat_parameters()
    assert 0 < difference.norm() < 0.15 * moved.norm()
    x = some_activation(full.manifest, 5)
    torch.testing.assert_close(reduced.infer(x).float(), full.infer(x), rtol=0.05, atol=0.05)


# -- averaging


def test_parts_are_views_that_cover_the_sum_once() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    for parts in (1, 2, 3, 7):
        for part in range(parts):
            runtime.gradient_part(part, parts).add_(1)
        assert torch.equal(runtime.gradient_part(0, 1), torch.ones(runtime.parameter_count))
        runtime.discard_gradient()


def test_combine_adds_in_the_given_order_and_leaves_its_inputs() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(5000, generator=generator) * 10**n for n in range(4)]
    before = [bits(tensor) for tensor in inputs]
    result = runtime.combine(inputs, 1000)
    assert bits(result) == bits((((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]) / 1000)
    assert bits(result) != bits(runtime.combine(inputs[::-1], 1000))
    assert [bits(tensor) for tensor in inputs] == before
    alone = runtime.combine(inputs[:1], 1)
    alone.zero_()
    assert bits(inputs[0]) == before[0]
    assert not runtime.combine(inputs, 0).any()
    for wrong in ([], [inputs[0], inputs[1][1:]], [inputs[0], inputs[1].double()]):
        with pytest.raises(ValueError, match=r"contributions|nothing"):
            runtime.combine(wrong, 1)


def test_an_average_is_used_only_when_every_part_is_there() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    values = torch.randn(runtime.parameter_count)
    halves, thirds = torch.tensor_split(values, 2), torch.tensor_split(values, 3)

    def incomplete() -> None:
        for call in (runtime.average_digest, runtime.update):
            with pytest.raises(RuntimeError, match="the average is not complete"):
                call()

    incomplete()
    runtime.set_average(1, 2, halves[1])
    incomplete()
    runtime.set_average(0, 3, thirds[0])  # another division: the half is forgotten
    runtime.set_average(1, 3, thirds[1])
    incomplete()
    runtime.reset_average()
    runtime.set_average(0, 2, halves[0])
    incomplete()
    runtime.set_average(1, 2, halves[1])
    assert runtime.average_digest() == hashlib.sha256(bits(values)).hexdigest()
    for part, expected in enumerate(thirds):
        assert torch.equal(runtime.average_part(part, 3), expected)
    assert runtime.update().grad_norm > runtime.manifest.optimizer.clip_norm
    incomplete()
    assert bits(runtime.average_part(0, 1)) == bits(values)  # for a replica that missed it
    with pytest.raises(ValueError, match="part 0 of 2"):
        runtime.set_average(0, 2, values)


def test_the_sums_outlive_an_averaging_that_begins_again() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    _, saved = runtime.forward(some_activation(runtime.manifest))
    runtime.accumulate(runtime.backward(saved, some_activation(runtime.manifest, 1))[1])
    before = bits(runtime.gradient_part(0, 1))
    runtime.set_average(0, 2, runtime.combine([runtime.gradient_part(0, 2)] * 2, 9))
    runtime.reset_average()
    assert bits(runtime.gradient_part(0, 1)) == before
    average_alone(runtime, 9)
    runtime.update()
    assert not runtime.gradient_part(0, 1).any()


# -- update


def torch_twin(runtime: StageRuntime) -> tuple[list[Tensor], torch.optim.AdamW]:
    section = runtime.manifest.optimizer
    tensors = [slot.view(runtime.flat_parameters()).clone().requires_grad_() for slot in runtime.layout.slots]
    groups = [
        {"params": [t for t in tensors if t.dim() == 2], "weight_decay": section.weight_decay},
        {"params": [t for t in tensors if t.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    return tensors, torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=section.eps)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 10.0], ids=["small", "below-clip", "clipped"])
def test_update_is_clipped_adamw(scale: float) -> None:
    runtime = StageRuntime(small_manifest(), 0)
    tensors, optimizer = torch_twin(runtime)
    generator = torch.Generator().manual_seed(5)
    for step in range(8):
        average = torch.randn(runtime.parameter_count, generator=generator) * scale
        runtime.set_average(0, 1, average)
        for tensor, slot in zip(tensors, runtime.layout.slots, strict=True):
            tensor.grad = slot.view(average).clone()
        norm = torch.nn.utils.clip_grad_norm_(tensors, runtime.manifest.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(runtime.manifest.optimizer, step)
        optimizer.step()
        stats = runtime.update()
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert stats.learning_rate == learning_rate(runtime.manifest.optimizer, step)
        assert runtime.step == step + 1
    for tensor, slot in zip(tensors, runtime.layout.slots, strict=True):
        torch.testing.assert_close(slot.view(runtime.flat_parameters()), tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_schedule_is_that_of_torch(warmup: int) -> None:
    table = {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "warmup_steps": warmup, "total_steps": 12}
    section = small_manifest(optimizer=table).optimizer
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    rates = torch.optim.lr_scheduler
    schedule: rates.LRScheduler = rates.CosineAnnealingLR(optimizer, T_max=12 - warmup, eta_min=3e-4)
    if warmup:
        rising = rates.LinearLR(optimizer, 1 / warmup, total_iters=max(1, warmup - 1))
        schedule = rates.SequentialLR(optimizer, [rising, schedule], milestones=[warmup])
    for step in range(13):
        assert learning_rate(section, step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_the_schedule_warms_up_and_follows_a_cosine() -> None:
    section = small_manifest().optimizer
    rates = [learning_rate(section, step) for step in range(10)]
    assert rates[0] == pytest.approx(1.5e-3)
    assert rates[1] == rates[2] == pytest.approx(3e-3)
    assert rates[5] == pytest.approx((3e-3 + 3e-4) / 2)
    assert rates[8] == rates[9] == pytest.approx(3e-4)
    assert rates[2:9] == sorted(rates[2:9], reverse=True)


def test_replicas_stay_identical_whatever_their_threads() -> None:
    """1.4M parameters, so that torch divides every elementwise operation among its threads."""
    manifest = small_manifest((3,), width=192, ffn_width=500)
    generator = torch.Generator().manual_seed(9)
    count = StageRuntime(manifest, 0).parameter_count
    averages = [torch.randn(count, generator=generator) for _ in range(3)]
    before = torch.get_num_threads()
    digests = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runtime = StageRuntime(manifest, 0)
            for average in averages:
                runtime.set_average(0, 1, average)
                runtime.update()
            digests.append(runtime.digest())
    finally:
        torch.set_num_threads(before)
    assert count > 1_200_000
    assert len(set(digests)) == 1


def test_update_changes_what_forward_computes() -> None:
    for dtype in ("float32", "bfloat16"):
        runtime = StageRuntime(small_manifest(dtype=dtype), 1)
        x = some_activation(runtime.manifest)
        before, digest = runtime.infer(x), runtime.digest()
        train(runtime, 2)
        assert not torch.equal(runtime.infer(x), before)
        assert runtime.digest() != digest


# -- state


@pytest.mark.parametrize("stage", [0, 2])
def test_a_state_taken_over_continues_to_the_bit(stage: int) -> None:
    manifest = small_manifest()
    donor, taker = StageRuntime(manifest, stage), StageRuntime(manifest, stage)
    train(donor, 3)
    image = donor.state_image()
    assert len(image) <= taker.max_image_bytes
    taker.load_image(image)
    assert taker.step == 3
    assert taker.state_image() == image
    for runtime in (donor, taker):
        train(runtime, 2)
    assert taker.digest() == donor.digest()
    assert taker.state_image() == donor.state_image()
    names = donor.state_tensors().keys()
    assert {f"optimizer.exp_avg.{slot.name}" for slot in donor.layout.slots} <= names
    assert len(names) == 3 * len(donor.layout.slots) + 1


def test_a_loaded_state_discards_the_gradient() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    _, saved = runtime.forward(some_activation(runtime.manifest))
    runtime.accumulate(runtime.backward(saved, some_activation(runtime.manifest, 1))[1])
    runtime.load_image(StageRuntime(runtime.manifest, 1).state_image())
    assert not runtime.gradient_part(0, 1).any()


Change = Callable[[dict[str, Tensor]], object]
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(NAME), f"lacks {NAME}"),
        (lambda s: s.pop(f"optimizer.exp_avg.{NAME}"), "lacks optimizer"),
        (lambda s: s.pop("step"), "lacks step"),
        (lambda s: s.update(more=torch.zeros(1)), "unknown more"),
        (lambda s: s.update({NAME: s[NAME].double()}), "float64"),
        (lambda s: s.update({NAME: s[NAME].t().contiguous()}), r"\[48, 80\], not float32 \[80, 48\]"),
        (lambda s: s.update({NAME: s[NAME] * math.nan}), "NaN"),
        (lambda s: s.update({f"optimizer.exp_avg_sq.{NAME}": -torch.ones_like(s[NAME])}), "negative"),
        (lambda s: s.update(step=torch.tensor(-1)), "step is -1"),
        (lambda s: s.update(step=torch.tensor(2**48)), "step is"),
        (lambda s: s.update(step=torch.tensor([1])), "step is int64"),
        (lambda s: s.update(step=torch.tensor(1.0)), "step is float32"),
    ],
)
def test_a_wrong_state_changes_nothing(change: Change, message: str) -> None:
    runtime = StageRuntime(small_manifest(), 1)
    train(runtime, 1)
    before = runtime.state_image()
    wrong = load(StageRuntime(runtime.manifest, 1).state_image())
    change(wrong)
    with pytest.raises(StateError, match=message):
        runtime.load_state(wrong)
    with pytest.raises(StateError):
        runtime.load_image(save(wrong))
    assert runtime.state_image() == before


def test_a_damaged_image_is_refused() -> None:
    runtime = StageRuntime(small_manifest(), 1)
    image = runtime.state_image()
    other_stage = StageRuntime(runtime.manifest, 0).state_image()
    long_header = (len(image) - 8).to_bytes(8, "little") + image[8:]
    for wrong in (
        b"",
        image[:7],
        image[:-1],
        image + b"x",
        image * 2,
        other_stage,
        long_header,
        b"\xff" * 99,
    ):
        with pytest.raises(StateError, match="Take it from another replica"):
            runtime.load_image(wrong)
    runtime.load_image(image)


def test_the_digest_is_of_the_parameters_alone() -> None:
    manifest = small_manifest()
    runtime = StageRuntime(manifest, 1)
    assert runtime.digest() == hashlib.sha256(bits(runtime.flat_parameters())).hexdigest()
    assert runtime.digest() != StageRuntime(manifest, 2).digest()
    other: Manifest = manifest.model_copy(update={"seed": 8})
    assert runtime.digest() != StageRuntime(other, 1).digest()
