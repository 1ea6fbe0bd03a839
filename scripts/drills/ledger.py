"""Who ran which task when, and where each message of a stream was handled: what the verdict goes by.

Handlers write here and not into the table, which is what is examined.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a handler."""

    task_id: str
    region: str
    epoch: int
    fence: int
    is_stream: bool
    begun: float
    ended: float | None = None
    is_done: bool = False
    """The handler came to its end, and was not stopped."""


class Ledger:
    """Runs and messages, from any thread; moments are monotonic seconds."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._runs: list[Run] = []
        self._messages: dict[str, dict[int, int]] = defaultdict(dict)
        self._last: dict[str, tuple[str, float]] = {}
        self._firsts: dict[tuple[str, str, int], float] = {}

    def begin(self, task_id: str, region: str, epoch: int, fence: int, *, is_stream: bool = False) -> Run:
        """A handler begins."""
        run = Run(task_id=task_id, region=region, epoch=epoch, fence=fence, is_stream=is_stream, begun=time.monotonic())
        with self._guard:
            self._runs.append(run)
        return run

    def end(self, run: Run, *, is_done: bool) -> None:
        """It has ended."""
        run.is_done = is_done
        run.ended = time.monotonic()

    def message(self, run: Run, seq: int) -> None:
        """A stream has handled a message."""
        now = time.monotonic()
        with self._guard:
            counts = self._messages[run.task_id]
            counts[seq] = counts.get(seq, 0) + 1
            self._last[run.task_id] = run.region, now
            self._firsts.setdefault((run.task_id, run.region, run.epoch), now)

    @property
    def runs(self) -> list[Run]:
        """All runs so far, in the order of their begin."""
        with self._guard:
            return list(self._runs)

    def open_in(self, region: str) -> int:
        """Handlers that run now in a region."""
        return sum(run.ended is None for run in self.runs if run.region == region)

    def live_in(self, region: str, epoch: int) -> dict[str, float]:
        """When each stream handled its first message in a region under an epoch."""
        with self._guard:
            return {task: at for (task, one, of), at in self._firsts.items() if (one, of) == (region, epoch)}

    def messages(self) -> dict[str, dict[int, int]]:
        """How often each message of each stream was handled, by its number."""
        with self._guard:
            return {task: dict(counts) for task, counts in self._messages.items()}


def overlaps(runs: list[Run], lost: str, other: str) -> list[tuple[Run, Run]]:
    """Runs of two regions at the same time, for each run of the first that has one."""
    others = [run for run in runs if run.region == other]
    found = []
    for run in runs:
        if run.region == lost:
            beside = next(
                (
                    one
                    for one in others
                    if one.begun < (run.ended or float("inf")) and run.begun < (one.ended or float("inf"))
                ),
                None,
            )
            if beside is not None:
                found.append((run, beside))
    return found


def twice(runs: list[Run]) -> list[str]:
    """Batch tasks that came to their end more than once."""
    done = Counter(run.task_id for run in runs if run.is_done and not run.is_stream)
    return sorted(task for task, number in done.items() if number > 1)


def silently_twice(runs: list[Run]) -> list[str]:
    """Tasks that came to their end more than once in one epoch, or whose later run has no larger fence: what they do
    outside of the table could not be told apart.
    """
    done = Counter((run.task_id, run.epoch) for run in runs if run.is_done and not run.is_stream)
    found = {task for (task, _), number in done.items() if number > 1}
    largest = dict[str, int]()
    for run in sorted(runs, key=lambda run: run.begun):
        if run.fence <= largest.get(run.task_id, 0):
            found.add(run.task_id)
        largest[run.task_id] = max(run.fence, largest.get(run.task_id, 0))
    return sorted(found)
