"""What peers tell each other about themselves and about plans, as bytes of gossiped facts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, ValidationError

from scheduler.errors import SchedulerError
from scheduler.instance import Frozen, Instance, LinkRate, PeerName, Rate, Seconds, Stage
from scheduler.plan import Plan, validate
from scheduler.timeline import makespan

VIEW_TOPIC = "view"
PLAN_TOPIC = "plan"
MAX_VIEW_BYTES = 1 << 16
MAX_LINKS = 512

Busy = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""Seconds of work; nobody computes in no time."""
Counter48 = Annotated[int, Field(ge=0, lt=2**48)]


class PeerView(Frozen):
    """A peer's word on itself: the fact (``VIEW_TOPIC``, peer). Times are for one microbatch."""

    peer: PeerName
    incarnation: Counter48
    stage: Stage
    state: Literal["joining", "active", "leaving"]
    step: Counter48
    forward_s: Busy
    backward_s: Busy
    weight_s: Seconds = 0.0
    loss_s: Seconds = 0.0
    memory_slots: Annotated[int, Field(ge=1, lt=2**20)]
    up_bytes_per_s: Rate
    down_bytes_per_s: Rate
    links: Annotated[dict[PeerName, tuple[Seconds, LinkRate]], Field(max_length=MAX_LINKS)] = Field(
        default_factory=dict
    )
    """Other peer -> (one-way latency in s, rate towards it in bytes/s); a rate of 0: cannot be reached."""
    seen: Annotated[dict[PeerName, Busy], Field(max_length=MAX_LINKS)] = Field(default_factory=dict)
    """Other peer -> the least s of late from our sending to the arrival of its output at the hop after it."""

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, owner: str) -> PeerView:
        """The view that ``owner`` signed. Raises SchedulerError, in one line, if it is none or not of
        itself."""
        view = cls._parse(data)
        if view.peer != owner:
            raise SchedulerError("view: speaks of another peer than its owner")
        return view

    @classmethod
    def _parse(cls, data: bytes) -> PeerView:
        try:
            return cls.model_validate(_unpack(data))
        except ValidationError as error:
            raise SchedulerError.of("view", error) from None


def _unpack(data: bytes) -> Any:
    """MessagePack of bounded size, without extension types and with nesting bounded by msgpack itself."""
    if len(data) > MAX_VIEW_BYTES:
        raise SchedulerError(f"view: over {MAX_VIEW_BYTES} bytes")
    try:
        return msgpack.unpackb(data, use_list=False, raw=False, max_ext_len=0)
    except (
        Exception
    ) as error:  # msgpack raises many unrelated kinds, RecursionError and ValueError among them
        raise SchedulerError(f"view: not MessagePack ({type(error).__name__})") from None


class PlanFact(Frozen):
    """A peer's proposal: the fact (``PLAN_TOPIC``, proposer)."""

    plan: Plan

    def to_bytes(self) -> bytes:
        return self.plan.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, owner: str) -> PlanFact:
        """The plan that ``owner`` signed. Raises SchedulerError, in one line, if it is none or not its
        own."""
        plan = Plan.from_bytes(data)
        if plan.proposer != owner:
            raise SchedulerError("plan: names another proposer than its owner")
        return cls(plan=plan)


Rank = tuple[bool, int, float, str]


def rank(plan: Plan, instance: Instance) -> Rank:
    """How ``plan`` stands in ``instance``; the least stands. What the plan claims of itself has no part in
    it.

    Those that hold come first, by the makespan that we compute; then those that do not, by how many of their
    hops are dead; then the hash.
    """
    fault = validate(plan, instance)
    dead = sum(peer not in instance.index for path in plan.paths for peer in path)
    makespan_s = makespan(instance, plan.paths) if fault is None else float("inf")
    return fault is not None, dead, makespan_s, plan.digest()
