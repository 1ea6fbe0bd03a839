"""The doctor on DynamoDB: what is missing, denied, late or away is named, and nothing is left behind."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from tests.acceptance.proxy import Proxy
from tests.support.stands import Stand, patience
from thunderagent.model.clock import DateClock
from thunderagent.model.errors import AccessDenied
from thunderagent.ops.doctor.checks import Doctor, probe_row
from thunderagent.ops.doctor.dynamo import look_at_table, try_actions
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.ops.doctor.services import identify, look_at_bucket, look_at_metrics, look_at_queue
from thunderagent.ops.iam import INDEX_ACTIONS, TABLE_ACTIONS, Role
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.errors import Place
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.s3 import PREFIX

ACTIONS: Final = ("PutItem", "GetItem", "BatchGetItem", "Query", "UpdateItem", "PartiQLInsert", "DeleteItem")
PLACE: Final = Place("TaskTable", "eu-central-1")


@pytest.fixture
def engine() -> Iterator[DynamoEngine]:
    with mock_aws():
        made = DynamoEngine("TaskTable", region="eu-central-1", threads=1)
        yield made
        made.close()


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    file = tmp_path / "supervisord.conf"
    file.write_text(
        "[program:agent]\ncommand=thunderagent run jobs\nstopwaitsecs=45\nautorestart=true\nstopasgroup=true\n"
    )
    return file


def deny(monkeypatch: pytest.MonkeyPatch, engine: DynamoEngine, *denied: str) -> list[str]:
    """Let a connection refuse these actions, as IAM does; the answer lists what was asked."""
    real, asked = engine.connection.call, list[str]()

    def call(action: str, **arguments: Any) -> dict[str, Any]:
        asked.append("PartiQLInsert" if action == "BatchExecuteStatement" else action)
        if asked[-1] in denied:
            raise AccessDenied(f"not allowed: dynamodb:{asked[-1]} on {engine.connection.place}")
        return real(action, **arguments)

    monkeypatch.setattr(engine.connection, "call", call)
    return asked


def by_check(found: Iterator[Finding]) -> dict[str, list[Finding]]:
    told: dict[str, list[Finding]] = {}
    for one in found:
        told.setdefault(one.check, []).append(one)
    return told


def states(found: list[Finding]) -> list[State]:
    return [one.state for one in found]


def rows_of(engine: DynamoEngine) -> int:
    return int(engine.connection.call("Scan", TableName=engine.table)["Count"])


# The table


def test_a_good_table_is_found_good(dynamo_stand: Stand) -> None:
    found = by_check(look_at_table(dynamo_stand.dynamo))
    assert set(found) == {"table", "index", "billing", "time to live", "point-in-time recovery"}
    assert State.WRONG not in [one.state for all_ in found.values() for one in all_]
    assert found["table"][0].found.endswith("is ACTIVE")
    assert found["billing"] == [Finding("billing", State.OK, "on demand")]


def test_time_to_live_and_backups_that_are_off_are_named(engine: DynamoEngine) -> None:
    create_table(engine)
    off = {"Enabled": False, "AttributeName": "expireAt"}
    engine.connection.call("UpdateTimeToLive", TableName=engine.table, TimeToLiveSpecification=off)
    never = {"PointInTimeRecoveryEnabled": False}
    engine.connection.call("UpdateContinuousBackups", TableName=engine.table, PointInTimeRecoverySpecification=never)
    found = by_check(look_at_table(engine))
    assert states(found["time to live"]) == [State.WRONG]
    assert "ended tasks stay for ever" in found["time to live"][0].found
    assert "thunderagent table create" in found["time to live"][0].remedy
    assert states(found["point-in-time recovery"]) == [State.WARNING]


def test_an_index_that_is_missing_is_named_once_and_is_no_matter_of_permissions(engine: DynamoEngine) -> None:
    engine.connection.call(
        "CreateTable",
        TableName=engine.table,
        KeySchema=[{"AttributeName": "taskId", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "taskId", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    found = by_check(look_at_table(engine))
    assert states(found["index"]) == [State.WRONG]
    assert "add it with: thunderagent table create" in found["index"][0].remedy
    assert [one.state for one in try_actions(engine, probe_row(time.time()))] == [State.OK]


def test_provisioned_capacity_is_a_warning(engine: DynamoEngine) -> None:
    create_table(engine)
    units = {"ReadCapacityUnits": 5, "WriteCapacityUnits": 7}
    indexes = [{"Update": {"IndexName": "status-createdAt-index", "ProvisionedThroughput": units}}]
    engine.connection.call(
        "UpdateTable",
        TableName=engine.table,
        BillingMode="PROVISIONED",
        ProvisionedThroughput=units,
        GlobalSecondaryIndexUpdates=indexes,
    )
    [found] = by_check(look_at_table(engine))["billing"]
    assert found.state is State.WARNING
    assert "5 read and 7 write units" in found.found
    assert "--billing-mode PAY_PER_REQUEST" in found.remedy


def test_a_table_that_may_not_be_described_is_a_warning_as_agents_need_no_more(
    engine: DynamoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(engine)
    deny(monkeypatch, engine, "DescribeTable")
    [found] = look_at_table(engine)
    assert found.state is State.WARNING
    assert '"Action": "dynamodb:DescribeTable"' in found.remedy


# Permissions


def test_what_is_tried_is_what_the_policy_of_an_agent_allows() -> None:
    """Looking at the table is tried by the check of the table, and an agent can do without."""
    allowed = TABLE_ACTIONS[Role.AGENT] | INDEX_ACTIONS[Role.AGENT]
    assert set(ACTIONS) == allowed - {"DescribeTable"}


def test_every_action_of_an_agent_is_tried_and_nothing_is_left_behind(
    dynamo_stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dynamo_stand.dynamo
    before, asked = rows_of(engine), deny(monkeypatch, engine)
    [found] = try_actions(engine, probe_row(engine.clock.now()))
    assert found.state is State.OK
    assert tuple(asked) == ACTIONS
    assert rows_of(engine) == before


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_each_denied_action_is_named_with_the_line_that_the_policy_lacks(
    engine: DynamoEngine, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(engine)
    asked = deny(monkeypatch, engine, action)
    found, *left = try_actions(engine, probe_row(time.time()))
    assert found.state is State.WRONG
    assert f"dynamodb:{action} is denied" in found.found
    statement = json.loads(found.remedy.partition(": ")[2])
    resource = "arn:aws:dynamodb:eu-central-1:*:table/TaskTable"
    index = "/index/status-createdAt-index" if action == "Query" else ""
    assert statement == {"Effect": "Allow", "Action": f"dynamodb:{action}", "Resource": resource + index}
    assert set(asked) == set(ACTIONS)
    assert rows_of(engine) == len(left) == (action == "DeleteItem")


def test_a_row_that_may_not_be_deleted_is_named_and_ends_by_itself(
    engine: DynamoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(engine)
    deny(monkeypatch, engine, "DeleteItem")
    row = probe_row(time.time())
    found = list(try_actions(engine, row))
    assert states(found) == [State.WRONG, State.WARNING]
    assert row["taskId"] in found[-1].found
    left = engine.get([row["taskId"]])[row["taskId"]]
    assert time.time() < left["expireAt"] < time.time() + 7200
    assert "status" not in left


def test_a_probe_that_is_interrupted_leaves_nothing_behind(
    engine: DynamoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(engine)
    deny(monkeypatch, engine, "GetItem")
    found = try_actions(engine, probe_row(time.time()))
    assert "GetItem" in next(found).found
    assert rows_of(engine) == 1
    assert isinstance(found, Generator)
    found.close()
    assert rows_of(engine) == 0


# The whole examination


def test_a_missing_table_is_named_and_what_rests_on_it_is_skipped(engine: DynamoEngine, conf: Path) -> None:
    doctor = Doctor(store=engine.url, supervisor_conf=conf, opening=lambda url: engine)
    found = by_check(doctor.examine())
    assert states(found["table"]) == [State.WRONG]
    assert "does not exist" in found["table"][0].found
    assert found["table"][0].remedy == "thunderagent table create"
    assert found["latency"] == [Finding("latency", State.SKIPPED, "see above")]
    assert "permissions" not in found or State.WRONG not in states(found["permissions"])
    assert doctor.is_reachable
    assert found["clock"]


def test_everything_is_well_on_a_dynamodb(dynamo_stand: Stand, conf: Path) -> None:
    engine = dynamo_stand.dynamo
    before = rows_of(engine)
    doctor = Doctor(store=engine.url, supervisor_conf=conf, opening=lambda url: engine)
    found = by_check(doctor.examine())
    wrong = [one for all_ in found.values() for one in all_ if one.state is State.WRONG]
    assert wrong == []
    assert states(found["permissions"]) == [State.OK]
    assert states(found["latency"]) == [State.OK]
    assert states(found["queues"]) == [State.OK]
    assert rows_of(engine) == before


@pytest.mark.parametrize(
    ("ahead_s", "state", "says"),
    [
        (0.0, State.OK, "0.0 s"),
        (20.0, State.WARNING, "20.0 s ahead"),
        (-20.0, State.WARNING, "20.0 s behind"),
        (600.0, State.WRONG, "AWS refuses requests that are five minutes off"),
    ],
)
def test_a_clock_that_is_off_is_named(
    engine: DynamoEngine, conf: Path, ahead_s: float, state: State, says: str
) -> None:
    create_table(engine)
    clock = DateClock(host=lambda: time.time() + ahead_s)
    for _ in range(2):
        now = time.monotonic()
        half = datetime.now(UTC) - timedelta(seconds=0.5)
        clock.observe(f"{half:%a, %d %b %Y %H:%M:%S} GMT", sent=now, received=now)
    engine.connection.clock = clock
    engine.connection._note_received = lambda **_: None  # type: ignore[method-assign] # moto tells its own time
    clock._low, clock._high, clock._at = (
        time.time() - time.monotonic(),
        time.time() - time.monotonic(),
        time.monotonic(),
    )
    doctor = Doctor(store=engine.url, supervisor_conf=conf, opening=lambda url: engine)
    doctor._engine = engine
    [found] = doctor._clock()
    assert found.state is state
    assert says in found.found


@pytest.mark.slow
@pytest.mark.ministack
def test_an_endpoint_that_swallows_everything_ends_the_examination_in_seconds(
    ministack_endpoint: str, conf: Path
) -> None:
    proxy = Proxy(ministack_endpoint)
    proxy.hang()
    try:
        begin = time.monotonic()
        url = f"dynamodb://TaskTable?region=eu-central-1&endpoint={proxy.endpoint}"
        doctor = Doctor(store=url, supervisor_conf=conf)
        found = by_check(doctor.examine())
        assert time.monotonic() - begin < 30.0 * patience()
    finally:
        proxy.off()
    assert not doctor.is_reachable
    assert states(found["table"]) == [State.WRONG]
    assert "no answer to DescribeTable" in found["table"][0].found
    assert "security group" in found["table"][0].remedy
    assert states(found["permissions"]) == states(found["latency"]) == states(found["queues"]) == [State.SKIPPED]
    assert states(found["python"]) == [State.OK]


@pytest.mark.slow
@pytest.mark.ministack
def test_expired_credentials_are_named(ministack_endpoint: str, conf: Path) -> None:
    proxy = Proxy(ministack_endpoint)
    proxy.expire()
    try:
        url = f"dynamodb://TaskTable?region=eu-central-1&endpoint={proxy.endpoint}"
        found = by_check(Doctor(store=url, supervisor_conf=conf).examine())
    finally:
        proxy.off()
    assert "expired or unknown" in found["table"][0].found


# Who we are


class Session:
    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def get_credentials(self) -> Any:
        return self._credentials


class Credentials:
    method = "shared-credentials-file"


class Passing(Credentials):
    @property
    def _expiry_time(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=90)


class Service:
    """A client whose every call ends in the same way."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return call


def refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "for a test"}}, "Test")


AWAY: Final = EndpointConnectionError(endpoint_url="https://service.test/")
ARN: Final = "arn:aws:iam::123456789012:role/agent"


@pytest.mark.parametrize(
    ("credentials", "answer", "state", "says"),
    [
        (None, None, State.WRONG, "there are no AWS credentials"),
        (Credentials(), {"Arn": ARN}, State.OK, f"{ARN} from shared-credentials-file"),
        (Passing(), {"Arn": ARN}, State.WARNING, "for 1 min more"),
        (Credentials(), refusal("ExpiredToken"), State.WRONG, "expired or unknown"),
        (Credentials(), refusal("InvalidClientTokenId"), State.WRONG, "expired or unknown"),
        (Credentials(), AWAY, State.WARNING, "STS does not answer"),
    ],
)
def test_credentials_are_named_with_their_source(credentials: Any, answer: Any, state: State, says: str) -> None:
    [found] = identify(PLACE, lambda name: Service(answer), session=lambda: Session(credentials))
    assert found.state is state
    assert says in found.found
    assert bool(found.remedy) is (state is not State.OK)


def test_a_local_engine_is_asked_for_no_credentials() -> None:
    place = Place("TaskTable", None, "http://127.0.0.1:4566")
    [found] = identify(place, lambda name: pytest.fail("nobody is to be asked"))
    assert found.state is State.SKIPPED


# What is around the table


def moto_clients(name: str) -> Any:
    return boto3.client(name, region_name="us-east-1")


def test_a_wake_queue_is_looked_at_and_left_as_it_was() -> None:
    with mock_aws():
        sqs = moto_clients("sqs")
        url = sqs.create_queue(QueueName="thunderagent")["QueueUrl"]
        [found] = look_at_queue(url, moto_clients)
        assert found.state is State.OK
        assert "about 0 messages" in found.found
        assert "Messages" not in sqs.receive_message(QueueUrl=url)
        [found] = look_at_queue(url + "-of-nobody", moto_clients)
        assert (found.state, found.found) == (State.WRONG, f"{url}-of-nobody does not exist")


def test_each_denied_action_of_the_wake_queue_is_named() -> None:
    url = "https://sqs.eu-central-1.amazonaws.com/123456789012/thunderagent"
    found = list(look_at_queue(url, lambda name: Service(refusal("AccessDenied"))))
    assert states(found) == [State.WRONG] * 4
    assert [one.found.split()[0] for one in found] == [
        "sqs:ReceiveMessage",
        "sqs:SendMessage",
        "sqs:DeleteMessage",
        "sqs:ChangeMessageVisibility",
    ]
    assert '"Resource": "arn:aws:sqs:*:123456789012:thunderagent"' in found[0].remedy
    [away] = look_at_queue(url, lambda name: Service(AWAY))
    assert away.state is State.WARNING


@pytest.mark.slow
def test_a_bucket_is_looked_at_and_left_as_it_was() -> None:
    with mock_aws():
        s3 = moto_clients("s3")
        s3.create_bucket(Bucket="texts")
        [found] = look_at_bucket("texts", moto_clients, PREFIX)
        assert found.state is State.OK
        assert "Contents" not in s3.list_objects_v2(Bucket="texts")
        [found] = look_at_bucket("texts-of-nobody", moto_clients, PREFIX)
        assert found.state is State.WRONG
        assert "NoSuchBucket" in found.found


class Bucket:
    """S3 as far as it looks at checksums."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def put_object(self, *, Body: bytes, ContentMD5: str, **_: Any) -> None:
        self.asked.append("put")
        assert base64.b64decode(ContentMD5) != hashlib.md5(Body, usedforsecurity=False).digest()
        raise refusal("BadDigest")

    def get_object(self, **_: Any) -> None:
        self.asked.append("get")
        raise refusal("AccessDenied")


def test_what_is_put_into_a_bucket_is_refused_for_its_checksum() -> None:
    """So nothing is there to be deleted, which an agent need not be allowed to do."""
    bucket = Bucket()
    [found] = look_at_bucket("texts", lambda name: bucket, PREFIX)
    assert bucket.asked == ["put", "get"]
    assert found.state is State.WARNING  # what is not there is also denied to whoever may not list
    assert "is unknown without s3:ListBucket" in found.found


def test_a_denied_bucket_is_named() -> None:
    [found] = look_at_bucket("texts", lambda name: Service(refusal("AccessDenied")), PREFIX)
    assert found.state is State.WRONG
    assert "s3:PutObject is denied" in found.found
    assert '"Resource": "arn:aws:s3:::texts/thunderagent/*"' in found.remedy
    [found] = look_at_bucket("texts", lambda name: Service(AWAY), PREFIX)
    assert "does not answer" in found.found


def test_metrics_that_may_not_be_sent_are_named() -> None:
    [found] = look_at_metrics("ThunderAgent", lambda name: Service(refusal("AccessDenied")))
    assert found.state is State.WRONG
    assert '"cloudwatch:namespace": "ThunderAgent"' in found.remedy
    [found] = look_at_metrics("ThunderAgent", lambda name: Service(refusal("InvalidParameterCombination")))
    assert found.state is State.OK
    [found] = look_at_metrics("ThunderAgent", lambda name: Service(AWAY))
    assert found.state is State.WARNING
