"""Streams of the acceptance tests: an agent imports this module as `streamjobs`.

A handler appends a line for each message to the file of its stream, whichever process it runs in: the order of the
lines is the order in which messages were handled, over all agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.job import stream

LEASE_S = 3.0
HEARTBEAT_S = 0.5
LOST_NAME = "lost.invalid"
"""A host whose name server never answers."""


class Peer(BaseModel):
    """Where a stream comes from, and where its lines go."""

    url: str
    folder: Path
    each_s: float = 0.0
    """Time that the handler takes over each message."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of StreamOptions."""


class Lines:
    """What was handled of one stream, by any process."""

    def __init__(self, ctx: StreamContext, peer: Peer) -> None:
        self._ctx = ctx
        self._path = peer.folder / f"{ctx.task_id}.lines"
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def last(self) -> Cursor | None:
        """The place of the last message that was handled."""
        whole, _, _ = self._path.read_text().rpartition("\n")
        if not whole:
            return None
        _, epoch, seq, *_ = whole.rpartition("\n")[2].split()
        return Cursor(int(seq), epoch)

    def add(self, message: dict[str, Any], handed_at: float) -> None:
        """One message was handled, in one write."""
        line = f"{self._ctx.fence} {message['epoch']} {message['seq']} {handed_at:.6f} {os.getpid()}\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        os.close(self._file)


def mark(ctx: StreamContext, peer: Peer, what: str, **facts: Any) -> None:
    """Write `<stream>.<fence>.<what>`, whole or not at all."""
    path = peer.folder / f"{ctx.task_id}.{ctx.fence}.{what}"
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps({"pid": os.getpid(), "at": time.time(), **facts}))
    part.replace(path)


def place(message: dict[str, Any]) -> Cursor:
    """The position of a message of the chaos server."""
    return Cursor(message["seq"], message["epoch"])


async def subscribe(connection: Connection, cursor: Cursor | None) -> None:
    """From the cursor; without one from the start."""
    since, epoch = (cursor.seq, cursor.epoch) if cursor else (None, None)
    await connection.send_json({"op": "subscribe", "since": since, "epoch": epoch})
    await connection.expect(op="subscribed")


Endpoint = str | Callable[[Attempt], Any]


async def follow(
    ctx: StreamContext,
    peer: Peer,
    *,
    endpoint: Endpoint | None = None,
    stores: bool = True,
    meet: Callable[[int], Any] | None = None,
) -> None:
    """Handle every message.

    Args:
        ctx: of the run.
        peer: the payload.
        endpoint: in place of the URL of the peer.
        stores: go on behind the last line, if that is further than the cursor, as a handler does that keeps its place
            together with its data.
        meet: called with the number of each message of this run before it is handled; what it answers is awaited.
    """
    lines = Lines(ctx, peer)
    try:
        kept, cursor = lines.last(), ctx.cursor
        mark(ctx, peer, "started", cursor=cursor.seq if cursor else 0, kept=kept.seq if kept else 0)
        if stores and kept is not None:
            ctx.checkpoint(seq=kept.seq, epoch=kept.epoch)
        feed = ctx.connect(
            endpoint or f"{peer.url}?stream={ctx.task_id}",
            decode=json.loads,
            on_open=subscribe,
            position=place,
            options=StreamOptions(**peer.options),
        )
        number = 0
        async for message in feed:
            handed_at = time.time()
            number += 1
            if meet is not None:
                await meet(number)
            if peer.each_s:
                if number == 1:
                    mark(ctx, peer, "busy")
                await asyncio.sleep(peer.each_s)
            lines.add(message, handed_at)
            ctx.checkpoint(seq=message["seq"], epoch=message["epoch"])
    finally:
        lines.close()


@stream("ticks.exclusive", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def exclusive(ctx: StreamContext, payload: Peer) -> None:
    """Never two connections."""
    await follow(ctx, payload)


@stream("ticks.shared", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, exclusive=False)
async def shared(ctx: StreamContext, payload: Peer) -> None:
    """The next agent connects before this one leaves."""
    await follow(ctx, payload)


@stream("ticks.plain", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def plain(ctx: StreamContext, payload: Peer) -> None:
    """A handler that has no place of its own: it goes on at the cursor."""
    await follow(ctx, payload, stores=False)


# Those that get stuck


@stream("ticks.no_endpoint", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def no_endpoint(ctx: StreamContext, payload: Peer) -> None:
    """Whoever knows the endpoint never answers."""

    async def ask(_: Attempt) -> str:
        mark(ctx, payload, "asked")
        await asyncio.get_running_loop().create_future()
        return payload.url

    await follow(ctx, payload, endpoint=ask)


@stream("ticks.no_name", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def no_name(ctx: StreamContext, payload: Peer) -> None:
    """The name server never answers."""
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **options: Any) -> Any:
        if host == LOST_NAME:
            mark(ctx, payload, "asked")
            threading.Event().wait()
        return real(host, *rest, **options)

    socket.getaddrinfo = look_up
    await follow(ctx, payload, endpoint=f"ws://{LOST_NAME}/")


@stream("ticks.waits", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def waits(ctx: StreamContext, payload: Peer) -> None:
    """Tells when the next thing it needs is a turn to connect."""

    def answer(_: Attempt) -> str:
        mark(ctx, payload, "asked")
        return f"{payload.url}?stream={ctx.task_id}"

    await follow(ctx, payload, endpoint=answer)


@stream("wedge.sleep", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def wedge_sleep(ctx: StreamContext, payload: Peer) -> None:
    """The first run blocks the event loop at its third message, for longer than the test takes."""

    async def meet(number: int) -> None:
        if (ctx.fence, number) == (1, 3):
            mark(ctx, payload, "wedged")
            time.sleep(60.0)  # noqa: ASYNC251 # that is what is wrong with it

    await follow(ctx, payload, meet=meet)


@stream("wedge.deadlock", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def wedge_deadlock(ctx: StreamContext, payload: Peer) -> None:
    """The first run waits for itself at its third message."""

    async def meet(number: int) -> None:
        if (ctx.fence, number) == (1, 3):
            mark(ctx, payload, "wedged")
            lock = asyncio.Lock()
            async with lock, lock:
                pass

    await follow(ctx, payload, meet=meet)


@stream("wedge.deaf", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def wedge_deaf(ctx: StreamContext, payload: Peer) -> None:
    """As the deadlock, and it swallows its cancellation."""

    async def meet(number: int) -> None:
        if (ctx.fence, number) == (1, 3):
            mark(ctx, payload, "wedged")
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.get_running_loop().create_future()

    await follow(ctx, payload, meet=meet)


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int = 1


@job("batch.add")
def add(ctx: Context, payload: Numbers) -> dict[str, int]:
    """A task that is no stream."""
    return {"sum": payload.a + payload.b}
