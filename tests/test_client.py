"""What an application asks for: enqueue, look, wait, cancel, retry, list, purge, stats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.engine import LONG_S, a_job, seen, settings
from thunderagent.agent.loop import Agent
from thunderagent.client import BULK, Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import (
    ConfigurationError,
    DuplicateTask,
    NotAllowed,
    PayloadInvalid,
    PayloadTooLarge,
    TaskNotFound,
    WaitTimeout,
)
from thunderagent.model.schedules import schedule_id
from thunderagent.model.task import Lane, Lease, Page, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.agents import sentinel_id
from thunderagent.model.writes.limits import limit_id
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.model.writes.unique import key_id
from thunderagent.queue.enqueue import DEFAULTS, EnqueueOptions
from thunderagent.regions.grant import scope_id
from thunderagent.stores.dynamo.batches import PROBE_ID
from thunderagent.stores.dynamo.engine import LANES_ID
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite import boots
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_client


class Payload(BaseModel):
    month: str


@job("test.build", queue="reports", max_retry=7)
def build(ctx: Context, payload: Payload) -> None: ...


@job("test.none")
def of_none(ctx: Context, payload: None) -> None: ...


class Counting(SqliteEngine):
    """Counts pages and puts."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MEMORY, clock=clock)
        self.pages = 0
        self.puts: list[tuple[int, bool]] = []

    def page(self, status_value: str, **options: Any) -> Page:
        self.pages += 1
        return super().page(status_value, **options)

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        self.puts.append((len(rows), fresh))
        return super().put(rows, fresh=fresh)


@dataclass
class Setting:
    """A client on a clock set by the test, and hands that play the agent."""

    clock: FakeClock
    engine: Counting
    store: TaskStore
    client: Client
    woken: list[int]

    def claim(self, task: Task, owner: str = "agent") -> Lease:
        [lease] = self.store.claim([Wanted(seen(self.client.get(task)), 300.0)], owner=owner)
        return lease

    def succeed(self, task: Task, result: str | None = None) -> Task:
        now = self.clock.now()
        self.store.settle([writes.succeed(self.claim(task), now=now, expire_at=now + 1000, result=result)])
        return self.client.get(task)

    def fail(self, task: Task, error: str = "ValueError: x") -> Task:
        now = self.clock.now()
        self.store.settle([writes.fail(self.claim(task), error=error, now=now, expire_at=now + 1000)])
        return self.client.get(task)

    def close(self, task: Task) -> Task:
        now = self.clock.now()
        self.store.settle([writes.close(self.claim(task), reason="stopped", now=now, expire_at=now + 1000)])
        return self.client.get(task)

    def in_status(self, status: Status) -> Task:
        """A task in that status."""
        if status is Status.BLOCKED:
            return self.client.enqueue("test.job", {}, depends_on=[self.client.enqueue("test.parent", {})])
        task = self.client.enqueue("test.job", {})
        match status:
            case Status.RUNNING:
                self.claim(task)
            case Status.SUCCESS:
                self.succeed(task)
            case Status.FAILED:
                self.fail(task)
            case Status.DONE:
                self.close(task)
        return self.client.get(task)


@pytest.fixture
def at() -> Iterator[Setting]:
    clock, woken = FakeClock(), list[int]()
    engine = Counting(clock)
    store = TaskStore(engine, monotonic=clock.monotonic)
    client = Client(store, settings(max_retry=3), on_enqueue=lambda: woken.append(1))
    yield Setting(clock, engine, store, client, woken)
    client.close()


# Enqueue


def test_a_new_task_waits_in_the_queue_of_its_job(at: Setting) -> None:
    task = at.client.enqueue(build, Payload(month="2026-07"))
    assert task == at.client.get(task)
    assert (task.status, task.queue, task.job, task.max_retry) == (Status.PENDING, "reports", "test.build", 7)
    assert task.payload == {"month": "2026-07"}
    assert task.created_at == task.submitted_at == at.clock.now()
    assert task.fence == 0
    assert at.woken == [1]


def test_options_of_an_enqueue_go_before_those_of_the_job(at: Setting) -> None:
    task = at.client.enqueue(build, Payload(month="x"), queue="fast", max_retry=0, delay_s=90, task_id="mine")
    assert (task.id, task.queue, task.max_retry) == ("mine", "fast", 0)
    assert task.created_at == at.clock.now() + 90
    assert task.submitted_at == at.clock.now()


def test_a_task_may_have_a_moment_instead_of_a_delay(at: Setting) -> None:
    assert at.client.enqueue(of_none, None, run_at=at.clock.now() + 3600).created_at == at.clock.now() + 3600
    assert at.client.enqueue(of_none, None, delay_s=-5).created_at == at.clock.now()


def test_a_name_will_do_where_the_code_is_not_at_hand(at: Setting) -> None:
    task = at.client.enqueue("test.build", {"month": "2026-07"})
    assert (task.queue, task.max_retry, task.payload) == ("default", None, {"month": "2026-07"})
    assert at.client.enqueue("test.none").payload is None
    assert at.client.enqueue(of_none, None).max_retry == 3


def test_a_payload_that_does_not_fit_is_refused_before_anything_is_written(at: Setting) -> None:
    with pytest.raises(PayloadInvalid, match="month: Input should be a valid string"):
        at.client.enqueue(build, Payload.model_construct(month=7))  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalid):
        at.client.enqueue("test.build", {"x": float("nan")})
    with pytest.raises(PayloadInvalid):
        at.client.enqueue("test.build", {"x": object()})
    unique: list[dict[str, Any]] = [{}, {"unique_key": "k"}, {"unique_key": "k", "task_id": "mine"}]
    for options in unique:
        with pytest.raises(PayloadTooLarge, match=r"^the payload of 'test\.build' has .* set THUNDERAGENT_BLOB_BUCKET"):
            at.client.enqueue("test.build", {"x": "y" * 400_000}, **options)
    assert at.engine.lanes() == []
    assert at.woken == []


def test_the_same_id_twice_is_one_task(at: Setting) -> None:
    first = at.client.enqueue("test.build", {"a": 1, "b": 2}, task_id="mine")
    at.clock.advance(60)
    assert at.client.enqueue("test.build", {"b": 2, "a": 1}, task_id="mine", delay_s=5) == first
    assert list(at.client.get("mine").payload) == ["a", "b"]
    assert at.client.enqueue("test.build", {"b": 2, "a": 1}).payload_text == '{"b":2,"a":1}'
    assert at.succeed(first).status is Status.SUCCESS
    assert at.client.enqueue("test.build", {"a": 1, "b": 2}, task_id="mine").status is Status.SUCCESS


def test_an_id_of_another_task_is_refused_with_what_it_is(at: Setting) -> None:
    at.client.enqueue("test.build", {"a": 1}, task_id="mine")
    with pytest.raises(DuplicateTask, match=r"'mine' exists with another payload \(status PENDING\)"):
        at.client.enqueue("test.build", {"a": 2}, task_id="mine")
    with pytest.raises(DuplicateTask, match=r"'mine' exists with the job 'test.build'"):
        at.client.enqueue("test.other", {"a": 1}, task_id="mine")


@pytest.mark.parametrize("name", ["a#b", "agent:x", "turn:x", "x" * 513, "ü" * 257, "a\nb"])
def test_an_id_that_would_collide_with_our_own_rows_is_refused(at: Setting, name: str) -> None:
    with pytest.raises(PayloadInvalid, match="cannot be a task_id"):
        at.client.enqueue("test.build", {}, task_id=name)
    with pytest.raises(TaskNotFound):
        at.client.get(name)


def test_no_task_can_have_the_id_of_a_row_of_ours(at: Setting) -> None:
    ours = (
        *(CONTROL_ID, LANES_ID, PROBE_ID, boots.ROW_ID, key_id("a", "b"), limit_id("a"), sentinel_id("eu")),
        *(scope_id("default"), schedule_id("a"), "agent:a", "turn:a", "journal:a#1"),
    )
    for task_id in ours:
        with pytest.raises(PayloadInvalid, match="cannot be a task_id"):
            at.client.enqueue("test.build", {"month": "x"}, task_id=task_id)


@pytest.mark.parametrize("name", ["x" * 512, "ü", "a b/c?d", "' OR 1=1 --"])
def test_any_other_id_is_fine(at: Setting, name: str) -> None:
    assert at.client.enqueue("test.build", {}, task_id=name).id == name
    assert at.client.get(name).id == name
    assert at.client.cancel(name).status is Status.DONE


def test_a_queue_that_cannot_be_is_refused(at: Setting) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a queue"):
        at.client.enqueue("test.build", {}, queue="a.b")


# Enqueue many


def test_each_of_many_has_an_outcome_of_its_own(at: Setting) -> None:
    payloads = [{"n": 0}, {"n": float("nan")}, {"n": 2}, {"n": "y" * 400_000}, {"n": "\ud800"}, {"n": 5}]
    outcomes = at.client.enqueue_many("test.build", payloads)
    assert [type(one.error).__name__ for one in outcomes] == [
        "NoneType",
        "PayloadInvalid",
        "NoneType",
        "PayloadTooLarge",
        "PayloadInvalid",
        "NoneType",
    ]
    assert [one.created for one in outcomes] == [True, False, True, False, False, True]
    assert [at.client.get(one.task).payload["n"] for one in outcomes if one.created] == [0, 2, 5]
    assert at.engine.count("PENDING") == 3


def test_a_typed_payload_in_the_middle_that_does_not_fit_stops_nothing(at: Setting) -> None:
    payloads = [Payload(month="a"), Payload.model_construct(month=3), Payload(month="b")]  # type: ignore[arg-type]
    outcomes = at.client.enqueue_many(build, payloads)
    assert [one.created for one in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, PayloadInvalid)
    assert {one.task.queue for one in outcomes if one.created} == {"reports"}


def test_ids_of_many_may_be_given_and_each_is_judged_alone(at: Setting) -> None:
    at.client.enqueue("test.build", {"n": 1}, task_id="same")
    at.client.enqueue("test.build", {"n": 9}, task_id="taken")
    at.clock.advance(1)
    outcomes = at.client.enqueue_many(
        "test.build", [{"n": n} for n in range(4)], task_ids=["new", "same", "taken", "agent:x"]
    )
    assert [one.created for one in outcomes] == [True, False, False, False]
    assert [type(one.error).__name__ for one in outcomes] == ["NoneType", "NoneType", "DuplicateTask", "PayloadInvalid"]
    assert [one.task.id for one in outcomes[:3]] == ["new", "same", "taken"]
    assert at.engine.puts[-1] == (3, False), "ids that were given may be taken: the engine must look"


def test_too_few_ids_are_a_mistake(at: Setting) -> None:
    with pytest.raises(ConfigurationError, match="task_ids has only 1 members"):
        at.client.enqueue_many("test.build", [{}, {}], task_ids=["only-one"])


def test_an_option_that_does_not_exist_is_refused_with_what_was_meant(at: Setting) -> None:
    assert DEFAULTS.keys() == EnqueueOptions.__annotations__.keys()
    with pytest.raises(ConfigurationError, match="enqueue has no option 'dely_s'; did you mean 'delay_s'"):
        at.client.enqueue("test.build", {}, dely_s=5)  # type: ignore[call-overload] # the point of it
    with pytest.raises(ConfigurationError, match="enqueue_many has no option 'task_id'"):
        at.client.enqueue_many("test.build", [{}], task_id="a")  # type: ignore[call-arg] # the point of it
    assert at.engine.puts == []


def test_many_are_put_in_batches_that_are_told_as_they_go(at: Setting) -> None:
    read: list[int] = []
    told: list[tuple[int, int]] = []

    def payloads() -> Iterator[dict[str, int]]:
        for number in range(BULK * 2 + 1):
            read.append(number)
            yield {"n": number}

    outcomes = at.client.enqueue_many(
        "test.build", payloads(), on_progress=lambda number: told.append((number, len(read)))
    )
    assert told == [(BULK, BULK), (BULK * 2, BULK * 2), (BULK * 2 + 1, BULK * 2 + 1)]
    assert at.engine.puts == [(BULK, True), (BULK, True), (1, True)]
    assert all(one.created for one in outcomes)
    assert len({one.task.id for one in outcomes}) == BULK * 2 + 1
    assert at.woken == [1, 1, 1]


def test_options_of_many_are_those_of_one(at: Setting) -> None:
    [one] = at.client.enqueue_many("test.build", [{}], delay_s=60, max_retry=1, queue="q")
    assert (one.task.created_at, one.task.max_retry, one.task.queue) == (at.clock.now() + 60, 1, "q")
    assert at.client.enqueue_many("test.build", []) == []


# Look and wait


def test_a_task_that_is_not_there_is_told_with_the_place(at: Setting) -> None:
    for name in ("nothing", "", "agent:x", "turn:blocked"):
        with pytest.raises(TaskNotFound, match="sqlite://:memory:"):
            at.client.get(name)
    for command in (at.client.cancel, at.client.retry):
        with pytest.raises(TaskNotFound):
            command("nothing")
    with pytest.raises(TaskNotFound):
        at.client.wait("nothing", timeout_s=0)


def test_rows_that_are_no_tasks_are_not_taken_for_some(at: Setting) -> None:
    at.store.announce("x", {"queues": {}, "jobs": []}, lives_s=60)
    at.store.take_turn("blocked", owner="x", lasts_s=60)
    for name in ("agent:x", "turn:blocked"):
        with pytest.raises(TaskNotFound):
            at.client.get(name)
    assert list(at.client.list()) == []


def test_a_task_whose_time_to_live_is_over_is_gone_for_readers(at: Setting) -> None:
    task = at.succeed(at.client.enqueue("test.build", {}))
    at.clock.advance(999)
    assert at.client.get(task).status is Status.SUCCESS
    at.clock.advance(2)
    with pytest.raises(TaskNotFound):
        at.client.get(task)


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.FAILED, Status.DONE])
def test_a_wait_ends_with_the_task_whatever_its_end(at: Setting, status: Status) -> None:
    task = at.in_status(status)
    assert at.client.wait(task, timeout_s=0).status is status
    assert asyncio.run(at.client.wait_async(task.id, timeout_s=0)).status is status


@pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.BLOCKED])
def test_a_wait_has_an_end_and_the_task_goes_on(at: Setting, status: Status) -> None:
    task = at.in_status(status)
    with pytest.raises(WaitTimeout, match=f"is still {status} after 0.06 s; it goes on"):
        at.client.wait(task, timeout_s=0.06)
    with pytest.raises(WaitTimeout):
        asyncio.run(at.client.wait_async(task, timeout_s=0.06))
    assert at.client.get(task).status is status


def test_a_wait_notices_the_end_soon(at: Setting) -> None:
    task = at.client.enqueue("test.build", {})
    thread = threading.Timer(0.1, lambda: at.succeed(task, '"done"'))
    thread.start()
    assert at.client.wait(task, timeout_s=LONG_S).result == "done"
    thread.join(LONG_S)


def test_a_coroutine_that_waits_leaves_the_loop_to_others(at: Setting) -> None:
    task = at.client.enqueue("test.build", {})

    async def both() -> Task:
        waiting = asyncio.create_task(at.client.wait_async(task, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await asyncio.to_thread(at.succeed, task)
        return await waiting

    assert asyncio.run(both()).status is Status.SUCCESS


# List


def several(at: Setting) -> dict[str, Task]:
    """Tasks of two queues, one a second, of which two have ended."""
    tasks = {}
    for number, queue in enumerate(["default", "reports", "default", "reports", "default"]):
        tasks[f"t{number}"] = at.client.enqueue("test.build", {}, task_id=f"t{number}", queue=queue)
        at.clock.advance(1)
    at.succeed(tasks["t1"])
    at.fail(tasks["t2"])
    return tasks


def ids(tasks: Iterator[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_tasks_are_listed_newest_first_or_oldest_first(at: Setting) -> None:
    several(at)
    assert ids(at.client.list()) == ["t4", "t3", "t2", "t1", "t0"]
    assert ids(at.client.list(newest_first=False)) == ["t0", "t1", "t2", "t3", "t4"]
    assert ids(at.client.list(limit=2)) == ["t4", "t3"]


def test_tasks_are_listed_by_status_and_by_queue(at: Setting) -> None:
    several(at)
    assert ids(at.client.list(status=Status.PENDING)) == ["t4", "t3", "t0"]
    assert ids(at.client.list(status="PENDING", queue="reports")) == ["t3"]
    assert ids(at.client.list(queue="default", newest_first=False)) == ["t0", "t2", "t4"]
    assert ids(at.client.list(status=Status.SUCCESS, queue="default")) == []
    assert ids(at.client.list(queue="nowhere")) == []
    with pytest.raises(ConfigurationError, match="NOPE"):
        at.client.list(status="NOPE")


def test_shards_of_a_queue_are_one_list(at: Setting) -> None:
    client = Client(at.store, settings(shards=5))
    for number in range(30):
        client.enqueue("test.build", {}, task_id=f"t{number:02}", queue="reports")
        at.clock.advance(1)
    assert len(at.engine.lanes()) == 5
    assert ids(client.list(queue="reports", newest_first=False)) == [f"t{number:02}" for number in range(30)]


def test_pages_are_read_as_they_are_asked_for(at: Setting) -> None:
    at.client.enqueue_many("test.build", [{"n": n} for n in range(350)])
    at.engine.pages = 0
    tasks = at.client.list(status="PENDING", limit=None)
    assert at.engine.pages == 0
    assert len([next(tasks) for _ in range(90)]) == 90
    assert at.engine.pages == 1
    assert len(list(tasks)) == 260
    assert at.engine.pages == 4


def test_what_left_its_status_since_its_page_was_read_is_left_out(at: Setting) -> None:
    tasks = at.client.enqueue_many("test.build", [{"n": n} for n in range(3)])
    entries = at.client.list(status="PENDING", newest_first=False)
    at.succeed(tasks[1].task)
    assert tasks[1].task.id not in ids(entries)


# Cancel


@pytest.mark.parametrize("status", [Status.PENDING, Status.BLOCKED])
def test_a_waiting_task_is_closed_at_once(at: Setting, status: Status) -> None:
    task = at.client.cancel(at.in_status(status))
    assert (task.status, task.done_reason) == (Status.DONE, "cancelled")
    assert task.waiting_for == frozenset()
    assert task.expire_at is not None
    assert at.client.cancel(task) == task


def test_of_a_running_task_its_agent_is_asked(at: Setting) -> None:
    task = at.client.cancel(at.in_status(Status.RUNNING))
    assert (task.status, task.cancel_requested, task.lease_owner) == (Status.RUNNING, True, "agent")
    assert at.client.cancel(task) == task


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.FAILED])
def test_what_has_ended_cannot_be_cancelled(at: Setting, status: Status) -> None:
    with pytest.raises(NotAllowed, match=f"has ended as {status}: nothing is left to cancel"):
        at.client.cancel(at.in_status(status))


def test_what_is_done_is_done(at: Setting) -> None:
    task = at.in_status(Status.DONE)
    assert at.client.cancel(task) == task


def test_a_cancel_that_loses_a_race_looks_again(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    task = at.client.enqueue("test.build", {})
    real, raced = at.client.store.write_tasks, list[int]()

    def apply(batch: Any) -> Any:
        if not raced:
            raced.append(1)
            at.claim(task)
        return real(batch)

    monkeypatch.setattr(at.client.store, "write_tasks", apply)
    after = at.client.cancel(task)
    assert (after.status, after.cancel_requested) == (Status.RUNNING, True)


def test_children_of_a_cancelled_task_are_told(at: Setting) -> None:
    parent = at.client.enqueue("test.parent", {})
    fails = at.client.enqueue("test.child", {}, depends_on=[parent])
    runs = at.client.enqueue("test.child", {}, depends_on=[parent], on_parent_failure="run")
    closes = at.client.enqueue("test.child", {}, depends_on=[parent], on_parent_failure="cancel")
    at.client.cancel(parent)
    assert [at.client.get(one).status for one in (fails, runs, closes)] == ["FAILED", "PENDING", "DONE"]


# Retry


@pytest.mark.parametrize("status", [Status.FAILED, Status.DONE])
def test_what_failed_or_was_closed_is_put_back_with_fresh_budgets(at: Setting, status: Status) -> None:
    before = at.in_status(status)
    at.clock.advance(60)
    at.woken.clear()
    after = at.client.retry(before)
    assert (after.status, after.retry_count, after.crash_count) == (Status.PENDING, 0, 0)
    assert after.created_at == at.clock.now()
    assert after.submitted_at == before.submitted_at
    assert (after.finished_at, after.expire_at, after.error, after.done_reason) == (None, None, None, None)
    assert not after.cancel_requested
    assert after.fence == before.fence == 1
    assert at.woken == [1]
    assert at.succeed(after).fence == 2


def test_a_retry_keeps_the_history_of_errors(at: Setting) -> None:
    task = at.fail(at.client.enqueue("test.build", {}), "ValueError: first")
    task = at.fail(at.client.retry(task), "ValueError: second")
    assert [entry["error"] for entry in at.client.retry(task).errors] == ["ValueError: first", "ValueError: second"]


@pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.BLOCKED, Status.SUCCESS])
def test_nothing_else_can_be_retried(at: Setting, status: Status) -> None:
    with pytest.raises(NotAllowed, match=f"is {status}: only FAILED and DONE can be retried"):
        at.client.retry(at.in_status(status))


def test_a_child_whose_parent_has_not_succeeded_is_not_retried_alone(at: Setting) -> None:
    parent = at.client.enqueue("test.parent", {}, task_id="parent")
    child = at.client.enqueue("test.child", {}, depends_on=[parent])
    at.client.cancel(parent)
    with pytest.raises(NotAllowed, match="depends on 'parent', which is DONE: retry that first"):
        at.client.retry(child)
    at.client.retry(parent)
    assert at.client.retry(child).status is Status.BLOCKED
    assert at.client.get(parent).dependents == frozenset({child.id})


def test_of_two_who_retry_one_is_told_of_the_other(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    task = at.in_status(Status.FAILED)
    at.client.retry(task)
    at.clock.advance(1)
    monkeypatch.setattr(at.client, "get", lambda _: task)
    with pytest.raises(NotAllowed, match="has changed meanwhile"):
        at.client.retry(task)


# Purge


def test_only_what_has_ended_is_purged(at: Setting) -> None:
    kept = [at.in_status(status) for status in (Status.PENDING, Status.RUNNING, Status.BLOCKED, Status.FAILED)]
    gone = [at.in_status(Status.SUCCESS) for _ in range(3)]
    assert at.client.purge("SUCCESS") == 3
    for task in gone:
        with pytest.raises(TaskNotFound):
            at.client.get(task)
    assert [at.client.get(task) for task in kept] == kept
    for status in (Status.PENDING, Status.RUNNING, Status.BLOCKED):
        with pytest.raises(NotAllowed, match="have not ended: cancel them first"):
            at.client.purge(status)


def test_a_purge_may_be_of_one_queue_of_old_ones_and_of_a_number(at: Setting) -> None:
    for queue in ("default", "reports"):
        for _ in range(5):
            at.succeed(at.client.enqueue("test.build", {}, queue=queue))
            at.clock.advance(10)
    assert at.client.purge(Status.SUCCESS, queue="reports", older_than_s=25) == 3
    assert at.client.purge(Status.SUCCESS, limit=2) == 2
    assert at.engine.count(Lane("reports").value("SUCCESS")) + at.engine.count("SUCCESS") == 5
    assert at.client.purge(Status.SUCCESS) == 5
    assert at.client.purge(Status.SUCCESS) == 0


def test_a_purge_of_more_than_a_page_deletes_all(at: Setting) -> None:
    for one in at.client.enqueue_many("test.build", [{"n": n} for n in range(250)]):
        at.client.cancel(one.task)
    assert at.client.purge("DONE") == 250


# Stats


def test_queues_are_counted(at: Setting) -> None:
    for _ in range(3):
        at.client.enqueue("test.job", {})
    at.clock.advance(12.5)
    at.client.enqueue("test.job", {}, delay_s=60)
    at.in_status(Status.FAILED)
    at.claim(at.client.enqueue("test.job", {}))
    at.client.enqueue("test.job", {}, queue="reports", depends_on=[at.client.enqueue("test.job", {}, queue="reports")])
    default, reports = at.client.stats()
    assert (default.queue, default.ready, default.delayed, default.running, default.blocked, default.failed) == (
        "default",
        3,
        1,
        1,
        0,
        1,
    )
    assert default.oldest_ready_s == 12.5
    assert (reports.queue, reports.ready, reports.blocked, reports.oldest_ready_s) == ("reports", 1, 1, 0)
    assert (default.agents, default.unknown_jobs) == (0, ())


def test_jobs_that_no_agent_of_a_queue_has_are_named(at: Setting) -> None:
    at.client.enqueue("test.job", {})
    at.client.enqueue("test.typo", {})
    at.client.enqueue("test.job", {}, queue="unserved")
    at.store.announce("one", {"queues": {"default": 3, "idle": 1}, "jobs": ["test.job"]}, lives_s=60)
    default, idle, unserved = at.client.stats()
    assert (default.agents, default.unknown_jobs) == (1, ("test.typo",))
    assert (idle.queue, idle.ready, idle.agents) == ("idle", 0, 1)
    assert (unserved.queue, unserved.ready, unserved.agents, unserved.unknown_jobs) == ("unserved", 1, 0, ())
    at.clock.advance(61)
    assert [one.agents for one in at.client.stats()] == [0, 0]


def test_nothing_is_an_answer_too(at: Setting) -> None:
    assert list(at.client.stats()) == []
    assert list(at.client.agents.list()) == []
    assert list(at.client.list()) == []


def test_a_client_may_be_made_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_STORE", "sqlite://:memory:")
    monkeypatch.setenv("THUNDERAGENT_MAX_RETRY", "9")
    client = Client.from_settings()
    assert client.enqueue(a_job(), {}).max_retry == 9
    client.close()
    with pytest.raises(ConfigurationError, match="neither sqlite:// nor dynamodb://"):
        Client.from_settings(store="redis://localhost")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"delay_s": float("inf")}, "delay_s is inf; use a number of seconds"),
        ({"run_at": 1_800_000_000_000.0}, "epoch seconds"),
        ({"run_at": float("nan")}, "epoch seconds"),
        ({"max_retry": -1}, "max_retry is -1"),
        ({"on_parent_failure": "explode"}, "explode"),
        ({"queue": "a b"}, "a b"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], problem: str) -> None:
    client = memory_client()
    with pytest.raises(ConfigurationError, match=problem):
        client.enqueue("test.job", {}, **options)
    assert list(client.list()) == []


def test_a_single_parent_may_be_named_by_its_id() -> None:
    client = memory_client()
    parent = client.enqueue("test.job", {})
    assert client.enqueue("test.job", {}, depends_on=parent.task_id).depends_on == (parent.task_id,)


def test_a_heartbeat_that_does_not_fit_the_lease_of_the_settings_is_refused_at_the_start() -> None:
    @job("test.eager", heartbeat_s=200)
    def eager(ctx: Context, payload: None) -> None:
        raise NotImplementedError

    client = memory_client()
    with pytest.raises(ConfigurationError, match=r"heartbeat_s of 'test.eager' is 200"):
        Agent(client.store, Registry(eager), client.settings)
