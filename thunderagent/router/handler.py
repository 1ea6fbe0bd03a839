"""The router: collects typed routes and is the handler of an AWS Lambda function."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from thunderagent import router_events, spans
from thunderagent.bus import EventBus
from thunderagent.client import Client
from thunderagent.errors import ConfigurationError, EventRejected, StoreError
from thunderagent.router import answers, requests, shapes
from thunderagent.router.answers import Tasks
from thunderagent.router.enqueue import event_key, put_all
from thunderagent.router.routes import (
    EventBridgeRoute,
    HttpRoute,
    SnsRoute,
    clash,
    one_http_path,
    parameter_types,
)
from thunderagent.router.shapes import EventBridgeEvent, HttpRequest, SnsRecord
from thunderagent.settings import load_settings
from thunderagent.telemetry import Telemetry, configure_logging

T = TypeVar("T")

ForEventBridge = Callable[[T, EventBridgeEvent], Tasks]
ForSns = Callable[[T, SnsRecord], Tasks]
ForHttp = Callable[[T, HttpRequest], Tasks]


class Router:
    """Turns events into tasks. Give its `handler` to Lambda.

    Each event has exactly one route; routes that could both be for the same event do not construct. The id of a task
    is made of the job's name and the id of the event, so an event that is delivered again gives the task that exists.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        on_reject: Literal["raise", "drop"] = "raise",
        base_path: str = "",
        bus: EventBus | None = None,
    ) -> None:
        """Make a router without routes.

        Args:
            client: what enqueues; None: one with the settings of the environment, made for the first event and kept.
            on_reject: what happens to an event of EventBridge or SNS that cannot become a task: "raise"
                `EventRejected`, so that Lambda tries again and then keeps it in the dead letter queue; or "drop" it,
                and answer with the reason.
            base_path: what stands before the paths of the routes, as a custom domain of API Gateway adds it.
            bus: told what happens to events; None: log lines, as agents write them with the same settings.

        Raises:
            ConfigurationError: an option cannot be what it is.
        """
        if on_reject not in ("raise", "drop"):
            raise ConfigurationError(f"on_reject is {on_reject!r}; use 'raise' or 'drop'")
        if base_path and (not base_path.startswith("/") or base_path.endswith("/")):
            raise ConfigurationError(f"base_path is {base_path!r}; write for example '/shop'")
        self.bus = bus or EventBus()
        self._client = client
        self._logs = bus is None and client is None
        self._on_reject = on_reject
        self._base_path = base_path
        self._guard = threading.Lock()
        self._eventbridge: list[EventBridgeRoute] = []
        self._sns: list[SnsRoute] = []
        self._http: list[HttpRoute] = []

    # Routes

    def eventbridge(
        self, *, source: str | None = None, detail_type: str | None = None
    ) -> Callable[[ForEventBridge[T]], ForEventBridge[T]]:
        """A route for events of EventBridge: `(detail, event)`, the detail as the type that is annotated.

        Args:
            source: only of this source; None: of any.
            detail_type: only of this detail type; None: of any.

        Raises:
            ConfigurationError: another route can be for the same event, or the function cannot be a route.
        """
        if source is None and detail_type is None:
            raise ConfigurationError("a route for EventBridge needs a source, a detail_type, or both")

        def add(function: ForEventBridge[T]) -> ForEventBridge[T]:
            content, adapter = parameter_types(function, EventBridgeEvent)
            route = EventBridgeRoute(
                function=function, content=content, adapter=adapter, source=source, detail_type=detail_type
            )
            _add(route, self._eventbridge)
            return function

        return add

    def sns(self, *, topic: str) -> Callable[[ForSns[T]], ForSns[T]]:
        """A route for messages of SNS: `(message, record)`, the message as JSON of the type that is annotated.

        A function that takes `str` gets the text as it is.

        Args:
            topic: the ARN of the topic; or its name alone, for any account and region.

        Raises:
            ConfigurationError: another route can be for the same message, or the function cannot be a route.
        """
        if not topic or topic.count(":") not in (0, 5):
            raise ConfigurationError(
                f"{topic!r} is no topic; write its ARN, arn:aws:sns:REGION:ACCOUNT:NAME, or its name"
            )

        def add(function: ForSns[T]) -> ForSns[T]:
            content, adapter = parameter_types(function, SnsRecord)
            _add(SnsRoute(function=function, content=content, adapter=adapter, topic=topic), self._sns)
            return function

        return add

    def http(self, method: str, path: str) -> Callable[[ForHttp[T]], ForHttp[T]]:
        """A route for HTTP requests: `(body, request)`, the body as JSON of the type that is annotated.

        A function that takes `str` or `bytes` gets the body as it is, one that takes None has no body.

        Args:
            method: such as "POST".
            path: such as "/orders" or "/orders/{order_id}"; what stands in braces is in `request.path_params`.

        Raises:
            ConfigurationError: another route can be for the same request, or the function cannot be a route.
        """
        method, path = one_http_path(method, path)

        def add(function: ForHttp[T]) -> ForHttp[T]:
            content, adapter = parameter_types(function, HttpRequest)
            _add(HttpRoute(function=function, content=content, adapter=adapter, method=method, path=path), self._http)
            return function

        return add

    # Events

    def handler(self, event: Any, context: object = None) -> dict[str, Any]:
        """Handle one invocation of Lambda.

        Returns:
            of EventBridge the ids of the tasks, of SNS that for each record, of HTTP an answer for the caller.

        Raises:
            EventRejected: it is no event that a router knows, or one of EventBridge or SNS that cannot become a task.
            StoreError: of EventBridge and SNS, the store did not answer.
            Exception: of EventBridge and SNS, what the route raised.
        """
        self._start_log()
        try:
            return self._handle(event)
        finally:
            spans.flush()  # Lambda lets no thread run between two invocations

    def _handle(self, event: Any) -> dict[str, Any]:
        if isinstance(event, Mapping):
            if shapes.is_http(event):
                return requests.serve(event, self._http, self._base_path, self.client, self.bus)
            if shapes.is_sns(event):
                return self._records(event["Records"])
            if shapes.is_eventbridge(event):
                return self._event(event)
        raise shapes.unknown(event)

    def use(self, client: Client) -> None:
        """Enqueue with this client from now on; for tests of routes that a module defines."""
        with self._guard:
            self._client, self._logs = client, False

    def client(self) -> Client:
        """The client, made once.

        Raises:
            ConfigurationError: the settings of the environment cannot work.
        """
        with self._guard:
            if self._client is None:
                self._client = Client.from_settings()
            return self._client

    def _start_log(self) -> None:
        """Write log lines from now on. Settings that cannot work are told when the client is made."""
        with self._guard:
            if self._logs:
                self._logs = False
                try:
                    settings = load_settings()
                    configure_logging(
                        settings.log_level, as_json=settings.log_json, redact=settings.log_redact, stream=sys.stderr
                    )
                except ConfigurationError:
                    configure_logging(stream=sys.stderr)
                Telemetry(self.bus)

    def _event(self, data: Mapping[str, Any]) -> dict[str, Any]:
        def read_and_put() -> dict[str, Any]:
            event = shapes.read_eventbridge(data)
            found = [route for route in self._eventbridge if route.is_for(event)]
            return self._put(f"source {event.source!r} and detail-type {event.detail_type!r}", event, event.id, found)

        return self._answer(read_and_put, "eventbridge", data.get("id"))

    def _records(self, records: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Handle each record; a rejection or an error of a route does not stop those behind it.

        Raises:
            EventRejected: one of the records was rejected, all others were taken.
        """
        told: list[dict[str, Any]] = []
        failures: list[Exception] = []
        for data in records:

            def read_and_put(data: Mapping[str, Any] = data) -> dict[str, Any]:
                record = shapes.read_sns(data)
                found = [route for route in self._sns if route.is_for(record)]
                return self._put(f"the topic {record.topic!r}", record, record.message_id, found)

            message_id = data["Sns"].get("MessageId")
            try:
                told.append({"message_id": message_id} | self._answer(read_and_put, "sns", message_id))
            except StoreError:  # nothing behind it has a better chance, and Lambda tries all of them again
                raise
            except Exception as error:
                failures.append(error)
        if failures:
            raise next((one for one in failures if not isinstance(one, EventRejected)), failures[0])
        return {"records": told}

    def _put(self, what: str, event: Any, event_id: str, found: list[Any]) -> dict[str, Any]:
        if not found:
            known = ", ".join(map(str, self._eventbridge if isinstance(event, EventBridgeEvent) else self._sns))
            raise EventRejected(f"there is no route for {what}; there are {known or 'none'}")
        [route] = found
        tasks = answers.wanted(route.function(route.content_of(event), event), route.name)
        source = "eventbridge" if isinstance(event, EventBridgeEvent) else "sns"
        put = put_all(self.client(), tasks, event_key(source, event_id), may_differ=True) if tasks else []
        task_ids = tuple(task.task_id for task in put)
        self.bus.emit(router_events.EventRouted(route=str(route), event_id=event_id, task_ids=task_ids))
        return answers.taken(put)

    def _answer(self, read_and_put: Callable[[], dict[str, Any]], source: str, event_id: object) -> dict[str, Any]:
        try:
            return read_and_put()
        except Exception as error:
            rejected = answers.rejection(error)
            if rejected is None:
                raise
            self.bus.emit(router_events.EventRefused(route=source, event_id=str(event_id)[:255], reason=str(rejected)))
            if self._on_reject == "raise":
                raise rejected from None
            return {"task_ids": [], "rejected": answers.told(rejected)}


def _add(route: T, routes: list[T]) -> None:
    if problem := clash(route, routes):
        raise problem
    routes.append(route)
