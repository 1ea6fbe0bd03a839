"""Agents under a real supervisord, with the configuration that we ship."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.acceptance.processes import BIN, ROOT, Log, environment, is_alive, until

CONF: Final = ROOT / "systemd" / "supervisord.conf"
CONTROL_S: Final = 60.0
START_S: Final = 30.0


class Supervised:
    """A supervisord and its agents; use it with `supervised()`."""

    def __init__(self, folder: Path, conf: Path, process: subprocess.Popen[bytes], number: int) -> None:
        self._conf = conf
        self._folder = folder
        self.process = process
        self.logs = [Log(folder / f"agent-{index}.log") for index in range(number)]

    @property
    def log(self) -> str:
        """What supervisord wrote to its own log."""
        path = self._folder / "supervisord.log"
        return path.read_text() if path.exists() else "(no log of supervisord)"

    def control(self, *arguments: str) -> str:
        """What `supervisorctl` answers."""
        done = subprocess.run(
            [BIN / "supervisorctl", "-c", self._conf, *arguments],
            env={**os.environ, "AGENT_RUN": str(self._folder)},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=CONTROL_S,
            check=False,
        )
        assert done.returncode == 0, (
            f"supervisorctl {arguments} ended with {done.returncode}: {done.stdout}{done.stderr}\n{self.log}"
        )
        return done.stdout

    def started(self, index: int, times: int = 1) -> int:
        """The process id of an agent, once it has said so many times that it started."""

        def look() -> list[dict[str, Any]] | None:
            lines = self.logs[index].lines("agent started")
            return lines if len(lines) >= times else None

        lines = until(look, START_S, lambda: f"start {times} of agent {index}\n{self.logs[index].tail}\n{self.log}")
        return int(str(lines[times - 1]["agent"]).split(":")[-2])

    def restart(self, index: int) -> int:
        """Restart one agent as an operator does, wait until it runs, and answer with its new process id."""
        times = len(self.logs[index].lines("agent started"))
        name = f"agent:agent-{index}"
        told = self.control("restart", name)
        assert re.findall(r"(\w+)$", told, re.MULTILINE) == ["stopped", "started"], told
        assert "RUNNING" in self.control("status", name)
        return self.started(index, times + 1)

    def stop(self, within_s: float) -> int:
        """SIGTERM to supervisord, as systemd sends it; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def ends(self) -> list[str]:
        """How each process of an agent ended, in supervisord's words."""
        return re.findall(r"(?:stopped|exited): agent-\d+ \((.*)\)", self.log)

    def problems(self, *messages: str) -> list[dict[str, Any]]:
        """Lines of the agents with one of these messages, and all errors."""
        return [
            line
            for log in self.logs
            for line in log.lines()
            if line["level"] == "ERROR" or any(line["message"].startswith(message) for message in messages)
        ]

    def end(self) -> None:
        """Whatever happened, all are gone afterwards."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for log in self.logs:
            for line in log.lines("agent started"):
                pid = int(str(line["agent"]).split(":")[-2])
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def supervised(
    folder: Path, *, jobs: str, home: Path, number: int, changes: dict[str, str] | None = None, **settings: object
) -> Iterator[Supervised]:
    """So many agents under a supervisord that is gone afterwards.

    Args:
        folder: for its socket and all logs.
        jobs: package with the jobs.
        home: folder of that package.
        number: of agents.
        changes: lines of the configuration that get another value.
        settings: of the agents, without the prefix.
    """
    text = CONF.read_text(encoding="utf-8")
    for name, value in (changes or {}).items():
        text, found = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert found == 1, f"{name} is not a line of {CONF}"
    conf = folder / "supervisord.conf"
    conf.write_text(text, encoding="utf-8")
    given = {
        "AGENT_HOME": home,
        "AGENT_JOBS": jobs,
        "AGENT_BIN": BIN,
        "AGENT_PROCESSES": number,
        "AGENT_RUN": folder,
        "AGENT_LOGS": folder,
    }
    with (folder / "supervisord.out").open("wb") as output:
        process = subprocess.Popen(
            [BIN / "supervisord", "-n", "-c", conf],
            env={**environment(log_json="true", **settings), **{name: str(value) for name, value in given.items()}},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Supervised(folder, conf, process, number)
    try:
        for index in range(number):
            running.started(index)
        yield running
    finally:
        running.end()
