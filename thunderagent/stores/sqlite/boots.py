"""The row of a SQLite file with the start of the machine from which its leases count.

The first process that writes after a start writes it. The machine's earlier agents are gone then: their leases are
over. What agents of a release without this row hold is left alone, as they may run beside us.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from thunderagent.model.clock import BootClock
from thunderagent.model.task import Status, timestamp
from thunderagent.model.writes.agents import AGENT_STATUS

ROW_ID: Final = "boot:"
"""It has no status, so no index shows it."""

_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Boot:
    """A start of a machine: its name, and the epoch second from which leases count."""

    boot_id: str
    zero: float


def read(cursor: sqlite3.Cursor) -> Boot | None:
    """The boot in the file; None: there is none, or it cannot be read."""
    found = cursor.execute('SELECT CAST("info" AS BLOB) FROM tasks WHERE "taskId" = ?', (ROW_ID,)).fetchone()
    try:
        info = json.loads(found[0])
        boot = Boot(str(info["id"]), float(info["zero"]))
        return boot if math.isfinite(boot.zero) else None
    except (TypeError, ValueError, LookupError, RecursionError):
        return None


def recall(cursor: sqlite3.Cursor, clock: BootClock) -> bool:
    """Give a clock the base of the file, if that is of this start of the machine; the answer is that of `place`."""
    known = read(cursor)
    return known is None or known.boot_id != clock.boot_id or clock.place(known.zero)


def settle(cursor: sqlite3.Cursor, clock: BootClock) -> float:
    """In a transaction: the second from which the leases of this start of the machine count."""
    known = read(cursor)
    if known is not None and known.boot_id == clock.boot_id:
        return known.zero
    zero = clock.choose()  # a question would enter another connection from inside this one
    info = json.dumps({"id": clock.boot_id, "zero": zero})
    cursor.execute(
        'INSERT OR REPLACE INTO tasks ("taskId", "info", "updatedAt") VALUES (?, ?, ?)',
        (ROW_ID, info, timestamp(clock.now())),
    )
    _end_former(cursor, clock)
    return zero


def _end_former(cursor: sqlite3.Cursor, clock: BootClock) -> None:
    """End what agents of another start of the machine hold: nothing of them runs any more."""
    now, names = clock.now(), list(_former(cursor, clock.boot_id))
    for start in range(0, len(names), _CHUNK):
        some = names[start : start + _CHUNK]
        marks = ", ".join("?" * len(some))
        agents = [f"agent:{name}" for name in some]
        cursor.execute(
            f'UPDATE tasks SET "expireAt" = ? WHERE "taskId" IN ({marks}) AND "expireAt" > ?',  # noqa: S608 - marks
            (int(now), *agents, now),
        )
        for time, owner, where in (
            ("lockTime", "leaseOwner", f"\"status\" BETWEEN '{Status.RUNNING}' AND '{Status.RUNNING}~'"),
            ("lockTime", "leaseOwner", "\"taskId\" BETWEEN 'turn:' AND 'turn:~'"),
            ("handoffUntil", "handoffOwner", f"\"status\" BETWEEN '{Status.PENDING}' AND '{Status.RUNNING}~'"),
        ):
            cursor.execute(
                f'UPDATE tasks SET "{time}" = ? WHERE {where} AND "{owner}" IN ({marks}) AND "{time}" > ?',  # noqa: S608
                (timestamp(now), *some, now),
            )


def _former(cursor: sqlite3.Cursor, boot_id: str) -> Iterator[str]:
    """Names of agents whose rows are of another start of the machine."""
    for row_id, text in cursor.execute('SELECT "taskId", "info" FROM tasks WHERE "status" = ?', (AGENT_STATUS,)):
        try:
            boot = json.loads(text).get("boot")
        except (TypeError, ValueError, AttributeError, RecursionError):
            continue
        if boot not in (None, boot_id):
            yield str(row_id).removeprefix("agent:")
