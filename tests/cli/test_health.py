"""The command `health`: exit codes for scripts, reasons for people."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.judgement import Health, Reason
from thunderagent.agent.health.probes import Probes
from thunderagent.cli import app
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.testing import FakeClock

HERE: Final = socket.gethostname()
AGENT: Final = f"{HERE}:4711:0a1b2c3d"
FINE: Final = Health(healthy=True, alive=True)
ILL: Final = Health(healthy=False, alive=True, reasons=(Reason("store", "the store has not answered for 75 s"),))


class Commands:
    """The commands on a store in a file, in this process."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/tasks.db"
        self.clock = FakeClock()
        self.store = open_store(Settings(store=self.url))
        self.said = ""
        """Standard error of the last command."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["health", *arguments])
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def agent(self, health: Any, name: str = AGENT) -> None:
        self.store.announce(name, {"queues": {"default": 10}, "health": health}, lives_s=60.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.store.engine.close()


def test_a_host_whose_agents_are_healthy_is_exit_code_0(run: Commands) -> None:
    run.agent(FINE.entry())
    run.agent(ILL.entry(), "elsewhere:1:00000000")
    assert run("--store", run.url) == f"{AGENT} healthy\n"
    assert run("--store", run.url, "--agent", AGENT) == f"{AGENT} healthy\n"


def test_one_that_is_not_healthy_is_exit_code_1_and_a_line_with_the_reason(run: Commands) -> None:
    run.agent(FINE.entry())
    run.agent({**ILL.entry(), "notes": ["the doorbell does not work"]}, f"{HERE}:4712:0a1b2c3d")
    assert run("--store", run.url, code=1).splitlines() == [
        f"{AGENT} healthy",
        f"{HERE}:4712:0a1b2c3d not healthy: the store has not answered for 75 s; the doorbell does not work",
    ]
    assert "elsewhere" not in run("--store", run.url, "--agent", AGENT)
    [told] = json.loads(run("--store", run.url, "--agent", f"{HERE}:4712:0a1b2c3d", "--json", code=1))
    assert (told["healthy"], told["alive"], told["reasons"]) == (False, True, ["the store has not answered for 75 s"])


def test_what_restarts_an_agent_asks_whether_it_is_alive(run: Commands, tmp_path: Path) -> None:
    """A container engine that asked for its health would restart a whole fleet whose store is away."""
    folder = str(tmp_path / "health")
    file = HealthFile(folder, now=time.time)
    for told, code in ((ILL, 0), (Health(healthy=False, alive=False), 1)):
        file.write({"agent": AGENT, **told.entry()}, every_s=60.0)
        assert AGENT in run("--folder", folder, "--alive", code=code)
        run("--folder", folder, code=1)
    file.remove()
    run("--folder", folder, "--alive", code=1)
    run("--store", run.url, "--alive", code=2)
    assert "--alive needs --folder or --url" in run.said


def test_no_agent_is_not_healthy(run: Commands) -> None:
    assert run("--store", run.url, code=1) == "no agent\n"
    assert json.loads(run("--store", run.url, "--json", code=1)) == []


def test_rows_of_older_agents_tell_enough(run: Commands) -> None:
    run.agent({"heartbeat_alive": True, "store_answers": True})
    assert run("--store", run.url) == f"{AGENT} healthy\n"
    run.agent({"heartbeat_alive": False, "store_answers": True})
    assert "its heartbeat has died, or the store does not answer it" in run("--store", run.url, code=1)


def test_a_row_that_is_not_renewed_is_that_of_an_agent_that_is_gone(
    run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.agent(FINE.entry())
    later = run.store.clock.now() + 50.0
    monkeypatch.setattr("thunderagent.model.clock.HostClock.now", lambda self: later)
    assert "its row was not renewed for 50 s: it was killed, or" in run("--store", run.url, code=1)


def test_files_are_read_without_a_store(run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "dynamodb://TaskTable?region=eu-central-1&endpoint=http://127.0.0.1:9")
    folder = str(tmp_path / "health")
    file = HealthFile(folder, now=run.clock.now)
    monkeypatch.setattr("time.time", run.clock.now)
    file.write({"agent": AGENT, **FINE.entry()}, every_s=1.0)
    assert run("--folder", folder) == f"{AGENT} healthy\n"
    file.write({"agent": AGENT, **ILL.entry()}, every_s=1.0)
    assert run("--folder", folder, code=1) == f"{AGENT} not healthy: the store has not answered for 75 s\n"
    [told] = json.loads(run("--folder", folder, "--json", code=1))
    assert (told["pid"], told["alive"]) == (os.getpid(), True)
    file.write({"agent": AGENT, **FINE.entry()}, every_s=1.0)
    run.clock.advance(5.0)
    assert "was not written for 5 s: its process runs, and does not get on" in run("--folder", folder, code=1)
    assert run("--folder", folder, "--agent", "elsewhere", code=1) == "no agent\n"
    file.remove()
    assert run("--folder", folder, code=1) == "no agent\n"


def test_a_folder_that_is_not_there_is_wrong_input(run: Commands, tmp_path: Path) -> None:
    run("--folder", str(tmp_path / "gone"), code=2)
    assert "THUNDERAGENT_HEALTH_FOLDER of the agents names it" in run.said
    run("--folder", str(tmp_path), "--url", "http://127.0.0.1:9", code=2)
    assert "not both" in run.said
    run("--url", "file:///etc/passwd", code=2)
    assert "write for example http://127.0.0.1:9464" in run.said


@pytest.mark.slow
def test_an_agent_is_asked_at_its_port(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    now = [FINE]
    probes = Probes("127.0.0.1", 21820, agent=AGENT, health=lambda: now[0])
    probes.start()
    try:
        assert run("--url", probes.url) == f"{AGENT} healthy\n"
        now[0] = ILL
        assert run("--url", f"{probes.url}/health", code=1) == f"{AGENT} not healthy: {ILL.reasons[0]}\n"
    finally:
        probes.close()
    assert f"{probes.url}/health does not answer as an agent does" in run("--url", probes.url, code=1)


@pytest.mark.slow
def test_what_is_no_agent_at_a_port_is_not_healthy(run: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("thunderagent.cli.health.ASK_S", 0.2)
            assert "does not answer as an agent does: " in run("--url", url, code=1)
