"""ThunderAgent: a task-queue agent on Amazon DynamoDB, or on one SQLite file.

Applications need `Client`, a jobs package `job` and `stream` with their contexts and answers, and programs that run
agents themselves `Agent`. A name is imported when it is first used, so that `Client` loads no agent and no sockets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from thunderagent.model.version import __version__

if TYPE_CHECKING:
    from thunderagent.agent.loop import Agent
    from thunderagent.client import Client
    from thunderagent.jobs.context import Cancel, Context, Fail, ParentFailure, ParentResults, Snooze
    from thunderagent.jobs.hooks import JobRun, around, on
    from thunderagent.jobs.job import Job, job
    from thunderagent.jobs.periodic import periodic
    from thunderagent.jobs.registry import Registry
    from thunderagent.model.pacing import Backoff
    from thunderagent.model.schedules import Tick
    from thunderagent.model.task import Status, Task
    from thunderagent.model.ticks import cron, every
    from thunderagent.settings import Settings
    from thunderagent.streams.connection.connection import Connection
    from thunderagent.streams.connection.endpoint import Attempt, Endpoint
    from thunderagent.streams.connection.options import StreamOptions
    from thunderagent.streams.context import StreamContext
    from thunderagent.streams.cursor import Cursor, Gap, GapAction, Span
    from thunderagent.streams.job import stream

__all__ = [
    "Agent",
    "Attempt",
    "Backoff",
    "Cancel",
    "Client",
    "Connection",
    "Context",
    "Cursor",
    "Endpoint",
    "Fail",
    "Gap",
    "GapAction",
    "Job",
    "JobRun",
    "ParentFailure",
    "ParentResults",
    "Registry",
    "Settings",
    "Snooze",
    "Span",
    "Status",
    "StreamContext",
    "StreamOptions",
    "Task",
    "Tick",
    "__version__",
    "around",
    "cron",
    "every",
    "job",
    "on",
    "periodic",
    "stream",
]

_HOMES: Final = {
    "agent.loop": "Agent",
    "client": "Client",
    "jobs.context": "Cancel Context Fail ParentFailure ParentResults Snooze",
    "jobs.hooks": "JobRun around on",
    "jobs.job": "Job job",
    "jobs.periodic": "periodic",
    "jobs.registry": "Registry",
    "model.pacing": "Backoff",
    "model.schedules": "Tick",
    "model.task": "Status Task",
    "model.ticks": "cron every",
    "settings": "Settings",
    "streams.connection.connection": "Connection",
    "streams.connection.endpoint": "Attempt Endpoint",
    "streams.connection.options": "StreamOptions",
    "streams.context": "StreamContext",
    "streams.job": "stream",
    "streams.cursor": "Cursor Gap GapAction Span",
}
"""Public names by the module that has them."""

_HOME: Final = {name: f"thunderagent.{module}" for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
