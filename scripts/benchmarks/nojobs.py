"""The job that does nothing: what is left is the cost of the queue."""

from __future__ import annotations

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


class Number(BaseModel):
    """A small payload, as most are."""

    n: int


@job("bench.nothing")
def nothing(ctx: Context, payload: Number) -> None:
    """Do nothing."""
