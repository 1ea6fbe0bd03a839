"""The meter: what it counts, that it stays small, and that readers do not take from each other."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.telemetry import metrics
from thunderagent.telemetry.meter import Meter, Reader, two_digits
from thunderagent.telemetry.metrics import MOST_LABELS, OTHER
from thunderagent.telemetry.prices import store_dollars
from thunderagent.testing import FakeClock


def about(**changes: Any) -> dict[str, Any]:
    return {"task_id": "a", "job": "test.job", "queue": "default", "fence": 1, "attempt": 1, **changes}


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def meter(bus: EventBus, clock: FakeClock) -> Meter:
    return Meter(bus, monotonic=clock.monotonic)


def test_events_are_counted_by_queue_and_by_job(bus: EventBus, meter: Meter) -> None:
    bus.emit(events.Polled(queue="reports", seen=9, tried=5, won=3))
    bus.emit(events.TaskStarted(**about(queue="reports"), waited_s=1.26))
    bus.emit(events.TaskSucceeded(**about(queue="reports"), seconds=0.5))
    bus.emit(events.TaskRetried(**about(), error="x", delay_s=1.0))
    bus.emit(events.TaskFailed(**about(), error="x"))
    reading = meter.read()
    assert reading.counters[metrics.TASKS_CLAIMED, "reports"] == 3
    assert reading.counters[metrics.CLAIMS_LOST, "reports"] == 2
    assert reading.counters[metrics.TASKS_SUCCEEDED, "reports"] == 1
    assert reading.counters[metrics.HANDLER_ERRORS, "test.job"] == 2
    latency = reading.distributions[metrics.CLAIM_LATENCY, "reports"]
    assert (latency.counts, latency.total) == ({1.3: 1}, 1.26)
    assert reading.distributions[metrics.RUN_TIME, "test.job"].counts == {0.5: 1}


def test_a_task_that_was_taken_over_says_nothing_about_latency(bus: EventBus, meter: Meter) -> None:
    bus.emit(events.TaskTakenOver(**about(fence=2), lost_agent="b"))
    bus.emit(events.TaskStarted(**about(fence=2), waited_s=400.0))
    bus.emit(events.TaskStarted(**about(fence=3), waited_s=1.0))
    reading = meter.read()
    assert reading.distributions[metrics.CLAIM_LATENCY, "default"].counts == {1.0: 1}
    assert reading.counters[metrics.TASKS_TAKEN_OVER, "default"] == 1


def test_takeovers_that_never_start_are_forgotten(bus: EventBus, meter: Meter) -> None:
    for number in range(3000):
        bus.emit(events.TaskTakenOver(**about(task_id=str(number)), lost_agent="b"))
    assert len(meter._taken_over) == 1000


def test_of_very_many_jobs_the_rest_is_other(bus: EventBus, meter: Meter) -> None:
    for number in range(MOST_LABELS + 30):
        bus.emit(events.TaskSucceeded(**about(job=f"job-{number}"), seconds=0.1))
    reading = meter.read()
    labels = {label for metric, label in reading.distributions if metric is metrics.RUN_TIME}
    assert len(labels) == MOST_LABELS + 1
    assert reading.distributions[metrics.RUN_TIME, OTHER].number == 30
    assert reading.counters[metrics.TASKS_SUCCEEDED, "default"] == MOST_LABELS + 30


def test_of_very_many_reasons_that_a_source_tells_the_rest_is_one_sum(meter: Meter) -> None:
    meter.add_source(lambda: [(metrics.THROTTLES, f"reason-{number}", 2.0) for number in range(MOST_LABELS + 5)])
    for _ in range(2):
        assert meter.read().counters[metrics.THROTTLES, OTHER] == 10.0


def test_a_distribution_keeps_few_values_whatever_comes(bus: EventBus, meter: Meter) -> None:
    for number in range(20_000):
        bus.emit(events.TaskSucceeded(**about(), seconds=number * 0.37))
    kept = meter.read().distributions[metrics.RUN_TIME, "test.job"]
    assert kept.number == 20_000
    assert len(kept.counts) < 600


@pytest.mark.parametrize(
    ("value", "kept"),
    [(0.0004, 0.0), (-3.0, 0.0), (math.nan, 0.0), (0.01249, 0.012), (126.0, 130.0), (math.inf, 1e7), (1.0, 1.0)],
)
def test_times_are_kept_with_two_digits(value: float, kept: float) -> None:
    assert two_digits(value) == kept


def test_readers_do_not_take_from_each_other(bus: EventBus, meter: Meter) -> None:
    one, other = Reader(meter.read), Reader(meter.read)
    series = (metrics.TASKS_SUCCEEDED, "default")
    bus.emit(events.TaskSucceeded(**about(), seconds=0.5))
    assert one.take().counters[series] == 1
    one.kept([series, (metrics.RUN_TIME, "test.job")])
    bus.emit(events.TaskSucceeded(**about(), seconds=0.5))
    bus.emit(events.TaskSucceeded(**about(), seconds=2.0))
    assert one.take().counters[series] == 2
    assert one.take().distributions[metrics.RUN_TIME, "test.job"].counts == {0.5: 1, 2.0: 1}
    assert other.take().counters[series] == 3
    assert other.take().distributions[metrics.RUN_TIME, "test.job"].counts == {0.5: 2, 2.0: 1}


def test_what_did_not_arrive_is_read_again(bus: EventBus, meter: Meter) -> None:
    reader = Reader(meter.read)
    bus.emit(events.Polled(queue="a", seen=1, tried=1, won=1))
    bus.emit(events.Polled(queue="b", seen=1, tried=1, won=1))
    assert len(reader.take().counters) == 2  # nothing was lost, and nothing is said of that
    reader.kept([(metrics.TASKS_CLAIMED, "a")])
    assert (metrics.TASKS_CLAIMED, "a") not in reader.take().counters
    assert reader.take().counters[metrics.TASKS_CLAIMED, "b"] == 1


def test_what_stands_still_is_not_read_again(bus: EventBus, meter: Meter) -> None:
    reader = Reader(meter.read)
    bus.emit(events.TaskSucceeded(**about(), seconds=0.5))
    taken = reader.take()
    reader.kept({*taken.counters, *taken.distributions})
    again = reader.take()
    assert (again.counters, again.distributions) == ({}, {})


def test_a_gauge_of_the_fleet_is_read_once_and_one_of_the_agent_each_time(
    bus: EventBus, meter: Meter, clock: FakeClock
) -> None:
    reader = Reader(meter.read)
    bus.emit(fleet_events.QueueMeasured(queue="a", ready=7, oldest_ready_s=3.0))
    bus.emit(events.Counted(running=2, slots=10, skew_s=0.1))
    taken = reader.take()
    assert taken.gauges[metrics.QUEUE_DEPTH, "a"] == 7
    assert taken.gauges[metrics.OLDEST_READY_AGE, "a"] == 3.0
    reader.kept(taken.gauges)
    clock.advance(60.0)
    again = reader.take()
    assert (metrics.QUEUE_DEPTH, "a") not in again.gauges
    assert again.gauges[metrics.SLOTS, ""] == 10
    bus.emit(fleet_events.QueueMeasured(queue="a", ready=7, oldest_ready_s=63.0))
    assert reader.take().gauges[metrics.QUEUE_DEPTH, "a"] == 7


def test_health_is_a_gauge_from_the_start(bus: EventBus, meter: Meter) -> None:
    bus.emit(events.AgentStarted(agent="a", store="s", queues="q", jobs=()))
    assert meter.read().gauges[metrics.HEALTHY, ""] == 1.0
    bus.emit(fleet_events.HealthChanged(healthy=False, reasons=("x",)))
    assert meter.read().gauges[metrics.HEALTHY, ""] == 0.0


def test_dollars_are_those_of_the_last_minute(bus: EventBus, meter: Meter) -> None:
    units = {"read": 0.0, "write": 0.0}
    meter.add_source(
        lambda: [
            (metrics.READ_UNITS, "poll", units["read"]),
            (metrics.WRITE_UNITS, "claim", units["write"]),
            (metrics.WRITE_UNITS, "settle", units["write"]),
        ]
    )

    def minute(tasks: int, read: float, write: float) -> float | None:
        for _ in range(tasks):
            bus.emit(events.TaskSucceeded(**about(), seconds=0.5))
        units["read"] += read
        units["write"] += write
        bus.emit(events.Counted(running=0, slots=10, skew_s=None))
        return meter.read().gauges.get((metrics.COST, ""))

    assert minute(10, 40.0, 30.0) == pytest.approx(store_dollars(read_units=40.0, write_units=60.0) * 100)
    assert minute(1, 0.0, 3.0) == pytest.approx(store_dollars(write_units=6.0) * 1000)
    assert minute(0, 5.0, 0.0) is None


def test_without_units_nothing_is_reported_about_dollars(bus: EventBus, meter: Meter) -> None:
    bus.emit(events.TaskSucceeded(**about(), seconds=0.5))
    bus.emit(events.Counted(running=0, slots=10, skew_s=None))
    assert (metrics.COST, "") not in meter.read().gauges


class Interrupted(dict[Any, float]):
    """Counts of which the first look is followed by whatever another thread can do in the next third of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()
        self.other_is_done = threading.Event()

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        if not self.looked.is_set():
            self.looked.set()
            self.other_is_done.wait(0.3)
        return found


@pytest.mark.slow
def test_a_thread_that_counts_is_not_overtaken_by_another(bus: EventBus, meter: Meter) -> None:
    meter._counters = counts = Interrupted()

    def other() -> None:
        counts.looked.wait(10)
        bus.emit(events.TaskReleased(**about()))
        counts.other_is_done.set()

    thread = threading.Thread(target=other)
    thread.start()
    bus.emit(events.TaskReleased(**about()))
    thread.join(10)
    assert counts[metrics.TASKS_RELEASED, "default"] == 2


def test_threads_that_count_at_once_lose_nothing(bus: EventBus, meter: Meter) -> None:
    reader, arrived = Reader(meter.read), 0.0
    series = (metrics.TASKS_SUCCEEDED, "default")
    begin = threading.Barrier(4)

    def emit() -> None:
        begin.wait(10)
        for number in range(2000):
            bus.emit(events.TaskSucceeded(**about(), seconds=number / 1000))

    threads = [threading.Thread(target=emit) for _ in range(3)]
    for thread in threads:
        thread.start()
    begin.wait(10)
    while any(thread.is_alive() for thread in threads):
        arrived += reader.take().counters.get(series, 0.0)
        reader.kept([series])
    for thread in threads:
        thread.join(10)
    arrived += reader.take().counters.get(series, 0.0)
    assert arrived == 6000
    assert meter.read().distributions[metrics.RUN_TIME, "test.job"].number == 6000
