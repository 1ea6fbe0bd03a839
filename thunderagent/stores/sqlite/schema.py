"""The schema of a SQLite file: its version, which releases can use it, and how it grows.

`PRAGMA user_version` is the version, `PRAGMA application_id` the oldest one whose releases can use the file: they leave
unknown columns alone. A file grows with the first write of newer code; a reader changes nothing.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from thunderagent.model.errors import SchemaMismatch
from thunderagent.stores.sqlite import sql

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (sql.CREATE, sql.CREATE_INDEX),
    ('CREATE INDEX "expireAt-index" ON tasks ("expireAt") WHERE "expireAt" IS NOT NULL',),
    *(sql.add_columns(version) for version in sorted(sql.ADDED)),
)
"""What brings a file from each version to the next."""

USABLE_FROM: Final = 1
"""The oldest version whose releases can use a file of the newest. A migration that does more than add columns that
may be absent, or indexes, sets this to its own version."""

_MARK: Final = 0x7468 << 16
"""The upper half of an `application_id` of ours."""


def version_of(cursor: sqlite3.Cursor) -> int:
    """The version of a file; 0 before it has a table."""
    return int(cursor.execute("PRAGMA user_version").fetchone()[0])


def usable_from(cursor: sqlite3.Cursor) -> int:
    """The oldest version whose releases can use a file; its own where it says nothing."""
    mark = int(cursor.execute("PRAGMA application_id").fetchone()[0])
    return mark ^ _MARK if mark >> 16 == _MARK >> 16 else version_of(cursor)


def check(cursor: sqlite3.Cursor, path: str) -> int:
    """The version of a file that this release can use.

    Raises:
        SchemaMismatch: it is of a newer release, and this one cannot use it.
    """
    version = version_of(cursor)
    if version > len(MIGRATIONS) and (needed := usable_from(cursor)) > len(MIGRATIONS):
        raise SchemaMismatch(
            f"{path} has schema version {version}, which can be used from version {needed} on, and this ThunderAgent "
            f"knows versions up to {len(MIGRATIONS)}: upgrade it"
        )
    return version


def grow(cursor: sqlite3.Cursor, path: str) -> None:
    """Bring a file to the newest version, within a transaction that writes.

    Raises:
        SchemaMismatch: as `check`.
    """
    version = check(cursor, path)
    if version >= len(MIGRATIONS):
        return
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            cursor.execute(statement)
    cursor.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    cursor.execute(f"PRAGMA application_id = {_MARK | USABLE_FROM}")
