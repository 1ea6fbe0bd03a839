"""When a periodic job is due: a spec as a value, and the ticks that it gives.

A spec is a fixed set of moments in whole epoch seconds: every agent finds the same ticks, whenever it asks. It is data
too: `to_data` and `spec_of` are each other's inverse.

* Seconds, minutes and hours are counted in UTC from the epoch: `every(7).minutes` are the multiples of 420 s. Neither
  the start of a process nor a change of the wall clock moves them.
* Days, weeks and weekdays are wall times of a zone. A time that does not come in spring ticks at the first moment after
  the gap; one that comes twice in autumn ticks the first time only.
* So does a cron expression with fixed seconds, minutes and hours. One with `*` in them ticks whenever the wall clock
  matches, so it goes on evenly through a change of the clock.

cronsim knows neither intervals that go on over an hour, a month or a year, nor seconds in its handling of gaps: so
`every` counts by itself, and `Cron` has cronsim walk on a wall without a zone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any, Final

from cronsim import CronSim, CronSimError

from thunderagent.model.arguments import shown
from thunderagent.model.crontab import read_line
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.zones import DAY_S, moment_of, next_turn, seconds_of, wall_time, zone_named

UNITS: Final[Mapping[str, int]] = {"seconds": 1, "minutes": 60, "hours": 3600, "days": DAY_S, "weeks": 7 * DAY_S}
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LONGEST_S: Final = 3660 * DAY_S
LAST_MOMENT: Final = 10_000_000_000
"""The year 2286: no right clock shows more."""

_FIRST_DAY: Final = date(1970, 1, 1).toordinal()
_FORMS: Final[Mapping[str, tuple[str, str]]] = {
    "minutes": (r":(?P<s>\d\d)", "':SS'"),
    "hours": (r"(?::(?P<m>\d\d)|(?P<mm>\d\d):(?P<s>\d\d))", "':MM' or 'MM:SS'"),
    "days": (r"(?P<h>\d\d?):(?P<m>\d\d)(?::(?P<s>\d\d))?", "'HH:MM' or 'HH:MM:SS'"),
}
_CRON_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class Every:
    """Every so many seconds, minutes, hours, days or weeks. Make one with `every`."""

    number: int
    unit: str
    weekday: int | None = None
    """Of weeks: 0 for Monday, the default, to 6."""
    at_s: int | None = None
    """Seconds after the begin of the unit."""
    zone: str = "UTC"
    """Of days and weeks."""

    def __post_init__(self) -> None:
        if self.unit not in UNITS or type(self.number) is not int:
            raise ConfigurationError(f"every({shown(self.number)}).{self.unit} is no interval: use {', '.join(UNITS)}")
        if not 1 <= self.number * UNITS[self.unit] <= LONGEST_S:
            raise ConfigurationError(f"every({shown(self.number)}).{self.unit} is not between one second and ten years")
        if self.weekday is not None and (self.unit != "weeks" or self.weekday not in range(7)):
            raise ConfigurationError(f"{self.weekday!r} of every({self.number}).{self.unit} is no day of a week")
        if self.at_s is not None and not (type(self.at_s) is int and 0 <= self.at_s < min(UNITS[self.unit], DAY_S)):
            raise ConfigurationError(f"{self.at_s!r} is no second of {self.unit}")
        if self._on_the_wall and isinstance(self.zone, str):
            zone_named(self.zone)
        elif self.zone != "UTC":
            raise ConfigurationError(f"{self.unit} are counted in UTC: leave the zone {self.zone!r} out, or use days")

    def at(self, text: str, zone: str | None = None) -> Every:
        """The same at a time.

        Args:
            text: `"HH:MM"` or `"HH:MM:SS"` of days and weeks, `":MM"` or `"MM:SS"` of hours, `":SS"` of minutes.
            zone: of days and weeks.

        Raises:
            ConfigurationError: there is no such time, or no such zone.
        """
        pattern, forms = _FORMS.get("days" if self._on_the_wall else self.unit, ("", ""))
        found = re.fullmatch(pattern, text) if pattern and isinstance(text, str) else None
        parts = {name: int(value) for name, value in found.groupdict().items() if value} if found else {}
        hours, minutes, seconds = parts.get("h", 0), parts.get("m", parts.get("mm", 0)), parts.get("s", 0)
        if found is None or hours > 23 or minutes > 59 or seconds > 59:
            wrong = "there is no such time; " if found else ""
            hint = f"{wrong}write {forms}" if forms else "seconds have no time"
            raise ConfigurationError(f".at({shown(text)}) does not fit {self.unit}: {hint}")
        return replace(self, at_s=(hours * 60 + minutes) * 60 + seconds, zone=self.zone if zone is None else zone)

    def next(self, after: int) -> int:
        """The first tick after this second."""
        if self._on_the_wall:
            zone = zone_named(self.zone)
            return next(moment for day in self._days(after, zone) if (moment := self._moment(day, zone)) > after)
        period, offset = self.number * UNITS[self.unit], self.at_s or 0
        return ((after - offset) // period + 1) * period + offset

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"every": self.number, "unit": self.unit}
        data |= {"weekday": self.weekday} if self.weekday is not None else {}
        data |= {"at": self.at_s} if self.at_s is not None else {}
        return data | ({"zone": self.zone} if self._on_the_wall else {})

    @property
    def shortest_s(self) -> int:
        """Least seconds between two ticks."""
        return self.number * UNITS[self.unit] - (DAY_S // 2 if self._on_the_wall else 0)

    def __str__(self) -> str:
        """For people: `every 2 weeks on Friday at 09:30 Europe/Berlin`."""
        one = WEEKDAYS[self.weekday or 0] if self.unit == "weeks" else self.unit.removesuffix("s")
        text = f"every {one}" if self.number == 1 else f"every {self.number} {self.unit}"
        if self.unit == "weeks" and self.number > 1:
            text += f" on {one}"
        if self._on_the_wall:
            return f"{text} at {time_text(self.at_s or 0)} {self.zone}"
        if self.at_s is None:
            return text
        return text + (
            f" at :{self.at_s:02d}"
            if self.unit == "minutes"
            else f" at {time_text(self.at_s)[-5:]}"
            if self.at_s % 60
            else f" at :{self.at_s // 60:02d}"
        )

    @property
    def _on_the_wall(self) -> bool:
        return self.unit in ("days", "weeks")

    def _days(self, after: int, zone: tzinfo) -> Iterator[int]:
        """Numbers of days since the epoch, from the day before: a time that it lacks may tick after its end."""
        first = wall_time(after, zone).date().toordinal() - _FIRST_DAY - 1
        shift = (self.weekday or 0) - 3 if self.unit == "weeks" else 0  # the epoch was a Thursday
        step = self.number * (7 if self.unit == "weeks" else 1)
        day = first + (shift - first) % step
        while True:
            yield day
            day += step

    def _moment(self, day: int, zone: tzinfo) -> int:
        at = datetime.combine(date.fromordinal(_FIRST_DAY + day), time()) + timedelta(seconds=self.at_s or 0)
        return moment_of(at, zone)


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression on the wall of a zone. Make one with `cron`."""

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        zone_named(self.zone)
        _check_cron(self.expression)
        object.__setattr__(self, "expression", " ".join(self.expression.upper().split()))
        try:
            next(CronSim(self.expression, datetime(2000, 1, 1)))
        except CronSimError as error:
            if self._never_comes():
                raise ConfigurationError(
                    f"the cron expression {self.expression!r} never matches: the day {self._days[0]} never comes in "
                    f"the month {self.expression.split()[-2]}; L is the last day of a month"
                ) from None
            raise ConfigurationError(
                f"the cron expression {self.expression!r} cannot be read: {error}; it has minute (0-59), hour (0-23), "
                "day of month (1-31), month (1-12 or JAN-DEC) and day of week (0-7 or SUN-SAT), as in "
                "'0 2 * * MON-FRI', and may have seconds before them"
            ) from None
        except StopIteration:
            raise ConfigurationError(f"the cron expression {self.expression!r} never matches") from None

    def next(self, after: int) -> int:
        """The first tick after this second."""
        zone = zone_named(self.zone)
        if self._is_fixed:
            matches = CronSim(self.expression, wall_time(after, zone))
            return next(moment for match in matches if (moment := moment_of(match, zone)) > after)
        while True:
            wall = wall_time(after + 1, zone)
            tick = (
                after + 1 + seconds_of(next(CronSim(self.expression, wall - timedelta(seconds=1)))) - seconds_of(wall)
            )
            turn = next_turn(after + 1, tick, zone)
            if turn is None:
                return tick
            after = turn - 1

    def to_data(self) -> dict[str, Any]:
        return {"cron": self.expression, "zone": self.zone}

    @property
    def shortest_s(self) -> int:
        """Least seconds between two ticks; half of an hour or a day that a change of the clock may shorten."""
        *seconds, minute, hour, _, _, _ = self.expression.split()
        if seconds and not seconds[0].isdecimal():
            return 1
        if not minute.isdecimal():
            return 60
        return DAY_S // 2 if hour.isdecimal() else 1800

    @property
    def _is_fixed(self) -> bool:
        """Whether the time of day is fixed: it ticks once whatever the wall clock does."""
        times = self.expression.split()[:-3]
        return not any(part.startswith("*") for part in times)

    @property
    def _days(self) -> tuple[str, str]:
        """The two fields of days: of the month, and of the week."""
        *_, day, _, weekday = self.expression.split()
        return day, weekday

    def _never_comes(self) -> bool:
        """Whether the days exist in some months, but not in these."""
        fields = self.expression.split()
        if len(fields) not in (5, 6):
            return False
        try:
            next(CronSim(" ".join([*fields[:-2], "*", fields[-1]]), datetime(2000, 1, 1)))
        except (CronSimError, StopIteration):
            return False
        return True

    def __str__(self) -> str:
        """For people, with what both fields of days mean together: `cron 0 0 13 * FRI UTC (day 13 or FRI)`."""
        day, weekday = self._days
        both = "and" if day.startswith("*") or weekday.startswith("*") else "or"
        meaning = "" if "*" in (day, weekday) else f" (day {day} {both} {weekday})"
        return f"cron {self.expression} {self.zone}{meaning}"


Spec = Every | Cron


@dataclass(frozen=True, slots=True)
class _Unit:
    """An attribute of `Count`: the spec of its number and this unit."""

    unit: str
    weekday: int | None = None
    is_one: bool = False

    def __get__(self, count: Count, owner: type[Count]) -> Every:
        if self.is_one and count.number != 1:
            raise ConfigurationError(f"every({count.number}) is more than one: write .{self.unit}")
        return Every(count.number, self.unit, self.weekday)


class Count:
    """`every(10)`, which needs its unit.

    Days and weeks are counted from 1 January 1970 and its Monday. They begin at midnight, and weeks on Monday.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    second, seconds = _Unit("seconds", is_one=True), _Unit("seconds")
    minute, minutes = _Unit("minutes", is_one=True), _Unit("minutes")
    hour, hours = _Unit("hours", is_one=True), _Unit("hours")
    day, days = _Unit("days", is_one=True), _Unit("days")
    week, weeks = _Unit("weeks", is_one=True), _Unit("weeks")
    monday, tuesday, wednesday = _Unit("weeks", 0), _Unit("weeks", 1), _Unit("weeks", 2)
    thursday, friday = _Unit("weeks", 3), _Unit("weeks", 4)
    saturday, sunday = _Unit("weeks", 5), _Unit("weeks", 6)


def every(number: int = 1) -> Count:
    """A spec in words: `every(10).minutes`, `every().hour.at(":15")`, `every(2).weeks`,
    `every().monday.at("09:30")`."""
    return Count(number)


def cron(expression: str, zone: str | None = None) -> Cron:
    """A spec as a cron expression: minute, hour, day of month, month, day of week, and seconds before them if there are
    six.

    Lines of crontabs, of Quartz and of AWS are taken where their meaning is certain: `@daily`, `?`, `FRI-MON`,
    `CRON_TZ=Europe/Berlin 0 2 * * *`, `cron(0 12 * * ? *)`. With both fields of days set, a day that fits either is
    enough, unless one of them begins with `*`.

    Args:
        expression: the fields, or such a line.
        zone: on whose wall it ticks; None: that of the line, else UTC.

    Raises:
        ConfigurationError: it cannot be read, is not certain, never matches, or the zone is unknown.
    """
    _check_cron(expression)
    fields, of_line = read_line(expression)
    if zone is not None and of_line is not None and zone != of_line:
        raise ConfigurationError(f"the cron line {expression!r} names a zone of its own: leave out {zone!r}")
    return Cron(fields, (of_line or "UTC") if zone is None else zone)


def _check_cron(expression: object) -> None:
    if not isinstance(expression, str) or not expression.strip() or len(expression) > _CRON_LENGTH:
        raise ConfigurationError(f"{shown(expression)} is no cron expression: write for example '0 2 * * MON-FRI'")


def spec_of(data: Mapping[str, Any]) -> Spec:
    """The spec that `to_data` gave.

    Raises:
        ConfigurationError: this version does not know it.
    """
    match dict(data):
        case {"cron": str(expression), "zone": str(zone), **rest} if not rest:
            return Cron(expression, zone)
        case {"every": int(number), "unit": str(unit), **rest} if not rest.keys() - {"weekday", "at", "zone"}:
            return Every(number, unit, rest.get("weekday"), rest.get("at"), rest.get("zone", "UTC"))
    raise ConfigurationError(f"{dict(data)!r:.200} is no spec that this version knows: upgrade it")


def between(spec: Spec, after: float, until: float, *, most: int) -> list[int]:
    """The first `most` ticks after `after`, up to and with `until`, oldest first."""
    ticks: list[int] = []
    last, end = int(after // 1), int(min(until, LAST_MOMENT) // 1)
    while len(ticks) < most and last < end and (tick := spec.next(last)) <= end:
        ticks.append(last := tick)
    return ticks


def newest(spec: Spec, after: float, until: float) -> int | None:
    """The last tick after `after`, up to and with `until`, in a few dozen steps however many there are."""
    start, end = int(after // 1), int(min(until, LAST_MOMENT) // 1)
    if start >= end or spec.next(start) > end:
        return None
    step = 64
    while spec.next(low := max(start, end - step)) > end:
        step *= 8
    high = end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spec.next(middle) <= end else (low, middle)
    return spec.next(low)


def time_text(seconds: int) -> str:
    """Seconds of a day as a time: `09:30`, or `09:30:15`."""
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return text.removesuffix(":00") if seconds % 60 == 0 and seconds < DAY_S else text
