"""Random fault plans that a swarm must survive: a majority lives and is connected, and so does stage 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from bootstrap.faults.plan import AtMessage, AtStep, FaultPlan, Target

PHASES = {
    "forward": ("accept", "forward"),
    "backward": ("backward", "commit"),
    "closing": ("gossip_push", "propose", "accepted", "decided"),
    "averaging": ("average_part", "average_result", "average_digest", "average_done"),
}
"""Messages by the part of a step that they stand for."""

WEIGHTS = {
    "kill": 5,
    "freeze": 3,
    "hang": 2,
    "reset": 3,
    "drop": 2,
    "delay": 2,
    "slow": 1,
    "one_way": 2,
    "partition": 3,
    "join": 2,
}


class Scheduler:
    """Draws the faults of one plan; ``touched`` are peers that others may take for gone."""

    def __init__(self, rng: random.Random, peers: Mapping[str, int], lost: int | None, step_s: float) -> None:
        self._rng = rng
        self._peers = dict(peers)
        self._lost = lost
        self._step_s = step_s
        self.touched: set[str] = set()

    def _touchable(self) -> list[str]:
        """Peers that may be taken out: a majority stays, and of each stage that must live a replica."""
        if 2 * (len(self.touched) + 1) >= len(self._peers):
            return []
        untouched: dict[int, list[str]] = {}
        for name, stage in self._peers.items():
            if name not in self.touched:
                untouched.setdefault(stage, []).append(name)
        return sorted(name for names in untouched.values() if len(names) > 1 for name in names)

    def _take(self) -> str | None:
        names = self._touchable()
        if not names:
            return None
        name = self._rng.choice(names)
        self.touched.add(name)
        return name

    def duration_s(self) -> float:
        """From a part of a step to longer than any silence that is borne."""
        return round(self._rng.choice([0.3, 0.7, 1.5, 3, 6, 6, 9, 20]) * self._rng.uniform(0.7, 1.3), 3)

    def trigger(self, steps: range, *, aimed: bool) -> AtStep | AtMessage:
        """Somewhere in these steps. ``aimed``: at a message of the fault's own target."""
        rng = self._rng
        step = rng.choice(steps)
        if rng.random() < 0.35:
            return AtStep(step=step, offset_s=round(rng.random() * self._step_s, 4))
        message = rng.choice(PHASES[rng.choice(list(PHASES))])
        side = rng.choice(["sent", "received"])
        nth = rng.choice([1, 1, 2, 3, 5]) if aimed else rng.choice([1, 2, 5, 10])
        return AtMessage(message=message, side=side, step=step, nth=nth)

    def fault(self, kind: str) -> dict[str, Any] | None:
        """Whom and how much; None if nobody is left that may be hit."""
        made: Callable[[], dict[str, Any] | None] = getattr(self, f"_{kind}")
        return made()

    def _kill(self) -> dict[str, Any] | None:
        name = self._take()
        back = self.duration_s() if self._rng.random() < 0.4 else None
        return None if name is None else {"peer": name, "returns_after_s": back}

    def _freeze(self) -> dict[str, Any] | None:
        name = self._take()
        return None if name is None else {"peer": name, "duration_s": self.duration_s()}

    _hang = _freeze

    def _reset(self) -> dict[str, Any] | None:
        return {"other": Target()}

    def _pair(self) -> dict[str, Any]:
        a, b = self._rng.sample(sorted(self._peers), 2)
        return {"peer": a, "other": b, "duration_s": self.duration_s()}

    def _drop(self) -> dict[str, Any] | None:
        return self._pair() | {"share": self._rng.choice([0.02, 0.1, 0.3])}

    def _delay(self) -> dict[str, Any] | None:
        latency_s = self._rng.choice([0.05, 0.3, 1.0])
        return self._pair() | {"latency_s": latency_s, "jitter_s": self._rng.choice([0, latency_s])}

    def _slow(self) -> dict[str, Any] | None:
        return self._pair() | {"bytes_per_s": self._rng.choice([50.0, 1000.0])}

    def _one_way(self) -> dict[str, Any] | None:
        name = self._take()
        if name is None:
            return None
        other = self._rng.choice(sorted(self._peers.keys() - {name}))
        everyone = self._rng.random() < 0.5
        return {"peer": name, "other": None if everyone else other, "duration_s": self.duration_s()}

    def _partition(self) -> dict[str, Any] | None:
        wanted = self._rng.choice([1, 1, 2, 3, len(self._peers)])
        side = [name for name in (self._take() for _ in range(wanted)) if name is not None]
        if not side:
            return None
        return {"groups": (tuple(Target(peer=name) for name in side),), "duration_s": self.duration_s()}

    def _join(self) -> dict[str, Any] | None:
        stages = sorted(set(self._peers.values()) - {self._lost})
        return {"stage": self._rng.choice(stages)}


def random_plan(
    seed: int,
    peers: Mapping[str, int],
    *,
    spare_stages: int,
    steps: range,
    step_s: float,
    most: int = 6,
) -> FaultPlan:
    """One to ``most`` faults in ``steps`` among ``peers`` (name -> stage).

    ``spare_stages``: so many stages (not stage 0) a path may do without; one of them may lose all replicas.
    ``step_s``: about how long a step takes, seconds.
    """
    rng = random.Random(f"faults {seed}")
    lost = None
    singles = sorted(set(peers.values()) - {0})
    if spare_stages > 0 and singles and rng.random() < 0.25:
        lost = rng.choice(singles)
    scheduler = Scheduler(rng, peers, lost, step_s)
    plan = FaultPlan(seed=seed)
    victims = sorted(name for name, stage in peers.items() if stage == lost)
    if 2 * len(victims) < len(peers):
        for name in victims:
            scheduler.touched.add(name)
            back = scheduler.duration_s() if rng.random() < 0.4 else None
            kill = plan.add("kill", peer=name, returns_after_s=back)
            plan = kill.triggered(scheduler.trigger(steps, aimed=True))
    for kind in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(1, most)):
        fields = scheduler.fault(kind)
        if fields is not None:
            aimed = fields.get("peer") is not None
            plan = plan.add(kind, **fields).triggered(scheduler.trigger(steps, aimed=aimed))
    return plan
