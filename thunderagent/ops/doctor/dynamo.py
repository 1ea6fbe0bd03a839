"""Examines a table on DynamoDB, and tries the actions that an agent needs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import AccessDenied, StoreError, StoreUnavailable, TableMissing, ThunderAgentError
from thunderagent.model.task import Row, Status
from thunderagent.ops.doctor.findings import Finding, State, allow_line
from thunderagent.stores.aws import is_loopback
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.errors import Place, Refused
from thunderagent.stores.dynamo.expressions import INDEX
from thunderagent.stores.dynamo.table import (
    EXPIRY,
    Difference,
    describe,
    index_of,
    of_backups,
    of_expiry,
    of_index,
    of_keys,
)

# The table


def look_at_table(engine: DynamoEngine) -> Iterator[Finding]:
    """The table, its index, its time to live, its backups and its billing.

    Raises:
        StoreUnavailable: DynamoDB did not answer.
        TableMissing: there is no such table.
    """
    place = engine.connection.place
    try:
        table = describe(engine)
    except AccessDenied as error:
        engine.page(Status.PENDING, limit=1)
        remedy = f"an agent needs no more; to see it here: {policy_line('DescribeTable', place)}"
        yield Finding("table", State.WARNING, f"{place} answers, but may not be described: {error}", remedy)
        return
    status = table["TableStatus"]
    if status not in ("ACTIVE", "UPDATING"):
        yield Finding("table", State.WRONG, f"{place} is {status}", "wait until it is ACTIVE")
        return
    yield from _compared("table", f"{place} is {status}", of_keys(engine, table))
    yield from _compared("index", f"{INDEX} is there", of_index(engine, index_of(table)))
    yield _billing(engine, table)
    if table.get("MultiRegionConsistency") == "STRONG":
        what = "a table of strong consistency has none, so ended tasks stay"
        yield Finding("time to live", State.SKIPPED, what, "delete them with: thunderagent purge")
    else:
        yield from _compared("time to live", f"on {EXPIRY}", of_expiry(engine))
    yield from _compared("point-in-time recovery", "on", of_backups(engine))


def _compared(check: str, fine: str, differences: Iterator[Difference]) -> Iterator[Finding]:
    found = list(differences)
    for one in found:
        yield Finding(check, State.WARNING if one.is_warning else State.WRONG, one.what, one.remedy)
    if not found:
        yield Finding(check, State.OK, fine)


def _billing(engine: DynamoEngine, table: dict[str, Any]) -> Finding:
    mode = table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if mode == "PAY_PER_REQUEST":
        return Finding("billing", State.OK, "on demand")
    units = table.get("ProvisionedThroughput", {})
    reads, writes = units.get("ReadCapacityUnits", "?"), units.get("WriteCapacityUnits", "?")
    return Finding(
        "billing",
        State.WARNING,
        f"provisioned, {reads} read and {writes} write units a second: above that DynamoDB throttles",
        "see that auto scaling moves them (docs/guides/aws.md#capacity), or aws dynamodb update-table --table-name "
        f"{engine.table} --billing-mode PAY_PER_REQUEST",
    )


# Permissions


def try_actions(engine: DynamoEngine, row: Row) -> Iterator[Finding]:
    """Try each action that an agent needs on a row of its own, and name the denied ones.

    The row is always deleted in the end. Where DeleteItem is denied, it expires within days.

    Raises:
        StoreUnavailable: DynamoDB did not answer.
    """
    place, call = engine.connection.place, engine.connection.call
    table, key = engine.table, expressions.key(row["taskId"])
    touch = Write(verb="probe", task_id=row["taskId"], increase={"fence": 1}, require=[Present("taskId")])
    tries: tuple[tuple[str, Callable[[], object]], ...] = (
        ("PutItem", lambda: call("PutItem", **expressions.put(table, row))),
        ("GetItem", lambda: call("GetItem", TableName=table, Key=key, ConsistentRead=True)),
        ("BatchGetItem", lambda: call("BatchGetItem", RequestItems={table: {"Keys": [key], "ConsistentRead": True}})),
        ("Query", lambda: engine.page(Status.PENDING, limit=1)),
        ("UpdateItem", lambda: call("UpdateItem", **expressions.update(table, touch))),
        ("PartiQLInsert", lambda: engine.refuses_duplicates(row)),
        ("DeleteItem", lambda: call("DeleteItem", TableName=table, Key=key)),
    )
    allowed: list[str] = []
    denied: list[str] = []
    try:
        for action, attempt in tries:
            try:
                answer = attempt()
            except AccessDenied as error:
                denied.append(action)
                yield Finding("permissions", State.WRONG, _denial(action, error), policy_line(action, place))
            except Refused:
                allowed.append(action)
            except TableMissing:
                pass  # the table, or its index: an earlier finding says so
            except StoreUnavailable:
                raise
            except ThunderAgentError as error:
                yield Finding("permissions", State.WRONG, f"{action} does not work: {error}")
            else:
                allowed += [action] * (answer is not False)  # a local engine may lack what agents can do without
    except BaseException:
        if not {"PutItem", "PartiQLInsert"} <= set(denied):  # the row may be there
            with suppress(StoreError, Refused):
                call("DeleteItem", TableName=table, Key=key)
        raise
    if not {"PutItem", "PartiQLInsert"}.isdisjoint(allowed) and "DeleteItem" in denied:
        left = f"the probe row {row['taskId']} could not be deleted"
        yield Finding("permissions", State.WARNING, left, "its time to live deletes it within two days")
    if not denied and allowed:
        how = "all allowed" if not is_loopback(place.endpoint) else "all work; a local engine checks no permissions"
        yield Finding("permissions", State.OK, f"{', '.join(allowed)}: {how}")


def policy_line(action: str, place: Place) -> str:
    table = f"arn:aws:dynamodb:{place.region or '*'}:*:table/{place.table}"
    resource = f"{table}/index/{INDEX}" if action == "Query" else table
    return allow_line(f"dynamodb:{action}", resource)


def _denial(action: str, error: AccessDenied) -> str:
    return f"dynamodb:{action} is denied ({error})"
