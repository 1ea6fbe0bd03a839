"""What a request to the store is for, known from its verb or from what is read; units are counted by it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from thunderagent.model.task import Status, StatusValue
from thunderagent.model.writes.agents import AGENT_STATUS
from thunderagent.model.writes.limits import WAITLIST_STATUS
from thunderagent.model.writes.schedules import SCHEDULE_STATUS


class RequestPurpose(StrEnum):
    """Each purpose with its meaning."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> RequestPurpose:
        purpose = str.__new__(cls, value)
        purpose._value_, purpose.meaning = value, meaning
        return purpose

    ENQUEUE = "enqueue", "put new tasks"
    POLL = "poll", "read the index for ready tasks"
    CLAIM = "claim", "claim tasks, lost claims included"
    HEARTBEAT = "heartbeat", "renew leases, with progress and cursors"
    SETTLE = "settle", "write outcomes: succeed, retry, snooze, fail, close, release"
    SWEEP = "sweep", "look for lost agents' tasks and stuck dependencies, and take them over"
    DEPENDENCIES = "dependencies", "notify the tasks that wait for others"
    LIMITS = "limits", "permits and waitlists of limits"
    KEYS = "keys", "unique keys"
    TICKS = "ticks", "schedules of periodic jobs"
    STREAMS = "streams", "handoffs and journals of streams, stop and start"
    REGISTRY = "registry", "the agents' rows, turns, pauses, lists of lanes"
    MEASURE = "measure", "count the queues"
    TEXTS = "texts", "payloads and results that are too large for a row"
    TASKS = "tasks", "read tasks by id, cancel, retry by hand, purge"
    OTHER = "other", "what has none of these names"


_VERBS: Final[Mapping[RequestPurpose, str]] = {
    RequestPurpose.CLAIM: "claim",
    RequestPurpose.HEARTBEAT: "renew, reassert",
    RequestPurpose.SETTLE: "succeed, retry, snooze, fail, close, stop, release, put back, let go",
    RequestPurpose.SWEEP: "take over, give up, set apart",
    RequestPurpose.DEPENDENCIES: "register dependent, parent done, unpark, doom",
    RequestPurpose.LIMITS: "wait for permit, join waitlist, leave waitlist, take permit, replace holders, mend limit, "
    "release permit, let limit expire, open waitlist, keep waitlist, close waitlist",
    RequestPurpose.KEYS: "pass key, free key, drop key, forget key",
    RequestPurpose.STREAMS: "offer, ready, end handoff, hand over, journal, request stop, request start, stop waiting, "
    "stay ended",
    RequestPurpose.REGISTRY: "take turn, keep places, announce, set controls, sentinel",
    RequestPurpose.TASKS: "cancel, request cancel, revive",
}
_OF_VERB: Final = {verb: purpose for purpose, verbs in _VERBS.items() for verb in verbs.split(", ")}

_OF_ROW: Final[Mapping[str, RequestPurpose]] = {
    **dict.fromkeys(("agent", "control", "lanes", "turn", "probe", "sentinel"), RequestPurpose.REGISTRY),
    "journal": RequestPurpose.STREAMS,
    "limit": RequestPurpose.LIMITS,
    "schedule": RequestPurpose.TICKS,
    "unique": RequestPurpose.KEYS,
}
"""By the prefix of the ids of rows that are no tasks."""

_OF_STATUS: Final[Mapping[str, RequestPurpose]] = {
    Status.PENDING: RequestPurpose.POLL,
    Status.RUNNING: RequestPurpose.SWEEP,
    Status.BLOCKED: RequestPurpose.SWEEP,
    AGENT_STATUS: RequestPurpose.REGISTRY,
    WAITLIST_STATUS: RequestPurpose.LIMITS,
    SCHEDULE_STATUS: RequestPurpose.TICKS,
}


def of_write(verb: str, row_id: str) -> RequestPurpose:
    """Of a conditional write, by its verb; one without an entry by its row."""
    return _OF_VERB.get(verb) or of_row(row_id)


def of_put(row_id: str) -> RequestPurpose:
    """Of a put of a new row, by its id."""
    purpose = of_row(row_id)
    return RequestPurpose.ENQUEUE if purpose is RequestPurpose.TASKS else purpose


def of_row(row_id: str) -> RequestPurpose:
    """Of reading or deleting a row, by its id."""
    prefix, mark, _ = row_id.partition(":")
    return _OF_ROW.get(prefix, RequestPurpose.TASKS) if mark else RequestPurpose.TASKS


def of_query(status_value: str) -> RequestPurpose:
    """Of a query of the index, by what it looks for."""
    status, _, line = StatusValue.parse(status_value)
    return RequestPurpose.LIMITS if line is not None else _OF_STATUS.get(status, RequestPurpose.TASKS)
