"""Real agent processes, and the bounded waits of the tests.

A test never sleeps for a while and hopes: it waits for a line of a log, a mark of a handler or the state of a row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.support.stands import patience

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
BIN: Final = Path(sys.executable).parent
COMMAND: Final = str(BIN / "thunderagent")
LOOK_S: Final = 0.02
STEPPED: Final = """
import sys, time
from pathlib import Path
clock, ahead = time.time, Path(sys.argv.pop(1))
time.time = lambda: clock() + float(ahead.read_text())
from thunderagent.cli import main
main()
"""
"""The command, on a host whose clock is ahead by as many seconds as a file says."""
LONG_S: Final = 30.0
"""For what takes a moment unless the machine is overloaded; a bound that is a promise stands in its test."""

T = TypeVar("T")


def until(look: Callable[[], T | None], within_s: float, what: str | Callable[[], str]) -> T:
    """What `look` finds, asked again and again; fails with `what` when there is nothing within the time."""
    begun = time.monotonic()
    while not (found := look()):
        if time.monotonic() - begun >= within_s * patience():
            raise AssertionError(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(LOOK_S)
    return found


def environment(**settings: object) -> dict[str, str]:
    """The environment of this process with settings, each named without its prefix."""
    given = {f"THUNDERAGENT_{name.upper()}": str(value) for name, value in settings.items()}
    path = os.pathsep.join((str(HERE), str(ROOT)))  # our jobs, and the code beside these tests
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **given}


def is_alive(pid: int) -> bool:
    """True while a process runs; a zombie has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def stands_still(pid: int) -> bool:
    """True when every thread of a process has stopped, or the process is gone.

    SIGSTOP reaches a process when one of its threads gets a core; until then the others go on.
    """
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states <= set("TZX")


class Log:
    """The JSON lines that a process has written to a file so far; other lines are kept apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._lines: list[dict[str, Any]] = []
        self._other: list[str] = []

    def lines(self, message: str | None = None, **facts: object) -> list[dict[str, Any]]:
        """All lines so far with this message and these facts."""
        self._take()
        return [
            line
            for line in self._lines
            if message in (None, line["message"]) and all(line.get(name) == value for name, value in facts.items())
        ]

    @property
    def other(self) -> str:
        """What is not JSON: tracebacks, messages of the command line."""
        self._take()
        return "\n".join(self._other)

    @property
    def tail(self) -> str:
        """The end, for the message of a test that fails."""
        if not self.path.exists():
            return "(no log)"
        return "\n".join(self.path.read_text(errors="replace").splitlines()[-25:])

    def _take(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            try:
                self._lines.append(json.loads(text))
            except ValueError:
                self._other.append(text)


def cli(
    *arguments: str, cwd: Path, stdin: str = "", columns: int = 200, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run a command of `thunderagent` to its end; it never shows a traceback."""
    done = subprocess.run(
        [COMMAND, *arguments],
        env={**environment(**settings), "COLUMNS": str(columns)},
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


class AgentProcess:
    """One `thunderagent run`, in a process group of its own.

    Args:
        arguments: of the command.
        settings: of the agent, without their prefix.
        log: the file of its output.
        cwd: its folder.
        ahead: the file of a clock that the test sets.
        within: the command that runs it, such as one that makes namespaces.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        settings: Mapping[str, object],
        log: Path,
        cwd: Path,
        ahead: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.log = Log(log)
        command = [COMMAND] if ahead is None else [sys.executable, "-c", STEPPED, str(ahead)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*within, *command, "run", *arguments, "--json"],
                env=environment(**settings),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def name(self) -> str:
        """The `leaseOwner` of what it holds."""
        return str(self.line("agent started")["agent"])

    def line(self, message: str, *, within_s: float = LONG_S, **facts: object) -> dict[str, Any]:
        """The first line with this message and these facts, waited for."""
        return self.wait_lines(1, message, within_s=within_s, **facts)[0]

    def wait_lines(
        self, number: int, message: str, *, within_s: float = LONG_S, **facts: object
    ) -> list[dict[str, Any]]:
        """At least so many lines with this message and these facts."""

        def look() -> list[dict[str, Any]] | None:
            has_ended = self.process.poll() is not None
            found = self.log.lines(message, **facts)
            if len(found) >= number:
                return found
            assert not has_ended, f"it ended with {self.process.returncode} before {message!r}:\n{self.log.tail}"
            return None

        return until(look, within_s, lambda: f"{number} x {message!r} {facts} in the log\n{self.log.tail}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until nothing of it runs any more; SIGCONT wakes it up."""
        self.send(signal.SIGSTOP)
        until(lambda: stands_still(self.pid), LONG_S, "a process that has stopped")

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the whole process group, as a terminal or supervisor's `stopasgroup` does."""
        os.killpg(self.pid, number)

    def kill(self) -> float:
        """SIGKILL; the time at which it was gone."""
        self.process.kill()
        self.process.wait(10)
        return time.time()

    def wait(self, within_s: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(within_s * patience())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent still runs after {within_s:g} s:\n{self.log.tail}") from None

    def stop(self, within_s: float = 10.0) -> int:
        """SIGTERM and the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(within_s)

    def end(self) -> None:
        """Whatever happened, it is gone afterwards; its isolated children end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


class Marks:
    """What handlers did, and the files that let them end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @property
    def payload(self) -> dict[str, str]:
        """The payload that leads handlers here."""
        return {"folder": str(self.folder)}

    def read(self, task_id: str, fence: int, what: str, *, within_s: float = LONG_S) -> dict[str, Any]:
        """A mark, waited for."""
        path = self.folder / f"{task_id}.{fence}.{what}"
        until(path.exists, within_s, f"the mark {path.name}; there are {self.names()}")
        return dict(json.loads(path.read_text()))

    def when(self, task_id: str, fence: int, what: str) -> int:
        """The moment at which a mark was made, in nanoseconds."""
        return (self.folder / f"{task_id}.{fence}.{what}").stat().st_mtime_ns

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def release(self, which: int | str | None = None) -> None:
        """Let every run end, or those with a fence, those of a task, or `TASK.FENCE`."""
        (self.folder / ("release" if which is None else f"release.{which}")).touch()

    def runs(self) -> Iterator[tuple[str, int]]:
        """Each line that `quick.count` wrote: task and fence."""
        for path in self.folder.glob("*.runs"):
            for line in path.read_text().splitlines():
                task_id, fence = line.split()
                yield task_id, int(fence)

    def count(self) -> int:
        """Number of lines that `quick.count` wrote so far."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob("*.runs"))
