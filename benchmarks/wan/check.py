"""Is the emulated WAN what it was asked to be? Round-trip times and TCP rates between pairs, measured.

One process measures all: a socket belongs to the namespace in which it was opened, wherever it is used.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import statistics
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TypeVar

from benchmarks.wan.testbed import Host, WanTestbed
from bootstrap.forker import enter_network
from bootstrap.local import Place

T = TypeVar("T")

PORT = 7000
ROUNDS = 5
"""Pings of each pair; the median counts."""
SPACING_S = 0.002
"""Between two pings of any pairs: they do not wait for each other."""
LOST_S = 2.0
PING = struct.Struct("!dII")
"""When it was sent, by whom, to whom."""
CHUNK = memoryview(bytes(1 << 20))
ROUND_TRIPS = 12
"""TCP has found its rate after these."""


@dataclass(frozen=True)
class Line:
    """One measurement: of the latency in s there and back, or of the rate in bytes/s one way."""

    source: Host
    target: Host
    what: str
    asked: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.asked


def on_host(place: Place, make: Callable[[], T]) -> T:
    """What ``make`` returns in the namespace of ``place``: a socket that it opens stays there."""
    assert place.namespace is not None

    def enter_and_make() -> T:
        enter_network(str(place.namespace))
        return make()

    # A namespace is a thread's own, and a process without rights outside cannot go home again.
    with ThreadPoolExecutor(1) as guest:
        return guest.submit(enter_and_make).result()


def udp_socket(place: Place, port: int) -> socket.socket:
    """Bound to the address of ``place``, in its namespace."""
    made = on_host(place, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    made.bind((place.address, port))
    return made


def round_trips(testbed: WanTestbed) -> list[Line]:
    """Of all pairs, by UDP. Raises RuntimeError if a pair's packets do not come back."""
    hosts = list(testbed.hosts.values())
    found: dict[tuple[int, int], list[float]] = {}
    with ExitStack() as stack, selectors.SelectSelector() as selector:
        sockets = []
        for host in hosts:
            one = stack.enter_context(udp_socket(host.place, PORT))
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, host.number)
            sockets.append(one)
        # Each pair once with nobody asking for the other way: an answer is one way of its own.
        pings = [pair for _ in range(ROUNDS) for pair in itertools.combinations(range(len(hosts)), 2)]
        next_s = perf_counter()
        sent = 0
        while sum(map(len, found.values())) < len(pings) and perf_counter() < next_s + LOST_S:
            if sent < len(pings) and perf_counter() >= next_s:
                source, target = pings[sent]
                packet = PING.pack(perf_counter(), source, target)
                sockets[source].sendto(packet, (hosts[target].place.address, PORT))
                sent += 1
                next_s = perf_counter() + SPACING_S
            for key, _ in selector.select(0.0005):
                assert isinstance(key.fileobj, socket.socket)
                packet, sender = key.fileobj.recvfrom(PING.size)
                now_s = perf_counter()
                sent_s, source, target = PING.unpack(packet)
                if key.data == target:
                    key.fileobj.sendto(packet, sender)
                else:
                    found.setdefault((source, target), []).append(now_s - sent_s)
    lost = [pair for pair in itertools.combinations(range(len(hosts)), 2) if pair not in found]
    if lost:
        raise RuntimeError(f"no ping came back between hosts {lost[0]}")
    one_way_s = testbed.wan.one_way_s
    return [
        Line(hosts[a], hosts[b], "rtt", one_way_s[a][b] + one_way_s[b][a], statistics.median(found[a, b]))
        for a, b in sorted(found)
    ]


def tcp_rate(testbed: WanTestbed, source: Host, target: Host, duration_s: float) -> Line:
    """Of one connection that has found its rate, over ``duration_s``."""
    with ExitStack() as stack:
        there = (target.place.address, PORT)
        listener = stack.enter_context(on_host(target.place, lambda: socket.create_server(there)))
        sender = stack.enter_context(on_host(source.place, lambda: socket.create_connection(there)))
        receiver = stack.enter_context(listener.accept()[0])
        received = 0

        def send() -> None:
            with suppress(OSError):  # shut down at the end of the measurement
                while True:
                    sender.sendall(CHUNK)

        def receive() -> None:
            nonlocal received
            memory = bytearray(1 << 18)
            with suppress(OSError):  # reset by the end of the measurement
                while count := receiver.recv_into(memory):
                    received += count

        threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
        for thread in threads:
            thread.start()
        one_way_s = testbed.wan.one_way_s
        round_trip_s = one_way_s[source.number][target.number] + one_way_s[target.number][source.number]
        sleep(max(1.0, ROUND_TRIPS * round_trip_s))
        began_s, before = perf_counter(), received
        sleep(duration_s)
        rate = (received - before) / (perf_counter() - began_s)
        sender.shutdown(socket.SHUT_RDWR)
        receiver.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    return Line(source, target, "rate", testbed.wan.rate_bytes_per_s(source.number, target.number), rate)


def spread(testbed: WanTestbed, count: int) -> Sequence[tuple[Host, Host]]:
    """``count`` pairs from the slowest to the fastest, each as long as the other pairs of its rate."""
    hosts = list(testbed.hosts.values())
    pairs = sorted(
        itertools.combinations(hosts, 2),
        key=lambda pair: testbed.wan.rate_bytes_per_s(pair[0].number, pair[1].number),
    )
    count = min(count, len(pairs))
    return [pairs[round(n * (len(pairs) - 1) / max(1, count - 1))] for n in range(count)]


def table(lines: Sequence[Line]) -> str:
    """Asked, measured and ratio of each, for people: ms and Mbit/s."""
    rows = [f"{'pair':28} {'':5} {'asked':>10} {'measured':>10} {'ratio':>6}"]
    for line in lines:
        unit = 1e3 if line.what == "rtt" else 8e-6
        pair = f"{line.source.region} - {line.target.region}"
        unit_name = "ms" if line.what == "rtt" else "Mbit/s"
        rows.append(
            f"{pair:28} {line.what:5} {line.asked * unit:10.2f} {line.measured * unit:10.2f} "
            f"{line.ratio:6.3f} {unit_name}"
        )
    return "\n".join(rows)
