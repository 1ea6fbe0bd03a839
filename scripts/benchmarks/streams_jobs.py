"""The stream that only counts, and a timer beside it: what is left is the cost of holding connections."""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel

from benchmarks.streams_probe import PROBE
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream

STREAM: Final = "bench.stream"
BEAT_S: Final = 5.0
LEASE_S: Final = 20.0


class Source(BaseModel):
    """Where to connect."""

    url: str


@stream(STREAM, lease_s=LEASE_S, heartbeat_s=BEAT_S)
async def follow(ctx: StreamContext, payload: Source) -> None:
    """Count the messages of a feed."""
    is_first = True
    async for message in ctx.connect(payload.url):
        PROBE.handled += 1
        if is_first:
            PROBE.take(ctx.task_id)
            is_first = False
        if PROBE.mode != "raw":
            value = json.loads(message)
            if PROBE.mode == "checkpoint":
                ctx.checkpoint(seq=value["seq"])


class Nothing(BaseModel):
    """No input."""


@job("bench.timer", lease_s=LEASE_S, heartbeat_s=BEAT_S)
async def timer(ctx: Context, payload: Nothing) -> None:
    """Find out how late the event loop is."""
    await PROBE.tick()
