"""A single-process trainer to hold a swarm's run against: plain autograd and a textbook's (or torch's) AdamW.

It shares with the swarm what a run is made of (the model's formulas, the start, the sampler, the order of
parameters) and nothing of how the swarm computes: no deferred gradients, no flat optimizer, no messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.manifest import Manifest, OptimizerSection
from swarm.model.layout import Layout, build_stage, initialise, layout_of
from swarm.model.llama import Llama, summed_loss


@dataclass(frozen=True)
class CountedMicrobatch:
    """A microbatch that the step counts: ``peers[i]`` computed ``path_stages[i]``, the origin first."""

    index: int
    path_stages: tuple[int, ...]
    peers: tuple[str, ...]


class TextbookAdamW:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) and clipping, parameter by parameter, nothing in place.

    Each operation rounds once, in the order of the formulas, as the swarm's optimizer promises to. A run can
    therefore be followed for many steps. torch's fused operations differ in last bits at once, and training
    amplifies that: on the demo's model the gradients were apart by 1e-7 at step 1 and by 8e-4 at step 19.
    """

    def __init__(self, parameters: Sequence[Tensor], section: OptimizerSection) -> None:
        self.parameters = parameters
        self.section = section
        self.m = [torch.zeros_like(parameter) for parameter in parameters]
        self.v = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], step: int) -> None:
        section = self.section
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        scale = min(1.0, section.clip_norm / (norm + 1e-6))
        rate, t = scheduled_rate(section, step), step + 1
        for i, parameter in enumerate(self.parameters):
            g = gradients[i] * scale
            self.m[i] = section.beta1 * self.m[i] + (1 - section.beta1) * g
            self.v[i] = section.beta2 * self.v[i] + (1 - section.beta2) * (g * g)
            denominator = self.v[i].sqrt() / math.sqrt(1 - section.beta2**t) + section.eps
            decay = section.weight_decay if parameter.dim() == 2 else 0.0
            moved = rate / (1 - section.beta1**t) * (self.m[i] / denominator)
            parameter.copy_(parameter * (1 - rate * decay) - moved)


class TorchAdamW:
    """torch's own optimizer and clipping, whose last bits differ from the textbook's."""

    def __init__(self, parameters: Sequence[Tensor], section: OptimizerSection) -> None:
        self.parameters = parameters
        self.section = section
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": section.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)

    def update(self, gradients: Sequence[Tensor], step: int) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.section.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = scheduled_rate(self.section, step)
        self.optimizer.step()


def scheduled_rate(section: OptimizerSection, step: int) -> float:
    """Linear warm-up to the full rate, then half a cosine down to the least."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    done = (step - section.warmup_steps) / max(1, section.total_steps - section.warmup_steps)
    falling = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return section.min_learning_rate + falling * (section.learning_rate - section.min_learning_rate)


class _Stage:
    """One stage's module and its optimizer."""

    def __init__(self, manifest: Manifest, stage: int, optimizer: type[TextbookAdamW | TorchAdamW]) -> None:
        self.module: Llama = build_stage(manifest, stage)
        self.layout: Layout = layout_of(self.module)
        flat = torch.empty(self.layout.total)
        initialise(manifest, self.layout, flat)
        self.module.to_empty(device="cpu")
        self.module.load_state_dict({slot.name: slot.view(flat) for slot in self.layout.slots})
        named = dict(self.module.named_parameters())
        self.parameters = [named[slot.name] for slot in self.layout.slots]
        self.optimizer = optimizer(self.parameters, manifest.optimizer)

    def update(self, average: Tensor, step: int) -> None:
        self.optimizer.update([slot.view(average) for slot in self.layout.slots], step)


class ReferenceTrainer:
    """All stages of a run in one process, at the step ``self.number``."""

    def __init__(
        self, manifest: Manifest, optimizer: type[TextbookAdamW | TorchAdamW] = TextbookAdamW
    ) -> None:
        self.manifest = manifest
        self.number = 0
        self.stages = [_Stage(manifest, stage, optimizer) for stage in range(len(manifest.stages))]
        self.sampler = Sampler(manifest, load_corpus(manifest.data.corpus))

    def parameters(self, stage: int) -> Tensor:
        """The stage's parameters, float32 ``[n]``, in the order of ``StageRuntime.flat_parameters``."""
        return torch.cat([parameter.detach().flatten() for parameter in self.stages[stage].parameters])

    def step(
        self,
        counted: Sequence[CountedMicrobatch],
        order: Mapping[tuple[int, str], Sequence[int]],
        members: Mapping[int, Sequence[str]],
    ) -> dict[int, Tensor]:
        """One optimizer step of every stage; returns the averaged gradients, float32 ``[n]`` by stage.

        ``order[stage, peer]`` lists the microbatches (by index) in the order in which the peer added their
        gradients, ``members[stage]`` the peers in the order in which their sums were added. A peer that is
        no member of its stage (it died before the averaging) contributes neither gradient nor tokens.
        """
        by_index = {microbatch.index: microbatch for microbatch in counted}
        if len(by_index) != len(counted):
            raise ValueError("a microbatch is counted twice")
        gradients = {index: self.gradients(microbatch) for index, microbatch in by_index.items()}
        averages = {}
        for stage in range(len(self.stages)):
            total = torch.zeros(self.stages[stage].layout.total)
            tokens = 0
            for peer in members[stage]:
                indices = order.get((stage, peer), ())
                self._require_computed(by_index, stage, peer, indices)
                mine = torch.zeros_like(total)
                for index in indices:
                    mine += gradients[index][stage]
                    tokens += self.manifest.microbatch_size * self.manifest.model.context
                total += mine
            averages[stage] = total / max(1, tokens)
        for stage, average in averages.items():
            self.stages[stage].update(average, self.number)
        self.number += 1
        return averages

    def _require_computed(
        self, counted: Mapping[int, CountedMicrobatch], stage: int, peer: str, indices: Sequence[int]
    ) -> None:
        """``indices`` must be exactly the counted microbatches whose path has ``peer`` at ``stage``."""
        expected = {
            index
            for index, microbatch in counted.items()
            if (stage, peer) in zip(microbatch.path_stages, microbatch.peers, strict=True)
        }
        if sorted(indices) != sorted(expected):
            raise ValueError(
                f"{peer} added {sorted(indices)} in stage {stage}; {sorted(expected)} are counted"
            )

    def gradients(self, microbatch: CountedMicrobatch) -> dict[int, Tensor]:
        """Gradients of the summed loss of one microbatch, float32 ``[n]`` for each stage of its path."""
        if microbatch.path_stages[0] != 0 or len(set(microbatch.path_stages)) != len(microbatch.path_stages):
            raise ValueError("a path starts at stage 0 and visits no stage twice")
        tokens, labels = self.sampler.training(self.number, microbatch.index)
        origin = self.stages[0].module
        x = origin.embed(tokens)
        for stage in microbatch.path_stages:
            x = self.stages[stage].module.blocks(x)
        loss = summed_loss(origin.head(x), labels)
        flat = [parameter for stage in microbatch.path_stages for parameter in self.stages[stage].parameters]
        parts = iter(torch.autograd.grad(loss, flat))
        return {
            stage: torch.cat([next(parts).flatten() for _ in self.stages[stage].parameters])
            for stage in microbatch.path_stages
        }
