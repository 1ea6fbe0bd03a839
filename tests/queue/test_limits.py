"""Limits: never more than so many at once, counted where handlers really run, and a slot dies with its lease."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.simulation.limit_world import World, limited_jobs
from tests.support import process_jobs, stands
from tests.support.billing import write_units
from tests.support.engine import LONG_S, Stage, Writing, settings
from tests.support.streams import FeedThread, Fleet, Log, fleet, follower
from thunderagent.agent.admission import UNDECIDED_S
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Fail, Snooze
from thunderagent.jobs.job import Job, Limit, job
from thunderagent.jobs.outcome import Returned
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.conditions import Above, Present, Write
from thunderagent.model.errors import ConfigurationError, StoreError
from thunderagent.model.task import Lease, Row, Status, Task
from thunderagent.model.writes import limits as limit_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import LIMIT_LIVES_S, WAITLIST_STATUS
from thunderagent.queue.limits.permits import Permits, holders_of, limit_of
from thunderagent.queue.limits.waitlist import keep_waitlist_open
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.expressions import encode_row
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.faulty_engine import Fault, FaultyEngine

Payload = dict[str, Any]
BOTH: Final = ("sqlite-file", pytest.param("ministack", marks=pytest.mark.ministack))


class Gauge:
    """Counts the handlers that really run, by the keys of their limits; distinct tasks and all."""

    def __init__(self, key_of: Callable[[Lease], str] = lambda lease: lease.task.limit_key or lease.task.job) -> None:
        self._key_of = key_of
        self._guard = threading.Condition()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.tasks: Counter[str] = Counter()
        self.most_tasks = 0
        self.order: list[str] = []

    @contextmanager
    def scope(self, running: Running) -> Iterator[None]:
        lease = running.lease
        key = self._key_of(lease)
        self._count(key, lease.task_id, 1)
        try:
            yield
        finally:
            self._count(key, lease.task_id, -1)

    def _count(self, key: str, task_id: str, by: int) -> None:
        with self._guard:
            self.now[key] += by
            self.tasks[task_id] += by
            self.most[key] = max(self.most[key], self.now[key])
            self.most_tasks = max(self.most_tasks, sum(count > 0 for count in self.tasks.values()))
            self.order += [task_id] if by > 0 else []
            self._guard.notify_all()

    def wait(self, predicate: Callable[[], object]) -> None:
        """Wait until it holds; asked whenever a handler begins or ends."""
        with self._guard:
            assert self._guard.wait_for(lambda: bool(predicate()), LONG_S), (self.now, self.order)


class Agents:
    """Several agents on one store, and a client."""

    def __init__(self, open_store: Callable[[], TaskStore], gauge: Gauge) -> None:
        self._open = open_store
        self.gauge = gauge
        self.stages: list[Stage] = []
        self.store = open_store()
        self.client = Client(self.store, settings(), on_enqueue=self._wake)

    def _wake(self) -> None:
        for stage in self.stages:
            stage.agent.wake()

    def add(self, *jobs: Job[Any], **changes: Any) -> Stage:
        stage = Stage(jobs, store=self._open(), scope=self.gauge.scope, **changes)
        self.stages.append(stage)
        stage.start()
        stage.record.wait(events.AgentStarted)
        return stage

    def end_of(self, tasks: Sequence[Task]) -> list[Task]:
        return [self.client.wait(task, timeout_s=4 * LONG_S) for task in tasks]

    def row(self, key: str) -> Row:
        return self.store.engine.get([f"limit:{key}"]).get(f"limit:{key}", {})

    def until(self, predicate: Callable[[], object], within_s: float = LONG_S) -> float:
        """Ask again until it holds; the seconds that took."""
        begun = time.monotonic()
        while not predicate():
            assert time.monotonic() < begun + within_s, "it did not come about"
            time.sleep(0.01)
        return time.monotonic() - begun


@pytest.fixture
def gauge() -> Gauge:
    return Gauge()


@contextmanager
def on(name: str, request: pytest.FixtureRequest, folder: Path, gauge: Gauge) -> Iterator[Agents]:
    endpoint = request.getfixturevalue("ministack_endpoint") if name == "ministack" else ""
    with stands.open_stand(name, folder, endpoint) as stand:
        made = Agents(stand.open, gauge)
        try:
            yield made
        finally:
            for stage in made.stages:
                stage.agent.stop()
                stage.agent.stop()
            for stage in made.stages:
                stage.join()


@pytest.fixture
def agents(request: pytest.FixtureRequest, tmp_path: Path, gauge: Gauge) -> Iterator[Agents]:
    """On a SQLite file."""
    with on("sqlite-file", request, tmp_path, gauge) as made:
        yield made


@pytest.fixture(params=BOTH)
def agents_anywhere(request: pytest.FixtureRequest, tmp_path: Path, gauge: Gauge) -> Iterator[Agents]:
    """On a SQLite file, and on DynamoDB."""
    with on(request.param, request, tmp_path, gauge) as made:
        yield made


def sync_job(name: str = "limited", seconds: float = 0.03, **options: Any) -> Job[Payload]:
    def handler(ctx: Context, payload: Payload) -> None:
        ctx.wait(seconds)

    return job(name, **options)(handler)


def async_job(name: str = "limited", **options: Any) -> Job[Payload]:
    async def handler(ctx: Context, payload: Payload) -> None:
        await asyncio.sleep(0.03)

    return job(name, **options)(handler)


def held_job(go_on: threading.Event, name: str = "limited", **options: Any) -> Job[Payload]:
    """A handler that runs until the test lets it go on, or it is told to stop."""

    def handler(ctx: Context, payload: Payload) -> None:
        while not go_on.wait(0.01):
            ctx.check()

    return job(name, **options)(handler)


# Never more than so many


@pytest.mark.slow
@pytest.mark.parametrize("make", [sync_job, async_job], ids=["threads", "event loop"])
def test_no_more_handlers_run_than_the_limit_of_their_job(agents_anywhere: Agents, make: Any) -> None:
    limited = make(limit=2)
    for _ in range(3):
        agents_anywhere.add(limited, slots=4)
    singles = [agents_anywhere.client.enqueue(limited, {"n": n}) for n in range(8)]
    many = [one.task for one in agents_anywhere.client.enqueue_many(limited, [{"n": n} for n in range(12)])]
    assert {task.status for task in agents_anywhere.end_of(singles + many)} == {Status.SUCCESS}
    assert agents_anywhere.gauge.most["limited"] == 2, agents_anywhere.gauge.order
    agents_anywhere.until(lambda: not holders_of(agents_anywhere.row("limited")))


@pytest.mark.slow
def test_a_key_is_shared_by_jobs_of_every_kind_over_queues(request: Any, tmp_path: Path) -> None:
    gauge = Gauge(lambda lease: "api")
    echo = job("child", isolation="process", limit=2, limit_key="api", queue="children")(process_jobs.echo.handler)
    jobs = [
        sync_job("one", limit=2, limit_key="api"),
        async_job("two", limit=2, limit_key="api", queue="reports"),
        process_jobs.echo,
    ]
    assert echo.isolation == "process"
    with on("sqlite-file", request, tmp_path, gauge) as agents:
        for _ in range(2):
            agents.add(*jobs, slots=4)
        tasks = [
            agents.client.enqueue(one, {"n": n}, limit_key="api", limit=2)
            for n in range(6)
            for one in jobs[: 3 - n % 2]
        ]
        assert {task.status for task in agents.end_of(tasks)} == {Status.SUCCESS}
        assert gauge.most["api"] == 2


@pytest.mark.slow
def test_a_limit_of_tasks_counts_for_each_key_of_its_own(agents: Agents) -> None:
    plain = sync_job("plain")
    for _ in range(2):
        agents.add(plain, slots=8)
    tasks = [
        agents.client.enqueue("plain", {"n": n}, limit_key=f"customer-{n % 3}", limit=n % 3 + 1) for n in range(30)
    ]
    agents.end_of(tasks)
    most = [agents.gauge.most[f"customer-{n}"] for n in range(3)]
    assert most[0] == 1
    assert 1 <= most[1] <= 2
    assert 2 <= most[2] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 3], ids=["slots are free", "their leases are over"])
@pytest.mark.parametrize("name", BOTH)
def test_of_many_that_want_the_last_slots_at_the_same_moment_as_many_win_as_there_are(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, dead: int
) -> None:
    endpoint = request.getfixturevalue("ministack_endpoint") if name == "ministack" else ""
    with stands.open_stand(name, tmp_path, endpoint) as stand:
        limit = Limit("last", 3)
        first = Permits(stand.store, guard_s=0.0, examine_s=15.0)
        gone = [stand.lease(f"gone-{n}", owner="dead") for n in range(dead)]
        assert first.acquire([(lease, limit) for lease in gone]) == [None] * dead
        for lease in gone:
            now = stand.store.clock.now()
            assert stand.store.settle([writes.release(lease, now=now)])[0].accepted
        leases = [stand.lease(f"task-{n}", owner=f"agent-{n}") for n in range(8)]

        def taker(lease: Lease) -> Callable[[], bool]:
            slots = Permits(stand.open(), guard_s=0.0, examine_s=15.0)
            return lambda: slots.acquire([(lease, limit)]) == [None]

        won = stands.together(*map(taker, leases))
        assert sum(won) <= 3
        holders = holders_of(stand.store.engine.get(["limit:last"])["limit:last"])
        assert holders == {f"{lease.task_id}#1" for lease, mine in zip(leases, won, strict=True) if mine}
        assert sum(won) >= 1 if dead else sum(won) == 3


@pytest.mark.slow
def test_tasks_that_were_enqueued_without_the_code_of_their_job_are_limited_too(agents: Agents) -> None:
    agents.add(sync_job(limit=1), slots=8)
    agents.end_of([agents.client.enqueue("limited", {}) for _ in range(8)])
    assert agents.gauge.most["limited"] == 1


@pytest.mark.slow
def test_ids_with_letters_of_any_alphabet_hold_and_free_slots(agents_anywhere: Agents) -> None:
    limited = sync_job(limit=1)
    tasks = [agents_anywhere.client.enqueue(limited, {}, task_id=name) for name in ("zoë", "日本", 'a"b\\c', "ß&<>")]
    agents_anywhere.add(limited, slots=4)
    agents_anywhere.end_of(tasks)
    dead = agents_anywhere.store.engine.apply([_holders("limited", {"weg-é#1", "日本#9"})])
    assert dead[0].row is not None
    [after] = agents_anywhere.end_of([agents_anywhere.client.enqueue(limited, {})])
    assert after.status is Status.SUCCESS
    assert agents_anywhere.gauge.most["limited"] == 1


def _holders(key: str, members: set[str]) -> Write:
    return Write(
        verb="test",
        task_id=f"limit:{key}",
        set={"holders": frozenset(members)},
        require=(Present("taskId"),),
    )


# Streams


def loop_stream(name: str, **options: Any) -> Job[Payload]:
    @stream(name, lease_s=6.0, heartbeat_s=0.1, **options)
    async def run(ctx: StreamContext, payload: Payload) -> None:
        await asyncio.Event().wait()

    return run


@pytest.mark.slow
def test_streams_count_as_long_as_they_run_and_the_next_starts_when_one_is_stopped(agents: Agents) -> None:
    limited = loop_stream("limited", limit=2)
    for _ in range(2):
        agents.add(limited)
    tasks = [agents.client.enqueue(limited, {}, task_id=f"s{n}") for n in range(4)]
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 2)
    agents.until(lambda: [agents.client.get(task).status for task in tasks].count(Status.BLOCKED) == 2)
    for task in tasks:
        agents.client.streams.stop(task)
        agents.client.wait(task)
    assert agents.gauge.most["limited"] == 2
    assert [agents.client.streams.start(task).id for task in tasks]
    agents.gauge.wait(lambda: len(agents.gauge.order) >= 4 and agents.gauge.now["limited"] == 2)
    assert agents.gauge.most["limited"] == 2


def test_an_exclusive_stream_that_is_handed_over_never_runs_beside_another(agents: Agents) -> None:
    limited = loop_stream("limited", limit=1)
    first = agents.add(limited)
    agents.client.enqueue(limited, {}, task_id="s0")
    agents.gauge.wait(lambda: agents.gauge.order == ["s0"])
    waiting = agents.client.enqueue(limited, {}, task_id="s1")
    assert waiting.waitlist == "limited"
    agents.add(limited)
    first.stop()
    agents.gauge.wait(lambda: len(agents.gauge.order) == 2 and agents.gauge.now["limited"] == 1)
    assert agents.gauge.most["limited"] == 1


@pytest.mark.slow
def test_a_stream_that_is_handed_over_without_a_break_has_one_slot(tmp_path: Path) -> None:
    log = Log()
    with FeedThread() as feed, fleet(tmp_path) as agents:
        limited = follower(log, exclusive=False, limit=1)
        first = agents.add(limited)
        payload = {"url": feed.url}
        agents.client.enqueue(limited, payload, task_id="s")
        feed.publish(3)
        log.until(3)
        agents.client.enqueue(limited, payload, task_id="other")
        assert agents.row("other").waitlist == "test.stream"
        second = agents.add(limited)
        agents.introduce()
        seen: list[frozenset[str]] = []
        watch = second.store.engine
        watch.before.append(lambda batch: seen.append(_held(agents)))  # type: ignore[attr-defined]
        first.stop()
        feed.publish(3)
        log.until(6, fence=2)
        assert {one.task for one in log.handled} == {"s"}, "the other ran beside it"
        assert all(len({member.partition("#")[0] for member in members}) <= 1 for members in seen)
        agents.client.streams.stop("s")
        log.wait(lambda: any(ctx.task_id == "other" for ctx in log.contexts))


def _held(agents: Fleet) -> frozenset[str]:
    return holders_of(agents.store.engine.get(["limit:test.stream"]).get("limit:test.stream"))


def test_while_a_stream_is_handed_over_its_slot_is_not_given_to_another() -> None:
    """Its successor has claimed it and has not come for the slot yet, when somebody examines the holders."""
    clock = FakeClock()
    store = memory_store(clock)
    mine = claim(store, "s", "old", kind="stream")
    slots = Permits(store, guard_s=2.0, examine_s=15.0)
    limit = Limit("k", 1)
    assert slots.acquire([(mine, limit)]) == [None]
    store.settle([writes.offer(mine, now=clock.now(), until=clock.now() + 15.0)])
    task = store.peek(["s"])["s"]
    [successor] = store.claim([Wanted(stands.seen(task), 60.0)], owner="new")
    other = claim(store, "b", "third")
    assert Permits(store, guard_s=2.0, examine_s=15.0).acquire([(other, limit)]) != [None]
    assert Permits(store, guard_s=2.0, examine_s=15.0).acquire([(successor, limit)]) == [None]
    assert holders_of(store.engine.get(["limit:k"])["limit:k"]) == {"s#2"}
    assert slots.release([mine])[0][1]["holders"] == {"s#2"}
    clock.advance(18.0)
    assert Permits(store, guard_s=2.0, examine_s=15.0).living(store.engine.get(["limit:k"]).values()) == {"s#2"}


@pytest.mark.parametrize("guard_s", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("how", ["runs", "is handed over"])
def test_a_holder_keeps_its_slot_until_its_lease_and_the_guard_are_over(guard_s: float, how: str) -> None:
    """Its agent is seen as gone only then, and may run its handler up to that moment by its own clock."""
    clock = FakeClock()
    store = memory_store(clock)
    limit = Limit("k", 1)
    holds = claim(store, "a", "holder", lease_s=10.0, kind="stream")
    assert Permits(store, guard_s=guard_s, examine_s=0.0).acquire([(holds, limit)]) == [None]
    if how == "is handed over":
        store.settle([writes.offer(holds, now=clock.now(), until=clock.now() + 10.0)])
    wants = claim(store, "b", "other")

    def refused() -> bool:
        return Permits(store, guard_s=guard_s, examine_s=0.0).acquire([(wants, limit)]) != [None]

    clock.advance(10.0 + guard_s - 0.01)
    assert refused()
    clock.advance(0.02)
    assert not refused()


def claim(store: TaskStore, name: str, owner: str, *, lease_s: float = 60.0, **fields: Any) -> Lease:
    now = store.clock.now()
    values: dict[str, Any] = {"task_id": name, "status": Status.PENDING, "created_at": now, "submitted_at": now}
    [put] = store.enqueue([Task(**{**values, "job": "j", **fields})])
    [lease] = store.claim([Wanted(stands.seen(put.task), lease_s)], owner=owner)
    return lease


# What frees a slot


@pytest.mark.slow
def test_a_cancel_an_error_a_snooze_and_a_failure_free_the_slot_for_the_next(agents: Agents) -> None:
    answers: dict[str, list[Any]] = {"snooze": [Snooze(30)], "fail": [Fail("no")], "error": [ValueError("boom")]}

    def handler(ctx: Context, payload: Payload) -> Any:
        for answer in answers.get(ctx.task_id, []):
            if isinstance(answer, Exception):
                raise answer
            return answer
        while ctx.task_id == "cancel":
            ctx.check()
            ctx.wait(0.01)
        return None

    limited = job("limited", limit=1, max_retry=1)(handler)
    agents.add(limited, slots=1, sweep_s=60.0, poll_min_s=0.05, backoff_base_s=20.0, backoff_cap_s=20.0)
    tasks = [agents.client.enqueue(limited, {}, task_id="cancel")]
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    for name in ("error", "snooze", "fail", "last"):
        agents.until(lambda: agents.store.clock.now() > tasks[-1].created_at + 0.002)  # their order is to be known
        tasks.append(agents.client.enqueue(limited, {}, task_id=name))
    assert [task.waitlist for task in tasks[1:]] == ["limited"] * 4
    agents.client.cancel("cancel")
    assert agents.client.wait("last").status is Status.SUCCESS
    assert [agents.client.get(task).status for task in tasks] == [
        Status.DONE,
        Status.PENDING,
        Status.PENDING,
        Status.FAILED,
        Status.SUCCESS,
    ]
    assert agents.gauge.order == ["cancel", "error", "snooze", "fail", "last"]


def test_a_lost_lease_frees_its_slot_when_the_handler_has_ended(agents: Agents) -> None:
    go_on = threading.Event()
    stage = agents.add(held_job(go_on, limit=1), slots=2, sweep_s=60.0, lease_s=6.0)
    first = agents.client.enqueue("limited", {}, task_id="a")
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    task = agents.client.get(first)
    now = agents.store.clock.now()
    assert agents.store.write_tasks([writes.give_up(task, error="gone", now=now, expire_at=now + 60)]) != [None]
    stage.record.wait(events.LeaseLost)
    go_on.set()
    agents.until(lambda: not holders_of(agents.row("limited")))


def test_a_task_that_is_taken_over_has_one_slot_and_its_former_lease_none() -> None:
    clock = FakeClock()
    store = memory_store(clock)
    limit = Limit("k", 3)
    dead, live = Permits(store, guard_s=2.0, examine_s=15.0), Permits(store, guard_s=2.0, examine_s=15.0)
    lost = claim(store, "a", "dead", lease_s=10.0)
    assert dead.acquire([(lost, limit)]) == [None]
    clock.advance(20.0)
    [mine] = store.take_over([(store.peek(["a"])["a"], 60.0)], owner="live").leases
    assert live.acquire([(mine, limit)]) == [None]
    assert holders_of(store.engine.get(["limit:k"])["limit:k"]) == {"a#2"}


@pytest.mark.slow
def test_a_task_that_is_given_up_frees_its_slot_and_the_next_starts() -> None:
    world = World(2)
    try:
        world.ends = lambda task: (100.0 if task.task_id == "a" else 1.0, Returned(1))
        jobs = limited_jobs()
        world.client.enqueue(jobs["left"], {}, task_id="a")
        for _ in range(SETTINGS_CRASHES):
            agent = world.join("left")
            world.pass_time_until(lambda: any(one.running.lease.task_id == "a" for one in world.runs), 60.0)
            agent.kill()
        world.client.enqueue(jobs["left"], {}, task_id="b")
        world.join("left")
        world.pass_time_until(lambda: world.client.get("b").status is Status.SUCCESS, 40.0)
        assert world.client.get("a").status is Status.FAILED
    finally:
        world.close()


SETTINGS_CRASHES: Final = 7


# In line


def test_a_task_that_waits_in_line_can_be_cancelled_and_brought_back(agents: Agents) -> None:
    go_on = threading.Event()
    agents.add(held_job(go_on, limit=1), slots=4)
    agents.client.enqueue("limited", {}, task_id="a", limit=1)
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    waiting = agents.client.enqueue("limited", {}, task_id="b", limit=1)
    assert waiting.status_value == "BLOCKED@limited"
    closed = agents.client.cancel(waiting)
    assert (closed.status, closed.done_reason, closed.waitlist) == (Status.DONE, "cancelled", None)
    again = agents.client.retry(waiting)
    assert again.status is Status.PENDING
    agents.until(lambda: agents.client.get("b").waitlist == "limited")
    assert agents.client.get("b").started_at is None
    go_on.set()
    agents.end_of([waiting])
    assert agents.gauge.order == ["a", "b"]


@pytest.mark.slow
def test_a_delayed_task_comes_into_the_line_when_it_is_due(agents: Agents) -> None:
    go_on = threading.Event()
    agents.add(held_job(go_on, limit=1), slots=4)
    agents.client.enqueue("limited", {}, task_id="a", limit=1)
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    later = agents.client.enqueue("limited", {}, limit=1, delay_s=0.3)
    assert later.status is Status.PENDING
    agents.until(lambda: agents.client.get(later).waitlist == "limited")
    assert agents.client.get(later).created_at < later.created_at + 0.01, "it has lost its place"
    go_on.set()
    agents.end_of([later])


@pytest.mark.slow
def test_a_child_with_a_limit_waits_for_its_parent_first_and_then_for_a_slot(agents: Agents) -> None:
    go_on = threading.Event()
    limited = held_job(go_on, limit=1)
    agents.add(limited, sync_job("parent", 0.0), slots=4)
    holder = agents.client.enqueue(limited, {}, task_id="holder")
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    parent = agents.client.enqueue("parent", {}, delay_s=0.2)
    child = agents.client.enqueue(limited, {}, depends_on=[parent])
    assert (child.status_value, set(child.waiting_for)) == ("BLOCKED", {parent.id})
    agents.until(lambda: agents.client.get(child).waitlist == "limited")
    go_on.set()
    agents.end_of([holder, child])
    assert agents.gauge.most["limited"] == 1


@pytest.mark.slow
def test_the_list_and_the_numbers_show_what_stands_in_line(agents_anywhere: Agents) -> None:
    agents, go_on = agents_anywhere, threading.Event()
    agents.add(held_job(go_on, limit=1), slots=4)
    tasks = [agents.client.enqueue("limited", {}, limit=1)]
    agents.gauge.wait(lambda: agents.gauge.now["limited"] == 1)
    tasks += [agents.client.enqueue("limited", {}, limit=1) for _ in range(3)]
    agents.until(lambda: len(list(agents.client.list(status="BLOCKED"))) == 3)
    listed = list(agents.client.list(status="BLOCKED", newest_first=False))
    assert {task.id for task in listed} == {task.id for task in tasks[1:]}
    assert listed == sorted(listed, key=lambda task: task.created_at)
    [queue] = [one for one in agents.client.stats() if one.queue == "default"]
    assert (queue.blocked, queue.running, queue.ready) == (3, 1, 0)
    go_on.set()
    agents.end_of(tasks)


# Out of the way of others


class Counting(FaultyEngine):
    """Counts requests and what they read, and bills writes as DynamoDB does."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: Counter[str] = Counter()
        self.touched: Counter[str] = Counter()
        self.entries = 0
        self.units: Counter[str] = Counter()
        self._real = engine

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        answers = []
        for write in batch:
            before = self._real.get([write.task_id]).get(write.task_id)
            [answer] = super().apply([write])
            self.calls[write.verb] += 1
            self.touched[write.task_id] += 1
            old = encode_row(before) if before else None
            if answer.won and answer.row:
                self.units[write.task_id] += write_units(old, encode_row(answer.row))[0]
            else:
                self.units[write.task_id] += write_units(None, old)[0] - write_units(None, old)[1] if old else 1
            answers.append(answer)
        return answers

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = super().put(rows, fresh=fresh)
        for row, answer in zip(rows, answers, strict=True):
            self.calls["put"] += 1
            self.units[row["taskId"]] += write_units(None, encode_row(row))[0] if answer.won else 1
        return answers

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        self.calls["get"] += 1
        self.entries += len(task_ids)
        return super().get(task_ids)

    def page(self, status_value: str, **options: Any) -> Any:
        page = super().page(status_value, **options)
        self.calls["page"] += 1
        self.entries += len(page.entries)
        return page

    def sibling(self) -> Any:
        return self


def counted_world(seed: int = 5) -> tuple[World, Counting]:
    world = World(seed, wrap=Counting)
    assert isinstance(world.engine, Counting)
    return world, world.engine


def requests_of_a_while(waiting: int) -> tuple[Counter[str], int]:
    """What two agents ask for in 20 minutes in which the only slot is taken and so many wait for it."""
    world, counting = counted_world()
    try:
        world.ends = lambda task: (1e6, Returned(1))
        jobs = limited_jobs()
        world.client.enqueue(jobs["left"], {}, task_id="holder")
        for _ in range(2):
            world.join("left", "free", lease_s=3000.0, heartbeat_s=900.0)
        world.pass_time_until(lambda: world.started == ["holder"], 5.0)
        world.client.enqueue_many(jobs["left"], [{"n": n} for n in range(waiting)])
        world.pass_time(60.0)
        counting.calls.clear()
        counting.touched.clear()
        counting.entries = 0
        world.pass_time(1200.0)
        ids = {task.task_id for task in world.tasks(Status.BLOCKED)}
        assert len(ids) == waiting
        assert not ids & counting.touched.keys(), "something was written for a task that waits"
        return counting.calls, counting.entries
    finally:
        world.close()


@pytest.mark.slow
def test_nothing_is_written_and_no_more_is_read_for_tasks_that_wait_whatever_their_number() -> None:
    few, few_entries = requests_of_a_while(5)
    many, many_entries = requests_of_a_while(200)
    assert few["page"] > 100
    for verb in {*few, *many}:
        assert abs(few[verb] - many[verb]) <= 0.03 * max(few[verb], many[verb]) + 2, (verb, few, many)
    assert abs(few_entries - many_entries) <= 0.05 * few_entries


def test_five_hundred_that_wait_hide_no_other_task() -> None:
    world, _ = counted_world()
    try:
        world.ends = lambda task: (1000.0, Returned(1))
        jobs = limited_jobs()
        world.client.enqueue(jobs["left"], {}, task_id="holder")
        agent = world.join("left", "free", poll_idle_s=2.0)
        world.pass_time_until(lambda: world.started == ["holder"], 5.0)
        world.client.enqueue_many(jobs["left"], [{"n": n} for n in range(500)])
        world.pass_time(10.0)
        claims = agent.store.log.count("claim")
        world.clock.advance(0.01)
        world.client.enqueue(jobs["free"], {}, task_id="other")
        assert world.pass_time_until(lambda: "other" in world.started, 3.0) <= 2.0 + 0.5
        assert agent.store.log.count("claim") == claims + 1
    finally:
        world.close()


@pytest.mark.slow
def test_five_hundred_on_the_ready_page_leave_it_and_hide_no_other_task_for_long() -> None:
    """They were put before anybody ran, one by one."""
    world, _ = counted_world()
    try:
        world.ends = lambda task: (1000.0 if task.task_id != "other" else 0.1, Returned(1))
        jobs = limited_jobs()
        for number in range(500):
            world.client.enqueue(jobs["left"], {}, task_id=f"t{number}")
        world.clock.advance(0.01)
        world.client.enqueue(jobs["free"], {}, task_id="other")
        world.join("left", "free")
        world.pass_time_until(lambda: "other" in world.started, 20.0)
        world.pass_time_until(lambda: len(world.tasks(Status.BLOCKED)) == 499, 20.0)
    finally:
        world.close()


# What it costs


PLAIN: Final = 8
"""Write units of a small task: enqueue 2, claim 3, success 3."""


# Rows that nobody uses


@pytest.fixture(params=["sqlite-memory", "moto"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[stands.Stand]:
    with stands.open_stand(request.param, tmp_path) as one:
        yield one


def slots_of(stand: stands.Stand) -> Permits:
    return Permits(stand.store, guard_s=2.0, examine_s=15.0)


def row_of(stand: stands.Stand, key: str) -> Row:
    return dict(stand.store.engine.get([f"limit:{key}"]).get(f"limit:{key}", {}))


def is_kept(row: Row) -> bool:
    return bool(row) and "expireAt" not in row


@pytest.mark.parametrize("number", [1, 2])
def test_the_row_of_a_limit_expires_while_nobody_uses_it_for_no_further_write(stand: stands.Stand, number: int) -> None:
    key, counting = stand.mark, Writing(stand.store.engine)
    slots = Permits(TaskStore(counting), guard_s=2.0, examine_s=15.0)
    leases = [stand.lease(name) for name in "ab"]
    for lease in leases:
        assert slots.acquire([(lease, Limit(key, number))]) == [None]
        assert is_kept(row_of(stand, key))
        slots.release([lease])
        slots.let_expire(is_leaving=True)
        left_s = row_of(stand, key)["expireAt"] - stand.store.clock.now()
        assert left_s == pytest.approx(LIMIT_LIVES_S, abs=5.0)
    assert counting.verbs == ["take permit", "release permit"] * 2


def test_the_row_of_a_shared_limit_stays_until_its_last_slot_is_given_back_and_expires_then(
    stand: stands.Stand,
) -> None:
    limit, slots, others = Limit(stand.mark, 2), slots_of(stand), slots_of(stand)
    first, second = stand.lease("a"), stand.lease("b")
    assert slots.acquire([(first, limit)]) == others.acquire([(second, limit)]) == [None]
    slots.release([first])  # it was alone, as far as is known there
    assert is_kept(row_of(stand, limit.key))
    assert holders_of(row_of(stand, limit.key)) == {f"{second.task_id}#{second.fence}"}
    slots.let_expire(is_leaving=True)
    assert is_kept(row_of(stand, limit.key))
    others.release([second])
    others.let_expire()
    assert is_kept(row_of(stand, limit.key)), "it may be used again at once"
    others.let_expire(is_leaving=True)
    assert "expireAt" in row_of(stand, limit.key)


def test_a_limit_that_is_used_again_before_its_row_is_set_to_expire_keeps_it(stand: stands.Stand) -> None:
    limit, slots, others = Limit(stand.mark, 2), slots_of(stand), slots_of(stand)
    leases = [stand.lease(name) for name in "abc"]
    assert slots.acquire([(leases[0], limit), (leases[1], limit)]) == [None, None]
    slots.release(leases[:2])
    assert others.acquire([(leases[2], limit)]) == [None]
    slots.let_expire(is_leaving=True)
    assert is_kept(row_of(stand, limit.key))


def test_a_slot_that_is_taken_while_the_row_is_deleted_is_taken_all_the_same(stand: stands.Stand) -> None:
    """The time to live deletes what is overdue at its moment: before the write the row is founded again, after it no
    more."""
    limit, slots = Limit(stand.mark, 1), slots_of(stand)
    a, b, c = (stand.lease(name) for name in "abc")
    assert slots.acquire([(a, limit)]) == [None]
    slots.release([a])
    assert delete_overdue(stand, limit.key)
    assert slots.acquire([(b, limit)]) == [None]
    assert holders_of(row_of(stand, limit.key)) == {f"{b.task_id}#{b.fence}"}
    assert slots_of(stand).acquire([(c, limit)]) != [None]
    slots.release([b])
    assert slots.acquire([(c, limit)]) == [None]
    assert not delete_overdue(stand, limit.key)
    assert holders_of(row_of(stand, limit.key)) == {f"{c.task_id}#{c.fence}"}


@pytest.mark.slow
def test_a_line_that_opens_keeps_the_row_of_a_limit_that_expires(stand: stands.Stand) -> None:
    limit, slots, engine = Limit(stand.mark, 1), slots_of(stand), stand.store.engine
    a, b = stand.lease("a"), stand.lease("b")
    assert slots.acquire([(a, limit)]) == [None]
    slots.release([a])
    seen = row_of(stand, limit.key)
    keep_waitlist_open(stand.store, limit, seen)
    assert is_kept(row_of(stand, limit.key))
    assert not delete_overdue(stand, limit.key)
    assert slots.acquire([(b, limit)]) == [None]
    slots.release([b])
    slots.let_expire(is_leaving=True)
    assert is_kept(row_of(stand, limit.key)), "a line is open"
    for is_used, won in ((True, False), (False, True)):
        at = row_of(stand, limit.key)["updatedAt"]
        write = limit_writes.close_waitlist(limit.key, seen_at=at, is_used=is_used, now=engine.clock.now())
        assert stand.store.write_rows([write])[0][0] == won
    assert "expireAt" in row_of(stand, limit.key)
    engine.apply([_holders(limit.key, {"x#1"})])
    delete_overdue(stand, limit.key)
    keep_waitlist_open(stand.store, limit, seen)
    assert row_of(stand, limit.key)["status"] == WAITLIST_STATUS, "it was gone"


def test_a_line_that_closes_beside_a_long_handler_lets_the_row_expire_after_it(stand: stands.Stand) -> None:
    limit, slots = Limit(stand.mark, 1), slots_of(stand)
    lease = stand.lease("a")
    keep_waitlist_open(stand.store, limit, None)
    assert slots.acquire([(lease, limit)]) == [None]
    at = row_of(stand, limit.key)["updatedAt"]
    for is_used, won in ((False, False), (True, True)):
        write = limit_writes.close_waitlist(limit.key, seen_at=at, is_used=is_used, now=at)
        assert stand.store.write_rows([write])[0][0] == won
    assert is_kept(row_of(stand, limit.key))
    slots.release([lease])
    slots.let_expire(is_leaving=True)
    assert "expireAt" in row_of(stand, limit.key)


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.LOST_REQUEST])
def test_the_row_of_a_limit_expires_although_a_request_or_its_reply_is_lost(fault: Fault) -> None:
    store = memory_store(FakeClock())
    faulty = FaultyEngine(store.engine)
    slots = Permits(TaskStore(faulty), guard_s=2.0, examine_s=15.0)
    lease = claim(store, "a", "me")
    assert slots.acquire([(lease, Limit("k", 1))]) == [None]
    faulty.fail("release permit", fault)
    slots.release([lease])
    slots.release([])
    assert "expireAt" in store.engine.get(["limit:k"])["limit:k"]
    assert holders_of(store.engine.get(["limit:k"])["limit:k"]) == frozenset()


def delete_overdue(stand: stands.Stand, key: str) -> bool:
    """Delete the row as the time to live does, if it expires at all."""
    before = row_of(stand, key)
    later = Write(verb="expire", task_id=f"limit:{key}", delete=True, require=(Above("expireAt", 0.0),))
    [(is_gone, _)] = stand.store.write_rows([later])
    assert is_gone == ("expireAt" in before)
    return is_gone


# What it costs


def extra_units(play: Callable[[World, Any], None], tasks: int) -> float:
    """Write units that a limited task costs more than another, agents and turns left out."""
    world, counting = counted_world()
    try:
        world.ends = lambda task: (0.05, Returned("done"))
        play(world, limited_jobs()["left"])
        world.pass_time_until(lambda: world.is_done, 600.0)
        limited = sum(units for name, units in counting.units.items() if not name.startswith(("agent:", "turn:")))
        return (limited - PLAIN * tasks) / tasks
    finally:
        world.close()


@pytest.mark.slow
def test_a_task_that_finds_a_free_slot_costs_two_write_units_more() -> None:
    def play(world: World, limited: Job[Any]) -> None:
        world.join("left")
        for number in range(40):
            world.client.enqueue(limited, {}, task_id=f"t{number}")
            world.pass_time_until(lambda: world.is_done, 20.0)

    assert extra_units(play, 40) <= 2.1


@pytest.mark.slow
def test_a_task_that_comes_through_the_line_costs_two_write_units_more() -> None:
    def play(world: World, limited: Job[Any]) -> None:
        world.client.enqueue(limited, {}, task_id="first")
        world.join("left")
        world.ends = lambda task: (1.0 if task.task_id == "first" else 0.05, Returned("done"))
        world.pass_time_until(lambda: world.started == ["first"], 5.0)
        for number in range(99):
            world.client.enqueue(limited, {}, task_id=f"t{number}")

    assert extra_units(play, 100) <= 2.1


def test_a_burst_in_one_call_before_anybody_runs_costs_two_write_units_more_each() -> None:
    def play(world: World, limited: Job[Any]) -> None:
        world.client.enqueue_many(limited, [{"n": n} for n in range(100)])
        world.join("left")

    assert extra_units(play, 100) <= 2.2


@pytest.mark.slow
def test_a_burst_of_single_calls_before_anybody_runs_costs_five_write_units_more_each() -> None:
    def play(world: World, limited: Job[Any]) -> None:
        for number in range(100):
            world.client.enqueue(limited, {}, task_id=f"t{number}")
        world.join("left")

    assert extra_units(play, 100) <= 5.5


# Rows made by hand, and options that cannot be


BROKEN: Final[list[dict[str, Any]]] = [
    {"holders": {"S": "abc"}},
    {"holders": {"N": "5"}},
    {"holders": {"L": [{"S": "a#1"}]}},
    {"holders": {"NULL": True}},
    {"limitMax": {"S": "many"}},
    {"limitMax": {"N": "0"}, "updatedAt": {"S": "yesterday"}},
    {"limitMax": {"N": "-3"}, "status": {"S": "LINE"}, "createdAt": {"N": "1"}},
    {"updatedAt": {"S": "yesterday"}, "status": {"S": "LINE"}, "createdAt": {"N": "1"}, "holders": {"SS": ["x", "a#"]}},
]
BROKEN_SQL: Final[list[dict[str, Any]]] = [
    {"holders": "abc"},
    {"holders": "5"},
    {"holders": '"abc"'},
    {"holders": '[ "x#1",   5]'},
    {"holders": '{"a": 1}', "status": "LINE", "createdAt": 1},
    {"limitMax": "many", "updatedAt": "yesterday"},
    {"limitMax": -3, "status": "LINE", "createdAt": 1},
    {"updatedAt": "yesterday", "status": "LINE", "createdAt": "soon"},
    {"status": "nonsense"},
]


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN_SQL)
def test_a_row_made_by_hand_with_wrong_types_stops_nobody(agents: Agents, broken: dict[str, Any]) -> None:
    engine = agents.store.engine
    assert isinstance(engine, SqliteEngine)
    with engine._transaction() as cursor:
        names = ", ".join(f'"{name}"' for name in broken)
        marks = ", ".join("?" * len(broken))
        cursor.execute(
            f'INSERT INTO tasks ("taskId", {names}) VALUES (?, {marks})', ("limit:limited", *broken.values())
        )
    _works_all_the_same(agents)


@pytest.mark.slow
@pytest.mark.ministack
@pytest.mark.parametrize("broken", BROKEN)
def test_an_item_made_by_hand_with_wrong_types_stops_nobody(
    request: pytest.FixtureRequest, tmp_path: Path, gauge: Gauge, broken: dict[str, Any]
) -> None:
    with on("ministack", request, tmp_path, gauge) as agents:
        engine = agents.store.engine
        assert isinstance(engine, DynamoEngine)
        item = {"taskId": {"S": "limit:limited"}, **broken}
        engine.connection.call("PutItem", TableName=engine.table, Item=item)
        _works_all_the_same(agents)


def _works_all_the_same(agents: Agents) -> None:
    limited, other = sync_job(limit=1), sync_job("other", limit=1)
    stage = agents.add(limited, other, slots=4)
    tasks = [agents.client.enqueue(one, {"n": n}) for n in range(3) for one in (limited, other)]
    assert {task.status for task in agents.end_of(tasks)} == {Status.SUCCESS}
    assert agents.gauge.most["limited"] == 1
    assert stage.is_running


def test_a_row_of_a_task_made_by_hand_with_wrong_types_stops_nobody(agents: Agents) -> None:
    engine = agents.store.engine
    assert isinstance(engine, SqliteEngine)
    with engine._transaction() as cursor:
        cursor.execute(
            'INSERT INTO tasks ("taskId", "status", "createdAt", "job", "fence", "limitKey", "limitMax", "payload") '
            "VALUES ('hand', 'PENDING', 1, 'limited', 0, 5, -7.5, '{}')"
        )
    agents.add(sync_job(limit=1))
    assert agents.end_of([agents.client.get("hand")])[0].status is Status.SUCCESS


def test_jobs_that_share_a_key_must_agree_about_its_number() -> None:
    one, two = sync_job("one", limit=1, limit_key="api"), sync_job("two", limit=2, limit_key="api")
    with pytest.raises(ConfigurationError, match="'one' and 'two' share the limit 'api' with 1 and 2 at once"):
        Stage((one, two))
    Registry(one, two)


def test_the_number_of_a_job_is_not_kept_in_its_tasks_and_that_of_a_task_is() -> None:
    clock = FakeClock()
    store = memory_store(clock)
    client = Client(store, settings())
    by_job = client.enqueue(sync_job(limit=2), {})
    own = client.enqueue(sync_job(limit=2), {}, limit=5)
    key = client.enqueue(sync_job(limit=2), {}, limit_key="customer-7")
    assert [(task.limit_key, task.limit_max) for task in (by_job, own, key)] == [
        ("limited", None),
        ("limited", 5),
        ("customer-7", None),
    ]
    today = sync_job(limit=3)
    assert [limit_of(task, today) for task in (by_job, own, key)] == [
        Limit("limited", 3),
        Limit("limited", 5),
        Limit("customer-7", 3),
    ]
    assert limit_of(by_job, sync_job()) is None


# A store that does not answer


@pytest.mark.slow
def test_when_the_store_cannot_say_whether_a_slot_is_free_the_task_comes_again_later(gauge: Gauge) -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    made = Agents(lambda: TaskStore(faulty), gauge)
    try:
        limited = sync_job(limit=1)
        tasks = [made.client.enqueue(limited, {}) for _ in range(3)]
        faulty.fail("take permit", *[Fault.LOST_REPLY] * 3)
        stage = made.add(limited, slots=1)
        made.end_of(tasks)
        assert gauge.most["limited"] == 1
        snoozed = stage.record.of(events.TaskSnoozed)
        assert 1 <= len(snoozed) <= 3
        assert {one.delay_s for one in snoozed} == {UNDECIDED_S}
        assert not [task for task in map(made.client.get, tasks) if task.retry_count]
    finally:
        made.stages[0].stop()
        faulty.close()


@pytest.mark.slow
def test_a_store_that_is_away_does_not_make_an_agent_turn_while_a_slot_is_free(gauge: Gauge) -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    made = Agents(lambda: TaskStore(faulty), gauge)
    go_on = threading.Event()
    try:
        limited = held_job(go_on, limit=1)
        stage = made.add(limited, slots=1, sweep_s=60.0)
        tasks = [made.client.enqueue(limited, {})]
        gauge.wait(lambda: gauge.now["limited"] == 1)
        tasks.append(made.client.enqueue(limited, {}))
        faulty.chance("page", Fault.LOST_REQUEST, 1.0)
        go_on.set()
        stage.record.wait(events.StoreFailed, 3)
        assert len(faulty.hits) < 40
        faulty.calm()
        made.end_of(tasks)
    finally:
        go_on.set()
        made.stages[0].stop()
        faulty.close()


def test_slots_that_could_not_be_given_back_are_given_back_later() -> None:
    clock = FakeClock()
    faulty = FaultyEngine(SqliteEngine(MEMORY, clock=clock))
    store = TaskStore(faulty, monotonic=clock.monotonic)
    slots = Permits(store, guard_s=2.0, examine_s=15.0)
    lease = claim(store, "a", "me")
    assert slots.acquire([(lease, Limit("k", 1))]) == [None]
    faulty.outage()
    assert slots.release([lease]) == []
    with pytest.raises(StoreError):
        store.engine.get(["limit:k"])
    faulty.calm()
    [(limit, row)] = slots.release([])
    assert (limit.key, holders_of(row)) == ("k", frozenset())
