"""The directory over real p2pds: freshness, forgery, replays, frozen keys, a dead p2pd (S1-S3, S5)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

import bootstrap
from swarm.clock import LoopClock
from swarm.directory import Directory, DirectoryError
from swarm.identity import Identity
from swarm.manifest import Manifest, ManifestError, SignedManifest
from swarm.messages import Member
from swarm.records import Genesis, PeerRecord, ProgressRecord, RecordError, dht_key, seal
from swarm.transport.p2phost import P2PHost

RESEARCHER = Identity(b"r" * 32)
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)
SIGNED = SignedManifest.sign(MANIFEST, RESEARCHER)
RUN = MANIFEST.run_id


def run(test: Callable[[], Awaitable[None]], limit_s: float = 120.0) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), limit_s))


def record(who: Directory, stage: int = 1, step: int = 0, **fields: Any) -> PeerRecord:
    fields = {"state": "active", "incarnation": 1, **fields}
    return PeerRecord(peer=who._identity.peer_id, stage=stage, step=step, **fields)


@contextlib.asynccontextmanager
async def swarm_of(count: int) -> AsyncIterator[list[Directory]]:
    """``count`` directories of one run, each with its own p2pd; the first is the seed of the others."""
    async with contextlib.AsyncExitStack() as stack:
        first = await enter(stack, ())
        seeds = await first._host.addresses()
        rest = [await enter(stack, seeds) for _ in range(count - 1)]
        yield [first, *rest]


async def enter(
    stack: contextlib.AsyncExitStack, seeds: tuple[str, ...], run_id: str = RUN, **options: Any
) -> Directory:
    host = await enter_host(stack, seeds)
    directory = await Directory.start(
        host, host.identity, run_id, clock=LoopClock(), initial_peers=seeds, **options
    )
    stack.push_async_callback(directory.close)
    return directory


async def enter_host(stack: contextlib.AsyncExitStack, seeds: tuple[str, ...]) -> P2PHost:
    host = await P2PHost.start(Identity.generate(), initial_peers=seeds)
    stack.push_async_callback(host.close)
    return host


class Stranger:
    """A DHT node without any of our guards, that says what it likes."""

    def __init__(self, host: P2PHost, node: DHTNode) -> None:
        self.identity = host.identity
        self.node = node

    @classmethod
    async def enter(cls, stack: contextlib.AsyncExitStack, seed: Directory) -> Stranger:
        host = await enter_host(stack, await seed._host.addresses())
        node = await DHTNode.create(p2p=host.p2p, initial_peers=list(await seed._host.addresses()))
        stack.push_async_callback(node.shutdown)
        return cls(host, node)

    async def store(
        self, at: Directory, key: str, subkey: bytes, value: bytes, expiration: float
    ) -> list[bool]:
        """One raw STORE at one node; ``subkey`` and ``value`` are the bytes on the wire."""
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(source=key).to_bytes()],
            subkeys=[subkey],
            values=[value],
            expiration_time=[expiration],
            in_cache=[False],
            peer=self.node.protocol.node_info,
        )
        stub = self.node.protocol.get_stub(PeerID.from_base58(at._host.peer_id))
        return list((await stub.rpc_store(request, timeout=10.0)).store_ok)

    def keep(self, key: str, entries: dict[str, tuple[bytes, float]], expiration: float) -> None:
        """Answer anybody who asks for ``key`` with these entries and this expiration of the whole."""
        dictionary = DictionaryDHTValue()
        for subkey, (data, expires) in entries.items():
            dictionary.store(subkey, MSGPackSerializer.dumps(data), expires)
        storage = self.node.protocol.storage
        storage.clear()
        assert storage.store(DHTID.generate(source=key), dictionary, expiration)
        storage.store_subkey = lambda *_: True  # whatever it is given, it says that it took it


def test_eight_nodes_read_the_latest() -> None:
    async def test() -> None:
        async with swarm_of(8) as nodes:
            await nodes[0].publish_manifest(SIGNED)
            await asyncio.gather(*(node.announce(record(node, stage=n % 4)) for n, node in enumerate(nodes)))
            for reader in (nodes[0], nodes[7]):
                # Eight stores at once: a call that a busy machine lost leaves its node unasked for 5 s.
                peers = await reader.peers()
                while {peer.peer for peer in peers} != {node._identity.peer_id for node in nodes}:
                    peers = await reader.peers()
                assert [peer.stage for peer in peers] == [0, 0, 1, 1, 2, 2, 3, 3]
            # Straight after an update, at a node that has read the key before.
            for step in range(1, 25):
                writer, reader = nodes[step % 8], nodes[(step * 3 + 1) % 8]
                stage = step % 8 % 4
                await writer.announce(record(writer, stage=stage, step=step))
                steps = {peer.peer: peer.step for peer in await reader.peers(stage)}
                assert steps[writer._identity.peer_id] == step
            assert not any(node.refused for node in nodes)

    run(test)


def test_manifest_genesis_and_progress_come_through() -> None:
    async def test() -> None:
        async with swarm_of(3) as (first, second, third):
            assert await second.manifest() is None
            assert await second.genesis() is None
            assert await second.peers() == []
            await first.publish_manifest(SIGNED)
            await second.publish_manifest(SIGNED)  # anybody may keep it alive
            assert await third.manifest() == SIGNED
            members = (Member(peer=first._identity.peer_id, stage=0, incarnation=5),)
            genesis = Genesis.sign(MANIFEST, members, RESEARCHER)
            await first.publish_genesis(genesis)
            assert await third.genesis() == genesis
            for number, node in enumerate((first, second)):
                await node.publish_progress(
                    ProgressRecord(peer=node._identity.peer_id, step=3 + number, train_loss=2.5)
                )
            assert sorted(seen.step for seen in await third.progress()) == [3, 4]

            with pytest.raises(ManifestError):
                await first.publish_manifest(SignedManifest(SIGNED.manifest, b"0" * 64))
            with pytest.raises(RecordError):
                await first.publish_genesis(Genesis.sign(MANIFEST, members, Identity(b"x" * 32)))

    run(test)


def test_a_move_to_another_stage_leaves_no_ghost() -> None:
    async def test() -> None:
        async with swarm_of(2) as (first, second):
            await first.publish_manifest(SIGNED)
            await second.announce(record(second, stage=1))
            await second.announce(record(second, stage=2))
            assert await first.peers(1) == []
            assert [peer.stage for peer in await first.peers()] == [2]
            assert [peer.state for peer in await first.peers(1, leaving=True)] == []

    run(test)


def test_forged_foreign_and_lasting_records_are_refused_and_counted() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            victim, reader = await stack.enter_async_context(swarm_of(2))
            await victim.announce(record(victim, step=1))
            stranger = await Stranger.enter(stack, victim)
            key, pack = dht_key(RUN, "peer", 1), MSGPackSerializer.dumps
            name, own = victim._identity.peer_id, stranger.identity.peer_id
            soon = time.time() + 30

            def peer_record(peer: str, expiration: float, run_id: str = RUN) -> bytes:
                """Signed by the stranger, whoever it speaks for."""
                honest = PeerRecord(peer=own, stage=1, step=99, incarnation=9, state="active")
                data = seal(honest, run_id, expiration, stranger.identity)
                body = data[64:].replace(own.encode(), peer.encode())
                return stranger.identity.sign(b"skipswarm record 1\n" + body) + body

            late = time.time() + 1000
            cases = [
                (key, pack(name), pack(peer_record(name, soon)), soon, "bad signature"),  # S1
                (key, pack(name), pack(peer_record(own, soon)), soon, "wrong owner"),
                (key, pack(own), pack(b"unsigned"), soon, "malformed"),  # S2
                (key, pack(own), pack({"step": 1}), soon, "malformed"),
                ("anything", pack(own), pack(peer_record(own, soon)), soon, "wrong key"),
                ("anything", pack(None), pack("squatter"), soon, "malformed"),
                (key, pack(own), pack(peer_record(own, soon, "00" * 32)), soon, "another run"),  # S3
                (key, pack(own), pack(peer_record(own, late)), late, "expires too late"),
                (key, pack(own), pack(peer_record(own, soon)), 1e12, "expires too late"),
            ]
            for where, subkey, value, expiration, reason in cases:
                before = victim.refused[reason]
                assert await stranger.store(victim, where, subkey, value, expiration) == [False]
                assert victim.refused[reason] == before + 1, reason

            # The stranger serves its forgeries itself: whoever reads them there refuses them too.
            stranger.keep(key, {name: (peer_record(name, soon), soon)}, soon)
            before = reader.refused["bad signature"]
            assert [(peer.peer, peer.step) for peer in await reader.peers(1)] == [(name, 1)]
            assert reader.refused["bad signature"] > before
            # And the key is not frozen: its owner goes on.
            await victim.announce(record(victim, step=2))
            assert [peer.step for peer in await reader.peers(1)] == [2]

    run(test)


def test_a_replay_after_a_clean_leave_changes_nothing() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first, second, leaver = await stack.enter_async_context(swarm_of(3))
            stranger = await Stranger.enter(stack, first)
            await leaver.announce(record(leaver, step=4))
            assert [peer.step for peer in await second.peers(1)] == [4]
            key, name = dht_key(RUN, "peer", 1), leaver._identity.peer_id
            heard = await stranger.node.get(key, latest=True)
            assert heard is not None
            data, expiration = heard.value[name]

            await leaver.announce(record(leaver, step=4, state="leaving"))
            assert await second.peers(1) == []
            pack = MSGPackSerializer.dumps
            for node in (first, second):
                await stranger.store(node, key, pack(name), pack(data), expiration)
            stranger.keep(key, {name: (data, expiration)}, expiration)
            assert await second.peers(1) == []
            newcomer = await enter(stack, await first._host.addresses())
            assert await newcomer.peers(1) == []

            # Even where nobody stores the leave any more, a reader knows what it has read.
            for node in (first, second, leaver, newcomer):
                node._node.protocol.storage.clear()
            stranger.keep(key, {name: (data, expiration)}, expiration)
            assert await second.peers(1) == []
            assert second.refused["stale"] > 0

    run(test)


def test_a_neighbour_cannot_end_a_search_by_an_endless_expiration() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            # More nodes than replicas (5) of a record: some readers have to ask.
            nodes = await stack.enter_async_context(swarm_of(8))
            stranger = await Stranger.enter(stack, nodes[0])
            key = dht_key(RUN, "peer", 1)
            soon = time.time() + 30
            honest = PeerRecord(peer=stranger.identity.peer_id, stage=1, step=0, state="active")
            data = seal(honest, RUN, soon, stranger.identity)
            # A search for the latest would end where it hears this, whatever the others would have said.
            stranger.keep(key, {stranger.identity.peer_id: (data, soon)}, float("inf"))
            name, key_id = PeerID.from_base58(stranger.identity.peer_id), DHTID.generate(source=key)
            (heard, _) = (await nodes[1]._node.protocol.call_find(name, [key_id]))[key_id]
            assert heard.expiration_time == soon
            for step in range(1, 4):
                for writer, reader in zip(nodes, nodes[1:] + nodes[:1], strict=True):
                    await writer.announce(record(writer, step=step))
                    steps = {peer.peer: peer.step for peer in await reader.peers(1)}
                    assert steps[writer._identity.peer_id] == step

    run(test)


def test_a_store_that_nobody_takes_is_an_error() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            seed = await enter(stack, ())
            seeds = await seed._host.addresses()
            node = await enter(stack, seeds)
            await node.announce(record(node))
            await seed.close()
            await seed._host.close()
            with pytest.raises(DirectoryError, match="no other node took our peer record"):
                await node.announce(record(node, step=1))
            with pytest.raises(DirectoryError, match="no node of the run can be reached"):
                await node.peers(3)

    run(test)


def test_a_restart_of_p2pd_publishes_anew() -> None:
    async def test() -> None:
        async with swarm_of(2) as (first, second):
            await second.announce(record(second, step=3))
            (before,) = await first.peers(1)
            back = asyncio.Event()

            async def restarted(_p2p: Any) -> None:
                back.set()

            second._host.on_restart(restarted)  # after the directory's own
            os.kill(second._host.pid, signal.SIGKILL)
            await back.wait()
            (after,) = await first.peers(1)
            assert after.step == 3
            assert after.sequence > before.sequence
            await second.announce(record(second, step=4))
            assert [peer.step for peer in await first.peers(1)] == [4]

    run(test)


def test_a_wrong_clock_is_told_at_the_join() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            seed = await enter(stack, ())
            seeds = await seed._host.addresses()
            for offset, words in ((600, "600 s ahead of"), (-600, "600 s behind")):
                with pytest.raises(DirectoryError, match=f"clock is {words} the swarm's"):
                    await enter(stack, seeds, wall=lambda offset=offset: time.time() + offset)

    run(test)


VICTIM = """
import asyncio, sys, uvloop
from swarm.clock import LoopClock
from swarm.directory import Directory
from swarm.identity import Identity
from swarm.transport.p2phost import P2PHost

async def main():
    host = await P2PHost.start(Identity(b"v" * 32))
    directory = await Directory.start(host, host.identity, sys.argv[1], clock=LoopClock())
    print((await host.addresses())[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(dict(directory.refused), flush=True)
    await directory.close()
    await host.close()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def nested(levels: int) -> bytes:
    data = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return bytes(data)


def test_nested_extensions_from_a_raw_peer_do_not_end_a_node() -> None:
    """S5. The victim is a process of its own: its crash is a failed test and not the end of pytest."""
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert victim.stdin is not None
    assert victim.stdout is not None
    try:
        address = victim.stdout.readline().strip()
        bomb = nested(200)
        assert len(bomb) < 2000

        async def attack() -> None:
            async with contextlib.AsyncExitStack() as stack:
                host = await enter_host(stack, (address,))
                node = await DHTNode.create(p2p=host.p2p, initial_peers=[address])
                stack.push_async_callback(node.shutdown)
                stub = node.protocol.get_stub(PeerID.from_base58(address.rpartition("/p2p/")[2]))
                key = DHTID.generate(source=dht_key(RUN, "peer", 0)).to_bytes()
                soon = time.time() + 30
                # As a whole dictionary, as a value, as a subkey: the first is decoded before any validator.
                for subkey, value in (
                    (DHTProtocol.IS_DICTIONARY, bomb),
                    (MSGPackSerializer.dumps("x"), bomb),
                    (bomb, bomb),
                ):
                    request = dht_pb2.StoreRequest(
                        keys=[key], subkeys=[subkey], values=[value], expiration_time=[soon], in_cache=[False]
                    )
                    with contextlib.suppress(Exception):  # how it is refused is not the point here
                        await stub.rpc_store(request, timeout=10.0)
                assert victim.poll() is None
                answer = await stub.rpc_ping(dht_pb2.PingRequest(), timeout=10.0)
                assert answer.peer.node_id

        run(attack)
        out, _ = victim.communicate("", timeout=30)
        assert victim.returncode == 0
        assert "malformed" in out  # the two that reached the validator were counted
    finally:
        victim.kill()
        victim.wait()
