"""One governor for all connections of a process, so that a mass reconnect neither stalls the loop nor storms a peer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from thunderagent.streams.connection.resolver import Resolver


class Governor:
    """Lets attempts to connect begin one after the other.

    Measured with TLS and 350 connections that are lost at once: without it the loop stands still for seconds, which is
    enough to lose leases.

    Args:
        concurrency: attempts under way at one moment to one peer, so that a dead one holds up no other.
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
        self._concurrency = concurrency
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._interval_s = 1.0 / rate
        self._pace = asyncio.Lock()
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
    async def turn(self, url: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while connecting to this URL."""
        peer = urlsplit(url).netloc
        room = self._rooms.get(peer) or asyncio.Semaphore(self._concurrency)
        self._rooms[peer] = room
        async with room:
            async with self._pace:  # asleep one by one, or a loop that stood still would begin several at once
                loop = asyncio.get_running_loop()
                if (left := self._next - loop.time()) > 0:
                    await asyncio.sleep(left)
                self._next = loop.time() + self._interval_s
            yield
