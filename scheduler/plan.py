"""The paths and the send order of one step's microbatches, as text, as bytes for gossip, and checked."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property
from itertools import pairwise
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from scheduler.errors import SchedulerError
from scheduler.instance import MAX_STAGES, Frozen, Instance, PeerName

MAX_TEXT_BYTES = 1 << 20
MAX_PATHS = 1 << 16

Path = Annotated[tuple[PeerName, ...], Field(min_length=1, max_length=MAX_STAGES)]


class Plan(Frozen):
    """Which peers each microbatch visits, origin first, in the order in which they are sent and preferred.

    The i-th path that starts with an origin is that of its i-th microbatch. ``makespan_s`` is the proposer's
    claim; whoever receives a plan computes its own. ``degraded`` says that some paths are shorter than the
    run asks for, or some stages less trained than others, because too few peers live or can reach each other.
    """

    paths: Annotated[tuple[Path, ...], Field(max_length=MAX_PATHS)]
    makespan_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    epoch: Annotated[str, Field(max_length=64, pattern=r"^[!-~]*$")] = ""
    proposer: Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")] = ""
    degraded: bool = False

    @model_validator(mode="after")
    def _simple_paths(self) -> Plan:
        for path in self.paths:
            if len(set(path)) != len(path):
                raise ValueError("a path visits a peer twice")
        return self

    @cached_property
    def _by_origin(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        grouped: dict[str, list[tuple[str, ...]]] = {}
        for path in self.paths:
            grouped.setdefault(path[0], []).append(path)
        return {origin: tuple(paths) for origin, paths in grouped.items()}

    def take(self, origin: str, count: int) -> tuple[tuple[str, ...], ...]:
        """Paths for ``count`` microbatches of ``origin``, from the first again if it has more than was
        planned.

        Empty if the plan has none for it.
        """
        paths = self._by_origin.get(origin, ())
        return tuple(paths[i % len(paths)] for i in range(count)) if paths else ()

    def to_text(self) -> str:
        """One header line for each field, then one line for each path; ``from_text`` reads it back."""
        head = [
            "plan 1",
            f"epoch {self.epoch}",
            f"proposer {self.proposer}",
            f"makespan_s {self.makespan_s!r}",
            f"degraded {'yes' if self.degraded else 'no'}",
        ]
        return "\n".join([*head, *(" ".join(("path", *path)) for path in self.paths)]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Raises SchedulerError, in one line, if ``text`` is no plan."""
        if len(text) > MAX_TEXT_BYTES:
            raise SchedulerError(f"plan: over {MAX_TEXT_BYTES} characters")
        lines = text.split("\n")
        if len(lines) < 6 or lines[0] != "plan 1" or lines[-1] != "":
            raise SchedulerError("plan: not the text of a plan, or cut off")
        fields: list[str] = []
        for name, line in zip(("epoch", "proposer", "makespan_s", "degraded"), lines[1:5], strict=True):
            key, _, value = line.partition(" ")
            if key != name:
                raise SchedulerError(f"plan: {name} expected")
            fields.append(value)
        paths = []
        for line in lines[5:-1]:
            key, *path = line.split(" ")
            if key != "path":
                raise SchedulerError("plan: a path expected")
            paths.append(tuple(path))
        if fields[3] not in ("yes", "no"):
            raise SchedulerError("plan: degraded is yes or no")
        try:
            makespan_s = float(fields[2])
        except ValueError:
            raise SchedulerError("plan: makespan_s is not a number") from None
        try:
            return cls(
                paths=tuple(paths),
                makespan_s=makespan_s,
                epoch=fields[0],
                proposer=fields[1],
                degraded=fields[3] == "yes",
            )
        except ValidationError as error:
            raise SchedulerError.of("plan", error) from None

    def to_bytes(self) -> bytes:
        return self.to_text().encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Raises SchedulerError, in one line, if ``data`` is no plan."""
        if len(data) > MAX_TEXT_BYTES:
            raise SchedulerError(f"plan: over {MAX_TEXT_BYTES} bytes")
        try:
            return cls.from_text(data.decode("ascii"))
        except UnicodeDecodeError:
            raise SchedulerError("plan: not ASCII") from None

    def digest(self) -> str:
        """SHA-256 of the bytes, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def validate(plan: Plan, instance: Instance) -> str | None:
    """Why ``plan`` cannot stand for ``instance``, or None if it can.

    Each origin has a path for each of its microbatches; a path visits known peers, one a stage, going up, as
    many as living stages allow, over links that work both ways; the stages that live are visited equally
    often, within the instance's tolerance (unless links are missing and the plan says that it is degraded).
    """
    drawn = Counter(path[0] for path in plan.paths)
    for origin, count in instance.microbatches.items():
        if drawn.get(origin, 0) != count:
            return f"{drawn.get(origin, 0)} paths for the {count} microbatches of {origin}"
    if sum(drawn.values()) != sum(instance.microbatches.values()):
        return "a path starts at a peer that has no microbatches"
    visits: Counter[int] = Counter()
    for path in plan.paths:
        reason = path_fault(path, instance)
        if reason:
            return reason
        visits.update(instance.peers[instance.index[peer]].stage for peer in path[1:])
    counts = [visits[stage] for stage in instance.alive_stages]
    uneven = max(counts, default=0) - min(counts, default=0) > instance.coverage_tolerance
    if uneven and (instance.all_usable or not plan.degraded):
        return f"stages are visited between {min(counts)} and {max(counts)} times"
    return None


def path_fault(path: tuple[str, ...], instance: Instance) -> str | None:
    """Why a microbatch of ``path[0]`` cannot take ``path`` in ``instance``, or None if it can."""
    for peer in path:
        if peer not in instance.index:
            return f"{peer} is not among the living peers"
    hops = [instance.index[peer] for peer in path]
    if any(instance.peers[a].stage >= instance.peers[b].stage for a, b in pairwise(hops)):
        return "a path does not go up through the stages"
    required = instance.required_length(path[0])
    if len(path) != required:
        return f"a path visits {len(path)} stages instead of {required}"
    gap = instance.gap(hops)
    return None if gap is None else no_way(instance, gap)


def no_way(instance: Instance, gap: tuple[int, int]) -> str:
    """What is wrong with a path that has this ``Instance.gap``."""
    return "no way between " + " and ".join(instance.peers[p].peer for p in gap)
