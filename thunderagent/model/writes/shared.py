"""The conditional writes of rows that are no tasks: agents, turns, journals, unique keys, limits, pauses, schedules.

As in `writes`: one pure function per verb, no write without a condition, and none whose repetition would count twice.
Only the rows of agents and schedules, and of limits with a line of waiting tasks, have index entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from thunderagent.model.conditions import Above, Absent, Below, Condition, Either, Fewer, Is, Mistyped, Present, Write
from thunderagent.model.pacing import KEY_DOUBT_S, KEY_SETTLES_S, TURN_AHEAD_S
from thunderagent.model.task import Row, timestamp
from thunderagent.model.unreadable import is_count, is_number

AGENT_STATUS: Final = "AGENT"
"""Status value of the row of an agent."""

SCHEDULE_STATUS: Final = "SCHEDULE"
"""Status value of the row of a schedule."""

LINE_STATUS: Final = "LINE"
"""Status value of the row of a limit in whose line tasks may stand, so that sweeps find it."""


# Unique keys: `heldBy` names the task that has the key. Held it is only while that task is open.


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


# Limits: `holders` has a member for each slot that is taken, `task_id#fence`: a slot is a lease's, not a task's.
# `expireAt` is only there while no slot is taken and no line is open: a row that is gone is a limit nobody uses.

LIMIT_LIVES_S: Final = 7 * 86400.0
"""The row of a limit that nobody uses is deleted after so long."""


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
        insert={"holders": frozenset({member})},
        remove=("expireAt",),
        require=(Present("taskId"), Fewer("holders", number)),
    )


def replace_holders(limit_key: str, seen: frozenset[str], then: frozenset[str], *, now: float) -> Write:
    """Put leases that live in the place of those that are over, as somebody saw the holders."""
    return Write(
        verb="replace holders",
        task_id=limit_id(limit_key),
        set={"updatedAt": timestamp(now)} | ({"holders": then} if then else {}),
        remove=("expireAt",) if then else ("holders",),
        require=(Is("holders", seen),),
    )


def mend_limit(row_id: str, *, now: float) -> Write:
    """Take away what somebody has put by hand in the place of the holders; no slot can be taken beside it."""
    return Write(
        verb="mend limit",
        task_id=row_id,
        set={"updatedAt": timestamp(now)},
        remove=("holders",),
        require=(Mistyped("holders"),),
    )


def free_slot(limit_key: str, member: str) -> Write:
    """Give a slot back; doing it again changes nothing."""
    return Write(
        verb="free slot",
        task_id=limit_id(limit_key),
        discard={"holders": member},
        require=(Present("taskId"),),
    )


def free_last_slot(limit_key: str, member: str, *, now: float) -> Write:
    """Give the only slot back that is taken, and let the row expire; refused if another is taken or a line is open."""
    return Write(
        verb="free slot",
        task_id=limit_id(limit_key),
        set={"expireAt": _limit_over(now)},
        remove=("holders",),
        require=(Is("holders", frozenset({member})), Absent("status")),
    )


def let_limit_expire(limit_key: str, *, now: float) -> Write:
    """The row of a limit expires that nobody uses; it stays when a slot was taken meanwhile or a line opened."""
    return Write(
        verb="let limit expire",
        task_id=limit_id(limit_key),
        set={"expireAt": _limit_over(now)},
        require=(Present("taskId"), Absent("holders"), Absent("status"), Absent("expireAt")),
    )


def open_line(limit_key: str, *, number: int, now: float) -> Write:
    """Say that tasks are about to stand in the line of a limit: sweeps look after it from now on."""
    return Write(
        verb="open line",
        task_id=limit_id(limit_key),
        set={"status": LINE_STATUS, "createdAt": timestamp(now), "limitMax": number, "updatedAt": timestamp(now)},
        remove=("expireAt",),
        require=(Present("taskId"),),
    )


def keep_line(limit_key: str, *, number: int, now: float) -> Write:
    """Say it again of a line that is open: nobody may close it as long as tasks come."""
    return Write(
        verb="keep line",
        task_id=limit_id(limit_key),
        set={"limitMax": number, "updatedAt": timestamp(now)},
        remove=("expireAt",),
        require=(Is("status", LINE_STATUS),),
    )


def close_line(limit_key: str, *, seen_at: float, is_used: bool, now: float) -> Write:
    """The line has been empty for long and nobody has touched the row since it was seen.

    Args:
        limit_key: the key of the limit.
        seen_at: when the row had been touched that was seen.
        is_used: a slot was taken then; else the row expires from now on.
        now: on the shared clock.
    """
    return Write(
        verb="close line",
        task_id=limit_id(limit_key),
        set={} if is_used else {"expireAt": _limit_over(now)},
        remove=("status", "createdAt"),
        require=(
            Is("status", LINE_STATUS),
            Is("updatedAt", seen_at),
            Present("holders") if is_used else Absent("holders"),
        ),
    )


def _limit_over(now: float) -> float:
    return float(int(now + LIMIT_LIVES_S))


# Pauses: `info` has an entry for each queue, job and agent that is paused.

CONTROL_ID: Final = "control:"
"""Id of the only row of pauses."""


def control_row(info: Mapping[str, Any], *, now: float) -> Row:
    """The row of pauses of a store where nothing was paused before."""
    return {"taskId": CONTROL_ID, "info": dict(info), "fence": 1, "updatedAt": timestamp(now)}


def set_controls(seen: Row, info: Mapping[str, Any], *, now: float) -> Write:
    """Change what is paused, as somebody saw it: of two who saw the same row, one looks again."""
    fence, verb, changed = seen.get("fence"), "set controls", {"info": dict(info), "updatedAt": timestamp(now)}
    if fence is not None and not is_count(fence):  # a row made by hand: it gets a fence
        return Write(verb=verb, task_id=CONTROL_ID, set={**changed, "fence": 1}, require=(Present("fence"),))
    as_seen = (Present("taskId"), Absent("fence") if fence is None else Is("fence", fence))
    return Write(verb=verb, task_id=CONTROL_ID, set=changed, increase={"fence": 1}, require=as_seen)


# Schedules: `info` has the schedule of a periodic job and how far it is; every change is made under the fence as seen.


def schedule_row(row_id: str, info: Mapping[str, Any], *, owner: str, now: float, expire_at: float) -> Row:
    """The row of a job that nobody has scheduled."""
    return {
        "taskId": row_id,
        "status": SCHEDULE_STATUS,
        "createdAt": timestamp(now),
        "updatedAt": timestamp(now),
        "fence": 0,
        "lastAgent": owner,
        "info": dict(info),
        "expireAt": int(expire_at),
    }


def change_schedule(
    verb: str, seen: Row, info: Mapping[str, Any], *, owner: str, now: float, expire_at: float
) -> Write:
    """The next state of a schedule, as somebody decided who saw the one before: of several one wins.

    `createdAt` stays, so that no index entry is written.
    """
    return Write(
        verb=verb,
        task_id=seen["taskId"],
        set={"info": dict(info), "lastAgent": owner, "updatedAt": timestamp(now), "expireAt": int(expire_at)},
        increase={"fence": 1},
        require=(Is("status", SCHEDULE_STATUS), Is("fence", seen["fence"])),
    )


# Agents: their turns, their rows, and the journals of streams.


def take_turn(turn_id: str, *, owner: str, now: float, until: float) -> Write:
    """One agent gets the turn for a piece of housekeeping; the turn ends by itself at `until`.

    One that would last for longer than any was taken before the clock was set back; one without a time is free.
    """
    ahead = timestamp(until + TURN_AHEAD_S)
    free = (Absent("lockTime"), Below("lockTime", timestamp(now)), Above("lockTime", ahead), Mistyped("lockTime"))
    return Write(
        verb="take turn",
        task_id=turn_id,
        set={"leaseOwner": owner, "lockTime": timestamp(until)},
        require=(Present("taskId"), Either(free)),
    )


def keep_places(turn_id: str, places: Mapping[str, Any], *, owner: str) -> Write:
    """Say where the sweep of this turn has ended, for the agent that gets the next turn."""
    return Write(
        verb="keep places",
        task_id=turn_id,
        set={"info": dict(places)} if places else {},
        remove=() if places else ("info",),
        require=(Is("leaseOwner", owner),),
    )


def announce(agent_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """Say that an agent is alive, and what it runs."""
    return Write(
        verb="announce",
        task_id=agent_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Is("status", AGENT_STATUS),),
    )


def sentinel(region: str, *, now: float) -> Write:
    """A sign of the region that has the grant; its age in another region tells how far the table there is behind."""
    return Write(
        verb="sentinel",
        task_id=sentinel_id(region),
        set={"updatedAt": timestamp(now)},
        require=(Present("taskId"),),
    )


def sentinel_id(region: str) -> str:
    """Id of the row of a sentinel."""
    return f"sentinel:{region}"


def journal(journal_id: str, *, info: Mapping[str, Any], now: float, expire_at: float) -> Write:
    """What happened to a stream under one fence; the row has no status, so that no index entry is written."""
    return Write(
        verb="journal",
        task_id=journal_id,
        set={"info": dict(info), "updatedAt": timestamp(now), "expireAt": float(int(expire_at))},
        require=(Present("taskId"),),
    )
