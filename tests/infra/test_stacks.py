"""The stacks on a local engine that enforces permissions, deployed by the code of `scripts/deploy`, and then used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.acceptance.processes import ROOT, Log, until
from tests.infra.recorded_agent import RECORD
from tests.infra.rendering import Rendered
from tests.infra.test_templates import AGENTS
from tests.infra.world import REGION, World, artefacts, engine, parameters_of, resources_of
from thunderagent.client import Client
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import AccessDenied, TaskNotFound
from thunderagent.model.task import Status
from thunderagent.ops.iam import ARBITER_ACTIONS, Role, policy, resources
from thunderagent.queue.doorbell.sqs import SqsDoorbell
from thunderagent.router.function import DETAIL_TYPE
from thunderagent.settings import Settings
from thunderagent.stores import open_engine
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry import metrics
from thunderagent.telemetry.cloudwatch import CloudWatch, data_of
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.queue_gauges import QueueMeasure, measure

pytestmark = [pytest.mark.ministack, pytest.mark.processes]

NAMESPACE: Final = "ThunderAgent"
LARGE: Final = "x" * 400_000
MEDIUM: Final = "x" * 20_000
ROOT_KEY: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
"""Whoever starts the engine with this key may do everything with it."""


@dataclass(slots=True)
class Place:
    """The deployed stacks, and credentials for those who use them."""

    world: World
    outputs: Mapping[str, str]
    bucket: str
    _closed: list[Client] = field(default_factory=list)

    @property
    def store_url(self) -> str:
        return f"{self.outputs['StoreUrl']}&endpoint={self.world.endpoint}"

    @property
    def settings(self) -> Settings:
        return Settings(
            store=self.store_url,
            wake_queue_url=self.outputs["WakeQueueUrl"],
            blob_bucket=self.bucket,
            cloudwatch_namespace=NAMESPACE,
        )

    def aws(self, service: str, **credentials: str) -> Any:
        """A client of a service, of the root of the account unless others are named."""
        known = credentials or {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        return boto3.client(service, region_name=REGION, endpoint_url=self.world.endpoint, **known)

    def machine(self) -> dict[str, str]:
        """Credentials of the machines' role, as the environment has them."""
        arn = self.outputs["RoleArn"]
        given = self.aws("sts").assume_role(RoleArn=arn, RoleSessionName="i-0123")["Credentials"]
        return {
            "AWS_ACCESS_KEY_ID": given["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"],
            "AWS_SESSION_TOKEN": given["SessionToken"],
        }

    def application(self) -> dict[str, str]:
        """Credentials of a user who may do what `thunderagent iam producer` prints."""
        iam, name = self.aws("iam"), f"shop-{uuid.uuid4().hex[:8]}"
        iam.create_user(UserName=name)
        document = policy(Role.PRODUCER, resources(self.settings, account="000000000000"))
        iam.put_user_policy(UserName=name, PolicyName="thunderagent", PolicyDocument=json.dumps(spoken(document)))
        given = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": given["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"]}

    @property
    def code(self) -> str:
        """The bucket of what machines and functions run."""
        return artefacts.bucket_name(self.world.cloud, "ta")

    def task_store(self) -> TaskStore:
        return TaskStore(open_engine(self.store_url))

    def alarm(self, stack: str, logical: str) -> str:
        """The state of an alarm of a stack."""
        name = resources_of(self.world, f"ta-{stack}")[logical]["PhysicalResourceId"]
        [alarm] = self.aws("cloudwatch").describe_alarms(AlarmNames=[name])["MetricAlarms"]
        return str(alarm["StateValue"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    quick = {"LAMBDA_ASYNC_RETRY_BASE_SECONDS": "0.05"}
    with engine(tmp_path_factory.mktemp("engine"), AUTH="true", **ROOT_KEY, **quick) as world:
        made = Place(world, {}, "texts")
        made.aws("s3").create_bucket(Bucket="texts")
        run = world.deploy(
            "control", "table", "doorbell", "agents", AlarmQueue="old", BlobBucket="texts", ArbiterRegion=REGION
        )
        made.outputs = run.outputs
        made.aws("s3").delete_bucket_policy(Bucket=made.code)  # the engine has no TLS
        router = resources_of(world, "ta-doorbell")["RouterRole"]["PhysicalResourceId"]
        for role, name in (
            (run.outputs["RoleName"], "agent"),
            (run.outputs["RoleName"], "forwarder"),
            (router, "tasks"),
        ):
            spoken_by_engine(made.aws("iam"), role, name)
        yield made


def spoken_by_engine(iam: Any, role: str, name: str) -> None:
    """Say a policy of a role as the engine understands it: it asks for the names of the requests of SQS that take
    many, where AWS asks for those that take one, does not know the key cloudwatch:namespace, and has no `:*` at the end
    of a log group."""
    document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    iam.put_role_policy(RoleName=role, PolicyName=f"{name}-spoken", PolicyDocument=json.dumps(spoken(document)))


def spoken(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same permissions in the words of the engine."""
    statements = []
    for statement in document["Statement"]:
        actions = statement["Action"]
        if str(actions) == "cloudwatch:PutMetricData":
            statements.append({key: value for key, value in statement.items() if key != "Condition"})
        else:
            many = [f"{action}Batch" for action in actions if f"{action}Batch" in MANY]
            many += ["dynamodb:BatchExecuteStatement" for action in actions if action == "dynamodb:PartiQLInsert"]
            statement = {**statement, "Action": [*actions, *many]}
            if statement["Sid"] == "Log":
                statement["Resource"] = str(statement["Resource"]).removesuffix(":*")
            statements.append(statement)
    return {"Version": "2012-10-17", "Statement": statements}


MANY: Final = ("sqs:ChangeMessageVisibilityBatch", "sqs:DeleteMessageBatch", "sqs:SendMessageBatch")


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may do everything."""
    use(monkeypatch, ROOT_KEY)


def use(monkeypatch: pytest.MonkeyPatch, credentials: Mapping[str, str]) -> None:
    """This process has these credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)


# Agents and applications with the permissions of the templates

NOT_MET: Final = {
    "dynamodb:GetItem/ThunderAgentArbiter": "asked when a row has gone between a look and a write",
}
"""What the policy allows and the life of this test does not need, and when it would be."""


@dataclass(slots=True)
class RunningAgent:
    """A real agent with the credentials of the machines' role."""

    place: Place
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    log: Log = field(init=False)

    def __enter__(self) -> RunningAgent:
        self.log = Log(self.folder / "agent.log")
        settings = {
            "STORE": self.place.store_url,
            "WAKE_QUEUE_URL": self.place.outputs["WakeQueueUrl"],
            "BLOB_BUCKET": self.place.bucket,
            "CLOUDWATCH_NAMESPACE": NAMESPACE,
            "REGION": REGION,
            "REGION_BEAT_S": "2",
            "REGION_ARBITER": f"{self.place.outputs['ArbiterUrl']}&endpoint={self.place.world.endpoint}",
            # Nobody but the doorbell could be the reason that a task starts soon.
            "POLL_MIN_S": "30",
            "POLL_MAX_S": "30",
            "POLL_IDLE_S": "30",
        }
        with self.log.path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.infra.recorded_agent", "run", "tests.infra.cloudjobs", "--json"],
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                    **self.place.machine(),
                    **{f"THUNDERAGENT_{name}": value for name, value in settings.items()},
                    "AWS_ENDPOINT_URL": self.place.world.endpoint,
                    "AWS_EC2_METADATA_DISABLED": "true",
                    "AWS_DEFAULT_REGION": REGION,
                    "PYTHONPATH": str(ROOT),
                    RECORD: str(self.folder / "actions"),
                },
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    @property
    def actions(self) -> set[str]:
        """What it has asked of AWS."""
        return set((self.folder / "actions").read_text().split())

    def await_line(self, message: str, within_s: float = 20.0) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.log.tail
            return bool(self.log.lines(message))

        until(look, within_s, lambda: f"{message!r} in the log\n{self.log.tail}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


@dataclass(frozen=True, slots=True)
class Lived:
    """What came of a day in the life of an agent and an application."""

    actions: set[str]
    log: str
    exit_code: int


@pytest.fixture(scope="module")
def lived(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    """An agent with the role of a machine, and an application with the rights of a producer, do all that they can."""
    from tests.infra.cloudjobs import work

    with pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, place.application())
        monkeypatch.setenv("AWS_ENDPOINT_URL", place.world.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
        client = Client.from_settings(**place.settings.model_dump(include={"store", "wake_queue_url", "blob_bucket"}))
        with RunningAgent(place, tmp_path_factory.mktemp("agent")) as agent:
            agent.await_line("agent started")
            first = client.enqueue(work.plain, {})
            ends = [
                first,
                client.enqueue(work.plain, {}, depends_on=[first]),
                client.enqueue(work.plain, {"text": MEDIUM, "answer": MEDIUM}),
                client.enqueue(work.plain, {"text": LARGE, "answer": LARGE}),
                client.enqueue(work.plain, {"fail": True}),
                client.enqueue(work.plain, {"snooze": True}),
                client.enqueue(work.plain, {}, unique_key="one"),
                client.enqueue(work.fan_out, {}),
                *(one.task for one in client.enqueue_many(work.limited, [{}, {}, {}])),
            ]
            client.enqueue("cloud.of_others", {})  # a ring that is of no use here
            held = client.enqueue(work.held, {})
            parent = client.enqueue(work.plain, {}, delay_s=1000)
            client.enqueue(work.plain, {}, depends_on=[parent])
            client.cancel(parent)
            with pytest.raises(TaskNotFound):
                client.cancel("nobody")
            for task in ends:
                assert client.wait(task, timeout_s=25).status in (Status.SUCCESS, Status.FAILED), task
            assert client.wait(ends[3]).result == LARGE
            client.cancel(held)  # its agent hears of it by the wake queue: it would beat after a minute
            assert client.wait(held, timeout_s=25).status is Status.DONE
            client.retry(ends[4])
            at_work = wanted_actions(place) - {"cloudwatch:PutMetricData"}  # which is asked at the end of its minute
            at_work.add("dynamodb:UpdateItem/ThunderAgentArbiter")
            until(
                lambda: agent.actions >= at_work, 25.0, lambda: f"all but {at_work - agent.actions}\n{agent.log.tail}"
            )
            code = agent.stop()
            client.close()
            yield Lived(agent.actions, agent.log.path.read_text(), code)


def test_an_agent_with_the_role_of_a_machine_and_an_application_do_all_their_work(lived: Lived) -> None:
    refusals = [line for line in lived.log.splitlines() if "not allowed" in line or "AccessDenied" in line]
    assert refusals == []
    assert lived.exit_code == 0


def test_agents_ask_for_all_that_their_policy_allows_and_for_nothing_else(place: Place, lived: Lived) -> None:
    assert {action for action in lived.actions if "/" not in action} == wanted_actions(place)
    arbiter = {action for action in lived.actions if action.endswith("/ThunderAgentArbiter")}
    allowed = {f"dynamodb:{action}/ThunderAgentArbiter" for action in ARBITER_ACTIONS[Role.AGENT]}
    assert arbiter | NOT_MET.keys() == allowed


def test_an_agent_hears_of_new_tasks_through_the_deployed_wake_queue(lived: Lived) -> None:
    # It polls every 30 s, and a cancel of a running task would wait for a beat.
    assert {"sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility"} <= lived.actions


def wanted_actions(place: Place) -> set[str]:
    """Every action that the policy of agents allows, out of the template that was deployed."""
    rendered = Rendered(
        "agents",
        {
            "ArtefactBucket": "artefacts",
            "ArtefactKey": AGENTS["ArtefactKey"],
            "Subnets": "subnet-0a",
            "BlobBucket": place.bucket,
            "WakeQueueArn": place.outputs["WakeQueueArn"],
        },
    )
    [document] = [
        one["PolicyDocument"] for one in rendered.properties("Role")["Policies"] if one["PolicyName"] == "agent"
    ]
    actions = [one["Action"] for one in document["Statement"]]
    return {action for some in actions for action in ([some] if isinstance(some, str) else some)}


def test_what_scaling_and_alarms_look_at_is_what_agents_have_sent(
    place: Place, lived: Lived, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskStore, "take_turn", lambda *_, **__: True)  # it may be the stopped agent's for a minute
    send_backlog(place)
    cloudwatch = place.aws("cloudwatch")
    sent = {one["MetricName"] for one in cloudwatch.list_metrics(Namespace=NAMESPACE)["Metrics"]}
    wanted = (metrics.TASKS_SUCCEEDED, metrics.HEALTHY, metrics.BACKLOG, metrics.ACTIVE_CONNECTIONS)
    assert {metric.cloudwatch for metric in wanted} <= sent
    now = time.time()
    window = {"StartTime": now - 300, "EndTime": now + 60, "Period": 600, "Namespace": NAMESPACE}
    [agents] = cloudwatch.get_metric_statistics(MetricName="Healthy", Statistics=["SampleCount", "Minimum"], **window)[
        "Datapoints"
    ]
    [backlog] = cloudwatch.get_metric_statistics(MetricName="Backlog", Statistics=["Maximum"], **window)["Datapoints"]
    assert agents["SampleCount"] >= 1
    assert agents["Minimum"] == 1
    assert backlog["Maximum"] / agents["SampleCount"] >= 1  # the task of a job that nobody has
    until(lambda: place.alarm("agents", "Unhealthy") == "OK", 10.0, "an alarm that has seen a healthy agent")


def send_backlog(place: Place) -> None:
    """Count the queues and send what an agent does each minute."""
    store, bus = place.task_store(), EventBus()
    meter = Meter(bus)
    to = CloudWatch(NAMESPACE, region=REGION, endpoint=place.world.endpoint, now=time.time)
    try:
        QueueMeasure(store, bus, owner="test").look()
        to.put(datum for series, datum in data_of(meter.read()) if series[0] is metrics.BACKLOG)
    finally:
        to.close()
        store.engine.close()


# What they may not do


def refusal(act: Any) -> str:
    """The code with which AWS refuses."""
    with pytest.raises(ClientError) as refused:
        act()
    return str(refused.value.response["Error"]["Code"])


def lowered(credentials: Mapping[str, str]) -> dict[str, str]:
    """Credentials as a client takes them."""
    return {name.lower(): value for name, value in credentials.items()}


def test_a_machine_may_do_nothing_beside_its_work(place: Place) -> None:
    key = lowered(place.machine())
    table = place.outputs["TableName"]
    dynamodb, sqs, s3 = (place.aws(service, **key) for service in ("dynamodb", "sqs", "s3"))
    dynamodb.describe_table(TableName=table)
    logs, function = (
        place.aws("logs", **key),
        resources_of(place.world, "ta-doorbell")["RouterLog"]["PhysicalResourceId"],
    )
    forbidden = [
        lambda: dynamodb.delete_table(TableName=table),
        lambda: dynamodb.scan(TableName=table),
        lambda: dynamodb.update_table(TableName=table, DeletionProtectionEnabled=False),
        lambda: dynamodb.delete_item(TableName=place.outputs["ArbiterName"], Key={"taskId": {"S": "region:default"}}),
        lambda: dynamodb.describe_table(TableName=place.outputs["ArbiterName"]),
        lambda: sqs.purge_queue(QueueUrl=place.outputs["WakeQueueUrl"]),
        lambda: sqs.send_message(QueueUrl=place.outputs["LostEventsUrl"], MessageBody="x"),
        lambda: s3.list_objects_v2(Bucket=place.bucket),
        lambda: s3.put_object(Bucket=place.bucket, Key="elsewhere/x", Body=b"x"),
        lambda: place.aws("iam", **key).list_roles(),
        lambda: place.aws("cloudformation", **key).describe_stacks(),
        lambda: logs.create_log_group(logGroupName="other"),
        lambda: logs.create_log_stream(logGroupName=function, logStreamName="i-0123/agent-0"),
        lambda: logs.delete_log_group(logGroupName=place.outputs["LogGroupName"]),
    ]
    for act in forbidden:
        assert refusal(act).startswith("AccessDenied")


def test_a_machine_may_fetch_its_own_code_and_complete_its_own_hook(place: Place) -> None:
    key = lowered(place.machine())
    parameters = place.aws("cloudformation").describe_stacks(StackName="ta-agents")["Stacks"][0]["Parameters"]
    values = {one["ParameterKey"]: one["ParameterValue"] for one in parameters}
    s3, autoscaling = place.aws("s3", **key), place.aws("autoscaling", **key)
    s3.get_object(Bucket=values["ArtefactBucket"], Key=values["ArtefactKey"])
    before = f"thunderagent/agents/{'0' * 64}.tar.gz"  # a machine of the template before, during an update
    place.aws("s3").put_object(Bucket=values["ArtefactBucket"], Key=before, Body=b"x")
    s3.get_object(Bucket=values["ArtefactBucket"], Key=before)
    assert refusal(lambda: s3.get_object(Bucket=values["ArtefactBucket"], Key="other")).startswith("AccessDenied")
    for hook, result in (("boot", "CONTINUE"), ("boot", "ABANDON"), ("drain", "CONTINUE")):
        told = {"LifecycleHookName": hook, "InstanceId": "i-0123", "LifecycleActionResult": result}
        autoscaling.complete_lifecycle_action(AutoScalingGroupName=place.outputs["GroupName"], **told)
    act = lambda: autoscaling.complete_lifecycle_action(AutoScalingGroupName="other", **told)  # noqa: E731
    assert refusal(act).startswith("AccessDenied")


def test_the_bucket_of_the_code_answers_nobody_without_tls(place: Place) -> None:
    values = parameters_of(place.world, "agents")
    s3, machine = place.aws("s3"), place.aws("s3", **lowered(place.machine()))
    fetch = {"Bucket": values["ArtefactBucket"], "Key": values["ArtefactKey"]}
    machine.get_object(**fetch)
    s3.put_bucket_policy(Bucket=place.code, Policy=json.dumps(artefacts.tls_only(place.code)))
    try:
        assert refusal(lambda: machine.get_object(**fetch)).startswith("AccessDenied")
    finally:
        s3.delete_bucket_policy(Bucket=place.code)


def test_a_machine_may_write_its_log_which_ends_and_whose_errors_are_counted(place: Place) -> None:
    group, root = place.outputs["LogGroupName"], place.aws("logs")
    machine = place.aws("logs", **lowered(place.machine()))
    stream = {"logGroupName": group, "logStreamName": "i-0123/agent-0"}
    machine.create_log_stream(**stream)
    line = {"timestamp": int(time.time() * 1000), "message": json.dumps({"level": "ERROR"})}
    machine.put_log_events(**stream, logEvents=[line])
    assert [one["message"] for one in root.get_log_events(**stream)["events"]] == [line["message"]]
    [found] = root.describe_log_groups(logGroupNamePrefix=group)["logGroups"]
    [counted] = root.describe_metric_filters(logGroupName=group)["metricFilters"]
    [told] = counted["metricTransformations"]
    assert (found["retentionInDays"], told["metricNamespace"], told["metricName"]) == (30, NAMESPACE, "ErrorLines")


def test_an_application_may_not_list_what_others_have_enqueued(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, place.application())
    client = Client.from_settings(store=place.store_url)
    try:
        client.enqueue("cloud.of_others", {})
        with pytest.raises(AccessDenied, match="Query"):
            list(client.list())
    finally:
        client.close()


# Alarms


def test_a_task_that_nobody_takes_is_an_alarm_until_somebody_does(place: Place, as_root: None) -> None:
    store = place.task_store()
    cloudwatch = CloudWatch(NAMESPACE, region=REGION, endpoint=place.world.endpoint, now=lambda: time.time() - 296.0)
    bus = EventBus()
    meter = Meter(bus)
    client = Client.from_settings(store=place.store_url)
    late = client.enqueue("cloud.nobodys", {}, queue="old", run_at=time.time() - 3600)
    try:
        for one in measure(store):
            bus.emit(one)
        measured = [(series, datum) for series, datum in data_of(meter.read()) if series[1] == "old"]
        assert {series[0] for series, _ in measured} == {metrics.QUEUE_DEPTH, metrics.OLDEST_READY_AGE}
        cloudwatch.put(datum for _, datum in measured)
        until(lambda: place.alarm("table", "OldestReadyOfQueue") == "ALARM", 8.0, "an alarm")
        client.cancel(late)
        # The engine looks at the last five minutes, and what was sent as of 296 s ago is out of them soon.
        cloudwatch._now = time.time
        [age] = [datum for series, datum in measured if series[0] is metrics.OLDEST_READY_AGE]

        def is_over() -> bool:
            cloudwatch.put([{**age, "Value": 0.0}])
            return place.alarm("table", "OldestReadyOfQueue") == "OK"

        until(is_over, 20.0, "the end of the alarm")
    finally:
        client.close()
        cloudwatch.close()
        store.engine.close()


def test_throttled_writes_are_an_alarm(place: Place, as_root: None) -> None:
    name = resources_of(place.world, "ta-table")["TableWriteThrottles"]["PhysicalResourceId"]
    cloudwatch = place.aws("cloudwatch")
    [alarm] = cloudwatch.describe_alarms(AlarmNames=[name])["MetricAlarms"]
    told = {"MetricName": "WriteThrottleEvents", "Dimensions": [{"Name": "TableName", "Value": "TaskTable"}]}
    cloudwatch.put_metric_data(Namespace="AWS/DynamoDB", MetricData=[{**told, "Value": 2 * alarm["Threshold"]}])
    until(lambda: place.alarm("table", "TableWriteThrottles") == "ALARM", 8.0, "an alarm")
    assert place.alarm("table", "TableReadThrottles") != "ALARM"


# Events


def put_event(place: Place, detail: Mapping[str, Any], detail_type: str = DETAIL_TYPE) -> str:
    """Put an event on the bus; its id."""
    entry = {"Source": "shop", "DetailType": detail_type, "Detail": json.dumps(detail)}
    [told] = place.aws("events").put_events(Entries=[entry])["Entries"]
    return str(told["EventId"])


def test_an_event_becomes_a_task_through_the_deployed_function(place: Place, as_root: None) -> None:
    payload = {"order": uuid.uuid4().hex}
    put_event(place, {"job": "cloud.ordered", "payload": payload}, detail_type="Something else")
    event = put_event(place, {"job": "cloud.ordered", "payload": payload, "queue": "orders", "max_retry": 7})
    client = Client.from_settings(store=place.store_url)
    try:
        tasks = until(lambda: list(client.list(queue="orders")), 25.0, "a task")
    finally:
        client.close()
    [task] = tasks
    assert (task.id, task.job, task.max_retry) == (f"cloud.ordered@eventbridge:{event}", "cloud.ordered", 7)
    assert task.payload_text == json.dumps(payload, separators=(",", ":"))


def test_the_deployed_function_rings_for_the_task(place: Place, as_root: None) -> None:
    bell = SqsDoorbell(place.outputs["WakeQueueUrl"])
    try:
        event = put_event(place, {"job": "cloud.rung", "queue": "rung"})
        heard: list[str] = []

        def hears() -> bool:
            heard.extend(str(ring.task_id) for ring in bell.listen(1.0, lambda _: True))
            return f"cloud.rung@eventbridge:{event}" in heard

        until(hears, 25.0, lambda: f"the ring, only {heard}")
    finally:
        bell.close()


def test_an_event_that_can_be_no_task_is_kept_with_the_reason(place: Place) -> None:
    # The engine's bus calls a function and forgets it, where that of AWS hands the event over as this call does.
    event = uuid.uuid4().hex
    detail = {"job": "cloud.ordered", "qeueu": "orders"}
    told = {"id": event, "source": "shop", "detail-type": DETAIL_TYPE, "detail": detail}
    function = resources_of(place.world, "ta-doorbell")["Router"]["PhysicalResourceId"]
    payload = json.dumps(told).encode()
    place.aws("lambda").invoke(FunctionName=function, InvocationType="Event", Payload=payload)
    sqs, url = place.aws("sqs"), place.outputs["LostEventsUrl"]
    kept: list[dict[str, Any]] = []

    def is_kept() -> bool:
        found = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
        kept.extend(json.loads(message["Body"]) for message in found)
        return bool(kept)

    until(is_kept, 25.0, "the event in the queue of lost events")
    [failure] = kept
    assert failure["requestPayload"]["id"] == event
    assert "qeueu" in failure["responsePayload"]["errorMessage"]
