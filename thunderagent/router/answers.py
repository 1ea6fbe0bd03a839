"""Answers of routes, and answers of the router."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from thunderagent.model.errors import DuplicateTask, EventRejected, PayloadInvalid, PayloadTooLarge, TooManyDependents
from thunderagent.model.task import Task
from thunderagent.router.enqueue import Enqueue
from thunderagent.router.problems import listing, problems_of

Tasks = Enqueue | Sequence[Enqueue] | None
"""Answer of a route: one task, several, or None for an event that is ignored."""

RETRY_AFTER_S: Final = 5
"""Seconds in the header `retry-after` when the store does not answer."""

_FOR_CALLERS: Final[Mapping[type[Exception], str]] = {
    PayloadInvalid: "what was sent makes no payload that fits",
    PayloadTooLarge: "what was sent makes a payload that is too large; send a reference to the data instead",
    DuplicateTask: "there is another task with this id",
    TooManyDependents: "too many tasks wait for the same task",
}
"""Answers for exceptions that name jobs and tasks, which only the log shows."""


def wanted(answer: object, name: str) -> list[Enqueue]:
    """The tasks of a route's answer.

    Raises:
        TypeError: the route answered with something else.
    """
    if answer is None:
        return []
    tasks: list[Enqueue] = []
    for one in answer if isinstance(answer, (list, tuple)) else (answer,):
        if not isinstance(one, Enqueue):
            raise TypeError(
                f"the route {name} answered with a {type(one).__name__}; return Enqueue(job, payload), a list of "
                "them, or None for an event that is not wanted"
            )
        tasks.append(one)
    return tasks


def rejection(error: Exception) -> EventRejected | None:
    """The rejection for an exception; None if the event is not the cause."""
    if isinstance(error, EventRejected):
        return error
    if isinstance(error, ValidationError):  # the route made a model of its input that does not fit
        problems = problems_of(error, "payload")
        return EventRejected(f"the payload does not fit: {listing(problems)}", problems=problems)
    if isinstance(error, PayloadInvalid):
        return EventRejected(str(error))
    if isinstance(error, PayloadTooLarge):
        return EventRejected(str(error), status=413)
    if isinstance(error, (DuplicateTask, TooManyDependents)):
        return EventRejected(str(error), status=409)
    return None


def without_names(rejected: EventRejected, error: Exception) -> EventRejected:
    """The rejection for an HTTP caller, without names of jobs and tasks."""
    text = next((text for kind, text in _FOR_CALLERS.items() if isinstance(error, kind)), None)
    return rejected if text is None else EventRejected(text, status=rejected.status)


def as_data(error: EventRejected) -> dict[str, Any]:
    return {"error": str(error)} | ({"problems": list(error.problems)} if error.problems else {})


def taken(tasks: Sequence[Task]) -> dict[str, Any]:
    return {"task_ids": [task.task_id for task in tasks]}


def http_taken(tasks: Sequence[Task], answer: object) -> dict[str, Any]:
    """The answer to a request: the id of one task, a list for a list, or no content."""
    if answer is None:
        return {"statusCode": 204, "headers": {"cache-control": "no-store"}, "body": "", "isBase64Encoded": False}
    return http(202, {"task_id": tasks[0].task_id} if isinstance(answer, Enqueue) else taken(tasks))


def http_rejected(error: EventRejected) -> dict[str, Any]:
    return http(error.status if 400 <= error.status < 500 else 400, as_data(error))


def http_parent_missing() -> dict[str, Any]:
    return http(409, {"error": "a task that this one depends on does not exist"})


def http_unavailable() -> dict[str, Any]:
    error = {"error": "the task could not be stored; try again"}
    return http(503, error, {"retry-after": str(RETRY_AFTER_S)})


def http_failed(request_id: str) -> dict[str, Any]:
    return http(500, {"error": "internal error", "request_id": request_id})


def http(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """An answer for API Gateway and function URLs, in both payload formats."""
    return {
        "statusCode": status,
        "headers": {"content-type": "application/json", "cache-control": "no-store", **(headers or {})},
        "body": json.dumps(body),
        "isBase64Encoded": False,
    }
