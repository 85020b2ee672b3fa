"""The run manifest: what one training job is. Its hash is the run's name.

TOML in, strict frozen pydantic model, canonical bytes, ``run_id``, the researcher's signature.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import UserError
from swarm.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify

MAX_MANIFEST_BYTES = 1 << 16
RUN_ID_CHARS = 64
FRAME_HEADER_BYTES = 1 << 14
"""Room that a frame needs beside its tensor: the header with its path."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_STATE_BYTES = 16
"""float32 weight, gradient and AdamW's two moments."""
_SIGNED_PREFIX = b"skipswarm manifest 1\n"


class ManifestError(UserError, ValueError):
    """A manifest that cannot be used; one line, beginning with the key where one is at fault."""


class Section(BaseModel):
    """Base of the manifest's tables: strict, frozen, nothing unknown, no infinities."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1, le=2**31)]


class ModelSection(Section):
    """A LLaMA-style transformer."""

    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive
    ffn_width: Positive
    context: Positive
    vocabulary: Positive = 256
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    init_std: Annotated[float, Field(gt=0, lt=1)] = 0.02
    dtype: Literal["float32", "bfloat16"] = "float32"


class OptimizerSection(Section):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and cosine decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=10)]
    min_learning_rate: Annotated[float, Field(ge=0, le=10)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    total_steps: Positive
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class SyncSection(Section):
    """How replicas of a stage keep in step."""

    start_replicas: Positive = 1
    """Replicas that each stage needs before the first step."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints; 0 for none but the last."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """Activations and gradients on the wire between stages."""


class DataSection(Section):
    """The text, and how often the loss on its held-out part is taken."""

    corpus: str
    tokenizer: Literal["bytes"] = "bytes"
    validation_every: Annotated[int, Field(ge=0)] = 20
    validation_microbatches: Positive = 4


class LimitsSection(Section):
    """What a peer must be ready for, and what it may refuse."""

    max_frame_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 1 << 28
    max_memory_bytes: Annotated[int, Field(ge=1 << 24)] = 1 << 34
    memory_slots: Positive = 8
    """Microbatches that a peer holds between their forward and their backward."""


class Manifest(Section):
    """One run."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSection
    stages: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=1024)]
    """Layers of each stage, first to last; their sum is ``model.layers``."""
    path_length: Positive
    """Stages that a microbatch visits, stage 0 included."""
    coverage_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.3
    """By what share of the mean number of visits two stages may differ in one step (by one visit always), so
    that a stage which lacks a peer holds the others up less; each learns from its own visits."""
    microbatches_per_origin: Positive
    microbatch_size: Positive
    optimizer: OptimizerSection
    sync: SyncSection = SyncSection()
    data: DataSection
    limits: LimitsSection = LimitsSection()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    researcher: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
    """The researcher's Ed25519 public key, in hex."""

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self

    @classmethod
    def from_toml(cls, source: str | Path, researcher: str | None = None) -> Manifest:
        """Read TOML text, or a file when given a ``Path``.

        ``researcher`` (a public key in hex) is put in where the TOML names none. Raises ``ManifestError``.
        """
        table = load_toml(source)
        if researcher is not None:
            table.setdefault("researcher", researcher)
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Manifest:
        """Check a decoded TOML document. Raises ``ManifestError``."""
        try:
            text = json.dumps(table)
        except TypeError:
            raise ManifestError("dates and times have no place in a manifest") from None
        return cls._from_json(text)

    @classmethod
    def from_canonical(cls, data: bytes) -> Manifest:
        """Read canonical bytes, from a stranger perhaps. Raises ``ManifestError``."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, not {len(data)}")
        manifest = cls._from_json(data)
        if manifest.canonical != data:
            raise ManifestError("not in canonical form")
        return manifest

    @classmethod
    def _from_json(cls, text: str | bytes) -> Manifest:
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ManifestError(one_line(error)) from None

    @property
    def canonical(self) -> bytes:
        """The bytes that are hashed and signed: JSON, keys sorted, floats in their shortest exact form."""
        table = self.model_dump(mode="json")
        return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    def stage_parameters(self, stage: int) -> int:
        """Parameters of one stage; stage 0 also has the embedding, the final norm and the head, untied."""
        model = self.model
        attention = 2 * model.width * model.width * (model.heads + model.kv_heads) // model.heads
        layer = attention + 3 * model.width * model.ffn_width + 2 * model.width
        ends = 2 * model.vocabulary * model.width + model.width if stage == 0 else 0
        return self.stages[stage] * layer + ends

    @property
    def run_id(self) -> str:
        """SHA-256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.canonical).hexdigest()


def short_run_id(run_id: str) -> str:
    """The first 12 digits, for people; machines compare the whole."""
    return run_id[:12]


def load_toml(source: str | Path) -> dict[str, Any]:
    """Decode TOML text, or a file when given a ``Path``. Raises ``ManifestError``."""
    try:
        if isinstance(source, Path):
            with source.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
            if len(data) > MAX_MANIFEST_BYTES:
                raise ManifestError(f"{source}: longer than {MAX_MANIFEST_BYTES} bytes")
            source = data.decode("utf-8")
        return tomllib.loads(source)
    except OSError as error:
        raise ManifestError(f"cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ManifestError("not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(f"not TOML: {error}") from None


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What no single field shows, each as ``key: message``."""
    model, optimizer, limits = manifest.model, manifest.optimizer, manifest.limits
    if model.width % model.heads:
        yield f"model.heads: must divide model.width ({model.width})"
    elif (model.width // model.heads) % 2:
        yield f"model.heads: leaves {model.width // model.heads} dimensions a head; rotary needs them even"
    if model.heads % model.kv_heads:
        yield f"model.kv_heads: must divide model.heads ({model.heads})"
    if sum(manifest.stages) != model.layers:
        yield f"stages: hold {sum(manifest.stages)} layers; model.layers is {model.layers}"
    if manifest.path_length > len(manifest.stages):
        yield f"path_length: at most the number of stages ({len(manifest.stages)})"
    if optimizer.warmup_steps > optimizer.total_steps:
        yield f"optimizer.warmup_steps: at most optimizer.total_steps ({optimizer.total_steps})"
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield f"optimizer.min_learning_rate: at most optimizer.learning_rate ({optimizer.learning_rate})"
    if manifest.data.tokenizer == "bytes" and model.vocabulary != 256:
        yield "model.vocabulary: 256 for data.tokenizer 'bytes'"
    activation = manifest.microbatch_size * model.context * model.width
    frame = activation * _DTYPE_BYTES[manifest.sync.wire_dtype] + FRAME_HEADER_BYTES
    if frame > limits.max_frame_bytes:
        yield f"limits.max_frame_bytes: one activation takes {frame}; raise it or lower microbatch_size"
    state = max(manifest.stage_parameters(stage) for stage in range(len(manifest.stages))) * _STATE_BYTES
    if state > limits.max_memory_bytes:
        yield f"limits.max_memory_bytes: the largest stage takes {state} for weights, gradients and AdamW"
    if limits.max_frame_bytes > limits.max_memory_bytes:
        yield f"limits.max_frame_bytes: at most limits.max_memory_bytes ({limits.max_memory_bytes})"


def one_line(error: ValidationError) -> str:
    """The first error as ``key.path: message``."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "missing"
    elif first["type"] == "extra_forbidden":
        message = "unknown key"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return (f"{path}: {message}" if path else message) + more


@dataclass(frozen=True)
class SignedManifest:
    """Canonical manifest bytes and the researcher's Ed25519 signature (64 bytes) over them."""

    manifest: bytes
    signature: bytes

    @classmethod
    def sign(cls, manifest: Manifest, key: Identity) -> SignedManifest:
        """Raises ``ManifestError`` when ``key`` is not the researcher's."""
        if key.public_key.hex() != manifest.researcher:
            raise ManifestError(f"researcher: names {manifest.researcher[:12]}..., which is another key")
        return cls(manifest.canonical, key.sign(_SIGNED_PREFIX + manifest.canonical))

    def verify(self, run_id: str | None = None) -> Manifest:
        """The manifest, once its form, its hash (if ``run_id`` is given) and its signature hold.

        Raises ``ManifestError``.
        """
        if run_id is not None and hashlib.sha256(self.manifest).hexdigest() != run_id:
            raise ManifestError("its hash is not the run id")
        manifest = Manifest.from_canonical(self.manifest)
        signer = peer_id_of(bytes.fromhex(manifest.researcher))
        if not verify(signer, _SIGNED_PREFIX + self.manifest, self.signature):
            raise ManifestError("its signature is not the researcher's")
        return manifest

    def to_bytes(self) -> bytes:
        """A JSON file: ``{"manifest": ..., "signature": hex}``."""
        document = {"manifest": self.manifest.decode("ascii"), "signature": self.signature.hex()}
        return json.dumps(document, indent=1).encode("ascii") + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedManifest:
        """What ``to_bytes`` made; not yet verified. Raises ``ManifestError``."""
        if len(data) > 2 * MAX_MANIFEST_BYTES:
            raise ManifestError("too long for a signed manifest")
        try:
            document = _SignedFile.model_validate_json(data)
            return cls(document.manifest.encode("ascii"), bytes.fromhex(document.signature))
        except (ValidationError, UnicodeEncodeError):
            raise ManifestError("not a signed manifest") from None


class _SignedFile(Section):
    manifest: Annotated[str, Field(max_length=MAX_MANIFEST_BYTES)]
    signature: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SIGNATURE_BYTES}}}$")]
