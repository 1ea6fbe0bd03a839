"""`weather.import`: check a file of daily weather, from disk or S3, and write one clean CSV file a month."""

from __future__ import annotations

from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from jobs.files import write_atomically
from jobs.source import BadSource, rows
from jobs.weather import Day, month_file, month_text
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

BAD_SHARE: Final = 0.05
TOLD_PROBLEMS: Final = 10


class ImportPayload(BaseModel):
    """What to read, a path or `s3://bucket/key`, and the folder for the clean months."""

    source: str
    folder: Path


class ImportResult(BaseModel):
    """Good rows, the months written, and how many rows were left out, with the first reasons."""

    rows: int
    months: list[str]
    skipped: int
    problems: list[str]


@job("weather.import", timeout_s=600, fatal=(BadSource,))
def import_weather(ctx: Context, payload: ImportPayload) -> ImportResult:
    """Each file is replaced as a whole: a second run, or two at once, leave the same files."""
    days, problems = _check_rows(ctx, payload.source)
    months: dict[str, list[Day]] = defaultdict(list)
    for day in days:
        months[f"{day.date:%Y-%m}"].append(day)
    for month, its_days in sorted(months.items()):
        ctx.check()
        ctx.progress({"step": "write", "month": month, "months": len(months)})
        write_atomically(month_file(payload.folder, month), month_text(its_days))
    told = problems[:TOLD_PROBLEMS]
    return ImportResult(rows=len(days), months=sorted(months), skipped=len(problems), problems=told)


def _check_rows(ctx: Context, source: str) -> tuple[list[Day], list[str]]:
    days: dict[date, Day] = {}
    problems: list[str] = []
    for number, (line, row) in enumerate(rows(source)):
        if number % 100 == 0:
            ctx.check()
            ctx.progress({"step": "check", "rows": number})
        try:
            day = Day.from_row(row)
            if day.date in days:
                raise ValueError(f"{day.date} is there twice")
            days[day.date] = day
        except ValueError as problem:
            problems.append(f"line {line}: {problem}")
    total = len(days) + len(problems)
    if not days or len(problems) > BAD_SHARE * total:
        raise BadSource(f"{len(problems)} of {total} rows are bad: {'; '.join(problems[:TOLD_PROBLEMS])}")
    return list(days.values()), problems
