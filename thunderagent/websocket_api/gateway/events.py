"""The events and limits of Amazon's API Gateway, made of a local request."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from thunderagent.websocket_api.protocol import MESSAGE_BYTES, Action
from thunderagent.websocket_api.server.throttle import Rates

STAGE: Final = "local"
API: Final = "local"
METHOD_ARN: Final = f"arn:aws:execute-api:local:000000000000:{API}/{STAGE}/$connect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Rates):
    """What API Gateway and the functions allow. Tests allow less."""

    rotate_after_s: float = 7200.0
    """Longest life of a connection."""
    idle_s: float = 600.0
    """Silence in both directions after which a connection is closed."""
    connects_per_s: float = 500.0
    """New connections a second; more are refused with 429."""
    frame_bytes: int = 32 * 1024
    """A larger frame closes the connection with 1009."""
    message_bytes: int = MESSAGE_BYTES
    """A larger message does too."""
    answer_s: float = 29.0
    """Longest time of a handler."""
    at_once: int = 8
    """Messages of one connection that are handled at once; replies come in any order."""


def new_connection_id() -> str:
    """An id in the form of API Gateway."""
    return base64.urlsafe_b64encode(secrets.token_bytes(11)).decode()


def connect_event(connection: str, path: str, headers: Mapping[str, str], *, now: float) -> dict[str, Any]:
    """The event of `$connect`, for the authorizer and for the handler."""
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    return {
        "type": "REQUEST",
        "methodArn": METHOD_ARN,
        "headers": dict(headers),
        "multiValueHeaders": {name: [value] for name, value in headers.items()},
        "queryStringParameters": {name: values[-1] for name, values in query.items()} or None,
        "multiValueQueryStringParameters": query or None,
        "requestContext": _context(connection, "$connect", "CONNECT", now),
        "isBase64Encoded": False,
    }


def message_event(connection: str, data: str | bytes, authorizer: Mapping[str, Any], *, now: float) -> dict[str, Any]:
    is_text = isinstance(data, str)
    context = _context(connection, _route(data), "MESSAGE", now)
    return {
        "requestContext": {**context, "messageId": context["requestId"], "authorizer": dict(authorizer)},
        "body": data if isinstance(data, str) else base64.b64encode(data).decode(),
        "isBase64Encoded": not is_text,
    }


def disconnect_event(
    connection: str, authorizer: Mapping[str, Any], *, code: int, reason: str, now: float
) -> dict[str, Any]:
    """The event of `$disconnect`."""
    context = _context(connection, "$disconnect", "DISCONNECT", now)
    over = {"disconnectStatusCode": code, "disconnectReason": reason, "authorizer": dict(authorizer)}
    return {"requestContext": {**context, **over}, "isBase64Encoded": False}


def failure(connection: str, event: Mapping[str, Any], message: str) -> str:
    """The text for a client whose handler failed, or took too long."""
    about = event["requestContext"]
    return json.dumps({"message": message, "connectionId": connection, "requestId": about["requestId"]})


def _context(connection: str, route: str, kind: str, now: float) -> dict[str, Any]:
    return {
        "routeKey": route,
        "eventType": kind,
        "connectionId": connection,
        "apiId": API,
        "stage": STAGE,
        "domainName": "localhost",
        "requestId": secrets.token_urlsafe(12),
        "requestTimeEpoch": int(now * 1000),
        "identity": {"sourceIp": "127.0.0.1"},
    }


def _route(data: str | bytes) -> str:
    """The route of a message, by `$request.body.action`."""
    try:
        found = json.loads(data)
        action = found.get("action") if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        action = None
    return action if isinstance(action, str) and action in set(Action) else "$default"
