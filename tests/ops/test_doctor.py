"""The doctor on an embedded store: each failure staged, named, and told with its remedy."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.support.engine import put
from tests.support.powerless import needs_powerless, powerless
from thunderagent.cli import app
from thunderagent.cli import doctor as command
from thunderagent.cli.output import out
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreError, StoreUnavailable
from thunderagent.model.task import Status, Task
from thunderagent.ops.doctor.checks import Doctor, doubts_about_settings
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.ops.doctor.sqlite import AHEAD_S, EMPTY_BYTES, LONG_LOG_BYTES, LOW_BYTES, look_at_file
from thunderagent.settings import Settings
from thunderagent.stores import open_engine, open_store
from thunderagent.stores.engine import Engine
from thunderagent.testing.faulty_engine import FaultyEngine

CONF: Final = """
[program:agent]
command=/opt/thunderagent/.venv/bin/thunderagent run jobs
autorestart=true
stopwaitsecs=45
stopasgroup=true
"""


@pytest.fixture(autouse=True)
def conf(tmp_path: Path) -> Path:
    """A configuration of supervisor that fits, so that what runs on this machine is not looked at."""
    file = tmp_path / "supervisord.conf"
    file.write_text(CONF)
    return file


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with its file."""
    store = open_store(Settings(store=f"sqlite:///{tmp_path}/tasks.db"))
    store.engine.check()
    store.engine.close()
    return store.engine.url


def examine(conf: Path, store: str, **more: Any) -> dict[str, list[Finding]]:
    """The findings by the name of their check."""
    found: dict[str, list[Finding]] = {}
    for one in Doctor(store=store, supervisor_conf=conf, **more).examine():
        found.setdefault(one.check, []).append(one)
    return found


def told(found: list[Finding]) -> str:
    return "\n".join(f"{one.state}: {one.found} -> {one.remedy}" for one in found)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.stdout


# All is well


def test_a_good_installation_is_found_good_and_nothing_is_left_behind(conf: Path, url: str) -> None:
    found = examine(conf, url)
    states = {one.state for findings in found.values() for one in findings}
    assert states <= {State.OK, State.SKIPPED}, told([one for all_ in found.values() for one in all_])
    for check in ("python", "settings", "supervisor", "store", "file", "disk", "write-ahead log", "latency", "clock"):
        assert [one.state for one in found[check]] == [State.OK], told(found[check])
    assert "median of 5: read " in found["latency"][0].found
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM tasks WHERE taskId <> 'boot:'").fetchone() == (0,)
    connection.close()


def test_a_file_that_nobody_has_made_is_not_made(conf: Path, tmp_path: Path) -> None:
    found = examine(conf, f"sqlite:///{tmp_path}/new.db")
    assert "is not there yet" in found["file"][0].found
    assert [one.state for one in found["latency"] + found["queues"]] == [State.SKIPPED, State.SKIPPED]
    assert not (tmp_path / "new.db").exists()


def test_the_command_says_so_and_ends_with_0(conf: Path, url: str) -> None:
    answer = run("--store", url, "--supervisor-conf", str(conf))
    assert "all is well" in answer
    data = json.loads(run("--store", url, "--supervisor-conf", str(conf), "--json"))
    assert (data["store"], data["state"], data["exit_code"]) == (url, "ok", 0)
    assert {"check", "state", "found", "remedy"} == set(data["checks"][0])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_every_terminal(conf: Path, url: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "_width", width)
    monkeypatch.setattr(out, "_height", 50)
    lines = run("--store", url, "--supervisor-conf", str(conf)).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("ok") and "python:" in line for line in lines)


def test_its_progress_is_told_only_on_a_terminal(conf: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    list(Doctor(store=url, supervisor_conf=conf).examine(heard.append))
    assert heard[:4] == ["python", "settings", "jobs", "supervisor"]
    with command._progress() as progress:
        progress("nothing is printed where there is no terminal")
    assert run("--store", url, "--supervisor-conf", str(conf)).startswith("ok")


# Settings and jobs


def test_every_wrong_setting_is_named_and_the_rest_is_looked_at_all_the_same(
    conf: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDERAGENT_SLOTS", "0")
    monkeypatch.setenv("THUNDERAGENT_HEALHT_S", "5")
    monkeypatch.setenv("THUNDERAGENT_LEASE_S", "30")
    found = examine(conf, url)
    text = told(found["settings"])
    assert len(found["settings"]) == 3
    assert all(one.state is State.WRONG for one in found["settings"])
    assert "THUNDERAGENT_SLOTS is 0" in text
    assert "did you mean THUNDERAGENT_HEALTH_S?" in text
    assert "three heartbeats must fit" in text
    assert found["latency"][0].state is State.OK
    assert "3 wrong" in run("--store", url, "--supervisor-conf", str(conf), code=1)


def test_a_store_that_no_engine_has_is_named(conf: Path) -> None:
    found = examine(conf, "mysql://here")
    assert "neither sqlite:// nor dynamodb://" in told(found["store"])
    assert found["latency"][0].state is State.SKIPPED
    assert run("--store", "mysql://here", "--supervisor-conf", str(conf), code=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"http_port": 9464, "http_host": "0.0.0.0"}, "may read the metrics"),  # noqa: S104
        ({"health_folder": "/no/such/folder"}, "no folder that this user can write to"),
        ({"wake_queue_url": "https://sqs.eu-central-1.amazonaws.com/1/q"}, "an embedded store does not use it"),
    ],
)
def test_a_doubtful_setting_is_a_warning(changes: dict[str, Any], says: str) -> None:
    [found] = doubts_about_settings(Settings(**changes))
    assert found.state is State.WARNING
    assert says in found.found
    assert found.remedy


JOBS: Final = """
from thunderagent import Context, job, stream

@job("report.build", queue="reports"{options})
def build(ctx: Context, payload: dict) -> None: ...

@stream("ticker.follow")
async def follow(ctx, payload: dict) -> None: ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a package of jobs and names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(options: str = "") -> str:
        (tmp_path / "doctored.py").write_text(JOBS.format(options=options))
        return "doctored"

    yield make
    sys.modules.pop("doctored", None)


def test_jobs_are_imported_and_fit_the_settings(conf: Path, url: str, package: Callable[..., str]) -> None:
    [found] = examine(conf, url, jobs=package())["jobs"]
    assert (found.state, found.found) == (State.OK, "2 jobs in doctored, for reports, streams")


def test_a_lease_too_short_for_the_heartbeat_is_named(conf: Path, url: str, package: Callable[..., str]) -> None:
    [found] = examine(conf, url, jobs=package(", heartbeat_s=150.0"))["jobs"]
    assert found.state is State.WRONG
    assert "the heartbeat_s of 'report.build' is 150" in found.found


def test_queues_that_nobody_serves_are_named(
    conf: Path, url: str, package: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDERAGENT_QUEUES", '{"report": 4}')
    monkeypatch.setenv("THUNDERAGENT_MAX_STREAMS", "0")
    found = examine(conf, url, jobs=package())["jobs"]
    text = told(found)
    assert {one.state for one in found} == {State.WARNING}
    assert "serves the queue report, to which none of these jobs goes" in text
    assert "the jobs report.build go to the queue reports" in text
    assert "ticker.follow are streams" in text


def test_a_package_that_does_not_import_is_named_with_its_line(
    conf: Path, url: str, package: Callable[..., str], tmp_path: Path
) -> None:
    name = package()
    (tmp_path / "doctored.py").write_text("import nothing_of_this_name\n")
    [found] = examine(conf, url, jobs=name)["jobs"]
    assert found.state is State.WRONG
    assert "doctored.py:1" in found.found


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("./doctored", "doctored"),
        ("doctored/", "doctored"),
        ("doctored.py", "doctored"),
        ("shop/doctored.py", "shop.doctored"),
        ("../shop/doctored.py", "doctored, in the folder ../shop that holds it"),
        ("/srv/shop/doctored", "doctored, in the folder /srv/shop that holds it"),
    ],
)
def test_a_path_is_no_package_and_its_name_is_told(
    conf: Path, url: str, package: Callable[..., str], given: str, name: str
) -> None:
    package()
    [found] = examine(conf, url, jobs=given)["jobs"]
    assert (found.state, found.found) == (State.WRONG, f"name a package, not a path: {name}")
    done = CliRunner().invoke(app, ["run", given, "--store", url])
    assert done.exit_code == 2
    assert f"name a package, not a path: {name}" in done.stderr


def test_a_supervisor_of_others_is_told_and_not_judged(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.ops.doctor.checks.find_conf", lambda environ: None)
    monkeypatch.setattr(
        "thunderagent.ops.doctor.checks.find_others", lambda environ: [Path("/srv/other/supervisord.conf")]
    )
    monkeypatch.setattr("thunderagent.ops.doctor.checks.look_at_agent_units", lambda settings: iter(()))
    [found] = [one for one in Doctor(store=url).examine() if one.check == "supervisor"]
    assert found.state is State.SKIPPED
    assert found.found == "a supervisord runs here with /srv/other/supervisord.conf, which does not run these agents"
    assert found.remedy == "--supervisor-conf PATH checks it"


def test_tasks_that_no_agent_takes_are_named(conf: Path, url: str) -> None:
    store = open_store(Settings(store=url))
    put(store, "a")
    put(store, "b")
    [found] = examine(conf, url)["queues"]
    assert found.state is State.WARNING
    assert found.found == "queue default: 2 tasks are ready and no live agent serves it"
    assert found.remedy == "thunderagent run JOBS --queue default"
    info: dict[str, Any] = {"queues": {"default": 2}, "jobs": ["other"], "health": {}}
    store.announce("host:1:a", info, lives_s=60.0)
    [found] = examine(conf, url)["queues"]
    assert found.found == "queue default: no live agent has the jobs test.job"
    store.engine.close()


def test_rows_that_nobody_deletes_are_told(conf: Path, url: str) -> None:
    store = open_store(Settings(store=url))
    now = store.clock.now()
    store.enqueue([Task(task_id="a", status=Status.DONE, created_at=now, submitted_at=now, job="j", finished_at=now)])
    said = "1 row is overdue to be deleted, the first for 3.0 h"
    for seconds, told in ((3 * 3600.0, True), (60.0, False)):
        store.engine.apply(
            [Write(verb="x", task_id="a", set={"expireAt": now - seconds}, require=(Present("taskId"),))]
        )
        assert [one.found for one in examine(conf, url).get("expiry", [])] == [said] * told
        assert (said in CliRunner().invoke(app, ["stats", "--store", url]).stderr) is told
    store.engine.close()


# The file


def look(path: Path, **changes: Any) -> dict[str, Finding]:
    return {one.check: one for one in look_at_file(str(path), **changes)}


def test_a_folder_that_is_not_there_is_named() -> None:
    [found] = look_at_file("/no/such/folder/tasks.db")
    assert (found.state, found.remedy) == (State.WRONG, "mkdir -p /no/such/folder")


def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    [found] = [one for one in look_at_file("/proc/tasks.db") if one.check == "file"]
    assert found.state is State.WRONG
    assert "cannot write to the folder /proc" in found.found


def test_a_file_that_cannot_be_written_to_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = Path(url.removeprefix("sqlite:///")), os.access

    def refusing(name: Any, mode: int, **_: Any) -> bool:
        return real(name, mode) and not (os.fspath(name) == str(path) and mode & os.W_OK)

    monkeypatch.setattr("thunderagent.stores.sqlite.access.os.access", refusing)
    found = look(path)["file"]
    assert found.state is State.WRONG
    assert f"cannot write to {path}" in found.found
    assert "run agents and commands as one user" in found.remedy


@pytest.mark.slow
@needs_powerless
@pytest.mark.parametrize(("of_file", "of_folder"), [(0o444, 0o755), (0o444, 0o555), (0o644, 0o555), (0o000, 0o755)])
def test_a_permission_that_is_missing_is_one_thing_that_is_wrong(
    tmp_path: Path, conf: Path, of_file: int, of_folder: int
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    engine = open_engine(f"sqlite:///{folder}/tasks.db")
    engine.check()
    engine.close()
    (folder / "tasks.db").chmod(of_file)
    folder.chmod(of_folder)
    try:
        words = ("--store", engine.url, "--supervisor-conf", str(conf), "--json")
        done = powerless("doctor", *words, folder=tmp_path)
    finally:
        folder.chmod(0o755)
    assert done.returncode == 1, done.stderr
    checks = json.loads(done.stdout)["checks"]
    [wrong] = [one for one in checks if one["state"] == "wrong"]
    assert wrong["check"] == "file"
    assert "cannot write to" in wrong["found"]
    assert f"chmod u+w {folder}" in wrong["remedy"]
    assert "backup" not in done.stdout
    assert [one["state"] for one in checks if one["check"] in ("latency", "queues")] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    ("free", "state"), [(EMPTY_BYTES - 1, State.WRONG), (LOW_BYTES - 1, State.WARNING), (LOW_BYTES, State.OK)]
)
def test_a_full_disk_is_named(url: str, free: int, state: State) -> None:
    assert look(Path(url.removeprefix("sqlite:///")), free=lambda folder: free)["disk"].state is state


def test_a_file_system_over_the_network_is_named(url: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/root / ext4 rw 0 0\nserver:/x {tmp_path.parent} nfs4 rw 0 0\n")
    found = look(Path(url.removeprefix("sqlite:///")), mounts=mounts)["file system"]
    assert found.state is State.WRONG
    assert "is on nfs4" in found.found


def test_what_is_no_database_is_named(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database\n" * 100)
    found = look(tmp_path / "notes.db")["database"]
    assert found.state is State.WRONG
    assert "file is not a database" in found.found


def test_a_database_of_a_newer_version_is_named(url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    found = look(path)["database"]
    assert found.state is State.OK, "the file says that it can be used"
    assert "schema version 999" in found.found
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 0")
    found = look(path)["database"]
    assert found.state is State.WRONG
    assert "schema version 999" in found.found
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 5")
    found = look(path)["database"]
    assert found.state is State.OK
    assert "the next write of this release brings it to 6, and releases from version 1 on" in found.found


def test_a_log_that_grows_is_named(url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    with Path(f"{path}-wal").open("wb") as file:
        file.truncate(LONG_LOG_BYTES + 1)
    assert look(path)["write-ahead log"].state is State.WARNING


def test_a_clock_that_was_set_back_is_named(url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    os.utime(path, (time.time() + 7200, time.time() + 7200))
    found = look(path)["clock"]
    assert found.state is State.WARNING
    assert "in the future" in found.found
    assert look(path, now=lambda: time.time() + 7200 - AHEAD_S / 2)["clock"].state is State.OK


# A store that does not answer


def test_a_store_that_does_not_answer_ends_with_3_and_the_rest_is_told(
    conf: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opening(url: str) -> Engine:
        engine = FaultyEngine(open_engine(url))
        engine.outage()
        return engine

    found = examine(conf, url, opening=opening)
    assert found["latency"][0].state is State.WRONG
    assert found["latency"][0].remedy.startswith("see which process holds the file")
    assert found["queues"][0] == Finding("queues", State.SKIPPED, "the store does not answer")
    assert found["python"][0].state is State.OK
    monkeypatch.setattr(command, "Doctor", lambda **given: Doctor(**given, opening=opening))
    assert "cannot be used" in run("--store", url, "--supervisor-conf", str(conf), code=3)
    data = json.loads(run("--store", url, "--supervisor-conf", str(conf), "--json", code=3))
    assert (data["exit_code"], data["state"]) == (3, "wrong")


def test_a_check_that_hangs_is_left_behind(conf: Path, url: str) -> None:
    ended = threading.Event()

    def hanging(url: str) -> Engine:
        ended.wait(600.0)
        raise StoreUnavailable

    begin = time.monotonic()
    doctor = Doctor(store=url, supervisor_conf=conf, opening=hanging, limit_s=0.2)
    found = {one.check: one for one in doctor.examine()}
    ended.set()
    assert time.monotonic() - begin < 60.0
    assert found["store"].found == "it has not ended within 0.2 s"
    assert not doctor.is_reachable
    assert found["queues"].state is State.SKIPPED


def test_a_check_that_fails_by_itself_is_told_and_the_others_go_on(conf: Path, url: str) -> None:
    def broken(url: str) -> Engine:
        raise ZeroDivisionError("division by zero")

    found = examine(conf, url, opening=broken)
    assert "the check itself failed: ZeroDivisionError" in found["store"][0].found
    assert found["clock" if "clock" in found else "queues"]


def test_a_write_that_is_refused_leaves_nothing_behind(conf: Path, url: str) -> None:
    class Refusing(FaultyEngine):
        def apply(self, batch: Any) -> Any:
            if batch[0].verb == "probe":
                raise StoreError("attempt to write a readonly database")
            return super().apply(batch)

    found = examine(conf, url, opening=lambda url: Refusing(open_engine(url)))
    assert "readonly database" in told(found["latency"])
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    assert connection.execute("SELECT COUNT(*) FROM tasks WHERE taskId <> 'boot:'").fetchone() == (0,)
    connection.close()


def test_a_slow_store_is_a_warning(conf: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.ops.doctor.checks.run_laps", lambda engine: ([0.01] * 5, [0.3] * 5))
    [found] = examine(conf, url)["latency"]
    assert found.state is State.WARNING
    assert "read 10.0 ms, write 300.0 ms: that is slow" in found.found
