"""The rule of `dependsOn`: what becomes of a child when a parent has a given status."""

from __future__ import annotations

from enum import Enum, StrEnum

from thunderagent.task import Status


class OnParentFailure(StrEnum):
    """What a child does when a parent ends without success.

    * `FAIL`: the child fails too, and so on down the graph.
    * `CANCEL`: the child is closed as DONE.
    * `RUN`: the child runs as if the parent had succeeded.
    """

    FAIL = "fail"
    CANCEL = "cancel"
    RUN = "run"


class Verdict(Enum):
    """What one parent means for one child."""

    WAIT = "wait"
    GO = "go"
    FAIL = "fail"
    CANCEL = "cancel"


def verdict(parent: Status | None, policy: str | None) -> Verdict:
    """The verdict of one parent; `None` is a parent that no longer exists, which counts as one that failed.

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
