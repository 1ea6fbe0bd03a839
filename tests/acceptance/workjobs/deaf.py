"""Handlers that ignore every request to stop."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

from .marks import LOOK_S, Facts, Folder, facts, mark, may_end


def _go_on(ctx: Context, payload: Folder) -> Facts:
    mark(ctx, payload, "started")
    while not may_end(ctx, payload):
        time.sleep(LOOK_S)
    return facts(ctx)


@job("deaf.sync")
def deaf_sync(ctx: Context, payload: Folder) -> Facts:
    """In a thread."""
    return _go_on(ctx, payload)


@job("deaf.isolated", isolation="process")
def deaf_isolated(ctx: Context, payload: Folder) -> Facts:
    """In a process of its own."""
    return _go_on(ctx, payload)


@job("deaf.async")
async def deaf_async(ctx: Context, payload: Folder) -> Facts:
    """On the event loop; swallows its cancellation."""
    mark(ctx, payload, "started")
    while not may_end(ctx, payload):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LOOK_S)
    return facts(ctx)


@job("deaf.blocking")
async def deaf_blocking(ctx: Context, payload: Folder) -> Facts:
    """A coroutine function that never lets go of the event loop."""
    return _go_on(ctx, payload)
