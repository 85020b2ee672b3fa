"""The one error that this package raises for input it refuses."""

from __future__ import annotations

from pydantic import ValidationError


class SchedulerError(ValueError):
    """An instance, a plan or a gossiped fact that cannot be used; the message is one line."""

    @classmethod
    def of(cls, what: str, error: ValidationError) -> SchedulerError:
        """The first complaint of a pydantic ``error`` about ``what``, in one line with its key path."""
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return cls(f"{what}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}")
