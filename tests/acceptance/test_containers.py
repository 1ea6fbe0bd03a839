"""Agents in PID namespaces, as containers of one host are: each is process 1, and several may have one host name."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.conftest import HEARTBEAT_S, SWEEP_S, Place, Start
from tests.acceptance.processes import LONG_S, AgentProcess, Marks, until
from thunderagent.model.task import Status

CONTAINER: Final = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")


def has_namespaces() -> bool:
    """Whether this machine lets us make PID namespaces."""
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not has_namespaces(), reason="PID namespaces need Linux, root and unshare"),
]


def signal_init(agent: AgentProcess, number: signal.Signals) -> None:
    """Signal process 1 of the namespace, as a container engine does."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    os.kill(int(until(lambda: children.read_text().split(), LONG_S, "process 1")[0]), number)


def test_an_agent_that_is_process_1_drains_on_sigterm(sqlite_place: Place, start: Start, marks: Marks) -> None:
    agent = start(sqlite_place, within=CONTAINER)
    assert agent.name.split(":")[1] == "1"
    task = sqlite_place.client.enqueue("hold.isolated", marks.payload)
    marks.read(task.id, 1, "started")
    signal_init(agent, signal.SIGTERM)
    agent.line("agent draining")
    marks.release()
    assert agent.wait(10) == 0
    assert sqlite_place.task(task.id).status is Status.SUCCESS


def test_a_lost_container_is_not_taken_for_alive_by_the_next_process_1_of_its_host(
    sqlite_place: Place, start: Start, marks: Marks
) -> None:
    task = sqlite_place.client.enqueue("hold.sync", marks.payload)
    names = set()
    for fence in (1, 2):
        agent = start(sqlite_place, within=CONTAINER, lease_s=1.0, heartbeat_s=0.2, max_crashes=1)
        names.add(agent.name)
        marks.read(task.id, fence, "started")
        signal_init(agent, signal.SIGKILL)
        agent.wait(10)
    assert len(names) == 2
    assert len({name.rpartition(":")[0] for name in names}) == 1, "host and pid are the same"
    start(sqlite_place, within=CONTAINER, lease_s=1.0, heartbeat_s=0.2, max_crashes=1)
    failed = sqlite_place.wait(task.id, Status.FAILED, within_s=40.0)
    assert str(failed.errors[0]["error"]).startswith("agent ")
    assert str(failed.error).startswith("2 agents were lost while they ran it (max_crashes is 1), at last with ")


def test_a_container_whose_clock_of_the_start_is_shifted_leaves_the_tasks_of_others(
    sqlite_place: Place, start: Start, marks: Marks
) -> None:
    """A time namespace: the start of the machine has the same name there, and was a day earlier."""
    start(sqlite_place, within=CONTAINER)
    task = sqlite_place.client.enqueue("hold.sync", marks.payload)
    marks.read(task.id, 1, "started")
    start(sqlite_place, within=(*CONTAINER, "--time", "--boottime=86400")).line("agent started")

    def beats() -> int:
        return sqlite_place.task(task.id).hb or 0

    enough = beats() + 2 * SWEEP_S / HEARTBEAT_S + 1
    until(lambda: beats() > enough, LONG_S, "some sweeps")
    marks.release()
    assert sqlite_place.wait(task.id, Status.SUCCESS).fence == 1
