"""What CloudFormation knows of a stack, and what its states mean for us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deployment.cloud import Cloud
from deployment.errors import DeploymentError, told


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A stack as it is."""

    name: str
    id: str
    status: str
    reason: str
    parameters: dict[str, str]
    outputs: dict[str, str]

    @property
    def is_busy(self) -> bool:
        """Somebody is at work on it. A stack that only a change set was made for is nobody's."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def is_new(self) -> bool:
        """There are no resources yet."""
        return self.status == "REVIEW_IN_PROGRESS"

    @property
    def is_ruin(self) -> bool:
        """What is left of a stack that could not be made: it can only be deleted."""
        return self.status in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED")

    @property
    def is_stuck(self) -> bool:
        """Nothing can be done with it before a person has helped."""
        return self.status in ("UPDATE_ROLLBACK_FAILED", "DELETE_FAILED")


def state_of(cloud: Cloud, name: str) -> State | None:
    """A stack by its name or id; None if there is none.

    Raises:
        DeploymentError: it cannot be read.
    """
    with told(f"reading the stack {name}"):
        try:
            [stack] = cloud.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
        except ClientError as error:
            if "does not exist" in str(error):
                return None
            raise
    if stack["StackStatus"] == "DELETE_COMPLETE":
        return None
    return State(
        name=stack["StackName"],
        id=stack["StackId"],
        status=stack["StackStatus"],
        reason=stack.get("StackStatusReason", ""),
        parameters={one["ParameterKey"]: one.get("ParameterValue", "") for one in stack.get("Parameters", [])},
        outputs={one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])},
    )


def check_physical_ids(cloud: Cloud, name: str) -> list[dict[str, Any]]:
    """The resources of a stack, each of which really exists: an engine that skips a type in silence is found out.

    Raises:
        DeploymentError: a resource has no physical id, or is not complete.
    """
    with told(f"listing the resources of {name}"):
        pages = cloud.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=name)
        resources: list[dict[str, Any]] = [one for page in pages for one in page["StackResourceSummaries"]]
    wrong = [
        f"{one['LogicalResourceId']} ({one['ResourceType']}: {one['ResourceStatus']})"
        for one in resources
        if not one.get("PhysicalResourceId") or not one["ResourceStatus"].endswith("_COMPLETE")
    ]
    if wrong or not resources:
        what = ", ".join(wrong) or "it has no resources at all"
        raise DeploymentError(f"the stack {name} is told to be complete, but these do not exist: {what}")
    return resources
