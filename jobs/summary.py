"""`report.summary`: one HTML page over all the reports it depends on."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel

from jobs.charts import bar_chart, line_chart
from jobs.files import file_name, write_atomically
from jobs.pages import Markup, chart, figures, link, page, table
from jobs.report import ReportResult
from thunderagent.jobs.context import Context, Fail
from thunderagent.jobs.job import job


class SummaryPayload(BaseModel):
    """A title, and the folder for the page."""

    title: str
    folder: Path


class SummaryResult(BaseModel):
    """Where the page is, and the totals."""

    path: Path
    reports: int
    days: int
    mean_c: float
    rain_mm: float


@job("report.summary", queue="reports")
def build_summary(ctx: Context, payload: SummaryPayload) -> SummaryResult | Fail:
    """Read the results of the reports, not their files: a dependency is enough to hand data on."""
    results = [ReportResult.model_validate(one) for one in ctx.parent_results().values() if one is not None]
    reports = sorted(results, key=lambda report: report.month)
    if not reports:
        return Fail("there is no report to sum up: enqueue the task with depends_on=[report, …]")
    days = sum(report.days for report in reports)
    result = SummaryResult(
        path=(payload.folder / file_name(ctx.task_id, ".html")).absolute(),
        reports=len(reports),
        days=days,
        mean_c=round(sum(report.mean_c * report.days for report in reports) / days, 1),
        rain_mm=round(sum(report.rain_mm for report in reports), 1),
    )
    write_atomically(result.path, _html(payload.title, result, reports, ctx.task_id))
    return result


def _html(title: str, result: SummaryResult, reports: list[ReportResult], task_id: str) -> str:
    hottest = max(reports, key=lambda report: report.hottest_c)
    wettest = max(reports, key=lambda report: report.rain_mm)
    facts = [
        ("Mean temperature", f"{result.mean_c:.1f} °C", f"over {result.days} days"),
        ("Hottest day", f"{hottest.hottest_c:.1f} °C", _day(hottest)),
        ("Rain", f"{result.rain_mm:.1f} mm", f"most in {wettest.hottest_day:%B %Y}"),
    ]
    x = [f"{one.hottest_day:%b %y}" for one in reports]
    warmth = {"Hottest day": [one.hottest_c for one in reports], "Mean": [one.mean_c for one in reports]}
    cells = [(_link(one, result), one.mean_c, one.rain_mm, one.hottest_c, _day(one)) for one in reports]
    parts = [
        figures(facts),
        chart("Temperature", line_chart("Temperature by month in °C", x, warmth, "°C")),
        chart("Rain", bar_chart("Rain by month in mm", x, {"Rain": [one.rain_mm for one in reports]}, "mm")),
        table("Reports", ("Month", "Mean °C", "Rain mm", "Hottest °C", "Hottest day"), cells),
    ]
    return page(title, f"{len(reports)} monthly reports", parts, f"Made by task {task_id}")


def _link(report: ReportResult, result: SummaryResult) -> Markup:
    return link(quote(os.path.relpath(report.path, result.path.parent)), f"{report.hottest_day:%B %Y}")


def _day(report: ReportResult) -> str:
    return f"{report.hottest_day:%a} {report.hottest_day.day} {report.hottest_day:%B}"
