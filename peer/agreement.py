"""What counts in a step and who goes on: one decision a step, by single-decree Paxos among its members.

The decided value is the step's ``StepClose``. Round 0 belongs to the first peer of the step's draw order,
which needs no promises for it (Lamport, "Paxos Made Simple", 2001, section 3); whoever takes over asks for
promises. A majority of the *agreed* membership must accept, so two parts of a split swarm never close a step
differently. A restarted daemon has another incarnation, is no member, and so cannot forget a promise.

Paxos lets whoever gets votes choose any value. A peer that hears nobody, but is heard, would close the step
with itself alone. So none proposes that does not hear a majority, and a voter refuses a new value that leaves
out what it knows to live or to count (``objection``); only a value that may have been decided already is
taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from peer.context import Context, draw_order
from swarm.messages import (
    Accepted,
    Ballot,
    Decided,
    Message,
    Prepare,
    Promise,
    Propose,
    Rejected,
    StepClose,
    StepQuery,
)
from swarm.transport.base import PeerId

TAKE_OVER_S = 3.0
"""A proposer that could have closed the step and did not is followed by the next after this time."""
TICK_S = 0.5
REMEMBERED_CLOSES = 8

NONE: Ballot = (0, " ")
"""Below every ballot."""


class Agreement:
    """This peer's acceptor and proposer for the step of its context."""

    def __init__(
        self,
        context: Context,
        *,
        ready: Callable[[], StepClose | None],
        objection: Callable[[StepClose], str | None],
        on_decided: Callable[[StepClose], None],
    ) -> None:
        self._context = context
        self._ready = ready
        self._objection = objection
        self._on_decided = on_decided
        self.closes: dict[int, StepClose] = {}
        self._ready_since: float | None = None
        self._alone_since: float | None = None
        self._closed = False
        self._order: tuple[PeerId, ...] = ()
        self._reset()
        context.clock.call_later(TICK_S, self._tick)

    def forget(self) -> None:
        """A new epoch: what an older one decided is given up."""
        self.closes.clear()

    @property
    def without_majority_s(self) -> float:
        """For how long this peer, a voter, has not seen enough others to close a step with; 0 if it does."""
        return 0.0 if self._alone_since is None else self._context.clock.now() - self._alone_since

    def begin(self) -> None:
        """A new step: its members vote on its close."""
        self._order = draw_order(self._context.step, self._voters())
        self._ready_since = None
        self._reset()

    def _reset(self) -> None:
        self._promised: Ballot = NONE
        self._accepted: tuple[Ballot, StepClose] | None = None
        self._ballot: Ballot | None = None
        self._proposal: StepClose | None = None
        self._proposed_at = 0.0
        self._promises: dict[PeerId, Promise] = {}
        self._votes: set[PeerId] = set()
        self._highest_round = 0

    def _voters(self) -> tuple[PeerId, ...]:
        return tuple(sorted(m.peer for m in self._context.members if not m.learning))

    @property
    def majority(self) -> int:
        return len(self._order) // 2 + 1

    @property
    def decided(self) -> bool:
        return self._context.step in self.closes

    def close(self) -> None:
        self._closed = True

    def _tick(self) -> None:
        if not self._closed:
            self._context.clock.call_later(TICK_S, self._tick)
            self._count_living()
            self.consider()

    def _count_living(self) -> None:
        context = self._context
        if not context.active or context.me not in self._order or context.majority_heard:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = context.clock.now()

    # -- proposing -----------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Propose if it is this peer's turn and the step can be closed."""
        context = self._context
        if self._closed or self.decided or context.me not in self._order:
            return
        close = self._ready() if context.majority_heard else None
        if close is None:
            self._ready_since = None
            return
        now = context.clock.now()
        if self._ready_since is None:
            self._ready_since = now
        living = [peer for peer in self._order if not context.liveness.gone(peer)]
        turn_s = living.index(context.me) * TAKE_OVER_S
        stalled = self._ballot is None or now - self._proposed_at > TAKE_OVER_S
        if now - self._ready_since >= turn_s and stalled:
            self._propose(close)

    def _propose(self, close: StepClose) -> None:
        context = self._context
        self._proposed_at = context.clock.now()
        self._votes = set()
        self._promises = {}
        self._proposal = None
        first = self._ballot is None and self._order[0] == context.me and self._promised == NONE
        if first:
            self._ballot = (0, context.me)
            self._ask_votes(close, adopted=False)
        else:
            self._highest_round += 1
            self._ballot = (self._highest_round, context.me)
            self._to_voters(Prepare(step=context.step, ballot=self._ballot))

    def _ask_votes(self, close: StepClose, *, adopted: bool) -> None:
        assert self._ballot is not None
        self._proposal = close
        step = self._context.step
        self._to_voters(Propose(step=step, ballot=self._ballot, close=close, adopted=adopted))

    def _to_voters(self, message: Message) -> None:
        for peer in self._order:
            if peer == self._context.me or self._context.liveness.alive(peer):
                self._context.transport.send(peer, message)

    def on_promise(self, sender: PeerId, message: Promise) -> None:
        if not self._mine(sender, message) or self._proposal is not None:
            return
        self._promises[sender] = message
        if len(self._promises) == self.majority:
            self._context.clock.call_later(TICK_S, self._choose, self._ballot, False)
        self._choose(self._ballot, True)

    def _choose(self, ballot: Ballot | None, patient: bool) -> None:
        """With a majority's promises, ask for votes: on our own close if nothing can have been decided yet,
        else on what was accepted under the highest ballot. If it is not sure, further promises may tell."""
        promises, context = self._promises, self._context
        late = ballot != self._ballot or self._proposal is not None or self.decided or self._closed
        if late or len(promises) < self.majority:
            return
        taken = [p for p in promises.values() if p.accepted is not None and p.accepted_ballot]
        unheard = [peer for peer in self._order if peer not in promises]
        newest = max(taken, key=lambda p: p.accepted_ballot or NONE, default=None)
        if newest is not None and newest.accepted is not None and len(taken) + len(unheard) >= self.majority:
            if not patient or not any(context.liveness.alive(peer) for peer in unheard):
                self._ask_votes(newest.accepted, adopted=True)
            return
        close = self._ready()  # as we see it now: the promises may have been long on their way
        if close is not None:
            self._ask_votes(close, adopted=False)

    def on_accepted(self, sender: PeerId, message: Accepted) -> None:
        if not self._mine(sender, message) or self.decided or self._proposal is None:
            return
        self._votes.add(sender)
        if len(self._votes) >= self.majority:
            decided = Decided(close=self._proposal)
            everyone = {m.peer for m in self._context.members} | {m.peer for m in decided.close.members}
            for peer in sorted(everyone - {self._context.me}):
                self._context.transport.send(peer, decided)
            self._decide(decided.close)

    def on_rejected(self, sender: PeerId, message: Rejected) -> None:
        if not self._mine(sender, message):
            return
        self._highest_round = max(self._highest_round, message.promised[0])
        if message.objected:
            # What it knows of is on its way to us, or it will miss whom we miss: try again in a moment.
            retry_s = self._context.clock.now() - TAKE_OVER_S + TICK_S
            self._proposed_at = min(self._proposed_at, retry_s)

    def _mine(self, sender: PeerId, message: Promise | Accepted | Rejected) -> bool:
        context = self._context
        return message.step == context.step and message.ballot == self._ballot and sender in self._order

    # -- accepting -----------------------------------------------------------------------------------------

    def on_prepare(self, sender: PeerId, message: Prepare) -> None:
        if not self._votable(sender, message):
            return
        step, ballot = message.step, message.ballot
        if ballot <= self._promised:
            self._reject(sender, message)
            return
        self._promised = ballot
        self._highest_round = max(self._highest_round, ballot[0])
        if self._accepted is None:
            self._context.transport.send(sender, Promise(step=step, ballot=ballot))
        else:
            accepted_ballot, accepted = self._accepted
            promise = Promise(step=step, ballot=ballot, accepted_ballot=accepted_ballot, accepted=accepted)
            self._context.transport.send(sender, promise)

    def on_propose(self, sender: PeerId, message: Propose) -> None:
        close = message.close
        if not self._votable(sender, message) or (close.step, close.epoch) != (
            message.step,
            self._context.epoch,
        ):
            return
        if message.ballot[0] == 0 and sender != self._order[0]:
            self._context.strike(sender, "a proposal of round 0 from a peer that is not the first")
        elif message.ballot < self._promised:
            self._reject(sender, message)
        elif self._refused(message):
            self._reject(sender, message, objected=True)
        else:
            self._promised = message.ballot
            self._accepted = (message.ballot, message.close)
            self._context.transport.send(sender, Accepted(step=message.step, ballot=message.ballot))

    def _refused(self, message: Propose) -> bool:
        """Would this new value leave out what we know of?"""
        reason = None if message.adopted else self._objection(message.close)
        if reason is not None:
            self._context.events.emit("objected", step=message.step, other=message.ballot[1], reason=reason)
        return reason is not None

    def _votable(self, sender: PeerId, message: Prepare | Propose) -> bool:
        """Is this a vote on our step, by its own proposer? A laggard is told what was decided."""
        context = self._context
        if message.step != context.step or self.decided:
            close = self.closes.get(message.step)
            if close is not None:
                context.transport.send(sender, Decided(close=close))
            return False
        if message.ballot[1] != sender:
            context.strike(sender, "a ballot in another's name")
            return False
        return sender in self._order and context.me in self._order

    def _reject(self, sender: PeerId, message: Prepare | Propose, *, objected: bool = False) -> None:
        step, ballot = message.step, message.ballot
        rejected = Rejected(step=step, ballot=ballot, promised=self._promised, objected=objected)
        self._context.transport.send(sender, rejected)

    # -- the decision --------------------------------------------------------------------------------------

    def on_decided(self, sender: PeerId, message: Decided) -> None:
        close, context = message.close, self._context
        if (close.step, close.epoch) == (context.step, context.epoch) and not self.decided:
            self._decide(close)

    def on_query(self, sender: PeerId, message: StepQuery) -> None:
        """What was decided; to one so late that this is forgotten, the newest decision."""
        close = self.closes.get(message.step)
        if close is None and self.closes and message.step < min(self.closes):
            close = self.closes[max(self.closes)]
        if close is not None:
            self._context.transport.send(sender, Decided(close=close))

    def _decide(self, close: StepClose) -> None:
        self.closes[close.step] = close
        self.closes.pop(close.step - REMEMBERED_CLOSES, None)
        self._on_decided(close)
