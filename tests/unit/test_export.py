"""From stages to one model, and to Hugging Face's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from model_cases import average_alone, small_manifest, some_tokens
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.data.tokenizer import BytesTokenizer
from swarm.manifest import Manifest
from swarm.model.export import WholeModel, export, load_whole, merge_states
from swarm.model.stage import StageRuntime
from swarm.model.state import StateError

MANIFEST = small_manifest((1, 2, 1), microbatch_size=8, optimizer={"learning_rate": 1e-2, "total_steps": 60})


def through(runtimes: list[StageRuntime], tokens: Tensor) -> Tensor:
    x = tokens
    for runtime in runtimes:
        x = runtime.infer(x)
    return x


@pytest.fixture(scope="module")
def trained() -> list[StageRuntime]:
    """Every stage after 60 steps on the shipped text."""
    runtimes = [StageRuntime(MANIFEST, stage) for stage in range(3)]
    sampler = Sampler(MANIFEST, load_corpus("kjv"))
    for step in range(60):
        x, labels = sampler.training(step, 0)
        saved = []
        for runtime in runtimes:
            x, kept = runtime.forward(x)
            saved.append(kept)
        result = runtimes[0].loss(x, labels)
        runtimes[0].accumulate(result.deferred)
        gradient: Tensor | None = result.grad
        for runtime, kept in zip(reversed(runtimes), reversed(saved), strict=True):
            assert gradient is not None
            gradient, deferred = runtime.backward(kept, gradient)
            runtime.accumulate(deferred)
        for runtime in runtimes:
            average_alone(runtime, result.tokens)
            runtime.update()
    return runtimes


@pytest.fixture(scope="module")
def parameters(trained: list[StageRuntime]) -> dict[str, Tensor]:
    return merge_states(MANIFEST, [runtime.state_tensors() for runtime in trained])


def test_the_whole_computes_what_the_stages_compute(
    trained: list[StageRuntime], parameters: dict[str, Tensor]
) -> None:
    sampler = Sampler(MANIFEST, load_corpus("kjv"))
    tokens, labels = sampler.validation(0)
    loss_sum, count = trained[0].infer_loss(through(trained, tokens), labels)
    whole = load_whole(MANIFEST, parameters)
    assert whole.loss([(tokens, labels)]) == pytest.approx(loss_sum / count, rel=1e-6)
    both = whole.loss([(tokens, labels), sampler.validation(1)])
    assert both == pytest.approx((loss_sum / count + whole.loss([sampler.validation(1)])) / 2, rel=1e-6)
    assert both < 3.3  # an untrained model has 5.55
    assert math.isnan(whole.loss([]))


def test_hugging_face_loads_the_folder_and_computes_the_same(
    tmp_path: Path, parameters: dict[str, Tensor]
) -> None:
    export(MANIFEST, parameters, tmp_path / "model")
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    tokens, _ = some_tokens(MANIFEST)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens).logits
    torch.testing.assert_close(
        load_whole(MANIFEST, parameters).logits(tokens), expected, rtol=1e-4, atol=1e-5
    )
    prompt = torch.tensor([list(b"And the ")])
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    greedy = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 8:].tolist()
    whole = load_whole(MANIFEST, parameters)
    assert whole.generate(list(b"And the "), 12, 0.0, torch.Generator()) == greedy


def test_the_folder_holds_parameters_only(tmp_path: Path, parameters: dict[str, Tensor]) -> None:
    export(MANIFEST, parameters, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "TOKENIZER.md",
        "config.json",
        "model.safetensors",
    ]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(parameters)
        assert not [name for name in file.keys() if "optimizer" in name]  # noqa: SIM118
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert config["max_position_embeddings"] == 24
    assert "bytes(tokens)" in (tmp_path / "TOKENIZER.md").read_text()


def test_sampling_follows_the_generator_and_the_model(parameters: dict[str, Tensor]) -> None:
    whole = load_whole(MANIFEST, parameters)
    prompt = BytesTokenizer().encode("In the beginning God created ")  # longer than the context

    def sample(seed: int, temperature: float = 0.8) -> list[int]:
        return whole.generate(prompt, 60, temperature, torch.Generator().manual_seed(seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len(sample(1)) == 60
    letters = sum(chr(token).isalpha() or chr(token).isspace() for token in sample(1))
    assert letters > 50  # of 256 bytes, the model has learnt which are text
    with pytest.raises(ValueError, match="prompt"):
        whole.generate([], 1, 1.0, torch.Generator())


def test_a_whole_model_is_a_copy(parameters: dict[str, Tensor]) -> None:
    changed = {name: tensor.clone() for name, tensor in parameters.items()}
    whole: WholeModel = load_whole(MANIFEST, changed)
    tokens, _ = some_tokens(MANIFEST)
    before = whole.logits(tokens)
    for tensor in changed.values():
        tensor.zero_()
    assert torch.equal(whole.logits(tokens), before)


def test_states_that_do_not_make_one_model_are_refused(trained: list[StageRuntime]) -> None:
    states = [runtime.state_tensors() for runtime in trained]
    with pytest.raises(StateError, match="2 states of 3 stages"):
        merge_states(MANIFEST, states[:2])
    with pytest.raises(StateError, match="lacks"):
        merge_states(MANIFEST, [states[0], states[2], states[1]])
    early = StageRuntime(MANIFEST, 2).state_tensors()
    with pytest.raises(StateError, match=r"of steps \[0, 60\]"):
        merge_states(MANIFEST, [*states[:2], early])


def test_wrong_parameters_are_refused(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    other: Manifest = small_manifest((1, 2), microbatch_size=8)
    cases = [
        (MANIFEST, {k: v for k, v in parameters.items() if k != name}, "lacks"),
        (other, parameters, "unknown"),
        (MANIFEST, parameters | {name: parameters[name].double()}, "not finite float32"),
        (MANIFEST, parameters | {name: parameters[name] * math.inf}, "not finite float32"),
        (MANIFEST, parameters | {name: parameters[name].t()}, "not finite float32"),
    ]
    for manifest, wrong, message in cases:
        with pytest.raises(StateError, match=message):
            load_whole(manifest, wrong)
        with pytest.raises(StateError, match=message):
            export(manifest, wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
