"""A peer's Ed25519 identity: the file that p2pd reads, the peer id, signatures.

An Ed25519 peer id (``12D3Koo...``) is the public key itself in a fixed envelope, so a signature can be
checked from the id alone (libp2p specification, "Peer IDs and Keys").
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import UserError

KEY_BYTES = 32
SIGNATURE_BYTES = 64

# Multihash "identity" (0x00) of 36 bytes, which are PublicKey{type: Ed25519 (1), data: 32 bytes} in protobuf.
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
# PrivateKey{type: Ed25519 (1), data: 64 bytes}; the data are the private seed and the public key.
_FILE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_FILE_BYTES = len(_FILE_PREFIX) + 2 * KEY_BYTES
_PEER_ID_CHARS = 52


class IdentityError(UserError, ValueError):
    """An identity file or a peer id that cannot be used; one line that says what to do."""


class Identity:
    """An Ed25519 key pair."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise IdentityError(f"an Ed25519 seed has {KEY_BYTES} bytes, not {len(seed)}")
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        """The raw 32 bytes."""
        self.peer_id: str = peer_id_of(self.public_key)
        """base58, ``12D3Koo...``."""

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        """A new key pair from the system's randomness."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read what ``save`` wrote. Raises ``IdentityError`` for a missing, unreadable or malformed file."""
        try:
            with open(path, "rb") as file:
                data = file.read(_FILE_BYTES + 1)
        except OSError as error:
            raise IdentityError(f"cannot read identity {path}: {error.strerror}; check --identity") from error
        if len(data) != _FILE_BYTES or not data.startswith(_FILE_PREFIX):
            raise IdentityError(f"{path} is not an Ed25519 libp2p identity; move it away for a new identity")
        body = data[len(_FILE_PREFIX) :]
        identity = cls(body[:KEY_BYTES])
        if identity.public_key != body[KEY_BYTES:]:
            raise IdentityError(
                f"{path} is damaged (its keys do not match); restore it, or move it away for a new identity"
            )
        return identity

    def to_bytes(self) -> bytes:
        """libp2p's PrivateKey protobuf, which is what p2pd reads: secret."""
        return _FILE_PREFIX + self._seed + self.public_key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_bytes()``, mode 0600, whole or not at all.

        Raises ``IdentityError`` when the folder cannot be written.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.to_bytes())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise IdentityError(
                f"cannot write identity {path}: {error.strerror}; check --identity"
            ) from error

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature (RFC 8032) of ``data``."""
        return self._key.sign(data)


def peer_id_of(public_key: bytes) -> str:
    """The peer id of a raw Ed25519 public key. Raises ``IdentityError`` unless it has 32 bytes."""
    if len(public_key) != KEY_BYTES:
        raise IdentityError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return str(base58.b58encode(_PEER_ID_PREFIX + public_key), "ascii")


def public_key_of(peer_id: str) -> bytes:
    """The 32 bytes inside an Ed25519 peer id. Raises ``IdentityError`` for anything else."""
    # The length comes first: base58 takes time quadratic in it, and ids come from strangers.
    if isinstance(peer_id, str) and len(peer_id) == _PEER_ID_CHARS and peer_id.isascii():
        try:
            raw = bytes(base58.b58decode(peer_id))
        except ValueError:
            raw = b""
        # base58's decoder strips white space; one key must have one name, so the way back must agree.
        if raw.startswith(_PEER_ID_PREFIX) and len(raw) == len(_PEER_ID_PREFIX) + KEY_BYTES:
            key = raw[len(_PEER_ID_PREFIX) :]
            if peer_id_of(key) == peer_id:
                return key
    raise IdentityError(f"{str(peer_id)[:64]!r} is not an Ed25519 peer id (12D3Koo...)")


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether the owner of ``peer_id`` signed ``data``; malformed arguments give False, no exception."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, data)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
