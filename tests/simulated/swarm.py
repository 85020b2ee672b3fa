"""A swarm of real protocol cores on the simulated network, in virtual time, and what must hold of it."""

from __future__ import annotations

import random
from typing import Any

from peer.context import StepRules
from peer.core import Core, CoreOptions
from peer.worker import SimExecutor, TaskKind
from swarm.clock import SimClock
from swarm.events import ListEvents
from swarm.messages import Member
from swarm.transport.memory import SimNetwork
from tests.simulated.fake import SPEC, WIDTH, FakeBackend, FakeBatches

DURATIONS_S = {
    TaskKind.FORWARD: 0.010,
    TaskKind.BACKWARD: 0.012,
    TaskKind.WEIGHT: 0.008,
    TaskKind.LOSS: 0.004,
    TaskKind.EVALUATE: 0.008,
    TaskKind.SYNC: 0.002,
    TaskKind.BACKGROUND: 0.002,
}


class SimPeer:
    """One core with its fake stage."""

    def __init__(self, swarm: SimSwarm, name: str, stage: int, incarnation: int = 1) -> None:
        self.name = name
        self.stage = stage
        self.backend = FakeBackend(stage)
        transport = swarm.network.transport(name)
        clock = swarm.network.clock_of(name)
        self.events = ListEvents(swarm.clock)
        self.failures: list[Exception] = []
        self.dead = False
        self.core = Core(
            CoreOptions(
                stage=stage, incarnation=incarnation, run_id="sim", seed=swarm.seed, activation_bytes=32
            ),
            swarm.rules,
            transport=transport,
            clock=clock,
            executor=SimExecutor(clock, lambda kind: DURATIONS_S[kind]),
            backend=self.backend,
            batches=FakeBatches(),
            events=self.events,
            rng=random.Random(f"{swarm.seed}/{name}"),
            sign=lambda payload: b"",
            verify=lambda owner, payload, signature: True,
            on_failed=self.failures.append,
        )

    @property
    def step(self) -> int:
        return self.core.context.step

    def applied(self) -> dict[int, str]:
        """step -> digest of the parameters after it, without steps that the peer took back by falling out:
        what one that was cut off did on its own, before it took the others' state again."""
        digests: dict[int, str] = {}
        last = -1
        for _, event, fields in self.events.entries:
            if event in ("stepped", "followed"):
                last = fields["step"]
                digests[last] = fields["digest"]
            elif event == "fell_out":
                digests.pop(last, None)
        return digests


class SimSwarm:
    """``replicas[s]`` peers of each stage, all founding members."""

    def __init__(
        self,
        replicas: tuple[int, ...],
        *,
        seed: int = 0,
        path_length: int | None = None,
        microbatches_per_origin: int = 6,
        total_steps: int = 1000,
        memory_slots: int = 8,
        validation_every: int = 0,
        **network: Any,
    ) -> None:
        self.seed = seed
        self.clock = SimClock()
        self.network = SimNetwork(self.clock, seed, **network)
        length = path_length or len(replicas)
        self.rules = StepRules(
            stages=len(replicas),
            path_length=length,
            min_path_length=max(1, length - 1),
            microbatches_per_origin=microbatches_per_origin,
            memory_slots=memory_slots,
            total_steps=total_steps,
            validation_every=validation_every,
            validation_microbatches=2,
            activation=SPEC,
        )
        self.peers: dict[str, SimPeer] = {}
        self.founders = tuple(
            Member(peer=f"s{stage}r{number}", stage=stage, incarnation=1)
            for stage, count in enumerate(replicas)
            for number in range(count)
        )
        for member in self.founders:
            self.peers[member.peer] = SimPeer(self, member.peer, member.stage)
        for peer in self.peers.values():
            peer.core.found(self.founders)

    def living(self) -> list[SimPeer]:
        return [peer for peer in self.peers.values() if not peer.dead]

    def kill(self, name: str) -> None:
        """The process is gone: no message leaves it any more, its links break."""
        peer = self.peers[name]
        peer.dead = True
        peer.core.close()
        self.network.crash(name)

    def newcomer(self, name: str, stage: int) -> SimPeer:
        """A peer that asks all that live to be admitted."""
        contacts = {peer.name for peer in self.living()}
        self.peers[name] = peer = SimPeer(self, name, stage)
        peer.core.join(contacts)
        return peer

    def run_to(self, step: int, limit_s: float = 120.0) -> bool:
        """Until every living peer works on ``step`` or a later one."""
        return self.clock.run_until(lambda: all(p.step >= step for p in self.living()), limit_s)

    def check(self) -> None:
        """What must hold at any time: one history, identical replicas, counts as the close says."""
        closes: dict[int, Any] = {}
        digests: dict[tuple[int, int], dict[str, str]] = {}
        for peer in self.peers.values():
            assert not peer.failures, (peer.name, peer.failures)
            for closed in peer.events.of("closed"):
                known = closes.setdefault(closed["step"], closed)
                assert known == closed, f"two histories of step {closed['step']}"
            for step, digest in peer.applied().items():
                digests.setdefault((peer.stage, step), {})[peer.name] = digest
        for (stage, step), by_peer in digests.items():
            assert len(set(by_peer.values())) == 1, f"stage {stage} diverged in step {step}: {by_peer}"
        for step, closed in closes.items():
            indices = [entry[0] for entry in closed["counted"]]
            assert len(indices) == len(set(indices)), f"a microbatch counts twice in step {step}"
        for peer in self.peers.values():
            self._check_counts(peer, closes)

    def _check_counts(self, peer: SimPeer, closes: dict[int, Any]) -> None:
        """Each average holds exactly the microbatches of the close that its roster computed, once each."""
        rosters = {averaged["step"]: averaged["members"] for averaged in peer.events.of("averaged")}
        for step, average in peer.backend.history:
            if step not in rosters:
                continue  # followed as a learner: the digest was that of the others' average
            expected = [0] * WIDTH
            for index, _, _, path, _ in closes[step]["counted"]:
                for hop in path:
                    stage, _, name = hop.partition(":")
                    expected[index] += stage == str(peer.stage) and name in rosters[step]
            assert list(average) == expected, (peer.name, step)
            assert max(expected) <= 1

    def counted(self, step: int) -> int:
        """Microbatches that count in ``step``."""
        for peer in self.peers.values():
            for closed in peer.events.of("closed"):
                if closed["step"] == step:
                    return len(closed["counted"])
        return 0
