"""A doorbell within one process: for agents beside the application, and for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from thunderagent.model.errors import DoorbellError
from thunderagent.model.forks import renewed
from thunderagent.queue.doorbell.message import Ring, pack, parse
from thunderagent.queue.doorbell.port import Wanted

HEARD = 1000
"""Messages that wait for a listener at most; what comes on top is lost."""


class MemoryHub:
    """Where the doorbells of a process meet."""

    def __init__(self) -> None:
        self._guard = renewed(threading.Lock())
        self._listeners: tuple[queue.Queue[str | None], ...] = ()

    def join(self) -> queue.Queue[str | None]:
        """A new listener's inbox."""
        inbox: queue.Queue[str | None] = queue.Queue(HEARD)
        with self._guard:
            self._listeners = (*self._listeners, inbox)
        return inbox

    def leave(self, inbox: queue.Queue[str | None]) -> None:
        """Tell this listener nothing more."""
        with self._guard:
            self._listeners = tuple(one for one in self._listeners if one is not inbox)

    def tell(self, message: str) -> None:
        """Put a message into every inbox that has room."""
        for inbox in self._listeners:
            put_if_room(inbox, message)


class MemoryDoorbell:
    """One party at a hub. The rings go through their text, as they do between processes."""

    is_local = True

    def __init__(self, hub: MemoryHub | None = None) -> None:
        self.hub = hub or MemoryHub()
        self.is_healthy = True
        self._inbox: queue.Queue[str | None] | None = None
        self._closed = False

    def ring(self, rings: Sequence[Ring]) -> None:
        for message in pack(rings):
            self.hub.tell(message)

    def listen(self, timeout_s: float, wanted: Wanted) -> list[Ring]:
        if self._closed:
            raise DoorbellError("the doorbell was closed")
        if self._inbox is None:
            self._inbox = self.hub.join()
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [ring for ring in parse(message or b"") or () if wanted(ring)]

    def close(self) -> None:
        self._closed = True
        if self._inbox is not None:
            self.hub.leave(self._inbox)
            put_if_room(self._inbox, None)


def put_if_room(inbox: queue.Queue[str | None], message: str | None) -> None:
    """Put a message into an inbox unless it is full."""
    try:
        inbox.put_nowait(message)
    except queue.Full:
        return
