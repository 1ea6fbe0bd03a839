"""What every measured process has: it counts, and it answers.

A request is a line of JSON on standard input, its answer one on standard output. A process that is not asked does
nothing for the measurement. When its standard input ends, the harness is gone, and the process ends too.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

RSS_EVERY: Final = 250
"""Tasks between two looks at the memory."""
TIMER_S: Final = 0.05


class Counts:
    """Counts of this process; moments are monotonic seconds, which all processes of a machine share."""

    def __init__(self) -> None:
        self.ran = self.ended = self.tried = self.won = 0
        self.failed = self.lost = self.given_back = self.polled = 0
        self.first_started = self.last_ended = self.drain_cpu_s = 0.0
        self.requests = self.refused = 0
        self.read_units = self.write_units = 0.0
        self.is_done = False
        # Streams
        self.live = self.beats = self.handled = self.ticks = 0
        self.last_live = self.beat_late_s = self.stall_s = 0.0
        self.has_timer = False
        self.mode = "raw"
        """What is done with a message: nothing, decode it (json), or save its place too (checkpoint)."""
        self._go = threading.Event()
        self._cpu_before = 0.0
        self._rss: list[tuple[int, int]] = []
        self._runs = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - in memory it would be measured too
        self._first: dict[str, float] = {}
        self._is_watched = False

    # Tasks

    def await_go(self) -> None:
        """Wait for the request `go`, the start of what is measured."""
        self._go.wait()
        self._cpu_before = time.process_time()

    def start(self, task_id: str) -> None:
        """A task is about to run."""
        self.first_started = self.first_started or time.monotonic()
        self.ran += 1
        self._runs.write(f"{task_id}\n")

    def succeed(self) -> None:
        """A task is done."""
        self.ended += 1
        self.last_ended, self.drain_cpu_s = time.monotonic(), time.process_time() - self._cpu_before
        if self.ended % RSS_EVERY == 0:
            self._rss.append((self.ended, memory_kib()["rss_kib"]))

    # Handlers and streams

    def first(self, task_id: str) -> None:
        """A handler begins, or has its first message."""
        self._first.setdefault(task_id, time.monotonic())

    async def tick(self) -> None:
        """A timer in the event loop, once it is asked for: how late it is shows how long the loop stood still."""
        self.has_timer = True
        while True:
            pause_s = TIMER_S if self._is_watched else 1.0
            due = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            if self._is_watched:
                self.stall_s = max(self.stall_s, time.monotonic() - due)
                self.ticks += 1

    # Answers

    def answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Answer a request of the harness."""
        match do:
            case "state":
                return self._state()
            case "runs":
                self._runs.seek(0)
                return {"runs": self._runs.read().split()}
            case "first":
                return {"first": dict(self._first)}
            case "go":
                self._go.set()
            case "mode":
                self.mode = arguments["mode"]
            case "mark":
                self.stall_s = self.beat_late_s = 0.0
            case "watch":
                self._is_watched = True
            case _:
                raise ValueError(f"{do} is not known here")
        return {}

    def _state(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            "begun": len(self._first),
            "now": time.monotonic(),
            "cpu_s": time.process_time(),
            **memory_kib(),
            "growth_kib": self._growth_kib(),
        }

    def _growth_kib(self) -> int | None:
        """Memory at the end less that after a quarter of the tasks; None: there were too few."""
        if len(self._rss) < 4:
            return None
        return self._rss[-1][1] - next(size for count, size in self._rss if count >= self.ended / 4)


COUNTS: Final = Counts()


def serve(hello: Mapping[str, Any], answer: Callable[..., Mapping[str, Any]] = COUNTS.answer) -> None:
    """Say hello, and answer requests in a thread until standard input ends."""

    def say(what: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    def work() -> None:
        for line in sys.stdin:
            try:
                say(answer(**json.loads(line)))
            except Exception as error:
                say({"error": repr(error)})
        os._exit(1)

    say(hello)
    threading.Thread(target=work, name="requests", daemon=True).start()


def run(main: Coroutine[Any, Any, None], *, on_uvloop: bool) -> None:
    """Run a process that has an event loop."""
    if on_uvloop:
        import uvloop  # an extra

        uvloop.run(main)
    else:
        asyncio.run(main)


def raise_open_files() -> int:
    """Let this process open as many files as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def memory_kib() -> dict[str, int]:
    """Resident memory of this process, and the most that it had; on Linux alone.

    `ru_maxrss` would begin with the memory of the process that called exec.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    lines = (line.split() for line in status.splitlines())
    sizes = {line[0]: int(line[1]) for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
    return {"rss_kib": sizes["VmRSS:"], "peak_kib": sizes["VmHWM:"]}
