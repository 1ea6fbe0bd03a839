"""The conditional writes of rows that are no tasks: agents, turns, journals, unique keys, limits.

As in `writes`: one pure function per verb, no write without a condition, and none whose repetition would count twice.
Only the rows of agents, and of limits with a line of waiting tasks, have index entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from thunderagent.conditions import Absent, Below, Either, Fewer, Is, Present, Write
from thunderagent.task import Row, timestamp

AGENT_STATUS: Final = "AGENT"
"""Status value of the row of an agent."""

LINE_STATUS: Final = "LINE"
"""Status value of the row of a limit in whose line tasks may stand, so that sweeps find it."""


# Unique keys: `heldBy` names the task that has the key. Held it is only while that task is open.


def key_id(job: str, unique_key: str) -> str:
    """Id of the row of a unique key; a key belongs to its job."""
    return f"unique:{job} {unique_key}"


def key_row(row_id: str, task_id: str, *, now: float) -> Row:
    """The row of a key that nobody has had."""
    return {"taskId": row_id, "heldBy": task_id, "fence": 1, "updatedAt": timestamp(now)}


def pass_key(seen: Row, task_id: str, *, now: float) -> Write:
    """The key goes from a task that has ended to another, or anew to the one that has it.

    The fence as seen: of two that see the same ended task, and of one who brings that task to life again, one wins.
    """
    return Write(
        verb="pass key",
        task_id=seen["taskId"],
        set={"heldBy": task_id, "updatedAt": timestamp(now)},
        increase={"fence": 1},
        require=(Is("heldBy", seen["heldBy"]), Is("fence", seen["fence"])),
    )


def free_key(row_id: str, task_id: str) -> Write:
    """The row of a key goes when its task has ended; another's key stays."""
    return Write(verb="free key", task_id=row_id, delete=True, require=(Is("heldBy", task_id),))


# Limits: `holders` has a member for each slot that is taken, `task_id#fence`: a slot is a lease's, not a task's.


def limit_id(limit_key: str) -> str:
    """Id of the row of a limit."""
    return f"limit:{limit_key}"


def holder(task_id: str, fence: int) -> str:
    """How a lease is written among the holders of a limit."""
    return f"{task_id}#{fence}"


def limit_row(limit_key: str, *, number: int, now: float, holders: Iterable[str] = ()) -> Row:
    """The row of a limit that nobody has used."""
    row: Row = {"taskId": limit_id(limit_key), "limitMax": number, "updatedAt": timestamp(now)}
    if members := frozenset(holders):
        row["holders"] = members
    return row


def take_slot(limit_key: str, member: str, *, number: int, now: float) -> Write:
    """Take one of `number` slots; refused when all are taken."""
    return Write(
        verb="take slot",
        task_id=limit_id(limit_key),
        set={"limitMax": number, "updatedAt": timestamp(now)},
        insert={"holders": member},
        require=(Present("taskId"), Fewer("holders", number)),
    )


def replace_holders(limit_key: str, seen: frozenset[str], then: frozenset[str], *, now: float) -> Write:
    """Put leases that live in the place of those that are over, as somebody saw the holders."""
    return Write(
        verb="replace holders",
        task_id=limit_id(limit_key),
        set={"updatedAt": timestamp(now)} | ({"holders": then} if then else {}),
        remove=() if then else ("holders",),
        require=(Is("holders", seen),),
    )


def free_slot(limit_key: str, member: str) -> Write:
    """Give a slot back; doing it again changes nothing."""
    return Write(
        verb="free slot",
        task_id=limit_id(limit_key),
        discard={"holders": member},
        require=(Present("taskId"),),
    )


def open_line(limit_key: str, *, number: int, now: float) -> Write:
    """Say that tasks are about to stand in the line of a limit: sweeps look after it from now on."""
    return Write(
        verb="open line",
        task_id=limit_id(limit_key),
        set={"status": LINE_STATUS, "createdAt": timestamp(now), "limitMax": number, "updatedAt": timestamp(now)},
        require=(Present("taskId"), Absent("status")),
    )


def keep_line(limit_key: str, *, number: int, now: float) -> Write:
    """Say it again of a line that is open: nobody may close it as long as tasks come."""
    return Write(
        verb="keep line",
        task_id=limit_id(limit_key),
        set={"limitMax": number, "updatedAt": timestamp(now)},
        require=(Is("status", LINE_STATUS),),
    )


def close_line(limit_key: str, *, seen_at: float) -> Write:
    """The line has been empty for long and nobody has touched the row since it was seen."""
    return Write(
        verb="close line",
        task_id=limit_id(limit_key),
        remove=("status", "createdAt"),
        require=(Is("status", LINE_STATUS), Is("updatedAt", seen_at)),
    )


# Agents: their turns, their rows, and the journals of streams.


def take_turn(turn_id: str, *, owner: str, now: float, until: float) -> Write:
    """One agent gets the turn for a piece of housekeeping; the turn ends by itself at `until`."""
    return Write(
        verb="take turn",
        task_id=turn_id,
        set={"leaseOwner": owner, "lockTime": timestamp(until)},
        require=(Present("taskId"), Either((Absent("lockTime"), Below("lockTime", timestamp(now))))),
    )


def announce(agent_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """Say that an agent is alive, and what it runs."""
    return Write(
        verb="announce",
        task_id=agent_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Is("status", AGENT_STATUS),),
    )


def journal(journal_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """What happened to a stream under one fence; the row has no status, so that no index entry is written."""
    return Write(
        verb="journal",
        task_id=journal_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Present("taskId"),),
    )
