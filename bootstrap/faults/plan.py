"""What is to go wrong in a run, as data: one plan drives the simulated swarm, real processes and benchmarks.

A plan holds no state: whoever carries it out (``simulated.py``, ``processes.py``) counts what fired. The
triggers follow torchft's failure injector: a fault waits for a time, a step, or a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.errors import UserError
from swarm.manifest import one_line
from swarm.messages import MAX_STAGES, Message, PeerName

MAX_FAULTS = 4096
MAX_PLAN_BYTES = 1 << 22

Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Times = Annotated[int, Field(ge=1, le=1 << 20)]


class FaultPlanError(UserError, ValueError):
    """A plan that cannot be used; one line."""


class Part(BaseModel):
    """Base of what a plan is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# Whom it hits


class Target(Part):
    """One peer. Of several that fit, the one whose message pulled the trigger, else a living one that the
    plan's seed draws. Without any field every peer fits."""

    peer: PeerName | None = None
    """Its name, or as a decimal number its place among the founders."""
    stage: Stage | None = None
    replica: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    """Its place among those of its stage, by name."""

    @model_validator(mode="after")
    def _whole(self) -> Target:
        if self.replica is not None and self.stage is None:
            raise ValueError("a replica without its stage")
        if self.peer is not None and self.stage is not None:
            raise ValueError("either a peer or a stage")
        return self


# When


class AtTime(Part):
    """So long after the plan was started."""

    on: Literal["time"] = "time"
    time_s: Seconds = 0.0


class AtStep(Part):
    """``offset_s`` after the first peer began ``step``; without ``step``: of any step."""

    on: Literal["step"] = "step"
    step: Annotated[int, Field(ge=0)] | None = None
    offset_s: Seconds = 0.0
    probability: Share = 1.0
    """Of each such event."""
    times: Times | None = 1
    """So often at most; None: no end."""


class AtMessage(Part):
    """At the ``nth`` message of a kind in ``step`` (None: any) that a peer which fits the target sends or
    receives: just after it was sent, or before the receiver has seen it."""

    on: Literal["message"] = "message"
    message: str
    side: Literal["sent", "received"] = "received"
    stage: Stage | None = None
    """Only messages of peers of this stage count; the target may then be of another."""
    step: Annotated[int, Field(ge=0)] | None = None
    nth: Times = 1
    probability: Share = 1.0
    """Of each such message from the ``nth`` on."""
    times: Times | None = 1

    @field_validator("message")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in Message.registry:
            raise ValueError(f"no message is called {kind!r}")
        return kind


Trigger = Annotated[AtTime | AtStep | AtMessage, Field(discriminator="on")]


# What happens


class _Fault(Part):
    trigger: Trigger = AtTime()


class _PeerFault(_Fault):
    target: Target = Target()


class Kill(_PeerFault):
    """``kill -9``. With ``returns_after_s`` its machine comes back: same identity, higher incarnation."""

    kind: Literal["kill"] = "kill"
    returns_after_s: Seconds | None = None


class Freeze(_PeerFault):
    """SIGSTOP, and SIGCONT after ``duration_s``: nobody is told."""

    kind: Literal["freeze"] = "freeze"
    duration_s: Seconds


class Hang(_PeerFault):
    """What the peer computes from now on comes ``duration_s`` later; its heartbeats go on."""

    kind: Literal["hang"] = "hang"
    duration_s: Seconds


class DiskFull(_PeerFault):
    """Writing fails with ENOSPC for ``duration_s``."""

    kind: Literal["disk_full"] = "disk_full"
    duration_s: Seconds


class Join(_Fault):
    """A newcomer comes to ``stage``."""

    kind: Literal["join"] = "join"
    stage: Stage


class _LinkFault(_PeerFault):
    other: Target | None = None
    """The link's other end; None: all the target's links."""


class Reset(_LinkFault):
    """The connection breaks; both ends see it at once, and what is under way is lost."""

    kind: Literal["reset"] = "reset"


class _LinkFaultFor(_LinkFault):
    duration_s: Seconds


class Drop(_LinkFaultFor):
    """So large a share of the packets is lost; a reliable stream feels it as delay."""

    kind: Literal["drop"] = "drop"
    share: Annotated[float, Field(gt=0, lt=1)]


class Delay(_LinkFaultFor):
    """So much one-way latency is added."""

    kind: Literal["delay"] = "delay"
    latency_s: Seconds
    jitter_s: Seconds = 0.0


class Slow(_LinkFaultFor):
    """No more bandwidth than this, in each direction."""

    kind: Literal["slow"] = "slow"
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class OneWay(_LinkFaultFor):
    """Nothing comes from ``other`` to the target any more; what the target sends arrives."""

    kind: Literal["one_way"] = "one_way"


class Partition(_Fault):
    """Only peers of one group reach each other; those that no group names are a group of their own."""

    kind: Literal["partition"] = "partition"
    groups: Annotated[tuple[tuple[Target, ...], ...], Field(min_length=1, max_length=64)]
    duration_s: Seconds


AnyFault = Kill | Freeze | Hang | DiskFull | Join | Reset | Drop | Delay | Slow | OneWay | Partition
Fault = Annotated[AnyFault, Field(discriminator="kind")]
KINDS: dict[str, type[Any]] = {
    made.model_fields["kind"].default: made
    for made in (Kill, Freeze, Hang, DiskFull, Join, Reset, Drop, Delay, Slow, OneWay, Partition)
}


class FaultPlan(Part):
    """Faults in a fixed order, which names them; ``seed`` decides what the faults leave open.

    ``FaultPlan(seed=1).add("kill", stage=1).at_message("forward", step=2)`` kills the first peer of stage 1
    to which a FORWARD of step 2 comes.
    """

    version: Literal[1] = 1
    seed: int = 0
    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS)] = ()

    # Building

    def add(
        self,
        kind: str,
        *,
        peer: str | int | None = None,
        stage: int | None = None,
        replica: int | None = None,
        **numbers: Any,
    ) -> FaultPlan:
        """The plan and one more fault, at once unless an ``at_...`` follows; ``other``: a ``Target`` or a
        name.

        Raises FaultPlanError for an unknown kind or numbers that do not belong to it.
        """
        if kind not in KINDS:
            raise FaultPlanError(f"no fault is called {kind!r}; try one of {', '.join(KINDS)}")
        if isinstance(numbers.get("other"), str):
            numbers["other"] = Target(peer=numbers["other"])
        try:
            if "target" in KINDS[kind].model_fields:
                name = None if peer is None else str(peer)
                numbers["target"] = Target(peer=name, stage=stage, replica=replica)
            elif stage is not None:
                numbers["stage"] = stage
            return self._with((*self.faults, KINDS[kind](**numbers)))
        except ValidationError as error:
            raise FaultPlanError(f"{kind}: {one_line(error)}") from None

    def at_time(self, time_s: float) -> FaultPlan:
        """When the last fault happens."""
        return self._at(AtTime, time_s=time_s)

    def at_step(self, step: int | None = None, offset_s: float = 0.0, **rest: Any) -> FaultPlan:
        """When the last fault happens."""
        return self._at(AtStep, step=step, offset_s=offset_s, **rest)

    def at_message(self, message: str, **rest: Any) -> FaultPlan:
        """When the last fault happens."""
        return self._at(AtMessage, message=message, **rest)

    def triggered(self, trigger: AtTime | AtStep | AtMessage) -> FaultPlan:
        """When the last fault happens."""
        if not self.faults:
            raise FaultPlanError("a trigger without a fault; add one first")
        *before, last = self.faults
        return self._with((*before, last.model_copy(update={"trigger": trigger})))

    def _at(self, made: type[AtTime | AtStep | AtMessage], **fields: Any) -> FaultPlan:
        try:
            return self.triggered(made(**fields))
        except ValidationError as error:
            raise FaultPlanError(one_line(error)) from None

    def _with(self, faults: Iterable[AnyFault]) -> FaultPlan:
        return FaultPlan(seed=self.seed, faults=tuple(faults))

    # Files

    @classmethod
    def from_json(cls, data: bytes | str) -> FaultPlan:
        """Raises FaultPlanError, in one line, if ``data`` is none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise FaultPlanError(f"not a fault plan: {one_line(error)}") from None

    def to_json(self) -> str:
        """The same plan gives the same text; what is as by default is left out."""
        table = {"version": self.version, **self.model_dump(mode="json", exclude_defaults=True)}
        for row, fault in zip(table.get("faults", ()), self.faults, strict=True):
            row["kind"] = fault.kind
            if "trigger" in row:
                row["trigger"]["on"] = fault.trigger.on
        return json.dumps(table, indent=1)

    @classmethod
    def load(cls, path: Path) -> FaultPlan:
        """Raises FaultPlanError for a file that cannot be read or is none."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_PLAN_BYTES + 1)
        except OSError as error:
            raise FaultPlanError(f"{path}: {error.strerror}; give the file of a fault plan") from None
        if len(data) > MAX_PLAN_BYTES:
            raise FaultPlanError(f"{path}: longer than {MAX_PLAN_BYTES} bytes; give the file of a fault plan")
        try:
            return cls.from_json(data)
        except FaultPlanError as error:
            raise FaultPlanError(f"{path}: {error}") from None

    def dump(self, path: Path) -> None:
        """Raises FaultPlanError if it cannot be written."""
        try:
            path.write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise FaultPlanError(f"{path}: {error.strerror}; choose another file") from None
