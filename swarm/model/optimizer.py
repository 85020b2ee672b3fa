"""AdamW on one flat vector, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm.manifest import OptimizerSection


def learning_rate(section: OptimizerSection, step: int) -> float:
    """The rate of update number ``step`` (from 0): linear warm-up, then a cosine to ``min_learning_rate``."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    span = max(1, section.total_steps - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / span)
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_learning_rate + share * (section.learning_rate - section.min_learning_rate)


def gradient_norm(gradient: Tensor) -> float:
    """The 2-norm, summed in float64: the order of summation then all but never shows in a float32."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def clip(gradient: Tensor, norm: float, limit: float) -> None:
    """Scale ``gradient`` in place to the norm ``limit`` if it is above, as ``clip_grad_norm_`` does."""
    if (scale := limit / (norm + 1e-6)) < 1.0:
        gradient.mul_(scale)


class FlatAdamW:
    """AdamW (Loshchilov & Hutter 2019) on flat float32 vectors ``[n]``; the first ``matrices`` decay.

    Every operation is a single one of + - * / sqrt, each rounded as IEEE 754 says; there is no fused
    multiply-add, whose use depends on the instruction set and on how threads divide a vector. Replicas with
    the same average therefore stay bit-identical, whatever they run on.
    """

    def __init__(self, section: OptimizerSection, total: int, matrices: int, device: torch.device) -> None:
        self.section = section
        self.matrices = matrices
        self.exp_avg = torch.zeros(total, device=device)
        self.exp_avg_sq = torch.zeros(total, device=device)

    def apply(self, parameters: Tensor, gradient: Tensor, step: int) -> float:
        """Update ``parameters`` in place with update number ``step`` (from 0); returns the learning rate."""
        section = self.section
        rate = learning_rate(section, step)
        scratch = torch.mul(gradient, 1.0 - section.beta1)
        self.exp_avg.mul_(section.beta1).add_(scratch)
        torch.mul(gradient, gradient, out=scratch).mul_(1.0 - section.beta2)
        self.exp_avg_sq.mul_(section.beta2).add_(scratch)
        correction1 = 1.0 - section.beta1 ** (step + 1)
        correction2 = 1.0 - section.beta2 ** (step + 1)
        torch.sqrt(self.exp_avg_sq, out=scratch)
        scratch.div_(math.sqrt(correction2)).add_(section.eps)
        torch.div(self.exp_avg, scratch, out=scratch).mul_(rate / correction1)
        parameters[: self.matrices].mul_(1.0 - rate * section.weight_decay)
        parameters.sub_(scratch)
        return rate
