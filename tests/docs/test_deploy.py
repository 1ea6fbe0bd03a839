"""What runs the agents in production fits the agents' settings, and parses where it will be parsed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from supervisor.options import ServerOptions

from thunderagent.settings import Settings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "thunderagent.service"
ONE = ROOT / "systemd" / "thunderagent@.service"
TEMPLATE = ROOT / "systemd" / "environment"
CONF = ROOT / "systemd" / "supervisord.conf"


def unit(path: Path = UNIT) -> dict[str, dict[str, list[str]]]:
    """Sections of the unit, with every value of a repeated key."""
    sections: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
            continue
        name, equals, value = line.partition("=")
        assert equals and name.isalpha(), f"line {number} of the unit is no setting: {line!r}"
        sections[section][name].append(value)
    return sections


def service(name: str, path: Path = UNIT) -> str:
    """The last value, which is the one that counts."""
    return unit(path)["Service"][name][-1]


def unit_environment(path: Path = UNIT) -> dict[str, str]:
    pairs = (value.partition("=") for value in unit(path)["Service"]["Environment"])
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


@pytest.mark.parametrize("path", [UNIT, ONE], ids=lambda path: path.name)
def test_the_unit_gives_settings_that_the_agent_accepts(path: Path) -> None:
    given = {name: value for name, value in unit_environment(path).items() if name.startswith("THUNDERAGENT_")}
    for name in given:
        assert name.removeprefix("THUNDERAGENT_").lower() in Settings.model_fields
    assert given["THUNDERAGENT_STORE"].startswith("sqlite:////var/lib/thunderagent/"), "the one folder jobs may write"


def test_the_unit_runs_supervisor_in_the_foreground_with_this_file() -> None:
    program, *arguments = service("ExecStart").split()
    assert program == unit_environment()["AGENT_BIN"] + "/supervisord"
    assert arguments[:2] == ["-n", "-c"]
    assert Path(arguments[2]).parts[-2:] == CONF.parts[-2:]


# One agent a unit, without supervisor


def test_an_agent_of_its_own_unit_is_watched_and_has_time_to_drain() -> None:
    environment = unit_environment(ONE)
    stop_wait_s = float(environment["THUNDERAGENT_STOP_WAIT_S"])
    assert stop_wait_s >= Settings().drain_s + 5, "the agent would refuse to start"
    assert float(service("TimeoutStopSec", ONE)) > stop_wait_s + 10
    assert service("Type", ONE) == "notify"
    assert service("NotifyAccess", ONE) == "main", "the children of jobs do not speak for the agent"
    assert float(service("WatchdogSec", ONE)) >= 30
    assert service("Restart", ONE) == "always"
    assert (service("KillMode", ONE), service("KillSignal", ONE)) == ("mixed", "SIGTERM")
    assert unit(ONE)["Unit"]["StartLimitIntervalSec"] == ["0"]


def test_both_units_run_as_the_same_user_from_the_same_place_with_the_same_protection() -> None:
    differ = {"Type", "NotifyAccess", "WatchdogSec", "TimeoutStartSec", "TimeoutStopSec", "Environment", "ExecStart"}
    differ |= {"RuntimeDirectory", "RuntimeDirectoryPreserve", "LogsDirectory", "WorkingDirectory"}
    first, second = unit(UNIT)["Service"], unit(ONE)["Service"]
    assert {name: first[name] for name in first if name not in differ} == {
        name: second[name] for name in second if name not in differ
    }
    program, command, package = service("ExecStart", ONE).split()
    assert program == unit_environment()["AGENT_BIN"] + "/thunderagent"
    assert (command, package) == ("run", "${AGENT_JOBS}")
    assert service("WorkingDirectory", ONE) == unit_environment()["AGENT_HOME"], "the jobs are imported from there"


def test_supervisor_and_its_agents_do_not_speak_to_systemd() -> None:
    assert service("Type") == "exec"
    assert service("NotifyAccess") == "none", "else systemd names them a socket that is not for them"
    assert "WatchdogSec" not in unit()["Service"]


def test_the_environment_file_has_what_the_units_read_and_settings_that_exist() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    given = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert given == {name: unit_environment()[name] for name in ("AGENT_JOBS", "AGENT_PROCESSES", "THUNDERAGENT_STORE")}
    for name in re.findall(r"^# (THUNDERAGENT_\w+)=", text, re.MULTILINE):
        assert name.removeprefix("THUNDERAGENT_").lower() in Settings.model_fields
    for path in (UNIT, ONE):
        assert service("EnvironmentFile", path) == "-/etc/thunderagent/environment"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root folder with the units of this system and ours, and programs where ours expect them."""
    units = next(
        (path for path in map(Path, ("/usr/lib/systemd/system", "/lib/systemd/system")) if path.is_dir()), None
    )
    if units is None:
        pytest.skip("this machine has no units of systemd to verify ours with")
    shutil.copytree(units, tmp_path / "usr/lib/systemd/system", symlinks=True)
    bin_ = tmp_path / unit_environment()["AGENT_BIN"].removeprefix("/")
    bin_.mkdir(parents=True)
    for name in ("supervisord", "thunderagent"):
        (bin_ / name).write_text("#!/bin/sh\n")
        (bin_ / name).chmod(0o755)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    for path in (UNIT, ONE):
        shutil.copy(path, tmp_path / "etc/systemd/system")
    return tmp_path


def verify(root: Path, name: str) -> str:
    """What systemd finds wrong with a unit; nothing, if it is as it should be."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine")


@needs_systemd
@pytest.mark.parametrize("name", ["thunderagent.service", "thunderagent@1.service"])
def test_systemd_finds_nothing_wrong_with_the_units(root: Path, name: str) -> None:
    assert verify(root, name) == ""


@needs_systemd
@pytest.mark.parametrize(("path", "name"), [(UNIT, "thunderagent.service"), (ONE, "thunderagent@1.service")])
def test_systemd_would_find_a_wrong_key_and_a_program_that_is_not_there(root: Path, path: Path, name: str) -> None:
    place = root / "etc/systemd/system" / path.name
    place.write_text(place.read_text().replace("Restart=always", "Restrat=always"))
    assert "Restrat" in verify(root, name)
    shutil.rmtree(root / "opt")
    assert "is not executable" in verify(root, name)
