"""Requests over HTTP: read as API Gateway, function URLs and load balancers wrap them, answered as each takes it."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import responses
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_plus, urlencode

from pydantic import Field

from thunderagent.client import Client
from thunderagent.jobs.outcome import raised
from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import DuplicateTask, EventRejected, ParentNotFound, StoreError
from thunderagent.model.traceparent import checked, continuing, from_xray
from thunderagent.router import answers
from thunderagent.router.enqueue import event_key, put_all
from thunderagent.router.events import HttpRequest, Shape, read
from thunderagent.router.routes import AS_IT_IS, HttpRoute

BODY_LIMIT: Final = 256 * 1024
"""Most bytes of a body, after base64."""

KEY_HEADER: Final = "idempotency-key"
LONGEST_KEY: Final = 255

_JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Answers requests; no step ends with a traceback."""

    routes: Sequence[HttpRoute]
    base_path: str
    client: Callable[[], Client]
    bus: EventBus

    def serve(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request: 202 with the id of its task, 4xx with what is wrong, 503 or 500 for a failure of ours."""
        return in_its_form(event, self._answer(event))

    def _answer(self, event: Mapping[str, Any]) -> dict[str, Any]:
        try:
            envelope = read_http(event)
        except EventRejected as error:
            return answers.http_rejected(error)
        request = envelope.request(self.base_path)
        found = [(route, values) for route in self.routes if (values := route.match(request.path)) is not None]
        if not found:
            return answers.http(404, {"error": "there is no such path"})
        mine = [(route, values) for route, values in found if route.method == request.method]
        if not mine:
            methods = ", ".join(sorted({route.method for route, _ in found}))
            return answers.http(405, {"error": f"the method must be {methods}"}, {"allow": methods})
        [(route, values)] = mine
        request = request.model_copy(update={"path_params": dict(values)})
        try:
            return self._enqueue(envelope, request, route)
        except ParentNotFound as error:
            self.bus.emit(edge_events.EventRefused(route=str(route), event_id=request.request_id, reason=str(error)))
            return answers.http_parent_missing()
        except Exception as error:
            if rejected := answers.rejection(error):
                self.bus.emit(
                    edge_events.EventRefused(route=str(route), event_id=request.request_id, reason=str(rejected))
                )
                return answers.http_rejected(answers.without_names(rejected, error))
            self.bus.emit(
                edge_events.EventFailed(route=str(route), event_id=request.request_id, error=raised(error).error)
            )
            if isinstance(error, StoreError):
                return answers.http_unavailable()
            return answers.http_failed(request.request_id)

    def _enqueue(self, envelope: Envelope, request: HttpRequest, route: HttpRoute) -> dict[str, Any]:
        request = request.model_copy(update={"body": body_of(envelope)})
        if request.body and route.content not in AS_IT_IS:
            _check_type(request.headers)
        key = _key(request, route)
        answer = route.function(route.content_of(request), request)
        tasks = answers.wanted(answer, route.name)
        try:
            with continuing(trace_of(request.headers)):
                put = put_all(self.client(), tasks, key, may_differ=False) if tasks else []
        except DuplicateTask:
            if key is None or any("task_id" in one.options for one in tasks):
                raise
            raise EventRejected("the Idempotency-Key was used for another request", status=422) from None
        names = tuple(one.task_id for one in put)
        self.bus.emit(edge_events.EventRouted(route=str(route), event_id=request.request_id, task_ids=names))
        return answers.http_taken(put, answer)


class _Http(Shape):
    method: str


class _Context(Shape):
    http: _Http | None = None
    stage: str = ""
    request_id: str = Field(default="", alias="requestId")
    authorizer: dict[str, Any] | None = None
    elb: Any = None


class Envelope(Shape):
    """A request in one of the payload formats.

    Format 1.0 has `httpMethod` and `path`, as has a load balancer, which adds `elb`; 2.0 has `http` and `rawPath`.
    """

    context: _Context = Field(alias="requestContext")
    method: str | None = Field(default=None, alias="httpMethod")
    version: Any = None
    path: str | None = None
    raw_path: str | None = Field(default=None, alias="rawPath")
    headers: dict[str, str | None] | None = Field(default=None, repr=False)
    multiple_headers: dict[str, list[str] | None] | None = Field(default=None, alias="multiValueHeaders", repr=False)
    cookies: list[str] | None = Field(default=None, repr=False)
    query: dict[str, str | None] | None = Field(default=None, alias="queryStringParameters", repr=False)
    multiple_query: dict[str, list[str] | None] | None = Field(
        default=None, alias="multiValueQueryStringParameters", repr=False
    )
    raw_query: str | None = Field(default=None, alias="rawQueryString", repr=False)
    body: str | None = Field(default=None, repr=False)
    is_base64: bool | None = Field(default=None, alias="isBase64Encoded")

    def request(self, base_path: str) -> HttpRequest:
        """The request without its body; its path begins after `base_path`."""
        method, path = self.method or "", self.path or "/"
        if self.context.http:
            method, path = self.context.http.method, self.raw_path or "/"
        if self.context.http or self.version == "1.0":  # an HTTP API leaves the stage in the path, a REST API does not
            path = _without(f"/{self.context.stage}", path)
        headers, (raw_query, query) = self._headers(), self._query()
        query_all = defaultdict[str, list[str]](list)
        for name, value in query:
            query_all[name].append(value)
        return HttpRequest(
            method=method.upper(),
            path=_without(base_path, path),
            query=dict(query),
            query_all={name: tuple(values) for name, values in query_all.items()},
            raw_query=raw_query,
            headers=headers,
            cookies=_cookies(headers.get("cookie", "")),
            request_id=self.context.request_id,
            authorizer=self.context.authorizer or {},
        )

    def _headers(self) -> dict[str, str]:
        headers = {name.lower(): value or "" for name, value in (self.headers or {}).items()}
        for name, values in (self.multiple_headers or {}).items():
            headers[name.lower()] = ("; " if name.lower() == "cookie" else ", ").join(values or ())
        if self.cookies:  # format 2.0 takes them out of the headers
            headers.setdefault("cookie", "; ".join(self.cookies))
        return headers

    def _query(self) -> tuple[str, list[tuple[str, str]]]:
        """The query as it was sent, and its decoded parameters in order."""
        if self.raw_query:
            return self.raw_query, parse_qsl(self.raw_query, keep_blank_values=True)
        several = {name: [value] for name, value in (self.query or {}).items()} | dict(self.multiple_query or {})
        pairs = [(name, value or "") for name, values in several.items() for value in values or ()]
        if self.context.elb is None:
            return urlencode(pairs), pairs
        raw = "&".join(f"{name}={value}" for name, value in pairs)  # a load balancer decodes nothing
        return raw, [(unquote_plus(name), unquote_plus(value)) for name, value in pairs]


def in_its_form(event: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer in the form of the sender.

    A load balancer needs a description of the status, and lists of header values if it sent such.
    """
    if event["requestContext"].get("elb") is None:
        return answer
    status = answer["statusCode"]
    answer = {**answer, "statusDescription": f"{status} {responses.get(status, 'Rejected')}"}
    if event.get("multiValueHeaders") is not None:
        answer["multiValueHeaders"] = {name: [value] for name, value in answer.pop("headers").items()}
    return answer


def read_http(event: Mapping[str, Any]) -> Envelope:
    return read(Envelope, event, "request")


def body_of(envelope: Envelope) -> bytes:
    """The body of a request.

    Raises:
        EventRejected: it is too large, or not base64.
    """
    body, encoded = envelope.body or "", bool(envelope.is_base64)
    if len(body) > (BODY_LIMIT * 4 // 3 + 4 if encoded else BODY_LIMIT):
        raise _too_large()
    try:
        content = base64.b64decode(body, validate=True) if encoded else body.encode()
    except ValueError:
        raise EventRejected("the body is not base64") from None
    if len(content) > BODY_LIMIT:
        raise _too_large()
    return content


def _cookies(header: str) -> dict[str, str]:
    cookies: dict[str, str] = {}
    for part in header.split(";"):
        name, equals, value = part.partition("=")
        if equals:
            cookies.setdefault(name.strip(), value.strip())
    return cookies


def _without(prefix: str, path: str) -> str:
    if prefix.strip("/") and (path == prefix or path.startswith(f"{prefix}/")):
        return path.removeprefix(prefix) or "/"
    return path


def _too_large() -> EventRejected:
    return EventRejected(f"the body is over {BODY_LIMIT // 1024} KB; send a reference to the data instead", status=413)


def trace_of(headers: Mapping[str, str]) -> str | None:
    """The trace of a request: its `traceparent`, else the header of AWS."""
    return checked(headers.get("traceparent")) or from_xray(headers.get("x-amzn-trace-id"))


def _check_type(headers: Mapping[str, str]) -> None:
    """Take JSON only: a page of another site may send what needs no such header."""
    kind, _, rest = headers.get("content-type", "").lower().partition(";")
    is_json = kind.strip() == _JSON or (kind.startswith("application/") and kind.strip().endswith("+json"))
    charset = rest.partition("charset=")[2].partition(";")[0].strip(' "')
    if not is_json or charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise EventRejected(f"the content-type must be {_JSON}, in UTF-8", status=415)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise EventRejected("the body must not be compressed", status=415)


def _key(request: HttpRequest, route: HttpRoute) -> str | None:
    """Identifies the request: its idempotency key with its route, so that a key counts for one route."""
    given = request.headers.get(KEY_HEADER)
    if given is None:
        return None
    text = given.strip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]  # as the draft of the IETF has it
    key = event_key(f"{route.method}:{route.path}", text)
    if not text or len(key) - len(event_key(f"{route.method}:{route.path}", "")) > LONGEST_KEY:
        raise EventRejected(f"the Idempotency-Key must have 1 to {LONGEST_KEY} characters")
    return key
