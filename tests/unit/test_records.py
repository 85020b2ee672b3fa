"""Directory records: every way in which one can be wrong is refused with its reason (S1, S2, S3, S5, S6)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bootstrap
from swarm.identity import Identity
from swarm.manifest import Manifest, SignedManifest
from swarm.messages import Member
from swarm.records import (
    MAX_RECORD_BYTES,
    Genesis,
    GenesisRecord,
    ManifestRecord,
    PeerRecord,
    ProgressRecord,
    RecordError,
    VerifiedCache,
    seal,
    unseal,
)

RESEARCHER, ALICE, BOB = (Identity(letter * 32) for letter in (b"r", b"a", b"b"))
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)
RUN = MANIFEST.run_id
NOW = 1_800_000_000.0
PEER = PeerRecord(
    peer=ALICE.peer_id, stage=1, step=7, incarnation=3, sequence=9, state="active", forward_s=0.01
)


def resigned(data: bytes, identity: Identity = ALICE, **changes: object) -> bytes:
    """The record with other content, signed anew by somebody who has a key and may lie."""
    payload = json.loads(data[64:])
    for key, value in changes.items():
        target = payload
        *parents, last = key.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    body = json.dumps(payload).encode()
    return identity.sign(b"skipswarm record 1\n" + body) + body


def test_a_record_comes_back_as_it_was() -> None:
    envelope = unseal(seal(PEER, RUN, NOW, ALICE), RUN)
    assert envelope.record == PEER
    assert envelope.expiration == NOW
    assert envelope.key.endswith(f"{RUN}/peer/1")
    assert envelope.subkey == ALICE.peer_id


def test_nobody_signs_for_another() -> None:
    with pytest.raises(RecordError, match="another peer"):
        seal(PEER, RUN, NOW, BOB)
    with pytest.raises(RecordError, match="bad signature"):
        unseal(resigned(seal(PEER, RUN, NOW, ALICE), BOB), RUN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "00" * 32}, "another run"),
        ({"version": 2}, "malformed"),
        ({"colour": "red"}, "malformed"),
        ({"record__colour": "red"}, "malformed"),
        ({"record__kind": "king"}, "malformed"),
        ({"record__stage": -1}, "malformed"),
        ({"record__stage": "1"}, "malformed"),
        ({"record__forward_s": float("nan")}, "malformed"),
        ({"record__forward_s": float("inf")}, "malformed"),
        ({"expiration": float("inf")}, "malformed"),
        ({"record__addresses": ["http://x"]}, "malformed"),
        ({"record__addresses": ["/ip4/1.2.3.4/tcp/1"] * 17}, "malformed"),
        ({"record__peer": BOB.peer_id}, "bad signature"),
        ({"record__peer": "1" * 128}, "bad signature"),
    ],
)
def test_what_a_liar_with_a_key_can_say(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RecordError, match=f"^{reason}$"):
        unseal(resigned(seal(PEER, RUN, NOW, ALICE), **changes), RUN)


def test_every_signed_byte_counts() -> None:
    data = seal(PEER, RUN, NOW, ALICE)
    for at in range(0, len(data), 7):
        with pytest.raises(RecordError):
            unseal(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], RUN)
    with pytest.raises(RecordError):
        unseal(data + b" ", RUN)


def test_sizes_are_bounded_by_kind() -> None:
    long = PEER.model_copy(update={"addresses": ("/dns4/" + "x" * 190,) * 16, "software": "v" * 64})
    assert len(seal(long, RUN, NOW, ALICE)) <= MAX_RECORD_BYTES["peer"]  # the largest that the schema lets in
    padded = resigned(seal(PEER, RUN, NOW, ALICE))
    body = padded[64:] + b" " * MAX_RECORD_BYTES["peer"]
    with pytest.raises(RecordError, match="too large"):
        unseal(ALICE.sign(b"skipswarm record 1\n" + body) + body, RUN)
    with pytest.raises(RecordError, match="too large"):
        unseal(b"x" * ((1 << 20) + 1), RUN)
    many = ProgressRecord(
        peer=ALICE.peer_id, step=1, membership=tuple((ALICE.peer_id, stage) for stage in range(256))
    )
    assert unseal(seal(many, RUN, NOW, ALICE), RUN).record == many


def test_a_manifest_record_is_checked_against_the_run_id() -> None:
    signed = SignedManifest.sign(MANIFEST, RESEARCHER)
    record = ManifestRecord.of(signed, BOB.peer_id)  # anybody may carry it
    envelope = unseal(seal(record, RUN, NOW, BOB), RUN)
    assert envelope.subkey is None
    assert envelope.record == record
    other = MANIFEST.model_copy(update={"seed": 99})
    for forged in (
        SignedManifest(other.canonical, signed.signature),
        SignedManifest(other.canonical, RESEARCHER.sign(other.canonical)),
        SignedManifest(signed.manifest, BOB.sign(signed.manifest)),
    ):
        with pytest.raises(RecordError, match="bad manifest"):
            unseal(seal(ManifestRecord.of(forged, BOB.peer_id), RUN, NOW, BOB), RUN)


def test_only_the_researcher_says_who_begins() -> None:
    members = (Member(peer=BOB.peer_id, stage=1, incarnation=2), Member(peer=ALICE.peer_id, stage=0))
    genesis = Genesis.sign(MANIFEST, members, RESEARCHER)
    assert [member.stage for member in genesis.members] == [0, 1]
    assert genesis.verify(RUN) == MANIFEST
    record = GenesisRecord(peer=BOB.peer_id, genesis=genesis)
    assert unseal(seal(record, RUN, NOW, BOB), RUN).record == record

    def refused(genesis: Genesis) -> str:
        with pytest.raises(RecordError) as caught:
            unseal(seal(GenesisRecord(peer=BOB.peer_id, genesis=genesis), RUN, NOW, BOB), RUN)
        return str(caught.value)

    assert refused(Genesis.sign(MANIFEST, members, BOB)) == "not the researcher's signature"
    fewer = genesis.model_copy(update={"members": genesis.members[:1]})
    assert refused(fewer) == "not the researcher's signature"
    for field, value in (("peer", BOB.peer_id), ("stage", 2), ("incarnation", 8), ("learning", True)):
        first = genesis.members[0].model_copy(update={field: value})
        altered = genesis.model_copy(update={"members": (first, *genesis.members[1:])})
        assert refused(altered) == "not the researcher's signature"
    assert set(Member.model_fields) == {"peer", "stage", "incarnation", "learning"}  # all of them, above
    theirs = MANIFEST.model_copy(update={"researcher": BOB.public_key.hex()})
    assert refused(Genesis.sign(theirs, members, BOB)) == "manifest is not the run's"
    nowhere = (Member(peer=BOB.peer_id, stage=4),)
    assert refused(Genesis.sign(MANIFEST, nowhere, RESEARCHER)) == "no such stage"


def test_a_beginning_gives_up_what_lies_after_it_in_every_epoch_before() -> None:
    members = (Member(peer=ALICE.peer_id, stage=0),)
    genesis = Genesis.sign(MANIFEST, members, RESEARCHER)
    for epoch, step in ((1, 100), (2, 150), (3, 120)):
        genesis = Genesis.sign(MANIFEST, members, RESEARCHER, epoch=epoch, step=step, before=genesis)
    assert genesis.verify(RUN) == MANIFEST
    assert genesis.beginnings == ((0, 0), (1, 100), (3, 120))  # what the second gave up, so does the third
    counts = [(0, 100), (1, 120), (2, 120), (3, 10**6)]
    given_up = [(0, 101), (1, 121), (2, 121), (1, 150)]
    assert not any(genesis.gave_up(*mark) for mark in counts)
    assert all(genesis.gave_up(*mark) for mark in given_up)
    forged = genesis.model_copy(update={"began": ()})
    with pytest.raises(RecordError, match="signature"):
        forged.verify(RUN)


def test_of_two_beginnings_of_one_epoch_everybody_follows_the_same() -> None:
    both = [
        Genesis.sign(MANIFEST, (Member(peer=peer.peer_id, stage=0),), RESEARCHER, epoch=1, step=9)
        for peer in (ALICE, BOB)
    ]
    assert [one.supersedes(other) for one, other in (both, both[::-1])].count(True) == 1
    assert not both[0].supersedes(both[0])
    later = Genesis.sign(MANIFEST, both[0].members, RESEARCHER, epoch=2, step=5)
    for one in both:
        assert one.supersedes(None)
        assert later.supersedes(one)
        assert not one.supersedes(later)


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_random_bytes_give_only_the_record_error(data: bytes, signed: bool) -> None:
    if signed:
        data = ALICE.sign(b"skipswarm record 1\n" + data) + data
    with pytest.raises(RecordError):
        unseal(data, RUN)


def test_deep_json_is_only_malformed() -> None:
    body = b"[" * 1_000_000
    with pytest.raises(RecordError, match="malformed"):
        unseal(ALICE.sign(body) + body, RUN)


def test_the_cache_keeps_what_holds_within_its_bound() -> None:
    cache = VerifiedCache(RUN, capacity_bytes=3000)
    records = [seal(PEER, RUN, NOW + number, ALICE) for number in range(20)]
    first = cache.unseal(records[0])
    assert cache.unseal(records[0]) is first
    for data in records:
        assert cache.unseal(data).record == PEER
    assert cache._bytes == sum(map(len, cache._entries)) <= 3000
    assert cache.unseal(records[0]) is not first
    with pytest.raises(RecordError):
        cache.unseal(records[0][:-1])


def nested(levels: int) -> bytes:
    data = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return bytes(data)


class TestGuard:
    """What stands between hivemind's DHT and a stranger, without a network."""

    def test_nested_extensions_are_bounded_before_they_are_decoded(self) -> None:
        from hivemind.utils import MSGPackSerializer

        from swarm import dht_guard

        honest = (1, (2, (3, (4,))))
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(honest)) == honest
        for levels in (9, 200, 5000):
            with pytest.raises(dht_guard.DecodeError):
                MSGPackSerializer.loads(nested(levels))
        # The count begins anew: a refusal leaves nothing behind.
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(honest)) == honest
        with pytest.raises(dht_guard.DecodeError, match="unknown extension"):
            MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x33, b"x")))

    def test_a_dictionary_does_not_restart_the_count(self) -> None:
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.utils import MSGPackSerializer

        from swarm import dht_guard

        data = nested(0)
        for _ in range(9):
            inner = msgpack.packb([None, 0.0, [["key", b"value", 1.0]], msgpack.ExtType(0x50, data)])
            data = msgpack.packb([msgpack.ExtType(0x50, inner)])
        with pytest.raises(dht_guard.DecodeError):
            MSGPackSerializer.loads(data)
        value = DictionaryDHTValue()
        value.store("key", b"value", 1e12)
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)).get("key").value == b"value"

    def test_the_validator_refuses_by_place_and_time(self) -> None:
        from hivemind.utils import MSGPackSerializer

        from swarm import dht_guard

        refused: Counter[str] = Counter()
        validator = dht_guard.RunValidator(RUN, refused, lambda: NOW)
        pack = MSGPackSerializer.dumps
        expiration = NOW + 30
        data = seal(PEER, RUN, expiration, ALICE)
        envelope = unseal(data, RUN)
        key, subkey, value = dht_guard.key_id(envelope.key), pack(ALICE.peer_id), pack(data)

        assert validator.read(key, subkey, value, expiration) == envelope
        assert validator.read(key, subkey, value, expiration) == envelope
        assert not refused
        other_stage = dht_guard.key_id(envelope.key[:-1] + "2")
        lasting = pack(seal(PEER, RUN, NOW + 121, ALICE))
        for case, reason in [
            ((other_stage, subkey, value, expiration), "wrong key"),
            ((dht_guard.key_id("foreign"), subkey, value, expiration), "wrong key"),
            ((key, pack(BOB.peer_id), value, expiration), "wrong owner"),
            ((key, pack(None), value, expiration), "wrong owner"),
            ((key, subkey, value, expiration + 1), "expiration is not the signed one"),
            ((key, subkey, lasting, NOW + 121), "expires too late"),
            ((key, subkey, lasting, float("inf")), "expires too late"),
            ((key, subkey, lasting, float("nan")), "expires too late"),
            ((key, subkey, data, expiration), "malformed"),
            ((key, subkey, pack("text"), expiration), "malformed"),
            ((key, subkey, nested(200), expiration), "malformed"),
            ((key, subkey, b"", expiration), "malformed"),
            ((key, subkey, b"x" * (1 << 21), expiration), "too large"),
        ]:
            refused.clear()
            assert validator.read(*case) is None
            assert refused == Counter({reason: 1})

    def test_a_full_dictionary_takes_renewals_only(self) -> None:
        from hivemind.dht.routing import DHTID

        from swarm import dht_guard

        storage = dht_guard.BoundedStorage()
        key, far = DHTID.generate("key"), 4e9
        taken = sum(storage.store_subkey(key, f"peer{n}", b"x" * 65_000, far) for n in range(80))
        assert taken == (dht_guard.MAX_DICTIONARY_BYTES // 65_096) == 48
        assert storage.store_subkey(key, "peer0", b"y", far + 1)
        assert storage.store_subkey(key, "small", b"z" * 100, far)
