"""Which of its checkpoints a peer goes by, when the run has begun again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import bootstrap
from peer.checkpoint import CheckpointError, Mark
from peer.keeper import NONE, Keeper
from swarm.events import NoEvents
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.records import Genesis

RESEARCHER = Identity(b"r" * 32)
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)
STAGE = 1


def genesis(epoch: int, step: int) -> Genesis:
    members = (Member(peer="a", stage=0),)
    return Genesis.sign(MANIFEST, members, RESEARCHER, epoch=epoch, step=step)


def keeper(folder: Path) -> Keeper:
    return Keeper(folder, MANIFEST, events=NoEvents(), report=lambda line: None)


def write(kept: Keeper, *marks: Mark) -> None:
    async def work() -> None:
        for epoch, step in marks:
            kept.write(STAGE, (epoch, step), b"%d of %d" % (step, epoch))
            await asyncio.gather(*kept._tasks)

    asyncio.run(work())


def marks(kept: Keeper) -> list[Mark]:
    return [(epoch, step) for epoch, step, _ in kept.listed(STAGE)]


def test_a_life_that_comes_in_anew_at_an_earlier_step_has_its_new_states_on_disk(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    assert kept.newest(STAGE) == NONE
    write(kept, (0, 100), (0, 140), (0, 150))
    kept.learn(genesis(1, 100))
    assert marks(kept) == [(0, 100)]
    write(kept, (1, 110))
    assert kept.newest(STAGE) == (1, 110)
    assert marks(kept) == [(1, 110), (0, 100)]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert kept.read(STAGE, 110)[1] == b"110 of 1"
    assert kept.newest_stage() == STAGE


def test_each_state_is_taken_once_and_those_of_a_new_epoch_from_its_first_step(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    asked = [(0, 140), (0, 150), (0, 150), (1, 100), (1, 110), (1, 110), (0, 160)]
    assert [kept.due(STAGE, mark) for mark in asked] == [True, True, False, True, True, False, False]
    assert kept.due(STAGE + 1, (1, 110))  # of the stage that it has moved to


def test_of_one_step_in_two_epochs_the_one_that_counts_is_read(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    write(kept, (0, 110), (1, 110))
    assert kept.read(STAGE, 110)[1] == b"110 of 1"
    kept.learn(genesis(2, 100))
    with pytest.raises(CheckpointError, match="no usable checkpoint of step 110"):
        kept.read(STAGE, 110)


def test_a_lost_stage_is_not_founded_from_what_was_given_up(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    write(kept, (0, 90), (0, 150))
    disk = kept.disk(STAGE)
    assert (disk.step(), disk.read()) == (150, b"150 of 0")
    kept.learn(genesis(1, 100))
    assert (disk.step(), disk.read()) == (90, b"90 of 0")
    kept.learn(genesis(2, 10))
    assert disk.step() is None
    with pytest.raises(CheckpointError):
        disk.read()


def test_a_damaged_newest_image_leaves_the_one_before_for_a_lost_stage(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    write(kept, (0, 90), (0, 150))
    next(tmp_path.rglob("*150.safetensors")).write_bytes(b"150 OF 0")
    assert kept.disk(STAGE).read() == b"90 of 0"
