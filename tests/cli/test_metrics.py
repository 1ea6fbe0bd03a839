"""`thunderagent metrics` and `thunderagent dashboard`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from thunderagent.cli import app, output
from thunderagent.telemetry.metrics import METRICS


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_metrics_lists_each_with_kind_unit_dimension_and_meaning() -> None:
    code, out, _ = run("metrics", "--json")
    listed = json.loads(out)
    assert code == 0
    assert [one["cloudwatch"] for one in listed] == [metric.cloudwatch for metric in METRICS]
    [depth] = [one for one in listed if one["name"] == "queue depth"]
    assert depth == {
        "name": "queue depth",
        "kind": "gauge",
        "unit": "Count",
        "dimension": "Queue",
        "dimensions": ["Queue"],
        "cloudwatch": "QueueDepth",
        "prometheus": "thunderagent_queue_depth",
        "of_fleet": True,
        "meaning": depth["meaning"],
    }
    assert depth["meaning"].startswith("Tasks that are ready")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_terminal_shows_both_names_of_every_metric(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(output.out, "width", width)
    code, out, _ = run("metrics")
    assert code == 0
    assert all(metric.cloudwatch in out for metric in METRICS)
    assert all(metric.prometheus in out for metric in METRICS)
    assert out.count("counter") >= len([one for one in METRICS if one.kind == "counter"])


def test_dashboard_prints_a_body_for_the_namespace_and_region() -> None:
    code, out, _ = run("dashboard", "--namespace", "Shop", "--region", "eu-west-3")
    body = json.loads(out)
    assert code == 0
    widgets = [widget["properties"] for widget in body["widgets"] if widget["type"] == "metric"]
    assert len(widgets) == len(METRICS)
    assert {widget["region"] for widget in widgets} == {"eu-west-3"}
    assert "Shop" in json.dumps(widgets[0]["metrics"])


def test_dashboard_takes_both_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "dynamodb://TaskTable?region=eu-west-2")
    monkeypatch.setenv("THUNDERAGENT_CLOUDWATCH_NAMESPACE", "Shop")
    code, out, _ = run("dashboard", "--json")
    assert code == 0
    assert out.count("\n") == 1
    assert '"region": "eu-west-2"' in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no namespace is set"),
        (("--namespace", "Shop"), "no region is known"),
        (("--namespace", "AWS/EC2", "--region", "a"), "THUNDERAGENT_CLOUDWATCH_NAMESPACE is 'AWS/EC2'"),
    ],
)
def test_dashboard_says_what_it_needs(arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("dashboard", *arguments)
    assert code == 2
    assert message in err
