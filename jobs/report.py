"""`report.build`: an HTML report of one month's weather."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from pydantic import BaseModel, Field

from jobs.charts import bar_chart, line_chart
from jobs.files import file_name, write_atomically
from jobs.pages import chart, figures, page, table
from jobs.weather import Day, read_month
from thunderagent.jobs.context import Context, Snooze
from thunderagent.jobs.job import job


class ReportPayload(BaseModel):
    """A month such as `2012-07`, and the folder with the clean months, where the report goes too."""

    month: str = Field(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$")
    folder: Path


class ReportResult(BaseModel):
    """Where the report is, and its key figures."""

    month: str
    path: Path
    days: int
    mean_c: float
    rain_mm: float
    hottest_day: date
    hottest_c: float


class BadMonth(Exception):
    """The month's file is not what `weather.import` writes; another try would find the same."""


@job("report.build", queue="reports", max_retry=5, timeout_s=600, fatal=(BadMonth,))
def build_report(ctx: Context, payload: ReportPayload) -> ReportResult | Snooze:
    """The file is named after the task and replaced as a whole, so a second run does no harm."""
    try:
        days = read_month(payload.folder, payload.month)
    except FileNotFoundError:
        return Snooze(5)
    except ValueError as error:
        raise BadMonth(str(error)) from error
    ctx.check()
    hottest = max(days, key=lambda day: day.high_c)
    result = ReportResult(
        month=payload.month,
        path=(payload.folder / file_name(ctx.task_id, ".html")).absolute(),
        days=len(days),
        mean_c=round(sum(day.mean_c for day in days) / len(days), 1),
        rain_mm=round(sum(day.rain_mm for day in days), 1),
        hottest_day=hottest.date,
        hottest_c=hottest.high_c,
    )
    write_atomically(result.path, _html(result, days, ctx.task_id))
    return result


def _html(result: ReportResult, days: list[Day], task_id: str) -> str:
    facts = [
        ("Mean temperature", f"{result.mean_c:.1f} °C", "middle of highest and lowest"),
        ("Hottest day", f"{result.hottest_c:.1f} °C", f"{result.hottest_day:%A} {result.hottest_day.day}"),
        ("Rain", f"{result.rain_mm:.1f} mm", f"on {sum(d.rain_mm > 0 for d in days)} of {len(days)} days"),
    ]
    x = [str(day.date.day) for day in days]
    warmth = {"Highest": [day.high_c for day in days], "Lowest": [day.low_c for day in days]}
    cells = [(f"{d.date:%a} {d.date.day}", d.high_c, d.low_c, d.rain_mm, d.wind_ms, d.weather) for d in days]
    parts = [
        figures(facts),
        chart("Temperature", line_chart("Temperature by day in °C", x, warmth, "°C")),
        chart("Rain", bar_chart("Rain by day in mm", x, {"Rain": [day.rain_mm for day in days]}, "mm")),
        table("Day by day", ("Day", "Highest °C", "Lowest °C", "Rain mm", "Wind m/s", "Weather"), cells),
    ]
    return page(f"Weather in {result.hottest_day:%B %Y}", f"{len(days)} days", parts, f"Made by task {task_id}")
