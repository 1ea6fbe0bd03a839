"""Handlers that run until the test lets them end, and stop when they are told to."""

from __future__ import annotations

import asyncio
import time

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model.errors import TaskStopped

from .marks import LOOK_S, Facts, Folder, facts, mark, may_end


def _hold(ctx: Context, payload: Folder) -> Facts:
    mark(ctx, payload, "started")
    try:
        while not may_end(ctx, payload):
            ctx.check()
            time.sleep(LOOK_S)
    except TaskStopped as why:
        mark(ctx, payload, "stopped", why=type(why).__name__)
        raise
    return facts(ctx)


@job("hold.sync")
def hold_sync(ctx: Context, payload: Folder) -> Facts:
    """In a thread."""
    return _hold(ctx, payload)


@job("hold.isolated", isolation="process")
def hold_isolated(ctx: Context, payload: Folder) -> Facts:
    """In a process of its own."""
    return _hold(ctx, payload)


@job("hold.async")
async def hold_async(ctx: Context, payload: Folder) -> Facts:
    """On the event loop."""
    mark(ctx, payload, "started")
    try:
        while not may_end(ctx, payload):  # noqa: ASYNC110 # the test, another process, decides
            await asyncio.sleep(LOOK_S)
    except asyncio.CancelledError:
        mark(ctx, payload, "stopped", why=type(ctx.stop_reason).__name__)
        raise
    return facts(ctx)
