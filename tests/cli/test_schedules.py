"""The commands on periodic jobs: what they say of a schedule, and what they do to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.engine import put, settings
from thunderagent.cli import app
from thunderagent.cli.output import out
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.periodic import periodic
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.schedules import Tick
from thunderagent.model.task import Status
from thunderagent.model.ticks import cron, every
from thunderagent.queue.schedules.scheduler import TickScheduler
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore


def ticking(ctx: Context, payload: Tick) -> None:
    """A handler that does nothing."""


NIGHTLY: Job[Any] = periodic(every().day.at("02:00", "Europe/Berlin"), overlap="skip", catch_up="none")(
    job("report.nightly", queue="reports")(ticking)
)
OFTEN: Job[Any] = periodic(cron("*/10 * * * *"))(job("[bold]often")(ticking))


class Stand:
    """A store in a file, and the commands on it in this process."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self.store = TaskStore(SqliteEngine(str(path)))
        self.client = Client(self.store, settings())
        self.said = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Standard output of a command that ends with this code."""
        done = CliRunner().invoke(app, ["schedule", *arguments, "--store", self.url])
        assert done.exit_code == code, (done.exit_code, done.output, done.exception)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def register(self, *jobs: Job[Any]) -> None:
        """As an agent that starts with these jobs."""
        TickScheduler(
            self.store, Registry(*jobs), settings(), EventBus(), owner="agent-1", cancel=self.client.cancel
        ).look()

    def earlier(self, task_id: str) -> None:
        """As if the task of the row had been put a day before."""
        name = task_id.partition("@")[0]
        before = f"{name}@2026-01-01T00:00:00Z"
        put(self.store, before, job=name)
        self.client.schedules._change_schedule(name, "set schedule", lambda seen: replace(seen, previous=before))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    monkeypatch.setattr(out, "_width", 160)
    stand = Stand(tmp_path / "tasks.db")
    stand.register(NIGHTLY, OFTEN)
    return stand


def test_without_periodic_jobs_the_list_says_what_makes_one(tmp_path: Path) -> None:
    assert "no periodic jobs: an agent that has one puts its schedule when it starts" in Stand(tmp_path / "t.db")(
        "list"
    )


def test_the_list_shows_each_job_with_its_schedule_and_its_next_tick(stand: Stand) -> None:
    lines = stand("list").splitlines()
    assert lines[0].split() == ["job", "schedule", "next", "last", "catch", "up", "overlap", "queue", "left", "out"]
    [often] = [line for line in lines if "[bold]often" in line]
    assert "cron */10 * * * * UTC" in often
    [nightly] = [line for line in lines if "report.nightly" in line]
    assert "every day at 02:00 Europe/Berlin" in nightly
    assert "skip" in nightly and "none" in nightly and "reports" in nightly
    told = stand.json("list")
    assert [one["job"] for one in told] == ["[bold]often", "report.nightly"]
    assert told[0]["next"] % 600 == 0


def test_a_narrow_list_keeps_the_job_and_its_next_tick(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "_width", 80)
    lines = stand("list").splitlines()
    assert lines[0].split() == ["job", "schedule", "next"]
    assert all(line.rstrip().endswith("Z") for line in lines[1:]), "the whole moment"


def test_next_tells_the_ticks_to_come_and_in_how_long(stand: Stand) -> None:
    text = stand("next", "report.nightly", "-n", "3")
    assert "report.nightly: every day at 02:00 Europe/Berlin" in text
    assert len([line for line in text.splitlines() if "Z  in " in line]) == 3
    ticks = stand.json("next", "[bold]often", "--number", "2")
    assert len(ticks) == 2
    assert all(tick.endswith("0:00Z") for tick in ticks)


def test_run_now_prints_the_id_of_its_task(stand: Stand) -> None:
    task_id = stand("run-now", "report.nightly").strip()
    assert task_id.startswith("report.nightly@")
    task = stand.client.get(task_id)
    assert (task.status, task.queue) == (Status.PENDING, "reports")
    stand.earlier(task_id)
    stand("run-now", "report.nightly", code=1)  # its policy is to skip, and that task is open
    assert "is still open" in stand.said
    assert stand.json("run-now", "[bold]often")["job"] == "[bold]often"


def test_pause_and_resume_say_what_they_did(stand: Stand) -> None:
    text = stand("pause", "report.nightly", "--for", "2h", "--reason", "moving house")
    assert text.startswith("report.nightly is paused since ")
    assert " until " in text and "moving house" in text
    assert " after a pause" in stand("list")
    assert stand.json("pause", "report.nightly")["paused_until"] is None
    assert "paused" in stand("list")
    assert "no ticks until: thunderagent schedule resume report.nightly" in stand("next", "report.nightly")
    stand("run-now", "report.nightly")
    assert "is paused; this task runs all the same" in stand.said
    assert stand("resume", "report.nightly").startswith("report.nightly is due next at 2")
    assert stand.json("resume", "report.nightly")["paused"] is None


@pytest.mark.slow
@pytest.mark.parametrize("command", [("next",), ("run-now",), ("pause",), ("resume",)])
def test_a_job_without_a_schedule_is_refused_with_the_remedy(stand: Stand, command: tuple[str, ...]) -> None:
    stand(*command, "report.hourly", code=1)
    assert "there is no schedule of 'report.hourly'" in stand.said
    assert "when it starts" in stand.said


def test_a_time_that_is_none_is_refused(stand: Stand) -> None:
    stand("pause", "report.nightly", "--for", "soon", code=2)
    assert "--for" in stand.said
