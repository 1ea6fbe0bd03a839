"""Real processes send their spans to a collector, and end in time when it does not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.acceptance.conftest import SETTINGS, Place
from tests.acceptance.processes import AgentProcess, environment, until
from tests.support.stands import patience
from thunderagent.model.task import Status
from thunderagent.model.traceparent import trace_id
from thunderagent.telemetry.traces import SPANS_END_S

pytestmark = pytest.mark.processes

JOBS = "tests.support.traced_jobs"


class Collector:
    """What an OpenTelemetry collector is to those that send spans to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    names = {one.key: one.value.string_value for one in resource.resource.attributes}
                    collector.services.add(names["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def one(self, name: str) -> Any:
        """The only span with this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    one = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.url)
    yield one
    one.close()


@contextmanager
def an_agent(place: Place, folder: Path, **settings: object) -> Iterator[AgentProcess]:
    agent = AgentProcess(
        [JOBS],
        settings={**SETTINGS, "store": place.url, "traces": "1", **settings},
        log=folder / "agent.log",
        cwd=folder,
    )
    try:
        yield agent
    finally:
        agent.end()


PRODUCER = """
import sys
from thunderagent import Client
client = Client.from_settings()
print(client.enqueue(sys.argv[1], {"store": client.store.engine.url}).id)
client.close()
"""


def produce(place: Place, name: str) -> str:
    """Enqueue in a process of its own, with traces; the id of the task."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCER, name],
        env=environment(store=place.url, traces="1"),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_the_spans_of_a_producer_an_agent_and_a_child_process_come_to_the_collector_when_they_end(
    sqlite_place: Place, tmp_path: Path, collector: Collector
) -> None:
    with an_agent(sqlite_place, tmp_path) as agent:
        task = sqlite_place.wait(produce(sqlite_place, "traced.process"), Status.SUCCESS)
        leaf = sqlite_place.wait(task.result, Status.SUCCESS)
        assert agent.line("task succeeded", task_id=leaf.id)["trace_id"] == trace_id(task.traceparent)
        assert agent.stop() == 0
        assert not agent.log.other
    put, run = collector.one("enqueue traced.process"), collector.one("run traced.process")
    child_put, child_run = collector.one("enqueue traced.leaf"), collector.one("run traced.leaf")
    assert [run.parent_span_id, child_put.parent_span_id, child_run.parent_span_id] == [
        put.span_id,
        run.span_id,
        child_put.span_id,
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id(task.traceparent)}
    assert collector.services == {"thunderagent"}


def test_an_agent_whose_collector_does_not_answer_works_and_ends_in_time(
    sqlite_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:  # takes connections and never says a word
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{hole.getsockname()[1]}")
        with an_agent(sqlite_place, tmp_path) as agent:
            task = sqlite_place.client.enqueue("traced.thread", {"store": sqlite_place.url})
            isolated = sqlite_place.client.enqueue("traced.process", {"store": sqlite_place.url})
            for one in (task, isolated):
                done = sqlite_place.wait(one.id, Status.SUCCESS)
                sqlite_place.wait(done.result, Status.SUCCESS)
            began = time.monotonic()
            assert agent.stop(20) == 0
            assert time.monotonic() - began < (SPANS_END_S + 3.0) * patience()
            assert agent.log.lines("agent stopped")


def test_spans_are_sent_while_an_agent_goes_on_and_are_named_as_the_variables_say(
    sqlite_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "reports")
    try:
        with an_agent(sqlite_place, tmp_path) as agent:
            task = sqlite_place.client.enqueue("traced.leaf", {})
            sqlite_place.wait(task.id, Status.SUCCESS)
            until(lambda: collector.spans, 10.0, "the span came while the agent goes on")
            assert agent.stop() == 0
    finally:
        collector.close()
    assert collector.services == {"reports"}
