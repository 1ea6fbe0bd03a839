"""The weather of one day, and the file of clean days of one month."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

COLUMNS: Final = ("date", "precipitation", "temp_max", "temp_min", "wind", "weather")


@dataclass(frozen=True, slots=True)
class Day:
    """One day; rain in mm, temperatures in °C, wind in m/s."""

    date: date
    rain_mm: float
    high_c: float
    low_c: float
    wind_ms: float
    weather: str

    @property
    def mean_c(self) -> float:
        """Middle of the highest and the lowest temperature."""
        return (self.high_c + self.low_c) / 2

    @classmethod
    def from_row(cls, row: Mapping[str, str | None]) -> Day:
        """The day that a row describes; ValueError tells which value is missing or impossible."""
        when, *numbers, weather = ((row.get(name) or "").strip() for name in COLUMNS)
        rain, high, low, wind = (_number(*pair) for pair in zip(COLUMNS[1:5], numbers, strict=True))
        if high < low:
            raise ValueError(f"temp_max {high:g} is under temp_min {low:g}")
        if rain < 0 or wind < 0:
            raise ValueError("precipitation and wind cannot be negative")
        if not weather:
            raise ValueError("weather is empty")
        return cls(date.fromisoformat(when.replace("/", "-")), rain, high, low, wind, weather)


def month_file(folder: Path, month: str) -> Path:
    """Where the clean days of a month such as `2012-07` are."""
    return folder / f"weather-{month}.csv"


def month_text(days: Iterable[Day]) -> str:
    """The days as CSV text in the order of their dates."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for day in sorted(days, key=lambda day: day.date):
        writer.writerow((day.date, day.rain_mm, day.high_c, day.low_c, day.wind_ms, day.weather))
    return text.getvalue()


def read_month(folder: Path, month: str) -> list[Day]:
    """The days that `weather.import` left; ValueError for anything that is not a day of this month."""
    with month_file(folder, month).open(encoding="utf-8", newline="") as file:
        days = [Day.from_row(row) for row in csv.DictReader(file)]
    if not days or any(f"{day.date:%Y-%m}" != month for day in days):
        raise ValueError(f"{month_file(folder, month)} must hold days of {month} and nothing else")
    return days


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text!r}, not a number")
    return number
