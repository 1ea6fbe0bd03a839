"""Every exception that ThunderAgent raises. The docstring of a class is its default message.

A lost race is a value and never an exception. These are broken inputs and dependencies, and each says what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence


class ThunderAgentError(Exception):
    """Something in ThunderAgent went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""))


class ConfigurationError(ThunderAgentError):
    """The configuration cannot work."""


class JobImportError(ThunderAgentError):
    """A module of the jobs package cannot be imported."""


class PayloadError(ThunderAgentError):
    """The payload of the task is not acceptable."""


class PayloadInvalid(PayloadError):
    """The payload does not fit the payload type of the job."""


class PayloadTooLarge(PayloadError):
    """The payload is too large; store the data elsewhere and enqueue a reference to it."""


class UnknownJob(ThunderAgentError):
    """No job of this name is registered."""


class TaskNotFound(ThunderAgentError):
    """No task has this id."""


class DuplicateTask(ThunderAgentError):
    """A task with this id exists and has another job or payload."""


class ParentNotFound(ThunderAgentError):
    """A task named in `depends_on` does not exist; enqueue the parents first."""


class TooManyDependents(ThunderAgentError):
    """More tasks would wait for one, or one for more, than a row has room for; put a task in between."""


class ParentResultLost(ThunderAgentError):
    """A parent succeeded and its result cannot be had."""


class EventRejected(ThunderAgentError):
    """The event cannot become a task."""

    def __init__(
        self,
        message: str | None = None,
        *,
        problems: Sequence[Mapping[str, str]] = (),
        status: int = 400,
    ) -> None:
        """Reject an event; a route may raise this too.

        Args:
            message: why, without anything secret: it is the answer to the sender, and is logged.
            problems: each field with what is wrong with it, as `field` and `message`.
            status: of the answer over HTTP, 400 to 499.
        """
        super().__init__(message)
        self.problems = tuple(problems)
        self.status = status


class NotAllowed(ThunderAgentError):
    """The state of the task does not permit this."""


class TaskUnreadable(NotAllowed):
    """The row of the task cannot be read; upgrade this installation, or mend or delete the row."""


class WaitTimeout(ThunderAgentError):
    """The task did not end in the given time; it goes on."""


class TaskStopped(ThunderAgentError):
    """The task was asked to stop."""


class TaskCancelled(TaskStopped):
    """The task was cancelled."""


class LeaseLost(TaskStopped):
    """The lease of the task is over: another agent may hold it now. Stop all side effects."""


class TimeLimitExceeded(TaskStopped):
    """The time limit of the task is over."""


class AgentDraining(TaskStopped):
    """The agent is stopping and its drain time is over; the task goes back to its queue."""


class StreamStopped(TaskStopped):
    """The stream was stopped; it can be started again."""


class StreamHandedOff(TaskStopped):
    """The stream goes to another agent, which has more room for it."""


class StreamWedged(TaskStopped):
    """The stream makes no progress here; another agent will try."""


class StreamFailed(ThunderAgentError):
    """The stream cannot go on."""


class ClientClosed(ThunderAgentError):
    """The client has ended; make another one, with the changes that were not acknowledged."""


class ChangeRefused(ThunderAgentError):
    """The server does not take this change, now or later."""


class VersionConflict(ChangeRefused):
    """The state does not have the version that the change was made for; look at the state and decide again."""


class TooManyChanges(ThunderAgentError):
    """Too many changes wait for a server; wait until some are acknowledged."""


class MessageTooLarge(ThunderAgentError):
    """The message is over the limit of the WebSocket API; store the data and send a reference."""


class PushFailed(ThunderAgentError):
    """The message could not be pushed to any connection of the user; retry later."""


class DoorbellError(ThunderAgentError):
    """The doorbell does not work now: tasks are found by polling."""


class StoreError(ThunderAgentError):
    """The store did not do what was asked."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or is busy; retry later."""


class StoreThrottled(StoreUnavailable):
    """The table refuses requests because of its throughput; raise the number of shards or warm it up."""


class RegionPassive(StoreUnavailable):
    """The region holds no valid grant, so its agents write nothing; see: thunderagent region status"""


class CredentialsExpired(StoreUnavailable):
    """The AWS credentials are expired; renew them (the agent waits and goes on by itself)."""


class CredentialsMissing(StoreUnavailable, ConfigurationError):
    """There are no AWS credentials. At the start that is a setting to mend; under way an agent waits for them."""


class StoreRejected(StoreError):
    """The store does not take this, now or later; nothing of it was done."""


class TableMissing(StoreError):
    """The table does not exist. Create it with: thunderagent table create"""


class AccessDenied(StoreError):
    """A permission is missing."""


class TextGone(StoreError):
    """The payload or the result of the task is gone."""


class SchemaMismatch(StoreError):
    """The database was written by a newer version of ThunderAgent; upgrade this installation."""
