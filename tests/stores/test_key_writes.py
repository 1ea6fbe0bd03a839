"""The rules of the rows of unique keys on each store, races for them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.billing import write_units
from tests.support.stands import Stand, seen, together
from thunderagent.client import Client
from thunderagent.model.errors import NotAllowed, StoreError
from thunderagent.model.task import Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.unique import (
    KEY_DOUBT_S,
    KEY_SETTLES_S,
    drop_key,
    forget_key,
    key_id,
    key_row,
    pass_key,
    release_key,
)
from thunderagent.queue.unique import UniqueKeys
from thunderagent.settings import Settings
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.dynamo.consumed import Consumed
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.tasks import TaskStore, Wanted

JOB = "report.build"
DAY_S = 86400.0


def row_of(stand: Stand) -> Row | None:
    row_id = key_id(JOB, stand.mark)
    return stand.store.engine.get([row_id]).get(row_id)


def taken(stand: Stand, name: str = "a", *, now: float | None = None, **plan: Any) -> Row:
    """The row of the test's key, which a task has."""
    now = stand.store.clock.now() if now is None else now
    row = key_row(key_id(JOB, stand.mark), stand.id(name), now=now, **plan)
    ours, left = stand.store.insert_row(row)
    assert ours
    assert left == row == row_of(stand)
    return row


def client(stand: Stand, store: TaskStore | None = None) -> Client:
    return Client(store or stand.open(), Settings(store="sqlite://:memory:"))


def enqueue(one: Client, stand: Stand, n: int = 1, **options: Any) -> Task:
    return one.enqueue(JOB, {"n": n}, queue=stand.lane.queue, unique_key=stand.mark, **options)


def failed(stand: Stand, task: Task, *, frees: bool) -> Task:
    """The task has run and failed; its agent may have died before it freed the key."""
    [lease] = stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    now = stand.store.clock.now()
    assert stand.store.settle([writes.fail(lease, error="boom", now=now, expire_at=now + DAY_S)])[0].accepted
    after = stand.store.get([task.task_id])[task.task_id]
    if frees:
        UniqueKeys(stand.store).release([after])
        assert row_of(stand) is None
    return after


def open_tasks(stand: Stand, *tasks: Task) -> set[str]:
    rows = stand.store.get(task.task_id for task in tasks)
    return {task.task_id for task in rows.values() if not task.status.is_terminal}


# The writes


def test_the_row_of_a_key_is_taken_once(stand: Stand) -> None:
    row = taken(stand)
    ours, left = stand.store.insert_row({**row, "heldBy": stand.id("b")})
    assert (ours, left) == (False, row)


def test_a_key_is_passed_on_as_it_was_seen_and_only_once(stand: Stand) -> None:
    row = taken(stand, promise="{}")
    now = stand.store.clock.now() + 1
    [(won, left)] = stand.store.write_rows([pass_key(row, stand.id("b"), now=now, ended_at=5.5)])
    assert won
    assert left is not None
    assert (left["heldBy"], left["fence"], left["finishedAt"]) == (stand.id("b"), 2, 5.5)
    assert "payload" not in left
    assert not stand.store.write_rows([pass_key(row, stand.id("c"), now=now)])[0][0]
    [(won, left)] = stand.store.write_rows([pass_key(left, stand.id("c"), now=now)])
    assert won
    assert left is not None
    assert "finishedAt" not in left


@pytest.mark.parametrize("change", [{"heldBy": "x"}, {"fence": 2}, {"updatedAt": 1.0}, {"updatedAt": None}])
def test_a_key_that_changed_since_it_was_seen_is_not_passed_on(stand: Stand, change: Row) -> None:
    row = taken(stand)
    assert not stand.store.write_rows([pass_key({**row, **change}, stand.id("b"), now=1.0)])[0][0]
    assert row_of(stand) == row


@pytest.mark.parametrize(
    ("ended_at", "over_at", "goes"),
    [
        (None, 5.0, True),
        (None, None, True),
        (4.999, 5.0, True),
        (5.0, 5.0, False),
        (6.0, 5.0, False),
        (5.0, None, False),
    ],
)
def test_a_key_is_freed_by_its_task_unless_that_has_taken_it_anew(
    stand: Stand, ended_at: float | None, over_at: float | None, goes: bool
) -> None:
    row = taken(stand, now=4.0, ended_at=ended_at)
    stand.store.write_rows([release_key(row["taskId"], stand.id("b"), over_at=100.0)])
    assert row_of(stand) == row, "another task's end frees nothing"
    stand.store.write_rows([release_key(row["taskId"], stand.id("a"), over_at=over_at)])
    assert (row_of(stand) is None) == goes
    stand.store.write_rows([release_key(row["taskId"], stand.id("a"), over_at=over_at)])


@pytest.mark.parametrize(("taken_at", "goes"), [(5.0 + KEY_DOUBT_S - 0.1, True), (5.0 + KEY_SETTLES_S, False)])
def test_a_key_that_was_taken_long_after_the_end_of_a_task_is_not_freed_for_it(
    stand: Stand, taken_at: float, goes: bool
) -> None:
    """The task was purged, and another was put under its id, before the removal came through."""
    row = taken(stand, now=taken_at)
    stand.store.write_rows([release_key(row["taskId"], stand.id("a"), over_at=5.0)])
    assert (row_of(stand) is None) == goes


@pytest.mark.parametrize(("age_s", "goes"), [(KEY_SETTLES_S + 0.1, True), (KEY_SETTLES_S - 0.1, False)])
def test_the_key_of_a_task_that_is_gone_is_forgotten_unless_one_may_just_be_put_under_its_id(
    stand: Stand, age_s: float, goes: bool
) -> None:
    row = taken(stand, now=1000.0 - age_s, ended_at=5.0)
    stand.store.write_rows([forget_key(row["taskId"], stand.id("b"), now=1000.0)])
    assert row_of(stand) == row, "the key is another's"
    stand.store.write_rows([forget_key(row["taskId"], stand.id("a"), now=1000.0)])
    assert (row_of(stand) is None) == goes


def test_a_purge_takes_the_rows_of_keys_away_that_still_name_its_tasks(stand: Stand) -> None:
    keys = UniqueKeys(stand.store)
    clock = stand.store.clock
    gone = replace(stand.task("a"), job=JOB, unique_key=stand.mark)
    row = taken(stand, now=clock.now() - KEY_SETTLES_S - 1)
    keys.forget([replace(gone, task_id=stand.id("b")), replace(gone, unique_key="another")], now=clock.now())
    assert row_of(stand) == row
    keys.forget([gone, replace(gone, task_id=stand.id("b"))], now=clock.now())
    assert row_of(stand) is None


@pytest.mark.slow
def test_a_key_that_was_taken_for_nothing_is_dropped_as_it_was_taken(stand: Stand) -> None:
    row = taken(stand)
    for change in ({"heldBy": stand.id("b")}, {"fence": 2}, {"updatedAt": row["updatedAt"] + 1}):
        stand.store.write_rows([drop_key({**row, **change})])
        assert row_of(stand) == row
    stand.store.write_rows([drop_key(row)])
    assert row_of(stand) is None
    row = taken(stand, ended_at=5.0)
    stand.store.write_rows([drop_key(row)])
    assert row_of(stand) == row


def test_who_has_ended_and_is_kept_so_is_not_brought_to_life_by_those_who_saw_it_before(stand: Stand) -> None:
    task = failed(stand, stand.enqueue(), frees=False)
    now = stand.store.clock.now()
    assert stand.store.write_tasks([writes.stay_ended(task, now=now)]) != [None]
    assert stand.store.write_tasks([writes.stay_ended(task, now=now + 1)]) == [None]
    assert stand.store.write_tasks([writes.revive(task, now=now)]) == [None]
    again = stand.now()
    assert (again.status, again.finished_at, again.fence) == (task.status, task.finished_at, task.fence + 1)
    assert stand.store.write_tasks([writes.revive(again, now=now)]) != [None]
    assert stand.store.write_tasks([writes.stay_ended(again, now=now)]) == [None], "it lives since this moment"


def test_a_task_that_its_client_could_not_put_is_put_by_the_next_as_it_was(stand: Stand) -> None:
    """With a payload that no row keeps on DynamoDB, and parents, which are a set."""
    parent = stand.enqueue("parent")
    mine, one = stand.id("mine"), client(stand, stand.store)
    keys = UniqueKeys(stand.store)

    def never(task: Task) -> Any:
        raise StoreError("the client is gone")

    text = '{"text":"' + "x" * 3000 + '"}'
    lost = stand.task(
        "mine",
        payload_text=text,
        unique_key=stand.mark,
        unique_scope="until_done",
        status=Status.BLOCKED,
        depends_on=(parent.task_id,),
        waiting_for=frozenset({parent.task_id}),
    )
    with pytest.raises(StoreError):
        keys.put(lost, never, own_id=True, shards=1)
    assert mine not in stand.store.get([mine])
    row = row_of(stand)
    assert row is not None
    assert len(row["payload"]) < 1024 or stand.store.engine.inline_bytes > 1024, "a kilobyte more is a write unit more"
    found = enqueue(one, stand)
    assert found.task_id == mine
    assert found.payload_text == text
    assert found.waiting_for == {parent.task_id}
    assert stand.now("parent").dependents == {mine}


@pytest.mark.parametrize("change", [{"heldBy": ["x"]}, {"heldBy": 7}, {"heldBy": None}, {"fence": "first"}])
def test_a_row_of_the_wrong_types_is_a_clear_error_and_no_agent_minds_it(wire_stand: Stand, change: Row) -> None:
    row_id = key_id(JOB, wire_stand.mark)
    types: dict[type, Callable[[Any], Any]] = {
        str: lambda value: {"S": value},
        int: lambda value: {"N": str(value)},
        list: lambda value: {"L": [{"S": one} for one in value]},
    }
    item = {"taskId": row_id, "heldBy": "x", "fence": 1, "updatedAt": 1} | change
    engine = wire_stand.dynamo
    rendered = {name: types[type(value)](value) for name, value in item.items() if value is not None}
    engine.connection.call("PutItem", TableName=engine.table, Item=rendered)
    with pytest.raises(StoreError, match="is not one of a unique key") as caught:
        enqueue(client(wire_stand), wire_stand)
    assert row_id in str(caught.value)
    task = wire_stand.enqueue(unique_key=wire_stand.mark, unique_scope="until_done")
    failed(wire_stand, task, frees=False)
    UniqueKeys(wire_stand.store).release([wire_stand.now()])
    assert row_of(wire_stand) is not None


# Races


@pytest.mark.slow
def test_of_many_that_enqueue_together_all_get_the_same_task(atomic_stand: Stand) -> None:
    clients = [client(atomic_stand) for _ in range(4)]
    for _ in range(8):
        tasks = together(*(partial(enqueue, one, atomic_stand, n) for n, one in enumerate(clients)))
        [task_id] = {task.task_id for task in tasks}
        assert len({task.payload_text for task in tasks}) == 1
        [task] = atomic_stand.store.get([task_id]).values()
        assert client(atomic_stand, atomic_stand.store).cancel(task).status is Status.DONE
        assert row_of(atomic_stand) is None


@pytest.mark.slow
def test_of_many_that_see_an_ended_holder_one_puts_the_next(atomic_stand: Stand) -> None:
    clients = [client(atomic_stand) for _ in range(4)]
    last = enqueue(clients[0], atomic_stand)
    for number in range(8):
        failed(atomic_stand, last, frees=number % 2 == 0)
        tasks = together(*(partial(enqueue, one, atomic_stand, n) for n, one in enumerate(clients)))
        [task_id] = {task.task_id for task in tasks}
        assert task_id != last.task_id
        last = atomic_stand.store.get([task_id])[task_id]
        assert last.status is Status.PENDING


@pytest.mark.slow
def test_of_a_retry_by_hand_and_an_enqueue_that_come_together_one_wins(atomic_stand: Stand) -> None:
    clients = [client(atomic_stand) for _ in range(3)]

    def retry(one: Client, task: Task) -> Task | None:
        try:
            return one.retry(task)
        except NotAllowed as error:
            assert "is held by" in str(error) or "has changed meanwhile" in str(error)
            return None

    first = enqueue(clients[0], atomic_stand)
    for number in range(8):
        failed(atomic_stand, first, frees=number % 2 == 0)
        others = [partial(enqueue, one, atomic_stand, n) for n, one in enumerate(clients[1:])]
        retried, *found = together(partial(retry, clients[0], first), *others)
        tasks = [task for task in (first, *found) if task is not None]
        [task_id] = open_tasks(atomic_stand, *tasks)
        assert {task.task_id for task in found if task is not None} == {task_id}
        assert retried is None or task_id == first.task_id
        if task_id != first.task_id:
            clients[0].cancel(task_id)
            clients[0].retry(first)
        first = atomic_stand.store.get([first.task_id])[first.task_id]


# What it costs


class Meter:
    """Units of each change of the row of the test's key, by the rules of DynamoDB."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._before: dict[str, Any] | None = None

    def since(self) -> tuple[int, int]:
        engine, key = self._stand.dynamo, expressions.key(key_id(JOB, self._stand.mark))
        reply = engine.connection.call("GetItem", TableName=engine.table, Key=key, ConsistentRead=True)
        before, self._before = self._before, reply.get("Item")
        return write_units(before, self._before or {})


@pytest.mark.parametrize("own_id", [False, True])
def test_a_key_costs_one_unit_to_take_and_one_to_free_and_no_index(dynamo_stand: Stand, own_id: bool) -> None:
    meter, one = Meter(dynamo_stand), client(dynamo_stand, dynamo_stand.store)
    options: dict[str, Any] = {"task_id": dynamo_stand.id("mine")} if own_id else {}
    task = enqueue(one, dynamo_stand, **options)
    assert meter.since() == (1, 0)
    after = failed(dynamo_stand, task, frees=True)
    assert meter.since() == (1, 0)
    one.retry(after)
    assert meter.since() == (1, 0)


@pytest.mark.slow
def test_the_meter_of_the_engine_counts_two_writes_more_for_a_task_with_a_key(wire_stand: Stand) -> None:
    place = wire_stand.dynamo.connection.place
    engine = DynamoEngine(place.table, region=place.region, endpoint=place.endpoint, consumed=Consumed(enabled=True))
    store = TaskStore(engine)
    one = client(wire_stand, store)

    def cost(**options: Any) -> tuple[int, float, float]:
        consumed = engine.consumed
        before = consumed.requests, consumed.write_units - consumed.index_write_units, consumed.read_units
        task = one.enqueue(JOB, {"n": 1}, **options)
        [lease] = store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
        assert store.settle([ending(store, lease)])[0].accepted
        UniqueKeys(store).release([*store.peek([task.task_id]).values()])
        after = consumed.requests, consumed.write_units - consumed.index_write_units, consumed.read_units
        return after[0] - before[0], after[1] - before[1], after[2] - before[2]

    cost()
    plain, unique = cost(), cost(unique_key=wire_stand.mark)
    assert unique[0] - plain[0] == 2
    assert unique[1] - plain[1] == 2
    assert unique[2] == plain[2], "an enqueue that finds the key free reads nothing"
    assert row_of(wire_stand) is None
    engine.close()


def ending(store: TaskStore, lease: Lease) -> Any:
    now = store.clock.now()
    return writes.succeed(lease, now=now, expire_at=now + DAY_S)
