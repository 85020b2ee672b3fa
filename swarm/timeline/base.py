"""What the fields of events may be. Logs may come from anyone: each is bounded, and no number is infinite."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

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


class Microbatch(Event):
    """What concerns one attempt at one microbatch."""

    step: Count
    index: Count
    attempt: Count
