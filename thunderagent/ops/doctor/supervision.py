"""Examines whether supervisor and systemd here wait for the drain of the agents."""

from __future__ import annotations

import configparser
import glob
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.settings import PREFIX, Settings

MARGIN_S: Final = 5.0
"""Seconds that the supervisor must wait longer than the drain."""

PLACES: Final = (
    "/opt/thunderagent/current/systemd/supervisord.conf",
    "/etc/thunderagent/supervisord.conf",
    "/etc/supervisor/supervisord.conf",
    "/etc/supervisord.conf",
)
UNITS: Final = ("/etc/systemd/system/thunderagent.service", "/lib/systemd/system/thunderagent.service")
AGENT_UNITS: Final = ("/etc/systemd/system/thunderagent@.service", "/lib/systemd/system/thunderagent@.service")

_ITS_STOP_S: Final = 10.0
"""Supervisor's default wait."""

_SYSTEMD_STOP_S: Final = 90.0
_UNITS_OF_TIME: Final = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hr": 3600.0, "ms": 0.001}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of supervisor, with its options that matter for a stop."""

    name: str
    command: str
    directory: str
    stop_wait_s: float | None
    """None: the option is no number."""
    stop_signal: str
    as_group: bool
    kill_as_group: bool
    autorestart: str
    environment: Mapping[str, str]


def find_conf(
    environ: Mapping[str, str], *, processes: Path = Path("/proc"), places: tuple[str, ...] = PLACES
) -> Path | None:
    """The configuration of the supervisord that runs these agents, else the installed one; None: there is none.

    Args:
        environ: `AGENT_HOME` names a project with a configuration of its own.
        processes: the system's list of processes.
        places: possible paths of an installed configuration.
    """
    home = environ.get("AGENT_HOME")
    own = (f"{home}/systemd/supervisord.conf", f"{home}/supervisord.conf") if home else ()
    known = (Path(place) for place in (*own, *places))
    ours = (one.conf for one in _running(processes) if _runs_these(one, environ))
    return next(ours, None) or next((place for place in known if place.is_file()), None)


def find_others(environ: Mapping[str, str], *, processes: Path = Path("/proc")) -> list[Path]:
    """The configurations of other supervisords that run here."""
    return [one.conf for one in _running(processes) if not _runs_these(one, environ)]


@dataclass(frozen=True, slots=True)
class _Supervisor:
    """A running supervisord: its configuration, its working folder, and its environment if it can be read."""

    conf: Path
    folder: Path
    environ: Mapping[str, str]


def _runs_these(one: _Supervisor, environ: Mapping[str, str]) -> bool:
    """Whether a supervisord belongs to these agents: by the folder of its configuration or of its programs, or by the
    installation of Python that they use."""
    homes = _folders(os.getcwd(), environ.get("AGENT_HOME"))
    bins = _folders(os.path.join(sys.prefix, "bin"), environ.get("AGENT_BIN"))
    folder = one.conf.resolve().parent
    if folder in homes or (folder.name == "systemd" and folder.parent in homes):
        return True
    try:
        programs = read_programs(one.conf, one.environ or environ)
    except (OSError, configparser.Error, UnicodeDecodeError):
        return False
    return any(
        (one.folder / program.directory).resolve() in homes
        or any(word.startswith("/") and Path(word).parent.resolve() in bins for word in program.command.split())
        for program in programs
    )


def _folders(*names: str | None) -> set[Path]:
    return {Path(name).resolve() for name in names if name}


def _running(processes: Path) -> Iterator[_Supervisor]:
    for found in sorted(processes.glob("[0-9]*/cmdline")):
        try:
            words = found.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            if not any(Path(word).name == "supervisord" for word in words[:2]):
                continue
            for number, word in enumerate(words):
                name = words[number + 1] if word in ("-c", "--configuration") and number + 1 < len(words) else ""
                name = name or (word.partition("=")[2] if word.startswith("--configuration=") else "")
                folder = (found.parent / "cwd").resolve()
                if name and (folder / name).is_file():
                    yield _Supervisor(folder / name, folder, _environment(found.parent / "environ"))
        except OSError:  # it has ended, or belongs to another user
            continue


def _environment(file: Path) -> dict[str, str]:
    try:
        words = file.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words if "=" in word)}


def read_programs(conf: Path, environ: Mapping[str, str]) -> list[Program]:
    """The programs of a supervisord configuration, and of the files that it includes, that run agents.

    Raises:
        OSError: the file cannot be read.
        configparser.Error: the file is no such configuration.
    """
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    parser.read_string(conf.read_text(encoding="utf-8"), str(conf))
    if parser.has_option("include", "files"):
        for pattern in parser.get("include", "files").split():
            for name in sorted(glob.glob(str(conf.parent / pattern.replace("%(here)s", str(conf.parent))))):
                parser.read_string(Path(name).read_text(encoding="utf-8"), name)
    found = []
    for section in parser.sections():
        kind, _, name = section.partition(":")
        if kind == "program" and _is_agent(parser.get(section, "command", fallback="")):
            found.append(_program(name.strip(), conf, dict(parser.items(section)), environ))
    return found


def _is_agent(command: str) -> bool:
    return re.search(r"\bthunderagent\b.*\brun\b", command) is not None


def _program(name: str, conf: Path, options: Mapping[str, str], environ: Mapping[str, str]) -> Program:
    def read(option: str, default: str) -> str:
        text = options.get(option, default).replace("%(here)s", str(conf.parent))
        return re.sub(r"%\(ENV_(\w+)\)s", lambda one: environ.get(one[1], one[0]), text).strip()

    try:
        stop_wait_s = float(read("stopwaitsecs", str(_ITS_STOP_S)))
    except ValueError:
        stop_wait_s = None
    as_group = _is_true(read("stopasgroup", "false"))
    return Program(
        name=name,
        command=read("command", ""),
        directory=read("directory", ""),
        stop_wait_s=stop_wait_s,
        stop_signal=read("stopsignal", "TERM").upper().removeprefix("SIG"),
        as_group=as_group,
        kill_as_group=_is_true(read("killasgroup", str(as_group))),
        autorestart=read("autorestart", "unexpected").lower(),
        environment=_pairs(read("environment", "")),
    )


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "yes", "on", "1")


def _pairs(text: str) -> dict[str, str]:
    """`A="1",B='2'` as supervisor reads it. Supervisor itself reports a wrong text."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return {}
    return {name: value for word in words if "=" in word for name, _, value in (word.partition("="),)}


def look_at_supervisor(
    settings: Settings, conf: Path, environ: Mapping[str, str], *, units: tuple[str, ...] = UNITS
) -> Iterator[Finding]:
    """Options of a supervisord configuration, and of its systemd unit, that do not fit the drain of the agents."""
    try:
        programs = read_programs(conf, environ)
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        remedy = "name a file that can be read: thunderagent doctor --supervisor-conf PATH"
        yield Finding("supervisor", State.WRONG, f"{conf} cannot be read: {error}", remedy)
        return
    if not programs:
        what = f"{conf} has no program that runs `thunderagent run`"
        yield Finding("supervisor", State.WARNING, what, "name another file: --supervisor-conf PATH")
        return
    for program in programs:
        yield from _look_at(program, settings, conf)
    longest = max((one.stop_wait_s or 0.0 for one in programs), default=0.0)
    yield from _look_at_units(longest, units)


def _look_at(program: Program, settings: Settings, conf: Path) -> Iterator[Finding]:
    where = f"[program:{program.name}] of {conf}"
    if program.stop_wait_s is None:
        yield Finding("supervisor", State.WRONG, f"{where}: stopwaitsecs is no number", "write it in seconds")
        return
    drain_s = _number(program.environment, "DRAIN_S", settings.drain_s)
    said_s = _number(program.environment, "STOP_WAIT_S", settings.stop_wait_s)
    stops = f"stopwaitsecs is {program.stop_wait_s:g} s, the drain takes up to {drain_s:g} s"
    needed = f"stopwaitsecs={drain_s + MARGIN_S:g} or more in {where}, then: supervisorctl reread, supervisorctl update"
    fine = True
    if program.stop_wait_s < drain_s + MARGIN_S:
        yield Finding("supervisor", State.WRONG, f"{stops}: agents are killed in the middle of it", f"set {needed}")
        fine = False
    elif program.stop_wait_s != said_s:
        what = f"stopwaitsecs is {program.stop_wait_s:g} s, {PREFIX}STOP_WAIT_S says {said_s:g}"
        remedy = f"set {PREFIX}STOP_WAIT_S={program.stop_wait_s:g}, so that agents check it at their start"
        yield Finding("supervisor", State.WARNING, what, remedy)
        fine = False
    if program.stop_signal not in ("TERM", "INT"):
        what = f"{where}: stopsignal is {program.stop_signal}, on which no agent drains"
        yield Finding("supervisor", State.WRONG, what, "set stopsignal=TERM")
        fine = False
    if program.autorestart != "true" and not _is_true(program.autorestart):
        what = (
            f"{where}: autorestart is {program.autorestart}: an agent that recycled itself ends with 0 and stays away"
        )
        yield Finding("supervisor", State.WARNING, what, "set autorestart=true")
        fine = False
    if not program.kill_as_group:
        what = f"{where}: killasgroup is false: children of an agent that is killed live on"
        yield Finding("supervisor", State.WARNING, what, "set killasgroup=true")
        fine = False
    if fine:
        group = "true" if program.as_group else "false"
        yield Finding("supervisor", State.OK, f"{stops}; stopasgroup={group}, autorestart=true ({conf})")


def _number(environment: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        return float(environment.get(f"{PREFIX}{name}", otherwise))
    except ValueError:
        return otherwise


def _look_at_units(stop_wait_s: float, units: tuple[str, ...]) -> Iterator[Finding]:
    unit = next((Path(name) for name in units if os.access(name, os.R_OK)), None)
    if unit is not None:
        yield _of_unit(unit, stop_wait_s, f"supervisor waits up to {stop_wait_s:g} s")


def look_at_agent_units(settings: Settings, units: tuple[str, ...] = AGENT_UNITS) -> Iterator[Finding]:
    """Whether the systemd unit that runs agents without supervisor, if there is one, waits for their drain."""
    unit = next((Path(name) for name in units if os.access(name, os.R_OK)), None)
    if unit is not None:
        yield _of_unit(unit, settings.drain_s, f"the drain takes up to {settings.drain_s:g} s")


def _of_unit(unit: Path, needed_s: float, why: str) -> Finding:
    found = None
    for file in (unit, *sorted(Path(f"{unit}.d").glob("*.conf"))):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found = next(iter(re.findall(r"^\s*TimeoutStopSec\s*=\s*(.+?)\s*$", text, re.MULTILINE)[-1:]), found)
    seconds = _SYSTEMD_STOP_S if found is None else span_of(found)
    if seconds is None:
        return Finding("systemd", State.WARNING, f"{unit}: TimeoutStopSec={found} is no time", "write it in seconds")
    if seconds < needed_s + MARGIN_S:
        what = f"TimeoutStopSec is {seconds:g} s, {why}: the drain is cut off"
        remedy = f"set TimeoutStopSec={needed_s + 30:g} in {unit}, then: systemctl daemon-reload"
        return Finding("systemd", State.WRONG, what, remedy)
    return Finding("systemd", State.OK, f"TimeoutStopSec is {seconds:g} s, {why} ({unit})")


def span_of(text: str) -> float | None:
    """Seconds of a time of systemd, such as 75, 75s or 1min 15s; None: it is no time. `infinity` and 0 have no end."""
    if text in ("infinity", "0"):
        return float("inf")
    parts = _PART.findall(text)
    if _PART.sub("", text).strip() or not parts or any(unit not in _UNITS_OF_TIME for _, unit in parts):
        return None
    return sum(float(number) * _UNITS_OF_TIME[unit] for number, unit in parts)
