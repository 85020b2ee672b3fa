"""A fault plan carried out on real processes of a local swarm: signals for what a signal can do, commands to
the emulated peers (``peer/emulation.py``) for the rest.

Steps are seen in the peers' event logs, messages by the peers themselves. With several peers that fit a
trigger by message, one of them is drawn when the fault is armed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any

from bootstrap.faults.control import pause, shape_of, signal_children, tell
from bootstrap.faults.driver import Ends, FaultDriver, LinkFault
from bootstrap.faults.plan import (
    AnyFault,
    AtMessage,
    AtStep,
    AtTime,
    DiskFull,
    FaultPlan,
    Freeze,
    Hang,
    Join,
    Kill,
    OneWay,
    Partition,
    Reset,
    Target,
)
from bootstrap.local import LocalSwarm
from bootstrap.progress import Event, Tail
from swarm.clock import Clock

LOOK_S = 0.02
"""Between two looks into the event logs."""


class ProcessFaults(FaultDriver):
    """Carries out ``plan`` on ``swarm`` from now on; an async context manager.

    ``stages``: the peers by name, with their stages; ``start(name, stage)`` starts one of them again, or a
    newcomer. ``frozen_machines``: a freeze stops a peer's p2pd too, as a frozen machine would. The times of
    ``log`` are on the event logs' scale.
    """

    def __init__(
        self,
        swarm: LocalSwarm,
        plan: FaultPlan,
        stages: Mapping[str, int],
        start: Callable[[str, int], None],
        clock: Clock,
        *,
        frozen_machines: bool = False,
    ) -> None:
        super().__init__(plan, tuple(stages))
        self.stages = dict(stages)
        self.ids: dict[str, str] = {}
        """name -> peer id, of those whose log has begun."""
        self._swarm = swarm
        self._start = start
        self._clock = clock
        self._machines = frozen_machines
        self._tails = {name: Tail(swarm.events_path(name)) for name in stages}
        self._conditions: list[tuple[float, str, dict[str, Any]]] = []
        """(until when, whose, command): told again to a peer that is started again."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ProcessFaults:
        self._catch_up()
        self._spawn(self._look())
        for number, fault in enumerate(self.plan.faults):
            self._arm(number, fault, fault.trigger)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        for tail in self._tails.values():
            tail.close()
        for name in self._frozen:
            self._thaw(name)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    # -- triggers ------------------------------------------------------------------------------------------

    def _arm(self, number: int, fault: AnyFault, trigger: AtTime | AtStep | AtMessage) -> None:
        if isinstance(trigger, AtTime):
            self._after(trigger.time_s, lambda: self._fire(number, fault))
        elif isinstance(trigger, AtStep):
            self._await_step(number, fault, trigger)
        else:
            self._spawn(self._watch(number, fault, trigger))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        async def later() -> None:
            await pause(self._clock, delay_s)
            act()

        self._spawn(later())

    def _catch_up(self) -> None:
        """What was written before the plan began pulls no trigger."""
        for name, tail in self._tails.items():
            for event in tail.read():
                self._meet(name, event)
                self._newest = max(self._newest, _begun_step(event))

    async def _look(self) -> None:
        while True:
            for name, tail in list(self._tails.items()):
                for event in tail.read():
                    self._apply(name, event)
            await pause(self._clock, LOOK_S)

    def _meet(self, name: str, event: Event) -> None:
        if name not in self.ids and "peer" in event:
            self.ids[name] = str(event["peer"])

    def _apply(self, name: str, event: Event) -> None:
        self._meet(name, event)
        self._step_begins(_begun_step(event))
        if event.get("event") == "emulated" and event.get("do") == "watch":
            self._pulled(name, event)

    async def _watch(self, number: int, fault: AnyFault, trigger: AtMessage) -> None:
        """Have a peer look out for the message; what befalls itself it does in that very call."""
        aimed = trigger.stage is None and not isinstance(fault, Join | Partition)
        target = fault.target if aimed and not isinstance(fault, Join | Partition) else Target()
        name = self._pick(number, target if aimed else Target(stage=trigger.stage), None)
        if name is None:
            return
        command = {
            "do": "watch",
            "number": number,
            "message": trigger.message,
            "side": trigger.side,
            "step": trigger.step,
            "nth": trigger.nth,
        }
        if aimed and trigger.probability == 1 and isinstance(fault, Kill | Freeze):
            command["then"] = fault.kind
        await tell(self._swarm, name, self._clock, command)

    def _pulled(self, name: str, event: Event) -> None:
        number = int(event["number"])
        fault = self.plan.faults[number]
        trigger = fault.trigger
        if not isinstance(trigger, AtMessage) or (self._disarmed and event["then"] == "tell"):
            return
        if trigger.times is not None and self._seen[number] >= trigger.times:
            return
        if event["then"] == "tell" and self._rngs[number].random() >= trigger.probability:
            return
        self._seen[number] += 1
        if event["then"] == "tell":
            other = next((each for each, peer in self.ids.items() if peer == event["other"]), None)
            ends: Ends = (name, other)
            self._fire(number, fault, ends)
        else:
            self._has_done(name, fault)
            self._note(number, fault, (name,), event["t"])

    def _has_done(self, name: str, fault: AnyFault) -> None:
        """A peer did it to itself; the rest is ours."""
        if isinstance(fault, Kill):
            self._killed(name, fault)
        elif isinstance(fault, Freeze):
            self._stop_children(name, signal.SIGSTOP)
            self._freeze(name, fault)

    # -- the swarm -----------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now()

    def _hosts(self) -> Mapping[str, int]:
        return self.stages

    def _lives(self, name: str) -> bool:
        process = self._swarm.processes.get(name)
        return process is not None and not process.ended.is_set()

    def _around(self) -> list[str]:
        return [name for name in sorted(self.stages) if self._lives(name)]

    def _come(self, number: int, stage: int) -> str:
        name = f"newcomer{len(self.stages)}"
        self._begin(name, stage)
        return name

    def _kill(self, name: str, fault: Kill) -> None:
        self._swarm.signal(name, signal.SIGKILL)
        self._killed(name, fault)

    def _killed(self, name: str, fault: Kill) -> None:
        if fault.returns_after_s is not None:
            self.active += 1
            self._spawn(self._return(name, fault.returns_after_s))

    async def _return(self, name: str, after_s: float) -> None:
        await pause(self._clock, after_s)
        await self._swarm.processes[name].ended.wait()
        self._begin(name, self.stages[name])
        self.active -= 1

    def _begin(self, name: str, stage: int) -> None:
        self.stages[name] = stage
        self._start(name, stage)
        self._tails.setdefault(name, Tail(self._swarm.events_path(name)))
        self._spawn(self._impose_again(name))

    async def _impose_again(self, name: str) -> None:
        """The network is as bad for a peer that comes back."""
        for until_s, whose, command in list(self._conditions):
            left_s = until_s - self._clock.now()
            if whose == name and left_s > 0:
                await tell(self._swarm, name, self._clock, {**command, "duration_s": left_s})

    def _stop(self, name: str) -> None:
        self._swarm.signal(name, signal.SIGSTOP)
        self._stop_children(name, signal.SIGSTOP)

    def _stop_children(self, name: str, number: signal.Signals) -> None:
        """Or let them go on: what belongs to the machine of a peer that freezes."""
        if self._machines:
            signal_children(self._swarm.processes[name].pid, number)

    def _thaw(self, name: str) -> None:
        if self._lives(name):
            self._stop_children(name, signal.SIGCONT)
            self._swarm.signal(name, signal.SIGCONT)

    def _disturb(self, name: str, fault: Hang | DiskFull) -> None:
        self._impose(name, {"do": fault.kind}, fault.duration_s)

    def _strain(self, fault: LinkFault, target: str, others: list[str]) -> None:
        if isinstance(fault, Reset):
            command = {"do": "reset", "peers": self._peer_ids(others)}
            self._spawn(self._tell(target, command))
        elif isinstance(fault, OneWay):
            self._cut(target, others, fault.duration_s, deaf=True)
            for other in others:
                self._cut(other, [target], fault.duration_s, deaf=False)
        else:
            shape = shape_of(fault)
            self._impose(target, {**shape, "peers": self._peer_ids(others)}, fault.duration_s)
            for other in others:
                self._impose(other, {**shape, "peers": self._peer_ids([target])}, fault.duration_s)

    def _split(self, group_of: dict[str, int], duration_s: float) -> None:
        living = self._around()
        for name in living:
            others = [other for other in living if group_of.get(other, -1) != group_of.get(name, -1)]
            if others:
                self._cut(name, others, duration_s, deaf=True)

    def _cut(self, name: str, others: list[str], duration_s: float, *, deaf: bool) -> None:
        self._impose(name, {"do": "cut", "peers": self._peer_ids(others), "deaf": deaf}, duration_s)

    def _impose(self, name: str, command: dict[str, Any], duration_s: float) -> None:
        """What the peer undoes by itself; machine faults end with the process, the network's do not."""
        now = self._clock.now()
        self._conditions = [entry for entry in self._conditions if entry[0] > now]
        if "peers" in command:
            self._conditions.append((now + duration_s, name, command))
        self._during(duration_s, lambda: None)
        self._spawn(self._tell(name, {**command, "duration_s": duration_s}))

    async def _tell(self, name: str, command: dict[str, Any]) -> None:
        await tell(self._swarm, name, self._clock, command)

    def _peer_ids(self, names: list[str]) -> list[str]:
        return sorted(self.ids[name] for name in names if name in self.ids)


def _begun_step(event: Event) -> int:
    """The step that a peer is known to be in by this event; -1 if it says nothing of that."""
    kind = event.get("event")
    if kind not in ("started", "stepped", "joined"):
        return -1
    return int(event["step"]) + (kind == "stepped")
