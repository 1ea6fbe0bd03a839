"""The router: collects typed routes and is the handler of an AWS Lambda function."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from thunderagent.client import Client
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.traceparent import continuing, from_xray
from thunderagent.router import events as shapes
from thunderagent.router.answers import Tasks
from thunderagent.router.deliveries import AnyRoute, Deliveries
from thunderagent.router.events import (
    KINDS,
    EventBridgeEvent,
    HttpRequest,
    Invocation,
    S3Event,
    S3Kind,
    SnsRecord,
    SqsMessage,
)
from thunderagent.router.http import Requests
from thunderagent.router.routes import (
    EventBridgeRoute,
    HttpRoute,
    InvokeRoute,
    S3Route,
    SnsRoute,
    SqsRoute,
    clash,
    one_address,
    one_http_path,
    parameter_types,
)
from thunderagent.settings import load_settings
from thunderagent.telemetry import traces
from thunderagent.telemetry.logs import Telemetry, configure_logging

T = TypeVar("T")

ForEventBridge = Callable[[T, EventBridgeEvent], Tasks]
ForSns = Callable[[T, SnsRecord], Tasks]
ForSqs = Callable[[T, SqsMessage], Tasks]
ForS3 = Callable[[T, S3Event], Tasks]
ForInvoke = Callable[[T, Invocation], Tasks]
ForHttp = Callable[[T, HttpRequest], Tasks]


class Router:
    """Turns events into tasks; its `handler` is the Lambda handler.

    Each event has exactly one route: two routes for the same event are refused. The id of a task consists of the job's
    name and the id of the event, so a second delivery finds the existing task.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        on_reject: Literal["raise", "drop"] = "raise",
        base_path: str = "",
        batch_item_failures: bool = False,
        bus: EventBus | None = None,
    ) -> None:
        """Make a router without routes.

        Args:
            client: enqueues; None: a client with the settings of the environment, made for the first event.
            on_reject: for what cannot become a task and did not come over HTTP: "raise" `EventRejected`, so that
                Lambda retries and then uses its dead letter queue; or "drop" it and answer with the reason.
            base_path: prefix of all paths, as a custom domain of API Gateway adds it.
            batch_item_failures: True: only messages of SQS without a task are delivered again. Each mapping of a queue
                to the function must have `ReportBatchItemFailures`, or SQS deletes them. False: the whole batch is
                delivered again; existing tasks are found by their ids.
            bus: receives an event for each event; None: log lines by the settings of the environment.

        Raises:
            ConfigurationError: an option is invalid.
        """
        if on_reject not in ("raise", "drop"):
            raise ConfigurationError(f"on_reject is {on_reject!r}; use 'raise' or 'drop'")
        if base_path and (not base_path.startswith("/") or base_path.endswith("/")):
            raise ConfigurationError(f"base_path is {base_path!r}; write for example '/shop'")
        if not isinstance(batch_item_failures, bool):
            raise ConfigurationError(f"batch_item_failures is {batch_item_failures!r}; use True or False")
        self.bus = bus or EventBus()
        self._client = client
        self._logs = bus is None and client is None
        self._base_path = base_path
        self._guard = threading.Lock()
        self._deliveries = Deliveries(
            client=self.client, bus=self.bus, drops=on_reject == "drop", reports=batch_item_failures
        )
        self._eventbridge: list[EventBridgeRoute] = []
        self._sns: list[SnsRoute] = []
        self._sqs: list[SqsRoute] = []
        self._s3: list[S3Route] = []
        self._invoke: list[InvokeRoute] = []
        self._http: list[HttpRoute] = []

    # Routes

    def eventbridge(
        self, *, source: str | None = None, detail_type: str | None = None
    ) -> Callable[[ForEventBridge[T]], ForEventBridge[T]]:
        """A route for events of EventBridge: `(detail, event)`, the detail as the annotated type.

        Args:
            source: only this source; None: any.
            detail_type: only this detail type; None: any.

        Raises:
            ConfigurationError: another route takes the same event, or the function cannot be a route.
        """
        if source is None and detail_type is None:
            raise ConfigurationError("a route for EventBridge needs a source, a detail_type, or both")

        parts = {"source": source, "detail_type": detail_type}
        return _adder(EventBridgeRoute, EventBridgeEvent, self._eventbridge, self._s3, **parts)

    def sns(self, *, topic: str) -> Callable[[ForSns[T]], ForSns[T]]:
        """A route for messages of SNS: `(message, record)`, the message as JSON of the annotated type.

        A function that takes `str` gets the text as it is.

        Args:
            topic: the ARN of the topic, or its name in any account and region.

        Raises:
            ConfigurationError: another route takes the same message, or the function cannot be a route.
        """
        return _adder(SnsRoute, SnsRecord, self._sns, address=one_address("sns", "topic", topic))

    def sqs(self, *, queue: str) -> Callable[[ForSqs[T]], ForSqs[T]]:
        """A route for messages of SQS: `(message, record)`, the body as JSON of the annotated type.

        A function that takes `str` gets the text as it is.

        Args:
            queue: the ARN of the queue, or its name in any account and region.

        Raises:
            ConfigurationError: another route takes the same message, or the function cannot be a route.
        """
        return _adder(SqsRoute, SqsMessage, self._sqs, address=one_address("sqs", "queue", queue))

    def s3(self, *, bucket: str, kind: S3Kind | None = "created") -> Callable[[ForS3[T]], ForS3[T]]:
        """A route for the objects of a bucket: `(object, event)`, from S3 or through EventBridge.

        The object is an `S3Object`, or any type with some of its fields.

        Args:
            bucket: the name of the bucket.
            kind: "created", "deleted", or None for every event.

        Raises:
            ConfigurationError: another route takes the same event, or the function cannot be a route.
        """
        if not bucket or ":" in bucket:
            raise ConfigurationError(f"{bucket!r} is no bucket; write its name, without an ARN")
        if kind is not None and kind not in KINDS:
            raise ConfigurationError(f"kind is {kind!r}; use {', '.join(map(repr, KINDS))} or None")
        return _adder(S3Route, S3Event, self._s3, self._eventbridge, bucket=bucket, kind=kind)

    def invoke(self) -> Callable[[ForInvoke[T]], ForInvoke[T]]:
        """The route for an input that the caller of the function chose: `(input, invocation)`.

        EventBridge Scheduler with an `Input`, Step Functions and `aws lambda invoke` call it so. It gets all that is
        of no other kind, so annotate the input with a model.

        Raises:
            ConfigurationError: there is such a route, or the function cannot be one.
        """
        return _adder(InvokeRoute, Invocation, self._invoke)

    def http(self, method: str, path: str) -> Callable[[ForHttp[T]], ForHttp[T]]:
        """A route for HTTP requests: `(body, request)`, the body as JSON of the annotated type.

        A function for `str` or `bytes` gets the body as it is, one for None has no body.

        Args:
            method: such as "POST".
            path: such as "/orders" or "/orders/{order_id}"; parts in braces are in `request.path_params`.

        Raises:
            ConfigurationError: another route takes the same request, or the function cannot be a route.
        """
        method, path = one_http_path(method, path)
        return _adder(HttpRoute, HttpRequest, self._http, method=method, path=path)

    # Events

    def handler(self, event: Any, context: object = None) -> dict[str, Any]:
        """Handle one invocation of Lambda.

        Returns:
            the ids of the tasks, for SNS, SQS and S3 of each record; or the messages of SQS to deliver again; or an
            HTTP answer for the caller, which is the answer to each failure of a request too.

        Raises:
            EventRejected: the event is unknown, or cannot become a task.
            StoreError: the store did not answer.
            Exception: the route raised it.
        """
        self._start_log()
        # Lambda always names a trace; one that X-Ray does not record would keep the spans of the task from being sent.
        invoked = os.environ.get("_X_AMZN_TRACE_ID", "")
        try:
            with continuing(from_xray(invoked) if "Sampled=1" in invoked else None):
                return self._handle(event, context)
        finally:
            traces.flush()  # Lambda lets no thread run between two invocations

    def _handle(self, event: Any, context: object) -> dict[str, Any]:
        if isinstance(event, Mapping):
            if problem := shapes.not_for_a_router(event):
                raise problem
            if shapes.is_http(event):
                requests = Requests(routes=self._http, base_path=self._base_path, client=self.client, bus=self.bus)
                return requests.serve(event)
            if kind := shapes.records_of(event):
                routes: Mapping[str, Sequence[AnyRoute]] = {"sns": self._sns, "sqs": self._sqs, "s3": self._s3}
                return self._deliveries.records(kind, event["Records"], routes[kind])
            if shapes.is_eventbridge(event):
                return self._deliveries.event(event, self._eventbridge, self._s3)
        if self._invoke:
            request_id = getattr(context, "aws_request_id", None)
            name = request_id if isinstance(request_id, str) else None
            return self._deliveries.invocation(event, self._invoke[0], name)
        raise shapes.unknown(event)

    def use(self, client: Client) -> None:
        """Enqueue with this client from now on, for tests of the routes of a module."""
        with self._guard:
            self._client, self._logs = client, False

    def client(self) -> Client:
        """The client, made once; a ConfigurationError says why the settings of the environment cannot work."""
        with self._guard:
            if self._client is None:
                self._client = Client.from_settings()
            return self._client

    def _start_log(self) -> None:
        """Write log lines from now on. Invalid settings are reported when the client is made."""
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


def _adder(
    make: Callable[..., T], event: type[BaseModel], routes: list[T], others: Sequence[object] = (), **parts: Any
) -> Callable[[Any], Any]:
    """The decorator that makes a route of a function and adds it, unless another route takes the same events."""

    def add(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        content, adapter = parameter_types(function, event)
        route = make(function=function, content=content, adapter=adapter, **parts)
        if problem := clash(route, [*routes, *others]):
            raise problem
        routes.append(route)
        return function

    return add
