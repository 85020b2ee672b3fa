"""A state from several donors, honest, slow, lost and lying."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from peer.download import INDEX_S, STALL_S, WINDOW, Download
from swarm.clock import SimClock
from swarm.messages import MAX_CHUNK_BYTES, StateChunk, StateIndex, StateRequest, TensorSpec

STAGE, STEP, CHUNK = 1, 7, 10
LARGEST = 1000


def image(total: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8).tobytes()


def index_of(data: bytes, lineage: str = "l") -> StateIndex:
    return StateIndex(
        stage=STAGE,
        step=STEP,
        total=len(data),
        chunk_bytes=CHUNK,
        digests=tuple(hashlib.sha256(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK)),
        lineage=lineage,
    )


class Bench:
    """A download from donors, each with its image and the time that an answer takes."""

    def __init__(self, **donors: tuple[bytes, float]) -> None:
        self.clock = SimClock()
        self.donors = donors
        self.requests: list[tuple[str, int | None]] = []
        self.strikes: list[str] = []
        self.got: list[bytes] = []
        self.failed: list[str] = []
        self.silent: set[str] = set()
        self.spoils: set[str] = set()
        context: Any = SimpleNamespace(
            clock=self.clock,
            transport=SimpleNamespace(send=self._send),
            backend=SimpleNamespace(to_bytes=lambda chunk: chunk.tobytes()),
            strike=lambda peer, reason: self.strikes.append(peer),
        )
        self.download = Download(
            context,
            STAGE,
            STEP,
            largest=LARGEST,
            on_image=lambda index, data: self.got.append(data),
            on_failed=self.failed.append,
        )
        self.download.begin(donors)

    def _send(self, to: str, request: StateRequest) -> None:
        self.requests.append((to, request.chunk))
        if to not in self.silent:
            self.clock.call_later(self.donors[to][1], self._answer, to, request)

    def _answer(self, donor: str, request: StateRequest) -> None:
        data = self.donors[donor][0]
        if donor in self.silent:
            return
        if request.chunk is None:
            self.download.on_index(donor, index_of(data))
            return
        values = np.frombuffer(data[request.chunk * CHUNK :][:CHUNK], dtype=np.uint8)
        spec = TensorSpec(dtype="uint8", shape=(len(values),))
        chunk = StateChunk(stage=STAGE, step=STEP, chunk=request.chunk, tensor=spec)
        assert self.download.admit(chunk, spec) is None
        self.download.on_chunk(donor, chunk, values ^ 1 if donor in self.spoils else values)

    def run(self, limit_s: float = 60.0) -> None:
        self.clock.run_until(lambda: bool(self.got or self.failed), limit_s)


@pytest.mark.parametrize("total", [1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK, 10 * CHUNK + 3])
@pytest.mark.parametrize("count", [1, 3])
def test_the_image_comes_whole_whatever_its_length(total: int, count: int) -> None:
    data = image(total)
    bench = Bench(**{f"d{number}": (data, 0.01) for number in range(count)})
    bench.run()
    assert bench.got == [data]
    assert bench.strikes == []


def test_donors_share_the_load_and_the_faster_serves_more() -> None:
    data = image(LARGEST)
    bench = Bench(fast=(data, 0.01), same=(data, 0.01), slow=(data, 0.05))
    bench.run()
    assert bench.got == [data]
    sources = bench.download.sources
    assert sources["fast"] > 2 * sources["slow"] > 0
    assert abs(sources["fast"] - sources["same"]) <= WINDOW
    assert sum(sources.values()) <= 100 + 2 * WINDOW


@pytest.mark.parametrize("lost", [["a"], ["a", "b"]])
def test_what_a_lost_donor_was_asked_for_comes_from_the_others(lost: list[str]) -> None:
    data = image(LARGEST)
    bench = Bench(a=(data, 0.01), b=(data, 0.01), c=(data, 0.01))
    bench.clock.run_for(0.1)
    for donor in lost:
        bench.silent.add(donor)
        bench.download.on_lost(donor)
    bench.run()
    assert bench.got == [data]
    chunks = [chunk for _, chunk in bench.requests if chunk is not None]
    assert len(chunks) <= 100 + len(lost) * WINDOW + WINDOW


def test_a_donor_that_stops_sending_though_it_lives_is_left_out() -> None:
    data = image(LARGEST)
    bench = Bench(a=(data, 0.01), b=(data, 0.5))
    bench.clock.run_for(0.6)
    bench.silent.add("a")
    bench.run(200)
    assert bench.got == [data]
    alone = Bench(a=(data, 0.01))
    alone.clock.run_for(0.1)
    alone.silent.add("a")
    alone.run(3 * STALL_S)
    assert alone.failed == ["no replica sends the state"]


def test_nobody_answering_or_holding_the_state_is_said() -> None:
    assert Bench().failed == ["no replica holds the state"]
    bench = Bench(a=(image(30), 1.0), b=(image(30), 1.0))
    bench.download.on_refused("a")
    bench.download.on_lost("b")
    assert bench.failed == ["every replica that held the state was lost"]
    bench.clock.run_for(5)
    assert bench.got == []


def test_a_liar_in_a_chunk_is_found_struck_and_asked_no_more() -> None:
    data = image(LARGEST)
    bench = Bench(good=(data, 0.01), liar=(data, 0.01))
    bench.spoils.add("liar")
    bench.run()
    assert bench.got == [data]
    assert bench.strikes == ["liar"]
    asked = [donor for donor, chunk in bench.requests if chunk is not None]
    assert asked.count("liar") == WINDOW


def test_a_liar_in_the_index_is_outvoted() -> None:
    data, other = image(300), image(300, seed=1)
    bench = Bench(a=(data, 0.02), b=(data, 0.03), liar=(other, 0.01))
    bench.run()
    assert bench.got == [data]
    assert "liar" not in [donor for donor, chunk in bench.requests if chunk is not None]


def test_the_first_index_is_taken_when_the_others_are_late() -> None:
    data = image(300)
    bench = Bench(a=(data, 0.01), late=(data, 3 * INDEX_S))
    bench.clock.run_for(INDEX_S / 2)
    assert bench.got == []
    bench.run(INDEX_S)
    assert bench.got == [data]


def test_a_donor_that_comes_later_helps() -> None:
    data = image(LARGEST)
    bench = Bench(a=(data, 0.05))
    bench.clock.run_for(0.3)
    bench.donors["b"] = (data, 0.05)
    bench.download.begin(["b"])
    bench.run()
    assert bench.got == [data]
    assert bench.download.sources["b"] > 20


def test_a_state_of_an_impossible_size_is_refused_before_anything_is_allocated() -> None:
    bench = Bench(a=(image(LARGEST + 1), 0.01))
    bench.run()
    assert bench.got == []
    assert bench.strikes == ["a"]
    assert bench.failed


@pytest.mark.parametrize(
    "fields",
    [
        {"total": 0},
        {"total": 31},
        {"total": 2**50, "chunk_bytes": MAX_CHUNK_BYTES},
        {"chunk_bytes": 0},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"digests": (b"short",)},
        {"digests": ()},
        {"gradient_norm": float("nan")},
    ],
)
def test_an_index_that_does_not_add_up_is_none(fields: dict[str, Any]) -> None:
    good = index_of(image(30)).model_dump(exclude={"tensor"})
    with pytest.raises(ValidationError):
        StateIndex.model_validate({**good, **fields})


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (CHUNK,)), ("uint8", (CHUNK, 1)), ("uint8", (9,))])
def test_a_chunk_of_another_size_is_not_read(dtype: str, shape: tuple[int, ...]) -> None:
    bench = Bench(a=(image(30), 0.01))
    bench.clock.run_for(0.015)
    spec = TensorSpec.model_validate({"dtype": dtype, "shape": shape})
    chunk = StateChunk(stage=STAGE, step=STEP, chunk=1, tensor=spec)
    assert bench.download.admit(chunk, spec) == "a chunk of the wrong size"


def test_a_chunk_that_was_not_asked_for_changes_nothing() -> None:
    data = image(LARGEST)
    bench = Bench(a=(data, 0.01))
    bench.clock.run_for(0.015)
    spec = TensorSpec(dtype="uint8", shape=(CHUNK,))
    nonsense = np.zeros(CHUNK, dtype=np.uint8)
    for number in (50, 99):
        bench.download.on_chunk("a", StateChunk(stage=STAGE, step=STEP, chunk=number, tensor=spec), nonsense)
    bench.download.on_chunk("x", StateChunk(stage=STAGE, step=STEP, chunk=0, tensor=spec), nonsense)
    bench.run()
    assert bench.got == [data]
    assert bench.strikes == []
