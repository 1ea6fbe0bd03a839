"""The WebSocket API and its canary as they were deployed: real clients, real functions, and policies that count."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.infra.rendering import ROOT
from tests.infra.websocket_stack import (
    BUCKET,
    NAMESPACE,
    REGION,
    STATE,
    WAIT_S,
    Client,
    Cloud,
    client_of,
    strict_engine,
)
from tests.support.connections import run
from tests.support.stands import eventually
from tests.websocket_api.client.support import until
from thunderagent.model.errors import AccessDenied, MessageTooLarge
from thunderagent.websocket_api.client import Client as ResilientClient
from thunderagent.websocket_api.client import ClientOptions
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.protocol import FRAME_BYTES, MESSAGE_BYTES, Joiner, encode, frames
from thunderagent.websocket_api.push import make_pusher
from thunderagent.websocket_api.server.connections import FLOOD_CONNECTS
from thunderagent.websocket_api.server.throttle import CONNECT_RATE

sys.path.insert(0, str(ROOT / "scripts"))

from deployment.package import build, upload

pytestmark = [pytest.mark.ministack, pytest.mark.processes]

API: Final = "T-wsapi"
WATCH: Final = "T-failover"
SOON_S: Final = 30.0


@dataclass(slots=True)
class Place:
    """What was deployed."""

    cloud: Cloud
    outputs: dict[str, str]
    folder: Path

    def client(self, user: str, **how: Any) -> AbstractContextManager[Client]:
        return client_of(self.outputs["WebSocketUrl"], self.cloud.issuer.token(user), **how)

    @property
    def connections(self) -> str:
        return self.outputs["ConnectionTableName"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The API with its functions, deployed from the template as it is."""
    folder = tmp_path_factory.mktemp("cloud")
    package = build(folder / "lambda.zip", local=True)
    with strict_engine(folder) as endpoint:
        cloud = Cloud(endpoint)
        s3 = cloud.aws("s3")
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        outputs = cloud.deploy(
            API,
            "wsapi",
            CodeBucket=BUCKET,
            CodeKey=upload(package, BUCKET, s3),
            TokenIssuer=cloud.issuer.issuer,
            TokenAudience=cloud.issuer.audience,
            Jwks=cloud.issuer.jwks,
            Endpoint=endpoint,
            DeletionPolicy="Delete",
            DeletionProtection="false",
        )
        try:
            yield Place(cloud, outputs, folder)
        finally:
            cloud.close()


@pytest.fixture
def user() -> str:
    """A user whom no other test has."""
    return f"user-{uuid.uuid4().hex[:8]}"


def test_every_resource_of_the_stack_is_there(place: Place) -> None:
    resources = place.cloud.resources(API)
    assert len(resources) > 20
    assert [name for name, physical in resources.items() if not physical] == []
    assert place.outputs["StateTableName"] == STATE


@pytest.mark.parametrize("as_subprotocol", [False, True], ids=["header", "subprotocol"])
def test_a_client_saves_its_state_and_finds_it_again_over_another_connection(
    place: Place, user: str, as_subprotocol: bool
) -> None:
    change = str(uuid.uuid4())
    with place.client(user, as_subprotocol=as_subprotocol) as client, place.client(user) as other:
        empty = client.ask(action="getState", id=1, known_version=0)
        assert (empty["type"], empty["state"], empty["version"]) == ("state", {}, 0)
        assert empty["region"] == REGION
        saved = client.ask(action="setState", id=2, version=0, patch={"cart": ["tea"]}, change=change)
        assert (saved["type"], saved["id"], saved["version"]) == ("saved", 2, 1)
        assert other.receive().items() >= {"type": "changed", "version": 1, "patch": {"cart": ["tea"]}}.items()
        assert client.ask(action="setState", id=3, version=0, patch={"cart": ["tea"]}, change=change)["version"] == 1
        conflict = client.ask(action="setState", id=4, version=0, patch={"cart": []}, change=str(uuid.uuid4()))
        assert (conflict["type"], conflict["state"], conflict["version"]) == ("conflict", {"cart": ["tea"]}, 1)
        assert client.ask(action="ping", id=5) == {"type": "pong", "id": 5, "region": REGION}
    with place.client(user) as client:
        found = client.ask(action="getState", id=1, known_version=7)
        assert (found["state"], found["version"], found["client_ahead"]) == ({"cart": ["tea"]}, 1, True)
    row = place.cloud.row(STATE, f"user:{user}")
    assert row is not None
    assert (json.loads(row["payload"]), row["fence"], row["lastAgent"]) == ({"cart": ["tea"]}, "1", REGION)


def test_what_the_api_does_not_know_is_answered_and_ends_no_connection(place: Place, user: str) -> None:
    with place.client(user) as client:
        unknown = client.ask(action="dance", id=1)
        assert (unknown["type"], unknown["error"], unknown["id"]) == ("error", "unknown_route", 1)
        client.socket.send("no JSON")
        assert client.receive()["error"] == "bad_request"
        assert client.ask(action="ping", id=2)["type"] == "pong"


def test_a_connection_has_its_rows_while_it_lasts(place: Place, user: str) -> None:
    with place.client(user) as client:
        client.ask(action="ping", id=1)
        listed = place.cloud.row(place.connections, f"connections:{user}")
        assert listed is not None
        [connection] = listed["holders"]
        row = place.cloud.row(place.connections, f"connection:{connection}")
        assert row is not None
        assert row["heldBy"] == user
        assert int(row["expireAt"]) > 0
    eventually(lambda: f"connection:{connection}" not in place.cloud.rows(place.connections), SOON_S)
    left = place.cloud.row(place.connections, f"connections:{user}")
    assert left is None or "holders" not in left
    assert not [one for one in place.cloud.rows(STATE) if one.startswith("connection")]


def test_the_resilient_client_goes_on_with_its_state_when_the_api_has_ended_its_connection(
    place: Place, user: str
) -> None:
    """As API Gateway does to every connection after two hours."""
    management = place.cloud.aws("apigatewaymanagementapi", place.outputs["PushEndpoint"])
    tokens: list[str] = []

    def token(attempt: object) -> str:
        tokens.append(place.cloud.issuer.token(user))
        return tokens[-1]

    def end_connection() -> None:
        listed = place.cloud.row(place.connections, f"connections:{user}")
        assert listed is not None
        for connection in listed["holders"]:
            management.delete_connection(ConnectionId=connection)

    async def story() -> None:
        options = ClientOptions(proxy=False, backoff_base_s=0.1, backoff_cap_s=0.5)
        async with ResilientClient(place.outputs["WebSocketUrl"], token, options=options) as client:
            assert await client.set({"a": 1}, timeout_s=WAIT_S) == 1
            await asyncio.to_thread(end_connection)
            await until(lambda: len(tokens) > 1 and client.is_connected, WAIT_S)
            assert await client.set({"b": 2}, timeout_s=WAIT_S) == 2
            assert await client.get(WAIT_S) == {"a": 1, "b": 2}
            assert client.region == REGION

    run(story(), limit_s=3 * WAIT_S)


@pytest.mark.parametrize("wrong", ["none", "expired", "audience", "key", "query"], ids=lambda name: name)
def test_nobody_connects_without_a_good_token(place: Place, user: str, wrong: str) -> None:
    url, issuer = place.outputs["WebSocketUrl"], place.cloud.issuer
    token: str | None = None
    match wrong:
        case "expired":
            token = issuer.token(user, expires_s=-3600)
        case "audience":
            token = issuer.token(user, aud="another")
        case "key":
            token = Issuer().token(user)
        case "query":
            url = f"{url}?token={issuer.token(user)}"
    with pytest.raises(InvalidStatus) as refused, client_of(url, token):
        pass
    # The engine makes 500 of what AWS answers with 401.
    assert refused.value.response.status_code in (401, 403, 500)
    assert f"connections:{user}" not in place.cloud.rows(place.connections)


def test_messages_over_a_frame_travel_in_chunks_both_ways_and_over_the_limit_are_refused(
    place: Place, user: str
) -> None:
    text = "ü" * 30_000
    with place.client(user) as client:
        message = {"action": "setState", "id": 1, "version": 0, "change": "c-1", "patch": {"text": text}}
        pieces = frames(encode(message), "m-1", to_server=True)
        assert len(pieces) > 1
        for piece in pieces:
            assert len(piece.encode()) <= FRAME_BYTES
            client.socket.send(piece)
        assert client.receive()["type"] == "saved"

        client.socket.send(encode({"action": "getState", "id": 2, "known_version": 1}))
        joiner, whole, count = Joiner(), None, 0
        while whole is None:
            raw = client.socket.recv(30)
            assert len(raw.encode() if isinstance(raw, str) else raw) <= FRAME_BYTES
            count += 1
            whole = joiner.add(json.loads(raw))
        assert count > 1
        assert json.loads(whole)["state"] == {"text": text}

        large = {"action": "setState", "id": 3, "version": 1, "change": "c-2", "patch": {"text": "x" * MESSAGE_BYTES}}
        client.socket.send(encode(large))  # the engine takes such a frame, and the function must not
        answer = client.receive()
        assert (answer["type"], answer["error"]) == ("error", "too_large")
        too_much = {"action": "setState", "id": 4, "version": 1, "change": "c-3", "patch": {"more": "y" * 65_000}}
        for piece in frames(encode(too_much), "m-2", to_server=True):
            client.socket.send(piece)
        answer = client.receive()
        assert (answer["type"], answer["error"]) == ("error", "too_large")
        assert client.ask(action="ping", id=5)["type"] == "pong"


def test_a_job_with_the_push_policy_reaches_every_connection_of_a_user_and_nothing_else(
    place: Place, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"pusher-{user}"
    for variable, value in place.cloud.restricted(name, place.outputs["PushPolicyArn"]).items():
        monkeypatch.setenv(variable, value)
    store = f"{place.outputs['ConnectionStore']}&endpoint={place.cloud.endpoint}"
    pusher = make_pusher(place.outputs["PushEndpoint"], store)
    try:
        assert pusher.push(user, {"order": 0}) == 0
        with place.client(user) as one, place.client(user) as two:
            assert pusher.push(user, {"order": 1}) == 2
            for client in (one, two):
                assert client.receive().items() >= {"type": "push", "message": {"order": 1}}.items()
            with pytest.raises(MessageTooLarge):
                pusher.push(user, "x" * MESSAGE_BYTES)
            assert one.ask(action="ping", id=1)["type"] == "pong"  # nothing came before it

        # A connection that is gone loses its rows with the next push.
        dynamo = place.cloud.aws("dynamodb")
        key = {"taskId": {"S": f"connections:{user}"}}
        eventually(lambda: "holders" not in (place.cloud.row(place.connections, key["taskId"]["S"]) or {}), SOON_S)
        dynamo.put_item(TableName=place.connections, Item={"taskId": {"S": "connection:gone"}, "heldBy": {"S": user}})
        dynamo.put_item(TableName=place.connections, Item=key | {"holders": {"SS": ["gone"]}})
        assert pusher.push(user, {"order": 2}) == 0
        assert "connection:gone" not in place.cloud.rows(place.connections)
        assert "holders" not in (place.cloud.row(place.connections, f"connections:{user}") or {})
    finally:
        pusher.close()

    states = make_pusher(place.outputs["PushEndpoint"], f"dynamodb://{STATE}?region={REGION}&endpoint="
                         f"{place.cloud.endpoint}")  # fmt: skip
    try:
        with pytest.raises(AccessDenied):
            states.push(user, {})
    finally:
        states.close()


def test_a_client_that_sends_too_much_is_told_and_then_disconnected(place: Place, user: str) -> None:
    place.cloud.deploy(API, "wsapi", UserRate="1", UserBurst="10")
    replies: list[dict[str, Any]] = []
    try:
        with place.client(user) as client, pytest.raises(ConnectionClosed):
            while len(replies) < 1000:
                replies.append(client.ask(action="ping", id=len(replies)))
        row = place.cloud.row(place.connections, f"connections:{user}")
    finally:
        place.cloud.deploy(API, "wsapi", UserRate="50", UserBurst="250")
    assert {one["type"] for one in replies} == {"pong", "error"}
    assert {(one["error"], one["retry_after_s"] > 0) for one in replies if "error" in one} == {("throttled", True)}
    assert [one["id"] for one in replies] == list(range(len(replies)))
    assert row is not None
    assert float(row["handoffUntil"]) >= 1000 * (float(row["updatedAt"]) + FLOOD_CONNECTS / CONNECT_RATE)


def test_the_functions_used_every_permission_that_they_have(place: Place, user: str) -> None:
    """What they lack would have failed above, as the engine gives them the credentials of their roles."""
    with place.client(user) as client:
        client.ask(action="setState", id=1, version=0, patch={"a": 1}, change="c-1")
        client.ask(action="setState", id=2, version=1, patch={"a": 2}, change="c-2")
        client.ask(action="getState", id=3)
        for piece in frames(encode({"action": "ping", "id": "p" * 50, "x": "y" * 40_000}), "m", to_server=True):
            client.socket.send(piece)
        client.receive()
    eventually(lambda: not (place.cloud.row(place.connections, f"connections:{user}") or {}).get("holders"), SOON_S)
    role = place.cloud.resources(API)["HandlerRole"]
    document = place.cloud.aws("iam").get_role_policy(RoleName=role, PolicyName="wsapi")["PolicyDocument"]
    statements = {one["Sid"]: one for one in document["Statement"]}
    assert set(statements) == {"Logs", "State", "Connections", "Push"}
    key = place.cloud.key_of(place.outputs["HandlerFunctionName"])
    actions = {action for sid in ("State", "Connections") for action in statements[sid]["Action"]}
    unused = {action for action in actions if not place.cloud.was_called(action, key)}
    assert unused == set()
    assert statements["Push"]["Action"] == "execute-api:ManageConnections"  # used by the replies in chunks
    authorizer = place.cloud.key_of(place.outputs["AuthorizerFunctionName"])
    assert not any(place.cloud.was_called(action, authorizer) for action in actions)


def test_the_canary_tells_how_the_api_does_and_its_alarm_follows_both_ways(place: Place) -> None:
    cloud = place.cloud
    secrets = cloud.aws("secretsmanager")
    secret = f"canary-{REGION}"
    secrets.create_secret(Name=secret, SecretString=cloud.issuer.token("canary"))
    outputs = cloud.deploy(
        WATCH,
        "failover",
        CodeBucket=BUCKET,
        CodeKey=str(cloud.aws("s3").list_objects_v2(Bucket=BUCKET)["Contents"][0]["Key"]),
        RegionalUrl=place.outputs["RegionalUrl"],
        TokenSecret="canary",
        Namespace=NAMESPACE,
        Endpoint=cloud.endpoint,
    )
    assert [name for name, physical in cloud.resources(WATCH).items() if not physical] == []
    # The function is called here; the schedule, which is there, would come in between.
    rule = cloud.resources(WATCH)["CanarySchedule"].rpartition("|")[2]
    assert cloud.aws("events").describe_rule(Name=rule)["State"] == "ENABLED"
    [target] = cloud.aws("events").list_targets_by_rule(Rule=rule)["Targets"]
    assert target["Arn"].endswith(f":function:{outputs['CanaryFunctionName']}")
    cloud.aws("events").disable_rule(Name=rule)
    cloud.forget_conditions(cloud.resources(WATCH)["CanaryRole"], "canary")
    function, alarm = outputs["CanaryFunctionName"], outputs["CanaryAlarmName"]
    metrics = cloud.aws("cloudwatch")

    def look(expected: bool) -> str:
        if expected:
            with place.client(
                "other"
            ):  # a function that starts afresh takes longer on a busy machine than a canary waits
                pass
        did, answer = cloud.invoke(function)
        assert did, answer
        [probe] = answer["probes"]
        assert (answer["observer"], probe["target"], probe["ok"]) == (REGION, REGION, expected), answer
        [found] = metrics.describe_alarms(AlarmNames=[alarm])["MetricAlarms"]
        return str(found["StateValue"])

    assert look(expected=True) == "OK"
    [told] = metrics.list_metrics(Namespace=NAMESPACE, MetricName="CanaryHealthy")["Metrics"]
    [found] = metrics.describe_alarms(AlarmNames=[alarm])["MetricAlarms"]
    by_name = {one["Name"]: one["Value"] for one in told["Dimensions"]}
    assert by_name == {one["Name"]: one["Value"] for one in found["Dimensions"]}
    assert (told["Namespace"], told["MetricName"]) == (found["Namespace"], found["MetricName"])
    assert (found["TreatMissingData"], found["EvaluationPeriods"]) == ("breaching", 2)

    secrets.put_secret_value(SecretId=secret, SecretString=Issuer().token("canary"))  # in time, and not for this API
    assert look(expected=False) == "ALARM"  # one of two looks did: half is not enough
    secrets.put_secret_value(SecretId=secret, SecretString=cloud.issuer.token("canary"))
    assert any(look(expected=True) == "OK" for _ in range(8))
    secrets.put_secret_value(SecretId=secret, SecretString=cloud.issuer.token("canary", expires_s=-3600))
    assert look(expected=False) == "OK"  # a token that is over moves nothing, and is told
    [told] = metrics.list_metrics(Namespace=NAMESPACE, MetricName="CanaryBlind")["Metrics"]
    [found] = metrics.describe_alarms(AlarmNames=[cloud.resources(WATCH)["BlindAlarm"]])["MetricAlarms"]
    assert (found["MetricName"], found["Dimensions"]) == ("CanaryBlind", told["Dimensions"])
    state = cloud.row(STATE, "user:canary")
    assert state is not None

    key = cloud.key_of(function)
    assert cloud.was_called("secretsmanager:GetSecretValue", key)
    assert cloud.was_called("cloudwatch:PutMetricData", key)
    assert cloud.delete(WATCH) == "DELETE_COMPLETE"


def test_new_code_is_deployed_by_an_update_which_keeps_the_state(place: Place, user: str, tmp_path: Path) -> None:
    with place.client(user) as client:
        client.ask(action="setState", id=1, version=0, patch={"a": 1}, change="c-1")
    (tmp_path / "release.txt").write_text("2", encoding="utf-8")
    package = build(tmp_path / "lambda.zip", local=True, extra=[tmp_path])
    key = upload(package, BUCKET, place.cloud.aws("s3"))
    before = place.cloud.resources(API)
    outputs = place.cloud.deploy(API, "wsapi", CodeKey=key, LogDays="7")
    assert outputs == place.outputs
    assert place.cloud.resources(API) == before
    code = place.cloud.aws("lambda").get_function(FunctionName=outputs["HandlerFunctionName"])["Configuration"]
    assert code["CodeSize"] == package.packed
    logs = place.cloud.aws("logs").describe_log_groups(logGroupNamePrefix=before["HandlerLog"])["logGroups"]
    assert [one["retentionInDays"] for one in logs] == [7]
    with place.client(user) as client:
        assert client.ask(action="getState", id=1)["state"] == {"a": 1}


def test_a_stack_with_a_replica_and_a_domain_works_too_and_leaves_nothing_when_it_is_deleted(place: Place) -> None:
    cloud = place.cloud
    certificate = cloud.aws("acm").request_certificate(DomainName="ws.example.com")["CertificateArn"]
    outputs = cloud.deploy(
        "T-second",
        "wsapi",
        CodeBucket=BUCKET,
        CodeKey=str(cloud.aws("s3").list_objects_v2(Bucket=BUCKET)["Contents"][0]["Key"]),
        TokenIssuer=cloud.issuer.issuer,
        TokenAudience=cloud.issuer.audience,
        Jwks=cloud.issuer.jwks,
        StateTableName="Replicated",
        ReplicaRegion="eu-west-1",
        DeletionPolicy="Delete",
        DeletionProtection="false",
        DomainName="ws.example.com",
        CertificateArn=certificate,
        AccountLogRole="present",
        Endpoint=cloud.endpoint,
    )
    resources = cloud.resources("T-second")
    assert [name for name, physical in resources.items() if not physical] == []
    assert {"UserStateGlobal", "Domain", "DomainMapping"} <= set(resources)
    assert outputs["WebSocketUrl"] == "wss://ws.example.com/"
    assert outputs["RegionalUrl"].startswith("ws://127.0.0.1:")
    assert outputs["RegionalDomainName"]
    with client_of(outputs["RegionalUrl"], cloud.issuer.token("somebody")) as client:
        assert client.ask(action="setState", id=1, version=0, patch={"a": 1}, change="c-1")["type"] == "saved"
    assert "user:somebody" in cloud.rows("Replicated")
    assert "user:somebody" not in cloud.rows(STATE)
    assert cloud.delete("T-second") == "DELETE_COMPLETE"
    left = [*cloud.aws("dynamodb").list_tables()["TableNames"]]
    left += [one["FunctionName"] for one in cloud.aws("lambda").list_functions()["Functions"]]
    left += [one["RoleName"] for one in cloud.aws("iam").list_roles()["Roles"]]
    left += [one["logGroupName"] for one in cloud.aws("logs").describe_log_groups()["logGroups"]]
    assert [name for name in left if name == "Replicated" or "T-second" in name] == []
    assert outputs["ApiId"] not in [one["ApiId"] for one in cloud.aws("apigatewayv2").get_apis()["Items"]]
    with pytest.raises(InvalidStatus), client_of(outputs["RegionalUrl"], cloud.issuer.token("somebody")):
        pass


def test_the_protection_of_the_state_is_switched_by_an_update(place: Place) -> None:
    for protection in ("true", "false"):
        place.cloud.deploy(API, "wsapi", DeletionProtection=protection)
        table = place.cloud.aws("dynamodb").describe_table(TableName=STATE)["Table"]
        assert table["DeletionProtectionEnabled"] is (protection == "true")
