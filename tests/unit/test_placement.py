"""Peers that look at the same records take different places, the neediest stage first."""

from __future__ import annotations

from collections import Counter

import pytest

from bootstrap.create import example_toml
from peer.placement import assign
from swarm.manifest import Manifest
from swarm.records import PeerRecord

MANIFEST = Manifest.from_toml(example_toml(), researcher="00" * 32)


def record(peer: str, stage: int, state: str) -> PeerRecord:
    return PeerRecord.model_validate({"peer": peer, "stage": stage, "step": 0, "state": state})


@pytest.mark.parametrize("claimed", [0, 1, 3])
def test_eight_that_come_at_once_fill_every_stage_whatever_they_claimed_before(claimed: int) -> None:
    records = [record(f"p{number}", claimed, "joining") for number in range(8)]
    places = Counter(assign(records, one.peer, MANIFEST) for one in records)
    assert places == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_newcomer_takes_the_stage_that_lacks_a_peer() -> None:
    records = [record(f"p{number}", number % 4, "active") for number in range(8) if number != 6]
    assert assign(records, "new", MANIFEST) == 2


def test_the_answer_does_not_hang_on_the_order_of_records() -> None:
    records = [record(f"p{number}", 0, "joining") for number in range(5)]
    assert assign(records, "p3", MANIFEST) == assign(records[::-1], "p3", MANIFEST)
