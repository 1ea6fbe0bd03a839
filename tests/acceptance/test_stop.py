"""Stopping: what runs may end, what does not is given back at no cost, and the process does end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.conftest import SETTINGS, Place, Start
from tests.acceptance.processes import COMMAND, LONG_S, Marks, environment, is_alive, until
from thunderagent.agent.executors.child_end import DESCENDANTS_END_S
from thunderagent.agent.in_flight import HURRY_S
from thunderagent.model.outlet import LINES_END_S
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

KINDS = ("sync", "async", "isolated")
SLACK_S = 2.0
"""What ending an interpreter on a busy machine may take."""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
@pytest.mark.parametrize("whom", ["agent", "group"])
def test_a_signal_drains_running_tasks_and_claims_no_more(
    place: Place, start: Start, marks: Marks, how: signal.Signals, whom: str
) -> None:
    agent = start(place)
    tasks = [place.client.enqueue(f"hold.{kind}", marks.payload) for kind in KINDS]
    for task in tasks:
        marks.read(task.id, 1, "started")
    if whom == "agent":
        agent.send(how)
    else:
        agent.signal_group(how)
    assert agent.line("agent draining")["running"] == len(tasks)
    late = place.client.enqueue("quick.add", {"a": 1})
    marks.release()
    assert agent.wait(10) == 0
    for task in tasks:
        done = place.task(task.id)
        assert (done.status, done.fence, done.retry_count, done.crash_count) == (Status.SUCCESS, 1, 0, 0)
        assert agent.pid in (done.result["pid"], done.result["parent"])
    assert place.task(late.id).fence == 0, "a draining agent claimed"
    assert agent.log.lines("agent stopped")[-1]["stuck"] == 0
    assert not agent.log.other
    assert place.client.agents.list() == []


def test_tasks_longer_than_the_drain_go_back_at_no_cost_and_end_elsewhere(
    place: Place, start: Start, marks: Marks
) -> None:
    agent = start(place, drain_s=0.5)
    tasks = [place.client.enqueue(f"hold.{kind}", marks.payload) for kind in KINDS]
    for task in tasks:
        marks.read(task.id, 1, "started")
    began = time.monotonic()
    assert agent.stop(0.5 + HURRY_S + SLACK_S) == 0
    assert time.monotonic() - began > 0.5, "the drain was cut short"
    for task in tasks:
        assert marks.read(task.id, 1, "stopped")["why"] == "AgentDraining"
        back = place.task(task.id)
        assert (back.status, back.retry_count, back.crash_count, back.errors) == (Status.PENDING, 0, 0, ())
        assert back.lease_owner is None
    assert len(agent.log.lines("task released")) == len(tasks)

    marks.release()
    heir = start(place)
    for task in tasks:
        done = place.wait(task.id, Status.SUCCESS)
        assert (done.fence, done.retry_count, done.crash_count, done.attempt) == (2, 0, 0, 1)
        assert heir.pid in (done.result["pid"], done.result["parent"])
    assert heir.stop() == 0


def test_a_second_signal_hurries(place: Place, start: Start, marks: Marks) -> None:
    agent = start(place, drain_s=30)
    task = place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    agent.send(signal.SIGTERM)
    agent.line("agent draining")
    assert place.task(task.id).status is Status.RUNNING
    agent.send(signal.SIGTERM)
    assert agent.wait(HURRY_S + SLACK_S) == 0
    assert marks.read(task.id, 1, "stopped")["why"] == "AgentDraining"
    back = place.task(task.id)
    assert (back.status, back.retry_count, back.crash_count) == (Status.PENDING, 0, 0)


@pytest.mark.parametrize("kind", ["sync", "isolated", "async", "blocking"])
def test_a_handler_that_ignores_everything_does_not_keep_the_process_alive(
    sqlite_place: Place, start: Start, marks: Marks, kind: str
) -> None:
    place = sqlite_place
    agent = start(place, drain_s=0.5)
    task = place.client.enqueue(f"deaf.{kind}", marks.payload)
    runs_in = marks.read(task.id, 1, "started")["pid"]
    assert agent.stop(0.5 + HURRY_S + SLACK_S) == 0
    until(lambda: not is_alive(runs_in), 3.0, "the end of the process in which the handler runs")
    assert agent.log.lines("agent stopped")[-1]["stuck"] == 1
    back = place.task(task.id)
    assert (back.status, back.retry_count, back.crash_count) == (Status.PENDING, 0, 0)


NOISY = 40
"""Handlers, each of which prints 40 KB; a pipe holds 64."""


def test_a_log_pipe_that_nobody_reads_stops_neither_handlers_nor_the_signal(
    sqlite_place: Place, tmp_path: Path
) -> None:
    place = sqlite_place
    with piped_agent(place, tmp_path) as (agent, _):
        tasks = [
            place.client.enqueue(f"noisy.{('sync', 'async', 'sync', 'isolated')[one % 4]}", {}) for one in range(NOISY)
        ]
        for task in tasks:
            done = place.wait(task.id, Status.SUCCESS)
            assert (done.fence, done.retry_count, done.crash_count) == (1, 0, 0)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(HURRY_S + LINES_END_S + SLACK_S) == 0
    assert place.client.agents.list() == []


def test_a_log_pipe_that_is_read_again_tells_what_is_missing(sqlite_place: Place, tmp_path: Path) -> None:
    place = sqlite_place
    with piped_agent(place, tmp_path) as (agent, reader):
        tasks = [place.client.enqueue("noisy.sync", {}) for _ in range(NOISY)]
        for task in tasks:
            place.wait(task.id, Status.SUCCESS)

        def note() -> str | None:
            notes = [note for one in place.client.agents.list() for note in one.info["health"]["notes"]]
            return next((note for note in notes if "were dropped" in note), None)

        dropped = int(until(note, LONG_S, "a note on dropped lines").split()[0])
        agent.send_signal(signal.SIGTERM)
        text = b""
        while piece := os.read(reader, 1 << 16):
            text += piece
        assert agent.wait(HURRY_S + LINES_END_S + SLACK_S) == 0
    lines = text.decode().splitlines()
    printed = [line for line in lines if " says its line number " in line]
    assert f"thunderagent: {dropped} lines were dropped here, which nobody took in time" in lines
    assert len(printed) == NOISY * 1000 - dropped
    assert any('"agent stopped"' in line for line in lines)


@contextmanager
def piped_agent(place: Place, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An agent whose standard output and standard error are one pipe, and the end of it that should be read."""
    reader, writer = os.pipe()
    try:
        agent = subprocess.Popen(
            [COMMAND, "run", "workjobs", "--json"],
            env=environment(**SETTINGS, store=place.url),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
        )
    finally:
        os.close(writer)
    try:
        yield agent, reader
    finally:
        agent.kill()
        agent.wait(LONG_S)
        os.close(reader)


# Processes that handlers have started


def started(file: Path) -> int:
    return int(until(lambda: file.read_text(encoding="utf-8") if file.exists() else None, LONG_S, "a process"))


@pytest.mark.parametrize("how", ["killed", "stopped", "ended"])
def test_what_an_isolated_handler_has_started_ends_with_it(
    sqlite_place: Place, start: Start, tmp_path: Path, how: str
) -> None:
    place = sqlite_place
    agent = start(place, drain_s=0.5)
    payload = {"file": str(tmp_path / "pid"), "waits": how != "ended"}
    task = place.client.enqueue("family.isolated", payload)
    pid = started(tmp_path / "pid")
    if how == "killed":
        agent.kill()
    elif how == "stopped":
        agent.stop()
    else:
        place.wait(task.id, Status.SUCCESS)
    until(lambda: not is_alive(pid), LONG_S, "the end of the process that the handler has started")


def test_what_a_handler_in_a_thread_has_started_ends_with_the_agent_unless_it_has_a_session_of_its_own(
    sqlite_place: Place, start: Start, tmp_path: Path
) -> None:
    place = sqlite_place
    agent = start(place)
    files = {detached: tmp_path / f"pid-{detached}" for detached in (False, True)}
    for detached, file in files.items():
        task = place.client.enqueue("family.sync", {"file": str(file), "detached": detached})
        place.wait(task.id, Status.SUCCESS)
    ours, detached_one = started(files[False]), started(files[True])
    try:
        assert is_alive(ours)
        assert agent.stop(HURRY_S + DESCENDANTS_END_S + SLACK_S) == 0
        assert not is_alive(ours)
        assert is_alive(detached_one)
    finally:
        os.kill(detached_one, signal.SIGKILL)
