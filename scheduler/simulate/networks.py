"""Networks as data files: regions, and the latency and the rate between each two of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from scheduler.errors import SchedulerError
from scheduler.instance import UNLIMITED_BYTES_PER_S, Frozen

FOLDER = Path(__file__).parent / "profiles"
BYTES_PER_S = 1e6 / 8
"""In a Mbit/s."""

RegionName = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_-]+$")]
Milliseconds = Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)]
MegabitsPerS = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class Between(Frozen):
    """What two hosts have between them, each way; without a bandwidth only their own rates hold them up."""

    one_way_ms: Milliseconds
    bandwidth_mbit_per_s: MegabitsPerS | None = None


class RegionLink(Between):
    """Between a host in region ``a`` and one in ``b``."""

    a: RegionName
    b: RegionName


class NetworkProfile(Frozen):
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
    def _each_pair_once(self) -> Self:
        listed = [tuple(sorted((link.a, link.b))) for link in self.links]
        wanted = {tuple(sorted(pair)) for pair in itertools.combinations(self.regions, 2)}
        if len(set(self.regions)) != len(self.regions):
            raise ValueError("a region is listed twice")
        if sorted(listed) != sorted(wanted):
            odd = wanted.symmetric_difference(listed) or {pair for pair in listed if listed.count(pair) > 1}
            raise ValueError(f"links: {' - '.join(min(odd))} must be listed once, and regions only")
        return self

    @classmethod
    def load(cls, name: str) -> Self:
        """The profile of that name, or in the file of that path. Raises SchedulerError, in one line."""
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        path = FOLDER / f"{name}.json" if name in known else Path(name)
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SchedulerError(
                f"{path}: {error.strerror}; give a file or one of {', '.join(known)}"
            ) from None
        except ValidationError as error:
            raise SchedulerError.of(f"{path}: not a WAN profile", error) from None

    @cached_property
    def _pairs(self) -> Mapping[frozenset[str], Between]:
        return {frozenset((link.a, link.b)): link for link in self.links}

    def between(self, a: str, b: str) -> Between:
        """What a host in region ``a`` and another in ``b`` have between them. Raises KeyError."""
        return self.same_region if a == b else self._pairs[frozenset((a, b))]


def bytes_per_s(mbit_per_s: float | None) -> float:
    """A rate in bytes/s; None for one that never holds anything up."""
    return UNLIMITED_BYTES_PER_S if mbit_per_s is None else mbit_per_s * BYTES_PER_S
