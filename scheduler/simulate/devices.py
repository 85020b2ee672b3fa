"""What a device computes in a second, for peers whose speed nobody has measured.

``devices.csv`` holds dense peak rates from vendors' data sheets: 16-bit matrix units that sum in float32, and
float32 vector units (CPUs: 3 GHz, 32 operations a core and cycle, as with AVX2). A measured speed is always
better: ``forward_s`` and ``backward_s`` of a peer win over its device, and so does ``tflops``.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from scheduler.errors import SchedulerError

DEVICES = Path(__file__).parent / "devices.csv"
SHARE_OF_PEAK = 0.4
"""What training reaches of the peak rate. An assumption: PaLM's authors report 0.46 (Chowdhery et al. 2022,
section 4.1) and Megatron-LM's 0.44 to 0.52 (Narayanan et al. 2021, table 1), with larger matrices than a
volunteer's."""


def flops_per_s(device: str, dtype: str) -> float:
    """Effective FLOP/s of ``device`` with matrices of ``dtype`` ("bfloat16" or "float32").

    Raises SchedulerError, in one line, for a device that is not in the table.
    """
    known = _devices()
    rates = known.get(_folded(device))
    if rates is None:
        raise SchedulerError(
            f"no device {device!r} in the table; give tflops, or forward_s and backward_s, or one of: "
            + ", ".join(name for name, _, _ in known.values())
        )
    _, tensor, vector = rates
    return SHARE_OF_PEAK * 1e12 * (tensor if dtype == "bfloat16" else vector)


@cache
def _devices() -> dict[str, tuple[str, float, float]]:
    with DEVICES.open(encoding="utf-8", newline="") as file:
        rows = [
            (row["device"], float(row["tensor_tflops"]), float(row["vector_tflops"]))
            for row in csv.DictReader(file)
        ]
    return {_folded(row[0]): row for row in rows}


def _folded(device: str) -> str:
    return "".join(device.casefold().removeprefix("nvidia").split()).replace("-", "")
