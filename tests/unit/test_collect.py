"""Checkpoints of several peers to one model, and what must not become one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from model_cases import average_alone, small_manifest
from safetensors import safe_open
from torch import Tensor

from bootstrap.collect import CollectError, collect, export_folders
from peer.checkpoint import write
from swarm.cli import main
from swarm.manifest import Manifest
from swarm.model.export import merge_states
from swarm.model.stage import StageRuntime

MANIFEST = small_manifest()
STAGES = range(3)


def runtime_at(manifest: Manifest, stage: int, step: int) -> StageRuntime:
    """A stage after ``step`` updates with the gradient zero: weight decay alone moves it."""
    runtime = StageRuntime(manifest, stage)
    for _ in range(step):
        average_alone(runtime, 1)
        runtime.update()
    return runtime


def save(
    folder: Path,
    manifest: Manifest,
    stage: int,
    step: int,
    runtime: StageRuntime | None = None,
    *,
    epoch: int = 0,
) -> Path:
    """What the daemon of a peer writes into its ``--dir``; the path of the image."""
    image = (runtime or runtime_at(manifest, stage, step)).state_image()
    text = manifest.canonical.decode("ascii")
    return write(folder / "checkpoints", manifest.run_id, stage, (epoch, step), image, text)


def expected(step: int) -> dict[str, Tensor]:
    return merge_states(MANIFEST, [runtime_at(MANIFEST, stage, step).state_tensors() for stage in STAGES])


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit(image: Path, **changes: object) -> None:
    """Change a checkpoint's description."""
    path = image.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_newest_step_that_all_stages_have(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path / f"peer{stage}", MANIFEST, stage, 1)
        save(tmp_path / f"peer{stage}", MANIFEST, stage, 2)
    save(tmp_path / "peer1", MANIFEST, 1, 3)
    collected = collect([tmp_path / f"peer{stage}" for stage in STAGES])
    assert (collected.manifest, collected.step, collected.notes) == (MANIFEST, 2, ())
    assert_same(collected.parameters, expected(2))
    assert not torch.equal(expected(1)["lm_head.weight"], expected(2)["lm_head.weight"])


def test_a_step_by_name_and_one_folder_for_all(tmp_path: Path) -> None:
    for stage in STAGES:
        for step in (1, 2):
            save(tmp_path / f"peer{stage}", MANIFEST, stage, step)
    collected = collect([tmp_path], step=1)
    assert collected.step == 1
    assert_same(collected.parameters, expected(1))


def test_a_damaged_image_gives_way_to_a_replica(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path / "a", MANIFEST, stage, 1)
    save(tmp_path / "b", MANIFEST, 2, 1)
    damaged = tmp_path / "a" / "checkpoints" / "stage-002" / "epoch-000-step-00000001.safetensors"
    corrupt(damaged)
    collected = collect([tmp_path])
    assert_same(collected.parameters, expected(1))
    assert len(collected.notes) == 1
    assert "do not hash to its digest" in collected.notes[0]


def test_a_damaged_image_without_a_replica_gives_way_to_an_older_step(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path, MANIFEST, stage, 1)
        newest = save(tmp_path, MANIFEST, stage, 2)
    corrupt(newest)
    collected = collect([tmp_path])
    assert collected.step == 1
    assert_same(collected.parameters, expected(1))
    corrupt(newest.with_name("epoch-000-step-00000001.safetensors"))
    with pytest.raises(CollectError, match=r"no step of which every stage has a sound checkpoint.*digest"):
        collect([tmp_path])


def test_what_most_replicas_hold(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path / "a", MANIFEST, stage, 1)
    save(tmp_path / "b", MANIFEST, 1, 1)
    other = runtime_at(MANIFEST, 1, 1)
    other.flat_parameters()[0] += 1.0
    save(tmp_path / "c", MANIFEST, 1, 1, other)
    collected = collect([tmp_path])
    assert_same(collected.parameters, expected(1))
    assert collected.notes == ("the replicas of stage 1 differ at step 1; took what 2 of 3 hold",)


def test_a_description_that_lies_about_the_step(tmp_path: Path) -> None:
    for stage in STAGES:
        image = save(tmp_path, MANIFEST, stage, 1)
    edit(image, step=2)
    save(tmp_path, MANIFEST, 0, 2)
    save(tmp_path, MANIFEST, 1, 2)
    with pytest.raises(CollectError, match="says step 2 and holds step 1"):
        collect([tmp_path])


def test_a_description_that_lies_about_the_manifest(tmp_path: Path) -> None:
    other = small_manifest(seed=8).canonical.decode()
    for stage in STAGES:
        edit(save(tmp_path, MANIFEST, stage, 1), manifest=other)
    with pytest.raises(CollectError, match="no checkpoint holds the manifest of its run"):
        collect([tmp_path])
    save(tmp_path / "honest", MANIFEST, 0, 1)
    assert_same(collect([tmp_path]).parameters, expected(1))


def test_an_absurd_size_is_not_read(tmp_path: Path) -> None:
    for stage in STAGES:
        image = save(tmp_path, MANIFEST, stage, 1)
    with image.open("ab") as file:
        file.truncate(1 << 40)  # sparse; to read it would end the process
    edit(image, bytes=1 << 40)
    with pytest.raises(CollectError, match="are too many for stage 2"):
        collect([tmp_path])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_id": "x"}', " " * 200_000])
def test_nonsense_is_passed_over(tmp_path: Path, text: str) -> None:
    for stage in STAGES:
        save(tmp_path, MANIFEST, stage, 1)
    (tmp_path / "checkpoints" / "stage-000" / "epoch-000-step-00000009.json").write_text(text)
    collected = collect([tmp_path])
    assert collected.step == 1
    assert len(collected.notes) == 1
    assert "not a checkpoint's description" in collected.notes[0]


def test_two_runs_are_no_model(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path / "a", MANIFEST, stage, 1)
    save(tmp_path / "b", small_manifest(seed=8), 0, 1)
    with pytest.raises(CollectError, match="checkpoints of 2 runs"):
        collect([tmp_path])


def test_of_two_histories_the_later_epochs_model_is_taken_and_none_of_both(tmp_path: Path) -> None:
    """Epoch 1 began again before what epoch 0 had come to."""
    for stage in STAGES:
        save(tmp_path / str(stage), MANIFEST, stage, 2)
        save(tmp_path / str(stage), MANIFEST, stage, 1, epoch=1)
    save(tmp_path / "0", MANIFEST, 0, 3, epoch=1)
    for stage in STAGES[1:]:
        save(tmp_path / str(stage), MANIFEST, stage, 3)
    assert collect([tmp_path]).step == 1
    assert collect([tmp_path], step=2).step == 2
    with pytest.raises(CollectError, match="step 3 is not one"):
        collect([tmp_path], step=3)


def test_unequal_steps_are_no_model(tmp_path: Path) -> None:
    save(tmp_path, MANIFEST, 0, 1)
    save(tmp_path, MANIFEST, 1, 2)
    save(tmp_path, MANIFEST, 2, 1)
    with pytest.raises(CollectError, match="stage 0: 1; stage 1: 2; stage 2: 1"):
        collect([tmp_path])


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    save(tmp_path, MANIFEST, 0, 1)
    save(tmp_path, MANIFEST, 2, 1)
    with pytest.raises(CollectError, match="no checkpoint of stage 1"):
        collect([tmp_path])


def test_no_checkpoints_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="no checkpoints in"):
        collect([tmp_path])
    with pytest.raises(CollectError, match="is no folder"):
        collect([tmp_path / "nowhere"])


def test_export_writes_a_new_folder_only(tmp_path: Path) -> None:
    for stage in STAGES:
        save(tmp_path / "peers", MANIFEST, stage, 1)
    out = tmp_path / "model"
    export_folders([tmp_path / "peers"], out)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, expected(1))  # noqa: SIM118
    with pytest.raises(CollectError, match="is there already"):
        export_folders([tmp_path / "peers"], out)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for stage in STAGES:
        save(tmp_path / f"peer{stage}", MANIFEST, stage, 1)
        folders.append(str(tmp_path / f"peer{stage}"))
    arguments = ["skipswarm", "export", *folders, "--out", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"run      {MANIFEST.run_id[:12]}, step 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 4
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
