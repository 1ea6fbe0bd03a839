"""One governor for all connections of a process, so that a mass reconnect neither stalls the loop nor storms a peer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from thunderagent.streaming.resolver import Resolver


class Governor:
    """Lets attempts to connect begin one after the other.

    Measured with TLS and 350 connections that are lost at once: without it the loop stands still for seconds, which is
    enough to lose leases.

    Args:
        concurrency: attempts under way at one moment.
        rate: attempts that begin in a second.
        spread_s: the first retry after a live connection waits a random time up to this, times `fleet`.
        fleet: number of processes that lose their connections to one peer together.
    """

    def __init__(
        self,
        *,
        concurrency: int = 16,
        rate: float = 40.0,
        spread_s: float = 1.0,
        fleet: Callable[[], int] = lambda: 1,
        rng: random.Random | None = None,
    ) -> None:
        self._room = asyncio.Semaphore(concurrency)
        self._interval_s = 1.0 / rate
        self._next = 0.0
        self._spread_s = spread_s
        self._fleet = fleet
        self.rng = rng or random.Random()
        self.resolver = Resolver()
        """Looks the names of peers up."""

    def first_retry(self) -> float:
        """Seconds to wait before the first attempt after a live connection ended."""
        return self.rng.uniform(0.0, self._spread_s * self._fleet())

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while connecting."""
        async with self._room:
            loop = asyncio.get_running_loop()
            now = loop.time()
            at = max(now, self._next)
            self._next = at + self._interval_s
            if at > now:
                await asyncio.sleep(at - now)
            yield
