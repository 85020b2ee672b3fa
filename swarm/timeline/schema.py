"""Every event that anything emits, declared once: the schema of the event log.

A line is ``{"t": seconds, "peer": id, "event": name, ...fields}``; ``t`` is on the writer's monotonic scale.
The class's name in snake case is the event's name, its docstring the meaning; ``docs/events.md`` is made of
them, and of those in ``about_peers.py``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from swarm.timeline import about_peers
from swarm.timeline.base import (
    Added,
    Count,
    CountedOf,
    Event,
    Kind,
    Members,
    Microbatch,
    Number,
    Path,
    Peer,
    Peers,
    Text,
    Time,
)

SCHEMA_VERSION = 1

# -- the log and its peer ----------------------------------------------------------------------------------


class Opened(Event):
    """A process has opened its log: the schema's version, Unix time at ``t``, and the clock that ``t`` is of
    (logs with the same name share it)."""

    version: Count
    unix_s: Annotated[float, Field(ge=0.0, le=1e12)]
    clock: Text


class Began(Event):
    """A life of the peer has begun, in this stage."""

    stage: Count
    incarnation: Count


class Ready(Event):
    """The bootstrap node can be joined by this join string."""

    join: Text


class Waiting(Event):
    """The bootstrap node counts the replicas of each stage, and says what is lacking."""

    replicas: Annotated[list[Count], Field(max_length=4096)]
    lacking: Text


class Genesis(Event):
    """The bootstrap node has signed who begins an epoch, and at which step."""

    epoch: Count
    step: Count
    members: Count


class Directory(Event):
    """The directory could not be asked or told."""

    reason: Text


class Checkpoint(Event):
    """The stage's state before ``step`` of ``epoch`` is on disk."""

    epoch: Count
    step: Count
    path: Text


class CheckpointFailed(Event):
    """The disk took no checkpoint."""

    step: Count
    reason: Text


class ComputeFailed(Event):
    """This peer's own arithmetic failed; the daemon ends."""

    reason: Text


class Emulated(Event):
    """For benchmarks and tests this peer does something to itself (``peer/emulation.py``): ``do``, for so
    long, to its links to ``peers`` (none named: to all); or a message that it was to watch for came, and it
    does ``then``."""

    do: Text
    duration_s: Time | None = None
    peers: Peers | None = None
    number: Count | None = None
    other: Peer | None = None
    step: Count | None = None
    index: Count | None = None
    then: Text | None = None


class Finished(Event):
    """The run's last step is done."""

    step: Count


# -- a microbatch ------------------------------------------------------------------------------------------


class Started(Microbatch):
    """The origin has started an attempt on this path."""

    path: Path


class Received(Microbatch):
    """A hop has taken a microbatch of a step whose parameters it does not have yet."""

    frequent = True
    other: Peer


class Computed(Microbatch):
    """A task of a microbatch was computed: seconds in the queue, seconds of computing. It came at ``t`` less
    both; what comes of it is sent on at ``t``."""

    frequent = True
    kind: Kind
    wait_s: Time
    run_s: Time


class Refused(Microbatch):
    """The next hop has refused it."""

    frequent = True
    other: Peer
    reason: Text


class Sent(Microbatch):
    """What a hop holds was sent once more: all replicas were full, or the link was broken."""

    frequent = True
    other: Peer
    kind: Literal["forward", "backward"]


class Rerouted(Microbatch):
    """A hop has put another peer, another stage or nothing in the place of the next hop, because that was
    lost or refused."""

    stage: Count
    lost: Peer
    cause: Literal["lost", "refused"]
    reason: Text
    path: Path


class Restarted(Microbatch):
    """The origin has given an attempt up, and will start another."""

    reason: Text


class TakenOver(Event):
    """An origin starts a microbatch that a lost origin had drawn."""

    step: Count
    index: Count
    lost: Peer


class GivenBack(Event):
    """The origin that drew the microbatch is back and starts it itself."""

    step: Count
    index: Count
    other: Peer


class LeftTo(Event):
    """An origin that is back leaves a microbatch to the one that has started it meanwhile."""

    step: Count
    index: Count
    other: Peer


class Committed(Microbatch):
    """The origin has its own backward: the microbatch counts, on the path that its gradient took."""

    loss: Number
    path: Path


class Stale(Event):
    """A message of another life than the step's membership names was passed over."""

    frequent = True
    other: Peer
    message: Text
    step: Count


# -- a step ------------------------------------------------------------------------------------------------


class Planned(Event):
    """This origin has found a plan; the makespan that the simulator predicts."""

    step: Count
    makespan_s: Number
    epoch: Text


class NoPlan(Event):
    """There is no plan for the peers that live."""

    reason: Text


class Validated(Event):
    """The validation loss of a step, in nats a token."""

    step: Count
    loss: Number
    tokens: Count


class Done(Event):
    """This origin has committed all that it drew."""

    step: Count
    committed: Count


class Closed(Event):
    """The step's one decision: microbatches that count, as [index, attempt, origin, path, tokens], and the
    members of the next step; learners among them take no work yet."""

    step: Count
    counted: CountedOf
    members: Members
    learners: Peers = Field(default_factory=list)


class Summed(Event):
    """The sum of gradients holds what the close counts here, added in the order of these [index, attempt]."""

    step: Count
    order: Added


class Objected(Event):
    """This peer votes against the close of another that leaves out what it knows of."""

    step: Count
    other: Peer
    reason: Text


class Rebuilt(Event):
    """The sum held what the close does not count, and was computed anew."""

    step: Count
    counted: Count


class Averaged(Event):
    """The replicas of the stage have the same average."""

    step: Count
    stage: Count
    members: Peers
    digest: Text


class AveragingAgain(Event):
    """The averaging begins again with these members."""

    step: Count
    members: Peers


class LineagesDiffer(Event):
    """Replicas have applied other averages before; these stay together."""

    step: Count
    stay: Peers


class DigestsDiffer(Event):
    """Members of an averaging hold other bytes."""

    step: Count
    digests: Annotated[dict[Peer, Text], Field(max_length=100_000)]


class Stepped(Event):
    """The average is applied: the step is over for this peer. ``rerouted`` counts since its process began."""

    step: Count
    stage: Count
    digest: Text
    tokens: Count
    committed: Count
    rerouted: Count
    loss: Number | None
    grad_norm: Number | None = None
    learning_rate: Number | None = None


# -- the table ---------------------------------------------------------------------------------------------


def _name(event: type[Event]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower()


def _declared(base: type[Event]) -> list[type[Event]]:
    """In the order of their files."""
    own = [] if base in (Event, Microbatch) else [base]
    return own + [event for below in base.__subclasses__() for event in _declared(below)]


def _beside(event: type[Event]) -> bool:
    return event.__module__ == about_peers.__name__


EVENTS: dict[str, type[Event]] = {_name(event): event for event in sorted(_declared(Event), key=_beside)}
FREQUENT: frozenset[str] = frozenset(name for name, event in EVENTS.items() if event.frequent)
