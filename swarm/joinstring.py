"""The join string: all that a volunteer needs to find a run, in one word for a chat or a web page.

``skipswarm:<run id>@<multiaddr>[,<multiaddr>...]``; each multiaddr ends in ``/p2p/<peer id>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarm.errors import UserError
from swarm.identity import IdentityError, public_key_of
from swarm.manifest import RUN_ID_CHARS

SCHEME = "skipswarm"
MAX_ADDRESSES = 32
MAX_JOIN_STRING_CHARS = 8192

_RUN_ID = re.compile(rf"[0-9a-f]{{{RUN_ID_CHARS}}}")
_MULTIADDR = re.compile(r"/[\x21-\x2b\x2d-\x7e]{1,250}/p2p/([1-9A-HJ-NP-Za-km-z]+)")


class JoinStringError(UserError, ValueError):
    """A join string that cannot be read; one line."""


@dataclass(frozen=True)
class JoinString:
    """A run's name, and where nodes that know it may be dialled."""

    run_id: str
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise JoinStringError(f"a run id has {RUN_ID_CHARS} hexadecimal digits: {self.run_id[:80]!r}")
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise JoinStringError(f"a join string holds 1 to {MAX_ADDRESSES} addresses")
        for address in self.addresses:
            match = _MULTIADDR.fullmatch(address)
            if match is None:
                raise JoinStringError(f"not a multiaddr that ends in /p2p/<peer id>: {address[:80]!r}")
            try:
                public_key_of(match[1])
            except IdentityError as error:
                raise JoinStringError(str(error)) from None

    def __str__(self) -> str:
        return f"{SCHEME}:{self.run_id}@{','.join(self.addresses)}"

    @classmethod
    def parse(cls, text: str) -> JoinString:
        """Read what ``str`` wrote. Raises ``JoinStringError``."""
        text = text.strip()
        if len(text) > MAX_JOIN_STRING_CHARS:
            raise JoinStringError(f"a join string has at most {MAX_JOIN_STRING_CHARS} characters")
        scheme, colon, rest = text.partition(":")
        run_id, at, addresses = rest.partition("@")
        if scheme != SCHEME or not colon or not at:
            raise JoinStringError(
                "a join string looks like skipswarm:<run id>@<multiaddr>,...; "
                "copy the whole line that `skipswarm bootstrap` printed"
            )
        return cls(run_id, tuple(addresses.split(",")))
