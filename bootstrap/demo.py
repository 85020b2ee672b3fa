"""``skipswarm demo``: a swarm of eight peers on this machine trains a model, and survives the loss of one."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bootstrap.create import KEY_NAME, example_toml, write_whole
from bootstrap.demo_view import View
from bootstrap.local import LocalSwarm, Process, wait
from bootstrap.progress import Progress, Tail
from swarm.clock import Clock
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.manifest import Manifest, SignedManifest, load_toml

NODE = "node"
TICK_S = 0.1
START_S = 180.0
"""From the first process to the first committed microbatch, at most."""
STALL_S = 120.0
"""Without a step for so long, the swarm is taken to be stuck."""
LEAVE_S = 25.0
"""After Ctrl-C: a peer finishes its step for up to 20 s."""


class DemoError(UserError):
    """The demo did not come to its end; one line."""


@dataclass(frozen=True)
class DemoOptions:
    """What the user chooses."""

    directory: Path | None = None
    """Empty or not there yet; ``runs/demo-N`` if None."""
    steps: int | None = None
    seed: int | None = None
    kill: bool = True


@dataclass(frozen=True)
class Trained:
    """A run that came to its end; every process of it is gone."""

    directory: Path
    manifest: Manifest
    progress: Progress


def make_directory(chosen: Path | None) -> Path:
    """The demo's folder, new and empty. Raises ``DemoError``."""
    try:
        if chosen is not None:
            chosen.mkdir(parents=True, exist_ok=True)
            if any(chosen.iterdir()):
                raise DemoError(f"{chosen} is not empty; give a new folder with --dir")
            return chosen.resolve()
        for number in itertools.count(1):
            folder = Path("runs") / f"demo-{number}"
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder.resolve()
    except OSError as error:
        place = chosen or Path("runs").resolve()
        raise DemoError(f"cannot write {place}: {error.strerror}; give another folder with --dir") from None
    raise AssertionError("unreachable: some number is free")


def make_run(directory: Path, options: DemoOptions) -> tuple[Manifest, Path, Path]:
    """The manifest of ``demo.toml`` with the user's changes, signed by a new key: (it, signed file, key)."""
    key = Identity.generate()
    table = load_toml(example_toml())
    table["researcher"] = key.public_key.hex()
    if options.seed is not None:
        table["seed"] = options.seed
    if options.steps is not None:
        optimizer, data = table["optimizer"], table["data"]
        optimizer["total_steps"] = options.steps
        optimizer["warmup_steps"] = min(optimizer["warmup_steps"], options.steps // 3)
        data["validation_every"] = min(data["validation_every"], max(1, options.steps // 4))
    manifest = Manifest.from_table(table)
    signed_path, key_path = directory / "run.signed", directory / KEY_NAME
    key.save(key_path)
    write_whole(signed_path, SignedManifest.sign(manifest, key).to_bytes())
    return manifest, signed_path, key_path


async def run_demo(
    directory: Path,
    options: DemoOptions,
    stop: asyncio.Event,
    *,
    clock: Clock,
    open_view: Callable[[Manifest], View],
    began_s: float | None = None,
) -> tuple[Trained | None, View]:
    """Train; None when ``stop`` was set before the end. The view is still open, every process gone.

    Raises:
        DemoError, LocalSwarmError: one line each; nothing is left running.
    """
    manifest, signed, key = make_run(directory, options)
    view = open_view(manifest)
    try:
        async with LocalSwarm(directory, clock) as swarm:
            story = _Story(swarm, manifest, view, clock, kill=options.kill, began_s=began_s)
            training = asyncio.ensure_future(story.run(signed, key))
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait((training, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not training.done():
                await _leave(training, swarm, view, story.progress)
                return None, view
            training.result()
    except BaseException:
        view.close()
        raise
    return Trained(directory, manifest, story.progress), view


async def _leave(training: asyncio.Task[None], swarm: LocalSwarm, view: View, progress: Progress) -> None:
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    if progress.training_began_s is None:
        view.say("leaving before the training began; Ctrl-C again leaves now")
    else:
        view.say(f"leaving after {progress.step} steps: every peer ends its step; Ctrl-C again leaves now")
    if not await swarm.stop(LEAVE_S):
        left = ", ".join(process.name for process in swarm.living())
        view.say(f"killing what did not leave in {LEAVE_S:.0f} s: {left}")


class _Story:
    """What happens in the demo, in its order."""

    def __init__(
        self,
        swarm: LocalSwarm,
        manifest: Manifest,
        view: View,
        clock: Clock,
        *,
        kill: bool,
        began_s: float | None,
    ) -> None:
        self._swarm = swarm
        self._manifest = manifest
        self._view = view
        self._clock = clock
        self._kill = kill
        self._rng = random.Random(manifest.seed)
        self._tails: dict[str, Tail] = {}
        self._told: set[str] = set()
        began = clock.now() if began_s is None else began_s
        self.progress = Progress(manifest.optimizer.total_steps, began_s=began)

    async def run(self, signed: Path, key: Path) -> None:
        """Until every peer has taken the last step, written it down and left."""
        self.progress.news = "starting the processes"
        opening = asyncio.ensure_future(self._swarm.open())
        try:
            while not opening.done():
                await asyncio.wait((opening,), timeout=TICK_S)
                self._show()
            opening.result()
        finally:
            opening.cancel()
        join = await self._start_node(signed, key)
        stages, replicas = len(self._manifest.stages), self._manifest.sync.start_replicas
        for number in range(stages * replicas):
            name, stage = f"p{number}", number % stages
            self._swarm.start_peer(name, join=join, stage=stage)
            self.progress.started(name, stage)
            self._tails[name] = Tail(self._swarm.events_path(name))
        self.progress.news = "the peers find each other"
        try:
            while self._peers_left():
                self._look()
                await self._tick()
            self._look()
        finally:
            for tail in self._tails.values():
                tail.close()
        if self.progress.step < self.progress.total_steps:
            raise self._error("every peer has ended before the last step")

    async def _start_node(self, signed: Path, key: Path) -> str:
        """The bootstrap node; its join string."""
        node = self._swarm.start_node(NODE, signed=signed, key=key)
        events = Tail(self._swarm.events_path(NODE))
        end_s = self._clock.now() + START_S
        try:
            while not node.ended.is_set() and self._clock.now() < end_s:
                for event in events.read():
                    if event.get("event") == "ready":
                        return str(event["join"])
                await self._tick()
        finally:
            events.close()
        raise self._error(f"the bootstrap node did not start ({node.last_line() or 'no answer'})")

    def _peers_left(self) -> list[Process]:
        return [process for process in self._swarm.living() if process.kind == "peer"]

    async def _tick(self) -> None:
        self._show()
        await wait(self._clock, asyncio.Event(), TICK_S)

    def _show(self) -> None:
        self._view.update(self.progress, self._clock.now())

    def _look(self) -> None:
        """Take in what is new, kill when it is time, give up when nothing moves any more."""
        for name, tail in self._tails.items():
            for event in tail.read():
                self.progress.apply(name, event)
        for process in self._swarm.processes.values():
            if process.ended.is_set() and process.name not in self._told:
                self._told.add(process.name)
                self._ended(process)
        if self._kill and self.progress.kill is None:
            self._kill_half_way()
        self._check_moving()

    def _ended(self, process: Process) -> None:
        if process.name == NODE:
            self._view.say(f"the bootstrap node has ended: {process.last_line()}; see {process.log}")
            return
        self.progress.ended(process.name)
        if self.progress.peers[process.name].state == "ended" or process.code not in (0, -signal.SIGKILL):
            self._view.say(f"{process.name} has ended: {process.last_line()}; see {process.log}")

    def _kill_half_way(self) -> None:
        """SIGKILL one peer that is no origin, while microbatches of a step are on their way through it."""
        progress = self.progress
        if progress.step < max(1, progress.total_steps // 2):
            return
        may_die = [peer.name for peer in progress.at_work() if peer.stage != 0 and peer.state == "training"]
        if may_die:
            victim = self._rng.choice(may_die)
            self._swarm.signal(victim, signal.SIGKILL)
            progress.killed(victim, self._clock.now())

    def _check_moving(self) -> None:
        progress, now_s = self.progress, self._clock.now()
        if progress.first_commit_s is None:
            if now_s - progress.began_s > START_S:
                raise self._error(f"no microbatch was committed in {START_S:.0f} s")
        elif now_s - (progress.last_step_s or progress.first_commit_s) > STALL_S:
            raise self._error(f"no step was made in {STALL_S:.0f} s")

    def _error(self, what: str) -> DemoError:
        return DemoError(
            f"{what}, after {self.progress.step} of {self.progress.total_steps} steps; "
            f"look into {self._swarm.directory}/*/log"
        )
