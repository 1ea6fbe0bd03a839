"""The bus: who is told what, in which order, and what a listener that fails may do."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from loguru import logger

from thunderagent.model import events
from thunderagent.model.bus import Event, EventBus
from thunderagent.telemetry.logs import Telemetry, configure_logging

ABOUT: dict[str, Any] = {"job": "test.job", "queue": "default", "fence": 1, "attempt": 1}
ENDED = [events.TaskSucceeded(task_id=f"task-{number}", seconds=0.1, **ABOUT) for number in range(5)]


class Counting(io.StringIO):
    """A stream that counts the calls that write to it."""

    calls = 0

    def write(self, text: str) -> int:
        self.calls += 1
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[Counting]:
    one = Counting()
    configure_logging("INFO", as_json=True, stream=one)
    yield one
    logger.remove()


def test_events_that_happened_together_are_told_to_all_in_their_order() -> None:
    bus, one_by_one, at_once = EventBus(), list[Event](), list[Sequence[Event]]()
    bus.subscribe(one_by_one.append)
    end = bus.subscribe(one_by_one.append, several=at_once.append)
    bus.emit_all(ENDED)
    assert one_by_one == ENDED
    assert at_once == [ENDED]
    end()
    bus.emit_all(ENDED)
    assert (len(one_by_one), len(at_once)) == (10, 1)


def test_a_listener_that_fails_on_several_hurts_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    bus, told = EventBus(), list[Event]()

    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    bus.subscribe(broken)
    bus.subscribe(lambda event: None, several=broken)
    bus.subscribe(told.append)
    bus.emit_all(ENDED)
    assert told == ENDED
    failures = capsys.readouterr().err.splitlines()
    assert failures[:5] == ["a listener of TaskSucceeded failed: RuntimeError('a bug')"] * 5
    assert failures[5:] == ["a listener of events failed: RuntimeError('a bug')"]


def test_lines_of_events_that_happened_together_are_written_by_one_call(stream: Counting) -> None:
    bus = EventBus()
    telemetry = Telemetry(bus)
    bus.emit_all(ENDED)
    assert stream.calls == 1
    assert [f'"task_id": "task-{number}"' in line for number, line in enumerate(stream.getvalue().splitlines())] == (
        [True] * 5
    )
    assert telemetry.take() == {"succeeded": 5}


def test_a_log_that_nobody_takes_any_more_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stderr", Gone())
    configure_logging("INFO", as_json=True)
    bus, told = EventBus(), list[Event]()
    Telemetry(bus)
    bus.subscribe(told.append)
    try:
        bus.emit(ENDED[0])
        bus.emit_all(ENDED)
    finally:
        logger.remove()
    assert len(told) == 6, "the supervisor that read the log may be gone; the agent goes on"
