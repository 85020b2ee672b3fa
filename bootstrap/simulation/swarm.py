"""A swarm of real protocol cores on the simulated network, in virtual time, and what must hold of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootstrap.simulation.fake import SPEC, WIDTH, FakeBackend, FakeBatches
from peer.context import StepRules
from peer.core import Core, CoreOptions
from peer.restore import NO_DISK, Disk
from peer.worker import SimExecutor, TaskKind
from swarm.clock import SimClock
from swarm.events import ListEvents
from swarm.messages import Member, Message, TensorSpec
from swarm.transport.memory import SimNetwork, SimTransport

DURATIONS_S = {
    TaskKind.FORWARD: 0.010,
    TaskKind.BACKWARD: 0.012,
    TaskKind.WEIGHT: 0.008,
    TaskKind.LOSS: 0.004,
    TaskKind.EVALUATE: 0.008,
    TaskKind.SYNC: 0.002,
    TaskKind.BACKGROUND: 0.002,
}


class Broken(AssertionError):
    """A promise that did not hold. ``rule``: lost, double, stuck, diverged or failed."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"{rule}: {why}")
        self.rule = rule
        self.why = why


def hold(truth: object, rule: str, why: object) -> None:
    """Raise ``Broken`` unless it is true."""
    if not truth:
        raise Broken(rule, str(why))


Tap = Callable[[str, str, Message], None]
"""(sender, receiver, message)"""


class TappedTransport:
    """A transport that shows what goes out and what comes in to the test, which may kill a peer just then."""

    def __init__(self, swarm: SimSwarm, inner: SimTransport) -> None:
        self._swarm = swarm
        self._inner = inner
        self.peer_id = inner.peer_id
        self._handler: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, handler: Any) -> None:
        self._handler = handler
        self._inner.start(self)

    def send(self, to: str, message: Message, tensor: Any = None) -> None:
        self._inner.send(to, message, tensor)
        if self._swarm.sent:
            for tap in list(self._swarm.sent):
                tap(self.peer_id, to, message)

    def on_message(self, sender: str, message: Message, tensor: Any) -> None:
        if self._swarm.came:
            for tap in list(self._swarm.came):
                tap(sender, self.peer_id, message)
            self._inner.run(lambda: self._handler.on_message(sender, message, tensor))
        else:
            self._handler.on_message(sender, message, tensor)

    def admit(self, sender: str, message: Message, spec: TensorSpec) -> str | None:
        return self._handler.admit(sender, message, spec)

    def on_link_up(self, peer: str) -> None:
        self._handler.on_link_up(peer)

    def on_link_lost(self, peer: str, reason: str) -> None:
        self._handler.on_link_lost(peer, reason)


class SimPeer:
    """One core with its fake stage."""

    def __init__(
        self, swarm: SimSwarm, name: str, stage: int, incarnation: int = 1, disk: Disk = NO_DISK
    ) -> None:
        self.name = name
        self.stage = stage
        self.incarnation = incarnation
        self.backend = FakeBackend(stage)
        self.backends = [self.backend]
        """Of each stage that it has hosted, the one of its first stage first."""
        transport = TappedTransport(swarm, swarm.network.transport(name))
        clock = swarm.network.clock_of(name)
        self.events = ListEvents(swarm.clock)
        self.pace = swarm.pace[stage] if isinstance(swarm.pace, tuple) else swarm.pace
        """May be changed at any time."""
        self.executor = SimExecutor(clock, lambda kind: self.pace * DURATIONS_S[kind])
        self.failures: list[Exception] = []
        self.dead = False
        self.core = Core(
            CoreOptions(
                stage=stage,
                incarnation=incarnation,
                run_id="sim",
                seed=swarm.seed,
                activation_bytes=32,
                plan_iterations=swarm.plan_iterations,
            ),
            swarm.rules,
            transport=transport,
            clock=clock,
            executor=self.executor,
            backend=self.backend,
            batches=FakeBatches(),
            events=self.events,
            rng=random.Random(f"{swarm.seed}/{name}"),
            sign=lambda payload: b"",
            verify=lambda owner, payload, signature: True,
            on_step=lambda: swarm.began(self),
            on_failed=self.failures.append,
            disk_for=lambda stage: disk,
            backend_for=self._backend if swarm.moves else None,
        )

    def _backend(self, stage: int) -> FakeBackend:
        self.backends.append(made := FakeBackend(stage))
        return made

    @property
    def step(self) -> int:
        return self.core.context.step

    def applied(self) -> dict[tuple[int, int], str]:
        """(stage, step) -> digest of the parameters after it, without steps that the peer took back by
        falling out: what one that was cut off did on its own, before it took the others' state again."""
        digests: dict[tuple[int, int], str] = {}
        last = (-1, -1)
        for _, event, fields in self.events.entries:
            if event in ("stepped", "followed"):
                last = (fields["stage"], fields["step"])
                digests[last] = fields["digest"]
            elif event == "fell_out":
                digests.pop(last, None)
        return digests


class SimSwarm:
    """``replicas[s]`` peers of each stage, all founding members. ``pace``: how long computing takes, as a
    multiple of ``DURATIONS_S``, everywhere or in each stage."""

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
        pace: float | tuple[float, ...] = 1.0,
        moves: bool = False,
        plan_iterations: int = 8,
        **network: Any,
    ) -> None:
        self.seed = seed
        self.pace = pace
        self.plan_iterations = plan_iterations
        self.moves = moves
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
        self.former: list[SimPeer] = []
        """Earlier lives of peers that came back."""
        self.origins: dict[int, tuple[str, ...]] = {}
        """Those of each step's agreed membership, as the first peer that began it knew them."""
        self.sent: list[Tap] = []
        """Called after each send."""
        self.came: list[Tap] = []
        """Called before each delivery."""
        self.begun: list[Callable[[SimPeer], None]] = []
        """Called when a peer has begun a step."""
        self.founders = tuple(
            Member(peer=f"s{stage}r{number}", stage=stage, incarnation=1)
            for stage, count in enumerate(replicas)
            for number in range(count)
        )
        for member in self.founders:
            self.peers[member.peer] = SimPeer(self, member.peer, member.stage)
        self.origins[0] = tuple(m.peer for m in self.founders if m.stage == 0)
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

    def newcomer(self, name: str, stage: int, incarnation: int = 1, disk: Disk = NO_DISK) -> SimPeer:
        """A peer that asks all that live to be admitted."""
        contacts = {peer.name for peer in self.living()} - {name}
        if name in self.peers:
            self.former.append(self.peers[name])
        self.peers[name] = peer = SimPeer(self, name, stage, incarnation, disk)
        peer.core.join(contacts)
        return peer

    def when(
        self, kind: str, act: Callable[[str, str, Any], object], *, step: int = 1, sent: bool = False
    ) -> None:
        """Call ``act(sender, receiver, message)`` for messages of ``kind`` in ``step``, until it is true."""
        taps = self.sent if sent else self.came

        def tap(sender: str, to: str, message: Any) -> None:
            about = message.close.step if message.kind == "decided" else getattr(message, "step", step)
            wanted = message.kind == kind and about == step
            if wanted and tap in taps and act(sender, to, message) and tap in taps:
                taps.remove(tap)

        taps.append(tap)

    def run_to(self, step: int, limit_s: float = 120.0) -> bool:
        """Until every living peer works on ``step`` or a later one."""
        waiting: list[SimPeer] = []

        def reached() -> bool:
            """Looks at one who is behind; at all only when nobody known is."""
            while waiting and (waiting[-1].dead or waiting[-1].step >= step):
                waiting.pop()
            if not waiting:
                waiting.extend(peer for peer in self.living() if peer.step < step)
            return not waiting

        return self.clock.run_until(reached, limit_s)

    def check(self) -> None:
        """What must hold at any time: one history, identical replicas, counts as the close says.

        Raises Broken with the rule that does not hold.
        """
        closes: dict[int, Any] = {}
        digests: dict[tuple[int, int], dict[str, str]] = {}
        for peer in self.lives():
            hold(not peer.failures, "failed", f"{peer.name}: {peer.failures}")
            for closed in peer.events.of("closed"):
                known = closes.setdefault(closed["step"], closed)
                hold(known == closed, "diverged", f"two histories of step {closed['step']}")
            for place, digest in peer.applied().items():
                digests.setdefault(place, {})[f"{peer.name}/{peer.incarnation}"] = digest
        for (stage, step), by_peer in digests.items():
            hold(len(set(by_peer.values())) == 1, "diverged", f"stage {stage} in step {step}: {by_peer}")
        for step, closed in closes.items():
            indices = [entry[0] for entry in closed["counted"]]
            hold(len(indices) == len(set(indices)), "double", f"step {step} counts {indices}")
        for peer in self.lives():
            for backend in peer.backends:
                self._check_counts(peer, backend, closes)

    def _check_counts(self, peer: SimPeer, backend: FakeBackend, closes: dict[int, Any]) -> None:
        """Each average holds exactly the microbatches of the close that its roster computed, once each."""
        rosters = {
            averaged["step"]: averaged["members"]
            for averaged in peer.events.of("averaged")
            if averaged["stage"] == backend.stage
        }
        for step, average in backend.history:
            if step not in rosters:
                continue  # followed as a learner: the digest was that of the others' average
            expected = [0] * WIDTH
            for index, _, _, path, _ in closes[step]["counted"]:
                for hop in path:
                    stage, _, name = hop.partition(":")
                    expected[index] += stage == str(backend.stage) and name in rosters[step]
            hold(max(expected) <= 1, "double", f"step {step} in stage {backend.stage}: {expected}")
            for index, count in enumerate(average):
                rule = "double" if count > expected[index] else "lost"
                what = f"{peer.name} applied {count} of {expected[index]} of index {index} in step {step}"
                hold(count == expected[index], rule, what)

    def of(self, event: str) -> list[tuple[str, dict[str, Any]]]:
        """(peer, fields) of each such event of any peer."""
        return [(peer.name, fields) for peer in self.lives() for fields in peer.events.of(event)]

    def trace(self) -> list[tuple[Any, ...]]:
        """Everything that happened, for comparing two runs."""
        return [(p.name, *entry) for p in self.lives() for entry in p.events.entries]

    def save_logs(self, folder: Path) -> None:
        """Write what each peer's event log would hold, a file for each life."""
        for number, peer in enumerate(self.lives()):
            (folder / f"{peer.name}-{number}.jsonl").write_text("".join(peer.events.lines(peer.name)))

    def wasted(self, step: int) -> dict[tuple[str, int], int]:
        """(peer, index) -> forward computations of a living peer that differ from what counted there: once
        if it is on the committed path, else never."""
        made: Counter[tuple[str, int]] = Counter()
        for peer in self.living():
            for (at, index), times in peer.backend.forwards.items():
                if at == step:
                    made[peer.name, index] += times
        for index, _, _, path, _ in self.close_of(step)["counted"]:
            for hop in path:
                name = hop.partition(":")[2]
                if not self.peers[name].dead:
                    made[name, index] -= 1
        return {key: times for key, times in made.items() if times}

    def forwards(self, step: int) -> int:
        """Forward computations of ``step``, the origins' own among them, by all peers that ever lived."""
        return sum(
            times for peer in self.lives() for (at, _), times in peer.backend.forwards.items() if at == step
        )

    def close_of(self, step: int) -> dict[str, Any]:
        """What was decided for ``step``."""
        return next(fields for _, fields in self.of("closed") if fields["step"] == step)

    def counted(self, step: int) -> int:
        """Microbatches that count in ``step``."""
        closes = [fields for _, fields in self.of("closed") if fields["step"] == step]
        return len(closes[0]["counted"]) if closes else 0

    def began(self, peer: SimPeer) -> None:
        context = peer.core.context
        known = self.origins.setdefault(context.step, context.origins_of_step)
        hold(known == context.origins_of_step, "diverged", f"two memberships of step {context.step}")
        for told in self.begun:
            told(peer)

    def new_epoch(self, step: int, members: tuple[Member, ...]) -> None:
        """They begin ``step`` again: what an older epoch decided of it and later is no history any more."""
        for peer in self.lives():
            peer.events.entries = [
                entry
                for entry in peer.events.entries
                if entry[1] not in ("closed", "averaged", "stepped", "followed") or entry[2]["step"] < step
            ]
        self.origins = {at: origins for at, origins in self.origins.items() if at < step}
        self.origins[step] = tuple(sorted(member.peer for member in members if member.stage == 0))

    def lives(self) -> list[SimPeer]:
        """Every peer in each of its lives."""
        return [*self.former, *self.peers.values()]

    def whole(self) -> None:
        """``check``, and every microbatch that the origins of each step drew was counted in it."""
        self.check()
        drawn = self.rules.microbatches_per_origin
        for step in range(min(peer.step for peer in self.living())):
            indices = [entry[0] for entry in self.close_of(step)["counted"]]
            expected = list(range(drawn * len(self.origins[step])))
            hold(indices == expected, "lost", f"step {step} counts {indices} of {len(expected)}")
