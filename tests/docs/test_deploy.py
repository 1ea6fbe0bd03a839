"""What runs the agents in production fits the agents' settings, and parses where it will be parsed."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from supervisor.options import ServerOptions

from thunderagent.settings import Settings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "thunderagent.service"
CONF = ROOT / "systemd" / "supervisord.conf"


def unit() -> dict[str, dict[str, list[str]]]:
    """Sections of the unit, with every value of a repeated key."""
    sections: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for number, line in enumerate(UNIT.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
            continue
        name, equals, value = line.partition("=")
        assert equals and name.isalpha(), f"line {number} of the unit is no setting: {line!r}"
        sections[section][name].append(value)
    return sections


def service(name: str) -> str:
    """The last value, which is the one that counts."""
    return unit()["Service"][name][-1]


def unit_environment() -> dict[str, str]:
    pairs = (value.partition("=") for value in unit()["Service"]["Environment"])
    return {name: value for name, _, value in pairs}


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that supervisor itself reads from the file."""
    for name in [name for name in os.environ if name.startswith(("AGENT_", "THUNDERAGENT_"))]:
        monkeypatch.delenv(name)
    for name, value in unit_environment().items():
        # The folders must exist when supervisor reads the file; on the machine systemd makes them.
        monkeypatch.setenv(name, str(tmp_path) if value.startswith("/") else value)
    options: Any = ServerOptions()
    options.realize(["-n", "-c", str(CONF)])
    (group,) = options.process_group_configs
    return list(group.process_configs)


def test_supervisor_reads_as_many_agents_as_the_environment_says(agents: list[Any]) -> None:
    assert [one.name for one in agents] == ["agent-0", "agent-1"]
    assert all(one.command.endswith("/thunderagent run jobs") for one in agents)
    assert len({one.stdout_logfile for one in agents}) == 2


def test_an_agent_has_time_to_drain_before_it_is_killed(agents: list[Any]) -> None:
    for one in agents:
        assert one.stopsignal == signal.SIGTERM
        assert one.stopwaitsecs > Settings().drain_s
        assert float(one.environment["THUNDERAGENT_STOP_WAIT_S"]) == one.stopwaitsecs
        assert one.stopasgroup and one.killasgroup


def test_systemd_waits_longer_than_supervisor(agents: list[Any]) -> None:
    assert float(service("TimeoutStopSec")) > max(one.stopwaitsecs for one in agents) + 10
    assert service("KillMode") == "mixed", "TERM to the whole group would drain the agents behind supervisor's back"
    assert service("KillSignal") == "SIGTERM"


def test_both_restart_what_dies_and_rotate_logs(agents: list[Any]) -> None:
    assert service("Restart") == "always"
    for one in agents:
        assert one.autorestart.__name__ == "RestartUnconditionally"
        assert one.startsecs > 0
        assert 0 < one.stdout_logfile_maxbytes < 1 << 30
        assert one.stdout_logfile_backups > 0


def test_nobody_else_can_control_the_agents() -> None:
    text = CONF.read_text(encoding="utf-8")
    assert "[inet_http_server]" not in text
    assert "chmod=0600" in text


def test_the_unit_sets_every_variable_that_the_conf_reads() -> None:
    used = set(re.findall(r"%\(ENV_(\w+)\)s", CONF.read_text(encoding="utf-8")))
    assert used <= unit_environment().keys()
    assert not any(name.startswith("THUNDERAGENT_") for name in used), "the agent refuses settings it does not know"


def test_the_unit_gives_settings_that_the_agent_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in unit_environment().items() if name.startswith("THUNDERAGENT_")}
    for name in given:
        assert name.removeprefix("THUNDERAGENT_").lower() in Settings.model_fields
    assert given["THUNDERAGENT_STORE"].startswith("sqlite:////var/lib/thunderagent/"), "the one folder jobs may write"


def test_the_unit_runs_supervisor_in_the_foreground_with_this_file() -> None:
    program, *arguments = service("ExecStart").split()
    assert program == unit_environment()["AGENT_BIN"] + "/supervisord"
    assert arguments[:2] == ["-n", "-c"]
    assert Path(arguments[2]).parts[-2:] == CONF.parts[-2:]
