"""The corpus that ships, its tokenizer and the sampler."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import small_manifest

from swarm.data import corpus as corpus_module
from swarm.data.corpus import CorpusError, load_corpus, shipped_corpora
from swarm.data.sampler import Sampler, training_batch, validation_batch
from swarm.data.tokenizer import BytesTokenizer

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)
PINNED = [84, 38, 181, 78, 148, 143]


def test_the_shipped_text_is_a_megabyte_of_english() -> None:
    assert shipped_corpora() == ("kjv",)
    corpus = load_corpus("kjv")
    text = bytes(corpus.train) + bytes(corpus.validation)
    assert len(text) == 4_153_204
    assert text.startswith(b"Genesis 1\n\nIn the beginning God created the heaven and the earth.\n")
    assert text.isascii()
    words = text.lower().split()
    assert words.count(b"the") > 50_000
    readme = Path(corpus_module.__file__).parent / "corpora" / "README.md"
    assert corpus.sha256 in readme.read_text()


def test_validation_is_the_last_twentieth() -> None:
    corpus = load_corpus("kjv")
    assert len(corpus.validation) == (len(corpus.train) + len(corpus.validation)) // 20
    assert bytes(corpus.validation).endswith(b"be with you all. Amen.\n")
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


@pytest.mark.parametrize("name", ["nothing", "", "../corpora/kjv", "/etc/passwd", "kjv.txt.xz"])
def test_a_manifest_can_name_nothing_but_what_ships(name: str) -> None:
    with pytest.raises(CorpusError, match="shipped are kjv"):
        load_corpus(name)


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    plain, packed = tmp_path / "text.txt", tmp_path / "text.txt.xz"
    plain.write_bytes(b"0123456789" * 10)
    packed.write_bytes(lzma.compress(b"0123456789" * 10))
    assert load_corpus(plain).sha256 == load_corpus(packed).sha256
    assert bytes(load_corpus(packed).validation) == b"56789"


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, cut = tmp_path / "broken.xz", tmp_path / "cut.xz"
    broken.write_bytes(b"not xz")
    cut.write_bytes(lzma.compress(bytes(range(256)) * 99)[:-20])
    for path in (tmp_path / "missing.txt", tmp_path, broken, cut):
        with pytest.raises(CorpusError, match="cannot read the corpus"):
            load_corpus(path)
    monkeypatch.setattr(corpus_module, "MAX_CORPUS_BYTES", 100)
    bomb = tmp_path / "bomb.xz"
    bomb.write_bytes(lzma.compress(b"0" * 101))
    with pytest.raises(CorpusError, match="more than 100 bytes"):
        load_corpus(bomb)


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = BytesTokenizer()
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)
    assert tokenizer.decode(tokens) == text


def test_half_a_character_decodes_to_a_mark() -> None:
    assert BytesTokenizer().decode([0x41, 0xC3]) == "A\ufffd"
    with pytest.raises(ValueError, match="256"):
        BytesTokenizer().decode([256])


def test_a_sample_is_a_function_of_step_and_index() -> None:
    tokens, labels = training_batch(TEXT, seed=1, step=2, index=3, batch=4, context=16)
    assert tokens.shape == labels.shape == (4, 16)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    again = training_batch(TEXT, seed=1, step=2, index=3, batch=4, context=16)
    assert torch.equal(again[0], tokens)
    others = [(0, 2, 3), (1, 1, 3), (1, 2, 2), (1, 3, 2), (2, 2, 3)]
    for seed, step, index in others:
        other = training_batch(TEXT, seed=seed, step=step, index=index, batch=4, context=16)
        assert not torch.equal(other[0], tokens)


def test_samples_do_not_change_between_versions() -> None:
    """Runs go on across releases: the same place must be drawn for ever."""
    tokens, _ = training_batch(TEXT, seed=7, step=5, index=11, batch=6, context=4)
    assert tokens[:, 0].tolist() == PINNED


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**48 - 1), st.integers(0, 2**32 - 1), st.integers(17, 300))
def test_every_window_lies_in_the_text(seed: int, step: int, index: int, length: int) -> None:
    text = TEXT[:length]
    tokens, labels = training_batch(text, seed=seed, step=step, index=index, batch=3, context=16)
    whole = bytes(text)
    for row, following in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert bytes([*row, following[-1]]) in whole


def test_training_draws_every_place_about_equally() -> None:
    text = np.arange(40, dtype=np.uint8)
    starts = torch.cat([training_batch(text, 0, step, 0, 50, 8)[0][:, 0] for step in range(40)])
    counts = torch.bincount(starts, minlength=32)
    assert counts.shape == (32,)  # 40 - 8 places, the last label included
    expected = 2000 / 32
    assert ((counts - expected) ** 2 / expected).sum() < 61.1  # chi-squared, 31 degrees: 0.1 % chance


def test_validation_batches_are_fixed_spread_and_do_not_repeat() -> None:
    text = np.arange(1001) // 4
    text = text.astype(np.uint8)
    batches = [validation_batch(text, number, batch=5, context=10) for number in range(20)]
    starts = [row[0].item() for tokens, _ in batches for row in tokens]
    assert len({bytes(row.tolist()) for tokens, _ in batches for row in tokens}) == 100
    first = sorted(starts[:5])
    assert max(b - a for a, b in zip([0, *first], [*first, 250], strict=True)) < 110
    again = validation_batch(text, 20, batch=5, context=10)
    assert torch.equal(again[0], batches[0][0])
    for tokens, labels in batches:
        assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_a_sampler_keeps_training_and_validation_apart() -> None:
    manifest = small_manifest()
    corpus = load_corpus("kjv")
    sampler = Sampler(manifest, corpus)
    train, held_out = bytes(corpus.train), bytes(corpus.validation)
    for number in range(4):
        for row in sampler.training(number, number)[0]:
            assert bytes(row.tolist()) in train
        for row in sampler.validation(number)[0]:
            assert bytes(row.tolist()) in held_out
    assert sampler.training(3, 1)[0].shape == (manifest.microbatch_size, manifest.model.context)


def test_a_text_shorter_than_a_context_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 400)  # 20 bytes are held out; a context is 24
    with pytest.raises(CorpusError, match="shorter than one context"):
        Sampler(small_manifest(), load_corpus(path))
