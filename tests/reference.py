"""A single-process trainer to hold a swarm's run against: plain autograd, torch's own AdamW and clipping.

It shares with the swarm what a run is made of (the model's formulas, the start, the sampler, the order of
parameters) and nothing of how the swarm computes: no deferred gradients, no flat optimizer, no messages.
"""

from __future__ import annotations

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


class _Stage:
    """One stage's module, its optimizer and its schedule."""

    def __init__(self, manifest: Manifest, stage: int) -> None:
        self.module: Llama = build_stage(manifest, stage)
        self.layout: Layout = layout_of(self.module)
        flat = torch.empty(self.layout.total)
        initialise(manifest, self.layout, flat)
        self.module.to_empty(device="cpu")
        self.module.load_state_dict({slot.name: slot.view(flat) for slot in self.layout.slots})
        named = dict(self.module.named_parameters())
        self.parameters = [named[slot.name] for slot in self.layout.slots]
        section = manifest.optimizer
        groups = [
            {"params": [p for p in self.parameters if p.dim() == 2], "weight_decay": section.weight_decay},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (section.beta1, section.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=section.learning_rate, betas=betas, eps=section.eps)
        self.scheduler = _schedule(self.optimizer, section)
        self.clip_norm = section.clip_norm

    def update(self, average: Tensor) -> None:
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            parameter.grad = slot.view(average).clone()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.scheduler.step()


def _schedule(
    optimizer: torch.optim.Optimizer, section: OptimizerSection
) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up to the full rate, then half a cosine, from torch's own schedulers."""
    rates = torch.optim.lr_scheduler
    span = max(1, section.total_steps - section.warmup_steps)
    cosine = rates.CosineAnnealingLR(optimizer, T_max=span, eta_min=section.min_learning_rate)
    if section.warmup_steps == 0:
        return cosine
    first = 1 / section.warmup_steps
    warmup = rates.LinearLR(optimizer, start_factor=first, total_iters=max(1, section.warmup_steps - 1))
    return rates.SequentialLR(optimizer, [warmup, cosine], milestones=[section.warmup_steps])


class ReferenceTrainer:
    """All stages of a run in one process, at the step ``self.number``."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.number = 0
        self.stages = [_Stage(manifest, stage) for stage in range(len(manifest.stages))]
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
            self.stages[stage].update(average)
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
