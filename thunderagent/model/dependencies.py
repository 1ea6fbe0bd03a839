"""The rules of `dependsOn`: what a parent's status means for a child, and how many children a parent may have."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from thunderagent.model.task import OnParentFailure as OnParentFailure
from thunderagent.model.task import Status, Task

LONGEST_ID: Final = 512
"""Most bytes of a task's id."""

MOST_LINKED: Final = 375_000
"""Most bytes of other tasks' ids in a row, with one more for each: of those that it waits for, and that wait for it.

A row of DynamoDB has 400 KB. What else a task comes to in its life is under 24 KB.
"""


class Verdict(Enum):
    WAIT = "wait"
    GO = "go"
    FAIL = "fail"
    CANCEL = "cancel"


def verdict(parent: Status | None, policy: str | None) -> Verdict:
    """The verdict of one parent; None is a parent that no longer exists, which counts as failed.

    Parents must exist when a child is enqueued, so no cycle can be built and every chain of waiting ends.
    """
    if parent is Status.SUCCESS:
        return Verdict.GO
    if parent is not None and not parent.is_terminal:
        return Verdict.WAIT
    match OnParentFailure(policy or OnParentFailure.FAIL):
        case OnParentFailure.FAIL:
            return Verdict.FAIL
        case OnParentFailure.CANCEL:
            return Verdict.CANCEL
        case OnParentFailure.RUN:
            return Verdict.GO


def reason(parent_id: str, parent: Status | None) -> str:
    """Why a child did not run, for its row."""
    return f"parent {parent_id} no longer exists" if parent is None else f"parent {parent_id} ended as {parent}"


def linked_bytes(names: Iterable[str]) -> int:
    """Bytes that the ids of other tasks take in a row."""
    return sum(len(name.encode(errors="replace")) + 1 for name in names)


def most_dependents(parent: Task, children: Iterable[str]) -> int:
    """How many tasks may wait for a parent before these do too; 0: its row has no room for them.

    Others may have come since the parent was read: each counts as the longest id.
    """
    kept = linked_bytes(parent.dependents) + linked_bytes(parent.waiting_for) + linked_bytes(parent.depends_on)
    left = MOST_LINKED - kept - linked_bytes(set(children) - parent.dependents)
    return 0 if left < 0 else len(parent.dependents) + left // (LONGEST_ID + 1) + 1
