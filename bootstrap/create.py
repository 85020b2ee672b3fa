"""Making a run: check the manifest, sign it with the researcher's key."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from swarm.data.corpus import shipped_corpora
from swarm.errors import UserError
from swarm.identity import KEY_BYTES, Identity
from swarm.manifest import Manifest, ManifestError, SignedManifest, load_toml
from swarm.records import Genesis, RecordError

KEY_NAME = "researcher.key"


@dataclass(frozen=True)
class Created:
    """A run that was made."""

    manifest: Manifest
    signed_path: Path
    key_path: Path
    key_is_new: bool


def example_toml(**changes: object) -> str:
    """The demo's manifest, commented; with other values where ``changes`` names its keys (TOML, as they are
    written there). Raises ValueError for a key that does not stand in it once."""
    text = resources.files("bootstrap").joinpath("demo.toml").read_text(encoding="utf-8")
    for key, value in changes.items():
        lines = [line for line in text.splitlines() if line.startswith(f"{key} =")]
        if len(lines) != 1:
            raise ValueError(f"the demo's manifest has {len(lines)} lines of {key}")
        text = text.replace(lines[0], f"{key} = {value}")
    return text


def create_run(toml: Path, *, key: Path | None = None, out: Path | None = None) -> Created:
    """Check ``toml``, make the researcher's key if there is none, write the signed manifest.

    ``key`` is ``researcher.key`` and ``out`` is ``NAME.signed``, beside the TOML, unless given. Nothing is
    written unless the manifest holds. Raises ``UserError``.
    """
    key_path = key or toml.with_name(KEY_NAME)
    signed_path = out or signed_path_of(toml)
    table = _table(toml)
    key_is_new = not key_path.exists()
    identity = Identity.generate() if key_is_new else Identity.load(key_path)
    table.setdefault("researcher", identity.public_key.hex())
    manifest = _checked(toml, table)
    if manifest.researcher != identity.public_key.hex():
        whose = "a new key would be" if key_is_new else "is"
        raise UserError(
            f"{toml}: researcher: names {manifest.researcher[:12]}..., but {key_path} {whose} another; "
            "give that key with --key, or remove the line"
        )
    if key_is_new:
        identity.save(key_path)
    write_whole(signed_path, SignedManifest.sign(manifest, identity).to_bytes())
    return Created(manifest, signed_path, key_path, key_is_new)


def _table(toml: Path) -> dict[str, object]:
    if not toml.exists():
        raise UserError(f"{toml} does not exist; begin with: skipswarm create --example > {toml}")
    try:
        return load_toml(toml)
    except ManifestError as error:
        raise UserError(f"{toml}: {error}; correct it and run `skipswarm create {toml}` again") from None


def _checked(toml: Path, table: dict[str, object]) -> Manifest:
    try:
        manifest = Manifest.from_table(table)
    except ManifestError as error:
        raise UserError(f"{toml}: {error}; correct it and run `skipswarm create {toml}` again") from None
    if manifest.data.corpus not in shipped_corpora():
        known = ", ".join(shipped_corpora())
        raise UserError(f"{toml}: data.corpus: no {manifest.data.corpus!r} is shipped; there are: {known}")
    return manifest


def signed_path_of(path: Path) -> Path:
    """Where the signed manifest of a TOML file lies; a path that ends in ``.signed`` is one itself."""
    return path if path.suffix == ".signed" else path.with_suffix(".signed")


def load_unsigned(path: Path) -> Manifest:
    """The manifest that the TOML at ``path`` would be, whoever signs it. Raises ``UserError``."""
    return _checked(path, {"researcher": "00" * KEY_BYTES, **_table(path)})


def load_signed(path: Path) -> SignedManifest:
    """Read the signed manifest at ``path``, or beside it when that is the TOML, and verify it.

    Raises ``UserError``, also when the TOML has changed since.
    """
    signed_path = signed_path_of(path)
    source = path if path != signed_path else signed_path.with_suffix(".toml")
    try:
        signed = SignedManifest.from_bytes(signed_path.read_bytes())
        manifest = signed.verify()
    except FileNotFoundError:
        missing = path if not path.exists() else signed_path
        raise UserError(f"{missing} does not exist; make it with: skipswarm create {source}") from None
    except OSError as error:
        raise UserError(f"cannot read {signed_path}: {error.strerror}") from None
    except ManifestError as error:
        raise UserError(f"{signed_path}: {error}; make it again: skipswarm create {source}") from None
    if path != signed_path and path.exists():
        current = _checked(path, {"researcher": manifest.researcher, **_table(path)})
        if current != manifest:
            raise UserError(
                f"{path} has changed since it was signed, which makes it another run; "
                f"sign it: skipswarm create {path}, or bootstrap the old one: {signed_path}"
            )
    return signed


def load_researcher_key(path: Path, manifest: Manifest) -> Identity:
    """The key that may sign this run's genesis. Raises ``UserError``."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give the key that signed the run with --key FILE")
    identity = Identity.load(path)
    if identity.public_key.hex() != manifest.researcher:
        raise UserError(f"{path} is not the key that signed the run; give that one with --key FILE")
    return identity


def load_genesis(path: Path, manifest: Manifest) -> Genesis | None:
    """The genesis that a bootstrap node kept, verified; None when it kept none. Raises ``UserError``."""
    if not path.exists():
        return None
    try:
        genesis = Genesis.model_validate_json(path.read_bytes())
        genesis.verify(manifest.run_id)
    except (OSError, ValidationError, RecordError) as error:
        reason = str(error) if isinstance(error, RecordError) else "cannot be read"
        raise UserError(f"{path} is not this run's genesis ({reason}); move it away") from None
    return genesis


def load_or_make_identity(path: Path) -> Identity:
    """The node's libp2p identity, kept so that its join string stays true. Raises ``IdentityError``."""
    if path.exists():
        return Identity.load(path)
    identity = Identity.generate()
    identity.save(path)
    return identity


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises ``UserError``."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
