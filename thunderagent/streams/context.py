"""What the handler of a stream is given: its cursor, its connections, and the lease behind them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypedDict, TypeVar, Unpack, overload

from thunderagent.jobs.context import Context
from thunderagent.jobs.outcome import about
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import (
    AgentDraining,
    LeaseLost,
    StreamHandedOff,
    StreamStopped,
    TaskCancelled,
    TaskStopped,
)
from thunderagent.model.task import Lease
from thunderagent.settings import LEASE_MARGIN
from thunderagent.streams.connection.connection import OnOpen, Peer
from thunderagent.streams.connection.ending import CAUGHT_UP, State
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.feed import Feed
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.cursor import Cursor, Gap, GapAction, OnGap, PositionOf, Snapshot
from thunderagent.streams.journal import Journal, Missed, read_cursor

LOOP_LATE_S: Final = 5.0
"""Age of an event loop's last tick at which the leases of its streams are no longer renewed."""

M = TypeVar("M")

DEFAULT_OPTIONS = StreamOptions()
_SOFT = (AgentDraining, StreamHandedOff, StreamStopped, TaskCancelled)
"""Reasons of a stop after which the handler may finish its message, and its cursor is saved."""


class ConnectArguments(TypedDict, total=False):
    """Arguments of `StreamContext.connect`, which explains them."""

    answer: Callable[[Any], Any] | None
    keepalive: tuple[Any, float] | None
    on_open: OnOpen | None
    position: PositionOf | None
    on_gap: OnGap
    snapshot: Snapshot | None
    options: StreamOptions


class StreamContext(Context):
    """What the handler of a stream knows of its task and may do.

    Agents make it. `connect` belongs to the event loop; everything else may be called from any thread.

    Args:
        lease, parents: as in `Context`.
        grace_s: longest time that the handler may take to end after a stop, in the event loop.
        on_hold: True while another agent handles this stream's messages: none is handed out before `release`.
        monotonic: clock of the lease.
        now: shared clock, for the journal.
    """

    __slots__ = (
        "_cursor",
        "_deadline",
        "_ends",
        "_exclusive",
        "_feeds",
        "_going_back",
        "_governor",
        "_grace_s",
        "_loop_ticked",
        "_monotonic",
        "_now",
        "_on_hold",
        "_past",
        "_saved",
        "_tell",
        "_touched",
        "journal",
    )

    def __init__(
        self,
        lease: Lease,
        parents: Callable[[], Mapping[str, Any]] | None = None,
        *,
        bus: EventBus | None = None,
        exclusive: bool = True,
        grace_s: float = 30.0,
        on_hold: bool = False,
        monotonic: Callable[[], float] = since_boot,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(lease, parents)
        self.journal = Journal(lease.task_id, lease.fence, lease.owner)
        self._tell = (bus or EventBus()).emit
        self._exclusive, self._on_hold = exclusive, on_hold
        self._grace_s = grace_s
        self._monotonic, self._now = monotonic, now
        self._cursor = self._saved = read_cursor(lease.task)
        self._going_back: set[str | None] = set()
        self._deadline = lease.deadline(LEASE_MARGIN)
        self._touched = monotonic()
        self._feeds: tuple[Feed[Any], ...] = ()
        self._governor: Governor | None = None
        self._loop_ticked: Callable[[], float] = monotonic
        self._ends = False
        self._past = Counter[str]()

    # For handlers

    @property
    def cursor(self) -> Cursor | None:
        """The last checkpoint, of an earlier run too; None at the beginning. With keys: `ctx.cursor.of("BTCUSDT")`."""
        return self._cursor

    def checkpoint(
        self, *, seq: int, epoch: str | int | None = None, token: str | None = None, key: str | None = None
    ) -> None:
        """Move the cursor: everything up to here was handled. The next heartbeat saves it, and so does the end.

        The cursor goes back only after a snapshot of the peer, or when the peer counts from its beginning again.

        Args:
            seq: number of the last message handled.
            epoch: the life of the stream in which it counts.
            token: what the peer resumes from, if that is not the number; at most 200 bytes.
            key: the sequence in which it counts, if there are several; the places of all may have 400 bytes.

        Raises:
            ValueError: one of the values cannot be a part of a cursor, or there are too many keys.
        """
        place = Cursor(seq, epoch, token, key)
        self._touched = self._monotonic()
        with self._guard:
            before = None if self._cursor is None else self._cursor.of(key)
            if before is not None and place.is_behind(before) and key not in self._going_back:
                return
            cursor = place if self._cursor is None else self._cursor.with_place(place)
            cursor.check_size()
            self._cursor = cursor
            self._going_back.discard(key)

    def progress(self, value: Any) -> None:
        self._touched = self._monotonic()
        super().progress(value)

    @overload
    def connect(
        self, endpoint: EndpointSource, *, decode: Callable[[Any], M], **arguments: Unpack[ConnectArguments]
    ) -> Feed[M]: ...

    @overload
    def connect(
        self, endpoint: EndpointSource, *, decode: None = None, **arguments: Unpack[ConnectArguments]
    ) -> Feed[Any]: ...

    def connect(
        self,
        endpoint: EndpointSource,
        *,
        decode: Callable[[Any], Any] | None = None,
        **arguments: Unpack[ConnectArguments],
    ) -> Feed[Any]:
        """Messages of a WebSocket over any number of connections: `async for message in ctx.connect(…)`.

        The loop ends when the stream is stopped or goes to another agent; a lost lease cancels the handler.

        Args:
            endpoint: a URL, several to try in turn, or a function that gets an `Attempt` before each attempt.
            decode: makes a message of the text or bytes received, for example `json.loads`.
            answer: the reply to a ping of the peer's own protocol, sent before waiting messages are handled: text,
                bytes, or a value sent as JSON. None for a message that is no ping: the handler gets it.
            keepalive: `(message, every_s)`; the message may be a function that makes it.
            on_open: authenticates and subscribes; gets the connection and the place to go on from.
            position: the place of a message: its number, a `Cursor`, or a `Span` if it covers several numbers, belongs
                to one of several sequences, or is a snapshot. With it duplicates are dropped and gaps found.
            on_gap: what to do about a gap, or a function that decides.
            snapshot: reads the state again and answers with its place; read the place first, then the state.
            options: times, sizes and limits.

        Raises:
            ConfigurationError: the arguments cannot work together.
            StreamFailed: while it is iterated: the stream cannot go on.
        """
        if self._governor is None:
            self._governor = Governor()
        arguments.setdefault("options", DEFAULT_OPTIONS)
        peer = Peer(endpoint=endpoint, decode=decode, overlap=not self._exclusive, **arguments)
        feed: Feed[Any] = Feed(
            peer, keeper=self, governor=self._governor, on_hold=self._on_hold, monotonic=self._monotonic
        )
        over = [one for one in self._feeds if one.state in (State.CLOSED, State.FAILED)]
        self._past += _counts(over)  # of no use to the handler any more
        self._feeds = (*(one for one in self._feeds if one not in over), feed)
        if self._ends:
            feed.finish()
        return feed

    # For feeds

    def guard(self) -> None:
        """Check that messages may still be handed out.

        Raises:
            LeaseLost: the deadline of the lease is past.
        """
        if self._monotonic() >= self._deadline:
            raise LeaseLost("the lease could not be renewed in time")
        if self._stop is not None and not isinstance(self._stop, _SOFT):
            raise self._stop

    def moved(self, feed: Feed[Any], state: State, reason: str) -> None:
        self.journal.moved(self._now(), state, reason, feed=feed, wait_s=feed.wait_s)
        if state is State.BACKOFF:
            self._tell(events.StreamDisconnected(**about(self.lease), reason=reason))
        elif state is State.LIVE and reason != CAUGHT_UP:
            self._tell(events.StreamConnected(**about(self.lease), connects=feed.connects))

    def found_gap(self, gap: Gap, action: GapAction) -> None:
        """Note missing messages."""
        self.journal.missed(Missed(self._now(), gap.cause, gap.after.to_map(), gap.before.to_map(), gap.missed, action))
        missed = f"{gap.missed} messages" if gap.missed is not None else "messages"
        sequence = "" if gap.key is None else f"{gap.key} "
        text = f"{missed} after {sequence}{gap.after.seq} ({gap.cause})"
        self._tell(events.StreamGap(**about(self.lease), gap=text, action=str(action)))

    def goes_back(self, key: str | None) -> None:
        """Let the next checkpoint of this sequence be behind the last one."""
        with self._guard:
            self._going_back.add(key)

    def warned(self, feed: Feed[Any], reason: str) -> None:
        """Note what looks wrong while a feed goes on."""
        self.journal.moved(self._now(), feed.state, reason)
        self._tell(events.StreamDoubted(**about(self.lease), reason=reason))

    # For the engine

    @property
    def is_connected(self) -> bool:
        return any(feed.connection is not None for feed in self._feeds)

    @property
    def is_ready(self) -> bool:
        """True while every feed is connected: a successor on hold buffers."""
        return bool(self._feeds) and all(feed.connection is not None for feed in self._feeds)

    @property
    def is_on_hold(self) -> bool:
        """True while another agent handles the messages of this stream."""
        return self._on_hold

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of this run for the journal."""
        return dict(self._past + _counts(self._feeds))

    def attach(self, governor: Governor, loop_ticked: Callable[[], float]) -> None:
        """Set the event loop of the handler: its governor, and the monotonic second of its last tick."""
        self._governor, self._loop_ticked = governor, loop_ticked

    def release(self, cursor: Cursor | None) -> None:
        """The one who handled messages has stopped at this place: hand out what comes behind it."""
        if not self._on_hold:
            return
        self._on_hold = False
        if cursor is not None:
            self._cursor = self._saved = cursor
        for feed in self._feeds:
            feed.release(cursor)

    def not_renewable(self) -> str | None:
        now = self._monotonic()
        if now - self._loop_ticked() > LOOP_LATE_S:
            return f"the event loop has stood still for {now - self._loop_ticked():.0f} s"
        return self.wedged(now)

    def wedged(self, now: float) -> str | None:
        """Why this stream makes no progress, or None."""
        for feed in self._feeds:
            if feed.handling_s() > feed.options.handler_timeout_s:
                return f"the handler has taken over {feed.options.handler_timeout_s:g} s for one message"
        limit = DEFAULT_OPTIONS.handler_timeout_s
        if not self._feeds and now - self._touched > limit:
            return f"the handler has neither connected nor made progress for {limit:g} s"
        return None

    def unsaved_cursor(self) -> Mapping[str, Any] | None:
        cursor = self._cursor
        if cursor is None or cursor == self._saved or self._on_hold:  # on hold the row has our predecessor's
            return None
        return cursor.to_map()

    def cursor_saved(self, cursor: Mapping[str, Any] | None) -> None:
        if cursor is not None:
            self._saved = Cursor.from_map(cursor)

    def extended(self, deadline: float, lease: Lease | None = None) -> None:
        self._deadline, self.lease = deadline, lease or self.lease

    def stop(self, why: TaskStopped) -> bool:
        is_first = super().stop(why)
        if isinstance(why, (LeaseLost, AgentDraining)) and not is_first and self._on_stop is not None:
            self._on_stop(why)  # a handler that was to end by itself has no time left
        return is_first

    @property
    def ended_by(self) -> TaskStopped | None:
        return self._stop

    @property
    def has_progressed(self) -> bool:
        return any(feed.has_progressed for feed in self._feeds)

    @property
    def grace_s(self) -> float:
        return self._grace_s

    def ends_softly(self, why: TaskStopped) -> bool:
        if not isinstance(why, _SOFT) or not self._feeds:
            return False
        self._ends = True
        for feed in self._feeds:
            feed.finish()
        return True

    def flush(self) -> None:
        """End after what was read already is handed out: the successor has everything behind it."""
        self._ends = True
        for feed in self._feeds:
            feed.finish(flush=True)

    async def close(self) -> None:
        """Close what the handler left open; bounded by `close_timeout_s`."""
        closing = [feed.finish() for feed in self._feeds]
        if closing:
            await asyncio.wait(closing)

    def abort(self) -> None:
        for feed in self._feeds:
            feed.abort()


def _counts(feeds: Iterable[Feed[Any]]) -> Counter[str]:
    each = [
        Counter(connects=one.connects, handled=one.handled, duplicates=one.duplicates, unsent=one.unsent)
        for one in feeds
    ]
    return sum(each, Counter[str]())
