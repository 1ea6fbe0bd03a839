"""The bounded buffer between a connection and its handler."""

from __future__ import annotations

import asyncio
from collections import deque

from websockets.typing import Data

from thunderagent.model.errors import StreamFailed
from thunderagent.streams.connection.options import OnFull


class Buffer:
    """Messages that were read and not yet handed out, limited in number and bytes. One reader, one handler.

    Args:
        size: largest sum of their sizes in bytes; one message may be larger than that.
        on_full: what happens to a message without room.
    """

    def __init__(self, messages: int, size: int, on_full: OnFull) -> None:
        self._max_messages = messages
        self._max_bytes = size
        self._on_full = on_full
        self._items: deque[Data] | tuple[()] = ()  # an empty deque has 760 bytes, and most streams are quiet
        self._bytes = 0
        self._gone = 0
        self._begins: tuple[int, ...] = ()
        self._room: asyncio.Future[None] | None = None
        self._some: asyncio.Future[None] | None = None
        self.is_closed = False
        self.dropped = 0
        """Messages dropped since `take_dropped` was called."""
        self.connection = 0
        """Number of the connection that brought the message taken last."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_full(self) -> bool:
        return len(self._items) >= self._max_messages or self._bytes >= self._max_bytes

    def put(self, message: Data) -> None:
        """Add a message; call it only with room, unless `on_full` makes some.

        Raises:
            StreamFailed: the buffer is full and `on_full` is "fail".
        """
        if self.is_full and self._on_full == "fail":
            raise StreamFailed(
                f"the handler is too slow: {len(self._items)} messages with {self._bytes} bytes wait, "
                "and on_full is 'fail'"
            )
        items = self._items = self._items or deque[Data]()
        items.append(message)
        self._bytes += len(message)
        if self._on_full == "drop_oldest":
            while len(items) > self._max_messages or (self._bytes > self._max_bytes and len(items) > 1):
                self._bytes -= len(items.popleft())
                self._gone += 1
                self.dropped += 1
        _wake(self._some)

    @property
    def must_wait(self) -> bool:
        return self._on_full == "pause" and self.is_full

    async def wait_for_room(self) -> None:
        """Wait until the handler has taken half of the messages, so that the reader does not wake for each."""
        while self.must_wait:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def get(self) -> Data | None:
        """Take the oldest message; None if there is none."""
        if not self._items:
            return None
        message = self._items.popleft()
        self._bytes -= len(message)
        self._gone += 1
        while self._begins and self._begins[0] < self._gone:
            self._begins = self._begins[1:]
            self.connection += 1
        self._items = self._items or ()
        if len(self._items) <= self._max_messages // 2 and self._bytes <= self._max_bytes // 2:
            _wake(self._room)
        return message

    def begin_connection(self) -> None:
        """Count what is put from now on to a new connection."""
        ahead = self._gone + len(self._items)
        if ahead not in self._begins[-1:]:  # the one before has brought nothing
            self._begins = (*self._begins, ahead)

    def waiting(self) -> list[Data]:
        """The messages, oldest first; they stay."""
        return list(self._items)

    def newest(self) -> Data | None:
        return self._items[-1] if self._items else None

    async def wait_for_some(self) -> None:
        while not self._items and not self.is_closed:
            self._some = asyncio.get_running_loop().create_future()
            await self._some

    def take_dropped(self) -> int:
        """Messages dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def close(self) -> None:
        """End: wakes the handler."""
        self.is_closed = True
        _wake(self._some)

    def clear(self) -> None:
        self._gone += len(self._items)
        self._items = ()
        self._bytes = 0
        _wake(self._room)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
