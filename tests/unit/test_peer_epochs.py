"""Which of the researcher's words a peer follows, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bootstrap
from peer import checkpoint
from peer.core import Core
from peer.epochs import EPOCH_S, RIVAL_S, Epochs
from peer.keeper import Keeper
from swarm.clock import SimClock
from swarm.directory import Directory
from swarm.events import NoEvents
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.records import Genesis

RESEARCHER = Identity(b"r" * 32)
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)
ME = "me"


def genesis(epoch: int, step: int, *others: str, life: int | None = 8) -> Genesis:
    """One that names us in that life."""
    members = [Member(peer=name, stage=1) for name in others]
    if life is not None:
        members.append(Member(peer=ME, stage=0, incarnation=life))
    return Genesis.sign(MANIFEST, tuple(members), RESEARCHER, epoch=epoch, step=step)


def rivals(step: int) -> tuple[Genesis, Genesis]:
    """Two of one epoch, the one that all follow first."""
    one, other = genesis(1, step, "x"), genesis(1, step, "y")
    return (one, other) if one.supersedes(other) else (other, one)


class FakeCore:
    """A member in its eighth life that notes what it is told."""

    def __init__(self, *, epoch: int = 0, step: int = 9, active: bool = True) -> None:
        self.context = SimpleNamespace(
            me=ME, stage=0, incarnation=8, epoch=epoch, step=step, active=active, worker=self
        )
        self.loads: list[Callable[[str], None]] = []
        self.joiner = None
        self.newest_epoch = epoch
        self.agreement = SimpleNamespace(without_majority_s=0.0)
        self.told: list[Any] = []

    def submit(self, kind: Any, order: Any, work: Any, done: Callable[[str], None], refused: Any) -> None:
        """The compute thread: what it has loaded comes when ``loaded`` is called."""
        self.loads.append(done)

    def found(self, members: tuple[Member, ...], *, epoch: int, step: int, lineage: str = "") -> None:
        self.told.append(("found", epoch, step))
        self.context.epoch = epoch

    def begin_again(self, members: tuple[Member, ...], *, epoch: int, step: int) -> bool:
        self.told.append(("begin again", epoch, step))
        return step == self.context.step

    def leave_epoch(self, members: tuple[Member, ...], epoch: int, step: int) -> None:
        self.told.append(("leave", epoch, step))
        self.context.epoch = epoch


class FakeDirectory:
    def __init__(self, newest: Genesis) -> None:
        self.newest = newest
        self.looks = 0

    async def genesis(self) -> Genesis:
        self.looks += 1
        return self.newest


class Peer:
    def __init__(self, folder: Path, first: Genesis, **core: Any) -> None:
        self.core = FakeCore(epoch=first.epoch, **core)
        self.clock = SimClock()
        keeper = Keeper(folder, MANIFEST, events=NoEvents(), report=lambda line: None)
        self.epochs = Epochs(
            cast(Core, self.core), keeper, self.clock, events=NoEvents(), report=lambda line: None
        )
        asyncio.run(self.epochs.start(first, founding=False))

    def hears(self, word: Genesis) -> list[Any]:
        """What it does then."""
        self.core.told.clear()
        asyncio.run(self.epochs.heard(word))
        return list(self.core.told)


FIRST = genesis(0, 0, "x", life=8)


def test_a_member_begins_again_where_it_stands_and_otherwise_comes_in_anew(tmp_path: Path) -> None:
    assert Peer(tmp_path, FIRST).hears(genesis(1, 9, life=9)) == [("begin again", 1, 9)]
    assert Peer(tmp_path, FIRST).hears(genesis(1, 7, life=9)) == [("begin again", 1, 7), ("leave", 1, 7)]
    assert Peer(tmp_path, FIRST).hears(genesis(1, 9, "x", life=None)) == [("leave", 1, 9)]


def test_whoever_ended_a_step_meanwhile_is_told_again(tmp_path: Path) -> None:
    """It was to begin again where it stood, and did not stand there any more when its turn came."""
    peer = Peer(tmp_path, FIRST)
    word = genesis(1, 9, life=9)
    assert peer.hears(word) == [("begin again", 1, 9)]
    peer.core.context.step = 10
    assert peer.hears(word) == [("begin again", 1, 9), ("leave", 1, 9)]
    assert peer.hears(word) == []


def test_one_of_two_beginnings_of_an_epoch_is_given_up_by_those_who_began_it(tmp_path: Path) -> None:
    followed, given_up = rivals(9)
    assert Peer(tmp_path, given_up).hears(followed) == [("leave", 1, 9)]
    for active in (True, False):
        assert Peer(tmp_path, followed, active=active).hears(given_up) == []
    peer = Peer(tmp_path, FIRST)  # one that comes to the epoch by the first that it reads
    assert peer.hears(given_up) == [("begin again", 1, 9)]
    peer.core.context.epoch = 1
    assert peer.hears(followed) == [("leave", 1, 9)]


def test_who_has_made_nothing_yet_begins_the_one_that_goes_on(tmp_path: Path) -> None:
    followed, given_up = rivals(0)
    assert Peer(tmp_path, given_up, active=False).hears(followed) == [("found", 1, 0)]


def holder(folder: Path) -> Peer:
    """A peer without a place that holds step 9."""
    image = (0, 9), b"state", MANIFEST.canonical.decode("ascii")
    checkpoint.write(folder, MANIFEST.run_id, 0, *image)
    return Peer(folder, FIRST, active=False)


def test_a_holder_begins_with_its_checkpoint(tmp_path: Path) -> None:
    peer = holder(tmp_path)
    assert peer.hears(genesis(1, 9)) == []
    (loaded,) = peer.core.loads
    loaded("digest")
    assert peer.core.told == [("found", 1, 9)]


def test_a_holder_without_that_step_comes_in_anew(tmp_path: Path) -> None:
    assert holder(tmp_path).hears(genesis(1, 8)) == [("leave", 1, 8)]


def test_a_checkpoint_that_comes_late_is_not_loaded_over_what_trains(tmp_path: Path) -> None:
    """A large one takes longer to read than it takes until the next look."""
    peer = holder(tmp_path)
    word = genesis(1, 9)
    peer.hears(word)
    peer.hears(word)
    first, second = peer.core.loads
    first("digest")
    peer.core.context.active = True
    second("digest")
    assert peer.core.told == [("found", 1, 9)]
    asyncio.run(peer.epochs.begin(word))
    assert len(peer.core.loads) == 2


def test_a_checkpoint_of_a_beginning_that_was_superseded_begins_nothing(tmp_path: Path) -> None:
    peer = holder(tmp_path)
    peer.hears(genesis(1, 9))
    assert peer.hears(genesis(2, 7, "x", life=None)) == [("leave", 2, 7)]
    peer.core.loads[0]("digest")
    assert peer.core.told == [("leave", 2, 7)]


def test_one_that_trains_looks_for_a_rival_now_and_then_and_one_that_cannot_go_on_often(
    tmp_path: Path,
) -> None:
    for stuck_s, every_s in ((0.0, RIVAL_S), (60.0, EPOCH_S)):
        peer = Peer(tmp_path, FIRST)
        peer.core.agreement.without_majority_s = stuck_s
        directory = FakeDirectory(FIRST)
        seconds = int(2 * RIVAL_S) + 1
        for _ in range(seconds):
            peer.clock.run_for(1.0)
            asyncio.run(peer.epochs.review(cast(Directory, directory)))
        assert directory.looks == seconds // every_s
