"""Traces: which trace a task belongs to, and the spans of enqueues and runs.

A run is below the span of its enqueue, each attempt beside the others: one trace has the whole story of a task, also in
AWS X-Ray, which knows no links between traces.

OpenTelemetry, the extra `traces`, is imported here alone, and only once spans are wanted. Spans are made with the
tracer provider of the process. If the application has set none, one is set up that sends them as the `OTEL_…` variables
say, in a thread of OpenTelemetry.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from thunderagent.jobs.outcome import Outcome, Stopped, in_words
from thunderagent.model.errors import ConfigurationError, LeaseLost, StreamWedged, TimeLimitExceeded
from thunderagent.model.forks import renewed
from thunderagent.model.outlet import without_waiting
from thunderagent.model.traceparent import CURRENT, checked, continuing
from thunderagent.model.version import __version__
from thunderagent.settings import has_package

if TYPE_CHECKING:  # of runs, which a client has none
    from thunderagent.jobs.running import Running, Scope

REMEDY: Final = "traces need OpenTelemetry: pip install 'thunderagent[traces]'"

SPANS_END_S: Final = 2.0
"""How long finished spans may take to be sent when a process ends."""

CHILD_SPANS_S: Final = 1.0
"""The same for the child process of an isolated handler: its outcome waits for it."""

SYSTEM: Final = "thunderagent"

Attributes = dict[str, str | int | float]

_NOTHING: Final = nullcontext()
_starting: Final = renewed(threading.Lock())
_ready = False
_sender: threading.Thread | None = None


@dataclass(slots=True)
class Ending:
    """How a span ends, filled in before its end."""

    attributes: Attributes = field(default_factory=dict)
    error: str | None = None


def trace_of_new() -> str | None:
    """The `traceparent` for a task that is enqueued now: of the current span, else of the current run or request."""
    return current() or CURRENT.get()


@contextmanager
def enqueuing(job: str, *, traces: bool, number: int | None = None) -> Iterator[Ending]:
    """Surrounds the enqueue of tasks with a span `enqueue JOB`, to which the tasks belong.

    Args:
        job: name of the job.
        traces: False: no span.
        number: of tasks, when several are enqueued together.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """
    if not traces:
        yield Ending()
        return
    start()
    attributes: Attributes = {"messaging.system": SYSTEM, "messaging.operation.type": "send", "thunderagent.job": job}
    if number is not None:
        attributes["messaging.batch.message_count"] = number
    outside = CURRENT.get() if current() is None else None
    with inside(outside), producing(f"enqueue {job}", attributes) as ending:
        yield ending


def carrying(running: Running) -> AbstractContextManager[None]:
    """A scope without OpenTelemetry: what the handler enqueues belongs to the trace of its task."""
    text = running.lease.task.traceparent
    return _NOTHING if text is None else continuing(checked(text))


def run_spans(hide: Callable[[str], str]) -> Scope:
    """A scope with a span `run JOB` for each run; what the handler enqueues is below it.

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
        with consuming(f"run {task.job}", attributes, outside) as (ending, own), continuing(own or outside):
            yield
            word, text = in_words(running.outcome)
            ending.attributes["thunderagent.outcome"] = word
            if text is not None and _is_error(word, running.outcome):
                ending.error = hide(text)

    return run_span


def _is_error(word: str, outcome: Outcome | None) -> bool:
    """A run that was stopped to go on elsewhere, or that is not wanted any more, is no error."""
    if isinstance(outcome, Stopped):
        return isinstance(outcome.why, (LeaseLost, StreamWedged, TimeLimitExceeded))
    return word in ("raised", "failed")


@contextmanager
def in_child(traceparent: str | None, *, traces: bool) -> Iterator[None]:
    """Surrounds an isolated handler in its child process: its spans are below the run, and are sent at the end."""
    with continuing(checked(traceparent)):
        if not (traces and is_installed()):
            yield
            return
        start()
        try:
            with inside(traceparent):
                yield
        finally:
            flush(CHILD_SPANS_S)


def is_installed() -> bool:
    """True when the extra `traces` is there."""
    return has_package("opentelemetry.sdk") and has_package("opentelemetry.exporter.otlp")


def start() -> None:
    """Set up a tracer provider if the process has none.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """
    global _ready
    with _starting:
        if _ready:
            return
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigurationError(REMEDY) from None
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # none is set
            trace.set_tracer_provider(_provider())
            atexit.register(flush)
        _ready = True


def _provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigurationError(REMEDY) from None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "thunderagent"})
    # Its own exit handler would wait for a collector that does not answer, longer than a supervisor does.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def flush(seconds: float = SPANS_END_S) -> None:
    """Send the spans that have ended, within this time. Never raises."""
    global _sender
    api: Any = sys.modules.get("opentelemetry.trace")
    send = getattr(api.get_tracer_provider(), "force_flush", None) if _ready and api else None
    if send is None or (_sender is not None and _sender.is_alive()):  # still unanswered: do not wait again
        return
    # In a thread, as not every exporter keeps to a time.
    _sender = threading.Thread(target=_quietly, args=(send, seconds), name="flush-spans", daemon=True)
    _sender.start()
    _sender.join(seconds)


def _quietly(send: Any, seconds: float) -> None:
    try:
        send(int(seconds * 1000))
    except Exception as error:
        without_waiting(sys.stderr).write(f"spans could not be sent: {type(error).__name__}\n")


def current() -> str | None:
    """The `traceparent` of the current span of OpenTelemetry, if there is one."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if (get := getattr(api, "get_current_span", None)) is None:
        return None
    return _traceparent(get().get_span_context())


def _traceparent(context: Any) -> str | None:
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


@contextmanager
def producing(name: str, attributes: Attributes) -> Iterator[Ending]:
    """A PRODUCER span, the current one inside. An exception makes it an error."""
    from opentelemetry.trace import SpanKind, Status, StatusCode

    with _tracer().start_as_current_span(
        name, kind=SpanKind.PRODUCER, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        ending = Ending()
        try:
            yield ending
        except BaseException as error:
            ending.error = ending.error or type(error).__name__  # its text may hold a payload
            raise
        finally:
            span.set_attributes(ending.attributes)
            if ending.error is not None:
                span.set_status(Status(StatusCode.ERROR, ending.error))


@contextmanager
def consuming(name: str, attributes: Attributes, parent: str | None) -> Iterator[tuple[Ending, str | None]]:
    """A CONSUMER span below the span that `parent` names; gives its own `traceparent`."""
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, Status, StatusCode, use_span

    outside = _remote(parent) or Context()  # not what happens to be current in this thread
    span = _tracer().start_span(name, outside, kind=SpanKind.CONSUMER, attributes=attributes)
    ending = Ending()
    try:
        with use_span(span, record_exception=False, set_status_on_exception=False):
            yield ending, _traceparent(span.get_span_context())
    finally:
        span.set_attributes(ending.attributes)
        if ending.error is not None:
            kind, _, text = ending.error.partition(": ")
            span.add_event("exception", {"exception.type": kind, "exception.message": text})
            span.set_status(Status(StatusCode.ERROR, ending.error))
        span.end()


@contextmanager
def inside(parent: str | None) -> Iterator[None]:
    """Spans inside are below the span of another process that `parent` names."""
    from opentelemetry.context import attach, detach

    if (outside := _remote(parent)) is None:
        yield
        return
    token = attach(outside)
    try:
        yield
    finally:
        detach(token)


def _remote(parent: str | None) -> Any:
    """The context whose current span is the one that `parent` names, of another process."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if (text := checked(parent)) is None:
        return None
    _, trace, span, flags = text.split("-")
    remote = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote))


def _tracer() -> Any:
    from opentelemetry.trace import get_tracer

    return get_tracer("thunderagent", __version__)
