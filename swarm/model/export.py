"""From the states of all stages to one model: a folder that Hugging Face loads, or a model to run here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from swarm.manifest import Manifest
from swarm.model.finite import is_finite
from swarm.model.layout import build_stage, build_whole, layout_of
from swarm.model.llama import Llama, summed_loss
from swarm.model.state import StateError
from swarm.model.state import check as check_state

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_NOTE = "TOKENIZER.md"

_NOTES = {
    "bytes": """\
# Tokenizer

Token = byte: `list(text.encode("utf-8"))` encodes, `bytes(tokens).decode("utf-8", errors="replace")` decodes.
There are 256 tokens and no special ones, so Hugging Face's `transformers` needs no tokenizer files for it.
""",
}


def merge_states(manifest: Manifest, stages: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model's parameters from its stages' states in order (``StageRuntime.state_tensors``).

    Raises StateError if a stage is missing, wrong, or of another step than the others.
    """
    if len(stages) != len(manifest.stages):
        raise StateError(f"{len(stages)} states of {len(manifest.stages)} stages: give one of each")
    whole: dict[str, Tensor] = {}
    steps: set[int] = set()
    for stage, tensors in enumerate(stages):
        layout = layout_of(build_stage(manifest, stage))
        steps.add(check_state(tensors, layout))
        whole |= {slot.name: tensors[slot.name] for slot in layout.slots}
    if len(steps) > 1:
        raise StateError(f"the stages are of steps {sorted(steps)}: take all from one checkpoint")
    return whole


def _check_whole(manifest: Manifest, parameters: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(p.shape) for name, p in build_whole(manifest).named_parameters()}
    if missing := wanted.keys() - parameters.keys():
        raise StateError(
            f"the model lacks {min(missing)}: give the states of all {len(manifest.stages)} stages"
        )
    if unknown := parameters.keys() - wanted.keys():
        raise StateError(f"the unknown {min(unknown)} is not of this run's model: take its own checkpoint")
    for name, shape in wanted.items():
        tensor = parameters[name]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not is_finite(tensor):
            raise StateError(f"{name} is not finite float32 {list(shape)}: take another checkpoint")


def huggingface_config(manifest: Manifest) -> dict[str, Any]:
    """The fields of ``LlamaConfig`` that describe this model."""
    model = manifest.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def export(manifest: Manifest, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and a note on the tokenizer into ``folder``.

    ``parameters`` are those of ``merge_states``. Raises StateError if they are wrong, OSError from the disk.
    """
    _check_whole(manifest, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(huggingface_config(manifest), indent=2) + "\n")
    (folder / TOKENIZER_NOTE).write_text(_NOTES[manifest.data.tokenizer])


class WholeModel:
    """All stages in one place, for evaluation and sampling, without gradients."""

    def __init__(self, module: Llama) -> None:
        self._module = module
        self._context = module.config.context

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """int64 ``[B, T]`` -> float32 ``[B, T, V]``, T at most the context."""
        logits: Tensor = self._module(tokens)
        return logits.float()

    def loss(self, samples: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Mean cross-entropy in nats a token of (tokens, labels) pairs, int64 ``[B, T]``; NaN of none."""
        total, tokens = 0.0, 0
        for x, labels in samples:
            total += summed_loss(self.logits(x), labels).item()
            tokens += labels.numel()
        return total / tokens if tokens else math.nan

    def generate(
        self, prompt: Sequence[int], count: int, temperature: float, generator: torch.Generator
    ) -> list[int]:
        """``count`` tokens that follow ``prompt``, drawn with ``generator``; the likeliest at temperature 0.

        The model sees at most its context's last tokens. ValueError if the prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(torch.tensor([tokens[-self._context :]]))[0, -1]
            if temperature > 0:
                chances = torch.softmax(logits / temperature, dim=0)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
            else:
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


def load_whole(manifest: Manifest, parameters: Mapping[str, Tensor]) -> WholeModel:
    """A model on the CPU with a copy of the parameters of ``merge_states``. StateError if they are wrong."""
    _check_whole(manifest, parameters)
    module = build_whole(manifest).to_empty(device="cpu")
    module.load_state_dict(dict(parameters))
    return WholeModel(module)
