"""A scheduling problem: peers, stages, compute times, link costs, memory, and the microbatches of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scheduler.errors import SchedulerError
from scheduler.kernel import Tables

if TYPE_CHECKING:
    from scheduler.view import PeerView

MAX_STAGES = 1024
MAX_PEERS = 65536
UNLIMITED_BYTES_PER_S = 1e15
"""A rate that never holds anything up."""

PeerName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=UNLIMITED_BYTES_PER_S, allow_inf_nan=False)]
LinkRate = Annotated[float, Field(ge=0, le=UNLIMITED_BYTES_PER_S, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=0, lt=2**48)]


class Frozen(BaseModel):
    """Base of the models here: strict, frozen, nothing unknown."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A checked copy with other values of some fields.

        pydantic's own would take over what was cached of the old ones, and check nothing.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_validate({**fields, **(update or {})})


class PeerSpec(Frozen):
    """One peer as the simulator sees it. Times are for one microbatch."""

    peer: PeerName
    stage: Stage
    forward_s: Seconds
    backward_s: Seconds
    """The input gradient alone."""
    weight_s: Seconds = 0.0
    """The deferred weight gradients, computed after the commit."""
    loss_s: Seconds = 0.0
    """Head, loss and the gradient of both; counts at origins only."""
    memory_slots: Annotated[int, Field(ge=1, lt=2**20)] = 8
    """Microbatches that the peer holds between their forward and their backward."""
    up_bytes_per_s: Rate = UNLIMITED_BYTES_PER_S
    down_bytes_per_s: Rate = UNLIMITED_BYTES_PER_S

    @property
    def work_s(self) -> float:
        """What one visit costs the peer in all."""
        return self.forward_s + self.backward_s + self.weight_s


class Link(NamedTuple):
    """One direction between two peers; ``bandwidth_bytes_per_s == 0`` says that it cannot be used."""

    source: PeerName
    target: PeerName
    latency_s: Seconds
    bandwidth_bytes_per_s: LinkRate


class Instance(Frozen):
    """What is to be scheduled. Peers that are not listed are dead; stages without a peer are skipped by all.

    Links not listed have the defaults. A hop p -> q carries the activation one way and the gradient the
    other, so a path may use it only if both directions can be used.
    """

    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    path_length: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    """Stages that a microbatch visits, stage 0 included."""
    peers: Annotated[tuple[PeerSpec, ...], Field(max_length=MAX_PEERS)]
    microbatches: dict[PeerName, Annotated[int, Field(ge=0, lt=2**20)]]
    """How many microbatches each origin starts in the step, in a fixed order of origins."""
    activation_bytes: Size
    """Size of an activation, and of a gradient, on the wire."""
    default_latency_s: Seconds = 0.0
    default_bandwidth_bytes_per_s: LinkRate = UNLIMITED_BYTES_PER_S
    links: tuple[Link, ...] = ()
    coverage_tolerance: Annotated[int, Field(ge=1, lt=2**20)] = 1
    """By how many visits the stages 1.. that have a peer may differ in one step."""
    gradient_bytes: tuple[Size, ...] = ()
    """What the replicas of each stage average when all microbatches are done; empty for no averaging."""

    @model_validator(mode="after")
    def _consistent(self) -> Instance:
        if self.path_length > self.stages:
            raise ValueError(f"path_length {self.path_length} exceeds the {self.stages} stages")
        stage_of: dict[str, int] = {}
        for spec in self.peers:
            if spec.peer in stage_of:
                raise ValueError(f"peer {spec.peer} is listed twice")
            if spec.stage >= self.stages:
                raise ValueError(f"peer {spec.peer} hosts stage {spec.stage}, the last is {self.stages - 1}")
            stage_of[spec.peer] = spec.stage
        for origin in self.microbatches:
            if stage_of.get(origin) != 0:
                raise ValueError(f"origin {origin} is not a peer of stage 0")
        pairs: set[tuple[str, str]] = set()
        for link in self.links:
            pair = (link.source, link.target)
            if link.source not in stage_of or link.target not in stage_of or link.source == link.target:
                raise ValueError(f"link {link.source} -> {link.target} does not join two of the peers")
            if pair in pairs:
                raise ValueError(f"link {link.source} -> {link.target} is listed twice")
            pairs.add(pair)
        if len(self.gradient_bytes) not in (0, self.stages):
            raise ValueError(f"gradient_bytes needs one size for each of the {self.stages} stages")
        return self

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each peer in ``peers``; the matrices below use it."""
        return {spec.peer: i for i, spec in enumerate(self.peers)}

    @cached_property
    def by_stage(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the replicas of each stage."""
        replicas: list[list[int]] = [[] for _ in range(self.stages)]
        for i, spec in enumerate(self.peers):
            replicas[spec.stage].append(i)
        return tuple(map(tuple, replicas))

    @cached_property
    def alive_stages(self) -> tuple[int, ...]:
        """Stages other than 0 that have a peer."""
        return tuple(s for s in range(1, self.stages) if self.by_stage[s])

    @cached_property
    def latency_s(self) -> NDArray[np.float64]:
        """``[n, n]``: one-way latency from row to column."""
        return self._matrix(self.default_latency_s, 2)

    @cached_property
    def bandwidth_bytes_per_s(self) -> NDArray[np.float64]:
        """``[n, n]``: rate from row to column, before either end's own limit; 0 where it cannot be used."""
        return self._matrix(self.default_bandwidth_bytes_per_s, 3)

    def _matrix(self, default: float, field: int) -> NDArray[np.float64]:
        matrix = np.full((len(self.peers), len(self.peers)), default, dtype=np.float64)
        for link in self.links:
            matrix[self.index[link.source], self.index[link.target]] = link[field]
        return matrix

    @cached_property
    def tables(self) -> Tables:
        """The instance in arrays, for the kernel."""
        peers = self.peers
        figures = np.array(
            [
                (p.backward_s, p.loss_s, p.forward_s, p.weight_s, p.up_bytes_per_s, p.down_bytes_per_s)
                for p in peers
            ]
        ).reshape(len(peers), 6)
        up, down = figures[:, 4], figures[:, 5]
        rate, size = self.bandwidth_bytes_per_s, self.activation_bytes
        usable = (rate > 0) & (rate.T > 0)
        np.fill_diagonal(usable, False)
        with np.errstate(divide="ignore", invalid="ignore"):
            link_s = np.where(rate > 0, size / rate, np.inf)
            hop_s = np.where(
                rate > 0, self.latency_s + size / np.minimum(rate, np.minimum(up[:, None], down)), np.inf
            )
        np.fill_diagonal(hop_s, 0.0)
        replicas = np.full((self.stages, max(1, *map(len, self.by_stage))), -1, np.int64)
        for row, group in zip(replicas, self.by_stage, strict=True):
            row[: len(group)] = group
        return Tables(
            task_s=np.ascontiguousarray(figures[:, :4]),
            slots=np.array([p.memory_slots for p in peers], np.int64),
            up_s=size / up,
            down_s=np.where(down < UNLIMITED_BYTES_PER_S, size / down, 0.0),
            latency_s=self.latency_s,
            link_s=link_s,
            hop_s=hop_s,
            usable=usable,
            gradient_bytes=np.array(self.gradient_bytes or (0,) * self.stages, np.float64),
            own_rate=np.minimum(up, down),
            rate=rate,
            stage=np.array([p.stage for p in peers], np.int64),
            replicas=replicas,
            hosts=np.array([len(group) for group in self.by_stage], np.int64),
        )

    @cached_property
    def usable(self) -> list[list[bool]]:
        """``[n][n]``: may a path step from row to column, and its gradient come back?"""
        usable: list[list[bool]] = self.tables.usable.tolist()
        return usable

    @cached_property
    def hop_s(self) -> list[list[float]]:
        """``[n][n]``: seconds from row to column for one tensor that nothing else holds up; infinite if
        cut."""
        hop_s: list[list[float]] = self.tables.hop_s.tolist()
        return hop_s

    @cached_property
    def all_usable(self) -> bool:
        """Can every peer of one stage exchange with every peer of another?"""
        rate = self.bandwidth_bytes_per_s
        unlike = np.not_equal.outer(*(np.array([spec.stage for spec in self.peers]),) * 2)
        return bool(np.all((rate > 0) | ~unlike))

    @cached_property
    def epoch(self) -> str:
        """A name for who hosts what and draws how much, whatever the speeds: what a plan is made for."""
        members = sorted((spec.peer, spec.stage) for spec in self.peers)
        drawn = sorted(self.microbatches.items())
        text = json.dumps([self.stages, self.path_length, members, drawn], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def _lengths(self) -> dict[str, int]:
        return {origin: self._longest(origin) for origin in self.microbatches}

    def required_length(self, origin: str) -> int:
        """Stages that a path of ``origin`` visits: ``path_length``, or the most that living stages allow."""
        return self._lengths[origin]

    def _longest(self, origin: str) -> int:
        if self.all_usable:
            return min(self.path_length, 1 + len(self.alive_stages))
        # Bit n of lengths[p]: a path of n stages can start at p, go up, and end at a neighbour of the origin.
        home = self.usable[self.index[origin]]
        lengths = [0] * len(self.peers)
        above: list[int] = []
        for stage in reversed(self.alive_stages):
            for p in self.by_stage[stage]:
                mask = 2 if home[p] else 0
                for q in above:
                    if self.usable[p][q]:
                        mask |= lengths[q] << 1
                lengths[p] = mask
            above.extend(self.by_stage[stage])
        possible = 2
        for p in above:
            if home[p]:
                possible |= lengths[p] << 1
        return (possible & ((2 << self.path_length) - 1)).bit_length() - 1

    @cached_property
    def visits(self) -> int:
        """Visits to stages other than 0 that all microbatches of the step make."""
        return sum(n * (self.required_length(origin) - 1) for origin, n in self.microbatches.items())

    def gap(self, path: Sequence[int]) -> tuple[int, int] | None:
        """The first two neighbours on ``path``, given by position, with no way between them; the last hop
        and the origin are neighbours too. None if there is none."""
        ring = zip(path, [*path[1:], path[0]], strict=True) if len(path) > 1 else ()
        return next(((p, q) for p, q in ring if not self.usable[p][q]), None)

    def without(self, *dead: str) -> Instance:
        """The same problem when the ``dead`` peers are gone."""
        return self.model_copy(
            update={
                "peers": tuple(spec for spec in self.peers if spec.peer not in dead),
                "microbatches": {o: n for o, n in self.microbatches.items() if o not in dead},
                "links": tuple(k for k in self.links if k.source not in dead and k.target not in dead),
            }
        )

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Instance:
        """Raises SchedulerError, in one line, if ``text`` is no instance."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SchedulerError.of("instance", error) from None

    @classmethod
    def from_view(
        cls,
        views: Iterable[PeerView],
        *,
        stages: int,
        path_length: int,
        microbatches: Mapping[str, int],
        activation_bytes: int,
        members: Mapping[str, int] | None = None,
        gradient_bytes: tuple[int, ...] = (),
        coverage_tolerance: int = 1,
    ) -> Instance:
        """The problem that the gossiped ``views`` describe.

        ``members`` (peer -> stage) says who lives and hosts what; it wins over the views, and a member
        without a view is taken for an ordinary one (the medians of the others). Without ``members`` every
        active view counts. Where only one direction of a link was measured, the other has its latency. Raises
        SchedulerError if no instance comes of it.
        """
        known = {view.peer: view for view in views}
        if members is None:
            members = {name: view.stage for name, view in known.items() if view.state == "active"}
        known = {name: view for name, view in known.items() if name in members}
        typical = _typical(known.values())
        peers = tuple(_spec(name, members[name], known.get(name), typical) for name in sorted(members))
        links, usual_s = _links(known)
        try:
            return cls(
                stages=stages,
                path_length=path_length,
                peers=peers,
                microbatches=dict(microbatches),
                activation_bytes=activation_bytes,
                default_latency_s=usual_s,
                links=links,
                gradient_bytes=gradient_bytes,
                coverage_tolerance=coverage_tolerance,
            )
        except ValidationError as error:
            raise SchedulerError.of("instance", error) from None


_SPEEDS = ("forward_s", "backward_s", "weight_s", "loss_s", "up_bytes_per_s", "down_bytes_per_s")


def _typical(views: Iterable[PeerView]) -> PeerView | None:
    """A view with the median of every figure, of the views that there are."""
    seen = list(views)
    if not seen:
        return None
    medians = {name: float(median(getattr(view, name) for view in seen)) for name in _SPEEDS}
    slots = int(median(view.memory_slots for view in seen))
    return seen[0].model_copy(update={**medians, "memory_slots": slots})


def _spec(name: str, stage: int, view: PeerView | None, typical: PeerView | None) -> PeerSpec:
    figures = view or typical
    if figures is None:
        # Nobody has said anything yet: any equal figures give a balanced plan.
        return PeerSpec(peer=name, stage=stage, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    speeds = {field: getattr(figures, field) for field in _SPEEDS}
    return PeerSpec(peer=name, stage=stage, memory_slots=figures.memory_slots, **speeds)


def _links(known: Mapping[str, PeerView]) -> tuple[tuple[Link, ...], float]:
    """Links between the known peers, both directions where one was measured, and their median latency."""
    links: dict[tuple[str, str], Link] = {}
    for name in sorted(known):
        for other, (latency_s, rate) in sorted(known[name].links.items()):
            if other in known and other != name:
                links[name, other] = Link(name, other, latency_s, rate)
    for (name, other), link in list(links.items()):
        links.setdefault((other, name), Link(other, name, link.latency_s, UNLIMITED_BYTES_PER_S))
    usual_s = median(link.latency_s for link in links.values()) if links else 0.0
    return tuple(links.values()), usual_s
