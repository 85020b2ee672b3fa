"""Backward in two parts: the input gradient at once, the weight gradients when the microbatch counts.

The B/W split of zero-bubble pipelining (Qi et al. 2023). A matrix keeps its input and its output gradient;
``Deferred.gradients`` computes the products, with plain autograd's very operations, so the bits are equal.
The gradients of norms are small and are computed with the input gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class _Linear(torch.autograd.Function):
    """``x @ weight.T`` whose backward notes (weight, x, output gradient) on the tape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tape: Tape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tape = tape
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        ctx.tape.products.append((weight, x.detach().reshape(-1, weight.shape[1]), gradient))
        return gradient.mm(weight).view(x.shape), None, None


class Tape:
    """What one microbatch's backward leaves behind for its weight gradients."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []
        """(weight ``[out, in]``, its input ``[n, in]``, its output's gradient ``[n, out]``)"""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``torch.nn.functional.linear`` without a gradient for ``weight``."""
        result: Tensor = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return result


class Deferred:
    """Weight gradients of one microbatch, not yet computed.

    ``ready`` holds (parameter, gradient) pairs that are known; ``embedding`` is (weight ``[V, D]``, tokens
    int64 ``[B, T]``, gradient ``[B, T, D]``).
    """

    def __init__(
        self,
        step: int,
        tape: Tape,
        ready: Iterable[tuple[Tensor, Tensor]],
        embedding: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.step = step
        self._products = tape.products
        self._ready = list(ready)
        self._embedding = embedding
        self._used = False

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, gradient) for each parameter. Once only: RuntimeError the next time."""
        if self._used:
            raise RuntimeError("the weight gradients of this microbatch were already computed")
        self._used = True
        while self._products:
            weight, x, gradient = self._products.pop()
            yield weight, gradient.t().mm(x)
        if self._embedding is not None:
            weight, tokens, gradient = self._embedding
            self._embedding = None
            yield (
                weight,
                torch.ops.aten.embedding_dense_backward(gradient, tokens, weight.shape[0], -1, False),
            )
        yield from self._ready
        self._ready = []
