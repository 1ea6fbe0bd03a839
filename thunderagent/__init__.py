"""ThunderAgent: a task-queue agent on Amazon DynamoDB, or on one SQLite file.

The application needs `Client`, a jobs package `job` and `stream` with their contexts and what a handler may answer, and
whoever runs agents in a program of their own `Agent`.
"""

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
from thunderagent.model.version import __version__
from thunderagent.settings import Settings
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.endpoint import Attempt, Endpoint
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext, stream
from thunderagent.streams.cursor import Cursor, Gap, GapAction, Span

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
