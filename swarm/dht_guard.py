"""hivemind's DHT, made fit for strangers. Importing this module installs the decoding guard in the process.

- ``MSGPackSerializer`` recurses through its extension types without a bound: 200 levels, 1.4 KB, end the
  process with SIGSEGV, and the DHT decodes before any validator runs. The guard bounds the depth.
- ``RunValidator`` lets only the run's own records in: right key, right owner, signed, not too long-lived.
- ``guard`` makes a node drop bad entries of a dictionary one by one (hivemind drops the whole dictionary),
  take no expiration on a neighbour's word (an infinite one would end every later search at once), bound the
  size of a dictionary (an answer over 4 MiB hangs its reader for ever) and tell whether others took a record.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.records import MAX_AHEAD_S, MAX_RECORD_BYTES, Envelope, RecordError, VerifiedCache

MAX_EXTENSION_DEPTH = 8
"""Honest records nest extension types less than four deep."""
MAX_DICTIONARY_BYTES = 3 << 20
MAX_BAD_ENTRIES = 16
"""A dictionary with more is refused whole: its sender checks nothing, or is the forger."""
_ENTRY_OVERHEAD_BYTES = 96

_depth = threading.local()


class DecodeError(ValueError):
    """Bytes that the DHT must not decode."""


def _install_decoding_guard() -> None:
    original = MSGPackSerializer._decode_ext_types.__func__
    if getattr(original, "depth_is_bounded", False):
        return

    def decode(cls: Any, type_code: int, data: bytes) -> Any:
        # Every way down (tuples, dictionaries) comes through this function before it decodes its content.
        level = getattr(_depth, "level", 0)
        if level >= MAX_EXTENSION_DEPTH:
            raise DecodeError("extension types nested too deep")
        if type_code not in cls._ext_type_codes and type_code != cls._TUPLE_EXT_TYPE_CODE:
            raise DecodeError("unknown extension type")
        _depth.level = level + 1
        try:
            return original(cls, type_code, data)
        finally:
            _depth.level = level

    decode.depth_is_bounded = True  # type: ignore[attr-defined]
    MSGPackSerializer._decode_ext_types = classmethod(decode)


_install_decoding_guard()


class RunValidator(RecordValidatorBase):
    """Refuses, and counts by reason in ``refused``, whatever is not a record of this run in its own place."""

    def __init__(self, run_id: str, refused: Counter[str], wall: Callable[[], float]) -> None:
        self._verified = VerifiedCache(run_id)
        self._refused = refused
        self._wall = wall

    def validate(self, record: DHTRecord) -> bool:
        """hivemind's question, at every store and for every record that a neighbour returns."""
        return self.read(record.key, record.subkey, record.value, record.expiration_time) is not None

    def read(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> Envelope | None:
        """The checked content of a DHT entry; None, and counted, when it is refused.

        ``key`` is the 20-byte DHT id; ``subkey`` and ``value`` are MessagePack, as in a ``DHTRecord``.
        """
        try:
            return self._read(key, subkey, value, expiration)
        except RecordError as error:
            self._refused[str(error)] += 1
            return None

    def _read(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> Envelope:
        # Expired ones pass here: hivemind drops them itself, and one of them must not spoil a dictionary.
        if not expiration <= self._wall() + MAX_AHEAD_S:
            raise RecordError("expires too late")
        if len(value) > max(MAX_RECORD_BYTES.values()) + 8:
            raise RecordError("too large")
        try:
            data = msgpack.unpackb(value, raw=False)
        except (ValueError, msgpack.exceptions.UnpackException):
            raise RecordError("malformed") from None
        if not isinstance(data, bytes):
            raise RecordError("malformed")
        envelope = self._verified.unseal(data)
        if key != key_id(envelope.key):
            raise RecordError("wrong key")
        if subkey != MSGPackSerializer.dumps(envelope.subkey):
            raise RecordError("wrong owner")
        if expiration != envelope.expiration:
            raise RecordError("expiration is not the signed one")
        return envelope


def key_id(key: str) -> bytes:
    """The 20 bytes under which the DHT knows ``key``."""
    result: bytes = DHTID.generate(source=key).to_bytes()
    return result


class BoundedStorage(DHTLocalStorage):
    """A dictionary that is full takes no new subkey; those that are in it may renew."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        if known is not None and isinstance(known.value, DictionaryDHTValue) and subkey not in known.value:
            size = sum(len(item.value) + _ENTRY_OVERHEAD_BYTES for _, item in known.value.items())
            if size + len(value) + _ENTRY_OVERHEAD_BYTES > MAX_DICTIONARY_BYTES:
                return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored


class StoreOutcome:
    """What the other nodes said to one store."""

    def __init__(self) -> None:
        self.answered = 0
        self.accepted = 0


_outcome: contextvars.ContextVar[StoreOutcome | None] = contextvars.ContextVar("outcome", default=None)


def watch_stores() -> StoreOutcome:
    """Counts, from now on, the answers to stores made by this task and by the tasks that it starts."""
    outcome = StoreOutcome()
    _outcome.set(outcome)
    return outcome


class GuardedProtocol(DHTProtocol):
    """See ``guard``."""

    async def call_store(self, *args: Any, **kwargs: Any) -> list[bool] | None:
        answer: list[bool] | None = await super().call_store(*args, **kwargs)
        outcome = _outcome.get()
        if outcome is not None and answer is not None:
            outcome.answered += 1
            outcome.accepted += any(answer)
        return answer

    async def call_find(self, *args: Any, **kwargs: Any) -> Any:
        found = await super().call_find(*args, **kwargs)
        if not found:
            return found
        return {key: (_honest(value), nearest) for key, (value, nearest) in found.items()}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        dictionary.maxsize = math.inf
        bad = 0
        with dictionary.freeze():
            for subkey, (value, expiration) in list(dictionary.items()):
                if not self._entry_holds(key_bytes, subkey, value, expiration):
                    del dictionary[subkey]
                    bad += 1
                    if bad > MAX_BAD_ENTRIES:
                        return False
            latest = max((item.expiration_time for _, item in dictionary.items()), default=-math.inf)
        dictionary.latest_expiration_time = latest
        return bool(dictionary.data)

    def _entry_holds(self, key_bytes: bytes, subkey: Any, value: Any, expiration: Any) -> bool:
        if not (isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expiration, float)):
            return False
        if self.record_validator is None:
            return True
        record = DHTRecord(key_bytes, self.serializer.dumps(subkey), value, expiration)
        valid: bool = self.record_validator.validate(record)
        return valid


# hivemind names its libp2p handlers after the class.
GuardedProtocol.__name__ = DHTProtocol.__name__


def _honest(value: Any) -> Any:
    """A neighbour's dictionary with the expiration of its latest entry, whatever the neighbour said."""
    if value is not None and isinstance(value.value, DictionaryDHTValue):
        return ValueWithExpiration(value.value, value.value.latest_expiration_time)
    return value


def guard(node: DHTNode) -> None:
    """Put the guards into a node that was just made (its validator is in force already)."""
    node.protocol.__class__ = GuardedProtocol
    bounded = BoundedStorage()
    bounded.__dict__.update(node.protocol.storage.__dict__)
    node.protocol.storage = bounded
    cache = BoundedStorage(maxsize=1024)
    node.protocol.cache = cache
