"""Commands on metrics: metrics, dashboard."""

from __future__ import annotations

import json
import os
from typing import Annotated, Final

import typer
from rich.markup import escape

from thunderagent.cli.output import JsonOption, errors, make_table, out, tell
from thunderagent.model.errors import ConfigurationError
from thunderagent.settings import load_settings
from thunderagent.telemetry.dashboard import dashboard as make_dashboard
from thunderagent.telemetry.metrics import METRICS

WIDE: Final = 120
"""Columns of a terminal that has room for kind, unit and dimension beside the names and the meaning."""


def metrics(as_json: JsonOption = False) -> None:
    """List the metrics of agents: what each means, its unit, and its names in CloudWatch and Prometheus."""
    if as_json:
        listed = [
            {
                "name": metric.name,
                "kind": str(metric.kind),
                "unit": str(metric.unit),
                "dimension": None if metric.dimension is None else str(metric.dimension),
                "dimensions": [str(dimension) for dimension in metric.dimensions],
                "cloudwatch": metric.cloudwatch,
                "prometheus": metric.prometheus,
                "of_fleet": metric.of_fleet,
                "meaning": metric.help,
            }
            for metric in METRICS
        ]
        tell(listed, True)
        return
    facts = ("kind", "unit", "by") if out.width >= WIDE else ()
    table = make_table("CloudWatch, Prometheus", *facts, ids=[one.prometheus for one in METRICS])
    table.add_column("meaning", ratio=1)
    for metric in METRICS:
        by = ", ".join(metric.dimensions).lower()
        told = (metric.kind, metric.unit.lower(), by) if facts else ()
        short = "" if facts else f" [dim]({metric.kind}{' by ' * bool(by)}{by})[/dim]"
        table.add_row(f"{metric.cloudwatch}\n[dim]{metric.prometheus}[/dim]", *told, escape(metric.help) + short)
    out.print(table)


def dashboard(
    namespace: Annotated[
        str | None,
        typer.Option(help="Of the metrics, instead of THUNDERAGENT_CLOUDWATCH_NAMESPACE.", show_default=False),
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="AWS region of the metrics, instead of the store's.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the body of a CloudWatch dashboard of the metrics, with the thresholds of the alarms as lines.

    It is JSON, indented without --json. Give it to `aws cloudwatch put-dashboard --dashboard-body file://FILE`.
    """
    with errors():
        settings = load_settings(cloudwatch_namespace=namespace)
        if settings.cloudwatch_namespace is None:
            raise ConfigurationError(
                "no namespace is set: give --namespace, for example ThunderAgent, or THUNDERAGENT_CLOUDWATCH_NAMESPACE"
            )
        from thunderagent.telemetry.cloudwatch import cloudwatch_place  # boto3 is slow to import

        where = region or cloudwatch_place(settings.store)["region"] or os.environ.get("AWS_DEFAULT_REGION")
        if where is None:
            raise ConfigurationError("no region is known: give --region, for example eu-central-1")
        typer.echo(json.dumps(make_dashboard(settings.cloudwatch_namespace, where), indent=None if as_json else 2))
