"""Events about other peers, and about this one's way into the swarm and out of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swarm.timeline.base import Count, Event, Peer, Text, Time


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


class Doubted(Event):
    """A peer claims to need ``claimed_s`` for a forward, and others see it need more: it is planned with
    ``seen_s``."""

    other: Peer
    claimed_s: Time
    seen_s: Time


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
    stage: Count
    digest: Text


class MissedAverage(Event):
    """A learner has missed an average, and begins anew."""

    step: Count


class Joined(Event):
    """A learner is a full member from this step on."""

    step: Count


class Moving(Event):
    """A member begins to load the state of another stage, while it works on in its own."""

    step: Count
    stage: Count
    target: Count


class Moved(Event):
    """It hosts the other stage from this step on."""

    step: Count
    stage: Count
    target: Count


class MoveGivenUp(Event):
    """It stays where it is."""

    target: Count
    reason: Text


class FellOut(Event):
    """This peer is out of step with the others and becomes a newcomer."""

    step: Count
    reason: Text
