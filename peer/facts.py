"""What peers gossip about a step, besides views and plans (scheduler/view.py)."""

from __future__ import annotations

from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scheduler.store import TopicLimit
from scheduler.view import PLAN_TOPIC, VIEW_TOPIC
from swarm.messages import Count, Counted, Step

DONE_TOPIC = "done"
WITNESS_TOPIC = "witness"
TOPICS = {
    VIEW_TOPIC: TopicLimit(1, 1 << 16),
    PLAN_TOPIC: TopicLimit(1, 1 << 20),
    DONE_TOPIC: TopicLimit(1, 1 << 20),
    WITNESS_TOPIC: TopicLimit(1, 1 << 20),
}


class CommitsFact(BaseModel):
    """Commits of one step. Under ``done``: an origin's own, all that it drew, or not ``done`` if it has taken
    over more since. Under ``witness``: those that a
    hop heard from an origin that it has lost since, so that they do not get lost with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: Step
    epoch: Count = 0
    done: bool = True
    counted: Annotated[tuple[Counted, ...], Field(max_length=1 << 16)]

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> CommitsFact:
        """Raises ValueError, in one line, if ``data`` is none."""
        try:
            return cls.model_validate(msgpack.unpackb(data, use_list=False, raw=False, max_ext_len=0))
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"commits: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except Exception as error:  # msgpack raises many unrelated kinds
            raise ValueError(f"commits: not MessagePack ({type(error).__name__})") from None
