"""The LLaMA architecture (Touvron et al. 2023) with the names and numerics of Hugging Face's Llama.

In the spirit of nanoGPT: flat and plain. A ``Llama`` may be the whole model or one stage of it; either way
its ``state_dict`` has the names of the whole (``model.layers.7.mlp.up_proj.weight``). Sizes in shapes:
B sequences, T tokens, D width, H heads, K key and value heads, E = D / H, V vocabulary.

Every product with a matrix goes through a ``LinearOp`` that the caller may replace:
``torch.nn.functional.linear`` is plain autograd, ``swarm.model.deferred.Tape.linear`` puts the weight
gradients off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.manifest import ModelSection

LinearOp = Callable[[Tensor, Tensor], Tensor]
"""(x ``[..., in]``, weight ``[out, in]``) -> ``[..., out]``."""


class Linear(nn.Module):
    """A matrix ``[out, in]``; no bias anywhere in a LLaMA. Not initialised (see ``initialise``)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor, linear: LinearOp) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelSection, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, float32 ``[context, E]``, both halves of E alike."""
    size = config.width // config.heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(config.context).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x ``[B, heads, T, E]``; dimension i is paired with i + E/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """``[B, K, T, E]`` -> ``[B, K * times, T, E]``, the copies of a head side by side."""
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(-1, -1, times, -1, -1).reshape(batch, heads * times, length, size)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023): H / K heads share a key and value."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.size = config.width // config.heads
        self.q_proj = Linear(config.width, self.heads * self.size)
        self.k_proj = Linear(config.width, self.kv_heads * self.size)
        self.v_proj = Linear(config.width, self.kv_heads * self.size)
        self.o_proj = Linear(self.heads * self.size, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, linear: LinearOp) -> Tensor:
        batch, length, width = x.shape
        q = self.q_proj(x, linear).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x, linear).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x, linear).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        if group > 1:  # not enable_gqa, which torch 2.4 lacks
            k, v = repeat_heads(k, group), repeat_heads(v, group)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, width), linear)
        return result


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.ffn_width)
        self.up_proj = Linear(config.width, config.ffn_width)
        self.down_proj = Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor, linear: LinearOp) -> Tensor:
        hidden = F.silu(self.gate_proj(x, linear)) * self.up_proj(x, linear)
        result: Tensor = self.down_proj(hidden, linear)
        return result


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, linear: LinearOp) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, linear)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x), linear)
        return result


class Trunk(nn.Module):
    """What Hugging Face calls ``model``: the embedding, some layers under their numbers, the final norm."""

    def __init__(self, config: ModelSection, layers: Iterable[int], ends: bool) -> None:
        super().__init__()
        if ends:
            self.embed_tokens = Linear(config.width, config.vocabulary)
        self.layers = nn.ModuleDict({str(number): Block(config) for number in layers})
        if ends:
            self.norm = RMSNorm(config.width, config.norm_eps)


class Llama(nn.Module):
    """Layers ``layers`` of the model, and with ``ends`` also its embedding, final norm and head.

    The parameters are not initialised and stand in ``float32`` on the CPU; the caller gives them values.
    """

    def __init__(self, config: ModelSection, layers: Iterable[int], *, ends: bool) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, layers, ends)
        if ends:
            self.lm_head = Linear(config.width, config.vocabulary)
        self._rotary: tuple[Tensor, Tensor] | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 ``[B, T]`` -> ``[B, T, D]``."""
        return F.embedding(tokens, self.model.embed_tokens.weight)

    def blocks(self, x: Tensor, linear: LinearOp = F.linear) -> Tensor:
        """``[B, T, D]`` -> ``[B, T, D]`` through these layers; T is at most the model's context."""
        if self._rotary is None or self._rotary[0].device != x.device:
            self._rotary = rotary_table(self.config, x.device)
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in self._rotary)
        for block in self.model.layers.values():
            x = block(x, cos, sin, linear)
        return x

    def head(self, x: Tensor, linear: LinearOp = F.linear) -> Tensor:
        """``[B, T, D]`` -> logits ``[B, T, V]`` through the final norm and the head."""
        logits: Tensor = self.lm_head(self.model.norm(x), linear)
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ``[B, T]`` -> logits ``[B, T, V]``, of a model that has both ends."""
        return self.head(self.blocks(self.embed(tokens)))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats summed over all tokens, of logits ``[B, T, V]`` and labels int64 ``[B, T]``."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
