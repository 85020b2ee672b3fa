"""Real sockets and processes on the emulated WAN. Needs what it needs: root or user namespaces."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.wan.check import round_trips, udp_socket
from benchmarks.wan.profiles import Profile
from benchmarks.wan.testbed import WanTestbed
from bootstrap.create import create_run, example_toml
from bootstrap.local import LocalSwarm
from swarm.clock import LoopClock
from tests.network.swarms import first, happens

REGIONS = ("Belgium", "NL", "London")
LOST_S = 0.3
"""What comes takes 7 ms; what a cut dropped never comes."""


def hosts_of(testbed: WanTestbed, stack: ExitStack) -> list[socket.socket]:
    """A UDP socket on each host."""
    sockets = []
    for host in testbed.hosts.values():
        one = stack.enter_context(udp_socket(host.place, 7001))
        one.settimeout(LOST_S)
        sockets.append(one)
    return sockets


@pytest.mark.asyncio
async def test_packets_pass_between_hosts_until_a_cut_and_after_it_is_healed() -> None:
    testbed = WanTestbed(Profile.load("gcp12").wan(REGIONS), ("a", "b", "c"), REGIONS)
    async with testbed:
        for line in await asyncio.to_thread(round_trips, testbed):
            assert line.measured >= line.asked  # never early; how late is the benchmark's to say
        with ExitStack() as stack:
            sockets = hosts_of(testbed, stack)
            there = testbed.hosts["b"].place
            testbed.cut(0, 1)
            await testbed.counts()  # the router has obeyed
            sockets[0].sendto(b"lost", (there.address, 7001))
            with pytest.raises(TimeoutError):
                sockets[1].recv(64)
            testbed.heal(0, 1)
            await testbed.counts()  # the router has obeyed
            sockets[0].sendto(b"passes", (there.address, 7001))
            assert sockets[1].recv(64) == b"passes"
    assert there.namespace is not None
    assert not there.namespace.exists()  # and the namespace with it: its last descriptor was the router's


@pytest.mark.asyncio
async def test_a_swarms_process_is_where_it_was_put(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(example_toml())
    made = create_run(tmp_path / "run.toml")
    clock = LoopClock()
    testbed = WanTestbed(Profile.load("home").wan(["Paris"]), ("node",), ("Paris",))
    async with testbed, LocalSwarm(tmp_path, clock, testbed.place_of) as swarm:
        await swarm.open()
        swarm.start_node("node", signed=made.signed_path, key=made.key_path)
        ready = await happens(clock, lambda: first(tmp_path, "node", "ready"))
    address = testbed.hosts["node"].place.address
    assert f"/ip4/{address}/tcp/" in ready["join"]
    with socket.socket() as ours, pytest.raises(OSError, match="assign"):
        ours.bind((address, 0))
