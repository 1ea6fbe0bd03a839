"""Deletes stacks, the last first. Tables are kept unless their data are given up in so many words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from deployment import artefacts
from deployment.changes import make_change_set
from deployment.cloud import Cloud
from deployment.deploying import GOOD, Declined
from deployment.errors import told
from deployment.plan import Stack
from deployment.progress import Follower, why
from deployment.states import State, check_physical_ids, state_of
from deployment.takeover import TABLES
from deployment.templates import Parameter
from deployment.values import Origin, Value

GIVEN_UP = {"DeletionPolicy": "Delete", "DeletionProtection": "false"}


@dataclass(slots=True, kw_only=True)
class Destruction:
    """One run.

    Args:
        cloud: where.
        console: what it says.
        prefix: of the stacks' names.
        agree: asks whether to go on, with what.
        with_data: delete the tables too, with all that is in them.
    """

    cloud: Cloud
    console: Console
    prefix: str
    agree: Callable[[str], bool]
    with_data: bool = False
    kept: list[tuple[str, str]] = field(default_factory=list)
    """Types and names of what was left."""

    def run(self, stacks: Sequence[Stack], *, is_all: bool) -> int:
        """Delete these stacks, the last of the order first; how many there were.

        Args:
            stacks: in the order of deploying.
            is_all: no stack is left out, so that the bucket goes too.

        Raises:
            DeploymentError: one could not be deleted; those after it in the order are gone.
        """
        self.console.print(f"Destroying in {escape(self.cloud.place)}", highlight=False)
        found = [state for stack in stacks if (state := state_of(self.cloud, f"{self.prefix}-{stack.name}"))]
        if not found:
            self.console.print("there is nothing to destroy")
        else:
            self._ask(found)
        for state in reversed(found):
            self._delete(state)
        if is_all and artefacts.delete_bucket(self.cloud, name := artefacts.bucket_name(self.cloud, self.prefix)):
            self.console.print(f"deleted the bucket {name}", highlight=False)
        for type_, name in self.kept:
            self.console.print(f"[yellow]kept[/] {type_} {escape(name)}", highlight=False)
        if any(f"AWS::{type_}" in TABLES for type_, _ in self.kept):
            self.console.print(
                "A scripts/deploy with the same names of tables takes them over; destroy them then with --with-data."
            )
        return len(found)

    def _ask(self, found: Sequence[State]) -> None:
        for state in found:
            number = "no resources yet" if state.is_new else f"{self._number(state)} resources"
            self.console.print(f"  {state.name}: {state.status.lower().replace('_', ' ')}, {number}", highlight=False)
        names = ", ".join(state.name for state in found)
        data = " [bold red]and all tables with what is in them[/]" if self.with_data else ""
        if not self.agree(f"Delete {names}{data}?"):
            raise Declined("everything was left as it is")

    def _number(self, state: State) -> int:
        with told(f"listing the resources of {state.name}"):
            pages = self.cloud.client("cloudformation").get_paginator("list_stack_resources")
            return sum(len(page["StackResourceSummaries"]) for page in pages.paginate(StackName=state.id))

    def _delete(self, state: State) -> None:
        self.console.print(f"\n[bold]{state.name}[/]", highlight=False)
        if state.is_busy:
            Follower(self.cloud, self.console, state.id, has_begun=True).until_done()
        if self.with_data and "DeletionPolicy" in state.parameters and not state.is_new and not state.is_ruin:
            self._give_up(state)
        follower = Follower(self.cloud, self.console, state.id)
        with told(f"deleting {state.name}"):
            self.cloud.client("cloudformation").delete_stack(StackName=state.name)
        status = follower.until_done()
        if status != "DELETE_COMPLETE":
            raise why(follower, state.name, status)
        self.kept += [(type_.removeprefix("AWS::"), physical) for _, type_, physical in follower.kept]

    def _give_up(self, state: State) -> None:
        """Take the protection off the tables of a stack."""
        values = [
            Value(
                parameter=Parameter(name=name, type="String", default=None, description="", is_secret=False),
                value=GIVEN_UP.get(name, value),
                origin=Origin.GIVEN if name in GIVEN_UP else Origin.KEPT,
                before=value,
            )
            for name, value in state.parameters.items()
        ]
        change_set = make_change_set(self.cloud, state.name, values, template=None, state=state)
        if change_set is None:
            return
        self.console.print("  taking the protection off its tables")
        follower = Follower(self.cloud, self.console, state.id)
        with told(f"taking the protection off {state.name}"):
            self.cloud.client("cloudformation").execute_change_set(ChangeSetName=change_set.id)
        status = follower.until_done()
        if status not in GOOD:
            raise why(follower, state.name, status)
        check_physical_ids(self.cloud, state.name)
