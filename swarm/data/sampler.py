"""Samples as a pure function of (seed, step, index): any origin can draw any microbatch of a run.

The randomness is counter-based (Philox4x64: Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"). Only raw words of the bit generator are used, whose stream numpy promises to keep (NEP 19).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm.data.corpus import Corpus, CorpusError
from swarm.manifest import Manifest

Sample = tuple[Tensor, Tensor]
"""(tokens, labels), both int64 ``[B, T]``; a label is the token that follows."""

_TRAINING = 0x7261_696E  # tells this use of a run's seed from others


def training_batch(
    text: npt.NDArray[np.uint8], seed: int, step: int, index: int, batch: int, context: int
) -> Sample:
    """``batch`` windows of ``text`` (uint8 ``[n]``), each at a place drawn from (seed, step, index) alone."""
    places = len(text) - context
    _check(places)
    # The low counter words are the generator's own; step and index in the high ones keep draws apart.
    words = np.random.Philox(key=[seed, _TRAINING], counter=[0, 0, index, step]).random_raw(batch)
    return _windows(text, [int(word) * places >> 64 for word in words], context)


def validation_batch(text: npt.NDArray[np.uint8], number: int, batch: int, context: int) -> Sample:
    """Batch ``number`` of ``text``'s windows side by side, in a fixed order that spreads the first few."""
    windows = (len(text) - 1) // context
    _check(windows)
    stride = max(1, round(windows * 0.618))  # the golden section leaves no large gap at any count
    while np.gcd(stride, windows) != 1:
        stride += 1
    rows = range(number * batch, (number + 1) * batch)
    return _windows(text, [row * stride % windows * context for row in rows], context)


def _check(places: int) -> None:
    if places < 1:
        raise CorpusError("the corpus is shorter than one context: give a longer text or a smaller context")


def _windows(text: npt.NDArray[np.uint8], starts: list[int], context: int) -> Sample:
    rows = np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64)
    whole = torch.from_numpy(rows)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


class Sampler:
    """A run's samples: its seed, batch and context bound to its text."""

    def __init__(self, manifest: Manifest, corpus: Corpus) -> None:
        self._corpus = corpus
        self._seed = manifest.seed
        self._batch = manifest.microbatch_size
        self._context = manifest.model.context
        _check(len(corpus.train) - self._context)
        _check((len(corpus.validation) - 1) // self._context)

    def training(self, step: int, index: int) -> Sample:
        """The microbatch ``index`` of ``step``: (tokens, labels), int64 ``[B, T]`` each."""
        return training_batch(self._corpus.train, self._seed, step, index, self._batch, self._context)

    def validation(self, number: int) -> Sample:
        """Batch ``number`` of the held-out text, the same for every seed; past its end it begins anew."""
        return validation_batch(self._corpus.validation, number, self._batch, self._context)
