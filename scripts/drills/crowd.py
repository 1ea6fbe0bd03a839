"""The clients of a drill, as the drill sees them: a process that tells how they are."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

SCRIPTS: Final = Path(__file__).resolve().parents[1]
START_S: Final = 30.0
REPORT_S: Final = 60.0
END_S: Final = 10.0


class CrowdFailed(Exception):
    """The process of the clients has ended, or says nothing."""


class Crowd:
    """The process of `drills.people`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._told: queue.Queue[dict[str, Any]] = queue.Queue(1000)
        self._is_over = False
        self.live: Mapping[str, int] = {}
        """How many clients are live in which region, as of a moment ago."""
        self.acknowledged = 0
        self._thread = threading.Thread(target=self._listen, name="crowd", daemon=True)
        self._thread.start()

    def begin(self, about: Mapping[str, Any]) -> str:
        """Tell it what it needs; the URL of its feed."""
        self._say(json.dumps(about))
        return str(self._next("feed", START_S))

    def rest(self) -> None:
        """Nobody changes anything any more."""
        self._say("rest")

    def report(self) -> dict[str, Any]:
        """Everything; the process ends."""
        self._is_over = True
        self._say("report")
        report: dict[str, Any] = self._next("report", REPORT_S)
        return report

    def check(self) -> None:
        """Raise when it has ended before it was asked for everything.

        Raises:
            CrowdFailed: with its exit code.
        """
        if not self._is_over and (code := self._process.poll()) is not None:
            raise CrowdFailed(f"the process of the clients has ended with exit code {code}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise CrowdFailed(f"the process of the clients does not listen: {error}") from None

    def _next(self, what: str, timeout_s: float) -> Any:
        try:
            message = self._told.get(timeout=timeout_s)
        except queue.Empty:
            raise CrowdFailed(f"the process of the clients told no {what} within {timeout_s:g} s") from None
        if what not in message:
            raise CrowdFailed(f"the process of the clients has ended (exit code {self._process.poll()})")
        return message[what]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "live" in message:
                self.live, self.acknowledged = message["live"], message["acknowledged"]
            else:
                self._told.put(message)
        self._told.put({})


@contextmanager
def crowd() -> Iterator[Crowd]:
    """The process, which has ended at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "drills.people"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"},
        start_new_session=True,  # Ctrl-C comes to us alone, and we stop things in order
    ) as process:
        try:
            yield Crowd(process)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def people(clients: int) -> Sequence[tuple[str, int]]:
    """Users and their devices: each fifth user has two, whose changes meet in one state."""
    found: list[tuple[str, int]] = []
    user = 0
    while len(found) < clients:
        devices = 2 if user % 5 == 4 else 1
        found += [(f"user-{user}", device) for device in range(devices)]
        user += 1
    return found[:clients]
