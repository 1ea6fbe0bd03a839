"""The dashboard is made of the list of metrics, and is one that CloudWatch takes."""

from __future__ import annotations

import json
import re
from typing import Any

from thunderagent.telemetry import metrics
from thunderagent.telemetry.dashboard import ALARMS, dashboard
from thunderagent.telemetry.metrics import METRICS, Dimension

BODY = dashboard("Shop/Tasks", "eu-central-1")
WIDGETS: list[dict[str, Any]] = [widget for widget in BODY["widgets"] if widget["type"] == "metric"]


def test_every_metric_has_a_widget_of_its_own_in_the_order_of_the_list() -> None:
    titles = [widget["properties"]["title"].partition(" (")[0] for widget in WIDGETS]
    assert titles == [metric.name for metric in METRICS]
    for metric, widget in zip(METRICS, WIDGETS, strict=True):
        assert metric is metrics.COST or metric.cloudwatch in json.dumps(widget["properties"]["metrics"])


def test_widgets_fill_the_grid_and_none_covers_another() -> None:
    taken = set[tuple[int, int]]()
    for widget in BODY["widgets"]:
        assert widget["x"] >= 0 and widget["x"] + widget["width"] <= 24
        cells = {
            (widget["x"] + column, widget["y"] + row)
            for column in range(widget["width"])
            for row in range(widget["height"])
        }
        assert not cells & taken
        taken |= cells


def test_values_of_a_dimension_are_searched_for_in_the_namespace() -> None:
    for metric, widget in zip(METRICS, WIDGETS, strict=True):
        if metric.dimension is None or metric is metrics.COST:
            continue
        [[row]] = widget["properties"]["metrics"]
        found = re.fullmatch(
            r"""SEARCH\('\{"Shop/Tasks",([\w",]+)\} MetricName="(\w+)"', '(\w+)', 60\)""", row["expression"]
        )
        assert found and found.group(2) == metric.cloudwatch
        assert tuple(Dimension(name.strip('"')) for name in found.group(1).split(",")) == metric.dimensions


def test_rows_and_expressions_have_the_form_that_cloudwatch_takes() -> None:
    for widget in WIDGETS:
        properties = widget["properties"]
        assert properties["region"] == "eu-central-1"
        assert properties["metrics"]
        ids = [row[-1]["id"] for row in properties["metrics"] if "id" in row[-1]]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch(r"[a-z][A-Za-z0-9_]*", one) for one in ids)
        for row in properties["metrics"]:
            assert len(row) == 1 or row[:1] == ["Shop/Tasks"]


def test_the_thresholds_of_the_alarms_are_lines() -> None:
    lines = [
        (metric, line["value"])
        for metric, widget in zip(METRICS, WIDGETS, strict=True)
        for line in widget["properties"].get("annotations", {}).get("horizontal", [])
    ]
    assert sorted(lines, key=repr) == sorted(((alarm.metric, alarm.threshold) for alarm in ALARMS), key=repr)


def test_of_agents_that_measure_for_the_fleet_the_largest_counts() -> None:
    by_name = {metric: widget["properties"]["stat"] for metric, widget in zip(METRICS, WIDGETS, strict=True)}
    assert by_name[metrics.QUEUE_DEPTH] == by_name[metrics.OLDEST_READY_AGE] == "Maximum"
    assert by_name[metrics.TASKS_SUCCEEDED] == by_name[metrics.SLOTS] == "Sum"
    assert by_name[metrics.HEALTHY] == "Minimum"
    assert by_name[metrics.RUN_TIME] == "p99"
