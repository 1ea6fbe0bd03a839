"""Jobs that enqueue: in a thread, in a coroutine, in a child process."""

from __future__ import annotations

import asyncio
from typing import Any

from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job


def _put(payload: dict[str, Any]) -> str:
    client = Client.from_settings(store=payload["store"])
    try:
        return client.enqueue("traced.leaf", {}).id
    finally:
        client.close()


@job("traced.leaf", max_retry=0)
def leaf(ctx: Context, payload: dict[str, Any]) -> None:
    """Does nothing."""


@job("traced.thread")
def in_thread(ctx: Context, payload: dict[str, Any]) -> str:
    return _put(payload)


@job("traced.coroutine")
async def in_coroutine(ctx: Context, payload: dict[str, Any]) -> str:
    await asyncio.sleep(0)
    return await asyncio.to_thread(_put, payload)


@job("traced.process", isolation="process")
def in_process(ctx: Context, payload: dict[str, Any]) -> str:
    return _put(payload)
