"""The attributes of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ATTRIBUTES: Final[Mapping[str, str]] = {
    "taskId": "S",
    "status": "S",
    "createdAt": "N",
    "submittedAt": "N",
    "startedAt": "N",
    "finishedAt": "N",
    "updatedAt": "N",
    "job": "S",
    "kind": "S",
    "payload": "S",
    "payloadRef": "S",
    "retryCount": "N",
    "maxRetry": "N",
    "crashCount": "N",
    "fence": "N",
    "lockTime": "N",
    "leaseOwner": "S",
    "leaseSec": "N",
    "hb": "N",
    "lastAgent": "S",
    "dependsOn": "L",
    "waitingFor": "SS",
    "dependents": "SS",
    "onParentFailure": "S",
    "desiredState": "S",
    "lastSeq": "M",
    "handoffOwner": "S",
    "handoffUntil": "N",
    "handoffState": "S",
    "cancelRequested": "BOOL",
    "progress": "S",
    "result": "S",
    "resultRef": "S",
    "error": "S",
    "errors": "L",
    "doneReason": "S",
    "expireAt": "N",
    "info": "M",
    "uniqueKey": "S",
    "uniqueScope": "S",
    "limitKey": "S",
    "limitMax": "N",
    "heldBy": "S",
    "holders": "SS",
    "traceparent": "S",
    "regionEpoch": "N",
}
"""Every attribute of the table and its DynamoDB type. `info`, `heldBy` and `holders` are of rows that are no tasks: of
agents, journals, schedules and pauses the first, of unique keys the second, of limits the third."""

LEASE_ATTRIBUTES: Final = ("lockTime", "leaseOwner", "leaseSec", "hb")
"""Present exactly while RUNNING."""
