"""Processes that are asked: a line of JSON on standard input is a request, one on standard output its answer.

A child does nothing of this while it is not asked, so that what is measured is not the measuring. When its standard
input ends, whoever asked is gone, and it ends too.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import SCRIPTS, STOP_S, BenchFailed

START_S: Final = 60.0
TAIL_BYTES: Final = 2000
LOOK_S: Final = 0.1


class Child:
    """One process that is asked."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.hello: dict[str, Any] = {}

    @property
    def is_alive(self) -> bool:
        """False when it has ended."""
        return self._process.poll() is None

    def ask(self, do: str, *, deadline_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer.

        Raises:
            BenchFailed: there was none in time, or the child has ended; with the end of its log.
        """
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        except OSError:
            raise BenchFailed(f"{self.name} has ended with {self._process.poll()}:\n{self.tail()}") from None
        return self.answer(do, deadline_s)

    def answer(self, what: str, deadline_s: float) -> dict[str, Any]:
        """The next line that it says.

        Raises:
            BenchFailed: as for `ask`.
        """
        try:
            line = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            raise BenchFailed(f"{self.name} did not answer to {what!r} in {deadline_s:g} s:\n{self.tail()}") from None
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            raise BenchFailed(f"{self.name} has ended with {self._process.poll()}:\n{self.tail()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise BenchFailed(f"{self.name} failed to {what}: {told['error']}\n{self.tail()}")
        return told

    def until(self, what: str, done: Callable[[dict[str, Any]], bool], deadline_s: float) -> dict[str, Any]:
        """Ask for its state until that is as wanted; the last one.

        Raises:
            BenchFailed: it did not become so in time.
        """
        until = time.monotonic() + deadline_s
        while not done(state := self.ask("state")):
            if time.monotonic() > until:
                shown = {name: value for name, value in state.items() if isinstance(value, int | float)}
                raise BenchFailed(f"{self.name}: not {what} in {deadline_s:g} s, but {shown}\n{self.tail()}")
            time.sleep(LOOK_S)
        return state

    def tail(self) -> str:
        """The end of what it wrote to standard error."""
        raw = self._log.read_bytes()[-TAIL_BYTES:] if self._log.exists() else b""
        return raw.decode(errors="replace")

    def kill(self) -> float:
        """End it as a crash does; the monotonic second of the signal."""
        at = time.monotonic()
        self._process.kill()
        return at

    def terminate(self) -> float:
        """Ask it to stop, as a supervisor does; the monotonic second of the signal."""
        at = time.monotonic()
        self._process.terminate()
        return at

    def end(self, *, politely: bool = False) -> None:
        """Make sure that it has ended; `politely` it may take the time of a drain."""
        if self.is_alive:
            self._process.terminate() if politely else self._process.kill()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with suppress(ValueError):  # closed under us by `end`
            for line in pipe:
                self._answers.put(line)
        self._answers.put(None)


class Children:
    """Starts children; all of them end with the block in which it was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._children: list[Child] = []

    def start(self, module: str, argument: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Child:
        """Run `python -m MODULE ARGUMENT` and wait for the first line that it says, which is its `hello`.

        Raises:
            BenchFailed: it did not start.
        """
        self._made += 1
        name = f"{module.rpartition('.')[2]}-{self._made}"
        log = self._folder / f"{name}.log"
        path = os.pathsep.join(filter(None, (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH"))))
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(argument)],
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C comes to us alone
            )
        child = Child(name, process, log)
        self._children.append(child)
        child.hello = child.answer("start", START_S)
        return child

    def end_all(self) -> None:
        """End what still runs."""
        for child in reversed(self._children):
            child.end()


@contextmanager
def children(folder: Path) -> Iterator[Children]:
    """Children that all have ended when the block has."""
    started = Children(folder)
    try:
        yield started
    finally:
        started.end_all()


# In the child


def say(told: Mapping[str, Any]) -> None:
    """Answer, or say hello."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def serve(answer: Callable[..., Mapping[str, Any]]) -> None:
    """Answer requests until standard input ends, in a thread of its own."""

    def work() -> None:
        for line in sys.stdin:
            try:
                told = answer(**json.loads(line))
            except Exception as error:
                told = {"error": repr(error)}
            say(told)
        os._exit(1)  # whoever measures is gone

    threading.Thread(target=work, name="requests", daemon=True).start()


def raise_open_files() -> int:
    """Let this process open as many files as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
