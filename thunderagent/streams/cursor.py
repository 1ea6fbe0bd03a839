"""Places in a stream: what was handled, what comes twice, what is missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.arguments import shown

TOKEN_BYTES: Final = 200
"""Longest resume token: with it a row stays under 1 KB, so that a heartbeat costs one unit."""

KEY_BYTES: Final = 100
"""Longest name of a sequence."""

CURSOR_BYTES: Final = 400
"""Largest cursor of several sequences: some twenty symbols, each with a number."""

NUMBER_BYTES: Final = 11
"""Bytes counted for each sequence's number, so that a cursor still fits when its numbers have grown."""

DIGITS: Final = 38
LARGEST: Final = 10**DIGITS - 1
"""Largest number that every store keeps to its last digit."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a stream: the number of a message in its epoch.

    An epoch names one life of the stream. Within it numbers grow, by one unless the stream's options say otherwise; a
    new epoch begins again (https://centrifugal.dev/docs/server/history_and_recovery has the same idea). `token` is what
    the peer resumes from, if that is not the number.

    With several sequences, such as one for each symbol, `key` names the one of the number, and `others` has the places
    of the others by their keys. `of` finds the place of a key.
    """

    seq: int
    epoch: str | int | None = None
    token: str | None = None
    key: str | None = None
    others: Mapping[str, Cursor] = field(default_factory=dict, hash=False)

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
        if self.key is not None:
            check_key(self.key)

    # As a `Span` of one number

    @property
    def first(self) -> int:
        return self.seq

    @property
    def last(self) -> int:
        return self.seq

    @property
    def snapshot(self) -> bool:
        return False

    @property
    def beginning(self) -> Cursor:
        return self.end

    @property
    def end(self) -> Cursor:
        return replace(self, others={}) if self.others else self

    # Several sequences

    def of(self, key: str | None) -> Cursor | None:
        """The place in the sequence of this key; None if nothing of it was handled."""
        if key == self.key:
            return self.end
        return self.others.get(key) if key is not None else None

    @property
    def places(self) -> tuple[Cursor, ...]:
        """The place in each sequence, this one's own last."""
        return (*self.others.values(), self.end)

    def with_place(self, place: Cursor) -> Cursor:
        """The same places with this one for its sequence."""
        if place.key == self.key and not self.others:
            return place
        joined = joined_cursor([*self.places, place])
        assert joined is not None
        return joined

    def is_behind(self, other: Cursor) -> bool:
        """True when the other place is of the same sequence and epoch, and further on."""
        return self.epoch == other.epoch and self.seq < other.seq and self.key == other.key

    def check_size(self) -> None:
        """Refuse a cursor that makes the row too large for one unit a heartbeat.

        Raises:
            ValueError: it has the places of too many sequences.
        """
        if not self.others:
            return
        places = self.places
        texts = (text for place in places for text in (place.key, place.epoch, place.token) if isinstance(text, str))
        size = NUMBER_BYTES * len(places) + sum(len(text.encode()) for text in texts)
        if size > CURSOR_BYTES:
            raise ValueError(
                f"the cursor of {len(places)} keys has {size} bytes, at most {CURSOR_BYTES} are kept: give "
                "each part of the keys a task of its own, or keep no checkpoints of them"
            )

    def to_map(self) -> dict[str, Any]:
        values: dict[str, Any] = {"seq": self.seq, "epoch": self.epoch, "token": self.token, "key": self.key}
        kept = {name: value for name, value in values.items() if value is not None}
        if self.others:
            kept["others"] = {key: _kept_other(place) for key, place in self.others.items()}
        return kept

    @classmethod
    def from_map(cls, kept: Mapping[str, Any] | None) -> Cursor | None:
        if not kept:
            return None
        others = {
            key: cls(int(other["seq"]), other.get("epoch"), other.get("token"), key)
            if isinstance(other, Mapping)
            else cls(int(other), key=key)
            for key, other in (kept.get("others") or {}).items()
        }
        return cls(int(kept["seq"]), kept.get("epoch"), kept.get("token"), kept.get("key"), others)


def _kept_other(place: Cursor) -> int | dict[str, Any]:
    """A number alone for most sequences: rows stay small."""
    values = place.to_map()
    del values["key"]
    return place.seq if len(values) == 1 else values


def joined_cursor(places: Iterable[Cursor]) -> Cursor | None:
    """One cursor of several places; the last of each key counts. First comes the place without a key, else the last."""
    by_key: dict[str | None, Cursor] = {}
    last: str | None = None
    for place in places:
        by_key[place.key], last = place, place.key
    if not by_key:
        return None
    first = by_key.pop(None if None in by_key else last)
    return replace(first, others={key: place for key, place in by_key.items() if key is not None})


def check_key(key: object) -> None:
    """Check the name of a sequence.

    Raises:
        ValueError: it is no text, or empty, or too long.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(f"the key of a place is {key!r}; name a sequence by a text, or the only one by None")
    if len(key.encode()) > KEY_BYTES:
        raise ValueError(f"the key of a place has {len(key.encode())} bytes, at most {KEY_BYTES} are kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of a message that covers several numbers, belongs to one of several sequences, or is a snapshot.

    A message that says "changes 157 to 160 of BTCUSDT" is `Span(first=157, last=160, key="BTCUSDT")`. It follows 156,
    and a part of it may have come before.
    """

    first: int
    last: int
    key: str | None = None
    """The sequence in which the numbers count."""
    epoch: str | int | None = None
    token: str | None = None
    """See `Cursor`."""
    snapshot: bool = False
    """True for a message that replaces the state: it is always handed out and ends a gap."""

    def __post_init__(self) -> None:
        for name, number in (("first", self.first), ("last", self.last)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"{name} is {number!r}; a place in a stream is a whole number")
        if self.first > self.last:
            raise ValueError(f"a span from {self.first} to {self.last} covers nothing: first is the smaller number")
        if self.key is not None:
            check_key(self.key)

    @property
    def beginning(self) -> Cursor:
        return Cursor(self.first, self.epoch, None, self.key)

    @property
    def end(self) -> Cursor:
        """The place behind which the stream goes on."""
        return Cursor(self.last, self.epoch, self.token, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Missing messages: those between `after` and `before`."""

    after: Cursor
    before: Cursor
    cause: str
    """`missing`, `dropped` (by our full buffer), `epoch` (a new one began) or `restart` (numbers began again)."""

    @property
    def key(self) -> str | None:
        return self.before.key

    @property
    def missed(self) -> int | None:
        """How many by the numbers, at most if they do not grow by one; None over a change of the epoch."""
        is_one_life = self.cause != RESTART and self.after.epoch == self.before.epoch
        return self.before.seq - self.after.seq - 1 if is_one_life else None


RESTART: Final = "restart"
"""Cause of a gap: a peer without epochs counts from its beginning again."""


class GapAction(StrEnum):
    """What to do about a gap.

    * `CONTINUE`: go on; the journal has the gap.
    * `SNAPSHOT`: read the state with `snapshot`, then go on behind the place that it answers.
    * `AWAIT`: withhold the sequence until a message with `Span(snapshot=True)`, or what is missing, has come.
    * `RECONNECT`: connect again from the cursor, for a peer that sends what is missing.
    * `FAIL`: end the stream as FAILED.
    """

    CONTINUE = "continue"
    SNAPSHOT = "snapshot"
    AWAIT = "await"
    RECONNECT = "reconnect"
    FAIL = "fail"


OnGap = GapAction | Callable[[Gap], GapAction | Awaitable[GapAction]]
Snapshot = Callable[[Gap], Cursor | int | Awaitable[Cursor | int]]
Place = Span | Cursor
Position = Place | int | None
PositionOf = Callable[[Any], Position]
"""The place of a decoded message; None for one without, such as a greeting. Pure and cheap."""


def place_of(value: Position) -> Place | None:
    return Cursor(value) if isinstance(value, int) else value
