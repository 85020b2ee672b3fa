"""A fault plan carried out on the simulated swarm: the same plan gives the same run to the last event."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from bootstrap.faults.driver import FaultDriver, LinkFault, Undo
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
    Hang,
    Join,
    Kill,
    OneWay,
    Partition,
    Reset,
    Slow,
)
from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Message
from swarm.transport.memory import LinkModel, SimNetwork

LIFE = 1024
"""Incarnations of one life of a machine: falling out and coming in again takes one more within it."""

T = TypeVar("T")


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
        return self._hold(self._splits, group_of)

    def block(self, pairs: frozenset[tuple[str, str]]) -> Undo:
        """Nothing comes from the first to the second of each pair until the returned call."""
        return self._hold(self._blocked, pairs)

    def _hold(self, cuts: list[T], cut: T) -> Undo:
        cuts.append(cut)
        self._cut()

        def undo() -> None:
            cuts[:] = [other for other in cuts if other is not cut]
            self._cut()

        return undo

    def _cut(self) -> None:
        """Those reach each other that no split parts; whom none names is with the rest, newcomers too."""
        named = {peer for split in self._splits for peer in split}
        group_of: dict[str, Hashable] = {
            peer: tuple(split.get(peer, -1) for split in self._splits) for peer in named
        }
        self._network.cut(group_of, frozenset().union(*self._blocked))


class SimulatedFaults(FaultDriver):
    """Carries out ``plan`` on ``swarm`` from now on.

    Raises FaultPlanError for a fault that the simulated swarm cannot have.
    """

    def __init__(self, swarm: SimSwarm, plan: FaultPlan) -> None:
        super().__init__(plan, tuple(member.peer for member in swarm.founders))
        self._swarm = swarm
        self._conditions = Conditions(swarm.network)
        self._waiting: dict[tuple[str, str], list[tuple[int, AnyFault, AtMessage]]] = {}
        self._newest = max(peer.step for peer in swarm.living())
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
            swarm.begun.append(lambda peer: self._step_begins(peer.step))

    # -- triggers ------------------------------------------------------------------------------------------

    def _arm(self, number: int, fault: AnyFault, trigger: AtTime | AtStep | AtMessage) -> None:
        if isinstance(trigger, AtTime):
            self._after(trigger.time_s, lambda: self._fire(number, fault))
        elif isinstance(trigger, AtMessage):
            self._waiting.setdefault((trigger.side, trigger.message), []).append((number, fault, trigger))
        else:
            self._await_step(number, fault, trigger)

    def _message(self, side: str, subject: str, other: str, message: Message) -> None:
        waiting = self._waiting.get((side, message.kind))
        if waiting is None or self._disarmed or subject == other:
            return
        peer = self._swarm.peers[subject]
        for entry in list(waiting):
            number, fault, trigger = entry
            close = getattr(message, "close", None)
            step = getattr(message, "step", peer.step) if close is None else close.step
            if trigger.step not in (None, step) or not self._concerns(fault, trigger, subject):
                continue
            self._seen[number] += 1
            if self._seen[number] >= trigger.nth and self._rngs[number].random() < trigger.probability:
                self._fire(number, fault, (subject, other))
                if trigger.times is not None and self.fired[number] >= trigger.times:
                    waiting.remove(entry)

    def _concerns(self, fault: AnyFault, trigger: AtMessage, name: str) -> bool:
        if trigger.stage is not None:
            return self._swarm.peers[name].stage == trigger.stage
        return isinstance(fault, Join | Partition) or name in self._fitting(fault.target)

    # -- the swarm -----------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._swarm.clock.now()

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._swarm.clock.call_later(delay_s, act)

    def _hosts(self) -> Mapping[str, int]:
        return {name: peer.stage for name, peer in self._swarm.peers.items()}

    def _lives(self, name: str) -> bool:
        return not self._swarm.peers[name].dead

    def _come(self, number: int, stage: int) -> str:
        name = f"new{number}.{self.fired[number]}"
        self._swarm.newcomer(name, stage)
        return name

    def _kill(self, name: str, fault: Kill) -> None:
        peer = self._swarm.peers[name]
        self._swarm.kill(name)
        if fault.returns_after_s is not None:
            life = (peer.core.context.incarnation // LIFE + 1) * LIFE + 1
            self._during(fault.returns_after_s, lambda: self._return(name, peer.stage, life))

    def _return(self, name: str, stage: int, incarnation: int) -> None:
        self._swarm.newcomer(name, stage, incarnation)

    def _stop(self, name: str) -> None:
        self._swarm.network.freeze(name)

    def _thaw(self, name: str) -> None:
        self._swarm.network.thaw(name)

    def _disturb(self, name: str, fault: Hang | DiskFull) -> None:
        self._swarm.peers[name].executor.hang(fault.duration_s)
        self._during(fault.duration_s, lambda: None)

    def _strain(self, fault: LinkFault, target: str, others: list[str]) -> None:
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

    def _split(self, group_of: dict[str, int], duration_s: float) -> None:
        self._during(duration_s, self._conditions.split(group_of))


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
