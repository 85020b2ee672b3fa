"""Texts to train on, divided into a training and a held-out part."""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.errors import UserError

VALIDATION_PART = 20
"""One part of so many, the text's last, is held out."""

MAX_CORPUS_BYTES = 1 << 32
"""Plain bytes; a compressed file that would exceed it is refused while it is read."""

SUFFIX = ".txt.xz"


class CorpusError(UserError):
    """A corpus that cannot be had; the message says why and what to try."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as bytes: ``train`` and ``validation`` are uint8 ``[n]``, read-only, and do not overlap."""

    name: str
    train: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]
    sha256: str
    """SHA-256 of the whole plain text, in hex: two peers that agree on it draw the same samples."""


def shipped_corpora() -> tuple[str, ...]:
    """Names of the texts in this package."""
    files = resources.files("swarm.data").joinpath("corpora").iterdir()
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX)))


def load_corpus(name_or_path: str | Path) -> Corpus:
    """Load a shipped text by its name, or a file (plain, or ``.xz``) by its path.

    A ``str`` is only ever a shipped name: it may come from a stranger's manifest, which must not choose
    what is read from a volunteer's disk. A ``Path`` is the word of the person at this machine.
    Raises CorpusError.
    """
    if isinstance(name_or_path, Path):
        return _divide(name_or_path.name, _read(name_or_path))
    if name_or_path not in shipped_corpora():
        raise CorpusError(f"no corpus is named {name_or_path!r}: shipped are {', '.join(shipped_corpora())}")
    with resources.as_file(resources.files("swarm.data") / "corpora" / (name_or_path + SUFFIX)) as path:
        return _divide(name_or_path, _read(path))


def _read(path: Path) -> bytes:
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rb") as file:
            text: bytes = file.read(MAX_CORPUS_BYTES + 1)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise CorpusError(f"cannot read the corpus {path}: {error}") from error
    if len(text) > MAX_CORPUS_BYTES:
        raise CorpusError(f"the corpus {path} has more than {MAX_CORPUS_BYTES} bytes: give a shorter one")
    return text


def _divide(name: str, text: bytes) -> Corpus:
    cut = len(text) - len(text) // VALIDATION_PART
    data = np.frombuffer(text, dtype=np.uint8)
    return Corpus(name, data[:cut], data[cut:], hashlib.sha256(text).hexdigest())
