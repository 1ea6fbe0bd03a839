"""The commands that pause, and what the others say of what is paused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.support.engine import put
from thunderagent.cli import app
from thunderagent.cli.output import notes, out
from thunderagent.cli.pauses import duration
from thunderagent.client import Client
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Lane, Status
from thunderagent.model.writes.limits import holder, limit_row
from thunderagent.settings import Settings
from thunderagent.stores import open_store

AGENT: Final = "host-1:4711:0a1b2c3d"
REPORTS: Final = Lane("reports")


class Stand:
    """A store in a file, and the commands on it in this process."""

    def __init__(self, url: str) -> None:
        self.url = url
        settings = Settings(store=url)
        self.store = open_store(settings)
        self.client = Client(self.store, settings)
        self.said = ""
        """Standard error of the last command."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output of a command that ends with this code."""
        done = CliRunner().invoke(app, [*arguments, "--store", self.url])
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def agent(self, name: str = AGENT, **health: Any) -> None:
        fine = {"heartbeat_alive": True, "store_answers": True, "draining": False}
        info = {"queues": {"reports": 2}, "running": {"reports": 1}, "jobs": ["test.job"], "health": {**fine, **health}}
        self.store.announce(name, info, lives_s=60.0)


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the terminal so wide."""

    def make(width: int) -> None:
        for console in (out, notes):
            monkeypatch.setattr(console, "_width", width)
            monkeypatch.setattr(console, "_height", 50)

    return make


@pytest.fixture
def stand(tmp_path: Path, columns: Callable[[int], None]) -> Iterator[Stand]:
    columns(80)
    stand = Stand(f"sqlite:///{tmp_path}/tasks.db")
    yield stand
    stand.client.close()


def words(text: str) -> str:
    """A text with single spaces: how it is laid out does not matter."""
    return " ".join(text.split())


# pause, resume, pauses


def test_a_queue_is_paused_listed_and_resumed(stand: Stand) -> None:
    stand.agent()
    assert stand("pauses") == "nothing is paused\n"
    said = stand("pause", "queue", "reports", "--for", "2h", "--reason", "the [database] moves")
    assert said.startswith("queue reports is paused since 2")
    assert said.endswith("Z (in 2 h): the [database] moves\n")
    assert stand.said == ""
    assert stand("pauses").startswith("queue reports is paused since 2")
    assert stand("resume", "queue", "reports").startswith("queue reports is resumed; it was paused since 2")
    assert stand("resume", "queue", "reports") == "queue reports was not paused\n"
    assert stand("pauses") == "nothing is paused\n"


def test_everything_can_be_had_as_json(stand: Stand) -> None:
    stand.agent()
    made = stand.json("pause", "agent", AGENT, "--for", "90s")
    assert {**made, "since": 0, "until": 0} == {"kind": "agent", "name": AGENT, "since": 0, "until": 0, "reason": None}
    assert made["until"] - made["since"] == pytest.approx(90)
    assert stand.json("pauses") == [made]
    assert stand.json("resume", "agent", AGENT) == {"kind": "agent", "name": AGENT, "resumed": True}
    assert stand.json("resume", "agent", AGENT) == {"kind": "agent", "name": AGENT, "resumed": False}
    assert stand.json("pauses") == []


@pytest.mark.parametrize(
    ("kind", "name", "doubt"),
    [
        ("queue", "repots", "no task was ever in the queue 'repots' and no live agent serves it"),
        ("job", "report.biuld", "no live agent has the job 'report.biuld'"),
        ("agent", "host-2", "no live agent has the name or the host 'host-2'"),
    ],
)
def test_a_name_that_nobody_knows_is_warned_of_and_paused_all_the_same(
    stand: Stand, kind: str, name: str, doubt: str
) -> None:
    stand.agent()
    assert f"{kind} {name} is paused" in stand("pause", kind, name)
    assert words(stand.said) == f"{doubt}; it is paused all the same"
    assert [one["name"] for one in stand.json("pauses")] == [name]


def test_long_names_are_not_cut_at_eighty_columns(stand: Stand) -> None:
    name = "a-host-with-quite-a-long-name.eu-central-1.compute.internal:4711:0a1b2c3d"
    stand("pause", "agent", name, "--reason", "r" * 200)
    assert name in stand("pauses")
    assert "r" * 200 in stand("pauses")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pause", "quee", "reports"), "KIND is 'quee'; use one of queue, job, agent"),
        (("resume", "quee", "reports"), "KIND is 'quee'; use one of queue, job, agent"),
        (("pause", "queue", "no spaces"), "cannot be the name of a queue"),
        (("pause", "queue", "a", "--for", "90"), "--for 90: write a time with its unit"),
        (("pause", "queue", "a", "--for", "0s"), "--for 0s: write a time"),
        (("pause", "queue", "a", "--for", "1e9d"), "--for 1e9d: write a time"),
        (("pause", "queue", "a", "--for", "99999d"), "use a number of seconds from 0.001 to 315360000"),
        (("pause", "job", "a", "--reason", "x" * 201), "one line of at most 200 letters"),
    ],
)
def test_wrong_input_says_what_is_right(stand: Stand, arguments: tuple[str, ...], message: str) -> None:
    stand(*arguments, code=2)
    assert message in words(stand.said)
    assert stand.client.pauses.list() == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("1.5h", 5400)]
)
def test_times_are_written_with_their_units(text: str, seconds: float) -> None:
    assert duration("--for", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "90", "1 h", "-5m", "2h!", "h2", "٣s", "1w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="90s, 15m, 2h, 1d"):
        duration("--for", text)


# What other commands tell


def test_a_paused_agent_is_called_so_at_once(stand: Stand) -> None:
    stand.agent()
    stand.agent("host-2:4712:4d3c2b1a", paused=True)
    stand.agent("host-3:4713:4d3c2b1a", store_answers=False)
    stand.agent("host-4:4714:4d3c2b1a", draining=True)
    stand.agent("host-5:4715:4d3c2b1a")
    stand.client.pauses.pause(agent=AGENT)
    for host in ("host-3", "host-4"):
        stand.client.pauses.pause(agent=host)
    states = {line.split()[0][:6]: words(line).split(" ", 3)[-1] for line in stand("agents").splitlines()[1:]}
    assert states == {
        "host-1": "paused",
        "host-2": "paused",
        "host-3": "not well",
        "host-4": "draining",
        "host-5": "ok",
    }


def test_a_paused_queue_is_told_with_its_numbers(stand: Stand) -> None:
    stand.agent()
    put(stand.store, "a", lane=REPORTS)
    put(stand.store, "b")
    pause = stand.client.pauses.pause(queue="reports", reason="a move")
    stand("stats")
    assert "queue reports is paused since" in stand.said
    assert ": a move" in stand.said
    found = {one["queue"]: one["paused"] for one in stand.json("stats")}
    assert found == {"default": None, "reports": pause.entry()}


def test_show_says_why_a_task_does_not_run_at_eighty_columns(stand: Stand) -> None:
    stand.agent()
    values: dict[str, Any] = {"lane": REPORTS, "limit_key": "api", "limit_max": 1}
    put(stand.store, "a-task-that-has-the-slot", **values)
    put(stand.store, "a-task-in-line", status=Status.BLOCKED, waitlist="api", **values)
    members = [holder("a-task-that-has-the-slot", 1)]
    stand.store.insert_row(limit_row("api", number=1, now=stand.store.clock.now(), holders=members))
    stand.client.pauses.pause(queue="reports", reason="the [database] moves")
    shown = stand("show", "a-task-in-line")
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    said = words(shown)
    assert "why its queue reports is paused since 2" in said
    assert ": the [database] moves it waits for a permit of the limit 'api': the only permit is taken by" in said
    told = stand.json("show", "a-task-in-line")["why"]
    assert told[0].startswith("its queue reports is paused since 2")
    assert told[1] == (
        "it waits for a permit of the limit 'api': the only permit is taken by a-task-that-has-the-slot (PENDING); "
        "it is the next"
    )


def test_show_says_nothing_of_the_kind_of_a_task_that_has_ended(stand: Stand) -> None:
    put(stand.store, "a", status=Status.SUCCESS)
    assert "why" not in stand("show", "a").split()
    assert stand.json("show", "a")["why"] == []


def test_every_command_has_help_that_says_how(stand: Stand) -> None:
    for command in ("pause", "resume", "pauses"):
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
    assert "90s, 15m, 2h, 1d" in words(CliRunner().invoke(app, ["pause", "--help"]).stdout.replace("│", " "))
