"""What a daemon says of itself: records for the directory, lines for the volunteer."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from peer.core import Core
from peer.keeper import Keeper
from peer.worker import TaskKind
from swarm.clock import Clock
from swarm.directory import Directory, DirectoryError
from swarm.events import EventLog
from swarm.messages import Member
from swarm.records import PeerRecord, ProgressRecord

REPORT_S = 2.0
"""Between two lines for the volunteer, and over which tokens/s are taken."""
WAITING_S = 10.0
"""Without a majority for so long, a member says that it waits for a new epoch."""
MAX_MEMBERSHIP = 256
"""Members that a progress record names."""


class Announcer:
    """Speaks for one peer, before it has a place in the run and after."""

    def __init__(
        self,
        me: Member,
        addresses: tuple[str, ...],
        *,
        clock: Clock,
        events: EventLog,
        report: Callable[[str], None],
    ) -> None:
        self._me = me
        self._addresses = addresses[:16]
        self._clock = clock
        self._events = events
        self._report = report
        self._measured_s = clock.now()
        self._measured_tokens = 0
        self._tokens_per_s = 0.0
        self.core: Core | None = None
        self.keeper: Keeper | None = None

    def waiting(
        self, stage: int, memory_slots: int, checkpoints: tuple[tuple[int, int, str], ...] = ()
    ) -> PeerRecord:
        """A peer without a place in the run yet, which would host ``stage`` from one of these states."""
        return PeerRecord(
            peer=self._me.peer,
            incarnation=self._me.incarnation,
            stage=stage,
            step=0,
            state="joining",
            memory_slots=memory_slots,
            checkpoints=checkpoints,
            addresses=self._addresses,
            software=f"skipswarm {version('skipswarm')}",
        )

    async def publish(self, directory: Directory) -> None:
        """Tell the directory what we are and, as an origin, how the run goes."""
        core = self.core
        if core is None:
            return
        context = core.context
        worker = context.worker
        checkpoints = self.keeper.listed(context.stage) if self.keeper is not None else ()
        record = self.waiting(context.stage, context.rules.memory_slots, checkpoints).model_copy(
            update={
                "incarnation": context.incarnation,
                "step": context.step,
                "epoch": context.epoch,
                "state": "waiting" if core.agreement.without_majority_s > WAITING_S else context.state,
                "forward_s": worker.median_s(TaskKind.FORWARD) or 0.0,
                "backward_s": worker.median_s(TaskKind.BACKWARD) or 0.0,
                "tokens_per_s": self._tokens_per_s,
                "digest": core.digest,
            }
        )
        try:
            await directory.announce(record)
            if context.stage == 0 and context.active:
                await directory.publish_progress(self._progress(core))
        except DirectoryError as error:
            self._events.emit("directory", reason=str(error))

    def _progress(self, core: Core) -> ProgressRecord:
        context = core.context
        members = tuple((member.peer, member.stage) for member in context.members)
        return ProgressRecord(
            peer=context.me,
            incarnation=context.incarnation,
            step=context.step,
            train_loss=core.loss_of_last_step,
            validation_loss=core.validation_loss,
            tokens_per_s=self._tokens_per_s,
            tokens_total=core.tokens_total,
            committed=core.committed_total,
            rerouted=core.router.rerouted,
            members=len(members),
            membership=members if len(members) <= MAX_MEMBERSHIP else (),
        )

    def stepped(self) -> None:
        """A step is over: measure the swarm's speed, and tell the volunteer now and then."""
        core, now = self.core, self._clock.now()
        if core is None or now - self._measured_s < REPORT_S:
            return
        self._tokens_per_s = (core.tokens_total - self._measured_tokens) / (now - self._measured_s)
        self._measured_s, self._measured_tokens = now, core.tokens_total
        loss = "" if core.loss_of_last_step is None else f", loss {core.loss_of_last_step:.3f}"
        self._report(
            f"step {core.context.step}: {len(core.context.members)} peers, {self._tokens_per_s:,.0f} tokens/s"
            f"{loss}; your contribution: {core.summed_total:,} microbatches"
        )
