"""Change sets: made, read and shown before anything happens."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployment.cloud import Cloud
from deployment.errors import DeploymentError, told
from deployment.states import State
from deployment.values import Value, worth_telling

LOOK_S: Final = 1.0
LONGEST_S: Final = 300.0
CAPABILITIES: Final = ["CAPABILITY_NAMED_IAM", "CAPABILITY_AUTO_EXPAND"]
TAGS: Final = [{"Key": "made-by", "Value": "thunderagent"}]
NARROW: Final = 72
"""Columns of a terminal below which a table has no room for its words."""

HOLDERS: Final = frozenset({"DynamoDB::GlobalTable", "DynamoDB::Table", "Logs::LogGroup", "S3::Bucket", "SQS::Queue"})
"""Types whose resources hold something that is lost with them."""

_NOTHING: Final = ("didn't contain changes", "No updates are to be performed")
_STYLES: Final = {"Add": "green", "Modify": "yellow", "Remove": "red", "Import": "cyan", "Dynamic": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to one resource."""

    action: str
    resource: str
    type: str
    replacement: str
    what: str

    @property
    def is_loss(self) -> bool:
        """What the resource holds goes with it."""
        return self.type in HOLDERS and (self.action == "Remove" or self.replacement in ("True", "Conditional"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSet:
    """What an update would do, nothing of which has happened."""

    id: str
    stack: str
    changes: tuple[Change, ...]


def make_change_set(
    cloud: Cloud,
    name: str,
    values: Sequence[Value],
    *,
    template: str | None,
    state: State | None,
    imported: Sequence[dict[str, Any]] = (),
    revert_drift: bool = False,
) -> ChangeSet | None:
    """Ask CloudFormation what would change; None if nothing would.

    Args:
        cloud: where.
        name: of the stack.
        values: of its parameters.
        template: its text; None: the one that the stack has.
        state: what it is now; None: it does not exist.
        imported: what is there already and becomes a part of the stack, as CloudFormation takes it; the template has
            nothing else then.
        revert_drift: whether an update compares with what the account has, and not with the last deployment alone.

    Raises:
        DeploymentError: it was refused; the message has the reason.
    """
    client = cloud.client("cloudformation")
    is_new = state is None or state.is_new
    arguments: dict[str, Any] = {"UsePreviousTemplate": True} if template is None else {"TemplateBody": template}
    if imported:  # which takes no tags
        arguments |= {"ChangeSetType": "IMPORT", "ResourcesToImport": list(imported)}
    else:
        arguments |= {"ChangeSetType": "CREATE" if is_new else "UPDATE", "Tags": TAGS}
        if revert_drift and not is_new:
            arguments["DeploymentMode"] = "REVERT_DRIFT"
    with told(f"asking what would change in {name}"):
        made = client.create_change_set(
            StackName=name,
            ChangeSetName=f"deploy-{uuid.uuid4().hex}",
            Parameters=[one.argument for one in values],
            Capabilities=CAPABILITIES,
            **arguments,
        )
        deadline = cloud.monotonic() + LONGEST_S
        while True:
            read = client.describe_change_set(ChangeSetName=made["Id"])
            if not read["Status"].endswith(("_PENDING", "_IN_PROGRESS")):
                break
            if cloud.monotonic() > deadline:
                raise DeploymentError(f"CloudFormation has not said within {LONGEST_S:g} s what would change in {name}")
            cloud.sleep(LOOK_S)
        if read["Status"] == "FAILED":
            reason = read.get("StatusReason", "no reason was given")
            drop(cloud, name, made["Id"], is_new=is_new)
            if any(words in reason for words in _NOTHING):
                return None
            raise DeploymentError(f"the stack {name} cannot be changed: {reason}")
        changes = list(read.get("Changes", []))
        while token := read.get("NextToken"):
            read = client.describe_change_set(ChangeSetName=made["Id"], NextToken=token)
            changes += read.get("Changes", [])
    return ChangeSet(id=made["Id"], stack=name, changes=tuple(_change(one["ResourceChange"]) for one in changes))


def drop(cloud: Cloud, name: str, change_set: str, *, is_new: bool) -> None:
    """Take a change set away, and the empty stack that stands for it if the stack is new."""
    client = cloud.client("cloudformation")
    with told(f"taking back the change set of {name}"):
        client.delete_change_set(ChangeSetName=change_set)
        if is_new:
            client.delete_stack(StackName=name)


def show(console: Console, change_set: ChangeSet, values: Sequence[Value]) -> None:
    """Print what would change."""
    if console.width < NARROW:
        for change in change_set.changes:
            note = f", replaced: {change.replacement}" if change.replacement not in ("", "False") else ""
            console.print(
                f"[{_STYLES.get(change.action, '')}]{change.action}[/] {escape(change.resource)}\n"
                f"  {escape(change.type)}{note}" + (f"\n  {escape(change.what)}" if change.what else "")
            )
    elif change_set.changes:
        table = Table("action", "resource", "type", "replaced", "what", title=change_set.stack, title_justify="left")
        for change in change_set.changes:
            style = "bold red" if change.is_loss else _STYLES.get(change.action, "")
            table.add_row(
                f"[{style}]{change.action}[/]" if style else change.action,
                escape(change.resource),
                escape(change.type),
                {"False": "", "True": "[bold red]yes[/]"}.get(change.replacement, change.replacement),
                escape(change.what),
            )
        console.print(table)
    show_values(console, values)
    losses = [change for change in change_set.changes if change.is_loss]
    if losses:
        names = ", ".join(f"{one.resource} ({one.type})" for one in losses)
        console.print(f"[bold red]Removed, or made anew without what it holds:[/] {escape(names)}")


def show_values(console: Console, values: Sequence[Value]) -> None:
    """Print the parameters that change, and those that differ from the template's defaults."""
    for one in worth_telling(values):
        now, default = one.shown(one.value), one.parameter.default
        if one.is_changed:
            told = f"[yellow]{escape(one.shown(one.before))} → {escape(now)}[/] ({one.origin})"
        elif one.before is not None and one.origin.value == "kept" and default is not None:
            told = f"{escape(now)} (kept; the default is {escape(one.shown(default))})"
        else:
            told = f"{escape(now)} ({one.origin})"
        console.print(f"  {one.parameter.name}: {told}", soft_wrap=True)  # so that what is copied is whole


def _change(told_: dict[str, Any]) -> Change:
    names = sorted(
        {one["Target"].get("Name") or one["Target"].get("Attribute", "") for one in told_.get("Details", [])} - {""}
    )
    return Change(
        action=told_["Action"],
        resource=told_["LogicalResourceId"],
        type=told_["ResourceType"].removeprefix("AWS::"),
        replacement=told_.get("Replacement", ""),
        what=", ".join(names),
    )
