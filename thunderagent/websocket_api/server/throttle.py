"""Limits of what a connection and a user may send to all instances of the function: token buckets in their rows.

An instance counts messages in memory and books them in lots. A lot costs one write for the connection and one for the
user. After a refusal the instance refuses from memory until a lot fits again. So each instance lets at most `LOT - 1`
messages in `FORGET_S` through beyond a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from thunderagent.stores.engine import Engine
from thunderagent.websocket_api.records import MOST_CONNECTIONS, Bucket, connection_id_of, connections_id, spend

USER_RATE: Final = 50.0
USER_BURST: Final = 250.0
CONNECT_RATE: Final = 5.0
CONNECT_BURST: Final = 2.0 * MOST_CONNECTIONS
"""Connects of a user at one moment: each connection beside the one that it replaces."""
LOT: Final = 5
"""Messages that are booked together."""
FORGET_S: Final = 10.0
"""Age at which messages of less than a lot, and refusals, are forgotten."""
FLOOD: Final = 20
"""Messages of a connection that one instance refuses within `FORGET_S` before it closes the connection."""
MOST_ROWS: Final = 10_000
"""Rows that an instance remembers; it forgets the oldest."""
_CLOCKS_S: Final = 3.0
"""Seconds of its rate that a bucket holds at least: clocks of instances differ, because `Date` has whole seconds."""
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a user may do at most."""

    user_rate: float = USER_RATE
    """Messages in a second; one connection may send half of them."""
    user_burst: float = USER_BURST
    """Messages at one moment; one connection may send half of them."""
    connect_rate: float = CONNECT_RATE
    """Connects in a second."""


class Throttled(Exception):
    """A limit is reached. `wait_s`: until more is taken; `is_flood`: the sender does not stop."""

    def __init__(self, wait_s: float, *, is_flood: bool = False, is_first: bool = True) -> None:
        super().__init__(f"the limit is reached for {wait_s:.1f} s")
        self.wait_s = wait_s
        self.is_flood = is_flood
        self.is_first = is_first
        """No message of the connection was refused just before."""


@dataclass(slots=True)
class _Count:
    since: float
    messages: int = 0
    refused: int = 0
    until: float = 0.0
    was_full: bool = True
    """The bucket when it was seen last: a right guess saves a second write."""


class Throttle:
    """The limits of messages in one instance of the function. Safe in threads. A burst is at least 3 times the rate."""

    def __init__(self, engine: Engine, now: Callable[[], float], *, rate: float, burst: float) -> None:
        self._engine = engine
        self._now = now
        burst = max(burst, _CLOCKS_S * rate)
        self._of_user = Bucket("lockTime", rate, burst)
        self._of_connection = Bucket("lockTime", rate / 2, burst / 2)
        self._guard = threading.Lock()
        self._counts: dict[str, _Count] = {}

    def check(self, connection: str, user: str) -> None:
        """Count a message.

        Raises:
            Throttled: it is one too many.
            StoreError: the store did not answer.
        """
        row_id = connection_id_of(connection)
        try:
            self._wait(connections_id(user))  # first: a refusal costs the connection neither a write nor tokens
            self._take(row_id, self._of_connection)
            self._take(connections_id(user), self._of_user)
        except Throttled as error:
            with self._guard:
                count = self._count(row_id)
                count.refused += 1
                is_flood, is_first = count.refused % FLOOD == 0, count.refused == 1
            raise Throttled(error.wait_s, is_flood=is_flood, is_first=is_first) from None

    def _wait(self, row_id: str) -> _Count:
        with self._guard:
            count = self._count(row_id)
            if (left := count.until - self._now()) > 0:
                raise Throttled(left)
            return count

    def _take(self, row_id: str, bucket: Bucket) -> None:
        count = self._wait(row_id)
        with self._guard:
            count.messages += 1
            if count.messages < LOT:
                return
            count.messages = 0
        if (left := self._book(row_id, bucket, count)) > 0:
            with self._guard:
                count.until, count.messages = self._now() + left, LOT - 1  # the next message is booked at once
            raise Throttled(left)

    def _book(self, row_id: str, bucket: Bucket, count: _Count) -> float:
        """Take a lot out of a bucket; 0, or the seconds until there is one."""
        for _ in range(_TRIES):
            now = self._now()
            [applied] = self._engine.apply([spend(row_id, bucket, LOT, now=now, was_full=count.was_full)])
            if applied.error is not None:
                raise applied.error
            if applied.row is None:  # the connection is not known
                break
            count.was_full = bucket.is_full(applied.row, now)
            if applied.won:
                break
            if (left := bucket.wait_s(applied.row, LOT, now)) > 0:
                return left
        return 0.0

    def _count(self, row_id: str) -> _Count:
        now = self._now()
        count = self._counts.get(row_id)
        if count is None:
            while len(self._counts) >= MOST_ROWS:
                del self._counts[next(iter(self._counts))]
            count = self._counts[row_id] = _Count(now)
        elif now - count.since >= FORGET_S:
            count.since, count.messages, count.refused, count.was_full = now, 0, 0, True
        return count
