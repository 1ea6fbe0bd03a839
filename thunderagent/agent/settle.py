"""The single place that turns the outcome of a handler into one transition of its task."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from thunderagent.jobs.context import Cancel, Fail, Snooze
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Raised, Refused, Returned, Stopped, Undecided, about
from thunderagent.model import events
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    AgentDraining,
    LeaseLost,
    StoreUnavailable,
    StreamHandedOff,
    StreamStopped,
    TaskCancelled,
    ThunderAgentError,
)
from thunderagent.model.jsondata import NOT_STORED, dump_result
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import Lease, Task
from thunderagent.model.writes import tasks as writes

RAN_OVER: Final = "it ran for "
"""First words of the note of a task that is SUCCESS although it ran past its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers that settling needs."""

    backoff: Backoff
    max_retry: int
    keep_success_s: float
    keep_failed_s: float


KeepResult = Callable[[str, str, float], str | None]
"""Stores a text too large for a row (key, text, expire_at); returns its reference. None: it goes into the row."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """One transition to write, and the event to emit once it is written."""

    write: Write
    event: events.TaskEvent


def settle(
    lease: Lease,
    job: Job[Any],
    outcome: Outcome,
    *,
    policy: Policy,
    now: float,
    seconds: float,
    rng: random.Random,
    keep: KeepResult,
) -> Settlement | None:
    """The one transition of an outcome; None when the lease is lost and nothing may be written.

    * a value: SUCCESS, even after a request to stop, as the work is done; FAILED if it cannot be stored and the job
      says so;
    * `Snooze`, `Cancel`, `Fail`: PENDING later, DONE (closed on purpose), FAILED;
    * an error: PENDING after a backoff, or FAILED when it is fatal or no retry is left;
    * no permit of its limit was free: BLOCKED, in the waitlist; unknown, or the payload could not be read: PENDING
      later, no retry used;
    * stopped by a cancel: DONE; by the time limit: an error; by a drain: PENDING at once, no retry used.
    """
    task = lease.task
    fields = about(lease)
    if job.keep_s is not None:
        policy = replace(policy, keep_success_s=job.keep_s, keep_failed_s=job.keep_s)
    match outcome:
        case Refused(limit=(key, number)):
            write = writes.wait_for_permit(lease, limit_key=key, now=now)
            return Settlement(write, events.TaskLimited(**fields, limit_key=key, limit=number))
        case Undecided(delay_s=delay):
            write = writes.put_back(lease, due=now + delay, now=now)
            return Settlement(write, events.TaskSnoozed(**fields, delay_s=delay))
        case Stopped(why=LeaseLost()):
            return None
        case Stopped(why=AgentDraining() | StreamHandedOff()):
            return Settlement(writes.release(lease, now=now), events.TaskReleased(**fields))
        case Stopped(why=StreamStopped()):
            write = writes.stop(lease, now=now, expire_at=now + policy.keep_failed_s)
            return Settlement(write, events.TaskClosed(**fields, reason=writes.STOPPED))
        case Stopped(why=TaskCancelled() as why):
            return _closed(lease, fields, str(why), policy, now)
        case Stopped(why=why):
            fatal = isinstance(why, job.fatal) if job.fatal else False
            error = Raised(f"{type(why).__name__}: {why}", fatal, outcome.progressed)
            return _failed(lease, job, error, fields, policy, now, rng)
        case Raised():
            return _failed(lease, job, outcome, fields, policy, now, rng)
        case Returned(value=Snooze(seconds=delay)):
            return Settlement(
                writes.snooze(lease, due=now + max(0.0, delay), now=now),
                events.TaskSnoozed(**fields, delay_s=delay),
            )
        case Returned(value=Cancel(reason=reason)):
            return _closed(lease, fields, reason, policy, now)
        case Returned(value=Fail(reason=reason)):
            return _failed(lease, job, Raised(reason, fatal=True), fields, policy, now, rng)
        case Returned(value=value):
            expire_at = now + policy.keep_success_s
            result, ref, note = _result(task, value, expire_at, keep)
            if note is not None and job.on_bad_result == "fail":
                return _failed(lease, job, Raised(note, fatal=True), fields, policy, now, rng)
            if job.timeout_s is not None and seconds > job.timeout_s:
                late = f"{RAN_OVER}{seconds:.1f} s, over its time limit of {job.timeout_s:g} s"
                note = late if note is None else f"{note}; {late}"
            write = writes.succeed(lease, now=now, expire_at=expire_at, result=result, result_ref=ref, note=note)
            return Settlement(write, events.TaskSucceeded(**fields, seconds=seconds, note=note))


def _closed(lease: Lease, fields: dict[str, Any], reason: str, policy: Policy, now: float) -> Settlement:
    write = writes.close(lease, reason=reason, now=now, expire_at=now + policy.keep_success_s)
    return Settlement(write, events.TaskClosed(**fields, reason=reason))


def _failed(
    lease: Lease,
    job: Job[Any],
    outcome: Raised,
    fields: dict[str, Any],
    policy: Policy,
    now: float,
    rng: random.Random,
) -> Settlement:
    task = replace(lease.task, retry_count=0) if outcome.progressed else lease.task
    lease = replace(lease, task=task)
    if outcome.fatal or task.retry_count >= _retries(task, job, policy):
        write = writes.fail(lease, error=outcome.error, now=now, expire_at=now + policy.keep_failed_s)
        return Settlement(write, events.TaskFailed(**fields, error=outcome.error))
    delay = (job.backoff or policy.backoff).delay(task.retry_count, rng)
    write = writes.retry(lease, due=now + delay, error=outcome.error, now=now)
    return Settlement(write, events.TaskRetried(**fields, error=outcome.error, delay_s=delay))


def _retries(task: Task, job: Job[Any], policy: Policy) -> int:
    """Allowed retries: of the task, else of the job, else of the settings."""
    if task.max_retry is not None:
        return task.max_retry
    return policy.max_retry if job.max_retry is None else job.max_retry


def _result(task: Task, value: Any, expire_at: float, keep: KeepResult) -> tuple[str | None, str | None, str | None]:
    """Result, reference and note. A result that cannot be stored only gets a note: the task has succeeded."""
    try:
        text = dump_result(value)
        key = f"{task.task_id}#result.{task.fence}.{task.submitted_at:.3f}"  # a purge resets fences
        ref = None if text is None else keep(key, text, expire_at)
    except (ValueError, ThunderAgentError) as error:
        if isinstance(error, StoreUnavailable):
            raise  # the outcome is written later
        return None, None, f"{NOT_STORED}{error}"
    return (text, None, None) if ref is None else (None, ref, None)
