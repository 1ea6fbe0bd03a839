"""Keeps a connection to a peer: connects, reads, waits, and connects again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from thunderagent.model.errors import StreamFailed, TaskStopped
from thunderagent.model.pacing import Backoff
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.connection import Connection, Peer
from thunderagent.streams.connection.ending import (
    CAUGHT_UP,
    NEXT_ATTEMPT,
    Cause,
    ConnectionEnd,
    FunctionFailed,
    State,
    end_of,
)
from thunderagent.streams.connection.endpoint import Attempt, resolve_endpoint
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.liveness import Pings
from thunderagent.streams.connection.transport import open_connection
from thunderagent.streams.connection.verdicts import UNKNOWN, Pace, Verdict
from thunderagent.streams.cursor import Cursor

FLOOR_S: Final = 0.1
"""No peer sees two attempts of one stream closer together than this, unless the first end was planned."""

SPREAD_S: Final = (5.0, 30.0)
"""Wait before the return to a peer that restarts and said so."""

SLOW_S: Final = 30.0
"""Least wait before the return to a peer that has too much to do."""


def reconnect_delay(failures: int, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Seconds before the next attempt to connect: full jitter, as `Backoff`, but at least `FLOOR_S`."""
    return max(FLOOR_S, Backoff(base_s=base_s, cap_s=cap_s).delay(failures, rng))


Moved = Callable[[State, str], None]
"""Called with each new state and its reason."""

ROTATION_RETRY_S: Final = 30.0
"""Pause after a replacement that could not be opened while the old connection still works."""

LONGEST_S: Final = 3600.0
"""Longest wait that a peer may ask for, plus up to half of it: it may be wrong."""


class Pump:
    """Connects until it is cancelled, and fills a buffer.

    Args:
        resume: the place to go on from, called for each attempt.
        moved: called with each new state.
        begin_at: called with the answer of `on_open`, if that is a place.
        guard: raises when the right to the stream is lost; called before each attempt.
        pings: makes the pings that prove a connection alive; None: pings of the WebSocket protocol.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        governor: Governor,
        buffer: Buffer,
        resume: Callable[[], Cursor | None],
        moved: Moved,
        begin_at: Callable[[Cursor | int], None],
        guard: Callable[[], None],
        pings: Callable[[Connection], Pings] | None = None,
    ) -> None:
        self._peer = peer
        self._options = peer.options
        self._governor = governor
        self._buffer = buffer
        self._resume = resume
        self._moved = moved
        self._begin_at = begin_at
        self._guard = guard
        self._pings = pings
        self._failures = 0
        self._refusals = 0
        self._refused_since = 0.0
        self._auth_failed = False
        self._last_end: ConnectionEnd | None = None
        self.connection: Connection | None = None
        """The live connection; None while there is none."""
        self.connects = 0
        """Connections that became live."""
        self.has_progressed = False
        """True once a connection was stable."""
        self.wait_s = 0.0
        """Seconds from the last end to the next attempt."""

    async def run(self) -> None:
        """Connect and read until cancelled.

        Raises:
            StreamFailed: an end was fatal.
            FunctionFailed: a function given to `connect` has raised.
        """
        while True:
            opened = await self._attempt(self._moved, self._failures + 1)
            end = await self._hold(opened) if isinstance(opened, Connection) else opened
            await self._wait_after(end)

    def progressed(self) -> None:
        """Note progress: delays and counts start again."""
        self.has_progressed = True
        self._failures = 0
        self._refusals = 0

    def handled_one(self) -> None:
        """Note a handled message: the peer does not refuse us."""
        self._refusals = 0

    def abort(self) -> None:
        if self.connection is not None:
            self.connection.abort()

    # One attempt

    async def _attempt(self, moved: Moved, number: int) -> Connection | ConnectionEnd:
        state, opened, lost = State.RESOLVING, None, None
        try:
            moved(state, "")
            cursor = self._resume()
            attempt = Attempt(number=number, cursor=cursor, auth_failed=self._auth_failed, last_end=self._last_end)
            async with _limit(self._options.open_timeout_s, "the endpoint function"):
                endpoint = await resolve_endpoint(self._peer.endpoint, attempt)
            async with self._governor.turn(endpoint.url):
                lost = self._lost()  # a process that stood still wakes up here, and another agent may be connected
                if lost is not None:
                    raise lost
                state = State.CONNECTING
                moved(state, "")
                opened = Connection(
                    await open_connection(endpoint, self._options, self._governor.resolver),
                    self._peer,
                    self._pings,
                )
            if self._peer.on_open is not None:
                state = State.SUBSCRIBING
                moved(state, "")
                async with _limit(self._options.subscribe_timeout_s, "on_open"):
                    place = await self._peer.on_open(opened, cursor)
                if isinstance(place, (Cursor, int)):
                    self._begin_at(place)
            opened.forget_handshake()
        except BaseException as error:  # what user code raises, SystemExit too, ends this attempt
            is_open = opened is not None and opened.is_open
            if opened is not None:
                opened.abort()
            if is_cancelled() or isinstance(error, (StreamFailed, FunctionFailed)) or error is lost:
                raise
            end = end_of(error, state, now=time.time(), is_open=is_open)
            return end if opened is None else _with_answer(end, error, opened)
        return opened

    def _lost(self) -> TaskStopped | None:
        """Why no connection may be made any more, or None."""
        try:
            self._guard()
        except TaskStopped as why:
            return why
        return None

    # A live connection

    async def _hold(self, connection: Connection) -> ConnectionEnd:
        """Read until the connection ends; replace it before the peer's limit on its age."""
        moved, reason = self._moved, ""
        while True:
            self.connection = connection
            self.connects += 1
            self._auth_failed = False
            moved(State.LIVE, reason)
            loop = asyncio.get_running_loop()
            stable = loop.call_later(self._options.stable_after_s, self.progressed)
            if self._options.age_limit_s is None:  # read here: a task for each reader costs 2 KiB
                try:
                    return await self._read(connection)
                finally:
                    stable.cancel()
            reader = loop.create_task(connection.read(self._buffer, self._paused))
            reader.add_done_callback(seen)
            try:
                replacement = await self._read_until_old(connection, reader)
                if isinstance(replacement, ConnectionEnd):
                    self.connection = None
                    connection.abort()
                    return replacement
            finally:  # after a cancel the connection stays open: the feed closes it politely
                stable.cancel()
                reader.cancel()
            connection, reason = replacement, "replaced the connection before the peer's limit on its age"

    async def _read(self, connection: Connection) -> ConnectionEnd:
        try:
            end = await connection.read(self._buffer, self._paused)
        except Exception as error:
            if isinstance(error, (StreamFailed, FunctionFailed)):
                raise
            end = end_of(error, State.LIVE, now=time.time())
        self.connection = None
        connection.abort()
        return end

    async def _read_until_old(
        self, connection: Connection, reader: asyncio.Task[ConnectionEnd]
    ) -> ConnectionEnd | Connection:
        """The end of the connection, or the one that takes its place."""
        limit = self._options.age_limit_s
        left = None if limit is None else limit * (1.0 - 0.1 * self._governor.rng.random())
        number = self._failures + 1
        while True:
            await asyncio.wait((reader,), timeout=left)
            if reader.done():
                return _end_of_reader(reader)
            if not self._peer.overlap:
                await connection.close()
                return ConnectionEnd(cause=Cause.ROTATED, state=State.LIVE, detail="the connection was old")
            opened = await self._attempt(lambda state, reason: None, number)
            if isinstance(opened, ConnectionEnd):
                self._remember(opened)
                left, number = ROTATION_RETRY_S, number + 1
                continue
            try:
                await self._switch(connection, reader)
            except BaseException:
                opened.abort()
                raise
            return opened

    async def _switch(self, old: Connection, reader: asyncio.Task[ConnectionEnd]) -> None:
        """Read what the old connection brought before the new one was subscribed, then close it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.close_timeout_s
        while not old.is_drained and not reader.done() and loop.time() < until:
            await asyncio.wait((reader,), timeout=0.01)
        reader.cancel()
        await asyncio.wait((reader,))
        if not reader.cancelled():
            _end_of_reader(reader)
        await old.close()

    def _paused(self, is_paused: bool) -> None:
        if is_paused:
            self._moved(State.PAUSED, "the handler is slower than the peer")
        else:
            self._moved(State.LIVE, CAUGHT_UP)

    # After an end

    async def _wait_after(self, end: ConnectionEnd) -> None:
        verdict = self._remember(end)
        if verdict.fatal_after is None:
            self._refusals = 0
        else:
            now = asyncio.get_running_loop().time()
            self._refused_since = self._refused_since if self._refusals else now
            self._refusals += 1
            lasted_s = now - self._refused_since
            if verdict.is_fatal(self._refusals, lasted_s):
                raise StreamFailed(self._fatal(end, lasted_s))
        self.wait_s = self._delay(verdict, end)
        self._failures += 1
        asked = verdict.pace is Pace.SLOW and end.retry_after_s is not None
        wish = f", Retry-After {end.retry_after_s:g} s" if asked else ""
        self._moved(State.BACKOFF, f"{end}{wish}{NEXT_ATTEMPT}{self.wait_s:.1f} s")
        await asyncio.sleep(self.wait_s)

    def _remember(self, end: ConnectionEnd) -> Verdict:
        """Keep the end for the next attempt; the answer is its verdict."""
        try:
            verdict = self._options.verdict(end)
        except BaseException:  # of the user's classify, SystemExit too: it must not end the stream without a reason
            verdict = UNKNOWN
        self._last_end = end
        self._auth_failed = self._auth_failed or verdict.refresh
        return verdict

    def _fatal(self, end: ConnectionEnd, lasted_s: float) -> str:
        times = f", refused {self._refusals} times in {lasted_s:.0f} s" if self._refusals > 1 else ""
        limit = f"; max_size is {self._options.max_size} bytes" if end.cause is Cause.TOO_BIG else ""
        return f"{end.kind}{times}: {end.detail or 'no reason given'}{limit}"

    def _delay(self, verdict: Verdict, end: ConnectionEnd) -> float:
        rng = self._governor.rng
        match verdict.pace:
            case Pace.AT_ONCE if not self._failures:
                return 0.0
            case Pace.SPREAD:
                return rng.uniform(*SPREAD_S)
            case Pace.SLOW:
                least = min(max(SLOW_S, end.retry_after_s or 0.0), LONGEST_S)
                return least + rng.uniform(0.0, least / 2)
        first = self._governor.first_retry() if end.state in (State.LIVE, State.PAUSED) and not self._failures else 0.0
        return first + reconnect_delay(self._failures, self._options.backoff_base_s, self._options.backoff_cap_s, rng)


@asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[None]:
    """As `asyncio.timeout`, with a message."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
        raise
    if is_cancelled():  # user code swallowed our cancellation
        raise asyncio.CancelledError


def is_cancelled() -> bool:
    """True when our own task was cancelled, not one that user code waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def seen(task: asyncio.Task[Any]) -> None:
    """Mark a task's error as retrieved, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()


def _with_answer(end: ConnectionEnd, error: BaseException, connection: Connection) -> ConnectionEnd:
    """The end of an attempt with what the peer said to `on_open`. Silence is no refusal: it may be an outage."""
    missing = connection.missing
    return replace(
        end,
        cause=Cause.NETWORK if isinstance(error, TimeoutError) and connection.is_unanswered else end.cause,
        detail="; ".join(filter(None, (end.detail, missing))),
    )


def _end_of_reader(reader: asyncio.Task[ConnectionEnd]) -> ConnectionEnd:
    """The end that the reader answered, or that it died.

    Raises:
        StreamFailed: the stream cannot go on.
        FunctionFailed: a function given to `connect` has raised.
    """
    if reader.cancelled():
        return ConnectionEnd(cause=Cause.INTERNAL, state=State.LIVE, detail="the reader was cancelled")
    error = reader.exception()
    if isinstance(error, (StreamFailed, FunctionFailed)):
        raise error
    return reader.result() if error is None else end_of(error, State.LIVE, now=time.time())
