"""Fault plans as data: building, reading back, and refusing what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootstrap.faults.plan import KINDS, FaultPlan, FaultPlanError, Kill, Target

NUMBERS = {
    "freeze": {"duration_s": 2},
    "hang": {"duration_s": 2},
    "disk_full": {"duration_s": 2},
    "join": {"stage": 1},
    "drop": {"duration_s": 2, "share": 0.1},
    "delay": {"duration_s": 2, "latency_s": 0.3},
    "slow": {"duration_s": 2, "bytes_per_s": 1e5},
    "one_way": {"duration_s": 2},
    "partition": {"duration_s": 2, "groups": ((Target(peer="a"), Target(stage=1, replica=0)),)},
}


def plan_of_everything() -> FaultPlan:
    plan = FaultPlan(seed=7)
    for kind in KINDS:
        plan = plan.add(kind, **NUMBERS.get(kind, {}))
    plan = plan.add("kill", stage=1, returns_after_s=3).at_message("forward", step=2)
    plan = plan.add("reset", peer=3, other="b").at_step(1, 0.25, probability=0.5, times=None)
    return plan.add("freeze", stage=0, replica=1, duration_s=1.5).at_time(4)


def test_a_plan_reads_back_as_it_was_built(tmp_path: Path) -> None:
    plan = plan_of_everything()
    assert len(plan.faults) == len(KINDS) + 3
    assert FaultPlan.from_json(plan.to_json()) == plan
    plan.dump(tmp_path / "plan.json")
    assert FaultPlan.load(tmp_path / "plan.json") == plan
    assert json.loads(plan.to_json())["version"] == 1


def test_building_changes_no_plan_but_the_new_one() -> None:
    empty = FaultPlan(seed=3)
    killed = empty.add("kill", stage=1)
    assert empty.faults == ()
    assert killed.at_time(2).faults != killed.faults
    fault = killed.faults[0]
    assert isinstance(fault, Kill)
    assert (fault.target, fault.returns_after_s, killed.seed) == (Target(stage=1), None, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a fault plan"),
        ('{"version": 2}', "version"),
        ('{"faults": [{"kind": "rain"}]}', "faults[0]"),
        ('{"faults": [{"kind": "freeze"}]}', "duration_s: missing"),
        ('{"faults": [{"kind": "freeze", "duration_s": NaN}]}', "duration_s"),
        ('{"faults": [{"kind": "freeze", "duration_s": -1}]}', "duration_s"),
        ('{"faults": [{"kind": "kill", "when": 1}]}', "unknown key"),
        ('{"faults": [{"kind": "kill", "target": {"replica": 1}}]}', "a replica without its stage"),
        (
            '{"faults": [{"kind": "kill", "trigger": {"on": "message", "message": "x"}}]}',
            "no message is called",
        ),
        ('{"faults": [{"kind": "drop", "duration_s": 1, "share": 1.5}]}', "share"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FaultPlanError) as caught:
        FaultPlan.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FaultPlanError, match="No such file"):
        FaultPlan.load(tmp_path / "none.json")
    with pytest.raises(FaultPlanError, match="choose another file"):
        FaultPlan().dump(tmp_path / "none" / "plan.json")
    monkeypatch.setattr("bootstrap.faults.plan.MAX_PLAN_BYTES", 8)
    (tmp_path / "plan.json").write_text(FaultPlan().to_json())
    with pytest.raises(FaultPlanError, match="longer than 8 bytes"):
        FaultPlan.load(tmp_path / "plan.json")


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(FaultPlanError, match="no fault is called 'rain'"):
        FaultPlan().add("rain")
    with pytest.raises(FaultPlanError, match="freeze: duration_s: missing"):
        FaultPlan().add("freeze")
    with pytest.raises(FaultPlanError, match="a trigger without a fault"):
        FaultPlan().at_time(1)
    with pytest.raises(FaultPlanError, match="no message is called"):
        FaultPlan().add("kill").at_message("rain")
