"""Every message that peers exchange, as frozen pydantic models: schema before use.

A message's ``kind`` names it on the wire. Those that carry a tensor say its dtype and shape in ``tensor``;
the bytes follow the header (``swarm/wire.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PeerName = Annotated[str, Field(min_length=1, max_length=128)]
Step = Annotated[int, Field(ge=0, lt=2**48)]
Index = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=0, lt=2**32)]
Digest = Annotated[str, Field(max_length=64)]
Reason = Annotated[str, Field(max_length=200)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

ChunkDigest = Annotated[bytes, Field(min_length=32, max_length=32)]

MAX_STAGES = 1024
MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNKS = 1 << 14
"""Of a stage's state: 16 GiB, whose index fits a header."""
MAX_MEMBERS = 65536


class TensorSpec(BaseModel):
    """dtype and shape of a tensor that follows a header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16", "int64", "uint8"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], Field(max_length=8)]


class Message(BaseModel):
    """Base of all messages; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Message]]] = {}

    tensor: TensorSpec | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kind = cls.__dict__.get("kind")
        if kind is not None:
            if kind in Message.registry:
                raise TypeError(f"two messages call themselves {kind!r}")
            Message.registry[kind] = cls


class Hop(BaseModel):
    """One place of a path. ``version`` grows each time a rerouting puts another peer there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    peer: PeerName
    version: Count = 0


Path = Annotated[tuple[Hop, ...], Field(min_length=1, max_length=MAX_STAGES)]


class MicrobatchMessage(Message):
    """A message about one attempt at one microbatch. ``attempt`` grows when the origin starts it anew."""

    step: Step
    index: Index
    attempt: Count

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.step, self.index, self.attempt)


class Forward(MicrobatchMessage):
    """An activation ``[B, T, width]`` for ``path[hop]``; ``hop == len(path)`` is the origin's loss.

    ``revision`` grows when a rerouting changes the stages of the path, a hop's ``version`` when it changes
    the peer alone.
    """

    kind = "forward"
    origin: PeerName
    path: Path
    hop: Count
    revision: Count = 0
    evaluate: bool = False

    @model_validator(mode="after")
    def _hop_in_path(self) -> Forward:
        if not 1 <= self.hop <= len(self.path):
            raise ValueError("hop lies outside the path")
        return self


class Backward(MicrobatchMessage):
    """A gradient ``[B, T, width]`` of the output of ``path[hop]``; ``trail`` lists who computed so far."""

    kind = "backward"
    origin: PeerName
    path: Path
    hop: Count
    revision: Count = 0
    trail: Annotated[tuple[Hop, ...], Field(max_length=MAX_STAGES)]

    @model_validator(mode="after")
    def _hop_in_path(self) -> Backward:
        if not 0 <= self.hop < len(self.path):
            raise ValueError("hop lies outside the path")
        return self


class Accept(MicrobatchMessage):
    """The answer to a FORWARD that will be computed."""

    kind = "accept"
    hop: Count


class Arrived(MicrobatchMessage):
    """To the hop before ``peer``, from the hop after it: ``peer``'s output is here. Said of some."""

    kind = "arrived"
    peer: PeerName


class Refuse(MicrobatchMessage):
    """The answer to a FORWARD that will not be computed."""

    kind = "refuse"
    hop: Count
    reason: Literal["busy", "wrong step", "wrong stage", "leaving", "behind"]


class Restart(MicrobatchMessage):
    """A hop's word to the origin that this attempt cannot be finished on its path."""

    kind = "restart"
    reason: Reason


class Release(MicrobatchMessage):
    """Drop what is held for this attempt: the origin's word that it counts nowhere, or with ``version`` the
    hop before's word that another peer took the receiver's place while it could not be reached."""

    kind = "release"
    version: Count | None = None


class Holding(MicrobatchMessage):
    """The sender has no slot left, and holds this attempt as a hop of this ``version``: is it still wanted?
    Asked of the origin and of the hop before; answered by RELEASE if not, else by nothing."""

    kind = "holding"
    origin: PeerName
    version: Count


class TakenOver(Message):
    """Between an origin that is back and one that has taken over from it: the sender has started these of the
    former's microbatches, and has committed those. The former says it of what it goes on with itself."""

    kind = "taken_over"
    step: Step
    indices: Annotated[tuple[Count, ...], Field(max_length=65536)] = ()
    committed: Annotated[tuple[Count, ...], Field(max_length=65536)] = ()


class Commit(MicrobatchMessage):
    """The origin's word that a microbatch went through forward and backward on ``path``."""

    kind = "commit"
    origin: PeerName
    path: Path
    tokens: Count
    loss: Annotated[float, Field(allow_inf_nan=False)]


class Heartbeat(Message):
    """Sent on every link in use.

    ``echo_s`` returns the receiver's own last ``sent_s``, held here for ``held_s``: from both it knows the
    round-trip time without comparing clocks.
    """

    kind = "heartbeat"
    sequence: Count
    incarnation: Count
    step: Step
    progress: Count
    """Compute tasks finished; while it is ``working`` and this stands still, its compute hangs."""
    working: bool = False
    state: Literal["joining", "active", "leaving"]
    epoch: Count = 0
    sent_s: Seconds
    echo_s: Seconds | None = None
    held_s: Seconds = 0.0


class Goodbye(Message):
    """A clean leave: whatever is still held for the sender goes elsewhere at once."""

    kind = "goodbye"
    incarnation: Count


class ProbeRequest(Message):
    """The sender has lost ``peer``: does it answer the receiver? Answered by PROBE_ACK."""

    kind = "probe_request"
    peer: PeerName
    nonce: Count


class Probe(Message):
    """``asker`` wants to know through the sender whether the receiver lives."""

    kind = "probe"
    nonce: Count
    asker: PeerName


class ProbeAck(Message):
    """``peer`` lives in that ``incarnation``; None: the sender has lost it too. With ``asker`` it is on its
    way to a helper, who passes it on without."""

    kind = "probe_ack"
    peer: PeerName
    nonce: Count
    incarnation: Count | None
    asker: PeerName | None = None


Topic = Annotated[str, Field(min_length=1, max_length=64)]
FactVersion = Annotated[int, Field(ge=0, lt=2**62)]
FactHash = Annotated[bytes, Field(max_length=16)]


class GossipEntry(BaseModel):
    """One signed fact. Merging keeps the greater of (version, value): a join-semilattice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Topic
    owner: PeerName
    version: FactVersion
    value: Annotated[bytes, Field(max_length=1 << 20)]
    signature: Annotated[bytes, Field(max_length=64)] = b""


class GossipPush(Message):
    """Facts that the receiver may not know."""

    kind = "gossip_push"
    entries: Annotated[tuple[GossipEntry, ...], Field(max_length=4096)]


Place = Annotated[str, Field(max_length=128)]
FactName = tuple[Topic, PeerName]
FactLine = tuple[Topic, PeerName, FactVersion, FactHash]


class GossipDigest(Message):
    """What the sender's store holds, as hashes or as lists of the facts at a place, and what it wants of the
    receiver's (``scheduler/store.py``: ``Digest``)."""

    kind = "gossip_digest"
    nodes: Annotated[tuple[tuple[Place, FactHash], ...], Field(max_length=4096)] = ()
    held: Annotated[tuple[tuple[Place, tuple[FactLine, ...]], ...], Field(max_length=1024)] = ()
    wanted: Annotated[tuple[FactName, ...], Field(max_length=4096)] = ()


class Member(BaseModel):
    """A peer in the agreed membership of a step. A learner receives every average and takes no work yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: PeerName
    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    incarnation: Count = 0
    learning: bool = False


class Counted(BaseModel):
    """A microbatch that counts in its step: who computed each stage, and how many tokens it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: Index
    attempt: Count
    origin: PeerName
    path: Path
    tokens: Count


class StepClose(BaseModel):
    """What one step's agreement decides: the microbatches that count, and who takes part from here on.

    ``epoch`` is that of the genesis which the membership goes back to: what was decided in an older one is
    given up when the run begins again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: Step
    epoch: Count = 0
    counted: Annotated[tuple[Counted, ...], Field(max_length=1 << 20)]
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MAX_MEMBERS)]


Ballot = Annotated[tuple[Count, PeerName], Field()]
"""(round, proposer); round 0 belongs to the step's first proposer alone."""


class Prepare(Message):
    kind = "prepare"
    step: Step
    ballot: Ballot


class Promise(Message):
    kind = "promise"
    step: Step
    ballot: Ballot
    accepted_ballot: Ballot | None = None
    accepted: StepClose | None = None


class Propose(Message):
    """``adopted``: others accepted this close under an earlier ballot, so it may be decided already."""

    kind = "propose"
    step: Step
    ballot: Ballot
    close: StepClose
    adopted: bool = False


class Accepted(Message):
    kind = "accepted"
    step: Step
    ballot: Ballot


class Rejected(Message):
    """A higher ballot was promised; or the close leaves out what the sender knows of (``objected``)."""

    kind = "rejected"
    step: Step
    ballot: Ballot
    promised: Ballot
    objected: bool = False


class Decided(Message):
    kind = "decided"
    close: StepClose


class StepQuery(Message):
    """What was decided for ``step``? Answered by DECIDED, or by nothing if it is not known."""

    kind = "step_query"
    step: Step


class AverageMessage(Message):
    """A message about averaging one stage's gradients of a closed step among the peers of one roster.

    ``roster`` is the hash of the names of those that average together: each loss makes another roster, so
    that what belongs to one is never mixed into another.
    """

    step: Step
    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    roster: Digest


class AverageStart(AverageMessage):
    """The sender averages among ``members``: somebody was lost, or it waits and shows where it stands.

    Under the roster ``answer``: the average that follows was made by ``members``.
    """

    kind = "average_start"
    members: Annotated[tuple[PeerName, ...], Field(min_length=1, max_length=4096)]
    lineage: Digest = ""


class AveragePart(AverageMessage):
    """The sender's gradient sum of part ``part``, for that part's owner; ``tokens`` stand behind it.

    ``lineage`` names the parameters that it was computed with. ``holds`` is the digest of a larger roster's
    average that the sender holds whole, and has told the digest of, so that who is lost may have applied it.
    """

    kind = "average_part"
    part: Count
    tokens: Count
    lineage: Digest = ""
    holds: Digest = ""


class AverageResult(AverageMessage):
    """The averaged part, the same bytes from its owner to everyone."""

    kind = "average_result"
    part: Count
    parts: Count


class AverageDigest(AverageMessage):
    """The sender holds the whole average, and this is its SHA-256."""

    kind = "average_digest"
    digest: Digest


class AverageDone(AverageMessage):
    """Every peer of the roster holds the average with this digest: apply it. Under the roster ``answer`` an
    empty digest says that the average is not held any more."""

    kind = "average_done"
    digest: Digest


class JoinRequest(Message):
    """A newcomer asks to be admitted to a stage: as a learner, and when it is ``ready`` as a member.

    ``step``: the newest step whose members it knows, 0 if it knows none; when it is ready it holds the state
    of that step. ``holds``: the step of the newest state of that stage on its disk, in case nobody else has
    any.
    """

    kind = "join_request"
    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    incarnation: Count
    step: Step = 0
    ready: bool = False
    holds: Step | None = None


class StateMessage(Message):
    """A message about a stage's state at exactly ``step``: before that step's update."""

    stage: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    step: Step


class StateRequest(StateMessage):
    """Ask a replica for chunk number ``chunk`` of its stage's state, or without one for the index."""

    kind = "state_request"
    chunk: Count | None = None


class StateIndex(StateMessage):
    """What the state's safetensors image consists of: ``total`` bytes in chunks of ``chunk_bytes``, the last
    one shorter, and the SHA-256 of each.

    ``gradient_norm`` is that of the stage's last average: the weight of its parameters where a neighbour
    stage is rebuilt from them.
    """

    kind = "state_index"
    total: Annotated[int, Field(ge=1, lt=2**48)]
    chunk_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    digests: Annotated[tuple[ChunkDigest, ...], Field(min_length=1, max_length=MAX_CHUNKS)]
    lineage: Digest = ""
    gradient_norm: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _adds_up(self) -> StateIndex:
        if len(self.digests) != -(-self.total // self.chunk_bytes):
            raise ValueError("not one digest for each chunk")
        return self


class StateChunk(StateMessage):
    """The bytes of one chunk."""

    kind = "state_chunk"
    chunk: Count


class StateRefused(StateMessage):
    """The state at that step is not held (any more, or yet)."""

    kind = "state_refused"
    reason: Reason
