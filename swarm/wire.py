"""Frames: a fixed preamble, a MessagePack header, raw tensor bytes.

``preamble | header (header_bytes) | payload (payload_bytes)``. A control message is a header alone. A tensor
travels in one part, or in ``parts`` parts on as many streams: part 0 follows the message's header, the others
name the transfer that they belong to. Sizes are checked before anything is allocated, the schema before
anything is used, and whatever the bytes, the only exception that comes out of decoding is ``WireError``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import msgpack
import torch
from pydantic import BaseModel, ValidationError

from swarm.messages import Message, TensorSpec

PROTOCOL_VERSION = 4
MAGIC = b"sw"
MAX_HEADER_BYTES = 1 << 20
MAX_PARTS = 64
ACKNOWLEDGED_BYTES = 1 << 16
"""A tensor of at least this size is acknowledged when it has come whole: smaller ones tell no rate."""

_PREAMBLE = struct.Struct("!2sBBHHIQQ")
PREAMBLE_BYTES = _PREAMBLE.size

_MAX_ARRAY = 1 << 16
_MAX_MAP = 64
_MAX_DEPTH = 16

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
_NAMES: dict[torch.dtype, Any] = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ValueError):
    """Bytes that are not a frame of this protocol, or a message that does not fit into one."""

    def __init__(self, text: str) -> None:
        # Names in it may come from a stranger, and it ends in logs and on terminals.
        super().__init__("".join(char if char.isprintable() else "?" for char in text[:300]))


class FrameKind(IntEnum):
    """What a frame is for; the first two open a stream, ``BYE`` ends a link with a reason, ``TAKEN``
    acknowledges a transfer."""

    HELLO = 1
    WELCOME = 2
    MESSAGE = 3
    TENSOR = 4
    PART = 5
    BYE = 6
    TAKEN = 7


@dataclass(frozen=True, slots=True)
class Preamble:
    """The fixed start of every frame."""

    kind: FrameKind
    header_bytes: int = 0
    payload_bytes: int = 0
    transfer: int = 0
    """The sender's number of a tensor's transfer on this link."""
    part: int = 0
    parts: int = 0

    def pack(self) -> bytes:
        return _PREAMBLE.pack(
            MAGIC,
            PROTOCOL_VERSION,
            self.kind,
            self.part,
            self.parts,
            self.header_bytes,
            self.transfer,
            self.payload_bytes,
        )


def unpack_preamble(data: bytes | bytearray | memoryview, offset: int, max_header_bytes: int) -> Preamble:
    """Read the preamble at ``offset``; ``data`` holds at least ``PREAMBLE_BYTES`` from there."""
    magic, version, kind, part, parts, header_bytes, transfer, payload_bytes = _PREAMBLE.unpack_from(
        data, offset
    )
    if magic != MAGIC:
        raise WireError("not a frame of this protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version}; this is {PROTOCOL_VERSION}")
    if header_bytes > max_header_bytes:
        raise WireError(f"a header of {header_bytes} bytes; {max_header_bytes} are allowed")
    try:
        frame = Preamble(FrameKind(kind), header_bytes, payload_bytes, transfer, part, parts)
    except ValueError as error:
        raise WireError(f"unknown kind of frame {kind}") from error
    _check_shape(frame)
    return frame


def _check_shape(frame: Preamble) -> None:
    """Which fields each kind of frame may use."""
    if frame.kind is FrameKind.TENSOR or frame.kind is FrameKind.PART:
        first = frame.kind is FrameKind.TENSOR
        if not 1 <= frame.parts <= MAX_PARTS or not frame.part < frame.parts:
            raise WireError(f"part {frame.part} of {frame.parts}")
        if first != (frame.part == 0) or first != (frame.header_bytes > 0):
            raise WireError("part 0 of a tensor comes with the header, the others without")
    elif frame.kind is FrameKind.TAKEN:
        if frame.header_bytes or frame.payload_bytes or frame.part or frame.parts:
            raise WireError("a TAKEN frame has a transfer and nothing else")
    elif frame.payload_bytes or frame.transfer or frame.part or frame.parts:
        raise WireError(f"a {frame.kind.name} frame has no payload")


def bye_frame(reason: str) -> bytes:
    """The last frame of a link."""
    header = reason[:200].encode()
    return Preamble(FrameKind.BYE, len(header)).pack() + header


def part_bounds(total_bytes: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of a part in a tensor's bytes: equal parts of whole 4 KiB pages, the last one shorter."""
    size = -(-total_bytes // parts)
    size = -(-size // 4096) * 4096
    return min(part * size, total_bytes), min((part + 1) * size, total_bytes)


# Headers


def pack(value: Any) -> bytes:
    """MessagePack with binary and text kept apart. Raises ``WireError`` for what cannot be packed."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot be packed: {error}") from error


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _depth_within(value: Any, depth: int) -> bool:
    if isinstance(value, tuple):
        return depth > 0 and all(_depth_within(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return depth > 0 and all(_depth_within(item, depth - 1) for item in value.values())
    return True


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """One MessagePack value, arrays as tuples. Raises ``WireError`` for bad, oversized or deep input."""
    try:
        value = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            ext_hook=_no_extensions,
            max_array_len=_MAX_ARRAY,
            max_map_len=_MAX_MAP,
            max_ext_len=0,
        )
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
        msgpack.UnpackException,
    ) as error:
        raise WireError(f"bad MessagePack: {str(error)[:100]}") from error
    if not _depth_within(value, _MAX_DEPTH):
        raise WireError(f"nested deeper than {_MAX_DEPTH}")
    return value


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], fields: Any) -> _Model:
    """``fields`` as a ``model``, without conversions. Raises ``WireError`` naming the first bad field."""
    try:
        return model.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(place)[:40] for place in first["loc"][:4])
        raise WireError(f"{model.__name__}: {where}: {first['msg'][:100]}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{model.__name__}: {str(error)[:100]}") from error


def encode_header(message: Message, max_header_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """A message's header: ``[kind, fields that differ from their defaults]``."""
    header = pack((message.kind, message.model_dump(exclude_defaults=True)))
    if len(header) > max_header_bytes:
        raise WireError(f"{message.kind}: a header of {len(header)} bytes; {max_header_bytes} are allowed")
    return header


def decode_header(data: bytes | bytearray | memoryview) -> Message:
    """The message of a header whose length was checked. Raises ``WireError`` and nothing else."""
    value = unpack(data)
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        raise WireError("a header is a pair of kind and fields")
    kind, fields = value
    model = Message.registry.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise WireError(f"unknown kind of message {str(kind)[:40]!r}")
    return validated(model, fields)


# Tensors


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """dtype and shape of ``tensor``. Raises ``WireError`` for a dtype that does not travel."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise WireError(f"tensors of {tensor.dtype} do not travel; convert to one of {', '.join(DTYPES)}")
    return TensorSpec(dtype=name, shape=tuple(tensor.shape))


def tensor_nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def check_payload(spec: TensorSpec, frame: Preamble, max_frame_bytes: int) -> int:
    """Bytes of the whole tensor, once this frame's share of them proved right. Raises ``WireError``."""
    total = tensor_nbytes(spec)
    if total > max_frame_bytes:
        raise WireError(f"a tensor of {total} bytes; {max_frame_bytes} are allowed")
    start, end = part_bounds(total, frame.part, frame.parts)
    if frame.payload_bytes != end - start:
        raise WireError(
            f"part {frame.part} of {frame.parts} has {frame.payload_bytes} bytes, not {end - start}"
        )
    return total


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, read-only by intent; a copy only if it is not a contiguous CPU tensor."""
    flat = tensor.detach()
    if flat.device.type != "cpu":
        flat = flat.cpu()
    if flat.numel() == 0:
        return memoryview(bytearray())
    return memoryview(flat.contiguous().view(-1).view(torch.uint8).numpy().data)


def empty_tensor(spec: TensorSpec) -> tuple[torch.Tensor, memoryview]:
    """An uninitialised tensor and its memory, to read into. Raises ``WireError`` when there is no room."""
    try:
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise WireError(f"cannot allocate a tensor of shape {spec.shape}") from error
    return tensor, tensor_bytes(tensor)


def encode(
    message: Message, tensor: torch.Tensor | None, max_header_bytes: int, max_frame_bytes: int
) -> tuple[bytes, memoryview | None]:
    """Header and tensor bytes of a message. Raises ``WireError`` if no receiver could accept them."""
    header = encode_header(message, max_header_bytes)
    if (tensor is None) != (message.tensor is None):
        raise WireError(f"{message.kind}: a tensor without its spec, or a spec without its tensor")
    if tensor is None:
        return header, None
    if spec_of(tensor) != message.tensor:
        raise WireError(f"{message.kind}: the tensor is not {message.tensor}")
    payload = tensor_bytes(tensor)
    if len(payload) > max_frame_bytes:
        raise WireError(f"{message.kind}: a tensor of {len(payload)} bytes; {max_frame_bytes} are allowed")
    return header, payload
