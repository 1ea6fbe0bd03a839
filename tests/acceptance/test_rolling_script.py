"""`scripts/rolling-restart` under a real supervisord with the configuration that we ship."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import SETTINGS, Place
from tests.acceptance.processes import BIN, HERE, ROOT, Marks, is_alive, until
from tests.acceptance.supervised import supervised
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "scripts" / "rolling-restart"
LONG_S = 90


def rolling(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script, as an operator runs it."""
    return subprocess.Popen(
        [SCRIPT, "--run", folder, "--health", folder / "health", *arguments],
        env={**os.environ, "AGENT_BIN": str(BIN)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_agents_restart_one_after_the_other_and_a_running_task_ends_well(
    sqlite_place: Place, marks: Marks, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "store": sqlite_place.url, "health_folder": tmp_path / "health", "slots": 1}
    with supervised(tmp_path, jobs="workjobs", home=HERE, number=2, **settings) as agents:
        before = [agents.started(index) for index in range(2)]
        tasks = [sqlite_place.client.enqueue("hold.sync", marks.payload) for _ in range(2)]
        runs = [marks.read(task.id, 1, "started") for task in tasks]
        assert sorted(run["pid"] for run in runs) == sorted(before), "one agent has both"
        with rolling(tmp_path) as script:
            until(lambda: agents.logs[0].lines("agent draining"), 30.0, agents.log)
            assert agents.logs[1].lines("agent draining") == [], "both drain at once"
            marks.release()
            said, _ = script.communicate(timeout=LONG_S)
        assert script.returncode == 0, said
        after = [agents.started(index, 2) for index in range(2)]
        assert said.splitlines() == [
            "restarting agent:agent-0 (1 of 2)",
            f"agent:agent-0 serves as process {after[0]}",
            "restarting agent:agent-1 (2 of 2)",
            f"agent:agent-1 serves as process {after[1]}",
        ]
        for task in tasks:
            done = sqlite_place.task(task.id)
            assert (done.status, done.fence, done.retry_count, done.crash_count) == (Status.SUCCESS, 1, 0, 0)
        with rolling(tmp_path, "--check") as script:
            said, _ = script.communicate(timeout=LONG_S)
        assert (script.returncode, said) == (0, "2 agents serve\n")


def test_code_that_does_not_start_stops_the_restart_at_the_first_agent(sqlite_place: Place, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(HERE / "workjobs", home / "workjobs")
    settings: dict[str, Any] = {**SETTINGS, "store": sqlite_place.url, "health_folder": tmp_path / "health"}
    changes = {"directory": str(home)}
    with supervised(tmp_path, jobs="workjobs", home=home, number=2, changes=changes, **settings) as agents:
        before = [agents.started(index) for index in range(2)]
        until(lambda: "RUNNING" in agents.control("status", "agent:agent-1"), 30.0, agents.log)
        (home / "workjobs" / "quick.py").write_text("import no_such_module\n")
        with rolling(tmp_path, "--wait", "5") as script:
            said, _ = script.communicate(timeout=LONG_S)
        assert script.returncode == 1, said
        assert "agent:agent-0" in said
        assert "--rollback" in said
        assert "agent:agent-1" not in said
        assert not is_alive(before[0])
        assert is_alive(before[1]), "what was not reached goes on as it was"
        assert agents.logs[1].lines("agent draining") == []
