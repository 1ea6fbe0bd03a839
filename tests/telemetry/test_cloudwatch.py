"""Metrics on their way to CloudWatch: how many requests, what is in them, and what becomes of those that fail."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.engine import EPOCH, LONG_S, Recorder
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError
from thunderagent.telemetry import cloudwatch, metrics
from thunderagent.telemetry.cloudwatch import (
    FLUSH_S,
    MOST_BYTES,
    MOST_DATA,
    MOST_VALUES,
    CloudWatch,
    Export,
    data_of,
    portions_of,
)
from thunderagent.telemetry.meter import Distribution, Meter, Reading
from thunderagent.telemetry.metrics import METRICS, MOST_LABELS, Kind

pytestmark = pytest.mark.slow


def about(**changes: Any) -> dict[str, Any]:
    return {"task_id": "a", "job": "test.job", "queue": "default", "fence": 1, "attempt": 1, **changes}


class Wire:
    """A CloudWatch on the loopback address that keeps what it is sent, and refuses or is silent on request."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.refuse: str | None = None
        self.refuse_after = 0
        """Requests that are taken before one is refused."""
        self.silent = threading.Event()
        self.endpoint = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["Content-Length"]))
        plain = gzip.decompress(raw) if handler.headers.get("Content-Encoding") == "gzip" else raw
        while self.silent.is_set():  # until the test ends
            time.sleep(0.02)
        refused = self.refuse is not None and len(self.bodies) >= self.refuse_after
        if not refused:
            self.bodies.append(json.loads(plain))
            self.sizes.append(len(plain))
        body = json.dumps({"__type": self.refuse, "message": "not for you"} if refused else {}).encode()
        handler.send_response(400 if refused else 200)
        handler.send_header("Content-Type", "application/x-amz-json-1.0")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def data(self) -> list[dict[str, Any]]:
        return [datum for body in self.bodies for datum in body["MetricData"]]

    def sum_of(self, name: str) -> float:
        """Over all data of a metric, whatever their form."""
        found = [datum for datum in self.data() if datum["MetricName"] == name]
        return sum(datum["Value"] if "Value" in datum else sum(datum["Counts"]) for datum in found)


@contextmanager
def serving_cloudwatch() -> Iterator[Wire]:
    wire = Wire()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            wire.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Whoever asked is gone."""

    server = Server(("127.0.0.1", 0), Handler)
    wire.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield wire
    finally:
        wire.silent.clear()
        server.shutdown()
        thread.join(10)
        server.server_close()


class Bench:
    """An exporter with its bus, its meter and what it sends to."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.to = CloudWatch("Test", endpoint=wire.endpoint, now=lambda: EPOCH)
        self.export = Export(Meter(self.bus), self.to, self.bus)

    def minute(self) -> None:
        self.export.turn()
        self.export.turn()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with serving_cloudwatch() as wire:
        bench = Bench(wire)
        yield bench
        bench.to.close()


def succeed(bus: EventBus, number: int = 1, **changes: Any) -> None:
    for _ in range(number):
        bus.emit(events.TaskSucceeded(**about(**changes), seconds=0.5))


def test_a_minute_is_one_request_with_everything_in_it(bench: Bench) -> None:
    bench.export.turn()
    assert bench.wire.bodies == []
    succeed(bench.bus, 3)
    succeed(bench.bus, 2, queue="reports", job="report.build")
    bench.bus.emit(events.Counted(running=2, slots=10, skew_s=0.25))
    bench.minute()
    [body] = bench.wire.bodies
    assert body["Namespace"] == "Test"
    values = {
        (datum["MetricName"], *(one["Value"] for one in datum.get("Dimensions", ()))): datum
        for datum in body["MetricData"]
    }
    assert values["TasksSucceeded", "default"]["Value"] == 3
    assert values["TasksSucceeded", "reports"]["Dimensions"] == [{"Name": "Queue", "Value": "reports"}]
    assert values["RunTime", "report.build"]["Values"] == [0.5]
    assert values["RunTime", "report.build"]["Counts"] == [2]
    assert values["RunTime", "report.build"]["Unit"] == "Seconds"
    assert values["ClockSkew",]["Value"] == 0.25
    assert all(datum["Timestamp"] == EPOCH for datum in body["MetricData"])


def test_an_agent_without_streams_makes_one_request_a_minute_and_one_with_streams_two(bench: Bench) -> None:
    bench.bus.emit(events.AgentStarted(agent="a", store="s", queues="q", jobs=()))
    bench.export.turn()
    for _ in range(5):
        succeed(bench.bus)
        bench.bus.emit(events.Counted(running=2, slots=10, skew_s=None))
        bench.minute()
    assert len(bench.wire.bodies) == 5
    # Auto Scaling takes no machine away while one of its policies has no data.
    names = Counter(datum["MetricName"] for datum in bench.wire.data())
    assert (names["ActiveConnections"], bench.wire.sum_of("ActiveConnections"), names["StreamsHeld"]) == (5, 0, 0)
    for connections in range(5):
        succeed(bench.bus)
        bench.bus.emit(events.ActiveConnections(connections=connections, streams=5))
        bench.minute()
    assert len(bench.wire.bodies) == 15
    assert [datum["MetricName"] for datum in bench.wire.bodies[5]["MetricData"]] == ["ActiveConnections"]
    assert bench.wire.sum_of("TasksSucceeded") == 10
    names = Counter(datum["MetricName"] for datum in bench.wire.data())
    assert names["ActiveConnections"] == 15


def test_no_metric_names_a_task_or_an_agent(bench: Bench) -> None:
    bench.export.turn()
    bench.bus.emit(events.AgentStarted(agent="host:1:secret", store="s", queues="q", jobs=()))
    bench.bus.emit(events.TaskTakenOver(**about(task_id="secret-task"), lost_agent="host:2:secret"))
    bench.bus.emit(events.LeaseLost(**about(task_id="secret-task"), reason="secret-reason"))
    bench.minute()
    assert bench.wire.sum_of("LeasesLost") == 1
    assert "secret" not in json.dumps(bench.wire.bodies)


def test_what_was_refused_is_in_the_next_minute_and_reported_once(bench: Bench) -> None:
    bench.export.turn()
    bench.wire.refuse = "AccessDeniedException"
    for _ in range(3):
        succeed(bench.bus, 4)
        bench.minute()
    [failed] = bench.record.of(fleet_events.ExportFailed)
    assert failed.to == "CloudWatch"
    assert "cloudwatch:PutMetricData" in failed.error and "'Test'" in failed.error
    bench.wire.refuse = None
    bench.minute()
    assert bench.wire.sum_of("TasksSucceeded") == bench.wire.sum_of("RunTime") == 12
    bench.minute()
    assert bench.wire.sum_of("TasksSucceeded") == 12
    bench.wire.refuse = "AccessDeniedException"
    succeed(bench.bus)
    bench.minute()
    assert len(bench.record.of(fleet_events.ExportFailed)) == 2


def test_another_problem_is_reported_again(bench: Bench) -> None:
    bench.export.turn()
    for problem in ("AccessDeniedException", "UnrecognizedClientException", "ThrottlingException"):
        bench.wire.refuse = problem
        succeed(bench.bus)
        bench.minute()
    assert len(bench.record.of(fleet_events.ExportFailed)) == 3


def test_an_outage_of_hours_keeps_no_more_than_a_minute_does(bench: Bench) -> None:
    bench.export.turn()
    bench.wire.refuse = "AccessDeniedException"
    for minute in range(120):
        succeed(bench.bus, 5, job=f"job-{minute}")
        bench.export._send()
    bench.wire.refuse = None
    bench.minute()
    [body] = bench.wire.bodies
    assert bench.wire.sum_of("RunTime") == 600
    assert len(body["MetricData"]) <= MOST_LABELS + 5


def test_of_two_portions_the_one_that_arrived_is_not_sent_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudwatch, "MOST_DATA", 1)
    bench.export.turn()
    for queue in "abc":
        bench.bus.emit(events.Polled(queue=queue, seen=1, tried=1, won=1))
    bench.wire.refuse, bench.wire.refuse_after = "AccessDeniedException", 2
    bench.minute()
    assert len(bench.wire.bodies) == 2
    bench.wire.refuse = None
    bench.minute()
    queues = [datum["Dimensions"][0]["Value"] for datum in bench.wire.data() if datum["MetricName"] == "TasksClaimed"]
    assert sorted(queues) == ["a", "b", "c"]


def test_the_end_sends_what_is_left(bench: Bench) -> None:
    bench.export.turn()
    succeed(bench.bus, 7)
    bench.export.last()
    assert bench.wire.sum_of("TasksSucceeded") == 7


def test_the_end_does_not_wait_for_a_cloudwatch_that_is_silent(bench: Bench) -> None:
    bench.wire.silent.set()
    succeed(bench.bus)
    begun = time.monotonic()
    bench.export.last()
    assert time.monotonic() - begun < FLUSH_S + 30.0  # a wire that is silent is so for a minute


def test_the_end_does_not_wait_for_what_has_no_time_limit_of_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, entered = threading.Event(), threading.Event()

    def resolve_for_ever(data: Any, *, hurry: bool = False) -> None:
        entered.set()
        hang.wait(LONG_S)

    monkeypatch.setattr(bench.to, "put", resolve_for_ever)
    succeed(bench.bus)
    begun = time.monotonic()
    bench.export.last()
    took = time.monotonic() - begun
    assert entered.is_set()
    hang.set()
    assert took < FLUSH_S + 10.0


def test_the_end_is_bounded_while_a_minute_hangs_too(bench: Bench) -> None:
    bench.export.turn()
    succeed(bench.bus)
    bench.wire.silent.set()
    thread = threading.Thread(target=bench.minute)
    thread.start()
    begun = time.monotonic()
    bench.export.last()
    assert time.monotonic() - begun < FLUSH_S + 10.0
    bench.wire.silent.clear()
    thread.join(15)
    assert not thread.is_alive()


def test_the_end_waits_for_a_minute_that_is_on_its_way_and_sends_nothing_twice(bench: Bench) -> None:
    bench.export.turn()
    succeed(bench.bus, 7)
    bench.wire.silent.set()
    thread = threading.Thread(target=bench.minute)
    thread.start()
    threading.Timer(0.3, bench.wire.silent.clear).start()
    bench.export.last()
    thread.join(15)
    assert not thread.is_alive()
    assert bench.wire.sum_of("TasksSucceeded") == 7


def test_an_unknown_region_is_a_problem_with_a_remedy(bench: Bench) -> None:
    to = CloudWatch("Test", now=lambda: EPOCH)
    with pytest.raises(ConfigurationError, match="set AWS_DEFAULT_REGION"):
        to.put([])


def test_without_credentials_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    bus = EventBus()
    record = Recorder(bus)
    export = Export(Meter(bus), CloudWatch("Test", region="eu-central-1", now=lambda: EPOCH), bus)
    succeed(bus)
    export._send()
    [failed] = record.of(fleet_events.ExportFailed)
    assert "no usable AWS credentials" in failed.error and "cloudwatch:PutMetricData" in failed.error


# The limits of a request


def test_a_distribution_of_many_values_is_several_data() -> None:
    counts = {number / 10: number + 1 for number in range(MOST_VALUES * 2 + 20)}
    reading = Reading({}, {}, {(metrics.RUN_TIME, "a"): Distribution(counts, 1.0)}, {}, 0.0)
    data = [datum for _, datum in data_of(reading)]
    assert [len(datum["Values"]) for datum in data] == [MOST_VALUES, MOST_VALUES, 20]
    assert {value: count for one in data for value, count in zip(one["Values"], one["Counts"], strict=True)} == counts


def test_no_portion_has_more_than_a_request_may_and_none_is_lost() -> None:
    counters = {
        (metric, f"label-{number}"): 1.0
        for metric in METRICS
        if metric.kind is Kind.COUNTER
        for number in range(MOST_LABELS)
    }
    wide = Distribution({number / 10: 1 for number in range(1000)}, 1.0)
    distributions = {(metrics.RUN_TIME, f"job-{number}"): wide for number in range(MOST_LABELS)}
    data = list(data_of(Reading(counters, {}, distributions, {}, 0.0)))
    portions = list(portions_of(data))
    assert [one for portion in portions for one in portion] == data
    assert len(portions) > 2
    for portion in portions:
        assert len(portion) <= MOST_DATA
        assert len(json.dumps([datum for _, datum in portion])) < MOST_BYTES


def test_nothing_counted_is_no_request() -> None:
    assert list(portions_of(())) == []


def test_the_dimension_of_a_job_with_strange_letters_is_one_that_cloudwatch_takes() -> None:
    [(_, datum)] = data_of(Reading({(metrics.HANDLER_ERRORS, "bücher" + "x" * 400): 1.0}, {}, {}, {}, 0.0))
    [dimension] = datum["Dimensions"]
    assert dimension["Value"].startswith("b?cher") and len(dimension["Value"]) == 255


# A real engine


@pytest.mark.ministack
def test_a_real_engine_takes_the_data_and_adds_them_up(ministack_endpoint: str) -> None:
    bus = EventBus()
    moment = time.time()
    to = CloudWatch("ThunderTest", endpoint=ministack_endpoint, now=lambda: moment)
    export = Export(Meter(bus), to, bus)
    record = Recorder(bus)
    succeed(bus, 3)
    bus.emit(events.TaskSucceeded(**about(), seconds=9.0))
    bus.emit(fleet_events.QueueMeasured(queue="default", ready=41, oldest_ready_s=7.5))
    export.last()
    succeed(bus, 2)
    export.last()
    assert record.of(fleet_events.ExportFailed) == []

    def statistics(name: str, dimension: str, value: str, *wanted: str) -> dict[str, float]:
        reply = to._client(False).get_metric_statistics(
            Namespace="ThunderTest",
            MetricName=name,
            Dimensions=[{"Name": dimension, "Value": value}],
            StartTime=moment - 300,
            EndTime=moment + 300,
            Period=3600,
            Statistics=list(wanted),
        )
        [point] = reply["Datapoints"]
        return {one: point[one] for one in wanted}

    try:
        assert statistics("TasksSucceeded", "Queue", "default", "Sum") == {"Sum": 6.0}
        assert statistics("QueueDepth", "Queue", "default", "Maximum") == {"Maximum": 41.0}
        values = statistics("RunTime", "Job", "test.job", "SampleCount", "Maximum")
        assert values == {"SampleCount": 6.0, "Maximum": 9.0}
    finally:
        to.close()
