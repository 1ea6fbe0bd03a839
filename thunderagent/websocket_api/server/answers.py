"""The replies of the WebSocket API as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.websocket_api.protocol import Kind, Problem

RETRY_AFTER_S: Final = 2.0
"""Pause that a client is asked for when the store does not answer."""

LEAST_PAUSE_S: Final = 1.0
"""Shortest pause that a client is asked for when it sends too much."""

CHUNK_LOST: Final = f"a chunk could not be kept; send the whole message again in {RETRY_AFTER_S:g} s, under another id"
"""It is unknown whether the chunk is kept after all."""

MessageId = str | int | None
Reply = dict[str, Any]


class Refusal(Exception):
    """A message that is answered with an error."""

    def __init__(self, problem: Problem, message: str, message_id: MessageId = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.message_id = message_id


def state(message_id: MessageId, value: Mapping[str, Any], version: int, region: str, *, ahead: bool) -> Reply:
    """The answer to `getState`. `ahead`: the client has seen a later version than the store has."""
    return {
        "type": Kind.STATE,
        "id": message_id,
        "state": value,
        "version": version,
        "region": region,
        "client_ahead": ahead,
    }


def saved(message_id: MessageId, version: int, region: str) -> Reply:
    """A change is saved as this version."""
    return {"type": Kind.SAVED, "id": message_id, "version": version, "region": region}


def conflict(message_id: MessageId, value: Mapping[str, Any], version: int, region: str) -> Reply:
    """A change is not saved: the client did not know the present version."""
    return {"type": Kind.CONFLICT, "id": message_id, "state": value, "version": version, "region": region}


def changed(version: int, change: str, region: str) -> Reply:
    """The notice of a change for the user's other connections. With its `patch` they need not ask for the state."""
    return {"type": Kind.CHANGED, "version": version, "change": change, "region": region}


def pong(message_id: MessageId, region: str) -> Reply:
    return {"type": Kind.PONG, "id": message_id, "region": region}


def error(message_id: MessageId, problem: Problem, message: str) -> Reply:
    reply: Reply = {"type": Kind.ERROR, "id": message_id, "error": problem, "message": message}
    return reply | ({"retry_after_s": RETRY_AFTER_S} if problem is Problem.UNAVAILABLE else {})


def unavailable(message_id: MessageId) -> Reply:
    message = f"the state cannot be reached now; try again in {RETRY_AFTER_S:g} s, a change under the same change id"
    return error(message_id, Problem.UNAVAILABLE, message)


def throttled(message_id: MessageId, wait_s: float) -> Reply:
    pause_s = max(LEAST_PAUSE_S, round(wait_s, 1))
    message = (
        f"Too many messages: wait {pause_s:g} s, then send this one again. A client that continues is disconnected."
    )
    return error(message_id, Problem.THROTTLED, message) | {"retry_after_s": pause_s}


def http(status: int, body: str | None = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The answer of a Lambda function to API Gateway, which sends the body to the client."""
    answer: dict[str, Any] = {"statusCode": status}
    if headers:
        answer["headers"] = dict(headers)
    if body is not None:
        answer["body"] = body
    return answer
