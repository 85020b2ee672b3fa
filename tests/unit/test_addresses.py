"""Remembered addresses help where they can, and never harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.addresses import MAX_BOOK_BYTES, AddressBook
from swarm.identity import Identity
from swarm.joinstring import MAX_ADDRESSES
from swarm.records import PeerRecord

RUN = "ab" * 32
NAMES = [Identity.generate().peer_id for _ in range(40)]
GIVEN = (f"/ip4/203.0.113.1/tcp/1/p2p/{NAMES[-1]}",)


def record(name: str, *addresses: str) -> PeerRecord:
    return PeerRecord(peer=name, stage=0, step=0, state="active", addresses=addresses)


def at(name: str, port: int = 9) -> str:
    return f"/ip4/203.0.113.2/tcp/{port}/p2p/{name}"


def test_what_was_seen_comes_after_what_was_given(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", RUN)
    assert book.seeds(GIVEN) == GIVEN
    records = [record(name, at(name), at(name, 10)) for name in NAMES[:3]]
    book.remember([*records, record(NAMES[5]), record(NAMES[6], at(NAMES[7]))], me=NAMES[1])
    again = AddressBook(tmp_path / "peers.json", RUN)
    assert again.seeds(GIVEN) == (*GIVEN, at(NAMES[0]), at(NAMES[2]))
    assert again.seeds((at(NAMES[0]),)) == (at(NAMES[0]), at(NAMES[2]))
    assert [path.name for path in tmp_path.iterdir()] == ["peers.json"]


def test_a_book_of_another_run_is_not_used(tmp_path: Path) -> None:
    AddressBook(tmp_path / "peers.json", "cd" * 32).remember([record(NAMES[0], at(NAMES[0]))], me="me")
    assert AddressBook(tmp_path / "peers.json", RUN).seeds(GIVEN) == GIVEN


def test_it_stays_small(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", RUN)
    book.remember([record(name, at(name)) for name in NAMES], me="me")
    assert len(book.seeds(GIVEN)) == 1 + MAX_ADDRESSES // 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"run_id": "RUN", "addresses": ["not a multiaddr"]}',
        b'{"run_id": "RUN", "addresses": ["/ip4/203.0.113.2/tcp/9"]}',
        b'{"run_id": "RUN", "addresses": [], "more": 1}',
        b" " * (MAX_BOOK_BYTES + 1),
    ],
)
def test_a_spoiled_book_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "peers.json").write_bytes(content.replace(b"RUN", RUN.encode()))
    assert AddressBook(tmp_path / "peers.json", RUN).seeds(GIVEN) == GIVEN


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "missing" / "peers.json", RUN)
    book.remember([record(NAMES[0], at(NAMES[0]))], me="me")
    assert book.seeds(GIVEN) == GIVEN
