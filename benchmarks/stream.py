"""An activation from one process to another: our transport, hivemind's servicer streams, plain asyncio TCP.

Each activation is handed over whole and acknowledged; two are on their way at any time. The three ways take
turns, round by round; a figure is the median over the rounds. CPU time is that of both ends and both p2pds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind knows only typing's own)

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import uvloop
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import runtime_pb2
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming

from benchmarks import report
from swarm import wire
from swarm.clock import LoopClock
from swarm.identity import Identity
from swarm.messages import Message, TensorSpec
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.p2phost import P2PHost

SIZES = {"4mb": 4 << 20, "64mb": 64 << 20}
WAYS = ("ours", "servicer", "tcp")
IN_FLIGHT = 2
MAX_UNANSWERED = 50
PARTS = ("sender", "sender_p2pd", "receiver_p2pd", "receiver")
SLICE_BYTES = 1 << 20

Send = Callable[[torch.Tensor], Awaitable[None]]


class Activation(Message):
    kind = "benchmark_activation"
    number: int


class Received(Message):
    kind = "benchmark_received"
    number: int


class Push(ServicerBase):
    """hivemind's way: a stream for each call, protobuf chunks of a serialized tensor."""

    async def rpc_push(
        self, requests: AsyncIterator[runtime_pb2.ExpertRequest], context: P2PContext
    ) -> runtime_pb2.ExpertResponse:
        parts = [tensor async for request in requests for tensor in request.tensors]
        tensor = deserialize_torch_tensor(combine_from_streaming(parts))
        return runtime_pb2.ExpertResponse(metadata=struct.pack("!Q", tensor.numel()))


class End:
    """Our transport's handler on either side."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self.transport = transport
        self.waiting: dict[int, asyncio.Future[None]] = {}

    def on_message(self, sender: str, message: Message, tensor: Any) -> None:
        if isinstance(message, Activation):
            self.transport.send(sender, Received(number=message.number))
        elif isinstance(message, Received):
            self.waiting.pop(message.number).set_result(None)

    def admit(self, sender: str, message: Message, spec: TensorSpec) -> str | None:
        return None

    def on_link_up(self, peer: str) -> None:
        """Nothing waits for it."""

    def on_link_lost(self, peer: str, reason: str) -> None:
        for future in self.waiting.values():
            future.set_exception(ConnectionError(reason))
        self.waiting.clear()


async def endpoint() -> tuple[P2PHost, End]:
    host = await P2PHost.start(Identity.generate())
    transport = Libp2pTransport(host, LoopClock(), run_id="benchmark")
    end = End(transport)
    transport.start(end)
    await transport.open()
    return host, end


# The receiving process


async def receive_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            header_bytes, nbytes = struct.unpack("!IQ", await reader.readexactly(12))
            message = wire.decode_header(await reader.readexactly(header_bytes))
            spec = message.tensor
            assert spec is not None
            data = await reader.readexactly(nbytes)
            tensor = torch.frombuffer(data, dtype=wire.DTYPES[spec.dtype]).reshape(spec.shape)
            writer.write(struct.pack("!Q", tensor.numel()))
    except asyncio.IncompleteReadError:
        writer.close()


async def receiver() -> None:
    # Plain TCP's tensors stay in the bytes that they came in, as nothing writes to them here.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    host, end = await endpoint()
    await Push().add_p2p_handlers(host.p2p)
    server = await asyncio.start_server(receive_tcp, "127.0.0.1", 0, limit=1 << 22)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # The sender's end, however it came, ends us too.
    loop.add_reader(sys.stdin.fileno(), stop.set)
    port = server.sockets[0].getsockname()[1]
    print(
        json.dumps(
            {"peer": host.peer_id, "addresses": await host.addresses(), "p2pd": host.pid, "port": port}
        ),
        flush=True,
    )
    await stop.wait()
    server.close()
    await end.transport.close()
    await host.close()


# The sending process


class Sender:
    """The three ways to hand over an activation."""

    def __init__(self, host: P2PHost, end: End, there: dict[str, Any]) -> None:
        self.host = host
        self.end = end
        self.there = there
        self.number = 0
        self.unanswered = 0
        """Calls of hivemind's servicer that ended without an answer, and were made again."""
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def begin(self) -> None:
        self.end.transport.learn(self.there["peer"], tuple(self.there["addresses"]))
        for _ in range(IN_FLIGHT):
            self.connections.put_nowait(await asyncio.open_connection("127.0.0.1", self.there["port"]))
        await self.ours(torch.zeros(1))
        self.stub = Push.get_stub(self.host.p2p, PeerID.from_base58(self.there["peer"]))

    async def ours(self, tensor: torch.Tensor) -> None:
        self.number += 1
        done = self.end.waiting[self.number] = asyncio.get_running_loop().create_future()
        message = Activation(number=self.number, tensor=wire.spec_of(tensor))
        self.end.transport.send(self.there["peer"], message, tensor)
        await done

    async def servicer(self, tensor: torch.Tensor) -> None:
        async def requests() -> AsyncIterator[runtime_pb2.ExpertRequest]:
            for part in split_for_streaming(serialize_torch_tensor(tensor), DEFAULT_MAX_MSG_SIZE):
                yield runtime_pb2.ExpertRequest(uid="stage", tensors=[part])

        while True:
            try:
                response = await self.stub.rpc_push(requests())
            except ValueError:
                # hivemind's protobuf stream now and then ends without an answer and without an error. Its
                # caller asks again; that the time counts is as it would be in use.
                self.unanswered += 1
                if self.unanswered > MAX_UNANSWERED:
                    raise
                continue
            assert struct.unpack("!Q", response.metadata)[0] == tensor.numel()
            return

    async def tcp(self, tensor: torch.Tensor) -> None:
        reader, writer = await self.connections.get()
        self.number += 1
        header = wire.encode_header(Activation(number=self.number, tensor=wire.spec_of(tensor)))
        data = wire.tensor_bytes(tensor)
        writer.write(struct.pack("!IQ", len(header), len(data)) + header)
        for start in range(0, len(data), SLICE_BYTES):
            writer.write(data[start : start + SLICE_BYTES])
            await writer.drain()
        assert struct.unpack("!Q", await reader.readexactly(8))[0] == tensor.numel()
        self.connections.put_nowait((reader, writer))


def cpu_s(pid: int) -> float:
    """User and system time that a process has used (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(send: Send, nbytes: int, count: int, pids: list[int]) -> tuple[float, list[float]]:
    """MB/s, and CPU-seconds of each process."""
    tensors = [torch.randn(nbytes // 4) for _ in range(IN_FLIGHT)]
    before = [cpu_s(pid) for pid in pids]
    started = time.perf_counter()

    async def lane(index: int) -> None:
        for _ in range(count // IN_FLIGHT):
            await send(tensors[index])

    await asyncio.gather(*(lane(index) for index in range(IN_FLIGHT)))
    elapsed_s = time.perf_counter() - started
    spent = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    return count * nbytes / elapsed_s / 1e6, spent


async def sender(there: dict[str, Any], child: int, quick: bool) -> dict[str, float]:
    host, end = await endpoint()
    try:
        ways = Sender(host, end, there)
        await ways.begin()
        pids = [os.getpid(), host.pid, there["p2pd"], child]
        rounds, total_bytes = (3, 192 << 20) if quick else (9, 512 << 20)
        rates: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for turn in range(rounds):
            for size, nbytes in SIZES.items():
                count = max(2 * IN_FLIGHT, total_bytes // nbytes // IN_FLIGHT * IN_FLIGHT)
                for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                    send: Send = getattr(ways, way)
                    if turn == 0:
                        await measure(send, nbytes, IN_FLIGHT, pids)
                    rate, spent = await measure(send, nbytes, count, pids)
                    rates.setdefault(f"{way}_{size}", []).append(rate)
                    gigabytes = count * nbytes / 1e9
                    for part, seconds in zip(PARTS, spent, strict=True):
                        cpu.setdefault(f"{way}_{size}_cpu_s_per_gb_{part}", []).append(seconds / gigabytes)
        return {**summary(rates, cpu), "servicer_unanswered": ways.unanswered}
    finally:
        await end.transport.close()
        await host.close()


def summary(rates: dict[str, list[float]], cpu: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and our rate over theirs as the median of each round's ratio."""
    figures = {}
    for other in ("servicer", "tcp"):
        for size in SIZES:
            pairs = zip(rates[f"ours_{size}"], rates[f"{other}_{size}"], strict=True)
            figures[f"vs_{other}_{size}"] = statistics.median(mine / theirs for mine, theirs in pairs)
    for name, values in rates.items():
        figures[f"{name}_mb_per_s"] = statistics.median(values)
        figures[f"{name}_best_mb_per_s"] = max(values)
    for name, values in cpu.items():
        if not (name.startswith("tcp") and "p2pd" in name):
            figures[name] = statistics.median(values)
    return figures


def main() -> None:
    if sys.argv[1:] == ["--receive"]:
        uvloop.run(receiver())
        return
    options = report.options(__doc__ or "")
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stream", "--receive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        there = json.loads(child.stdout.readline())
        figures = uvloop.run(sender(there, child.pid, options.quick))
    finally:
        child.terminate()
        child.wait()
    report.write("stream", figures, options.json)


if __name__ == "__main__":
    main()
