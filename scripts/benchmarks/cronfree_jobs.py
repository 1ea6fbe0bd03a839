"""The job of the measurement of latency: it notes when its handlers began, and does nothing else."""

from __future__ import annotations

import time
from typing import Final

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

STARTED: Final[dict[str, float]] = {}
"""Monotonic second of the first statement of each handler; all processes of a machine share that clock."""


class Nothing(BaseModel):
    """A small payload, as most are."""

    n: int = 0


@job("bench.note")
def note(ctx: Context, payload: Nothing) -> None:
    """Say when it began."""
    STARTED.setdefault(ctx.task_id, time.monotonic())
