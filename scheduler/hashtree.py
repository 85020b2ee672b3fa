"""Facts in a tree of hashes: two sets that differ in few facts find out which without listing the rest.

A Merkle tree (1987) over the hashes of the facts' owners, of 16 branches, whose shape and hashes are a
function of the facts alone. Nodes are never changed, so that sets share what they have in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import msgpack

HEX = "0123456789abcdef"
DEPTH = 64
"""Digits of a place."""
LEAF_FACTS = 16
"""A node of no more facts is a leaf, and so is one of one owner."""
DIGEST_BYTES = 16
"""Of SHA-256, as many as stand off whoever searches for collisions among facts of its own."""


class Fact(NamedTuple):
    """What ``owner`` said last about ``topic``: a kind (``"view"``), or a kind and a key
    (``"commit/12/3"``)."""

    topic: str
    owner: str
    version: int
    value: bytes
    signature: bytes = b""

    @property
    def key(self) -> tuple[str, str]:
        return (self.topic, self.owner)

    @property
    def kind(self) -> str:
        return self.topic.partition("/")[0]

    @property
    def order(self) -> tuple[int, bytes, bytes]:
        """Of two facts with one key the greater stands. The signature comes last, so that the order is
        total."""
        return (self.version, self.value, self.signature)


@lru_cache(maxsize=1 << 16)
def place_of(owner: str) -> str:
    """Where the facts of ``owner`` are in the tree, in hexadecimal digits."""
    return hashlib.sha256(owner.encode()).hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


class Held(NamedTuple):
    """A fact in the tree; ``mark`` is its hash."""

    fact: Fact
    place: str
    mark: bytes

    @classmethod
    def of(cls, fact: Fact) -> Held:
        return cls(fact, place_of(fact.owner), _digest(msgpack.packb(tuple(fact))))


class Node:
    """Facts whose places begin alike: a leaf that holds them in order of their keys, or 16 branches."""

    __slots__ = ("branches", "count", "digest", "held")

    def __init__(self, held: tuple[Held, ...], branches: tuple[Node | None, ...] = ()) -> None:
        self.held = held
        self.branches = branches
        self.count: int
        if branches:
            self.count = sum(branch.count for branch in branches if branch is not None)
            self.digest = _digest(
                b"".join(digest_of(branch).ljust(DIGEST_BYTES, b"\0") for branch in branches)
            )
        else:
            self.count = len(held)
            self.digest = _digest(b"".join(entry.mark for entry in held))

    def __iter__(self) -> Iterator[Held]:
        yield from self.held
        for branch in self.branches:
            if branch is not None:
                yield from branch


def digest_of(node: Node | None) -> bytes:
    """Of nothing it is empty."""
    return b"" if node is None else node.digest


def build(held: Iterable[Held], depth: int = 0) -> Node | None:
    """The node, ``depth`` digits below the root, that holds these."""
    entries = sorted(held, key=lambda entry: (entry.fact.owner, entry.fact.topic))
    if not entries:
        return None
    if len(entries) <= LEAF_FACTS or len({entry.place for entry in entries}) == 1:
        return Node(tuple(entries))
    groups: dict[str, list[Held]] = {digit: [] for digit in HEX}
    for entry in entries:
        groups[entry.place[depth]].append(entry)
    return Node((), tuple(build(group, depth + 1) for group in groups.values()))


def put(node: Node | None, entry: Held, depth: int = 0) -> Node | None:
    """``node`` with ``entry`` in the place of what had its key."""
    if node is None or not node.branches:
        others = () if node is None else node.held
        return build([entry, *(other for other in others if other.fact.key != entry.fact.key)], depth)
    digit = int(entry.place[depth], 16)
    return Node((), _with(node.branches, digit, put(node.branches[digit], entry, depth + 1)))


def without(node: Node | None, entry: Held, depth: int = 0) -> Node | None:
    """``node`` without what has the key of ``entry``."""
    if node is None or not node.branches:
        others = () if node is None else node.held
        return build((other for other in others if other.fact.key != entry.fact.key), depth)
    digit = int(entry.place[depth], 16)
    branches = _with(node.branches, digit, without(node.branches[digit], entry, depth + 1))
    left = [branch for branch in branches if branch is not None]
    count = sum(branch.count for branch in left)
    if count <= LEAF_FACTS or len(left) == 1:
        return build((entry for branch in left for entry in branch), depth)
    return Node((), branches)


def _with(branches: tuple[Node | None, ...], digit: int, branch: Node | None) -> tuple[Node | None, ...]:
    return (*branches[:digit], branch, *branches[digit + 1 :])


def under(node: Node | None, prefix: str) -> Node | None:
    """What of ``node``, the root, has a place that begins with ``prefix``, as a node of its own."""
    for digit in prefix:
        if node is None:
            return None
        if not node.branches:
            return build((entry for entry in node.held if entry.place.startswith(prefix)), len(prefix))
        node = node.branches[int(digit, 16)]
    return node
