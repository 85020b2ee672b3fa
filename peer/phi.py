"""How long to wait for what usually comes at intervals: the accrual failure detector's estimate.

Hayashibara, Defago, Yared, Katayama, "The phi accrual failure detector", SRDS 2004: phi(t) = -log10 P(the
next arrival comes later than t), with intervals taken as normal. Median and median absolute deviation stand
in for mean and standard deviation, so that one long pause does not teach the detector to be blind.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_NORMAL = statistics.NormalDist()
_DEVIATION_OF_MAD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class PhiLimits:
    """What bounds the estimate. Times in seconds."""

    threshold: float = 8.0
    """At this phi the wait is over: one false alarm in 10^8 intervals, were they normal (the paper, 5.2)."""
    pause_s: float = 2.5
    """Always granted on top: a machine that swaps, collects garbage or is put to other work."""
    least_deviation_s: float = 0.1
    most_s: float = 20.0
    """Waiting longer is never worth while."""
    unmeasured_s: float = 4.0
    """Waited as long as fewer than ``samples`` intervals were measured."""
    samples: int = 4


class Arrivals:
    """Intervals between arrivals of one kind, the last 32 of them."""

    def __init__(self, limits: PhiLimits) -> None:
        self._limits = limits
        self._intervals_s: deque[float] = deque(maxlen=32)
        self._borne_s: float | None = None

    def add(self, interval_s: float) -> None:
        self._intervals_s.append(interval_s)
        self._borne_s = None

    def clear(self) -> None:
        self._intervals_s.clear()
        self._borne_s = None

    @property
    def measured(self) -> bool:
        """Are there enough intervals to judge by?"""
        return len(self._intervals_s) >= self._limits.samples

    def _shape(self) -> tuple[float, float]:
        """(the expected interval with its pause, its deviation), in seconds."""
        median_s = statistics.median(self._intervals_s)
        mad_s = statistics.median(abs(interval_s - median_s) for interval_s in self._intervals_s)
        deviation_s = max(self._limits.least_deviation_s, _DEVIATION_OF_MAD * mad_s)
        return median_s + self._limits.pause_s, deviation_s

    def phi(self, silence_s: float) -> float:
        """How sure it is, after so long, that nothing comes any more; 0 before enough was measured."""
        if not self.measured:
            return 0.0
        expected_s, deviation_s = self._shape()
        later = math.erfc((silence_s - expected_s) / (deviation_s * math.sqrt(2))) / 2
        return -math.log10(later) if later > 0 else math.inf

    def borne_s(self) -> float:
        """The silence at which phi reaches the threshold, within the limits."""
        if self._borne_s is None:
            self._borne_s = self._limits.unmeasured_s
            if self.measured:
                expected_s, deviation_s = self._shape()
                quantile = -_NORMAL.inv_cdf(10**-self._limits.threshold)
                self._borne_s = min(self._limits.most_s, expected_s + quantile * deviation_s)
        return self._borne_s
