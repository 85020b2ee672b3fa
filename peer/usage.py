"""Where a daemon's CPU time goes: compute, event loop, serialisation, p2pd. For benchmarks; off by default.

CPU seconds of whole threads and processes are the kernel's; how the loop's thread divides its own is sampled
(what stands on its stack every few milliseconds, waiting left out).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLE_S = 0.02
_SERIALISATION = ("swarm/wire.py", "swarm/messages.py")
_TRANSPORT = ("swarm/transport/",)
_DIRECTORY = ("swarm/directory.py", "swarm/records.py", "swarm/dht_guard.py", "hivemind/dht/")


def _kind_of(frame: FrameType | None) -> str:
    """What the loop's thread is doing, by the innermost of our files on its stack."""
    innermost = True
    while frame is not None:
        name = frame.f_code.co_filename
        if innermost and frame.f_code.co_name in ("select", "run_forever", "run_until_complete", "run"):
            return "waiting"
        innermost = False
        if any(part in name for part in _SERIALISATION):
            return "serialisation"
        if any(part in name for part in _DIRECTORY):
            return "directory"
        if any(part in name for part in _TRANSPORT):
            return "transport"
        if "/peer/" in name or "/scheduler/" in name:
            return "protocol"
        frame = frame.f_back
    return "other"


def process_cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of a process that lives; 0 if it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process, and what of it is its own (not shared with the one that forked it)."""
    sizes: Counter[str] = Counter()
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            key, value, *_ = line.split()
            sizes[key.rstrip(":")] += int(value)
    except OSError:
        return {"rss_mib": 0.0, "private_mib": 0.0}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"rss_mib": sizes["Rss"] / 1024, "private_mib": private / 1024}


class Usage:
    """Samples the thread that made it until ``stop``."""

    def __init__(self, p2pd_pid: int) -> None:
        self._p2pd_pid = p2pd_pid
        self._p2pd_start_s = process_cpu_s(p2pd_pid)
        self._loop_thread = threading.get_ident()
        self._loop_start_s = time.thread_time()
        self._process_start_s = time.process_time()
        self._samples: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="usage", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._samples[_kind_of(sys._current_frames().get(self._loop_thread))] += 1

    def stop(self) -> dict[str, float]:
        """CPU seconds by part since the beginning; called on the sampled thread."""
        self._stop.set()
        self._thread.join()
        loop_s = time.thread_time() - self._loop_start_s
        process_s = time.process_time() - self._process_start_s
        working = {kind: count for kind, count in self._samples.items() if kind != "waiting"}
        total = sum(working.values()) or 1
        figures = {f"loop_{kind}_s": loop_s * count / total for kind, count in sorted(working.items())}
        return {
            "process_s": process_s,
            "loop_s": loop_s,
            "compute_s": process_s - loop_s,
            "p2pd_s": process_cpu_s(self._p2pd_pid) - self._p2pd_start_s,
            **memory_mib(os.getpid()),
            **{f"p2pd_{key}": value for key, value in memory_mib(self._p2pd_pid).items()},
            **figures,
        }
