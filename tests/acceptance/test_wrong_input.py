"""What an agent cannot work with ends it at once, with one clear message; tasks it cannot run do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.conftest import Place, Start
from tests.acceptance.processes import AgentProcess, cli
from thunderagent.model.task import Status

pytestmark = pytest.mark.processes

JOB = """\
from thunderagent import Context, job

@job("{name}")
def handler(ctx: Context, payload: None) -> None: ...
"""


def package(folder: Path, **modules: str) -> str:
    """A package of jobs; the answer is its name."""
    home = folder / "theirs"
    home.mkdir()
    (home / "__init__.py").touch()
    for name, text in modules.items():
        (home / f"{name}.py").write_text(text)
    return home.name


def refuses(agent: AgentProcess, code: int) -> str:
    """The message with which an agent ends at once."""
    assert agent.wait(15) == code, agent.log.tail
    assert "Traceback" not in agent.log.other
    assert agent.log.lines() == [], "it began although it cannot work"
    return agent.log.other


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("import thunderagent\n\nimport not_installed_here\n", 3, "No module named 'not_installed_here'"),
        ("def broken(:\n", 1, "SyntaxError"),
        ("\n\n\nnumber = 1 / 0\n", 4, "ZeroDivisionError"),
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError"),
        ("from theirs.fine import nothing\n", 1, "cannot import name 'nothing'"),
    ],
    ids=["missing module", "syntax", "own error", "error in a library", "missing name"],
)
def test_a_module_that_does_not_import_is_named_with_its_line(
    sqlite_place: Place, start: Start, tmp_path: Path, text: str, line: int, says: str
) -> None:
    jobs = package(tmp_path, broken=text, fine=JOB.format(name="fine"))
    message = refuses(start(sqlite_place, jobs=jobs), 2)
    assert "theirs.broken" in message
    assert f"{tmp_path}/theirs/broken.py:{line}" in message
    assert says in message


def test_two_jobs_with_one_name_are_both_named(sqlite_place: Place, start: Start, tmp_path: Path) -> None:
    jobs = package(tmp_path, first=JOB.format(name="same"), second=JOB.format(name="same"))
    message = refuses(start(sqlite_place, jobs=jobs), 2)
    assert "'same'" in message
    assert "theirs.first.handler" in message
    assert "theirs.second.handler" in message


def test_all_problems_of_the_settings_are_told_at_once(sqlite_place: Place, start: Start) -> None:
    wrong = {"slots": 0, "lease_s": 10, "heartbeat_s": 5, "drain_s": 44, "batch_page": "many", "leese_s": 3}
    message = refuses(start(sqlite_place, **wrong), 2)
    for name in ("SLOTS", "HEARTBEAT_S", "DRAIN_S", "BATCH_PAGE"):
        assert f"THUNDERAGENT_{name}" in message
    assert "did you mean THUNDERAGENT_LEASE_S?" in message
    assert message.count("\n  - ") == 5


@pytest.mark.parametrize(
    ("store", "code", "says"),
    [
        ("postgres://somewhere", 2, "neither sqlite:// nor dynamodb://"),
        ("sqlite:////no/such/folder/tasks.db", 2, "/no/such/folder"),
        ("sqlite:///garbage", 3, "garbage"),
        ("dynamodb://TaskTable?region=us-east-1&endpoint=http://127.0.0.1:9", 3, "http://127.0.0.1:9"),
    ],
    ids=["scheme", "folder", "not a database", "nobody there"],
)
def test_a_store_that_cannot_be_used_is_named(start: Start, tmp_path: Path, store: str, code: int, says: str) -> None:
    (tmp_path / "garbage").write_text("this is no database, whatever its name says\n" * 100)
    assert says in refuses(start(store), code)


def test_a_package_that_is_not_there_is_named(sqlite_place: Place, start: Start) -> None:
    assert "there is no package 'nowhere'" in refuses(start(sqlite_place, jobs="nowhere"), 2)


@pytest.mark.ministack
def test_a_missing_table_is_told_with_its_remedy(ministack_place: Place, start: Start) -> None:
    url = ministack_place.url.replace("Acceptance-", "Missing-")
    message = refuses(start(url), 3)
    assert "Missing-" in message
    assert "thunderagent table create" in message


def test_tasks_of_unknown_jobs_stay_for_others_and_are_told(place: Place, start: Start, tmp_path: Path) -> None:
    for number in range(3):
        place.client.enqueue("nobody.has.this", task_id=f"unknown-{number}")
    agent = start(place)
    line = agent.line("tasks of jobs that this agent does not have are left alone")
    assert line["jobs"] == ["nobody.has.this"]
    known = place.client.enqueue("quick.add", {"a": 2})
    place.wait(known.id, Status.SUCCESS)
    left = [place.task(f"unknown-{number}") for number in range(3)]
    assert {(task.status, task.fence) for task in left} == {(Status.PENDING, 0)}

    told = cli("stats", cwd=tmp_path, store=place.url)
    assert told.returncode == 0
    assert "no agent has the jobs nobody.has.this" in told.stderr
    [default] = [
        one for one in json.loads(cli("stats", "--json", cwd=tmp_path, store=place.url).stdout) if one["ready"]
    ]
    assert (default["queue"], default["ready"], default["unknown_jobs"]) == ("default", 3, ["nobody.has.this"])
