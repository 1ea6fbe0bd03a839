"""The table: made twice, compared, and deleted only when that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.stub import Stubber
from moto import mock_aws

from thunderagent.model.errors import AccessDenied, NotAllowed, StoreUnavailable, TableMissing
from thunderagent.model.task import Status
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import Difference, check_table, create_table, delete_table

INDEX = "status-createdAt-index"
KEY = [{"AttributeName": "taskId", "KeyType": "HASH"}]
INDEX_KEY = [{"AttributeName": "status", "KeyType": "HASH"}, {"AttributeName": "createdAt", "KeyType": "RANGE"}]
TYPES = {"taskId": "S", "status": "S", "createdAt": "N"}
INCLUDE = {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["job", "kind"]}


@pytest.fixture
def engine() -> Iterator[DynamoEngine]:
    with mock_aws():
        made = DynamoEngine("TaskTable", region="eu-central-1", threads=1)
        yield made
        made.close()


def _make(
    engine: DynamoEngine,
    *,
    key: list[dict[str, str]] = KEY,
    types: dict[str, str] = TYPES,
    index: dict[str, Any] | None = None,
) -> None:
    indexes: dict[str, Any] = {"GlobalSecondaryIndexes": [{"IndexName": INDEX, **index}]} if index else {}
    engine.connection.call(
        "CreateTable",
        TableName=engine.table,
        KeySchema=key,
        AttributeDefinitions=[{"AttributeName": n, "AttributeType": t} for n, t in types.items()],
        BillingMode="PAY_PER_REQUEST",
        **indexes,
    )


def _text(found: list[Difference]) -> str:
    return "\n".join(f"{one.what} -> {one.remedy}" for one in found)


def test_a_new_table_is_as_it_should_be(engine: DynamoEngine) -> None:
    told: list[str] = []
    assert create_table(engine, progress=told.append) == []
    assert check_table(engine) == []
    engine.check()
    table = engine.connection.call("DescribeTable", TableName="TaskTable")["Table"]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert table["KeySchema"] == KEY
    [index] = table["GlobalSecondaryIndexes"]
    assert (index["KeySchema"], index["Projection"]) == (INDEX_KEY, INCLUDE)
    expiry = engine.connection.call("DescribeTimeToLive", TableName="TaskTable")["TimeToLiveDescription"]
    assert (expiry["TimeToLiveStatus"], expiry["AttributeName"]) == ("ENABLED", "expireAt")
    assert "creating the table 'TaskTable' in region eu-central-1" in told
    assert any("time to live" in line for line in told)


def test_creating_again_changes_nothing(engine: DynamoEngine) -> None:
    create_table(engine)
    before = engine.connection.call("DescribeTable", TableName="TaskTable")["Table"]
    told: list[str] = []
    assert create_table(engine, progress=told.append) == []
    assert engine.connection.call("DescribeTable", TableName="TaskTable")["Table"] == before
    assert told == ["the table 'TaskTable' in region eu-central-1 exists"]


def test_creating_adds_what_a_table_lacks(engine: DynamoEngine) -> None:
    _make(engine, types={"taskId": "S"})
    assert "there is no index" in _text(check_table(engine))
    with pytest.raises(TableMissing, match="no index 'status-createdAt-index'"):
        engine.check()
    assert create_table(engine) == []
    engine.check()


def test_a_missing_table_is_told_with_region_and_remedy(engine: DynamoEngine) -> None:
    [difference] = check_table(engine)
    assert "'TaskTable' in region eu-central-1 does not exist" in difference.what
    assert "thunderagent table create" in difference.remedy
    for call in (engine.check, lambda: engine.get(["x"]), lambda: engine.page(Status.PENDING, limit=1)):
        with pytest.raises(
            TableMissing, match="eu-central-1 does not exist; create it with: thunderagent table create"
        ):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "what", "remedy", "is_warning"),
    [
        (
            lambda e: _make(
                e,
                key=[{"AttributeName": "id", "KeyType": "HASH"}],
                types={"id": "S", "status": "S", "createdAt": "N"},
                index={"KeySchema": INDEX_KEY, "Projection": INCLUDE},
            ),
            "the key of the table 'TaskTable' in region eu-central-1 is id (S), not taskId (S)",
            "name another table",
            False,
        ),
        (
            lambda e: _make(
                e,
                types={"taskId": "S", "status": "S", "createdAt": "S"},
                index={"KeySchema": INDEX_KEY, "Projection": INCLUDE},
            ),
            f"the key of the index {INDEX} is status (S), createdAt (S), not status (S), createdAt (N)",
            "delete the index",
            False,
        ),
        (
            lambda e: _make(e, index={"KeySchema": INDEX_KEY, "Projection": {"ProjectionType": "ALL"}}),
            f"the index {INDEX} projects ALL attributes: each heartbeat is billed twice",
            "delete the index",
            True,
        ),
        (
            lambda e: _make(e, index={"KeySchema": INDEX_KEY, "Projection": {"ProjectionType": "KEYS_ONLY"}}),
            f"the index {INDEX} does not project job, kind",
            "delete the index",
            False,
        ),
        (
            lambda e: _make(
                e,
                index={
                    "KeySchema": INDEX_KEY,
                    "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["job", "kind", "hb"]},
                },
            ),
            f"the index {INDEX} projects hb too: changing it is billed twice",
            "delete the index",
            True,
        ),
    ],
    ids=["table key", "index key", "projects all", "projects keys", "projects more"],
)
def test_each_wrong_key_and_projection_is_told(
    engine: DynamoEngine, make: Callable[[DynamoEngine], None], what: str, remedy: str, is_warning: bool
) -> None:
    make(engine)
    found = {one.what: one for one in create_table(engine)}
    assert list(found) == [what], "it is told even after a create, which cannot change it"
    assert remedy in found[what].remedy
    assert found[what].is_warning is is_warning


def test_time_to_live_that_is_off_or_elsewhere_is_told(engine: DynamoEngine) -> None:
    _make(engine, index={"KeySchema": INDEX_KEY, "Projection": INCLUDE})
    off, backups = check_table(engine)
    assert (off.what, off.is_warning) == ("time to live is off: ended tasks stay for ever", False)
    assert (backups.what, backups.is_warning) == ("point-in-time recovery is off", True)
    engine.connection.call(
        "UpdateTimeToLive",
        TableName="TaskTable",
        TimeToLiveSpecification={"Enabled": True, "AttributeName": "finishedAt"},
    )
    assert "time to live is on finishedAt, not expireAt" in [one.what for one in check_table(engine)]


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("describe_table", "allow dynamodb:DescribeTable"),
        ("describe_time_to_live", "allow dynamodb:DescribeTimeToLive"),
        ("describe_continuous_backups", "allow dynamodb:DescribeContinuousBackups"),
    ],
)
def test_a_call_that_is_not_permitted_is_a_difference(engine: DynamoEngine, action: str, told: str) -> None:
    create_table(engine)
    _deny(engine, action)
    [difference] = check_table(engine)
    assert told in difference.remedy


def _deny(engine: DynamoEngine, *actions: str, code: str = "AccessDeniedException") -> None:
    def denied(**arguments: Any) -> None:
        client = engine.connection.client
        with Stubber(client) as stub:
            stub.add_client_error(actions[0], code, "not authorized", 400)
            real[actions[0]](**arguments)

    real = {action: getattr(engine.connection.client, action) for action in actions}
    for action in actions:
        setattr(engine.connection.client, action, denied)


def test_without_the_permission_to_describe_the_check_asks_the_index(engine: DynamoEngine) -> None:
    create_table(engine)
    _deny(engine, "describe_table")
    engine.check()
    _deny(engine, "query")
    with pytest.raises(AccessDenied, match="dynamodb:Query on the table 'TaskTable'"):
        engine.check()


@pytest.mark.parametrize("action", ["update_time_to_live", "update_continuous_backups"])
def test_an_engine_that_lacks_expiry_or_backups_is_no_error(engine: DynamoEngine, action: str) -> None:
    _deny(engine, action, code="UnknownOperationException")
    told: list[str] = []
    [difference] = create_table(engine, progress=told.append)
    assert "is off" in difference.what
    assert any("could not be switched on" in line for line in told)
    engine.check()


def test_a_table_that_never_gets_ready_is_unavailable_after_the_wait(engine: DynamoEngine) -> None:
    create_table(engine)
    real = engine.connection.call

    def creating(action: str, **arguments: Any) -> dict[str, Any]:
        reply = real(action, **arguments)
        if action == "DescribeTable":
            reply["Table"]["TableStatus"] = "CREATING"
        return reply

    engine.connection.call = creating  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="CREATING"):
        create_table(engine, wait_s=0.0)
    with pytest.raises(StoreUnavailable, match="wait until it is ACTIVE"):
        engine.check()


def test_a_protected_table_is_not_deleted(engine: DynamoEngine) -> None:
    create_table(engine, deletion_protection=True)
    with pytest.raises(NotAllowed, match="--no-deletion-protection-enabled"):
        delete_table(engine)
    engine.check()


def test_protection_can_be_added_later(engine: DynamoEngine) -> None:
    create_table(engine)
    create_table(engine, deletion_protection=True)
    with pytest.raises(NotAllowed):
        delete_table(engine)


def test_a_table_without_protection_is_deleted_and_gone(engine: DynamoEngine) -> None:
    create_table(engine)
    delete_table(engine)
    with pytest.raises(TableMissing):
        engine.check()
    with pytest.raises(TableMissing):
        delete_table(engine)


@pytest.mark.ministack
def test_a_query_without_the_index_names_the_index_not_the_table(ministack_endpoint: str) -> None:
    engine = DynamoEngine("TableWithoutIndex", endpoint=ministack_endpoint)
    _make(engine, types={"taskId": "S"})
    with pytest.raises(TableMissing, match="no index 'status-createdAt-index'; see what is missing with"):
        engine.page(Status.PENDING, limit=1)
    delete_table(engine)
    engine.close()


@pytest.mark.ministack
def test_the_local_engine_has_everything(ministack_endpoint: str) -> None:
    engine = DynamoEngine("TableOfItsOwn", endpoint=ministack_endpoint)
    assert create_table(engine) == []
    assert create_table(engine) == []
    delete_table(engine)
    with pytest.raises(TableMissing, match=f"'TableOfItsOwn' in region us-east-1 at {ministack_endpoint}"):
        engine.check()
    engine.close()
