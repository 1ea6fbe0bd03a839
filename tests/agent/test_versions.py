"""Old and new code side by side on one store: nothing is discarded, nothing fails, and nothing is claimed in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import stands
from tests.support.engine import EPOCH, Stage, claimed, serving, settings
from tests.support.version_jobs import NAME, New, Old, from_1_to_2, isolated, new_job, old_job
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.periodic import periodic
from thunderagent.model import events, queue_events
from thunderagent.model.errors import ConfigurationError, DuplicateTask
from thunderagent.model.task import Status, Task
from thunderagent.model.ticks import every
from thunderagent.model.writes import tasks as writes
from thunderagent.ops.waiting import why
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.queue.pause_commands import doubt
from thunderagent.queue.stats import queue_stats
from thunderagent.stores.tasks import AgentInfo
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock, memory_store

OLD = Old(month="2026-07")
NEW = New(year=2026, month=7)


class Fleet:
    """Agents of several deploys over one store."""

    def __init__(self, stand: stands.Stand) -> None:
        self.stand = stand
        self.store = stand.open()
        self.client = Client(self.store, settings())
        self._agents = ExitStack()

    def agent(self, *jobs: Job[Any], **changes: Any) -> Stage:
        """An agent with this code, in a thread."""
        return self._agents.enter_context(serving(*jobs, store=self.stand.open(), **changes))

    def stop(self) -> None:
        """Stop all agents."""
        self._agents.close()

    def ends(self, tasks: list[Task]) -> list[Task]:
        return [self.client.wait(task, timeout_s=60.0) for task in tasks]


@pytest.fixture(params=["sqlite-file", pytest.param("ministack", marks=pytest.mark.ministack)])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as stand:
        made = Fleet(stand)
        try:
            yield made
        finally:
            made.stop()


def untouched(task: Task) -> bool:
    """Nobody has claimed it, and nothing of it is used up."""
    return (task.status, task.fence, task.retry_count, task.crash_count, task.errors) == (Status.PENDING, 0, 0, 0, ())


# A rolling deploy, on both engines


@pytest.mark.slow
def test_old_and_new_agents_side_by_side_run_what_old_and_new_producers_put(fleet: Fleet) -> None:
    many = 40 if fleet.stand.name == "ministack" else 150
    old, new = fleet.agent(old_job()), fleet.agent(new_job())
    tasks: dict[str, list[Task]] = {}

    def produce(which: str, one: Job[Any], payload: Any, client: Client) -> None:
        put = [answer.task for answer in client.enqueue_many(one, [payload] * many)]
        tasks[which] = [*put, *(client.enqueue(one, payload, depends_on=[put[0], parent]) for parent in put[-5:])]

    producers = [
        threading.Thread(target=produce, args=("old", old_job(), OLD, old.client)),
        threading.Thread(target=produce, args=("new", new_job(), NEW, new.client)),
    ]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(60)
    crossed = [
        fleet.client.enqueue(new_job(), NEW, depends_on=tasks["old"][:2]),
        fleet.client.enqueue(old_job(), OLD, depends_on=tasks["new"][:2]),
    ]
    ended = fleet.ends([*tasks["old"], *tasks["new"], *crossed])
    assert len(ended) == 2 * (many + 5) + 2
    assert {(one.status, one.attempt, one.errors) for one in ended} == {(Status.SUCCESS, 1, ())}
    assert {one.result["month"] for one in ended} == {"2026-07"}
    by = {(one.version, one.result["by"]) for one in ended}
    assert by <= {(1, 1), (1, 2), (2, 2)}
    assert (2, 2) in by
    fleet.stop()
    assert old.record.of(events.SettleRefused) == new.record.of(events.SettleRefused) == []


@pytest.mark.slow
def test_after_a_rollback_tasks_of_new_code_wait_untouched_and_the_rest_goes_on(fleet: Fleet) -> None:
    waiting = [answer.task for answer in fleet.client.enqueue_many(new_job(), [NEW] * 120)]
    old = fleet.agent(old_job())
    [told] = old.record.wait(events.UnknownJobsSeen)
    assert told.jobs == (f"{NAME}@2",)
    behind = [answer.task for answer in fleet.client.enqueue_many(old_job(), [OLD] * 10)]
    assert {one.result["by"] for one in fleet.ends(behind)} == {1}
    old.record.wait(events.Polled, len(old.record.of(events.Polled)) + 3)
    assert sum(one.tried for one in old.record.of(events.Polled)) == 10  # no claim in vain
    assert all(untouched(task) for task in fleet.store.get([task.task_id for task in waiting]).values())
    fleet.agent(new_job())
    assert {one.result["by"] for one in fleet.ends(waiting)} == {2}


@pytest.mark.slow
def test_a_limit_is_one_whatever_the_version(fleet: Fleet) -> None:
    guard, running, most = threading.Lock(), 0, 0

    def count(ctx: Context, payload: Any) -> None:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        ctx.wait(0.01)
        with guard:
            running -= 1

    def old(ctx: Context, payload: Old) -> None:
        count(ctx, payload)

    def new(ctx: Context, payload: New) -> None:
        count(ctx, payload)

    old_code = job(NAME, limit=2)(old)
    new_code = job(NAME, limit=2, version=2, upcasters={1: from_1_to_2})(new)
    fleet.agent(old_code)
    fleet.agent(new_code)
    put = []
    for _ in range(10):
        put += [fleet.client.enqueue(old_code, OLD), fleet.client.enqueue(new_code, NEW)]
    assert {one.status for one in fleet.ends(put)} == {Status.SUCCESS}
    assert most <= 2


def test_a_unique_key_is_one_whatever_the_version(fleet: Fleet) -> None:
    first = fleet.client.enqueue(old_job(), OLD, unique_key="july")
    assert fleet.client.enqueue(new_job(), NEW, unique_key="july").task_id == first.task_id
    fleet.agent(new_job())
    assert fleet.ends([first])[0].result["by"] == 2
    second = fleet.client.enqueue(new_job(), NEW, unique_key="july", task_id="mine")
    assert second.task_id != first.task_id
    assert fleet.ends([second])[0].version == 2


def test_one_id_put_by_old_and_new_code_is_one_task(fleet: Fleet) -> None:
    first = fleet.client.enqueue(old_job(), OLD, task_id="july")
    again = fleet.client.enqueue(new_job(), NEW, task_id="july")
    assert (again.task_id, again.version) == (first.task_id, 1)
    [answer] = fleet.client.enqueue_many(new_job(), [NEW], task_ids=["july"])
    assert (answer.created, answer.error) == (False, None)
    with pytest.raises(DuplicateTask):
        fleet.client.enqueue(old_job(), Old(month="2026-08"), task_id="july")


@pytest.mark.slow
def test_a_lost_agents_task_of_new_code_is_not_taken_over_by_old_code(fleet: Fleet) -> None:
    lease = claimed(fleet.store, "lost", job=NAME, version=2, payload_text=NEW.model_dump_json(), lease_s=0.01)
    assert lease.task.version == 2
    old = fleet.agent(old_job(), clock_guard_s=0.0)
    fleet.ends([fleet.client.enqueue(old_job(), OLD)])
    old.record.wait(events.Polled, len(old.record.of(events.Polled)) + 10)
    assert fleet.client.get("lost").fence == 1
    new = fleet.agent(new_job(), clock_guard_s=0.0)
    assert fleet.ends([fleet.client.get("lost")])[0].result["by"] == 2
    assert len(new.record.of(events.TaskTakenOver)) == 1
    assert old.record.of(events.TaskTakenOver) == []


# What else looks at the job of a task


def test_a_name_without_code_is_a_task_of_the_first_version_unless_it_says_more() -> None:
    with serving(new_job()) as stage:
        plain = stage.client.enqueue(NAME, {"month": "2026-07"})
        named = stage.client.enqueue(f"{NAME}@2", {"year": 2026, "month": 7}, limit=3, unique_key="july")
        assert (plain.version, plain.job) == (1, NAME)
        assert (named.version, named.job, named.limit_key) == (2, NAME, NAME)
        assert stage.end_of(plain).result == stage.end_of(named).result == {"by": 2, "month": "2026-07"}
        [wrong] = stage.client.enqueue_many(f"{NAME}@2", [{"year": {1}}])  # no JSON
        assert wrong.error is not None
        with pytest.raises(ConfigurationError, match="write name@2"):
            stage.client.enqueue(f"{NAME}@0", {})


def test_an_upcaster_that_fails_ends_its_task_with_a_name_and_a_place() -> None:
    with serving(new_job()) as stage:
        ended = stage.end_of(stage.client.enqueue(NAME, {"month": "no month"}))
        assert (ended.status, ended.attempt) == (Status.FAILED, 1)
        assert ended.error is not None
        assert f"the upcaster of '{NAME}' from version 1 failed: ValueError at " in ended.error


def test_a_coroutine_gets_its_payload_brought_up() -> None:
    async def build(ctx: Context, payload: New) -> int:
        return payload.year

    with serving(job(NAME, version=2, upcasters={1: from_1_to_2})(build)) as stage:
        assert stage.end_of(stage.client.enqueue(old_job(), OLD)).result == 2026


@pytest.mark.slow
def test_a_child_process_gets_its_payload_brought_up() -> None:
    with serving(isolated) as stage:
        ended = stage.end_of(stage.client.enqueue("report.isolated", {"month": "2026-07"}))
        assert ended.result == {"by": 2, "month": "2026-07"}


@pytest.mark.slow
def test_a_child_process_with_older_code_than_its_agent_leaves_the_task_alone() -> None:
    newer = replace(isolated, version=3, upcasters={**isolated.upcasters, 2: dict})
    with serving(newer) as stage:
        task = stage.client.enqueue(newer, NEW)
        [snoozed] = stage.record.wait(events.TaskSnoozed)
        assert snoozed.task_id == task.task_id
        after = stage.client.get(task)
        assert (after.status, after.retry_count, after.errors) == (Status.PENDING, 0, ())
        assert after.created_at > stage.store.clock.now() + 30


def test_a_pause_holds_every_version_of_a_job() -> None:
    with serving(new_job(), job("other")(lambda_handler)) as stage:
        stage.client.pauses.pause(job=new_job())
        stage.record.wait(events.Paused)
        held = [stage.client.enqueue(old_job(), OLD), stage.client.enqueue(new_job(), NEW)]
        stage.end_of(stage.client.enqueue("other", {}))
        stage.record.wait(events.Polled, len(stage.record.of(events.Polled)) + 3)
        assert all(untouched(stage.client.get(task)) for task in held)
        stage.client.pauses.resume(job=NAME)
        assert {stage.end_of(task).status for task in held} == {Status.SUCCESS}
        with pytest.raises(ConfigurationError, match="a pause is of all versions of a job"):
            stage.client.pauses.pause(job=f"{NAME}@2")


def lambda_handler(ctx: Context, payload: dict[str, Any]) -> None:
    """Does nothing."""


def test_a_pause_of_a_job_that_agents_have_in_another_version_is_no_mistake() -> None:
    with serving(new_job(upcasters={})) as stage:
        stands.eventually(stage.client.agents.list)
        assert doubt(stage.store, stage.client.pauses.pause(job=NAME)) is None
        assert doubt(stage.store, stage.client.pauses.pause(job="report.biuld")) is not None


def test_agents_of_all_versions_share_the_ticks_of_a_job() -> None:
    @periodic(every(10).minutes, payload=NEW)
    @job(NAME, version=2)
    def build(ctx: Context, payload: New) -> None: ...

    with serving(build) as stage:
        ticks = stage.agent._housekeeping._ticks
        ticks.learn([AgentInfo("another", 0.0, 0.0, {"jobs": [f"{NAME}@3"], "queues": {}})])
        assert "another" in ticks._others[NAME]


@pytest.mark.slow
def test_of_an_id_in_the_line_of_a_limit_new_code_takes_its_own() -> None:
    """The next in the line is of new code: old code, which frees the slot, does not take it and is not held up."""
    store = memory_store()
    gate = threading.Event()

    def build(ctx: Context, payload: Old) -> None:
        gate.wait(30)

    old_code = job(NAME, limit=1)(build)
    with serving(old_code, store=store) as old:
        first = old.client.enqueue(old_code, OLD)
        old.record.wait(events.TaskStarted)
        second = old.client.enqueue(new_job(limit=1), NEW)
        third = old.client.enqueue(old_code, OLD)
        assert (second.waitlist, second.version, third.waitlist) == (NAME, 2, NAME)
        gate.set()
        assert {old.end_of(first).status, old.end_of(third).status} == {Status.SUCCESS}
        assert old.client.get(second).fence == 0
        with_new = Stage((new_job(limit=1),), store=store)
        with_new.start()
        try:
            assert old.end_of(second).result["by"] == 2
        finally:
            with_new.stop()


def test_agents_tell_the_versions_that_they_take_and_operators_are_told_what_is_missing() -> None:
    with serving(old_job()) as stage:
        task = stage.client.enqueue(new_job(), NEW)
        stage.record.wait(events.UnknownJobsSeen)
        [agent] = stage.client.agents.list()
        assert agent.info["jobs"] == [NAME]
        [numbers] = [one for one in queue_stats(stage.store) if one.queue == "default"]
        assert numbers.unknown_jobs == (f"{NAME}@2",)
        [reason] = why(stage.store, stage.client.get(task))
        assert f"has version 2 of the job {NAME}: it is served by {agent.name}" in reason
    with serving(new_job()) as stage:
        stage.end_of(stage.client.enqueue(NAME, {"month": "2026-07"}))
        [agent] = stage.client.agents.list()
        assert agent.info["jobs"] == [NAME, f"{NAME}@2"]


def test_old_tasks_wait_for_old_code_where_no_upcaster_leads_from_them() -> None:
    with serving(new_job(upcasters={})) as stage:
        old = stage.client.enqueue(old_job(), OLD)
        assert stage.end_of(stage.client.enqueue(new_job(), NEW)).result["by"] == 2
        stage.record.wait(events.UnknownJobsSeen, where=lambda event: event.jobs == (NAME,))
        assert untouched(stage.client.get(old))


def test_a_tick_is_of_the_version_of_the_code_that_gave_the_schedule() -> None:
    @periodic(every(10).minutes, payload=OLD)
    @job(NAME)
    def old_code(ctx: Context, payload: Old) -> int:
        return 1

    @periodic(every(10).minutes, payload=NEW)
    @job(NAME, version=2, upcasters={1: from_1_to_2})
    def new_code(ctx: Context, payload: New) -> int:
        return payload.month

    clock = FakeClock(EPOCH)
    store = memory_store(clock)
    client = Client(store, settings())

    def tick(*jobs: Job[Any]) -> Task:
        """The task of the next tick, put by the first of these that comes to it, each of which has just started."""
        stages = [Stage((one,), store=store) for one in jobs]
        for stage in stages:
            stage.start()
            stage.record.wait(events.AgentStarted)
        clock.advance(600)
        for stage in stages:
            stage.agent.wake()
        [put] = stages[-1].record.wait(queue_events.TickPut) if len(stages) == 1 else [any_tick(stages)]

        def look() -> Task | None:
            for stage in stages:  # on a clock that stands still no agent looks again by itself
                stage.agent.wake()
            task = client.get(put.task_id)
            return task if task.status.is_terminal else None

        ended = stands.eventually(look)
        for stage in stages:
            stage.stop()
        return ended

    def any_tick(stages: list[Stage]) -> queue_events.TickPut:
        return stands.eventually(
            lambda: next((one for stage in stages for one in stage.record.of(queue_events.TickPut)), None)
        )

    assert (tick(old_code).version, tick(old_code).result) == (1, 1)
    assert tick(new_code).version == 2
    mixed = tick(old_code, new_code)
    assert mixed.status is Status.SUCCESS
    assert client.schedules.run_now(new_code).version in (1, 2)
    assert tick(new_code).result == 7


@pytest.mark.slow
def test_a_stream_of_new_code_is_left_by_old_code_and_one_of_old_code_is_brought_up() -> None:
    async def old(ctx: StreamContext, payload: Old) -> str:
        return payload.month

    async def new(ctx: StreamContext, payload: New) -> int:
        return payload.month

    old_code = stream("ticker.follow")(old)
    new_code = stream("ticker.follow", version=2, upcasters={1: from_1_to_2})(new)
    store = memory_store()
    with serving(old_code, store=store, max_streams=10) as stage:
        held = stage.client.enqueue(new_code, NEW, task_id="new")
        assert stage.end_of(stage.client.enqueue(old_code, OLD, task_id="old")).result == "2026-07"
        stage.record.wait(events.Polled, len(stage.record.of(events.Polled)) + 3)
        assert untouched(stage.client.get(held))
        with_new = Stage((new_code,), store=store, max_streams=10)
        with_new.start()
        try:
            assert stage.end_of(held).result == 7
        finally:
            with_new.stop()
    with serving(new_code, max_streams=10) as stage:
        assert stage.end_of(stage.client.enqueue(old_code, OLD)).result == 7


def test_a_ring_of_newer_code_wins_nothing() -> None:
    """What a doorbell tells of a version that an agent does not have is not even tried."""
    with serving(old_job()) as stage:
        task = stage.client.enqueue(new_job(), NEW, delay_s=0.0)
        assert not stage.agent._in_flight.selector.inbox.has_room(DoorbellMessage.task(task))
        stage.agent._in_flight.selector.inbox.receive(DoorbellMessage.task(task))
        stage.agent.wake()
        stage.record.wait(events.UnknownJobsSeen)
        assert untouched(stage.client.get(task))
        stage.agent._in_flight.selector.inbox.receive(DoorbellMessage.task(replace(task, version=1)))  # forged
        stage.agent.wake()
        stage.record.wait(events.Polled, len(stage.record.of(events.Polled)) + 3)
        assert untouched(stage.client.get(task))


def test_a_ring_of_any_version_that_an_agent_takes_is_followed() -> None:
    with serving(new_job(), slots=5) as stage:
        inbox = stage.agent._in_flight.selector.inbox
        stage.record.wait(events.Polled)
        cases: list[tuple[Job[Any], Any]] = [(old_job(), OLD), (new_job(), NEW)]
        for one, payload in cases:
            task = Client(stage.store, stage.settings).enqueue(one, payload)  # nobody is woken by it
            assert inbox.has_room(DoorbellMessage.task(task))
            inbox.receive(DoorbellMessage.task(task))
            stage.end_of(task)
        assert not inbox.has_room(DoorbellMessage.task(replace(task, version=3)))


def test_a_retry_by_hand_keeps_the_version() -> None:
    store = memory_store()
    lease = claimed(store, "a", job=NAME, version=2, payload_text="{}")
    store.settle([writes.fail(lease, error="no", now=store.clock.now(), expire_at=EPOCH * 2)])
    assert Client(store, settings()).retry("a").job_value == f"{NAME}@2"
