"""The page of metrics: read by the parser of Prometheus itself."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import Stage, a_job
from thunderagent.agent.assembly import make_meter
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.telemetry import prometheus
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.metrics import METRICS, Kind
from thunderagent.telemetry.prometheus import FRESH_S, prometheus_text
from thunderagent.testing import FakeClock


def about(**changes: Any) -> dict[str, Any]:
    return {"task_id": "a", "job": "test.job", "queue": "default", "fence": 1, "attempt": 1, **changes}


def families(meter: Meter) -> dict[str, Any]:
    return {one.name: one for one in text_string_to_metric_families(prometheus_text(meter).decode())}


def test_every_metric_is_on_the_page_with_its_type_and_meaning() -> None:
    found = families(Meter(EventBus()))
    kinds = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.DISTRIBUTION: "histogram"}
    for metric in METRICS:
        family = found.pop(metric.prometheus.removesuffix("_total"))
        assert (family.type, family.documentation) == (kinds[metric.kind], metric.help)
    assert list(found) == ["thunderagent_info"]


def test_counters_gauges_and_histograms_have_their_values() -> None:
    bus = EventBus()
    meter = Meter(bus)
    for seconds in (0.004, 0.25, 0.26, 9000.0):
        bus.emit(events.TaskSucceeded(**about(), seconds=seconds))
    bus.emit(events.Counted(running=3, slots=10, skew_s=-0.5))
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families(meter).values()
        for sample in family.samples
    }
    assert samples["thunderagent_tasks_succeeded_total", ("default",)] == 4
    assert samples["thunderagent_slots_used", ()] == 3
    assert samples["thunderagent_clock_skew_seconds", ()] == -0.5
    name = "thunderagent_run_time_seconds"
    assert samples[f"{name}_bucket", ("test.job", "0.005")] == 1
    assert samples[f"{name}_bucket", ("test.job", "0.25")] == 2
    assert samples[f"{name}_bucket", ("test.job", "0.5")] == 3
    assert samples[f"{name}_bucket", ("test.job", "7200.0")] == 3
    assert samples[f"{name}_bucket", ("test.job", "+Inf")] == samples[f"{name}_count", ("test.job",)] == 4
    assert samples[f"{name}_sum", ("test.job",)] == pytest.approx(9000.514)


def test_a_name_of_any_kind_is_a_label() -> None:
    bus = EventBus()
    meter = Meter(bus)
    bus.emit(events.TaskSucceeded(**about(job='a"b\\c\nü'), seconds=1.0))
    [job] = {sample.labels["job"] for sample in families(meter)["thunderagent_run_time_seconds"].samples}
    assert job == 'a"b\\c\nü'


def test_reading_the_page_changes_nothing() -> None:
    bus = EventBus()
    meter = Meter(bus)
    bus.emit(events.TaskSucceeded(**about(), seconds=1.0))
    assert prometheus_text(meter) == prometheus_text(meter)


def test_what_this_agent_once_measured_for_the_fleet_is_not_shown_for_ever() -> None:
    bus, clock = EventBus(), FakeClock()
    meter = Meter(bus, monotonic=clock.monotonic)
    bus.emit(fleet_events.QueueMeasured(queue="a", ready=7, oldest_ready_s=3.0))
    clock.advance(FRESH_S)
    assert [sample.value for sample in families(meter)["thunderagent_queue_depth"].samples] == [7]
    clock.advance(1.0)
    assert families(meter)["thunderagent_queue_depth"].samples == []


def test_without_its_library_nothing_is_measured_for_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage((), http_port=9464)
    assert make_meter(stage.agent) is not None
    monkeypatch.setattr(prometheus, "find_spec", lambda name: None)
    assert make_meter(stage.agent) is None


def test_a_counter_without_labels_is_there_from_the_start_so_that_its_rate_is_right() -> None:
    found = families(Meter(EventBus()))
    for metric in METRICS:
        if metric.kind is Kind.COUNTER:
            values = [sample.value for sample in found[metric.prometheus.removesuffix("_total")].samples]
            assert values == ([0.0] if metric.dimension is None else []), metric.name


def test_the_page_of_a_fresh_agent_has_its_slots_and_the_skew_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage((a_job(), a_job("test.other", queue="other")), http_port=9464, slots=7)
    monkeypatch.setattr(stage.store.clock, "skew", -0.5, raising=False)
    meter = make_meter(stage.agent)
    assert meter is not None
    found = families(meter)
    assert [sample.value for sample in found["thunderagent_slots"].samples] == [14]
    assert [sample.value for sample in found["thunderagent_slots_used"].samples] == [0]
    assert [sample.value for sample in found["thunderagent_clock_skew_seconds"].samples] == [-0.5]


def test_the_page_of_a_fresh_agent_with_streams_has_their_gauges() -> None:
    @stream("test.feed")
    async def feed(ctx: StreamContext, payload: dict[str, Any]) -> None: ...

    stage = Stage((feed,), http_port=9464)
    meter = make_meter(stage.agent)
    assert meter is not None
    stage.agent._housekeeping.begin()
    found = families(meter)
    for name in ("thunderagent_active_connections", "thunderagent_streams_held"):
        assert [sample.value for sample in found[name].samples] == [0], name
