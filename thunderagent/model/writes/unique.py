"""Conditional writes of the rows of unique keys: `heldBy` names the task that has the key, while that task is open."""

from __future__ import annotations

from typing import Final

from thunderagent.model.conditions import Absent, Below, Condition, Either, Is, Mistyped, Write
from thunderagent.model.rows import is_number
from thunderagent.model.task import Row, timestamp

KEY_DOUBT_S: Final = 30.0
"""Who took a unique key so long ago takes it anew before he puts his task."""

KEY_SETTLES_S: Final = 60.0
"""A task whose unique key was taken so long ago is not put any more: `KEY_DOUBT_S`, and longer than a request takes."""


def key_id(job: str, unique_key: str) -> str:
    """Id of the row of a unique key; a key belongs to its job. The name of a job has no space there: no two meet."""
    return f"unique:{job.replace('%', '%25').replace(' ', '%20')} {unique_key}"


def key_row(row_id: str, task_id: str, *, now: float, promise: str | None = None, ended_at: float | None = None) -> Row:
    """The row of a key that nobody has.

    Args:
        row_id: see `key_id`.
        task_id: who has it from now on.
        now: on the shared clock.
        promise: the task that is about to be put, as text, when its id is its caller's: anybody may put it then.
        ended_at: when the task had ended that is about to be brought to life again.
    """
    return {"taskId": row_id, "heldBy": task_id, "fence": 1, "updatedAt": timestamp(now)} | _plan(promise, ended_at)


def pass_key(
    seen: Row, task_id: str, *, now: float, promise: str | None = None, ended_at: float | None = None
) -> Write:
    """The key goes from a task that has ended to another, or anew to the one that has it; see `key_row`.

    The row as seen: of two that see the same ended task, and of one who brings that task to life again, one wins. The
    time too, as a row that was taken away and came back begins with the same fence.
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


def free_key(row_id: str, task_id: str, *, over_at: float | None) -> Write:
    """The row of a key goes when its task does not hold it any more since `over_at`; another's key stays.

    So does one that the task has had anew since: a task that ends is brought to life again before its key is freed, or
    another was put under its id after a purge.
    """
    anew: tuple[Condition, ...] = (Absent("finishedAt"),)
    require: tuple[Condition, ...] = (Is("heldBy", task_id),)
    if over_at is not None:
        anew += (Below("finishedAt", timestamp(over_at)),)
        require += (Below("updatedAt", timestamp(over_at + KEY_DOUBT_S)),)  # clocks differ a little
    return Write(verb="free key", task_id=row_id, delete=True, require=(*require, Either(anew)))


def forget_key(row_id: str, task_id: str, *, now: float) -> Write:
    """The row of a key goes whose task was deleted after `now`, unless another may be put under that id just then."""
    still = (Is("heldBy", task_id), Below("updatedAt", timestamp(now - KEY_SETTLES_S)))
    return Write(verb="forget key", task_id=row_id, delete=True, require=still)


def drop_key(taken: Row) -> Write:
    """The row of a key goes as it was taken for a task which was not put after all, and was not taken anew for it."""
    as_taken = [Is(name, taken[name]) for name in ("heldBy", "fence", "updatedAt")]
    require: tuple[Condition, ...] = (*as_taken, Absent("finishedAt"))
    return Write(verb="drop key", task_id=taken["taskId"], delete=True, require=require)


def _plan(promise: str | None, ended_at: float | None) -> Row:
    """What whoever takes a key is about to do, for those who find it before it is done."""
    plan: Row = {}
    if promise is not None:
        plan["payload"] = promise
    if ended_at is not None:
        plan["finishedAt"] = ended_at
    return plan
