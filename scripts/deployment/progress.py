"""Follows a stack to its end: a line for each step, and the reason of what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError
from rich.console import Console
from rich.markup import escape

from deployment.cloud import Cloud
from deployment.errors import DeploymentError, told
from deployment.states import state_of

LOOK_S: Final = 2.0
LOCAL_LOOK_S: Final = 0.2
LONGEST_S: Final = 3600.0
STACK: Final = "AWS::CloudFormation::Stack"
FOLLOWS: Final = ("Resource creation cancelled", "Resource update cancelled", "Resource deletion cancelled")
"""Reasons of resources that failed only because another one had."""


@dataclass(slots=True)
class Follower:
    """Reads the events of one stack. Made before the work begins, so that it tells nothing of an earlier one."""

    cloud: Cloud
    console: Console
    stack: str
    """Its id, or its name while it has none."""
    seen: set[str] = field(default_factory=set)
    has_begun: bool = False
    """Whether the stack itself has told of a step: before, it may look as if it were at rest already."""
    failures: list[str] = field(default_factory=list)
    kept: list[tuple[str, str, str]] = field(default_factory=list)
    """Resources that a deletion left: logical id, type, physical id."""

    def __post_init__(self) -> None:
        self.seen.update(event["EventId"] for event in self._events())

    def until_done(self, longest_s: float = LONGEST_S) -> str:
        """Print what happens until the stack is at rest; its status, `DELETE_COMPLETE` if it is gone.

        Raises:
            DeploymentError: it takes longer than `longest_s` seconds, or cannot be read.
        """
        deadline = self.cloud.monotonic() + longest_s
        while True:
            state = state_of(self.cloud, self.stack)
            self.tell()  # after the look: the last events are there when the status is
            if state is None:
                return "DELETE_COMPLETE"
            if not state.is_busy and self.has_begun:
                return state.status
            if self.cloud.monotonic() > deadline:
                raise DeploymentError(
                    f"{self.stack} is {state.status} after {longest_s:g} s. It goes on by itself; run this again to "
                    "follow it"
                )
            self.cloud.sleep(LOCAL_LOOK_S if self.cloud.endpoint else LOOK_S)

    def tell(self) -> None:
        """Print the events that are new."""
        for event in self._events():
            if event["EventId"] in self.seen:
                continue
            self.seen.add(event["EventId"])
            name, type_ = event["LogicalResourceId"], event.get("ResourceType", "")
            status, reason = event["ResourceStatus"], event.get("ResourceStatusReason", "")
            self.has_begun = self.has_begun or type_ == STACK
            if status.endswith("_FAILED") and not reason.startswith(FOLLOWS):
                self.failures.append(f"{name} ({type_}): {reason or status}")
            if status == "DELETE_SKIPPED":
                self.kept.append((name, type_, event.get("PhysicalResourceId", "")))
            style = "red" if "FAILED" in status or "ROLLBACK" in status else "green" if "COMPLETE" in status else "dim"
            self.console.print(f"  [{style}]{status.lower().replace('_', ' ')}[/] {escape(name)}", highlight=False)
            if reason and style == "red":
                self.console.print(f"    {escape(reason)}", highlight=False)

    def _events(self) -> list[dict[str, Any]]:
        """The events of the stack, the oldest first; none while it does not exist."""
        with told(f"following {self.stack}"):
            pages = self.cloud.client("cloudformation").get_paginator("describe_stack_events")
            found: list[dict[str, Any]] = []
            try:
                for page in pages.paginate(StackName=self.stack):
                    found += page["StackEvents"]
                    if any(event["EventId"] in self.seen for event in page["StackEvents"]):
                        break  # newest first: what comes is known
            except ClientError as error:
                if "does not exist" not in str(error):
                    raise
        return found[::-1]


def why(follower: Follower, stack: str, status: str) -> DeploymentError:
    """The error of a stack that came to a bad end."""
    reasons = (
        "\n".join(f"  {reason}" for reason in dict.fromkeys(follower.failures)) or "  CloudFormation tells no reason"
    )
    after = ""
    if status == "ROLLBACK_COMPLETE":
        after = (
            "\nWhat had been made was taken back. Mend it and run this again: the rest of the stack is deleted then."
        )
    elif status.startswith("UPDATE_ROLLBACK_COMPLETE"):
        after = "\nThe stack is as it was before."
    elif status == "UPDATE_ROLLBACK_FAILED":
        after = f"\nMend it, then: aws cloudformation continue-update-rollback --stack-name {stack}"
    return DeploymentError(f"the stack {stack} ended as {status}:\n{reasons}{after}")
