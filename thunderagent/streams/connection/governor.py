"""The governor of a process's connections: a mass reconnect neither stalls the loop nor storms a peer."""

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

    Without it, 350 TLS connections lost at once stop the loop for seconds, enough to lose leases (measured).

    Args:
        concurrency: attempts to one peer at one moment, so that a dead peer holds up no other.
        rate: attempts that begin each second.
        spread_s: longest wait of the first retry after a live connection, times `fleet`.
        fleet: processes that lose their connections to one peer together.
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

    def first_retry(self) -> float:
        """Wait before the first attempt after a live connection."""
        return self.rng.uniform(0.0, self._spread_s * self._fleet())

    @asynccontextmanager
    async def turn(self, url: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while connecting to this URL."""
        peer = urlsplit(url).netloc
        room = self._rooms.get(peer) or asyncio.Semaphore(self._concurrency)
        self._rooms[peer] = room
        async with room:
            async with self._pace:  # one by one, or a loop that stood still would begin several at once
                loop = asyncio.get_running_loop()
                if (left := self._next - loop.time()) > 0:
                    await asyncio.sleep(left)
                self._next = loop.time() + self._interval_s
            yield
