"""Deferred weight gradients are plain autograd's, to the bit."""

from __future__ import annotations

import pytest
import torch
from model_cases import bits, small_manifest, some_activation, some_tokens
from torch import Tensor

from swarm.manifest import Manifest
from swarm.model.deferred import Deferred, Tape
from swarm.model.layout import Layout
from swarm.model.llama import Llama, summed_loss
from swarm.model.stage import StageRuntime

CASES = [
    {},
    {"width": 128, "heads": 4, "kv_heads": 2, "ffn_width": 384, "context": 128, "microbatch_size": 4},
    {"width": 20, "heads": 2, "kv_heads": 1, "ffn_width": 33, "context": 7, "microbatch_size": 1},
]
IDS = ["small", "demo", "odd"]


def plain_module(manifest: Manifest, runtime: StageRuntime, ends: bool) -> Llama:
    """The same layers and values as ``runtime``, for plain autograd."""
    numbers = sorted({int(s.name.split(".")[2]) for s in runtime.layout.slots if ".layers." in s.name})
    module = Llama(manifest.model, numbers, ends=ends)
    states = runtime.state_tensors()
    module.load_state_dict({slot.name: states[slot.name] for slot in runtime.layout.slots})
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def flat_gradient(module: Llama, layout: Layout) -> Tensor:
    named = dict(module.named_parameters())
    return torch.cat([named[slot.name].grad.flatten() for slot in layout.slots])


@pytest.mark.parametrize("changes", CASES, ids=IDS)
def test_a_middle_stage_over_several_microbatches(changes: dict[str, int]) -> None:
    manifest = small_manifest(**changes)
    runtime = StageRuntime(manifest, 1)
    module = plain_module(manifest, runtime, ends=False)
    for number in range(4):
        x = some_activation(manifest, seed=number)
        grad_y = some_activation(manifest, seed=100 + number)
        source = x.clone().requires_grad_()
        expected = module.blocks(source)
        expected.backward(grad_y)
        y, saved = runtime.forward(x)
        grad_x, deferred = runtime.backward(saved, grad_y)
        runtime.accumulate(deferred)
        assert bits(y) == bits(expected)
        assert grad_x is not None
        assert bits(grad_x) == bits(source.grad)
        assert bits(runtime.gradient_part(0, 1)) == bits(flat_gradient(module, runtime.layout))
    assert runtime.gradient_part(0, 1).abs().min() > 0


@pytest.mark.parametrize("changes", CASES, ids=IDS)
def test_stage_0_with_embedding_head_and_loss(changes: dict[str, int]) -> None:
    manifest = small_manifest(**changes)
    runtime = StageRuntime(manifest, 0)
    module = plain_module(manifest, runtime, ends=True)
    for number in range(3):
        tokens, labels = some_tokens(manifest, seed=number)
        total = summed_loss(module(tokens), labels)
        total.backward()
        y, saved = runtime.forward(tokens)
        result = runtime.loss(y, labels)
        grad_x, deferred = runtime.backward(saved, result.grad)
        assert grad_x is None
        runtime.accumulate(result.deferred)
        runtime.accumulate(deferred)
        assert result.loss_sum == total.item()
        assert result.tokens == tokens.numel()
        assert bits(runtime.gradient_part(0, 1)) == bits(flat_gradient(module, runtime.layout))


def test_the_sum_follows_the_order_of_commits_not_of_backwards() -> None:
    manifest = small_manifest()
    inputs = [(some_activation(manifest, n), some_activation(manifest, 50 + n)) for n in range(3)]

    def run(order: tuple[int, ...]) -> bytes:
        runtime = StageRuntime(manifest, 1)
        kept = []
        for x, grad_y in inputs:
            _, saved = runtime.forward(x)
            kept.append((saved, grad_y))
        deferred = [runtime.backward(saved, grad_y)[1] for saved, grad_y in kept]
        for number in order:
            runtime.accumulate(deferred[number])
        return bits(runtime.gradient_part(0, 1))

    expected = torch.zeros_like(StageRuntime(manifest, 1).gradient_part(0, 1))
    for number in (2, 0, 1):
        alone = StageRuntime(manifest, 1)
        _, saved = alone.forward(inputs[number][0])
        alone.accumulate(alone.backward(saved, inputs[number][1])[1])
        expected += alone.gradient_part(0, 1)
    assert run((2, 0, 1)) == bits(expected)
    assert run((0, 1, 2)) != bits(expected)


def test_backward_leaves_the_sum_alone_and_a_release_leaves_nothing() -> None:
    manifest = small_manifest()
    runtime = StageRuntime(manifest, 1)
    _, saved = runtime.forward(some_activation(manifest))
    _, deferred = runtime.backward(saved, some_activation(manifest, 1))
    del deferred
    assert not runtime.gradient_part(0, 1).any()


def test_saved_and_deferred_work_once() -> None:
    manifest = small_manifest()
    runtime = StageRuntime(manifest, 1)
    _, saved = runtime.forward(some_activation(manifest))
    _, deferred = runtime.backward(saved, some_activation(manifest, 1))
    with pytest.raises(RuntimeError, match="already"):
        runtime.backward(saved, some_activation(manifest, 1))
    runtime.accumulate(deferred)
    once = bits(runtime.gradient_part(0, 1))
    with pytest.raises(RuntimeError, match="already"):
        runtime.accumulate(deferred)
    assert bits(runtime.gradient_part(0, 1)) == once


def test_computing_again_on_a_replica_gives_the_same_input_gradient() -> None:
    """What a backward reroute relies on."""
    manifest = small_manifest()
    x, grad_y = some_activation(manifest), some_activation(manifest, 1)
    results = []
    for _ in range(2):
        replica = StageRuntime(manifest, 2)
        _, saved = replica.forward(x)
        grad_x, _ = replica.backward(saved, grad_y)
        assert grad_x is not None
        results.append(bits(grad_x))
    assert results[0] == results[1]


def test_a_tape_holds_one_product_for_each_matrix() -> None:
    tape = Tape()
    weight = torch.randn(5, 3, requires_grad=True)
    x = torch.randn(2, 4, 3, requires_grad=True)
    y = tape.linear(x, weight)
    assert not tape.products
    grad_y = torch.randn(2, 4, 5)
    y.backward(grad_y)
    assert weight.grad is None
    (pair,) = Deferred(0, tape, []).gradients()
    assert pair[0] is weight
    torch.testing.assert_close(pair[1], torch.einsum("btj,bti->ji", grad_y, x.detach()))
