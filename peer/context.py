"""What the parts of one daemon share: its place in the run, and the means to talk, wait and compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from peer.ledger import Ledger
from peer.liveness import Liveness
from peer.worker import Worker
from swarm.clock import Clock
from swarm.events import EventLog
from swarm.messages import Hop, Member, TensorSpec
from swarm.transport.base import PeerId, Transport


class Backend(Protocol):
    """One stage's arithmetic, called on the compute thread only. ``StageBackend`` computes with torch.

    Activations and gradients are in the wire's form: ``[B, T, width]`` of the run's wire dtype; stage 0 takes
    token ids ``[B, T]``. ``saved`` and ``deferred`` are opaque and used at most once.
    """

    def forward(self, inputs: Any) -> tuple[Any, Any]:
        """(output, saved)"""
        ...

    def infer(self, inputs: Any) -> Any:
        """The output alone; nothing is kept."""
        ...

    def backward(self, saved: Any, gradient: Any) -> tuple[Any, Any]:
        """(gradient of the input, deferred weight gradients)"""
        ...

    def loss(self, output: Any, labels: Any) -> tuple[float, int, Any, Any]:
        """(loss summed over tokens in nats, tokens, gradient of ``output``, deferred); stage 0 only."""
        ...

    def infer_loss(self, output: Any, labels: Any) -> tuple[float, int]:
        """(loss summed over tokens in nats, tokens); stage 0 only."""
        ...

    def accumulate(self, deferred: Any) -> None:
        """Compute weight gradients and add them to the sum."""
        ...

    def discard_gradient(self) -> None:
        """Set the sum to zero."""
        ...

    def gradient_part(self, part: int, parts: int) -> Any:
        """Part ``part`` of the sum, not copied: it must not be changed before it was delivered."""
        ...

    def part_spec(self, part: int, parts: int) -> TensorSpec:
        """What a part looks like on the wire."""
        ...

    def combine(self, contributions: list[Any], tokens: int) -> Any:
        """The contributions' sum in their order, divided by ``tokens``."""
        ...

    def usable(self, values: Any) -> bool:
        """Are all numbers of a contribution finite?"""
        ...

    def set_average(self, part: int, parts: int, values: Any) -> None: ...

    def average_part(self, part: int, parts: int) -> Any: ...

    def average_digest(self) -> str: ...

    def update(self) -> tuple[str, dict[str, float]]:
        """Apply the average, clear the sum: (digest of the parameters, figures to report)."""
        ...

    def image_bytes(self, stage: int | None = None) -> int:
        """No honest ``state_image`` of our or another stage is longer."""
        ...

    def state_image(self) -> bytes: ...

    def load_image(self, image: bytes) -> str:
        """Take the state, whole or not at all; its digest. Raises ValueError on anything malformed."""
        ...

    def rebuild(self, neighbours: list[tuple[int, bytes, float]]) -> None:
        """Take the mean of neighbour stages, (stage, image, gradient norm) each, for the stage's own state
        that is lost. Raises ValueError on anything malformed."""
        ...

    def skip_to(self, step: int) -> str:
        """The state is that of ``step``, with nothing learned since its own; the parameters' digest."""
        ...

    def from_bytes(self, data: Any) -> Any:
        """A tensor of uint8 ``[n]`` that holds a copy of ``data``."""
        ...

    def to_bytes(self, chunk: Any) -> Any:
        """The bytes of a tensor of uint8 ``[n]``."""
        ...


class Batches(Protocol):
    """The run's data: any origin can draw any sample."""

    def train(self, step: int, index: int) -> tuple[Any, Any]:
        """Tokens and labels ``[B, T]``."""
        ...

    def validation(self, index: int) -> tuple[Any, Any]: ...


class Routes(Protocol):
    """Where microbatches go (``peer/planner.py``)."""

    def path(self, position: int, avoid: frozenset[PeerId] = frozenset()) -> tuple[Hop, ...]:
        """The path of this origin's microbatch number ``position`` of the step, from the plan it holds;
        around the peers of ``avoid`` where their stages have others."""
        ...

    def full_path(self) -> tuple[Hop, ...]:
        """One living peer of every stage, for the validation loss."""
        ...

    def replacement(self, stage: int, exclude: set[PeerId]) -> PeerId | None:
        """The living replica of ``stage`` with the least predicted finish."""
        ...


State = Literal["joining", "active", "leaving"]


@dataclass(frozen=True)
class StepRules:
    """What the protocol needs of the manifest."""

    stages: int
    path_length: int
    min_path_length: int
    microbatches_per_origin: int
    memory_slots: int
    total_steps: int
    validation_every: int
    validation_microbatches: int
    activation: TensorSpec
    start_replicas: int = 1
    coverage_tolerance: float = 0.3
    """By what share of the mean number of visits two stages may differ in one step."""
    work_s: tuple[float, ...] = ()
    """Relative work of each stage; equal if empty."""


@dataclass
class Context:
    """One daemon's place in the run. ``core.py`` alone changes ``step``, ``members`` and ``ledger``."""

    me: PeerId
    stage: int
    incarnation: int
    rules: StepRules
    clock: Clock
    transport: Transport
    worker: Worker
    backend: Backend
    events: EventLog
    step: int = 0
    epoch: int = 0
    """Of the genesis that the membership goes back to."""
    members: tuple[Member, ...] = ()
    origins_of_step: tuple[PeerId, ...] = ()
    running: bool = False
    """Forward and backward of ``step`` may be computed: the parameters are those of this step."""
    active: bool = False
    """A member that takes work; false while joining."""
    lineage: str = ""
    """Names the parameters by the averages that were applied to them (``averaging.lineage_after``)."""
    leaving: bool = False
    """This peer finishes ``step`` and takes nothing of a later one."""
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    liveness: Liveness = None  # type: ignore[assignment]
    routes: Routes = None  # type: ignore[assignment]
    strike: Callable[[PeerId, str], None] = lambda peer, reason: None
    say: Callable[[str], None] = lambda line: None
    """A line for the volunteer."""
    _order: tuple[int, tuple[PeerId, ...], tuple[PeerId, ...]] = (-1, (), ())
    _lives: tuple[tuple[Member, ...], dict[PeerId, int]] = ((), {})

    def replicas(self, stage: int) -> tuple[PeerId, ...]:
        """Members that take work for ``stage``, alive or not, in a fixed order."""
        return tuple(sorted(m.peer for m in self.members if m.stage == stage and not m.learning))

    def living(self, stage: int) -> tuple[PeerId, ...]:
        """Members of ``stage`` that are not known to be lost."""
        return tuple(peer for peer in self.replicas(stage) if self.liveness.alive(peer))

    @property
    def lives(self) -> dict[PeerId, int]:
        """The agreed members, learners too, each with the life that the membership names."""
        if self._lives[0] is not self.members:
            self._lives = (self.members, {member.peer: member.incarnation for member in self.members})
        return self._lives[1]

    def drawn_by(self, step: int, index: int) -> PeerId | None:
        """The origin that drew ``index`` of our step; None for another step, whose origins may differ."""
        if step != self.step or not self.origins_of_step:
            return None
        if self._order[:2] != (step, self.origins_of_step):
            self._order = (step, self.origins_of_step, draw_order(step, self.origins_of_step))
        return self._order[2][index % len(self.origins_of_step)]

    @property
    def majority_heard(self) -> bool:
        """Does this peer hear most of the members that vote? Who does not may be the one that is cut off."""
        voters = [member.peer for member in self.members if not member.learning]
        return 2 * sum(map(self.liveness.alive, voters)) > len(voters)

    @property
    def state(self) -> State:
        """What others are told of us."""
        return "leaving" if self.leaving else "active" if self.active else "joining"

    @property
    def microbatches(self) -> int:
        """Microbatches of this step, over all origins of the agreed membership."""
        return self.rules.microbatches_per_origin * len(self.origins_of_step)


def draw_order(step: int, peers: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """The peers in an order that changes from step to step and that nobody chooses: by hash(step, peer)."""
    return tuple(sorted(peers, key=lambda peer: hashlib.sha256(f"{step}|{peer}".encode()).digest()))
