"""What the random fault schedules brought to light, each as the smallest swarm that showed it."""

from __future__ import annotations

import pytest

from bootstrap.faults.plan import FaultPlan, Target
from bootstrap.faults.simulated import SimulatedFaults
from bootstrap.simulation.swarm import SimSwarm
from swarm.messages import Decided, StepClose

EVERYONE = Target()


def suffers(swarm: SimSwarm, plan: FaultPlan, steps: int = 4, limit_s: float = 90.0) -> SimulatedFaults:
    """From step 1 on; every fault of the plan happens, and everyone makes that many more steps."""
    assert swarm.run_to(1)
    faults = SimulatedFaults(swarm, plan)
    assert swarm.clock.run_until(lambda: len(faults.fired) == len(plan.faults) and not faults.active, 60)
    assert swarm.run_to(max(peer.step for peer in swarm.living()) + steps, limit_s)
    swarm.whole()
    return faults


@pytest.mark.parametrize("nth", range(1, 5))
def test_the_output_of_a_hop_that_was_replaced_does_not_take_the_gradient_from_its_replacement(
    nth: int,
) -> None:
    """Its link breaks under it, comes back when it has computed, and both outputs reach the origin."""
    swarm = SimSwarm((2, 3), memory_slots=1, microbatches_per_origin=2, pace=10)
    suffers(swarm, FaultPlan().add("reset", stage=0, other=EVERYONE).at_message("accept", step=2, nth=nth))


def test_everyone_knows_at_once_of_the_new_life_of_a_peer_that_fell_out() -> None:
    """Also a peer that it has lost, and so tells no goodbye: what comes from it next is no zombie's."""
    swarm = SimSwarm((2, 2, 2))
    assert swarm.run_to(1)
    swarm.network.one_way("s0r1", "s1r0")
    core = swarm.peers["s0r1"].core
    assert swarm.clock.run_until(lambda: not core.liveness.alive("s1r0"), 10)
    members = tuple(member for member in core.context.members if member.peer != "s0r1")
    close = StepClose(step=core.context.step + 2, counted=(), members=members)
    core.on_message("s2r0", Decided(close=close), None)
    assert core.context.incarnation == 2
    swarm.clock.run_for(0.05)
    assert not swarm.peers["s1r0"].core.liveness.stale("s0r1", 2)
