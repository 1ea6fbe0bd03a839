"""The table on DynamoDB: made, compared with what ThunderAgent needs, and deleted.

On demand, key `taskId`; one index with `job` and `kind` beside its keys; time to live on `expireAt`; point-in-time
recovery. What an engine on your own machine lacks of the last two is told, and is no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from thunderagent.model.errors import NotAllowed, StoreError, StoreUnavailable, TableMissing
from thunderagent.stores.dynamo.differences import (
    EXPIRY,
    INDEX_KEY,
    KEY,
    Difference,
    check_table,
    describe,
    index_of,
    of_backups,
    of_expiry,
)
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.expressions import INDEX, PROJECTED

__all__ = ("Difference", "check_table", "create_table", "delete_table")

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
        progress: told what is done, a line at a time.
        wait_s: longest wait for the table, its index and its backups.
        sleep: how to wait, in seconds.

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
        with suppress(StoreUnavailable):  # somebody else is creating it at this moment
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


def _pause(engine: DynamoEngine, state: str, deadline: float, sleep: Callable[[float], None]) -> None:
    if time.monotonic() >= deadline:
        raise StoreUnavailable(f"{engine.connection.place} is {state}: look again with: thunderagent table check")
    sleep(_LOOK_S)


def _until_active(
    engine: DynamoEngine, deadline: float, progress: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    told = ""
    while True:
        table = describe(engine)
        index = index_of(table) or {}
        states = {table["TableStatus"], index.get("IndexStatus", "ACTIVE")}
        if states == {"ACTIVE"}:
            return
        state = " and ".join(sorted(states - {"ACTIVE"}))
        if state != told:
            progress(f"waiting: {state}")
        told = state
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
