"""Requests over HTTP as API Gateway and function URLs wrap them, in payload formats 1.0 and 2.0."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from thunderagent.errors import EventRejected
from thunderagent.router.shapes import HttpRequest, Shape, read

BODY_LIMIT: Final = 256 * 1024
"""Bytes of the body of an HTTP request, after base64."""


class _Http(Shape):
    method: str


class _Context(Shape):
    http: _Http | None = None
    stage: str = ""
    request_id: str = Field(default="", alias="requestId")
    authorizer: dict[str, Any] | None = None


class Envelope(Shape):
    """A request in one of the two payload formats: in 1.0 `httpMethod` and `path`, in 2.0 `http` and `rawPath`."""

    context: _Context = Field(alias="requestContext")
    method: str | None = Field(default=None, alias="httpMethod")
    path: str | None = None
    raw_path: str | None = Field(default=None, alias="rawPath")
    headers: dict[str, str | None] | None = Field(default=None, repr=False)
    multiple_headers: dict[str, list[str] | None] | None = Field(default=None, alias="multiValueHeaders", repr=False)
    query: dict[str, str | None] | None = Field(default=None, alias="queryStringParameters", repr=False)
    body: str | None = Field(default=None, repr=False)
    is_base64: bool | None = Field(default=None, alias="isBase64Encoded")

    def request(self, base_path: str) -> HttpRequest:
        """The request without its body, with the path as the routes have it."""
        method, path = self.method or "", self.path or "/"
        if self.context.http:
            method, path = self.context.http.method, self.raw_path or "/"
            # API Gateway leaves the stage in the path of this format, and takes it off in the other.
            path = _without(f"/{self.context.stage}", path)
        single = {name.lower(): value or "" for name, value in (self.headers or {}).items()}
        multiple = {name.lower(): ", ".join(some or ()) for name, some in (self.multiple_headers or {}).items()}
        return HttpRequest(
            method=method.upper(),
            path=_without(base_path, path),
            query={name: value or "" for name, value in (self.query or {}).items()},
            headers=multiple | single,
            request_id=self.context.request_id,
            authorizer=self.context.authorizer or {},
        )


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


def _without(prefix: str, path: str) -> str:
    if prefix.strip("/") and (path == prefix or path.startswith(f"{prefix}/")):
        return path.removeprefix(prefix) or "/"
    return path


def _too_large() -> EventRejected:
    return EventRejected(f"the body is over {BODY_LIMIT // 1024} KB; send a reference to the data instead", status=413)
