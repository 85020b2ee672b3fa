"""The bootstrap node as the run's witness at birth, and ``skipswarm status`` beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time

from bootstrap.create import create_run, example_toml, load_signed
from bootstrap.node import BootstrapOptions, Waiting, _Witness, run_bootstrap
from swarm.cli import main
from swarm.clock import LoopClock
from swarm.directory import Directory
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.joinstring import JoinString
from swarm.manifest import SignedManifest
from swarm.monitor.commands import look
from swarm.records import Genesis, ManifestRecord, PeerRecord, ProgressRecord, dht_key, seal
from swarm.transport.p2phost import P2PHost

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/" + Identity(b"d" * 32).peer_id


def run(test: Callable[[], Awaitable[None]], limit_s: float = 120.0) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), limit_s))


def new_run(tmp_path: Path, replicas: int) -> BootstrapOptions:
    toml = tmp_path / "run.toml"
    toml.write_text(example_toml().replace("start_replicas = 2", f"start_replicas = {replicas}"))
    made = create_run(toml)
    return BootstrapOptions(
        signed=load_signed(toml),
        key=Identity.load(made.key_path),
        identity=Identity.generate(),
        genesis_path=tmp_path / "run.genesis",
    )


@pytest.fixture
def options(tmp_path: Path) -> BootstrapOptions:
    """A run that needs one replica of each stage."""
    return new_run(tmp_path, 1)


class Running:
    """A bootstrap node that runs in this process."""

    def __init__(self, options: BootstrapOptions) -> None:
        loop = asyncio.get_running_loop()
        self.join: asyncio.Future[JoinString] = loop.create_future()
        self.genesis: asyncio.Future[Genesis] = loop.create_future()
        self.waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self.stop = asyncio.Event()
        self.task = asyncio.ensure_future(
            run_bootstrap(
                options,
                self.stop,
                on_ready=self.join.set_result,
                on_waiting=self.waiting.put_nowait,
                on_genesis=self.genesis.set_result,
            )
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, options: BootstrapOptions) -> AsyncIterator[Running]:
        running = cls(options)
        try:
            yield running
        finally:
            running.stop.set()
            await running.task


async def volunteer(stack: contextlib.AsyncExitStack, join: JoinString) -> Directory:
    host = await P2PHost.start(Identity.generate(), initial_peers=join.addresses)
    stack.push_async_callback(host.close)
    directory = await Directory.start(
        host, host.identity, join.run_id, clock=LoopClock(), initial_peers=join.addresses
    )
    stack.push_async_callback(directory.close)
    return directory


def record(who: Directory, stage: int, **fields: Any) -> PeerRecord:
    return PeerRecord(
        peer=who._identity.peer_id, stage=stage, step=0, **{"state": "joining", "incarnation": 3, **fields}
    )


def test_the_run_begins_when_every_stage_has_its_replicas(tmp_path: Path) -> None:
    options = new_run(tmp_path, 2)

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            node = await stack.enter_async_context(Running.of(options))
            join = await node.join
            assert JoinString.parse(str(join)) == join
            assert await node.waiting.get() == Waiting((0, 0, 0, 0), 2)
            peers = [await volunteer(stack, join) for _ in range(8)]
            for number, peer in enumerate(peers[:7]):
                await peer.announce(record(peer, number % 4))
            seen = await node.waiting.get()
            while seen.replicas != (2, 2, 2, 1):
                seen = await node.waiting.get()
            assert not node.genesis.done()
            assert await peers[0].genesis() is None
            before = await look(join)
            assert not before.begun
            assert before.complete

            await peers[7].announce(record(peers[7], 3))
            genesis = await node.genesis
            assert [member.stage for member in genesis.members] == [0, 0, 1, 1, 2, 2, 3, 3]
            assert {member.peer for member in genesis.members} == {peer._identity.peer_id for peer in peers}
            assert {member.incarnation for member in genesis.members} == {3}
            assert genesis.verify(join.run_id) == options.signed.verify()
            assert await peers[0].genesis() == genesis

            # What `status` sees.
            await peers[0].publish_progress(
                ProgressRecord(peer=peers[0]._identity.peer_id, step=5, train_loss=2.0, committed=60)
            )
            await peers[4].publish_progress(
                ProgressRecord(peer=peers[4]._identity.peer_id, step=5, train_loss=3.0, committed=60)
            )
            await peers[1].announce(record(peers[1], 1, state="leaving"))
            after = await look(join)
            assert (after.begun, after.step, after.train_loss, after.committed) == (True, 5, 2.5, 60)
            assert [stage.replicas for stage in after.stages] == [2, 1, 2, 2]
            assert after.complete
            await peers[5].announce(record(peers[5], 1, state="leaving"))
            assert not (await look(join)).complete

    run(test)


def test_a_restarted_node_repeats_the_genesis_that_it_kept(options: BootstrapOptions) -> None:
    async def test() -> None:
        first: Genesis | None = None
        for _ in range(2):
            async with contextlib.AsyncExitStack() as stack:
                node = await stack.enter_async_context(Running.of(options))
                join = await node.join
                if first is None:
                    peers = [await volunteer(stack, join) for _ in range(4)]
                    for number, peer in enumerate(peers):
                        await peer.announce(record(peer, number))
                    first = await node.genesis
                else:  # other peers, or none at all, make no other beginning
                    assert await node.genesis == first
                    newcomer = await volunteer(stack, join)
                    assert await newcomer.genesis() == first

    run(test)


def test_a_node_that_forgot_takes_the_genesis_of_the_dht(options: BootstrapOptions, tmp_path: Path) -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            node = await stack.enter_async_context(Running.of(options))
            join = await node.join
            peers = [await volunteer(stack, join) for _ in range(4)]
            for number, peer in enumerate(peers):
                await peer.announce(record(peer, number))
            genesis = await node.genesis

            def another(name: str) -> BootstrapOptions:
                return BootstrapOptions(
                    signed=options.signed,
                    key=options.key,
                    identity=Identity.generate(),
                    initial_peers=join.addresses,
                    genesis_path=tmp_path / name,
                )

            async with Running.of(another("second.genesis")) as second:
                assert await second.genesis == genesis
                assert (tmp_path / "second.genesis").read_bytes() == (tmp_path / "run.genesis").read_bytes()

    run(test)


def test_a_run_that_trains_gets_no_second_beginning(options: BootstrapOptions) -> None:
    """All peers are there and nobody holds the genesis any more."""
    manifest = options.signed.verify()
    peers = [PeerRecord(peer=f"p{stage}", stage=stage, step=7, state="joining") for stage in range(4)]

    class Forgetful:
        def __init__(self, progress: list[ProgressRecord]) -> None:
            self.seen = progress
            self.looks = 0
            self.stop = asyncio.Event()

        async def genesis(self) -> None:
            return None

        async def publish_genesis(self, genesis: Genesis) -> None:
            self.stop.set()

        async def peers(self) -> list[PeerRecord]:
            return peers

        async def progress(self) -> list[ProgressRecord]:
            self.looks += 1
            if self.looks == 2:
                self.stop.set()
            return self.seen

    async def begun(progress: list[ProgressRecord]) -> Genesis | None:
        directory = Forgetful(progress)
        witness = _Witness(
            cast(Directory, directory), manifest, options.key, options.genesis_path, None, LoopClock()
        )
        signed: list[Genesis] = []
        await witness.serve(directory.stop, lambda _: None, signed.append)
        return signed[0] if signed else None

    async def test() -> None:
        assert await begun([ProgressRecord(peer="p0", step=7)]) is None
        assert options.genesis_path is not None
        assert not options.genesis_path.exists()
        genesis = await begun([])
        assert genesis is not None
        assert Genesis.model_validate_json(options.genesis_path.read_bytes()) == genesis

    run(test)


@pytest.mark.parametrize("as_json", [True, False])
def test_status_from_the_command_line(
    options: BootstrapOptions,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 for a run with an empty stage, 2 and one line for a run that is not there."""

    def status(join: JoinString) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["skipswarm", "status", str(join), *(["--json"] * as_json)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output.out, output.err

    async def test() -> None:
        async with Running.of(options) as node:
            join = await node.join
            loop = asyncio.get_running_loop()
            code, out, _ = await loop.run_in_executor(None, status, join)
            assert code == 1
            if as_json:
                seen = json.loads(out)
                assert seen["run_id"] == join.run_id
                assert [stage["replicas"] for stage in seen["stages"]] == [0, 0, 0, 0]
            else:
                assert out.startswith(f"demo  {join.run_id}\n")
                assert out.count("none") == 4

            unknown = JoinString("00" * 32, join.addresses)
            code, out, err = await loop.run_in_executor(None, status, unknown)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert err.startswith("skipswarm: unknown run 000000000000:")

    # Signals belong to the main thread; here the command runs in another one.
    monkeypatch.setattr(uvloop.Loop, "add_signal_handler", lambda *_: None, raising=False)
    run(test)


def test_an_unreachable_node_is_one_line(options: BootstrapOptions) -> None:
    async def test() -> None:
        with pytest.raises(UserError, match="no bootstrap peer answered"):
            await look(JoinString(options.signed.verify().run_id, (DEAD,)), timeout_s=1.0)

    run(test)


def test_a_port_in_use_is_one_line(options: BootstrapOptions) -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            busy = BootstrapOptions(
                signed=options.signed,
                key=options.key,
                identity=options.identity,
                host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",),
            )
            with pytest.raises(UserError, match=f"/tcp/{port} is in use"):
                await run_bootstrap(busy, asyncio.Event())

    run(test)


@pytest.mark.parametrize("kept", ["another manifest", "another signature"])
def test_a_manifest_that_is_not_the_runs_is_one_line(options: BootstrapOptions, kept: str) -> None:
    """S16, from the side of a reader: the only node that answers tells of another run."""

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            manifest = options.signed.verify()
            host = await P2PHost.start(Identity.generate())
            stack.push_async_callback(host.close)
            liar = await DHTNode.create(p2p=host.p2p)  # checks nothing
            stack.push_async_callback(liar.shutdown)
            if kept == "another manifest":
                altered = manifest.model_copy(update={"seed": 99})
                signed = SignedManifest.sign(altered, options.key)
            else:
                signed = SignedManifest(options.signed.manifest, b"0" * 64)
            expiration = get_dht_time() + 30
            record = ManifestRecord.of(signed, host.peer_id)
            data = seal(record, manifest.run_id, expiration, host.identity)
            await liar.store(dht_key(manifest.run_id, "manifest"), data, expiration)
            join = JoinString(manifest.run_id, await host.addresses())
            with pytest.raises(UserError, match="its hash or its signature differs"):
                await look(join)

    run(test)
