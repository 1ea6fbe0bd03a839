"""A trace goes from the enqueue to the run, to what the run enqueues, and into log lines."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags
from typer.testing import CliRunner

from tests.support import traced_jobs
from tests.support.engine import LONG_S, serving
from thunderagent.cli import app
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Fail, Snooze
from thunderagent.jobs.job import job
from thunderagent.model import events
from thunderagent.model.errors import ConfigurationError, DuplicateTask, ParentNotFound
from thunderagent.model.task import Task
from thunderagent.model.traceparent import checked, continuing, trace_id
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.telemetry import traces
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope
from thunderagent.telemetry.traces import SPANS_END_S
from thunderagent.testing import memory_client

TRACE = "0af7651916cd43dd8448eb211c80319c"
GOOD = f"00-{TRACE}-b7ad6b7169203331-01"
JOBS = (traced_jobs.in_thread, traced_jobs.in_coroutine, traced_jobs.in_process)
IDS = ["thread", "coroutine", "process"]

_exporter = InMemorySpanExporter()


@pytest.fixture
def exported() -> InMemorySpanExporter:
    """The spans of this process; a tracer provider can be set once only."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    if not getattr(_exporter, "is_used", False):
        trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(_exporter))  # type: ignore[attr-defined]
        _exporter.is_used = True  # type: ignore[attr-defined]
    _exporter.clear()
    return _exporter


def of(exported: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exported.get_finished_spans() if span.name == name]


def text_of(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def id_of(span: Any) -> int:
    return int(span.get_span_context().span_id)


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that child processes can open; their spans go nowhere."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    return f"sqlite:///{tmp_path}/tasks.db"


# Without OpenTelemetry


def test_a_task_has_no_trace_where_there_is_none() -> None:
    with closing(memory_client()) as client:
        assert client.enqueue("a.job", {}).traceparent is None


def test_a_task_keeps_the_trace_in_which_it_was_put_through_retries_and_an_equal_second_put() -> None:
    tries = []

    @job("traced.fails", max_retry=1)
    def fails(ctx: Context, payload: dict[str, Any]) -> Any:
        tries.append(ctx.lease.task.traceparent)
        if len(tries) == 1:
            raise ValueError("once")
        return Snooze(0) if len(tries) == 2 else None

    with serving(fails) as stage:
        with continuing(GOOD):
            task = stage.client.enqueue(fails, {}, task_id="one")
        with continuing(GOOD.replace("0af", "1af")):
            assert stage.client.enqueue(fails, {}, task_id="one").traceparent == GOOD
        assert stage.end_of(task).traceparent == GOOD
        assert {event.trace_id for event in stage.record.of(events.TaskEvent)} == {TRACE}
    assert tries == [GOOD] * 3


@pytest.mark.slow
@pytest.mark.parametrize("one", JOBS, ids=IDS)
@pytest.mark.parametrize("has_trace", [True, False])
def test_what_a_handler_enqueues_belongs_to_the_trace_of_its_task(one: Any, has_trace: bool, url: str) -> None:
    store = open_store(load_settings(store=url))
    with serving(one, traced_jobs.leaf, store=store) as stage:
        with continuing(GOOD if has_trace else None):
            task = stage.client.enqueue(one, {"store": url})
        stage.end_of(task)
        child = stage.client.get(stage.client.get(task).result)
    assert child.traceparent == (GOOD if has_trace else None)


@pytest.mark.parametrize("nasty", ["nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", GOOD.upper()])
def test_a_row_with_a_malformed_trace_runs_without_one(nasty: str, url: str) -> None:
    store = open_store(load_settings(store=url))
    with serving(traced_jobs.in_thread, traced_jobs.leaf, store=store) as stage:
        with continuing(nasty):
            task = stage.client.enqueue(traced_jobs.in_thread, {"store": url})
        done = stage.end_of(task)
        assert (done.status, done.attempt, done.traceparent) == ("SUCCESS", 1, nasty)
        assert stage.client.get(done.result).traceparent is None
        assert {event.trace_id for event in stage.record.of(events.TaskEvent)} == {None}


@job("traced.logs")
def logs(ctx: Context, payload: dict[str, Any]) -> None:
    logger.info("inside")


@job("traced.logs.async")
async def logs_async(ctx: Context, payload: dict[str, Any]) -> None:
    logger.info("inside")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("DEBUG", as_json=True, stream=stream)
    yield stream
    logger.remove()


def test_lines_of_a_handler_and_of_the_engine_about_its_task_carry_the_trace(lines: io.StringIO) -> None:
    with serving(logs, logs_async, scope=task_scope) as stage:
        Telemetry(stage.bus)
        for one in (logs, logs_async):
            stage.client.enqueue(one, {}, task_id=f"without {one.name}")
            with continuing(GOOD):
                stage.client.enqueue(one, {}, task_id=f"with {one.name}")
        stage.record.wait(events.TaskSucceeded, 4)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    about = [line for line in found if "task_id" in line]
    assert len(about) == 12
    assert {line.get("trace_id") for line in about if line["task_id"].startswith("without")} == {None}
    assert {line.get("trace_id") for line in about if line["task_id"].startswith("with ")} == {TRACE}
    assert {line["message"] for line in about} == {"task started", "inside", "task succeeded"}


def test_show_tells_the_trace_of_a_task(url: str) -> None:
    with closing(Client.from_settings(store=url)) as client:
        with continuing(GOOD):
            client.enqueue("a.job", {}, task_id="with")
        client.enqueue("a.job", {}, task_id="without")
    shown = {name: CliRunner().invoke(app, ["show", name, "--store", url]).output for name in ("with", "without")}
    assert re.search(rf"^trace +{TRACE}", shown["with"], flags=re.MULTILINE)
    assert "trace" not in shown["without"]
    as_json = CliRunner().invoke(app, ["show", "with", "--store", url, "--json"]).output
    assert json.loads(as_json)["traceparent"] == GOOD


# With OpenTelemetry


def test_the_current_span_of_an_application_is_the_trace_of_what_it_enqueues(exported: InMemorySpanExporter) -> None:
    with closing(memory_client()) as client, trace.get_tracer("app").start_as_current_span("request") as span:
        with continuing(GOOD):
            task = client.enqueue("a.job", {})
        assert task.traceparent == text_of(span)
    assert [span.name for span in exported.get_finished_spans()] == ["request"], "no spans of ours, as none are wanted"


def test_an_enqueue_is_a_span_of_a_producer_whose_trace_the_task_has(exported: InMemorySpanExporter) -> None:
    with closing(memory_client(traces=True)) as client:
        alone = client.enqueue("a.job", {})
        with trace.get_tracer("app").start_as_current_span("request") as request:
            below = client.enqueue(traced_jobs.leaf, {})
        with continuing(GOOD):
            far = client.enqueue("a.job", {})
        many = client.enqueue_many("a.job", [{"n": 1}, {"n": 2}])
    first, third, batch = of(exported, "enqueue a.job")
    [second] = of(exported, "enqueue traced.leaf")
    for span, task in ((first, alone), (second, below), (third, far)):
        assert task.traceparent == text_of(span)
        assert span.kind is SpanKind.PRODUCER
        assert (span.attributes or {})["messaging.message.id"] == task.id
    assert parent_of(first) is None
    assert parent_of(second) == id_of(request)
    assert trace_id(far.traceparent) == TRACE
    assert {one.task.traceparent for one in many} == {text_of(batch)}
    assert (batch.attributes or {})["messaging.batch.message_count"] == 2


def test_an_enqueue_that_fails_is_an_error_without_the_payload(exported: InMemorySpanExporter) -> None:
    with closing(memory_client(traces=True)) as client:
        client.enqueue("a.job", {"secret": "s3cr"}, task_id="one")
        with pytest.raises(DuplicateTask):
            client.enqueue("a.job", {"secret": "s3cr3t"}, task_id="one")
        with pytest.raises(ParentNotFound):
            client.enqueue("a.job", {}, depends_on=["nobody"])
    _, second, third = of(exported, "enqueue a.job")
    assert (second.status.status_code, second.status.description) == (StatusCode.ERROR, "DuplicateTask")
    assert (third.status.status_code, third.status.description) == (StatusCode.ERROR, "ParentNotFound")
    assert "s3cr" not in second.to_json() + third.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("one", JOBS, ids=IDS)
def test_a_run_is_a_span_below_its_enqueue_and_above_what_it_enqueues(
    one: Any, url: str, exported: InMemorySpanExporter
) -> None:
    store = open_store(load_settings(store=url))
    with serving(one, traced_jobs.leaf, store=store, traces=True) as stage:
        task = stage.client.enqueue(one, {"store": url})
        child = stage.end_of(stage.end_of(task).result)
    [put], [run], [below] = (
        of(exported, name) for name in (f"enqueue {one.name}", f"run {one.name}", "run traced.leaf")
    )
    assert run.kind is SpanKind.CONSUMER
    assert parent_of(run) == id_of(put)
    assert child.traceparent == text_of(run), "the child was put without a span of its own"
    assert parent_of(below) == id_of(run)
    assert {text_of(span)[3:35] for span in (put, run, below)} == {trace_id(task.traceparent)}
    attributes = dict(run.attributes or {})
    assert attributes.pop("thunderagent.waited_s") >= 0  # type: ignore[operator]
    assert attributes == {
        "messaging.system": "thunderagent",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": task.id,
        "thunderagent.job": one.name,
        "thunderagent.attempt": 1,
        "thunderagent.fence": 1,
        "thunderagent.outcome": "returned",
    }
    assert run.status.status_code is StatusCode.UNSET


def test_spans_that_a_handler_makes_are_below_its_run(exported: InMemorySpanExporter) -> None:
    def work() -> None:
        with trace.get_tracer("app").start_as_current_span("work"):
            pass

    @job("traced.works")
    def works(ctx: Context, payload: dict[str, Any]) -> None:
        work()

    @job("traced.works.async")
    async def works_async(ctx: Context, payload: dict[str, Any]) -> None:
        work()

    with serving(works, works_async, traces=True) as stage:
        for one in (works, works_async):
            stage.end_of(stage.client.enqueue(one, {}))
    runs = {id_of(span) for name in ("works", "works.async") for span in of(exported, f"run traced.{name}")}
    assert {parent_of(span) for span in of(exported, "work")} == runs
    assert len(runs) == 2


def test_each_attempt_is_a_span_of_the_same_trace_and_a_failed_one_says_why_without_secrets(
    exported: InMemorySpanExporter,
) -> None:
    @job("traced.fails", max_retry=1)
    def fails(ctx: Context, payload: dict[str, Any]) -> Any:
        if ctx.attempt == 1:
            raise ValueError("no access with password=s3cr")
        return Fail("hopeless, token=s3cr")

    with serving(fails, traces=True) as stage:
        stage.end_of(stage.client.enqueue(fails, {}))
    [put], (first, second) = of(exported, "enqueue traced.fails"), of(exported, "run traced.fails")
    assert {parent_of(first), parent_of(second)} == {id_of(put)}
    assert [(one.attributes or {})["thunderagent.outcome"] for one in (first, second)] == ["raised", "failed"]
    assert [one.status.status_code for one in (first, second)] == [StatusCode.ERROR] * 2
    assert str(first.status.description).startswith("ValueError: no access with password=***")
    [event] = first.events
    assert event.name == "exception"
    assert (event.attributes or {})["exception.type"] == "ValueError"
    assert second.status.description == "hopeless, token=***"
    assert "s3cr" not in first.to_json() + second.to_json()


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_is_no_error(exported: InMemorySpanExporter) -> None:
    begun = threading.Event()

    @job("traced.waits")
    def waits(ctx: Context, payload: dict[str, Any]) -> None:
        begun.set()
        ctx.wait(60)
        ctx.check()

    with serving(waits, traces=True) as stage:
        task = stage.client.enqueue(waits, {})
        assert begun.wait(LONG_S)
        stage.client.cancel(task)
        stage.end_of(task)
    [run] = of(exported, "run traced.waits")
    assert (run.attributes or {})["thunderagent.outcome"] == "stopped"
    assert run.status.status_code is StatusCode.UNSET


def test_a_task_without_a_trace_begins_one_and_its_lines_carry_it(
    exported: InMemorySpanExporter, lines: io.StringIO
) -> None:
    with serving(logs, scope=task_scope, traces=True) as stage:
        stage.end_of(memory_put(stage.client))
    [run] = of(exported, "run traced.logs")
    assert run.parent is None
    [line] = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert line["trace_id"] == text_of(run)[3:35]


def memory_put(client: Client) -> Task:
    """As a program without traces puts it."""
    return Client(client.store, load_settings(store="sqlite://:memory:")).enqueue(logs, {})


def test_a_producer_that_does_not_sample_decides_for_the_run_and_what_it_enqueues(
    exported: InMemorySpanExporter, url: str
) -> None:
    unsampled = GOOD[:-2] + "00"
    store = open_store(load_settings(store=url))
    with serving(traced_jobs.in_thread, traced_jobs.leaf, store=store, traces=True) as stage:
        with continuing(unsampled):
            task = Client(store, load_settings(store=url)).enqueue(traced_jobs.in_thread, {"store": url})
        child = stage.end_of(stage.end_of(task).result)
    assert exported.get_finished_spans() == ()
    assert child.traceparent is not None
    assert trace_id(child.traceparent) == TRACE
    assert child.traceparent.endswith("-00")
    assert TraceFlags.DEFAULT == 0


def test_runs_at_the_same_time_do_not_mix_their_traces(exported: InMemorySpanExporter, url: str) -> None:
    store = open_store(load_settings(store=url))
    with serving(traced_jobs.in_thread, traced_jobs.in_coroutine, traced_jobs.leaf, store=store, traces=True) as stage:
        with ThreadPoolExecutor(4) as pool:
            tasks = list(pool.map(lambda one: stage.client.enqueue(one, {"store": url}), [*JOBS[:2]] * 10))
        for task in tasks:
            child = stage.client.get(stage.end_of(task).result)
            assert trace_id(child.traceparent) == trace_id(task.traceparent)
        assert len({trace_id(task.traceparent) for task in tasks}) == len(tasks)


# Without the extra, and with a collector that does not answer


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr(traces, "_ready", False)


@pytest.mark.usefixtures("nothing_installed")
def test_without_the_extra_traces_are_refused_with_what_to_install() -> None:
    for attempt in (lambda: load_settings(traces=True), traces.start):
        with pytest.raises(ConfigurationError, match=r"pip install 'thunderagent\[traces\]'"):
            attempt()


@pytest.mark.usefixtures("nothing_installed")
def test_without_the_extra_a_given_trace_is_passed_on_all_the_same(url: str) -> None:
    store = open_store(load_settings(store=url))
    with serving(traced_jobs.in_thread, traced_jobs.leaf, store=store) as stage:
        with continuing(GOOD):
            task = stage.client.enqueue(traced_jobs.in_thread, {"store": url})
        assert stage.client.get(stage.end_of(task).result).traceparent == GOOD


def test_the_end_does_not_wait_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    asked = threading.Event()

    class Provider:
        def force_flush(self, milliseconds: int) -> None:
            asked.set()
            never.wait(60)

    monkeypatch.setattr(traces, "_ready", True)
    monkeypatch.setattr(trace, "get_tracer_provider", Provider)
    monkeypatch.setattr(traces, "_sender", None)

    def flush() -> None:
        traces.flush(0.05)
        traces.flush(60)  # at the exit of the process: it is not waited for a second time

    flushed = threading.Thread(target=flush)
    flushed.start()
    flushed.join(LONG_S)
    assert not flushed.is_alive()
    assert asked.is_set()
    never.set()
    assert SPANS_END_S <= 2.0


def test_what_is_current_is_well_formed(exported: InMemorySpanExporter) -> None:
    assert traces.current() is None
    with trace.get_tracer("app").start_as_current_span("request"):
        assert checked(traces.current()) == traces.current()
