"""Compares a table on DynamoDB with what ThunderAgent needs; each difference is told with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model.errors import AccessDenied, StoreError, StoreUnavailable, TableMissing
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.expressions import INDEX, PROJECTED

EXPIRY: Final = "expireAt"
KEY: Final = [{"AttributeName": "taskId", "KeyType": "HASH"}]
INDEX_KEY: Final = [
    {"AttributeName": "status", "KeyType": "HASH"},
    {"AttributeName": "createdAt", "KeyType": "RANGE"},
]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a table is not as it should be; a warning does not keep agents from working."""

    what: str
    remedy: str
    is_warning: bool = False


def check_table(engine: DynamoEngine) -> list[Difference]:
    """Everything in which the table is not as it should be, each with its remedy; empty: all is well.

    Raises:
        StoreUnavailable: DynamoDB did not answer.
    """
    try:
        table = describe(engine)
    except TableMissing as error:
        return [Difference(f"{engine.connection.place} does not exist", str(error))]
    except AccessDenied as error:
        return [Difference(f"the table cannot be looked at: {error}", _allow("DescribeTable"))]
    found = list(of_keys(engine, table))
    found += of_index(engine, index_of(table))
    found += of_expiry(engine)
    found += of_backups(engine)
    return found


def describe(engine: DynamoEngine) -> dict[str, Any]:
    """The table as DynamoDB describes it.

    Raises:
        TableMissing: it does not exist.
        AccessDenied: the permission is missing.
    """
    table: dict[str, Any] = engine.connection.call("DescribeTable", TableName=engine.table)["Table"]
    return table


def index_of(table: dict[str, Any]) -> dict[str, Any] | None:
    """The description of our index in that of the table."""
    indexes = table.get("GlobalSecondaryIndexes", ())
    return next((index for index in indexes if index["IndexName"] == INDEX), None)


def of_keys(engine: DynamoEngine, table: dict[str, Any]) -> Iterator[Difference]:
    """How the keys of the table and of its index differ."""
    types = {kind["AttributeName"]: kind["AttributeType"] for kind in table["AttributeDefinitions"]}
    if table["KeySchema"] != KEY or types.get("taskId") != "S":
        yield Difference(
            f"the key of {engine.connection.place} is {_named(table['KeySchema'], types)}, not taskId (S)",
            "a key cannot be changed: name another table in THUNDERAGENT_STORE and create it with: "
            "thunderagent table create",
        )
    index = index_of(table)
    if index and (index["KeySchema"] != INDEX_KEY or (types.get("status"), types.get("createdAt")) != ("S", "N")):
        yield Difference(
            f"the key of the index {INDEX} is {_named(index['KeySchema'], types)}, not status (S), createdAt (N)",
            _again(engine),
        )


def of_index(engine: DynamoEngine, index: dict[str, Any] | None) -> Iterator[Difference]:
    """How the index differs from what agents read; None: there is none."""
    if index is None:
        yield Difference(f"there is no index {INDEX}", "add it with: thunderagent table create")
        return
    if index.get("IndexStatus", "ACTIVE") != "ACTIVE":
        yield Difference(f"the index {INDEX} is {index['IndexStatus']}", "wait until it is ACTIVE")
    projection = index["Projection"]
    has = set(projection.get("NonKeyAttributes", ()))
    if projection["ProjectionType"] == "ALL":
        yield Difference(
            f"the index {INDEX} projects ALL attributes: each heartbeat is billed twice",
            _again(engine),
            is_warning=True,
        )
    elif missing := [name for name in PROJECTED if name not in has]:
        yield Difference(f"the index {INDEX} does not project {', '.join(missing)}", _again(engine))
    elif more := sorted(has - set(PROJECTED)):
        yield Difference(
            f"the index {INDEX} projects {', '.join(more)} too: changing it is billed twice",
            _again(engine),
            is_warning=True,
        )


def of_expiry(engine: DynamoEngine) -> Iterator[Difference]:
    """How the time to live of the table differs."""
    remedy = "switch it on with: thunderagent table create"
    try:
        reply = engine.connection.call("DescribeTimeToLive", TableName=engine.table)
    except StoreUnavailable:
        raise
    except AccessDenied:
        yield Difference("time to live cannot be looked at", _allow("DescribeTimeToLive"), is_warning=True)
        return
    except StoreError as error:
        yield Difference(f"this engine has no time to live: {error}", "delete old tasks by hand", is_warning=True)
        return
    told = reply["TimeToLiveDescription"]
    if told.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        yield Difference("time to live is off: ended tasks stay for ever", remedy)
    elif told.get("AttributeName") != EXPIRY:
        yield Difference(
            f"time to live is on {told.get('AttributeName')}, not {EXPIRY}",
            f"switch it off, wait an hour (DynamoDB asks for that), then {remedy}",
        )


def of_backups(engine: DynamoEngine) -> Iterator[Difference]:
    """How the backups of the table differ."""
    try:
        reply = engine.connection.call("DescribeContinuousBackups", TableName=engine.table)
    except StoreUnavailable:
        raise
    except AccessDenied:
        yield Difference(
            "point-in-time recovery cannot be looked at", _allow("DescribeContinuousBackups"), is_warning=True
        )
        return
    except StoreError as error:
        yield Difference(f"this engine has no point-in-time recovery: {error}", "none is needed", is_warning=True)
        return
    told = reply["ContinuousBackupsDescription"].get("PointInTimeRecoveryDescription", {})
    if told.get("PointInTimeRecoveryStatus") != "ENABLED":
        yield Difference(
            "point-in-time recovery is off", "switch it on with: thunderagent table create", is_warning=True
        )


def _named(schema: list[dict[str, str]], types: dict[str, str]) -> str:
    return ", ".join(f"{key['AttributeName']} ({types.get(key['AttributeName'], '?')})" for key in schema)


def _allow(action: str) -> str:
    return f"allow dynamodb:{action} to see it"


def _again(engine: DynamoEngine) -> str:
    return (
        "while no agent runs, delete the index with: aws dynamodb update-table "
        f'--table-name {engine.table} --global-secondary-index-updates \'[{{"Delete":{{"IndexName":"{INDEX}"}}}}]\' '
        "and add it with: thunderagent table create"
    )
