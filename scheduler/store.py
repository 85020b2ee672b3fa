"""Signed facts that every peer comes to know, as mergeable state, and how two stores find what they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from scheduler.hashtree import DEPTH, HEX, Fact, Held, Node, digest_of, place_of, put, under, without

MAX_VERSION = 1 << 62

Line = tuple[str, str, int, bytes]
"""(topic, owner, version, hash) of a fact that somebody holds."""


class Digest(NamedTuple):
    """What one store tells another of itself; the answer is another digest, facts, or both, until they agree.

    A *place* is a kind of topic, a slash, and the first hexadecimal digits of the hash of an owner.
    """

    nodes: tuple[tuple[str, bytes], ...] = ()
    """The hash of all facts at a place; empty if there are none."""
    held: tuple[tuple[str, tuple[Line, ...]], ...] = ()
    """All facts at a place."""
    wanted: tuple[tuple[str, str], ...] = ()
    """(topic, owner) of facts that the other store holds and this one lacks."""


class TopicLimit(NamedTuple):
    """What one owner may put under one kind of topic; of more facts the ``facts`` newest stay."""

    facts: int = 1
    value_bytes: int = 1 << 16


class GossipStore:
    """Facts by (topic, owner). Merging is commutative, associative and idempotent.

    Kinds of topics that ``limits`` does not name are refused, values that are too long too, and what ``keep``
    refuses. An owner's facts of one kind beyond its limit displace those with the least (version, topic):
    keeping the n greatest is itself such a merge, so replicas agree on what they dropped.
    """

    def __init__(
        self, limits: Mapping[str, TopicLimit], keep: Callable[[Fact], bool] = lambda _: True
    ) -> None:
        self._limits = dict(limits)
        self._keep = keep
        self._roots: dict[str, Node | None] = dict.fromkeys(sorted(limits))

    def copy(self) -> GossipStore:
        """Another store with the same facts; the two share the memory of what stays the same in both."""
        made = GossipStore(self._limits, self._keep)
        made._roots = dict(self._roots)
        return made

    def __len__(self) -> int:
        return sum(root.count for root in self._roots.values() if root is not None)

    def get(self, topic: str, owner: str) -> Fact | None:
        held = self._held(topic, owner)
        return None if held is None else held.fact

    def _held(self, topic: str, owner: str) -> Held | None:
        kind = topic.partition("/")[0]
        return next((entry for entry in self._of(kind, owner) if entry.fact.topic == topic), None)

    def _of(self, kind: str, owner: str) -> list[Held]:
        """All that ``owner`` says of one kind."""
        node, place = self._roots.get(kind), place_of(owner)
        depth = 0
        while node is not None and node.branches:
            node = node.branches[int(place[depth], 16)]
            depth += 1
        return [entry for entry in node.held if entry.fact.owner == owner] if node is not None else []

    def facts(self) -> tuple[Fact, ...]:
        """All facts, in order of (topic, owner)."""
        return tuple(sorted((entry.fact for entry in self._all()), key=lambda fact: fact.key))

    def _all(self) -> Iterable[Held]:
        return (entry for root in self._roots.values() if root is not None for entry in root)

    def of_kind(self, kind: str) -> tuple[Fact, ...]:
        """Facts whose topic is ``kind`` or begins with ``kind/``, in order of (topic, owner)."""
        entries = self._roots.get(kind) or ()
        return tuple(sorted((entry.fact for entry in entries), key=lambda fact: fact.key))

    def wants(self, fact: Fact) -> bool:
        """Would ``fact`` change the store? Asked before its signature is checked, which costs more."""
        limit = self._limits.get(fact.kind)
        if limit is None or len(fact.value) > limit.value_bytes or not 0 <= fact.version < MAX_VERSION:
            return False
        owned = [entry.fact for entry in self._of(fact.kind, fact.owner)]
        held = next((other for other in owned if other.topic == fact.topic), None)
        if held is not None:
            return fact.order > held.order and self._keep(fact)
        if len(owned) >= limit.facts and _age(fact) < min(map(_age, owned)):
            return False
        return self._keep(fact)

    def merge(self, fact: Fact) -> bool:
        """Take ``fact`` in; True if that changed the store. Its signature is the caller's to check."""
        if not self.wants(fact):
            return False
        self._roots[fact.kind] = put(self._roots[fact.kind], Held.of(fact))
        owned = self._of(fact.kind, fact.owner)
        if len(owned) > self._limits[fact.kind].facts:
            self._drop(min(owned, key=lambda entry: _age(entry.fact)))
        return True

    def forget(self, predicate: Callable[[Fact], bool]) -> int:
        """Drop the facts that ``predicate`` holds for. They come back from others unless ``keep`` refuses
        them."""
        old = [entry for entry in self._all() if predicate(entry.fact)]
        for entry in old:
            self._drop(entry)
        return len(old)

    def prune(self) -> int:
        """Drop what ``keep`` refuses by now."""
        return self.forget(lambda fact: not self._keep(fact))

    def _drop(self, entry: Held) -> None:
        kind = entry.fact.kind
        self._roots[kind] = without(self._roots[kind], entry)

    # -- what another store lacks --------------------------------------------------------------------------

    def digest(self) -> Digest:
        """What begins an exchange: a hash for each kind, however many facts there are."""
        return Digest(nodes=tuple((f"{kind}/", digest_of(root)) for kind, root in self._roots.items()))

    def answer(self, theirs: Digest, max_bytes: int) -> tuple[Digest, tuple[Fact, ...]]:
        """What to say to a store that said ``theirs``, about ``max_bytes`` of it at most, and the facts that
        it lacks.

        Where hashes differ the answer goes a digit deeper, or lists what is there; a list is answered by the
        facts that it lacks, and by what is wanted of it. So an exchange ends after as many answers as the
        tree is deep, and two more; what did not fit is for the next one.
        """
        facts: dict[tuple[str, str], Fact] = {}
        nodes: list[tuple[str, bytes]] = []
        held: list[tuple[str, tuple[Line, ...]]] = []
        wanted: dict[tuple[str, str], int] = {}
        for place, digest in dict(theirs.nodes).items():
            if max_bytes <= 0:
                break
            node, known = self._at(place)
            if not known or digest_of(node) == digest:
                continue
            if node is not None and not digest:
                facts |= {entry.fact.key: entry.fact for entry in node}
            elif node is not None and node.branches:
                below = zip(HEX, node.branches, strict=True)
                nodes += [(place + digit, digest_of(branch)) for digit, branch in below]
                max_bytes -= len(HEX) * (len(place) + 20)
            else:
                lines = tuple(map(_line, node or ()))
                held.append((place, lines))
                max_bytes -= len(place) + sum(len(topic) + len(owner) + 30 for topic, owner, *_ in lines)
        for place, lines in dict(theirs.held).items():
            lacking, here = self._compare(place, lines)
            facts |= {fact.key: fact for fact in here}
            for topic, owner in lacking:
                if max_bytes > 0:
                    wanted[topic, owner] = 0
                    max_bytes -= len(topic) + len(owner) + 6
        for topic, owner in theirs.wanted:
            fact = self.get(topic, owner)
            if fact is not None:
                facts[fact.key] = fact
        return Digest(tuple(nodes), tuple(held), tuple(wanted)), tuple(facts.values())

    def _at(self, place: str) -> tuple[Node | None, bool]:
        """What is held at ``place``, and whether there is such a place at all."""
        kind, slash, prefix = place.partition("/")
        if kind not in self._limits or not slash or len(prefix) > DEPTH or not set(prefix) <= set(HEX):
            return None, False
        return under(self._roots[kind], prefix), True

    def _compare(self, place: str, lines: Iterable[Line]) -> tuple[list[tuple[str, str]], list[Fact]]:
        """(topic, owner) of what we lack of somebody's ``lines``, and what it lacks of ours."""
        node, known = self._at(place)
        if not known:
            return [], []
        theirs = {(topic, owner): (version, mark) for topic, owner, version, mark in lines}
        lacking = []
        for (topic, owner), (version, mark) in theirs.items():
            held = self._held(topic, owner)
            if held is not None and (version < held.fact.version or mark == held.mark):
                continue
            # Judged by what a line shows: the value, and so some of ``keep``'s verdicts, are not known yet.
            other = held is not None and version == held.fact.version
            if other or self.wants(Fact(topic, owner, version, b"")):
                lacking.append((topic, owner))
        here = []
        for entry in node or ():
            version, mark = theirs.get(entry.fact.key, (-1, b""))
            if version < entry.fact.version or (version == entry.fact.version and mark != entry.mark):
                here.append(entry.fact)
        return lacking, here


def _line(entry: Held) -> Line:
    return (entry.fact.topic, entry.fact.owner, entry.fact.version, entry.mark)


def _age(fact: Fact) -> tuple[int, str]:
    return (fact.version, fact.topic)
