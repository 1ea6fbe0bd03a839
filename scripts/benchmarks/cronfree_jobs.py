"""Jobs of the measurement of cron-free work: they note when their handlers began, and do nothing else."""

from __future__ import annotations

import threading
import time
from typing import Final

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.periodic import periodic
from thunderagent.model.schedules import Tick
from thunderagent.model.ticks import every

STARTED: Final[dict[str, float]] = {}
"""Monotonic second of the first statement of each handler; all processes of a machine share that clock."""


GATE: Final = threading.Event()
"""Lets `hold` end."""

HOLD_S: Final = 60.0

INTERVAL_S: Final = 10
SPEC: Final = every(INTERVAL_S).seconds


class Nothing(BaseModel):
    """A small payload, as most are."""

    n: int = 0


@job("bench.note")
def note(ctx: Context, payload: Nothing) -> None:
    """Say when it began."""
    STARTED.setdefault(ctx.task_id, time.monotonic())


@job("bench.hold")
def hold(ctx: Context, payload: Nothing) -> None:
    """Say when it began, and run until it may end."""
    STARTED.setdefault(ctx.task_id, time.monotonic())
    GATE.wait(HOLD_S)


@periodic(SPEC)
@job("bench.tick")
def ticked(ctx: Context, payload: Tick) -> None:
    """Nothing, at every tick."""
