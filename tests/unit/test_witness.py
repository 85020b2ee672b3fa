"""The researcher's node as it looks into the directory: two of them, and what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import bootstrap
from bootstrap.epochs import BEGINNING_S, QUIET_S
from bootstrap.node import Waiting, _Witness
from swarm.clock import SimClock
from swarm.directory import Directory
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.records import Genesis, PeerRecord, ProgressRecord

RESEARCHER = Identity(b"r" * 32)
MANIFEST = Manifest.from_toml(
    Path(bootstrap.__file__).with_name("demo.toml"), researcher=RESEARCHER.public_key.hex()
)


def records(state: str, step: int = 0, epoch: int = 0, life: int = 7) -> list[PeerRecord]:
    """Two replicas of each stage."""
    return [
        PeerRecord.model_validate(
            {
                "peer": f"p{number}",
                "stage": number % 4,
                "step": step,
                "epoch": epoch,
                "state": state,
                "incarnation": life,
            }
        )
        for number in range(8)
    ]


class FakeDirectory:
    """What one node reads; the genesis is put there by the test."""

    def __init__(self, peers: list[PeerRecord]) -> None:
        self.seen = peers
        self.newest: Genesis | None = None

    async def genesis(self) -> Genesis | None:
        return self.newest

    async def peers(self) -> list[PeerRecord]:
        return self.seen

    async def progress(self) -> list[ProgressRecord]:
        return []


class Node:
    def __init__(self, peers: list[PeerRecord]) -> None:
        self.clock = SimClock()
        self.directory = FakeDirectory(peers)
        self.witness = _Witness(cast(Directory, self.directory), MANIFEST, RESEARCHER, None, None, self.clock)

    def look(self) -> Waiting | None:
        self.clock.run_for(1.0)
        return asyncio.run(self.witness._look())

    @property
    def kept(self) -> Genesis:
        assert self.witness._kept is not None
        return self.witness._kept


def test_of_two_nodes_that_sign_different_members_one_yields() -> None:
    """Each overwrites the other's in the directory, until both have read both."""
    one, *others = records("joining")
    nodes = [Node([one, *others]), Node([one.model_copy(update={"peer": "p8"}), *others])]
    for node in nodes:
        assert node.look() is None
    first, second = (node.kept for node in nodes)
    assert first.epoch == second.epoch == 0
    assert first.members != second.members
    nodes[0].directory.newest, nodes[1].directory.newest = second, first
    for node in nodes:
        node.look()
    followed = first if first.supersedes(second) else second
    assert [node.kept for node in nodes] == [followed, followed]


def test_the_members_of_an_epoch_have_time_to_begin_it_before_another_is_signed() -> None:
    """They read of it, link up and say so; until then none says that it trains."""
    node = Node(records("joining"))
    node.look()
    assert (node.kept.epoch, node.kept.step) == (0, 0)
    for _ in range(int(BEGINNING_S + QUIET_S) - 1):
        node.look()
        assert node.kept.epoch == 0
    for _ in range(3):
        node.look()
    assert node.kept.epoch == 1  # nobody did


def test_an_epoch_that_most_have_begun_may_end_at_once() -> None:
    """A run that is stopped whole seconds after its beginning need not wait for the beginning's end."""
    node = Node(records("joining"))
    node.look()
    everybody = records("active", 3)
    node.directory.seen = everybody[: len(everybody) // 2]
    node.look()
    begun, node.directory.seen = node.directory.seen, everybody
    node.look()
    node.directory.seen = records("joining")
    for _ in range(int(QUIET_S) - 1):
        node.look()
        assert node.kept.epoch == 0
    for _ in range(2):
        node.look()
    assert node.kept.epoch == 1

    few = Node(records("joining"))
    few.look()
    few.directory.seen = begun
    few.look()
    few.directory.seen = records("joining")
    for _ in range(int(QUIET_S) + 2):
        few.look()
        assert few.kept.epoch == 0  # the others may still link up


def test_each_epoch_remembers_those_before_and_is_of_the_members_that_the_node_knows() -> None:
    node = Node(records("joining"))
    node.look()
    node.directory.seen = records("active", 100)
    node.look()
    stranger = records("active", 102)[0].model_copy(update={"peer": "z"})
    node.directory.seen = [*records("waiting", 102)[:3], stranger]
    for _ in range(int(BEGINNING_S + QUIET_S) + 1):
        node.look()
    assert node.kept.beginnings == ((0, 0), (1, 102))
    assert {(member.peer, member.incarnation) for member in node.kept.members} == {
        ("p0", 8),
        ("p1", 8),
        ("p2", 8),
    }
