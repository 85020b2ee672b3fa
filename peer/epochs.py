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
RIVAL_S = 30.0
"""Between two looks by one that can: its beginning may be one of two that were signed for the same epoch."""


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
        self._genesis: Genesis | None = None
        """That this peer's history goes back to, as far as it knows."""

    @property
    def _needed(self) -> bool:
        """Can this peer not go on in its epoch, or has it heard of a later one?"""
        core = self._core
        return (
            core.joiner is not None
            or core.agreement.without_majority_s > WAITING_S
            or core.newest_epoch > core.context.epoch
            or self._genesis is None
            or self._genesis.epoch < core.context.epoch
        )

    async def review(self, directory: Directory) -> None:
        """Begin again with the others if a new epoch was signed."""
        now = self._clock.now()
        if now - self._looked_s < (EPOCH_S if self._needed else RIVAL_S):
            return
        self._looked_s = now
        try:
            genesis = await directory.genesis()
        except DirectoryError as error:
            self._events.emit("directory", reason=str(error))
            return
        if genesis is not None:
            await self.heard(genesis)

    async def heard(self, genesis: Genesis) -> None:
        """Follow the researcher's word if it supersedes that by which this peer trains."""
        epoch, before = self._core.context.epoch, self._genesis
        news = genesis.supersedes(before)
        if news:
            self._genesis = genesis
            self._keeper.learn(genesis)
        if genesis.epoch > epoch:
            await self._follow(genesis)  # again, if a step's end came in between the last time
        elif news and before is not None and before.epoch == genesis.epoch == epoch:
            await self._yield_to(genesis)

    async def _yield_to(self, rival: Genesis) -> None:
        """Two nodes have signed this epoch, and we began the one that all give up: what was made in it must
        not come into the other, so not even its members take their places there."""
        context = self._core.context
        if not context.active and self._place_in(rival) == context.incarnation:
            await self.begin(rival)  # we have made nothing yet
            return
        self._report(f"epoch {rival.epoch} was begun twice; coming in anew where it goes on")
        self._core.leave_epoch(rival.members, rival.epoch, rival.step)

    def _place_in(self, genesis: Genesis) -> int | None:
        """The life of ours that it names."""
        context = self._core.context
        places = (o for o in genesis.members if o.peer == context.me and o.stage == context.stage)
        return next((member.incarnation for member in places), None)

    async def _follow(self, genesis: Genesis) -> None:
        core, context = self._core, self._core.context
        life = self._place_in(genesis)
        if life is None:
            self._report(f"the run goes on in epoch {genesis.epoch} without this peer; coming in anew")
            core.leave_epoch(genesis.members, genesis.epoch, genesis.step)
            return
        self._report(f"the run goes on from step {genesis.step} (epoch {genesis.epoch})")
        if life == context.incarnation and not context.active:
            await self.begin(genesis)
        elif not core.begin_again(genesis.members, epoch=genesis.epoch, step=genesis.step):
            core.leave_epoch(genesis.members, genesis.epoch, genesis.step)

    async def start(self, genesis: Genesis, *, founding: bool) -> None:
        """The run's newest word when this life begins; ``founding``: it names us."""
        self._genesis = genesis
        self._keeper.learn(genesis)
        self._core.context.epoch = genesis.epoch
        if founding:
            await self.begin(genesis)

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
        if not self._awaits(genesis):
            return

        def loaded(parameters: str) -> None:
            if not self._awaits(genesis):
                return
            self._events.emit("loaded", step=genesis.step, digest=parameters, bytes=len(image))
            found(lineage=lineage_after("", digest))

        context.worker.submit(
            TaskKind.SYNC,
            (genesis.step,),
            lambda: context.backend.load_image(image),
            loaded,
            partial(self._cannot_begin, genesis),
        )

    def _awaits(self, genesis: Genesis) -> bool:
        """Are we still to begin by it? Reading and loading takes time, in which another may have come, or
        this one have been begun: its state must not be loaded over one that trains."""
        return self._genesis == genesis and not self._core.context.active

    def _cannot_begin(self, genesis: Genesis, error: Exception) -> None:
        if not self._awaits(genesis):
            return
        self._report(f"cannot begin from the checkpoint of step {genesis.step}: {error}; coming in anew")
        self._core.leave_epoch(genesis.members, genesis.epoch, genesis.step)
