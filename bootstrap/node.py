"""The researcher's node: a DHT node that others can find, the run's manifest, and its witness at birth.

It takes no part in the training. When every stage has its replicas it signs who begins (`Genesis`);
afterwards the swarm can do without it, and only newcomers need an address to begin with. It signs the next
epoch when the run was stopped whole, or when too few members are left to agree (`bootstrap.epochs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bootstrap.create import load_genesis, write_whole
from bootstrap.epochs import BEGINNING_S, RUNNING, Beginning, beginning, mostly_trains, trains
from bootstrap.known import Known
from swarm.clock import Clock, LoopClock
from swarm.directory import Directory, DirectoryError
from swarm.identity import Identity
from swarm.joinstring import MAX_ADDRESSES, JoinString
from swarm.manifest import Manifest, SignedManifest
from swarm.records import Genesis, PeerRecord
from swarm.transport.p2phost import P2PHost

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class BootstrapOptions:
    """What the researcher chooses."""

    signed: SignedManifest
    key: Identity
    """The researcher's key; it must be the one that the manifest names."""
    identity: Identity
    """The node's libp2p identity."""
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    """Other nodes of the same run, to join them."""
    genesis_path: Path | None = None
    """Where the genesis is kept, so that a restart repeats it."""


@dataclass(frozen=True)
class Waiting:
    """How far the swarm is from its beginning: replicas present for each stage, how many are needed, and in a
    few words what is lacking."""

    replicas: tuple[int, ...]
    needed: int
    lacking: str = "replicas"


async def run_bootstrap(
    options: BootstrapOptions,
    stop: asyncio.Event,
    *,
    clock: Clock | None = None,
    on_ready: Callable[[JoinString], None] = lambda _: None,
    on_waiting: Callable[[Waiting], None] = lambda _: None,
    on_genesis: Callable[[Genesis], None] = lambda _: None,
) -> None:
    """Serve the run until ``stop`` is set.

    ``on_ready`` gets the join string when the manifest is published, ``on_waiting`` what is there whenever
    that changes, ``on_genesis`` each epoch's genesis once it is published.

    Raises ``UserError`` (``HostError``, ``DirectoryError``): a port in use, unreachable initial peers, a
    genesis file that is not this run's.
    """
    manifest = options.signed.verify()
    kept = None if options.genesis_path is None else load_genesis(options.genesis_path, manifest)
    clock = clock or LoopClock()
    host = await P2PHost.start(
        options.identity,
        initial_peers=options.initial_peers,
        host_maddrs=options.host_maddrs,
        announce_maddrs=options.announce_maddrs or None,
        clock=clock,
    )
    try:
        directory = await Directory.start(
            host, options.identity, manifest.run_id, clock=clock, initial_peers=options.initial_peers
        )
        try:
            await directory.publish_manifest(options.signed)
            on_ready(JoinString(manifest.run_id, _dialable(await host.addresses())))
            witness = _Witness(directory, manifest, options.key, options.genesis_path, kept, clock)
            await witness.serve(stop, on_waiting, on_genesis)
        finally:
            await directory.close()
    finally:
        await host.close()


class _Witness:
    """Finds the run's genesis or makes it when its time has come, and each later epoch's."""

    def __init__(
        self,
        directory: Directory,
        manifest: Manifest,
        key: Identity,
        path: Path | None,
        kept: Genesis | None,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._key = key
        self._path = path
        self._kept = kept
        self._known = Known(manifest.optimizer.total_steps)
        if kept is not None:
            self._known = self._known.with_genesis(kept, now=False)
        self._clock = clock
        self._trained_s = clock.now()
        """When a member last said that it trains; after a beginning, until when it need not have."""

    async def serve(
        self,
        stop: asyncio.Event,
        on_waiting: Callable[[Waiting], None],
        on_genesis: Callable[[Genesis], None],
    ) -> None:
        """Until ``stop`` is set."""
        told: Waiting | None = None
        published: Genesis | None = None
        while not stop.is_set():
            try:
                waiting = await self._look()
                if self._kept is not None and self._kept != published:
                    published = self._kept
                    await _publish(self._directory, published)
                    on_genesis(published)
                if waiting is not None and waiting != told:
                    on_waiting(waiting)
                told = waiting
            except DirectoryError as error:
                log.warning("%s", error)
            await _until(stop, LOOK_AGAIN_S)

    async def _look(self) -> Waiting | None:
        """Keep the newest genesis there is, made now if its time has come; else what is waited for."""
        newest = await self._directory.genesis()
        if newest is not None and newest.supersedes(self._kept):
            self._keep(newest)  # another node of the researcher's made it
        progress = await self._directory.progress()
        peers = await self._directory.peers()
        now = self._clock.now()
        self._known = self._known.seeing(peers, progress)
        if mostly_trains(peers, self._known):
            self._trained_s = now  # the epoch has begun: nothing more is to be waited for
        elif trains(peers, self._known):
            self._trained_s = max(self._trained_s, now)
        # A run that trains has begun, whoever forgot how: a second beginning would split it.
        begun = self._kept is not None or bool(progress)
        next_one = beginning(
            peers,
            stages=len(self._manifest.stages),
            start_replicas=self._manifest.sync.start_replicas,
            begun=begun,
            quiet_s=now - self._trained_s,
            known=self._known,
        )
        if isinstance(next_one, Beginning):
            # Kept before anybody can hear of it: after a crash here the same members begin.
            self._keep(self._sign(next_one))
            return None
        if next_one == RUNNING or (begun and not peers) or now < self._trained_s:
            return None
        return self._count(peers, next_one)

    def _count(self, peers: list[PeerRecord], lacking: str) -> Waiting:
        replicas = [0] * len(self._manifest.stages)
        for peer in peers:
            replicas[peer.stage] += 1
        return Waiting(tuple(replicas), self._manifest.sync.start_replicas, lacking)

    def _sign(self, begins: Beginning) -> Genesis:
        last = begins.after if self._kept is None else max(begins.after, self._kept.epoch)
        return Genesis.sign(
            self._manifest,
            begins.members,
            self._key,
            epoch=last + 1,
            step=begins.step,
            before=self._kept,
        )

    def _keep(self, genesis: Genesis) -> None:
        self._kept = genesis
        self._known = self._known.with_genesis(genesis)
        self._trained_s = self._clock.now() + BEGINNING_S
        if self._path is not None:
            write_whole(self._path, genesis.model_dump_json(indent=1).encode("ascii"))


async def _publish(directory: Directory, genesis: Genesis) -> None:
    """Once now; the directory renews it, and tries again where this fails."""
    try:
        await directory.publish_genesis(genesis)
    except DirectoryError as error:
        log.warning("%s", error)


def _dialable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """The node's addresses, those of this machine alone last."""
    local = [address for address in addresses if address.startswith(("/ip4/127.", "/ip6/::1/"))]
    return tuple([address for address in addresses if address not in local] + local)[:MAX_ADDRESSES]


async def _until(stop: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), limit_s)
