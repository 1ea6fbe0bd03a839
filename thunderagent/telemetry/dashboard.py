"""A dashboard of CloudWatch, made of the same list of metrics that agents send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from thunderagent.telemetry import metrics
from thunderagent.telemetry.alarms import ALARMS
from thunderagent.telemetry.metrics import METRICS, Group, Kind, Metric
from thunderagent.telemetry.prices import READ_DOLLARS, WRITE_DOLLARS

PERIOD_S: Final = 60
_COLUMNS: Final = 3
_WIDTH, _HEIGHT = 24 // _COLUMNS, 6

Widget = dict[str, Any]
Row = list[Any]


def dashboard(namespace: str, region: str) -> dict[str, Any]:
    """The body of a dashboard: a row of widgets for each group, with the thresholds of the alarms as lines."""
    widgets: list[Widget] = []
    top = 0
    for group in Group:
        members = [metric for metric in METRICS if metric.group is group]
        widgets.append(
            {"type": "text", "x": 0, "y": top, "width": 24, "height": 1, "properties": {"markdown": f"## {group}"}}
        )
        for number, metric in enumerate(members):
            row, column = divmod(number, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + 1 + row * _HEIGHT, "width": _WIDTH, "height": _HEIGHT}
            widgets.append({"type": "metric", **place, "properties": _properties(metric, namespace, region)})
        top += 1 + -(-len(members) // _COLUMNS) * _HEIGHT
    return {"start": "-PT3H", "periodOverride": "inherit", "widgets": widgets}


def statistic(metric: Metric) -> str:
    """The statistic by which the values of several agents are one."""
    if metric.kind is Kind.COUNTER:
        return "Sum"
    if metric.kind is Kind.DISTRIBUTION:
        return "p99"
    if metric.of_fleet or metric is metrics.CLOCK_SKEW:
        return "Maximum"
    if metric is metrics.CANARY_BLIND:
        return "Maximum"
    if metric is metrics.CANARY_TOKEN_DAYS:
        return "Minimum"
    if metric is metrics.CANARY_HEALTHY:
        return "Average"
    return "Minimum" if metric is metrics.HEALTHY else "Sum"


def _properties(metric: Metric, namespace: str, region: str) -> dict[str, Any]:
    lines = [
        {"label": f"alarm: {alarm.text}", "value": alarm.threshold, "color": "#d62728"}
        for alarm in ALARMS
        if alarm.metric is metric
    ]
    properties: dict[str, Any] = {
        "title": f"{metric.name} ({_unit(metric)})",
        "region": region,
        "view": "timeSeries",
        "stacked": metric.kind is Kind.COUNTER and metric.dimension is not None,
        "period": PERIOD_S,
        "stat": statistic(metric),
        "metrics": list(_rows(metric, namespace)),
    }
    if metric is not metrics.CLOCK_SKEW:
        properties["yAxis"] = {"left": {"min": 0}}
    if lines:
        properties["annotations"] = {"horizontal": lines}
    return properties


def _rows(metric: Metric, namespace: str) -> Iterator[Row]:
    if metric is metrics.COST:
        yield from _cost(namespace)
    elif metric is metrics.ACTIVE_CONNECTIONS:  # each agent sends two a minute
        yield [{"expression": "sent / 2", "label": metric.name, "id": "connections"}]
        yield [namespace, metric.cloudwatch, {"id": "sent", "visible": False}]
    elif metric is metrics.HEALTHY:  # each agent sends one a minute
        yield [namespace, metric.cloudwatch, {"label": "healthy: 1 when all are"}]
        yield [namespace, metric.cloudwatch, {"label": "agents", "stat": "SampleCount", "yAxis": "right"}]
    elif metric is metrics.CLOCK_SKEW:  # of the agents furthest ahead and furthest behind
        yield from ([namespace, metric.cloudwatch, {"label": stat, "stat": stat}] for stat in ("Maximum", "Minimum"))
    elif metric.dimension is not None:
        yield [{"expression": _search(metric, namespace, statistic(metric)), "label": "", "id": "all"}]
    elif metric.kind is Kind.DISTRIBUTION:
        yield from ([namespace, metric.cloudwatch, {"label": stat, "stat": stat}] for stat in ("p50", "p99"))
    else:
        yield [namespace, metric.cloudwatch, {"label": metric.name}]


def _search(metric: Metric, namespace: str, stat: str) -> str:
    """All values of the metric's dimension, whatever they are."""
    names = ",".join(f'"{dimension}"' for dimension in metric.dimensions)
    where = f'{{"{namespace}",{names}}} MetricName="{metric.cloudwatch}"'
    return f"SEARCH('{where}', '{stat}', {PERIOD_S})"


def _cost(namespace: str) -> Iterator[Row]:
    """Dollars of the whole fleet for each thousand tasks, from the units of all agents."""
    for name, metric in (
        ("reads", metrics.READ_UNITS),
        ("writes", metrics.WRITE_UNITS),
        ("succeeded", metrics.TASKS_SUCCEEDED),
        ("failed", metrics.TASKS_FAILED),
    ):
        expression = f"FILL(SUM({_search(metric, namespace, 'Sum')}), 0)"
        yield [{"expression": expression, "label": name, "id": name, "visible": False}]
    dollars = f"(reads * {READ_DOLLARS:g} + writes * {WRITE_DOLLARS:g}) / 1000000"
    yield [{"expression": f"{dollars} / (succeeded + failed) * 1000", "label": "dollars", "id": "dollars"}]


def _unit(metric: Metric) -> str:
    by = f", by {' and '.join(metric.dimensions).lower()}" if metric.dimensions else ""
    return f"{'value' if metric.unit is metrics.Unit.NONE else metric.unit.lower()}{by}"
