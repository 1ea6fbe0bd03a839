"""The messages of a stream as an async iterator that survives its connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from websockets.exceptions import ConnectionClosed

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ConfigurationError, StreamFailed, TaskStopped
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.connection import Connection, Peer
from thunderagent.streams.connection.ending import CAUGHT_UP, Cause, FunctionFailed, State
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.pump import Pump, is_cancelled, seen
from thunderagent.streams.connection.sequencer import Ledger, Sequencer
from thunderagent.streams.cursor import Cursor, Place, place_of

M = TypeVar("M")


class Keeper(Ledger, Protocol):
    """The owner of a feed: has its lease and cursor, and keeps a journal."""

    def guard(self) -> None:
        """Raise when the lease is over: no message may be handed out."""

    def moved(self, feed: Feed[Any], state: State, reason: str) -> None:
        """Note that the feed is in another state."""

    def warned(self, feed: Feed[Any], reason: str) -> None:
        """Note what looks wrong while the feed goes on."""


class Feed(Generic[M]):
    """Messages of one peer over any number of connections. Made by `ctx.connect`; iterate it once.

    Nothing runs before the iteration, which ends with the feed and raises `StreamFailed` when the stream cannot go on.

    Args:
        peer: where and how to connect, and what its messages mean.
        on_hold: connect and buffer, but hand nothing out before `release`.
        monotonic: the clock of `handling_s`.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        keeper: Keeper,
        governor: Governor,
        on_hold: bool = False,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        if peer.overlap and peer.position is None:
            raise ConfigurationError(
                "exclusive=False needs positions, or what two connections bring at one moment would be handled twice: "
                "give connect() a `position` function"
            )
        self.options = options = peer.options
        self.state = State.RESOLVING
        self.since = monotonic()
        self.handled = 0
        """Handled messages."""
        self.unsent = 0
        """Messages that `send` could not send."""
        self._keeper = keeper
        self._decode = peer.decode
        self._position = peer.position
        self._monotonic = monotonic
        self._buffer = Buffer(options.max_pending, options.max_pending_bytes, options.on_full)
        self._sequencer = Sequencer(self, self._buffer, keeper, place=self._place_of, peer=peer)
        self._pump = Pump(
            peer,
            governor=governor,
            buffer=self._buffer,
            resume=self._resume,
            moved=self._moved,
            begin_at=self._begin_at,
            guard=keeper.guard,
        )
        self._pumping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._held = asyncio.Event() if on_hold else None
        self._flush = False
        self._since_progress = 0
        self._handling_since: float | None = None

    # For the handler

    def __aiter__(self) -> Self:
        if self._pumping is None and not self._buffer.is_closed:  # it may have ended before it began
            self._pumping = asyncio.get_running_loop().create_task(self._run())
            self._pumping.add_done_callback(seen)
        return self

    async def __anext__(self) -> M:
        self._has_handled()
        while True:
            self._keeper.guard()
            if self._held is not None:
                await self._held.wait()
                continue
            if self._closing is not None and not (self._flush and len(self._buffer)):
                await asyncio.shield(self._closing)
                raise StopAsyncIteration
            raw = self._buffer.get()
            if raw is None:
                if self._buffer.is_closed:
                    await self._tell_end()
                else:
                    await self._buffer.wait_for_some()
                continue
            try:
                message = cast(M, raw) if self._decode is None else self._decode(raw)
                is_next = self._position is None or await self._sequencer.is_next(place_of(self._position(message)))
            except (StopAsyncIteration, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                raise _silent(error) from error
            if is_next:
                self._handling_since = self._monotonic()
                return message

    async def send(self, message: str | bytes) -> bool:
        """Send a message on the live connection; waits while the peer takes nothing.

        Returns:
            True when it was written to the socket, which does not prove that the peer has it; False without a
            connection: then it is lost, and counted in the journal.
        """
        connection = self._pump.connection
        if connection is not None:
            with suppress(ConnectionClosed):
                await connection.send(message)
                return True
        self.unsent += 1
        return False

    async def send_json(self, value: Any) -> bool:
        """Send a value as JSON text, as `send` does."""
        return await self.send(json.dumps(value, separators=(",", ":")))

    @property
    def connection(self) -> Connection | None:
        """The live connection; None while there is none. It may end at any moment, so use `send`."""
        return self._pump.connection

    @property
    def connects(self) -> int:
        """Connections that became live so far."""
        return self._pump.connects

    @property
    def duplicates(self) -> int:
        """Dropped messages that had come before."""
        return self._sequencer.duplicates

    def reconnect(self, reason: str = "asked to") -> None:
        """Close the connection and connect again at once, for example when the peer announces a move."""
        if self._pump.connection is not None:
            self._pump.connection.cut(Cause.ASKED, reason)

    # For the keeper, in the thread of the loop but for `handling_s`

    @property
    def has_progressed(self) -> bool:
        """True once a connection was stable or enough messages were handled."""
        return self._pump.has_progressed

    @property
    def wait_s(self) -> float:
        """Seconds from the last end of a connection or an attempt to the next attempt."""
        return self._pump.wait_s

    def handling_s(self) -> float:
        """Seconds since the handler got its message or the end; 0 while it waits."""
        since = self._handling_since
        return 0.0 if since is None else self._monotonic() - since

    def release(self, cursor: Cursor | None) -> None:
        """Hand out what comes behind this place, where the former agent has stopped."""
        self._sequencer.release(cursor)
        self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.set()

    def finish(self, *, flush: bool = False) -> asyncio.Task[None]:
        """End: close the connection now; the handler's iteration ends at its next message.

        Args:
            flush: first hand out what was read already.
        """
        if self._closing is None:
            self._flush = flush
            self._closing = asyncio.get_running_loop().create_task(self._close())
            self._let_go()
            self._buffer.close()
        return self._closing

    def abort(self) -> None:
        self._pump.abort()
        self._buffer.close()
        if self._pumping is not None:
            self._pumping.cancel()

    # Inside

    async def _run(self) -> None:
        try:
            await self._pump.run()
        except StreamFailed as error:
            if self._closing is None:
                self._moved(State.FAILED, str(error))
            raise
        finally:
            self._pump.abort()
            self._buffer.close()

    async def _tell_end(self) -> None:
        """Raise the reason why the connection ended for good.

        Raises:
            StreamFailed: the stream cannot go on.
            TaskStopped: the lease was lost before it was connected again.
            RuntimeError: the task was cancelled.
            BaseException: the error of `answer` or `keepalive`.
        """
        pumping = self._pumping
        if pumping is None:
            raise StreamFailed("the feed was ended before it began")
        await asyncio.wait((pumping,))
        self._handling_since = self._monotonic()
        error = None if pumping.cancelled() else pumping.exception()
        if isinstance(error, (StreamFailed, TaskStopped)):
            raise error
        if isinstance(error, FunctionFailed):
            cause = error.__cause__ or error
            if isinstance(cause, (StopAsyncIteration, asyncio.CancelledError)):
                raise _silent(cause) from cause
            raise cause
        raise RuntimeError("the task that holds the connection has died") from error

    async def _close(self) -> None:
        """Close within `close_timeout_s`, even if user code cannot be cancelled."""
        pumping = self._pumping
        connection = self._pump.connection
        if pumping is not None and not pumping.done():
            if connection is not None:
                self._pump.connection = None  # ours from now on, or the end of the task would cut it
            pumping.cancel()
            await asyncio.wait((pumping,), timeout=self.options.close_timeout_s)
        if connection is not None:
            await connection.close()
        if self.state is not State.FAILED:
            self._moved(State.CLOSED, "")

    def _moved(self, state: State, reason: str) -> None:
        self._sequencer.moved()
        if state is State.LIVE and reason != CAUGHT_UP:
            self._buffer.begin_connection()
        self.state, self.since = state, self._monotonic()
        self._keeper.moved(self, state, reason)

    def _has_handled(self) -> None:
        if self._handling_since is None:
            return
        self._handling_since = None
        self.handled += 1
        self._pump.handled_one()
        self._since_progress += 1
        if self._since_progress >= self.options.stable_after_messages:
            self._since_progress = 0
            self._pump.progressed()

    def _resume(self) -> Cursor | None:
        """The place behind the newest message read; without positions, the last checkpoint."""
        return self._keeper.cursor if self._position is None else self._sequencer.resume()

    def _begin_at(self, place: Cursor | int) -> None:
        if self._position is not None:
            self._sequencer.begin_at(place)

    def _place_of(self, raw: Any) -> Place | None:
        """The place of a message that waits for the handler, if it has one."""
        if self._position is not None:
            with suppress(Exception):  # the handler meets the same error
                return place_of(self._position(raw if self._decode is None else self._decode(raw)))
        return None

    # For the sequencer

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count the time of functions given to `connect` as that of a message."""
        self._handling_since = self._monotonic()
        try:
            yield
        finally:
            self._handling_since = None
            self._keeper.guard()

    def doubt(self, reason: str) -> None:
        """Note what looks wrong."""
        self._keeper.warned(self, reason)

    def now(self) -> float:
        """Seconds of the lease's clock."""
        return self._monotonic()


def _silent(error: BaseException) -> RuntimeError:
    """Replaces an error of a user's function that would end the handler's loop silently."""
    return RuntimeError(f"a function given to connect() raised {type(error).__name__}")
