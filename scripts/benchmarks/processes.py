"""Processes that are measured: started together, begun together, watched, and stopped by their ids."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from benchmarks.tally import Tally

SCRIPTS: Final = Path(__file__).resolve().parents[1]
START_S: Final = 60.0
STOP_S: Final = 45.0
LOOK_S: Final = 0.1


class BenchFailed(Exception):
    """There is nothing to report, and why."""


class Fleet:
    """Processes of one module, each with a folder to report to."""

    def __init__(self, folder: Path, processes: Sequence[tuple[str, subprocess.Popen[str]]]) -> None:
        self._folder = folder
        self._processes = processes

    def go(self) -> None:
        """Wait until all are warm, then let all begin at once."""
        for name, process in self._processes:
            said = _pipe(process.stdout).readline()
            if said != "ready\n":
                raise BenchFailed(f"{name} did not start:\n{self.log(name)}")
        for _, process in self._processes:
            _pipe(process.stdin).write("go\n")
            _pipe(process.stdin).flush()

    def tallies(self) -> list[Tally]:
        """What each has counted so far."""
        return [Tally.read(self._folder / f"{name}.json") for name, _ in self._processes]

    def await_ended(self, tasks: int, deadline_s: float) -> list[Tally]:
        """Wait until so many tasks are done; the counts at that moment."""
        tallies = self.tallies()

        def done() -> bool:
            tallies[:] = self.tallies()
            return sum(one.ended for one in tallies) >= tasks

        if not self._await(done, deadline_s):
            ended = sum(one.ended for one in tallies)
            raise BenchFailed(f"only {ended} of {tasks} tasks were done in {deadline_s:g} s")
        return tallies

    def await_exit(self, deadline_s: float) -> list[Tally]:
        """Wait until all have ended by themselves; their last counts."""
        if not self._await(lambda: all(process.poll() is not None for _, process in self._processes), deadline_s):
            raise BenchFailed(f"the naive loops were not done in {deadline_s:g} s")
        for name, process in self._processes:
            if process.returncode:
                raise BenchFailed(f"{name} ended with {process.returncode}:\n{self.log(name)}")
        return self.tallies()

    def runs(self) -> list[tuple[str, float]]:
        """Every run of a task, with its moment."""
        lines = [
            line.split()
            for name, _ in self._processes
            for line in (self._folder / f"{name}.runs").read_text(encoding="utf-8").splitlines()
        ]
        return [(line[0], float(line[-1])) for line in lines if len(line) == 3]

    def log(self, name: str) -> str:
        """The end of what a process wrote to standard error."""
        return (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def stop(self) -> None:
        """End what still runs, and wait for it."""
        for _, process in self._processes:
            if process.poll() is None:
                process.terminate()
        for _, process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _await(self, done: Callable[[], bool], deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        while not done():
            for name, process in self._processes:
                if process.poll():
                    raise BenchFailed(f"{name} ended with {process.returncode}:\n{self.log(name)}")
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True


@contextmanager
def fleet(module: str, number: int, folder: Path, argument: str) -> Iterator[Fleet]:
    """So many processes of `python -m MODULE FOLDER NAME ARGUMENT`, stopped at the end of the block."""
    folder.mkdir(parents=True)
    path = os.pathsep.join(filter(None, (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH"))))
    processes: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        for name in (f"agent-{index}" for index in range(number)):
            with (folder / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(folder), name, argument],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C comes to us alone
                )
            processes.append((name, process))
        yield Fleet(folder, processes)
    finally:
        Fleet(folder, processes).stop()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
