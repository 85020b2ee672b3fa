"""The swarm's directory: who is there, how far the run is, and what it is, in a Hivemind DHT.

The DHT node lives in this process, on the running event loop. Every record is checked at every node that
stores it and again by who reads it (``swarm/dht_guard.py``); the kinds are in ``swarm/records.py``.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

# Importing the guard puts a bound on what hivemind decodes in this process.
from swarm import dht_guard
from swarm.clock import Clock, Timer
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.manifest import SignedManifest
from swarm.records import (
    RENEW_S,
    TTL_S,
    AnyRecord,
    Envelope,
    Genesis,
    GenesisRecord,
    ManifestRecord,
    PeerRecord,
    ProgressRecord,
    RecordError,
    dht_key,
    seal,
)
from swarm.transport.p2phost import P2PHost

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 30.0
JOIN_ATTEMPTS = 3
MAX_SKEW_S = 10.0
"""With a clock further off than this, records of 30 s would be dead or suspect on arrival."""
_MAX_REMEMBERED = 1 << 16

T = TypeVar("T", PeerRecord, ProgressRecord)


class DirectoryError(UserError):
    """The directory cannot be reached or did not take a record; one line."""


class Directory:
    """Publishes our records, renews them until ``withdraw`` or ``close``, and reads those of others.

    Every method that talks to the network raises ``DirectoryError`` when nobody answers in time.
    """

    def __init__(
        self,
        host: P2PHost,
        identity: Identity,
        run_id: str,
        clock: Clock,
        initial_peers: Sequence[str],
        client_only: bool,
        wall: Callable[[], float],
    ) -> None:
        self.run_id = run_id
        self.refused: Counter[str] = Counter()
        """Records of others that were refused, by reason."""
        self._host = host
        self._identity = identity
        self._clock = clock
        self._seeds = tuple(initial_peers)
        self._client_only = client_only
        self._wall = wall
        self._validator = dht_guard.RunValidator(run_id, self.refused, wall)
        self._node: Any = None
        self._own: dict[str, AnyRecord] = {}
        self._expirations: dict[str, float] = {}
        self._sequence = 0
        self._newest: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        self._stages: int | None = None
        self._genesis: Genesis | None = None
        self._renewal: Timer | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        host: P2PHost,
        identity: Identity,
        run_id: str,
        *,
        clock: Clock,
        initial_peers: Sequence[str] = (),
        client_only: bool = False,
        wall: Callable[[], float] = get_dht_time,
    ) -> Directory:
        """Make the DHT node and meet ``initial_peers`` (multiaddrs that end in ``/p2p/<id>``).

        ``client_only`` reads and stores, but serves nobody. ``wall`` is Unix time, for expirations alone.
        Raises ``DirectoryError`` when none of ``initial_peers`` answers, or when their clocks differ.
        """
        directory = cls(host, identity, run_id, clock, initial_peers, client_only, wall)
        await directory._make_node()
        try:
            await directory._join()
        except BaseException:
            await directory.close()
            raise
        host.on_restart(directory._on_restart)
        directory._schedule_renewal()
        return directory

    async def close(self) -> None:
        """Stop renewing and leave the DHT; what we published expires by itself."""
        self._closed = True
        if self._renewal is not None:
            self._renewal.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._drop_node()

    # Publishing

    async def announce(self, record: PeerRecord) -> None:
        """Publish what we are; when the stage is another than before, the old stage's record says so."""
        for key, old in list(self._own.items()):
            if isinstance(old, PeerRecord) and old.stage != record.stage:
                del self._own[key]
                await self._store(old.model_copy(update={"state": "leaving"}))
        await self._publish(record)

    async def publish_progress(self, record: ProgressRecord) -> None:
        """Publish what we, an origin, saw of the last step."""
        await self._publish(record)

    async def publish_manifest(self, signed: SignedManifest) -> None:
        """Publish the run's manifest. Raises ``ManifestError`` when it is not this run's."""
        self._stages = len(signed.verify(self.run_id).stages)
        await self._publish(ManifestRecord.of(signed, self._identity.peer_id))

    async def publish_genesis(self, genesis: Genesis) -> None:
        """Publish the run's first membership. Raises ``RecordError`` when it is not the researcher's."""
        genesis.verify(self.run_id)
        await self._publish(GenesisRecord(peer=self._identity.peer_id, genesis=genesis))

    async def _publish(self, record: AnyRecord) -> None:
        # Remembered first: if nobody takes it now, the renewal tries again.
        self._own[self._key_of(record)] = record
        await self._store(record)

    async def _store(self, record: AnyRecord) -> None:
        key = self._key_of(record)
        self._sequence = max(self._sequence + 1, int(self._wall() * 1000))
        last = self._expirations.get(key, 0.0)
        # The DHT keeps the later expiration, so each must exceed the one before.
        expiration = self._wall() + TTL_S
        if expiration <= last < expiration + TTL_S:
            expiration = last + 0.001
        self._expirations[key] = expiration
        stamped = record.model_copy(update={"sequence": self._sequence})
        try:
            data = seal(stamped, self.run_id, expiration, self._identity)
        except RecordError as error:
            raise DirectoryError(f"cannot publish the {record.kind} record: {error}") from None
        subkey = record.peer if isinstance(record, PeerRecord | ProgressRecord) else None
        node = self._live_node()
        outcome = dht_guard.watch_stores()
        await self._in_time(node.store(key, data, expiration, subkey=subkey), "storing a record")
        # hivemind's own answer counts the copy that a cut-off node keeps for itself. A shared record that
        # somebody else renewed a moment later is as good as ours.
        taken = outcome.accepted if subkey is not None else outcome.answered
        if not taken and (self._seeds or node.protocol.routing_table.uid_to_peer_id):
            raise DirectoryError(f"no other node took our {record.kind} record ({outcome.answered} answered)")

    def _key_of(self, record: AnyRecord) -> str:
        return dht_key(self.run_id, record.kind, record.stage if isinstance(record, PeerRecord) else None)

    # Reading

    async def peers(self, stage: int | None = None, *, leaving: bool = False) -> list[PeerRecord]:
        """The peers of one stage or of all, in order of (stage, peer); those that leave only on demand.

        Reading all takes the number of stages from the manifest; without one in the DHT there are none.
        """
        if stage is not None:
            stages: Sequence[int] = (stage,)
        else:
            if self._stages is None:
                await self.manifest()
            stages = range(self._stages or 0)
        envelopes = await self._read([dht_key(self.run_id, "peer", number) for number in stages])
        newest: dict[str, PeerRecord] = {}
        for record in self._fresh(envelopes, PeerRecord):
            known = newest.get(record.peer)
            if known is None or _age(record) > _age(known):
                newest[record.peer] = record
        peers = [record for record in newest.values() if leaving or record.state != "leaving"]
        return sorted(peers, key=lambda record: (record.stage, record.peer))

    async def progress(self) -> list[ProgressRecord]:
        """One record for each origin, in order of peer."""
        envelopes = await self._read([dht_key(self.run_id, "progress")])
        return sorted(self._fresh(envelopes, ProgressRecord), key=lambda record: record.peer)

    async def manifest(self) -> SignedManifest | None:
        """The run's manifest, verified; None when the DHT does not hold it."""
        for envelope in await self._read([dht_key(self.run_id, "manifest")]):
            signed = cast(ManifestRecord, envelope.record).signed
            self._stages = len(signed.verify(self.run_id).stages)
            return signed
        return None

    async def genesis(self) -> Genesis | None:
        """The membership that supersedes all others that we have ever read, verified; None without any."""
        for envelope in await self._read([dht_key(self.run_id, "genesis")]):
            genesis = cast(GenesisRecord, envelope.record).genesis
            if genesis.supersedes(self._genesis):
                self._genesis = genesis
        return self._genesis

    async def _read(self, keys: list[str]) -> list[Envelope]:
        """Every record under ``keys`` that holds and has not expired."""
        node = self._live_node()
        found = await self._in_time(
            # The latest, not the first: a node's first finding is stale half of the time after an update.
            node.get_many(keys, sufficient_expiration_time=float("inf")),
            "reading records",
        )
        if not any(found.values()) and self._seeds and not node.protocol.routing_table.uid_to_peer_id:
            raise DirectoryError("no node of the run can be reached any more")
        envelopes = []
        for key, entry in found.items():
            if entry is None:
                continue
            entries = entry.value.items() if isinstance(entry.value, dict) else [(None, entry)]
            for subkey, (data, expiration) in entries:
                envelope = self._validator.read(
                    dht_guard.key_id(key),
                    MSGPackSerializer.dumps(subkey),
                    MSGPackSerializer.dumps(data),
                    expiration,
                )
                if envelope is not None and envelope.expiration > self._wall():
                    envelopes.append(envelope)
        return envelopes

    def _fresh(self, envelopes: list[Envelope], kind: type[T]) -> list[T]:
        """Their records of one kind, without those that are older than one we have read before."""
        records: list[T] = []
        for envelope in envelopes:
            record = envelope.record
            if not isinstance(record, kind):
                continue
            owner = (record.kind, record.peer)
            if _age(record) < self._newest.get(owner, (0, 0)):
                self.refused["stale"] += 1
                continue
            self._newest[owner] = _age(record)
            self._newest.move_to_end(owner)
            if len(self._newest) > _MAX_REMEMBERED:
                self._newest.popitem(last=False)
            records.append(record)
        return records

    # The node

    async def _make_node(self) -> None:
        node = await self._in_time(
            DHTNode.create(
                p2p=self._host.p2p,
                client_mode=self._client_only,
                record_validator=self._validator,
                wait_timeout=RPC_TIMEOUT_S,
                backoff_rate=1.0,
                # We read the latest always; a cache would only be a second place to poison.
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            ),
            "starting the DHT node",
        )
        dht_guard.guard(node)
        self._node = node

    def _live_node(self) -> Any:
        if self._node is None:
            raise DirectoryError("the DHT node is down" if not self._closed else "the directory is closed")
        return self._node

    async def _drop_node(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            try:
                await asyncio.wait_for(node.shutdown(), RPC_TIMEOUT_S)
            except Exception as error:  # a p2pd that has died cannot be told
                log.debug("DHT node did not shut down cleanly: %r", error)

    async def _join(self) -> None:
        """Meet the seeds. Raises ``DirectoryError`` when there are some and none can be used."""
        if not self._seeds:
            return
        for _ in range(JOIN_ATTEMPTS):
            skews = [
                skew for skew in await asyncio.gather(*map(self._greet, self._seeds)) if skew is not None
            ]
            if skews:
                break
        else:
            raise DirectoryError(f"no bootstrap node answers at {', '.join(self._seeds)}")
        skew = statistics.median_low(skews)
        if abs(skew) > MAX_SKEW_S:
            way = "behind" if skew > 0 else "ahead of"
            raise DirectoryError(
                f"this machine's clock is {abs(skew):.0f} s {way} the swarm's; "
                "set it: timedatectl set-ntp true"
            )
        await self._in_time(self._node.find_nearest_nodes([self._node.node_id]), "looking for nodes")

    async def _greet(self, seed: str) -> float | None:
        """Ping a seed; by how many seconds its clock is ahead of ours, None when it does not answer."""
        protocol = self._node.protocol
        name = seed.rpartition("/p2p/")[2]
        if name == self._host.peer_id:
            return None
        peer = PeerID.from_base58(name)
        request = dht_pb2.PingRequest(peer=protocol.node_info)
        try:
            await asyncio.wait_for(self._host.dial(name, (seed,)), RPC_TIMEOUT_S)
            asked = self._wall()
            answer = await asyncio.wait_for(
                protocol.get_stub(peer).rpc_ping(request, timeout=RPC_TIMEOUT_S), 2 * RPC_TIMEOUT_S
            )
            node_id = DHTID.from_bytes(answer.peer.node_id)
            got = self._wall()
        except Exception as error:  # whatever it is: another seed may do
            log.debug("seed %s does not answer: %r", seed, error)
            return None
        await protocol.update_routing_table(node_id, peer, responded=True)
        return float(answer.dht_time) - (asked + got) / 2

    async def _on_restart(self, _p2p: Any) -> None:
        """p2pd is another one: so must the DHT node be; its store is empty, so publish at once."""
        if self._closed:
            return
        await self._drop_node()
        await self._renew()

    def _schedule_renewal(self) -> None:
        if not self._closed:
            self._renewal = self._clock.call_later(RENEW_S, self._begin_renewal)

    def _begin_renewal(self) -> None:
        self._renewing = asyncio.get_running_loop().create_task(self._renew())
        self._renewing.add_done_callback(lambda _: self._schedule_renewal())

    async def _renew(self) -> None:
        """Publish again what is ours; meet the seeds again if every node was lost."""
        try:
            if self._node is None:
                await self._make_node()
            if not self._node.protocol.routing_table.uid_to_peer_id:
                await self._join()
        except DirectoryError as error:
            log.warning("directory: %s", error)
        for key, record in list(self._own.items()):
            if self._own.get(key) is record:
                try:
                    await self._store(record)
                except DirectoryError as error:
                    log.warning("directory: %s", error)

    async def _in_time(self, work: Awaitable[Any], what: str) -> Any:
        """Bound what hivemind may leave hanging."""
        try:
            return await asyncio.wait_for(work, QUERY_TIMEOUT_S)
        except TimeoutError:
            raise DirectoryError(f"{what} took longer than {QUERY_TIMEOUT_S:.0f} s") from None
        except Exception as error:
            raise DirectoryError(f"{what} failed: {error!r}") from error


def _age(record: AnyRecord) -> tuple[int, int]:
    """Later is greater."""
    return (record.incarnation, record.sequence)
