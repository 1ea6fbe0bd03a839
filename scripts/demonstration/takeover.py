"""The second part of the demo: a stream that outlives its agent, without a gap and without a repetition."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from demonstration.feed import prices
from demonstration.stage import DemoFailed, console, script
from jobs.ticker import TickerPayload, follow
from thunderagent.client import Client
from thunderagent.model.errors import TaskNotFound
from thunderagent.model.task import Status, Task

TASK: Final = "ticker-stocks"
RATE: Final = 20
ENOUGH: Final = 60
"""Ticks to see before the kill, and again after the takeover."""
LOOK_S: Final = 0.1
WORD_S: Final = 5.0
"""Time between two words to a reader who sees no live table."""
START_S: Final = 15.0
TAKEOVER_S: Final = 45.0
"""The lease of a stream is 20 s; on top come the guard for clocks, 2 s, and the looks of the other agent."""
STOP_S: Final = 15.0
"""A stop rides on the next heartbeat, each 5 s."""

T = TypeVar("T")
Tick = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the files of the stream hold, and how the takeover went."""

    ticks: int
    first: int
    last: int
    files: int
    gaps: int
    duplicates: int
    takeover_s: float
    folder: Path


def show_takeover(client: Client, supervisor: subprocess.Popen[bytes], folder: Path, logs: Path) -> Told:
    """Follow a feed, kill the agent that holds the stream, see another one take it over, and stop the stream.

    Raises:
        DemoFailed: something did not come in time, or the files are not what the feed sent.
    """
    log = logs / "feed.log"
    with (
        script("feed.py", "--rate", str(RATE), log=log) as feed,
        Live(console=console, refresh_per_second=8, transient=True) as live,
    ):
        watch = Watch(client, {"supervisor": supervisor, "the feed": feed}, folder / TASK, live)
        url = watch.until("the feed listens", lambda: log.read_text(encoding="utf-8").strip(), START_S)
        client.enqueue(follow, TickerPayload(url=url, folder=folder), task_id=TASK)
        watch.tell(f"{TASK} is to follow {url}, {RATE} prices a second")

        held = watch.until("an agent takes the stream", watch.held_by_another_than(None), START_S)
        first = watch.until("the first tick is written", watch.written_behind(0), START_S)
        watch.tell(f"{held.lease_owner} holds it; its first tick is {first[0]['seq']}")
        watch.until("ticks are written", watch.written_behind(0, ENOUGH), START_S)

        before = {agent.name for agent in client.agents.list()}
        pid = pid_of(client, held, logs)
        os.kill(pid, signal.SIGKILL)
        killed, ticks = time.monotonic(), read(watch.folder)
        last = ticks[-1]["seq"]
        watch.tell(f"{len(ticks)} ticks are written, the last is {last}; kill -9 {pid}: that agent is gone")
        started = watch.until("supervisor starts another", lambda: agents_beside(client, before), START_S)
        watch.tell(f"supervisor has started {started} in its place")
        taken = watch.until("another agent takes over", watch.held_by_another_than(held.lease_owner), TAKEOVER_S)
        behind = watch.until("the ticks go on", watch.written_behind(last), START_S)
        takeover_s = time.monotonic() - killed
        watch.tell(
            f"{taken.lease_owner} has taken it over; behind {last} comes {behind[0]['seq']}, "
            f"{takeover_s:.1f} s after the kill"
        )
        missed = int(RATE * takeover_s)  # came while nobody listened, and is sent now in one go
        watch.until("it is live again", watch.written_behind(last + missed, ENOUGH), START_S)

        client.streams.stop(TASK)
        watch.tell("told to stop; its agent hears of it with the next heartbeat")
        task = watch.until("the stream is stopped", watch.ended, STOP_S)
        watch.tell(f"{task.status}, {task.done_reason}; the cursor is {(task.last_seq or {}).get('seq')}")
    return check(task, watch.folder, takeover_s)


class Watch:
    """Waits for what comes next and shows the stream meanwhile."""

    def __init__(self, client: Client, processes: dict[str, subprocess.Popen[bytes]], folder: Path, live: Live) -> None:
        self.folder = folder
        self._client = client
        self._processes = processes
        self._live = live
        self._began = self._told = time.monotonic()

    def tell(self, text: str) -> None:
        """A line with the time."""
        self._told = time.monotonic()
        self._live.console.print(escape(f"{self._told - self._began:5.1f} s  {text}"), soft_wrap=True)

    def until(self, what: str, look: Callable[[], T | None], within_s: float) -> T:
        """What `look` finds, asked again and again.

        Raises:
            DemoFailed: nothing in time, or a process has ended that should run.
        """
        until = time.monotonic() + within_s
        while not (found := look()):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise DemoFailed(f"{name} ended with exit code {process.returncode}")
            if time.monotonic() > until:
                raise DemoFailed(f"not within {within_s:g} s: {what}; {self._how()}")
            if self._live.console.is_terminal:
                self._live.update(self._table())
            elif time.monotonic() - self._told > WORD_S:
                self.tell(self._how())
            time.sleep(LOOK_S)
        return found

    def held_by_another_than(self, agent: str | None) -> Callable[[], Task | None]:
        """Finds the task when another agent holds it."""

        def look() -> Task | None:
            task = self._client.get(TASK)
            return task if task.status is Status.RUNNING and task.lease_owner != agent else None

        return look

    def written_behind(self, seq: int, number: int = 1) -> Callable[[], list[Tick] | None]:
        """Finds the ticks behind this one when there are so many."""

        def look() -> list[Tick] | None:
            ticks = [tick for tick in read(self.folder) if tick["seq"] > seq]
            return ticks if len(ticks) >= number else None

        return look

    def ended(self) -> Task | None:
        """Finds the task when it has ended."""
        task = self._client.get(TASK)
        return task if task.status.is_terminal else None

    def _how(self) -> str:
        """The stream in a line."""
        ticks = read(self.folder)
        newest = f"the newest of {len(ticks)} ticks is {ticks[-1]['seq']}" if ticks else "no tick yet"
        agent, lease = self._holder()
        return f"{newest}; {agent}: {lease}" if agent else f"{newest}; {lease}"

    def _holder(self) -> tuple[str, str]:
        """Who holds the stream, and how long the lease is good."""
        try:
            task = self._client.get(TASK)
        except TaskNotFound:
            return "", "not enqueued"
        if task.status is not Status.RUNNING or task.lease_owner is None or task.lock_time is None:
            return "", str(task.status)
        left = task.lock_time - self._client.store.clock.now()
        return task.lease_owner, f"lease {left:.0f} s" if left > 0 else "lease over"

    def _table(self) -> Table:
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("stream", "ticks", "month", "symbol", "price", "agent", ""):
            shown.add_column(name, justify="right" if name in ("ticks", "price") else "left", no_wrap=True)
        ticks = read(self.folder)
        newest = [str(ticks[-1][name]) for name in ("month", "symbol", "price")] if ticks else [""] * 3
        shown.add_row(TASK, str(len(ticks)), *newest, *map(escape, self._holder()))
        return shown


def agents_beside(client: Client, known: set[str]) -> str | None:
    """An agent that is not among those known."""
    return next((agent.name for agent in client.agents.list() if agent.name not in known), None)


def pid_of(client: Client, task: Task, logs: Path) -> int:
    """The process that holds a task, from the row by which its agent tells of itself.

    Raises:
        DemoFailed: our supervisor has not started it, so it is not ours to kill.
    """
    pid = next((int(agent.info["pid"]) for agent in client.agents.list() if agent.name == task.lease_owner), 0)
    if f"with pid {pid}\n" not in (logs / "supervisord.out").read_text(encoding="utf-8"):
        raise DemoFailed(f"the agent {task.lease_owner} (pid {pid}) is not one that this demo has started")
    return pid


def read(folder: Path) -> list[Tick]:
    """All whole lines of the stream's files, in the order of their minutes; each with the minute of its file."""
    ticks = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        ticks += [json.loads(line) | {"file": path.stem} for line in text[: text.rfind("\n") + 1].splitlines()]
    return ticks


def check(task: Task, folder: Path, takeover_s: float) -> Told:
    """Believe nothing: read the files again and compare them with what the feed must have sent.

    Raises:
        DemoFailed: a tick is missing, comes twice, is in the wrong file or is another than the feed's.
    """
    ticks = read(folder)
    seqs = [tick["seq"] for tick in ticks]
    told = Told(
        ticks=len(ticks),
        first=seqs[0],
        last=seqs[-1],
        files=len({tick["file"] for tick in ticks}),
        gaps=len(set(range(seqs[0], seqs[-1] + 1)) - set(seqs)),
        duplicates=len(seqs) - len({(tick["epoch"], tick["seq"]) for tick in ticks}),
        takeover_s=takeover_s,
        folder=folder,
    )
    if seqs != list(range(told.first, told.last + 1)):
        raise DemoFailed(f"the ticks in {folder} are not each there once and in order: {told}")
    if wrong := wrong_ticks(ticks):
        raise DemoFailed(f"{len(wrong)} ticks in {folder} are not the feed's or in the wrong file, such as {wrong[0]}")
    if (task.status, task.done_reason) != (Status.DONE, "stopped"):
        raise DemoFailed(f"{TASK} is {task.status}: {task.error or task.done_reason}")
    if (task.last_seq or {}).get("seq") != told.last:
        raise DemoFailed(f"the cursor is {task.last_seq}, and the last tick in {folder} is {told.last}")
    return told


def wrong_ticks(ticks: Sequence[Tick]) -> list[Tick]:
    """Ticks whose price is another than that of the data, or whose file is another than their minute's."""
    rows = prices()
    return [
        tick
        for tick in ticks
        if {name: tick[name] for name in rows[0]} != rows[(tick["seq"] - 1) % len(rows)]
        or tick["file"] != tick["time"][:16].replace(":", "-")
    ]
