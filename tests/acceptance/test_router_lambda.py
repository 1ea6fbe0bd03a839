"""The function of the guide, as Lambda runs it: behind EventBridge, SNS, API Gateway and a function URL."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import LONG_S, ROOT, until
from thunderagent.model.errors import TaskNotFound
from thunderagent.model.task import Status, Task
from thunderagent.settings import Settings
from thunderagent.stores.aws import new_session

pytestmark = [pytest.mark.ministack, pytest.mark.processes]

REGION: Final = "us-east-1"
SECRET: Final = "hun" + "ter2"
BLOCKS: Final = re.findall(
    r"```python\n# (\S+\.py).*?\n(.*?)```", (ROOT / "docs" / "guides" / "router.md").read_text(), re.DOTALL
)


def order(number: str, **changes: Any) -> dict[str, Any]:
    """What a shop sends."""
    return {"order_id": number, "lines": ["tea"], **changes}


def event_of(detail: Any, event_id: str) -> dict[str, Any]:
    """An event of EventBridge."""
    return {
        "version": "0",
        "id": event_id,
        "detail-type": "OrderPlaced",
        "source": "shop",
        "account": "000000000000",
        "time": "2026-07-30T12:00:00Z",
        "region": REGION,
        "resources": [],
        "detail": detail,
    }


def records_of(message: Any, message_id: str) -> dict[str, Any]:
    """Records of SNS."""
    content: dict[str, Any] = {
        "Type": "Notification",
        "MessageId": message_id,
        "TopicArn": f"arn:aws:sns:{REGION}:000000000000:uploads",
        "Subject": None,
        "Message": json.dumps(message),
        "Timestamp": "2026-07-30T12:00:00.000Z",
        "MessageAttributes": {},
    }
    return {"Records": [{"EventSource": "aws:sns", "EventVersion": "1.0", "EventSubscriptionArn": "x", "Sns": content}]}


def request_of(body: Any, key: str, version: str) -> dict[str, Any]:
    """A request as API Gateway hands it over."""
    headers = {"content-type": "application/json", "idempotency-key": key}
    common = {"headers": headers, "body": json.dumps(body), "isBase64Encoded": False}
    if version == "1.0":
        return common | {"httpMethod": "POST", "path": "/orders", "requestContext": {"stage": "prod", "requestId": "r"}}
    http_context = {"method": "POST", "path": "/prod/orders"}
    context = {"stage": "prod", "requestId": "r", "http": http_context}
    return common | {"version": "2.0", "rawPath": "/prod/orders", "requestContext": context}


@dataclass(slots=True)
class Cloud:
    """The local AWS with a function in it; every test gets a function of its own."""

    place: Place
    endpoint: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    wake_queue: str = ""

    @property
    def function(self) -> str:
        return f"router-{self.mark}"

    @property
    def arn(self) -> str:
        return f"arn:aws:lambda:{REGION}:000000000000:function:{self.function}"

    def aws(self, service: str) -> Any:
        """A client of a service."""
        return new_session(local=True).client(service, region_name=REGION, endpoint_url=self.endpoint)

    def create_queue(self, name: str) -> tuple[str, str]:
        """URL and ARN of a new queue."""
        url = self.aws("sqs").create_queue(QueueName=f"{name}-{self.mark}")["QueueUrl"]
        return url, f"arn:aws:sqs:{REGION}:000000000000:{name}-{self.mark}"

    def deploy(self, folder: Path, **settings: str) -> None:
        """Create the function from the files of the guide."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for path in sorted(folder.rglob("*.py")):
                archive.write(path, str(path.relative_to(folder)))
        given = {"store": self.place.url, "log_json": "1", **settings}
        if "wake_queue_url" in Settings.model_fields:
            self.wake_queue, _ = self.create_queue("wake")
            given["wake_queue_url"] = self.wake_queue
        lambdas = self.aws("lambda")
        lambdas.create_function(
            FunctionName=self.function,
            Runtime="python3.11",
            Handler="lambda_function.handler",
            Role="arn:aws:iam::000000000000:role/router",
            Code={"ZipFile": content.getvalue()},
            Timeout=30,
            Environment={"Variables": {f"THUNDERAGENT_{name.upper()}": value for name, value in given.items()}},
        )
        until(
            lambda: lambdas.get_function(FunctionName=self.function)["Configuration"]["State"] == "Active",
            10.0,
            "an active function",
        )

    def invoke(self, event: Any) -> tuple[bool, Any]:
        """True and the answer of the function, or False and its error."""
        answer = self.aws("lambda").invoke(FunctionName=self.function, Payload=json.dumps(event).encode())
        return "FunctionError" not in answer, json.loads(answer["Payload"].read())

    def post(self, path: str, body: str, headers: dict[str, str]) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of a real request to the local AWS."""
        host, _, port = self.endpoint.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=40)
        try:
            connection.request("POST", path, body.encode(), headers)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            text = answer.read()
            return answer.status, names, json.loads(text) if text else None
        finally:
            connection.close()

    def rings(self) -> list[str]:
        """What is in the wake queue now."""
        answer = self.aws("sqs").receive_message(QueueUrl=self.wake_queue, MaxNumberOfMessages=10, WaitTimeSeconds=2)
        return [message["Body"] for message in answer.get("Messages", [])]

    def task(self, task_id: str) -> Task | None:
        try:
            return self.place.client.get(task_id)
        except TaskNotFound:
            return None


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """The files of the guide, as they are printed."""
    folder = tmp_path / "function"
    for name, text in BLOCKS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "shop" / "__init__.py").touch()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.py")} == {
        "lambda_function.py",
        "test_orders.py",
        "shop/orders.py",
        "shop/__init__.py",
    }
    return folder


@pytest.fixture
def cloud(ministack_place: Place, ministack_endpoint: str) -> Iterator[Cloud]:
    """The local AWS, without a function yet."""
    one = Cloud(ministack_place, ministack_endpoint)
    yield one
    lambdas = one.aws("lambda")
    if any(found["FunctionName"] == one.function for found in lambdas.list_functions()["Functions"]):
        lambdas.delete_function(FunctionName=one.function)  # ends its process


def test_events_of_each_kind_become_tasks_once_and_an_agent_runs_them(cloud: Cloud, guide: Path, start: Start) -> None:
    cloud.deploy(guide)
    ids: list[str] = []
    for event in (event_of(order("1"), "event-1"), records_of({"key": "2"}, "message-2")):
        first, again = cloud.invoke(event), cloud.invoke(event)
        assert first == again
        assert first[0], first
        ids += first[1]["task_ids"] if "task_ids" in first[1] else first[1]["records"][0]["task_ids"]
    for version in ("1.0", "2.0"):
        event = request_of(order(version), f"key-{version}", version)
        first, again = cloud.invoke(event), cloud.invoke(event)
        assert first == again
        assert (first[0], first[1]["statusCode"]) == (True, 202), first
        ids.append(json.loads(first[1]["body"])["task_id"])
    assert ids == [
        "orders.import@eventbridge:event-1",
        "orders.import@sns:message-2",
        "orders.report@sns:message-2",
        "orders.import@POST:/orders:key-1.0",
        "orders.import@POST:/orders:key-2.0",
    ]
    assert cloud.invoke(event_of(order("0", lines=[]), "event-0")) == (True, {"task_ids": []})
    assert {task.task_id for task in cloud.place.client.list(limit=None)} == set(ids)
    if cloud.wake_queue:
        assert any("event-1" in ring for ring in until(cloud.rings, LONG_S, "rings of the function"))

    start(cloud.place, jobs="shop", cwd=guide)
    for task_id in [one for one in ids if "report" not in one]:
        task = cloud.place.wait(task_id, Status.SUCCESS)
        assert task.fence == 1, task
    assert cloud.place.task(ids[0]).result == "imported 1"
    # Its parent is done, and it is told a moment after that; then it waits for its time.
    until(lambda: cloud.place.task(ids[2]).status is Status.PENDING, LONG_S, "a report whose parent is done")


def test_events_that_travel_through_the_services_arrive(cloud: Cloud, guide: Path) -> None:
    cloud.deploy(guide)
    events, topics, lambdas = cloud.aws("events"), cloud.aws("sns"), cloud.aws("lambda")

    events.put_rule(Name=cloud.function, EventPattern=json.dumps({"source": ["shop"]}))
    events.put_targets(Rule=cloud.function, Targets=[{"Id": "router", "Arn": cloud.arn}])
    entry = {"Source": "shop", "DetailType": "OrderPlaced", "Detail": json.dumps(order("by-eventbridge"))}
    [sent] = events.put_events(Entries=[entry])["Entries"]
    task_id = f"orders.import@eventbridge:{sent['EventId']}"
    until(lambda: cloud.task(task_id), LONG_S, f"{task_id} in {list(cloud.place.client.list())}")
    assert cloud.invoke(event_of(order("by-eventbridge"), sent["EventId"])) == (True, {"task_ids": [task_id]})
    events.remove_targets(Rule=cloud.function, Ids=["router"])
    events.delete_rule(Name=cloud.function)

    topic = topics.create_topic(Name="uploads")["TopicArn"]
    subscription = topics.subscribe(TopicArn=topic, Protocol="lambda", Endpoint=cloud.arn)["SubscriptionArn"]
    message_id = topics.publish(TopicArn=topic, Message=json.dumps({"key": "by-sns"}))["MessageId"]
    until(lambda: cloud.task(f"orders.report@sns:{message_id}"), LONG_S, "both tasks of the message")
    assert cloud.place.task(f"orders.report@sns:{message_id}").depends_on == (f"orders.import@sns:{message_id}",)
    topics.unsubscribe(SubscriptionArn=subscription)

    config = lambdas.create_function_url_config(FunctionName=cloud.function, AuthType="NONE")
    url_id = config["FunctionUrl"].removeprefix("https://").partition(".")[0]
    _check_http(cloud, f"/_aws/lambda-url/{url_id}/orders")
    _check_http(cloud, f"/_aws/execute-api/{_http_api(cloud)}/live/orders")
    _check_http(cloud, f"/restapis/{_rest_api(cloud)}/live/_user_request_/orders")


def test_what_does_not_fit_is_an_error_of_the_function_and_ends_in_the_dead_letter_queue(
    cloud: Cloud, guide: Path
) -> None:
    cloud.deploy(guide)
    for event, expected in (
        (
            event_of(order(SECRET, lines=SECRET), "bad"),
            "the detail does not fit: detail.lines: Input should be a valid",
        ),
        (event_of(order("1"), "bad") | {"detail-type": "Other"}, "there is no route for source 'shop' and detail-type"),
        (records_of([SECRET], "bad"), "the message does not fit: message: Input should be an object"),
        (
            {"Records": [{"eventSource": "aws:kinesis", "kinesis": {"data": SECRET}}]},
            "the event has Records (of aws:kinesis); a router takes",
        ),
    ):
        succeeded, error = cloud.invoke(event)
        assert not succeeded
        assert error["errorMessage"].startswith(expected)
        assert SECRET not in error["errorMessage"]
    url, arn = cloud.create_queue("dead")
    cloud.aws("lambda").put_function_event_invoke_config(
        FunctionName=cloud.function,
        MaximumRetryAttempts=1,
        DestinationConfig={"OnFailure": {"Destination": arn}},
    )
    bad = event_of(order("1", lines=None), "bad")
    cloud.aws("lambda").invoke(FunctionName=cloud.function, InvocationType="Event", Payload=json.dumps(bad).encode())

    def dead() -> Any:
        return cloud.aws("sqs").receive_message(QueueUrl=url, WaitTimeSeconds=1).get("Messages")

    [message] = until(dead, LONG_S, "the event in the dead letter queue")
    told = json.loads(message["Body"])
    assert told["requestPayload"]["id"] == "bad"
    assert told["responsePayload"]["errorMessage"].startswith("the detail does not fit: detail.lines: ")
    assert list(cloud.place.client.list()) == []


def test_a_function_whose_store_is_away_answers_503_over_http_and_fails_for_events(cloud: Cloud, guide: Path) -> None:
    with socket.socket() as unused:  # bound and not listening: every connection is refused
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        cloud.deploy(guide, store=f"dynamodb://TaskTable?region={REGION}&endpoint=http://127.0.0.1:{port}")
        succeeded, answer = cloud.invoke(request_of(order("1"), "key", "2.0"))
        assert (succeeded, answer["statusCode"], answer["headers"]["retry-after"]) == (True, 503, "5")
        succeeded, error = cloud.invoke(event_of(order("1"), "event-1"))
        assert not succeeded
        assert "127.0.0.1" in error["errorMessage"]


def _check_http(cloud: Cloud, path: str) -> None:
    key = uuid.uuid4().hex
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    first, again = (cloud.post(path, json.dumps(order(key)), headers) for _ in range(2))
    assert (first[0], first[2]) == (202, {"task_id": f"orders.import@POST:/orders:{key}"}), (path, first)
    assert again[2] == first[2]
    assert cloud.place.task(first[2]["task_id"]).payload_text == json.dumps({"order": key}, separators=(",", ":"))
    status, _, answer = cloud.post(path, json.dumps({"order_id": SECRET, "lines": SECRET}), headers)
    assert (status, [one["field"] for one in answer["problems"]]) == (400, ["body.lines"]), path
    assert SECRET not in json.dumps(answer)
    assert cloud.post(path, json.dumps(order("another")), headers)[0] == 422
    assert cloud.post(path, "{}", {"Content-Type": "text/plain"})[0] == 415


def _http_api(cloud: Cloud) -> str:
    apis = cloud.aws("apigatewayv2")
    api = apis.create_api(Name=cloud.function, ProtocolType="HTTP")["ApiId"]
    integration = apis.create_integration(
        ApiId=api, IntegrationType="AWS_PROXY", IntegrationUri=cloud.arn, PayloadFormatVersion="2.0"
    )["IntegrationId"]
    apis.create_route(ApiId=api, RouteKey="$default", Target=f"integrations/{integration}")
    apis.create_stage(ApiId=api, StageName="live", AutoDeploy=True)
    return str(api)


def _rest_api(cloud: Cloud) -> str:
    apis = cloud.aws("apigateway")
    api = apis.create_rest_api(name=cloud.function)["id"]
    [root] = apis.get_resources(restApiId=api)["items"]
    resource = apis.create_resource(restApiId=api, parentId=root["id"], pathPart="{proxy+}")["id"]
    apis.put_method(restApiId=api, resourceId=resource, httpMethod="ANY", authorizationType="NONE")
    apis.put_integration(
        restApiId=api,
        resourceId=resource,
        httpMethod="ANY",
        type="AWS_PROXY",
        integrationHttpMethod="POST",
        uri=f"arn:aws:apigateway:{REGION}:lambda:path/2015-03-31/functions/{cloud.arn}/invocations",
    )
    apis.create_deployment(restApiId=api, stageName="live")
    return str(api)
