"""Our p2pd: clear errors, nothing left behind, found again on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from swarm.identity import Identity
from swarm.transport.p2phost import HostError, P2PHost

pytestmark = pytest.mark.asyncio

CHILD = """
import asyncio, sys
from swarm.identity import Identity
from swarm.transport.p2phost import P2PHost

async def main():
    host = await P2PHost.start(Identity.generate())
    print(host.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def sockets_of(host: P2PHost) -> list[Path]:
    p2p = host.p2p
    return [Path(str(m).removeprefix("/unix")) for m in (p2p._daemon_listen_maddr, p2p._client_listen_maddr)]


def ended(pidfd: int, limit_s: float) -> bool:
    return bool(select.select([pidfd], [], [], limit_s)[0])


async def test_start_and_close() -> None:
    identity = Identity.generate()
    host = await P2PHost.start(identity)
    try:
        assert str(host.p2p.peer_id) == host.peer_id == identity.peer_id
        addresses = await host.addresses()
        assert all(address.endswith(f"/p2p/{identity.peer_id}") for address in addresses)
        assert os.getsid(host.pid) == host.pid, "Ctrl-C would reach p2pd"
        sockets = sockets_of(host)
        assert sockets[0].exists()
        pidfd = os.pidfd_open(host.pid)
    finally:
        await host.close()
    assert ended(pidfd, 5)
    os.close(pidfd)
    assert not any(path.exists() for path in sockets)
    await host.close()


async def test_a_bootstrap_peer_introduces_others() -> None:
    hosts = [await P2PHost.start(Identity.generate())]
    try:
        seeds = ("/ip4/127.0.0.1/tcp/1/p2p/" + Identity.generate().peer_id, *await hosts[0].addresses())
        for _ in range(2):
            hosts.append(await P2PHost.start(Identity.generate(), initial_peers=seeds))
        found = False
        async with asyncio.timeout(15):
            while not found:  # the seed learns the newcomer's addresses a moment after it has let it in
                with contextlib.suppress(HostError):
                    await hosts[1].dial(hosts[2].peer_id, ())
                    found = True
        with pytest.raises(HostError):
            await hosts[1].dial(Identity.generate().peer_id, ())
    finally:
        for host in hosts:
            await host.close()


@pytest.mark.parametrize("what", ["nobody", "stranger", "in use", "foreign", "bad", "no peer"])
async def test_errors_are_one_line(what: str) -> None:
    other = await P2PHost.start(Identity.generate())
    try:
        address = (await other.addresses())[0].split("/p2p/")[0]
        stranger = Identity.generate().peer_id
        options, expected = {
            "nobody": ({"initial_peers": [f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"]}, "connection refused"),
            "stranger": ({"initial_peers": [f"{address}/p2p/{stranger}"]}, "peer id mismatch"),
            "in use": ({"host_maddrs": [address]}, f"{address} is in use"),
            "foreign": ({"host_maddrs": ["/ip4/192.0.2.1/tcp/4001"]}, "not one of this machine's"),
            "bad": ({"host_maddrs": ["127.0.0.1:4001"]}, "bad multiaddr '127.0.0.1:4001'"),
            "no peer": ({"initial_peers": [address]}, "/p2p/PEER_ID"),
        }[what]
        with pytest.raises(HostError) as caught:
            await P2PHost.start(Identity.generate(), bootstrap_timeout_s=1.0, **options)  # type: ignore[arg-type]
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        await other.close()


async def test_a_seed_that_comes_late_is_found() -> None:
    identity = Identity.generate()
    seed = await P2PHost.start(identity)
    addresses = await seed.addresses()
    listen = addresses[0].split("/p2p/")[0]
    await seed.close()
    starting = asyncio.ensure_future(
        P2PHost.start(Identity.generate(), initial_peers=addresses, bootstrap_timeout_s=30)
    )
    seed = await P2PHost.start(identity, host_maddrs=[listen])
    try:
        host = await starting
        await host.close()
    finally:
        await seed.close()


async def test_p2pd_dies_with_a_process_that_is_killed() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    try:
        pid = int(await asyncio.wait_for(child.stdout.readline(), 60))
        pidfd = os.pidfd_open(pid)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert ended(pidfd, 10), "p2pd outlived its owner"
    os.close(pidfd)
