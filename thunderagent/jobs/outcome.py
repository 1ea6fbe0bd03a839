"""Outcomes of handlers: the values, and the words for them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import Job, Limit
from thunderagent.model.errors import LeaseLost, TaskStopped
from thunderagent.model.memory import peak_mib, resident_mib
from thunderagent.model.task import Lease
from thunderagent.model.traceparent import trace_id
from thunderagent.model.writes.tasks import cut

_MESSAGE: Final = 700
_HERE: Final = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned this value."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler failed. Text only: a traceback would keep the handler's data in memory."""

    error: str
    fatal: bool = False
    progressed: bool = False
    """The run made progress, so that earlier errors no longer count."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The handler ended because it was asked to stop."""

    why: TaskStopped
    progressed: bool = False
    """As in `Raised`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The handler was not run: no permit of its limit was free."""

    limit: Limit


@dataclass(frozen=True, slots=True)
class Undecided:
    """The handler was not run, for a reason that may pass: a limit or a payload could not be read."""

    delay_s: float


Ran = Returned | Raised | Stopped
"""How a handler ended."""

Outcome = Ran | Refused | Undecided


def raised(error: BaseException, fatal: tuple[type[BaseException], ...] = (), *, progressed: bool = False) -> Raised:
    """The outcome of an exception: its type and message, then the innermost frames."""
    try:
        text = str(error)
    except Exception as problem:
        text = f"(its text cannot be had: {type(problem).__name__})"
    if isinstance(error, MemoryError):
        had = f"out of memory: the process had {resident_mib():.0f} MiB then, {peak_mib():.0f} at its peak"
        text = f"{text} ({had})" if text else had
    message = cut(f"{type(error).__name__}: {text}", _MESSAGE)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_HERE)]
    places = "".join(f"\n  at {_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[-3:])
    return Raised(message + places, fatal=isinstance(error, fatal), progressed=progressed)


def _short(filename: str) -> str:
    return "/".join(PurePath(filename).parts[-2:])


def outcome_of(error: BaseException, job: Job[Any], context: Context) -> Ran:
    """The outcome of an exception of a handler: stopped, if it was asked to stop; else an error."""
    if context.stop_reason is not None and not isinstance(error, job.fatal):
        return Stopped(context.stop_reason, progressed=context.has_progressed)
    if isinstance(error, LeaseLost):  # a stream found out by itself, before the heartbeat did
        return Stopped(error)
    return raised(error, job.fatal, progressed=context.has_progressed)


def about(lease: Lease) -> dict[str, Any]:
    """The fields that every event of a task has."""
    task = lease.task
    return {
        "task_id": task.task_id,
        "job": task.job,
        "queue": task.lane.queue,
        "fence": lease.fence,
        "attempt": task.attempt,
        "trace_id": trace_id(task.traceparent),
    }


def in_words(outcome: Outcome | None) -> tuple[str, str | None]:
    """An outcome in a word, and the error or the reason."""
    match outcome:
        case Returned(value=Snooze()):
            return "snoozed", None
        case Returned(value=Cancel(reason=reason)):
            return "cancelled", reason
        case Returned(value=Fail(reason=reason)):
            return "failed", reason
        case Returned():
            return "returned", None
        case Raised(error=error):
            return "raised", error
        case Stopped(why=why):
            return "stopped", f"{type(why).__name__}: {why}"
        case _:
            return "not run", None


def story(outcome: Outcome) -> str:
    """An outcome in a line, for the journal of a stream."""
    match outcome:
        case Stopped(why=why):
            return str(why)
        case Raised(error=error):
            return error.partition("\n")[0]
        case Refused() | Undecided():
            return "the handler was not run"
        case _:
            return "the handler returned"
