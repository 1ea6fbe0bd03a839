"""What of a task is in its spans, and to which trace a new task belongs.

A run is below the span of its enqueue, each attempt beside the others: so one trace has the whole story of a task, also
in AWS X-Ray, which knows no links between traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from thunderagent.jobs.outcome import Outcome, Stopped, in_words
from thunderagent.jobs.running import Running, Scope
from thunderagent.model.errors import LeaseLost, StreamWedged, TimeLimitExceeded
from thunderagent.model.pacing import CHILD_SPANS_S
from thunderagent.model.traceparent import CURRENT, checked, continuing
from thunderagent.telemetry import spans
from thunderagent.telemetry.spans import Attributes, Ending

SYSTEM: Final = "thunderagent"
_NOTHING: Final = nullcontext()


def trace_of_new() -> str | None:
    """The `traceparent` of a task that is put here and now.

    That of the current span of OpenTelemetry if there is one, else of the run or the request in which we are.
    """
    return spans.current() or CURRENT.get()


@contextmanager
def enqueuing(job: str, *, traces: bool, number: int | None = None) -> Iterator[Ending]:
    """Around putting tasks of a job: a span `enqueue JOB` if there are to be traces, to which they then belong.

    Args:
        job: name of the job.
        traces: make a span.
        number: how many tasks it is about, when several are put together.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """
    if not traces:
        yield Ending()
        return
    spans.start()
    attributes: Attributes = {"messaging.system": SYSTEM, "messaging.operation.type": "send", "thunderagent.job": job}
    if number is not None:
        attributes["messaging.batch.message_count"] = number
    outside = CURRENT.get() if spans.current() is None else None
    with spans.inside(outside), spans.producing(f"enqueue {job}", attributes) as ending:
        yield ending


def carrying(running: Running) -> AbstractContextManager[None]:
    """A scope: what the handler enqueues belongs to the trace of its task. Without OpenTelemetry."""
    text = running.lease.task.traceparent
    return _NOTHING if text is None else continuing(checked(text))


def run_spans(hide: Callable[[str], str]) -> Scope:
    """A scope: a span `run JOB` for each run, and what the handler enqueues is below it.

    Args:
        hide: takes secrets out of the texts of errors.
    """

    @contextmanager
    def run_span(running: Running) -> Iterator[None]:
        task = running.lease.task
        attributes: Attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "process",
            "messaging.destination.name": task.queue,
            "messaging.message.id": task.task_id,
            "thunderagent.job": task.job,
            "thunderagent.attempt": task.attempt,
            "thunderagent.fence": running.lease.fence,
        }
        if task.started_at is not None:
            attributes["thunderagent.waited_s"] = round(max(0.0, task.started_at - task.created_at), 3)
        outside = checked(task.traceparent)
        with spans.consuming(f"run {task.job}", attributes, outside) as (ending, own), continuing(own or outside):
            yield
            word, text = in_words(running.outcome)
            ending.attributes["thunderagent.outcome"] = word
            if text is not None and _is_error(word, running.outcome):
                ending.error = hide(text)

    return run_span


def _is_error(word: str, outcome: Outcome | None) -> bool:
    """A run that was stopped to go on elsewhere, or as it is not wanted any more, is none."""
    if isinstance(outcome, Stopped):
        return isinstance(outcome.why, (LeaseLost, StreamWedged, TimeLimitExceeded))
    return word in ("raised", "failed")


@contextmanager
def in_child(traceparent: str | None, *, traces: bool) -> Iterator[None]:
    """In the child process of an isolated handler: what it does is below its run, and its spans are sent at the end."""
    with continuing(checked(traceparent)):
        if not (traces and spans.is_installed()):
            yield
            return
        spans.start()
        try:
            with spans.inside(traceparent):
                yield
        finally:
            spans.flush(CHILD_SPANS_S)
