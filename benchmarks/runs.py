"""What benchmarks of real swarms share: a run's manifest, its processes, and what they write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from bootstrap.create import create_run, example_toml
from bootstrap.faults.control import children_of, pause, write_settings
from bootstrap.local import LocalSwarm, Place
from bootstrap.progress import Event, Tail
from peer.usage import process_cpu_s
from swarm.clock import LoopClock
from swarm.manifest import Manifest

LIMIT_S = 240.0
LOOK_S = 0.05


def manifest_text(**changes: object) -> str:
    """The demo's manifest with other values, and without validation and checkpoints."""
    return example_toml(**{"validation_every": 0, "checkpoint_every": 0, "warmup_steps": 1, **changes})


class SwarmRun:
    """A local swarm in a temporary folder, its peers ``peerN`` in stage N modulo the stages.

    An async context manager: all founders are started. ``events``: (name, event) as ``look`` has read them.
    ``settings``: of the emulation of a stage's peers; None: the daemons as volunteers run them. ``usage``:
    each peer leaves its CPU seconds in ``NAME/usage.json``. ``place_of``: where ``node`` and each peer is.
    """

    def __init__(
        self,
        manifest: str,
        peers: int,
        *,
        settings: Callable[[int], dict[str, Any]] | None = lambda stage: {},
        usage: bool = False,
        place_of: Callable[[str], Place] = lambda _: Place(),
    ) -> None:
        self._text = manifest
        self._settings = settings
        self._usage = usage
        self._folder = tempfile.TemporaryDirectory(prefix="skipswarm-run-")
        self.directory = Path(self._folder.name)
        self.clock = LoopClock()
        self.swarm = LocalSwarm(self.directory, self.clock, place_of)
        self.manifest = Manifest.from_toml(manifest, researcher="00" * 32)
        self.stages = {f"peer{n}": n % len(self.manifest.stages) for n in range(peers)}
        self.events: list[tuple[str, Event]] = []
        self.ids: dict[str, str] = {}
        """name -> peer id"""
        self._tails: dict[str, Tail] = {}
        self._join = ""
        self._members: dict[int, int] = {}
        """step -> members of the next one"""
        self._steps: dict[str, int] = {}
        """name -> the last step that it made"""

    async def __aenter__(self) -> SwarmRun:
        (self.directory / "run.toml").write_text(self._text)
        made = create_run(self.directory / "run.toml")
        self.manifest = made.manifest
        await self.swarm.open()
        self.swarm.start_node("node", signed=made.signed_path, key=made.key_path)
        node = Tail(self.swarm.events_path("node"))
        ready = await self.until(lambda: [event for event in node.read() if event["event"] == "ready"])
        node.close()
        self._join = str(ready[0]["join"])
        for name, stage in self.stages.items():
            self.start(name, stage)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.swarm.close()
        for tail in self._tails.values():
            tail.close()
        self._folder.cleanup()

    def start(self, name: str, stage: int) -> None:
        """A peer, for the first time or again."""
        settings = self._settings and write_settings(self.directory, name, **self._settings(stage))
        usage = self.usage_path(name) if self._usage else None
        self.swarm.start_peer(name, join=self._join, stage=stage, emulate=settings, usage=usage)
        self._tails.setdefault(name, Tail(self.swarm.events_path(name)))

    def usage_path(self, name: str) -> Path:
        """Where a peer's CPU seconds are when it has ended."""
        return self.directory / name / "usage.json"

    def look(self) -> list[tuple[str, Event]]:
        """Events that were written since the last call."""
        new = [(name, event) for name, tail in self._tails.items() for event in tail.read()]
        for name, event in new:
            self.ids.setdefault(name, str(event["peer"]))
            if event["event"] == "closed":
                self._members[event["step"]] = len(event["members"])
            elif event["event"] == "stepped":
                self._steps[name] = event["step"]
        self.events += new
        return new

    def of(self, *kinds: str, since_s: float = 0.0) -> list[tuple[str, Event]]:
        """Events of these kinds that were read, in the order of their times."""
        found = [
            (name, event) for name, event in self.events if event["event"] in kinds and event["t"] >= since_s
        ]
        return sorted(found, key=lambda entry: entry[1]["t"])

    async def until(self, there: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Look until ``there()`` has something. Raises RuntimeError when it has nothing for too long."""
        end_s = self.clock.now() + limit_s
        while True:
            self.look()
            found = there()
            if found:
                return found
            if self.clock.now() > end_s:
                last = "; ".join(f"{p.name}: {p.last_line()}" for p in self.swarm.processes.values())
                raise RuntimeError(f"the swarm did not get there in {limit_s:.0f} s ({last})")
            await pause(self.clock, LOOK_S)

    def cpu_s(self) -> float:
        """CPU seconds of all peers that live and their p2pds, so far."""
        total = 0.0
        for process in self.swarm.living_peers():
            pids = [process.pid, *children_of(process.pid)]
            total += sum(process_cpu_s(pid) for pid in pids if pid is not None)
        return total

    async def settled(self, steps: int = 3) -> None:
        """Until everybody is a member and has made ``steps`` steps from now on."""
        goal = max(self._steps.values(), default=-1) + steps

        def whole() -> bool:
            members = self._members.get(max(self._members, default=-1), 0)
            return members == len(self.stages) and all(
                self._steps.get(name, -1) >= goal for name in self.stages
            )

        await self.until(whole)
