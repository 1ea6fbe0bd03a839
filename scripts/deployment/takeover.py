"""Takes tables into a new stack that are there already: an earlier stack left them, or somebody made them by hand.

An import may touch nothing but what is imported, so it has a template of its own: the tables, and nothing else. It
changes nothing and is not checked, so a table first becomes what the import claims. CloudFormation cannot turn a table
into a global table; the way of AWS is to keep the table, take it out of its stack, add the replicas, and import it.
https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/globaltables-bestpractices.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from deployment.cloud import Cloud
from deployment.conditions import filled, text_of, wanted_resources
from deployment.errors import DeploymentError, told
from deployment.values import Value

TABLES: Final = ("AWS::DynamoDB::Table", "AWS::DynamoDB::GlobalTable")
LOOK_S: Final = 1.0
LONGEST_S: Final = 6 * 3600.0
"""How long a replica of a large table may take."""
UNCLAIMED: Final = frozenset(
    {
        "ContributorInsightsSpecification",
        "DeletionProtectionEnabled",
        "OnDemandThroughput",
        "PointInTimeRecoverySpecification",
        "ReadOnDemandThroughputSettings",
        "WarmThroughput",
        "WriteOnDemandThroughputSettings",
    }
)
"""Properties that an import leaves out, so that the update after it sets them, whatever the table had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTable:
    """A table of a template, its values filled in."""

    logical: str
    type: str
    name: str
    home: str
    properties: Mapping[str, Any]

    @property
    def is_global(self) -> bool:
        """Whether it may have replicas."""
        return self.type == "AWS::DynamoDB::GlobalTable"

    @property
    def regions(self) -> frozenset[str]:
        """Where it is, its own region among them."""
        return frozenset({self.home, *(one["Region"] for one in self.properties.get("Replicas", ()))})

    @property
    def consistency(self) -> str:
        """How its regions agree."""
        return str(self.properties.get("MultiRegionConsistency", "EVENTUAL"))

    @property
    def stream(self) -> str | None:
        """What its stream holds; None: it needs none."""
        view: str | None = self.properties.get("StreamSpecification", {}).get("StreamViewType")
        return view


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request of UpdateTable that makes a table what its import claims."""

    table: WantedTable
    words: str
    arguments: Mapping[str, Any]


def wanted_tables(template: Mapping[str, Any], values: Mapping[str, str], region: str) -> dict[str, WantedTable]:
    """The tables with a name that a stack would have, by that name.

    Raises:
        DeploymentError: the template uses a function that is not known here.
    """
    known, conditions = {**values, "AWS::Region": region}, template.get("Conditions", {})
    found: dict[str, WantedTable] = {}
    for logical, type_ in wanted_resources(template, values, region).items():
        properties = template["Resources"][logical].get("Properties", {})
        if type_ in TABLES and "TableName" in properties:
            name = text_of(properties["TableName"], known)
            full = filled(properties, conditions, known)
            found[name] = WantedTable(logical=logical, type=type_, name=name, home=region, properties=full)
    return found


def refuse_impossible(
    template: Mapping[str, Any], before: Mapping[str, str], values: Sequence[Value], region: str
) -> None:
    """Refuse what CloudFormation cannot do to the tables of a stack that is there.

    Args:
        template: what the stack will have.
        before: the values of its parameters now.
        values: what they will be.
        region: of the stack.

    Raises:
        DeploymentError: the message has the remedy.
    """
    defaults = {one.parameter.name: one.parameter.default or "" for one in values}
    have = wanted_tables(template, {**defaults, **before}, region)
    for name, will in wanted_tables(template, {one.parameter.name: one.value for one in values}, region).items():
        if (has := have.get(name)) is None:
            continue
        if will.is_global and not has.is_global:
            first = "" if before.get("DeletionPolicy") != "Delete" else "give --parameter DeletionPolicy=Retain alone, "
            raise DeploymentError(
                f"{name} is a table of {region} alone, and CloudFormation cannot turn it into a global table. Without "
                f"loss: {first}run scripts/destroy for this stack, which keeps the table, then this command again "
                "with all parameters. See docs/guides/aws.md#the-table"
            )
        if has.is_global and not will.is_global:
            raise DeploymentError(
                f"{name} is a global table, and CloudFormation cannot turn it back: give --parameter Global=true"
            )
        changed = sorted(has.regions ^ will.regions)
        if has.consistency != will.consistency or (will.consistency == "STRONG" and changed):
            raise DeploymentError(
                f"{name} has Consistency {has.consistency} in {_listed(has.regions)}, which AWS cannot change to "
                f"{will.consistency} in {_listed(will.regions)}: make another table with --parameter TableName=…"
            )
        if len(changed) > 1:
            raise DeploymentError(
                f"{name} is in {_listed(has.regions)} and is to be in {_listed(will.regions)}. CloudFormation adds or "
                f"removes one replica in an update: change one of {', '.join(changed)} with each run"
            )


def existing_tables(cloud: Cloud, template: Mapping[str, Any], values: Sequence[Value]) -> list[WantedTable]:
    """The tables that a new stack would make and that are there already.

    Raises:
        DeploymentError: they may not be described.
    """
    wanted = wanted_tables(template, {one.parameter.name: one.value for one in values}, cloud.region)
    return [one for one in wanted.values() if described_table(cloud, one.name) is not None]


def described_table(cloud: Cloud, name: str) -> Mapping[str, Any] | None:
    """What DynamoDB says of a table; None if there is none."""
    with told(f"looking for the table {name}"):
        try:
            table: Mapping[str, Any] = cloud.client("dynamodb").describe_table(TableName=name)["Table"]
        except ClientError as error:
            if error.response["Error"]["Code"] == "ResourceNotFoundException":
                return None
            raise
    return table


def steps_of(cloud: Cloud, tables: Sequence[WantedTable]) -> list[Step]:
    """What makes tables that are there what their import claims, in this order.

    Raises:
        DeploymentError: no request does; the message has the remedy.
    """
    return [step for one in tables for step in lacking(one, described_table(cloud, one.name) or {})]


def lacking(wanted: WantedTable, there: Mapping[str, Any]) -> list[Step]:
    """What makes one table what its import claims.

    Raises:
        DeploymentError: no request does; the message has the remedy.
    """
    name, home = wanted.name, wanted.home
    regions = frozenset({home, *(one["RegionName"] for one in there.get("Replicas", ()))})
    update = f"aws dynamodb update-table --region {home} --table-name {name}"
    if surplus := sorted(regions - wanted.regions):
        raise DeploymentError(
            f"{name} has replicas in {', '.join(surplus)}, which the stack would not have: name them with --parameter "
            "ReplicaRegion=…, give --parameter CreateTable=false if the stack of another region has the table, or name "
            "another table"
        )
    consistency = there.get("MultiRegionConsistency", "EVENTUAL")
    if wanted.consistency != consistency:
        raise DeploymentError(
            f"{name} is there with Consistency {consistency}, and only a new table can have {wanted.consistency}: give "
            f"--parameter TableName=… of another, or delete {name} if it is empty"
        )
    mode = there.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    missing = sorted(wanted.regions - regions)
    # The import claims the auto scaling of a global table, so the update after it finds no difference and makes none.
    if mode != wanted.properties["BillingMode"] or (mode == "PROVISIONED" and wanted.is_global):
        raise DeploymentError(
            f"{name} is there with BillingMode {mode}, and an import changes nothing: run {update} --billing-mode "
            "PAY_PER_REQUEST, deploy it so, and then with BillingMode=PROVISIONED if you want that"
        )
    spec = there.get("StreamSpecification") or {}
    stream = spec.get("StreamViewType") if spec.get("StreamEnabled") else None
    if wanted.stream is not None and stream not in (None, wanted.stream):
        raise DeploymentError(
            f"the stream of {name} holds {stream}, and a global table needs {wanted.stream}: when nobody reads it any "
            f"more run {update} --stream-specification StreamEnabled=false"
        )
    steps = []
    if wanted.stream is not None and stream is None:
        on = {"StreamEnabled": True, "StreamViewType": wanted.stream}
        steps.append(Step(table=wanted, words="turn on its stream", arguments={"StreamSpecification": on}))
    for region in missing:
        create = [{"Create": {"RegionName": region}}]
        steps.append(Step(table=wanted, words=f"add its replica in {region}", arguments={"ReplicaUpdates": create}))
    return steps


def prepare(cloud: Cloud, tables: Sequence[WantedTable], steps: Sequence[Step]) -> None:
    """Do these steps one after the other, and wait until each table and its replicas are at rest.

    Raises:
        DeploymentError: one was refused, or takes too long.
    """
    for step in steps:
        with told(f"{step.table.name}: {step.words}"):
            cloud.client("dynamodb").update_table(TableName=step.table.name, **step.arguments)
        _await_rest(cloud, step.table, step)
    for one in tables:
        _await_rest(cloud, one)


def _await_rest(cloud: Cloud, wanted: WantedTable, step: Step | None = None) -> None:
    """Wait until a table and its replicas are ACTIVE, and a step is seen: a description may be older than it."""
    deadline = cloud.monotonic() + LONGEST_S
    while (there := described_table(cloud, wanted.name)) is not None:
        states = {one["RegionName"]: one.get("ReplicaStatus", "ACTIVE") for one in there.get("Replicas", ())}
        states[cloud.region] = there["TableStatus"]
        if set(states.values()) == {"ACTIVE"} and (step is None or step not in lacking(wanted, there)):
            return
        if cloud.monotonic() > deadline:
            raise DeploymentError(
                f"{wanted.name} is {states} after {LONGEST_S:g} s: run this again when all are ACTIVE"
            )
        cloud.sleep(LOOK_S)
    raise DeploymentError(f"{wanted.name} is gone: it was deleted meanwhile")


def import_template(template: Mapping[str, Any], tables: Sequence[WantedTable]) -> str:
    """The template of an import: only these tables as they are, which stay whatever becomes of the stack."""
    resources = {
        one.logical: {"Type": one.type, "DeletionPolicy": "Retain", "Properties": _claimed(one.properties)}
        for one in tables
    }
    kept = {name: template[name] for name in ("AWSTemplateFormatVersion", "Parameters") if name in template}
    return json.dumps(kept | {"Description": "Tables that were there already.", "Resources": resources})


def resources_to_import(tables: Sequence[WantedTable]) -> list[dict[str, Any]]:
    """As CloudFormation takes it."""
    return [
        {
            "LogicalResourceId": one.logical,
            "ResourceType": one.type,
            "ResourceIdentifier": {"TableName": one.name},
        }
        for one in tables
    ]


def _claimed(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _claimed(one) for key, one in content.items() if key not in UNCLAIMED}
    return [_claimed(one) for one in content] if isinstance(content, list) else content


def _listed(regions: frozenset[str]) -> str:
    return ", ".join(sorted(regions))
