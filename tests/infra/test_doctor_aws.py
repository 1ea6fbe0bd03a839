"""`thunderagent doctor --aws` on an engine that enforces permissions: what is broken is told, with its remedy."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import boto3
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.client import BaseClient
from botocore.exceptions import EndpointConnectionError
from botocore.httpsession import URLLib3Session
from typer.testing import CliRunner

from tests.infra.test_stacks import ROOT_KEY, spoken_by_engine
from tests.infra.world import REGION, World, artefacts, engine, resources_of
from thunderagent.cli import app
from thunderagent.ops.iam import DOCTOR_ACTIONS, Resources, Role, policy
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table

pytestmark = [pytest.mark.ministack, pytest.mark.processes]

NUMBER: Final = "000000000000"
STACKS: Final = ("control", "table", "doorbell", "wsapi", "agents", "containers")
TOPIC: Final = f"arn:aws:sns:{REGION}:{NUMBER}:alarms"
READS: Final = ("Describe", "Get", "List", "Simulate")


def token(days: float, life: float = 365.0) -> str:
    """A token that ends in so many days, of a life of so many; its signature is no matter."""
    ends_at = time.time() + days * 86_400
    claims = json.dumps({"exp": ends_at, "iat": ends_at - life * 86_400})
    body = base64.urlsafe_b64encode(claims.encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{body}.c2VjcmV0"


def set_to(key: str, **values: Any) -> Callable[[Any], None]:
    """Changes the first member of an answer, or what is under a key of it."""

    def change(told: Any) -> None:
        one = told[key] if isinstance(told.get(key), dict) else told.get(key, [told])[0]
        one.update(values)

    return change


@dataclass(slots=True)
class Place:
    """An engine, and answers of AWS that it does not give."""

    world: World
    secret: str = ""
    answers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """By the name of an action: what changes its answer."""
    asked: set[str] = field(default_factory=set)

    def aws(self, service: str) -> Any:
        key = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        return boto3.client(service, region_name=REGION, endpoint_url=self.world.endpoint, **key)

    def deploy(self, prefix: str, *stacks: str, **parameters: str) -> None:
        """Deploy stacks, and switch on what the engine leaves out of a template."""
        made = self.world.deploy(*stacks, prefix=prefix, AlarmTopic=TOPIC, AlarmQueue="old", **parameters)
        for role in {"RoleName", "TaskRoleName"} & made.outputs.keys():
            spoken_by_engine(self.aws("iam"), made.outputs[role], "agent")
        bucket = artefacts.bucket_name(self.world.cloud, prefix)
        self.aws("s3").delete_bucket_policy(Bucket=bucket)  # the engine has no TLS
        dynamodb = self.aws("dynamodb")
        for name in dynamodb.list_tables()["TableNames"]:
            lives = {"Enabled": True, "AttributeName": "expireAt"}
            dynamodb.update_time_to_live(TableName=name, TimeToLiveSpecification=lives)
            on = {"PointInTimeRecoveryEnabled": True}
            dynamodb.update_continuous_backups(TableName=name, PointInTimeRecoverySpecification=on)

    def user(self, document: Mapping[str, Any]) -> dict[str, str]:
        """Credentials of a user with one policy."""
        iam, name = self.aws("iam"), f"reader-{time.monotonic_ns()}"
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="one", PolicyDocument=json.dumps(document))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def doctor(self, *words: str, code: int, **environment: str) -> list[dict[str, Any]]:
        """What the command finds, asked as AWS is; nobody's secret is in it."""
        known = {"AWS_ENDPOINT_URL": self.world.endpoint, "AWS_DEFAULT_REGION": REGION, **ROOT_KEY, **environment}
        self.asked.clear()
        done = CliRunner().invoke(app, ["doctor", "--aws", "--json", *words], env=known)
        assert done.exit_code == code, (done.output, done.exception)
        assert "c2VjcmV0" not in done.output
        checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
        return checks


@pytest.fixture(scope="module")
def engine_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with engine(tmp_path_factory.mktemp("engine"), AUTH="true", **ROOT_KEY) as world:
        place = Place(world)
        place.aws("sns").create_topic(Name="alarms")
        made = place.aws("secretsmanager").create_secret(Name="canary", SecretString=token(100))
        place.secret = made["ARN"]
        place.deploy("ta", *STACKS, ArbiterRegion=REGION, TokenSecretArn=place.secret, Image="shop:1")
        yield place


@pytest.fixture
def place(engine_of_all: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The stacks as they should be, with machines and quotas."""
    one, ask = engine_of_all, BaseClient._make_api_call
    one.answers = {
        "GetServiceQuota": lambda _: {"Quota": {"Value": 1000.0}},
        "GetAWSDefaultServiceQuota": lambda _: {"Quota": {"Value": 1000.0}},
        "DescribeAutoScalingGroups": lambda told: told["AutoScalingGroups"][0]["Instances"].append(
            {"LifecycleState": "InService"}
        ),
        "DescribeServices": set_to("services", runningCount=1, desiredCount=1),
    }

    def answered(client: Any, action: str, arguments: Any) -> Any:
        one.asked.add(f"{client.meta.service_model.signing_name}:{action}")
        changes = one.answers.get(action, lambda told: told)
        told = {} if "Quota" in action else ask(client, action, arguments)
        return changes(told) or told

    monkeypatch.setattr(BaseClient, "_make_api_call", answered)
    yield one


def test_what_is_as_promised_is_ok_and_asked_with_nothing_but_its_policy(place: Place) -> None:
    to = Resources(table="TaskTable", region=REGION, account=NUMBER, secrets=(place.secret,))
    document = policy(Role.DOCTOR, to)
    found = place.doctor("--prefix", "ta", code=0, **place.user(document))
    assert [one for one in found if one["state"] != "ok"] == []
    checks = {one["check"] for one in found}
    assert checks >= {"table", "index", "alarms", "logs", "machines", "permissions", "canary token", "quotas", "clock"}
    renamed = {"monitoring": "cloudwatch", "GetPublicAccessBlock": "GetBucketPublicAccessBlock"}
    asked = {":".join(renamed.get(part, part) for part in one.split(":")) for one in place.asked}
    wanted = {f"{service}:{action}" for service, (_, actions) in DOCTOR_ACTIONS.items() for action in actions}
    assert asked - {"sts:GetCallerIdentity"} == wanted | {"secretsmanager:GetSecretValue"}
    assert all(one.partition(":")[2].startswith(READS) for one in asked)


def test_what_may_not_be_seen_is_unknown_and_never_ok(place: Place) -> None:
    stacks = policy(Role.DOCTOR, Resources(table="TaskTable", region=REGION))["Statement"][1]
    found = place.doctor("--prefix", "ta", code=0, **place.user({"Version": "2012-10-17", "Statement": [stacks]}))
    unknown = {one["check"]: one for one in found if one["state"] != "ok"}
    assert {one["state"] for one in unknown.values()} == {"unknown"}
    assert unknown["alarms"]["found"] == "cannot tell: cloudwatch:DescribeAlarms is not allowed"
    assert unknown["alarms"]["remedy"].startswith("allow cloudwatch:DescribeAlarms; `thunderagent iam doctor` prints")
    assert "s3:GetBucketPublicAccessBlock" in unknown["buckets"]["found"]
    assert {one["check"] for one in found if one["state"] == "ok"} <= {
        *(f"stack ta-{name}" for name in STACKS),
        "account",
        "clock",
        "quotas",  # the answers of this test
    }


def test_what_is_broken_is_told_with_its_remedy(place: Place) -> None:
    names = {"TableName": "Broken", "ArbiterName": "BrokenArbiter", "Namespace": "Broken", "MaxSize": "1"}
    place.deploy("tb", "control", "table", "doorbell", "agents", ArbiterRegion=REGION, **names)
    ids = {
        name: one["PhysicalResourceId"]
        for stack in ("control", "table", "doorbell", "agents")
        for name, one in resources_of(place.world, f"tb-{stack}").items()
    }
    bucket = f"tb-artefacts-{NUMBER}-{REGION}"
    cloudwatch, dynamodb = place.aws("cloudwatch"), place.aws("dynamodb")
    # Drift first, as it is found by asking for it.
    place.aws("logs").put_retention_policy(logGroupName=ids["RouterLog"], retentionInDays=365)
    place.aws("cloudformation").detect_stack_drift(StackName="tb-doorbell")
    place.aws("logs").delete_retention_policy(logGroupName=ids["RouterLog"])
    cloudwatch.delete_alarms(AlarmNames=[ids["ThreadsDied"]])
    cloudwatch.disable_alarm_actions(AlarmNames=[ids["Unhealthy"]])
    off = {"PointInTimeRecoveryEnabled": False}
    for name in ("Broken", "BrokenArbiter"):
        dynamodb.update_continuous_backups(TableName=name, PointInTimeRecoverySpecification=off)
    lives = {"Enabled": False, "AttributeName": "expireAt"}
    dynamodb.update_time_to_live(TableName="Broken", TimeToLiveSpecification=lives)
    dynamodb.update_table(TableName="Broken", DeletionProtectionEnabled=False)
    place.aws("sqs").send_message(QueueUrl=ids["LostEvents"], MessageBody="{}")
    place.aws("sqs").delete_queue(QueueUrl=ids["WakeQueue"])
    place.aws("lambda").delete_function(FunctionName=ids["Router"])
    for name in ("agent", "agent-spoken"):
        place.aws("iam").delete_role_policy(RoleName=ids["Role"], PolicyName=name)
    place.aws("s3").delete_public_access_block(Bucket=bucket)
    found = place.doctor("--prefix", "tb", code=1)
    deploy = f"scripts/deploy --region {REGION} --prefix tb --stack"
    create = f"thunderagent table create --store 'dynamodb://Broken?region={REGION}'"
    for check, state, words, remedy in (
        ("stack tb-doorbell", "warning", "RouterLog (modified)", f"{deploy} doorbell --revert-drift"),
        ("time to live", "wrong", "time to live is off", create),
        ("point-in-time recovery", "warning", "is off", create),
        ("deletion protection", "warning", "Broken: off", "update-table --table-name Broken --deletion-protection-en"),
        ("table", "warning", "BrokenArbiter: point-in-time recovery is off", "update-continuous-backups --table-name"),
        ("alarms", "wrong", "ThreadsDied", f"{deploy} agents --revert-drift"),
        ("alarms", "warning", "Unhealthy", "aws cloudwatch enable-alarm-actions --alarm-names tb-agents-Unhealthy"),
        ("logs", "warning", "for ever, at a price", "--retention-in-days 30"),
        ("queues", "wrong", "WakeQueue", f"{deploy} doorbell --revert-drift"),
        ("queues", "warning", "has 1 lost events", "aws sqs receive-message --queue-url"),
        ("functions", "wrong", "Router", f"{deploy} doorbell --revert-drift"),
        ("machines", "warning", "MaxSize 1 is not over MinSize 1", f"{deploy} agents --parameter MaxSize=2"),
        ("permissions", "wrong", "dynamodb:PutItem on arn:aws:dynamodb", "thunderagent iam agent"),
        ("buckets", "warning", f"s3://{bucket} can be made public", "aws s3api put-public-access-block --bucket"),
    ):
        told = [one for one in found if (one["check"], one["state"]) == (check, state) and words in one["found"]]
        assert told, (check, words, [one for one in found if one["check"] == check])
        assert remedy in told[0]["remedy"]


OLD: Final = datetime(2026, 1, 1, tzinfo=UTC)
FAILED: Final = {"Description": "Launching a new EC2 instance", "StatusCode": "Failed", "StatusMessage": "no capacity"}
REPLICAS: Final = [{"RegionName": "eu-west-1", "ReplicaStatus": "CREATING"}]
ROLLED: Final = {"rolloutState": "FAILED", "rolloutStateReason": "no image"}
CAPS: Final = {"MaxReadRequestUnits": -1, "MaxWriteRequestUnits": 7}
WARM: Final = {"ReadUnitsPerSecond": 12000, "WriteUnitsPerSecond": 4000}


@pytest.mark.parametrize(
    ("action", "change", "check", "state", "words"),
    [
        ("DescribeStacks", set_to("Stacks", StackStatus="UPDATE_ROLLBACK_FAILED"), "stack", "wrong", "ROLLBACK_FAILED"),
        ("DescribeStacks", set_to("Stacks", StackStatus="UPDATE_IN_PROGRESS"), "stack", "warning", "IN_PROGRESS"),
        ("DescribeTable", set_to("Table", WarmThroughput=WARM), "warm", "ok", "about 800 tasks a second at once"),
        ("DescribeTable", set_to("Table", Replicas=REPLICAS), "replicas", "warning", "eu-west-1 is CREATING"),
        ("DescribeTable", set_to("Table", Replicas=REPLICAS), "replicas", "wrong", "has no stream"),
        ("DescribeTable", set_to("Table", BillingModeSummary={}), "billing", "warning", "BillingMode PROVISIONED"),
        ("DescribeTable", set_to("Table", OnDemandThroughput=CAPS), "billing", "warning", "MaxWriteUnits 7"),
        ("DescribeTable", set_to("Table", MultiRegionConsistency="STRONG"), "time to live", "skipped", "has none"),
        ("DescribeAlarms", set_to("MetricAlarms", StateValue="ALARM"), "alarms", "warning", "is ALARM: "),
        ("DescribeAlarms", set_to("MetricAlarms", StateUpdatedTimestamp=OLD), "alarms", "warning", "INSUFFICIENT_DATA"),
        ("DescribeAlarms", set_to("MetricAlarms", AlarmActions=[]), "alarms", "warning", f"not notify {TOPIC}"),
        ("DescribeLogGroups", set_to("logGroups", retentionInDays=1), "logs", "warning", "1 days, not for 30"),
        ("DescribeLogGroups", lambda _: {"logGroups": []}, "logs", "wrong", "does not exist any more"),
        ("DescribeScalingActivities", lambda _: {"Activities": [FAILED]}, "machines", "wrong", "no capacity"),
        ("DescribeAutoScalingGroups", lambda _: None, "machines", "wrong", "0 of 1 machines in service"),
        ("DescribeServices", set_to("services", runningCount=0), "containers", "wrong", "0 of 1 containers run"),
        ("DescribeServices", set_to("services", deployments=[ROLLED]), "containers", "wrong", "deployment of ta-"),
        ("DescribeServices", lambda _: {"services": []}, "containers", "wrong", "does not exist any more"),
        ("GetFunctionConfiguration", set_to("", LastUpdateStatus="Failed"), "functions", "wrong", "update failed"),
        ("GetSecretValue", lambda _: {"SecretString": token(3)}, "canary", "warning", "ends in 3.0 days"),
        ("GetSecretValue", lambda _: {"SecretString": token(10)}, "canary", "ok", "ends in 10 days"),
        ("GetSecretValue", lambda _: {"SecretString": token(0.5, life=1)}, "canary", "ok", "something replaces it"),
        (
            "GetSecretValue",
            lambda _: {"SecretString": token(-2)},
            "canary",
            "wrong",
            "days ago: the canary cannot judge",
        ),
        ("GetServiceQuota", lambda _: {"Quota": {"Value": 10.0}}, "quotas", "warning", "10, and 1,000 are wanted"),
        (
            "DescribeInstanceTypes",
            set_to("InstanceTypes", VCpuInfo={"DefaultVCpus": 300}),
            "quotas",
            "warning",
            "1,200",
        ),
    ],
)
def test_what_only_aws_can_show_is_told_from_its_answers(
    place: Place, action: str, change: Callable[[Any], Any], check: str, state: str, words: str
) -> None:
    place.answers[action] = change
    found = place.doctor("--prefix", "ta", code=1 if state == "wrong" or words.startswith("eu-west") else 0)
    told = [one for one in found if one["check"].startswith(check) and words in one["found"]]
    assert {one["state"] for one in told} == {state}, found
    assert (state == "ok") == (told[0]["remedy"] is None)


@pytest.mark.parametrize(("action", "check"), [("DescribeTable", "table"), ("GetSecretValue", "canary token")])
def test_a_service_without_an_answer_is_unknown_and_the_rest_is_looked_at(
    place: Place, action: str, check: str
) -> None:
    def silent(_: Any) -> None:
        raise EndpointConnectionError(endpoint_url="https://away")

    place.answers[action] = silent
    states = {one["check"]: one["state"] for one in place.doctor("--prefix", "ta", code=0)}
    assert states.pop(check) == "unknown"
    assert set(states.values()) == {"ok"}
    assert {"alarms", "quotas", "clock"} <= states.keys()


@pytest.mark.parametrize("action", ["DescribeStacks", "ListStackResources"])
def test_stacks_that_cannot_be_seen_are_no_pass(place: Place, action: str) -> None:
    seen = {"DescribeStacks", "ListStackResources"} - {action}
    allowed = {"Effect": "Allow", "Action": [f"cloudformation:{one}" for one in seen], "Resource": "*"}
    found = place.doctor("--prefix", "ta", code=3, **place.user({"Version": "2012-10-17", "Statement": [allowed]}))
    [unknown] = [one for one in found if one["state"] != "ok"]
    assert (unknown["check"], unknown["state"]) == ("stacks", "unknown")
    assert unknown["found"] == f"cannot tell: cloudformation:{action} is not allowed"


def test_one_throttled_request_drops_no_stack(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    send, throttled = URLLib3Session.send, list[str]()

    def once(session: URLLib3Session, request: AWSPreparedRequest) -> AWSResponse:
        reply: AWSResponse = send(session, request)
        if not throttled and "Action=ListStackResources" in str(request.body):
            throttled.append(request.url)
            reply.status_code = 400
            reply._content = b"<ErrorResponse><Error><Code>Throttling</Code></Error></ErrorResponse>"
        return reply

    monkeypatch.setattr(URLLib3Session, "send", once)
    found = place.doctor("--prefix", "ta", code=0)
    assert throttled
    assert {f"stack ta-{name}" for name in STACKS} <= {one["check"] for one in found}


def test_an_alarm_without_a_topic_is_a_warning_with_the_command(place: Place) -> None:
    def silence(told: Any) -> None:
        for one in told["MetricAlarms"]:
            one["AlarmActions"] = []

    def forget(told: Any) -> None:
        for stack in told["Stacks"]:
            stack["Parameters"] = [one for one in stack["Parameters"] if one["ParameterKey"] != "AlarmTopic"]

    place.answers |= {"DescribeAlarms": silence, "DescribeStacks": forget}
    remedies = {one["remedy"] for one in place.doctor("--prefix", "ta", code=0) if one["state"] == "warning"}
    command = f"scripts/deploy --region {REGION} --prefix ta --stack {{}} --parameter AlarmTopic=ARN"
    assert remedies >= {command.format(name) for name in ("agents", "containers", "doorbell", "table")}
    assert all(one.endswith("--parameter AlarmTopic=ARN") for one in remedies)


def test_a_table_without_stacks_is_judged_too(place: Place) -> None:
    made = DynamoEngine("Alone", region=REGION, endpoint=place.world.endpoint, threads=1)
    create_table(made)
    made.close()
    done = CliRunner().invoke(
        app, ["doctor", "--aws", "--prefix", "none", "--store", made.url], env={"COLUMNS": "200", **ROOT_KEY}
    )
    assert done.exit_code == 0, done.output
    assert "index: status-createdAt-index is there" in done.output
    assert "warning stacks: there are no stacks none-* in us-east-1, so there are no alarms" in done.output
    assert "-> scripts/deploy --local --prefix none" in done.output
    assert "deletion protection: Alone: off, so one request deletes it" in done.output
    assert "skipped quotas: a local engine has none" in done.output
    assert "nothing is wrong; 2 warnings" in done.output


@pytest.mark.parametrize(
    ("words", "environment", "code", "says"),
    [
        ((), {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, 3, "Unable to locate credentials"),
        ((), {"AWS_ACCESS_KEY_ID": "AKIANOBODY"}, 3, "InvalidClientTokenId"),
        (("--region", "eu-west-1"), {}, 3, "there are no stacks ta-* in eu-west-1"),
        (("--region", "eu-cental-1"), {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, 3, "is there a region eu-cental-1?"),
        (("--region", "here there"), {}, 3, "AWS cannot be asked in here there"),
    ],
)
def test_an_account_that_cannot_be_asked_is_one_clear_error(
    place: Place, words: tuple[str, ...], environment: dict[str, str], code: int, says: str
) -> None:
    [wrong] = [one for one in place.doctor("--prefix", "ta", *words, code=code, **environment) if one["state"] != "ok"]
    assert wrong["state"] == "wrong"
    assert says in f"{wrong['found']} {wrong['remedy']}"
    assert wrong["remedy"]


def test_an_account_that_never_answers_ends_within_seconds(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [found] = place.doctor(code=3, AWS_ENDPOINT_URL=endpoint)
        assert "Read timeout" in found["found"]
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--aws",), "no AWS region: give --region"),
        (("--aws", "jobs"), "--aws looks at the account alone"),
        (("--prefix", "ta"), "--prefix and --region go with --aws"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == 2
    assert says in done.stderr
