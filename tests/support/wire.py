"""Faults on the wire to DynamoDB, put in with botocore's own hooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session

from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.engine import Engine


class Fault:
    """What happens to the requests of one action, as often as `left` says; `met` counts."""

    def __init__(self, meet: Callable[[Any], Any], times: int) -> None:
        self._meet = meet
        self.left = times
        self.met = 0

    def __call__(self, request: Any, **_: Any) -> Any:
        if not self.left:
            return None
        answer = self._meet(request)
        if answer is not None:
            self.left -= 1
            self.met += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def _fault(engine: Engine, action: str, fault: Fault) -> Iterator[Fault]:
    assert isinstance(engine, DynamoEngine)
    events = engine.connection.client.meta.events
    name = f"before-send.dynamodb.{action}"
    events.register(name, fault)
    try:
        yield fault
    finally:
        events.unregister(name, fault)


def lost_replies(engine: Engine, action: str, *, times: int = 1, then: Callable[[], None] = lambda: None) -> Any:
    """Requests are done and their replies are lost; `then` happens before the sender notices."""

    def lose(request: Any) -> Any:
        carried_out(request)
        then()
        return ConnectionClosedError(endpoint_url=request.url)

    return _fault(engine, action, Fault(lose, times))


def on_the_wire(engine: Engine, action: str, meet: Callable[[Any], Any], *, times: int = 1) -> Any:
    """What `meet` says happens to requests: an exception or a reply in their place, None: they go on."""
    return _fault(engine, action, Fault(meet, times))


def carried_out(request: Any) -> None:
    """Let a request arrive whose sender does not wait for it."""
    wire = URLLib3Session()
    assert wire.send(request).status_code in (200, 400)  # 400: the repetition of a write that was done
    wire.close()


def refusals(
    engine: Engine, action: str, status: int, code: str, *, of: str = "", times: int = 100, **members: Any
) -> Any:
    """Requests that name `of` are not done and answered with an error."""

    def refuse(request: Any) -> AWSResponse | None:
        if of.encode() not in request.body:
            return None
        body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "injected", **members}
        headers = HTTPHeaders.from_dict({"content-type": "application/x-amz-json-1.0"})
        return AWSResponse(request.url, status, headers, _Raw(body))

    return _fault(engine, action, Fault(refuse, times))


class _Raw(BytesIO):
    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(json.dumps(body).encode())

    def stream(self) -> Iterator[bytes]:
        yield self.read()
