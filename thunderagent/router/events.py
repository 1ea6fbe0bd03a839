"""The events as Lambda hands them over, read into models; and the answer to what is none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote_plus

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent.model.errors import EventRejected
from thunderagent.router.problems import listing, problems_of

RECOGNISED: Final = (
    "an event of EventBridge (source, detail-type, detail), of SNS, SQS or S3 (Records), or of HTTP (API Gateway with "
    "payload format 1.0 or 2.0, a function URL, or a load balancer); anything else needs @router.invoke()"
)

SCHEDULER: Final = "aws.scheduler"
"""Source of the events that EventBridge Scheduler makes for a target without an input."""

S3: Final = "aws.s3"
"""Source of the events of S3 in EventBridge."""

S3Kind = Literal["created", "deleted"]
"""What happened to an object of S3. Its own notifications and EventBridge use different words."""

KINDS: Final[Mapping[S3Kind, tuple[str, ...]]] = {
    "created": ("Object Created", "ObjectCreated:"),
    "deleted": ("Object Deleted", "ObjectRemoved:", "LifecycleExpiration:"),
}
"""For each kind the detail type in EventBridge, and prefixes of its names in a notification."""

M = TypeVar("M", bound=BaseModel)


class Shape(BaseModel):
    """The parts of an event that are used; AWS adds others over the years."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class EventBridgeEvent(Shape):
    """An event of EventBridge, beside its typed detail."""

    id: str = Field(min_length=1, max_length=255)
    """The same in each delivery of an event."""
    source: str
    detail_type: str = Field(alias="detail-type")
    detail: Any = Field(repr=False)
    account: str = ""
    region: str = ""
    time: datetime | None = None
    resources: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.id

    def __str__(self) -> str:
        return f"source {self.source!r} and detail-type {self.detail_type!r}"


class SnsRecord(Shape):
    """A message of SNS, beside its typed content."""

    message_id: str = Field(alias="MessageId", min_length=1, max_length=255)
    """The same in each delivery of a message."""
    topic: str = Field(alias="TopicArn")
    message: str = Field(alias="Message", repr=False)
    subject: str | None = Field(default=None, alias="Subject", repr=False)
    timestamp: datetime | None = Field(default=None, alias="Timestamp")
    attributes: dict[str, str] = Field(default_factory=dict, repr=False)
    """Message attributes by name, as texts."""

    @property
    def key(self) -> str:
        return self.message_id

    def __str__(self) -> str:
        return f"the topic {self.topic!r}"


class SqsMessage(Shape):
    """A message of SQS, beside its typed content."""

    message_id: str = Field(alias="messageId", min_length=1, max_length=255)
    """The same in each delivery of a message."""
    queue: str = Field(alias="eventSourceARN")
    """ARN of the queue."""
    body: str = Field(repr=False)
    group: str | None = Field(default=None, repr=False)
    """Group in a FIFO queue: its messages keep their order."""
    receives: int = 1
    """Deliveries of the message, this one included."""
    sent_at: datetime | None = None
    attributes: dict[str, str | None] = Field(default_factory=dict, repr=False)
    """Message attributes by name, as texts."""

    @property
    def key(self) -> str:
        return self.message_id

    def __str__(self) -> str:
        return f"the queue {self.queue!r}"


class S3Object(Shape):
    """An object of S3, the same from both senders."""

    bucket: str
    key: str = Field(repr=False)
    """The decoded name of the object."""
    size: int | None = None
    etag: str | None = None
    version_id: str | None = None
    sequencer: str | None = None
    """Orders the events of one key: the later one is greater, as text of the same length."""


class S3Event(Shape):
    """What happened to an object of S3, from S3 or through EventBridge."""

    name: str
    """In the words of the sender: `ObjectCreated:Put`, or `Object Created` through EventBridge."""
    object: S3Object
    time: datetime | None = None
    region: str = ""
    event_id: str = ""
    """The id of the event in EventBridge, of the request in S3."""

    @property
    def kind(self) -> S3Kind | None:
        """What happened, in one word for both senders; None for other events."""
        return next((kind for kind, begins in KINDS.items() if self.name.startswith(begins)), None)

    @property
    def key(self) -> str:
        """Identifies the event, the same from both senders."""
        what = "\0".join((self.object.key, self.object.version_id or "", self.kind or self.name))
        digest = hashlib.sha256(what.encode(errors="replace")).hexdigest()[:16]
        return f"{self.object.bucket}:{self.object.sequencer or self.event_id}-{digest}"

    def __str__(self) -> str:
        return f"the bucket {self.object.bucket!r} and {self.name!r}"


class Invocation(Shape):
    """A call of the function with an input that the caller chose, beside that input."""

    request_id: str | None = None
    """The same in Lambda's own retries of an asynchronous call, new in each call."""
    content: Any = Field(default=None, repr=False)

    @property
    def key(self) -> str | None:
        return self.request_id

    def __str__(self) -> str:
        return "the invocation"


class HttpRequest(Shape):
    """A request over HTTP, beside its typed body."""

    method: str
    path: str
    path_params: dict[str, str] = Field(default_factory=dict, repr=False)
    """Parts of the path that the route names in braces."""
    query: dict[str, str] = Field(default_factory=dict, repr=False)
    """Decoded; the last value of each parameter."""
    query_all: dict[str, tuple[str, ...]] = Field(default_factory=dict, repr=False)
    """Decoded; all values of each parameter, in order."""
    raw_query: str = Field(default="", repr=False)
    """As it was sent; in format 1.0 made again from the decoded parameters."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """By name in small letters; several values are joined by commas."""
    cookies: dict[str, str] = Field(default_factory=dict, repr=False)
    """The first of each name."""
    body: bytes = Field(default=b"", repr=False)
    """As it was sent, to check a signature."""
    request_id: str = ""
    authorizer: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    """What the authorizer of API Gateway knows of the caller."""


def is_http(event: Mapping[str, Any]) -> bool:
    """Whether it is a request of API Gateway, a function URL or a load balancer."""
    context = event.get("requestContext")
    return isinstance(context, Mapping) and ("httpMethod" in event or isinstance(context.get("http"), Mapping))


def records_of(event: Mapping[str, Any]) -> Literal["sns", "sqs", "s3"] | None:
    """The service that all records of an event are of; None if there are none, or of several."""
    records = event.get("Records")
    if not isinstance(records, list) or not all(isinstance(one, Mapping) for one in records):
        return None
    kinds = {_record_kind(one) for one in records}
    return kinds.pop() if len(kinds) == 1 else None


def _record_kind(record: Mapping[str, Any]) -> Literal["sns", "sqs", "s3"] | None:
    if isinstance(record.get("Sns"), Mapping):
        return "sns"
    if isinstance(record.get("s3"), Mapping):
        return "s3"
    return "sqs" if record.get("eventSource") == "aws:sqs" else None


def is_eventbridge(event: Mapping[str, Any]) -> bool:
    return "detail-type" in event and "source" in event


def not_for_a_router(event: Mapping[str, Any]) -> EventRejected | None:
    """The rejection of events of API Gateway that look like requests over HTTP and are none."""
    context = event.get("requestContext")
    if event.get("type") in ("TOKEN", "REQUEST") and {"methodArn", "routeArn"} & event.keys():
        what = "the event asks an authorizer of API Gateway: give the authorizer a function of its own"
    elif isinstance(context, Mapping) and "connectionId" in context and "http" not in context:
        what = "the event is of a WebSocket API, which has no requests over HTTP: see thunderagent.websocket_api"
    else:
        return None
    return EventRejected(f"{what}; a router takes {RECOGNISED}")


def unknown(event: object) -> EventRejected:
    """The rejection of an unknown event: what was expected and which names it has, without values."""
    if not isinstance(event, Mapping):
        return EventRejected(f"the event is a {type(event).__name__}; a router takes {RECOGNISED}")
    names = ", ".join(sorted(str(name)[:40] for name in event)[:12]) or "nothing"
    records = event.get("Records")
    kinds = {
        str(one.get("eventSource") or one.get("EventSource"))[:40]
        for one in (records if isinstance(records, list) else ())
        if isinstance(one, Mapping)
    }
    found = f"the event has {names}" + (f" (of {', '.join(sorted(kinds))})" if kinds else "")
    return EventRejected(f"{found}; a router takes {RECOGNISED}")


def read_eventbridge(event: Mapping[str, Any]) -> EventBridgeEvent:
    return read(EventBridgeEvent, event, "event")


def read_sns(record: Mapping[str, Any]) -> SnsRecord:
    content = dict(record["Sns"])
    attributes = content.get("MessageAttributes") or {}
    if isinstance(attributes, Mapping):
        attributes = {name: one.get("Value") if isinstance(one, Mapping) else one for name, one in attributes.items()}
    return read(SnsRecord, content | {"attributes": attributes}, "Sns")


def read_sqs(record: Mapping[str, Any]) -> SqsMessage:
    system, given = part(record, "attributes"), part(record, "messageAttributes")
    names = {"group": "MessageGroupId", "receives": "ApproximateReceiveCount", "sent_at": "SentTimestamp"}
    parts: dict[str, Any] = {name: system[theirs] for name, theirs in names.items() if theirs in system}
    values = ((name, one) for name, one in given.items() if isinstance(one, Mapping))
    parts["attributes"] = {name: one.get("stringValue", one.get("binaryValue")) for name, one in values}
    return read(SqsMessage, {**record, **parts}, "message")


def read_s3(record: Mapping[str, Any]) -> S3Event:
    """Read a record of a notification, whose keys are encoded as in a form."""
    bucket, thing = part(record["s3"], "bucket"), part(record["s3"], "object")
    key = thing.get("key")
    found = {
        "bucket": bucket.get("name"),
        "key": unquote_plus(key) if isinstance(key, str) else key,
        "size": thing.get("size"),
        "etag": thing.get("eTag"),
        "version_id": thing.get("versionId"),
        "sequencer": thing.get("sequencer"),
    }
    parts = {"name": record.get("eventName"), "object": found, "time": record.get("eventTime")}
    more = {"region": record.get("awsRegion", ""), "event_id": part(record, "responseElements").get("x-amz-request-id")}
    return _s3_event(parts | more)


def s3_of(event: EventBridgeEvent) -> S3Event | None:
    """The event of S3 that came through EventBridge; None for all others."""
    if event.source != S3 or not event.detail_type.startswith("Object "):
        return None
    thing = part(event.detail, "object")
    found = {
        "bucket": part(event.detail, "bucket").get("name"),
        "version_id": thing.get("version-id"),
        **{name: thing.get(name) for name in ("key", "size", "etag", "sequencer")},
    }
    parts = {"name": event.detail_type, "object": found, "time": event.time}
    return _s3_event(parts | {"region": event.region, "event_id": event.id})


def _s3_event(parts: Mapping[str, Any]) -> S3Event:
    event = read(S3Event, {name: value for name, value in parts.items() if value is not None}, "s3")
    if not (event.object.sequencer or event.event_id):
        raise EventRejected("the event lacks what it must have: s3.object.sequencer: Field required")
    return event


def part(data: Any, name: str) -> Mapping[str, Any]:
    """A mapping inside another, empty if there is none."""
    found = data.get(name) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def read(model: type[M], data: Mapping[str, Any], root: str) -> M:
    """The model of an event.

    Raises:
        EventRejected: a part is missing or of another type.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        problems = problems_of(error, root)
        raise EventRejected(f"the event lacks what it must have: {listing(problems)}", problems=problems) from None
