"""The scheduling problems that ``benchmarks.schedule`` solves: files, and random swarms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from scheduler.assignment import Hosted, choose_stage
from scheduler.errors import SchedulerError
from scheduler.instance import Frozen, Instance, Link, PeerSpec
from scheduler.plan import Path as Hops

INSTANCES = Path(__file__).parent / "instances"


class Problem(Frozen):
    """An instance, and what others found for it: one path a microbatch, in send order."""

    name: str
    source: str = ""
    instance: Instance
    reference_paths: tuple[Hops, ...] = ()
    """By SkipPipe's published scheduler."""
    best_known_paths: tuple[Hops, ...] = ()


class SkipPipe(BaseModel):
    """A problem as SkipPipe's experiments state it; see ``benchmarks/instances/README.md``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    stages: list[list[int]]
    path_length: int
    memory_slots: int
    waves: int
    compute_s: list[float]
    hop_s: list[list[float]]
    reference_paths: list[list[int]] = []
    best_known_paths: list[list[int]] = []

    def problem(self) -> Problem:
        """Both waves in one step of the daemon's kind."""
        hosts = {p: s for s, group in enumerate(self.stages) for p in group}
        names = [f"p{i}" for i in range(len(self.compute_s))]
        peers = tuple(
            PeerSpec(
                peer=names[i],
                stage=hosts[i],
                forward_s=c,
                backward_s=1.5 * c,
                loss_s=c / 4,
                memory_slots=self.memory_slots,
            )
            for i, c in enumerate(self.compute_s)
        )
        links = tuple(
            Link(names[p], names[q], float(hop_s), 1e15)
            for p, row in enumerate(self.hop_s)
            for q, hop_s in enumerate(row)
            if p != q
        )
        instance = Instance(
            stages=len(self.stages),
            path_length=self.path_length,
            peers=peers,
            microbatches={names[p]: self.waves * self.memory_slots for p in self.stages[0]},
            activation_bytes=0,
            links=links,
        )

        def both_waves(paths: list[list[int]]) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(names[p] for p in path) for path in paths) * self.waves

        return Problem(
            name=self.name,
            source="SkipPipe's experiments (Blagoev et al. 2025, arXiv 2502.19913)",
            instance=instance,
            reference_paths=both_waves(self.reference_paths),
            best_known_paths=both_waves(self.best_known_paths),
        )


def load(directory: Path) -> list[Problem]:
    """The problems in the JSON files of ``directory``, of either form, by file name.

    Raises SchedulerError if a file holds none, or there is no file.
    """
    files = sorted(directory.glob("*.json"))
    if not files:
        raise SchedulerError(f"{directory}: no instances (*.json)")
    return [_read(path) for path in files]


def _read(path: Path) -> Problem:
    text = path.read_bytes()
    try:
        if b'"hop_s"' in text:
            return SkipPipe.model_validate_json(text).problem()
        return Problem.model_validate_json(text)
    except ValidationError as error:
        raise SchedulerError.of(path.name, error) from None


def random_problem(seed: int, *, peers: int | None = None, microbatches: int | None = None) -> Instance:
    """A swarm of 10 to 60 volunteers: speeds 1:8, home links (50 to 500 Mbit/s up, up to ten times that
    down), latencies by places on a plane, each at the stage that it would choose as it joins, 25 to 50 %
    skipped. ``microbatches`` is about the step's number of them, twice what the origins' memory holds if left
    out."""
    rng = np.random.default_rng(seed)
    n = peers or int(rng.integers(10, 61))
    stages = int(rng.integers(3, min(8, n // 3) + 1))
    skipped = max(1, round(float(rng.uniform(0.25, 0.5)) * (stages - 1)))
    work_s = 0.2 * 8 ** rng.random(n)
    up = 50e6 / 8 * 10 ** rng.random(n)
    down = up * (1 + 9 * rng.random(n))
    place = rng.random((n, 2))
    latency_s = 0.005 + 0.15 * np.hypot(*(place[:, None] - place[None]).transpose(2, 0, 1))
    slots = rng.integers(2, 7, n)
    hosted: list[Hosted] = []
    for each_s in (3 * work_s).tolist():
        hosted.append(Hosted(choose_stage(hosted, stages=stages, path_length=stages - skipped), each_s))
    specs = tuple(
        PeerSpec(
            peer=f"p{i:04}",
            stage=hosted[i].stage,
            forward_s=float(work_s[i]),
            backward_s=float(work_s[i]),
            weight_s=float(work_s[i]),
            loss_s=float(work_s[i]) / 4,
            memory_slots=int(slots[i]),
            up_bytes_per_s=float(up[i]),
            down_bytes_per_s=float(down[i]),
        )
        for i in range(n)
    )
    origins = [spec for spec in specs if spec.stage == 0]
    links = tuple(
        Link(a.peer, b.peer, float(latency_s[i, j]), 1e15)
        for i, a in enumerate(specs)
        for j, b in enumerate(specs)
        if i != j
    )
    each = max(1, round(microbatches / len(origins))) if microbatches else 0
    return Instance(
        stages=stages,
        path_length=stages - skipped,
        peers=specs,
        microbatches={spec.peer: each or 2 * spec.memory_slots for spec in origins},
        activation_bytes=4 << 20,
        links=links,
    )
