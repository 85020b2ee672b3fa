"""What stands in the directory: typed records, each signed by the libp2p key of the peer that it speaks for.

On the wire a record is 64 bytes of Ed25519 signature and then JSON. The signature covers exactly those JSON
bytes, and they hold the run, the kind, the stage, the peer, incarnation, sequence and expiration, so that no
part of a record can be moved to another key, run, owner or time. Nothing here knows hivemind.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.identity import SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarm.manifest import MAX_MANIFEST_BYTES, RUN_ID_CHARS, Manifest, ManifestError, SignedManifest
from swarm.messages import MAX_MEMBERS, MAX_STAGES, Count, Digest, Member, PeerName, Step

SCHEMA_VERSION = 1
TTL_S = 30.0
RENEW_S = 10.0
MAX_AHEAD_S = 120.0
"""A record may not expire later than this from now: a lasting one would freeze its key for everybody."""

_RECORD_PREFIX = b"skipswarm record 1\n"
_GENESIS_PREFIX = b"skipswarm genesis 3\n"
MAX_BEGINNINGS = 256
"""Earlier beginnings that a genesis remembers; of more, the oldest are forgotten."""

Rate = Annotated[float, Field(ge=0, le=1e15)]
Text = Annotated[str, Field(max_length=64)]
Address = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^/[\x21-\x2b\x2d-\x7e]+$")]
Total = Annotated[int, Field(ge=0, lt=2**62)]
Signature = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SIGNATURE_BYTES}}}$")]
RunId = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{RUN_ID_CHARS}}}$")]


class RecordError(ValueError):
    """A record that is refused. The message is a short reason out of a fixed few, fit for counting."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Record(_Model):
    """Base of all records. ``sequence`` is stamped by the directory when it publishes."""

    peer: PeerName
    incarnation: Count = 0
    sequence: Total = 0


class PeerRecord(Record):
    """One peer, under its stage's key. ``*_s`` are seconds of compute for one microbatch in that stage."""

    kind: Literal["peer"] = "peer"
    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    step: Step
    state: Literal["joining", "active", "waiting", "leaving"]
    """``waiting``: an active member that sees no majority, and can go on only in a new epoch."""
    epoch: Count = 0
    """The epoch that ``step`` is of."""
    forward_s: Rate = 0.0
    backward_s: Rate = 0.0
    memory_slots: Count = 0
    tokens_per_s: Rate = 0.0
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    """Multiaddrs where the peer may be dialled."""
    software: Text = ""
    digest: Digest = ""
    """SHA-256 of the stage's parameters at ``step``, in hex; empty when not known."""
    checkpoints: Annotated[tuple[tuple[Count, Step, Digest], ...], Field(max_length=8)] = ()
    """(epoch, step, SHA-256 of the image) of the states of ``stage`` that the peer could begin from."""


class ProgressRecord(Record):
    """What an origin saw when its last step closed. Losses in nats/token; None when not (yet) known."""

    kind: Literal["progress"] = "progress"
    step: Step
    train_loss: float | None = None
    """The mean over the origin's own microbatches of that step."""
    validation_loss: float | None = None
    tokens_per_s: Rate = 0.0
    """Of the whole swarm, as this origin sees it; so are ``tokens_total`` and ``committed``."""
    tokens_total: Total = 0
    committed: Total = 0
    """Microbatches that counted since the origin joined."""
    rerouted: Total = 0
    """By this origin itself."""
    members: Annotated[int, Field(ge=0, le=MAX_MEMBERS)] = 0
    membership: Annotated[tuple[tuple[PeerName, int], ...], Field(max_length=256)] = ()
    """(peer, stage) of the last close, where there are few enough."""


class ManifestRecord(Record):
    """The signed manifest. Anybody may publish it: its hash must be the run id."""

    kind: Literal["manifest"] = "manifest"
    manifest: Annotated[str, Field(max_length=MAX_MANIFEST_BYTES)]
    signature: Signature

    @classmethod
    def of(cls, signed: SignedManifest, peer: str) -> ManifestRecord:
        return cls(peer=peer, manifest=signed.manifest.decode("ascii"), signature=signed.signature.hex())

    @property
    def signed(self) -> SignedManifest:
        return SignedManifest(self.manifest.encode("utf-8"), bytes.fromhex(self.signature))


class Genesis(_Model):
    """An agreed membership on the researcher's word: who is there when ``step`` begins.

    The first is of epoch 0 and step 0. When a run was stopped whole, or has lost the majority that could
    agree on anything, the next epoch begins it again at a step whose parameters its members hold. Holds the
    manifest, so that anybody who has only the run id can check the researcher's signature.
    """

    manifest: Annotated[str, Field(max_length=MAX_MANIFEST_BYTES)]
    epoch: Count = 0
    step: Step = 0
    began: Annotated[tuple[tuple[Count, Step], ...], Field(max_length=MAX_BEGINNINGS)] = ()
    """(epoch, step) of the earlier beginnings that lie before ``step``, in order."""
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    signature: Signature

    @classmethod
    def sign(
        cls,
        manifest: Manifest,
        members: tuple[Member, ...],
        key: Identity,
        *,
        epoch: int = 0,
        step: int = 0,
        before: Genesis | None = None,
    ) -> Genesis:
        """The researcher's word on ``members``, which are put in order of (stage, peer).

        ``before``: the genesis of the epoch before, if it is known.
        """
        members = tuple(sorted(members, key=lambda member: (member.stage, member.peer)))
        earlier = before.beginnings if before is not None else ()
        # One that lies after this step gives up nothing that this one does not give up too.
        began = tuple(one for one in earlier if one[1] < step)[-MAX_BEGINNINGS:]
        signature = key.sign(_genesis_bytes(manifest.run_id, epoch, step, began, members))
        return cls(
            manifest=manifest.canonical.decode("ascii"),
            epoch=epoch,
            step=step,
            began=began,
            members=members,
            signature=signature.hex(),
        )

    @property
    def beginnings(self) -> tuple[tuple[int, int], ...]:
        """(epoch, step) of this beginning and of those before it."""
        return (*self.began, (self.epoch, self.step))

    def gave_up(self, epoch: int, step: int) -> bool:
        """Is the state of ``step`` in ``epoch`` no part of the run any more, since a later epoch began before
        it? The state that an epoch began from stays one."""
        return any(epoch < later and step > at for later, at in self.beginnings)

    def supersedes(self, other: Genesis | None) -> bool:
        """Does everybody who has read both follow this one? The later epoch; two nodes of the researcher may
        have signed one each for the same, of which the lesser hash goes on."""
        if other is None or self.epoch != other.epoch:
            return other is None or self.epoch > other.epoch
        return self._hash < other._hash

    @property
    def _hash(self) -> bytes:
        signed = _genesis_bytes("", self.epoch, self.step, self.began, self.members)
        return hashlib.sha256(signed).digest()

    def verify(self, run_id: str) -> Manifest:
        """The run's manifest, once it and the researcher's signature hold. Raises ``RecordError``."""
        try:
            manifest = Manifest.from_canonical(self.manifest.encode("utf-8"))
        except ManifestError:
            raise RecordError("bad manifest") from None
        if manifest.run_id != run_id:
            raise RecordError("manifest is not the run's")
        signer = peer_id_of(bytes.fromhex(manifest.researcher))
        signed = _genesis_bytes(run_id, self.epoch, self.step, self.began, self.members)
        if not verify(signer, signed, bytes.fromhex(self.signature)):
            raise RecordError("not the researcher's signature")
        if any(member.stage >= len(manifest.stages) for member in self.members):
            raise RecordError("no such stage")
        return manifest


def _genesis_bytes(
    run_id: str,
    epoch: int,
    step: int,
    began: tuple[tuple[int, int], ...],
    members: tuple[Member, ...],
) -> bytes:
    rows = [member.model_dump(mode="json") for member in members]
    document = {"began": began, "epoch": epoch, "members": rows, "run": run_id, "step": step}
    return _GENESIS_PREFIX + json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


class GenesisRecord(Record):
    """The genesis, published by the bootstrap node and by whoever wants to keep it alive."""

    kind: Literal["genesis"] = "genesis"
    genesis: Genesis


AnyRecord = PeerRecord | ProgressRecord | ManifestRecord | GenesisRecord

MAX_RECORD_BYTES = {
    "peer": 4096,
    "progress": 20_480,
    "manifest": 2 * MAX_MANIFEST_BYTES + 1024,
    "genesis": 1 << 20,
}


class Envelope(_Model):
    """What is signed."""

    version: Literal[1] = 1
    run: RunId
    expiration: float
    """Unix time. The directory's only use of the wall clock: hivemind's DHT expires by it."""
    record: Annotated[AnyRecord, Field(discriminator="kind")]

    @property
    def key(self) -> str:
        """The DHT key under which this record may stand, and no other."""
        record = self.record
        return dht_key(self.run, record.kind, record.stage if isinstance(record, PeerRecord) else None)

    @property
    def subkey(self) -> str | None:
        """The subkey under which it may stand: the owner, or None where all publishers say the same."""
        return self.record.peer if self.record.kind in ("peer", "progress") else None


def dht_key(run_id: str, kind: str, stage: int | None = None) -> str:
    """One key for each kind, and for peers one for each stage (a dictionary must fit one DHT answer)."""
    suffix = "" if stage is None else f"/{stage}"
    return f"skipswarm/{SCHEMA_VERSION}/{run_id}/{kind}{suffix}"


def seal(record: AnyRecord, run_id: str, expiration: float, identity: Identity) -> bytes:
    """Sign a record. Raises ``RecordError`` when it speaks for another peer or is too large to be stored."""
    if record.peer != identity.peer_id:
        raise RecordError("another peer's record")
    payload = Envelope(run=run_id, expiration=expiration, record=record).model_dump_json().encode("utf-8")
    if SIGNATURE_BYTES + len(payload) > MAX_RECORD_BYTES[record.kind]:
        raise RecordError("too large")
    return identity.sign(_RECORD_PREFIX + payload) + payload


def unseal(data: bytes, run_id: str) -> Envelope:
    """Check size, schema, run and signatures of a record from a stranger. Raises ``RecordError``."""
    if len(data) > max(MAX_RECORD_BYTES.values()):
        raise RecordError("too large")
    signature, payload = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        envelope = Envelope.model_validate_json(payload)
    except ValidationError:
        raise RecordError("malformed") from None
    record = envelope.record
    if len(data) > MAX_RECORD_BYTES[record.kind]:
        raise RecordError("too large")
    if envelope.run != run_id:
        raise RecordError("another run")
    if not verify(record.peer, _RECORD_PREFIX + payload, signature):
        raise RecordError("bad signature")
    if isinstance(record, GenesisRecord):
        record.genesis.verify(run_id)
    elif isinstance(record, ManifestRecord):
        try:
            record.signed.verify(run_id)
        except ManifestError:
            raise RecordError("bad manifest") from None
    return envelope


class VerifiedCache:
    """``unseal`` with a memory (least recently used out): a record is checked once, not at each read."""

    def __init__(self, run_id: str, capacity_bytes: int = 16 << 20) -> None:
        self._run_id = run_id
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, Envelope] = OrderedDict()

    def unseal(self, data: bytes) -> Envelope:
        """As the function; only good records are kept."""
        envelope = self._entries.get(data)
        if envelope is not None:
            self._entries.move_to_end(data)
            return envelope
        envelope = unseal(data, self._run_id)
        self._entries[data] = envelope
        self._bytes += len(data)
        while self._bytes > self._capacity_bytes:
            oldest, _ = self._entries.popitem(last=False)
            self._bytes -= len(oldest)
        return envelope
