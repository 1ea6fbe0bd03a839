"""The events as Lambda hands them over, read into models; and the answer to what is none of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent.errors import EventRejected
from thunderagent.router.problems import listing, problems_of

RECOGNISED: Final = (
    "an event of EventBridge (source, detail-type, detail), of SNS (Records with Sns) or of HTTP (API Gateway with "
    "payload format 1.0 or 2.0, or a function URL)"
)

M = TypeVar("M", bound=BaseModel)


class Shape(BaseModel):
    """Of what comes, the parts that are of use; AWS adds more over the years."""

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


class SnsRecord(Shape):
    """A message of SNS, beside its typed content."""

    message_id: str = Field(alias="MessageId", min_length=1, max_length=255)
    """The same in each delivery of a message."""
    topic: str = Field(alias="TopicArn")
    message: str = Field(alias="Message", repr=False)
    subject: str | None = Field(default=None, alias="Subject", repr=False)
    timestamp: datetime | None = Field(default=None, alias="Timestamp")
    attributes: dict[str, str] = Field(default_factory=dict, repr=False)
    """Message attributes by name, as the texts that they were sent as."""


class HttpRequest(Shape):
    """A request over HTTP, beside its typed body."""

    method: str
    path: str
    path_params: dict[str, str] = Field(default_factory=dict, repr=False)
    """The parts of the path that the route names in braces."""
    query: dict[str, str] = Field(default_factory=dict, repr=False)
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """By name in small letters."""
    body: bytes = Field(default=b"", repr=False)
    """As it was sent, for the check of a signature."""
    request_id: str = ""
    authorizer: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    """What the authorizer of API Gateway found out about the caller."""


def is_http(event: Mapping[str, Any]) -> bool:
    """True for a request of API Gateway or of a function URL."""
    context = event.get("requestContext")
    return isinstance(context, Mapping) and ("httpMethod" in event or isinstance(context.get("http"), Mapping))


def is_sns(event: Mapping[str, Any]) -> bool:
    """True for records of SNS."""
    records = event.get("Records")
    return bool(
        isinstance(records, list)
        and records
        and all(isinstance(one, Mapping) and isinstance(one.get("Sns"), Mapping) for one in records)
    )


def is_eventbridge(event: Mapping[str, Any]) -> bool:
    """True for an event of EventBridge."""
    return "detail-type" in event and "source" in event


def unknown(event: object) -> EventRejected:
    """What to say of an event that is none of those: what was expected, and what it has, without values."""
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
    """Read an event of EventBridge.

    Raises:
        EventRejected: it lacks what every such event has.
    """
    return read(EventBridgeEvent, event, "event")


def read_sns(record: Mapping[str, Any]) -> SnsRecord:
    """Read one of the records.

    Raises:
        EventRejected: it lacks what every such record has.
    """
    content = dict(record["Sns"])
    attributes = content.get("MessageAttributes") or {}
    if isinstance(attributes, Mapping):
        attributes = {name: one.get("Value") if isinstance(one, Mapping) else one for name, one in attributes.items()}
    return read(SnsRecord, content | {"attributes": attributes}, "Sns")


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
