"""Takes tables into a new stack that are there already: an earlier stack left them, or somebody made them by hand.

An import may touch nothing but what is imported, so it has a template of its own: the tables, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from botocore.exceptions import ClientError

from deployment.cloud import Cloud
from deployment.conditions import text_of, wanted_resources
from deployment.errors import told
from deployment.values import Value

TABLES: Final = ("AWS::DynamoDB::Table", "AWS::DynamoDB::GlobalTable")


def existing_tables(cloud: Cloud, template: Mapping[str, Any], values: Sequence[Value]) -> dict[str, str]:
    """Names of the tables that a new stack would make and that are there already, by their logical ids.

    Raises:
        DeploymentError: they may not be described.
    """
    known = {one.parameter.name: one.value for one in values}
    found: dict[str, str] = {}
    for logical, type_ in wanted_resources(template, known, cloud.region).items():
        name = template["Resources"][logical].get("Properties", {}).get("TableName")
        if type_ not in TABLES or name is None:
            continue
        table = text_of(name, known)
        with told(f"looking for the table {table}"):
            try:
                cloud.client("dynamodb").describe_table(TableName=table)
            except ClientError as error:
                if error.response["Error"]["Code"] == "ResourceNotFoundException":
                    continue
                raise
        found[logical] = table
    return found


def import_template(template: Mapping[str, Any], tables: Mapping[str, str]) -> str:
    """The template of an import: only these tables, which stay whatever becomes of the stack."""
    resources = {name: {**template["Resources"][name], "DeletionPolicy": "Retain"} for name in tables}
    kept = {
        name: template[name] for name in ("AWSTemplateFormatVersion", "Parameters", "Conditions") if name in template
    }
    return json.dumps(kept | {"Description": "Tables that were there already.", "Resources": resources})


def resources_to_import(template: Mapping[str, Any], tables: Mapping[str, str]) -> list[dict[str, Any]]:
    """As CloudFormation takes it."""
    return [
        {
            "LogicalResourceId": logical,
            "ResourceType": template["Resources"][logical]["Type"],
            "ResourceIdentifier": {"TableName": name},
        }
        for logical, name in tables.items()
    ]
