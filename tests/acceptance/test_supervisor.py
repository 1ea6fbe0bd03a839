"""Under a real supervisord with the configuration that we ship."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.conftest import SETTINGS, Place
from tests.acceptance.processes import BIN, HERE, ROOT, Log, Marks, environment, is_alive, until
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

CONF = ROOT / "systemd" / "supervisord.conf"


def test_supervisor_restarts_a_killed_agent_and_its_own_end_drains_both(
    place: Place, marks: Marks, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "store": place.url, "log_json": "true", "slots": 1, "drain_s": 20}
    given = {
        "AGENT_HOME": HERE,
        "AGENT_JOBS": "workjobs",
        "AGENT_BIN": BIN,
        "AGENT_PROCESSES": 2,
        "AGENT_RUN": tmp_path,
        "AGENT_LOGS": tmp_path,
    }
    logs = [Log(tmp_path / f"agent-{number}.log") for number in range(2)]

    def started(log: Log, number: int) -> str:
        lines = until(
            lambda: found if len(found := log.lines("agent started")) >= number else None,
            20.0,
            lambda: f"start {number} of an agent\n{log.tail}\n{(tmp_path / 'supervisord.log').read_text()}",
        )
        return str(lines[number - 1]["agent"])

    def pid(name: str) -> int:
        return int(name.split(":")[-2])

    with (tmp_path / "out").open("wb") as output:
        supervisor = subprocess.Popen(
            [BIN / "supervisord", "-n", "-c", CONF],
            env={**environment(**settings), **{name: str(value) for name, value in given.items()}},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    agents: list[str] = []
    try:
        agents += [started(log, 1) for log in logs]
        tasks = [place.client.enqueue("hold.isolated", marks.payload) for _ in range(2)]
        runs = [marks.read(task.id, 1, "started") for task in tasks]
        assert sorted(run["parent"] for run in runs) == sorted(pid(name) for name in agents), "one agent has both"

        lost = agents[0]
        os.kill(pid(lost), signal.SIGKILL)
        agents.append(started(logs[0], 2))
        [robbed] = [task for task, run in zip(tasks, runs, strict=True) if run["parent"] == pid(lost)]
        [kept] = [task for task in tasks if task is not robbed]
        assert marks.read(robbed.id, 2, "started", within_s=20)["parent"] == pid(agents[2])

        supervisor.send_signal(signal.SIGTERM)
        for log in logs:
            until(lambda log=log: log.lines("agent draining"), 10.0, log.tail)  # type: ignore[misc]
        assert supervisor.poll() is None, "supervisord did not wait for its agents"
        assert place.task(kept.id).status is Status.RUNNING
        marks.release()
        assert supervisor.wait(20) == 0
        for log in logs:
            assert log.lines("agent stopped")[-1]["stuck"] == 0
        ends = {task.id: place.task(task.id) for task in tasks}
        assert {task.status for task in ends.values()} == {Status.SUCCESS}
        assert (ends[kept.id].fence, ends[kept.id].crash_count) == (1, 0), "the signal to the group hurt a child"
        assert (ends[robbed.id].fence, ends[robbed.id].crash_count) == (2, 1)
        assert not any(is_alive(pid(name)) for name in agents)
    finally:
        if supervisor.poll() is None:
            supervisor.kill()
        supervisor.wait(10)
        for name in {*agents, *(str(line["agent"]) for log in logs for line in log.lines("agent started"))}:
            if is_alive(pid(name)):
                os.kill(pid(name), signal.SIGKILL)
