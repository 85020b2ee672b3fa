"""Random swarms under random faults: nothing lost, nothing counted twice, nobody stuck, no two histories.

The first 200 seeds of ``benchmarks/faults.py``, which goes through ten thousand. A seed that fails here is
shown event by event by ``python -m benchmarks.faults --trace --seed SEED``.
"""

from __future__ import annotations

import pytest

from bootstrap.faults.trial import run

SEEDS = 200
EACH = 10


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_random_faults_lose_nothing_count_nothing_twice_and_leave_nobody_stuck(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + EACH)]
    broken = [f"seed {o.seed}: {o.rule}: {o.why}" for o in outcomes if o.rule]
    assert broken == []
    assert sum(sum(outcome.fired.values()) for outcome in outcomes) >= EACH
