"""The list of metrics: its names, and that everything on it is filled by something."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from thunderagent.model import writes
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.task import StatusValue
from thunderagent.stores.purposes import RequestPurpose, of_put, of_query, of_row, of_write
from thunderagent.telemetry import metrics
from thunderagent.telemetry.dashboard import ALARMS
from thunderagent.telemetry.logs import LEVELS
from thunderagent.telemetry.meter import _NOTES, Meter
from thunderagent.telemetry.metrics import METRICS, Kind, Metric, Unit

PROMETHEUS = re.compile(r"thunderagent_[a-z0-9_]+")
OF_SOURCES = {
    metrics.STORE_REQUESTS,
    metrics.READ_UNITS,
    metrics.WRITE_UNITS,
    metrics.THROTTLES,
    metrics.LINES_DROPPED,
}
"""What the store or the process tells when it is asked, and no event."""


def test_one_name_gives_both_names() -> None:
    assert (metrics.TASKS_SUCCEEDED.cloudwatch, metrics.TASKS_SUCCEEDED.prometheus) == (
        "TasksSucceeded",
        "thunderagent_tasks_succeeded_total",
    )
    assert metrics.CLAIM_LATENCY.prometheus == "thunderagent_claim_latency_seconds"
    assert metrics.ACTIVE_CONNECTIONS.cloudwatch == "ActiveConnections"
    assert metrics.QUEUE_DEPTH.prometheus == "thunderagent_queue_depth"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.cloudwatch)
def test_names_and_units_are_what_both_systems_take(metric: Metric) -> None:
    assert re.fullmatch(r"[A-Z][A-Za-z0-9]{2,60}", metric.cloudwatch)
    assert PROMETHEUS.fullmatch(metric.prometheus)
    assert metric.prometheus.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert ("_seconds" in metric.prometheus) == (metric.unit is Unit.SECONDS)
    assert (metric.help.endswith(".") and metric.help[0].isupper()) or metric.help[0].isdigit()


def test_no_name_is_there_twice() -> None:
    for names in ([one.cloudwatch for one in METRICS], [one.prometheus for one in METRICS]):
        assert len(set(names)) == len(names)


def test_every_metric_is_filled_and_nothing_else_is() -> None:
    filled: set[Metric] = set()

    class Notes(Meter):
        def _count(self, metric: Metric, label: str = "", number: float = 1) -> None:
            filled.add(metric)

        def _set(self, metric: Metric, value: float, label: str = "") -> None:
            filled.add(metric)

        def _note(self, metric: Metric, value: float, label: str = "") -> None:
            filled.add(metric)

        def _sum(self, *wanted: Metric) -> float:
            self.calls = getattr(self, "calls", 0) + 1.0
            return self.calls

    meter = Notes(EventBus())
    for kind, note in _NOTES.items():
        note(meter, _any(kind))
        note(meter, _any(kind))
    assert filled | OF_SOURCES == set(METRICS)


def _any(kind: type[Event]) -> Event:
    values = {"str": "a", "int": 1, "float": 1.0, "bool": True, "float | None": 1.0, "tuple[str, ...]": ("a",)}
    fields = inspect.signature(kind).parameters.values()
    return kind(**{one.name: values.get(str(one.annotation), "a") for one in fields})


def test_only_events_that_are_reported_are_counted() -> None:
    assert [kind.__name__ for kind in _NOTES if kind not in LEVELS and kind.__name__ not in ("Polled", "Counted")] == []


def test_an_alarm_has_one_threshold_and_is_about_a_metric_of_the_list() -> None:
    for alarm in ALARMS:
        assert (alarm.above is None) != (alarm.below is None)
        assert alarm.metric in METRICS
        assert alarm.statistic in ("Sum", "Maximum", "Minimum", "Average")
    assert {alarm.metric for alarm in ALARMS} >= {metrics.OLDEST_READY_AGE, metrics.HEALTHY, metrics.TASKS_GIVEN_UP}


def _verbs() -> set[str]:
    """Every verb that a module of `model/writes` gives to a write, but for those that are parameters."""
    found = set[str]()
    for module in Path(writes.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "verb" and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("_settle", "_back", "_note"):
                found |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
    return found


def test_every_verb_of_a_write_has_a_purpose() -> None:
    verbs = _verbs()
    assert {"claim", "renew", "succeed", "offer", "announce", "take turn"} <= verbs
    assert {verb for verb in verbs if of_write(verb, "a-task") is RequestPurpose.TASKS} == {
        "cancel",
        "request cancel",
        "revive",
    }


def test_rows_and_queries_tell_what_they_are_for() -> None:
    assert of_put("0190-abc") is RequestPurpose.ENQUEUE
    assert of_put("report:2026-07") is RequestPurpose.ENQUEUE
    assert of_put("agent:host:1:ab") is of_put("turn:measure") is RequestPurpose.REGISTRY
    assert of_row("0190-abc") is RequestPurpose.TASKS
    assert of_row("schedule:job") is of_write("put", "schedule:job") is RequestPurpose.TICKS
    assert of_row("unique:a") is RequestPurpose.KEYS
    assert of_query("PENDING#reports.3") is RequestPurpose.POLL
    assert of_query("BLOCKED@api") is RequestPurpose.LIMITS
    assert of_query("RUNNING") is RequestPurpose.SWEEP
    assert of_query("AGENT") is RequestPurpose.REGISTRY
    assert StatusValue.parse("BLOCKED@api").waitlist == "api"
