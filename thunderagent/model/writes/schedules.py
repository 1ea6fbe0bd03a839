"""Conditional writes of the rows of schedules: `info` has the schedule of a periodic job and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.model.conditions import Is, Write
from thunderagent.model.task import Row, timestamp

SCHEDULE_STATUS: Final = "SCHEDULE"


def schedule_row(row_id: str, info: Mapping[str, Any], *, owner: str, now: float, expire_at: float) -> Row:
    """The first row of a schedule."""
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
    """The next state of a schedule, unless its row has changed since it was seen. `createdAt` stays, so no index
    entry is written."""
    return Write(
        verb=verb,
        task_id=seen["taskId"],
        set={"info": dict(info), "lastAgent": owner, "updatedAt": timestamp(now), "expireAt": int(expire_at)},
        increase={"fence": 1},
        require=(Is("status", SCHEDULE_STATUS), Is("fence", seen["fence"])),
    )
