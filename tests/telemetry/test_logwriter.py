"""The short way of a log line to its stream: the same text as by the logger, and only while that has nothing to add."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from loguru import logger

from tests.telemetry.test_logs import a_sample
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.telemetry import logs as telemetry
from thunderagent.telemetry.logs import LEVELS, Telemetry, configure_logging
from thunderagent.telemetry.logwriter import Stamps

SUCCEEDED = events.TaskSucceeded(task_id="a", job="b", queue="c", fence=1, attempt=1, seconds=0.25)
STAMP = len("2026-07-14 09:30:00.250Z")


@pytest.fixture(autouse=True)
def silent_afterwards() -> Iterator[None]:
    yield
    logger.remove()
    logger.configure(handlers=[], patcher=lambda record: None, extra={}, activation=[("thunderagent", True)])


def set_up(*, as_json: bool = True, **options: Any) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("DEBUG", as_json=as_json, stream=stream, **options)
    return stream


def without_time(line: str, *, as_json: bool) -> Any:
    """What must be the same; the time must be one."""
    assert line.endswith("\n")
    if not as_json:
        assert datetime.fromisoformat(line[:STAMP]).tzinfo is not None
        return line[STAMP:]
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    return list(told.items())


@pytest.fixture
def never_by_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(**_: Any) -> None:
        raise AssertionError("the long way was taken")

    monkeypatch.setattr(logger, "bind", bind, raising=False)


@pytest.mark.usefixtures("never_by_the_logger")
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_a_line_takes_the_short_way(as_json: bool) -> None:
    stream = set_up(as_json=as_json)
    Telemetry(EventBus()).listen(SUCCEEDED)
    assert "task succeeded" in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize("kind", LEVELS, ids=lambda kind: kind.__name__)
def test_every_event_is_the_same_line_by_either_way(
    kind: type[events.Event], as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_either_way(a_sample(kind), as_json, monkeypatch)


def by_either_way(event: events.Event, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, told = set_up(as_json=as_json), Telemetry(EventBus())
    told.listen(event)
    short = stream.getvalue()
    monkeypatch.setattr(telemetry, "_writer", None)
    told.listen(event)
    long = stream.getvalue().removeprefix(short)
    assert without_time(short, as_json=as_json) == without_time(long, as_json=as_json)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize(
    "error",
    ['a "quoted" one', "two\nlines", "ü \u2028 \x00 \x1b[31m \\ 日本", "{braces} <red>marks</red>", "", "token=abc x"],
)
def test_awkward_texts_are_the_same_by_either_way(error: str, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_either_way(events.StoreFailed(during=error, error=error, next_try_s=0.1), as_json, monkeypatch)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e-9, 1e22, 0.1 + 0.2, -0.0])
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_numbers_are_the_same_by_either_way(seconds: float, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    event = events.TaskSucceeded(task_id="a", job="b", queue="c", fence=1, attempt=1, seconds=seconds)
    stream, told = set_up(as_json=as_json), Telemetry(EventBus())
    told.listen(event)
    monkeypatch.setattr(telemetry, "_writer", None)
    told.listen(event)
    short, long = stream.getvalue().splitlines()
    assert short.partition("task succeeded")[2] == long.partition("task succeeded")[2]


def test_secrets_are_hidden_on_the_short_way_too() -> None:
    stream = set_up(redact="queue")
    Telemetry(EventBus()).listen(events.StoreFailed(during="x", error="password=" + "hun" + "ter2", next_try_s=0.1))
    Telemetry(EventBus()).listen(SUCCEEDED)
    assert "hun" + "ter2" not in stream.getvalue()
    assert '"queue": "***"' in stream.getvalue()


# When the logger has something to add


def test_a_sink_that_the_application_has_added_gets_the_lines_of_events() -> None:
    stream, more = set_up(), []
    logger.add(lambda line: more.append(str(line)), format="{message} {extra[task_id]}")
    Telemetry(EventBus()).listen(SUCCEEDED)
    assert more == ["task succeeded a\n"]
    assert stream.getvalue().count("\n") == 1


def test_what_the_application_has_bound_is_in_the_lines() -> None:
    stream, told = set_up(), Telemetry(EventBus())
    with logger.contextualize(service="shop"):
        told.listen(SUCCEEDED)
    told.listen(SUCCEEDED)
    logger.configure(extra={"region": "here"})
    told.listen(SUCCEEDED)
    bound, plain, extra = map(json.loads, stream.getvalue().splitlines())
    assert bound["service"] == "shop"
    assert "service" not in plain
    assert extra["region"] == "here"


def test_a_filter_of_the_application_counts() -> None:
    stream, told = set_up(), Telemetry(EventBus())
    logger.disable("thunderagent")
    told.listen(SUCCEEDED)
    assert not stream.getvalue()


def test_a_patcher_of_the_application_counts() -> None:
    stream, told = set_up(), Telemetry(EventBus())
    logger.configure(patcher=lambda record: record["extra"].update(line="patched"))
    told.listen(SUCCEEDED)
    assert stream.getvalue() == "patched\n"


def test_a_logger_without_sinks_writes_nothing() -> None:
    stream, told = set_up(), Telemetry(EventBus())
    logger.remove()
    told.listen(SUCCEEDED)
    assert not stream.getvalue()


class Terminal(io.StringIO):
    """Says that somebody looks at it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours() -> None:
    stream = Terminal()
    configure_logging("DEBUG", stream=stream)
    Telemetry(EventBus()).listen(SUCCEEDED)
    assert "\x1b[" in stream.getvalue()


# The stream


class Slow(io.StringIO):
    """Writes a line in two parts, with time in between."""

    def write(self, text: str) -> int:
        middle = len(text) // 2
        super().write(text[:middle])
        time.sleep(0.0005)
        super().write(text[middle:])
        return len(text)


def test_lines_of_all_threads_and_both_ways_are_whole() -> None:
    stream = Slow()
    configure_logging("DEBUG", as_json=True, stream=stream)
    told = Telemetry(EventBus())

    def by_events() -> None:
        for _ in range(50):
            told.listen(SUCCEEDED)

    def by_logger() -> None:
        for _ in range(50):
            logger.info("from a handler")

    threads = [threading.Thread(target=work) for work in (by_events, by_logger, by_events, by_logger)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert (messages.count("task succeeded"), messages.count("from a handler")) == (100, 100)


def test_a_line_has_left_the_process_when_it_is_written() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=False, line_buffering=False)
    configure_logging("DEBUG", as_json=True, stream=stream)
    Telemetry(EventBus()).listen(SUCCEEDED)
    assert raw.getvalue().endswith(b"}\n")


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize("way", ["by events", "by the logger"])
def test_the_time_of_a_line_does_not_move_with_the_zone_of_its_host(
    as_json: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, told = set_up(as_json=as_json), Telemetry(EventBus())
    for zone in ("UTC", "Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        told.listen(SUCCEEDED) if way == "by events" else logger.info("from a handler")
    monkeypatch.undo()
    time.tzset()
    lines = stream.getvalue().splitlines()
    times = [json.loads(line)["time"] if as_json else line[:STAMP] for line in lines]
    assert all(one.endswith("Z") for one in times)
    moments = [datetime.fromisoformat(one).timestamp() for one in times]
    assert max(abs(moment - time.time()) for moment in moments) < 600


def test_the_time_is_told_to_the_microsecond_with_its_zone() -> None:
    moments = [1784014200.25, 1784014200.999999, 1784014201.0, 1784014200.5]
    stamps = Stamps(iter(moments).__next__)
    for moment in moments:
        told = datetime.fromisoformat(stamps.iso())
        assert told.timestamp() == pytest.approx(moment, abs=1.1e-6)
        assert told.utcoffset() == timedelta(0)
