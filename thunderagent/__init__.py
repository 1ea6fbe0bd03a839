"""ThunderAgent: a task-queue agent on Amazon DynamoDB, or on one SQLite file.

The application needs `Client`, a jobs package `job`, `Context` and what a handler may answer, and whoever runs agents
in a program of their own `Agent`.
"""

from thunderagent.agent import Agent
from thunderagent.client import Client
from thunderagent.context import Cancel, Context, Fail, Snooze
from thunderagent.job import Job, job
from thunderagent.pacing import Backoff
from thunderagent.registry import Registry
from thunderagent.settings import Settings
from thunderagent.task import Status, Task
from thunderagent.version import __version__

__all__ = [
    "Agent",
    "Backoff",
    "Cancel",
    "Client",
    "Context",
    "Fail",
    "Job",
    "Registry",
    "Settings",
    "Snooze",
    "Status",
    "Task",
    "__version__",
    "job",
]
