"""Cron lines of other programs, read into the five fields that cronsim knows, or six with seconds first.

A line is taken where its meaning is certain: nicknames, `?`, full names, ranges over the end, `CRON_TZ=`, `cron()` of
AWS, a year that says nothing. All else is refused with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thunderagent.model.errors import ConfigurationError

_DAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS: Final = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_LONG: Final[Mapping[str, str]] = {
    one: one[:3]
    for one in (
        *("SUNDAY", "MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY"),
        *("JANUARY", "FEBRUARY", "MARCH", "APRIL", "JUNE", "JULY", "AUGUST", "SEPTEMBER", "OCTOBER", "NOVEMBER"),
        "DECEMBER",
    )
}
_NICKNAMES: Final[Mapping[str, str]] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_UNITS: Final[Mapping[str, str]] = {"s": "seconds", "m": "minutes", "h": "hours"}


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a line; `unit` is the interval that a step over all of it may have meant."""

    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    unit: str | None = None

    def value(self, text: str) -> int | None:
        """The number of a value, None for a text that is no value of this field."""
        if text in self.names:
            return self.names.index(text) + self.first
        return int(text) if text.isdecimal() and text.isascii() else None


_SECOND: Final = _Field("second", 0, 59, unit="seconds")
_MINUTE: Final = _Field("minute", 0, 59, unit="minutes")
_HOUR: Final = _Field("hour", 0, 23, unit="hours")
_DAY: Final = _Field("day of the month", 1, 31, unit="days")
_MONTH: Final = _Field("month", 1, 12, _MONTHS)
_WEEKDAY: Final = _Field("day of the week", 0, 6, _DAYS)
_FIVE: Final = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)
_WORDS: Final = frozenset({*_DAYS, *_MONTHS, *_LONG, "L", "W", "LW", "H"})


def read_line(line: str) -> tuple[str, str | None]:
    """The fields of a line for cronsim, and its zone if the line names one.

    Raises:
        ConfigurationError: the meaning is not certain, or it is no cron line; the message has the remedy.
    """
    text = " ".join(line.split())
    zone = None
    if found := re.fullmatch(r"(?:CRON_)?TZ=(\S+) (.+)", text):
        zone, text = found[1], found[2]
    try:
        if text.startswith("@"):
            return _nickname(text), zone
        if found := re.fullmatch(r"(?i)(rate|at|cron)\((.*)\)", text):
            return _aws(found[1].lower(), found[2].strip()), zone
        return _fields(text), zone
    except ConfigurationError as problem:
        raise ConfigurationError(f"the cron line {line!r:.200} cannot be taken: {problem}") from None


def _nickname(text: str) -> str:
    name, _, rest = text.partition(" ")
    text = text.lower()
    if fields := _NICKNAMES.get(name.lower()):
        if rest:
            raise _leave_out(rest)
        return fields
    if found := re.fullmatch(r"@every (\d+)([smh])(?:0[ms])*", text):
        raise ConfigurationError(f"use {_every(int(found[1]), _UNITS[found[2]])}")
    if text.startswith("@every"):
        raise ConfigurationError("use every(…) with one unit, for example every(90).minutes for 1h30m")
    if name.lower() == "@reboot":
        raise ConfigurationError("no clock ticks at a start: enqueue the task where your machine starts")
    raise ConfigurationError(f"there are {', '.join(_NICKNAMES)}")


def _aws(kind: str, text: str) -> str:
    """The fields of `cron(…)` of AWS; its other two forms are no cron lines."""
    if kind == "at":
        raise ConfigurationError("a single moment is no schedule: use client.enqueue(…, run_at=…)")
    if kind == "rate":
        if found := re.fullmatch(r"(\d+) (minute|hour|day)s?", text):
            raise ConfigurationError(f"use {_every(int(found[1]), f'{found[2]}s')}")
        raise ConfigurationError("use every(…), for example every(5).minutes")
    fields = text.upper().split()
    if len(fields) != 6:
        raise ConfigurationError(
            f"it has {len(fields)} fields, and cron() of AWS has minute, hour, day, month, day of the week and year"
        )
    return _with_year(fields, counts_from_one=True)


def _fields(text: str) -> str:
    """Five fields, six with seconds first or a year last, or seven with both."""
    given = text.split()
    times = [one.upper() for one in given]
    if len(given) > 5 and all(map(_is_time, times[:5])):
        count = next((number for number, one in enumerate(times) if not _is_time(one)), len(times))
        if count < len(times) or count > 7:
            raise _leave_out(" ".join(given[min(count, 7) :]))
    match len(times):
        case 5:
            return _read(_FIVE, times, counts_from_one=None if "?" in times else False)
        case 6 if _ends_with_year(times):
            return _with_year(times, counts_from_one=True if "?" in times else None)
        case 6:
            return _read((_SECOND, *_FIVE), times, counts_from_one=None if "?" in times else False)
        case 7:
            second, *rest = times
            return f"{_term(_SECOND, second)} {_with_year(rest, counts_from_one=None)}"
    raise ConfigurationError(
        f"it has {len(times)} fields; write minute, hour, day of the month, month and day of the week, as in "
        "'0 2 * * MON-FRI', and seconds before them if you want"
    )


def _leave_out(rest: str) -> ConfigurationError:
    return ConfigurationError(f"leave out {rest!r:.80}: only the times are read, and the job is what runs")


def _is_time(text: str) -> bool:
    return re.fullmatch(r"[\w*?,/#-]*[\w*?]", text) is not None and all(
        word in _WORDS or (word[:-1] in _DAYS and word[-1] == "L") for word in re.findall(r"[^\W\d]+", text)
    )


def _ends_with_year(six: Sequence[str]) -> bool:
    """Whether the last of six fields is a year, not the first the seconds: `?`, a name or a number shows it."""
    _, _, day, month, weekday, year = six
    has_names = set(_words(month)) & set(_MONTHS) or set(_words(weekday)) & set(_DAYS)
    return "?" in (day, weekday) or bool(has_names) or re.search(r"\d{4}", year) is not None


def _words(text: str) -> list[str]:
    return [_LONG.get(word, word) for word in re.findall(r"[A-Z]{3,}", text)]


def _with_year(six: Sequence[str], *, counts_from_one: bool | None) -> str:
    *times, year = six
    if year != "*":
        raise ConfigurationError(f"drop the year {year}: a schedule has none, and its job may look at the tick")
    return _read(_FIVE, times, counts_from_one=counts_from_one)


def _read(fields: Sequence[_Field], times: Sequence[str], *, counts_from_one: bool | None) -> str:
    """The fields as cronsim takes them.

    Args:
        fields: what the times stand for.
        times: in capitals.
        counts_from_one: Sunday is 1, as in AWS; False: Sunday is 0 or 7; None: dialects differ.
    """
    read = []
    for field, text in zip(fields, times, strict=True):
        if text == "?" and field in (_DAY, _WEEKDAY):
            text = "*"
        elif field is _WEEKDAY and counts_from_one is not False:
            text = ",".join(_named_weekday(term, counts_from_one) for term in text.split(","))
        read.append(_term(field, text))
    return " ".join(read)


def _named_weekday(term: str, counts_from_one: bool | None) -> str:
    """Days of the week by name, where their numbers are not those of crontabs."""
    head, hash_sign, which = term.partition("#")
    head, slash, step = head.partition("/")
    if re.search(r"\d", head):
        if counts_from_one is None:
            raise ConfigurationError(
                f"write the day of the week {term} by its name: Sunday is 1 in Quartz and AWS, and 0 in crontabs"
            )
        if any(not 1 <= int(number) <= 7 for number in re.findall(r"\d+", head)):
            raise ConfigurationError(f"the day of the week {term} is none: 1 is Sunday and 7 is Saturday")
        head = re.sub(r"\d", lambda digit: _DAYS[int(digit[0]) - 1], head)
    if slash and head in _DAYS:
        head = f"{head}-SAT"
    return f"{head}{slash}{step}{hash_sign}{which}"


def _term(field: _Field, text: str) -> str:
    text = re.sub(r"[A-Z]{4,}", lambda word: _LONG.get(word[0], word[0]), text)
    return ",".join(_part(field, part) for part in text.split(","))


def _part(field: _Field, part: str) -> str:
    """One part of a field as cronsim takes it; what it does not know is refused there, or here with a remedy."""
    if "?" in part:
        raise ConfigurationError(f"`?` stands for any day, and {part} is the {field.name}: write *")
    if part == "H" or part.startswith(("H/", "H(")):
        raise ConfigurationError(f"H is of Jenkins: choose a {field.name}, and spread the tasks with jitter_s")
    if field is _DAY and ("W" in part.removeprefix("LW") or part.startswith("L-")):
        raise ConfigurationError(f"{part} is not known: of such days there are L, the last, and LW, the last weekday")
    if field is _WEEKDAY and part[:-1] in _DAYS and part[-1] == "L":
        return f"{_DAYS.index(part[:-1])}L"
    if field is _WEEKDAY and part == "L":
        raise ConfigurationError("L alone is no day of the week: write SAT, or for example 5L for the last Friday")
    base, _, step = part.partition("/")
    if base in ("*", str(field.first)) and step.isdecimal() and int(step) > field.last - field.first + 1:
        remedy = f"use every({int(step)}).{field.unit}" if field.unit else f"write each {field.name} by its name"
        raise ConfigurationError(f"{part} means the {field.name} {field.first} alone: {remedy}")
    first, dash, last = base.partition("-")
    start, end = field.value(first), field.value(last)
    if not dash or start is None or end is None or start <= end:
        return part
    if start > field.last + (field is _WEEKDAY) or end < field.first:
        return part
    return _over_the_end(field, start, end, int(step) if step.isdecimal() and int(step) else 1)


def _over_the_end(field: _Field, start: int, end: int, step: int) -> str:
    """A range such as `FRI-MON` or `22-2`, which goes on with the first value after the last."""
    if start > field.last:  # Sunday as 7
        return f"{field.first}-{end}" + (f"/{step}" if step > 1 else "")
    values = [*range(start, field.last + 1), *range(field.first, end + 1)][::step]
    if step > 1:
        return ",".join(map(str, values))
    return f"{_span(start, field.last)},{_span(field.first, end)}"


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if first < last else f"{first}"


def _every(number: int, unit: str) -> str:
    return f"every().{unit.removesuffix('s')}" if number == 1 else f"every({number}).{unit}"
