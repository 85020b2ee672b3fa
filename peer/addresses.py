"""Where other peers of the run were last seen: a way back in when every bootstrap node is gone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.joinstring import MAX_ADDRESSES, JoinString, JoinStringError
from swarm.records import Address, PeerRecord

MAX_BOOK_BYTES = 1 << 16


class _Book(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]


class AddressBook:
    """A small file of addresses; one that cannot be read is an empty one, and one that cannot be written is
    done without: it only ever helps."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._written: tuple[str, ...] = ()

    def seeds(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """The addresses that the join string gave, then those that are remembered, each once."""
        try:
            if self._path.stat().st_size > MAX_BOOK_BYTES:
                return given
            book = _Book.model_validate_json(self._path.read_bytes())
            if book.run_id != self._run_id or not book.addresses:
                return given
            remembered = JoinString(self._run_id, book.addresses).addresses
        except (OSError, ValidationError, JoinStringError):
            return given
        return tuple(dict.fromkeys((*given, *remembered)))[:MAX_ADDRESSES]

    def remember(self, records: Iterable[PeerRecord], me: str) -> None:
        """Keep one address of each of these peers."""
        addresses = []
        for record in records:
            named = [a for a in record.addresses if a.endswith(f"/p2p/{record.peer}")]
            if named and record.peer != me:
                addresses.append(named[0])
        chosen = tuple(addresses[: MAX_ADDRESSES // 2])
        if not chosen or chosen == self._written:
            return
        self._written = chosen
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(_Book(run_id=self._run_id, addresses=chosen).model_dump_json())
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
