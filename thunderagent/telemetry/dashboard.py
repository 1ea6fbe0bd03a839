"""The alarms on metrics, as data, and a CloudWatch dashboard of the metrics that agents send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.telemetry import metrics
from thunderagent.telemetry.metrics import METRICS, Group, Kind, Metric
from thunderagent.telemetry.prices import READ_DOLLARS, WRITE_DOLLARS


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A threshold that is crossed for some minutes in a row. Missing data is no alarm unless `missing_is_bad`."""

    metric: Metric
    statistic: str
    """As CloudWatch calls it: Sum, Maximum, Minimum, p99."""
    above: float | None = None
    below: float | None = None
    minutes: int
    why: str
    """Its meaning, and where to look first."""
    missing_is_bad: bool = False

    @property
    def threshold(self) -> float:
        return self.above if self.above is not None else (self.below or 0.0)

    @property
    def text(self) -> str:
        """In words: `Maximum > 300 for 5 min`."""
        sign, number = (">", self.above) if self.above is not None else ("<", self.below)
        missing = ", or no data" if self.missing_is_bad else ""
        return f"{self.statistic} {sign} {number:g} for {self.minutes} min{missing}"


ALARMS: Final[tuple[Alarm, ...]] = (
    Alarm(
        metric=metrics.OLDEST_READY_AGE,
        statistic="Maximum",
        above=300.0,
        minutes=5,
        why="Nobody takes the tasks of a queue, or it needs more slots: `thunderagent stats`, `agents` and `pauses`.",
    ),
    Alarm(
        metric=metrics.HEALTHY,
        statistic="Minimum",
        below=1.0,
        minutes=5,
        missing_is_bad=True,
        why="An agent is not healthy, or none is left: `thunderagent agents`, and the log line `health has changed`.",
    ),
    Alarm(
        metric=metrics.CANARY_HEALTHY,
        statistic="Average",
        below=0.51,
        minutes=2,
        missing_is_bad=True,
        why="With a canary: users cannot use the API of a region, or nobody looks: `thunderagent canary`.",
    ),
    Alarm(
        metric=metrics.CANARY_BLIND,
        statistic="Maximum",
        above=0.0,
        minutes=5,
        why="The canary cannot judge, so nothing moves: users use up the throttle, or it has no token that counts.",
    ),
    Alarm(
        metric=metrics.CANARY_TOKEN_DAYS,
        statistic="Minimum",
        below=7.0,
        minutes=5,
        why="The canary's token is over soon: replace it where `THUNDERAGENT_CANARY_TOKEN_FROM` has it from.",
    ),
    Alarm(
        metric=metrics.TASKS_GIVEN_UP,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A task took several agents with it: its job kills the process, mostly by its memory.",
    ),
    Alarm(
        metric=metrics.TASKS_FAILED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="Tasks are FAILED and stay so: `thunderagent list --status FAILED`, repair, `thunderagent retry`.",
    ),
    Alarm(
        metric=metrics.LEASES_LOST,
        statistic="Sum",
        above=5.0,
        minutes=5,
        why="Agents lose their leases: the network, a machine without CPU, or a handler that blocks the process.",
    ),
    Alarm(
        metric=metrics.TASKS_TAKEN_OVER,
        statistic="Sum",
        above=10.0,
        minutes=5,
        why="Agents are lost: killed by memory, or stopped without their drain.",
    ),
    Alarm(
        metric=metrics.CLOCK_SKEW,
        statistic="Maximum",
        above=5.0,
        minutes=15,
        why="A host's clock is ahead. Leases are not affected; signatures of AWS fail from 5 minutes on.",
    ),
    Alarm(
        metric=metrics.CLOCK_SKEW,
        statistic="Minimum",
        below=-5.0,
        minutes=15,
        why="A host's clock is behind; as above.",
    ),
    Alarm(
        metric=metrics.STORE_FAILURES,
        statistic="Sum",
        above=10.0,
        minutes=5,
        why="The store does not answer, or refuses: the log line `store does not answer` has the reason.",
    ),
    Alarm(
        metric=metrics.THROTTLES,
        statistic="Sum",
        above=100.0,
        minutes=5,
        why="DynamoDB asks for less: with a reason of the index use more shards, of the account ask for more quota.",
    ),
    Alarm(
        metric=metrics.THREADS_DIED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A thread of an agent ended by an error; it was started again, or the agent ended: see its log.",
    ),
    Alarm(
        metric=metrics.STREAMS_WEDGED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A stream makes no progress and goes to another agent: `thunderagent streams explain ID`.",
    ),
)
"""Alarms to begin with; the numbers for queue age and throttles depend on your promises."""


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
    """The statistic that combines the values of several agents."""
    if metric.kind is Kind.COUNTER:
        return "Sum"
    if metric.kind is Kind.DISTRIBUTION:
        return "p99"
    if metric.of_fleet or metric is metrics.CLOCK_SKEW or metric is metrics.CANARY_BLIND:
        return "Maximum"
    if metric is metrics.CANARY_HEALTHY:
        return "Average"
    return "Minimum" if metric in (metrics.HEALTHY, metrics.CANARY_TOKEN_DAYS) else "Sum"


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
    """All values of the metric's dimension."""
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
