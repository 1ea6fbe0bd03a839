"""Events and messages: each becomes tasks once, or Lambda delivers it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from thunderagent.client import Client
from thunderagent.jobs.outcome import raised
from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import EventRejected, StoreError
from thunderagent.router import answers
from thunderagent.router import events as shapes
from thunderagent.router.enqueue import event_key, put_all
from thunderagent.router.events import EventBridgeEvent, Invocation, S3Event, SnsRecord, SqsMessage
from thunderagent.router.routes import EventBridgeRoute, InvokeRoute, S3Route, SnsRoute, SqsRoute

Delivery = EventBridgeEvent | SnsRecord | SqsMessage | S3Event | Invocation
AnyRoute = EventBridgeRoute | SnsRoute | SqsRoute | S3Route | InvokeRoute
Found = tuple[str, Delivery, Sequence[AnyRoute]]
"""Source of a delivery, the delivery, and routes of which one is for it."""

_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], SnsRecord | SqsMessage | S3Event]]] = {
    "sns": shapes.read_sns,
    "sqs": shapes.read_sqs,
    "s3": shapes.read_s3,
}
_LONGEST_ID: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """Handles all events but requests over HTTP."""

    client: Callable[[], Client]
    bus: EventBus
    drops: bool
    """Whether a rejection is an answer instead of an exception."""
    reports: bool
    """Whether the answer names the messages of SQS to deliver again."""

    def event(
        self, data: Mapping[str, Any], routes: Sequence[EventBridgeRoute], s3: Sequence[S3Route]
    ) -> dict[str, Any]:
        """Handle an event of EventBridge, maybe one of S3."""

        def read() -> Found:
            event = shapes.read_eventbridge(data)
            is_taken = not s3 or any(route.is_for(event) for route in routes)
            of_s3 = None if is_taken else shapes.s3_of(event)
            return ("eventbridge", event, routes) if of_s3 is None else ("s3", of_s3, s3)

        return self._deliver(read, "eventbridge", data.get("id"))

    def invocation(self, content: Any, route: InvokeRoute, request_id: str | None) -> dict[str, Any]:
        """Handle an input that the caller of the function chose."""
        call = Invocation(request_id=request_id, content=content)
        return self._deliver(lambda: ("invoke", call, [route]), "invoke", request_id)

    def records(
        self, kind: Literal["sns", "sqs", "s3"], records: Sequence[Mapping[str, Any]], routes: Sequence[AnyRoute]
    ) -> dict[str, Any]:
        """Handle each record; one without a task does not stop those behind it, except in its group of a FIFO queue.

        Raises:
            EventRejected: a record was rejected.
            StoreError: the store did not answer; the records behind it are not tried.
            Exception: a route raised it.
        """
        taken: list[dict[str, Any]] = []
        again: list[object] = []
        failures: list[Exception] = []
        held = set[str]()
        for record in records:
            name, group = _name_of(kind, record), _group_of(record)
            if group in held or (failures and isinstance(failures[-1], StoreError)):
                again.append(name)
                continue
            try:
                taken.append({"message_id": name} | self._deliver(partial(_found, kind, record, routes), kind, name))
            except Exception as error:
                again.append(name)
                failures.append(error)
                if group is not None:
                    held.add(group)
                if not isinstance(error, EventRejected):
                    self.bus.emit(edge_events.EventFailed(route=kind, event_id=_short(name), error=raised(error).error))
        reports = kind == "sqs" and self.reports
        if not failures:
            return {"batchItemFailures": []} if reports else {"records": taken}
        if reports and taken and all(isinstance(name, str) and name for name in again):
            return {"batchItemFailures": [{"itemIdentifier": name} for name in again]}
        raise next((one for one in failures if not isinstance(one, EventRejected)), failures[0])

    def _deliver(self, read: Callable[[], Found], kind: str, name: object) -> dict[str, Any]:
        try:
            source, delivery, routes = read()
            return self._put(source, delivery, routes)
        except Exception as error:
            rejected = answers.rejection(error)
            if rejected is None:
                raise
            self.bus.emit(edge_events.EventRefused(route=kind, event_id=_short(name), reason=str(rejected)))
            if not self.drops:
                raise rejected from None
            return {"task_ids": [], "rejected": answers.as_data(rejected)}

    def _put(self, source: str, delivery: Any, routes: Sequence[Any]) -> dict[str, Any]:
        found = [route for route in routes if route.is_for(delivery)]
        if not found:
            known = ", ".join(map(str, routes))
            raise EventRejected(f"there is no route for {delivery}; there are {known or 'none'}")
        [route] = found
        tasks = answers.wanted(route.function(route.content_of(delivery), delivery), route.name)
        key = None if delivery.key is None else event_key(source, delivery.key)
        put = put_all(self.client(), tasks, key, may_differ=True) if tasks else []
        task_ids = tuple(task.task_id for task in put)
        self.bus.emit(edge_events.EventRouted(route=str(route), event_id=_short(delivery.key), task_ids=task_ids))
        return answers.taken(put)


def _found(kind: str, record: Mapping[str, Any], routes: Sequence[AnyRoute]) -> Found:
    return kind, _READERS[kind](record), routes


def _name_of(kind: str, record: Mapping[str, Any]) -> object:
    """The sender's id of a record, however malformed it is."""
    if kind == "sns":
        return record["Sns"].get("MessageId")
    return record.get("messageId") if kind == "sqs" else shapes.part(record, "responseElements").get("x-amz-request-id")


def _group_of(record: Mapping[str, Any]) -> str | None:
    group = shapes.part(record, "attributes").get("MessageGroupId")
    return group if isinstance(group, str) else None


def _short(name: object) -> str:
    return "" if name is None else str(name)[:_LONGEST_ID]
