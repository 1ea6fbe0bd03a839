"""What a request to the store is for, told from its verb or from what is read; units are counted by it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from thunderagent.model.task import Status, StatusValue
from thunderagent.model.writes.agents import AGENT_STATUS
from thunderagent.model.writes.limits import LINE_STATUS
from thunderagent.model.writes.schedules import SCHEDULE_STATUS


class Purpose(StrEnum):
    """What a request is for."""

    ENQUEUE = "enqueue"
    POLL = "poll"
    CLAIM = "claim"
    HEARTBEAT = "heartbeat"
    SETTLE = "settle"
    SWEEP = "sweep"
    DEPENDENCIES = "dependencies"
    LIMITS = "limits"
    KEYS = "keys"
    TICKS = "ticks"
    STREAMS = "streams"
    REGISTRY = "registry"
    MEASURE = "measure"
    TEXTS = "texts"
    TASKS = "tasks"
    OTHER = "other"


MEANING: Final[dict[Purpose, str]] = {
    Purpose.ENQUEUE: "put new tasks",
    Purpose.POLL: "read the index for ready tasks",
    Purpose.CLAIM: "claim tasks, lost claims included",
    Purpose.HEARTBEAT: "renew leases, with progress and cursors",
    Purpose.SETTLE: "write outcomes: succeed, retry, snooze, fail, close, release",
    Purpose.SWEEP: "look for lost agents' tasks and stuck dependencies, and take them over",
    Purpose.DEPENDENCIES: "tell the tasks that wait for others",
    Purpose.LIMITS: "slots and lines of limits",
    Purpose.KEYS: "unique keys",
    Purpose.TICKS: "schedules of periodic jobs",
    Purpose.STREAMS: "handoffs and journals of streams, stop and start",
    Purpose.REGISTRY: "the agents' rows, turns, pauses, lists of lanes",
    Purpose.MEASURE: "count the queues",
    Purpose.TEXTS: "payloads and results that are too large for a row",
    Purpose.TASKS: "read tasks by id, cancel, retry by hand, purge",
    Purpose.OTHER: "what has none of these names",
}
"""Each purpose in words."""

_OF_VERB: Final[dict[str, Purpose]] = {
    verb: purpose
    for purpose, verbs in {
        Purpose.CLAIM: ("claim",),
        Purpose.HEARTBEAT: ("renew", "reassert"),
        Purpose.SETTLE: (
            "succeed",
            "retry",
            "snooze",
            "fail",
            "close",
            "stop",
            "release",
            "put back",
            "let go",
        ),
        Purpose.SWEEP: ("take over", "give up", "set apart"),
        Purpose.DEPENDENCIES: ("register dependent", "parent done", "unpark", "doom"),
        Purpose.LIMITS: (
            "stand in line",
            "join line",
            "leave line",
            "take slot",
            "replace holders",
            "mend limit",
            "free slot",
            "let limit expire",
            "open line",
            "keep line",
            "close line",
        ),
        Purpose.KEYS: ("pass key", "free key", "drop key", "forget key"),
        Purpose.STREAMS: (
            "offer",
            "ready",
            "end handoff",
            "hand over",
            "journal",
            "request stop",
            "request start",
            "stop waiting",
            "stay ended",
        ),
        Purpose.REGISTRY: ("take turn", "keep places", "announce", "set controls", "sentinel"),
        Purpose.TASKS: ("cancel", "request cancel", "revive"),
    }.items()
    for verb in verbs
}

_OF_ROW: Final[dict[str, Purpose]] = {
    "agent": Purpose.REGISTRY,
    "control": Purpose.REGISTRY,
    "lanes": Purpose.REGISTRY,
    "turn": Purpose.REGISTRY,
    "journal": Purpose.STREAMS,
    "limit": Purpose.LIMITS,
    "probe": Purpose.REGISTRY,
    "schedule": Purpose.TICKS,
    "sentinel": Purpose.REGISTRY,
    "unique": Purpose.KEYS,
}
"""By the prefix of the ids of rows that are no tasks."""

_OF_STATUS: Final[dict[str, Purpose]] = {
    Status.PENDING: Purpose.POLL,
    Status.RUNNING: Purpose.SWEEP,
    Status.BLOCKED: Purpose.SWEEP,
    AGENT_STATUS: Purpose.REGISTRY,
    LINE_STATUS: Purpose.LIMITS,
    SCHEDULE_STATUS: Purpose.TICKS,
}


def of_write(verb: str, row_id: str) -> Purpose:
    """Of a conditional write, by its verb; one that is not known here by its row."""
    return _OF_VERB.get(verb) or of_row(row_id)


def of_put(row_id: str) -> Purpose:
    """Of a put of a new row, by its id."""
    purpose = of_row(row_id)
    return Purpose.ENQUEUE if purpose is Purpose.TASKS else purpose


def of_row(row_id: str) -> Purpose:
    """Of reading or deleting a row, by its id."""
    prefix, mark, _ = row_id.partition(":")
    return _OF_ROW.get(prefix, Purpose.TASKS) if mark else Purpose.TASKS


def of_query(status_value: str) -> Purpose:
    """Of a query of the index, by what it looks for."""
    status, _, line = StatusValue.parse(status_value)
    return Purpose.LIMITS if line is not None else _OF_STATUS.get(status, Purpose.TASKS)
