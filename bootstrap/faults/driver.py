"""What drivers of a fault plan share, whatever the swarm: triggers by step, targets, what fired how often."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping

from bootstrap.faults.plan import (
    AnyFault,
    AtStep,
    Delay,
    DiskFull,
    Drop,
    FaultPlan,
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

Ends = tuple[str, str | None]
"""Whose message pulled a trigger, and that message's other end where it is known."""
Undo = Callable[[], None]
LinkFault = Reset | Drop | Delay | Slow | OneWay


class FaultDriver(ABC):
    """Carries out ``plan`` on a swarm whose ``founders`` are named in their order.

    ``fired[n]``: how often the plan's fault number ``n`` happened; one whose target lives no more does not.
    ``active``: faults that go on; ``log``: (time_s, number, kind, whom).
    """

    def __init__(self, plan: FaultPlan, founders: tuple[str, ...]) -> None:
        self.plan = plan
        self.fired: Counter[int] = Counter()
        self.active = 0
        self.log: list[tuple[float, int, str, tuple[str, ...]]] = []
        self._founders = founders
        self._rngs = [random.Random(f"{plan.seed}/{number}") for number in range(len(plan.faults))]
        self._seen: Counter[int] = Counter()
        self._steps: list[tuple[int, AnyFault, AtStep]] = []
        self._newest = -1
        """The step that the first peer has begun."""
        self._frozen: Counter[str] = Counter()
        self._disarmed = False

    def fired_kinds(self) -> Counter[str]:
        """How often each kind of fault happened."""
        kinds: Counter[str] = Counter()
        for number, times in self.fired.items():
            kinds[self.plan.faults[number].kind] += times
        return kinds

    def disarm(self) -> None:
        """Nothing new happens from now on; what goes on is still undone in its time."""
        self._disarmed = True

    # -- the swarm -----------------------------------------------------------------------------------------

    @abstractmethod
    def _now(self) -> float:
        """On the scale of ``log``."""

    @abstractmethod
    def _after(self, delay_s: float, act: Callable[[], None]) -> None: ...

    @abstractmethod
    def _hosts(self) -> Mapping[str, int]:
        """Every peer that there was, by name, with its stage."""

    @abstractmethod
    def _lives(self, name: str) -> bool: ...

    def _around(self) -> list[str]:
        """Peers whose links a fault of one peer's network strains."""
        return sorted(self._hosts())

    @abstractmethod
    def _come(self, number: int, stage: int) -> str:
        """A newcomer, by its name."""

    @abstractmethod
    def _kill(self, name: str, fault: Kill) -> None: ...

    @abstractmethod
    def _stop(self, name: str) -> None:
        """As SIGSTOP."""

    @abstractmethod
    def _thaw(self, name: str) -> None: ...

    @abstractmethod
    def _disturb(self, name: str, fault: Hang | DiskFull) -> None: ...

    @abstractmethod
    def _strain(self, fault: LinkFault, target: str, others: list[str]) -> None:
        """The links of ``target`` with ``others``."""

    @abstractmethod
    def _split(self, group_of: dict[str, int], duration_s: float) -> None:
        """Whom no group names is with the rest."""

    # -- steps ---------------------------------------------------------------------------------------------

    def _await_step(self, number: int, fault: AnyFault, trigger: AtStep) -> None:
        self._steps.append((number, fault, trigger))
        if trigger.step == self._newest:
            self._step_comes(number, fault, trigger)

    def _step_begins(self, step: int) -> None:
        """A peer has begun ``step``."""
        if step > self._newest:
            self._newest = step
            for number, fault, trigger in self._steps:
                if trigger.step in (None, step):
                    self._step_comes(number, fault, trigger)

    def _step_comes(self, number: int, fault: AnyFault, trigger: AtStep) -> None:
        if self._rngs[number].random() < trigger.probability:
            self._seen[number] += 1
            if trigger.times is None or self._seen[number] <= trigger.times:
                self._after(trigger.offset_s, lambda: self._fire(number, fault))

    # -- targets -------------------------------------------------------------------------------------------

    def _fitting(self, target: Target) -> list[str]:
        """The living peers that fit, by name."""
        named = target.peer
        if named is not None and named.isdecimal():
            number = int(named)
            named = self._founders[number] if number < len(self._founders) else ""
        hosts = self._hosts()
        if target.stage is not None:
            names = sorted(name for name, stage in hosts.items() if stage == target.stage)
            if target.replica is not None:
                names = names[target.replica : target.replica + 1]
        else:
            names = sorted(hosts) if named is None else [named]
        return [name for name in names if name in hosts and self._lives(name)]

    def _pick(
        self, number: int, target: Target, first: str | None, without: tuple[str, ...] = ()
    ) -> str | None:
        names = [name for name in self._fitting(target) if name not in without]
        if first in names:
            return first
        return self._rngs[number].choice(names) if names else None

    def _groups(self, number: int, fault: Partition, first: str | None) -> dict[str, int]:
        """Who is in which group of a partition."""
        group_of: dict[str, int] = {}
        for place, group in enumerate(fault.groups):
            for target in group:
                name = self._pick(number, target, first, tuple(group_of))
                if name is not None:
                    group_of[name] = place
        return group_of

    # -- what happens --------------------------------------------------------------------------------------

    def _fire(self, number: int, fault: AnyFault, ends: Ends | None = None) -> None:
        if self._disarmed:
            return
        whom = self._carry_out(number, fault, *(ends or (None, None)))
        if whom:
            self._note(number, fault, whom, self._now())

    def _note(self, number: int, fault: AnyFault, whom: tuple[str, ...], at_s: float) -> None:
        self.fired[number] += 1
        self.log.append((at_s, number, fault.kind, whom))

    def _carry_out(
        self, number: int, fault: AnyFault, sender: str | None, other: str | None
    ) -> tuple[str, ...]:
        """Those that it hit; none if nobody is left to be hit."""
        if isinstance(fault, Join):
            return (self._come(number, fault.stage),)
        if isinstance(fault, Partition):
            group_of = self._groups(number, fault, sender)
            if group_of:
                self._split(group_of, fault.duration_s)
            return tuple(sorted(group_of))
        target = self._pick(number, fault.target, sender)
        if target is None:
            return ()
        if isinstance(fault, Kill):
            self._kill(target, fault)
        elif isinstance(fault, Freeze):
            self._stop(target)
            self._freeze(target, fault)
        elif isinstance(fault, Hang | DiskFull):
            self._disturb(target, fault)
        else:
            return self._link_fault(number, fault, target, other)
        return (target,)

    def _link_fault(self, number: int, fault: LinkFault, target: str, other: str | None) -> tuple[str, ...]:
        if fault.other is None:
            others = [name for name in self._around() if name != target]
        else:
            picked = self._pick(number, fault.other, other, (target,))
            others = [] if picked is None else [picked]
        if not others:
            return ()
        self._strain(fault, target, others)
        return (target, *others) if fault.other is not None else (target,)

    def _during(self, duration_s: float, undo: Undo) -> None:
        self.active += 1

        def end() -> None:
            self.active -= 1
            undo()

        self._after(duration_s, end)

    def _freeze(self, name: str, fault: Freeze) -> None:
        """It has stopped: it goes on when nothing holds it any more."""
        self._frozen[name] += 1

        def thaw() -> None:
            self._frozen[name] -= 1
            if not self._frozen[name]:
                self._thaw(name)

        self._during(fault.duration_s, thaw)
