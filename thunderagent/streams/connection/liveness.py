"""Finds out whether a peer is still there, without harming a connection that is only slow.

The keepalive of the library cuts a healthy connection when the handler is slow (reading is paused, so the pong waits
behind messages) or when the loop was blocked (the time limit wins over the pong that is in the socket already). Here
only time counts in which the reader was waiting for the peer, and a timer that comes late counts as one tick. There
are several ticks to each limit, and between two of them the loop reads what has come: however often it is blocked, a
pong that is in the socket is seen in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from thunderagent.streams.connection.ending import Cause
from thunderagent.streams.connection.options import StreamOptions

_SLACK: Final = 0.05
"""Of a tick: so much may be missing, or a limit that is a whole number of ticks would take one more."""


class Pings(Protocol):
    """What liveness needs of a connection."""

    async def ping(self) -> Awaitable[float]:
        """Send a ping; what it answers is done when the pong is here."""


class Liveness:
    """Watches one connection, from the moment it is live until `stop`.

    A ping goes out each `ping_interval_s`; its pong has half of that. After a miss the next ping goes out at once, so
    that with two misses a dead peer is found within two intervals. A pong that comes later still tells that the peer
    is there. A pong settles all older pings: misses count in a row.

    Args:
        pings: the connection.
        options: intervals and limits.
        cut: called with the cause and a text once the peer is given up.
    """

    __slots__ = (
        "_asking",
        "_cut",
        "_is_open",
        "_listening_since",
        "_loop",
        "_misses",
        "_options",
        "_pings",
        "_quiet_s",
        "_since_ping_s",
        "_slack_s",
        "_tick_at",
        "_tick_s",
        "_timer",
        "_waited_s",
    )

    def __init__(self, pings: Pings, options: StreamOptions, cut: Callable[[Cause, str], None]) -> None:
        self._pings = pings
        self._options = options
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        shares = (options.ping_interval_s or 0.0) / 4, (options.idle_timeout_s or 0.0) / 4
        self._tick_s = min((share for share in shares if share), default=0.0)
        self._slack_s = self._tick_s * _SLACK
        self._asking: list[asyncio.Task[None]] = []  # the oldest first
        self._is_open = False
        self._misses = 0
        self._since_ping_s = self._waited_s = self._quiet_s = self._tick_at = 0.0
        self._listening_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch, before the first message too."""
        if self._tick_s:
            self._schedule()

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._asking:
            task.cancel()

    @property
    def is_listening(self) -> bool:
        """True while the reader waits for the peer."""
        return self._listening_since is not None

    def listening(self) -> None:
        """The reader waits for the peer from now on."""
        self._listening_since = self._loop.time()

    def heard(self, *, is_ping: bool = False) -> None:
        """A message came: the peer is there, and the reader has something else to do.

        Args:
            is_ping: it was no more than a sign of life, so the silence of `idle_timeout_s` goes on.
        """
        if is_ping:
            self._quiet_s += self._listened_s()
        else:
            self._quiet_s = 0.0
        if not self._options.only_pongs_count:
            self._waited_s = 0.0
            self._misses = 0
        else:
            self._waited_s += self._listened_s()
        self._listening_since = None

    def _listened_s(self) -> float:
        """How long the reader has waited for the peer since the last tick."""
        since = self._listening_since
        return 0.0 if since is None else min(self._loop.time() - max(since, self._tick_at), self._tick_s)

    def _schedule(self) -> None:
        self._tick_at = self._loop.time()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """One tick, however late it comes."""
        listened_s = self._listened_s()
        self._schedule()
        self._judge_silence(listened_s)
        if self._options.ping_interval_s and self._timer is not None:
            self._judge_pong(listened_s, self._options.ping_interval_s)

    def _judge_silence(self, listened_s: float) -> None:
        limit = self._options.idle_timeout_s
        self._quiet_s += listened_s
        if limit is not None and self._quiet_s >= limit - self._slack_s:
            self._give_up(Cause.IDLE, f"no message for {limit:g} s")

    def _judge_pong(self, listened_s: float, interval_s: float) -> None:
        self._since_ping_s += self._tick_s
        if self._is_open:
            self._waited_s += listened_s
            if self._waited_s < interval_s / 2 - self._slack_s:
                return
            self._misses += 1
            if self._misses >= self._options.pong_misses:
                self._give_up(Cause.ZOMBIE, f"{self._misses} pings were not answered")
                return
            self._send_ping()
        if self._since_ping_s >= interval_s - self._slack_s:
            self._send_ping()

    def _send_ping(self) -> None:
        """In a task: sending waits while the peer takes nothing, which is no answer either."""
        self._since_ping_s = self._waited_s = 0.0
        self._is_open = True
        if len(self._asking) >= self._options.pong_misses:
            return  # it never answers, and only data keeps it alive: an answer to an older ping is as good
        task = self._loop.create_task(self._ask())
        self._asking.append(task)
        task.add_done_callback(self._asking.remove)

    async def _ask(self) -> None:
        try:
            await (await self._pings.ping())
        except Exception:  # no answer; the reader tells how the connection ended
            return
        self._is_open = False
        self._misses = 0
        for older in self._asking:
            if older is asyncio.current_task():
                break
            older.cancel()

    def _give_up(self, cause: Cause, detail: str) -> None:
        self.stop()
        self._cut(cause, detail)
