"""The live view: what a frame shows at each width, and that the terminal is left as it was."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console, Group
from typer.testing import CliRunner

from tests.acceptance.processes import COMMAND, environment
from tests.support.engine import LONG_S, claimed, put
from thunderagent.cli import app
from thunderagent.cli.top import draw, frame_data, watch
from thunderagent.client import Client
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.task import Lane
from thunderagent.ops.overview import AgentView, Cost, Overview, Slots, overview
from thunderagent.queue.stats import QueueStats
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.streams.journal import Link
from thunderagent.telemetry.prices import store_dollars

STARTED_S: Final = 60.0
"""A process of its own is given so long on a machine that is overloaded."""

ENTER, LEAVE, HIDE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    settings = Settings(store=f"sqlite:///{tmp_path}/tasks.db")
    made = Client(open_store(settings), settings)
    yield made
    made.close()


def announce(client: Client, name: str = "host-1:1:a", health: dict[str, Any] | None = None, **more: Any) -> None:
    info: dict[str, Any] = {
        "version": "0.1.0",
        "queues": {"default": 10, "reports": 4},
        "running": {"default": 1, "reports": 4},
        "jobs": ["test.job"],
        "health": {"heartbeat_alive": True, "store_answers": True, "draining": False} if health is None else health,
    }
    client.store.announce(name, {**info, **more}, lives_s=60.0)


def frame(found: Overview | None, width: int = 80, *, error: str | None = None, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=60, highlight=False)
    console.print(Group(*draw(found, error, width, height, url="sqlite:///tasks.db")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


# What is seen


def test_a_frame_has_queues_agents_streams_and_says_that_cost_is_not_told(client: Client) -> None:
    put(client.store, "a")
    claimed(client.store, "b", lane=Lane("reports"))
    announce(client, streams={"held": 7, "max": 700, "connections": 6})
    client.pauses.pause(queue="reports")
    text = frame(overview(client.store), 120)
    assert re.search(r"default +1 +0 s +0 +0 +0 +0 +1", text)
    assert re.search(r"reports paused +0 +1", text)
    assert "agents 1 (1 ok)   streams 7 of 700 held, 6 connected" in text
    assert "default 1/10, reports 4/4" in text
    assert "cost: nothing, the store is a file" in text


def test_tasks_that_run_in_a_queue_that_nobody_serves_are_marked(client: Client, tmp_path: Path) -> None:
    claimed(client.store, "b", lane=Lane("reports"))
    text = frame(overview(client.store))
    assert re.search(r"reports +0 +1 lost +0 +0 +0 +0", text)
    stats = CliRunner().invoke(app, ["stats", "--store", client.store.engine.url])
    note = "queue reports: no agent serves it: 1 running there under the leases of lost agents"
    assert note in stats.stderr
    announce(client)
    assert "lost" not in frame(overview(client.store))
    assert "no agent" not in CliRunner().invoke(app, ["stats", "--store", client.store.engine.url]).stderr


@pytest.mark.parametrize(
    ("health", "state"),
    [
        ({"heartbeat_alive": True, "store_answers": True}, "ok"),
        ({"heartbeat_alive": False, "store_answers": True}, "not well"),
        ({"heartbeat_alive": True, "store_answers": False}, "not well"),
        ({"healthy": True}, "ok"),
        ({"healthy": False, "reasons": ["its queue default sees work and gets none"]}, "not well"),
        ({"healthy": True, "draining": True}, "draining"),
        ({"healthy": True, "paused": True}, "paused"),
        ({"healthy": False, "draining": True}, "draining"),
    ],
)
def test_an_agent_is_as_its_row_tells(client: Client, health: dict[str, Any], state: str) -> None:
    announce(client, health=health)
    found = overview(client.store)
    assert [one.state for one in found.agents] == [state]
    text = frame(found, 120)
    assert state in text
    if "reasons" in health:
        assert "sees work and gets none" in text


def test_an_agent_that_somebody_paused_is_paused_before_it_says_so(client: Client) -> None:
    announce(client)
    client.pauses.pause(agent="host-1")
    assert overview(client.store).agents[0].state == "paused"


def test_cost_is_that_of_the_units_that_agents_tell(client: Client) -> None:
    told = {"read_units": 100.0, "write_units": 3000.0, "succeeded": 480, "failed": 15, "closed": 5}
    announce(client, "host-1:1:a", counts=told)
    announce(client, "host-2:1:b", counts=told)
    announce(client, "host-3:1:old")
    cost = overview(client.store).cost
    assert cost == Cost(
        tasks=1000, read_units=200.0, write_units=6000.0, dollars=store_dollars(read_units=200, write_units=6000)
    )
    assert cost.dollars_per_1000 == pytest.approx(0.003775)
    assert "$0.0038 for 1,000 tasks" in frame(overview(client.store))
    assert "cost: unknown: these agents do not report it" in frame(replace(a_fleet(1, 1), cost=None))
    assert Cost(tasks=0, read_units=1.0, write_units=1.0, dollars=0.1).dollars_per_1000 is None


def a_fleet(queues: int, agents: int) -> Overview:
    def queue(number: int) -> QueueStats:
        return QueueStats(
            queue=f"queue-{number}",
            ready=10_000,
            delayed=123,
            running=45,
            blocked=6,
            failed=number % 2,
            oldest_ready_s=float(number),
            agents=number % 3,
            unknown_jobs=(),
            at_least=("ready",),
        )

    def agent(number: int) -> AgentView:
        return AgentView(
            name=f"ip-10-0-0-{number}.eu-central-1.compute.internal:4711:0a1b2c3d",
            version="0.1.0",
            since=0.0,
            seen=1.0,
            state="not well" if number == agents - 1 else "ok",
            reasons=("the store has not answered for 75 s",) if number == agents - 1 else (),
            slots=(Slots("default", 3, 10), Slots("reports", 1, 4)),
            streams_held=70,
            streams_most=700,
            streams_connected=69,
            streams_away=((f"ticks-{number}", Link(False, float(number), "network (refused)", 1_800_000_030.0)),),
        )

    return Overview(
        at=1_800_000_000.0,
        store="dynamodb://TaskTable?region=eu-central-1",
        queues=tuple(map(queue, range(queues))),
        paused=(),
        agents=tuple(map(agent, range(agents))),
        cost=Cost(tasks=1234567, read_units=1e6, write_units=7e6, dollars=4.5),
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_frame_is_readable_at_every_width(width: int) -> None:
    text = frame(a_fleet(3, 3), width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert "10000+" in text
    assert "queue-2" in text
    assert "ip-10-0-0-2" in text
    assert "not well" in text
    assert "4/14" in text or "default 3/10" in text
    assert "the store has not answered for 75 s" in text
    assert "ticks-0 not connected since 1970-01-01 00:00:00Z" in text
    if width == 200:
        assert ", next attempt at 2027-01-15 08:00:30Z (in 30 s): network (refused)" in text


@pytest.mark.parametrize("height", [12, 24, 50])
def test_a_large_fleet_fits_the_height_with_what_is_worst_first(height: int) -> None:
    text = frame(a_fleet(80, 200), 100, height=height)
    lines = text.rstrip("\n").splitlines()
    assert len(lines) <= max(height, 18)
    assert "more queues" in text
    assert "more agents" in text
    assert "queue-79" in text  # has waited longest
    first = lines[next(number for number, line in enumerate(lines) if line.startswith("agent ")) + 1]
    assert first.startswith("ip-10-0-0-199")
    assert "not well" in first
    assert "$" in lines[-1]


def test_the_data_of_a_frame_are_json(client: Client) -> None:
    announce(client)
    data = json.loads(json.dumps(frame_data(overview(client.store)), default=str))
    assert set(data) == {"at", "store", "queues", "paused", "agents", "cost"}
    assert data["agents"][0]["slots"] == [
        {"queue": "default", "running": 1, "slots": 10},
        {"queue": "reports", "running": 4, "slots": 4},
    ]


# The command


def test_once_prints_a_frame_and_json_its_data(client: Client) -> None:
    put(client.store)
    url = client.store.engine.url
    done = CliRunner().invoke(app, ["top", "--once", "--store", url])
    assert (done.exit_code, "default" in done.stdout) == (0, True)
    done = CliRunner().invoke(app, ["top", "--json", "--store", url])
    assert json.loads(done.stdout)["queues"][0]["ready"] == 1
    done = CliRunner().invoke(app, ["top", "--store", url])  # no terminal: one frame, and no end is waited for
    assert (done.exit_code, "default" in done.stdout) == (0, True)
    assert CliRunner().invoke(app, ["top", "--every", "0.5", "--store", url]).exit_code == 2


class Screen(io.StringIO):
    """A terminal's output that a test waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            number = super().write(text)
            self._changed.notify_all()
        return number

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.getvalue(), LONG_S), self.getvalue()[-2000:]


@pytest.mark.slow
def test_a_store_that_is_away_is_shown_as_such_and_asked_again() -> None:
    screen, stop, answers = Screen(), threading.Event(), iter(range(1000))
    console = Console(file=screen, force_terminal=True, width=100, height=30)

    def look() -> Overview:
        if next(answers) in (0, 2):
            raise StoreUnavailable("the table does not answer at all")
        return a_fleet(1, 1)

    thread = threading.Thread(target=lambda: watch(look, "dynamodb://T", 0.01, console=console, stop=stop))
    thread.start()
    try:
        screen.wait_for("the store does not answer:")
        screen.wait_for("queue-0")  # it came back
        first = screen.getvalue().index("queue-0")
        deadline = time.monotonic() + LONG_S
        while "does not answer at all" not in screen.getvalue()[first:]:  # away again: with the last frame below
            assert time.monotonic() < deadline
            stop.wait(0.01)
    finally:
        stop.set()
        thread.join(LONG_S)
    assert not thread.is_alive()
    again = screen.getvalue()[first:]
    assert "queue-0" in again[again.index("does not answer at all") :]
    assert screen.getvalue().index(ENTER) < screen.getvalue().rindex(LEAVE)


def test_what_nobody_expected_ends_it_and_leaves_the_terminal_clean() -> None:
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=100, height=30)

    def look() -> Overview:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch(look, "dynamodb://T", 0.01, console=console)
    assert screen.getvalue().rindex(LEAVE) > screen.getvalue().rindex(ENTER)
    assert screen.getvalue().rindex(SHOW) > screen.getvalue().rindex(HIDE)


DEADLOCK: Final = """
import os, signal, threading
from thunderagent.cli.top import watch
from thunderagent.model.errors import StoreUnavailable

class Interrupted(threading.Event):
    def wait(self, timeout=None):
        with self._cond:  # as the real one does
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass

def look():
    raise StoreUnavailable

watch(look, "dynamodb://T", 1.0, stop=Interrupted())
print("ended")
"""


@pytest.mark.processes
def test_ctrl_c_ends_it_at_the_very_moment_in_which_it_begins_to_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEADLOCK], capture_output=True, text=True, timeout=STARTED_S, check=True
    )
    assert done.stdout.endswith("ended\n")


class Terminal:
    """A process on a pseudo terminal."""

    def __init__(self, *arguments: str, store: str, cwd: Path) -> None:
        self._master, slave = pty.openpty()
        told = {
            **environment(store=store),
            "TERM": "xterm-256color",
            "COLUMNS": "80",
            "LINES": "24",
            "PYTHONFAULTHANDLER": "1",
        }
        self.process = subprocess.Popen(
            [COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=told, cwd=cwd, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + STARTED_S
        while text not in self.text and self._read():
            if time.monotonic() > deadline:
                self.process.send_signal(signal.SIGABRT)  # to see where it is
                while self._read():
                    pass
        assert text in self.text, self.text

    def _read(self) -> bool:
        """Read what there is; False at the end."""
        if select.select([self._master], [], [], 0.2)[0]:
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                return False
        return True

    def end(self) -> int:
        return self.process.wait(STARTED_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_the_terminal_clean(client: Client, tmp_path: Path, number: signal.Signals) -> None:
    put(client.store)
    with Terminal("top", "--every", "1", store=client.store.engine.url, cwd=tmp_path) as terminal:
        terminal.wait_for("Ctrl-C ends")
        assert ENTER in terminal.text
        terminal.process.send_signal(number)
        terminal.wait_for(LEAVE)
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert terminal.text.rindex(SHOW) > terminal.text.rindex(HIDE)


@pytest.mark.processes
def test_a_store_that_is_away_from_the_start_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # and closed again: nobody listens there
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Terminal("top", store=f"dynamodb://TaskTable?endpoint={endpoint}", cwd=tmp_path) as terminal:
        terminal.wait_for("the store does not answer")
        assert terminal.process.poll() is None
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(LEAVE)
        assert terminal.end() == 0
