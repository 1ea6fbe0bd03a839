"""The meaning of the next message's place: it follows, it is a duplicate, or messages are missing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from thunderagent.model.errors import StreamFailed
from thunderagent.streams.cursor import RESTART, Cursor, Gap, Place

MOST_KEYS: Final = 10_000
"""Sequences of one feed at most; more are messages taken for sequences."""

BEGIN_DROPPED: Final = 20
"""Duplicates in a row at the beginning of a connection that cause a warning."""

MANY_DROPPED: Final = 50
"""Duplicates that cause a warning if they are over a tenth of all messages, and again at twice as many."""


class Track:
    """The place of the last message handed out in one sequence.

    Args:
        last: where to go on; None at the beginning.
        contiguous: numbers grow by one, so that a jump is a gap.
    """

    __slots__ = ("_connection", "_contiguous", "_passed", "awaits_since", "dropped", "has_moved", "last", "reconnects")

    def __init__(self, last: Cursor | None, *, contiguous: bool) -> None:
        self.last = last
        self._contiguous = contiguous
        self._passed: set[str | int | None] | None = None
        self._connection = 0
        self.has_moved = False
        """True once `last` is beyond the checkpoint with which the feed began."""
        self.dropped = False
        """True when our buffer dropped messages since the last one handed out."""
        self.awaits_since: float | None = None
        """Begin of the wait for a snapshot; None: there is none."""
        self.reconnects = 0
        """Reconnects for gaps since the last message handed out."""

    def is_first_of(self, connection: int) -> bool:
        is_first, self._connection = connection > self._connection, connection
        return is_first

    def is_passed(self, at: Place) -> bool:
        return self._passed is not None and at.epoch in self._passed

    def is_duplicate(self, at: Place) -> bool:
        """True for a message that was handed out before."""
        last = self.last
        return self.is_passed(at) or (last is not None and last.epoch == at.epoch and at.last <= last.seq)

    def is_behind(self, at: Place) -> bool:
        """True for a message of the same epoch with smaller numbers than the last one."""
        last = self.last
        return last is not None and last.epoch == at.epoch and at.last < last.seq

    def jump(self, to: Cursor, epochs: Sequence[str | int | None] = ()) -> None:
        """Go on behind this place; of these epochs, in order, those before its own are over."""
        if over := [*takewhile(lambda epoch: epoch != to.epoch, epochs)]:
            self._passed = {*(self._passed or ()), *over}
        self.last, self.has_moved, self.awaits_since = to, True, None

    def gap_before(self, at: Place) -> Gap | None:
        last = self.last
        if last is None:
            return None
        if last.epoch != at.epoch:
            return Gap(after=last, before=at.beginning, cause="epoch")
        if at.last < last.seq and not at.snapshot:
            return Gap(after=last, before=at.beginning, cause=RESTART)
        if at.first <= last.seq + 1 or not (self._contiguous or self.dropped):
            return None
        return Gap(after=last, before=at.beginning, cause="dropped" if self.dropped else "missing")

    def handed_out(self, at: Place) -> None:
        """Make this message the last one."""
        self.last, self.has_moved, self.dropped = at.end, True, False
        self.awaits_since, self.reconnects = None, 0


class Tracks:
    """The sequences of a stream by their keys; most streams have one, without a key.

    Args:
        cursor: where to go on; None at the beginning.
        contiguous: numbers grow by one, so that a jump is a gap.
    """

    __slots__ = ("_contiguous", "_tracks")

    def __init__(self, cursor: Cursor | None, *, contiguous: bool) -> None:
        self._contiguous = contiguous
        self._tracks = {
            place.key: Track(place, contiguous=contiguous) for place in (cursor.places if cursor is not None else ())
        }

    def of(self, key: str | None) -> Track:
        """The sequence of this key, a new one for its first message.

        Raises:
            StreamFailed: there are too many.
        """
        track = self._tracks.get(key)
        if track is None:
            if len(self._tracks) >= MOST_KEYS:
                raise StreamFailed(
                    f"position() named over {MOST_KEYS} sequences, the last one {key!r}: a key is to name what has "
                    "numbers of its own, such as a symbol, and not a message"
                )
            track = self._tracks[key] = Track(None, contiguous=self._contiguous)
        return track

    @property
    def are_keyed(self) -> bool:
        return any(key is not None for key in self._tracks)

    def dropped(self) -> None:
        """Note that our buffer dropped messages of any sequence."""
        for track in self._tracks.values():
            track.dropped = True

    def moved(self) -> list[Cursor]:
        """The places beyond the checkpoint with which the feed began."""
        return [track.last for track in self._tracks.values() if track.has_moved and track.last is not None]


class Doubts:
    """Warns when dropped duplicates look like an error.

    Args:
        due: messages that come twice as a second connection begins before the first ends.
    """

    __slots__ = ("_connection", "_due", "_run", "_tell_at")

    def __init__(self, due: int) -> None:
        self._due = due
        self._connection = 0
        self._run: int | None = 0
        self._tell_at = MANY_DROPPED + due

    def handed_out(self, connection: int) -> None:
        """Note a message of this connection that was no duplicate."""
        self._connection, self._run = connection, None

    def dropped(self, at: Place, last: Cursor | None, *, connection: int, dropped: int, handled: int) -> str | None:
        """The warning about this duplicate, the `dropped`-th beside so many handled messages."""
        if connection > self._connection:
            self._connection, self._run = connection, 0
        if self._run is not None:
            self._run += 1
            if self._run == BEGIN_DROPPED + self._due:
                return f"the first {self._run} messages of the connection {_why(at, last)}"
        if dropped >= self._tell_at and dropped * 9 > handled:
            self._tell_at = 2 * dropped
            return f"{dropped} of {dropped + handled} messages {_why(at, last)}"
        return None


def _why(at: Place, last: Cursor | None) -> str:
    behind = "" if last is None else f", behind {last.seq}"
    sequence = "" if at.key is None else f"{at.key} "
    return (  # the journal keeps 200 bytes
        f"were dropped as duplicates ({sequence}{at.last}{behind}): "
        'does the peer restart its numbers (restart="accept") or have several sequences (Span(key=))?'
    )
