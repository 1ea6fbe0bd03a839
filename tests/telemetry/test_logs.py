"""Log lines and counters."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import pytest
from loguru import logger

from tests.support.engine import LONG_S, a_lease, running, serving
from thunderagent.jobs.context import Context, Snooze
from thunderagent.jobs.job import job
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.events import TaskEvent
from thunderagent.telemetry import logs
from thunderagent.telemetry.logs import COUNTED, LEVELS, Telemetry, adopt_lines, configure_logging, task_scope

ALL: Final = [
    one
    for module in (events, fleet_events)
    for _, one in inspect.getmembers(module, inspect.isclass)
    if issubclass(one, Event) and one not in (Event, TaskEvent)
]
STATE_CHANGES: Final = (
    events.TaskStarted,
    events.TaskTakenOver,
    events.TaskGivenUp,
    events.TaskSucceeded,
    events.TaskRetried,
    events.TaskFailed,
    events.TaskClosed,
    events.TaskSnoozed,
    events.TaskReleased,
)
ABOUT: Final[dict[str, Any]] = {"task_id": "a", "job": "test.job", "queue": "default", "fence": 3, "attempt": 2}


SECRET: Final = "hun" + "ter2"


@pytest.fixture
def text() -> Iterator[io.StringIO]:
    """What is logged as text; afterwards the logger is silent."""
    stream = io.StringIO()
    configure_logging("DEBUG", stream=stream)
    yield stream
    logger.remove()


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged as JSON."""
    stream = io.StringIO()
    configure_logging("DEBUG", as_json=True, stream=stream)
    yield stream
    logger.remove()


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def a_sample(kind: type[Event]) -> Event:
    samples: dict[str, Any] = {"str": "words", "int": 3, "float": 1.23456, "bool": True, "tuple[str, ...]": ("x", "y")}
    samples["tuple[float, ...]"] = (0.5, 0.25)
    values = {
        name: ABOUT.get(name, samples[annotation.removesuffix(" | None")])
        for one in reversed(kind.__mro__)
        for name, annotation in vars(one).get("__annotations__", {}).items()
    }
    return kind(**values)


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not events.Polled], ids=lambda kind: kind.__name__)
def test_every_event_is_one_line(kind: type[Event], lines: io.StringIO) -> None:
    Telemetry(EventBus()).listen(a_sample(kind))
    [line] = parsed(lines)
    assert line["message"]
    assert line["level"] == (LEVELS[kind][0] if kind in LEVELS else "INFO")


def test_every_event_has_a_line_or_is_counted() -> None:
    assert [kind for kind in ALL if kind not in LEVELS] == [events.Counted, events.Polled]
    assert [kind for kind in STATE_CHANGES if kind not in COUNTED] == []


def test_a_poll_is_counted_and_writes_nothing(text: io.StringIO) -> None:
    telemetry = Telemetry(EventBus())
    telemetry.listen(events.Polled(queue="default", seen=9, tried=5, won=2))
    telemetry.listen(events.Polled(queue="default", seen=0, tried=0, won=0))
    assert text.getvalue() == ""
    assert telemetry.take() == {"polls": 2, "claims_lost": 3}
    assert telemetry.take() == {}


def test_a_text_line_is_read_by_people(text: io.StringIO) -> None:
    Telemetry(EventBus()).listen(events.TaskRetried(**ABOUT, error="ValueError: bad\n  at x.py:3", delay_s=1.5))
    [line] = text.getvalue().splitlines()
    assert re.match(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z WARNING task will be retried ", line)
    assert "task_id=a job=test.job queue=default fence=3 attempt=2" in line
    assert r'error="ValueError: bad\n  at x.py:3"' in line
    assert line.endswith("delay_s=1.500")


@pytest.mark.parametrize("nasty", ["<red>x</red>", "{extra[x]}", "{}", "</level>", "\\<", "ü\u2028x"])
def test_whatever_an_error_says_cannot_break_its_line(nasty: str, text: io.StringIO) -> None:
    bus = EventBus()
    Telemetry(bus)
    bus.emit(events.TaskFailed(**ABOUT, error=nasty))
    assert nasty in text.getvalue() or json.dumps(nasty)[1:-1] in text.getvalue()
    assert text.getvalue().count("\n") == 1


def test_a_json_line_is_read_by_machines(lines: io.StringIO) -> None:
    Telemetry(EventBus()).listen(events.TaskSucceeded(**ABOUT, seconds=1.23456))
    [line] = parsed(lines)
    assert line.pop("time").count("T") == 1
    assert line == {"level": "INFO", "message": "task succeeded", **ABOUT, "seconds": 1.23456}


def test_the_line_of_the_minute_has_the_counters_since_the_last(lines: io.StringIO) -> None:
    bus = EventBus()
    Telemetry(bus)
    for event in (
        events.TaskStarted(**ABOUT, waited_s=0.1),
        events.TaskSucceeded(**ABOUT, seconds=1),
        events.TaskSucceeded(**ABOUT, seconds=1),
        events.Polled(queue="default", seen=3, tried=3, won=1),
        events.Counted(running=2, slots=10, skew_s=0.126),
        events.TaskFailed(**ABOUT, error="e"),
        events.Counted(running=0, slots=10, skew_s=None),
    ):
        bus.emit(event)
    first, second = [line for line in parsed(lines) if line["message"] == "last minute"]
    expected = {"slots": "2/10", "started": 1, "succeeded": 2, "polls": 1, "claims_lost": 2, "clock_skew_s": 0.13}
    assert {name: value for name, value in first.items() if name not in ("time", "level", "message")} == expected
    assert {name: value for name, value in second.items() if name not in ("time", "level", "message")} == {
        "slots": "0/10",
        "failed": 1,
    }


def test_the_level_is_respected() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream)
    telemetry = Telemetry(EventBus())
    telemetry.listen(events.TaskSucceeded(**ABOUT, seconds=1))
    telemetry.listen(events.TaskFailed(**ABOUT, error="e"))
    logger.remove()
    assert len(stream.getvalue().splitlines()) == 1


def test_an_exception_is_logged_without_the_values_of_variables(text: io.StringIO) -> None:
    def fails(password: str) -> None:
        raise ValueError("it failed")

    try:
        fails(SECRET)
    except ValueError:
        logger.exception("caught")
    assert "ValueError: it failed" in text.getvalue()
    assert "in fails" in text.getvalue()
    assert "hunter2" not in text.getvalue()


def test_an_exception_in_json_is_one_line_without_values(lines: io.StringIO) -> None:
    def fails(password: str) -> None:
        raise ValueError("it failed")

    try:
        fails(SECRET)
    except ValueError:
        logger.exception("caught")
    [line] = parsed(lines)
    assert line["exception"] == "ValueError('it failed')"
    assert "hunter2" not in lines.getvalue()


def test_a_handlers_own_lines_carry_its_task(lines: io.StringIO) -> None:
    with task_scope(running(a_lease(retry_count=1))):
        logger.info("inside {}", "{}")
    logger.info("outside")
    inside, outside = parsed(lines)
    assert (inside["task_id"], inside["fence"], inside["attempt"], inside["message"]) == ("a", 1, 2, "inside {}")
    assert "task_id" not in outside


@job("test.says")
def says(ctx: Context, payload: dict[str, Any]) -> None:
    logger.info("from a thread")


@job("test.says.async")
async def says_async(ctx: Context, payload: dict[str, Any]) -> None:
    logger.info("from a coroutine")


@job("test.secret")
def secret(ctx: Context, payload: dict[str, Any]) -> dict[str, Any] | Snooze:
    ctx.progress({"of": payload["token"]})
    return payload


def test_in_threads_and_coroutines_of_an_agent_lines_carry_their_task(lines: io.StringIO) -> None:
    with serving(says, says_async, scope=task_scope) as stage:
        Telemetry(stage.bus)
        for name in ("test.says", "test.says.async"):
            for number in range(3):
                stage.client.enqueue(name, {"n": number}, task_id=f"{name}-{number}")
        stage.record.wait(events.TaskSucceeded, 6)
    said = [line for line in parsed(lines) if line["message"].startswith("from a ")]
    assert {line["task_id"] for line in said} == {
        f"{name}-{number}" for name in ("test.says", "test.says.async") for number in range(3)
    }
    assert {(line["fence"], line["attempt"]) for line in said} == {(1, 1)}


def test_each_change_of_a_tasks_state_is_one_line_and_no_payload_is_in_any(lines: io.StringIO) -> None:
    with serving(secret) as stage:
        Telemetry(stage.bus)
        task = stage.client.enqueue(secret, {"token": "hunter2"})
        stage.record.wait(events.TaskSucceeded)
        assert stage.client.get(task).result == {"token": "hunter2"}
    about = [line["message"] for line in parsed(lines) if line.get("task_id") == task.id]
    assert about == ["task started", "task succeeded"]
    assert "hunter2" not in lines.getvalue()


def test_the_logger_of_a_process_can_be_configured_twice() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    logger.info("once")
    logger.remove()
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """The logger of a library whose lines are ours; afterwards it is as it was."""
    made = logging.getLogger("test.library")
    before = made.handlers, made.propagate
    adopt_lines(made.name)
    yield made
    made.handlers, made.propagate = before


def test_a_library_has_no_bare_lines(
    library: logging.Logger, lines: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    child = logging.getLogger("test.library.server")
    try:
        raise ValueError(f"password={SECRET}")
    except ValueError:
        child.error("connection %s failed {braces}", 7, exc_info=True)
    child.warning("token=%s", SECRET)
    child.info("server listening")
    error, warning = parsed(lines)
    assert (error["level"], error["message"], error["library"]) == ("ERROR", "connection 7 failed {braces}", child.name)
    assert error["exception"].startswith("ValueError(")
    assert warning["level"] == "WARNING"
    assert SECRET not in lines.getvalue()
    assert capsys.readouterr() == ("", "")


# Lines of events go straight to the stream below WARNING, and through the logger from there on


SUCCEEDED: Final = events.TaskSucceeded(**ABOUT, seconds=0.25)
FAILED: Final = events.TaskFailed(**ABOUT, error="ValueError: bad")
STAMP: Final = len("2026-07-14 09:30:00.250Z")


@pytest.mark.parametrize(
    "error", ['a "quoted" one', "two\nlines", "ü \u2028 \x00 \x1b[31m \\ 日本", "{braces} <red>", ""]
)
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_a_line_is_the_same_whether_it_goes_through_the_logger_or_not(
    error: str, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    configure_logging("DEBUG", as_json=as_json, stream=stream)
    for event in (SUCCEEDED, events.TaskReleased(**{**ABOUT, "job": error}), a_sample(fleet_events.CanaryProbed)):
        telemetry = Telemetry(EventBus())
        telemetry.listen(event)
        with monkeypatch.context() as patched:
            patched.setattr(logs, "_lines", None)
            telemetry.listen(event)
    logger.remove()
    lines = [re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+Z", "TIME", line) for line in stream.getvalue().split("\n")[:-1]]
    assert lines[::2] == lines[1::2]
    assert len(lines) == 6


def test_sinks_and_facts_of_the_application_are_for_every_warning(lines: io.StringIO) -> None:
    more, telemetry = list[str](), Telemetry(EventBus())
    logger.add(lambda line: more.append(str(line)), format="{message} {extra[task_id]}")
    with logger.contextualize(service="shop"):
        telemetry.listen(FAILED)
    telemetry.listen(SUCCEEDED)
    assert more == ["task failed a\n"]
    assert [line.get("service") for line in parsed(lines)] == ["shop", None]


def test_secrets_in_facts_of_events_are_hidden() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream, redact="queue")
    telemetry = Telemetry(EventBus())
    telemetry.listen(SUCCEEDED)
    telemetry.listen(events.StoreFailed(during="x", error=f"password={SECRET}", next_try_s=0.1))
    logger.remove()
    assert "queue=***" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    configure_logging(stream=stream)
    Telemetry(EventBus()).listen(SUCCEEDED)
    logger.remove()
    assert "\x1b[" in stream.getvalue()


class Slow(io.StringIO):
    """Writes a line in two parts, with time in between."""

    def write(self, text: str) -> int:
        middle = len(text) // 2
        super().write(text[:middle])
        time.sleep(0.0005)
        super().write(text[middle:])
        return len(text)


def test_lines_of_all_threads_are_whole() -> None:
    stream = Slow()
    configure_logging("DEBUG", as_json=True, stream=stream)
    telemetry = Telemetry(EventBus())

    def by_events() -> None:
        for _ in range(50):
            telemetry.listen(SUCCEEDED)

    def by_logger() -> None:
        for _ in range(50):
            logger.info("from a handler")

    threads = [threading.Thread(target=work) for work in (by_events, by_logger, by_events, by_logger)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    logger.remove()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert (messages.count("task succeeded"), messages.count("from a handler")) == (100, 100)


def test_a_line_has_left_the_process_when_it_is_written() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=False, line_buffering=False)
    configure_logging("DEBUG", as_json=True, stream=stream)
    Telemetry(EventBus()).listen(SUCCEEDED)
    logger.remove()
    assert raw.getvalue().endswith(b"}\n")


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.parametrize("way", ["by events", "by the logger"])
def test_the_time_of_a_line_does_not_move_with_the_zone_of_its_host(
    as_json: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, telemetry = io.StringIO(), Telemetry(EventBus())
    configure_logging("DEBUG", as_json=as_json, stream=stream)
    for zone in ("UTC", "Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        telemetry.listen(SUCCEEDED) if way == "by events" else logger.info("from a handler")
    monkeypatch.undo()
    time.tzset()
    logger.remove()
    lines = stream.getvalue().splitlines()
    times = [json.loads(line)["time"] if as_json else line[:STAMP] for line in lines]
    assert all(one.endswith("Z") for one in times)
    moments = [datetime.fromisoformat(one).timestamp() for one in times]
    assert max(abs(moment - time.time()) for moment in moments) < 600


def test_a_line_that_is_logged_in_the_midst_of_a_write_blocks_nothing() -> None:
    class Nested(io.StringIO):
        def write(self, text: str) -> int:
            if "task succeeded" in text:
                logger.info("from a finalizer")
            return super().write(text)

    stream = Nested()
    configure_logging("INFO", stream=stream)
    Telemetry(EventBus()).listen(SUCCEEDED)
    logger.remove()
    assert ["from a finalizer" in line for line in stream.getvalue().splitlines()] == [False, True]


def test_a_finalizer_that_warns_in_the_midst_of_a_write_and_a_thread_that_warns_wait_for_none() -> None:
    inside, warned = threading.Event(), threading.Event()

    class Nested(io.StringIO):
        def write(self, text: str) -> int:
            if "task succeeded" in text:
                inside.set()
                assert warned.wait(LONG_S)  # the other thread has its line accepted although this one holds the stream
                logger.warning("from a finalizer")
            return super().write(text)

    stream = Nested()
    configure_logging("INFO", stream=stream)
    writer = threading.Thread(target=Telemetry(EventBus()).listen, args=(SUCCEEDED,), daemon=True)
    writer.start()
    assert inside.wait(LONG_S)
    logger.warning("from beside")
    warned.set()
    writer.join(LONG_S)
    logger.remove()
    assert [line.split()[-1] for line in stream.getvalue().splitlines()[1:]] == ["beside", "finalizer"]


def test_lines_of_events_that_happened_together_keep_their_order() -> None:
    stream = io.StringIO()
    configure_logging("INFO", stream=stream)
    Telemetry(EventBus()).listen_to_all([SUCCEEDED, FAILED, SUCCEEDED])
    logger.remove()
    assert [line.split()[3:5] for line in stream.getvalue().splitlines()] == [
        ["task", "succeeded"],
        ["task", "failed"],
        ["task", "succeeded"],
    ]
