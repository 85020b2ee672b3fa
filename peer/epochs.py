"""A daemon's part in epochs: it begins on the researcher's word, and again where nobody could go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from peer.announce import WAITING_S
from peer.checkpoint import CheckpointError
from peer.core import Core
from peer.keeper import Keeper
from peer.rounds import lineage_after
from peer.worker import TaskKind
from swarm.clock import Clock
from swarm.directory import Directory, DirectoryError
from swarm.events import EventLog
from swarm.records import Genesis

EPOCH_S = 2.0
"""Between two looks for a new epoch, by a peer that cannot go on in its own."""


class Epochs:
    """Follows the researcher's node from epoch to epoch."""

    def __init__(
        self,
        core: Core,
        keeper: Keeper,
        clock: Clock,
        *,
        events: EventLog,
        report: Callable[[str], None],
    ) -> None:
        self._core = core
        self._keeper = keeper
        self._clock = clock
        self._events = events
        self._report = report
        self._looked_s = clock.now()

    @property
    def _needed(self) -> bool:
        """Can this peer not go on in its epoch, or has it heard of a later one?"""
        core = self._core
        return (
            core.joiner is not None
            or core.agreement.without_majority_s > WAITING_S
            or core.newest_epoch > core.context.epoch
        )

    async def review(self, directory: Directory) -> None:
        """Begin again with the others if a new epoch was signed."""
        now = self._clock.now()
        if now - self._looked_s < EPOCH_S or not self._needed:
            return
        self._looked_s = now
        try:
            genesis = await directory.genesis()
        except DirectoryError as error:
            self._events.emit("directory", reason=str(error))
            return
        if genesis is not None and genesis.epoch > self._core.context.epoch:
            await self._follow(genesis)

    async def _follow(self, genesis: Genesis) -> None:
        core, context = self._core, self._core.context
        mine = next((o for o in genesis.members if o.peer == context.me and o.stage == context.stage), None)
        if mine is None:
            self._report(f"the run goes on in epoch {genesis.epoch} without this peer; coming in anew")
            core.leave_epoch(genesis.members, genesis.epoch)
            return
        self._report(f"the run goes on from step {genesis.step} (epoch {genesis.epoch})")
        if mine.incarnation == context.incarnation and not context.active:
            await self.begin(genesis)
        elif not core.begin_again(genesis.members, epoch=genesis.epoch, step=genesis.step):
            core.leave_epoch(genesis.members, genesis.epoch)

    async def begin(self, genesis: Genesis) -> None:
        """Be one of the members that begin ``genesis.step``, with the parameters of our checkpoint."""
        context = self._core.context
        found = partial(self._core.found, genesis.members, epoch=genesis.epoch, step=genesis.step)
        if genesis.step == 0:
            found()
            return
        read = partial(self._keeper.read, context.stage, genesis.step)
        try:
            digest, image = await asyncio.get_running_loop().run_in_executor(None, read)
        except CheckpointError as error:
            self._cannot_begin(genesis, error)
            return

        def loaded(parameters: str) -> None:
            self._events.emit("loaded", step=genesis.step, digest=parameters, bytes=len(image))
            found(lineage=lineage_after("", digest))

        context.worker.submit(
            TaskKind.SYNC,
            (genesis.step,),
            lambda: context.backend.load_image(image),
            loaded,
            partial(self._cannot_begin, genesis),
        )

    def _cannot_begin(self, genesis: Genesis, error: Exception) -> None:
        self._report(f"cannot begin from the checkpoint of step {genesis.step}: {error}; coming in anew")
        self._core.leave_epoch(genesis.members, genesis.epoch)
