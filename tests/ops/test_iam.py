"""The printed IAM policies: what each role really asks of AWS in a whole life, no more and no less."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import boto3
import pytest
from botocore.client import BaseClient
from typer.testing import CliRunner

from tests.support.engine import LONG_S, Recorder, settings
from tests.support.program import program
from tests.support.stands import eventually
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.cli import app
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Snooze
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.periodic import periodic
from thunderagent.jobs.registry import Registry
from thunderagent.model import queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, ParentNotFound, TaskNotFound
from thunderagent.model.schedules import Tick
from thunderagent.model.task import Status
from thunderagent.model.ticks import every
from thunderagent.model.writes.tasks import request_cancel
from thunderagent.ops.iam import (
    ARBITER_ACTIONS,
    BUCKET_ACTIONS,
    INDEX_ACTIONS,
    METRICS_ACTION,
    METRICS_ROLES,
    QUEUE_ACTIONS,
    TABLE_ACTIONS,
    Resources,
    Role,
    policy,
    resources,
)
from thunderagent.queue.doorbell.sqs import SqsDoorbell
from thunderagent.regions.writes import first_row
from thunderagent.settings import Settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.s3 import S3Texts
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream

WHOLE = Resources(
    table="TaskTable",
    region="eu-central-1",
    account="123456789012",
    queue_url="https://sqs.eu-west-1.amazonaws.com/210987654321/wake",
    bucket="texts",
    namespace="ThunderAgent",
)
PUSHING = Resources(
    table="TaskTable",
    account="123456789012",
    push_endpoint="https://abc123.execute-api.eu-west-1.amazonaws.com/prod",
    push_connections="dynamodb://Connections?region=eu-west-1",
)
LARGE = "x" * 400_000
MEDIUM = "x" * 20_000


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {statement["Sid"]: statement for statement in document["Statement"]}


def test_a_policy_names_the_resources_and_nothing_else() -> None:
    told = by_name(policy(Role.AGENT, WHOLE))
    assert {name: statement["Resource"] for name, statement in told.items()} == {
        "Tasks": "arn:aws:dynamodb:eu-central-1:123456789012:table/TaskTable",
        "Index": "arn:aws:dynamodb:eu-central-1:123456789012:table/TaskTable/index/status-createdAt-index",
        "WakeQueue": "arn:aws:sqs:eu-west-1:210987654321:wake",
        "LargeTexts": "arn:aws:s3:::texts/thunderagent/*",
        "Metrics": "*",
    }
    assert told["Metrics"]["Condition"] == {"StringEquals": {"cloudwatch:namespace": "ThunderAgent"}}
    assert not any("*" in action for statement in told.values() for action in statement["Action"])
    assert {statement["Effect"] for statement in told.values()} == {"Allow"}


def test_an_agent_whose_jobs_push_may_use_that_api_and_its_table_of_connections() -> None:
    told = by_name(policy(Role.AGENT, PUSHING))
    assert told["Push"]["Action"] == ["execute-api:ManageConnections"]
    assert told["Push"]["Resource"] == ("arn:aws:execute-api:eu-west-1:123456789012:abc123/prod/POST/@connections/*")
    assert told["Connections"]["Resource"] == "arn:aws:dynamodb:eu-west-1:123456789012:table/Connections"
    own_domain = replace(PUSHING, push_endpoint="https://ws.example.com/x", push_connections="sqlite:///c.db")
    told = by_name(policy(Role.AGENT, own_domain))
    assert told["Push"]["Resource"] == "arn:aws:execute-api:*:123456789012:*/*/POST/@connections/*"
    assert "Connections" not in told
    assert "Push" not in by_name(policy(Role.PRODUCER, PUSHING))


def test_what_is_not_set_needs_no_permission() -> None:
    assert by_name(policy(Role.AGENT, Resources(table="TaskTable"))).keys() == {"Tasks", "Index"}
    assert "Metrics" not in by_name(policy(Role.PRODUCER, WHOLE))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("secret:canary", ["arn:aws:secretsmanager:eu-central-1:123456789012:secret:canary-??????"]),
        (
            "secret:canary-{target}?region=eu-west-1",
            [
                "arn:aws:secretsmanager:eu-west-1:123456789012:secret:canary-eu-central-1-??????",
                "arn:aws:secretsmanager:eu-west-1:123456789012:secret:canary-eu-west-1-??????",
            ],
        ),
        ("secret:arn:aws:secretsmanager:x:1:secret:y-abcdef", ["arn:aws:secretsmanager:x:1:secret:y-abcdef"]),
        ("env:TOKEN", []),
    ],
)
def test_the_canary_may_read_its_own_secrets(source: str, expected: list[str]) -> None:
    settings = Settings(
        store="dynamodb://TaskTable?region=eu-central-1",
        canary_targets={"eu-central-1": "wss://a", "eu-west-1": "wss://b"},
        canary_token_from=source,
    )
    to = resources(settings, account="123456789012")
    found = [one for one in policy(Role.AGENT, to)["Statement"] if one["Sid"].startswith("CanaryToken")]
    assert [one["Resource"] for one in found] == expected
    assert all(one["Action"] == ["secretsmanager:GetSecretValue"] for one in found)
    assert not [one for one in policy(Role.PRODUCER, to)["Statement"] if "Canary" in one["Sid"]]


def test_an_arbiter_is_in_its_own_region_and_each_role_may_do_there_what_it_needs() -> None:
    given = settings(
        store="dynamodb://T12?region=eu-central-1",
        region="eu-central-1",
        region_arbiter="dynamodb://Arbiter?region=eu-north-1",
    )
    found = resources(given, account="123456789012")
    for role in ARBITER_ACTIONS:
        statement = by_name(policy(role, found))["Arbiter"]
        assert statement["Resource"] == "arn:aws:dynamodb:eu-north-1:123456789012:table/Arbiter"
        assert statement["Action"] == [f"dynamodb:{action}" for action in sorted(ARBITER_ACTIONS[role])]
    on_file = settings(store="dynamodb://T12", region="eu-central-1", region_arbiter="sqlite:///arbiter.db")
    assert "Arbiter" not in by_name(policy(Role.AGENT, resources(on_file)))


def test_no_agent_and_no_application_may_change_the_table_itself() -> None:
    for role in (Role.AGENT, Role.PRODUCER):
        assert not {one for one in TABLE_ACTIONS[role] if one.endswith("Table")} - {"DescribeTable"}


def test_the_roles_grow() -> None:
    for actions in (TABLE_ACTIONS, INDEX_ACTIONS, QUEUE_ACTIONS, BUCKET_ACTIONS):
        assert actions[Role.PRODUCER] <= actions[Role.AGENT] <= actions[Role.OPERATOR]


def test_what_nobody_knows_is_a_placeholder_that_an_arn_may_have() -> None:
    found = resources(settings(store="dynamodb://T12", wake_queue_url="http://127.0.0.1:1/000000000000/wake"))
    told = by_name(policy(Role.PRODUCER, found))
    assert told["Tasks"]["Resource"] == "arn:aws:dynamodb:*:*:table/T12"
    assert told["WakeQueue"]["Resource"] == "arn:aws:sqs:*:000000000000:wake"


@pytest.mark.parametrize(
    ("region", "partition"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("eu-central-1", "aws")]
)
def test_the_partition_follows_the_region(region: str, partition: str) -> None:
    found = resources(settings(store=f"dynamodb://T12?region={region}"))
    assert by_name(policy(Role.AGENT, found))["Tasks"]["Resource"].startswith(f"arn:{partition}:dynamodb:{region}:")


@pytest.mark.parametrize(
    "wrong", [{"account": "12"}, {"region": "Frankfurt"}, {"partition": "azure"}, {"region": 'x","Action":"*'}]
)
def test_a_value_that_is_none_is_refused_with_an_example(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="write for example"):
        resources(settings(store="dynamodb://T12"), **wrong)


def test_a_file_needs_no_policy() -> None:
    done = CliRunner().invoke(app, ["iam", "agent", "--store", "sqlite:///tasks.db"])
    assert done.exit_code == 2
    assert "needs no IAM policy" in done.stderr


@pytest.mark.parametrize("role", list(Role))
def test_the_command_prints_the_policy_of_the_settings(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "dynamodb://TaskTable?region=eu-central-1")
    monkeypatch.setenv("THUNDERAGENT_WAKE_QUEUE_URL", str(WHOLE.queue_url))
    monkeypatch.setenv("THUNDERAGENT_BLOB_BUCKET", "texts")
    monkeypatch.setenv("THUNDERAGENT_CLOUDWATCH_NAMESPACE", "ThunderAgent")
    for form in ([], ["--json"]):
        done = CliRunner().invoke(app, ["iam", str(role), "--account", "123456789012", *form])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == policy(role, WHOLE)


# What is really asked


class Asked:
    """Which actions were asked of which service, by whom: the thread of the test, or the agent's threads."""

    PERMISSIONS: Final = {
        "SendMessageBatch": "SendMessage",
        "DeleteMessageBatch": "DeleteMessage",
        "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
        "BatchExecuteStatement": "PartiQLInsert",
    }
    """The permission of an action, where it has another name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actions: dict[tuple[Role, str], set[str]] = defaultdict(set)
        self.tables: set[tuple[str, bool]] = set()
        self.others = Role.AGENT
        self.here = Role.PRODUCER
        self._thread = threading.current_thread()
        ask = BaseClient._make_api_call

        def noted(client: Any, action: str, arguments: Any) -> Any:
            service = client.meta.service_model.service_name
            role = self.here if threading.current_thread() is self._thread else self.others
            self.actions[role, service].add(self.PERMISSIONS.get(action, action))
            if service == "dynamodb" and action == "Query":
                assert "IndexName" in arguments, "the policy allows queries on the index only"
            return ask(client, action, arguments)

        monkeypatch.setattr(BaseClient, "_make_api_call", noted)


@dataclass
class World:
    """A table, a queue and a bucket on the local engine."""

    endpoint: str
    store: str
    queue_url: str
    bucket: str
    clients: list[Client] = field(default_factory=list)

    def options(self, **changes: Any) -> dict[str, Any]:
        options = {"store": self.store, "wake_queue_url": self.queue_url, "blob_bucket": self.bucket}
        return {**options, "cloudwatch_namespace": "Test", **changes}

    def open(self) -> TaskStore:
        """A store whose requests are all made in the thread that asks."""
        table = self.store.removeprefix("dynamodb://").partition("?")[0]
        return TaskStore(DynamoEngine(table, endpoint=self.endpoint, threads=1), blobs=S3Texts(self.bucket))

    def client(self) -> Client:
        made = Client(self.open(), settings(**self.options()), doorbell=SqsDoorbell(self.queue_url))
        self.clients.append(made)
        return made


@pytest.fixture
def world(ministack_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    name = f"life-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack_endpoint)
    sqs, s3 = boto3.client("sqs"), boto3.client("s3")
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    s3.create_bucket(Bucket=name)
    engine = DynamoEngine(name, endpoint=ministack_endpoint)
    create_table(engine)
    queue_url = f"{ministack_endpoint}/000000000000/{name}"
    made = World(ministack_endpoint, f"dynamodb://{name}?endpoint={ministack_endpoint}", queue_url, name)
    yield made
    for client in made.clients:
        client.close()
    engine.close()
    sqs.delete_queue(QueueUrl=url)
    sqs.close()
    s3.close()


@job("life.plain", max_retry=0)
def plain(ctx: Context, payload: dict[str, Any]) -> Any:
    """Answers what it is asked to."""
    if payload.get("fail"):
        raise ValueError("as asked")
    if payload.get("snooze") and ctx.fence == 1:
        return Snooze(0.01)
    return payload.get("answer", "done")


@job("life.held")
def held(ctx: Context, payload: dict[str, Any]) -> None:
    """Goes on until it is told to stop."""
    ctx.wait(LONG_S)
    ctx.check()


@job("life.limited", limit=1)
def limited(ctx: Context, payload: dict[str, Any]) -> None:
    """One at a time."""


@stream("life.stream", lease_s=6.0, heartbeat_s=0.2)
async def following(ctx: StreamContext, payload: dict[str, Any]) -> None:
    """Goes on until it is stopped."""
    ctx.checkpoint(seq=1)
    await asyncio.Event().wait()


def ticking(ctx: Context, payload: Tick) -> None:
    """One run a tick."""


TICKING: Job[Any] = periodic(every(1).seconds)(job("life.tick")(ticking))


@pytest.mark.slow
@pytest.mark.ministack
def test_each_role_asks_for_what_its_policy_allows_and_for_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)

    # An application, before any agent runs, and while one does.
    client = world.client()
    first = client.enqueue(plain, {})
    ends = [
        first,
        client.enqueue(plain, {}, depends_on=[first]),
        client.enqueue(plain, {"text": MEDIUM, "answer": MEDIUM}),
        client.enqueue(plain, {"text": LARGE, "answer": LARGE}),
        client.enqueue(plain, {"fail": True}),
        client.enqueue(plain, {"snooze": True}),
        client.enqueue(plain, {}, unique_key="one"),
        client.enqueue(plain, {}, delay_s=0.2),
        *(one.task for one in client.enqueue_many(plain, [{"n": n} for n in range(30)])),
        *(one.task for one in client.enqueue_many(limited, [{}, {}, {}])),
    ]
    assert client.get(ends[3]).payload["text"] == LARGE  # read in this thread, as it is but one
    assert client.enqueue(plain, {}, unique_key="one").id == ends[6].id
    child_of = client.enqueue(plain, {}, delay_s=1000, unique_key="two")
    client.enqueue(plain, {}, depends_on=[child_of])
    client.cancel(child_of)
    client.cancel(client.enqueue(limited, {}, delay_s=1000))
    with pytest.raises(TaskNotFound):
        client.cancel("nobody")
    with pytest.raises(ParentNotFound):
        client.enqueue(plain, {}, depends_on=["nobody"])
    # A row may go between the look and the write of a cancel; the engine looks where it is then.
    gone = client.enqueue(plain, {}, delay_s=1000)
    client.store.engine.delete([gone.to_row()])
    [answer] = client.store.engine.apply([request_cancel(gone, now=0.0)])
    assert (answer.won, answer.row) == (False, None)
    following_it = client.enqueue(following, {}, task_id=f"stream-{uuid.uuid4().hex[:8]}")
    to_stop = client.enqueue(held, {})

    inner = world.client()

    @job("life.fan_out")
    def fan_out(ctx: Context, payload: dict[str, Any]) -> None:
        """Jobs enqueue too."""
        inner.enqueue_many(plain, [{"m": m} for m in range(3)])

    ends.append(client.enqueue(fan_out, {}))
    bus = EventBus()
    record = Recorder(bus)
    agent = Agent(
        world.open(),
        Registry(plain, held, fan_out, limited, following, TICKING),
        settings(**world.options(lease_s=6.0)),
        bus=bus,
        doorbell=SqsDoorbell(world.queue_url),
        threads=equip,
        first_poll_s=0.0,
    )
    thread = threading.Thread(target=agent.run, name="agent", daemon=True)
    thread.start()
    try:
        for task in ends:
            assert client.wait(task, timeout_s=LONG_S * 2).status in (Status.SUCCESS, Status.FAILED)
        assert client.wait(ends[3]).result == LARGE
        record.wait(queue_events.TickPut)
        client.cancel(to_stop)
        client.wait(to_stop, timeout_s=LONG_S)
        client.retry(ends[4])
        client.enqueue("life.of_others", {})  # a ring that is of no use here
        eventually(lambda: asked.actions[Role.AGENT, "sqs"] >= QUEUE_ACTIONS[Role.AGENT])
        client.streams.stop(following_it)
        client.streams.start(following_it)
    finally:
        agent.stop()
        thread.join(LONG_S * 2)
    assert not thread.is_alive()

    for role in (Role.PRODUCER, Role.AGENT):
        compare(role, asked)

    asked.here = asked.others = Role.OPERATOR
    operate(world, [task.id for task in ends], following_it.id, monkeypatch)
    compare(Role.OPERATOR, asked)


@pytest.mark.ministack
def test_an_application_in_several_regions_asks_of_the_arbiter_what_its_policy_allows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter = DynamoEngine(f"{world.bucket}-arbiter", endpoint=world.endpoint, threads=1)
    create_table(arbiter)
    arbiter.put([first_row("default", "here", lease_s=30.0, by="me", now=arbiter.clock.now())])
    asked: set[str] = set()
    ask = BaseClient._make_api_call

    def noted(client: Any, action: str, arguments: Any) -> Any:
        if arbiter.table in str(arguments):
            asked.add(action)
        return ask(client, action, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", noted)
    client = Client.from_settings(store=world.store, region="here", region_arbiter=arbiter.url)
    client.cancel(client.enqueue(plain, {}, delay_s=1000, unique_key="one"))
    assert asked == ARBITER_ACTIONS[Role.PRODUCER]
    client.close()
    arbiter.close()


QUIET: Final = frozenset({"run", "local", "health", "metrics", "dashboard", "iam", "canary", "wsapi serve"})
"""Commands that ask AWS for nothing, or are an agent, a canary or a server, or ask an engine of this machine."""


def commands(group: Any, before: str = "") -> Iterator[str]:
    """The words of every command."""
    for name, one in group.commands.items():
        yield from commands(one, f"{before}{name} ") if hasattr(one, "commands") else [f"{before}{name}"]


def operate(world: World, ends: list[str], followed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that there is, on what the life has left."""
    for name, value in world.options().items():
        monkeypatch.setenv(f"THUNDERAGENT_{name.upper()}", value)
    done: set[str] = set()

    def say(words: str, *arguments: str, code: int | None = 0) -> None:
        ended = CliRunner().invoke(app, [*words.split(), *arguments])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
        assert code is None or ended.exit_code == code, (words, ended.exit_code, ended.output)
        done.add(words)

    say("enqueue", "life.plain", '{"a": 1}', "--task-id", "queued")
    say("enqueue", "life.plain", json.dumps({"text": LARGE}), "--unique-key", "two")
    say("list")
    say("show", ends[3])
    say("explain", "queued")
    say("retry", ends[4])
    say("cancel", "queued")
    say("purge", "success", "--yes")
    say("pause", "queue", "default")
    say("pauses")
    say("resume", "queue", "default")
    say("stats")
    say("agents")
    say("agents drain", "nobody", code=None)
    say("top", "--once")
    say("streams list")
    say("streams stop", followed)
    say("streams start", followed)
    say("streams explain", followed)
    say("schedule list")
    say("schedule next", "life.tick")
    say("schedule run-now", "life.tick")
    say("schedule pause", "life.tick")
    say("schedule resume", "life.tick")
    arbiter = DynamoEngine(f"{world.bucket}-arbiter", endpoint=world.endpoint, threads=1)
    create_table(arbiter)
    arbiter.put([first_row("default", "here", lease_s=30.0, by="me", now=arbiter.clock.now())])
    monkeypatch.setenv("THUNDERAGENT_REGION", "here")
    monkeypatch.setenv("THUNDERAGENT_REGION_ARBITER", arbiter.url)
    say("region status")
    say("region failover", "--to", "there", "--yes")
    say("region stay")
    say("region failback", "--to", "there", "--yes")
    say("region freeze")
    say("region thaw")
    say("doctor", code=None)
    say("table check", code=None)
    say("table create", "--deletion-protection")
    say("table delete", "--yes", code=None)
    DynamoEngine(world.bucket, endpoint=world.endpoint).connection.call(
        "UpdateTable", TableName=world.bucket, DeletionProtectionEnabled=False
    )
    say("table delete", "--yes")
    say("table create")
    every_one = {"agents", *commands(program())}
    assert done <= every_one, "a command that is not there any more"
    assert every_one - done <= QUIET, "try the new command here, for what it asks of AWS"


def compare(role: Role, asked: Asked) -> None:
    """What was asked beside what the policy allows."""
    allowed = {
        "dynamodb": TABLE_ACTIONS[role] | INDEX_ACTIONS[role],
        "sqs": QUEUE_ACTIONS[role],
        "s3": BUCKET_ACTIONS[role],
    }
    for service, actions in allowed.items():
        assert asked.actions[role, service] == actions, f"{role} and {service}"
    others = {service: found for (whose, service), found in asked.actions.items() if whose is role}
    others = {service: actions for service, actions in others.items() if service not in allowed}
    metrics = {METRICS_ACTION.partition(":")[2]} if role in METRICS_ROLES else set()
    assert others.pop("cloudwatch", set()) <= metrics
    assert others.pop("sts", set()) <= {"GetCallerIdentity"}, "which needs no permission"
    assert others == {}
