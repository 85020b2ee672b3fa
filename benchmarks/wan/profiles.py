"""What an emulated WAN is asked to be: a data file of regions, latencies and rates, and its matrices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scheduler.instance import UNLIMITED_BYTES_PER_S
from swarm.errors import UserError
from swarm.manifest import one_line

FOLDER = Path(__file__).parent / "profiles"
BYTES_PER_S = 1e6 / 8
"""In a Mbit/s."""

RegionName = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_-]+$")]
Milliseconds = Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)]
MegabitsPerS = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Between(_Strict):
    """What two hosts have between them, each way; without a bandwidth only their own rates hold them up."""

    one_way_ms: Milliseconds
    bandwidth_mbit_per_s: MegabitsPerS | None = None


class RegionLink(Between):
    """Between a host in region ``a`` and one in ``b``."""

    a: RegionName
    b: RegionName


class Profile(_Strict):
    """A WAN: regions, what lies between each two of them, and the line that each host has."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    source: str
    """Where the figures are from."""
    regions: Annotated[tuple[RegionName, ...], Field(min_length=1, max_length=256)]
    queue_ms: Annotated[float, Field(gt=0, le=10_000)] = 200.0
    """Whoever would wait longer than this before a rate is dropped, as routers with full buffers do."""
    up_mbit_per_s: MegabitsPerS | None = None
    """What a host sends, to all others together; None: nothing of its own holds it up."""
    down_mbit_per_s: MegabitsPerS | None = None
    same_region: Between
    links: tuple[RegionLink, ...]

    @model_validator(mode="after")
    def _each_pair_once(self) -> Profile:
        listed = [tuple(sorted((link.a, link.b))) for link in self.links]
        wanted = {tuple(sorted(pair)) for pair in itertools.combinations(self.regions, 2)}
        if len(set(self.regions)) != len(self.regions):
            raise ValueError("a region is listed twice")
        if sorted(listed) != sorted(wanted):
            odd = wanted.symmetric_difference(listed) or {pair for pair in listed if listed.count(pair) > 1}
            raise ValueError(f"links: {' - '.join(min(odd))} must be listed once, and regions only")
        return self

    @classmethod
    def load(cls, name: str) -> Profile:
        """The profile of that name, or in the file of that path. Raises UserError, in one line."""
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        path = FOLDER / f"{name}.json" if name in known else Path(name)
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file or one of {', '.join(known)}") from None
        except ValidationError as error:
            raise UserError(f"{path}: not a WAN profile: {one_line(error)}") from None

    def between(self, a: str, b: str) -> Between:
        """What a host in region ``a`` and another in ``b`` have between them. Raises KeyError."""
        if a == b:
            return self.same_region
        return next(link for link in self.links if {link.a, link.b} == {a, b})

    def wan(self, regions: Sequence[str]) -> Wan:
        """The matrices for one host in each of ``regions``, which may name a region several times."""
        pairs = [[self.between(a, b) for b in regions] for a in regions]
        return Wan(
            one_way_s=[[pair.one_way_ms / 1000 for pair in row] for row in pairs],
            pair_bytes_per_s=[[_bytes_per_s(pair.bandwidth_mbit_per_s) for pair in row] for row in pairs],
            up_bytes_per_s=[_bytes_per_s(self.up_mbit_per_s)] * len(regions),
            down_bytes_per_s=[_bytes_per_s(self.down_mbit_per_s)] * len(regions),
            queue_s=self.queue_ms / 1000,
        )


def _bytes_per_s(mbit_per_s: float | None) -> float:
    return UNLIMITED_BYTES_PER_S if mbit_per_s is None else mbit_per_s * BYTES_PER_S


@dataclass
class Wan:
    """What the router is to make of ``n`` hosts; rows are sources, columns targets."""

    one_way_s: list[list[float]]
    """``[n][n]``"""
    pair_bytes_per_s: list[list[float]]
    """``[n][n]``"""
    up_bytes_per_s: list[float]
    """``[n]``"""
    down_bytes_per_s: list[float]
    """``[n]``"""
    queue_s: float

    def rate_bytes_per_s(self, source: int, target: int) -> float:
        """What one transfer alone can have."""
        return min(
            self.up_bytes_per_s[source], self.pair_bytes_per_s[source][target], self.down_bytes_per_s[target]
        )
