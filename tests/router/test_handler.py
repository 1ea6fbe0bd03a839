"""Events become tasks: recognised, typed, rejected with a clear answer, and the same task when they come again."""

from __future__ import annotations

import base64
import copy
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tests.support import sample_events
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, EventRejected, ParentNotFound, StoreUnavailable
from thunderagent.model.task import Status
from thunderagent.router import (
    Enqueue,
    EventBridgeEvent,
    HttpRequest,
    Router,
    S3Event,
    S3Object,
    SnsRecord,
    SqsMessage,
    Tasks,
)
from thunderagent.router.http import BODY_LIMIT
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import Fault, FaultyEngine, Recorder, memory_client

SECRET: Final = "hun" + "ter2"
EVENT_ID: Final = "6a7e8feb-b491-4cf7-a9f1-bf3703467718"
MESSAGE_ID: Final = "95df01b4-ee98-5cb9-9903-4c221d41eb5e"
TOPIC: Final = "arn:aws:sns:eu-central-1:123456789012:uploads"


class Order(BaseModel):
    order: str
    placed: date | None = None
    amount: int = 1

    @field_validator("order")
    @classmethod
    def _is_an_order(cls, value: str) -> str:
        if value == SECRET:
            raise ValueError(f"{value} is not an order")
        if value == "later":
            raise ValueError("orders are placed now")
        return value


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    placed: date
    lines: list[int] = Field(default_factory=list)


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Incomplete(BaseModel):
    part: NoSuchType  # type: ignore[name-defined] # noqa: F821


class Import(BaseModel):
    order: str = Field(max_length=20)


@job("orders.import", queue="orders")
def import_order(ctx: Context, payload: Import) -> None:
    """Never runs here."""


@job("orders.mail")
def mail(ctx: Context, payload: str) -> None:
    """Never runs here."""


def eventbridge(detail: Any = None, **changes: Any) -> dict[str, Any]:
    """An event as EventBridge hands it to Lambda."""
    return {
        "version": "0",
        "id": EVENT_ID,
        "detail-type": "OrderPlaced",
        "source": "shop",
        "account": "123456789012",
        "time": "2026-07-30T12:00:00Z",
        "region": "eu-central-1",
        "resources": ["arn:aws:shop:eu-central-1:123456789012:orders/7"],
        "detail": {"order": "7"} if detail is None else detail,
        **changes,
    }


def sns(*messages: Any, topic: str = TOPIC) -> dict[str, Any]:
    """Messages as SNS hands them to Lambda."""
    return {
        "Records": [
            {
                "EventVersion": "1.0",
                "EventSubscriptionArn": f"{topic}:21be56ed-a058-49f5-8c98-aedd2564c486",
                "EventSource": "aws:sns",
                "Sns": {
                    "Type": "Notification",
                    "MessageId": MESSAGE_ID if number == 0 else f"{MESSAGE_ID}-{number}",
                    "TopicArn": topic,
                    "Subject": None,
                    "Message": message if isinstance(message, str) else json.dumps(message),
                    "Timestamp": "2026-07-30T12:00:00.000Z",
                    "SignatureVersion": "1",
                    "Signature": "EXAMPLE",
                    "SigningCertUrl": "https://sns.eu-central-1.amazonaws.com/cert.pem",
                    "UnsubscribeUrl": "https://sns.eu-central-1.amazonaws.com/?Action=Unsubscribe",
                    "MessageAttributes": {"shop": {"Type": "String", "Value": "berlin"}},
                },
            }
            for number, message in enumerate(messages)
        ]
    }


JSON: Final = {"Content-Type": "application/json"}


def request_v1(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **changes: Any
) -> dict[str, Any]:
    """A request as API Gateway hands it over in payload format 1.0."""
    given = {**JSON, **(headers or {})}
    return {
        "resource": path,
        "path": path,
        "httpMethod": method,
        "headers": given,
        "multiValueHeaders": {name: [value] for name, value in given.items()},
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "pathParameters": None,
        "stageVariables": None,
        "requestContext": {
            "accountId": "123456789012",
            "stage": "prod",
            "requestId": "request-1",
            "path": f"/prod{path}",
            "httpMethod": method,
            "identity": {"sourceIp": "192.0.2.1"},
        },
        "body": body if body is None or isinstance(body, str) else json.dumps(body),
        "isBase64Encoded": False,
        **changes,
    }


def request_v2(
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    stage: str = "$default",
    **more: Any,
) -> dict[str, Any]:
    """A request as API Gateway and function URLs hand it over in payload format 2.0."""
    raw = path if stage == "$default" else f"/{stage}{path}"
    event: dict[str, Any] = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": raw,
        "rawQueryString": "",
        "headers": {name.lower(): value for name, value in {**JSON, **(headers or {})}.items()},
        "requestContext": {
            "accountId": "123456789012",
            "http": {"method": method, "path": raw, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1", "userAgent": "t"},
            "requestId": "request-1",
            "stage": stage,
        },
        "isBase64Encoded": False,
    }
    if body is not None:
        event["body"] = body if isinstance(body, str) else json.dumps(body)
    return event | more


Make = Any  # one of the two functions above
both_formats = pytest.mark.parametrize("make", [request_v1, request_v2], ids=["v1", "v2"])


def answer_of(answer: dict[str, Any]) -> tuple[int, Any]:
    """Status and body of an answer over HTTP, which is one that both formats take."""
    assert set(answer) == {"statusCode", "headers", "body", "isBase64Encoded"}
    assert all(isinstance(value, str) for value in answer["headers"].values())
    json.dumps(answer)
    return answer["statusCode"], json.loads(answer["body"]) if answer["body"] else None


class Shop:
    """A router with a route of each kind, the client behind it, and what it told."""

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        self.client = client or memory_client()
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.router = Router(self.client, bus=self.bus, **options)
        self.answer: Any = None
        """What the routes answer with instead of their own, if it is set."""
        self.seen: list[Any] = []

        @self.router.eventbridge(source="shop", detail_type="OrderPlaced")
        def order_placed(detail: Order, event: EventBridgeEvent) -> Tasks:
            return self._answer(detail, event)

        @self.router.sns(topic=TOPIC)
        def uploaded(message: Order, record: SnsRecord) -> Tasks:
            return self._answer(message, record)

        @self.router.http("POST", "/orders")
        def posted(body: Order, request: HttpRequest) -> Tasks:
            return self._answer(body, request)

    def _answer(self, content: Order, event: Any) -> Tasks:
        self.seen.append((content, event))
        if self.answer is None:
            return Enqueue(import_order, Import(order=content.order))
        answer: Tasks = self.answer(content) if callable(self.answer) else self.answer
        return answer

    def handle(self, event: Any) -> dict[str, Any]:
        """What Lambda would get, and proof that the event was left as it was."""
        before = copy.deepcopy(event)
        try:
            answer = self.router.handler(event, None)
        finally:
            assert event == before
        json.dumps(answer)
        return answer

    def post(self, body: Any, headers: dict[str, str] | None = None, make: Make = request_v2, **more: Any) -> Any:
        return answer_of(self.handle(make("POST", "/orders", body, headers, **more)))

    @property
    def number(self) -> int:
        return len(list(self.client.list(limit=None)))


@pytest.fixture
def shop() -> Iterator[Shop]:
    one = Shop()
    yield one
    one.client.close()


# Tasks of events


def test_an_event_of_eventbridge_becomes_a_task_with_the_typed_payload(shop: Shop) -> None:
    answer = shop.handle(eventbridge({"order": "7", "placed": "2026-07-30"}))
    assert answer == {"task_ids": [f"orders.import@eventbridge:{EVENT_ID}"]}
    task = shop.client.get(answer["task_ids"][0])
    assert (task.job, task.queue, json.loads(task.payload_text)) == ("orders.import", "orders", {"order": "7"})
    [(detail, event)] = shop.seen
    assert detail == Order(order="7", placed=date(2026, 7, 30))
    assert (event.id, event.source, event.region) == (EVENT_ID, "shop", "eu-central-1")
    assert event.resources == ("arn:aws:shop:eu-central-1:123456789012:orders/7",)
    assert event.time.isoformat() == "2026-07-30T12:00:00+00:00"


def test_a_message_of_sns_becomes_a_task_with_the_typed_payload(shop: Shop) -> None:
    answer = shop.handle(sns({"order": "7"}))
    task_id = f"orders.import@sns:{MESSAGE_ID}"
    assert answer == {"records": [{"message_id": MESSAGE_ID, "task_ids": [task_id]}]}
    assert json.loads(shop.client.get(task_id).payload_text) == {"order": "7"}
    [(_, record)] = shop.seen
    assert (record.topic, record.attributes, record.subject) == (TOPIC, {"shop": "berlin"}, None)


@both_formats
def test_a_request_over_http_becomes_a_task_and_is_told_its_id(shop: Shop, make: Make) -> None:
    status, body = shop.post({"order": "7"}, make=make)
    assert status == 202
    assert shop.client.get(body["task_id"]).job == "orders.import"
    [(_, request)] = shop.seen
    assert (request.method, request.path, request.request_id) == ("POST", "/orders", "request-1")
    assert request.body == b'{"order": "7"}'


TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
OTHER: Final = f"00-{TRACE}-00f067aa0ba902b7-01"
XRAY: Final = f"Root=1-{TRACE[:8]}-{TRACE[8:]};Parent=b7ad6b7169203331;Sampled=1"


@both_formats
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Amzn-Trace-Id": XRAY},
            f"00-{TRACE}-00f067aa0ba902b7-01",
        ),
        ({"traceparent": "nonsense", "X-Amzn-Trace-Id": XRAY}, f"00-{TRACE}-b7ad6b7169203331-01"),
        ({"X-Amzn-Trace-Id": XRAY.partition(";")[0]}, None),
        ({}, None),
    ],
)
def test_a_task_belongs_to_the_trace_of_its_request(
    shop: Shop, make: Make, headers: dict[str, str], expected: str | None
) -> None:
    _, body = shop.post({"order": "7"}, headers, make=make)
    assert shop.client.get(body["task_id"]).traceparent == expected
    assert shop.client.enqueue("a.job").traceparent is None, "the next one has none"


@pytest.mark.parametrize(
    ("invoked", "expected"),
    [(XRAY, f"00-{TRACE}-b7ad6b7169203331-01"), (XRAY.replace("Sampled=1", "Sampled=0"), None)],
)
def test_the_task_of_an_event_belongs_to_the_trace_of_its_invocation_if_that_is_recorded(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, invoked: str, expected: str | None
) -> None:
    monkeypatch.setenv("_X_AMZN_TRACE_ID", invoked)
    [task_id] = shop.router.handler(eventbridge())["task_ids"]
    assert shop.client.get(task_id).traceparent == expected
    _, body = shop.post({"order": "7"}, {"traceparent": OTHER})
    assert shop.client.get(body["task_id"]).traceparent == OTHER, "a request names its own"


@pytest.mark.parametrize("event", [eventbridge(), {"no": "event"}], ids=["good", "bad"])
def test_spans_are_sent_before_lambda_stands_still(
    shop: Shop, event: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("thunderagent.telemetry.traces.flush", lambda: flushed.append(shop.number))
    with suppress(EventRejected):
        shop.router.handler(event)
    assert flushed == [shop.number]


def test_options_reach_the_task(shop: Shop) -> None:
    parent = shop.client.enqueue(mail, "parent")
    shop.answer = Enqueue(
        import_order, Import(order="7"), queue="bulk", max_retry=7, depends_on=[parent], on_parent_failure="run"
    )
    [task_id] = shop.handle(eventbridge())["task_ids"]
    task = shop.client.get(task_id)
    assert (task.queue, task.max_retry, task.depends_on) == ("bulk", 7, (parent.task_id,))
    assert (task.status, task.on_parent_failure) == (Status.BLOCKED, "run")
    shop.answer = Enqueue(import_order, Import(order="7"), delay_s=3600)
    [task_id] = shop.handle(eventbridge(id="later"))["task_ids"]
    assert shop.client.get(task_id).created_at > shop.client.store.clock.now() + 3000


def test_only_the_options_that_were_given_are_passed_on(monkeypatch: pytest.MonkeyPatch, shop: Shop) -> None:
    given: list[dict[str, Any]] = []
    task = shop.client.enqueue(mail, "x")

    def enqueue(job: Any, payload: Any, **options: Any) -> Any:
        given.append(options)
        return task

    monkeypatch.setattr(shop.client, "enqueue", enqueue)
    shop.handle(eventbridge())
    shop.answer = Enqueue(
        mail, "x", unique_key="k", unique_scope="until_start", limit_key="api", limit=3, run_at=5.0, task_id="mine"
    )
    shop.handle(eventbridge())
    assert given == [
        {"task_id": f"orders.import@eventbridge:{EVENT_ID}"},
        {
            "task_id": "mine",
            "unique_key": "k",
            "unique_scope": "until_start",
            "limit_key": "api",
            "limit": 3,
            "run_at": 5.0,
        },
    ]


def test_a_job_may_be_named_without_its_code(shop: Shop) -> None:
    shop.answer = Enqueue("elsewhere.import", {"order": "7"})
    [task_id] = shop.handle(eventbridge())["task_ids"]
    assert task_id == f"elsewhere.import@eventbridge:{EVENT_ID}"
    assert shop.client.get(task_id).job == "elsewhere.import"


def test_an_event_that_is_not_wanted_makes_no_task(shop: Shop) -> None:
    shop.answer = lambda order: None
    assert shop.handle(eventbridge()) == {"task_ids": []}
    assert shop.handle(sns({"order": "7"})) == {"records": [{"message_id": MESSAGE_ID, "task_ids": []}]}
    assert shop.post({"order": "7"}) == (204, None)
    assert shop.number == 0


def test_a_list_over_http_is_answered_with_a_list_however_long(shop: Shop) -> None:
    for number in (0, 1, 2):
        shop.answer = [Enqueue(mail, str(one)) for one in range(number)]
        status, body = shop.post({"order": "7"})
        assert (status, len(body["task_ids"])) == (202, number)
    assert shop.number == 3


def test_a_task_may_depend_on_one_before_it_in_the_same_answer(shop: Shop) -> None:
    load = Enqueue(import_order, Import(order="7"))
    shop.answer = [load, Enqueue(mail, "done", depends_on=[load])]
    first, second = shop.handle(eventbridge())["task_ids"]
    assert shop.client.get(second).depends_on == (first,)
    child = Enqueue(mail, "done", depends_on=[load])
    shop.answer = [child, load]
    with pytest.raises(ConfigurationError, match=r"Enqueue\('orders.import'\) in depends_on must stand before"):
        shop.handle(eventbridge(id="other"))


# Again


def test_each_kind_of_event_that_comes_again_gives_the_task_that_exists(shop: Shop) -> None:
    for event in (
        eventbridge(),
        sns({"order": "7"}),
        request_v1("POST", "/orders", {"order": "7"}, {"Idempotency-Key": "key-1"}),
        request_v2("POST", "/orders", {"order": "7"}, {"Idempotency-Key": "key-2"}),
    ):
        before = shop.number
        assert shop.handle(event) == shop.handle(event)
        assert shop.number == before + 1


def test_several_tasks_of_an_event_have_ids_that_stay(shop: Shop) -> None:
    shop.answer = [Enqueue(mail, "a"), Enqueue(import_order, Import(order="7")), Enqueue(mail, "b")]
    expected = [
        f"orders.mail@eventbridge:{EVENT_ID}",
        f"orders.import@eventbridge:{EVENT_ID}",
        f"orders.mail@eventbridge:{EVENT_ID}+2",
    ]
    assert shop.handle(eventbridge())["task_ids"] == expected
    assert shop.handle(eventbridge())["task_ids"] == expected
    assert shop.number == 3
    assert [json.loads(shop.client.get(expected[n]).payload_text) for n in (0, 2)] == ["a", "b"]


def test_a_delivery_that_ended_in_between_is_completed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    shop = Shop(Client(TaskStore(engine), load_settings(store=f"sqlite://{MEMORY}")))
    shop.answer = [Enqueue(mail, "a"), Enqueue(import_order, Import(order="7")), Enqueue(mail, "b")]
    enqueue = shop.client.enqueue

    def failing_at_the_second(job: Any, payload: Any, **options: Any) -> Any:
        if job is import_order:
            engine.fail("put", Fault.LOST_REQUEST)
        return enqueue(job, payload, **options)

    monkeypatch.setattr(shop.client, "enqueue", failing_at_the_second)
    with pytest.raises(StoreUnavailable):
        shop.handle(eventbridge())
    assert shop.number == 1
    monkeypatch.undo()
    assert len(shop.handle(eventbridge())["task_ids"]) == 3
    assert shop.number == 3


def test_two_functions_that_listen_to_one_event_do_not_take_each_others_ids(shop: Shop) -> None:
    other = Shop(shop.client)
    other.answer = Enqueue(mail, "b")
    assert shop.handle(eventbridge()) != other.handle(eventbridge())
    assert shop.number == 2


def test_an_event_that_comes_again_after_its_route_has_changed_gives_the_task_that_exists(shop: Shop) -> None:
    first = shop.handle(eventbridge())
    shop.answer = Enqueue(import_order, Import(order="another spelling"))
    assert shop.handle(eventbridge()) == first
    assert json.loads(shop.client.get(first["task_ids"][0]).payload_text) == {"order": "7"}


def test_a_key_that_was_used_for_another_request_is_told_so(shop: Shop) -> None:
    status, _ = shop.post({"order": "7"}, {"Idempotency-Key": "k"})
    assert status == 202
    status, body = shop.post({"order": "8"}, {"Idempotency-Key": "k"})
    assert status == 422
    assert "Idempotency-Key was used for another request" in body["error"]
    assert shop.number == 1


def test_an_id_of_the_routes_own_that_is_taken_is_a_conflict(shop: Shop) -> None:
    shop.client.enqueue(mail, "x", task_id="mine")
    shop.answer = Enqueue(import_order, Import(order="7"), task_id="mine")
    assert shop.post({"order": "7"}, {"Idempotency-Key": "k"})[0] == 409
    with pytest.raises(EventRejected, match=r"'mine' exists with the job 'orders\.mail'"):
        shop.handle(eventbridge())


def test_an_id_that_somebody_gave_to_another_job_is_not_taken_for_an_earlier_delivery(shop: Shop) -> None:
    shop.client.enqueue(mail, "x", task_id=f"orders.import@eventbridge:{EVENT_ID}")
    with pytest.raises(EventRejected, match=r"exists with the job 'orders\.mail'"):
        shop.handle(eventbridge())


def test_requests_without_a_key_are_new_tasks(shop: Shop) -> None:
    assert shop.post({"order": "7"})[1] != shop.post({"order": "7"})[1]
    assert shop.number == 2


def test_a_key_counts_for_its_route_alone() -> None:
    router = Router(client := memory_client())
    for path in ("/orders", "/returns/{order}"):

        @router.http("POST", path)
        def posted(body: Order, request: HttpRequest) -> Tasks:
            return Enqueue(mail, request.path)

    ids = [
        answer_of(router.handler(request_v2("POST", path, {"order": "7"}, {"Idempotency-Key": "1"})))[1]["task_id"]
        for path in ("/orders", "/returns/7")
    ]
    assert ids == ["orders.mail@POST:/orders:1", "orders.mail@POST:/returns/{order}:1"]
    assert all(client.get(one) for one in ids)


@pytest.mark.parametrize("key", ["8e03978e-40d5", '"8e03978e-40d5"', " 8e03978e-40d5 "])
def test_a_key_may_be_quoted_as_a_structured_header_is(shop: Shop, key: str) -> None:
    assert shop.post({"order": "7"}, {"idempotency-KEY": key}) == (
        202,
        {"task_id": "orders.import@POST:/orders:8e03978e-40d5"},
    )


@pytest.mark.parametrize("key", ["a#b", "ключ", "a+2", "\x00\x1b", "%23", "🦊" * 20])
def test_any_key_can_be_part_of_an_id(shop: Shop, key: str) -> None:
    status, body = shop.post({"order": "7"}, {"Idempotency-Key": key})
    assert (status, body) == shop.post({"order": "7"}, {"Idempotency-Key": key})
    assert status == 202
    assert shop.post({"order": "7"}, {"Idempotency-Key": f"{key}."})[1] != body


def test_no_key_can_be_spelled_like_the_second_task_of_another(shop: Shop) -> None:
    shop.answer = [Enqueue(mail, "a"), Enqueue(mail, "b")]
    first = shop.post({"order": "7"}, {"Idempotency-Key": "k"})[1]["task_ids"]
    second = shop.post({"order": "7"}, {"Idempotency-Key": "k+2"})[1]["task_ids"]
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "🦊" * 22])
def test_a_key_that_is_empty_or_too_long_is_rejected(shop: Shop, key: str) -> None:
    status, body = shop.post({"order": "7"}, {"Idempotency-Key": key})
    assert (status, body["error"]) == (400, "the Idempotency-Key must have 1 to 255 characters")


# Rejections


def test_what_does_not_fit_is_rejected_with_fields_and_messages_and_without_values(shop: Shop) -> None:
    wrong = {"order": SECRET, "placed": SECRET, "amount": SECRET}
    with pytest.raises(EventRejected) as eventbridge_error:
        shop.handle(eventbridge(wrong))
    with pytest.raises(EventRejected) as sns_error:
        shop.handle(sns(wrong))
    status, body = shop.post(wrong)
    for root, message in (
        ("detail", str(eventbridge_error.value)),
        ("message", str(sns_error.value)),
        ("body", body["error"]),
    ):
        assert message.startswith(f"the {root} does not fit: {root}.order: Not acceptable (value_error); ")
        assert f"{root}.amount: Input should be a valid integer" in message
        assert SECRET not in message
    assert (status, [one["field"] for one in body["problems"]]) == (400, ["body.order", "body.placed", "body.amount"])
    assert SECRET not in json.dumps(body) + repr(shop.record.of(edge_events.EventRefused)) + repr(shop.seen)
    assert len(shop.record.of(edge_events.EventRefused)) == 3
    assert shop.number == 0


def test_what_a_validator_says_is_kept_when_it_does_not_quote_the_value(shop: Shop) -> None:
    _, body = shop.post({"order": "later"})
    assert body["problems"] == [{"field": "body.order", "message": "Value error, orders are placed now"}]


def test_the_tag_of_a_union_is_not_quoted() -> None:
    router = Router(memory_client())

    @router.http("POST", "/pets")
    def pets(body: Annotated[Cat | Dog, Field(discriminator="kind")], request: HttpRequest) -> Tasks:
        return None

    status, body = answer_of(router.handler(request_v2("POST", "/pets", {"kind": SECRET})))
    assert status == 400
    assert body["problems"] == [{"field": "body", "message": "The tag 'kind' must be one of 'cat', 'dog'"}]


def test_very_many_problems_are_told_in_short(shop: Shop) -> None:
    router = Router(memory_client())

    @router.http("POST", "/")
    def many(body: dict[str, int], request: HttpRequest) -> Tasks:
        return None

    status, body = answer_of(router.handler(request_v2("POST", "/", {"k" * 5000 + str(n): "x" for n in range(40)})))
    assert (status, len(body["problems"])) == (400, 21)
    assert body["problems"][-1] == {"field": "body", "message": "and 20 more"}
    assert len(json.dumps(body)) < 16_000


def test_a_payload_that_does_not_fit_its_job_is_a_rejection_too(shop: Shop) -> None:
    shop.answer = lambda order: Enqueue(import_order, Import(order=order.order))
    status, body = shop.post({"order": SECRET[0] * 21})
    assert (status, body["problems"][0]["field"]) == (400, "payload.order")
    shop.answer = lambda order: Enqueue(import_order, order)
    with pytest.raises(EventRejected, match=r"does not fit the job 'orders\.import'"):
        shop.handle(eventbridge())
    shop.answer = lambda order: Enqueue("by.name", {"at": order.placed})
    assert shop.post({"order": "7", "placed": "2026-07-30"})[0] == 400


def test_no_task_is_put_when_the_payload_of_one_does_not_fit(shop: Shop) -> None:
    shop.answer = lambda order: [Enqueue(mail, "good"), Enqueue(import_order, order)]
    assert shop.post({"order": "7"})[0] == 400
    assert shop.number == 0


def test_a_payload_that_is_too_large_for_the_store_is_413(shop: Shop) -> None:
    shop.answer = Enqueue(mail, "x" * 400_000)
    assert shop.post({"order": "7"})[0] == 413


def test_a_route_may_reject_in_its_own_words(shop: Shop) -> None:
    def refuse(order: Order) -> Tasks:
        raise EventRejected("the shop is closed", status=403)

    shop.answer = refuse
    assert shop.post({"order": "7"}) == (403, {"error": "the shop is closed"})
    with pytest.raises(EventRejected, match="the shop is closed"):
        shop.handle(eventbridge())


def test_a_status_of_a_rejection_that_is_none_becomes_400(shop: Shop) -> None:
    def refuse(order: Order) -> Tasks:
        raise EventRejected("no", status=200)

    shop.answer = refuse
    assert shop.post({"order": "7"})[0] == 400


def test_an_event_without_a_route_is_rejected_and_told_the_routes(shop: Shop) -> None:
    with pytest.raises(EventRejected, match=r"no route for source 'shop' and detail-type 'OrderGone'; there are event"):
        shop.handle(eventbridge(**{"detail-type": "OrderGone"}))
    with pytest.raises(EventRejected, match=r"no route for the topic 'arn:[^']+:other'; there are sns\(topic='arn"):
        shop.handle(sns({"order": "7"}, topic="arn:aws:sns:eu-central-1:123456789012:other"))
    with pytest.raises(EventRejected, match="there are none"):
        Router(shop.client).handler(eventbridge())


def test_dropping_answers_with_what_was_rejected_and_raises_nothing() -> None:
    shop = Shop(on_reject="drop")
    answer = shop.handle(eventbridge({"order": 7, "amount": SECRET}))
    assert answer["task_ids"] == []
    assert [one["field"] for one in answer["rejected"]["problems"]] == ["detail.order", "detail.amount"]
    assert SECRET not in json.dumps(answer) + repr(shop.record.of(edge_events.EventRefused))
    [refused] = shop.record.of(edge_events.EventRefused)
    assert (refused.route, refused.event_id) == ("eventbridge", EVENT_ID)
    answer = shop.handle(sns("no JSON", {"order": "7"}))
    assert "rejected" in answer["records"][0]
    assert answer["records"][1]["task_ids"] == [f"orders.import@sns:{MESSAGE_ID}-1"]


def test_a_record_that_is_rejected_does_not_keep_those_behind_it_from_becoming_tasks(shop: Shop) -> None:
    with pytest.raises(EventRejected, match="the message does not fit"):
        shop.handle(sns({"order": "1"}, {"order": 2}, {"order": "3"}))
    assert shop.number == 2

    def fail(order: Order) -> Tasks:
        if order.order == "5":
            raise KeyError("a bug")
        return Enqueue(mail, order.order)

    shop.answer = fail
    with pytest.raises(KeyError, match="a bug"):
        shop.handle(sns({"order": 4}, {"order": "5"}, {"order": "6"}))
    assert shop.number == 3


@pytest.mark.parametrize(
    "event",
    [
        None,
        "text",
        [],
        {},
        {"Records": []},
        {"Records": [{"eventSource": "aws:kinesis", "kinesis": SECRET}]},
        {"Records": "x", "a": 1},
        {"Records": [*sns({"order": "7"})["Records"], {"eventSource": "aws:sqs", "body": SECRET}]},
        {"detail-type": "x", "detail": SECRET},
        {"requestContext": {}, "body": SECRET},
        {"httpMethod": "GET"},
        {"requestContext": {"connectionId": "x", "routeKey": "$connect"}},
    ],
    ids=str,
)
def test_an_event_that_is_none_of_the_known_is_told_what_would_be_one(shop: Shop, event: Any) -> None:
    with pytest.raises(EventRejected, match=r"a router takes an event of EventBridge .* of SNS.* or of HTTP") as error:
        shop.handle(event)
    assert SECRET not in str(error.value)


def test_a_batch_of_another_service_is_named_as_what_it_is(shop: Shop) -> None:
    with pytest.raises(EventRejected, match=r"the event has Records \(of aws:kinesis\)"):
        shop.handle({"Records": [{"eventSource": "aws:kinesis", "kinesis": {}}]})


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"source": "shop", "detail-type": "OrderPlaced", "detail": {}}, "event.id"),
        ({"source": "shop", "detail-type": "OrderPlaced", "id": "x"}, "event.detail"),
        ({"source": 7, "detail-type": "OrderPlaced", "id": "x", "detail": {}}, "event.source"),
        (eventbridge(id=""), "event.id"),
        ({"Records": [{"EventSource": "aws:sns", "Sns": {"Message": "{}", "TopicArn": TOPIC}}]}, "Sns.MessageId"),
        ({"Records": [{"Sns": {"Message": "{}", "MessageId": "x"}}]}, "Sns.TopicArn"),
        ({"Records": [{"eventSource": "aws:sqs", "body": "{}"}]}, "message.messageId"),
        ({"Records": [{"eventSource": "aws:s3", "s3": {"object": {"key": "a"}}}]}, "s3.object.bucket"),
    ],
)
def test_an_event_that_lacks_a_part_is_told_which(shop: Shop, event: Any, field: str) -> None:
    with pytest.raises(EventRejected, match=field):
        shop.handle(event)


@pytest.mark.parametrize(
    "detail", [{"order": "\ud800"}, "\ud800", [], None, 7, {"order": {"order": "7"}}, float("nan")]
)
def test_a_detail_of_any_kind_is_rejected_and_not_a_crash(shop: Shop, detail: Any) -> None:
    event = eventbridge()
    event["detail"] = detail
    with pytest.raises(EventRejected):
        shop.handle(event)


@pytest.mark.parametrize("message", ["", "no JSON", "{", "\ud800", "[" * 100_000, '{"order": "\\ud800"}'], ids=repr)
def test_a_message_that_is_not_json_is_rejected_and_not_a_crash(shop: Shop, message: str) -> None:
    with pytest.raises(EventRejected):
        shop.handle(sns(message))


def test_texts_for_people_and_machines_are_read_as_json_is(shop: Shop) -> None:
    router = Router(memory_client())
    seen: list[Any] = []

    @router.eventbridge(source="strict")
    def strict(detail: Strict, event: EventBridgeEvent) -> Tasks:
        seen.append(detail)
        return None

    router.handler(eventbridge({"placed": "2026-07-30"}, source="strict"))
    assert seen == [Strict(placed=date(2026, 7, 30))]
    with pytest.raises(EventRejected, match=r"detail\.lines\.1: Input should be a valid integer.*detail\.more: Extra"):
        router.handler(eventbridge({"placed": "2026-07-30", "lines": [1, "2"], "more": 1}, source="strict"))


# HTTP


def test_paths_and_methods_that_are_not_there_are_told_so(shop: Shop) -> None:
    assert answer_of(shop.handle(request_v2("POST", "/order", {}))) == (404, {"error": "there is no such path"})
    answer = shop.handle(request_v1("GET", "/orders"))
    assert answer_of(answer) == (405, {"error": "the method must be POST"})
    assert answer["headers"]["allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": ""},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "text/json+json"},
        {"Content-Encoding": "gzip"},
    ],
    ids=str,
)
@both_formats
def test_a_body_that_does_not_say_it_is_json_is_415(shop: Shop, headers: dict[str, str], make: Make) -> None:
    assert shop.post({"order": "7"}, headers, make)[0] == 415


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=UTF-8",
        "application/cloudevents+json",
        'application/json;charset="utf-8"',
    ],
)
def test_json_has_many_names(shop: Shop, kind: str) -> None:
    assert shop.post({"order": "7"}, {"Content-Type": kind})[0] == 202


@pytest.mark.parametrize("body", ["", "{", "null", "[]", '{"order": 7}', '{"order": "\\ud800"}', "\ud800"], ids=repr)
def test_a_body_that_is_not_what_the_route_takes_is_400(shop: Shop, body: str) -> None:
    status, answer = shop.post(body)
    assert status == 400
    assert answer["error"]


@both_formats
def test_a_body_in_base64_is_read(shop: Shop, make: Make) -> None:
    encoded = base64.b64encode('{"order": "größer"}'.encode()).decode()
    assert shop.post(encoded, make=make, isBase64Encoded=True)[0] == 202
    assert shop.seen[0][0].order == "größer"
    assert shop.post("not base64!", make=make, isBase64Encoded=True) == (400, {"error": "the body is not base64"})
    junk = "!" + base64.b64encode(b'{"order": "7"}').decode()
    assert shop.post(junk, make=make, isBase64Encoded=True) == (400, {"error": "the body is not base64"})
    latin = base64.b64encode('{"order": "größer"}'.encode("latin-1")).decode()
    assert shop.post(latin, make=make, isBase64Encoded=True)[0] == 400


@pytest.mark.parametrize("encoded", [False, True])
def test_a_body_over_the_limit_is_413_and_one_at_it_is_not(shop: Shop, encoded: bool) -> None:
    shop.answer = Enqueue(mail, "x")
    for extra, expected in ((0, 202), (1, 413), (5, 413), (BODY_LIMIT, 413)):
        text = '{"order": "7"' + " " * (BODY_LIMIT - 14 + extra) + "}"
        assert len(text) == BODY_LIMIT + extra
        body = base64.b64encode(text.encode()).decode() if encoded else text
        assert shop.post(body, isBase64Encoded=encoded)[0] == expected, extra
    wide = '{"order": "' + "ö" * (BODY_LIMIT // 2) + '"}'
    assert shop.post(wide)[0] == 413


def test_a_body_that_is_too_large_is_not_decoded(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    assert shop.post("A" * (2 * BODY_LIMIT), isBase64Encoded=True)[0] == 413


def test_parts_of_the_path_and_the_query_reach_the_route() -> None:
    router = Router(memory_client(), base_path="/shop")
    seen: list[HttpRequest] = []

    @router.http("delete", "/orders/{order_id}/lines/{line}")
    def deleted(body: None, request: HttpRequest) -> Tasks:
        seen.append(request)
        return None

    path = "/shop/orders/a%2Fb%20c/lines/2"
    query: dict[str, Any] = {"queryStringParameters": {"force": "1"}}
    for event in (
        request_v1("DELETE", path, **query),
        request_v2("DELETE", path, **query),
        request_v2("DELETE", path, stage="prod", **query),
        request_v2("DELETE", path.removeprefix("/shop")),
    ):
        assert answer_of(router.handler(event)) == (204, None)
        assert seen[-1].path_params == {"order_id": "a/b c", "line": "2"}
    assert [one.query for one in seen] == [{"force": "1"}] * 3 + [{}]
    assert answer_of(router.handler(request_v2("DELETE", "/orders/1/lines/2/")))[0] == 204
    for wrong in ("/orders//lines/2", "/orders/1/lines/2//", "/orders/1", "/shoporders/1/lines/2", "/"):
        assert answer_of(router.handler(request_v2("DELETE", wrong)))[0] == 404
    assert answer_of(router.handler(request_v2("DELETE", path, {"no": "body"})))[0] == 400


def test_a_route_may_take_the_body_as_it_is_to_check_a_signature() -> None:
    router = Router(client := memory_client())

    @router.http("POST", "/hook")
    def hook(body: bytes, request: HttpRequest) -> Enqueue:
        if request.headers.get("x-signature") != "good":
            raise EventRejected("the signature does not fit", status=401)
        return Enqueue(mail, body.hex())

    @router.http("POST", "/text")
    def text(body: str, request: HttpRequest) -> Enqueue:
        return Enqueue(mail, body)

    raw = base64.b64encode(b"\xff\x00").decode()
    signed = {"Content-Type": "application/octet-stream", "X-Signature": "good"}
    status, answer = answer_of(router.handler(request_v2("POST", "/hook", raw, signed, isBase64Encoded=True)))
    assert (status, client.get(answer["task_id"]).payload_text) == (202, '"ff00"')
    assert answer_of(router.handler(request_v2("POST", "/hook", raw, isBase64Encoded=True)))[0] == 401
    assert answer_of(router.handler(request_v2("POST", "/text", "hello", {"Content-Type": "text/plain"})))[0] == 202
    assert answer_of(router.handler(request_v2("POST", "/text", raw, isBase64Encoded=True)))[0] == 400


def test_headers_that_are_there_in_one_form_only_are_read(shop: Shop) -> None:
    event = request_v1("POST", "/orders", {"order": "7"})
    assert answer_of(shop.handle(event | {"headers": None}))[0] == 202
    assert answer_of(shop.handle(event | {"multiValueHeaders": None}))[0] == 202
    assert answer_of(shop.handle(event | {"headers": None, "multiValueHeaders": None}))[0] == 415


def test_a_message_of_sns_may_be_plain_text() -> None:
    router = Router(client := memory_client())

    @router.sns(topic="uploads")
    def uploaded(message: str, record: SnsRecord) -> Enqueue:
        return Enqueue(mail, message)

    for number, topic in enumerate((TOPIC, TOPIC.replace("eu-central-1", "us-east-1"))):
        event = sns("just text", topic=topic)
        event["Records"][0]["Sns"]["MessageId"] = f"m{number}"
        [record] = router.handler(event)["records"]
        assert client.get(record["task_ids"][0]).payload_text == '"just text"'


# Anything

ANY_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PARTS: Final = st.sampled_from(
    [
        *("id", "source", "detail-type", "detail", "Records", "httpMethod", "path", "rawPath", "body", "headers"),
        *("isBase64Encoded", "requestContext", "queryStringParameters", "multiValueHeaders", "time", "resources"),
        *("multiValueQueryStringParameters", "rawQueryString", "cookies", "version", "type"),
    ]
)
CHANGES: Final = st.dictionaries(PARTS, ANY_JSON, max_size=3)
INNER: Final = st.dictionaries(
    st.sampled_from(
        [
            *("http", "stage", "requestId", "authorizer", "elb", "MessageId", "Message", "TopicArn"),
            *("MessageAttributes", "messageId", "body", "attributes", "messageAttributes", "eventSourceARN"),
            *("eventName", "eventTime", "responseElements", "bucket", "object", "key", "sequencer"),
        ]
    ),
    ANY_JSON,
    max_size=2,
)


ANY_SHOP: Final = Shop()


@ANY_SHOP.router.sqs(queue="orders")
def any_message(message: Order, record: SqsMessage) -> Tasks:
    """Takes what fits."""
    return None


@ANY_SHOP.router.s3(bucket="uploads", kind=None)
def any_object(thing: S3Object, event: S3Event) -> Tasks:
    """Takes what fits."""
    return None


@pytest.mark.slow
@given(
    base=st.sampled_from(["eventbridge", "sns", "v1", "v2", "balancer", "sqs", "s3", "s3 event", "nothing"]),
    changes=CHANGES,
    inner=INNER,
)
@settings(deadline=None, max_examples=400)
def test_whatever_comes_is_answered_or_rejected_and_never_another_error(
    base: str, changes: dict[str, Any], inner: dict[str, Any]
) -> None:
    event: dict[str, Any] = {
        "eventbridge": eventbridge(),
        "sns": sns({"order": "7"}),
        "v1": request_v1("POST", "/orders", {"order": "7"}),
        "v2": request_v2("POST", "/orders", {"order": "7"}),
        "balancer": copy.deepcopy(sample_events.BALANCER),
        "sqs": {"Records": [sample_events.sqs_record({"order": "7"})]},
        "s3": {"Records": [sample_events.s3_record()]},
        "s3 event": sample_events.s3_through_eventbridge(),
        "nothing": {},
    }[base]
    for record in (event, *event.get("Records", ())):
        for part in (record.get(name) for name in ("requestContext", "Sns", "s3")):
            if part is not None:
                part.update(inner)
        if base in ("sqs", "s3", "s3 event"):
            (record.get("detail") or record).update(inner)
    event.update(changes)
    try:
        answer = ANY_SHOP.router.handler(event)
        assert answer.get("statusCode", 202) in (202, 400, 404, 405, 413, 415), answer
    except EventRejected as error:
        assert str(error)


# Errors that are not the sender's


class Broken(Shop):
    """A shop whose store does not answer."""

    def __init__(self) -> None:
        engine = FaultyEngine(SqliteEngine(MEMORY))
        super().__init__(Client(TaskStore(engine), load_settings(store=f"sqlite://{MEMORY}")))
        engine.chance("put", Fault.LOST_REQUEST, 1.0)


def test_a_store_that_does_not_answer_is_an_exception_for_events_so_that_lambda_tries_again() -> None:
    shop = Broken()
    with pytest.raises(StoreUnavailable):
        shop.handle(eventbridge())
    with pytest.raises(StoreUnavailable):
        shop.handle(sns({"order": "7"}, {"order": "8"}))
    assert len(shop.seen) == 2  # the second record waited for nothing


@both_formats
def test_a_store_that_does_not_answer_is_503_with_retry_after(make: Make) -> None:
    shop = Broken()
    answer = shop.handle(make("POST", "/orders", {"order": "7"}))
    assert answer_of(answer) == (503, {"error": "the task could not be stored; try again"})
    assert answer["headers"]["retry-after"] == "5"
    [failed] = shop.record.of(edge_events.EventFailed)
    assert "StoreUnavailable" in failed.error


def test_an_error_in_a_route_is_500_without_a_word_about_it_and_an_exception_for_events(shop: Shop) -> None:
    def fail(order: Order) -> Tasks:
        raise KeyError(f"no shop of {order.order}")

    shop.answer = fail
    assert shop.post({"order": "7"}) == (500, {"error": "internal error", "request_id": "request-1"})
    [failed] = shop.record.of(edge_events.EventFailed)
    assert failed.error.startswith("KeyError: 'no shop of 7'\n")
    assert "in fail" in failed.error
    with pytest.raises(KeyError):
        shop.handle(eventbridge())
    with pytest.raises(KeyError):
        shop.handle(sns({"order": "7"}))


def test_a_route_that_answers_with_something_else_is_told_what_it_may(shop: Shop) -> None:
    for answer in ({"task": 1}, "task", [1], import_order):
        shop.answer = (lambda value: lambda order: value)(answer)
        with pytest.raises(TypeError, match=r"answered with a \w+; return Enqueue\(job, payload\)"):
            shop.handle(eventbridge())
        assert shop.post({"order": "7"})[0] == 500


def test_a_parent_that_does_not_exist_yet_is_tried_again_by_lambda_and_a_conflict_over_http() -> None:
    shop = Shop(on_reject="drop")
    shop.answer = Enqueue(mail, "x", depends_on=["nobody"])
    with pytest.raises(ParentNotFound):
        shop.handle(eventbridge())
    status, body = shop.post({"order": "7"})
    assert (status, body) == (409, {"error": "a task that this one depends on does not exist"})
    assert "nobody" in shop.record.of(edge_events.EventRefused)[-1].reason


def test_options_that_cannot_be_are_a_bug_and_not_the_senders(shop: Shop) -> None:
    shop.answer = Enqueue(mail, "x", run_at=1e15)
    assert shop.post({"order": "7"})[0] == 500
    with pytest.raises(ConfigurationError):
        shop.handle(eventbridge())


# The client and the log


def test_the_client_is_made_for_the_first_event_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    made: list[Client] = []
    make = Client.from_settings

    def counted(**overrides: Any) -> Client:
        made.append(make(**overrides))
        return made[-1]

    monkeypatch.setattr(Client, "from_settings", counted)
    router = Router(bus=EventBus())

    @router.eventbridge(source="shop")
    def any_event(detail: Order, event: EventBridgeEvent) -> Tasks:
        return Enqueue(mail, "x") if detail.amount else None

    router.handler(eventbridge({"order": "7", "amount": 0}))
    assert made == []  # not even a file is opened for what is not wanted
    monkeypatch.setenv("THUNDERAGENT_STORE", "nonsense")
    with pytest.raises(ConfigurationError):
        router.handler(eventbridge())
    monkeypatch.setenv("THUNDERAGENT_STORE", f"sqlite:///{tmp_path}/tasks.db")
    router.handler(eventbridge())
    router.handler(eventbridge(id="other"))
    [client] = made
    assert len(list(client.list())) == 2
    client.close()


def test_without_a_bus_of_the_users_events_are_log_lines_and_no_value_is_in_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", f"sqlite:///{tmp_path}/tasks.db")
    monkeypatch.setenv("THUNDERAGENT_LOG_JSON", "1")
    router = Router(on_reject="drop")

    @router.eventbridge(source="shop")
    def any_event(detail: Order, event: EventBridgeEvent) -> Tasks:
        return Enqueue(mail, SECRET)

    try:
        router.handler(eventbridge({"order": "7", "amount": SECRET}))
        router.handler(eventbridge())
        router.handler(eventbridge({"order": "7", "amount": SECRET}))
    finally:
        logger.remove()
    router.client().close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["event rejected", "event taken", "event rejected"]
    assert lines[1]["task_ids"] == [f"orders.mail@eventbridge:{EVENT_ID}"]
    assert SECRET not in json.dumps(lines)


def test_the_test_of_the_guide_passes_as_it_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "router.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```python\n# (\S+\.py).*?\n(.*?)```", guide, re.DOTALL):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        importlib.import_module("test_orders").test_an_order_becomes_an_import()
    finally:
        for name in ("shop", "shop.orders", "lambda_function", "test_orders"):
            sys.modules.pop(name, None)


def test_models_of_events_do_not_show_their_content() -> None:
    shop = Shop()
    secret = {"order": "7", "more": SECRET}
    shop.handle(eventbridge(secret))
    shop.handle(sns(secret))
    shop.post(secret, {"Authorization": SECRET})
    texts = io.StringIO()
    print(*(event for _, event in shop.seen), Enqueue(mail, SECRET), file=texts)
    assert SECRET not in texts.getvalue()
    shop.client.close()


# Routes that cannot be


def a_route(content: Any, event: Any) -> Tasks:
    """Annotated as needed."""
    return None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"source": "a", "detail_type": "x"}, {"source": "a", "detail_type": "x"}),
        ({"source": "a"}, {"source": "a", "detail_type": "x"}),
        ({"source": "a"}, {"detail_type": "x"}),
        ({"detail_type": "x"}, {"source": "a", "detail_type": "x"}),
    ],
)
def test_two_routes_for_one_event_do_not_construct(first: dict[str, str], second: dict[str, str]) -> None:
    for one, other in ((first, second), (second, first)):
        router = Router()
        router.eventbridge(**one)(a_route)
        with pytest.raises(ConfigurationError, match="of a_route can both be for the same event"):
            router.eventbridge(**other)(a_route)


@pytest.mark.parametrize(("first", "second"), [(TOPIC, TOPIC), (TOPIC, "uploads"), ("uploads", "uploads")])
def test_two_routes_for_one_topic_do_not_construct(first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        router = Router()
        router.sns(topic=one)(a_route)
        with pytest.raises(ConfigurationError, match="can both be for the same event"):
            router.sns(topic=other)(a_route)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/orders", "/orders"),
        ("/orders/{a}", "/orders/{b}"),
        ("/orders/{a}", "/orders/new"),
        ("/{a}/lines", "/orders/{b}"),
        ("/orders", "/orders/"),
    ],
)
def test_two_routes_for_one_request_do_not_construct(first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        router = Router()
        router.http("POST", one)(a_route)
        router.http("GET", other)(a_route)
        with pytest.raises(ConfigurationError, match="can both be for the same event"):
            router.http("post", other)(a_route)


def test_routes_that_differ_live_beside_each_other() -> None:
    router = Router()
    router.eventbridge(source="a", detail_type="x")(a_route)
    router.eventbridge(source="a", detail_type="y")(a_route)
    router.eventbridge(source="b")(a_route)
    router.sns(topic=TOPIC)(a_route)
    router.sns(topic=TOPIC.replace("eu-central-1", "us-east-1"))(a_route)
    router.sns(topic="downloads")(a_route)
    router.http("POST", "/orders")(a_route)
    router.http("POST", "/orders/{id}")(a_route)
    router.http("POST", "/orders/{id}/lines")(a_route)
    router.http("POST", "/returns/{id}")(a_route)
    router.http("PUT", "/")(a_route)
    router.http("PUT", "/{id}")(a_route)


@pytest.mark.parametrize(
    "path", ["orders", "", "/a b", "/{", "/{a}b", "/x/{}", "/a?b", "/a#b", "/{a}/{a}", "/" + "x" * 128]
)
def test_a_path_that_no_request_has_does_not_construct(path: str) -> None:
    with pytest.raises(ConfigurationError):
        Router().http("POST", path)


def test_other_arguments_that_cannot_be_do_not_construct() -> None:
    router = Router()
    with pytest.raises(ConfigurationError, match="HTTP method"):
        router.http("POST ", "/")
    with pytest.raises(ConfigurationError, match="needs a source"):
        router.eventbridge()
    for topic in ("", "a:b"):
        with pytest.raises(ConfigurationError, match="is no topic"):
            router.sns(topic=topic)
    with pytest.raises(ConfigurationError, match="on_reject"):
        Router(on_reject="ignore")  # type: ignore[arg-type] # the point of it
    for base in ("shop", "/shop/"):
        with pytest.raises(ConfigurationError, match="base_path"):
            Router(base_path=base)
    with pytest.raises(ConfigurationError, match="no option 'delays'; did you mean 'delay_s'"):
        Enqueue(mail, "x", delays=5)  # type: ignore[call-overload] # the point of it


def without_annotation(detail, event):  # type: ignore[no-untyped-def] # the point of it
    """Cannot be a route."""


def of_another_kind(detail: Order, event: HttpRequest) -> Tasks:
    """Cannot be a route of EventBridge."""
    return None


def of_one_parameter(detail: Order) -> Tasks:
    """Cannot be a route."""
    return None


async def coroutine(detail: Order, event: EventBridgeEvent) -> Tasks:
    """Cannot be a route."""
    return None


def of_no_type(detail: NoSuchType, event: EventBridgeEvent) -> Tasks:  # type: ignore[name-defined] # noqa: F821
    """Cannot be a route."""
    return None


def of_a_type_that_is_no_data(detail: io.StringIO, event: EventBridgeEvent) -> Tasks:
    """Cannot be a route."""
    return None


def of_a_model_that_lacks_a_type(detail: Incomplete, event: EventBridgeEvent) -> Tasks:
    """Cannot be a route."""
    return None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_annotation, "annotate the parameter 'detail'"),
        (of_another_kind, "the parameter 'event' of the route of_another_kind gets a EventBridgeEvent"),
        (of_one_parameter, "must take two parameters"),
        (coroutine, "must be a plain function"),
        (of_no_type, "cannot be resolved"),
        (of_a_type_that_is_no_data, "pydantic cannot read"),
        (of_a_model_that_lacks_a_type, "NoSuchType"),
    ],
)
def test_a_function_that_cannot_be_a_route_does_not_construct(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Router().eventbridge(source="shop")(function)
