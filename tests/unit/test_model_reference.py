"""Stages driven by hand as a swarm drives them, against the single-process reference trainer."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from model_cases import small_manifest
from torch import Tensor

from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.manifest import Manifest
from swarm.model.deferred import Deferred
from swarm.model.stage import StageRuntime
from tests.reference import CountedMicrobatch, ReferenceTrainer, TextbookAdamW, TorchAdamW

Key = tuple[int, str]


@dataclass
class HandSwarm:
    """Two replicas of each stage, ``a`` and ``b``, without a network."""

    manifest: Manifest

    def __post_init__(self) -> None:
        stages = range(len(self.manifest.stages))
        self.runtimes = {
            (stage, name): StageRuntime(self.manifest, stage) for stage in stages for name in "ab"
        }
        self.sampler = Sampler(self.manifest, load_corpus(self.manifest.data.corpus))

    def microbatch(self, step: int, counted: CountedMicrobatch) -> list[tuple[Key, Deferred]]:
        hops = list(zip(counted.path_stages, counted.peers, strict=True))
        x, labels = self.sampler.training(step, counted.index)
        saved = []
        for hop in hops:
            x, kept = self.runtimes[hop].forward(x)
            saved.append(kept)
        result = self.runtimes[hops[0]].loss(x, labels)
        left: list[tuple[Key, Deferred]] = [(hops[0], result.deferred)]
        gradient: Tensor | None = result.grad
        for hop, kept in zip(reversed(hops), reversed(saved), strict=True):
            assert gradient is not None
            gradient, deferred = self.runtimes[hop].backward(kept, gradient)
            left.append((hop, deferred))
        assert gradient is None
        return left

    def average(self, stage: int, members: list[str], tokens: int) -> Tensor:
        """A butterfly: each member combines one part, and all take the same bytes."""
        parts = len(members)
        for part in range(parts):
            owner = self.runtimes[stage, members[part]]
            sums = [self.runtimes[stage, name].gradient_part(part, parts) for name in members]
            values = owner.combine(sums, tokens)
            for name in members:
                self.runtimes[stage, name].set_average(part, parts, values)
        digests = {self.runtimes[stage, name].average_digest() for name in members}
        assert len(digests) == 1
        first = self.runtimes[stage, members[0]]
        sums = [self.runtimes[stage, name].gradient_part(0, 1) for name in members]
        return first.combine(sums, tokens)


def draw_step(generator: random.Random, stages: int, count: int) -> list[CountedMicrobatch]:
    """``count`` microbatches that leave out one stage each, at random replicas, in any order of stages."""
    counted = []
    for index in range(count):
        others = generator.sample(range(1, stages), stages - 2)
        path = (0, *others)
        counted.append(CountedMicrobatch(index, path, tuple(generator.choice("ab") for _ in path)))
    return counted


def members_of(stages: int, lost: Key | None) -> dict[int, list[str]]:
    return {stage: [name for name in "ba" if (stage, name) != lost] for stage in range(stages)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    "changes",
    [{}, {"width": 128, "heads": 4, "ffn_width": 384, "context": 64, "microbatch_size": 4}],
    ids=["small", "wide"],
)
@pytest.mark.parametrize("lost", [None, (2, "a")], ids=["all-live", "one-dies-at-step-1"])
@pytest.mark.parametrize("optimizer", [TextbookAdamW, TorchAdamW])
def test_a_run_by_hand_agrees_with_the_reference(
    lost: Key | None, changes: dict[str, int], optimizer: type[TextbookAdamW | TorchAdamW]
) -> None:
    manifest = small_manifest((1, 1, 1, 1), path_length=3, **changes)
    generator = random.Random(4)
    swarm, reference = HandSwarm(manifest), ReferenceTrainer(manifest, optimizer)
    for step in range(3):
        counted = draw_step(generator, 4, count=8)
        dead = lost if step >= 1 else None
        if step >= 2 and dead:  # by then nobody plans with it
            counted = [_without(microbatch, dead) for microbatch in counted]
        members = members_of(4, dead)
        left = [swarm.microbatch(step, microbatch) for microbatch in counted]
        order: dict[Key, list[int]] = {}
        for index in generator.sample(range(8), 8):  # commits come in any order
            for key in dict.fromkeys(key for key, _ in left[index]):
                order.setdefault(key, []).append(index)
            for key, deferred in left[index]:
                swarm.runtimes[key].accumulate(deferred)
        averages = reference.step(counted, order, members)
        for stage in range(4):
            counts = [len(order.get((stage, name), ())) for name in members[stage]]
            tokens = sum(counts) * manifest.microbatch_size * manifest.model.context
            assert relative(swarm.average(stage, members[stage], tokens), averages[stage]) < 1e-6
            for name in members[stage]:
                swarm.runtimes[stage, name].update()
                ours = swarm.runtimes[stage, name].flat_parameters()
                assert (ours - reference.parameters(stage)).abs().max() < 1e-5
            assert len({swarm.runtimes[stage, name].digest() for name in members[stage]}) == 1
    start = StageRuntime(manifest, 1).flat_parameters()
    assert (reference.parameters(1) - start).abs().max() > 5e-3  # far more than they may differ


def _without(microbatch: CountedMicrobatch, dead: Key) -> CountedMicrobatch:
    hops = zip(microbatch.path_stages, microbatch.peers, strict=True)
    peers = tuple("b" if hop == dead else hop[1] for hop in hops)
    return CountedMicrobatch(microbatch.index, microbatch.path_stages, peers)


def test_the_reference_notices_a_wrong_account() -> None:
    manifest = small_manifest((1, 1, 1), path_length=2)
    microbatch = CountedMicrobatch(0, (0, 2), ("a", "b"))
    members = {0: ["a"], 1: ["a"], 2: ["b"]}
    order = {(0, "a"): [0], (2, "b"): [0]}
    for wrong_order in ({(0, "a"): [0]}, order | {(1, "a"): [0]}, order | {(2, "b"): [0, 0]}):
        with pytest.raises(ValueError, match="are counted"):
            ReferenceTrainer(manifest).step([microbatch], wrong_order, members)
    with pytest.raises(ValueError, match="twice"):
        ReferenceTrainer(manifest).step([microbatch, microbatch], order, members)
    with pytest.raises(ValueError, match="stage 0"):
        ReferenceTrainer(manifest).step([CountedMicrobatch(0, (1, 2), ("a", "b"))], order, members)
    averages = ReferenceTrainer(manifest).step([microbatch], order, members)
    assert not averages[1].any()  # the stage that the path skips
    assert averages[2].any()


def test_a_missing_microbatch_shows_far_above_the_tolerance() -> None:
    """The agreement test could not pass with one microbatch dropped or one counted twice."""
    manifest = small_manifest((1, 1, 1), path_length=3)
    swarm, reference = HandSwarm(manifest), ReferenceTrainer(manifest)
    counted = [CountedMicrobatch(index, (0, 1, 2), ("a", "a", "a")) for index in range(8)]
    order = {(stage, "a"): list(range(8)) for stage in range(3)}
    averages = reference.step(counted, order, {stage: ["a"] for stage in range(3)})
    for microbatch in counted[1:]:
        for key, deferred in swarm.microbatch(0, microbatch):
            swarm.runtimes[key].accumulate(deferred)
    for stage in range(3):
        ours = swarm.average(stage, ["a"], 8 * 3 * 24)
        assert torch.isfinite(ours).all()
        assert relative(ours, averages[stage]) > 1e-2
