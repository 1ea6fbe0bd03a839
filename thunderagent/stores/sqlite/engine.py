"""The embedded engine: one SQLite file, many agent processes, no account.

A write-ahead log, so that readers never wait for the writer. `synchronous=FULL`, so that what was acknowledged survives
a power loss. Every batch in one `BEGIN IMMEDIATE` transaction: it pays for one fsync and happens whole or not at all. A
database that stays busy for `BUSY_S` is `StoreUnavailable`; nothing was written then, and the caller tries again.
"""

from __future__ import annotations

import math
import os
import random
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from thunderagent.model.clock import BootClock, HostClock, SharedClock, boot_id
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    ThunderAgentError,
)
from thunderagent.model.names import plain_job
from thunderagent.model.task import Candidate, Lane, Page, Row, Status, StatusValue, lanes_of
from thunderagent.model.writes.agents import AGENT_STATUS
from thunderagent.model.writes.unique import forget_key, key_id
from thunderagent.stores.engine import MAX_TEXT_BYTES, Applied, KeptText, Overdue
from thunderagent.stores.sqlite import boots, sql
from thunderagent.stores.sqlite import link as sqlite_link
from thunderagent.stores.sqlite import schema as sqlite_schema
from thunderagent.stores.sqlite.access import denied
from thunderagent.stores.sqlite.link import Link


def lock_pause(waited_s: float, rng: random.Random) -> float:
    """Pause before the next attempt to get the lock of a file that another process has had for `waited_s` seconds.

    Short and random, so that all who wait have the same chance. Little longer after a long wait: on a busy machine, one
    that asks less often the longer it waits would never get it.
    """
    return rng.uniform(0.0002, min(0.006, max(0.003, waited_s / 50)))


BUSY_S: Final = 5.0
LOST_S: Final = 3600.0
"""How long the row of a lost agent stays after it is overdue, for people."""

MEMORY: Final = sqlite_link.MEMORY

EXPIRED_AT_ONCE: Final = 100
"""Rows that one commit deletes: a large one has a hundred pages, and nobody else writes meanwhile."""

FREE_KEPT: Final = 2000
"""Free pages (of 4 KB) that a file keeps for new rows, if a quarter of it is not more; others are given back."""

GIVEN_BACK: Final = 250

MOST_OVERDUE: Final = 100_000

_SWITCH_PAUSE_S: Final = 0.01
_random: Final = random.SystemRandom()  # children that were forked together must not wait in step


UNFIT: Final = (OverflowError, TypeError, ValueError, KeyError, sqlite3.Error)
"""Errors of a write with a value that no column takes, or to a row that it cannot change."""

_NEVER: Final = ("Error binding parameter", "malformed JSON", "string or blob too big")

_NO_TEXT: Final = "Could not decode to UTF-8"

P = ParamSpec("P")
T = TypeVar("T")


def _of_any_text(do: Callable[Concatenate[SqliteEngine, P], T]) -> Callable[Concatenate[SqliteEngine, P], T]:
    """Do it again when a row has a text that is not UTF-8: the transaction that failed for it was rolled back."""

    @wraps(do)
    def done(engine: SqliteEngine, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            return do(engine, *arguments, **options)
        except StoreError as error:
            if not str(error.__cause__).startswith(_NO_TEXT):
                raise
            engine._link.take_any_text()
            return do(engine, *arguments, **options)

    return done


class SqliteEngine:
    """Rows in a SQLite file. One connection behind a lock; safe in threads, closed before a fork and opened after it.

    A relative path is of the working directory of this moment. A database in memory is of one process: a forked child
    is refused, as nobody would see what it puts.
    """

    inline_bytes = MAX_TEXT_BYTES
    most_counted: int | None = None

    def __init__(self, path: str, *, clock: SharedClock | None = None) -> None:
        self.path = path if path == MEMORY else os.path.abspath(path)
        self.clock: SharedClock = clock or HostClock(boot_id=boot_id())
        self._link = Link(self.path, _connect)
        weakref.finalize(self, self._link.drop)  # not `__del__`: at the end of a process its globals may be gone
        if leases := self._unplaced():
            leases.find = partial(_find_place, weakref.ref(self))

    @property
    def url(self) -> str:
        return f"sqlite://{MEMORY}" if self.path == MEMORY else f"sqlite:///{self.path}"

    # Writing

    @_of_any_text
    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = []
        with self._transaction() as cursor:
            for row in rows:
                try:
                    cursor.execute(*sql.insert(row))
                except UNFIT as error:
                    answers.append(_rejected(f"put {row.get('taskId')}", error))
                    continue
                if cursor.rowcount:
                    answers.append(Applied(won=True, row=row))
                else:
                    answers.append(Applied(won=False, row=_one(cursor, row["taskId"])))
        return answers

    @_of_any_text
    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        answers = []
        with self._transaction() as cursor:
            for write in batch:
                try:
                    left = cursor.execute(*sql.update(write)).fetchall()
                except UNFIT as error:
                    answers.append(_rejected(f"{write.verb} {write.task_id}", error))
                    continue
                if left:
                    answers.append(Applied(won=True, row=sql.decode(left[0])))
                else:
                    answers.append(Applied(won=False, row=_one(cursor, write.task_id)))
        return answers

    @_of_any_text
    def delete(self, tasks: Sequence[Row]) -> list[bool]:
        with self._transaction() as cursor:
            return [
                cursor.execute(
                    'DELETE FROM tasks WHERE "taskId" = ? AND "status" = ? AND "fence" = ?',
                    (row["taskId"], row["status"], row["fence"]),
                ).rowcount
                > 0
                for row in tasks
            ]

    @_of_any_text
    def expire(self, now: float) -> int:
        before = self._on_leases(now)
        parameters = (now, AGENT_STATUS, self._lost_before(now), EXPIRED_AT_ONCE)
        with self._reading() as cursor:  # ask for the lock of the writer only when there is something to do
            is_due = bool(cursor.execute(sql.DUE, parameters).fetchall())
            [[pages]] = cursor.execute("PRAGMA page_count").fetchall()
            [[free]] = cursor.execute("PRAGMA freelist_count").fetchall()
            [[vacuum]] = cursor.execute("PRAGMA auto_vacuum").fetchall()
        if is_due:
            with self._transaction() as cursor:
                gone = cursor.execute(sql.DELETE_DUE, parameters).fetchall()
                for task_id, job, unique_key in gone:
                    if unique_key is not None:
                        row_id = key_id(plain_job(str(job)), str(unique_key))
                        cursor.execute(*sql.update(forget_key(row_id, task_id, now=before)))
                return len(gone)
        if vacuum and free > max(FREE_KEPT, pages // 4):
            with self._transaction() as cursor:
                for _ in range(GIVEN_BACK):  # one each: the module ends the statement after its first step
                    cursor.execute("PRAGMA incremental_vacuum(1)")
        return 0

    def overdue(self, now: float) -> Overdue | None:
        with self._reading() as cursor:
            parameters = (now, AGENT_STATUS, self._lost_before(now), MOST_OVERDUE)
            rows, first = cursor.execute(sql.COUNT_DUE, parameters).fetchone()
        return Overdue(rows, now - first if rows else 0.0)

    def _lost_before(self, now: float) -> float:
        """When the rows of agents were overdue that are deleted now, on the clock of leases."""
        return self._on_leases(now) - LOST_S

    def _on_leases(self, now: float) -> float:
        """That moment on the clock of leases."""
        return now + self.clock.leases.now() - self.clock.now()

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        raise StoreError("SQLite keeps every text in its row")  # unreachable through the store: see inline_bytes

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        return {}

    # Reading

    @_of_any_text
    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        with self._reading() as cursor:
            select = sql.select(sqlite_schema.version_of(cursor))
            for start in range(0, len(task_ids), 500):
                some = task_ids[start : start + 500]
                cursor.execute(f'{select} WHERE "taskId" IN ({", ".join("?" * len(some))})', some)
                found = {row["taskId"]: row for row in map(sql.decode, cursor)}
                rows.update((task_id, found[task_id]) for task_id in some if task_id in found)
        return rows

    @_of_any_text
    def page(
        self,
        status_value: str,
        *,
        limit: int,
        until: float | None = None,
        after: Any = None,
        newest_first: bool = False,
    ) -> Page:
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        # As on DynamoDB, an entry has a number as its place and a text as its id, even if a person made the row.
        query = """ "status" = ? AND "createdAt" <= ? AND typeof("taskId") = 'text'"""
        parameters: list[Any] = [status_value, math.inf if until is None else until]
        if after is not None:
            query += f' AND ("createdAt", "taskId") {beyond} (?, CAST(? AS TEXT))'
            parameters += _behind(after)
        with self._reading() as cursor:
            cursor.execute(
                f'SELECT "taskId", "status", "createdAt", "job", "kind" FROM tasks WHERE {query} '  # noqa: S608
                f'ORDER BY "createdAt" {order}, "taskId" {order} LIMIT ?',
                (*parameters, limit),
            )
            found = cursor.fetchall()
        entries = tuple(Candidate.of(*values) for values in found if isinstance(values[0], str))
        return Page(entries, _place(found[-1]) if len(found) == limit else None)

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        with self._reading() as cursor:
            cursor.execute(
                'SELECT COUNT(*) FROM (SELECT 1 FROM tasks WHERE "status" = ? AND "createdAt" <= ? LIMIT ?)',
                (status_value, math.inf if until is None else until, -1 if most is None else most),
            )
            return int(cursor.fetchone()[0])

    @_of_any_text
    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        with self._reading() as cursor:
            cursor.execute(  # jumps from one value of the index to the next, whatever the number of rows
                """WITH RECURSIVE seen(value) AS (
                    SELECT MIN("status") FROM tasks WHERE "status" IS NOT NULL
                    UNION ALL
                    SELECT (SELECT MIN("status") FROM tasks WHERE "status" > seen.value)
                    FROM seen WHERE seen.value IS NOT NULL
                ) SELECT value FROM seen WHERE value IS NOT NULL"""
            )
            places = [StatusValue.parse(value) for (value,) in cursor if isinstance(value, str)]
        return lanes_of((place.suffix for place in places if place.status in set(Status)), strange)

    # The file

    def check(self) -> None:
        with self._reading() as cursor:
            cursor.execute("SELECT COUNT(*) FROM (SELECT 1 FROM tasks LIMIT 1)")

    @property
    def is_older(self) -> bool:
        """Whether the file has the schema of an older release: the next write brings it to ours."""
        with self._reading() as cursor:
            return sqlite_schema.version_of(cursor) < len(sqlite_schema.MIGRATIONS)

    def sibling(self) -> SqliteEngine:
        """Another connection to the file; the same engine for a database in memory, which has only one."""
        if self.path == MEMORY:
            return self
        other = SqliteEngine(self.path, clock=self.clock)
        other._link.file.same_as(self._link.file)
        return other

    def close(self) -> None:
        self._link.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Cursor]:
        with _translated(self.path), self._link.used() as cursor:
            if leases := self._unplaced():
                self._agree(boots.recall(cursor, leases))
            yield cursor

    def _transaction(self) -> AbstractContextManager[sqlite3.Cursor]:
        if leases := self._unplaced():
            with self._writing() as cursor:
                zero = boots.settle(cursor, leases)
            self._agree(leases.place(zero))
        return self._writing()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        """Wait for the lock of the one writer, and take it.

        SQLite itself waits longer after each attempt, up to 100 ms: the last to come gets the lock again and again, and
        the file is idle meanwhile. Nobody is inside the connection during the wait: a thread that reads or forks goes
        first.
        """
        begun = time.monotonic()
        while True:
            waited_s = time.monotonic() - begun
            with _translated(self.path), self._link.used() as cursor:
                if _has_begun(cursor, or_fails=waited_s >= BUSY_S):
                    try:
                        sqlite_schema.grow(cursor, self.path)
                        yield cursor
                        cursor.execute("COMMIT")
                    except BaseException:
                        if cursor.connection.in_transaction:
                            cursor.execute("ROLLBACK")
                        raise
                    return
            time.sleep(lock_pause(waited_s, _random))

    def _unplaced(self) -> BootClock | None:
        """The clock of leases while it has no base from the file."""
        leases = self.clock.leases
        return leases if isinstance(leases, BootClock) and not leases.is_placed else None

    def _agree(self, is_same: bool) -> None:
        if not is_same:
            raise StoreUnavailable(
                f"the clock of this machine was set while the first agents of {self.path} started: what was to be "
                "written has a wrong time, and is to be tried again"
            )


def _find_place(engine: weakref.ref[SqliteEngine]) -> None:
    """Read the base of the clock of leases from the file; the clock keeps no engine from being closed."""
    if one := engine():
        with suppress(ThunderAgentError), one._reading():
            pass


def _has_begun(cursor: sqlite3.Cursor, *, or_fails: bool) -> bool:
    """Begin to write, now or not at all; False while another connection writes, which is an error at last."""
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        cursor.execute("BEGIN IMMEDIATE")
        return True
    except sqlite3.OperationalError as error:
        if "locked" not in str(error) or or_fails:
            raise
        return False
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")


def _rejected(what: str, error: Exception) -> Applied:
    """The answer to a write that cannot be done, now or later; an error that may pass is raised again."""
    if isinstance(error, sqlite3.Error) and not str(error).startswith(_NEVER):
        raise error
    return Applied(won=False, error=StoreRejected(f"{what}: {error}"))


def _place(entry: Sequence[Any]) -> list[Any]:
    """Where the next page begins, as JSON can keep it."""
    task_id, _, created_at, *_ = entry
    return [created_at, task_id if isinstance(task_id, str) else task_id.decode(errors="surrogateescape")]


def _behind(place: Any) -> tuple[float, bytes]:
    """The values of a place.

    Raises:
        StoreRejected: it is none, as of a row made by hand.
    """
    try:
        created_at, task_id = place
        return float(created_at), task_id.encode(errors="surrogateescape")
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise StoreRejected(f"{place!r:.80} is no place in the index") from error


def _one(cursor: sqlite3.Cursor, task_id: str) -> Row | None:
    found = cursor.execute(sql.SELECT_ONE, (task_id,)).fetchall()
    return sql.decode(found[0]) if found else None


def _connect(path: str) -> sqlite3.Connection:
    folder = Path(path).parent
    if path != MEMORY and not folder.is_dir():
        raise ConfigurationError(f"the folder {str(folder)!r} of the database does not exist: create it first")
    with _translated(path):
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            if not connection.execute("PRAGMA page_count").fetchone()[0]:  # it cannot be set later
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _write_ahead(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 2000")
            connection.execute("PRAGMA cache_size = -2000")
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite does not wait with the switch of a new file while others do the same."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
        time.sleep(_SWITCH_PAUSE_S)


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """Check that this release can use the file, and make the table of a new one; an older one grows with a write."""
    with closing(connection.cursor()) as cursor:
        if sqlite_schema.check(cursor, path) > 0:
            return
        cursor.execute("BEGIN EXCLUSIVE")  # of many processes that start together, one does it and the others wait
        sqlite_schema.grow(cursor, path)
        cursor.execute("COMMIT")


_PASSING: Final = ("locked", "busy", "disk i/o error", "unable to open", "full")
_PERHAPS_DENIED: Final = ("readonly", "unable to open")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error).lower()
        if any(word in text for word in _PERHAPS_DENIED) and (why := denied(path)):
            raise AccessDenied(f"the database {path} cannot be used: {why} ({error})") from error
        if any(word in text for word in _PASSING):
            raise StoreUnavailable(f"the database {path} does not answer: {error}") from error
        raise StoreError(f"the database {path} refused: {error}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} cannot be used as a ThunderAgent database: {error}") from error
