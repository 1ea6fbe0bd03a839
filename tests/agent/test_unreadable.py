"""Rows that this version cannot read, beside good ones: nothing raises, the good tasks end, each is named once.

Every attribute of every kind of row gets every wrong type and value that the engine lets in, and the status, policies
and states of newer versions. A real agent, its sweeps, the client and the commands meet them all at once.

Each run has some of the values for each attribute, always the same, and together all of them. With
`THUNDER_TEST_MODEL=1` each attribute gets every value, in many parts.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from moto import mock_aws
from moto.dynamodb import comparisons
from typer.testing import CliRunner

from tests.support.engine import Recorder, serving
from tests.support.stands import eventually
from thunderagent.agent.sweep import Rescuer
from thunderagent.cli import app
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.periodic import periodic
from thunderagent.model import events, fleet_events
from thunderagent.model.errors import TaskNotFound, TaskUnreadable, ThunderAgentError
from thunderagent.model.rows import ATTRIBUTES, NAMED, Unread, Unreadable
from thunderagent.model.task import Row, Status, Task, read_task
from thunderagent.model.ticks import every
from thunderagent.ops.explain import explain
from thunderagent.ops.overview import overview
from thunderagent.settings import Settings
from thunderagent.stores import open_store
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table
from thunderagent.stores.sqlite import sql
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock

Raw = dict[str, Any]
"""A row as the engine itself keeps it: columns, or attribute values of DynamoDB."""

LOST: Final = "lost:1:aa"
PACE: Final[dict[str, Any]] = {"poll_min_s": 0.05, "poll_max_s": 0.2, "poll_idle_s": 0.2}
CLAIMED: Final = ("PENDING", "BLOCKED@")
NEWER: Final = {
    "status": ["SLEEPING", "PENDING#a.b.c", "PENDING#reports.-1", "PENDING@api", "RUNNING#", "BLOCKED#a b@c"],
    "kind": ["oracle"],
    "onParentFailure": ["ask"],
    "uniqueScope": ["for_ever"],
    "desiredState": ["PAUSED"],
    "handoffState": ["HALF"],
    "job": ["test.job@99999999999", ""],
}
"""What newer versions may write, by attribute."""


class Unchecked(bytes):
    """What another program has written as a text, of which SQLite does not ask whether it is one."""


IN_SQLITE: Final[list[Any]] = [
    *("x", "", "nan", "{}", "[]", '["a"]', '{"a":1}', "[1", "[NaN]", "[[[1]]]", '[{"at":"x"}]', '"a"', b"\xff\x00"),
    *(b"{}", b'["a"]', Unchecked(b"\xff"), Unchecked(b'["\xff"]')),
    *(7, -1, 1.5, 0, 2**63 - 1, -(2**63), 9e307, -9e307, float("inf"), None),
]
IN_DYNAMODB: Final[list[Any]] = [
    *(
        {"S": "x"},
        {"S": ""},
        {"S": "NaN"},
        {"N": "7"},
        {"N": "-1"},
        {"N": "1.5"},
        {"N": "9.9E+125"},
        {"N": "-9.9E+125"},
    ),
    *({"BOOL": True}, {"NULL": True}, {"L": []}, {"L": [{"S": "a"}]}, {"L": [{"M": {"at": {"B": b"x"}}}]}),
    *({"M": {}}, {"M": {"a": {"NS": ["1"]}}}, {"SS": ["a"]}, {"NS": ["1"]}, {"B": b"\xff"}, None),
]

PARTS: Final = range(len(IN_DYNAMODB) if os.environ.get("THUNDER_TEST_MODEL") else 1)


class Sqlite:
    """A database file, and its rows as they are in it."""

    values = IN_SQLITE
    at_once = 5
    kinds_at_once = 99

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/tasks.db"

    def encode(self, row: Row) -> Raw:
        return {name: sql.encode(name, value) for name, value in row.items()}

    def put(self, store: TaskStore, rows: list[Raw]) -> None:
        assert isinstance(store.engine, SqliteEngine)
        with store.engine._transaction() as cursor:
            for row in rows:
                names = ", ".join(f'"{name}"' for name in row)
                marks = ", ".join("CAST(? AS TEXT)" if isinstance(one, Unchecked) else "?" for one in row.values())
                cursor.execute(f"INSERT INTO tasks ({names}) VALUES ({marks})", list(row.values()))

    def all(self, store: TaskStore) -> dict[str, Raw]:
        assert isinstance(store.engine, SqliteEngine)
        with store.engine._reading() as cursor:
            store.engine._link.take_any_text()
            rows = [dict(zip(sql.COLUMNS, values, strict=True)) for values in cursor.execute(sql.SELECT)]
        return {row["taskId"]: {name: value for name, value in row.items() if value is not None} for row in rows}

    def newer(self, value: str) -> Any:
        return value


class Dynamo:
    """A table of DynamoDB in this process, and its items as they are in it."""

    values = IN_DYNAMODB
    at_once = 1
    """Wrong values of each attribute in one part: every request reads the whole table."""
    kinds_at_once = 3
    """Kinds of rows that have an attribute spoilt in one part."""

    def __init__(self) -> None:
        self.url = "dynamodb://TaskTable?region=eu-central-1"
        create_table(DynamoEngine("TaskTable", region="eu-central-1", threads=1))

    def encode(self, row: Row) -> Raw:
        return expressions.encode_row(row)

    def put(self, store: TaskStore, rows: list[Raw]) -> None:
        assert isinstance(store.engine, DynamoEngine)
        for row in rows:
            store.engine.connection.call("PutItem", TableName="TaskTable", Item=row)

    def all(self, store: TaskStore) -> dict[str, Raw]:
        assert isinstance(store.engine, DynamoEngine)
        found: dict[str, Raw] = {}
        after: dict[str, Any] = {}
        while True:
            reply = store.engine.connection.call("Scan", TableName="TaskTable", **after)
            found |= {item["taskId"]["S"]: item for item in reply["Items"]}
            if "LastEvaluatedKey" not in reply:
                return found
            after = {"ExclusiveStartKey": reply["LastEvaluatedKey"]}

    def newer(self, value: str) -> Any:
        return {"S": value}


Place = Sqlite | Dynamo


@contextmanager
def place_of(name: str, folder: Path) -> Iterator[Place]:
    if name == "sqlite":
        yield Sqlite(folder)
        return
    with mock_aws(), _as_dynamodb_compares():
        yield Dynamo()


@contextmanager
def _as_dynamodb_compares() -> Iterator[None]:
    """Values of different types are neither more nor less than each other; moto counts true as 1, or raises."""

    def compared(expr: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def answer(self: Any, item: Any) -> bool:
            one = (self.attr if isinstance(self, comparisons.FuncBetween) else self.lhs).expr(item)
            try:
                return not isinstance(one, bool) and expr(self, item)
            except TypeError:
                return False

        return answer

    with pytest.MonkeyPatch.context() as patch:
        for kind in (comparisons.OpLessThan, comparisons.OpGreaterThan, comparisons.FuncBetween):
            patch.setattr(kind, "expr", compared(kind.expr))
        yield


@pytest.fixture(params=["sqlite", "moto"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with place_of(request.param, tmp_path) as made:
        yield made


@contextmanager
def opened(place: Place) -> Iterator[TaskStore]:
    if isinstance(place, Sqlite):
        store = open_store(Settings(store=place.url))
    else:
        store = TaskStore(DynamoEngine("TaskTable", region="eu-central-1", threads=1))
    try:
        yield store
    finally:
        store.engine.close()


# The rows


def good_rows(now: float) -> dict[str, Row]:
    """A row of each kind as this version writes it, by the kind. None of these tasks can run here to its end."""
    task: Row = {"job": "test.job", "kind": "batch", "payload": "{}", "fence": 1, "retryCount": 0, "crashCount": 0}
    task |= {"submittedAt": now - 9, "createdAt": now - 5, "updatedAt": now - 5, "maxRetry": 3, "errors": [{"at": 1}]}
    lease: Row = {
        "lockTime": now - 99,
        "leaseOwner": LOST,
        "leaseSec": 5,
        "hb": 3,
        "lastAgent": LOST,
        "startedAt": now - 99,
    }
    ended: Row = {"finishedAt": now - 5, "expireAt": int(now + 9999), "result": "1", "progress": "2"}
    graph: Row = {"dependsOn": ["p"], "dependents": frozenset({"c"}), "onParentFailure": "fail"}
    keyed: Row = {
        "uniqueKey": "k",
        "uniqueScope": "until_done",
        "limitKey": "api",
        "limitMax": 2,
        "traceparent": "00-0-0-0",
    }
    stream: Row = {"kind": "stream", "desiredState": "STARTED", "lastSeq": {"seq": 5}, "handoffOwner": "x:1:a"}
    stream |= {"handoffUntil": now - 9, "handoffState": "DONE"}
    told = {"queues": {"default": 1}, "jobs": ["test.job"], "running": {}, "health": {}, "streams": {}, "counts": {}}
    ticks = {
        "spec": {"every": 1, "unit": "hours"},
        "queue": "default",
        "catch_up": "none",
        "overlap": "allow",
        "last": 1,
    }
    own: dict[str, Row] = {
        "agent": {
            "status": "AGENT",
            "createdAt": now,
            "updatedAt": now,
            "expireAt": now + 999,
            "fence": 0,
            "info": told,
        },
        "turn": {"leaseOwner": LOST, "lockTime": now - 99, "info": {}},
        "journal": {
            "info": {"agent": LOST, "moves": [[1.0, "live", ""]], "gaps": []},
            "updatedAt": now,
            "expireAt": now,
        },
        "unique": {"heldBy": "k", "fence": 1, "updatedAt": now - 999, "payload": "{}", "finishedAt": 1.0},
        "limit": {"status": "LINE", "createdAt": 1, "limitMax": 1, "updatedAt": 1.0, "holders": frozenset({"a#1"})},
        "schedule": {"status": "SCHEDULE", "createdAt": 1, "updatedAt": 1, "fence": 0, "info": ticks, "expireAt": now},
        "control": {"info": {"queue:x": {"since": 1, "until": None, "reason": "r"}}, "fence": 1, "updatedAt": 1.0},
    }
    tasks: dict[str, Row] = {
        "pending": {"status": "PENDING", **task, **keyed, "dependsOn": ["p"]},
        "running": {"status": "RUNNING", **task, **lease, **graph, "cancelRequested": True, "regionEpoch": 1},
        "blocked": {"status": "BLOCKED", **task, **graph, "waitingFor": frozenset({"p"}), "doneReason": "x"},
        "waiting": {"status": "BLOCKED@api", **task, **keyed},
        "ended": {"status": "FAILED", **task, **ended, **graph, "error": "it broke", "resultRef": "item:gone"},
        "stream": {"status": "PENDING", **task, **stream, "job": "test.stream", "payloadRef": "item:gone"},
    }
    return {**tasks, **own}


def values_for(place: Place, what: str, part: int) -> list[Any]:
    """Some of the values for an attribute of a kind of row; the parts together have all of them."""
    first = random.Random(what).randrange(len(place.values)) + part * place.at_once
    return [place.values[number % len(place.values)] for number in range(first, first + place.at_once)]


def bad_rows(place: Place, now: float, part: int) -> list[Raw]:
    """A row for each kind, each of its attributes, and each value: only that value is not as it should be."""
    rows: list[Raw] = []
    kinds, turns, used = list(good_rows(now).items()), Counter[str](), set[str]()
    random.Random(part).shuffle(kinds)
    for kind, row in kinds:
        for name in row:
            turns[name] += 1
            if turns[name] > place.kinds_at_once:
                continue
            newer = map(place.newer, NEWER.get(name, ()) if "job" in row else ())
            for value in (*values_for(place, f"{kind} {name}", part), *newer):
                if lets_in(place, name, value):
                    used.add(repr(value))
                    row_id = f"{'bad-' if 'job' in row else ''}{kind}:{name}-{len(rows)}"
                    rows.append(spoilt(place, {"taskId": row_id, **row}, name, value))
    assert used >= set(map(repr, place.values))
    return rows


def spoilt(place: Place, row: Row, name: str, value: Any) -> Raw:
    """A row with another value for one of its attributes; None: without it."""
    return {one: known for one, known in {**place.encode(row), name: value}.items() if known is not None}


def lets_in(place: Place, name: str, value: Any) -> bool:
    """An engine on DynamoDB lets no wrong type into the keys of its index. A reference that is a text is right."""
    is_text = isinstance(value, (str, int, float)) or (isinstance(value, dict) and "S" in value)
    if name in ("payloadRef", "resultRef") and is_text:
        return False
    if isinstance(place, Sqlite) or name not in ("status", "createdAt"):
        return True
    return value is None or (ATTRIBUTES[name] in value and value != {"S": ""})


@job("test.job")
def work(ctx: Context, payload: dict[str, Any]) -> str:
    return "done"


@job("test.limited", limit=1, limit_key="api")
def limited(ctx: Context, payload: dict[str, Any]) -> str:
    return "done"


@periodic(every(1).hours)
@job("test.tick")
def tick(ctx: Context, payload: Any) -> None:
    return None


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_wrong_value_of_every_attribute_of_every_kind_of_row_harms_no_agent_and_no_command(
    place: Place, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = Counter[str]()
    heal = Rescuer.heal

    def healed(rescuer: Rescuer, *arguments: Any) -> None:
        heal(rescuer, *arguments)
        swept["healed"] += 1

    monkeypatch.setattr(Rescuer, "heal", healed)
    with opened(place) as store:
        bad = bad_rows(place, store.clock.now(), part)
        place.put(store, bad)
        before = place.all(store)
        with serving(work, limited, tick, store=store, slots=20, sweep_s=0.5, **PACE) as stage:
            good = [stage.client.enqueue(one, {}) for one in (work, limited, work, limited)]
            good.append(stage.client.enqueue(work, {}, depends_on=[good[0], good[1]]))
            good.append(stage.client.enqueue(work, {}, unique_key="mine"))
            assert {stage.end_of(task).status for task in good} == {Status.SUCCESS}
            eventually(lambda: swept["healed"] >= 2, 30.0)
            _ask_the_client(stage.client, before)
            assert stage.is_running
            owner = stage.agent.name
        assert stage.stuck == 0
        _check_events(stage.record)
        after = place.all(store)
        _check_rows(place, before, after, owner)
        _commands(place, store, sorted(before))


def _check_events(record: Recorder) -> None:
    assert len(_check_once(record)) > 50


def _check_once(record: Recorder) -> Counter[str]:
    """Nothing was taken for a failure of the store or of the agent, and each row was named once."""
    wrong = (fleet_events.AgentFailed, events.ThreadDied, events.StoreFailed)
    assert [event for event in record.events if isinstance(event, wrong)] == []
    named = Counter(event.row_id for event in record.of(events.RowUnreadable))
    assert max(named.values(), default=1) == 1, named.most_common(5)
    return named


def _check_rows(place: Place, before: dict[str, Raw], after: dict[str, Raw], owner: str) -> None:
    held = [row_id for row_id, row in after.items() if _text(place, row.get("leaseOwner")) == owner]
    assert [row_id for row_id in held if row_id.startswith("bad-")] == []
    for row_id, row in before.items():
        if not row_id.startswith("bad-") or not isinstance(_read(place, row), Unreadable):
            continue
        left = after[row_id]
        if _text(place, row.get("status")).startswith(CLAIMED):  # only a claim shows what is wrong: it was let go
            is_mended = isinstance(_read(place, left), Task)  # a claim writes the times and the owner
            assert is_mended or _text(place, left["status"]).startswith(CLAIMED), row_id
        else:
            assert left == row, row_id


def _text(place: Place, value: Any) -> str:
    return str(value.get("S")) if isinstance(value, dict) else str(value)


def _read(place: Place, row: Raw) -> Task | Unreadable:
    if isinstance(place, Dynamo):
        return read_task(expressions.decode_row(row))
    return read_task(sql.decode([row.get(name) for name in sql.COLUMNS]))


def _ask_the_client(client: Client, rows: dict[str, Raw]) -> None:
    names = [name for name in rows if name.startswith("bad-")]
    found = client.store.get(names)
    for name in random.Random(6).sample(names, 60):
        try:
            task = client.get(name)
        except TaskUnreadable as error:
            assert name not in found
            assert name in str(error)
            assert "upgrade this installation" in str(error)
        except TaskNotFound:
            assert name not in found or found[name].expire_at is not None
        else:
            assert found[name].task_id == task.task_id
    listed = {task.task_id for task in client.list(limit=None)}
    assert listed <= {*found} | {task.task_id for task in client.list(limit=None)}
    assert client.stats()
    assert client.schedules.list()
    assert client.agents.list()
    assert overview(client.store).queues
    client.pauses.list()
    for name in random.Random(7).sample(sorted(found), min(20, len(found))):
        explain(client.store, found[name])
    for name in random.Random(8).sample(names, 20):
        for command in (client.retry, client.cancel, client.streams.stop, client.streams.runs):
            _refused_or_done(partial(command, name))


def _refused_or_done(command: Callable[[], object]) -> None:
    try:
        command()
    except ThunderAgentError:
        return


def _commands(place: Place, store: TaskStore, names: list[str]) -> None:
    bad = random.Random(9).sample([name for name in names if name.startswith("bad-")], 3)
    asked: list[list[str]] = [["list", "--limit", "99"], ["stats"], ["agents", "--all"], ["show", bad[0]]]
    if isinstance(place, Sqlite):  # what they show does not depend on the engine, and is read in a moment here
        asked += [["streams", "list"], ["pauses"], ["schedule", "list"], ["top", "--once"], ["doctor"], ["health"]]
        asked += [[*command, name] for name in bad for command in (["show"], ["explain"], ["streams", "explain"])]
    for arguments in asked:
        for more in ([], ["--json"]):
            done = CliRunner().invoke(app, [*arguments, *more, "--store", store.engine.url])
            assert done.exit_code in (0, 1), (arguments, done.output, done.exception)
            assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
            if more and done.exit_code == 0:
                json.loads(done.stdout)


def test_a_row_that_cannot_be_read_is_shown_as_it_is(tmp_path: Path) -> None:
    """The remedy says to mend it by hand: for that its attributes must be seen."""
    engine = SqliteEngine(str(tmp_path / "tasks.db"))
    row = {**good_rows(1000.0)["pending"], "taskId": "bad", "kind": "oracle", "dependents": frozenset({"b", "a"})}
    [answer] = engine.put([row])
    assert answer.won
    plain, as_json = (
        CliRunner().invoke(app, ["show", "bad", *more, "--store", engine.url]) for more in ([], ["--json"])
    )
    engine.close()
    assert (plain.exit_code, as_json.exit_code) == (1, 1)
    assert json.loads(as_json.stdout) == {**row, "dependents": ["a", "b"]}
    shown = dict(line.split(maxsplit=1) for line in plain.stdout.splitlines())
    assert {name: json.loads(text) for name, text in shown.items() if name in ("taskId", "kind", "dependents")} == {
        "taskId": "bad",
        "kind": "oracle",
        "dependents": ["a", "b"],
    }
    assert "kind is 'oracle'; upgrade this installation" in plain.stderr


# Rows of our own, under the ids where agents look for them


def own_rows(now: float) -> dict[str, Row]:
    """The rows that an agent and its sweeps read, as this version writes them."""
    rows = good_rows(now)
    ids = {
        "control:": "control",
        "limit:api": "limit",
        "schedule:test.tick": "schedule",
        "agent:other:1:aa": "agent",
        "turn:blocked": "turn",
        "turn:lines": "turn",
        "unique:test.job mine": "unique",
        "journal:bad-stream#1": "journal",
    }
    return {row_id: {"taskId": row_id, **rows[kind]} for row_id, kind in ids.items()}


def rounds(place: Place, part: int) -> Iterator[list[Raw]]:
    """For each value all rows of our own, each with that value for one of its attributes; every attribute has turns."""
    rng = random.Random(part)
    for value in values_for(place, "own", part):
        rows = []
        for row in own_rows(1_800_000_000.0).values():
            names = [name for name in row if name != "taskId" and lets_in(place, name, value)]
            rows.append(spoilt(place, row, rng.choice(names), value))
        yield rows


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_row_of_our_own_that_cannot_be_read_stops_no_agent(place: Place, part: int) -> None:
    for rows in rounds(place, part):
        with opened(place) as store:
            for row in place.all(store):
                _delete(place, store, row)
            place.put(store, rows)
            with serving(work, limited, tick, store=store, sweep_s=0.1, **PACE) as stage:
                tasks = [stage.client.enqueue(one, {}) for one in (work, limited)]
                tasks.append(stage.client.enqueue(work, {}, depends_on=tasks))
                _refused_or_done(partial(stage.client.enqueue, work, {}, unique_key="mine"))
                _refused_or_done(partial(stage.client.pauses.pause, queue="elsewhere"))
                for commands in (stage.client.agents, stage.client.schedules, stage.client.pauses):
                    commands.list()
                stage.client.stats()
                assert {stage.end_of(task).status for task in tasks} == {Status.SUCCESS}, rows
                assert stage.is_running, rows
            _check_once(stage.record)


def _delete(place: Place, store: TaskStore, row_id: str) -> None:
    if isinstance(store.engine, SqliteEngine):
        with store.engine._transaction() as cursor:
            cursor.execute('DELETE FROM tasks WHERE "taskId" = ?', (row_id,))
    else:
        assert isinstance(store.engine, DynamoEngine)
        store.engine.connection.call("DeleteItem", TableName="TaskTable", Key=expressions.key(row_id))


def test_more_rows_than_are_remembered_flood_no_log() -> None:
    clock = FakeClock()
    unread, named = Unread(clock.monotonic), list[str]()
    unread.listener = lambda one: named.append(one.row_id)
    for _ in range(2):
        for number in range(NAMED + 100):
            unread.note(Unreadable(f"row{number}", "status", "'WAITING'"))
    assert named == [f"row{number}" for number in range(NAMED)]
    assert unread.is_left_alone(f"row{NAMED + 99}"), "what is not named is not claimed either"
