"""The messages of a feed: numbered from 1 in an epoch, kept to be replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from thunderagent.testing.chaos.frames import text_frame


class Position(NamedTuple):
    """The last message that was read: its epoch and number; 0: none yet."""

    epoch: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, and its bytes on the wire."""

    epoch: str
    seq: int
    data: Any
    frame: bytes

    def padded(self, size: int) -> bytes:
        """The frame of this message with a text of at least so many bytes."""
        values = {"epoch": self.epoch, "seq": self.seq, "data": self.data, "padding": ""}
        values["padding"] = "x" * (size - len(json.dumps(values)))
        return text_frame(json.dumps(values))


Encode = Callable[[str, int, Any], str]
"""Makes the text of a message of its epoch, sequence number and data."""


def encode_json(epoch: str, seq: int, data: Any) -> str:
    """`{"epoch": E, "seq": N, "data": …}`."""
    return json.dumps({"epoch": epoch, "seq": seq, "data": data})


class History:
    """The messages of the current epoch; `changed` is called when there are new ones."""

    def __init__(
        self,
        changed: Callable[[], None],
        keep: int | None = None,
        *,
        encode: Encode = encode_json,
        name: str = "epoch",
    ) -> None:
        self._changed = changed
        self._keep = keep
        self._encode = encode
        self._name = name
        self._kept: dict[int, Message] = {}
        self._epochs = 1
        self.published = 0
        """Messages of all epochs."""
        self.last_seq = 0

    @property
    def epoch(self) -> str:
        return f"{self._name}-{self._epochs}"

    @property
    def end(self) -> Position:
        return Position(self.epoch, self.last_seq)

    def messages(self) -> list[Message]:
        return list(self._kept.values())

    def extend(self, many: Iterable[Any]) -> None:
        """Number these and keep them."""
        for data in many:
            self._append(data)
            self.published += 1
        self._changed()

    def start(self, since: int | None, epoch: str | None, *, from_start: bool) -> Position:
        """Where a subscriber begins; with a position of another epoch at the beginning of this one."""
        if since is None:
            return Position(self.epoch, 0) if from_start else self.end
        return Position(self.epoch, since if epoch in (None, self.epoch) else 0)

    def after(self, position: Position) -> Message | None:
        """The next message that is kept; None if there is none yet."""
        seq = position.seq + 1 if position.epoch == self.epoch else 1
        first = self.last_seq - len(self._kept) + 1
        return self._kept.get(max(seq, first))

    def new_epoch(self, keep_after: int | None = None) -> None:
        """Number from 1 again. The history is lost, or what comes after `keep_after` begins the new epoch."""
        kept = [] if keep_after is None else [one.data for one in self._kept.values() if one.seq > keep_after]
        self._epochs += 1
        self.last_seq = 0
        self._kept.clear()
        for data in kept:
            self._append(data)
        self._changed()

    def forget(self) -> None:
        """Lose the history but not the numbering: a subscriber with an earlier position finds a gap."""
        self._kept.clear()

    def _append(self, data: Any) -> None:
        self.last_seq += 1
        text = self._encode(self.epoch, self.last_seq, data)
        self._kept[self.last_seq] = Message(epoch=self.epoch, seq=self.last_seq, data=data, frame=text_frame(text))
        if self._keep is not None and len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]
