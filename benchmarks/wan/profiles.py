"""What an emulated WAN is asked to be: the matrices of a profile (``scheduler/simulate/networks.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from scheduler.errors import SchedulerError
from scheduler.simulate.networks import NetworkProfile, bytes_per_s
from swarm.errors import UserError


class Profile(NetworkProfile):
    """A network for the router."""

    @classmethod
    def load(cls, name: str) -> Self:
        """The profile of that name, or in the file of that path. Raises UserError, in one line."""
        try:
            return super().load(name)
        except SchedulerError as error:
            raise UserError(str(error)) from None

    def wan(self, regions: Sequence[str]) -> Wan:
        """The matrices for one host in each of ``regions``, which may name a region several times."""
        pairs = [[self.between(a, b) for b in regions] for a in regions]
        return Wan(
            one_way_s=[[pair.one_way_ms / 1000 for pair in row] for row in pairs],
            pair_bytes_per_s=[[bytes_per_s(pair.bandwidth_mbit_per_s) for pair in row] for row in pairs],
            up_bytes_per_s=[bytes_per_s(self.up_mbit_per_s)] * len(regions),
            down_bytes_per_s=[bytes_per_s(self.down_mbit_per_s)] * len(regions),
            queue_s=self.queue_ms / 1000,
        )


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
