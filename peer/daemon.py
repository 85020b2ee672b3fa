"""The peer daemon: assembly and life cycle of one volunteer's machine in one run."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peer.addresses import AddressBook
from peer.announce import Announcer
from peer.backend import CorpusBatches, StageBackend, TracingBackend, activation_spec, warm_up
from peer.context import StepRules
from peer.core import Core, CoreOptions
from peer.emulated_links import EmulatedTransport
from peer.emulation import AnyEvents, Emulation, EmulationSettings
from peer.epochs import Epochs
from peer.keeper import Keeper
from peer.neighbour import LivenessLimits
from peer.placement import Place, Stopped, find_manifest, find_place, pause
from peer.usage import Usage
from peer.worker import Executor, TaskKind, ThreadExecutor
from swarm.clock import Clock, LoopClock
from swarm.data.corpus import load_corpus
from swarm.data.sampler import Sampler
from swarm.directory import Directory, DirectoryError
from swarm.events import JsonLinesEvents, NoEvents
from swarm.identity import Identity, verify
from swarm.joinstring import JoinString
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.model.stage import StageRuntime
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.link import Limits
from swarm.transport.p2phost import P2PHost

AnyTransport = Libp2pTransport | EmulatedTransport

LOOK_S = 1.0
"""Between two looks at whether there is anything to tell or to ask."""
ANNOUNCE_S = 5.0
"""Between two records of our own in the directory: a store costs several processes some milliseconds."""
LEARN_S = 30.0
"""Between two readings of where everybody may be dialled, while every member is linked."""
DRAIN_S = 20.0
"""A leaving peer waits no longer than this for the step that it takes part in."""
REENTRIES = 1024
"""Incarnations that one life of the daemon may use: one for each time that it falls out and joins anew. The
next life begins above them, so that it is never taken for a life that had promised something."""
LINGER_S = 15.0
"""A finished peer answers the others no longer than this."""


@dataclass(frozen=True)
class DaemonOptions:
    """What a volunteer chooses."""

    join: JoinString
    directory: Path
    """Identity, checkpoints and the event log live here."""
    stage: int | None = None
    identity: Path | None = None
    """Key file; ``directory/identity.key`` if None. Made if it is not there."""
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    events: Path | None = None
    trace: Path | None = None
    """Write every averaged gradient here, for tests."""
    usage: Path | None = None
    """Write the CPU seconds of this life by part here (JSON), for benchmarks."""
    emulate: Path | None = None
    """Emulation settings (``peer/emulation.py``), for benchmarks and tests."""
    threads: int = 1
    device: str = "cpu"
    move: bool = True
    """Go to another stage when that needs a peer more; both must fit into memory for a while."""


def step_rules(manifest: Manifest) -> StepRules:
    """What the protocol needs of the manifest."""
    return StepRules(
        stages=len(manifest.stages),
        path_length=manifest.path_length,
        min_path_length=max(1, manifest.path_length - 1),
        microbatches_per_origin=manifest.microbatches_per_origin,
        memory_slots=manifest.limits.memory_slots,
        total_steps=manifest.optimizer.total_steps,
        validation_every=manifest.data.validation_every,
        validation_microbatches=manifest.data.validation_microbatches,
        activation=activation_spec(manifest),
        start_replicas=manifest.sync.start_replicas,
        coverage_tolerance=manifest.coverage_tolerance,
        work_s=tuple(float(layers) for layers in manifest.stages),
    )


def load_identity(path: Path) -> tuple[Identity, int]:
    """The key at ``path``, made if absent, and the incarnation that this life begins with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        identity = Identity.load(path)
    else:
        identity = Identity.generate()
        identity.save(path)
    counter = path.with_suffix(".incarnation")
    try:
        last = int(counter.read_text())
    except (OSError, ValueError):
        last = 0
    counter.write_text(f"{last + 1}\n")
    return identity, (last + 1) * REENTRIES


class Daemon:
    """One peer over libp2p and torch; ``run`` is its whole life."""

    def __init__(
        self, options: DaemonOptions, stop: asyncio.Event, *, report: Callable[[str], None], clock: Clock
    ) -> None:
        self._options = options
        self._stop = stop
        self._report = report
        self._clock = clock
        key_file = options.identity or options.directory / "identity.key"
        self._identity, incarnation = load_identity(key_file)
        self._me = Member(peer=self._identity.peer_id, stage=0, incarnation=incarnation)
        self._events: AnyEvents = NoEvents()
        if options.events is not None:
            self._events = JsonLinesEvents(options.events, self._identity.peer_id, clock, report=report)
        self._emulation: Emulation | None = None
        if options.emulate is not None:
            self._emulation = Emulation(EmulationSettings.load(options.emulate), clock, self._events)
            self._events = self._emulation.events()
        self._book = AddressBook(options.directory / "peers.json", options.join.run_id)
        self._finished = asyncio.Event()
        self._failure: Exception | None = None
        self._told_alone = False
        self._usage: Usage | None = None
        self._p2pd_pid = 0
        self._core: Core | None = None

    async def run(self) -> int:
        """Join, train, leave. 0 when the run is finished or the user left."""
        try:
            return await self._connect()
        finally:
            self._events.close()

    async def _connect(self) -> int:
        options = self._options
        seeds = self._book.seeds(options.join.addresses)
        host = await P2PHost.start(
            self._identity,
            initial_peers=seeds,
            host_maddrs=options.host_maddrs,
            announce_maddrs=options.announce_maddrs or None,
            clock=self._clock,
        )
        try:
            self._p2pd_pid = host.pid
            addresses = await host.addresses()
            self._announcer = Announcer(
                self._me, addresses, clock=self._clock, events=self._events, report=self._report
            )
            self._report(f"peer {self._me.peer} listens on {', '.join(addresses)}")
            directory = await Directory.start(
                host,
                self._identity,
                options.join.run_id,
                clock=self._clock,
                initial_peers=seeds,
            )
            try:
                await self._take_part(host, directory)
            except Stopped:
                self._report("left before the run began")
            finally:
                await directory.close()
        finally:
            await host.close()
        if self._failure is not None:
            raise self._failure
        return 0

    async def _take_part(self, host: P2PHost, directory: Directory) -> None:
        manifest = await find_manifest(directory, self._clock, self._stop)
        self._keeper = Keeper(
            self._options.directory / "checkpoints", manifest, events=self._events, report=self._report
        )
        emulation = self._emulation
        if emulation is not None:
            self._keeper.store = emulation.store(self._keeper.store)
        place = await find_place(
            directory,
            manifest,
            self._me,
            self._clock,
            self._stop,
            wanted=self._options.stage,
            own=self._keeper.newest_stage(),
            announce=lambda stage: self._announcer.waiting(
                stage, manifest.limits.memory_slots, self._keeper.listed(stage)
            ),
            report=self._report,
        )
        links = Libp2pTransport(
            host,
            self._clock,
            run_id=directory.run_id,
            limits=Limits(max_frame_bytes=manifest.limits.max_frame_bytes),
        )
        transport = links if emulation is None else emulation.transport(links)
        core = self._assemble(manifest, place, transport)
        links.watch(core.rates)
        self._core = self._announcer.core = core
        self._announcer.keeper = self._keeper
        try:
            await transport.open()
            if emulation is not None:
                await emulation.open(core.router.held)
            await self._live(core, place, directory, transport, manifest)
        finally:
            if self._usage is not None and self._options.usage is not None:
                self._options.usage.write_text(json.dumps(self._usage.stop()))
            core.close()
            if emulation is not None:
                await emulation.close()
            await transport.close()

    def _assemble(self, manifest: Manifest, place: Place, transport: AnyTransport) -> Core:
        options = self._options
        torch.set_num_threads(options.threads)
        warm_up()
        backend = self._backend(manifest, place.stage)
        executor: Executor = ThreadExecutor(asyncio.get_running_loop())
        liveness = LivenessLimits()
        if self._emulation is not None:
            executor, liveness = self._emulation.executor(executor), self._emulation.liveness()
        spec = activation_spec(manifest)
        sizes = {"float32": 4, "bfloat16": 2}
        batch, context, width = spec.shape
        parameters = backend.runtime.parameter_count
        self._report(f"stage {place.stage}: {parameters:,} parameters on {options.device}")
        return Core(
            CoreOptions(
                stage=place.stage,
                incarnation=self._me.incarnation,
                run_id=manifest.run_id,
                seed=manifest.seed,
                activation_bytes=batch * context * width * sizes[spec.dtype],
                liveness=liveness,
            ),
            step_rules(manifest),
            transport=transport,
            clock=self._clock,
            executor=executor,
            backend=backend,
            batches=CorpusBatches(Sampler(manifest, load_corpus(manifest.data.corpus))),
            events=self._events,
            rng=random.Random(int.from_bytes(os.urandom(8))),
            sign=self._identity.sign,
            verify=verify,
            on_step=lambda: self._stepped(manifest),
            on_finished=self._finished.set,
            on_failed=self._failed,
            disk_for=self._keeper.disk,
            backend_for=partial(self._backend, manifest) if options.move else None,
            say=self._report,
        )

    def _backend(self, manifest: Manifest, stage: int) -> StageBackend:
        options = self._options
        runtime = StageRuntime(manifest, stage, device=options.device)
        if options.trace is not None:
            return TracingBackend(runtime, options.trace / self._me.peer)
        return StageBackend(runtime)

    # -- a life --------------------------------------------------------------------------------------------

    async def _live(
        self, core: Core, place: Place, directory: Directory, transport: AnyTransport, manifest: Manifest
    ) -> None:
        epochs = Epochs(core, self._keeper, self._clock, events=self._events, report=self._report)
        await self._learn(core, directory, transport)
        await epochs.start(place.genesis, founding=place.founding)
        if not place.founding:
            contacts = {p.peer for p in await directory.peers() if p.state == "active"}
            core.join(contacts - {self._me.peer})
        await self._announcer.publish(directory)
        published_s = learned_s = self._clock.now()
        told = core.context.state
        while not self._stop.is_set() and not self._finished.is_set():
            try:
                await self._pause_or_finish(LOOK_S)
            except Stopped:
                break
            now = self._clock.now()
            if now - published_s >= ANNOUNCE_S or core.context.state != told:
                published_s, told = now, core.context.state  # newcomers look for those that are active
                await self._announcer.publish(directory)
            await epochs.review(directory)
            patience_s = LEARN_S if core.all_linked() else LOOK_S if core.alone() else ANNOUNCE_S
            if now - learned_s >= patience_s:
                learned_s = now
                await self._learn(core, directory, transport)
        if self._failure is None:
            await self._leave(core, directory)

    async def _pause_or_finish(self, duration_s: float) -> None:
        waits = [
            asyncio.ensure_future(pause(self._clock, duration_s, self._stop)),
            asyncio.ensure_future(self._finished.wait()),
        ]
        done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for task in done:
            task.result()

    async def _learn(self, core: Core, directory: Directory, transport: AnyTransport) -> None:
        """Where the others may be dialled, and for a newcomer whom to ask."""
        try:
            records = await directory.peers()
            for record in records:
                if record.peer != self._me.peer:
                    transport.learn(record.peer, record.addresses)
            self._book.remember(records, self._me.peer)
            active = {record.peer for record in records if record.state == "active"} - {self._me.peer}
            core.meet(active)
            if core.joiner is not None and not active:
                await self._ask_whether_over(core, directory)
        except DirectoryError as error:
            self._events.emit("directory", reason=str(error))

    async def _ask_whether_over(self, core: Core, directory: Directory) -> None:
        """Nobody trains: has the run come to its end before this newcomer was in?"""
        progress = await directory.progress()
        if any(record.step >= core.context.rules.total_steps for record in progress):
            self._report("the run is finished")
            self._finished.set()
        elif not self._told_alone:
            self._told_alone = True
            self._report("nobody trains in this run now; waiting for its peers (Ctrl-C leaves)")

    def _stepped(self, manifest: Manifest) -> None:
        """A step is over: measure, tell the volunteer, write a checkpoint when it is time."""
        core = self._core
        assert core is not None
        context = core.context
        if self._options.usage is not None and self._usage is None:
            self._usage = Usage(self._p2pd_pid)  # from here on: starting up is another figure
        self._announcer.stepped()
        every = manifest.sync.checkpoint_every
        last = context.step >= manifest.optimizer.total_steps
        if last or (every and context.step % every == 0):
            self._keep(core)

    def _keep(self, core: Core) -> None:
        """Take the image between two steps; it is written off the compute thread."""
        context = core.context
        stage, mark = context.stage, (context.epoch, context.step)
        if not self._keeper.due(stage, mark):
            return

        def taken(image: bytes) -> None:
            if core.left and (context.epoch, context.step) != mark:
                self._keep(core)  # an update was under way when we left
            else:
                self._keeper.write(stage, mark, image)

        context.worker.submit(TaskKind.SYNC, (context.step,), context.backend.state_image, taken)

    def _failed(self, error: Exception) -> None:
        self._failure = error
        self._stop.set()

    # -- leaving -------------------------------------------------------------------------------------------

    async def _leave(self, core: Core, directory: Directory) -> None:
        """Finish what is held, say goodbye, and let the directory know."""
        context = core.context
        if core.finished:
            await self._announcer.publish(
                directory
            )  # while we are active: newcomers must know that it is over
            await self._until(lambda: self._written(core) and core.others_finished(), LINGER_S)
            self._report(f"the run is finished: {context.step} steps")
        elif context.active or core.stuck:
            if core.stuck:
                self._report(f"step {context.step} cannot be finished by those who are left; leaving")
            else:
                self._report("leaving at the end of this step; Ctrl-C again leaves now")
                core.drain()
                await self._until(lambda: core.left or core.stuck, DRAIN_S)
            core.leave()
            if context.step:
                self._keep(core)
                await self._until(lambda: self._written(core), LINGER_S)
        core.leave()
        await self._announcer.publish(directory)

    def _written(self, core: Core) -> bool:
        context = core.context
        return self._keeper.newest(context.stage) >= (context.epoch, context.step)

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> None:
        end_s = self._clock.now() + limit_s
        never = asyncio.Event()
        while not holds() and self._clock.now() < end_s:
            await pause(self._clock, 0.1, never)


async def run_daemon(
    options: DaemonOptions, stop: asyncio.Event, *, report: Callable[[str], None] = print
) -> int:
    """Take part in a run until it is finished or ``stop`` is set; the exit code.

    Raises:
        UserError, HostError, DirectoryError, ManifestError: one line each; nothing is left running.
    """
    return await Daemon(options, stop, report=report, clock=LoopClock()).run()
