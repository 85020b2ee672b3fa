"""How a local swarm is doing, folded from the event logs that its processes write."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

State = Literal["starting", "training", "finished", "killed", "ended"]
Event = dict[str, Any]

RECENT_S = 10.0
"""The rate shown is that of the last so many seconds."""
MAX_LINE_BYTES = 1 << 20


class Tail:
    """The new whole lines of a growing file of JSON objects; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> Iterator[Event]:
        """What was appended since the last call; a line that is no object is left out."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self._rest = self._rest[:MAX_LINE_BYTES]
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class PeerProgress:
    """One process of the swarm as the view shows it."""

    name: str
    stage: int
    state: State = "starting"
    step: int = 0
    summed: int = 0
    """Microbatches that it computed and that counted."""
    peer: str = ""
    """Its peer id, once it has said anything."""


@dataclass
class Kill:
    """A peer that was killed, and what came after. Times are on the event logs' scale, in seconds."""

    name: str
    stage: int
    step: int
    at_s: float
    next_close_s: float | None = None
    """From the kill until the swarm closed its next step."""
    rerouted: int = 0
    """Microbatches that were rerouted or started anew since."""


@dataclass
class Progress:
    """The fold. ``apply`` takes the events of one process in their order, of several in any order."""

    total_steps: int
    began_s: float = 0.0
    """When the demo began; the scale is that of the events' ``t``."""
    peers: dict[str, PeerProgress] = field(default_factory=dict)
    step: int = 0
    """Steps that are done."""
    tokens: int = 0
    committed: int = 0
    rerouted: int = 0
    restarted: int = 0
    first_commit_s: float | None = None
    training_began_s: float | None = None
    first_step_s: float | None = None
    last_step_s: float | None = None
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss in nats a token), by step."""
    kill: Kill | None = None
    news: str = ""
    """What happened last, for people."""
    _under_way: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Microbatches that an origin has started and not committed, by (step, index): peer ids of the path."""
    _losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def apply(self, name: str, event: Event) -> None:
        """Take in one event of process ``name``; unknown events change nothing."""
        peer, handler = self.peers.get(name), _HANDLERS.get(str(event.get("event")))
        if peer is None:
            return
        peer.peer = str(event.get("peer", ""))
        if peer.state == "starting" and event.get("event") != "opened":
            peer.state = "training"
        if handler is not None:
            handler(self, peer, event)

    def started(self, name: str, stage: int) -> None:
        """A peer's process is there."""
        self.peers[name] = PeerProgress(name, stage)

    def ended(self, name: str) -> None:
        """A peer's process is gone."""
        if self.peers[name].state not in ("killed", "finished"):
            self.peers[name].state = "ended"

    def killed(self, name: str, at_s: float) -> None:
        """The demo killed a peer."""
        peer = self.peers[name]
        peer.state = "killed"
        self.kill = Kill(name, peer.stage, self.step, at_s)
        self.news = f"killed {name} (stage {peer.stage}) with SIGKILL in step {self.step + 1}"

    def at_work(self) -> list[PeerProgress]:
        """Peers on the paths of the microbatches that are under way now, by name."""
        busy = {peer for path in self._under_way.values() for peer in path}
        return sorted((p for p in self.peers.values() if p.peer in busy), key=lambda peer: peer.name)

    @property
    def train(self) -> list[tuple[int, float]]:
        """(step, mean loss of its committed microbatches) of the steps that are done."""
        return [
            (step, total / count) for step, (total, count) in sorted(self._losses.items()) if step < self.step
        ]

    @property
    def training_s(self) -> float:
        """From the first microbatch's start to the last step's end."""
        if self.training_began_s is None or self.last_step_s is None:
            return 0.0
        return self.last_step_s - self.training_began_s

    @property
    def tokens_per_s(self) -> float:
        """Over the whole training."""
        return self.tokens / self.training_s if self.training_s > 0 else 0.0

    @property
    def recent_tokens_per_s(self) -> float:
        """Over the last ``RECENT_S`` seconds."""
        if len(self._recent) < 2:
            return 0.0
        (first_s, before), (last_s, now) = self._recent[0], self._recent[-1]
        return (now - before) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Predicted time to the last step."""
        rate = self.recent_tokens_per_s
        if not self.step or rate <= 0:
            return None
        return (self.total_steps - self.step) * (self.tokens / self.step) / rate

    # -- events --------------------------------------------------------------------------------------------

    def _started(self, peer: PeerProgress, event: Event) -> None:
        if self.training_began_s is None or event["t"] < self.training_began_s:
            self.training_began_s = event["t"]
        hops = [hop.partition(":")[2] for hop in event["path"]]
        self._under_way[event["step"], event["index"]] = hops

    def _committed(self, peer: PeerProgress, event: Event) -> None:
        self._under_way.pop((event["step"], event["index"]), None)
        total, count = self._losses.get(event["step"], (0.0, 0))
        self._losses[event["step"]] = (total + event["loss"], count + 1)
        if self.first_commit_s is None:
            self.first_commit_s = event["t"]
            self.news = (
                f"the first microbatch is committed, {event['t'] - self.began_s:.1f} s after the start"
            )

    def _closed(self, peer: PeerProgress, event: Event) -> None:
        kill = self.kill
        if kill is None or event["t"] < kill.at_s:
            return
        after_s = event["t"] - kill.at_s
        if kill.next_close_s is None:
            self.news = f"step {event['step'] + 1} closed {after_s:.2f} s after {kill.name} was killed"
        kill.next_close_s = min(after_s, kill.next_close_s if kill.next_close_s is not None else after_s)

    def _stepped(self, peer: PeerProgress, event: Event) -> None:
        peer.step = event["step"] + 1
        if event["step"] < self.step:
            return
        self.step = event["step"] + 1
        self._under_way = {key: path for key, path in self._under_way.items() if key[0] >= self.step}
        self.tokens += event["tokens"]
        self.committed += event["committed"]
        self.last_step_s = event["t"]
        self.first_step_s = self.first_step_s or event["t"]
        if not self._recent and self.training_began_s is not None:
            self._recent.append((self.training_began_s, 0))
        self._recent.append((event["t"], self.tokens))
        while len(self._recent) > 2 and self._recent[0][0] < event["t"] - RECENT_S:
            self._recent.popleft()

    def _summed(self, peer: PeerProgress, event: Event) -> None:
        peer.summed += len(event["order"])

    def _validated(self, peer: PeerProgress, event: Event) -> None:
        self.validation.append((event["step"], event["loss"]))
        self.validation.sort()

    def _rerouted(self, peer: PeerProgress, event: Event) -> None:
        self.rerouted += 1
        self._after_kill(event)

    def _restarted(self, peer: PeerProgress, event: Event) -> None:
        self.restarted += 1
        self._after_kill(event)

    def _after_kill(self, event: Event) -> None:
        if self.kill is not None and event["t"] >= self.kill.at_s:
            self.kill.rerouted += 1

    def _finished(self, peer: PeerProgress, event: Event) -> None:
        if peer.state != "killed":
            peer.state = "finished"


_HANDLERS = {
    "started": Progress._started,
    "committed": Progress._committed,
    "closed": Progress._closed,
    "summed": Progress._summed,
    "stepped": Progress._stepped,
    "validated": Progress._validated,
    "rerouted": Progress._rerouted,
    "restarted": Progress._restarted,
    "finished": Progress._finished,
}
