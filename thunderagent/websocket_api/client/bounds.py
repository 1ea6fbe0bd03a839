"""Waits with a bound, and with words when it is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from thunderagent.streams.connection.pump import seen


@asynccontextmanager
async def bound(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """`asyncio.timeout` with words; None: no bound.

    Raises:
        TimeoutError: the time is over.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} (waited {timeout_s:g} s)") from None
        raise


async def ended(tasks: Iterable[asyncio.Task[Any]], timeout_s: float, *, grace_s: float = 0.0) -> None:
    """Let tasks end for `grace_s`, cancel those that have not, and wait: they may run code that does not listen."""
    tasks = list(tasks)
    if grace_s:
        await asyncio.wait(tasks, timeout=grace_s)
    for task in tasks:
        task.add_done_callback(seen)
        task.cancel()
    await asyncio.wait(tasks, timeout=timeout_s)


def known(answer: asyncio.Future[Any]) -> None:
    """The error of an answer that nobody waits for any more is nobody's news."""
    if not answer.cancelled():
        answer.exception()
