"""Finds a dead peer without harming a connection that is only slow.

The library's keepalive cuts healthy connections: a slow handler pauses reading, so that the pong waits behind messages,
and after a blocked loop the time limit wins over a pong in the socket. Here only time counts in which the reader waits
for the peer, and a late timer counts as one tick. Each limit has several ticks, and the loop reads between them: a pong
in the socket is seen in time, however often the loop is blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from thunderagent.streams.connection.ending import Cause
from thunderagent.streams.connection.options import StreamOptions

_SLACK: Final = 0.05
"""Part of a tick that may be missing, or a limit of a whole number of ticks would take one more."""


class Pings(Protocol):
    """Sends pings: a connection."""

    async def ping(self) -> Awaitable[float]:
        """Send a ping; the answer is done when the pong has come."""


class Liveness:
    """Watches one connection, from the moment it is live until `stop`.

    A ping goes out each `ping_interval_s`; its pong has half of that. After a miss the next ping goes out at once, so
    that two misses find a dead peer within two intervals. A late pong counts, and settles all older pings.

    Args:
        cut: called with the cause and a text when the peer is given up.
    """

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
        if self._tick_s:
            self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._asking:
            task.cancel()

    @property
    def is_listening(self) -> bool:
        return self._listening_since is not None

    def listening(self) -> None:
        """Note that the reader waits for the peer from now on."""
        self._listening_since = self._loop.time()

    def heard(self, *, is_ping: bool = False) -> None:
        """Note a message: the peer is there, and the reader is busy.

        Args:
            is_ping: True for a mere sign of life, which does not end the silence of `idle_timeout_s`.
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
        """Seconds since the last tick in which the reader has waited for the peer."""
        since = self._listening_since
        return 0.0 if since is None else min(self._loop.time() - max(since, self._tick_at), self._tick_s)

    def _schedule(self) -> None:
        self._tick_at = self._loop.time()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """One tick, however late."""
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
        """Send a ping in a task: sending waits while the peer takes nothing."""
        self._since_ping_s = self._waited_s = 0.0
        self._is_open = True
        if len(self._asking) >= self._options.pong_misses:
            return  # an answer to an older ping is as good
        task = self._loop.create_task(self._ask())
        self._asking.append(task)
        task.add_done_callback(self._asking.remove)

    async def _ask(self) -> None:
        try:
            await (await self._pings.ping())
        except Exception:  # no answer; the reader reports the end
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
