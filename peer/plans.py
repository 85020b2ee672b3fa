"""The plan that an origin goes by, and those that are to take its place.

Origins whose plans differ put their microbatches on the same peers: each plan is even, their mixture is not.
So a plan that fits its membership is kept for a whole step, whatever better ones come meanwhile, and when the
next step begins all choose alike. Only one that does not fit is replaced at once.
"""

from __future__ import annotations

from scheduler.instance import Instance
from scheduler.plan import Plan, validate
from scheduler.timeline import makespan
from swarm.transport.base import PeerId

GAIN = 0.03
"""Plans whose makespans differ by a lesser share are equally good: each origin reckons with figures that are
a little different, and all must come to the same choice."""


class Plans:
    """``held`` is what paths are taken from."""

    def __init__(self) -> None:
        self.held: Plan | None = None
        self._proposed: dict[PeerId, Plan] = {}
        """proposer -> its newest plan."""
        self._makespans: dict[str, float] = {}
        self._reckoned: Instance | None = None
        """The problem that ``_makespans`` (by the plans' digests) are for."""

    def fit(self, instance: Instance) -> bool:
        """Can the step go by the held plan?"""
        return self.held is not None and fits(self.held, instance)

    def offer(self, plan: Plan, instance: Instance | None) -> None:
        """A plan was found, or has come; with ``instance``, it may be needed at once."""
        self._proposed[plan.proposer] = plan
        if instance is not None and not self.fit(instance) and fits(plan, instance):
            self.held = plan

    def mend(self, instance: Instance) -> bool:
        """Does the held plan, or another one that we know of, fit? Then that is held from now on."""
        if not self.fit(instance):
            self.held = self._choice(instance) or self.held
        return self.fit(instance)

    def begin(self, instance: Instance) -> None:
        """A step begins, which may go by another plan than the last one."""
        self._proposed = {p: plan for p, plan in self._proposed.items() if plan.epoch == instance.epoch}
        self.held = self._choice(instance) or self.held

    def worth_telling(self, plan: Plan, instance: Instance) -> bool:
        """Is it better than what the others know of, by more than would change their choice?"""
        known = [self._makespan_s(one, instance) for one in self._fitting(instance)]
        return not known or self._makespan_s(plan, instance) < (1 - GAIN) * min(known)

    def _choice(self, instance: Instance) -> Plan | None:
        """The best, and of those that are about as good the one with the least hash."""
        plans = self._fitting(instance)
        bound_s = (1 + GAIN) * min((self._makespan_s(plan, instance) for plan in plans), default=0.0)
        good = (plan for plan in plans if self._makespan_s(plan, instance) <= bound_s)
        return min(good, key=Plan.digest, default=None)

    def _fitting(self, instance: Instance) -> list[Plan]:
        plans = {plan.digest(): plan for plan in self._proposed.values()}
        if self.held is not None:
            plans.setdefault(self.held.digest(), self.held)
        return [plan for plan in plans.values() if fits(plan, instance)]

    def _makespan_s(self, plan: Plan, instance: Instance) -> float:
        """What we reckon; what the plan claims of itself has no part in it."""
        if self._reckoned is not instance:
            self._reckoned = instance
            self._makespans.clear()
        digest = plan.digest()
        if digest not in self._makespans:
            self._makespans[digest] = makespan(instance, plan.paths)
        return self._makespans[digest]


def fits(plan: Plan, instance: Instance) -> bool:
    """Is the plan made for who is in ``instance``, and does it hold there?"""
    return plan.epoch == instance.epoch and validate(plan, instance) is None
