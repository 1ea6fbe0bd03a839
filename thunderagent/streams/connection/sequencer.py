"""Decides which message is handed out next: drops duplicates and deals with gaps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Protocol

from thunderagent.model.errors import ConfigurationError, StreamFailed
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.connection import Peer
from thunderagent.streams.connection.track import Doubts, Track, Tracks
from thunderagent.streams.cursor import RESTART, Cursor, Gap, GapAction, Place, joined_cursor

RECONNECTS_A_GAP: Final = 2
"""Reconnects for one gap before the stream goes on without what is missing."""


class Reader(Protocol):
    """Reads messages over connections: a feed."""

    handled: int

    @property
    def connects(self) -> int:
        """Connections that became live so far."""

    def reconnect(self, reason: str) -> None:
        """Close the connection and connect again at once."""

    def asking(self) -> AbstractContextManager[None]:
        """Wraps calls of the user's functions; raises at its end when the lease is over."""

    def doubt(self, reason: str) -> None:
        """Note what looks wrong."""

    def now(self) -> float:
        """Seconds of a clock."""


class Ledger(Protocol):
    """Has the cursor of the stream, and keeps its gaps."""

    @property
    def cursor(self) -> Cursor | None:
        """The last checkpoint."""

    def found_gap(self, gap: Gap, action: GapAction) -> None:
        """Note missing messages, and what is done about them."""

    def goes_back(self, key: str | None) -> None:
        """Let the next place of this sequence be behind the last one: the peer counts again, or sent a snapshot."""


class Sequencer:
    """The order of the messages of one feed, in each of its sequences.

    Args:
        place: of a message in the buffer; None without one.

    Raises:
        ConfigurationError: the arguments cannot work together.
    """

    def __init__(
        self,
        reader: Reader,
        buffer: Buffer,
        ledger: Ledger,
        *,
        place: Callable[[Any], Place | None],
        peer: Peer,
    ) -> None:
        options, overlap = peer.options, peer.overlap
        if peer.on_gap is GapAction.SNAPSHOT and peer.snapshot is None:
            raise ConfigurationError("on_gap asks for a snapshot: give connect() a `snapshot` function")
        if overlap and options.restart is not None:
            raise ConfigurationError(
                f"restart={options.restart!r} needs exclusive=True: a second connection begins behind the first one's "
                "last message, as does a peer that restarts its numbers"
            )
        self._reader = reader
        self._buffer = buffer
        self._ledger = ledger
        self._place = place
        self._on_gap = peer.on_gap
        self._snapshot = peer.snapshot
        self._options = options
        self._tracks = Tracks(ledger.cursor, contiguous=options.contiguous)
        self._doubts = Doubts(options.max_pending if overlap else 0)
        self._stale_from: int | None = None
        """Messages of connections up to this one are dropped: a new one is to bring what is missing."""
        self._asked_behind_gap = False
        self.duplicates = 0
        """Dropped messages that had come before."""

    # Where the stream goes on

    def resume(self) -> Cursor | None:
        """The place behind the newest message read, in each sequence; for each attempt to connect."""
        self._asked_behind_gap = self._stale_from is not None
        cursor = self._ledger.cursor
        places = [*(cursor.places if cursor is not None else ()), *self._tracks.moved()]
        if self._stale_from is None:
            places += (at.end for at in self._read())
        return joined_cursor(places)

    def _read(self) -> Iterator[Place]:
        """Places of waiting messages: of the newest alone, unless there are several sequences."""
        newest = self._buffer.newest()
        at = None if newest is None else self._place(newest)
        if not self._tracks.are_keyed and (at is None or at.key is None):
            yield from () if at is None else (at,)
            return
        yield from filter(None, map(self._place, self._buffer.waiting()))

    def begin_at(self, place: Cursor | int) -> None:
        """Begin at the place that `on_open` answered: the first message may already follow a gap."""
        for one in (Cursor(place) if isinstance(place, int) else place).places:
            track = self._tracks.of(one.key)
            if track.last is None:
                track.jump(one)

    def release(self, cursor: Cursor | None) -> None:
        """Hand out what comes behind this place, where the former agent has stopped."""
        for place in cursor.places if cursor is not None else ():
            last = self._tracks.of(place.key).last
            if last is None or last.epoch != place.epoch or last.is_behind(place):
                self._jump(place, last)

    def moved(self) -> None:
        """Note a new state: what dropped connections brought is cleared when a new one is there."""
        connects = self._reader.connects
        if self._stale_from is not None and connects > self._stale_from:
            self._buffer.clear()
            if self._asked_behind_gap:
                self._stale_from = None
            else:  # this attempt had begun before the gap was found
                self._stale_from = connects
                self._reader.reconnect("messages are missing")

    # The next message

    async def is_next(self, at: Place | None) -> bool:
        """Deal with what is missing before this place; True when its message is to be handed out."""
        if self._stale_from is not None:
            return False
        if at is None:
            return True
        if self._buffer.take_dropped():
            self._tracks.dropped()
        track, connection = self._tracks.of(at.key), self._buffer.connection
        is_first = track.is_first_of(connection)
        if at.snapshot and not track.is_passed(at):
            self._take_snapshot(track, at)
        else:
            is_restart = is_first and self._options.restart is not None and track.is_behind(at)
            if track.is_duplicate(at) and not is_restart:
                self._drop(track, at)
                return False
            gap = track.gap_before(at)
            if gap is not None and track.awaits_since is not None:
                self._withhold(track, at, track.awaits_since)
                return False
            if gap is not None and not await self._go_on_after(gap, track):
                return False
            if track.is_duplicate(at):  # the snapshot holds it already
                return False
        track.handed_out(at)
        self._doubts.handed_out(connection)
        return True

    def _drop(self, track: Track, at: Place) -> None:
        self.duplicates += 1
        doubt = self._doubts.dropped(
            at, track.last, connection=self._buffer.connection, dropped=self.duplicates, handled=self._reader.handled
        )
        if doubt is not None:
            self._reader.doubt(doubt)

    def _take_snapshot(self, track: Track, at: Place) -> None:
        """Go on behind a message that replaces the state."""
        gap = track.gap_before(at)
        if gap is not None and track.awaits_since is None:
            self._ledger.found_gap(gap, GapAction.SNAPSHOT)
        if track.is_behind(at):
            self._ledger.goes_back(at.key)

    def _withhold(self, track: Track, at: Place, since: float) -> None:
        """Withhold a message while its sequence waits for a snapshot; reconnect when that does not come."""
        now, limit_s = self._reader.now(), self._options.subscribe_timeout_s
        if now - since <= limit_s:
            return
        track.awaits_since = now
        track.reconnects += 1
        what = f"no snapshot of {at.key or 'the stream'} came within {limit_s:g} s"
        if track.reconnects <= RECONNECTS_A_GAP:
            self._reader.reconnect(what)
        elif track.reconnects == RECONNECTS_A_GAP + 1:
            self._reader.doubt(f"{what}, nor with {RECONNECTS_A_GAP} new connections: its messages are withheld")

    # Gaps

    async def _go_on_after(self, gap: Gap, track: Track) -> bool:
        """Deal with a gap; False when the message behind it comes again, or waits for a snapshot."""
        if gap.cause == RESTART and self._options.restart == "fail":
            raise StreamFailed(f"the peer restarts its numbers: {gap.before} after {gap.after}, and restart is 'fail'")
        with self._reader.asking():
            action = await self._action(gap)
            if action is GapAction.RECONNECT and track.reconnects >= RECONNECTS_A_GAP:
                action = GapAction.CONTINUE
            self._ledger.found_gap(gap, action)
            if gap.cause == RESTART and action is not GapAction.AWAIT:
                track.jump(replace(gap.before, seq=gap.before.seq - 1))
                self._ledger.goes_back(gap.key)
            match action:
                case GapAction.FAIL:
                    raise StreamFailed(f"messages are missing ({gap.cause}): after {gap.after}, before {gap.before}")
                case GapAction.RECONNECT:
                    track.reconnects += 1
                    self._stale_from, self._asked_behind_gap = self._reader.connects, False
                    self._buffer.clear()
                    self._reader.reconnect("messages are missing")
                    return False
                case GapAction.AWAIT:
                    track.awaits_since = self._reader.now()
                    return False
                case GapAction.SNAPSHOT:
                    await self._read_state(gap)
        return True

    async def _action(self, gap: Gap) -> GapAction:
        if isinstance(self._on_gap, GapAction):
            return self._on_gap
        action = self._on_gap(gap)
        return GapAction(await action if inspect.isawaitable(action) else action)

    async def _read_state(self, gap: Gap) -> None:
        """Read the state and go on behind its place, without a key in the gap's sequence."""
        if self._snapshot is None:
            raise ConfigurationError("on_gap asks for a snapshot: give connect() a `snapshot` function")
        place = self._snapshot(gap)
        if inspect.isawaitable(place):
            place = await place
        to = Cursor(place) if isinstance(place, int) else place
        if to is not None and to.key is None and not to.others:
            to = replace(to, key=gap.key)
        for one in to.places if to is not None else ():
            self._jump(one, *((gap.after, gap.before) if one.key == gap.key else ()))

    def _jump(self, to: Cursor, *before: Cursor | None) -> None:
        """Go on behind this place; messages read so far of earlier epochs are dropped."""
        epochs = [at.epoch for at in before if at is not None]
        read = map(self._place, self._buffer.waiting())
        epochs += [at.epoch for at in read if at is not None and at.key == to.key]
        self._tracks.of(to.key).jump(to, epochs)
