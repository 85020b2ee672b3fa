"""One process that imports torch and hivemind once, and forks a process for each peer of a local swarm.

``bootstrap.local`` starts it as ``python -m bootstrap.forker PARENT_PID`` and tells it, one JSON object a
line, what to do (``Start``, ``Signal``); it answers with ``ready``, ``started`` and ``ended`` lines. Eight
peers are up in the time that one import takes, and share its memory.

It leaves nothing behind: when its standard input ends, because its starter has finished or is dead, it kills
its children, waits for them and for their p2pds, and ends. It adopts the p2pd of a child that was killed
(PR_SET_CHILD_SUBREAPER), and its children die with it (PR_SET_PDEATHSIG), as p2pd does with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNET = 0x40000000
ORPHAN_PATIENCE_S = 2.0
"""A p2pd ends by itself within a second of its peer; after this it is killed."""


def main() -> None:
    """Serve ``os.getppid()``, which must be the process that the command line names, until it is gone."""
    parent = int(sys.argv[1])
    die_with(parent, signal.SIGTERM)  # while nothing reads standard input yet
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    _import_everything()
    # hivemind puts p2pd's sockets into /tmp, where those of a killed peer would stay for ever.
    sockets = Path(tempfile.mkdtemp(prefix="skipswarm-", dir="/tmp"))
    try:
        _sockets_into(sockets)
        Forker().serve()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def die_with(parent: int, number: signal.Signals) -> None:
    """Get signal ``number`` when ``parent`` ends; end now if it has."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def enter_network(namespace: str) -> None:
    """Put this thread into the network namespace in the file ``namespace``: what it opens and starts is
    there. The interpreter has setns(2) from 3.12 on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(file, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
    finally:
        os.close(file)


def prctl(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _import_everything() -> None:
    import bootstrap.node  # noqa: F401
    import peer.daemon  # noqa: F401
    from peer.backend import warm_up
    from swarm.identity import Identity
    from swarm.transport.p2phost import parse_multiaddr

    # What the libraries import when they are first used is not left to each child either.
    parse_multiaddr(f"/ip4/127.0.0.1/tcp/0/p2p/{Identity.generate().peer_id}", with_peer=True)
    warm_up()
    gc.collect()
    gc.freeze()  # the children's collector leaves the shared pages alone


def _sockets_into(folder: Path) -> None:
    from hivemind.p2p import P2P

    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"


class Forker:
    """The loop: commands in, children out. Single-threaded, so that it may fork."""

    def __init__(self) -> None:
        self._children: dict[int, str] = {}
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until standard input ends or SIGTERM comes; then no child is left."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_commands)
        self._selector.register(self._wake, selectors.EVENT_READ, self._read_signals)
        try:
            self._tell(event="ready")
            while all(key.data() for key, _ in self._selector.select()):
                pass
        finally:
            self._end_all()

    def _tell(self, **answer: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of standard input says the same
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")

    def _read_signals(self) -> bool:
        numbers = os.read(self._wake, 4096)
        self._reap()
        return signal.SIGTERM not in numbers

    def _read_commands(self) -> bool:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, command: dict[str, Any]) -> None:
        name = command["name"]
        if command["do"] == "start":
            pid = self._fork(command)
            self._children[pid] = name
            self._tell(event="started", name=name, pid=pid)
            return
        # Only what has not been reaped is in the table, so the number cannot belong to anybody else by now.
        for pid, child in self._children.items():
            if child == name:
                os.kill(pid, command["number"])

    def _fork(self, command: dict[str, Any]) -> int:
        sys.stdout.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._become_child(parent, command["log"])
            if command["options"]["namespace"] is not None:
                enter_network(command["options"]["namespace"])
            code = KINDS[command["kind"]](command["options"])
        except BaseException as error:
            code = _explain(error)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _become_child(self, parent: int, log: str) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with(parent, signal.SIGKILL)
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(output)

    def _reap(self) -> bool:
        """Collect what has ended; False when there is no child left, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            name = self._children.pop(pid, None)
            if name is not None:
                self._tell(event="ended", name=name, code=os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while self._reap():
            if signal.sigtimedwait({signal.SIGCHLD}, ORPHAN_PATIENCE_S) is None:
                _kill_orphans()


def _kill_orphans() -> None:
    """Kill every child that is left: all that this process forked itself are dead by now."""
    me = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == me:
                    os.kill(int(entry.name), signal.SIGKILL)


# -- what a child becomes ----------------------------------------------------------------------------------


def _explain(error: BaseException) -> int:
    from swarm.errors import UserError

    if isinstance(error, UserError):
        print(f"skipswarm: {error}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def _node(options: dict[str, Any]) -> int:
    """The bootstrap node of a signed manifest; its event log tells the join string."""
    from bootstrap.create import load_or_make_identity, load_researcher_key, load_signed
    from bootstrap.node import BootstrapOptions, run_bootstrap
    from swarm.clock import LoopClock
    from swarm.events import JsonLinesEvents
    from swarm.runtime import run

    signed = load_signed(Path(options["signed"]))
    identity = load_or_make_identity(Path(options["identity"]))
    chosen = BootstrapOptions(
        signed=signed,
        key=load_researcher_key(Path(options["key"]), signed.verify()),
        identity=identity,
        host_maddrs=(options["host_maddr"],),
        genesis_path=Path(options["identity"]).with_name("run.genesis"),
    )

    async def serve(stop: asyncio.Event) -> int:
        events = JsonLinesEvents(Path(options["events"]), identity.peer_id, LoopClock())
        await run_bootstrap(
            chosen,
            stop,
            on_ready=lambda join: events.emit("ready", join=str(join)),
            on_waiting=lambda waiting: events.emit(
                "waiting", replicas=waiting.replicas, lacking=waiting.lacking
            ),
            on_genesis=lambda genesis: events.emit(
                "genesis", epoch=genesis.epoch, step=genesis.step, members=len(genesis.members)
            ),
        )
        return 0

    return run(serve)


def _peer(options: dict[str, Any]) -> int:
    """A peer daemon."""
    from peer.daemon import DaemonOptions, run_daemon
    from swarm.joinstring import JoinString
    from swarm.runtime import run

    chosen = DaemonOptions(
        join=JoinString.parse(options["join"]),
        directory=Path(options["directory"]),
        stage=options["stage"],
        host_maddrs=(options["host_maddr"],),
        events=Path(options["events"]),
        trace=Path(options["trace"]) if options["trace"] else None,
        usage=Path(options["usage"]) if options["usage"] else None,
        emulate=Path(options["emulate"]) if options["emulate"] else None,
    )

    async def take_part(stop: asyncio.Event) -> int:
        return await run_daemon(chosen, stop, report=lambda line: print(line, flush=True))

    return run(take_part)


KINDS: dict[str, Callable[[dict[str, Any]], int]] = {"node": _node, "peer": _peer}

if __name__ == "__main__":
    main()
