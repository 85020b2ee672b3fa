"""One random swarm, one random fault plan, and the verdict: what ``benchmarks/faults.py`` does ten thousand
times and the test suite two hundred times."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from bootstrap.faults.plan import FaultPlan
from bootstrap.faults.schedule import random_plan
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.swarm import DURATIONS_S, Broken, SimSwarm, hold
from peer.worker import TaskKind
from swarm.transport.memory import LinkModel

FAULTY_STEPS = range(1, 4)
"""Steps in which faults begin."""
STEPS_AFTER = 2
"""Steps that must be made when everything is healed."""
SIZES = {(6, 8): 70, (9, 12): 20, (13, 18): 8, (19, 30): 2}
"""Least and most peers of a swarm, and of a hundred swarms how many: in a small one more is the last of its
kind, and a schedule costs as the square."""
LONG_SHARE = 0.03
"""Of the swarms, those whose steps are long against every fault, with many microbatches under way."""
START_LIMIT_S = 60.0
FAULTS_LIMIT_S = 180.0
HEAL_LIMIT_S = 60.0
AFTER_LIMIT_S = 180.0
"""Virtual time that each part of a trial may take before the swarm counts as stuck; three times as much where
steps are long."""


@dataclass
class Outcome:
    """What came of one seed. ``rule``: which promise was broken (``Broken.rule``), "" if none was."""

    seed: int
    rule: str = ""
    why: str = ""
    peers: int = 0
    steps: int = 0
    fired: Counter[str] = field(default_factory=Counter)


class Trial:
    """The swarm and the plan of ``seed``; ``run`` carries it through."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = random.Random(f"trial {seed}")
        replicas = _shape(rng)
        length = rng.randint(max(2, len(replicas) - 2), len(replicas))
        self.long = long = rng.random() < LONG_SHARE
        drawn = rng.choice([6, 8] if long else [1, 2, 3])
        step_s = rng.choice([12.0, 30.0] if long else [0.7, 1.5, 4.0])
        pace = step_s / _work_s(replicas, length, drawn)
        link = LinkModel(
            latency_s=rng.choice([0.002, 0.01, 0.05, 0.15]),
            jitter_s=rng.choice([0.0, 0.0, 0.01, 0.05]),
            loss=rng.choice([0.0, 0.0, 0.0, 0.01]),
        )
        self.swarm = SimSwarm(
            replicas,
            seed=seed,
            path_length=length,
            microbatches_per_origin=drawn,
            memory_slots=rng.choice([3, 6, 10] if long else [1, 2, 4]),
            validation_every=rng.choice([0, 0, 0, 0, 2]),
            pace=pace,
            plan_iterations=1,
            default_link=link,
            moves=rng.random() < 0.25,
        )
        self.plan: FaultPlan = random_plan(
            seed,
            {member.peer: member.stage for member in self.swarm.founders},
            spare_stages=len(replicas) - self.swarm.rules.min_path_length,
            steps=FAULTY_STEPS,
            step_s=step_s,
        )
        self.faults: SimulatedFaults | None = None

    def run(self) -> Outcome:
        """Carry the plan out; what is broken is in the outcome."""
        swarm = self.swarm
        outcome = Outcome(self.seed, peers=len(swarm.peers))
        try:
            self._suffer()
            swarm.whole()
        except Broken as broken:
            outcome.rule, outcome.why = broken.rule, broken.why
        except Exception as error:  # whatever a peer's own code raised, in the simulated network's turn
            outcome.rule, outcome.why = "failed", f"{type(error).__name__}: {error}"
        outcome.steps = max(peer.step for peer in swarm.peers.values())
        if self.faults is not None:
            outcome.fired = self.faults.fired_kinds()
        return outcome

    def _suffer(self) -> None:
        swarm, clock, scale = self.swarm, self.swarm.clock, 3 if self.long else 1
        hold(swarm.run_to(FAULTY_STEPS.start, START_LIMIT_S * scale), "stuck", "before any fault")
        self.faults = faults = SimulatedFaults(swarm, self.plan)
        hold(self._some_peer_reaches(FAULTY_STEPS.stop, FAULTS_LIMIT_S * scale), "stuck", self._where())
        faults.disarm()
        clock.run_until(lambda: not faults.active, HEAL_LIMIT_S)
        target = max(peer.step for peer in swarm.living()) + STEPS_AFTER
        hold(swarm.run_to(target, AFTER_LIMIT_S * scale), "stuck", self._where())
        back = clock.run_until(
            lambda: all(p.core.context.active for p in swarm.living()), AFTER_LIMIT_S * scale
        )
        hold(back, "stuck", f"not taken in again: {self._where()}")

    def _some_peer_reaches(self, step: int, limit_s: float) -> bool:
        newest = max(peer.step for peer in self.swarm.living())

        def began(peer: object) -> None:
            nonlocal newest
            newest = max(newest, peer.step)  # type: ignore[attr-defined]

        self.swarm.begun.append(began)
        return self.swarm.clock.run_until(lambda: newest >= step, limit_s)

    def _where(self) -> str:
        """Each living peer's step and state."""
        return " ".join(
            f"{peer.name}@{peer.step}{'' if peer.core.context.active else '?'}"
            for peer in self.swarm.living()
        )


def _work_s(replicas: tuple[int, ...], length: int, drawn: int) -> float:
    """About how long a step takes at pace 1: what the busiest stage has to do, and one way there and back."""
    one_s = DURATIONS_S[TaskKind.FORWARD] + DURATIONS_S[TaskKind.BACKWARD] + DURATIONS_S[TaskKind.WEIGHT]
    visits = replicas[0] * drawn * (length - 1) / (len(replicas) - 1)
    return one_s * (max(drawn, visits / min(replicas[1:])) + length)


def _shape(rng: random.Random) -> tuple[int, ...]:
    """Replicas of each stage: two to four origins, at least one peer of every other stage."""
    peers = rng.randint(*rng.choices(list(SIZES), list(SIZES.values()))[0])
    origins = rng.choice([2, 2, 3, 4])
    stages = rng.randint(2, min(5, 1 + (peers - origins) // 2))
    replicas = [origins] + [1] * (stages - 1)
    while sum(replicas) < peers:
        replicas[rng.randrange(1, stages)] += 1
    return tuple(replicas)


def run(seed: int) -> Outcome:
    """The outcome of one seed."""
    return Trial(seed).run()
