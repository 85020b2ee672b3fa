"""The architecture against Hugging Face's own."""

from __future__ import annotations

import hashlib

import pytest
import torch
from model_cases import small_manifest, some_tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swarm.manifest import Manifest
from swarm.model.export import huggingface_config
from swarm.model.layout import build_stage, build_whole, initialise, layout_of
from swarm.model.llama import Llama, summed_loss


def whole_model(manifest: Manifest) -> Llama:
    module = build_whole(manifest)
    layout = layout_of(module)
    flat = torch.empty(layout.total)
    initialise(manifest, layout, flat)
    module.to_empty(device="cpu")
    module.load_state_dict({slot.name: slot.view(flat) for slot in layout.slots})
    return module


def disturbed(module: Llama) -> Llama:
    """Weights of ordinary size, norms unlike 1: an error anywhere then shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise * (0.1 if parameter.dim() == 2 else 0.3))
    return module


def hugging_face(manifest: Manifest, module: Llama) -> LlamaForCausalLM:
    config = LlamaConfig(**huggingface_config(manifest), attn_implementation="eager")
    model = LlamaForCausalLM(config)
    model.load_state_dict(module.state_dict(), strict=True)
    return model.eval()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ((ours - theirs).norm() / theirs.norm()).item() < 2e-6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 6},
        {"kv_heads": 1, "rope_theta": 500_000.0},
        {"heads": 3, "kv_heads": 3, "norm_eps": 1e-2},
    ],
    ids=["grouped", "full", "one-kv-head", "large-eps"],
)
def test_logits_and_gradients_are_those_of_hugging_face(changes: dict[str, object]) -> None:
    manifest = small_manifest(**changes)
    ours = disturbed(whole_model(manifest))
    theirs = hugging_face(manifest, ours)
    tokens, labels = some_tokens(manifest)
    logits, expected = ours(tokens), theirs(input_ids=tokens).logits
    assert close(logits, expected)
    summed_loss(logits, labels).backward()
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert close(parameter.grad, gradients[name]), name


def test_a_short_input_is_the_start_of_a_long_one() -> None:
    """Causal: later tokens change nothing, and positions count from the start."""
    manifest = small_manifest()
    module = disturbed(whole_model(manifest))
    tokens, others = some_tokens(manifest)
    changed = torch.cat((tokens[:, :10], others[:, 10:]), dim=1)
    torch.testing.assert_close(module(tokens[:, :10]), module(changed)[:, :10])
    assert not torch.allclose(module(tokens)[:, 10:], module(changed)[:, 10:])


def test_stages_hold_the_names_of_the_whole_once_each() -> None:
    manifest = small_manifest((2, 1, 3))
    whole = [name for name, _ in build_whole(manifest).named_parameters()]
    stages = [[slot.name for slot in layout_of(build_stage(manifest, stage)).slots] for stage in range(3)]
    assert sorted(whole) == sorted(name for names in stages for name in names)
    assert {name.split(".")[2] for name in stages[2]} == {"3", "4", "5"}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(stages[0])


def test_the_start_does_not_depend_on_the_division_into_stages() -> None:
    starts = []
    for division in ((4,), (1, 1, 2), (2, 2)):
        manifest = small_manifest(division)
        start = {}
        for stage in range(len(division)):
            layout = layout_of(build_stage(manifest, stage))
            flat = torch.full((layout.total,), torch.nan)
            initialise(manifest, layout, flat)
            start |= {slot.name: slot.view(flat) for slot in layout.slots}
        starts.append(start)
    for other in starts[1:]:
        assert starts[0].keys() == other.keys()
        assert all(torch.equal(starts[0][name], other[name]) for name in other)


def test_the_start_depends_on_seed_and_name_and_has_the_standard_spread() -> None:
    manifest = small_manifest((4,), width=96, heads=6, ffn_width=200)
    start = whole_model(manifest).state_dict()
    layers = [start[f"model.layers.{number}.mlp.up_proj.weight"] for number in range(4)]
    assert not torch.equal(layers[0], layers[1])
    other = whole_model(manifest.model_copy(update={"seed": 8})).state_dict()
    assert not torch.equal(layers[0], other["model.layers.0.mlp.up_proj.weight"])
    for name, tensor in start.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
            continue
        residual = "o_proj" in name or "down_proj" in name
        std = 0.02 / (8**0.5 if residual else 1)
        values = tensor.flatten().double() / std
        count = values.numel()
        assert abs(values.mean()) < 5 / count**0.5, name
        assert abs(values.var() - 1) < 5 * (2 / count) ** 0.5, name
        assert abs((values > 1.959964).double().mean() - 0.025) < 5 * (0.025 / count) ** 0.5, name


def test_the_start_is_the_same_on_every_machine() -> None:
    """It needs integers, one product and one rounding: here it is computed again without numpy."""
    manifest = small_manifest((1,))
    value = whole_model(manifest).state_dict()["model.layers.0.self_attn.q_proj.weight"][0, 0].item()
    expected = first_value("7:model.layers.0.self_attn.q_proj.weight", 0.02)
    assert value == torch.tensor(expected, dtype=torch.float32).item()


def first_value(key: str, std: float) -> float:
    """The first value of a matrix, by Philox4x64-10 (Salmon et al. 2011) written out in Python."""
    mask = 2**64 - 1
    digest = hashlib.sha256(b"skipswarm parameter " + key.encode()).digest()
    keys = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
    counter = [1, 0, 0, 0]  # numpy counts before it draws
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ keys[0],
            second & mask,
            (first >> 64) ^ counter[3] ^ keys[1],
            first & mask,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    total = sum(word >> shift & 0xFFFF for word in counter for shift in (0, 16, 32, 48))
    return (total - 16 * 65535 / 2) * std / (16 * (65536**2 - 1) / 12) ** 0.5
