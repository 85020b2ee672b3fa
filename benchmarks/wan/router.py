"""The router's process: ``python -m benchmarks.wan.router PARENT_PID``. ``benchmarks.wan.testbed`` uses it.

It reads a ``Setup`` from the first line of its standard input, makes the namespaces, answers ``ready`` with
their descriptors, and then carries packets and obeys a ``Command`` a line until its standard input ends. All
goes with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from benchmarks.wan.namespaces import CLONE_NEWNET, new_host, unshare
from benchmarks.wan.profiles import Wan
from benchmarks.wan.shaper import Network
from bootstrap.forker import die_with, prctl
from swarm.errors import UserError

VNET_HEADER_BYTES = 10
_VNET_HEADER = struct.Struct("<BBHH")
"""The part of ``struct virtio_net_hdr`` that says how a piece is to be cut: flags, gso_type, hdr_len,
gso_size."""
DESTINATION = slice(VNET_HEADER_BYTES + 16, VNET_HEADER_BYTES + 20)
MAX_READ_BYTES = VNET_HEADER_BYTES + 65535
PR_SET_TIMERSLACK = 29
PACKETS_A_TURN = 32
"""Read from one device before the others have their turn."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Setup(_Strict):
    """The hosts' addresses and what lies between them."""

    addresses: tuple[str, ...]
    wan: Wan


class Cut(_Strict):
    """No packet passes from ``source`` to ``target`` any more."""

    do: Literal["cut"] = "cut"
    source: int
    target: int


class Heal(_Strict):
    """Packets pass again."""

    do: Literal["heal"] = "heal"
    source: int
    target: int


class Change(_Strict):
    """The link from ``source`` to ``target`` has another latency and rate."""

    do: Literal["change"] = "change"
    source: int
    target: int
    one_way_s: Annotated[float, Field(ge=0)]
    bytes_per_s: Annotated[float, Field(gt=0)]


class Count(_Strict):
    """Answer with ``counts``."""

    do: Literal["count"] = "count"


_COMMANDS: TypeAdapter[Cut | Heal | Change | Count] = TypeAdapter(
    Annotated[Cut | Heal | Change | Count, Field(discriminator="do")]
)


def wire_bytes(packet: bytes) -> int:
    """What a piece takes on the wire, whose packets have a header each."""
    _, segmented, header, payload = _VNET_HEADER.unpack_from(packet)
    size = len(packet) - VNET_HEADER_BYTES
    if not segmented or not payload or size <= header:
        return size
    return size + ((size - header - 1) // payload) * header


class Router:
    """Carries packets between devices, and obeys standard input."""

    def __init__(self, setup: Setup, devices: list[int]) -> None:
        self._network = Network(setup.wan)
        self._devices = devices
        self._hosts = {device: host for host, device in enumerate(devices)}
        self._targets = {bytes(map(int, text.split("."))): n for n, text in enumerate(setup.addresses)}
        self._commands = sys.stdin.fileno()
        self._rest = b""
        self._carried_bytes = 0
        self._refused = 0

    def serve(self) -> None:
        """Until standard input ends."""
        # select, not epoll: its timeout is in microseconds, and a latency of 1 ms must be one.
        watched = [*self._devices, self._commands]
        network = self._network
        while True:
            for target, packet in network.due(monotonic()):
                self._write(self._devices[target], packet)
            due_s = network.next_due_s()
            wait_s = None if due_s is None else max(0.0, due_s - monotonic())
            for ready in select.select(watched, [], [], wait_s)[0]:
                if ready != self._commands:
                    self._take(ready)
                elif not self._obey_all():
                    return

    def _take(self, device: int) -> None:
        """What a host has sent."""
        source, targets, network = self._hosts[device], self._targets, self._network
        for _ in range(PACKETS_A_TURN):
            try:
                packet = os.read(device, MAX_READ_BYTES)
            except BlockingIOError:
                return
            # Addresses of other kinds (multicast, IPv6) have no host here.
            target = targets.get(packet[DESTINATION])
            if target is not None and packet[VNET_HEADER_BYTES] >> 4 == 4:
                network.enter(monotonic(), source, target, packet, wire_bytes(packet))

    def _write(self, device: int, packet: bytes) -> None:
        try:
            self._carried_bytes += os.write(device, packet)
        except OSError:
            self._refused += 1  # as a network interface drops what it cannot take

    def _obey_all(self) -> bool:
        data = os.read(self._commands, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._obey(_COMMANDS.validate_json(line))
        return bool(data)

    def _obey(self, command: Cut | Heal | Change | Count) -> None:
        network = self._network
        if isinstance(command, Cut):
            network.cut(command.source, command.target)
        elif isinstance(command, Heal):
            network.heal(command.source, command.target)
        elif isinstance(command, Change):
            network.change(
                command.source, command.target, one_way_s=command.one_way_s, bytes_per_s=command.bytes_per_s
            )
        else:
            times = os.times()
            tell(
                event="counts",
                carried_bytes=self._carried_bytes,
                dropped=network.dropped(),
                refused=self._refused,
                cpu_s=times.user + times.system,
            )


def tell(**answer: Any) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            break
        line += byte
    return line


def main() -> None:
    die_with(int(sys.argv[1]), signal.SIGKILL)
    prctl(PR_SET_TIMERSLACK, 1)  # nanoseconds, not the usual 50 us after each deadline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches our starter, which then ends us
    setup = Setup.model_validate_json(_first_line())
    try:
        hosts = [new_host(address) for address in setup.addresses]
        unshare(CLONE_NEWNET)  # out of the last host's
    except UserError as error:
        tell(event="failed", reason=str(error))
        return
    tell(event="ready", namespaces=[namespace for namespace, _ in hosts])
    Router(setup, [device for _, device in hosts]).serve()


if __name__ == "__main__":
    main()
