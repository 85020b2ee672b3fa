"""Whom a step's close lets in: newcomers, and members that change their stage (``join.py``, ``mover.py``)."""

from __future__ import annotations

from peer.context import Context
from swarm.messages import JoinRequest, Member
from swarm.transport.base import PeerId

LAPSE_S = 5.0
"""A newcomer that has not asked again for so long does not want to come in any more."""
MAX_NEWCOMERS = 64


class Newcomers:
    """A member's list of those who asked to come in, and of members who ask to go to another stage."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requests: dict[PeerId, JoinRequest] = {}
        self._heard_s: dict[PeerId, float] = {}

    def on_request(self, sender: PeerId, message: JoinRequest) -> None:
        if len(self._requests) < MAX_NEWCOMERS or sender in self._requests:
            self._requests[sender] = message
            self._heard_s[sender] = self._context.clock.now()

    def known(self) -> set[PeerId]:
        return set(self._requests)

    def prune(self) -> None:
        """Forget those that are members by now."""
        members = {(m.peer, m.stage, m.incarnation) for m in self._context.members if not m.learning}
        for peer, request in list(self._requests.items()):
            if (peer, request.stage, request.incarnation) in members:
                self.forget(peer)

    def forget(self, peer: PeerId) -> None:
        self._requests.pop(peer, None)
        self._heard_s.pop(peer, None)

    def _asks(self, peer: PeerId) -> bool:
        """Does the peer answer, and go on asking?"""
        silent_s = self._context.clock.now() - self._heard_s.get(peer, -LAPSE_S)
        return silent_s < LAPSE_S and self._context.liveness.reachable(peer)

    def admit(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """``members`` with newcomers that live as learners, and learners that are ready as full members.

        A member that moves is a learner of the other stage beside its own, and a full member of one only. It
        never leaves its stage without another; and its entry lapses when it asks no more.
        """
        admitted = {(member.peer, member.stage): member for member in members}
        for member in members:
            moving = member.learning and any(o.peer == member.peer and not o.learning for o in members)
            request = self._requests.get(member.peer)
            if moving and (request is None or request.stage != member.stage or not self._asks(member.peer)):
                del admitted[member.peer, member.stage]
        founders = self._founders(members)
        for peer, request in self._requests.items():
            if self._asks(peer) and peer in founders.get(request.stage, {peer}):
                self._admit(admitted, request, peer)
        return tuple(sorted(admitted.values(), key=lambda member: (member.peer, member.stage)))

    def _admit(self, admitted: dict[tuple[PeerId, int], Member], request: JoinRequest, peer: PeerId) -> None:
        own = [m for m in admitted.values() if m.peer == peer]
        for member in own:
            if member.incarnation != request.incarnation:  # of an earlier life
                del admitted[peer, member.stage]
        own = [member for member in own if member.incarnation == request.incarnation]
        known = admitted.get((peer, request.stage))
        before = next((m for m in own if not m.learning and m.stage != request.stage), None)
        ready = request.ready and request.step == self._context.step
        if known is None:
            admitted[peer, request.stage] = Member(
                peer=peer,
                stage=request.stage,
                incarnation=request.incarnation,
                learning=not ready or before is not None,
            )
        elif known.learning and ready:
            if before is not None:
                stays = any(
                    m.stage == before.stage and not m.learning and m.peer != peer for m in admitted.values()
                )
                if not stays:
                    return
                del admitted[peer, before.stage]
            admitted[peer, request.stage] = known.model_copy(update={"learning": False})

    def _founders(self, members: tuple[Member, ...]) -> dict[int, set[PeerId]]:
        """For each stage without a replica the one newcomer that may come in: it makes the stage's state
        anew, and the next ones take it from there. Whoever holds the newest state of it comes first."""
        founders: dict[int, set[PeerId]] = {}
        for stage in {request.stage for request in self._requests.values()}:
            here = [member for member in members if member.stage == stage]
            if any(not member.learning for member in here):
                continue
            asking = {
                peer: -1 if request.holds is None else request.holds
                for peer, request in self._requests.items()
                if request.stage == stage and self._asks(peer)
            }
            if stage == 0:  # its embedding and head are nowhere else
                asking = {peer: holds for peer, holds in asking.items() if holds >= 0}
            begun = {member.peer for member in here}
            first = min(asking, key=lambda peer: (-asking[peer], peer), default=None)
            founders[stage] = begun or ({first} if first is not None else set())
        return founders
