"""Conditional writes of the rows of limits.

`holders` has one member for each permit that is taken, `task_id#fence`: a lease holds a permit, not a task. `expireAt`
is there only while no permit is taken and no waitlist is open. A row with a waitlist has an index entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from thunderagent.model.conditions import Absent, Fewer, Is, Mistyped, Present, Write
from thunderagent.model.task import Row, timestamp

WAITLIST_STATUS: Final = "LINE"
"""Status value of the row of a limit with a waitlist, so that sweeps find it."""


LIMIT_LIVES_S: Final = 7 * 86400.0
"""How long the row of an unused limit is kept."""


def limit_id(limit_key: str) -> str:
    return f"limit:{limit_key}"


def holder(task_id: str, fence: int) -> str:
    """A lease among the holders of a limit."""
    return f"{task_id}#{fence}"


def limit_row(limit_key: str, *, number: int, now: float, holders: Iterable[str] = ()) -> Row:
    """The row of a limit that nobody has used."""
    row: Row = {"taskId": limit_id(limit_key), "limitMax": number, "updatedAt": timestamp(now)}
    if members := frozenset(holders):
        row["holders"] = members
    return row


def take_permit(limit_key: str, member: str, *, number: int, now: float) -> Write:
    """Take one of `number` permits; refused when all are taken."""
    return Write(
        verb="take permit",
        task_id=limit_id(limit_key),
        set={"limitMax": number, "updatedAt": timestamp(now)},
        insert={"holders": frozenset({member})},
        remove=("expireAt",),
        require=(Present("taskId"), Fewer("holders", number)),
    )


def replace_holders(limit_key: str, seen: frozenset[str], then: frozenset[str], *, now: float) -> Write:
    """Put leases that live in the place of expired ones, unless the holders have changed."""
    return Write(
        verb="replace holders",
        task_id=limit_id(limit_key),
        set={"updatedAt": timestamp(now)} | ({"holders": then} if then else {}),
        remove=("expireAt",) if then else ("holders",),
        require=(Is("holders", seen),),
    )


def mend_limit(row_id: str, *, now: float) -> Write:
    """Take away what a person has put in the place of the holders; no permit can be taken beside it."""
    return Write(
        verb="mend limit",
        task_id=row_id,
        set={"updatedAt": timestamp(now)},
        remove=("holders",),
        require=(Mistyped("holders"),),
    )


def release_permit(limit_key: str, member: str) -> Write:
    """Doing it again changes nothing."""
    return Write(
        verb="release permit",
        task_id=limit_id(limit_key),
        discard={"holders": member},
        require=(Present("taskId"),),
    )


def release_last_permit(limit_key: str, member: str, *, now: float) -> Write:
    """Release the only permit that is taken, and let the row expire; refused if another is taken or a waitlist is
    open."""
    return Write(
        verb="release permit",
        task_id=limit_id(limit_key),
        set={"expireAt": _limit_over(now)},
        remove=("holders",),
        require=(Is("holders", frozenset({member})), Absent("status")),
    )


def let_limit_expire(limit_key: str, *, now: float) -> Write:
    """Let the row of an unused limit expire; refused when a permit was taken meanwhile or a waitlist opened."""
    return Write(
        verb="let limit expire",
        task_id=limit_id(limit_key),
        set={"expireAt": _limit_over(now)},
        require=(Present("taskId"), Absent("holders"), Absent("status"), Absent("expireAt")),
    )


def open_waitlist(limit_key: str, *, number: int, now: float) -> Write:
    """Open the waitlist before tasks come to it: sweeps look after it from now on."""
    return Write(
        verb="open waitlist",
        task_id=limit_id(limit_key),
        set={"status": WAITLIST_STATUS, "createdAt": timestamp(now), "limitMax": number, "updatedAt": timestamp(now)},
        remove=("expireAt",),
        require=(Present("taskId"),),
    )


def keep_waitlist(limit_key: str, *, number: int, now: float) -> Write:
    """Keep an open waitlist open as long as tasks come."""
    return Write(
        verb="keep waitlist",
        task_id=limit_id(limit_key),
        set={"limitMax": number, "updatedAt": timestamp(now)},
        remove=("expireAt",),
        require=(Is("status", WAITLIST_STATUS),),
    )


def close_waitlist(limit_key: str, *, seen_at: float, is_used: bool, now: float) -> Write:
    """Close a waitlist that has long been empty, unless its row was written since it was seen.

    Args:
        limit_key: the key of the limit.
        seen_at: when the seen row had been written.
        is_used: a permit was taken then; else the row expires from now on.
        now: on the shared clock.
    """
    return Write(
        verb="close waitlist",
        task_id=limit_id(limit_key),
        set={} if is_used else {"expireAt": _limit_over(now)},
        remove=("status", "createdAt"),
        require=(
            Is("status", WAITLIST_STATUS),
            Is("updatedAt", seen_at),
            Present("holders") if is_used else Absent("holders"),
        ),
    )


def _limit_over(now: float) -> float:
    return float(int(now + LIMIT_LIVES_S))
