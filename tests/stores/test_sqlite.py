"""What only the embedded engine promises: many processes on one file, survival of kills, schema versions."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.powerless import needs_powerless, powerless
from tests.support.stands import Stand, open_stand
from thunderagent.agent.housekeeping import EXPIRE_S, Expiry
from thunderagent.cli import app
from thunderagent.model.conditions import Is, Present, Write
from thunderagent.model.errors import ConfigurationError, SchemaMismatch, StoreError, StoreRejected, StoreUnavailable
from thunderagent.model.rows import ATTRIBUTES
from thunderagent.model.task import Candidate, Lane, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.engine import Overdue
from thunderagent.stores.sqlite import access as sqlite_access
from thunderagent.stores.sqlite import engine as sqlite
from thunderagent.stores.sqlite import schema as sqlite_schema
from thunderagent.stores.sqlite import sql
from thunderagent.stores.sqlite.engine import EXPIRED_AT_ONCE, FREE_KEPT, GIVEN_BACK, MEMORY, SqliteEngine, lock_pause
from thunderagent.stores.sqlite.schema import MIGRATIONS
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock

CLAIMER = """
import json, sys
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.model.task import Lane
store = TaskStore(SqliteEngine(sys.argv[1]))
page = store.ready(Lane(), limit=1000).entries
print(len(page), flush=True)
sys.stdin.readline()
won = []
for entry in page:
    won += [lease.task_id for lease in store.claim([Wanted(entry, 60.0)], owner=sys.argv[2])]
print(json.dumps(won), flush=True)
"""

ENQUEUER = """
import itertools, sys
from thunderagent.stores.tasks import TaskStore
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.model.task import Status, Task
store = TaskStore(SqliteEngine(sys.argv[1]))
for number in itertools.count():
    ids = [f"{number}-{one}" for one in range(5)]
    now = store.clock.now()
    store.enqueue([
        Task(task_id=one, status=Status.PENDING, created_at=now, submitted_at=now, job="j") for one in ids
    ])
    print(" ".join(ids), flush=True)
"""


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with open_stand("sqlite-file", tmp_path) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tasks.db")


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


@pytest.mark.slow
def test_four_processes_that_race_for_one_file_share_the_tasks(stand: Stand, path: str) -> None:
    tasks = [stand.task(f"n{number}") for number in range(200)]
    assert all(answer.created for answer in stand.store.enqueue(tasks))
    children = [_start(CLAIMER, path, f"agent-{number}") for number in range(4)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "200\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        won = [json.loads(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert sorted(task_id for one in won for task_id in one) == sorted(task.task_id for task in tasks)
    rows = stand.store.get(task.task_id for task in tasks).values()
    assert {(row.status, row.fence) for row in rows} == {(Status.RUNNING, 1)}
    assert {row.task_id: row.lease_owner for row in rows} == {
        task_id: f"agent-{number}" for number, one in enumerate(won) for task_id in one
    }


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(path: str) -> None:
    child = _start(ENQUEUER, path)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate(timeout=30)
    whole = [line for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]
    acknowledged = " ".join(whole).split()
    assert len(acknowledged) >= 100
    assert child.returncode == -signal.SIGKILL
    engine = SqliteEngine(path)
    assert set(engine.get(acknowledged)) == set(acknowledged)
    assert engine.count("PENDING") % 5 == 0, "a batch happens whole or not at all"
    engine.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_database_of_version_1_is_brought_up_to_date_with_its_rows(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in MIGRATIONS[0]:
            connection.execute(statement)
        connection.execute("PRAGMA user_version = 1")
        connection.execute(
            'INSERT INTO tasks ("taskId", "status", "createdAt", "submittedAt", "job", "kind", "payload", "fence")'
            " VALUES ('old', 'PENDING#reports', 1760000000.5, 1760000000.5, 'j', 'batch', '1', 0)"
        )
        connection.commit()
    engine = SqliteEngine(path)
    assert TaskStore(engine).get(["old"])["old"].lane == Lane("reports")
    assert engine.expire(1.0) == 0
    assert engine.delete([{"taskId": "none", "status": "DONE", "fence": 0}]) == [False]
    engine.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert {"status-createdAt-index", "expireAt-index"} <= names


def test_a_database_of_version_2_gets_the_columns_of_handoffs_and_keeps_its_rows(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in (*MIGRATIONS[0], *MIGRATIONS[1]):
            connection.execute(statement)
        connection.execute("PRAGMA user_version = 2")
        before = {name for _, name, *_ in connection.execute("PRAGMA table_info(tasks)")}
        connection.execute(
            'INSERT INTO tasks ("taskId", "status", "createdAt", "submittedAt", "job", "kind", "fence", "lastSeq")'
            """ VALUES ('old', 'PENDING', 1760000000.5, 1760000000.5, 'j', 'stream', 0, '{"seq":5}')"""
        )
        connection.commit()
    stores = [TaskStore(SqliteEngine(path)) for _ in range(2)]
    assert stores[0].get(["old"])["old"].last_seq == {"seq": 5}
    [lease] = stores[1].claim([Wanted(Candidate("old", "PENDING", 1760000000.5, "j", "stream"), 20.0)], owner="me")
    assert stores[0].settle([writes.offer(lease, now=1.0, until=1800000000.25)])[0].accepted
    row = stores[1].get(["old"])["old"]
    assert (row.handoff_owner, row.handoff_until, row.handoff_state) == ("me", 1800000000.25, "OFFERED")
    for store in stores:
        store.engine.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) == 6
        after = {name for _, name, *_ in connection.execute("PRAGMA table_info(tasks)")}
        assert after - before == {
            "handoffOwner",
            "handoffUntil",
            "handoffState",
            "uniqueKey",
            "uniqueScope",
            "limitKey",
            "limitMax",
            "heldBy",
            "holders",
            "traceparent",
            "regionEpoch",
        }


def test_a_new_database_has_the_columns_of_one_that_grew(path: str) -> None:
    SqliteEngine(path).check()
    with closing(sqlite3.connect(path)) as connection:
        assert {name for _, name, *_ in connection.execute("PRAGMA table_info(tasks)")} == set(ATTRIBUTES)


def test_a_database_of_a_newer_version_is_refused_and_left_alone(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    engine = SqliteEngine(path)
    with pytest.raises(SchemaMismatch, match="version 99"):
        engine.check()
    engine.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 99


@contextmanager
def _release(version: int) -> Iterator[None]:
    """The code of the release whose schema had this version: it knows no later column."""
    columns = tuple(name for name in ATTRIBUTES if sql._LATER.get(name, 1) <= version)
    listed = ", ".join(f'"{name}"' for name in columns)
    caches = sql.select, sql._update_sql
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_schema, "MIGRATIONS", MIGRATIONS[:version])
        patch.setattr(sql, "COLUMNS", columns)
        patch.setattr(sql, "_LISTED", listed)
        patch.setattr(sql, "SELECT_ONE", f'SELECT {listed} FROM tasks WHERE "taskId" = ?')
        for one in caches:
            one.cache_clear()
        yield
    for one in caches:
        one.cache_clear()


def _schema(path: str) -> tuple[int, list[tuple[str]]]:
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master UNION SELECT name FROM pragma_table_info('tasks')")
        return connection.execute("PRAGMA user_version").fetchone()[0], names.fetchall()


NEWEST = len(MIGRATIONS)


@pytest.mark.parametrize("version", range(1, NEWEST))
def test_a_release_can_be_rolled_back_to_any_that_lacks_nothing_but_columns(path: str, version: int) -> None:
    later = {name: "x" if ATTRIBUTES[name] == "S" else 1.0 for name in sql._LATER if sql._LATER[name] > version}
    later = {name: value for name, value in later.items() if ATTRIBUTES[name] in ("S", "N")}
    ours = SqliteEngine(path)
    retry = Write(verb="retry", task_id="b", set={"retryCount": 2}, require=(Is("status", "PENDING"),))
    with _release(version):
        old = SqliteEngine(path)
        assert old.put([_row("a")])[0].won
    before = _schema(path)
    assert before[0] == version
    assert ours.get(["a"])["a"]["job"] == "j"
    assert [one.task_id for one in ours.page("PENDING", limit=9).entries] == ["a"]
    assert _schema(path) == before, "a read changes nothing"
    assert ours.put([{**_row("b"), **later}])[0].won
    assert _schema(path)[0] == NEWEST
    with _release(version):
        fresh = SqliteEngine(path)
        for engine, name in ((old, "c"), (fresh, "d")):
            assert engine.put([_row(name)])[0].won
            assert not engine.put([_row("b")])[0].won
            [answer] = engine.apply([retry])
            assert answer.row is not None
            assert (answer.won, answer.row["retryCount"], *sorted(set(answer.row) & set(later))) == (True, 2)
            assert set(engine.get(["a", "b", "c"])) == {"a", "b", "c"}
            assert not set(engine.get(["b"])["b"]) & set(later)
        assert fresh.delete([_row("d")]) == [True]
    assert _schema(path)[0] == NEWEST
    assert ours.get(["b"])["b"] == {**_row("b"), **later, "retryCount": 2}, "what the old release did not know stays"
    for engine in (ours, old, fresh):
        engine.close()


def test_a_release_that_cannot_use_a_file_does_not_open_it_nor_write_into_it(path: str) -> None:
    """The file says so: columns that were added would be no reason."""
    open_before = SqliteEngine(path)
    assert open_before.put([_row("a")])[0].won
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, ("CREATE TABLE other (a)",)))
        newer.setattr(sqlite_schema, "USABLE_FROM", NEWEST + 1)
        engine = SqliteEngine(path)
        assert engine.put([_row("b")])[0].won
        engine.close()
    told = rf"has schema version {NEWEST + 1}, which can be used from version {NEWEST + 1} on.*upgrade it"
    with pytest.raises(SchemaMismatch, match=told):
        open_before.put([_row("c")])
    fresh = SqliteEngine(path)
    with pytest.raises(SchemaMismatch, match=told):
        fresh.check()
    for one in (open_before, fresh):
        one.close()
    assert not {"c"} & set(_tasks(path))


def _tasks(path: str) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute('SELECT "taskId" FROM tasks')]


def test_commands_that_read_leave_an_older_file_as_it_is(path: str) -> None:
    with _release(2):
        engine = SqliteEngine(path)
        assert engine.put([_row("a")])[0].won
        engine.close()
    before = _schema(path)
    runner = CliRunner()
    for words in (*LOOKS, ["pauses"], ["health"], ["schedule", "list"], ["streams", "list"], ["doctor"]):
        done = runner.invoke(app, [*words, "--store", f"sqlite:///{path}"])
        assert not isinstance(done.exception, Exception), (words, done.output)
        assert done.exit_code in (0, 1), (words, done.output)
        assert _schema(path) == before, words
    done = runner.invoke(app, ["pause", "queue", "reports", "--store", f"sqlite:///{path}"])
    assert done.exit_code == 0, done.output
    assert _schema(path)[0] == NEWEST


def test_a_busy_database_is_unavailable_now_and_works_later(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    engine = SqliteEngine(path)
    row = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    engine.check()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            engine.put([row])
        assert engine.get(["a"]) == {}, "readers do not wait for the writer"
        other.execute("ROLLBACK")
    assert engine.put([row])[0].won
    engine.close()


def test_whoever_waits_for_the_writer_asks_again_soon_however_long_it_has_waited(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would sleep up to 100 ms, in which those that come later get the lock: equal agents then claim unequally
    much."""
    engine = SqliteEngine(path)
    engine.check()
    pauses: list[float] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 50:
                other.execute("ROLLBACK")

        monkeypatch.setattr("time.sleep", pause)
        row = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
        assert engine.put([row])[0].won
    assert len(pauses) == 50
    assert max(pauses) <= 0.025
    with engine._reading() as cursor:
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (5000,), "everything else waits as before"
    engine.close()


def test_a_batch_that_fails_in_its_middle_leaves_nothing(path: str) -> None:
    engine = SqliteEngine(path)
    good = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    with pytest.raises(StoreError):
        engine.put([good, {**good, "taskId": "b", "noColumn": 1}])
    assert engine.get(["a"]) == {}
    engine.close()


def test_a_write_that_no_column_takes_is_refused_for_good_and_its_neighbours_are_done(path: str) -> None:
    engine = SqliteEngine(path)
    good = {"taskId": "a", "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}
    puts = engine.put([good, {**good, "taskId": "b", "maxRetry": 10**30}, {**good, "taskId": "c"}])
    assert [(one.won, type(one.error)) for one in puts] == [
        (True, type(None)),
        (False, StoreRejected),
        (True, type(None)),
    ]
    assert "put b: " in str(puts[1].error)
    batch = [
        Write(verb="test", task_id=name, set={"hb": number}, require=[Present("taskId")])
        for name, number in (("a", 1), ("c", 2**64), ("c", 3))
    ]
    answers = engine.apply(batch)
    assert [type(one.error) for one in answers] == [type(None), StoreRejected, type(None)]
    assert {name: row["hb"] for name, row in engine.get(["a", "c"]).items()} == {"a": 1, "c": 3}
    engine.close()


NO_UTF8 = "CAST(x'66ff' AS TEXT)"


def spoil(engine: SqliteEngine, task_id: str, column: str, value: str) -> None:
    """What another program writes into a row: SQLite checks no text."""
    with engine._transaction() as cursor:
        cursor.execute(f'UPDATE tasks SET "{column}" = {value} WHERE "taskId" = ?', (task_id,))


@pytest.mark.parametrize("column", ["payload", "job", "errors", "kind", "result", "uniqueKey"])
@pytest.mark.parametrize("value", [NO_UTF8, "x'66ff'", "x'5b5d'"])
def test_a_text_that_is_no_text_spoils_its_own_row_alone(path: str, column: str, value: str) -> None:
    engine = SqliteEngine(path)
    store, now = TaskStore(engine), engine.clock.now()
    store.enqueue(
        [Task(task_id=name, status=Status.PENDING, created_at=now, submitted_at=now, job="j") for name in "abc"]
    )
    spoil(engine, "b", column, value)
    assert isinstance(engine.get("abc")["b"][column], bytes)
    assert set(store.get("abc")) == {"a", "c"}
    assert [entry.task_id for entry in store.ready(Lane(), limit=10).entries] == ["a", "b", "c"]
    again = TaskStore(SqliteEngine(path))
    wanted = [Wanted(entry, 60.0) for entry in again.ready(Lane(), limit=10).entries]
    assert [lease.task_id for lease in again.exchange((), wanted, owner="x:1:a").leases] == ["a", "c"]
    assert all(row["fence"] <= 1 for row in again.engine.get("abc").values()), "no write is done twice"


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_an_id_that_is_no_text_is_no_entry_and_the_pages_go_on_behind_it(path: str, limit: int) -> None:
    engine = SqliteEngine(path)
    engine.put([{"taskId": name, "status": "PENDING", "createdAt": 1.0, "job": "j", "fence": 0} for name in "aegz"])
    spoil(engine, "e", "taskId", NO_UTF8)
    spoil(engine, "g", "taskId", "x'66fe'")
    found: list[str] = []
    after: Any = None
    for _ in range(5):
        page = SqliteEngine(path).page("PENDING", limit=limit, after=after)
        found += [entry.task_id for entry in page.entries]
        after = json.loads(json.dumps(page.after))
        if after is None:
            break
    assert (found, after) == (["a", "z"], None)
    assert engine.lanes() == [Lane()]


@pytest.mark.parametrize("place", [[], [1.0], [1.0, 2], {"a": 1}, [1.0, "a", 2]])
def test_a_place_that_is_none_is_refused(path: str, place: Any) -> None:
    with pytest.raises(StoreRejected, match="is no place in the index"):
        SqliteEngine(path).page("PENDING", limit=1, after=place)


def test_a_status_that_is_no_text_is_no_lane(path: str) -> None:
    engine = SqliteEngine(path)
    engine.put([{"taskId": name, "status": "PENDING", "createdAt": 1.0, "expireAt": 1, "fence": 0} for name in "ab"])
    spoil(engine, "a", "status", NO_UTF8)
    assert engine.lanes() == [Lane()]
    spoil(engine, "a", "taskId", NO_UTF8)
    assert engine.expire(2.0) == 2


def test_a_file_that_is_no_database_is_told_by_its_name(path: str) -> None:
    Path(path).write_text("this is a report, not a database " * 100)
    engine = SqliteEngine(path)
    with pytest.raises(StoreError, match=r"tasks\.db cannot be used"):
        engine.check()
    engine.close()


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    engine = SqliteEngine(str(tmp_path / "nowhere" / "tasks.db"))
    with pytest.raises(ConfigurationError, match="nowhere"):
        engine.check()


def test_commits_are_durable_and_readers_never_wait(path: str) -> None:
    engine = SqliteEngine(path)
    engine.check()
    with engine._reading() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cursor.execute("PRAGMA synchronous").fetchone() == (2,)
    engine.close()


@pytest.mark.slow
def test_a_forked_child_opens_the_file_again(stand: Stand) -> None:
    stand.enqueue()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if stand.now().status is Status.PENDING and stand.store.engine.count("PENDING") == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert stand.now().status is Status.PENDING


@pytest.mark.slow
def test_a_new_file_that_others_are_opening_is_waited_for(path: str) -> None:
    """SQLite answers the switch to its write-ahead log with "locked" at once while another connection may write."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE other (x)")
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.3, other.execute, ["ROLLBACK"])
        release.start()
        engine = SqliteEngine(path)
        engine.check()
        assert not other.in_transaction, "it was not waited for"
        release.join()
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["", "import sys; sys.exit()", "import atexit; atexit.register(shop.client.stats)"])
def test_a_client_that_lives_in_a_module_ends_with_its_process_in_silence(tmp_path: Path, ends: str) -> None:
    """As in each manage.py: what the client's own modules name may be gone before it."""
    (tmp_path / "shop.py").write_text(
        "from thunderagent.client import Client\nclient = Client.from_settings(store='sqlite:///tasks.db')\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"import shop; shop.client.enqueue('a.b', {{}})\n{ends}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(tmp_path)))},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "tasks.db-wal").exists() or ends.startswith("import atexit"), "its connection was closed"
    engine = SqliteEngine(str(tmp_path / "tasks.db"))
    assert engine.count("PENDING") == 1
    engine.close()


# The file is another now, or may not be used


def _row(name: str) -> dict[str, object]:
    return {"taskId": name, "status": "PENDING", "createdAt": 1.0, "submittedAt": 1.0, "job": "j", "fence": 0}


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks at the file."""
    monkeypatch.setattr(sqlite_access, "LOOK_S", 0.0)


@pytest.mark.usefixtures("looked_at")
def test_a_file_that_was_deleted_is_told_in_reads_and_writes_until_it_is_opened_anew(path: str) -> None:
    engine = SqliteEngine(path)
    engine.put([_row("a")])
    sibling = engine.sibling()
    os.rename(path, f"{path}.away")
    for call in (engine.lanes, lambda: engine.page("PENDING", limit=1), lambda: engine.put([_row("b")]), sibling.check):
        with pytest.raises(StoreUnavailable, match=r"tasks\.db was deleted while it was open: restart"):
            call()
    assert not Path(path).exists(), "nobody has made another"
    os.rename(f"{path}.away", path)
    with pytest.raises(StoreUnavailable, match="restart the agents"):
        engine.check()  # somebody else may have begun another log for it meanwhile
    engine.close()
    sibling.close()
    assert set(engine.get(["a", "b"])) == {"a"}
    engine.close()


@pytest.mark.usefixtures("looked_at")
def test_a_file_that_was_replaced_is_told_and_the_new_one_is_opened_only_anew(path: str) -> None:
    engine = SqliteEngine(path)
    engine.put([_row("a")])
    other = SqliteEngine(f"{path}.other")
    other.put([_row("b")])
    other.close()
    os.replace(f"{path}.other", path)
    sibling = engine.sibling()
    for one in (engine, sibling):
        with pytest.raises(StoreUnavailable, match=r"was replaced while it was open: restart the agents"):
            one.check()
    engine.close()
    sibling.close()
    for log in (f"{path}-wal", f"{path}-shm"):  # as the error says: they are of the old file
        os.unlink(log)
    fresh = SqliteEngine(path)
    assert set(fresh.get(["a", "b"])) == {"b"}
    fresh.close()


@pytest.mark.slow
@pytest.mark.usefixtures("looked_at")
def test_a_forked_child_does_not_open_a_file_that_took_the_place_of_the_first(path: str) -> None:
    engine = SqliteEngine(path)
    engine.check()
    os.rename(path, f"{path}.away")
    pid = os.fork()
    if pid == 0:
        try:
            engine.check()
            os._exit(1)
        except StoreUnavailable:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    engine.close()


def test_the_file_is_looked_at_once_in_a_second_however_much_is_asked(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    real = sqlite_access._identity
    engine, memory = SqliteEngine(path), SqliteEngine(sqlite.MEMORY)
    engine.check()

    def identity(name: str) -> tuple[int, int]:
        looks.append(name)
        return real(name)

    monkeypatch.setattr(sqlite_access, "_identity", identity)
    monkeypatch.setattr(sqlite_access, "LOOK_S", 600.0)
    for _ in range(100):
        engine.lanes()
        memory.lanes()
    assert looks == [path]
    engine.close()
    memory.close()


LOOKS = (["stats"], ["top", "--once"], ["agents"], ["list"], ["show", "a"], ["explain", "a"])


@pytest.mark.slow
@needs_powerless
def test_commands_that_look_work_on_a_file_that_they_cannot_write(path: str) -> None:
    engine = SqliteEngine(path)
    engine.put([_row("a")])
    engine.close()
    os.chmod(path, 0o444)
    for words in LOOKS:
        done = powerless(*words, "--store", f"sqlite:///{path}", folder=Path(path).parent)
        assert done.returncode == 0, (words, done.stderr)
    done = powerless("pause", "queue", "x", "--store", f"sqlite:///{path}", folder=Path(path).parent)
    assert done.returncode == 3
    assert f"cannot write to {path}: " in done.stderr
    assert f"chmod u+w {path}" in done.stderr


@pytest.mark.slow
@needs_powerless
@pytest.mark.parametrize("words", [["stats"], ["run", "jobs"]])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, words: list[str], is_there: bool
) -> None:
    folder = tmp_path / "frozen"
    folder.mkdir()
    (tmp_path / "jobs.py").write_text("from thunderagent import job\n\n@job('a.b')\ndef f(ctx, p: dict): ...\n")
    if is_there:
        engine = SqliteEngine(str(folder / "tasks.db"))
        engine.check()
        engine.close()
    folder.chmod(0o555)
    try:
        done = powerless(*words, "--store", f"sqlite:///{folder}/tasks.db", folder=tmp_path)
    finally:
        folder.chmod(0o755)
    assert done.returncode == 3
    assert f"cannot write to the folder {folder} of the file and its log" in done.stderr
    assert f"has the mode 0555: chmod u+w {folder}" in done.stderr


@pytest.mark.slow
@needs_powerless
def test_a_file_that_cannot_be_read_is_named_with_the_remedy(path: str) -> None:
    engine = SqliteEngine(path)
    engine.check()
    engine.close()
    os.chmod(path, 0o000)
    done = powerless("stats", "--store", f"sqlite:///{path}", folder=Path(path).parent)
    assert done.returncode == 3
    assert f"cannot read {path}: " in done.stderr
    assert f"has the mode 0000: chmod u+r {path}" in done.stderr


# What is overdue


def ended(count: int, *, expire_at: float, first: int = 0) -> list[Row]:
    """Rows of tasks that have ended."""
    task = Task(task_id="", status=Status.SUCCESS, created_at=1.0, submitted_at=1.0, job="j", payload_text="x" * 200)
    task = replace(task, finished_at=1.0, expire_at=expire_at)
    return [replace(task, task_id=f"ended-{one}").to_row() for one in range(first, first + count)]


def test_what_is_overdue_is_deleted_in_small_commits_until_nothing_is(path: str) -> None:
    clock = FakeClock()
    with closing(SqliteEngine(path, clock=clock)) as engine:
        engine.put(ended(1_050, expire_at=clock.now() - 5))
        engine.put(ended(7, expire_at=clock.now() + 5, first=5_000))
        assert engine.overdue(clock.now()) == Overdue(1_050, 5.0)
        numbers = []
        while number := engine.expire(clock.now()):
            numbers.append(number)
        assert numbers == [EXPIRED_AT_ONCE] * 10 + [50]
        assert engine.overdue(clock.now()) == Overdue(0, 0.0)
        assert engine.count("SUCCESS") == 7


def test_an_agent_keeps_up_with_more_than_two_hundred_overdue_rows_a_second() -> None:
    clock = FakeClock()
    store = TaskStore(SqliteEngine(MEMORY, clock=clock), monotonic=clock.monotonic)
    expiry = Expiry(store)
    clock.advance(EXPIRE_S)
    store.engine.put(ended(5_000, expire_at=clock.now() - 1.0))
    began = clock.monotonic()
    while store.engine.count("SUCCESS"):
        expiry.look()
        assert expiry.due <= clock.monotonic() + EXPIRE_S
        clock.advance(expiry.due - clock.monotonic())
    assert 5_000 / (clock.monotonic() - began) > 400


@pytest.mark.slow
def test_a_day_at_two_hundred_tasks_a_second_ends_at_a_constant_size(path: str) -> None:
    """With a retention of a minute. `THUNDER_TEST_DAY=1` is the whole day, and not five minutes of it."""
    seconds, retention_s, rate = (86_400 if os.environ.get("THUNDER_TEST_DAY") else 300), 60.0, 200
    clock = FakeClock()
    with closing(SqliteEngine(path, clock=clock)) as engine:
        store = TaskStore(engine, monotonic=clock.monotonic)
        expiry = Expiry(store)
        pages: list[int] = []
        for moment in range(0, seconds, 10):
            engine.put(ended(rate * 10, expire_at=clock.now() + retention_s, first=moment * rate))
            until = clock.monotonic() + 10.0
            while expiry.due <= until:
                clock.advance(max(0.0, expiry.due - clock.monotonic()))
                expiry.look()
            clock.advance(until - clock.monotonic())
            pages.append(_pragma(engine, "page_count"))
        overdue = engine.overdue(clock.now())
        assert overdue is not None
        assert overdue.seconds < 30.0
        assert max(pages[len(pages) // 2 :]) <= 1.1 * max(pages[: len(pages) // 2])
        assert engine.count("SUCCESS") <= rate * (retention_s + 30.0)


@pytest.mark.slow
def test_space_that_is_free_for_long_is_given_back(path: str) -> None:
    clock = FakeClock()
    with closing(SqliteEngine(path, clock=clock)) as engine:
        assert _pragma(engine, "auto_vacuum") == 2
        engine.put(ended(40_000, expire_at=clock.now() - 1.0))
        before = _pragma(engine, "page_count")
        while engine.expire(clock.now()):
            pass
        for _ in range(before // GIVEN_BACK + 1):
            engine.expire(clock.now())
        assert _pragma(engine, "page_count") <= FREE_KEPT + 100 < before
        assert _pragma(engine, "integrity_check") == "ok"


def test_a_file_of_an_older_version_goes_on_without_giving_space_back(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE other (a)")
    with closing(SqliteEngine(path, clock=FakeClock())) as engine:
        assert _pragma(engine, "auto_vacuum") == 0
        engine.put(ended(10, expire_at=1.0))
        assert [engine.expire(2.0), engine.expire(2.0)] == [10, 0]


def _pragma(engine: SqliteEngine, name: str) -> Any:
    with engine._reading() as cursor:
        return cursor.execute(f"PRAGMA {name}").fetchone()[0]


def test_all_who_wait_for_a_lock_have_the_same_chance_and_a_long_wait_costs_little() -> None:
    rng = random.Random(5)

    def longest(waited_s: float) -> float:
        pauses = [lock_pause(waited_s, rng) for _ in range(500)]
        assert min(pauses) >= 0.0002
        assert min(pauses) < max(pauses) / 5
        return max(pauses)

    assert longest(0.0) <= longest(0.1) + 0.0001 <= 0.0032
    assert longest(5.0) <= 0.006
