"""Streams that never wait for a reader: nobody reads, somebody reads again, the reader goes, the process forks."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest
from loguru import logger

from thunderagent.agent.health.judgement import Facts, Limits, judge
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.outlet import Outlet, dropped_lines, end_lines, outlet_of, said, without_waiting
from thunderagent.telemetry.logs import Telemetry, configure_logging

LONG_S = 20.0
LINE = b"a line of a log that nobody reads %06d\n"


@dataclass(slots=True)
class Pipe:
    """A pipe, and a stream into it, whose reader is this test."""

    reader: int
    stream: TextIO

    @property
    def below(self) -> Outlet:
        found = outlet_of(without_waiting(self.stream))
        assert found is not None
        return found

    def fill(self) -> int:
        """Fill the pipe to its end, as another process would; how many bytes that took."""
        own = os.open(f"/proc/self/fd/{self.stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        number = 0
        try:
            while True:
                number += os.write(own, b"." * 4096)
        except BlockingIOError:
            return number
        finally:
            os.close(own)

    def read(self, number: int) -> bytes:
        """So many bytes."""
        found = b""
        while len(found) < number:
            found += self._some(min(1 << 16, number - len(found)))
        return found

    def _some(self, most: int) -> bytes:
        assert select.select([self.reader], [], [], LONG_S)[0], "nothing comes"
        return os.read(self.reader, most)

    def lines(self, *words: str) -> list[str]:
        """The lines up to those that have these words in them."""
        found = ""
        while not all(word in found for word in words) or not found.endswith("\n"):
            found += self._some(1 << 16).decode()
        return found.splitlines()


@pytest.fixture(params=["at once", "by a thread"])
def pipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """One that can be opened again so that its writers do not wait; and one that cannot, as it is another user's."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    with monkeypatch.context() as patch:
        if request.param == "by a thread":

            def refuse(*_: object, **__: object) -> int:
                raise PermissionError(13, "Permission denied")

            patch.setattr(os, "open", refuse)
        without_waiting(stream)
    one = Pipe(reader, stream)
    yield one
    one.below.dropped = 0
    os.close(reader)
    stream.close()


def test_a_writer_never_waits_and_what_has_no_room_is_counted_where_it_is_missing(pipe: Pipe) -> None:
    filled = pipe.fill()
    below, number = pipe.below, 40_000
    for one in range(number):
        below.write(LINE % one)
    assert 0 < below.dropped < number
    pipe.read(filled)
    lines = pipe.lines("were dropped")
    kept = number - below.dropped
    assert lines[:-1] == [(LINE % one).decode().rstrip() for one in range(kept)], "whole, and in their order"
    assert lines[-1] == f"thunderagent: {below.dropped} lines were dropped here, which nobody took in time"
    below.write(b"after\n")
    assert pipe.lines("after") == ["after"]


def test_lines_wait_for_their_reader_in_their_order(pipe: Pipe) -> None:
    filled = pipe.fill()
    stream = without_waiting(pipe.stream)
    print("first", "of", "two", file=stream)
    print("second", file=stream)
    pipe.read(filled)
    assert pipe.lines("second") == ["first of two", "second"]
    assert pipe.below.dropped == 0


def test_a_line_longer_than_the_queue_is_written_whole(pipe: Pipe) -> None:
    text = "x" * (3 << 20)
    without_waiting(pipe.stream).write(f"{text}\n")
    assert pipe.lines("\n") == [text]


def test_a_reader_that_has_gone_costs_its_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = without_waiting(file)
        os.close(reader)
        print("to nobody", file=stream)
        print("again", file=stream)
        below = outlet_of(stream)
        assert below is not None
        assert below.dropped == 2


def test_a_stream_has_one_outlet_and_one_in_memory_needs_none(pipe: Pipe) -> None:
    stream = without_waiting(pipe.stream)
    assert without_waiting(pipe.stream) is stream
    assert without_waiting(stream) is stream
    assert (stream.fileno(), stream.isatty()) == (pipe.stream.fileno(), False)
    memory = io.StringIO()
    assert without_waiting(memory) is memory


def test_the_end_of_a_process_waits_for_its_last_lines_only_so_long(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = pipe.fill()
    monkeypatch.setattr(sys, "stderr", without_waiting(pipe.stream))
    sys.stderr.write("a line without its end")
    began = time.monotonic()
    end_lines(0.1)
    assert 0.1 <= time.monotonic() - began < LONG_S
    reads = threading.Thread(target=pipe.read, args=(filled + len("a line without its end"),))
    reads.start()
    end_lines(LONG_S)
    assert not pipe.below._waiting
    reads.join(LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True], ids=["read", "full"])
def test_a_forked_process_writes_by_itself(pipe: Pipe, is_full: bool) -> None:
    """Its parent may be in the midst of a line, and has the thread."""
    filled = pipe.fill() if is_full else 0
    without_waiting(pipe.stream).write("of the parent\n")
    if is_full:
        pipe.below._guard.acquire()
    forked = os.fork()
    if not forked:
        signal.alarm(int(LONG_S))
        without_waiting(pipe.stream).write("of the child\n")
        os._exit(0 if pipe.below.drain(LONG_S) else 1)
    if is_full:
        pipe.below._guard.release()
    pipe.read(filled)
    assert sorted(pipe.lines("of the child", "of the parent")) == ["of the child", "of the parent"]
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0


def test_a_finalizer_that_writes_in_the_midst_of_a_write_does_not_wait_for_itself(pipe: Pipe) -> None:
    below, again = pipe.below, list[int]()

    def writes_again(number: int) -> str:
        if not again:
            again.append(number)
            below.write(b"from a finalizer\n")
        return f"{number} dropped\n"

    below.said = writes_again
    below._lost = 3
    writes = threading.Thread(target=below.write, args=(b"a line\n",), daemon=True)
    writes.start()
    writes.join(LONG_S)
    assert not writes.is_alive()
    assert again == [3]


@pytest.mark.parametrize("drops", [False, True], ids=["kept", "dropped"])
def test_what_waits_when_an_outlet_is_closed_goes_to_its_own_file_and_to_no_other(
    pipe: Pipe, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, below = pipe.fill(), pipe.below
    below.write(b"the last line\n")
    if drops:
        monkeypatch.setattr(below, "_most", 0)
        below.write(b"too much\n")
    thread = below._thread
    assert thread is not None
    below.close()
    other, writer = os.pipe()  # takes the lowest numbers that are free
    pipe.read(filled)
    marks = [said(1).rstrip()] if drops else []
    assert pipe.lines("dropped" if drops else "the last line") == ["the last line", *marks]
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert not select.select([other], [], [], 0)[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(below._own)
    below.write(b"too late\n")
    assert below.dropped == drops + 1
    os.close(other)
    os.close(writer)


# What is written there


SUCCEEDED = events.TaskSucceeded(task_id="a", job="b", queue="c", fence=1, attempt=1, seconds=0.25)


@pytest.mark.parametrize("way", ["by events", "by the logger"])
def test_log_lines_never_wait_and_the_gap_is_a_line_of_the_log(
    pipe: Pipe, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = pipe.fill()
    monkeypatch.setattr(sys, "stderr", pipe.stream)
    monkeypatch.setattr(pipe.below, "_most", 1000)
    configure_logging("INFO", as_json=True)
    told = Telemetry(EventBus())
    for _ in range(20):
        told.listen(SUCCEEDED) if way == "by events" else logger.info("from a handler")
    logger.remove()
    pipe.read(filled)
    lines = [json.loads(line) for line in pipe.lines("were dropped")]
    gap = lines.pop()
    assert (gap["level"], gap["message"], gap["lines"]) == ("WARNING", "log lines were dropped", 20 - len(lines))
    assert lines
    assert dropped_lines() >= gap["lines"]


def test_a_listener_that_fails_is_told_without_waiting(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, bus = pipe.fill(), EventBus()
    monkeypatch.setattr(sys, "stderr", pipe.stream)

    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    bus.subscribe(broken)
    bus.emit(SUCCEEDED)
    pipe.read(filled)
    assert pipe.lines("failed") == ["a listener of TaskSucceeded failed: RuntimeError('a bug')"]


def test_the_health_of_an_agent_tells_of_dropped_lines() -> None:
    limits = Limits(progress_s=60.0, pause_s=30.0)
    assert judge(Facts(), limits).notes == ()
    health = judge(Facts(lines_dropped=7), limits)
    assert health.healthy
    assert "7 lines" in health.notes[0]
