"""The shapes of AWS's events: each is read as what it is, whichever of its services sends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
from pydantic import BaseModel, ConfigDict

from tests.router.test_handler import SECRET, TOPIC, Order, Shop, import_order, mail, sns
from tests.support import sample_events as samples
from thunderagent.client import Client
from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, EventRejected, StoreUnavailable, TooManyDependents
from thunderagent.router import (
    Enqueue,
    EventBridgeEvent,
    HttpRequest,
    Invocation,
    Router,
    S3Event,
    S3Object,
    SqsMessage,
    Tasks,
)
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import Fault, FaultyEngine, Recorder, memory_client

QUEUE: Final = f"arn:aws:sqs:{samples.REGION}:{samples.ACCOUNT}:orders"


@pytest.fixture
def shop() -> Iterator[Shop]:
    one = Shop()
    yield one
    one.client.close()


# HTTP


@pytest.mark.parametrize("name", samples.HTTP)
def test_one_request_is_read_as_one_whatever_wraps_it(shop: Shop, name: str) -> None:
    answer = shop.handle(samples.HTTP[name])
    assert answer["statusCode"] == 202, answer
    assert shop.client.get(json.loads(answer["body"])["task_id"]).job == "orders.import"
    [(order, request)] = shop.seen
    assert (order, request.method, request.path) == (Order(order="7"), "POST", "/orders")
    assert request.query == {"tag": "b c", "empty": ""}
    assert request.query_all == {"tag": ("a", "b c"), "empty": ("",)}
    assert request.raw_query in ("tag=a&tag=b%20c&empty=", "tag=a&tag=b+c&empty=")
    assert request.cookies == {"s": "1", "t": "2"}
    assert {name: request.headers[name] for name in ("content-type", "x-part", "cookie")} == {
        "content-type": "application/json",
        "x-part": "1, 2",
        "cookie": "s=1; t=2",
    }


def test_a_load_balancer_without_lists_is_read_too_and_its_query_decoded(shop: Shop) -> None:
    assert shop.handle(samples.BALANCER)["statusCode"] == 202
    [(_, request)] = shop.seen
    assert (request.query, request.raw_query) == ({"tag": "b c+d", "empty": ""}, "tag=b+c%2Bd&empty=")


def test_what_api_gateway_has_decoded_is_not_decoded_again(shop: Shop) -> None:
    query = {"queryStringParameters": {"a": "1+1%20"}, "multiValueQueryStringParameters": None}
    shop.handle(samples.HTTP["REST API"] | query)
    [(_, request)] = shop.seen
    assert request.query == {"a": "1+1%20"}
    assert request.raw_query == "a=1%2B1%2520"


def test_a_load_balancer_is_answered_in_the_form_that_it_takes(shop: Shop) -> None:
    plain = shop.handle(samples.BALANCER)
    assert set(plain) == {"statusCode", "statusDescription", "headers", "body", "isBase64Encoded"}
    assert (plain["statusDescription"], plain["headers"]["content-type"]) == ("202 Accepted", "application/json")
    lists = samples.HTTP["load balancer with lists"]
    answer = shop.handle(lists | {"httpMethod": "GET"})
    assert set(answer) == {"statusCode", "statusDescription", "multiValueHeaders", "body", "isBase64Encoded"}
    assert (answer["statusDescription"], answer["multiValueHeaders"]["allow"]) == ("405 Method Not Allowed", ["POST"])
    assert shop.handle(lists | {"path": 7})["statusDescription"] == "400 Bad Request"

    def refuse(order: Order) -> Tasks:
        raise EventRejected("no", status=499)

    shop.answer = refuse
    assert shop.handle(lists)["statusDescription"] == "499 Rejected"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("a=1; b=x=y ;c; a=2", {"a": "1", "b": "x=y"}),
        ('q="1"; e=%20', {"q": '"1"', "e": "%20"}),
        (";;", {}),
        ("", {}),
    ],
)
def test_cookies_are_told_as_they_were_sent(shop: Shop, header: str, expected: dict[str, str]) -> None:
    event = samples.HTTP["REST API"] | {"multiValueHeaders": None}
    shop.handle(event | {"headers": {"Content-Type": "application/json", "Cookie": header}})
    assert shop.seen[0][1].cookies == expected


@pytest.mark.parametrize("path", ["/orders", "/orders/"])
@pytest.mark.parametrize("of_route", ["/orders", "/orders/"])
def test_a_slash_at_the_end_is_no_other_path(path: str, of_route: str) -> None:
    router = Router(memory_client())

    @router.http("POST", of_route)
    def posted(body: Order, request: HttpRequest) -> Tasks:
        return None

    assert router.handler(samples.HTTP["HTTP API, format 2.0"] | {"rawPath": path})["statusCode"] == 204
    assert router.handler(samples.HTTP["HTTP API, format 2.0"] | {"rawPath": f"{path}//"})["statusCode"] == 404


def test_what_a_caller_is_told_of_a_rejection_names_no_job_and_the_log_does(shop: Shop) -> None:
    shop.client.enqueue(mail, "x", task_id="mine")

    def full(order: Order) -> Tasks:
        raise TooManyDependents("10,000 tasks wait for 'secret.parent'")

    for answer, status in (
        (lambda order: Enqueue(import_order, order), 400),
        (lambda order: Enqueue("secret.job", {"at": {1, 2}}), 400),
        (lambda order: [Enqueue("secret.job"), Enqueue("secret.job", {"at": {1, 2}})], 400),
        (lambda order: Enqueue("secret.job", {"x": "y" * 400_000}), 413),
        (lambda order: Enqueue("secret.job", task_id="mine"), 409),
        (full, 409),
    ):
        shop.answer = answer
        found, body = shop.post({"order": "7"})
        refused = shop.record.of(edge_events.EventRefused)[-1]
        assert found == status, body
        for name in ("orders.", "secret.", "mine"):
            assert name not in json.dumps(body)
        assert any(name in refused.reason for name in ("orders.", "secret."))
    shop.answer = lambda order: Enqueue("secret.job", {"order": order.order})
    assert shop.post({"order": "7"}, {"Idempotency-Key": "k"})[0] == 202
    assert shop.post({"order": "8"}, {"Idempotency-Key": "k"}) == (
        422,
        {"error": "the Idempotency-Key was used for another request"},
    )


# What is no request


@pytest.mark.parametrize("name", samples.AUTHORIZERS)
def test_a_question_to_an_authorizer_becomes_no_task(shop: Shop, name: str) -> None:
    _add_invoke(shop)
    with pytest.raises(EventRejected, match=r"asks an authorizer of API Gateway: give the authorizer a function"):
        shop.handle(samples.AUTHORIZERS[name])
    assert shop.number == 0


@pytest.mark.parametrize("name", samples.SOCKETS)
def test_an_event_of_a_websocket_api_becomes_no_task(shop: Shop, name: str) -> None:
    _add_invoke(shop)
    with pytest.raises(EventRejected, match=r"of a WebSocket API, .* see thunderagent\.websocket_api"):
        shop.handle(samples.SOCKETS[name])
    assert shop.number == 0


# EventBridge


@pytest.mark.parametrize("name", samples.EVENTS)
def test_every_event_of_eventbridge_becomes_a_task(name: str) -> None:
    event = samples.EVENTS[name]
    router = Router(client := memory_client())
    seen: list[EventBridgeEvent] = []

    @router.eventbridge(source=event["source"])
    def any_event(detail: dict[str, Any], event: EventBridgeEvent) -> Tasks:
        seen.append(event)
        return Enqueue("job.of", detail, task_id=None)  # as one writes whose id may be missing

    assert router.handler(event) == {"task_ids": ["job.of@eventbridge:e-1"]}
    payload = client.get("job.of@eventbridge:e-1").payload
    assert payload == ({} if event["detail"] == "{}" else event["detail"])
    assert seen[0].time is not None


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


def of_a_model(detail: Nothing, event: EventBridgeEvent) -> Tasks:
    assert detail == Nothing()
    return None


def of_a_text(detail: str, event: EventBridgeEvent) -> Tasks:
    assert detail == "{}"
    return None


def of_anything(detail: Any, event: EventBridgeEvent) -> Tasks:
    assert detail == {}
    return None


@pytest.mark.parametrize("route", [of_a_model, of_a_text, of_anything])
def test_the_detail_of_eventbridge_scheduler_is_what_its_text_holds(route: Any) -> None:
    router = Router(memory_client())
    router.eventbridge(source="aws.scheduler")(route)
    assert router.handler(samples.SCHEDULER) == {"task_ids": []}
    if route is not of_a_text:
        for text in ("{", "\ud800"):
            with pytest.raises(EventRejected, match="the detail"):
                router.handler(samples.SCHEDULER | {"detail": text})


# A bare input


class Call(BaseModel):
    order: str


def _add_invoke(shop: Shop) -> list[tuple[Any, Invocation]]:
    seen: list[tuple[Any, Invocation]] = []

    @shop.router.invoke()
    def called(given: Any, invocation: Invocation) -> Tasks:
        seen.append((given, invocation))
        return Enqueue(mail, "called")

    return seen


@dataclass
class LambdaContext:
    """What Lambda hands over beside the event."""

    aws_request_id: str


@pytest.mark.parametrize("name", samples.BARE)
def test_an_input_of_no_other_kind_needs_a_route_of_its_own(shop: Shop, name: str) -> None:
    with pytest.raises(EventRejected, match=r"anything else needs @router\.invoke\(\)"):
        shop.handle(samples.BARE[name])
    seen = _add_invoke(shop)
    assert len(shop.handle(samples.BARE[name])["task_ids"]) == 1
    assert [given for given, _ in seen] == [samples.BARE[name]]


def test_what_another_route_is_for_does_not_go_to_that_of_bare_inputs(shop: Shop) -> None:
    seen = _add_invoke(shop)
    for event in (samples.HTTP["REST API"], samples.EVENTS["an application's own"], sns({"order": "7"}, topic=TOPIC)):
        shop.handle(event)
    with pytest.raises(EventRejected, match=r"no route for source 'aws\.ec2'"):
        shop.handle(samples.EVENTS["EC2"])
    assert (seen, len(shop.seen)) == ([], 3)


def test_a_call_that_lambda_makes_again_is_the_same_task() -> None:
    router = Router(client := memory_client())

    @router.invoke()
    def called(given: Call, invocation: Invocation) -> Tasks:
        return Enqueue(mail, given.order)

    for _ in range(2):
        answer = router.handler({"order": "7"}, LambdaContext("r-1"))
        assert answer == {"task_ids": ["orders.mail@invoke:r-1"]}
    assert router.handler({"order": "7"}) != router.handler({"order": "7"}), "without a context each is a new one"
    assert len(list(client.list())) == 3
    with pytest.raises(EventRejected, match=r"the input does not fit: input\.order: Field required"):
        router.handler({})
    with pytest.raises(EventRejected, match="the input"):
        router.handler({"order": "\ud800"})


# SQS


class Inbox:
    """A router with a route for messages of a queue, and the orders that it saw."""

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        self.client = client or memory_client()
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.router = Router(self.client, bus=self.bus, **options)
        self.seen: list[str] = []
        self.messages: list[SqsMessage] = []
        self.before: Callable[[str], None] = lambda order: None

        @self.router.sqs(queue="orders")
        def arrived(message: Order, record: SqsMessage) -> Tasks:
            self.before(message.order)
            self.seen.append(message.order)
            self.messages.append(record)
            return Enqueue(mail, message.order)

    def handle(self, *records: dict[str, Any]) -> Any:
        answer = self.router.handler({"Records": list(records)})
        json.dumps(answer)
        return answer

    @property
    def ids(self) -> list[str]:
        return sorted(task.task_id for task in self.client.list(limit=None))


def fails(order: str) -> None:
    if order.startswith("bad"):
        raise KeyError("a bug")


def message(order: Any, message_id: str = "", **options: Any) -> dict[str, Any]:
    return samples.sqs_record({"order": order}, message_id or f"m-{order}", **options)


def test_a_message_of_sqs_becomes_a_task_with_the_typed_payload() -> None:
    inbox = Inbox()
    for _ in range(2):
        assert inbox.handle(message("7")) == {"records": [{"message_id": "m-7", "task_ids": ["orders.mail@sqs:m-7"]}]}
    [task] = inbox.client.list()
    assert task.payload == "7"
    one = inbox.messages[0]
    assert (one.queue, one.receives, one.group, one.attributes) == (QUEUE, 2, None, {"shop": "berlin"})
    assert one.sent_at is not None and one.sent_at.isoformat() == "2026-07-30T12:00:00+00:00"


def test_a_message_of_sqs_may_be_plain_text_and_its_queue_be_given_by_its_arn() -> None:
    router = Router(client := memory_client())

    @router.sqs(queue=QUEUE)
    def arrived(text: str, record: SqsMessage) -> Tasks:
        return Enqueue(mail, text)

    router.handler({"Records": [samples.sqs_record("plain text")]})
    assert [task.payload for task in client.list()] == ["plain text"]
    with pytest.raises(EventRejected, match=r"no route for the queue 'arn:[^']+:other'; there are sqs\(queue='arn"):
        router.handler({"Records": [samples.sqs_record("plain text", queue="other")]})


@pytest.mark.parametrize("bad", ["bad", 7], ids=["the route raises", "it does not fit"])
def test_without_a_report_a_failure_brings_the_whole_batch_again_and_its_tasks_are_found(bad: Any) -> None:
    inbox = Inbox()
    inbox.before = fails
    with pytest.raises(KeyError if bad == "bad" else EventRejected):
        inbox.handle(message("1"), message(bad), message("3"))
    assert inbox.ids == ["orders.mail@sqs:m-1", "orders.mail@sqs:m-3"]
    inbox.before = lambda order: None
    if bad == "bad":
        assert len(inbox.handle(message("1"), message(bad), message("3"))["records"]) == 3
        assert len(inbox.ids) == 3


def test_with_a_report_only_what_became_no_task_comes_again_and_the_log_says_why() -> None:
    inbox = Inbox(batch_item_failures=True)
    inbox.before = fails
    assert inbox.handle(message("1")) == {"batchItemFailures": []}
    assert inbox.handle(message("2"), message("bad"), message(3), message("4")) == {
        "batchItemFailures": [{"itemIdentifier": "m-bad"}, {"itemIdentifier": "m-3"}]
    }
    assert inbox.ids == [f"orders.mail@sqs:m-{number}" for number in (1, 2, 4)]
    [failed] = inbox.record.of(edge_events.EventFailed)
    [refused] = inbox.record.of(edge_events.EventRefused)
    assert (failed.event_id, refused.event_id) == ("m-bad", "m-3")
    assert failed.error.startswith("KeyError: 'a bug'")


def test_a_batch_of_which_nothing_became_a_task_is_an_error_whatever_the_mapping_reads() -> None:
    inbox = Inbox(batch_item_failures=True)
    inbox.before = fails
    with pytest.raises(KeyError, match="a bug"):
        inbox.handle(message("bad"))
    nameless = message("2")
    del nameless["messageId"]
    with pytest.raises(EventRejected, match="messageId"):
        inbox.handle(message("1"), nameless)


def test_behind_a_message_that_failed_its_group_waits_and_no_other() -> None:
    inbox = Inbox(batch_item_failures=True)
    inbox.before = fails
    batch = [
        message("1", group="a"),
        message("bad", group="a"),
        message("2", group="b"),
        message("3", group="a"),
        message("4"),
    ]
    failed = [{"itemIdentifier": "m-bad"}, {"itemIdentifier": "m-3"}]
    assert inbox.handle(*batch) == {"batchItemFailures": failed}
    assert inbox.seen == ["1", "2", "4"]


def test_a_store_that_is_away_fails_the_rest_of_a_batch_without_a_try() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    client = Client(TaskStore(engine), load_settings(store=f"sqlite://{MEMORY}"))
    inbox = Inbox(client, batch_item_failures=True)

    def away(order: str) -> None:
        if order == "2":
            engine.chance("put", Fault.LOST_REQUEST, 1.0)

    inbox.before = away
    failed = [{"itemIdentifier": name} for name in ("m-2", "m-3")]
    assert inbox.handle(message("1"), message("2"), message("3")) == {"batchItemFailures": failed}
    assert inbox.seen == ["1", "2"]
    [event] = inbox.record.of(edge_events.EventFailed)
    assert "StoreUnavailable" in event.error
    with pytest.raises(StoreUnavailable):
        Inbox(client).handle(message("4"), message("5"))


def test_what_is_dropped_does_not_come_again() -> None:
    inbox = Inbox(batch_item_failures=True, on_reject="drop")
    assert inbox.handle(message(7), message("8")) == {"batchItemFailures": []}
    assert len(inbox.record.of(edge_events.EventRefused)) == 1


# S3


@pytest.mark.parametrize("by", ["S3", "EventBridge"])
def test_a_new_object_becomes_a_task_whichever_way_the_event_comes(by: str) -> None:
    router = Router(client := memory_client())
    seen: list[tuple[S3Object, S3Event]] = []

    @router.s3(bucket="uploads")
    def uploaded(thing: S3Object, event: S3Event) -> Tasks:
        seen.append((thing, event))
        return Enqueue(mail, thing.key)

    direct, sent = {"Records": [samples.s3_record()]}, samples.s3_through_eventbridge()
    router.handler(direct if by == "S3" else sent)
    [task] = client.list()
    assert (task.payload, task.task_id.startswith("orders.mail@s3:uploads:0062E99A88DC407460-")) == (
        "in/a b+ü.csv",
        True,
    )
    [(thing, event)] = seen
    assert thing == S3Object(bucket="uploads", key="in/a b+ü.csv", size=5, etag="d41d8", sequencer="0062E99A88DC407460")
    assert (event.kind, event.region) == ("created", samples.REGION)
    assert event.time is not None
    for again in (direct, sent):  # a bucket that sends both ways has one task for each object
        router.handler(again)
    assert len(list(client.list())) == 1
    for other in (samples.s3_record(key="in/other"), samples.s3_record(versionId="2")):
        router.handler({"Records": [other]})
    assert len(list(client.list())) == 3


def test_each_record_of_a_notification_is_handled() -> None:
    router = Router(client := memory_client())

    @router.s3(bucket="uploads")
    def uploaded(thing: S3Object, event: S3Event) -> Tasks:
        fails(thing.key)
        return Enqueue(mail, thing.key)

    with pytest.raises(KeyError, match="a bug"):
        router.handler({"Records": [samples.s3_record(key=key) for key in ("1", "bad", "3")]})
    assert sorted(task.payload for task in client.list()) == ["1", "3"]


def test_a_deletion_is_for_another_route_than_a_creation() -> None:
    router = Router(memory_client())
    seen: list[str] = []

    @router.s3(bucket="uploads")
    def created(thing: S3Object, event: S3Event) -> Tasks:
        seen.append(f"created {event.name}")
        return None

    @router.s3(bucket="uploads", kind="deleted")
    def deleted(thing: dict[str, Any], event: S3Event) -> Tasks:
        seen.append(f"deleted {event.name} {thing['key']}")
        return None

    names = ("ObjectRemoved:Delete", "ObjectRemoved:DeleteMarkerCreated", "ObjectCreated:CompleteMultipartUpload")
    for name in names:
        router.handler({"Records": [samples.s3_record(name, key="a")]})
    router.handler(samples.s3_through_eventbridge("Object Deleted", key="a"))
    assert seen == [
        "deleted ObjectRemoved:Delete a",
        "deleted ObjectRemoved:DeleteMarkerCreated a",
        "created ObjectCreated:CompleteMultipartUpload",
        "deleted Object Deleted a",
    ]
    for event in (
        {"Records": [samples.s3_record("ObjectTagging:Put")]},
        samples.s3_through_eventbridge("Object Tags Added"),
    ):
        with pytest.raises(EventRejected, match=r"no route for the bucket 'uploads' and .*; there are s3\(bucket="):
            router.handler(event)


class Upload(BaseModel):
    key: str
    size: int


def test_a_route_may_take_a_model_of_the_parts_that_it_needs_and_whatever_happens() -> None:
    router = Router(client := memory_client())

    @router.s3(bucket="uploads", kind=None)
    def uploaded(upload: Upload, event: S3Event) -> Tasks:
        return Enqueue(mail, upload.key) if upload.size else None

    router.handler({"Records": [samples.s3_record("ObjectTagging:Put"), samples.s3_record(size=0)]})
    assert len(list(client.list())) == 1
    with pytest.raises(EventRejected, match=r"s3\.object\.sequencer"):
        nameless = samples.s3_record(sequencer=None)
        del nameless["responseElements"]
        router.handler({"Records": [nameless]})


def test_events_of_s3_go_to_a_route_of_eventbridge_where_there_is_no_other() -> None:
    router = Router(client := memory_client())

    @router.s3(bucket="uploads")
    def uploaded(thing: S3Object, event: S3Event) -> Tasks:
        return Enqueue(mail, "s3")

    @router.eventbridge(source="aws.s3", detail_type="Object Tags Added")
    def tagged(detail: dict[str, Any], event: EventBridgeEvent) -> Tasks:
        return Enqueue(mail, "eventbridge")

    router.handler(samples.s3_through_eventbridge("Object Tags Added"))
    router.handler(samples.s3_through_eventbridge())
    assert sorted(task.payload for task in client.list()) == ["eventbridge", "s3"]


# Routes that cannot be


def a_route(content: Any, event: Any) -> Tasks:
    """Annotated as needed."""
    return None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("sqs", {"queue": "a"}), ("sqs", {"queue": QUEUE.replace("orders", "a")})),
        (("s3", {"bucket": "a"}), ("s3", {"bucket": "a"})),
        (("s3", {"bucket": "a"}), ("s3", {"bucket": "a", "kind": None})),
        (("s3", {"bucket": "a"}), ("eventbridge", {"source": "aws.s3"})),
        (("s3", {"bucket": "a"}), ("eventbridge", {"detail_type": "Object Created"})),
        (
            ("s3", {"bucket": "a", "kind": None}),
            ("eventbridge", {"source": "aws.s3", "detail_type": "Object Tags Added"}),
        ),
        (("invoke", {}), ("invoke", {})),
    ],
    ids=str,
)
def test_two_routes_for_one_event_do_not_construct(
    first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]]
) -> None:
    for one, other in ((first, second), (second, first)):
        router = Router()
        getattr(router, one[0])(**one[1])(a_route)
        with pytest.raises(ConfigurationError, match="can both be for the same event"):
            getattr(router, other[0])(**other[1])(a_route)


def test_routes_that_differ_live_beside_each_other() -> None:
    router = Router()
    router.sqs(queue="a")(a_route)
    router.sqs(queue="b")(a_route)
    router.s3(bucket="a")(a_route)
    router.s3(bucket="a", kind="deleted")(a_route)
    router.s3(bucket="b", kind=None)(a_route)
    router.eventbridge(source="shop")(a_route)
    router.eventbridge(source="aws.s3", detail_type="AWS API Call via CloudTrail")(a_route)
    router.invoke()(a_route)


def test_arguments_that_cannot_be_do_not_construct() -> None:
    router = Router()
    for queue in ("", "a:b"):
        with pytest.raises(ConfigurationError, match=r"is no queue; write its ARN, arn:aws:sqs:"):
            router.sqs(queue=queue)
    for bucket in ("", "arn:aws:s3:::uploads"):
        with pytest.raises(ConfigurationError, match="is no bucket"):
            router.s3(bucket=bucket)
    with pytest.raises(ConfigurationError, match="batch_item_failures is 1; use True or False"):
        Router(batch_item_failures=1)  # type: ignore[arg-type] # the point of it
    with pytest.raises(ConfigurationError, match="kind is 'moved'; use 'created', 'deleted' or None"):
        router.s3(bucket="a", kind="moved")  # type: ignore[arg-type] # the point of it


def test_models_of_messages_do_not_show_their_content(shop: Shop) -> None:
    inbox, seen = Inbox(), _add_invoke(shop)
    inbox.handle(samples.sqs_record({"order": "7", "more": SECRET}))
    shop.handle({"more": SECRET})
    event = samples.HTTP["REST API"] | {"queryStringParameters": {"a": SECRET}}
    shop.handle(event | {"multiValueQueryStringParameters": None, "headers": {"cookie": f"s={SECRET}"}})
    texts = f"{inbox.messages} {[call for _, call in seen]} {[request for _, request in shop.seen]}"
    assert SECRET not in texts
