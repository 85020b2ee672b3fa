"""A runnable stage: forward, backward in two parts, the averaging's arithmetic, the optimizer, the state.

Everything is synchronous and belongs to one compute thread. Parameters, their gradient sum, the average and
the optimizer's moments are each one flat float32 vector ``[n]`` in the order of ``layout``. Shapes: B
microbatch size, T context, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.manifest import Manifest
from swarm.messages import TensorSpec
from swarm.model import state
from swarm.model.deferred import Deferred, Tape
from swarm.model.finite import LARGEST_ACTIVATION, require_finite
from swarm.model.layout import build_stage, initialise, layout_of
from swarm.model.llama import summed_loss
from swarm.model.optimizer import FlatAdamW, clip, gradient_norm

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Saved:
    """A microbatch between its forward and its backward, which empties it."""

    step: int
    graph: tuple[Tensor, Tensor, Tape] | None
    """(input that the gradient is for, output, tape)"""
    tokens: Tensor | None
    """int64 ``[B, T]`` on stage 0"""


@dataclass(frozen=True)
class LossResult:
    """The end of a microbatch's forward: ``grad`` ``[B, T, D]`` is the gradient of ``loss_sum`` (nats)."""

    loss_sum: float
    tokens: int
    grad: Tensor
    deferred: Deferred


@dataclass(frozen=True)
class UpdateStats:
    """``grad_norm`` is the average's norm before it was clipped."""

    grad_norm: float
    learning_rate: float


class StageRuntime:
    """One stage of a run on one device, from its deterministic start.

    Methods that take a tensor raise ValueError if its shape or dtype is wrong, NotFiniteError if it
    holds NaN or infinity, before anything changes. Activations may come in any float dtype and leave in the
    model's.
    """

    def __init__(self, manifest: Manifest, stage: int, device: str | torch.device = "cpu") -> None:
        if not 0 <= stage < len(manifest.stages):
            raise ValueError(f"stage {stage} is not one of the run's {len(manifest.stages)}")
        self.manifest = manifest
        self.stage = stage
        self.device = torch.device(device)
        self.step = 0
        self._module = build_stage(manifest, stage)
        self.layout = layout_of(self._module)
        start = torch.empty(self.layout.total)
        initialise(manifest, self.layout, start)
        self._parameters = start.to(self.device)
        self._sum = torch.zeros_like(self._parameters)
        self._average = torch.zeros_like(self._parameters)
        self._averaged: tuple[int, set[int]] = (0, set())  # parts of the average, and which are set
        self._optimizer = FlatAdamW(manifest.optimizer, self.layout.total, self.layout.matrices, self.device)
        # The parameters that are computed with: the flat vector itself, or its copy in the model's dtype.
        self._dtype = _DTYPES[manifest.model.dtype]
        self._compute = self._parameters.to(self._dtype)
        self._sums: dict[Tensor, Tensor] = {}
        self._bind()

    def _bind(self) -> None:
        """Give the module views of the flat parameters, and each parameter its view of the gradient sum."""
        for slot in self.layout.slots:
            parameter = torch.nn.Parameter(slot.view(self._compute))
            owner, _, attribute = slot.name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, parameter)
            self._sums[parameter] = slot.view(self._sum)
        self._norms = [parameter for parameter in self._sums if parameter.dim() == 1]
        self._head_norms = [self._module.model.norm.weight] if self.stage == 0 else []
        self._block_norms = [
            norm for norm in self._norms if all(norm is not head for head in self._head_norms)
        ]

    @property
    def parameter_count(self) -> int:
        """Numbers in this stage's parameters."""
        return self.layout.total

    def input_spec(self, batch: int) -> TensorSpec:
        """dtype on the wire and shape of what ``forward`` takes."""
        if self.stage == 0:
            return TensorSpec(dtype="int64", shape=(batch, self.manifest.model.context))
        return self.output_spec(batch)

    def output_spec(self, batch: int) -> TensorSpec:
        """dtype on the wire and shape of what ``forward`` gives, of its gradient, and of ``loss``'s input."""
        model = self.manifest.model
        return TensorSpec(dtype=self.manifest.sync.wire_dtype, shape=(batch, model.context, model.width))

    # -- one microbatch

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """``[B, T, D]`` (stage 0: int64 tokens ``[B, T]``) -> output ``[B, T, D]``, what backward needs."""
        x = self._checked(x)
        tape = Tape()
        tokens = x if self.stage == 0 else None
        source = (self._embed(x) if self.stage == 0 else x).detach().requires_grad_()
        with torch.enable_grad():
            y = self._module.blocks(source, tape.linear)
        require_finite(y, "this stage's output", LARGEST_ACTIVATION)
        return y.detach(), Saved(self.step, (source, y, tape), tokens)

    def backward(self, saved: Saved, grad_y: Tensor) -> tuple[Tensor | None, Deferred]:
        """Gradient ``[B, T, D]`` of the output -> of the input (None on stage 0), and the weights' for later.

        RuntimeError if ``saved`` was used before. It is used up also if the gradient overflows on the way
        (NotFiniteError), but not if ``grad_y`` is refused.
        """
        grad_y = self._checked_activation(grad_y)
        if saved.graph is None:
            raise RuntimeError("this microbatch's backward was already computed")
        (source, y, tape), saved.graph = saved.graph, None
        grad_x, *norms = torch.autograd.grad(y, [source, *self._block_norms], grad_y)
        require_finite(grad_x, "this stage's input gradient", LARGEST_ACTIVATION)
        ready = zip(self._block_norms, norms, strict=True)
        if saved.tokens is None:
            return grad_x, Deferred(saved.step, tape, ready)
        embedding = (self._module.model.embed_tokens.weight, saved.tokens, grad_x)
        return None, Deferred(saved.step, tape, ready, embedding)

    def loss(self, y: Tensor, labels: Tensor) -> LossResult:
        """Loss of ``y`` ``[B, T, D]``, the output of the path's last stage, for labels int64 ``[B, T]``."""
        source = self._checked_activation(y).detach().requires_grad_()
        tape = Tape()
        with torch.enable_grad():
            total = summed_loss(self._module.head(source, tape.linear), self._checked_tokens(labels))
        grad, *norms = torch.autograd.grad(total, [source, *self._head_norms])
        loss_sum = self._finite_loss(total)
        ready = zip(self._head_norms, norms, strict=True)
        return LossResult(loss_sum, labels.numel(), grad, Deferred(self.step, tape, ready))

    @torch.no_grad()
    def infer(self, x: Tensor) -> Tensor:
        """``forward`` without a backward."""
        x = self._checked(x)
        return self._module.blocks(self._embed(x) if self.stage == 0 else x)

    @torch.no_grad()
    def infer_loss(self, y: Tensor, labels: Tensor) -> tuple[float, int]:
        """``loss`` without its gradient: (sum in nats, tokens)."""
        logits = self._module.head(self._checked_activation(y))
        return self._finite_loss(summed_loss(logits, self._checked_tokens(labels))), labels.numel()

    @torch.no_grad()
    def accumulate(self, deferred: Deferred) -> None:
        """Compute the weight gradients and add them to the sum.

        RuntimeError if that was done before, or if the microbatch is of another step.
        """
        if deferred.step != self.step:
            raise RuntimeError(f"a microbatch of step {deferred.step} cannot count in step {self.step}")
        for parameter, gradient in deferred.gradients():
            self._sums[parameter] += gradient

    # -- averaging and update

    def gradient_part(self, part: int, parts: int) -> Tensor:
        """Part ``part`` of the gradient sum divided by ``torch.tensor_split``: a view, float32 ``[k]``."""
        return torch.tensor_split(self._sum, parts)[part]

    @torch.no_grad()
    def combine(self, contributions: list[Tensor], tokens: int) -> Tensor:
        """The sum of parts float32 ``[k]``, in the list's order, over ``tokens``; zero if ``tokens`` is 0."""
        if not contributions or tokens < 0:
            raise ValueError("nothing to combine")
        for contribution in contributions:
            if contribution.dtype != torch.float32 or contribution.shape != contributions[0].shape:
                raise ValueError("contributions to one part differ in dtype or shape")
        total = contributions[0].to(self.device, copy=True)
        for contribution in contributions[1:]:
            total += contribution.to(self.device)
        require_finite(total, "the gradients' sum")
        return total.div_(tokens) if tokens else total.zero_()

    @torch.no_grad()
    def set_average(self, part: int, parts: int, values: Tensor) -> None:
        """Take float32 ``[k]`` as part ``part`` of the average; another ``parts`` than before begins anew."""
        target = self.average_part(part, parts)
        if values.dtype != torch.float32 or values.shape != target.shape:
            raise ValueError(f"part {part} of {parts} must be float32 {list(target.shape)}")
        require_finite(values, "the average")
        if self._averaged[0] != parts:
            self._averaged = (parts, set())
        target.copy_(values)
        self._averaged[1].add(part)

    def average_part(self, part: int, parts: int) -> Tensor:
        """Part ``part`` of the last average, also after ``update``: a view, float32 ``[k]``."""
        return torch.tensor_split(self._average, parts)[part]

    def reset_average(self) -> None:
        """Forget the parts set so far: an averaging begins again, from the sums that are still held."""
        self._averaged = (0, set())

    def average_digest(self) -> str:
        """SHA-256 in hex of the whole average. RuntimeError if a part is missing."""
        self._require_average()
        return _sha256(self._average)

    @torch.no_grad()
    def update(self) -> UpdateStats:
        """Clip the average by its norm, apply AdamW, clear the sum, go to the next step.

        RuntimeError if a part of the average is missing.
        """
        self._require_average()
        norm = gradient_norm(self._average)
        # Clipped in the sum's memory, which is free now: the average stays as its digest says, for replicas
        # that ask for it again.
        self._sum.copy_(self._average)
        clip(self._sum, norm, self.manifest.optimizer.clip_norm)
        rate = self._optimizer.apply(self._parameters, self._sum, self.step)
        self.step += 1
        self.discard_gradient()
        self._refresh()
        return UpdateStats(norm, rate)

    def discard_gradient(self) -> None:
        """Clear the gradient sum and forget the parts of the average set so far."""
        self._sum.zero_()
        self.reset_average()

    # -- state

    def digest(self) -> str:
        """SHA-256 in hex of the parameters."""
        return _sha256(self._parameters)

    def flat_parameters(self) -> Tensor:
        """The parameters, float32 ``[n]`` in the order of ``layout``: the runtime's own memory."""
        return self._parameters

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face's names, moments as ``optimizer.exp_avg.<name>``, ``step``: views."""
        tensors = {slot.name: slot.view(self._parameters) for slot in self.layout.slots}
        for moment, flat in self._moments().items():
            tensors |= {state.moment_name(moment, slot.name): slot.view(flat) for slot in self.layout.slots}
        tensors["step"] = torch.tensor(self.step)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a whole state and clear the gradient sum; StateError, and no change, if it is wrong."""
        step = state.check(tensors, self.layout)
        for slot in self.layout.slots:
            slot.view(self._parameters).copy_(tensors[slot.name])
            for moment, flat in self._moments().items():
                slot.view(flat).copy_(tensors[state.moment_name(moment, slot.name)])
        self.step = step
        self.discard_gradient()
        self._refresh()

    @property
    def max_image_bytes(self) -> int:
        """No honest ``state_image`` is longer: the limit of what a download may allocate."""
        return state.max_image_bytes(self.layout)

    def skip_to(self, step: int) -> None:
        """Take the state for that of a later step, in which the optimizer's schedule then is.

        ValueError if ``step`` is an earlier one.
        """
        if step < self.step:
            raise ValueError(f"the state is of step {self.step}, after {step}")
        self.step = step
        self.discard_gradient()

    def state_image(self) -> bytes:
        """The state as a safetensors image; replicas with equal states give equal bytes."""
        return state.pack(self.state_tensors())

    def load_image(self, image: bytes) -> None:
        """``load_state`` of an image from anywhere. StateError."""
        self.load_state(state.unpack(image, self.layout))

    # -- inside

    def _moments(self) -> dict[str, Tensor]:
        return {moment: getattr(self._optimizer, moment) for moment in state.MOMENTS}

    def _refresh(self) -> None:
        if self._compute is not self._parameters:
            self._compute.copy_(self._parameters)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._module.embed(tokens)

    def _checked(self, x: Tensor) -> Tensor:
        return self._checked_tokens(x) if self.stage == 0 else self._checked_activation(x)

    def _checked_tokens(self, tokens: Tensor) -> Tensor:
        model = self.manifest.model
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[1] > model.context:
            raise ValueError(f"tokens must be int64 [B, T] with T at most {model.context}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.vocabulary:
            raise ValueError(f"a token lies outside the vocabulary of {model.vocabulary}")
        return tokens.to(self.device)

    def _checked_activation(self, x: Tensor) -> Tensor:
        model = self.manifest.model
        shaped = x.dim() == 3 and x.shape[1] <= model.context and x.shape[2] == model.width
        if not (shaped and x.is_floating_point()):
            raise ValueError(f"an activation must be floats [B, T, {model.width}], T at most {model.context}")
        require_finite(x, "an activation or its gradient", LARGEST_ACTIVATION)
        return x.to(self.device, self._dtype)

    def _finite_loss(self, total: Tensor) -> float:
        require_finite(total, "the loss")
        return total.item()

    def _require_average(self) -> None:
        parts, there = self._averaged
        if not parts or len(there) != parts:
            raise RuntimeError("the average is not complete")


def _sha256(flat: Tensor) -> str:
    return hashlib.sha256(flat.detach().cpu().numpy().data).hexdigest()
