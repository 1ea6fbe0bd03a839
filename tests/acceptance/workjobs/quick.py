"""Handlers that do almost nothing."""

from __future__ import annotations

import os

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

from .marks import Folder


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int = 1


@job("quick.count")
def count(ctx: Context, payload: Folder) -> None:
    """Append one line for this run to the file of this process, in one write."""
    line = f"{ctx.task_id} {ctx.fence}\n".encode()
    descriptor = os.open(payload.folder / f"{os.getpid()}.runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


@job("quick.add")
def add(ctx: Context, payload: Numbers) -> dict[str, int]:
    """The sum."""
    return {"sum": payload.a + payload.b}


@job("quick.break", max_retry=0)
def break_(ctx: Context, payload: None) -> None:
    """Fail."""
    raise ValueError("broken on purpose")


@job("quick.reports", queue="reports")
def reports(ctx: Context, payload: None) -> str:
    """In a queue of its own."""
    return "reported"
