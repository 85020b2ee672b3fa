"""Which microbatches of a step an origin starts: those that it drew, and those of lost origins until they are
back. So that a loss which was none costs little, who took over then gives back what it has not started, and
says what it has, which the one that is back leaves to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from peer.context import draw_order
from swarm.transport.base import PeerId


class Shares:
    """One step's share of the origin ``me``. Index i was drawn by the (i mod n)-th of ``order``."""

    def __init__(self, me: PeerId, order: tuple[PeerId, ...], microbatches: int) -> None:
        self._me = me
        self._order = order
        self._microbatches = microbatches
        self.taken: set[int] = set()
        """Drawn by others, and ours for now."""
        self._left_to: dict[int, PeerId] = {}
        """Drawn by us, and started by another while we were lost for it."""
        mine = order.index(me)
        self.queue: deque[int] = deque(range(mine, microbatches, len(order)))
        """To be started, in this order."""

    def owner(self, index: int) -> PeerId:
        return self._order[index % len(self._order)]

    def position(self, index: int) -> int:
        """The how manieth of its owner's microbatches it is."""
        return index // len(self._order)

    def take_over(self, gone: Callable[[PeerId], bool], committed: Container[int]) -> list[int]:
        """Queue what lost origins have drawn, or had taken over from us, and that falls to us now.

        By rendezvous hashing, so that another loss moves only what the newly lost had. Two origins that see
        different losses may both start one: the close counts one of them.
        """
        living = tuple(origin for origin in self._order if not gone(origin))
        taken = []
        for index in range(self._microbatches):
            owner = self.owner(index)
            if index in committed or index in self.taken:
                continue
            if owner == self._me:
                if index in self._left_to and gone(self._left_to[index]):
                    del self._left_to[index]
                    self.queue.append(index)
            elif owner not in living and draw_order(index, living)[0] == self._me:
                self.taken.add(index)
                self.queue.append(index)
                taken.append(index)
        return taken

    def give_back(self, owner: PeerId) -> tuple[list[int], list[int]]:
        """``owner`` is back: (what it starts itself, what we have started for it)."""
        ours = sorted(index for index in self.taken if self.owner(index) == owner)
        given = [index for index in ours if index in self.queue]
        self.taken.difference_update(given)
        self._drop(given)
        return given, [index for index in ours if index in self.taken]

    def leave_to(self, taker: PeerId, indices: Iterable[int]) -> list[int]:
        """``taker`` has started these while we were lost for it, and we have not: those of them that we drew.
        They are ours again should it be lost."""
        left = [index for index in sorted(indices) if self.owner(index) == self._me]
        self._left_to.update(dict.fromkeys(left, taker))
        self._drop(left)
        return left

    def _drop(self, indices: list[int]) -> None:
        dropped = set(indices)
        self.queue = deque(index for index in self.queue if index not in dropped)
