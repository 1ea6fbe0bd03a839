"""The queues are counted by one agent for all, and with few reads."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import pytest

from tests.support.engine import Recorder, a_job, put, serving
from thunderagent.agent.assembly import equip, make_meter, measuring_threads
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.fleet_events import BacklogMeasured, QueueMeasured
from thunderagent.model.task import Lane, Page
from thunderagent.stores.dynamo.consumed import Consumed
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry import metrics, prometheus
from thunderagent.telemetry import queue_gauges as measuring
from thunderagent.telemetry.cloudwatch import cloudwatch_place
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.metrics import MOST_LABELS
from thunderagent.telemetry.queue_gauges import TURN_S, QueueMeasure, measure
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.faulty_engine import Fault, FaultyEngine


class Counting(FaultyEngine):
    """An engine that counts what is read of the index."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.reads: Counter[str] = Counter()

    def page(self, status_value: str, **options: Any) -> Page:
        self.reads["page"] += 1
        return super().page(status_value, **options)

    def count(self, status_value: str, **options: Any) -> int:
        self.reads["count"] += 1
        return super().count(status_value, **options)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> TaskStore:
    return memory_store(clock=clock)


def test_a_queue_is_measured_by_what_is_due(store: TaskStore, clock: FakeClock) -> None:
    now = clock.now()
    put(store, "old", created_at=now - 90.0)
    put(store, "new", created_at=now - 1.0)
    put(store, "delayed", created_at=now + 60.0)
    put(store, "elsewhere", created_at=now - 5.0, lane=Lane("reports", 1))
    put(store, "elsewhere-too", created_at=now - 7.0, lane=Lane("reports", 0))
    put(store, "later", created_at=now + 7.0, lane=Lane("quiet"))
    assert list(measure(store)) == [
        QueueMeasured(queue="default", ready=2, oldest_ready_s=90.0),
        QueueMeasured(queue="quiet", ready=0, oldest_ready_s=0.0),
        QueueMeasured(queue="reports", ready=2, oldest_ready_s=7.0),
    ]


def test_a_count_stops_at_its_cap_and_says_so(
    store: TaskStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "CAP", 4)
    for number in range(6):
        put(store, f"a{number}", created_at=clock.now() - 9.0, lane=Lane("a", number % 2))
    put(store, "oldest", created_at=clock.now() - 99.0, lane=Lane("a", 2))
    for number in range(3):
        put(store, f"b{number}", created_at=clock.now() - 9.0, lane=Lane("b"))
    a, b = measure(store)
    assert (a.ready, a.is_capped, b.ready, b.is_capped) == (4, True, 3, False)
    assert a.oldest_ready_s == 99.0


def test_an_empty_lane_costs_one_read_and_another_two(store: TaskStore, clock: FakeClock) -> None:
    put(store, "later", created_at=clock.now() + 7.0, lane=Lane("quiet"))
    put(store, "due", created_at=clock.now() - 7.0, lane=Lane("busy"))
    engine = Counting(store.engine)
    list(measure(TaskStore(engine, monotonic=clock.monotonic)))
    assert engine.reads == {"count": 2, "page": 1}


def test_of_very_many_queues_no_more_are_measured_than_metrics_tell_apart(store: TaskStore) -> None:
    for number in range(MOST_LABELS + 5):
        put(store, f"a{number}", lane=Lane(f"q{number:03}"))
    assert len(list(measure(store))) == MOST_LABELS


def test_one_agent_of_the_fleet_measures_each_minute(store: TaskStore, clock: FakeClock) -> None:
    put(store, "a")
    bus = EventBus()
    record = Recorder(bus)
    agents = [QueueMeasure(store, bus, owner=f"agent-{number}") for number in range(3)]
    for minute in range(1, 4):
        for agent in agents:
            agent.look()
            clock.advance(1.0)
        assert len(record.of(QueueMeasured)) == minute
        clock.advance(60.0 - 3.0)
    assert TURN_S < measuring.MEASURE_S


def test_the_backlog_is_what_is_ready_in_all_queues_and_is_reported_when_it_is_nothing(
    store: TaskStore, clock: FakeClock
) -> None:
    bus = EventBus()
    record, meter = Recorder(bus), Meter(bus, monotonic=clock.monotonic)
    queues = QueueMeasure(store, bus, owner="me")
    queues.look()
    for name, lane in (("a", Lane()), ("b", Lane()), ("c", Lane("reports", 1))):
        put(store, name, created_at=clock.now() - 1.0, lane=lane)
    put(store, "later", created_at=clock.now() + 600.0)
    clock.advance(60.0)
    queues.look()
    assert [event.ready for event in record.of(BacklogMeasured)] == [0, 3]
    assert meter.read().gauges[metrics.BACKLOG, ""] == 3


def test_a_store_that_does_not_answer_is_reported_and_asked_again(clock: FakeClock) -> None:
    engine = FaultyEngine(memory_store(clock=clock).engine)
    store, bus = TaskStore(engine, monotonic=clock.monotonic), EventBus()
    record = Recorder(bus)
    put(store, "a")
    queues = QueueMeasure(store, bus, owner="me")
    engine.outage()
    queues.look()  # nobody knows whose turn it is
    engine.calm()
    engine.fail("count", Fault.LOST_REQUEST)
    queues.look()
    assert [failed.during for failed in record.of(events.StoreFailed)] == ["measuring the queues"]
    clock.advance(60.0)
    queues.look()
    assert len(record.of(QueueMeasured)) == 1


# What an agent's settings ask for


def test_an_agent_whose_metrics_are_not_read_counts_and_measures_nothing() -> None:
    with serving(a_job()) as stage:
        assert make_meter(stage.agent) is None
        assert "measure" not in {one.name for one in equip(stage.agent)}


def test_an_agent_with_a_port_has_a_meter_and_measures_and_sends_nothing() -> None:
    with serving(a_job(), http_port=18977) as stage:
        meter = make_meter(stage.agent)
        assert meter is not None
        assert [one.name for one in measuring_threads(stage.agent, meter)] == ["measure"]
        stage.end_of(stage.client.enqueue("test.job", {}))
        reading = meter.read()
        assert reading.counters[metrics.TASKS_SUCCEEDED, "default"] == 1
        assert (metrics.SLOTS_USED, "") in reading.gauges


@pytest.mark.slow
def test_an_agent_with_a_port_and_without_the_library_tells_its_health_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "find_spec", lambda name: None)
    with serving(a_job(), http_port=18977) as stage:
        stage.record.wait(events.AgentStarted)
        threads = {one.name: one for one in equip(stage.agent)}
        assert "measure" not in threads
        threads["http"].start()
        try:
            with urllib.request.urlopen(f"{stage.agent.facts['http']}/health", timeout=10) as reply:
                assert reply.status == 200
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{stage.agent.facts['http']}/metrics", timeout=10)
            with refused.value as answer:
                assert b"pip install 'thunderagent[prometheus]'" in answer.read()
        finally:
            threads["http"].close()


def test_throttles_of_the_store_are_metrics_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(a_job(), http_port=18977) as stage:
        consumed = Consumed()
        consumed.add_throttle(["TableWriteAccountLimitExceeded", "IndexWriteKeyRangeThroughputExceeded"])
        consumed.add_throttle(["TableWriteAccountLimitExceeded"])
        monkeypatch.setattr(stage.store.engine, "consumed", consumed, raising=False)
        meter = make_meter(stage.agent)
        assert meter is not None
        counters = meter.read().counters
        assert counters[metrics.THROTTLES, "TableWriteAccountLimitExceeded"] == 2
        assert counters[metrics.THROTTLES, "IndexWriteKeyRangeThroughputExceeded"] == 1


def test_an_agent_with_a_namespace_sends_too() -> None:
    with serving(a_job(), cloudwatch_namespace="Test") as stage:
        meter = make_meter(stage.agent)
        assert meter is not None
        assert [one.name for one in measuring_threads(stage.agent, meter)] == ["measure", "cloudwatch"]


@pytest.mark.parametrize(
    ("store_url", "region", "endpoint"),
    [
        ("sqlite:///tasks.db", None, None),
        ("dynamodb://TaskTable?region=eu-west-1", "eu-west-1", None),
        ("dynamodb://TaskTable?region=eu-west-1&endpoint=http://127.0.0.1:4566", "eu-west-1", "http://127.0.0.1:4566"),
        ("dynamodb://TaskTable?endpoint=https://dynamodb.eu-west-1.amazonaws.com", None, None),
    ],
)
def test_metrics_go_where_the_table_is_but_to_no_endpoint_of_another_service(
    store_url: str, region: str | None, endpoint: str | None
) -> None:
    assert cloudwatch_place(store_url) == {"region": region, "endpoint": endpoint}
