"""Every event that anything emits, declared once: the schema of the event log.

A line is ``{"t": seconds, "peer": id, "event": name, ...fields}``; ``t`` is on the writer's monotonic scale.
The class's name in snake case is the event's name, its docstring the meaning; ``docs/events.md`` is made of
them. What a log holds may come from anyone: each field is bounded, and no number is infinite.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Time = Annotated[float, Field(ge=0.0, le=1e9)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Text = Annotated[str, StringConstraints(max_length=4096)]
Peer = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Hop = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}:", max_length=140)]
"""``stage:peer``."""
Path = Annotated[list[Hop], Field(max_length=4096)]
Peers = Annotated[list[Peer], Field(max_length=100_000)]
Members = Annotated[list[Hop], Field(max_length=100_000)]
Added = Annotated[list[tuple[Count, Count]], Field(max_length=1_000_000)]
CountedOf = Annotated[list[tuple[Count, Count, Peer, Path, Count]], Field(max_length=1_000_000)]
Kind = Literal["forward", "backward", "weight", "loss"]


class Event(BaseModel):
    """Fields of a later version are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    frequent: ClassVar[bool] = False
    """Comes with every microbatch, or as often as a stranger likes: written within a second, not at once."""


class _Microbatch(Event):
    """What concerns one attempt at one microbatch."""

    step: Count
    index: Count
    attempt: Count


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
    """The stage's state before ``step`` is on disk."""

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


class Started(_Microbatch):
    """The origin has started an attempt on this path."""

    path: Path


class Received(_Microbatch):
    """A hop has taken a microbatch of a step whose parameters it does not have yet."""

    frequent = True
    other: Peer


class Computed(_Microbatch):
    """A task of a microbatch was computed: seconds in the queue, seconds of computing. What comes of it is
    sent on at once."""

    frequent = True
    kind: Kind
    wait_s: Time
    run_s: Time


class Refused(_Microbatch):
    """The next hop has refused it."""

    frequent = True
    other: Peer
    reason: Text


class Sent(_Microbatch):
    """What a hop holds was sent once more: all replicas were full, or the link was broken."""

    frequent = True
    other: Peer
    kind: Literal["forward", "backward"]


class Rerouted(_Microbatch):
    """A hop has put another peer, another stage or nothing in the place of the next hop, because that was
    lost or refused."""

    stage: Count
    lost: Peer
    cause: Literal["lost", "refused"]
    reason: Text
    path: Path


class Restarted(_Microbatch):
    """The origin has given an attempt up, and will start another."""

    reason: Text


class TakenOver(Event):
    """An origin starts a microbatch that a lost origin had drawn."""

    step: Count
    index: Count
    lost: Peer


class Committed(_Microbatch):
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
    members of the next step."""

    step: Count
    counted: CountedOf
    members: Members


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
    digest: Text
    tokens: Count
    committed: Count
    rerouted: Count
    loss: Number | None
    grad_norm: Number | None = None
    learning_rate: Number | None = None


# -- peers -------------------------------------------------------------------------------------------------


class Lost(Event):
    """Another peer is suspected: out of all routes."""

    other: Peer
    reason: Text


class Back(Event):
    """A lost peer answers again."""

    other: Peer


class Vouched(Event):
    """Another peer reaches one that we have lost."""

    other: Peer
    incarnation: Count


class Gone(Event):
    """The loss is confirmed: membership, averaging and samples go on without the peer."""

    other: Peer


class Goodbye(Event):
    """Another peer has left."""

    other: Peer


class Strike(Event):
    """A peer has sent what no honest peer sends."""

    frequent = True
    other: Peer
    reason: Text


class Banned(Event):
    """A peer is banned for so long."""

    other: Peer
    reason: Text
    duration_s: Time


class Pardoned(Event):
    """A ban is over."""

    other: Peer


class Founded(Event):
    """This peer is one of those who begin an epoch."""

    epoch: Count
    step: Count
    members: Count


class Admitted(Event):
    """A close has let this newcomer in, as a learner."""

    step: Count


class DownloadFailed(Event):
    """No replica's state could be had."""

    reason: Text


class Loaded(Event):
    """The stage's state of a step was taken, with the number of chunks from each source."""

    step: Count
    digest: Text
    bytes: Count
    sources: Annotated[dict[Peer, Count], Field(max_length=4096)] | None = None


class StageRestored(Event):
    """A stage without a replica goes on at ``step``: from what this peer kept, or from its neighbours'
    parameters, of step ``of_step``."""

    stage: Count
    step: Count
    digest: Text
    source: Literal["memory", "checkpoint", "neighbours"]
    of_step: Count


class RestoreFailed(Event):
    """A stage without a replica cannot be restored by this peer."""

    reason: Text


class Followed(Event):
    """A learner has applied an average of its stage."""

    step: Count
    digest: Text


class MissedAverage(Event):
    """A learner has missed an average, and begins anew."""

    step: Count


class Joined(Event):
    """A learner is a full member from this step on."""

    step: Count


class FellOut(Event):
    """This peer is out of step with the others and becomes a newcomer."""

    step: Count
    reason: Text


# -- the table ---------------------------------------------------------------------------------------------


def _name(event: type[Event]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower()


def _declared(base: type[Event]) -> list[type[Event]]:
    """In the order of this file."""
    own = [] if base.__name__.startswith("_") or base is Event else [base]
    return own + [event for below in base.__subclasses__() for event in _declared(below)]


EVENTS: dict[str, type[Event]] = {_name(event): event for event in _declared(Event)}
FREQUENT: frozenset[str] = frozenset(name for name, event in EVENTS.items() if event.frequent)
