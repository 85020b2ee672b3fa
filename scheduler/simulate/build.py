"""From a peers file and a model's sizes to a scheduling problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import ValidationError

from scheduler.assignment import Hosted, choose_stage
from scheduler.errors import SchedulerError
from scheduler.instance import UNLIMITED_BYTES_PER_S, Instance, Link, PeerSpec
from scheduler.simulate.devices import flops_per_s
from scheduler.simulate.model import STATE_BYTES, ModelSizes, Work
from scheduler.simulate.networks import NetworkProfile, bytes_per_s
from scheduler.simulate.peers import PeerEntry, PeersFile
from scheduler.simulate.places import Place, find_city, latency_s


class _Way(NamedTuple):
    one_way_s: float
    bytes_per_s: float


class Swarm:
    """The peers of a file with all that does not depend on who hosts what."""

    def __init__(self, file: PeersFile, sizes: ModelSizes) -> None:
        """Raises SchedulerError, in one line, for what cannot be: an unknown city, a peer too small."""
        self.sizes = sizes
        self.entries = {name: entry for entry in file.peers for name in entry.names}
        self._network = NetworkProfile.load(file.network) if file.network is not None else None
        self._places = {entry.name: self._place(entry) for entry in file.peers}
        self._ways = self._all_ways()
        last = len(sizes.stages) - 1
        for entry in file.peers:
            if entry.fixed_stage is not None and entry.fixed_stage > last:
                raise SchedulerError(
                    f"peer {entry.name}: stage {entry.fixed_stage} of {last + 1}; the last is {last}"
                )
            # Without a stage of its own it must have room for any.
            for stage in range(last + 1) if entry.fixed_stage is None else (entry.fixed_stage,):
                self._slots(entry, stage)
        self.fixed = {
            name: entry.fixed_stage for name, entry in self.entries.items() if entry.fixed_stage is not None
        }

    def instance(self, stage_of: Mapping[str, int]) -> Instance:
        """The problem with these places. Raises SchedulerError, in one line, if none comes of it."""
        sizes = self.sizes
        origins = [name for name in self.entries if stage_of[name] == 0]
        if not origins:
            raise SchedulerError(
                "nobody hosts stage 0, which starts the microbatches; leave out a peer's stage"
            )
        others = len({stage for stage in stage_of.values() if stage})
        each = sizes.microbatches_per_origin
        mean = len(origins) * each * (sizes.path_length - 1) / max(1, others)
        try:
            return Instance(
                stages=len(sizes.stages),
                path_length=sizes.path_length,
                peers=tuple(self._spec(name, stage_of[name]) for name in self.entries),
                microbatches=dict.fromkeys(origins, each),
                activation_bytes=sizes.activation_bytes,
                links=self._links(),
                coverage_tolerance=max(1, int(mean * sizes.coverage_tolerance)),
                gradient_bytes=tuple(sizes.gradient_bytes(stage) for stage in range(len(sizes.stages))),
            )
        except ValidationError as error:
            raise SchedulerError.of("instance", error) from None

    def first_stages(self) -> dict[str, int]:
        """The stages that the file gives; the other peers, the fastest first, take the stage most in need, as
        newcomers do."""
        sizes = self.sizes
        stages = range(len(sizes.stages))
        works = [sizes.work(stage) for stage in stages]
        weights = [w.forward + w.backward + w.weight + (0.0 if s else w.loss) for s, w in enumerate(works)]
        speed = {name: 1 / self._spec(name, 0).work_s for name in self.entries}
        stage_of = dict(self.fixed)
        for name in sorted(self.entries, key=lambda name: (-speed[name], name)):
            if name not in stage_of:
                # ``Hosted`` wants the seconds of a visit to the peer's own stage.
                hosted = [Hosted(stage, weights[stage] / speed[other]) for other, stage in stage_of.items()]
                stage_of[name] = choose_stage(
                    hosted,
                    stages=len(stages),
                    path_length=sizes.path_length,
                    start_replicas=sizes.start_replicas,
                    work_s=weights,
                )
        return stage_of

    # -- peers ---------------------------------------------------------------------------------------------

    def _spec(self, name: str, stage: int) -> PeerSpec:
        entry, network = self.entries[name], self._network
        up, down = entry.up_mbit_s, entry.down_mbit_s
        if network is not None:
            up, down = up or network.up_mbit_per_s, down or network.down_mbit_per_s
        forward_s, backward_s, weight_s, loss_s = self._seconds(entry, self.sizes.work(stage))
        return PeerSpec(
            peer=name,
            stage=stage,
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=weight_s,
            loss_s=loss_s,
            memory_slots=self._slots(entry, stage),
            up_bytes_per_s=bytes_per_s(up),
            down_bytes_per_s=bytes_per_s(down),
        )

    def _seconds(self, entry: PeerEntry, work: Work) -> tuple[float, float, float, float]:
        """(forward, backward, weight, loss) of one microbatch."""
        if entry.forward_s is not None and entry.backward_s is not None:
            share = work.forward / self.sizes.work().forward
            return (
                share * entry.forward_s,
                share * entry.backward_s,
                share * entry.weight_s,
                entry.loss_s,
            )
        if entry.tflops is not None:
            speed = 1e12 * entry.tflops
        else:
            try:
                speed = flops_per_s(entry.device or "", self.sizes.dtype)
            except SchedulerError as error:
                raise SchedulerError(f"peer {entry.name}: {error}") from None
        return work.forward / speed, work.backward / speed, work.weight / speed, work.loss / speed

    def _slots(self, entry: PeerEntry, stage: int) -> int:
        if entry.slots is not None:
            return entry.slots
        if entry.memory_gb is None:
            return self.sizes.memory_slots
        slots = self.sizes.slots_in(1e9 * entry.memory_gb, stage)
        if not slots:
            state_gb = STATE_BYTES * self.sizes.parameters(stage) / 1e9
            raise SchedulerError(
                f"peer {entry.name}: {entry.memory_gb:g} GB hold no microbatch of stage {stage}, whose "
                f"weights and optimizer alone take {state_gb:.1f} GB; give it another stage, or smaller "
                "stages or microbatches in the manifest"
            )
        return min(slots, self.sizes.memory_slots)

    # -- ways ----------------------------------------------------------------------------------------------

    def _place(self, entry: PeerEntry) -> Place | str | None:
        """Where it is, or its region."""
        if entry.region is not None and self._network is not None:
            if entry.region not in self._network.regions:
                raise SchedulerError(
                    f"peer {entry.name}: no region {entry.region!r} in {self._network.name}; there are: "
                    + ", ".join(self._network.regions)
                )
            return entry.region
        if entry.lat is not None and entry.lon is not None:
            return Place(entry.lat, entry.lon)
        if entry.city is None:
            return None
        try:
            return find_city(entry.city)
        except SchedulerError as error:
            raise SchedulerError(f"peer {entry.name}: {error}") from None

    def _all_ways(self) -> dict[tuple[str, str], _Way]:
        """Between each two peers, in each direction."""
        between: dict[tuple[str, str], _Way] = {}
        return {(a, b): self._way(a, b, between) for a in self.entries for b in self.entries if a != b}

    def _way(self, a: str, b: str, between: dict[tuple[str, str], _Way]) -> _Way:
        """``between`` remembers what lies between the places of two entries."""
        here, there = self.entries[a], self.entries[b]
        known = between.get((here.name, there.name)) or self._between_places(here, there)
        if known is not None:
            between[here.name, there.name] = known
        explicit_ms = here.latency_ms.get(b, there.latency_ms.get(a))
        if explicit_ms is not None:
            return _Way(explicit_ms / 1e3, known.bytes_per_s if known else UNLIMITED_BYTES_PER_S)
        if known is None:
            raise SchedulerError(
                f"no latency between {a} and {b}: give both a city (or lat and lon, or a region of one "
                "network), or one of them latency_ms to the other"
            )
        return known

    def _between_places(self, a: PeerEntry, b: PeerEntry) -> _Way | None:
        here, there = self._places[a.name], self._places[b.name]
        if isinstance(here, Place) and isinstance(there, Place):
            return _Way(latency_s(here, there), UNLIMITED_BYTES_PER_S)
        if isinstance(here, str) and isinstance(there, str) and self._network is not None:
            pair = self._network.between(here, there)
            return _Way(pair.one_way_ms / 1e3, bytes_per_s(pair.bandwidth_mbit_per_s))
        return None

    def _links(self) -> tuple[Link, ...]:
        return tuple(Link(a, b, way.one_way_s, way.bytes_per_s) for (a, b), way in self._ways.items())
