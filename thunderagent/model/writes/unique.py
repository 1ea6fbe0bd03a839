"""Conditional writes of the rows of unique keys: `heldBy` names the task that has the key, while that task is open."""

from __future__ import annotations

from typing import Final

from thunderagent.model.conditions import Absent, Below, Condition, Either, Is, Mistyped, Write
from thunderagent.model.rows import is_number
from thunderagent.model.task import Row, timestamp

KEY_DOUBT_S: Final = 30.0
"""Age at which a unique key must be acquired again before its task is put."""

KEY_SETTLES_S: Final = 60.0
"""Age at which the task of a unique key is not put any more: over `KEY_DOUBT_S` by more than a request takes."""


def key_id(job: str, unique_key: str) -> str:
    """Id of the row of a unique key of a job. No name of a job has a space there: no two ids meet."""
    return f"unique:{job.replace('%', '%25').replace(' ', '%20')} {unique_key}"


def key_row(row_id: str, task_id: str, *, now: float, promise: str | None = None, ended_at: float | None = None) -> Row:
    """The first row of a key.

    Args:
        row_id: see `key_id`.
        task_id: its owner.
        now: on the shared clock.
        promise: the task that is about to be put, as text, when the caller chose its id: any caller may put it then.
        ended_at: when the task had ended that is about to be revived.
    """
    return {"taskId": row_id, "heldBy": task_id, "fence": 1, "updatedAt": timestamp(now)} | _plan(promise, ended_at)


def pass_key(
    seen: Row, task_id: str, *, now: float, promise: str | None = None, ended_at: float | None = None
) -> Write:
    """The key goes from a task that has ended to another, or again to its owner; see `key_row`.

    Refused if the row has changed: of two that see the same ended task, or want to revive it, one wins. The time counts
    too, as a row that was deleted and came back begins with the same fence.
    """
    plan = _plan(promise, ended_at)
    at = seen.get("updatedAt")
    as_seen = Is("updatedAt", at) if is_number(at) else Absent("updatedAt") if at is None else Mistyped("updatedAt")
    return Write(
        verb="pass key",
        task_id=seen["taskId"],
        set={"heldBy": task_id, "updatedAt": timestamp(now)} | plan,
        increase={"fence": 1},
        remove=tuple(name for name in ("payload", "finishedAt") if name not in plan),
        require=(
            Is("heldBy", seen["heldBy"]),
            Is("fence", seen["fence"]),
            as_seen,
        ),
    )


def release_key(row_id: str, task_id: str, *, over_at: float | None) -> Write:
    """Delete the row of a key whose task has not needed it since `over_at`; another task's key stays.

    So does a key that was acquired again: the task was revived before its key was released, or its id used again after
    a purge.
    """
    releasable: tuple[Condition, ...] = (Absent("finishedAt"),)
    require: tuple[Condition, ...] = (Is("heldBy", task_id),)
    if over_at is not None:
        releasable += (Below("finishedAt", timestamp(over_at)),)
        require += (Below("updatedAt", timestamp(over_at + KEY_DOUBT_S)),)  # clocks differ a little
    return Write(verb="free key", task_id=row_id, delete=True, require=(*require, Either(releasable)))


def forget_key(row_id: str, task_id: str, *, now: float) -> Write:
    """Delete the row of a key whose task was deleted, unless a task may be put under that id just now."""
    still = (Is("heldBy", task_id), Below("updatedAt", timestamp(now - KEY_SETTLES_S)))
    return Write(verb="forget key", task_id=row_id, delete=True, require=still)


def drop_key(taken: Row) -> Write:
    """Delete the row of a key whose task was not put after all, unless it was acquired again."""
    as_taken = [Is(name, taken[name]) for name in ("heldBy", "fence", "updatedAt")]
    require: tuple[Condition, ...] = (*as_taken, Absent("finishedAt"))
    return Write(verb="drop key", task_id=taken["taskId"], delete=True, require=require)


def _plan(promise: str | None, ended_at: float | None) -> Row:
    """What the owner of a key is about to do, for those who find it before it is done."""
    plan: Row = {}
    if promise is not None:
        plan["payload"] = promise
    if ended_at is not None:
        plan["finishedAt"] = ended_at
    return plan
