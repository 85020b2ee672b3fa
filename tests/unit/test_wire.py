from __future__ import annotations

import math

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import messages as m
from swarm import wire
from swarm.wire import FrameKind, Preamble, WireError

names = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**32 - 1)
stages = st.integers(0, m.MAX_STAGES - 1)
steps = st.integers(0, 2**48 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
specs = st.none() | st.builds(
    m.TensorSpec,
    dtype=st.sampled_from(sorted(wire.DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
hops = st.builds(m.Hop, stage=stages, peer=names, version=counts)
paths = st.lists(hops, min_size=1, max_size=5).map(tuple)
entries = st.builds(
    m.GossipEntry,
    topic=names,
    owner=names,
    version=steps,
    value=st.binary(max_size=50),
    signature=st.binary(),
)
members = st.builds(m.Member, peer=names, stage=stages, incarnation=counts)
counted = st.builds(m.Counted, index=counts, attempt=counts, origin=names, path=paths, tokens=counts)
closes = st.builds(
    m.StepClose,
    step=steps,
    counted=st.lists(counted, max_size=3).map(tuple),
    members=st.lists(members, min_size=1, max_size=3).map(tuple),
)


@st.composite
def forwards(draw: st.DrawFn) -> m.Forward:
    path = draw(paths)
    return m.Forward(
        step=draw(steps),
        index=draw(counts),
        attempt=draw(counts),
        origin=draw(names),
        path=path,
        hop=draw(st.integers(1, len(path))),
        evaluate=draw(st.booleans()),
        tensor=draw(specs),
    )


some_messages = st.one_of(
    forwards(),
    st.builds(
        m.Commit,
        step=steps,
        index=counts,
        attempt=counts,
        origin=names,
        path=paths,
        tokens=counts,
        loss=floats,
        tensor=st.none(),
    ),
    st.builds(
        m.Heartbeat,
        sequence=counts,
        incarnation=counts,
        step=steps,
        progress=counts,
        state=st.sampled_from(["joining", "active", "leaving"]),
        sent_s=st.floats(0, 1e9),
        echo_s=st.none() | st.floats(0, 1e9),
        tensor=st.none(),
    ),
    st.builds(m.GossipPush, entries=st.lists(entries, max_size=3).map(tuple), tensor=st.none()),
    st.builds(
        m.GossipDigest,
        nodes=st.lists(st.tuples(names, st.binary(max_size=16)), max_size=3).map(tuple),
        held=st.lists(
            st.tuples(
                names,
                st.lists(st.tuples(names, names, counts, st.binary(max_size=16)), max_size=3).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
        wanted=st.lists(st.tuples(names, names), max_size=3).map(tuple),
        tensor=st.none(),
    ),
    st.builds(m.Propose, step=steps, ballot=st.tuples(counts, names), close=closes, tensor=st.none()),
    st.builds(
        m.Promise,
        step=steps,
        ballot=st.tuples(counts, names),
        accepted_ballot=st.none() | st.tuples(counts, names),
        accepted=st.none() | closes,
        tensor=st.none(),
    ),
)


@given(some_messages)
def test_a_message_comes_back_equal(message: m.Message) -> None:
    again = wire.decode_header(wire.encode_header(message))
    assert type(again) is type(message)
    assert again == message


@settings(max_examples=10_000, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_give_only_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_header(data)
    padded = data.ljust(wire.PREAMBLE_BYTES, b"\0")
    with pytest.raises(WireError):
        wire.unpack_preamble(padded, 0, wire.MAX_HEADER_BYTES)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(sorted(m.Message.registry)),
    st.dictionaries(st.text(max_size=8), values, max_size=4),
    values,
)
def test_wrong_fields_give_only_wire_errors(kind: str, fields: dict[str, object], value: object) -> None:
    for header in ([kind, fields], [kind, value], value, [value, fields]):
        try:
            message = wire.decode_header(msgpack.packb(header))
        except WireError:
            continue
        assert message.kind == kind  # only an accident that fits the schema gets here


@settings(max_examples=2000, deadline=None)
@given(some_messages, st.data())
def test_a_mutated_header_is_refused_or_valid(message: m.Message, data: st.DataObject) -> None:
    header = bytearray(wire.encode_header(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(header) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if action == "flip":
            header[place] ^= data.draw(st.integers(1, 255))
        elif action == "cut" and len(header) > 1:
            del header[place]
        else:
            header.insert(place, data.draw(st.integers(0, 255)))
    try:
        again = wire.decode_header(header)
    except WireError as refused:
        error = refused
    else:
        assert wire.decode_header(wire.encode_header(again)) == again
        return
    assert str(error).isprintable()


@settings(max_examples=2000, deadline=None)
@given(
    st.sampled_from(list(FrameKind)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
)
def test_preambles(kind: FrameKind, header: int, payload: int, transfer: int, part: int, parts: int) -> None:
    frame = Preamble(kind, header, payload, transfer, part, parts)
    packed = frame.pack()
    assert len(packed) == wire.PREAMBLE_BYTES
    try:
        again = wire.unpack_preamble(packed, 0, 4096)
    except WireError:
        return
    assert again == frame
    assert header <= 4096
    assert (payload == 0 and parts == 0) or kind in (FrameKind.TENSOR, FrameKind.PART)
    assert header == 0 or kind is not FrameKind.TAKEN


def test_no_conversions() -> None:
    header = ["accept", {"step": "1", "index": 2, "attempt": 0, "hop": 1}]
    with pytest.raises(WireError, match=r"Accept: step"):
        wire.decode_header(msgpack.packb(header))
    with pytest.raises(WireError):
        wire.decode_header(msgpack.packb(["accept", {"step": True, "index": 2, "attempt": 0, "hop": 1}]))
    with pytest.raises(WireError, match="unknown kind"):
        wire.decode_header(msgpack.packb(["no such", {}]))
    with pytest.raises(WireError, match="Extra"):
        wire.decode_header(msgpack.packb(["goodbye", {"incarnation": 1, "more": 2}]))


def test_nesting_is_bounded() -> None:
    for depth in (20, 900, 100_000):
        deep = b"\x91" * depth + b"\xc0"
        with pytest.raises(WireError):
            wire.unpack(deep)
    with pytest.raises(WireError):
        wire.unpack(b"\xdd\x7f\xff\xff\xff")
    with pytest.raises(WireError):
        wire.unpack(msgpack.packb(msgpack.ExtType(0x40, b"\x90")))


def test_a_message_that_is_too_large_is_refused() -> None:
    entry = m.GossipEntry(topic="t", owner="o", version=1, value=b"x" * 5000)
    with pytest.raises(WireError, match="4096"):
        wire.encode_header(m.GossipPush(entries=(entry,)), 4096)


@given(st.integers(0, 1 << 24), st.integers(1, wire.MAX_PARTS))
def test_parts_cover_a_tensor_once(total: int, parts: int) -> None:
    position = 0
    for part in range(parts):
        start, end = wire.part_bounds(total, part, parts)
        assert start == position
        assert end >= start
        position = end
    assert position == total


@pytest.mark.parametrize("dtype", sorted(wire.DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 0, 4), (2, 3, 4)])
def test_tensors_pass_through_their_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    source = (torch.arange(math.prod(shape)) * 37 % 251).reshape(shape).to(wire.DTYPES[dtype])
    spec = wire.spec_of(source)
    assert spec == m.TensorSpec(dtype=dtype, shape=shape)  # type: ignore[arg-type]
    target, memory = wire.empty_tensor(spec)
    memory[:] = wire.tensor_bytes(source)
    assert len(memory) == wire.tensor_nbytes(spec)
    assert target.dtype == source.dtype
    assert torch.equal(target, source)


def test_no_copy_is_made_of_a_contiguous_tensor() -> None:
    source = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    memory = wire.tensor_bytes(source)
    with torch.no_grad():
        source[3, 1] = 1.0
    assert bytes(memory[26 * 1 : 28]) == b"\x80\x3f"
    transposed = torch.arange(12.0).reshape(3, 4).t()
    assert bytes(wire.tensor_bytes(transposed)) == transposed.contiguous().numpy().tobytes()


def test_lying_tensor_headers_are_refused_before_allocation() -> None:
    huge = m.TensorSpec(dtype="float32", shape=(2**30, 2**30))
    whole = Preamble(FrameKind.TENSOR, 10, 2**62, 1, 0, 1)
    with pytest.raises(WireError, match="are allowed"):
        wire.check_payload(huge, whole, 1 << 28)
    small = m.TensorSpec(dtype="float32", shape=(4,))
    assert wire.check_payload(small, Preamble(FrameKind.TENSOR, 10, 16, 1, 0, 1), 1 << 28) == 16
    for payload in (0, 15, 17, 2**31):
        with pytest.raises(WireError):
            wire.check_payload(small, Preamble(FrameKind.TENSOR, 10, payload, 1, 0, 1), 1 << 28)
    with pytest.raises(WireError):
        wire.empty_tensor(m.TensorSpec(dtype="float32", shape=(0, 2**39, 2**39, 2**39)))


def test_an_unknown_dtype_does_not_travel() -> None:
    with pytest.raises(WireError, match="float16"):
        wire.spec_of(torch.zeros(2, dtype=torch.float16))
