"""A hop's slots are few, and nothing may keep one for nobody.

Whoever gives an attempt up, or goes around a hop, says so (RELEASE). What was lost with a link, or concerns a
hop that only a lost peer knew of, would still keep its slot to the step's end, and a stage whose only slots
are kept so would hold the step for ever. So a hop that must refuse work for want of a slot asks about what it
holds.
"""

from __future__ import annotations

from collections.abc import Callable

from peer.context import Context
from peer.held import Holdings, Phase
from swarm.messages import Holding, Release
from swarm.transport.base import PeerId

ASK_WANTED_S = 1.0
"""Between two questions about one microbatch."""


class Wanted:
    """Asks, and answers as an origin and as the hop before. ``mine(index, attempt)``: does this origin still
    wait for that attempt of the context's step?"""

    def __init__(self, context: Context, held: Holdings, *, mine: Callable[[int, int], bool]) -> None:
        self._context = context
        self._held = held
        self._mine = mine

    def ask(self) -> None:
        """There is no slot left."""
        now = self._context.clock.now()
        for held in self._held.values():
            if held.phase is Phase.RETURNED or held.hop == 0 or now < held.asked_s + ASK_WANTED_S:
                continue
            held.asked_s = now
            step, index, attempt = held.key
            version = held.path[held.hop].version
            question = Holding(step=step, index=index, attempt=attempt, origin=held.origin, version=version)
            for peer in sorted({held.origin, held.path[held.hop - 1].peer} - {self._context.me}):
                self._context.transport.send(peer, question)

    def on_holding(self, sender: PeerId, message: Holding) -> None:
        """Somebody asks: what is of our step and not wanted any more is released."""
        step, index, attempt = message.key
        if step != self._context.step or not self._context.running:
            return
        if message.origin == self._context.me and not self._mine(index, attempt):
            self._context.transport.send(sender, Release(step=step, index=index, attempt=attempt))
            return
        held = self._held.get(message.key)
        if held is not None and held.next_hop == sender:
            return
        if held is not None or message.origin != self._context.me:
            release = Release(step=step, index=index, attempt=attempt, version=message.version)
            self._context.transport.send(sender, release)
