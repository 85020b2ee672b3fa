"""What only the real transport meets: hostile bytes, half-open streams, the end of a p2pd."""

from __future__ import annotations

import asyncio
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from swarm import wire
from swarm.transport.libp2p import PROTOCOL, Libp2pTransport
from swarm.transport.link import Limits
from swarm.wire import FrameKind, Preamble
from tests.contract.harness import Bulk, Libp2pHarness, Node, Note
from tests.contract.raw import RawPeer

pytestmark = pytest.mark.asyncio
SHORT = Limits(dial_timeout_s=1.0, hello_timeout_s=0.5, header_timeout_s=0.5, transfer_timeout_s=0.5)


@pytest_asyncio.fixture
async def victim(libp2p: Libp2pHarness) -> Node:
    return await libp2p.node(limits=SHORT)


@pytest_asyncio.fixture
async def attacker(libp2p: Libp2pHarness, victim: Node) -> AsyncIterator[RawPeer]:
    peer = await RawPeer.start(victim)
    yield peer
    await peer.host.close()


async def still_serves(libp2p: Libp2pHarness, victim: Node) -> None:
    friend = await libp2p.node()
    await libp2p.introduce(victim, friend)
    tensor = torch.arange(300_000.0)
    friend.give(victim.id, tensor)
    await libp2p.until(lambda: any(sender == friend.id for sender, _, _ in victim.recorder.messages))
    assert torch.equal(victim.recorder.tensors()[-1], tensor)


def head(kind: FrameKind, header: bytes, **fields: int) -> bytes:
    return Preamble(kind, len(header), **fields).pack() + header


def bulk(*shape: int) -> bytes:
    return wire.encode_header(Bulk(number=1, tensor={"dtype": "uint8", "shape": shape}))  # type: ignore[arg-type]


WHOLE = {"payload_bytes": 10, "transfer": 1, "parts": 1}
BAD_FRAMES = {
    "noise": (0, bytes(range(256)) * 8, "not a frame"),
    "version": (0, b"sw\x63" + bytes(25), "protocol version 99"),
    "kind": (0, bytes((*b"sw", wire.PROTOCOL_VERSION, 99)) + bytes(24), "unknown kind of frame"),
    "header of 2^31": (0, head(FrameKind.MESSAGE, b"")[:8] + b"\x80\0\0\0" + bytes(16), "2147483648"),
    "tensor of 2^31": (1, head(FrameKind.TENSOR, bulk(2**31), payload_bytes=2**31, parts=1), "2147483648"),
    "tensor of 2^80": (
        1,
        head(FrameKind.TENSOR, bulk(2**39, 2**39), payload_bytes=2**62, parts=1),
        "are allowed",
    ),
    "length that lies": (1, head(FrameKind.TENSOR, bulk(11), **WHOLE) + bytes(10), "not 11"),
    "payload on control": (0, head(FrameKind.TENSOR, bulk(10), **WHOLE) + bytes(10), "out of place"),
    "message on data": (1, head(FrameKind.MESSAGE, wire.encode_header(Note(number=1))), "out of place"),
    "tensor that does not follow": (0, head(FrameKind.MESSAGE, bulk(10)), "does not follow"),
    "tensor without a spec": (
        1,
        head(FrameKind.TENSOR, wire.encode_header(Note(number=1)), **WHOLE),
        "announced",
    ),
    "unknown message": (0, head(FrameKind.MESSAGE, wire.pack(("nothing", {}))), "unknown kind of message"),
    "wrong schema": (0, head(FrameKind.MESSAGE, wire.pack(("test_note", {"number": "1"}))), "Note: number"),
    "deep nesting": (0, head(FrameKind.MESSAGE, b"\x92\xa4note" + b"\x91" * 500 + b"\xc0"), "deeper"),
    "too many parts": (1, head(FrameKind.TENSOR, bulk(30), payload_bytes=10, parts=3), "in 3 parts"),
    "taken and never sent": (0, head(FrameKind.TAKEN, b"", transfer=7), "was not under way"),
    "second hello": (0, head(FrameKind.HELLO, b"x"), "out of place"),
}


@pytest.mark.parametrize("name", sorted(BAD_FRAMES))
async def test_a_bad_frame_closes_the_link_with_a_reason(
    libp2p: Libp2pHarness, victim: Node, attacker: RawPeer, name: str
) -> None:
    index, data, reason = BAD_FRAMES[name]
    streams = await attacker.link(victim)
    await libp2p.until(lambda: victim.recorder.count("up") == 1)
    streams[index].write(data)
    assert reason in await streams[0].farewell()
    for stream in streams[1:]:
        await stream.ended()
    assert victim.recorder.events == [("up", attacker.host.peer_id), ("lost", attacker.host.peer_id)]
    assert reason in victim.recorder.reasons[0]
    assert victim.recorder.messages == []
    assert victim.transport.links() == frozenset()


async def test_a_watch_is_told_what_becomes_of_large_tensors(libp2p: Libp2pHarness) -> None:
    here, there = await libp2p.node(), await libp2p.node()
    await libp2p.introduce(here, there)
    told: list[tuple[object, ...]] = []

    def tell(*what: object) -> None:
        told.append(what)
        libp2p.changed.set()

    class Watch:
        sent = staticmethod(lambda peer, size: tell("sent", peer, size))
        taken = staticmethod(lambda peer, size: tell("taken", peer, size))
        lost = staticmethod(lambda peer: tell("lost", peer))

    assert isinstance(here.transport, Libp2pTransport)
    here.transport.watch(Watch())
    small = wire.ACKNOWLEDGED_BYTES // 4 - 1
    for floats in (300_000, small, small + 1):
        here.give(there.id, torch.zeros(floats))
    await libp2p.until(lambda: len(told) == 4)
    sizes = [1_200_000, wire.ACKNOWLEDGED_BYTES]
    assert told[:2] == [("sent", there.id, size) for size in sizes]
    assert sorted(told[2:]) == [("taken", there.id, size) for size in sorted(sizes)]
    there.transport.disconnect(here.id)
    await libp2p.until(lambda: len(told) == 5)
    assert told[4] == ("lost", there.id)


async def test_claims_of_size_cost_no_memory(libp2p: Libp2pHarness, victim: Node, attacker: RawPeer) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    async def attack() -> None:
        for name in ("header of 2^31", "tensor of 2^31", "tensor of 2^80"):
            index, data, reason = BAD_FRAMES[name]
            streams = await attacker.link(victim)
            streams[index].write(data)
            assert reason in await streams[0].farewell()
        # Allowed sizes of which nothing follows: a header of 1 MiB, a tensor of 256 MiB.
        streams = await attacker.link(victim)
        streams[0].write(Preamble(FrameKind.MESSAGE, 1 << 20).pack() + bytes(100))
        streams[1].write(head(FrameKind.TENSOR, bulk(1 << 28), payload_bytes=1 << 28, parts=1) + bytes(100))
        assert "incomplete" in await streams[0].farewell()

    await attack()
    before = resident_bytes()
    tracemalloc.start()
    try:
        await attack()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert resident_bytes() - before < 3 << 20  # tracemalloc's own tables are in here
    assert not any(tensor is not None for _, _, tensor in victim.recorder.messages)
    await still_serves(libp2p, victim)


async def test_noise_instead_of_a_hello(libp2p: Libp2pHarness, victim: Node, attacker: RawPeer) -> None:
    for noise in (
        b"\0" * 100,
        os.urandom(5000),
        head(FrameKind.HELLO, b"\xc1"),
        head(FrameKind.MESSAGE, b"x"),
    ):
        stream = await attacker.open(victim)
        stream.write(noise)
        assert await stream.farewell()
    stream = await attacker.open(victim)
    stream.write(Preamble(FrameKind.HELLO, 5000).pack())
    assert "4096 are allowed" in await stream.farewell()
    assert victim.recorder.events == []
    await still_serves(libp2p, victim)


async def test_a_farewell_arrives_though_more_noise_is_on_its_way(
    libp2p: Libp2pHarness, victim: Node, attacker: RawPeer
) -> None:
    for _ in range(5):
        stream = await attacker.open(victim)
        for _ in range(40):
            stream.write(bytes(10_000))
        assert "not a frame" in await stream.farewell()
    await still_serves(libp2p, victim)


@pytest.mark.parametrize("comes_up", [True, False])
async def test_what_waits_for_a_peer_that_we_cannot_dial_goes_over_the_link_that_it_opens(
    libp2p: Libp2pHarness, comes_up: bool
) -> None:
    """Behind a NAT, only one of the two can dial: the raw peer takes no stream that is opened to it."""
    victim = await libp2p.node(limits=Limits(hello_timeout_s=10.0) if comes_up else SHORT)
    dialler = await RawPeer.start(victim)
    try:
        say_hello = dialler.hellos()
        first = await say_hello(victim, 0)
        victim.say(dialler.host.peer_id, 7)
        if comes_up:
            await libp2p.settle()
            assert victim.recorder.events == []
            rest = [await say_hello(victim, index) for index in (1, 2)]
            assert all([(await stream.frame())[0].kind is FrameKind.WELCOME for stream in rest])
            assert (await first.frame())[0].kind is FrameKind.WELCOME
            assert wire.decode_header((await first.frame())[1]) == Note(number=7)
            assert victim.recorder.events == [("up", dialler.host.peer_id)]
        else:
            assert await first.farewell() == "its hello stayed incomplete"
            assert victim.recorder.events == [("lost", dialler.host.peer_id)]
            assert "cannot be reached" in victim.recorder.reasons[0]
    finally:
        await dialler.host.close()


async def test_half_open_streams_free_their_slots(
    libp2p: Libp2pHarness, victim: Node, attacker: RawPeer
) -> None:
    silent, dripping = await attacker.open(victim), await attacker.open(victim)
    dripping.write(b"s")
    assert await silent.farewell() == "no hello"
    await dripping.ended()
    streams = await attacker.link(victim)
    streams[0].write(Preamble(FrameKind.MESSAGE, 50).pack())
    assert "header stayed incomplete" in await streams[0].farewell()
    streams = await attacker.link(victim)
    streams[1].write(head(FrameKind.PART, b"", payload_bytes=4096, transfer=9, part=1, parts=2) + bytes(4096))
    assert "header did not come" in await streams[0].farewell()
    streams = await attacker.link(victim)
    streams[1].write(head(FrameKind.TENSOR, bulk(5000), payload_bytes=5000, parts=1) + bytes(4999))
    assert "too slowly" in await streams[0].farewell()
    assert victim.transport.links() == frozenset()
    await still_serves(libp2p, victim)


async def test_one_peer_cannot_take_all_slots(libp2p: Libp2pHarness) -> None:
    victim = await libp2p.node(limits=Limits(max_waiting_streams=32))
    attacker = await RawPeer.start(victim)
    try:
        streams = [await attacker.open(victim) for _ in range(16)]
        ended = [asyncio.ensure_future(stream.ended()) for stream in streams]
        while sum(future.done() for future in ended) < 8:
            await asyncio.wait([f for f in ended if not f.done()], return_when=asyncio.FIRST_COMPLETED)
        assert sum(future.done() for future in ended) == 8
        await still_serves(libp2p, victim)
        for future in ended:
            future.cancel()
    finally:
        await attacker.host.close()


async def test_parts_wait_for_their_header(libp2p: Libp2pHarness, victim: Node, attacker: RawPeer) -> None:
    streams = await attacker.link(victim)
    data = bytes(range(256)) * 40
    first, second = (data[slice(*wire.part_bounds(len(data), part, 2))] for part in range(2))
    part = head(FrameKind.PART, b"", payload_bytes=len(second), transfer=3, part=1, parts=2)
    streams[2].write(part + second)
    streams[0].write(head(FrameKind.MESSAGE, wire.encode_header(Note(number=5))))
    await libp2p.until(lambda: victim.recorder.numbers() == [5])
    assert victim.recorder.admitted == []
    lead = head(FrameKind.TENSOR, bulk(len(data)), payload_bytes=len(first), transfer=3, part=0, parts=2)
    streams[1].write(lead + first)
    await libp2p.until(lambda: len(victim.recorder.messages) == 2)
    assert wire.tensor_bytes(victim.recorder.tensors()[0]).tobytes() == data


async def test_frames_in_single_bytes(libp2p: Libp2pHarness, victim: Node, attacker: RawPeer) -> None:
    streams = await attacker.link(victim)
    for byte in head(FrameKind.MESSAGE, wire.encode_header(Note(number=8))):
        streams[0].write(bytes([byte]))
        await streams[0].writer.drain()
    for byte in head(FrameKind.TENSOR, bulk(10), **WHOLE) + bytes(range(10)):
        streams[2].write(bytes([byte]))
        await streams[2].writer.drain()
    await libp2p.until(lambda: len(victim.recorder.messages) == 2)
    assert victim.recorder.numbers() == [8]
    assert victim.recorder.tensors()[0].tolist() == list(range(10))


async def test_a_flood_of_small_messages_lets_others_in(
    libp2p: Libp2pHarness, victim: Node, attacker: RawPeer
) -> None:
    streams = await attacker.link(victim)
    flood = head(FrameKind.MESSAGE, wire.encode_header(Note(number=1))) * 20_000
    streams[0].write(flood)
    await still_serves(libp2p, victim)
    await libp2p.until(lambda: len(victim.recorder.numbers()) == 20_000)


async def test_another_run_is_refused(libp2p: Libp2pHarness, victim: Node) -> None:
    stranger = await libp2p.node(run_id="another run")
    await libp2p.introduce(victim, stranger)
    stranger.say(victim.id, 1)
    await libp2p.until(lambda: stranger.recorder.count("lost") == 1)
    assert "another run" in stranger.recorder.reasons[0]
    assert victim.recorder.events == []


async def test_a_peer_that_never_answers_is_given_up(libp2p: Libp2pHarness, victim: Node) -> None:
    frozen = await RawPeer.start(victim)
    kept = []

    async def never_answers(info: object, reader: object, writer: object) -> None:
        kept.append((reader, writer))

    try:
        await frozen.host.p2p.add_binary_stream_handler(PROTOCOL, never_answers)
        victim.transport.learn(frozen.host.peer_id, await frozen.host.addresses())
        victim.say(frozen.host.peer_id, 1)
        await libp2p.until(lambda: victim.recorder.count("lost") == 1)
        assert victim.recorder.events == [("lost", frozen.host.peer_id)]
        assert "no answer" in victim.recorder.reasons[0]
        assert kept
    finally:
        await frozen.host.close()


async def test_a_p2pd_that_was_killed_comes_back(libp2p: Libp2pHarness) -> None:
    # b's p2pd may try a by itself while a is down, and then refuses to dial it for 5 s and more: the
    # harness's short dial would give up just then.
    a, b = await libp2p.node(limits=Limits()), await libp2p.node(limits=Limits())
    await libp2p.introduce(a, b)
    a.transport.connect(b.id)
    await libp2p.until(lambda: b.recorder.count("up") == a.recorder.count("up") == 1)
    assert a.host is not None
    addresses, pid, back = await a.host.addresses(), a.host.pid, asyncio.Event()

    async def restarted(p2p: object) -> None:
        back.set()

    a.host.on_restart(restarted)
    os.kill(pid, signal.SIGKILL)
    await libp2p.until(lambda: a.recorder.count("lost") == b.recorder.count("lost") == 1)
    await asyncio.wait_for(back.wait(), 30)
    assert a.host.pid != pid
    assert await a.host.addresses() == addresses
    b.say(a.id, 1)
    await libp2p.until(lambda: a.recorder.numbers() == [1])
    a.say(b.id, 2)
    await libp2p.until(lambda: b.recorder.numbers() == [2])
    assert [event for event, _ in a.recorder.events] == ["up", "lost", "up"]


async def test_bytes_and_messages_are_counted(libp2p: Libp2pHarness) -> None:
    a, b = await libp2p.node(), await libp2p.node()
    await libp2p.introduce(a, b)
    a.give(b.id, torch.zeros(1_000_000))
    a.say(b.id, 1)
    await libp2p.until(lambda: len(b.recorder.messages) == 2)
    assert isinstance(a.transport, Libp2pTransport)
    assert isinstance(b.transport, Libp2pTransport)
    sent, received = a.transport.stats()[b.id], b.transport.stats()[a.id]
    assert 4_000_000 < sent.bytes_sent < 4_010_000
    assert received.bytes_received == sent.bytes_sent
    assert (sent.messages_sent, received.messages_received) == (2, 2)
