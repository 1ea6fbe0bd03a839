"""The road of an HTTP request through a router: every step may end it with an answer, none with a traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from thunderagent.client import Client
from thunderagent.jobs.outcome import raised
from thunderagent.model import edge_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import DuplicateTask, EventRejected, ParentNotFound, StoreError
from thunderagent.model.traceparent import checked, continuing, from_xray
from thunderagent.router import answers
from thunderagent.router.enqueue import event_key, put_all
from thunderagent.router.envelope import Envelope, body_of, in_its_form, read_http
from thunderagent.router.events import HttpRequest
from thunderagent.router.routes import AS_IT_IS, HttpRoute

KEY_HEADER: Final = "idempotency-key"
LONGEST_KEY: Final = 255

_JSON: Final = "application/json"


def serve(
    event: Mapping[str, Any],
    routes: Sequence[HttpRoute],
    base_path: str,
    client: Callable[[], Client],
    bus: EventBus,
) -> dict[str, Any]:
    """Answer a request: 202 with the id of its task, 4xx with what is wrong with it, 503 or 500 when we are."""
    return in_its_form(event, _serve(event, routes, base_path, client, bus))


def _serve(
    event: Mapping[str, Any],
    routes: Sequence[HttpRoute],
    base_path: str,
    client: Callable[[], Client],
    bus: EventBus,
) -> dict[str, Any]:
    try:
        envelope = read_http(event)
    except EventRejected as error:
        return answers.http_rejected(error)
    request = envelope.request(base_path)
    found = [(route, values) for route in routes if (values := route.match(request.path)) is not None]
    if not found:
        return answers.http(404, {"error": "there is no such path"})
    mine = [(route, values) for route, values in found if route.method == request.method]
    if not mine:
        methods = ", ".join(sorted({route.method for route, _ in found}))
        return answers.http(405, {"error": f"the method must be {methods}"}, {"allow": methods})
    [(route, values)] = mine
    request = request.model_copy(update={"path_params": dict(values)})
    try:
        return _enqueue(envelope, request, route, client, bus)
    except ParentNotFound as error:
        bus.emit(edge_events.EventRefused(route=str(route), event_id=request.request_id, reason=str(error)))
        return answers.http_parent_missing()
    except Exception as error:
        if rejected := answers.rejection(error):
            bus.emit(edge_events.EventRefused(route=str(route), event_id=request.request_id, reason=str(rejected)))
            return answers.http_rejected(answers.without_names(rejected, error))
        bus.emit(edge_events.EventFailed(route=str(route), event_id=request.request_id, error=raised(error).error))
        if isinstance(error, StoreError):
            return answers.http_unavailable()
        return answers.http_failed(request.request_id)


def _enqueue(
    envelope: Envelope, request: HttpRequest, route: HttpRoute, client: Callable[[], Client], bus: EventBus
) -> dict[str, Any]:
    request = request.model_copy(update={"body": body_of(envelope)})
    if request.body and route.content not in AS_IT_IS:
        _check_type(request.headers)
    key = _key(request, route)
    answer = route.function(route.content_of(request), request)
    tasks = answers.wanted(answer, route.name)
    try:
        with continuing(trace_of(request.headers)):
            put = put_all(client(), tasks, key, may_differ=False) if tasks else []
    except DuplicateTask:
        if key is None or any("task_id" in one.options for one in tasks):
            raise
        raise EventRejected("the Idempotency-Key was used for another request", status=422) from None
    names = tuple(one.task_id for one in put)
    bus.emit(edge_events.EventRouted(route=str(route), event_id=request.request_id, task_ids=names))
    return answers.http_taken(put, answer)


def trace_of(headers: Mapping[str, str]) -> str | None:
    """The trace that a request belongs to: of its `traceparent`, else of the header that AWS puts in."""
    return checked(headers.get("traceparent")) or from_xray(headers.get("x-amzn-trace-id"))


def _check_type(headers: Mapping[str, str]) -> None:
    """JSON only, also because a page of another site may send all that needs no such header."""
    kind, _, rest = headers.get("content-type", "").lower().partition(";")
    is_json = kind.strip() == _JSON or (kind.startswith("application/") and kind.strip().endswith("+json"))
    charset = rest.partition("charset=")[2].partition(";")[0].strip(' "')
    if not is_json or charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise EventRejected(f"the content-type must be {_JSON}, in UTF-8", status=415)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise EventRejected("the body must not be compressed", status=415)


def _key(request: HttpRequest, route: HttpRoute) -> str | None:
    """What names the request among all others: its key with its route, so that a key counts for one route alone."""
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
