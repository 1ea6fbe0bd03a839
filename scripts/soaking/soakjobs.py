"""The jobs of the soak. Each run writes its begin and its end into a file of its process, which no agent reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from thunderagent import Connection, Context, Cursor, Snooze, StreamContext, every, job, periodic, stream

LEDGER: Final = "SOAK_LEDGER"
"""Environment variable that names the folder of the ledger."""

LIMIT: Final = 3
"""Tasks of `soak.limited` that run at once."""

LARGE: Final = "x" * 2000

_files: dict[int, int] = {}
_guard = threading.Lock()


def write(*words: object) -> None:
    """Append a line with the moment: monotonic seconds, which all processes of a machine share. It survives a kill."""
    pid = os.getpid()
    with _guard:
        if pid not in _files:
            path = Path(os.environ[LEDGER]) / f"{pid}.{time.monotonic_ns()}.txt"
            _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(_files[pid], (" ".join(map(str, (*words, f"{time.monotonic():.6f}"))) + "\n").encode())


@contextmanager
def ledger(ctx: Context) -> Iterator[None]:
    """The begin and the end of a run; what it raised, or `ok`."""
    fence, how = ctx.fence, "ok"
    write("begin", ctx.task_id, fence)
    try:
        yield
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        write("end", ctx.task_id, fence, how)


class Flaky(Exception):
    """The first run of a task fails."""


@job("soak.quick")
def quick(ctx: Context, payload: dict[str, Any]) -> None:
    """Nothing but the two lines."""
    with ledger(ctx):
        pass


@job("soak.async")
async def coroutine(ctx: Context, payload: dict[str, Any]) -> int:
    """A coroutine."""
    with ledger(ctx):
        await asyncio.sleep(0.01)
    return 1


@job("soak.slow")
def slow(ctx: Context, payload: dict[str, Any]) -> None:
    """Long enough to be met by a kill."""
    with ledger(ctx):
        ctx.wait(0.5)
        ctx.check()


@job("soak.large")
def large(ctx: Context, payload: dict[str, Any]) -> str:
    """A payload and a result that are kept beside the row."""
    with ledger(ctx):
        assert payload["text"] == LARGE
    return LARGE


@job("soak.retry", max_retry=10)
def retry(ctx: Context, payload: dict[str, Any]) -> None:
    """Fails once."""
    with ledger(ctx):
        if not ctx.lease.task.errors:
            raise Flaky("the first run fails")


@job("soak.fails", max_retry=0)
def fails(ctx: Context, payload: dict[str, Any]) -> None:
    """Fails until it is retried by hand."""
    with ledger(ctx):
        if not any("Flaky" in str(entry) for entry in ctx.lease.task.errors):
            raise Flaky("it is to be retried by hand")


@job("soak.snooze")
def snooze(ctx: Context, payload: dict[str, Any]) -> Snooze | None:
    """Comes again now and then."""
    with ledger(ctx):
        return Snooze(0.05) if random.random() < 0.5 else None


@job("soak.limited", limit=LIMIT)
def limited(ctx: Context, payload: dict[str, Any]) -> None:
    """A few of them at once."""
    with ledger(ctx):
        ctx.wait(0.01)


@job("soak.child")
def child(ctx: Context, payload: dict[str, Any]) -> None:
    """Runs behind its parents."""
    with ledger(ctx):
        pass


@job("soak.unique")
def unique(ctx: Context, payload: dict[str, Any]) -> None:
    """One for each key at a time."""
    with ledger(ctx):
        ctx.wait(0.02)


@job("soak.isolated", isolation="process")
def isolated(ctx: Context, payload: dict[str, Any]) -> None:
    """A process of its own."""
    with ledger(ctx):
        pass


@periodic(every(1).seconds)
@job("soak.tick")
def tick(ctx: Context, payload: Any) -> None:
    """One task for each second."""
    with ledger(ctx):
        pass


@stream("soak.stream", lease_s=5.0, heartbeat_s=0.5, max_retry=1000, exclusive=False)
async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None:
    """Numbers of a feed, without a gap."""

    async def subscribe(connection: Connection, since: Cursor | None) -> None:
        place = {"since": since.seq, "epoch": since.epoch} if since else {"since": None}
        await connection.send_json({"op": "subscribe", **place})
        await connection.expect(op="subscribed")

    with ledger(ctx):
        feed = ctx.connect(payload["url"], decode=json.loads, on_open=subscribe, position=_place)
        async for message in feed:
            write("seq", ctx.task_id, ctx.fence, message["seq"])
            ctx.checkpoint(seq=message["seq"], epoch=message["epoch"])


def _place(message: dict[str, Any]) -> Cursor:
    return Cursor(message["seq"], message["epoch"])
