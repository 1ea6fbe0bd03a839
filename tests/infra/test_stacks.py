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
from tests.infra.world import REGION, World, engine, resources_of
from thunderagent import metrics
from thunderagent.bus import EventBus
from thunderagent.client import Client
from thunderagent.cloudwatch import CloudWatch, data_of
from thunderagent.doorbells.sqs import SqsDoorbell
from thunderagent.errors import AccessDenied, TaskNotFound
from thunderagent.iam import Role, policy, resources
from thunderagent.measuring import QueueMeasure
from thunderagent.meter import Meter
from thunderagent.router.deployed import DETAIL_TYPE
from thunderagent.settings import Settings
from thunderagent.store import TaskStore
from thunderagent.stores import open_engine
from thunderagent.task import Status

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
        iam.put_user_policy(UserName=name, PolicyName="thunderagent", PolicyDocument=json.dumps(document))
        given = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": given["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"]}

    def task_store(self) -> TaskStore:
        return TaskStore(open_engine(self.store_url))

    def alarm(self, stack: str, logical: str) -> str:
        """The state of an alarm of a stack."""
        name = resources_of(self.world, f"ta-{stack}")[logical]["PhysicalResourceId"]
        [alarm] = self.aws("cloudwatch").describe_alarms(AlarmNames=[name])["MetricAlarms"]
        return str(alarm["StateValue"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with engine(tmp_path_factory.mktemp("engine"), AUTH="true", **ROOT_KEY) as world:
        made = Place(world, {}, "texts")
        made.aws("s3").create_bucket(Bucket="texts")
        run = world.deploy("control", "table", "doorbell", "agents", AlarmQueue="old", BlobBucket="texts")
        made.outputs = run.outputs
        # The engine does not know the key cloudwatch:namespace and so refuses what is conditioned on it.
        unconditioned = {"Effect": "Allow", "Action": "cloudwatch:PutMetricData", "Resource": "*"}
        made.aws("iam").put_role_policy(
            RoleName=run.outputs["RoleName"],
            PolicyName="without-condition",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [unconditioned]}),
        )
        yield made


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

UNUSED: Final = {
    "s3:GetObject on the artefact": "asked by the command line of AWS on a machine that boots",
    "autoscaling:CompleteLifecycleAction": "asked by scripts/complete-termination on a machine that goes",
}
"""Actions of a machine's role that no agent asks for; tests of their own use them."""


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


def test_an_agent_with_the_role_of_a_machine_and_an_application_do_all_their_work(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.infra.cloudjobs import work

    use(monkeypatch, place.application())
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.world.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    client = Client.from_settings(**place.settings.model_dump(include={"store", "wake_queue_url", "blob_bucket"}))
    with RunningAgent(place, tmp_path) as agent:
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
        print("DB", client._doorbell, getattr(client._doorbell, "problem", None), place.aws("sqs").get_queue_attributes(QueueUrl=place.outputs["WakeQueueUrl"], AttributeNames=["All"])["Attributes"])
        for task in ends:
            assert client.wait(task, timeout_s=9).status in (Status.SUCCESS, Status.FAILED), task
        assert client.wait(ends[3]).result == LARGE
        client.cancel(held)
        assert client.wait(held, timeout_s=9).status is Status.DONE
        client.retry(ends[4])
        until(lambda: agent.actions >= wanted_actions(place), 30.0, lambda: str(wanted_actions(place) - agent.actions))
        assert agent.stop() == 0
    denied = [
        line for line in agent.log.path.read_text().splitlines() if "not allowed" in line or "AccessDenied" in line
    ]
    assert denied == []
    assert agent.actions == wanted_actions(place)
    client.close()


def wanted_actions(place: Place) -> set[str]:
    """Every action that the policy of agents allows, out of the template that was deployed."""
    rendered = Rendered(
        "agents",
        {
            "ArtefactBucket": "artefacts",
            "ArtefactKey": "a.tar.gz",
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
