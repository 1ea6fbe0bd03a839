"""Three generations of one job, as three deploys have them; those of a child process at the top of this module."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job

NAME = "report.build"


class Old(BaseModel):
    """The payload of version 1: `{"month": "2026-07"}`."""

    model_config = ConfigDict(extra="forbid")
    month: str


class New(BaseModel):
    """The payload of version 2: `{"year": 2026, "month": 7}`. Neither reads the other."""

    model_config = ConfigDict(extra="forbid")
    year: int
    month: int


def from_1_to_2(data: dict[str, Any]) -> dict[str, Any]:
    """Bring a payload up."""
    year, month = data["month"].split("-")
    return {"year": int(year), "month": int(month)}


def _old(ctx: Context, payload: Old) -> dict[str, Any]:
    return {"by": 1, "month": payload.month}


def _new(ctx: Context, payload: New) -> dict[str, Any]:
    return {"by": 2, "month": f"{payload.year}-{payload.month:02}"}


def old_job(**options: Any) -> Job[Old]:
    """The job as old code has it."""
    return job(NAME, **options)(_old)


def new_job(**options: Any) -> Job[New]:
    """The job as new code has it."""
    options.setdefault("upcasters", {1: from_1_to_2})
    return job(NAME, version=2, **options)(_new)


@job("report.isolated", version=2, upcasters={1: from_1_to_2}, isolation="process")
def isolated(ctx: Context, payload: New) -> dict[str, Any]:
    """What a child process finds."""
    return _new(ctx, payload)
