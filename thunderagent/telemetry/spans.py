"""OpenTelemetry: the only module that imports it, and only once spans are wanted. It is the extra `traces`.

Spans are made with the tracer provider of the process. If the application has set none, one is set up here that sends
them as the `OTEL_…` variables say; sending happens in a thread of OpenTelemetry.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.model.forks import renewed
from thunderagent.model.outlet import without_waiting
from thunderagent.model.pacing import SPANS_END_S
from thunderagent.model.traceparent import checked
from thunderagent.model.version import __version__
from thunderagent.settings import has_package

REMEDY: Final = "traces need OpenTelemetry: pip install 'thunderagent[traces]'"

Attributes = dict[str, str | int | float]

_starting: Final = renewed(threading.Lock())
_ready = False
_sender: threading.Thread | None = None


@dataclass(slots=True)
class Ending:
    """How a span ends, to be filled in before it does."""

    attributes: Attributes = field(default_factory=dict)
    error: str | None = None


def is_installed() -> bool:
    """True when the extra `traces` is there."""
    return has_package("opentelemetry.sdk") and has_package("opentelemetry.exporter.otlp")


def start() -> None:
    """Make sure that spans of this process go somewhere.

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
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nobody has set one
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
    """Send the spans that have ended, within this time; without any, nothing happens. Never raises."""
    global _sender
    api: Any = sys.modules.get("opentelemetry.trace")
    send = getattr(api.get_tracer_provider(), "force_flush", None) if _ready and api else None
    if send is None or (_sender is not None and _sender.is_alive()):  # nobody answered before: do not wait again
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
    """The `traceparent` of the span in which we are; None outside of one, and where nobody uses OpenTelemetry."""
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
    """A PRODUCER span around putting tasks; it is the current one inside. What is raised makes it an error."""
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
    """A CONSUMER span around a run, below the span that `parent` names; with its own `traceparent`."""
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
    """What makes spans inside makes them below the span of another process that `parent` names."""
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
    """The context in which the span that `parent` names, of another process, is the current one."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if (text := checked(parent)) is None:
        return None
    _, trace, span, flags = text.split("-")
    remote = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote))


def _tracer() -> Any:
    from opentelemetry.trace import get_tracer

    return get_tracer("thunderagent", __version__)
