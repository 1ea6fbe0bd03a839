"""The harness of all measurements: what is wanted, where it happens, the measured processes, and the report."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rich.table import Table

from thunderagent.client import Client
from thunderagent.ops import local_engine
from thunderagent.settings import load_settings
from thunderagent.stores import open_engine, open_store
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table

LOOPBACK: Final = ("127.0.0.1", "localhost")
START_S: Final = 60.0
STOP_S: Final = 45.0
LOOK_S: Final = 0.1
TAIL_BYTES: Final = 3000

Progress = Callable[[str], None]


class BenchFailed(Exception):
    """There is nothing to report, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how much of it; times are seconds."""

    store: str = "sqlite"
    naive: bool = True
    agents: tuple[int, ...] = (1,)
    tasks: int = 20_000
    samples: int = 100
    """Tasks of the latency, each way."""
    connections: tuple[int, ...] = (700,)
    tls: tuple[bool, ...] = (False,)
    loops: tuple[str, ...] = ("asyncio",)
    phases: tuple[str, ...] = ()
    streams: int = 30
    """Streams of an agent that is ended, and those that meet a server that flaps."""
    terms: int = 20
    """How often an agent with streams gets SIGTERM."""
    kills: int = 5
    settle_s: float = 6.0
    """Pause before memory is read."""
    idle_s: float = 20.0
    push_s: float = 8.0
    flap_s: float = 60.0
    clients: tuple[int, ...] = (30_000,)


FULL: Final = Plan()
QUICK: Final = Plan(
    tasks=200,
    samples=3,
    connections=(20,),
    streams=3,
    terms=1,
    kills=0,
    settle_s=0.2,
    idle_s=0.5,
    push_s=0.5,
    flap_s=2.0,
    clients=(2000,),
)
"""Enough to see that everything works."""


# Where it happens


@dataclass(slots=True)
class Place:
    """Where stores are for one run."""

    name: str
    folder: Path
    endpoint: str = ""
    """Of a local DynamoDB; empty: SQLite."""
    _made: int = field(default=0, init=False)
    _tables: list[DynamoEngine] = field(default_factory=list, init=False)

    def fresh(self) -> str:
        """URL of an empty store."""
        self._made += 1
        if not self.endpoint:
            return f"sqlite:///{self.folder}/tasks-{self._made}.db"
        url = f"dynamodb://Bench-{uuid.uuid4().hex[:8]}?region=us-east-1&endpoint={self.endpoint}"
        engine = open_engine(url)
        assert isinstance(engine, DynamoEngine)
        create_table(engine, wait_s=START_S, sleep=lambda _: time.sleep(LOOK_S))
        self._tables.append(engine)
        return url

    def close(self) -> None:
        """Delete the tables that were made."""
        for engine in self._tables:
            engine.connection.call("DeleteTable", TableName=engine.table)
            engine.close()


@contextmanager
def opened(store: str, folder: Path) -> Iterator[Place]:
    """The place that `--store` names; an engine that is started for it is stopped at the end of the block."""
    is_local = urlsplit(store).scheme == "http" and urlsplit(store).hostname in LOOPBACK
    if store not in ("sqlite", "ministack") and not is_local:
        raise BenchFailed(f"--store {store}: use sqlite, ministack, or http://127.0.0.1:PORT of a local DynamoDB")
    home = folder / "ministack"
    place = Place(store, folder, store if is_local else "")
    try:
        if store == "ministack":
            place.endpoint = local_engine.start(home).endpoint
        yield place
    finally:
        place.close()
        if store == "ministack":
            local_engine.stop(home)


def client_of(url: str) -> Client:
    """A client of a store, which counts the units of its requests where there are any."""
    settings = load_settings(store=url)
    client = Client(open_store(settings), settings)
    if isinstance(client.store.engine, DynamoEngine):
        client.store.engine.consumed.enabled = True
    client.store.engine.check()
    return client


# The measured processes


class Child:
    """A measured process, which answers requests; see `measured`."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.hello: dict[str, Any] = {}

    def ask(self, do: str, *, deadline_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; BenchFailed with the end of the log if there is none."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # it has ended, as its answers show
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        return self.answer(do, deadline_s)

    def answer(self, what: str, deadline_s: float) -> dict[str, Any]:
        """The next line of its answers."""
        try:
            line = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            raise self.failure(f"did not answer to {what!r} in {deadline_s:g} s") from None
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            raise self.failure(f"has ended with {self._process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failure(f"failed to {what}: {answer['error']}")
        return answer

    def until(self, what: str, done: Callable[[dict[str, Any]], bool], deadline_s: float) -> dict[str, Any]:
        """Ask for its state until that is as wanted; the last one."""
        return until([self], what, lambda states: done(states[0]), deadline_s)[0]

    def failure(self, what: str) -> BenchFailed:
        """What went wrong, with the end of the log."""
        raw = self._log.read_bytes()[-TAIL_BYTES:] if self._log.exists() else b""
        return BenchFailed(f"{self.name} {what}:\n{raw.decode(errors='replace')}")

    def signal(self, number: int) -> float:
        """Send a signal; the monotonic second of that."""
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    def end(self, *, politely: bool = False) -> None:
        """Make sure that it has ended; `politely` it may take the time of a drain."""
        if self._process.poll() is None:
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


def until(
    children: Sequence[Child], what: str, done: Callable[[list[dict[str, Any]]], bool], deadline_s: float
) -> list[dict[str, Any]]:
    """Ask all for their states until these are as wanted; the last ones."""
    end = time.monotonic() + deadline_s
    while not done(states := [child.ask("state") for child in children]):
        if time.monotonic() > end:
            numbers = [{name: one for name, one in state.items() if one} for state in states]
            raise children[0].failure(f"is not {what} in {deadline_s:g} s, but {numbers}")
        time.sleep(LOOK_S)
    return states


Start = Callable[..., Child]
_numbers: Final = count(1)


@contextmanager
def children(folder: Path) -> Iterator[Start]:
    """A function that starts `python -m benchmarks.MODULE ARGUMENT`, with a log in the folder.

    Every process has ended when the block has.
    """
    started: list[Child] = []

    def start(module: str, argument: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Child:
        name = f"{module}-{next(_numbers)}"
        log = folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.{module}", json.dumps(argument)],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C comes to us alone
            )
        child = Child(name, process, log)
        started.append(child)
        child.hello = child.answer("start", START_S)
        return child

    try:
        yield start
    finally:
        for child in reversed(started):
            child.end()


# The report


@dataclass(frozen=True, slots=True)
class Line:
    """One number of ours, beside the naive one and its goal if there are any."""

    name: str
    ours: float
    naive: float | None = None
    least: float = -math.inf
    most: float = math.inf

    @property
    def goal(self) -> str:
        """What is wanted, in words; empty: nothing."""
        if self.least == self.most:
            return number_text(self.most)
        if self.most < math.inf:
            return f"≤ {number_text(self.most)}"
        return f"≥ {number_text(self.least)}" if self.least > -math.inf else ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None: there is none."""
        return self.least <= self.ours <= self.most if self.goal else None

    @property
    def ratio(self) -> float | None:
        """Ours divided by the naive one."""
        return self.ours / self.naive if self.naive else None

    def data(self) -> dict[str, Any]:
        """The line as JSON data."""
        return {"ours": self.ours, "naive": self.naive, "ratio": self.ratio, "goal": self.goal, "met": self.met}


Goals = Mapping[str, tuple[float, float]]
"""The least and the most that is wanted, by the name of the line."""
Numbers = dict[str, float | None]
"""What was measured on one side, by the name of the line."""
Section = tuple[str, list[Line]]
"""A title and its lines."""


def section(
    title: str,
    ours: Mapping[str, float | None],
    naive: Mapping[str, float | None] | None = None,
    goals: Goals | None = None,
) -> Section:
    """The lines of what was measured on both sides; None is left out."""
    naive, goals = naive or {}, goals or {}
    lines = [Line(name, one, naive.get(name), *goals.get(name, ())) for name, one in ours.items() if one is not None]
    return title, lines


def table(title: str, sections: Iterable[Section]) -> Table:
    """Everything in one table."""
    shown = Table("", title=title, title_justify="left")
    for name in ("ours", "naive", "ratio", "goal"):
        shown.add_column(name, justify="right")
    for heading, lines in sections:
        shown.add_section()
        shown.add_row(f"[bold]{heading}[/]")
        for line in lines:
            mark = {True: " [green]✓[/]", False: " [red]✗[/]", None: ""}[line.met]
            numbers = map(number_text, (line.ours, line.naive, line.ratio))
            shown.add_row(line.name, *numbers, line.goal + mark)
    return shown


def number_text(value: float | None) -> str:
    """A number for people; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.2f}"


def load_now() -> float:
    """The load of the machine in the last minute."""
    return round(os.getloadavg()[0], 2)
