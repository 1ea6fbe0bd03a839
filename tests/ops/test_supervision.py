"""What of a supervisor cuts a drain off, read from its configuration."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.ops.doctor.supervision import (
    find_conf,
    find_others,
    look_at_agent_units,
    look_at_supervisor,
    read_programs,
    span_of,
)
from thunderagent.settings import Settings

FINE = """
[supervisord]
logfile=/tmp/supervisord.log

[program:agent]
command=%(ENV_AGENT_BIN)s/thunderagent run %(ENV_AGENT_JOBS)s
autorestart=true
stopsignal=TERM
stopwaitsecs=45 ; seconds
stopasgroup=true
environment=PYTHONUNBUFFERED="1",THUNDERAGENT_STOP_WAIT_S="45"

[program:web]
command=/usr/bin/gunicorn
stopwaitsecs=1
"""


def look(folder: Path, text: str, *, environ: dict[str, str] | None = None, unit: str | None = None) -> list[Finding]:
    conf = folder / "supervisord.conf"
    conf.write_text(text)
    units: tuple[str, ...] = ()
    if unit is not None:
        (folder / "thunderagent.service").write_text(f"[Service]\n{unit}\n")
        units = (str(folder / "thunderagent.service"),)
    return list(look_at_supervisor(Settings(), conf, environ or {}, units=units))


def changed(option: str, value: str | None) -> str:
    """The configuration with another value of an option, or without it."""
    line = f"{option}={value}" if value is not None else ""
    assert re.search(rf"^{option}=", FINE, re.MULTILINE)
    return re.sub(rf"^{option}=.*$", line, FINE, count=1, flags=re.MULTILINE)


def test_a_configuration_that_fits_is_found_good(tmp_path: Path) -> None:
    [found] = look(tmp_path, FINE)
    assert found.state is State.OK
    assert found.found.startswith("stopwaitsecs is 45 s, the drain takes up to 30 s; stopasgroup=true")


def test_what_this_project_installs_is_found_good() -> None:
    conf = ROOT / "systemd" / "supervisord.conf"
    unit = str(ROOT / "systemd" / "thunderagent.service")
    found = list(look_at_supervisor(Settings(), conf, dict(os.environ), units=(unit,)))
    assert {one.state for one in found} == {State.OK}, found


@pytest.mark.parametrize(
    ("text", "state", "says", "remedy"),
    [
        (changed("stopwaitsecs", "20"), State.WRONG, "killed in the middle", "stopwaitsecs=35 or more"),
        (changed("stopwaitsecs", "34.9"), State.WRONG, "killed in the middle", "supervisorctl update"),
        (changed("stopwaitsecs", None), State.WRONG, "stopwaitsecs is 10 s", "stopwaitsecs=35"),
        (
            changed("stopwaitsecs", "60"),
            State.WARNING,
            "THUNDERAGENT_STOP_WAIT_S says 45",
            "THUNDERAGENT_STOP_WAIT_S=60",
        ),
        (changed("stopwaitsecs", "soon"), State.WRONG, "no number", "in seconds"),
        (changed("stopsignal", "KILL"), State.WRONG, "on which no agent drains", "stopsignal=TERM"),
        (changed("autorestart", None), State.WARNING, "ends with 0 and stays away", "autorestart=true"),
        (changed("stopasgroup", None), State.WARNING, "killasgroup is false", "killasgroup=true"),
        ("[program:web]\ncommand=/bin/cat\n", State.WARNING, "no program that runs", "--supervisor-conf"),
        ("no configuration", State.WRONG, "cannot be read", "--supervisor-conf"),
    ],
)
def test_what_cuts_a_drain_off_is_named_with_its_remedy(
    tmp_path: Path, text: str, state: State, says: str, remedy: str
) -> None:
    [found] = look(tmp_path, text)
    assert found.state is state
    assert says in found.found
    assert remedy in found.remedy


def test_the_drain_of_the_program_counts_and_not_that_of_the_shell(tmp_path: Path) -> None:
    text = FINE.replace('STOP_WAIT_S="45"', 'STOP_WAIT_S="45",THUNDERAGENT_DRAIN_S="60"')
    [found] = look(tmp_path, text)
    assert (found.state, "the drain takes up to 60 s" in found.found) == (State.WRONG, True)


def test_values_of_the_environment_are_filled_in(tmp_path: Path) -> None:
    text = FINE.replace("stopwaitsecs=45", "stopwaitsecs=%(ENV_AGENT_STOP)s")
    assert look(tmp_path, text, environ={"AGENT_STOP": "20"})[0].state is State.WRONG
    assert look(tmp_path, text, environ={"AGENT_STOP": "45"})[0].state is State.OK
    assert "no number" in look(tmp_path, text)[0].found


def test_programs_of_included_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "agent.conf").write_text(FINE)
    (tmp_path / "main.conf").write_text("[include]\nfiles = conf.d/*.conf\n")
    assert [one.name for one in read_programs(tmp_path / "main.conf", {})] == ["agent"]


@pytest.mark.parametrize(
    ("unit", "state"),
    [
        ("TimeoutStopSec=75", State.OK),
        ("TimeoutStopSec=1min 15s", State.OK),
        ("TimeoutStopSec=infinity", State.OK),
        ("", State.OK),
        ("TimeoutStopSec=49", State.WRONG),
        ("TimeoutStopSec=90\nTimeoutStopSec=30", State.WRONG),
        ("TimeoutStopSec=later", State.WARNING),
    ],
)
def test_a_unit_that_ends_before_its_supervisor_is_named(tmp_path: Path, unit: str, state: State) -> None:
    found = look(tmp_path, FINE, unit=unit)
    assert (found[0].check, found[1].check) == ("supervisor", "systemd")
    assert found[1].state is state


def test_a_drop_in_of_a_unit_counts(tmp_path: Path) -> None:
    (tmp_path / "thunderagent.service.d").mkdir()
    (tmp_path / "thunderagent.service.d" / "stop.conf").write_text("[Service]\nTimeoutStopSec=20\n")
    found = look(tmp_path, FINE, unit="TimeoutStopSec=75")
    assert found[1].state is State.WRONG
    assert "TimeoutStopSec is 20 s" in found[1].found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("75", 75.0), ("75s", 75.0), ("1min 15s", 75.0), ("0", float("inf")), ("500ms", 0.5), ("x", None)],
)
def test_times_of_systemd_are_read(text: str, seconds: float | None) -> None:
    assert span_of(text) == seconds


def test_the_supervisor_that_runs_is_found_before_the_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    installed, running = tmp_path / "installed.conf", tmp_path / "running.conf"
    for file in (installed, running):
        file.write_text(FINE)
    processes = tmp_path / "proc"
    (processes / "4711").mkdir(parents=True)
    (processes / "4711" / "cwd").symlink_to(tmp_path)
    (processes / "12").mkdir()
    (processes / "12" / "cmdline").write_bytes(b"/usr/bin/vim\0supervisord\0-c\0installed.conf\0")
    places = (str(tmp_path / "none.conf"), str(installed))
    assert find_conf({}, processes=processes, places=places) == installed
    for words in (
        b"python\0/venv/bin/supervisord\0-n\0-c\0running.conf\0",
        b"supervisord\0--configuration=running.conf\0",
    ):
        (processes / "4711" / "cmdline").write_bytes(words)
        assert find_conf({}, processes=processes, places=places) == running
    assert find_conf({}, processes=tmp_path / "none", places=()) is None
    home = tmp_path / "home"
    (home / "systemd").mkdir(parents=True)
    (home / "systemd" / "supervisord.conf").write_text(FINE)
    found = find_conf({"AGENT_HOME": str(home)}, processes=tmp_path / "none", places=places)
    assert found == home / "systemd" / "supervisord.conf"


@pytest.mark.parametrize(
    ("text", "its", "here"),
    [
        ("[program:agent]\ncommand=/opt/other/bin/thunderagent run jobs\ndirectory=/opt/other\n", "", {}),
        ("[program:agent]\ncommand=thunderagent run jobs\n", "", {}),
        (FINE, "AGENT_BIN=/opt/other/bin\0AGENT_JOBS=jobs", {"AGENT_BIN": "/opt/ours/bin"}),
        ("[program:web]\ncommand=/usr/bin/gunicorn\n", "", {}),
        ("no configuration", "", {}),
    ],
)
def test_the_supervisor_of_another_project_is_not_taken_for_ours(
    tmp_path: Path, text: str, its: str, here: dict[str, str]
) -> None:
    processes = supervised(tmp_path, text, its)
    assert find_conf(here, processes=processes, places=()) is None
    assert find_others(here, processes=processes) == [tmp_path / "elsewhere" / "running.conf"]


@pytest.mark.parametrize(
    ("text", "its", "here"),
    [
        ("[program:agent]\ncommand=thunderagent run jobs\ndirectory={home}\n", "", {"AGENT_HOME": "{home}"}),
        ("[program:agent]\ncommand=thunderagent run jobs\ndirectory=%(here)s/../home\n", "", {"AGENT_HOME": "{home}"}),
        ("[program:agent]\ncommand=thunderagent run jobs\ndirectory={cwd}\n", "", {}),
        (FINE + "[program:more]\ncommand={bin}/thunderagent run jobs\n", "", {}),
        (FINE, "AGENT_BIN={bin}\0AGENT_JOBS=jobs", {}),
        ("[program:agent]\ncommand=thunderagent run jobs\n", "", {"AGENT_HOME": "{elsewhere}"}),
    ],
)
def test_the_supervisor_of_these_agents_is_found(tmp_path: Path, text: str, its: str, here: dict[str, str]) -> None:
    def filled(one: str) -> str:
        named = {"home": tmp_path / "home", "cwd": Path.cwd(), "bin": Path(sys.prefix, "bin")}
        for name, value in {**named, "elsewhere": tmp_path / "elsewhere"}.items():
            one = one.replace(f"{{{name}}}", str(value))
        return one

    processes = supervised(tmp_path, filled(text), filled(its))
    environ = {name: filled(value) for name, value in here.items()}
    assert find_conf(environ, processes=processes, places=()) == tmp_path / "elsewhere" / "running.conf"
    assert find_others(environ, processes=processes) == []


def supervised(folder: Path, text: str, its: str) -> Path:
    """Processes of a system with one supervisord, which runs in another folder."""
    process = folder / "proc" / "4711"
    for made in (process, folder / "elsewhere", folder / "home"):
        made.mkdir(parents=True)
    (folder / "elsewhere" / "running.conf").write_text(text)
    (process / "cwd").symlink_to(folder / "elsewhere")
    (process / "cmdline").write_bytes(b"supervisord\0-c\0running.conf\0")
    (process / "environ").write_bytes(its.encode() + b"\0")
    return folder / "proc"


def test_a_unit_that_runs_agents_by_itself_waits_for_their_drain(tmp_path: Path) -> None:
    ours = str(ROOT / "systemd" / "thunderagent@.service")
    [found] = look_at_agent_units(Settings(), units=(ours,))
    assert found.state is State.OK, found
    unit = tmp_path / "thunderagent@.service"
    unit.write_text("[Service]\nTimeoutStopSec=20\n")
    [found] = look_at_agent_units(Settings(), units=(str(tmp_path / "none"), str(unit)))
    assert found.state is State.WRONG
    assert "the drain takes up to 30 s: the drain is cut off" in found.found
    assert list(look_at_agent_units(Settings(), units=())) == []
