"""When a periodic job is due: specs are fixed sets of moments, on the clock of UTC or on the wall of a zone."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent.model.errors import ConfigurationError
from thunderagent.model.ticks import Cron, Every, Spec, between, cron, every, newest, spec_of
from thunderagent.model.zones import moment_of, wall_time, zone_named

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Australia/Sydney", "Asia/Kathmandu")


def at(text: str) -> int:
    """Epoch seconds of a moment such as `2026-03-29 01:00:00`, in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def told(ticks: list[int]) -> list[str]:
    return [datetime.fromtimestamp(tick, UTC).strftime("%m-%d %H:%M") for tick in ticks]


def on_days(spec: Spec, first: str, days: int) -> list[str]:
    """The ticks of so many days of UTC, in UTC."""
    begin = at(first)
    return told(between(spec, begin - 1, begin + days * 86400 - 1, most=10_000))


# Words


@pytest.mark.parametrize(
    ("spec", "text", "first"),
    [
        (every(30).seconds, "every 30 seconds", "2026-03-02 00:00:30"),
        (every().second, "every second", "2026-03-02 00:00:01"),
        (every(7).minutes, "every 7 minutes", "2026-03-02 00:01:00"),
        (every().minute.at(":17"), "every minute at :17", "2026-03-02 00:00:17"),
        (every(2).minutes.at(":00"), "every 2 minutes at :00", "2026-03-02 00:02:00"),
        (every().hour.at(":15"), "every hour at :15", "2026-03-02 00:15:00"),
        (every(2).hours.at("15:30"), "every 2 hours at 15:30", "2026-03-02 00:15:30"),
        (every().day, "every day at 00:00 UTC", "2026-03-03 00:00:00"),
        (every().day.at("02:00", "Europe/Berlin"), "every day at 02:00 Europe/Berlin", "2026-03-02 01:00:00"),
        (every().day.at("9:05:07"), "every day at 09:05:07 UTC", "2026-03-02 09:05:07"),
        (every(3).days.at("12:00"), "every 3 days at 12:00 UTC", "2026-03-02 12:00:00"),
        (every().week, "every Monday at 00:00 UTC", "2026-03-09 00:00:00"),
        (every().monday.at("09:30"), "every Monday at 09:30 UTC", "2026-03-02 09:30:00"),
        (
            every().sunday.at("23:59", "America/New_York"),
            "every Sunday at 23:59 America/New_York",
            "2026-03-02 04:59:00",
        ),
        (every(2).weeks, "every 2 weeks on Monday at 00:00 UTC", "2026-03-09 00:00:00"),
        (every(2).friday, "every 2 weeks on Friday at 00:00 UTC", "2026-03-13 00:00:00"),
        (cron("0 2 * * MON-FRI", "Europe/Berlin"), "cron 0 2 * * MON-FRI Europe/Berlin", "2026-03-02 01:00:00"),
        (cron("*/15 * * * * *"), "cron */15 * * * * * UTC", "2026-03-02 00:00:15"),
    ],
)
def test_specs_read_as_they_are_written_and_tick_when_they_say(spec: Spec, text: str, first: str) -> None:
    assert str(spec) == text
    assert spec.next(at("2026-03-02 00:00:00")) == at(first)  # a Monday
    assert spec_of(json.loads(json.dumps(spec.to_data()))) == spec


@pytest.mark.parametrize("name", ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"])
def test_a_weekday_is_that_day_of_the_week(name: str) -> None:
    spec: Every = getattr(every(), name)
    for tick in between(spec, at("2026-01-01 00:00:00"), at("2027-01-01 00:00:00"), most=100):
        assert datetime.fromtimestamp(tick, UTC).strftime("%A").lower() == name


def test_every_second_week_is_a_fortnight_from_one_year_to_the_next() -> None:
    ticks = between(every(2).weeks.at("08:00"), at("2025-11-01 00:00:00"), at("2026-03-01 00:00:00"), most=100)
    assert {later - earlier for earlier, later in pairwise(ticks)} == {14 * 86400}


def test_days_are_counted_on_so_that_no_month_begins_afresh() -> None:
    ticks = between(every(3).days, at("2025-12-01 00:00:00"), at("2026-04-01 00:00:00"), most=100)
    assert {later - earlier for earlier, later in pairwise(ticks)} == {3 * 86400}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: every(0).minutes, "between one second"),
        (lambda: every(-1).days, "between one second"),
        (lambda: every(9999).weeks, "ten years"),
        (lambda: every(1.5).minutes, "no interval"),  # type: ignore[arg-type]
        (lambda: every(True).minutes, "no interval"),
        (lambda: every(2).minute, "write .minutes"),
        (lambda: every(30).seconds.at(":10"), "seconds have no time"),
        (lambda: every().minute.at("10"), "write ':SS'"),
        (lambda: every().hour.at("02:00:00"), "':MM' or 'MM:SS'"),
        (lambda: every().hour.at(":75"), "there is no such time; write ':MM' or 'MM:SS'"),
        (lambda: every().day.at("25:00"), "'HH:MM' or 'HH:MM:SS'"),
        (lambda: every().day.at(":30"), "'HH:MM' or 'HH:MM:SS'"),
        (lambda: every().day.at("02:00", "Europe/Berln"), "did you mean Europe/Berlin"),
        (lambda: every().day.at("02:00", "new york"), "did you mean America/New_York"),
        (lambda: every().day.at("02:00", "Mars/Olympus Mons"), "there is no time zone"),
        (lambda: every().day.at("02:00", "../../etc/passwd"), "there is no time zone"),
        (lambda: every().hour.at(":30", "Europe/Berlin"), "counted in UTC"),
        (lambda: cron("99 2 * * *"), "Bad minute"),
        (lambda: cron("0 0 31 2 *"), "the day 31 never comes in the month 2"),
        (lambda: cron("0 0 31 APR,6 *"), "the day 31 never comes in the month APR,6; L is the last day"),
        (lambda: cron("0 24 * * *"), "Bad hour; it has .*hour (0-23)"),
        (lambda: cron("0 0 * 2 MON#6"), "cannot be read"),
        (lambda: cron("* " * 200), "no cron expression"),
        (lambda: cron("0 2 * * *", "Europe/Berln"), "did you mean Europe/Berlin"),
        (lambda: cron("0 2 * * *", ""), "there is no time zone"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("(", r"\(").replace(")", r"\)")):
        make()


# Lines that people have

TAKEN = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@Daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
    (" 0  9 * * mon-fri\t", "0 9 * * MON-FRI"),
    # any day
    ("0 9 ? * MON", "0 9 * * MON"),
    ("0 9 1 * ?", "0 9 1 * *"),
    ("0 0 12 ? * MON-FRI", "0 0 12 * * MON-FRI"),
    ("0 0 0 1 1 ? *", "0 0 0 1 1 *"),
    # a year that says nothing, behind the five
    ("0 12 * * ? *", "0 12 * * *"),
    ("0 9 * * MON *", "0 9 * * MON"),
    ("0 9 1 JAN * *", "0 9 1 JAN *"),
    # names
    ("0 0 9 * JAN-MAR TUE,THU", "0 0 9 * JAN-MAR TUE,THU"),
    ("0 9 * september Monday", "0 9 * SEP MON"),
    ("0 9 * * FRIL", "0 9 * * 5L"),
    # over the end
    ("0 22-2 * * *", "0 22-23,0-2 * * *"),
    ("50-10/5 * * * *", "50,55,0,5,10 * * * *"),
    ("0 0 28-3 * *", "0 0 28-31,1-3 * *"),
    ("0 0 * NOV-FEB *", "0 0 * 11-12,1-2 *"),
    ("0 0 * * FRI-MON", "0 0 * * 5-6,0-1"),
    ("0 0 * * SAT-SUN,3", "0 0 * * 6,0,3"),
    ("0 0 * * 7-2", "0 0 * * 0-2"),
    # AWS
    ("cron(0 12 * * ? *)", "0 12 * * *"),
    ("cron(0/15 8-17 ? * MON-FRI *)", "0/15 8-17 * * MON-FRI"),
    ("cron(0 12 ? * 2-6 *)", "0 12 * * MON-FRI"),
    ("0 12 ? * 1,7 *", "0 12 * * SUN,SAT"),
    ("cron(0 12 ? * 6L *)", "0 12 * * 5L"),
    ("cron(0 12 ? * 2#1 *)", "0 12 * * MON#1"),
    ("cron(0 12 ? * MON/2 *)", "0 12 * * MON-SAT/2"),
    ("cron(0 12 L * ? *)", "0 12 L * *"),
]


@pytest.mark.parametrize(("line", "expression"), TAKEN)
def test_a_line_whose_meaning_is_certain_is_taken(line: str, expression: str) -> None:
    assert cron(line) == Cron(expression)
    assert cron(cron(line).expression) == cron(line)


@pytest.mark.parametrize(
    ("line", "days"),
    [
        ("0 0 * * FRI-MON", "Fri Sat Sun Mon"),
        ("cron(0 0 ? * 6-2 *)", "Fri Sat Sun Mon"),
        ("cron(0 0 ? * MON/2 *)", "Mon Wed Fri"),
    ],
)
def test_days_of_a_week_are_those_that_the_line_means(line: str, days: str) -> None:
    ticks = between(cron(line), at("2026-03-01 12:00:00"), at("2026-03-08 12:00:00"), most=9)
    assert {datetime.fromtimestamp(tick, UTC).strftime("%a") for tick in ticks} == set(days.split())


@pytest.mark.parametrize("name", ["CRON_TZ", "TZ"])
def test_a_line_may_name_its_zone(name: str) -> None:
    line = f"{name}=America/New_York 0 9 * * *"
    assert cron(line) == cron(line, "America/New_York") == cron("0 9 * * *", "America/New_York")
    with pytest.raises(ConfigurationError, match="names a zone of its own: leave out 'UTC'"):
        cron(line, "UTC")
    with pytest.raises(ConfigurationError, match="did you mean Europe/Berlin"):
        cron(f"{name}=Europe/Berln 0 9 * * *")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("rate(5 minutes)", "use every(5).minutes"),
        ("rate(1 day)", "use every().day"),
        ("@every 5m", "use every(5).minutes"),
        ("@every 1h0m0s", "use every().hour"),
        ("@every 1h30m", "every(90).minutes"),
        ("*/90 * * * *", "means the minute 0 alone: use every(90).minutes"),
        ("0 0/36 * * *", "means the hour 0 alone: use every(36).hours"),
        ("0 0 * */18 *", "write each month by its name"),
        ("@reboot", "where your machine starts"),
        ("@fortnightly", "there are @yearly"),
        ("at(2026-01-01T00:00:00)", "run_at"),
        ("cron(0 12 ? * MON 2026)", "drop the year 2026"),
        ("0 9 * * 1 2026-2028", "drop the year 2026-2028"),
        ("0 0 0 1 1 ? 2027", "drop the year 2027"),
        ("cron(0 12 * * *)", "it has 5 fields, and cron() of AWS has"),
        ("0 9 ? * 2", "write the day of the week 2 by its name"),
        ("0 0 12 ? * 2-6", "write the day of the week 2-6 by its name"),
        ("0 9 1 JAN 2 *", "write the day of the week 2 by its name"),
        ("cron(0 12 ? * 0 *)", "1 is Sunday and 7 is Saturday"),
        ("? 9 * * *", "write *"),
        ("H 2 * * *", "spread the tasks with jitter_s"),
        ("H(0-30) 2 * * *", "spread the tasks with jitter_s"),
        ("0 8 15W * *", "LW, the last weekday"),
        ("0 8 L-3 * *", "LW, the last weekday"),
        ("0 8 * * L", "write SAT, or for example 5L"),
        ("0 2 * * * /usr/bin/backup --all", "leave out '/usr/bin/backup --all'"),
        ("0 2 * * * root backup", "leave out 'root backup'"),
        ("@daily backup", "leave out 'backup'"),
        ("*/5 * * * * # often", "leave out '# often'"),
        ("0 2 * *", "it has 4 fields; write minute, hour"),
    ],
)
def test_a_line_whose_meaning_is_not_certain_is_refused_with_what_to_write(line: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        cron(line)
    assert remedy in str(error.value)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("0 0 13 * FRI", "cron 0 0 13 * FRI UTC (day 13 or FRI)"),
        ("0 0 */2 * MON", "cron 0 0 */2 * MON UTC (day */2 and MON)"),
        ("0 0 13 * *", "cron 0 0 13 * * UTC"),
    ],
)
def test_what_two_fields_of_days_mean_together_is_said(line: str, text: str) -> None:
    assert str(cron(line)) == text
    days = [datetime.fromtimestamp(one, UTC) for one in between(cron(line), 0, 365 * 86400, most=999)]
    every_day = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(n) for n in range(1, 366))
    if " or " in text:
        assert days == [day for day in every_day if day.day == 13 or day.weekday() == 4]
    elif " and " in text:
        assert days == [day for day in every_day if day.day % 2 and day.weekday() == 0]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("0123456789*?/,-#LWH@ MONJAcron()=TZ"), max_size=30))
def test_any_line_is_taken_for_good_or_refused(line: str) -> None:
    try:
        found = cron(line)
    except ConfigurationError:
        return
    assert cron(found.expression, found.zone) == found == spec_of(found.to_data())


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"every": 1},
        {"every": "1", "unit": "days"},
        {"every": 1, "unit": "months", "zone": "UTC"},
        {"every": 1, "unit": "days", "zone": 5},
        {"every": 1, "unit": "days", "zone": ["UTC"]},
        {"every": 1, "unit": "days", "weekday": 2, "zone": "UTC"},
        {"every": 1, "unit": "days", "at": "02:00", "zone": "UTC"},
        {"every": 1, "unit": "days", "at": 99999, "zone": "UTC"},
        {"every": 1, "unit": "weeks", "weekday": [], "zone": "UTC"},
        {"every": 1, "unit": "days", "zone": "UTC", "except": "holidays"},
        {"cron": "0 2 * * *"},
        {"cron": None, "zone": "UTC"},
        {"cron": "0", "zone": "UTC"},
        {"cron": " ", "zone": "UTC"},
        {"cron": "0 2 * * *", "zone": "UTC", "seconds": True},
        {"sun": "rise"},
    ],
)
def test_data_that_is_no_spec_or_one_of_a_later_version_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        spec_of(data)


# Changes of the clock on the wall


@pytest.mark.parametrize(
    ("zone", "first", "gap", "before_and_after"),
    [
        # At 02:00 the clock is put to 03:00; in Lord Howe only to 02:30.
        ("Europe/Berlin", "2026-03-28 00:00:00", "03-29 01:00", ("03-28 01:30", "03-30 00:30")),
        ("America/New_York", "2026-03-07 00:00:00", "03-08 07:00", ("03-07 07:30", "03-09 06:30")),
        ("Australia/Sydney", "2026-10-02 15:00:00", "10-03 16:00", ("10-02 16:30", "10-04 15:30")),
    ],
)
def test_a_time_that_does_not_come_in_spring_ticks_at_the_first_moment_after_the_gap(
    zone: str, first: str, gap: str, before_and_after: tuple[str, str]
) -> None:
    for spec in (every().day.at("02:30", zone), cron("30 2 * * *", zone), cron("0 30 2 * * *", zone)):
        assert on_days(spec, first, 3) == [before_and_after[0], gap, before_and_after[1]]


@pytest.mark.parametrize(
    ("zone", "first", "expected"),
    [
        ("Europe/Berlin", "2026-10-24 00:00:00", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        ("America/New_York", "2026-10-31 00:00:00", ["10-31 05:30", "11-01 05:30", "11-02 06:30"]),
        ("Australia/Sydney", "2026-04-03 12:00:00", ["04-03 15:30", "04-04 15:30", "04-05 16:30"]),
    ],
)
def test_a_time_that_comes_twice_in_autumn_ticks_the_first_time_only(
    zone: str, first: str, expected: list[str]
) -> None:
    hour = "01" if zone == "America/New_York" else "02"
    for spec in (
        every().day.at(f"{hour}:30", zone),
        cron(f"30 {hour} * * *", zone),
        cron(f"0 30 {hour} * * *", zone),
    ):
        assert on_days(spec, first, 3) == expected


def test_a_gap_and_an_overlap_of_half_an_hour_are_treated_the_same() -> None:
    for spec in (every().day.at("02:15", "Australia/Lord_Howe"), cron("15 2 * * *", "Australia/Lord_Howe")):
        assert on_days(spec, "2026-10-02 12:00:00", 3) == ["10-02 15:45", "10-03 15:30", "10-04 15:15"]
    for spec in (every().day.at("01:45", "Australia/Lord_Howe"), cron("45 1 * * *", "Australia/Lord_Howe")):
        assert on_days(spec, "2026-04-03 12:00:00", 3) == ["04-03 14:45", "04-04 14:45", "04-05 15:15"]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Australia/Sydney"])
def test_a_time_outside_of_the_change_ticks_once_a_day_at_its_hour(zone: str) -> None:
    wall = ZoneInfo(zone)
    for spec in (every().day.at("09:30", zone), cron("30 9 * * *", zone)):
        ticks = between(spec, at("2026-01-01 00:00:00"), at("2027-01-01 00:00:00"), most=1000)
        walls = [datetime.fromtimestamp(tick, wall) for tick in ticks]
        assert len(ticks) == 365
        assert {(one.hour, one.minute) for one in walls} == {(9, 30)}
        assert len({one.date() for one in walls}) == 365


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Australia/Sydney"])
def test_a_daily_tick_comes_once_on_every_day_of_a_year_whatever_its_time(zone: str) -> None:
    wall = ZoneInfo(zone)
    begin, end = (moment_of(datetime(year, 1, 1), wall) for year in (2026, 2027))
    for minute in range(0, 24 * 60, 15):
        time_of_day = f"{minute // 60:02d}:{minute % 60:02d}"
        ticks = between(every().day.at(time_of_day, zone), begin - 1, end - 1, most=1000)
        assert len({datetime.fromtimestamp(tick, wall).date() for tick in ticks}) == len(ticks) == 365


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Sydney", "Australia/Lord_Howe"])
@pytest.mark.parametrize("spec", [every(10).minutes, every().hour.at(":15"), every(30).seconds])
def test_an_interval_goes_on_evenly_through_every_change_of_the_clock(zone: str, spec: Spec) -> None:
    assert isinstance(spec, Every)
    period = {"minutes": 600, "hours": 3600, "seconds": 30}[spec.unit]
    for day in ("2026-03-08", "2026-03-29", "2026-04-05", "2026-10-04", "2026-10-25", "2026-11-01"):
        begin = at(f"{day} 00:00:00") - 43200
        ticks = between(spec, begin, begin + 2 * 86400, most=100_000)
        assert {later - earlier for earlier, later in pairwise(ticks)} == {period}


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Sydney"])
@pytest.mark.parametrize(
    ("expression", "period"), [("*/10 * * * *", 600), ("15 * * * *", 3600), ("*/20 * * * * *", 20)]
)
def test_a_cron_expression_of_every_hour_goes_on_evenly_through_every_change_of_the_clock(
    zone: str, expression: str, period: int
) -> None:
    for day in ("2026-03-08", "2026-03-29", "2026-04-05", "2026-10-04", "2026-10-25", "2026-11-01"):
        begin = at(f"{day} 00:00:00") - 43200
        ticks = between(cron(expression, zone), begin, begin + 2 * 86400, most=100_000)
        assert {later - earlier for earlier, later in pairwise(ticks)} == {period}


def test_midnight_that_does_not_come_is_the_first_moment_of_that_day() -> None:
    """In Cairo the clock goes from 00:00 to 01:00 in spring."""
    ticks = between(
        every().day.at("00:00", "Africa/Cairo"), at("2026-04-23 00:00:00"), at("2026-04-25 12:00:00"), most=9
    )
    zone = ZoneInfo("Africa/Cairo")
    assert [datetime.fromtimestamp(one, zone).isoformat(" ")[:16] for one in ticks] == [
        "2026-04-24 01:00",
        "2026-04-25 00:00",
    ]


def test_a_day_that_a_zone_left_out_does_not_double_the_next() -> None:
    """In Apia there was no 30 December 2011."""
    ticks = between(
        every().day.at("00:00", "Pacific/Apia"), at("2011-12-28 00:00:00"), at("2012-01-02 00:00:00"), most=9
    )
    assert told(ticks) == ["12-28 10:00", "12-29 10:00", "12-30 10:00", "12-31 10:00", "01-01 10:00"]
    assert len(set(ticks)) == len(ticks)


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(
    "expression", ["30 2 * * *", "0,20,40 1-3 * * *", "15 2 29 3 *", "0 0 1 * MON", "5 4 * * SUN#1"]
)
def test_fixed_times_of_cron_are_those_of_the_library(zone: str, expression: str) -> None:
    begin = datetime(2026, 1, 1, tzinfo=ZoneInfo(zone))
    wanted: list[int] = []
    for tick in CronSim(expression, begin):
        if tick.year > 2026:
            break
        wanted.append(int(tick.timestamp()))
    end = int(datetime(2027, 1, 1, tzinfo=ZoneInfo(zone)).timestamp()) - 1
    assert between(cron(expression, zone), int(begin.timestamp()), end, most=10_000) == wanted


# The properties on which agents rely

intervals = st.builds(Every, st.integers(1, 500), st.sampled_from(["seconds", "minutes", "hours"]))
times = st.integers(0, 86399)
zones = st.sampled_from(ZONES)
days = st.builds(lambda n, at_s, zone: Every(n, "days", None, at_s, zone), st.integers(1, 40), times, zones)
weeks = st.builds(
    lambda n, day, at_s, zone: Every(n, "weeks", day, at_s, zone),
    st.integers(1, 5),
    st.none() | st.integers(0, 6),
    times,
    zones,
)
minute_words = st.sampled_from(["*", "*/7", "30", "0,15,45", "10-20", "59", "*/30"])
hour_words = st.sampled_from(["*", "2", "1-3", "*/2", "0", "23", "1,2"])
crons = st.builds(
    lambda parts, zone: Cron(" ".join(filter(None, parts)), zone),
    st.tuples(
        st.sampled_from(["", "", "*/20", "30", "0"]),
        minute_words,
        hour_words,
        st.sampled_from(["*", "1", "L", "*/5", "29"]),
        st.sampled_from(["*", "3", "10,11", "4-10"]),
        st.sampled_from(["*", "MON-FRI", "SUN", "SAT#1", "5L"]),
    ),
    zones,
)
specs: st.SearchStrategy[Spec] = st.one_of(intervals, days, weeks, crons)
CHANGES = [
    at(f"{day} 12:00:00")
    for day in ("2026-03-08", "2026-03-29", "2026-04-04", "2026-10-03", "2026-10-25", "2026-11-01")
]
moments = st.one_of(
    st.builds(lambda base, more: base + more, st.sampled_from(CHANGES), st.integers(-86400, 86400)),
    st.integers(0, 4_000_000_000),
)
spans = st.one_of(st.integers(0, 20_000), st.integers(0, 3_000_000))
MOST = 400


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(specs, moments, spans, spans)
def test_ticks_of_two_spans_are_those_of_both_together_and_grow(spec: Spec, a: int, first: int, second: int) -> None:
    b, c = a + first, a + first + second
    whole = between(spec, a, c, most=MOST)
    if len(whole) == MOST:  # the end is open: compare what is there
        c = whole[-1]
        b = min(b, c)
    left, right = between(spec, a, b, most=MOST), between(spec, b, c, most=MOST)
    assert left + right == whole
    assert all(earlier < later for earlier, later in pairwise([a, *whole]))
    assert all(a < tick <= c for tick in whole)


@settings(max_examples=300, deadline=None)
@given(specs, moments, spans)
def test_the_newest_tick_is_the_last_of_all(spec: Spec, a: int, span: int) -> None:
    ticks = between(spec, a, a + span, most=MOST)
    found = newest(spec, a, a + span)
    if len(ticks) < MOST:
        assert found == (ticks[-1] if ticks else None)
    else:
        assert found is not None and found >= ticks[-1] and spec.next(found) > a + span


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(specs, moments)
def test_the_next_tick_is_the_same_from_wherever_one_asks(spec: Spec, a: int) -> None:
    tick = spec.next(a)
    assert tick > a
    for moment in {a, (a + tick) // 2, tick - 1}:
        assert spec.next(moment) == tick
    assert spec.next(tick) > tick


@settings(max_examples=200, deadline=None)
@given(specs)
def test_a_spec_goes_through_json_and_comes_back_the_same(spec: Spec) -> None:
    assert spec_of(json.loads(json.dumps(spec.to_data()))) == spec
    assert len(json.dumps(spec.to_data())) < 300
    assert str(spec)


@settings(max_examples=200, deadline=None)
@given(zones, moments)
def test_a_moment_is_found_again_from_the_wall(zone: str, moment: int) -> None:
    known = zone_named(zone)
    found = moment_of(wall_time(moment, known), known)
    assert wall_time(found, known) == wall_time(moment, known)
    assert found <= moment


def test_fractions_of_seconds_do_not_move_a_tick() -> None:
    spec = every(10).seconds
    assert between(spec, 100.9, 120.0, most=9) == [110, 120]
    assert between(spec, 110.0, 119.999, most=9) == []
    assert between(spec, 109.999, 110.0, most=9) == [110]
    assert newest(spec, 109.2, 110.7) == 110


@pytest.mark.parametrize(
    "spec",
    [
        every().second,
        cron("* * * * * *", "Europe/Berlin"),
        cron("* * 1 1 *", "Europe/Berlin"),
        cron("0 0 29 2 *", "Europe/Berlin"),
        every().day.at("02:30", "Europe/Berlin"),
    ],
)
def test_years_without_a_look_cost_no_more_than_a_moment(spec: Spec) -> None:
    begun = time.thread_time()
    ticks = between(spec, 0, at("2026-11-29 00:00:00"), most=100)
    last = newest(spec, 0, at("2026-11-29 00:00:00"))
    assert time.thread_time() - begun < 2.0
    assert 13 <= len(ticks) <= 100
    assert last is not None


def test_a_clock_that_is_far_beyond_every_calendar_finds_an_end() -> None:
    spec = every().day.at("02:30", "Europe/Berlin")
    assert between(spec, 9_999_999_999, 1e18, most=5) == []
    assert newest(spec, 1e12, 1e18) is None
    assert timedelta(seconds=spec.next(9_999_999_999) - 9_999_999_999) < timedelta(days=2)
