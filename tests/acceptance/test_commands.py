"""The command line from end to end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import COMMAND, environment, is_alive
from tests.acceptance.processes import cli as run_cli
from tests.support.program import program

pytestmark = pytest.mark.processes


class Shell:
    """Commands in one folder, on one store."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.store = store
        self.columns = 200
        self.said = ""
        """Standard error of the last command."""

    def __call__(self, *arguments: str, code: int = 0, stdin: str = "") -> str:
        """Standard output of a command that ends with this code."""
        done = run_cli(*arguments, cwd=self.folder, stdin=stdin, columns=self.columns, store=self.store)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        self.said = done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def shell(sqlite_place: Place, tmp_path: Path) -> Shell:
    return Shell(tmp_path, sqlite_place.url)


def test_tasks_are_enqueued_run_and_shown(shell: Shell, sqlite_place: Place, start: Start) -> None:
    agent = start(sqlite_place)
    added = shell.json("enqueue", "quick.add", '{"a": 20, "b": 22}', "--wait", "20", "--jobs", "workjobs")
    assert (added["status"], added["payload"], added["result"]) == ("SUCCESS", {"a": 20, "b": 22}, {"sum": 42})
    [one] = shell.json("agents")
    assert (one["name"], one["pid"]) == (agent.name, agent.pid)
    assert agent.name in shell("agents")
    reported = shell("enqueue", "quick.reports", "--queue", "reports", "--wait", "20")
    assert reported.splitlines()[1:] == ['SUCCESS "reported"']
    reported = reported.splitlines()[0]
    assert [task["taskId"] for task in shell.json("list", "--queue", "reports")] == [reported]

    broken = shell.json("enqueue", "quick.break", "--task-id", "broken", "--wait", "20", code=1)
    assert (broken["status"], broken["taskId"], broken["attempt"]) == ("FAILED", "broken", 1)
    assert "broken on purpose" in broken["error"]
    shown = shell("show", "broken")
    assert "broken on purpose" in shown
    assert "quick.py" in shown
    listed = shell("list", "--status", "failed")
    assert "broken" in listed
    assert reported not in listed
    assert {one["queue"]: one["failed"] for one in shell.json("stats")} == {"default": 1, "reports": 0}
    assert agent.stop() == 0
    assert shell.json("retry", "broken")["status"] == "PENDING"


def test_tasks_are_cancelled_retried_and_purged(shell: Shell, sqlite_place: Place) -> None:
    task = shell("enqueue", "quick.add", '{"a": 1}', "--delay-s", "600").strip()
    other = shell("enqueue", "quick.add", '{"a": 2}').strip()
    assert sqlite_place.task(task).created_at > sqlite_place.task(other).created_at + 590
    assert shell("cancel", task) == f"{task} is DONE (closed on purpose)\n"
    assert shell.json("retry", task)["status"] == "PENDING"
    assert shell.json("cancel", task)["doneReason"] == "cancelled"
    assert "Delete all DONE tasks" in shell("purge", "DONE", code=1, stdin="n\n")
    assert shell.json("purge", "DONE", "--yes") == {"deleted": 1}
    assert [one["taskId"] for one in shell.json("list")] == [other]
    assert shell("purge", "SUCCESS", "--yes") == "0 tasks deleted\n"


def test_payloads_come_from_standard_input_and_parents_are_waited_for(shell: Shell) -> None:
    parent = shell("enqueue", "quick.add", "-", stdin='{"a": 3}').strip()
    assert shell.json("show", parent)["payload"] == {"a": 3}
    child = shell.json("enqueue", "quick.add", '{"a": 1}', "--depends-on", parent)
    assert (child["status"], child["waitingFor"]) == ("BLOCKED", [parent])
    assert parent in shell("show", child["taskId"])
    assert shell.json("enqueue", "quick.add", '{"a": 3}', "--task-id", "twice")["taskId"] == "twice"
    assert shell("enqueue", "quick.add", '{"a": 3}', "--task-id", "twice").strip() == "twice"
    assert len(shell.json("list")) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "nothing"], 1, "there is no task 'nothing'"),
        (["retry", "waits"], 1, "only FAILED and DONE"),
        (["cancel", "nothing"], 1, "there is no task"),
        (["enqueue", "quick.add", "{}", "--task-id", "waits"], 1, "waits"),
        (["enqueue", "quick.add", '{"a": 1}', "--wait", "0.1", "--json"], 1, "0.1 s"),
        (["enqueue", "quick.add", "{a: 1}"], 2, "the payload is not JSON"),
        (["enqueue", "quick.add", '{"a": "x"}', "--jobs", "workjobs"], 2, "does not fit the job 'quick.add'"),
        (["enqueue", "quick.subtract", "--jobs", "workjobs"], 2, "known are"),
        (["enqueue", "quick.add", "--depends-on", "nothing"], 2, "nothing"),
        (["enqueue", "quick.add", "--on-parent-failure", "cry"], 2, "use one of fail, cancel, run"),
        (["list", "--status", "GONE"], 2, "use one of PENDING"),
        (["purge", "PENDING", "--yes"], 1, "have not ended"),
        (["table", "check"], 2, "SQLite makes its own"),
        (["list", "--store", "mysql://"], 2, "neither sqlite:// nor dynamodb://"),
        (["list", "--store", "sqlite:///no.database"], 3, "no.database"),
        (["frobnicate"], 2, "No such command"),
        (["list", "--limit", "none"], 2, "--limit"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_wrong_command_says_what_is_wrong(
    shell: Shell, sqlite_place: Place, arguments: list[str], code: int, says: str
) -> None:
    sqlite_place.client.enqueue("quick.add", {"a": 1}, task_id="waits")
    (shell.folder / "no.database").write_text("no database\n" * 100)
    assert shell(*arguments, code=code) == ""
    assert says in shell.said.replace("\n", " ")


def test_a_narrow_terminal_shows_whole_ids(shell: Shell, sqlite_place: Place, start: Start) -> None:
    agent = start(sqlite_place)
    done = shell("enqueue", "quick.add", '{"a": 1}', "--wait", "20").splitlines()[0]
    odd = shell("enqueue", "quick.break", "--task-id", "[bold]an-id:with/odd.letters[/bold]", "--wait", "20", code=1)
    odd = odd.splitlines()[0]
    shell.columns = 60
    listed = shell("list")
    assert done in listed
    assert odd in listed
    assert "SUCCESS" in listed
    assert done in shell("show", done)
    assert agent.name in shell("agents")
    assert "default" in shell("stats")
    long = "an-id-that-is-longer-than-most-" + "x" * 20
    shell("enqueue", "quick.add", '{"a": 1}', "--task-id", long)
    assert long in shell("list")


def test_an_agent_warns_of_a_queue_to_which_none_of_its_jobs_goes(sqlite_place: Place, start: Start) -> None:
    agent = start(sqlite_place, "--queue", "reprts:2", "--queue", "default")
    line = agent.line("no job goes to the queue 'reprts'; did you mean 'reports'? It is served for tasks that name it")
    assert line["level"] == "WARNING"
    agent.line("agent started")
    assert agent.log.other == ""


def test_a_closed_pipe_is_no_error(shell: Shell, sqlite_place: Place) -> None:
    answers = sqlite_place.client.enqueue_many("quick.add", [{"a": number} for number in range(2000)])
    assert all(one.created for one in answers)
    with subprocess.Popen(
        [COMMAND, "list", "--limit", "2000", "--json"],
        env=environment(store=shell.store),
        cwd=shell.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listing:
        assert listing.stdout and listing.stderr
        assert listing.stdout.readline() == "[\n"
        listing.stdout.close()
        assert listing.stderr.read() == ""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def test_every_command_and_option_has_a_help_text(shell: Shell) -> None:
    found = dict(commands(program()))
    listed = shell("--help")
    for path, command in found.items():
        assert command.help, f"{path} has no help"
        assert len(path) > 1 or path[0] in listed
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{parameter.name} of {path} has no help"
    assert {("run",), ("enqueue",), ("table", "create"), ("local",)} <= set(found)
    assert "Run an agent until SIGTERM" in shell("run", "--help")
    assert shell("--version").startswith("thunderagent ")


@pytest.mark.ministack
def test_the_local_engine_is_started_used_and_stopped(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "sqlite:///unused.db")
    assert "not running" in shell("local", "--status", code=1)
    try:
        started = shell("local")
        assert started.count("\n") == 1
        variable, _, url = started.strip().removeprefix("export ").partition("=")
        assert variable == "THUNDERAGENT_STORE"
        assert shell("local") == started, "it was started twice"
        status = shell("local", "--status")
        assert "running as process" in status
        assert started.strip() in status
        pid = int(status.split("process ")[1].split()[0])
        there = Shell(tmp_path, url.strip("'"))
        task = there("enqueue", "quick.add", '{"a": 1}').strip()
        assert there.json("show", task)["status"] == "PENDING"
        assert "is as it should be" in there("table", "check")
        assert there.json("table", "create") == {"store": there.store, "ready": True, "differences": []}
        assert {one["check"]: one["state"] for one in there.json("doctor")["checks"]}["permissions"] == "ok"
        assert there.json("table", "delete", "--yes") == {"store": there.store, "deleted": True}
        assert there("list", code=3) == ""
        told = shell.json("local", "--status")
        assert (told["running"], told["store"], told["pid"]) == (True, there.store, pid)
    finally:
        stopped = shell("local", "--stop")
    assert stopped == "stopped\n"
    assert not is_alive(pid)
    assert "it was not running" in shell("local", "--stop")
    assert shell.json("local", "--stop") == {"stopped": False}
    assert "was not" not in shell("local", "--status", code=1)
    assert shell.json("local", "--status", code=1) == {"running": False}
