"""The ports of the store: to the engine that keeps the rows, and to a place for large texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from thunderagent.model.clock import SharedClock
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Lane, Page, Row

PAYLOAD_MARK: Final = "#payload."
"""Between the id of a task and the digest of its payload, in the key of a payload outside the row."""

MAX_TEXT_BYTES: Final = 350 * 1024
"""Largest payload or result that the table itself keeps; a DynamoDB row may have 400 KB."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of one write.

    `row` is the row after a write that was done, or the row that refused it (None: there is no row). With an `error`
    the outcome is unknown, except for `StoreRejected`: then nothing was done.
    """

    won: bool
    row: Row | None = None
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text outside the row of its task, and when it is deleted by itself (None: never)."""

    text: str
    expire_at: float | None = None


@dataclass(frozen=True, slots=True)
class Overdue:
    """How many rows wait to be deleted, and how long the first has waited."""

    rows: int
    seconds: float


class Engine(Protocol):
    """The place that keeps the rows. Every verb takes many and answers for each, in order."""

    @property
    def url(self) -> str:
        """Where the rows are, without secrets."""

    @property
    def clock(self) -> SharedClock:
        """The clock that all agents of this engine share."""

    @property
    def inline_bytes(self) -> int:
        """Texts up to this size live in the row; larger ones go to `put_texts`."""

    @property
    def most_counted(self) -> int | None:
        """Where counts stop, as each counted entry is billed; None: counting costs nothing."""

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        """Put rows whose ids are not taken. `fresh`: the ids are random, so taken ones may cost more."""

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        """Do conditional writes, each on its own."""

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        """Rows by id, as they are now; ids without a row are left out."""

    def page(
        self,
        status_value: str,
        *,
        limit: int,
        until: float | None = None,
        after: Any = None,
        newest_first: bool = False,
    ) -> Page:
        """Entries of the index for one status value in the order of `createdAt`, up to `until`. May be stale."""

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        """Number of index entries for one status value; at `most` it stops."""

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        """Every lane that ever held a task; `strange` is called with the ends of status values that name none."""

    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        """Delete rows that still have the status and fence given, with their texts."""

    def expire(self, now: float) -> int:
        """Delete some rows whose `expireAt` is over, in one small commit; the answer is their number, 0: nothing is
        due."""

    def overdue(self, now: float) -> Overdue | None:
        """Rows that are still there after their `expireAt`; None where the engine deletes them by itself."""

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        """Keep texts that are too large for a row. A payload that is there already keeps the later expiry."""

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        """The texts that `put_texts` kept."""

    def check(self) -> None:
        """Raise what is wrong with the place: missing table, missing permission, unreadable file."""

    def sibling(self) -> Engine:
        """The same place through connections of its own, for the heartbeat."""

    def close(self) -> None: ...


class Blobs(Protocol):
    def put(self, key: str, text: str) -> str:
        """Keep a text; the answer is the reference to it."""

    def get(self, ref: str) -> KeptText:
        """The text of a reference.

        Raises:
            TextGone: it is not there any more.
            StoreUnavailable: it cannot be read now.
            StoreError: it cannot be read.
        """
