"""The table on DynamoDB: made, compared with what ThunderAgent needs, and deleted.

On demand, key `taskId`; one index with `job` and `kind` beside its keys; time to live on `expireAt`; point-in-time
recovery. A local engine may lack the last two, which is no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.model.errors import AccessDenied, NotAllowed, StoreError, StoreUnavailable, TableMissing
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.expressions import INDEX, PROJECTED

EXPIRY: Final = "expireAt"
KEY: Final = [{"AttributeName": "taskId", "KeyType": "HASH"}]
INDEX_KEY: Final = [
    {"AttributeName": "status", "KeyType": "HASH"},
    {"AttributeName": "createdAt", "KeyType": "RANGE"},
]

WAIT_S: Final = 300.0
_LOOK_S: Final = 1.0

_KEY_TYPES: Final = [
    {"AttributeName": "taskId", "AttributeType": "S"},
    {"AttributeName": "status", "AttributeType": "S"},
    {"AttributeName": "createdAt", "AttributeType": "N"},
]
_THE_INDEX: Final = {
    "IndexName": INDEX,
    "KeySchema": INDEX_KEY,
    "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(PROJECTED)},
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a table is not as it should be; a warning does not keep agents from working."""

    what: str
    remedy: str
    is_warning: bool = False


def create_table(
    engine: DynamoEngine,
    *,
    deletion_protection: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    wait_s: float = WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Difference]:
    """Make the table, or add what it lacks; doing it again changes nothing. Waits until it can be used.

    Args:
        engine: names the table, its region and endpoint.
        deletion_protection: refuse to delete the table until the protection is taken off.
        progress: called with each line of what is done.
        wait_s: longest wait for the table, its index and its backups.
        sleep: waits, in seconds.

    Returns:
        What is still different, because it cannot be changed here or the engine does not have it.

    Raises:
        StoreUnavailable: the table was not active in time.
        AccessDenied: a permission is missing.
    """
    place, call = engine.connection.place, engine.connection.call
    deadline = time.monotonic() + wait_s
    try:
        table = describe(engine)
    except TableMissing:
        progress(f"creating {place}")
        with suppress(StoreUnavailable):  # another process is creating it at this moment
            call(
                "CreateTable",
                TableName=engine.table,
                KeySchema=KEY,
                AttributeDefinitions=_KEY_TYPES,
                GlobalSecondaryIndexes=[_THE_INDEX],
                BillingMode="PAY_PER_REQUEST",
                DeletionProtectionEnabled=deletion_protection,
            )
    else:
        progress(f"{place} exists")
        if index_of(table) is None and table["KeySchema"] == KEY:
            progress(f"adding the index {INDEX}")
            updates = [{"Create": _THE_INDEX}]
            call(
                "UpdateTable",
                TableName=engine.table,
                AttributeDefinitions=_KEY_TYPES,
                GlobalSecondaryIndexUpdates=updates,
            )
        if deletion_protection and not table.get("DeletionProtectionEnabled"):
            call("UpdateTable", TableName=engine.table, DeletionProtectionEnabled=True)
    _until_active(engine, deadline, progress, sleep)
    _switch_on(engine, deadline, progress, sleep)
    return check_table(engine)


def delete_table(engine: DynamoEngine, *, wait_s: float = WAIT_S, sleep: Callable[[float], None] = time.sleep) -> None:
    """Delete the table with all its tasks, and wait until it is gone.

    Raises:
        NotAllowed: its deletion protection is on.
        TableMissing: it does not exist.
    """
    if describe(engine).get("DeletionProtectionEnabled"):
        raise NotAllowed(
            f"{engine.connection.place} is protected against deletion; take the protection off with: aws dynamodb "
            f"update-table --table-name {engine.table} --no-deletion-protection-enabled"
        )
    engine.connection.call("DeleteTable", TableName=engine.table)
    deadline = time.monotonic() + wait_s
    with suppress(TableMissing):
        while describe(engine):
            _pause(engine, "still there", deadline, sleep)


def check_table(engine: DynamoEngine) -> list[Difference]:
    """Everything in which the table is not as it should be; empty: all is well.

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
    found = reply["TimeToLiveDescription"]
    if found.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        yield Difference("time to live is off: ended tasks stay for ever", remedy)
    elif found.get("AttributeName") != EXPIRY:
        yield Difference(
            f"time to live is on {found.get('AttributeName')}, not {EXPIRY}",
            f"switch it off, wait an hour (DynamoDB asks for that), then {remedy}",
        )


def of_backups(engine: DynamoEngine) -> Iterator[Difference]:
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
    found = reply["ContinuousBackupsDescription"].get("PointInTimeRecoveryDescription", {})
    if found.get("PointInTimeRecoveryStatus") != "ENABLED":
        yield Difference(
            "point-in-time recovery is off", "switch it on with: thunderagent table create", is_warning=True
        )


def _pause(engine: DynamoEngine, state: str, deadline: float, sleep: Callable[[float], None]) -> None:
    if time.monotonic() >= deadline:
        raise StoreUnavailable(f"{engine.connection.place} is {state}: look again with: thunderagent table check")
    sleep(_LOOK_S)


def _until_active(
    engine: DynamoEngine, deadline: float, progress: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    shown = ""
    while True:
        table = describe(engine)
        index = index_of(table) or {}
        states = {table["TableStatus"], index.get("IndexStatus", "ACTIVE")}
        if states == {"ACTIVE"}:
            return
        state = " and ".join(sorted(states - {"ACTIVE"}))
        if state != shown:
            progress(f"waiting: {state}")
        shown = state
        _pause(engine, state, deadline, sleep)


def _switch_on(
    engine: DynamoEngine, deadline: float, progress: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Time to live and point-in-time recovery, each when it is off; a table without them works."""
    steps = (
        (
            of_expiry,
            "UpdateTimeToLive",
            {"TimeToLiveSpecification": {"Enabled": True, "AttributeName": EXPIRY}},
            f"time to live on {EXPIRY}",
        ),
        (
            of_backups,
            "UpdateContinuousBackups",
            {"PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True}},
            "point-in-time recovery",
        ),
    )
    for differs, action, arguments, name in steps:
        while any(differs(engine)):
            try:
                engine.connection.call(action, TableName=engine.table, **arguments)
                progress(f"{name} is on")
            except StoreUnavailable:  # a new table has its backups a little later
                _pause(engine, f"not ready for {name}", deadline, sleep)
                continue
            except StoreError as error:
                progress(f"{name} could not be switched on: {error}")
            break


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
