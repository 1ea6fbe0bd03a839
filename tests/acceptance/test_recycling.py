"""Real agents that recycle, drain when they are asked to, and are killed: exit codes, and what becomes of the tasks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import Marks, cli, until
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

LOOK_S = 10.0
"""An agent looks every 5 s whether it is time for a fresh one."""


def test_agents_recycle_after_their_tasks_and_nothing_is_lost_nor_an_attempt_burned(
    sqlite_place: Place, marks: Marks, start: Start
) -> None:
    client = sqlite_place.client
    tasks = [one.task.task_id for one in client.enqueue_many("quick.count", [marks.payload] * 400)]
    first = start(sqlite_place, recycle_tasks=300)
    assert first.wait(LOOK_S + 15.0) == 0
    [told] = first.log.lines("agent retires: it drains, for a fresh one to take its place")
    assert "tasks (THUNDERAGENT_RECYCLE_TASKS)" in told["reason"]
    tasks += [one.task.task_id for one in client.enqueue_many("quick.count", [marks.payload] * 100)]
    second = start(sqlite_place, recycle_tasks=300)
    until(lambda: client.store.engine.count("SUCCESS") == 500, 20.0, lambda: second.log.tail)
    assert second.stop() == 0
    found = client.store.get(tasks).values()
    assert {(one.status, one.retry_count, one.crash_count, one.fence) for one in found} == {(Status.SUCCESS, 0, 0, 1)}
    assert len(list(marks.runs())) == 500
    assert list(client.agents.list()) == []


def test_an_agent_above_its_memory_retires_and_names_the_job(sqlite_place: Place, start: Start) -> None:
    agent = start(sqlite_place, recycle_mib=250)
    agent.line("agent started")
    kept = [sqlite_place.client.enqueue("hungry.keep", {"mib": 120}) for _ in range(2)]
    assert agent.wait(LOOK_S + 15.0) == 0
    [told] = agent.log.lines("agent retires: it drains, for a fresh one to take its place")
    assert "over 250 (THUNDERAGENT_RECYCLE_MIB)" in told["reason"]
    assert "most of it while these ran: hungry.keep" in told["reason"]
    assert {sqlite_place.task(task.task_id).status for task in kept} == {Status.SUCCESS}


def test_an_agent_that_is_too_large_from_its_start_goes_on(sqlite_place: Place, marks: Marks, start: Start) -> None:
    agent = start(sqlite_place, recycle_mib=5)
    agent.line("no recycling by memory: the agent begins with more than recycle_mib", recycle_mib=5)
    task = sqlite_place.client.enqueue("quick.count", marks.payload)
    sqlite_place.wait(task.task_id, Status.SUCCESS)
    assert agent.stop() == 0
    assert agent.log.lines("agent retires: it drains, for a fresh one to take its place") == []


def test_an_agent_is_asked_to_drain_and_another_goes_on(
    place: Place, marks: Marks, start: Start, tmp_path: Path
) -> None:
    agent, other = start(place, slots=1, drain_s=20), start(place, slots=1, drain_s=20)
    tasks = [place.client.enqueue("hold.sync", marks.payload) for _ in range(2)]
    for task in tasks:
        marks.read(task.task_id, 1, "started")
    done = cli(
        *("agents", "drain", agent.name, "--wait", "0.5", "--reason", "an upgrade", "--store", place.url), cwd=tmp_path
    )
    assert (done.returncode, "(1 task)" in done.stderr) == (1, True), done.stderr
    agent.line("agent retires: it drains, for a fresh one to take its place", within_s=20.0)
    marks.release()
    done = cli("agents", "drain", agent.name, "--wait", "20", "--json", "--store", place.url, cwd=tmp_path)
    if done.returncode == 0:  # else it was gone before the command
        assert json.loads(done.stdout) == {"drains": [agent.name], "gone": True}
    assert agent.wait(20.0) == 0
    for task in tasks:
        ended = place.wait(task.task_id, Status.SUCCESS)
        assert (ended.retry_count, ended.crash_count, ended.fence) == (0, 0, 1)
    assert other.process.poll() is None
    assert [one.name for one in place.client.agents.list()] == [other.name]
    later = place.client.enqueue("quick.count", marks.payload)
    place.wait(later.task_id, Status.SUCCESS)
    assert other.stop() == 0


def test_a_task_whose_agents_all_die_says_which_job_and_where_to_look(
    sqlite_place: Place, marks: Marks, start: Start
) -> None:
    task = sqlite_place.client.enqueue("hold.sync", marks.payload)
    for fence in (1, 2):
        agent = start(sqlite_place, max_crashes=1, lease_s=1.5, heartbeat_s=0.3)
        marks.read(task.task_id, fence, "started", within_s=20.0)
        name = agent.name
        agent.send(signal.SIGKILL)
        assert agent.wait(10.0) == -signal.SIGKILL
    start(sqlite_place, max_crashes=1)
    failed = sqlite_place.wait(task.task_id, Status.FAILED, within_s=20.0)
    assert failed.error is not None
    assert failed.error.startswith("2 agents were lost while they ran it (max_crashes is 1)")
    assert f"the last was {name}: look for 'Out of memory' in the kernel log of its host" in failed.error
    assert "as the job hold.sync may need more memory" in failed.error
