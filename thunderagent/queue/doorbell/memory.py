"""A doorbell within one process: for agents beside the application, and for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress

from thunderagent.model.errors import DoorbellError
from thunderagent.model.forks import renewed
from thunderagent.queue.doorbell.message import DoorbellMessage, pack, parse
from thunderagent.queue.doorbell.port import Accepts

INBOX = 1000
"""Packets that wait for a listener at most; what comes on top is lost."""


class MemoryHub:
    """Where the doorbells of a process meet."""

    def __init__(self) -> None:
        self._guard = renewed(threading.Lock())
        self._listeners: tuple[queue.Queue[str | None], ...] = ()

    def join(self) -> queue.Queue[str | None]:
        inbox: queue.Queue[str | None] = queue.Queue(INBOX)
        with self._guard:
            self._listeners = (*self._listeners, inbox)
        return inbox

    def leave(self, inbox: queue.Queue[str | None]) -> None:
        with self._guard:
            self._listeners = tuple(one for one in self._listeners if one is not inbox)

    def send(self, packet: str) -> None:
        """Put a packet into every inbox that has room."""
        for inbox in self._listeners:
            put_if_room(inbox, packet)


class MemoryDoorbell:
    """One party at a hub. Messages are packed as they are between processes."""

    is_local = True

    def __init__(self, hub: MemoryHub | None = None) -> None:
        self.hub = hub or MemoryHub()
        self.is_healthy = True
        self._inbox: queue.Queue[str | None] | None = None
        self._closed = False

    def ring(self, messages: Sequence[DoorbellMessage]) -> None:
        for packet in pack(messages):
            self.hub.send(packet)

    def listen(self, timeout_s: float, accepts: Accepts) -> list[DoorbellMessage]:
        if self._closed:
            raise DoorbellError("the doorbell was closed")
        if self._inbox is None:
            self._inbox = self.hub.join()
        try:
            packet = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [message for message in parse(packet or b"") or () if accepts(message)]

    def close(self) -> None:
        self._closed = True
        if self._inbox is not None:
            self.hub.leave(self._inbox)
            put_if_room(self._inbox, None)


def put_if_room(inbox: queue.Queue[str | None], packet: str | None) -> None:
    """Put a packet into an inbox unless it is full."""
    with suppress(queue.Full):
        inbox.put_nowait(packet)
