"""Jobs of the rolling restart: each run says when it began and when it ended, whichever process it is in."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from tests.acceptance.streamjobs import Peer, follow
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream


class Piece(BaseModel):
    """How long a run takes, and where it says what it did."""

    folder: Path
    seconds: float


def say(ctx: Context, payload: Piece, what: Literal["began", "ended"], agent: int) -> None:
    """Append a line to the file of this process, in one write."""
    line = f"{ctx.task_id} {ctx.fence} {agent} {what} {time.time():.6f}\n".encode()
    descriptor = os.open(payload.folder / f"{os.getpid()}.said", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def work(ctx: Context, payload: Piece, agent: int) -> None:
    """Take the time of a payload; nothing cuts it short."""
    say(ctx, payload, "began", agent)
    time.sleep(payload.seconds)
    say(ctx, payload, "ended", agent)


@job("rolling.brief")
def brief(ctx: Context, payload: Piece) -> None:
    """In a thread."""
    work(ctx, payload, os.getpid())


@job("rolling.long")
async def long(ctx: Context, payload: Piece) -> None:
    """On the event loop."""
    say(ctx, payload, "began", os.getpid())
    await asyncio.sleep(payload.seconds)
    say(ctx, payload, "ended", os.getpid())


@job("rolling.isolated", isolation="process")
def isolated(ctx: Context, payload: Piece) -> None:
    """In a process of its own."""
    work(ctx, payload, os.getppid())


@stream("rolling.follow")
async def ticker(ctx: StreamContext, payload: Peer) -> None:
    """A stream with the lease that streams have by default; it keeps its place with its data."""
    await follow(ctx, payload)
