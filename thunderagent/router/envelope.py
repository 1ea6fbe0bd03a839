"""Requests over HTTP as API Gateway, function URLs and load balancers wrap them, and answers as each takes them."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping
from http.client import responses
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_plus, urlencode

from pydantic import Field

from thunderagent.model.errors import EventRejected
from thunderagent.router.events import HttpRequest, Shape, read

BODY_LIMIT: Final = 256 * 1024
"""Bytes of the body of an HTTP request, after base64."""


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

    Format 1.0 has `httpMethod` and `path`, and so has a load balancer, which adds `elb`; 2.0 has `http` and `rawPath`.
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
        """The request without its body, with the path as the routes have it."""
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
        """As it was sent, and its parameters, decoded and in their order."""
        if self.raw_query:
            return self.raw_query, parse_qsl(self.raw_query, keep_blank_values=True)
        several = {name: [value] for name, value in (self.query or {}).items()} | dict(self.multiple_query or {})
        pairs = [(name, value or "") for name, values in several.items() for value in values or ()]
        if self.context.elb is None:
            return urlencode(pairs), pairs
        raw = "&".join(f"{name}={value}" for name, value in pairs)  # a load balancer decodes nothing
        return raw, [(unquote_plus(name), unquote_plus(value)) for name, value in pairs]


def in_its_form(event: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as whatever sent the event takes it.

    A load balancer wants a description of the status, and headers with lists of values if it sent such.
    """
    if event["requestContext"].get("elb") is None:
        return answer
    status = answer["statusCode"]
    answer = {**answer, "statusDescription": f"{status} {responses.get(status, 'Rejected')}"}
    if event.get("multiValueHeaders") is not None:
        answer["multiValueHeaders"] = {name: [value] for name, value in answer.pop("headers").items()}
    return answer


def read_http(event: Mapping[str, Any]) -> Envelope:
    """Read a request of either payload format.

    Raises:
        EventRejected: it lacks what every such request has.
    """
    return read(Envelope, event, "request")


def body_of(envelope: Envelope) -> bytes:
    """The body of a request.

    Raises:
        EventRejected: it is too large, or not what it claims to be.
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
