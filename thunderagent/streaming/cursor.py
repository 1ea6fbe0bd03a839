"""Places in a stream: what was handled, what comes twice, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final

from thunderagent.arguments import shown

TOKEN_BYTES: Final = 200
"""Longest resume token; the cursor is a part of the row, and a row under 1 KB costs one unit a heartbeat."""

DIGITS: Final = 38
LARGEST: Final = 10**DIGITS - 1
"""Largest number that every store keeps to its last digit."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a stream: the number of a message in its epoch.

    An epoch names one life of the stream: within it numbers grow, by one unless the stream's options say otherwise;
    with another epoch they start afresh (https://centrifugal.dev/docs/server/history_and_recovery has the same idea).
    `token` is what the peer wants to be resumed with, if that is not the number.
    """

    seq: int
    epoch: str | int | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seq, bool) or not isinstance(self.seq, int):
            raise ValueError(f"seq is {shown(self.seq)}; a place in a stream is a whole number")
        for name, number in (("seq", self.seq), ("epoch", self.epoch)):
            if isinstance(number, int) and abs(number) > LARGEST:
                raise ValueError(
                    f"the {name} of a cursor is {shown(number)}; at most {DIGITS} digits are kept: use `token`"
                )
        for name, text in (("epoch", self.epoch), ("token", self.token)):
            if isinstance(text, str) and len(text.encode()) > TOKEN_BYTES:
                raise ValueError(
                    f"the {name} of a cursor has {len(text.encode())} bytes, at most {TOKEN_BYTES} are kept"
                )

    def is_behind(self, other: Cursor) -> bool:
        """True when the other place is of the same epoch and further on."""
        return self.epoch == other.epoch and self.seq < other.seq

    def to_map(self) -> dict[str, Any]:
        """As the attribute `lastSeq` keeps it."""
        values = {"seq": self.seq, "epoch": self.epoch, "token": self.token}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_map(cls, kept: Mapping[str, Any] | None) -> Cursor | None:
        """The cursor that an attribute `lastSeq` keeps, None without one."""
        if not kept:
            return None
        return cls(int(kept["seq"]), kept.get("epoch"), kept.get("token"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Messages that did not come: those after `after` and before `before`."""

    after: Cursor
    before: Cursor
    cause: str
    """`missing`, `dropped` (by our own full buffer) or `epoch` (the stream began a new life)."""

    @property
    def missed(self) -> int | None:
        """How many by the numbers, which is the most if they do not grow by one; None over a change of the epoch."""
        return self.before.seq - self.after.seq - 1 if self.after.epoch == self.before.epoch else None


class GapAction(StrEnum):
    """What to do about a gap.

    * `CONTINUE`: go on; the gap stays on record.
    * `SNAPSHOT`: read the state anew with `snapshot`, then go on behind the place that it answers.
    * `RECONNECT`: connect again from the cursor, for a peer that sends what is missing.
    * `FAIL`: end the stream as FAILED.
    """

    CONTINUE = "continue"
    SNAPSHOT = "snapshot"
    RECONNECT = "reconnect"
    FAIL = "fail"


PositionOf = Callable[[Any], Cursor | int | None]
"""The place of a decoded message, or None for one that has none, such as a greeting. Pure and cheap."""


class Track:
    """The place of the last message that was handed out, and what the next one's place means.

    Args:
        last: where to go on; None at the very beginning.
        contiguous: numbers grow by one, so that a jump is a gap.
    """

    __slots__ = ("_contiguous", "_passed", "dropped", "last")

    def __init__(self, last: Cursor | None, *, contiguous: bool) -> None:
        self.last = last
        self._contiguous = contiguous
        self._passed: set[str | int | None] = set()
        self.dropped = False
        """True when our own buffer dropped messages since the last one that was handed out."""

    def is_duplicate(self, at: Cursor) -> bool:
        """True for a message that was handed out before."""
        last = self.last
        return at.epoch in self._passed or (last is not None and last.epoch == at.epoch and at.seq <= last.seq)

    def jump(self, to: Cursor, epochs: Sequence[str | int | None]) -> None:
        """Go on behind this place; of these epochs, in their order, those before its own are over."""
        self._passed.update(takewhile(lambda epoch: epoch != to.epoch, epochs))
        self.last = to

    def gap_before(self, at: Cursor) -> Gap | None:
        """What is missing before this message."""
        last = self.last
        if last is None:
            return None
        if last.epoch != at.epoch:
            return Gap(after=last, before=at, cause="epoch")
        if at.seq <= last.seq + 1 or not (self._contiguous or self.dropped):
            return None
        return Gap(after=last, before=at, cause="dropped" if self.dropped else "missing")

    def handed_out(self, at: Cursor) -> None:
        """This message is the last now."""
        self.last, self.dropped = at, False


def place_of(value: Cursor | int | None) -> Cursor | None:
    """What a `PositionOf` answered, as a cursor."""
    return Cursor(value) if isinstance(value, int) else value
