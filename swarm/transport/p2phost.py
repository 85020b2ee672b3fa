"""Our own p2pd: started in this process, watched, restarted, and gone when we are gone.

p2pd is hivemind's libp2p daemon. It gives up by itself when the process that started it dies, even by
SIGKILL: its persistent connection to us closes, and before there is one its standard output does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from swarm.clock import Clock, LoopClock
from swarm.errors import UserError
from swarm.identity import Identity

logger = logging.getLogger(__name__)

RestartCallback = Callable[[P2P], Awaitable[None]]

_SEED_TRY_S = 5.0
_SEED_PAUSE_S = 0.5
_BACKOFF_PAUSE_S = 0.25
_RESTART_PAUSE_S = 0.5
_RESTART_PAUSE_LIMIT_S = 30.0
_EXIT_S = 5.0


class HostError(UserError):
    """p2pd cannot do what was asked; one line: the cause, and what to do."""


class _Daemon(P2P):
    """hivemind's P2P, with p2pd in a session of its own and no sockets left behind."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        # Ctrl-C goes to the whole foreground process group: it must reach our drain, not p2pd. `setsid` of a
        # fresh child execs in place, so the process id stays p2pd's.
        setsid = shutil.which("setsid")
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        return [setsid, *command] if setsid else command

    def _terminate(self) -> None:
        super()._terminate()
        for name in ("_daemon_listen_maddr", "_client_listen_maddr"):
            maddr = getattr(self, name, None)
            if maddr is not None:
                with contextlib.suppress(OSError):
                    os.unlink(str(maddr).removeprefix("/unix"))


def parse_multiaddr(text: str, *, with_peer: bool = False) -> Multiaddr:
    """A checked multiaddr. Raises ``HostError``; ``with_peer`` demands a ``/p2p/ID`` at the end."""
    try:
        maddr = Multiaddr(text)
        if with_peer:
            PeerID.from_base58(maddr["p2p"])
    except Exception as error:  # hivemind's parser raises a dozen unrelated types
        need = "/ip4/ADDRESS/tcp/PORT" + ("/p2p/PEER_ID" if with_peer else "")
        raise HostError(f"bad multiaddr {str(text)[:100]!r}; it should look like {need}") from error
    return maddr


def split_peer(maddr: Multiaddr) -> tuple[str, Multiaddr]:
    """Peer id and the rest of a multiaddr that ends in ``/p2p/ID``."""
    peer = str(maddr["p2p"])
    return peer, maddr.decapsulate(f"/p2p/{peer}")


class P2PHost:
    """One p2pd, for as long as this process wants it. Make it with ``await P2PHost.start(...)``."""

    def __init__(self, identity: Identity, options: dict[str, Any], clock: Clock) -> None:
        self._identity = identity
        self._options = options
        self._clock = clock
        self._seeds: tuple[Multiaddr, ...] = ()
        self._callbacks: list[RestartCallback] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._p2p: P2P = None

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] | None = None,
        nat_port_map: bool = False,
        force_reachability: str | None = None,
        use_relay: bool = True,
        use_auto_relay: bool = False,
        trusted_relays: Sequence[str] | None = None,
        startup_timeout_s: float = 60.0,
        bootstrap_timeout_s: float = 20.0,
        clock: Clock | None = None,
    ) -> P2PHost:
        """Start p2pd and reach at least one of ``initial_peers`` (multiaddrs that end in ``/p2p/ID``).

        Raises ``HostError``: a bad multiaddr, a port in use, no bootstrap peer that answers.
        """
        seeds = tuple(parse_multiaddr(text, with_peer=True) for text in initial_peers)
        for text in (*(announce_maddrs or ()), *(trusted_relays or ())):
            parse_multiaddr(text)
        for text in host_maddrs:
            _check_port_free(parse_multiaddr(text))
        if use_auto_relay and trusted_relays is None:
            trusted_relays = initial_peers
        options = {
            "host_maddrs": tuple(host_maddrs),
            "announce_maddrs": tuple(announce_maddrs) if announce_maddrs else None,
            "nat_port_map": nat_port_map,
            "force_reachability": force_reachability,
            "use_relay": use_relay,
            "use_auto_relay": use_auto_relay,
            "trusted_relays": tuple(trusted_relays) if trusted_relays else None,
            "startup_timeout": startup_timeout_s,
        }
        host = cls(identity, options, clock or LoopClock())
        host._p2p = await host._spawn()
        try:
            host._seeds = tuple(seed for seed in seeds if split_peer(seed)[0] != identity.peer_id)
            await host._bootstrap(bootstrap_timeout_s)
            host._options["host_maddrs"] = host._fixed_ports(await host.addresses())
        except BaseException:
            await host.close()
            raise
        host._keep(host._watch())
        return host

    @property
    def p2p(self) -> P2P:
        """hivemind's handle of the p2pd that runs now; another one after a restart."""
        return self._p2p

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def pid(self) -> int:
        """Process id of the p2pd that runs now."""
        return int(self._p2p._child.pid)

    async def addresses(self) -> tuple[str, ...]:
        """Where others can dial us: multiaddrs that end in ``/p2p/ID``."""
        return tuple(str(maddr) for maddr in await self._p2p.get_visible_maddrs(latest=True))

    def on_restart(self, callback: RestartCallback) -> None:
        """Await ``callback(p2p)`` after each restart; handlers must be registered with the new p2pd."""
        self._callbacks.append(callback)

    async def dial(self, peer: str, addresses: Sequence[str]) -> None:
        """Connect p2pd to ``peer``; with no addresses, p2pd looks for some. Raises ``HostError``.

        May take long where a dial failed a moment ago: set a time-out.
        """
        maddrs = []
        for text in addresses:
            with contextlib.suppress(HostError):
                maddr = parse_multiaddr(text)
                maddrs.append(split_peer(maddr)[1] if text.endswith(f"/p2p/{peer}") else maddr)
        while True:
            try:
                await self._p2p._client.connect(PeerID.from_base58(peer), maddrs)
                return
            except (P2PDaemonError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                # p2pd dials by itself too, and after a failure refuses to for 5 s and more, whatever has
                # changed meanwhile. That is no answer to our question.
                if "dial backoff" not in str(error):
                    raise HostError(_dial_failure(str(error))) from error
            await self._pause(_BACKOFF_PAUSE_S)

    async def close(self) -> None:
        """End p2pd and remove its sockets. A second call does nothing."""
        self._closing = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        p2p, child = self._p2p, getattr(self._p2p, "_child", None)
        if child is None:
            return
        p2p._terminate()
        try:
            await asyncio.wait_for(child.wait(), _EXIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pause(self, duration_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(duration_s, _settle, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    async def _spawn(self) -> P2P:
        """Start p2pd, without bootstrap peers: it would end if none of them answered at that moment."""
        limit_s = self._options["startup_timeout"] + _EXIT_S
        # p2pd takes its key by path; a file in memory leaves none on the disk, whenever we are killed.
        key = os.memfd_create("identity", os.MFD_CLOEXEC)
        try:
            os.write(key, self._identity.to_bytes())
            create = _Daemon.create(
                identity_path=f"/proc/{os.getpid()}/fd/{key}", check_if_identity_free=False, **self._options
            )
            return await asyncio.wait_for(create, limit_s)
        except TimeoutError as error:
            raise HostError(f"p2pd did not start in {limit_s:.0f} s; is the machine overloaded?") from error
        except (P2PDaemonError, ValueError, OSError, asyncio.IncompleteReadError) as error:
            raise HostError(_start_failure(str(error))) from error
        finally:
            os.close(key)

    async def _bootstrap(self, timeout_s: float) -> None:
        """Reach one seed; each is tried by itself, again and again until ``timeout_s`` have passed."""
        if not self._seeds:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reasons: dict[str, str] = {}
        tries = [self._keep(self._try_seed(seed, reached, reasons)) for seed in self._seeds]
        try:
            await asyncio.wait_for(reached, timeout_s)
        except TimeoutError as error:
            for task in tries:
                task.cancel()
            seed = str(self._seeds[0])
            more = f" and {len(self._seeds) - 1} more" if len(self._seeds) > 1 else ""
            raise HostError(
                f"no bootstrap peer answered: {seed}{more} ({reasons.get(seed, 'no answer')}); "
                "check that it runs and that this is its address"
            ) from error

    async def _try_seed(
        self, seed: Multiaddr, reached: asyncio.Future[None], reasons: dict[str, str]
    ) -> None:
        """Dial one seed until it answers, or until another one did and this one failed once more."""
        peer, _ = split_peer(seed)
        while True:
            try:
                await asyncio.wait_for(self.dial(peer, (str(seed),)), _SEED_TRY_S)
            except (HostError, TimeoutError) as error:
                reasons.setdefault(str(seed), str(error) or "no answer")
                if reached.done():
                    return
                await self._pause(_SEED_PAUSE_S)
            else:
                _settle(reached)
                return

    def _fixed_ports(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """The listen addresses with port 0 replaced by the one that was given, so that a restart keeps it."""
        fixed = []
        for wanted in self._options["host_maddrs"]:
            pattern = re.escape(wanted)
            for anywhere in ("/ip4/0.0.0.0/", "/ip6/::/"):
                pattern = pattern.replace(re.escape(anywhere), anywhere[:5] + r"[^/]+/")
            pattern = re.sub(r"/(tcp|udp)/0(?=/|$)", r"/\1/(\\d+)", pattern) + r"(/p2p/.*)?$"
            found = next((match for text in addresses if (match := re.match(pattern, text))), None)
            if found is not None and re.search(r"/(tcp|udp)/0(/|$)", wanted):
                wanted = re.sub(r"/(tcp|udp)/0(?=/|$)", rf"/\1/{found.group(1)}", wanted)
            fixed.append(wanted)
        return tuple(fixed)

    async def _watch(self) -> None:
        """Wait for p2pd's end and start it again: same identity, same port."""
        while True:
            await self._p2p._child.wait()
            logger.warning("p2pd ended; starting it again")
            await self._restart()

    async def _restart(self) -> None:
        self._p2p._terminate()
        pause_s = _RESTART_PAUSE_S
        while True:
            try:
                self._p2p = await self._spawn()
                break
            except HostError as error:
                logger.error("p2pd did not start: %s; next try in %.1f s", error, pause_s)
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _RESTART_PAUSE_LIMIT_S)
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for seed in self._seeds:
            self._keep(self._try_seed(seed, reached, {}))
        for callback in self._callbacks:
            try:
                await callback(self._p2p)
            except Exception:
                logger.exception("a callback failed after the restart of p2pd")


def _check_port_free(maddr: Multiaddr) -> None:
    """p2pd listens with SO_REUSEPORT: beside another p2pd it would start, and share its connections."""
    match = re.match(r"/ip([46])/([^/]+)/(tcp|udp)/(\d+)(/|$)", str(maddr))
    if match is None or match.group(4) == "0":
        return
    family = socket.AF_INET if match.group(1) == "4" else socket.AF_INET6
    kind = socket.SOCK_STREAM if match.group(3) == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((match.group(2), int(match.group(4))))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise HostError(
                    f"{maddr} is in use; listen on another port, or on 0 for any free one"
                ) from error


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _start_failure(text: str) -> str:
    text = " ".join(text.split()).removeprefix("Daemon failed to start: ")
    if "cannot assign requested address" in text:
        return "the listen address is not one of this machine's; use 0.0.0.0 or an address of its own"
    return f"p2pd did not start: {text[:200]}"


def _dial_failure(text: str) -> str:
    for known in (
        "connection refused",
        "peer id mismatch",
        "no route to host",
        "i/o timeout",
        "no addresses",
    ):
        if known in text:
            return known
    return " ".join(text.removeprefix("Connect failed. msg=").split())[:150]
