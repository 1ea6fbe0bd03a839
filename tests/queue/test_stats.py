"""Queues and agents in numbers: exact where counting costs nothing, with bounded reads where each entry is billed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

from tests.support.engine import settings
from thunderagent.client import Client
from thunderagent.model.task import Lane, Page, Row, Status
from thunderagent.model.writes.limits import WAITLIST_STATUS, limit_row
from thunderagent.queue.limits.waitlist import waitlist_value
from thunderagent.queue.stats import WAITLISTS_COUNTED
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import memory_client, memory_store
from thunderagent.testing.faulty_engine import FaultyEngine

GENEROUS: Final = 5.0
"""How many times longer than a second of a core a look may take in a test: machines differ."""


class Billed(FaultyEngine):
    """An engine whose counts stop at a cap, and that counts requests and the entries that they read."""

    def __init__(self, engine: Engine, most: int | None = 5) -> None:
        super().__init__(engine)
        self.most = most
        self.requests: Counter[str] = Counter()
        self.entries = 0
        self.unbounded = 0

    @property
    def most_counted(self) -> int | None:
        return self.most

    def count(self, status_value: str, *, until: float | None = None, most: int | None = None) -> int:
        self.requests["count"] += 1
        self.unbounded += most is None
        number = super().count(status_value, until=until, most=most)
        self.entries += number
        return number

    def page(self, status_value: str, **options: Any) -> Page:
        self.requests["page"] += 1
        return super().page(status_value, **options)

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        self.requests["get"] += 1
        return super().get(task_ids)


def rows(number: int, *, status: str, now: float, lane: Lane | None = None, start: int = 0) -> list[Row]:
    value = (lane or Lane()).value(Status(status))
    return [
        {
            "taskId": f"{value}-{n}",
            "status": value,
            "createdAt": now - 100 + n % 50,
            "job": f"test.{n % 3}",
            "kind": "batch",
            "payload": "{}",
            "fence": 0,
            "submittedAt": now,
        }
        for n in range(start, start + number)
    ]


@pytest.fixture
def billed() -> Billed:
    return Billed(memory_store().engine)


def put(engine: Engine, several: list[Row]) -> None:
    assert all(answer.won for answer in engine.put(several))


def test_a_number_at_its_cap_stands_for_so_many_or_more(billed: Billed) -> None:
    store = TaskStore(billed)
    now = store.clock.now()
    put(billed, rows(9, status="PENDING", now=now))
    put(billed, rows(4, status="RUNNING", now=now))
    put(billed, rows(5, status="FAILED", now=now))
    [queue] = Client(store, settings()).stats()
    assert (queue.ready, queue.delayed, queue.running, queue.blocked, queue.failed) == (5, 0, 4, 0, 5)
    assert queue.at_least == ("ready", "delayed", "failed")
    assert queue.is_capped
    assert [queue.text(name) for name in ("ready", "delayed", "running", "failed")] == ["5+", "0+", "4", "5+"]


def test_the_cap_is_one_for_all_shards_of_a_queue(billed: Billed) -> None:
    store = TaskStore(billed)
    for shard in range(4):
        put(billed, rows(2, status="FAILED", now=store.clock.now(), lane=Lane("default", shard)))
    [queue] = Client(store, settings()).stats()
    assert (queue.failed, queue.at_least) == (5, ("failed",))
    assert billed.unbounded == 0


def test_under_the_cap_nothing_is_said_of_it(billed: Billed) -> None:
    store = TaskStore(billed)
    put(billed, rows(4, status="PENDING", now=store.clock.now()))
    [queue] = Client(store, settings()).stats()
    assert (queue.ready, queue.at_least, queue.is_capped, queue.text("ready")) == (4, (), False, "4")


@pytest.mark.parametrize("tasks", [100, 2000])
def test_what_a_look_reads_does_not_grow_with_the_number_of_tasks(tasks: int) -> None:
    billed = Billed(memory_store().engine, most=50)
    store = TaskStore(billed)
    for status in ("PENDING", "FAILED", "RUNNING", "BLOCKED"):
        put(billed, rows(tasks, status=status, now=store.clock.now()))
    Client(store, settings()).stats()
    assert (billed.unbounded, billed.entries) == (0, 5 * 50)
    assert billed.requests == {"count": 5, "page": 3, "get": 1}


def test_of_very_many_lines_so_many_are_counted(billed: Billed) -> None:
    billed.most = 1000
    store = TaskStore(billed)
    now, lane = store.clock.now(), Lane()
    for number in range(WAITLISTS_COUNTED + 250):
        row = {**limit_row(f"key-{number:04}", number=1, now=now), "status": WAITLIST_STATUS, "createdAt": now}
        [one] = rows(1, status="BLOCKED", now=now, start=number)
        put(billed, [row, {**one, "status": waitlist_value(lane, f"key-{number:04}")}])
    client = Client(store, settings())
    [queue] = client.stats()
    assert (queue.blocked, queue.at_least) == (WAITLISTS_COUNTED, ("blocked",))
    assert billed.requests["count"] <= WAITLISTS_COUNTED + 5
    assert billed.requests["page"] <= 4, "agents, two of lines, ready tasks"
    billed.most = None
    [queue] = client.stats()
    assert (queue.blocked, queue.at_least) == (WAITLISTS_COUNTED + 250, ()), "where counting costs nothing, it is exact"


def test_the_rows_of_agents_are_read_a_hundred_at_a_time(billed: Billed) -> None:
    store = TaskStore(billed)
    for number in range(250):
        store.announce(f"host:{number}:a", {"queues": {"default": 1}}, lives_s=60)
    billed.requests.clear()
    assert len(store.agents()) == 250
    assert billed.requests == {"page": 3, "get": 3}


# On SQLite


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """100,000 tasks in five queues of four shards, and 1,000 agents."""
    store = TaskStore(SqliteEngine(str(tmp_path_factory.mktemp("large") / "tasks.db")))
    now = store.clock.now()
    for queue in ("default", "reports", "mail", "imports", "hooks"):
        for shard in range(4):
            lane = Lane(queue, shard)
            several = [
                row for status, number in TASKS.items() for row in rows(number, status=status, now=now, lane=lane)
            ]
            put(store.engine, several)
    for number in range(1000):
        store.announce(f"host:{number}:a", {"queues": {"default": 1}, "jobs": ["test.0"]}, lives_s=600)
    client = Client(store, settings())
    yield client
    client.close()


TASKS: Final = {"PENDING": 2500, "SUCCESS": 1400, "FAILED": 500, "BLOCKED": 400, "RUNNING": 200}


@pytest.mark.slow
def test_a_hundred_thousand_tasks_are_counted_exactly_within_a_second_or_so(large: Client) -> None:
    begun = time.process_time()
    found = large.stats()
    took = time.process_time() - begun
    assert [(one.ready, one.failed, one.blocked, one.running, one.at_least) for one in found] == [
        (10_000, 2000, 1600, 800, ())
    ] * 5
    assert took < GENEROUS


def test_a_thousand_agents_are_listed_within_a_second_or_so(large: Client) -> None:
    begun = time.process_time()
    assert len(large.agents.list()) == 1000
    assert time.process_time() - begun < GENEROUS


def test_a_count_reads_the_index_alone_and_an_end_of_it(large: Client) -> None:
    engine = large.store.engine
    assert isinstance(engine, SqliteEngine)
    asked: list[str] = []
    with engine._reading() as cursor:
        cursor.connection.set_trace_callback(asked.append)
    assert engine.count("PENDING", most=7) == engine.count("PENDING", until=large.store.clock.now(), most=7) == 7
    with engine._reading() as cursor:
        cursor.connection.set_trace_callback(None)
        counts = [query for query in asked if "COUNT" in query]
        plans = [cursor.execute("EXPLAIN QUERY PLAN " + query.replace("Inf", "1e999")).fetchall() for query in counts]
    assert len(plans) == 2
    assert all(any("SEARCH tasks USING COVERING INDEX" in step[-1] for step in plan) for plan in plans), plans


def test_a_client_in_memory_counts_as_one_on_a_file() -> None:
    client = memory_client()
    client.enqueue("test.job", {})
    assert [(one.ready, one.is_capped) for one in client.stats()] == [(1, False)]
