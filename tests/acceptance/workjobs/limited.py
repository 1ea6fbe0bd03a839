"""Handlers of which only two run at once in the whole fleet, whatever their kind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

from .marks import LOOK_S, Facts, Folder, facts, mark, may_end

LIMIT: dict[str, Any] = {"limit": 2, "limit_key": "api"}


class Short(BaseModel):
    """How long a run takes, and where it says when it began and when it ended."""

    folder: Path
    seconds: float = 0.05


def _write(payload: Short, ctx: Context, what: str) -> None:
    (payload.folder / f"{ctx.task_id}.{ctx.fence}.{what}").write_text(repr(time.time()))


@job("limited.hold", **LIMIT)
def hold(ctx: Context, payload: Folder) -> Facts:
    """Until the test lets it end."""
    mark(ctx, payload, "started")
    while not may_end(ctx, payload):
        ctx.check()
        time.sleep(LOOK_S)
    return facts(ctx)


@job("limited.sync", **LIMIT)
def in_thread(ctx: Context, payload: Short) -> None:
    """In a thread."""
    _write(payload, ctx, "began")
    time.sleep(payload.seconds)
    _write(payload, ctx, "ended")


@job("limited.async", queue="reports", **LIMIT)
async def on_loop(ctx: Context, payload: Short) -> None:
    """On the event loop."""
    _write(payload, ctx, "began")
    await asyncio.sleep(payload.seconds)
    _write(payload, ctx, "ended")


@job("limited.isolated", isolation="process", **LIMIT)
def in_child(ctx: Context, payload: Short) -> None:
    """In a process of its own."""
    in_thread.handler(ctx, payload)
