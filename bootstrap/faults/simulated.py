"""A fault plan carried out on the simulated swarm: the same plan gives the same run to the last event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

from bootstrap.faults.plan import (
    AnyFault,
    AtMessage,
    AtStep,
    AtTime,
    Delay,
    DiskFull,
    Drop,
    FaultPlan,
    FaultPlanError,
    Freeze,
    Hang,
    Join,
    Kill,
    OneWay,
    Partition,
    Reset,
    Slow,
    Target,
)
from bootstrap.simulation.swarm import SimPeer, SimSwarm
from swarm.messages import Message
from swarm.transport.memory import LinkModel, SimNetwork

LIFE = 1024
"""Incarnations of one life of a machine: falling out and coming in again takes one more within it."""

Ends = tuple[str, str]
"""Whose message pulled a trigger, and that message's other end."""
Undo = Callable[[], None]


class Conditions:
    """What lies over the network's links while faults last: several may hit one link at once."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._base: dict[tuple[str, str], LinkModel] = {}
        self._changes: list[tuple[frozenset[tuple[str, str]], Callable[[LinkModel], LinkModel]]] = []
        self._splits: list[dict[str, int]] = []
        self._blocked: list[frozenset[tuple[str, str]]] = []

    def change(self, pairs: frozenset[tuple[str, str]], how: Callable[[LinkModel], LinkModel]) -> Undo:
        """Alter these links, each in its direction, until the returned call."""
        for pair in pairs:
            self._base.setdefault(pair, self._network.link(*pair))
        entry = (pairs, how)
        self._changes.append(entry)
        self._refresh(pairs)

        def undo() -> None:
            self._changes = [other for other in self._changes if other is not entry]
            self._refresh(pairs)

        return undo

    def _refresh(self, pairs: frozenset[tuple[str, str]]) -> None:
        for pair in sorted(pairs):
            model = self._base[pair]
            for others, how in self._changes:
                if pair in others:
                    model = how(model)
            self._network.set_link(*pair, model, both=False)

    def split(self, group_of: dict[str, int]) -> Undo:
        """Peers of different groups do not reach each other until the returned call."""
        self._splits.append(group_of)
        self._cut()

        def undo() -> None:
            self._splits = [other for other in self._splits if other is not group_of]
            self._cut()

        return undo

    def block(self, pairs: frozenset[tuple[str, str]]) -> Undo:
        """Nothing comes from the first to the second of each pair until the returned call."""
        self._blocked.append(pairs)
        self._cut()

        def undo() -> None:
            self._blocked = [other for other in self._blocked if other is not pairs]
            self._cut()

        return undo

    def _cut(self) -> None:
        """Those reach each other that no split parts; whom none names is with the rest, newcomers too."""
        named = {peer for split in self._splits for peer in split}
        group_of: dict[str, Hashable] = {
            peer: tuple(split.get(peer, -1) for split in self._splits) for peer in named
        }
        self._network.cut(group_of, frozenset().union(*self._blocked))


class SimulatedFaults:
    """Carries out ``plan`` on ``swarm`` from now on.

    ``fired[n]``: how often the plan's fault number ``n`` happened; one whose target lives no more does not.
    ``active``: faults that go on; ``log``: (time_s, number, kind, whom).

    Raises FaultPlanError for a fault that the simulated swarm cannot have.
    """

    def __init__(self, swarm: SimSwarm, plan: FaultPlan) -> None:
        self._swarm = swarm
        self._conditions = Conditions(swarm.network)
        self._founders = tuple(member.peer for member in swarm.founders)
        self._frozen: Counter[str] = Counter()
        self._rngs = [random.Random(f"{plan.seed}/{number}") for number in range(len(plan.faults))]
        self._seen: Counter[int] = Counter()
        self._waiting: dict[tuple[str, str], list[tuple[int, AnyFault, AtMessage]]] = {}
        self._steps: list[tuple[int, AnyFault, AtStep]] = []
        self._newest = max(peer.step for peer in swarm.living())
        self._disarmed = False
        self.plan = plan
        self.fired: Counter[int] = Counter()
        self.active = 0
        self.log: list[tuple[float, int, str, tuple[str, ...]]] = []
        for number, fault in enumerate(plan.faults):
            if isinstance(fault, DiskFull):
                raise FaultPlanError(
                    f"faults[{number}]: simulated peers write nothing to a disk; try disk_full with processes"
                )
            self._arm(number, fault, fault.trigger)
        if any(side == "sent" for side, _ in self._waiting):
            swarm.sent.append(lambda sender, to, message: self._message("sent", sender, to, message))
        if any(side == "received" for side, _ in self._waiting):
            swarm.came.append(lambda sender, to, message: self._message("received", to, sender, message))
        if self._steps:
            swarm.begun.append(self._began)

    def fired_kinds(self) -> Counter[str]:
        """How often each kind of fault happened."""
        kinds: Counter[str] = Counter()
        for number, times in self.fired.items():
            kinds[self.plan.faults[number].kind] += times
        return kinds

    def disarm(self) -> None:
        """Nothing new happens from now on; what goes on is still undone in its time."""
        self._disarmed = True

    # -- triggers ------------------------------------------------------------------------------------------

    def _arm(self, number: int, fault: AnyFault, trigger: AtTime | AtStep | AtMessage) -> None:
        if isinstance(trigger, AtTime):
            self._swarm.clock.call_later(trigger.time_s, self._fire, number, fault, None)
        elif isinstance(trigger, AtMessage):
            self._waiting.setdefault((trigger.side, trigger.message), []).append((number, fault, trigger))
        else:
            self._steps.append((number, fault, trigger))
            if trigger.step == self._newest:
                self._step_comes(number, fault, trigger)

    def _began(self, peer: SimPeer) -> None:
        if peer.step > self._newest:
            self._newest = peer.step
            for number, fault, trigger in self._steps:
                if trigger.step in (None, peer.step):
                    self._step_comes(number, fault, trigger)

    def _step_comes(self, number: int, fault: AnyFault, trigger: AtStep) -> None:
        if self._rngs[number].random() < trigger.probability:
            self._seen[number] += 1
            if trigger.times is None or self._seen[number] <= trigger.times:
                self._swarm.clock.call_later(trigger.offset_s, self._fire, number, fault, None)

    def _message(self, side: str, subject: str, other: str, message: Message) -> None:
        waiting = self._waiting.get((side, message.kind))
        if waiting is None or self._disarmed or subject == other:
            return
        peer = self._swarm.peers[subject]
        for entry in list(waiting):
            number, fault, trigger = entry
            close = getattr(message, "close", None)
            step = getattr(message, "step", peer.step) if close is None else close.step
            if trigger.step not in (None, step) or not self._concerns(fault, trigger, peer):
                continue
            self._seen[number] += 1
            if self._seen[number] >= trigger.nth and self._rngs[number].random() < trigger.probability:
                self._fire(number, fault, (subject, other))
                if trigger.times is not None and self.fired[number] >= trigger.times:
                    waiting.remove(entry)

    def _concerns(self, fault: AnyFault, trigger: AtMessage, peer: SimPeer) -> bool:
        if trigger.stage is not None:
            return peer.stage == trigger.stage
        return isinstance(fault, Join | Partition) or peer.name in self._fitting(fault.target)

    # -- targets -------------------------------------------------------------------------------------------

    def _fitting(self, target: Target) -> list[str]:
        """The living peers that fit, by name."""
        named = target.peer
        if named is not None and named.isdecimal():
            number = int(named)
            named = self._founders[number] if number < len(self._founders) else ""
        peers = self._swarm.peers
        if target.stage is not None:
            names = sorted(name for name, peer in peers.items() if peer.stage == target.stage)
            if target.replica is not None:
                names = names[target.replica : target.replica + 1]
        else:
            names = sorted(peers) if named is None else [named]
        return [name for name in names if name in peers and not peers[name].dead]

    def _pick(
        self, number: int, target: Target, first: str | None, without: tuple[str, ...] = ()
    ) -> str | None:
        names = [name for name in self._fitting(target) if name not in without]
        if first in names:
            return first
        return self._rngs[number].choice(names) if names else None

    # -- what happens --------------------------------------------------------------------------------------

    def _fire(self, number: int, fault: AnyFault, ends: Ends | None) -> None:
        if self._disarmed:
            return
        whom = self._carry_out(number, fault, ends)
        if whom:
            self.fired[number] += 1
            self.log.append((self._swarm.clock.now(), number, fault.kind, whom))

    def _carry_out(self, number: int, fault: AnyFault, ends: Ends | None) -> tuple[str, ...]:
        """Those that it hit; none if nobody is left to be hit."""
        if isinstance(fault, Join):
            name = f"new{number}.{self.fired[number]}"
            self._swarm.newcomer(name, fault.stage)
            return (name,)
        if isinstance(fault, Partition):
            return self._partition(number, fault, ends)
        target = self._pick(number, fault.target, ends[0] if ends else None)
        if target is None:
            return ()
        if isinstance(fault, Kill):
            self._kill(target, fault)
        elif isinstance(fault, Freeze):
            self._freeze(target, fault)
        elif isinstance(fault, Hang):
            self._swarm.peers[target].executor.hang(fault.duration_s)
            self._during(fault.duration_s, lambda: None)
        elif not isinstance(fault, DiskFull):
            return self._link_fault(number, fault, target, ends)
        return (target,)

    def _during(self, duration_s: float, undo: Undo) -> None:
        self.active += 1

        def end() -> None:
            self.active -= 1
            undo()

        self._swarm.clock.call_later(duration_s, end)

    def _kill(self, name: str, fault: Kill) -> None:
        peer = self._swarm.peers[name]
        self._swarm.kill(name)
        if fault.returns_after_s is not None:
            life = (peer.core.context.incarnation // LIFE + 1) * LIFE + 1
            self._during(fault.returns_after_s, lambda: self._return(name, peer.stage, life))

    def _return(self, name: str, stage: int, incarnation: int) -> None:
        self._swarm.newcomer(name, stage, incarnation)

    def _freeze(self, name: str, fault: Freeze) -> None:
        self._frozen[name] += 1
        self._swarm.network.freeze(name)

        def thaw() -> None:
            self._frozen[name] -= 1
            if not self._frozen[name]:
                self._swarm.network.thaw(name)

        self._during(fault.duration_s, thaw)

    def _link_fault(
        self, number: int, fault: Reset | Drop | Delay | Slow | OneWay, target: str, ends: Ends | None
    ) -> tuple[str, ...]:
        others = sorted(name for name in self._swarm.peers if name != target)
        if fault.other is not None:
            other = self._pick(number, fault.other, ends[1] if ends else None, (target,))
            others = [] if other is None else [other]
        if not others:
            return ()
        if isinstance(fault, Reset):
            # Never from within a send: a transport tells of a loss by itself.
            for other in others:
                self._swarm.clock.call_later(0.0, self._swarm.network.reset, target, other)
        elif isinstance(fault, OneWay):
            pairs = frozenset((other, target) for other in others)
            self._during(fault.duration_s, self._conditions.block(pairs))
        else:
            both = frozenset(pair for other in others for pair in ((other, target), (target, other)))
            self._during(fault.duration_s, self._conditions.change(both, _change_of(fault)))
        return (target, *others) if fault.other is not None else (target,)

    def _partition(self, number: int, fault: Partition, ends: Ends | None) -> tuple[str, ...]:
        group_of: dict[str, int] = {}
        for place, group in enumerate(fault.groups):
            for target in group:
                name = self._pick(number, target, ends[0] if ends else None, tuple(group_of))
                if name is not None:
                    group_of[name] = place
        if not group_of:
            return ()
        whom = tuple(sorted(group_of))
        self._during(fault.duration_s, self._conditions.split(group_of))
        return whom


def _change_of(fault: Drop | Delay | Slow) -> Callable[[LinkModel], LinkModel]:
    if isinstance(fault, Drop):
        return lambda link: replace(link, loss=1 - (1 - link.loss) * (1 - fault.share))
    if isinstance(fault, Delay):
        return lambda link: replace(
            link, latency_s=link.latency_s + fault.latency_s, jitter_s=link.jitter_s + fault.jitter_s
        )
    return lambda link: replace(
        link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, fault.bytes_per_s)
    )
