"""The stacks `wsapi` and `failover` on a local engine that enforces IAM and notes every API call.

The engine gives each function the credentials of its role, so a permission that the template forgot is a test that
fails. What it does otherwise than AWS, and tests must know:

* it has no route responses and sends a function's answer without them;
* it selects no subprotocol, and refuses a handshake with 500 where an authorizer raises `Unauthorized` (AWS: 401);
* it takes frames of any size;
* a stack's tables get neither time to live nor recovery, and protection keeps no table when its stack goes;
* a condition on `cloudwatch:namespace` is never met;
* an alarm looks at all data of the metric's name within its periods as one, whatever their dimensions, and only when
  data come; one that never saw data stays INSUFFICIENT_DATA.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import boto3
from botocore.exceptions import ClientError
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.infra.rendering import INFRA
from tests.support.stands import eventually, is_healthy
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.protocol import BEARER, SUBPROTOCOL

REGION: Final = "eu-central-1"
BUCKET: Final = "artefacts"
NAMESPACE: Final = "ThunderAgentTest"
WAIT_S: Final = 60.0
STATE: Final = "ThunderAgentState"


@contextmanager
def strict_engine(folder: Path) -> Iterator[str]:
    """A local engine with `AUTH`: policies count. Yields its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "tmp").mkdir()
    # Functions inherit the environment of the engine, so it gets nothing of ours.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ} | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "AUTH": "true",
        "CLOUDTRAIL_RECORDING": "1",
        "PERSIST_STATE": "0",
        "SFTP_ENABLED": "0",
        "IOT_MTLS_ENABLED": "0",
        "LOG_LEVEL": "WARNING",
        "TMPDIR": str(folder / "tmp"),
        "DOCKER_HOST": f"unix://{folder / 'no-docker.sock'}",
    }
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ministack"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: is_healthy(port, process, log), WAIT_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(AssertionError):
            eventually(lambda: _has_ended(process), 15.0)
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for: the group is ours, with its functions
        process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, while its number stays taken."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@dataclass(slots=True)
class Cloud:
    """An account on the engine, with what was deployed into it."""

    endpoint: str
    issuer: Issuer = field(default_factory=Issuer)
    _clients: dict[str, Any] = field(default_factory=dict)

    def aws(self, service: str, endpoint: str | None = None) -> Any:
        """A client of a service that may do everything."""
        if service not in self._clients:
            session = boto3.Session(aws_access_key_id="test", aws_secret_access_key="test", region_name=REGION)
            self._clients[service] = session.client(service, endpoint_url=endpoint or self.endpoint)
        return self._clients[service]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    # Stacks

    def deploy(self, name: str, template: str, **parameters: str) -> dict[str, str]:
        """Create a stack, or update it with these parameters and all others as they are; its outputs."""
        stacks = self.aws("cloudformation")
        before = self.stack(name)
        kept = [
            {"ParameterKey": one["ParameterKey"], "UsePreviousValue": True}
            for one in (before or {}).get("Parameters", [])
            if one["ParameterKey"] not in parameters
        ]
        (stacks.update_stack if before else stacks.create_stack)(
            StackName=name,
            TemplateBody=(INFRA / f"{template}.yaml").read_text(encoding="utf-8"),
            Capabilities=["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
            Parameters=kept + [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        )
        stack = self.settled(name)
        assert stack is not None
        assert stack["StackStatus"] in ("CREATE_COMPLETE", "UPDATE_COMPLETE"), (stack, self.failures(name))
        return {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])}

    def delete(self, name: str) -> str:
        """Delete a stack; how that ended."""
        self.aws("cloudformation").delete_stack(StackName=name)
        stack = self.settled(name)
        return "DELETE_COMPLETE" if stack is None else str(stack["StackStatus"])

    def stack(self, name: str) -> dict[str, Any] | None:
        """A stack that was not deleted."""
        try:
            [stack] = self.aws("cloudformation").describe_stacks(StackName=name)["Stacks"]
        except ClientError:
            return None
        return None if stack["StackStatus"] == "DELETE_COMPLETE" else dict(stack)

    def settled(self, name: str) -> dict[str, Any] | None:
        """A stack that nothing is being done to any more."""

        def look() -> tuple[dict[str, Any] | None] | None:
            stack = self.stack(name)
            is_busy = stack is not None and stack["StackStatus"].endswith("_IN_PROGRESS")
            return None if is_busy else (stack,)

        return eventually(look, WAIT_S)[0]

    def failures(self, name: str) -> list[str]:
        """Why a stack failed."""
        events = self.aws("cloudformation").describe_stack_events(StackName=name)["StackEvents"]
        return [f"{one['LogicalResourceId']}: {one.get('ResourceStatusReason')}" for one in events if "FAILED" in
                one["ResourceStatus"]]  # fmt: skip

    def resources(self, name: str) -> dict[str, str]:
        """Physical ids of a stack's resources."""
        found = self.aws("cloudformation").describe_stack_resources(StackName=name)["StackResources"]
        return {one["LogicalResourceId"]: one.get("PhysicalResourceId", "") for one in found}

    # What is in it

    def row(self, table: str, row_id: str) -> dict[str, Any] | None:
        """A row as DynamoDB has it, without the types."""
        reply = self.aws("dynamodb").get_item(TableName=table, Key={"taskId": {"S": row_id}}, ConsistentRead=True)
        item = reply.get("Item")
        return None if item is None else {name: next(iter(value.values())) for name, value in item.items()}

    def rows(self, table: str) -> set[str]:
        """Ids of all rows."""
        return {item["taskId"]["S"] for item in self.aws("dynamodb").scan(TableName=table)["Items"]}

    def invoke(self, function: str) -> tuple[bool, Any]:
        """True and what a function answers, or False and its error."""
        reply = self.aws("lambda").invoke(FunctionName=function, Payload=b"{}")
        return "FunctionError" not in reply, json.loads(reply["Payload"].read())

    def key_of(self, function: str) -> str:
        """The access key of a function's role, as the engine makes it."""
        config = self.aws("lambda").get_function(FunctionName=function)["Configuration"]
        made_of = f"{config['FunctionArn']}:{config['Role']}"
        return f"ASIA{hashlib.sha256(made_of.encode()).hexdigest()[:16].upper()}"

    def was_called(self, action: str, key: str) -> bool:
        """Whether somebody with this access key made a call, such as `dynamodb:GetItem`."""
        attributes = {"EventName": action.partition(":")[2], "AccessKeyId": key}
        lookup = [{"AttributeKey": name, "AttributeValue": value} for name, value in attributes.items()]
        return bool(self.aws("cloudtrail").lookup_events(LookupAttributes=lookup, MaxResults=1)["Events"])

    def forget_conditions(self, role: str, policy: str) -> None:
        """Take the conditions out of a role's policy, those that the engine cannot judge."""
        iam = self.aws("iam")
        document = iam.get_role_policy(RoleName=role, PolicyName=policy)["PolicyDocument"]
        for statement in document["Statement"]:
            statement.pop("Condition", None)
        iam.put_role_policy(RoleName=role, PolicyName=policy, PolicyDocument=json.dumps(document))

    def restricted(self, name: str, policy_arn: str) -> Mapping[str, str]:
        """The credentials of a user who may do what a policy says, as environment variables."""
        iam = self.aws("iam")
        iam.create_user(UserName=name)
        iam.attach_user_policy(UserName=name, PolicyArn=policy_arn)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            "AWS_DEFAULT_REGION": REGION,
        }


@contextmanager
def client_of(url: str, token: str | None, *, as_subprotocol: bool = False) -> Iterator[Client]:
    """A client of the API that was deployed.

    Raises:
        InvalidStatus: it may not connect.
    """
    with connect(
        url,
        additional_headers={} if token is None or as_subprotocol else {"Authorization": f"Bearer {token}"},
        subprotocols=[Subprotocol(SUBPROTOCOL), Subprotocol(f"{BEARER}{token}")] if as_subprotocol else None,
        open_timeout=WAIT_S,
        close_timeout=5,
        proxy=None,
        max_size=2**20,
    ) as socket_:
        yield Client(socket_)


@dataclass(frozen=True, slots=True)
class Client:
    """A connection to the API."""

    socket: ClientConnection

    def ask(self, **message: Any) -> Any:
        """Send a message and receive the next."""
        self.socket.send(json.dumps(message))
        return self.receive()

    def receive(self) -> Any:
        """The next message."""
        return json.loads(self.socket.recv(WAIT_S))
