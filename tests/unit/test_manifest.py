"""The manifest: what is refused and how it is said, the run id, the researcher's signature."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bootstrap
from swarm.identity import Identity
from swarm.manifest import Manifest, ManifestError, SignedManifest, short_run_id

DEMO = Path(bootstrap.__file__).with_name("demo.toml")
RESEARCHER = Identity(b"r" * 32)


def table() -> dict:
    document = tomllib.loads(DEMO.read_text())
    document["researcher"] = RESEARCHER.public_key.hex()
    return document


def changed(key: str, value: object) -> dict:
    document = table()
    *parents, last = key.split(".")
    target = document
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value
    return document


def demo() -> Manifest:
    return Manifest.from_table(table())


def test_the_demo_is_about_one_million_parameters() -> None:
    manifest = demo()
    assert 0.8e6 < sum(manifest.stage_parameters(stage) for stage in range(4)) < 1.2e6


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.heads", 3, "model.heads: must divide model.width (128)"),
        ("model.heads", 128, "model.heads: leaves 1 dimensions a head; rotary needs them even"),
        ("model.kv_heads", 3, "model.kv_heads: must divide model.heads (4)"),
        ("stages", [1, 1, 1], "stages: hold 3 layers; model.layers is 4"),
        ("path_length", 5, "path_length: at most the number of stages (4)"),
        ("optimizer.warmup_steps", 201, "optimizer.warmup_steps: at most optimizer.total_steps (200)"),
        ("optimizer.min_learning_rate", 0.1, "optimizer.min_learning_rate: at most"),
        ("model.vocabulary", 300, "model.vocabulary: 256 for data.tokenizer 'bytes'"),
        ("microbatch_size", 4096, "limits.max_frame_bytes: one activation takes 268451840"),
        ("model.ffn_width", 10**6, "limits.max_memory_bytes: the largest stage takes"),
        ("limits.max_frame_bytes", 1 << 31, "limits.max_frame_bytes: at most limits.max_memory_bytes"),
        ("model.layers", "4", "model.layers: Input should be a valid integer"),
        ("model.layers", True, "model.layers: Input should be a valid integer"),
        ("optimizer.eps", math.inf, "optimizer.eps: Input should be a finite number"),
        ("optimizer.beta1", math.nan, "optimizer.beta1: Input should be"),
        ("stages", [1, 1, 2, 0], "stages[3]: Input should be greater than or equal to 1"),
        ("model.colour", "red", "model.colour: unknown key"),
        ("colour", "red", "colour: unknown key"),
        ("name", "../etc", "name: String should match"),
        ("researcher", "00", "researcher: String should match"),
        ("model", {"layers": 4}, "model.width: missing (and 4 more)"),
    ],
)
def test_a_fault_is_one_line_with_its_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_table(changed(key, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"^not TOML: .*line 1"):
        Manifest.from_toml("= 3")
    with pytest.raises(ManifestError, match="dates"):
        Manifest.from_toml("name = 1979-05-27")
    with pytest.raises(ManifestError, match=r"cannot read .*No such file"):
        Manifest.from_toml(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(ManifestError, match="UTF-8"):
        Manifest.from_toml(tmp_path / "latin.toml")
    with pytest.raises(ManifestError, match="not TOML"):
        Manifest.from_toml("a=" + "[" * 50_000)


def test_the_researcher_is_filled_in_and_never_replaced() -> None:
    key = "ab" * 32
    assert Manifest.from_toml(DEMO, researcher=key).researcher == key
    text = f'researcher = "{"cd" * 32}"\n' + DEMO.read_text()
    assert Manifest.from_toml(text, researcher=key).researcher == "cd" * 32


def test_the_run_id_is_the_hash_of_the_canonical_bytes_and_of_nothing_else() -> None:
    manifest = demo()
    assert manifest.run_id == hashlib.sha256(manifest.canonical).hexdigest()
    assert short_run_id(manifest.run_id) == manifest.run_id[:12]
    reordered = dict(reversed(table().items()))
    assert Manifest.from_table(reordered).run_id == manifest.run_id
    assert Manifest.from_table(changed("model.norm_eps", 1e-5)).run_id == manifest.run_id  # the default
    assert Manifest.from_table(changed("seed", 2)).run_id != manifest.run_id
    # A float written as an integer is the same number.
    assert (
        Manifest.from_table(changed("optimizer.clip_norm", 1)).run_id
        == Manifest.from_table(changed("optimizer.clip_norm", 1.0)).run_id
    )


@given(st.floats(min_value=1e-12, max_value=10, exclude_min=True))
@settings(max_examples=50, deadline=None)
def test_floats_survive_exactly(rate: float) -> None:
    document = changed("optimizer.learning_rate", rate)
    document["optimizer"]["min_learning_rate"] = 0.0
    manifest = Manifest.from_table(document)
    again = Manifest.from_canonical(manifest.canonical)
    assert again == manifest
    assert again.optimizer.learning_rate == rate


def test_only_canonical_bytes_are_read_back() -> None:
    manifest = demo()
    assert Manifest.from_canonical(manifest.canonical) == manifest
    spaced = json.dumps(json.loads(manifest.canonical)).encode()
    with pytest.raises(ManifestError, match="canonical"):
        Manifest.from_canonical(spaced)
    twice = manifest.canonical[:-1] + b',"seed":1}'
    with pytest.raises(ManifestError):
        Manifest.from_canonical(twice)
    with pytest.raises(ManifestError, match="at most"):
        Manifest.from_canonical(b"{" * (1 << 17))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_give_only_a_manifest_error(data: bytes) -> None:
    for decode in (Manifest.from_canonical, SignedManifest.from_bytes):
        with pytest.raises(ManifestError):
            decode(data)


def test_a_signed_manifest_is_what_the_researcher_signed() -> None:
    manifest = demo()
    signed = SignedManifest.from_bytes(SignedManifest.sign(manifest, RESEARCHER).to_bytes())
    assert signed.verify(manifest.run_id) == manifest
    with pytest.raises(ManifestError, match="another key"):
        SignedManifest.sign(manifest, Identity(b"x" * 32))
    other = Manifest.from_table(changed("seed", 2))
    with pytest.raises(ManifestError, match="hash is not the run id"):
        SignedManifest(other.canonical, signed.signature).verify(manifest.run_id)
    with pytest.raises(ManifestError, match="signature is not the researcher's"):
        SignedManifest(other.canonical, signed.signature).verify()
    with pytest.raises(ManifestError, match="signature is not the researcher's"):
        # A signature over the bytes without their purpose is not one over a manifest.
        SignedManifest(manifest.canonical, RESEARCHER.sign(manifest.canonical)).verify()


def test_a_changed_copy_has_another_name() -> None:
    manifest = demo()
    assert manifest.model_copy(update={"seed": 2}).run_id != manifest.run_id
