"""A stage's state as named tensors and as a safetensors image; what comes in is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from swarm.errors import UserError
from swarm.model.finite import is_finite
from swarm.model.layout import Layout

MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_STEP = 2**48
_HEADER_BYTES_PER_TENSOR = 400


class StateError(UserError):
    """A state that is not this stage's: another run's, another stage's, or damaged."""


def moment_name(moment: str, parameter: str) -> str:
    """The name of an optimizer moment in a state."""
    return f"optimizer.{moment}.{parameter}"


def max_image_bytes(layout: Layout) -> int:
    """No honest image of this stage's state is longer."""
    tensors = 3 * len(layout.slots) + 1
    longest = max(len(slot.name) for slot in layout.slots)
    return 12 * layout.total + 16 + tensors * (_HEADER_BYTES_PER_TENSOR + longest)


def pack(tensors: dict[str, Tensor]) -> bytes:
    """The safetensors image of ``tensors``; equal tensors give equal bytes."""
    image: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return image


def unpack(image: bytes, layout: Layout) -> dict[str, Tensor]:
    """The tensors of an image that may come from anyone. StateError if it is too long or no such image."""
    if len(image) > max_image_bytes(layout):
        raise _error(f"its image has {len(image)} bytes, at most {max_image_bytes(layout)} fit")
    try:
        tensors: dict[str, Tensor] = load(image)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _error(f"its image cannot be read ({error})") from error
    return tensors


def check(tensors: Mapping[str, Tensor], layout: Layout) -> int:
    """Names, shapes, dtypes and values of a whole state; returns its step. StateError."""
    wanted = {slot.name: slot.shape for slot in layout.slots}
    for moment in MOMENTS:
        wanted |= {moment_name(moment, slot.name): slot.shape for slot in layout.slots}
    if missing := wanted.keys() - tensors.keys():
        raise _error(f"it lacks {min(missing)}")
    if unknown := tensors.keys() - wanted.keys() - {"step"}:
        raise _error(f"it holds the unknown {min(unknown)}")
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise _error(f"{name} is {_describe(tensor)}, not float32 {list(shape)}")
        if not is_finite(tensor):
            raise _error(f"{name} holds NaN or infinity")
        if name.startswith("optimizer.exp_avg_sq.") and bool((tensor < 0).any()):
            raise _error(f"{name} holds a negative number")
    return _step_of(tensors)


def _step_of(tensors: Mapping[str, Tensor]) -> int:
    step = tensors.get("step")
    if step is None:
        raise _error("it lacks step")
    if step.dtype != torch.int64 or step.dim() != 0:
        raise _error(f"step is {_describe(step)}, not int64 []")
    if not 0 <= (number := int(step)) < MAX_STEP:
        raise _error(f"step is {number}")
    return number


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _error(problem: str) -> StateError:
    return StateError(f"this is no state of the stage: {problem}. Take it from another replica or checkpoint")
