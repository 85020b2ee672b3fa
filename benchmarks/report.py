"""What every benchmark shares: its two options and the form of its result."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """``quick``: under a minute. ``json``: where the result goes, if anywhere."""

    quick: bool
    json: Path | None


def parser(description: str) -> argparse.ArgumentParser:
    """The common options; a benchmark may add its own."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="a shorter run, under a minute")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return made


def options(description: str, arguments: list[str] | None = None) -> Options:
    """Read the command line of a benchmark that has no options of its own."""
    parsed = parser(description).parse_args(arguments)
    return Options(parsed.quick, parsed.json)


def machine() -> str:
    """Processor, cores, memory and system in one line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith(("model name", "Hardware", "cpu model"))
        ),
        platform.machine(),
    )
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if "MemTotal" in line), 0)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{model}, {cores} cores, {memory_kb / 2**20:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def write(name: str, figures: Mapping[str, float], path: Path | None) -> None:
    """Print the figures and, given a path, write ``{"name", "when", "machine", "command", "figures"}`` there.

    Raises ``ValueError`` for a figure that is no finite number: a benchmark that measured nothing has failed.
    """
    for key, value in figures.items():
        if not math.isfinite(value):
            raise ValueError(f"{name}: {key} is {value}")
        print(f"{key:32} {value:12.4g}")
    if path is None:
        return
    result = {
        "name": name,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "figures": {key: float(value) for key, value in figures.items()},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(temporary, path)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
