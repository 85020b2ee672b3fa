from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from swarm.identity import Identity, IdentityError, peer_id_of, public_key_of, verify


def test_save_and_load_give_the_same_key(tmp_path: Path) -> None:
    identity = Identity.generate()
    path = tmp_path / "identity.key"
    identity.save(path)
    again = Identity.load(path)
    assert again.peer_id == identity.peer_id
    assert again.sign(b"x") == identity.sign(b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]


def test_peer_id_is_libp2ps(tmp_path: Path) -> None:
    identity = Identity.generate()
    assert identity.peer_id.startswith("12D3Koo")
    assert PeerID.from_base58(identity.peer_id).to_bytes()[-32:] == identity.public_key
    assert PeerID.from_base58(identity.peer_id).to_base58() == identity.peer_id
    assert public_key_of(identity.peer_id) == identity.public_key
    # libp2p's own test vector (specification, "Peer IDs and Keys"): a public key and its id.
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id_of(key) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def test_file_has_libp2ps_layout(tmp_path: Path) -> None:
    from hivemind.proto import crypto_pb2

    identity = Identity.generate()
    identity.save(tmp_path / "key")
    parsed = crypto_pb2.PrivateKey.FromString((tmp_path / "key").read_bytes())
    assert parsed.key_type == crypto_pb2.Ed25519
    assert parsed.data[32:] == identity.public_key


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "rsa", "mismatch", "folder"])
def test_load_refuses_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "key"
    Identity.generate().save(path)
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = bytearray(good)
        flipped[-1] ^= 1
        path.write_bytes(
            {
                "empty": b"",
                "short": good[:-1],
                "long": good + b"\0",
                "rsa": b"\x08\x00" + good[2:],
                "mismatch": bytes(flipped),
            }[damage]
        )
    with pytest.raises(IdentityError) as caught:
        Identity.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_save_fails_whole(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        Identity.generate().save(tmp_path / "no such folder" / "key")
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(IdentityError):
        Identity.generate().save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_signatures() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"data")
    assert verify(identity.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"Data", signature)
    assert not verify(other.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"data", signature[:-1])
    assert not verify(identity.peer_id + " ", b"data", signature)


KNOWN = Identity(bytes(range(32)))


@given(peer_id=st.text(max_size=80), data=st.binary(max_size=64), signature=st.binary(max_size=80))
def test_verify_never_raises(peer_id: str, data: bytes, signature: bytes) -> None:
    assert not verify(peer_id, data, signature)
    assert not verify(KNOWN.peer_id, data, signature)


@given(
    st.text(max_size=80) | st.integers(0, 51).map(lambda n: KNOWN.peer_id[:n] + "1" + KNOWN.peer_id[n + 1 :])
)
def test_public_key_of_is_exact(peer_id: str) -> None:
    try:
        key = public_key_of(peer_id)
    except IdentityError:
        return
    assert peer_id_of(key) == peer_id
