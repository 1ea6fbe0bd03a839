"""The page of metrics says what the list says; to write it anew: `python -m tests.docs.test_metrics`."""

from __future__ import annotations

import re
from pathlib import Path

from thunderagent.stores.purposes import MEANING
from thunderagent.telemetry.dashboard import ALARMS
from thunderagent.telemetry.metrics import METRICS, Group, Kind
from thunderagent.telemetry.prices import METRIC_DOLLARS, PUT_DOLLARS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def metrics_tables() -> str:
    """A table for each group of metrics."""
    parts = []
    for group in Group:
        lines = [f"### {group}", "", "| CloudWatch, Prometheus | kind | by | meaning |", "|---|---|---|---|"]
        for metric in METRICS:
            if metric.group is group:
                by = ", ".join(f"`{dimension}`" for dimension in metric.dimensions)
                kind = f"{metric.kind}" + (", s" if metric.unit == "Seconds" else "")
                lines.append(f"| `{metric.cloudwatch}`<br>`{metric.prometheus}` | {kind} | {by} | {metric.help} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def purposes_table() -> str:
    """What units are counted under."""
    lines = ["| purpose | what for |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{purpose}` | {meaning} |" for purpose, meaning in MEANING.items())])


def alarms_table() -> str:
    """Where to begin with alarms."""
    lines = ["| metric | alarm when | what it means, where to look |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{one.metric.cloudwatch}` | {one.text} | {one.why} |" for one in ALARMS)])


def cost_table() -> str:
    """What CloudWatch asks for in a month, for the agents, queues and jobs of some fleets."""
    lines = ["| agents | queues | jobs | metrics, at most | metrics, $ | requests, $ |", "|---|---|---|---|---|---|"]
    for agents, queues, jobs in ((1, 1, 3), (4, 3, 10), (50, 10, 40)):
        number = metrics_sent(queues, jobs)
        requests = agents * 30.42 * 24 * 60 / 1000 * PUT_DOLLARS
        lines.append(f"| {agents} | {queues} | {jobs} | {number} | {number * METRIC_DOLLARS:.0f} | {requests:.2f} |")
    return "\n".join(lines)


def metrics_sent(queues: int, jobs: int) -> int:
    """Different metrics if every one of them has something to say in every hour; three reasons of throttles, and no
    canary."""
    numbers = {"Queue": queues, "Job": jobs, "Purpose": len(MEANING), "Reason": 3, "Target": 0}
    return sum(1 if metric.dimension is None else numbers[metric.dimension] for metric in METRICS)


PARTS = {"metrics": metrics_tables, "purposes": purposes_table, "alarms": alarms_table, "cost": cost_table}


def _part(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: .*? -->\n)(.*?)(\n<!-- end of {name} -->)", flags=re.DOTALL)


def test_the_tables_of_the_page_are_made_of_the_lists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        found = _part(name).search(text)
        assert found, f"there is no part {name}"
        assert found.group(2) == make(), f"{name} is not up to date: run python -m tests.docs.test_metrics"


def test_every_metric_is_on_the_page_with_both_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for metric in METRICS:
        assert f"`{metric.cloudwatch}`<br>`{metric.prometheus}`" in text


def test_a_fleet_without_streams_sends_fewer_metrics_than_the_page_says() -> None:
    assert metrics_sent(1, 1) < metrics_sent(2, 1) < metrics_sent(2, 2)
    assert {metric.kind for metric in METRICS} == set(Kind)


def _renewed(text: str) -> str:
    for name, make in PARTS.items():
        found = _part(name).search(text)
        assert found
        text = text[: found.start(2)] + make() + text[found.end(2) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(_renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
