"""What a chaos server saw of its clients, and waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from thunderagent.model.errors import WaitTimeout
from thunderagent.testing.chaos.behaviours import Behaviour


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A connection that TCP accepted, noted when its behaviour is chosen."""

    time: float
    """Of the accept, on the clock of the loop."""
    key: str | None
    """The stream; None if no request was read."""
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    accepted: bool
    """True when it was to become a WebSocket."""
    behaviour: Behaviour


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    time: float
    key: str
    since: int | None
    epoch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message of a client, subscriptions too."""

    time: float
    key: str
    data: str | bytes


@dataclass(eq=False, slots=True)
class OpenSocket:
    """A socket from its accept to the moment when the client's side of it ended, or ours."""

    key: str | None = None
    """The stream if it is a WebSocket."""


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Observations:
    """All seen so far. A test may clear the lists between its parts."""

    attempts: list[Attempt] = field(default_factory=list)
    subscriptions: list[Subscription] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    close_codes: list[int] = field(default_factory=list)
    """Of the close frames of clients; 1005 for an empty one."""
    pings: int = 0
    most_open: dict[str, int] = field(default_factory=dict)
    """By stream: the largest number of WebSockets open at one moment."""
    _sockets: set[OpenSocket] = field(default_factory=set)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Open sockets, whatever the result of their handshake."""
        return len(self._sockets)

    def open_of(self, key: str) -> int:
        return sum(one.key == key for one in self._sockets)

    async def wait_for(self, predicate: Callable[[], object], timeout_s: float = 5.0) -> None:
        """Wait until the predicate holds; it is tested whenever the server has seen something.

        Raises:
            WaitTimeout: it did not come to hold within these seconds of the loop's clock.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            raise WaitTimeout(f"it did not come about within {timeout_s:g} s: {self.summary()}") from None

    def summary(self) -> str:
        """The numbers of all that was seen."""
        return (
            f"{len(self.attempts)} attempts, {self.open} sockets open, {len(self.subscriptions)} subscriptions, "
            f"{len(self.received)} messages received, {self.pings} pings, closed by clients with {self.close_codes}"
        )

    def notify(self) -> None:
        """Wake the waits, as something was seen."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def came(self) -> OpenSocket:
        one = OpenSocket()
        self._sockets.add(one)
        self.notify()
        return one

    def opened(self, one: OpenSocket, key: str) -> None:
        """It becomes a WebSocket of a stream."""
        one.key = key
        self.most_open[key] = max(self.most_open.get(key, 0), self.open_of(key))
        self.notify()

    def went(self, one: OpenSocket) -> None:
        self._sockets.discard(one)
        self.notify()
