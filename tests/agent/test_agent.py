"""A whole agent on a store in memory: what becomes of tasks, and how it stops."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engine import LONG_S, Stage, a_job, put, seen, serving, settings
from tests.support.stands import eventually
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Returned
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreUnavailable, TableMissing
from thunderagent.model.task import Lane, Status
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import memory_store

Payload = dict[str, Any]


class Gate:
    """A handler that says how many are inside, and lets them go when it is opened."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, ctx: Context, payload: Payload) -> str:
        self.inside.release()
        assert self.open.wait(LONG_S)
        return "done"

    def wait(self, number: int = 1) -> None:
        """Until so many more are inside."""
        for _ in range(number):
            assert self.inside.acquire(timeout=LONG_S)


def gated(gate: Gate, name: str = "test.gated", **options: Any) -> Any:
    def handler(ctx: Context, payload: Payload) -> str:
        return gate(ctx, payload)

    return job(name, **options)(handler)


@job("test.echo")
def echo(ctx: Context, payload: Payload) -> Payload:
    return payload


# Ends of a task


def test_a_task_runs_to_its_end_and_its_row_tells_the_story() -> None:
    with serving(echo) as stage:
        task = stage.client.enqueue(echo, {"n": 1})
        after = stage.end_of(task)
        assert (after.status, after.result, after.attempt, after.fence) == (Status.SUCCESS, {"n": 1}, 1, 1)
        assert after.lease_owner is None
        assert after.lock_time is None
        assert after.last_agent == stage.agent.name
        assert after.started_at is not None
        assert after.finished_at is not None
        assert after.submitted_at <= after.started_at <= after.finished_at
        assert after.expire_at == pytest.approx(after.finished_at + 14 * 86400, abs=2)
        [started] = stage.record.wait(events.TaskStarted)
        [ended] = stage.record.wait(events.TaskSucceeded)
        assert (started.task_id, ended.task_id) == (task.id, task.id)


def test_threads_coroutines_and_the_loop_all_settle() -> None:
    @job("test.async")
    async def coroutine(ctx: Context, payload: Payload) -> str:
        await asyncio.sleep(0)
        return "async"

    with serving(echo, coroutine) as stage:
        tasks = [stage.client.enqueue(one, {}) for one in (echo, coroutine) for _ in range(10)]
        assert {stage.end_of(task).status for task in tasks} == {Status.SUCCESS}


def test_a_handler_that_fails_is_tried_again_after_a_pause_and_its_errors_are_kept() -> None:
    @job("test.fails_twice")
    def fails_twice(ctx: Context, payload: Payload) -> int:
        if ctx.attempt < 3:
            raise ConnectionError(f"attempt {ctx.attempt}")
        return ctx.attempt

    with serving(fails_twice) as stage:
        after = stage.end_of(stage.client.enqueue(fails_twice, {}))
        assert (after.status, after.result, after.retry_count, after.fence) == (Status.SUCCESS, 3, 2, 3)
        assert [entry["error"].splitlines()[0] for entry in after.errors] == [
            "ConnectionError: attempt 1",
            "ConnectionError: attempt 2",
        ]
        assert [entry["attempt"] for entry in after.errors] == [1, 2]
        retried = stage.record.wait(events.TaskRetried, 2)
        assert [0 <= event.delay_s <= bound for event, bound in zip(retried, (0.01, 0.02), strict=True)] == [True] * 2


def test_a_retry_is_not_claimed_before_its_pause_is_over() -> None:
    @job("test.fails_once")
    def fails_once(ctx: Context, payload: Payload) -> None:
        if ctx.attempt == 1:
            raise ValueError

    with serving(fails_once, backoff_base_s=0.6, backoff_cap_s=0.6) as stage:
        stage.agent._core.rng.uniform = lambda a, b: b  # type: ignore[method-assign]
        task = stage.client.enqueue(fails_once, {})
        stage.record.wait(events.TaskRetried)
        failed = stage.client.get(task)
        assert failed.status is Status.PENDING
        after = stage.end_of(task)
        assert after.started_at is not None
        assert after.started_at >= failed.created_at


def test_when_retries_are_used_up_the_task_is_failed() -> None:
    @job("test.fails", max_retry=2)
    def fails(ctx: Context, payload: Payload) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    with serving(fails) as stage:
        after = stage.end_of(stage.client.enqueue(fails, {}))
        assert (after.status, after.retry_count, after.fence) == (Status.FAILED, 2, 3)
        assert after.error is not None
        assert after.error.startswith("ValueError: attempt 3")
        assert len(after.errors) == 3


def test_a_fatal_error_is_not_tried_again() -> None:
    @job("test.fatal", fatal=(LookupError,))
    def fatal(ctx: Context, payload: Payload) -> None:
        raise KeyError("month")

    with serving(fatal) as stage:
        after = stage.end_of(stage.client.enqueue(fatal, {}))
        assert (after.status, after.fence) == (Status.FAILED, 1)


@pytest.mark.slow
def test_a_snooze_costs_no_retry() -> None:
    rounds: list[int] = []

    @job("test.snoozes", max_retry=0)
    def snoozes(ctx: Context, payload: Payload) -> Snooze | int:
        rounds.append(ctx.attempt)
        return Snooze(0.01) if len(rounds) < 6 else ctx.fence

    with serving(snoozes) as stage:
        after = stage.end_of(stage.client.enqueue(snoozes, {}))
        assert (after.status, after.result, after.retry_count) == (Status.SUCCESS, 6, 0)
        assert rounds == [1] * 6
        assert len(stage.record.wait(events.TaskSnoozed, 5)) == 5


@pytest.mark.parametrize(
    ("answer", "status", "field", "reason"),
    [
        (Cancel("not wanted"), Status.DONE, "done_reason", "not wanted"),
        (Fail("no such month"), Status.FAILED, "error", "no such month"),
    ],
)
def test_a_handler_may_close_or_fail_its_task(answer: Any, status: Status, field: str, reason: str) -> None:
    @job("test.answers")
    def answers(ctx: Context, payload: Payload) -> Any:
        return answer

    with serving(answers) as stage:
        after = stage.end_of(stage.client.enqueue(answers, {}))
        assert (after.status, getattr(after, field), after.fence) == (status, reason, 1)


NONSENSE: Final[dict[str, Callable[[], Any]]] = {
    **{f"Snooze({value!r})": partial(Snooze, value) for value in (math.inf, math.nan, 1e200)},
    "Snooze('soon')": lambda: Snooze("soon"),  # type: ignore[arg-type]
    "Cancel(None)": lambda: Cancel(None),  # type: ignore[arg-type]
    "Fail(None)": lambda: Fail(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_an_answer_that_means_nothing_is_an_error_of_its_task_and_not_the_agents_end(
    answer: Callable[[], Any],
) -> None:
    @job("test.nonsense", max_retry=1)
    def nonsense(ctx: Context, payload: Payload) -> Any:
        return answer()

    with serving(nonsense, echo) as stage:
        after = stage.end_of(stage.client.enqueue(nonsense, {}))
        assert after.status is Status.FAILED
        assert after.error is not None
        assert "Error: " in after.error
        assert stage.end_of(stage.client.enqueue(echo, {})).status is Status.SUCCESS


def test_a_result_that_cannot_be_stored_leaves_a_success_with_a_note() -> None:
    @job("test.object")
    def an_object(ctx: Context, payload: Payload) -> Any:
        return object()

    with serving(an_object) as stage:
        after = stage.end_of(stage.client.enqueue(an_object, {}))
        assert (after.status, after.result, after.retry_count) == (Status.SUCCESS, None, 0)
        assert after.error is not None
        assert after.error.startswith("the result was not stored")


def test_a_payload_that_no_longer_fits_fails_without_a_retry() -> None:
    with serving(echo) as stage:
        after = stage.end_of(stage.client.enqueue("test.echo", None))
        assert (after.status, after.fence) == (Status.FAILED, 1)
        assert after.error is not None
        assert "does not fit the job 'test.echo'" in after.error


# Requests to stop


def test_a_running_task_is_cancelled_with_its_next_heartbeat() -> None:
    entered = threading.Event()

    @job("test.waits", lease_s=6, heartbeat_s=0.1)
    def waits(ctx: Context, payload: Payload) -> None:
        entered.set()
        ctx.wait(LONG_S)
        ctx.check()

    with serving(waits) as stage:
        task = stage.client.enqueue(waits, {})
        assert entered.wait(LONG_S)
        assert stage.client.cancel(task).cancel_requested
        after = stage.end_of(task)
        assert (after.status, after.done_reason, after.lease_owner) == (Status.DONE, "cancelled", None)
        assert [event.reason for event in stage.record.wait(events.TaskClosed)] == ["cancelled"]


def test_a_time_limit_is_an_error_that_may_be_tried_again() -> None:
    @job("test.slow", timeout_s=0.1, max_retry=1)
    def slow(ctx: Context, payload: Payload) -> str:
        if ctx.attempt == 1:
            ctx.wait(LONG_S)
            ctx.check()
        return "in time"

    with serving(slow) as stage:
        after = stage.end_of(stage.client.enqueue(slow, {}))
        assert (after.status, after.result, after.retry_count) == (Status.SUCCESS, "in time", 1)
        assert "the time limit of 0.1 s is over" in after.errors[0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("blocks_the_loop", [True, False])
def test_a_run_that_succeeds_long_after_its_time_limit_is_told_of(blocks_the_loop: bool) -> None:
    @job("test.blocks", timeout_s=0.1)
    async def blocks(ctx: Context, payload: Payload) -> str:
        time.sleep(1.8)  # noqa: ASYNC251 # what this is about
        return "late"

    @job("test.deaf", timeout_s=0.1)
    def deaf(ctx: Context, payload: Payload) -> str:
        time.sleep(1.8)
        return "late"

    one = blocks if blocks_the_loop else deaf
    with serving(one) as stage:
        after = stage.end_of(stage.client.enqueue(one, {}))
        [event] = stage.record.wait(events.TaskOverran)
        assert (event.job, event.reason, after.retry_count) == (one.name, "the time limit of 0.1 s is over", 0)
        assert 1.8 <= event.seconds < LONG_S


def test_progress_is_seen_while_the_task_runs() -> None:
    @job("test.progress", lease_s=6, heartbeat_s=0.1)
    def progress(ctx: Context, payload: Payload) -> None:
        ctx.progress({"rows": 5})
        ctx.wait(LONG_S)

    with serving(progress) as stage:
        task = stage.client.enqueue(progress, {})
        assert eventually(lambda: stage.client.get(task).progress) == {"rows": 5}
        stage.client.cancel(task)
        assert stage.end_of(task).progress == {"rows": 5}


# Slots and queues


def test_a_stuck_queue_does_not_starve_another() -> None:
    gate = Gate()
    stuck = gated(gate, queue="stuck")
    with serving(stuck, echo, queues={"stuck": 2, "default": 1}) as stage:
        waiting = [stage.client.enqueue(stuck, {}) for _ in range(5)]
        gate.wait(2)
        tasks = [stage.client.enqueue(echo, {"n": number}) for number in range(20)]
        assert {stage.end_of(task).status for task in tasks} == {Status.SUCCESS}
        assert sorted(stage.client.get(task).status for task in waiting) == ["PENDING"] * 3 + ["RUNNING"] * 2
        gate.open.set()
        assert {stage.end_of(task).status for task in waiting} == {Status.SUCCESS}


@pytest.mark.slow
def test_there_are_never_more_running_rows_than_slots() -> None:
    guard, inside, most = threading.Lock(), 0, 0

    @job("test.counts")
    def counts(ctx: Context, payload: Payload) -> None:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        ctx.wait(0.002)
        with guard:
            inside -= 1

    seen: list[int] = []
    with serving(counts, slots=4) as stage:
        stage.client.enqueue_many(counts, [{} for _ in range(200)])
        while len(stage.record.of(events.TaskSucceeded)) < 200:
            seen.append(stage.store.engine.count("RUNNING"))
            assert stage.agent.running <= 4
            stage.record.wait(events.TaskSucceeded, min(200, len(stage.record.of(events.TaskSucceeded)) + 5))
        assert stage.store.engine.count("SUCCESS") == 200
    assert most == 4
    assert max(seen) <= 4
    assert len(seen) > 10


def test_outcomes_that_come_together_are_written_together_with_the_next_claims() -> None:
    batches: list[list[str]] = []

    class Spying(SqliteEngine):
        def apply(self, batch: Sequence[Write]) -> list[Applied]:
            batches.append([write.verb for write in batch])
            return super().apply(batch)

    meeting = threading.Barrier(8)

    @job("test.together")
    def together(ctx: Context, payload: Payload) -> None:
        meeting.wait(LONG_S)

    with serving(together, store=TaskStore(Spying(MEMORY)), slots=8) as stage:
        stage.client.enqueue_many(together, [{} for _ in range(80)])
        stage.record.wait(events.TaskSucceeded, 80)
    settling = [batch for batch in batches if "succeed" in batch]
    assert sum(batch.count("succeed") for batch in settling) == 80
    assert len(settling) <= 50
    assert any("claim" in batch[batch.index("succeed") :] for batch in settling)
    assert all(batch.index("claim") >= batch.count("succeed") for batch in settling if "claim" in batch)


def test_a_local_enqueue_wakes_the_agent() -> None:
    with serving(echo, poll_min_s=60, poll_max_s=60, poll_idle_s=60, sweep_s=60) as stage:
        stage.record.wait(events.Polled)
        for number in range(3):
            task = stage.client.enqueue(echo, {"n": number})
            assert stage.client.wait(task, timeout_s=10).result == {"n": number}


def test_a_client_of_another_process_is_noticed_at_the_next_poll() -> None:
    with serving(echo) as stage:
        other = Client(stage.store, stage.settings)
        assert stage.end_of(other.enqueue(echo, {})).status is Status.SUCCESS


@pytest.mark.slow
def test_tasks_of_unknown_jobs_are_left_for_another_agent() -> None:
    with serving(echo) as stage:
        unknown = [stage.client.enqueue("test.unknown", {"n": number}) for number in range(120)]
        known = stage.client.enqueue(echo, {})
        assert stage.end_of(known).status is Status.SUCCESS
        [event] = stage.record.wait(events.UnknownJobsSeen)
        assert event.jobs == ("test.unknown",)
        assert {(stage.client.get(task).status, stage.client.get(task).fence) for task in unknown[::10]} == {
            (Status.PENDING, 0)
        }
        before = len(stage.record.of(events.Polled))
        stage.record.wait(events.Polled, before + 5)
        assert len(stage.record.of(events.UnknownJobsSeen)) == 1


def test_the_queues_of_jobs_are_served_and_the_plain_one_for_names_without_code() -> None:
    @job("test.reports", queue="reports")
    def reports(ctx: Context, payload: Payload) -> str:
        return "built"

    with serving(reports) as stage:
        assert stage.end_of(stage.client.enqueue(reports, {})).result == "built"
        assert stage.end_of(stage.client.enqueue("test.reports", {})).result == "built"
        [started] = stage.record.wait(events.AgentStarted)
        assert started.queues == "reports:10, default:10"
        assert started.jobs == ("test.reports",)


def test_tasks_of_every_shard_are_found() -> None:
    with serving(echo, shards=4) as stage:
        tasks = [stage.client.enqueue(echo, {"n": number}) for number in range(40)]
        assert {task.lane.shard for task in tasks} == {0, 1, 2, 3}
        assert {stage.end_of(task).status for task in tasks} == {Status.SUCCESS}


def test_a_lost_agents_task_is_taken_over_by_the_sweep() -> None:
    store = memory_store()
    with serving(echo, store=store, clock_guard_s=0.1) as stage:
        task = put(store, "orphan", job="test.echo", payload_text='{"n":1}', created_at=time.time() + 600)
        row = {
            "status": "RUNNING",
            "fence": 1,
            "hb": 3,
            "leaseOwner": "lost-agent",
            "leaseSec": 1.0,
            "lockTime": time.time() - 60,
            "lastAgent": "lost-agent",
        }
        store.engine.delete([task.to_row()])
        store.engine.put([{**task.to_row(), **row}])
        after = stage.end_of("orphan")
        assert (after.status, after.result, after.crash_count, after.fence) == (Status.SUCCESS, {"n": 1}, 1, 2)
        [event] = stage.record.wait(events.TaskTakenOver)
        assert event.lost_agent == "lost-agent"


def await_sweep(stage: Stage) -> None:
    """Until another sweep is over: the last thing that it does is to heal."""
    rescuer, over = stage.agent._housekeeping._rescuer, threading.Event()
    heal = rescuer.heal

    def healed(lanes: Sequence[Lane]) -> None:
        heal(lanes)
        over.set()

    rescuer.heal = healed  # type: ignore[method-assign]
    assert over.wait(LONG_S)
    rescuer.heal = heal  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_lost_agents_task_waits_for_a_free_slot() -> None:
    gate = Gate()
    with serving(gated(gate), slots=1, clock_guard_s=0.1) as stage:
        busy = stage.client.enqueue("test.gated", {})
        gate.wait()
        lost = put(stage.store, "orphan", job="test.gated", created_at=time.time() + 600)
        [lease] = stage.store.claim([Wanted(seen(lost), 0.001)], owner="lost-agent")
        for _ in range(3):
            await_sweep(stage)
        assert stage.agent.running == 1
        assert stage.client.get("orphan").fence == lease.fence
        gate.open.set()
        assert {stage.end_of(task).status for task in (busy, lost)} == {Status.SUCCESS}


def test_an_outcome_that_is_handed_over_twice_frees_one_slot() -> None:
    gate = Gate()
    with serving(gated(gate), slots=2) as stage:
        first = stage.client.enqueue("test.gated", {})
        gate.wait()
        [held] = stage.agent._in_flight.held.values()
        for _ in range(3):
            stage.agent._in_flight._inbox.done(held, Returned("by hand"))
        assert stage.end_of(first).result == "by hand"
        stage.record.wait(events.TaskSucceeded)
        poller = stage.agent._pollers["default", "batch"]
        assert eventually(lambda: stage.agent.running == 0)
        assert (poller.running, poller.free) == (0, 2)
        gate.open.set()


# Stopping


def test_a_stop_lets_tasks_end_and_claims_no_more() -> None:
    gate = Gate()
    with serving(gated(gate), slots=2) as stage:
        tasks = [stage.client.enqueue("test.gated", {}) for _ in range(5)]
        gate.wait(2)
        stage.agent.stop()
        stage.record.wait(events.AgentDraining)
        gate.open.set()
        stage.join()
        rows = stage.store.get(task.id for task in tasks)
        assert sorted(row.status for row in rows.values()) == ["PENDING"] * 3 + ["SUCCESS"] * 2
        assert stage.stuck == 0
        assert stage.record.of(events.AgentStopped) == [events.AgentStopped(stuck=0)]


def test_a_drain_releases_what_does_not_end_in_time_without_burning_an_attempt() -> None:
    entered = threading.Event()

    @job("test.waits")
    def waits(ctx: Context, payload: Payload) -> None:
        entered.set()
        ctx.wait(LONG_S)
        ctx.check()

    with serving(waits, drain_s=0.1) as stage:
        task = stage.client.enqueue(waits, {})
        assert entered.wait(LONG_S)
        before = stage.client.get(task)
        stage.stop()
        after = stage.client.get(task)
        assert (after.status, after.retry_count, after.crash_count, after.errors) == (Status.PENDING, 0, 0, ())
        assert (after.lease_owner, after.lock_time, after.hb) == (None, None, None)
        assert after.fence == before.fence
        assert after.attempt == 1
        assert [event.task_id for event in stage.record.of(events.TaskReleased)] == [task.id]
        assert stage.stuck == 0


def test_a_coroutine_is_cancelled_by_the_drain_and_its_task_released() -> None:
    entered = threading.Event()

    @job("test.follows")
    async def follows(ctx: Context, payload: Payload) -> None:
        entered.set()
        await asyncio.Event().wait()

    with serving(follows, drain_s=0.0) as stage:
        task = stage.client.enqueue(follows, {})
        assert entered.wait(LONG_S)
        stage.stop()
        assert stage.client.get(task).status is Status.PENDING
        assert stage.stuck == 0


def test_a_handler_that_never_listens_is_left_behind_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.agent.loop.HURRY_S", 0.1)
    gate = Gate()
    with serving(gated(gate), drain_s=0.0) as stage:
        task = stage.client.enqueue("test.gated", {})
        gate.wait()
        stage.stop()
        after = stage.client.get(task)
        assert (after.status, after.retry_count) == (Status.PENDING, 0)
        assert stage.stuck == 1
        assert stage.record.of(events.AgentStopped) == [events.AgentStopped(stuck=1)]
        gate.open.set()


def test_a_second_stop_hurries() -> None:
    entered = threading.Event()

    @job("test.waits")
    def waits(ctx: Context, payload: Payload) -> None:
        entered.set()
        ctx.wait(600)
        ctx.check()

    with serving(waits, drain_s=600, stop_wait_s=700) as stage:
        task = stage.client.enqueue(waits, {})
        assert entered.wait(LONG_S)
        stage.agent.stop()
        stage.record.wait(events.AgentDraining)
        stage.agent.stop()
        stage.join()
        assert stage.client.get(task).status is Status.PENDING


@pytest.mark.slow
def test_the_first_signal_to_an_agent_that_retires_hurries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, entered, end = list[Context](), threading.Event(), threading.Event()

    @job("test.works")
    def works(ctx: Context, payload: Payload) -> None:
        contexts.append(ctx)
        entered.set()
        end.wait(LONG_S)

    with serving(works, drain_s=600, stop_wait_s=700) as stage:
        task = stage.client.enqueue(works, {})
        assert entered.wait(LONG_S)
        stage.agent.retire("somebody asked for it")
        stage.record.wait(events.AgentDraining)
        rounds, gather = threading.Semaphore(0), stage.agent._in_flight.gather

        def counted(pause: float) -> None:
            rounds.release()
            gather(pause)

        monkeypatch.setattr(stage.agent._in_flight, "gather", counted)
        stage.agent.stop()
        for _ in range(3):  # the loop has come round, and seen the signal
            assert rounds.acquire(timeout=LONG_S)
        assert not contexts[0].cancelled
        end.set()
        stage.join()
        assert stage.client.get(task).status is Status.SUCCESS


@pytest.mark.slow
def test_leases_are_kept_alive_during_the_drain() -> None:
    gate = Gate()
    with serving(gated(gate, lease_s=6, heartbeat_s=0.1)) as stage:
        task = stage.client.enqueue("test.gated", {})
        gate.wait()
        stage.agent.stop()
        stage.record.wait(events.AgentDraining)
        beats = stage.client.get(task).hb or 0
        eventually(lambda: (stage.client.get(task).hb or 0) >= beats + 3)
        gate.open.set()
        stage.join()
        assert stage.client.get(task).status is Status.SUCCESS


def test_an_agent_that_stops_while_it_has_nothing_to_do_stops_at_once() -> None:
    with serving(echo, poll_min_s=60, poll_max_s=60, poll_idle_s=60, sweep_s=60) as stage:
        stage.record.wait(events.Polled)
        started = time.monotonic()
        stage.stop()
        assert time.monotonic() - started < LONG_S, "it polls each 60 s"


def test_a_task_released_by_one_agent_is_run_by_the_next() -> None:
    store = memory_store()
    attempts: list[int] = []

    @job("test.waits")
    def waits(ctx: Context, payload: Payload) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            ctx.wait(LONG_S)
            ctx.check()
        return "done"

    first = Stage((waits,), store=store, drain_s=0.0)
    first.start()
    task = first.client.enqueue(waits, {})
    first.record.wait(events.TaskStarted)
    eventually(lambda: attempts)
    first.stop()
    with serving(waits, store=store) as second:
        after = second.end_of(task)
        assert (after.status, after.result, after.fence) == (Status.SUCCESS, "done", 2)
        assert attempts == [1, 1]


# What an agent tells of itself


def test_an_agent_is_listed_from_its_start_to_its_end() -> None:
    gate = Gate()
    stage = Stage((gated(gate), echo), queues={"default": 3, "reports": 2})
    assert list(stage.client.agents.list()) == []
    stage.start()
    stage.record.wait(events.AgentStarted)
    [agent] = stage.client.agents.list()
    assert agent.name == stage.agent.name
    assert agent.info["queues"] == {"default": 3, "reports": 2}
    assert agent.info["jobs"] == ["test.echo", "test.gated"]
    assert agent.info["health"]["heartbeat_alive"] is True
    gate.open.set()
    stage.stop()
    assert list(stage.client.agents.list()) == []


def test_health_tells_how_the_agent_is() -> None:
    with serving(echo) as stage:
        stage.end_of(stage.client.enqueue(echo, {}))
        health = stage.agent.vitals.entry()
        assert health["heartbeat_alive"] is True
        assert health["store_answers"] is True
        assert health["draining"] is False
        assert 0 <= health["last_round_s"] < 5
        assert 0 <= health["last_heartbeat_s"] < 5
        stage.stop()
        assert stage.agent.vitals.entry()["draining"] is True
        assert stage.agent.vitals.entry()["heartbeat_alive"] is False


def test_each_agent_has_a_name_of_its_own() -> None:
    names = {Stage((echo,)).agent.name for _ in range(20)}
    assert len(names) == 20


def test_a_listener_that_is_broken_does_not_hurt(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage((echo,))
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("a bug in telemetry")

    stage.bus.subscribe(broken)
    stage.bus.subscribe(heard.append)
    stage.start()
    task = stage.client.enqueue(echo, {})
    assert stage.end_of(task).status is Status.SUCCESS
    stage.stop()
    assert any(isinstance(event, events.AgentStopped) for event in heard)
    assert "a listener of AgentStarted failed: RuntimeError('a bug in telemetry')" in capsys.readouterr().err


def test_a_listener_that_unsubscribed_hears_no_more() -> None:
    bus, heard = EventBus(), list[Event]()
    unsubscribe = bus.subscribe(heard.append)
    bus.emit(events.AgentStopped(stuck=0))
    unsubscribe()
    bus.emit(events.AgentStopped(stuck=1))
    assert heard == [events.AgentStopped(stuck=0)]


# A store that is away


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_costs_nothing_but_time() -> None:
    tried_while_away: list[list[str]] = []

    class Moody(SqliteEngine):
        away = False

        def apply(self, batch: Sequence[Write]) -> list[Applied]:
            if self.away and any(write.verb == "succeed" for write in batch):
                tried_while_away.append([write.verb for write in batch])
                return [Applied(won=False, error=StoreUnavailable("away")) for _ in batch]
            return super().apply(batch)

    engine, gate = Moody(MEMORY), Gate()
    with serving(gated(gate), store=TaskStore(engine), slots=2) as stage:
        tasks = [stage.client.enqueue("test.gated", {}) for _ in range(4)]
        gate.wait(2)
        engine.away = True
        gate.open.set()
        stage.record.wait(events.StoreFailed)
        for number in range(2, 5):
            tasks.append(stage.client.enqueue("test.gated", {}))  # wakes the agent, which then looks at everything
            stage.record.wait(events.StoreFailed, number)
        assert stage.agent.vitals.entry()["store_answers"] is False
        assert stage.store.engine.count("RUNNING") == 2
        engine.away = False
        rows = [stage.end_of(task) for task in tasks]
        assert {(row.status, row.fence, row.retry_count) for row in rows} == {(Status.SUCCESS, 1, 0)}
        assert not any("claim" in batch for batch in tried_while_away[1:]), "outcomes first: they hold their slots"
        stage.record.wait(events.StoreRecovered)
        assert stage.agent.vitals.entry()["store_answers"] is True


def test_a_store_that_cannot_be_used_from_the_start_is_told_at_once() -> None:
    class Missing(SqliteEngine):
        def check(self) -> None:
            raise TableMissing

    agent = Agent(TaskStore(Missing(MEMORY)), Registry(a_job()), settings(), rng=random.Random(1))
    with pytest.raises(TableMissing, match="thunderagent table create"):
        agent.run()


def test_an_event_loop_that_died_ends_the_agent_so_that_it_is_started_afresh() -> None:
    @job("test.async")
    async def coroutine(ctx: Context, payload: Payload) -> None: ...

    with serving(coroutine) as stage:
        stage.record.wait(events.AgentStarted)
        executors = stage.agent._in_flight.executors
        assert executors is not None
        assert executors.loop is not None
        executors.loop._loop.call_soon_threadsafe(executors.loop._loop.stop)
        [event] = stage.record.wait(events.ThreadDied)
        assert (event.thread, event.restarted) == ("event-loop", False)
        stage.join()


def test_rows_that_were_made_by_hand_stop_no_agent() -> None:
    store = memory_store()
    now = store.clock.now()
    store.engine.put(
        [
            {"taskId": "by-hand", "status": "PENDING", "createdAt": now - 5, "job": "test.job"},
            {"taskId": "no-job", "status": "PENDING", "createdAt": now - 5},
            {"taskId": "foreign", "status": "PENDING", "createdAt": now - 5, "job": "other.job"},
            {"taskId": "no-lease", "status": "RUNNING", "createdAt": now - 5, "job": "test.job", "fence": 1},
            {"taskId": "agent:odd", "status": "AGENT", "createdAt": now - 5, "info": {"host": "x"}},
        ]
    )

    @job("test.job")
    def work(ctx: Context, payload: None) -> str:
        return ctx.task_id

    with serving(work, store=store, sweep_s=0.1) as stage:
        stage.record.wait(events.TaskSucceeded)
        after = stage.client.enqueue(work, None)
        assert stage.end_of(after).result == after.task_id
        assert stage.client.get("by-hand").result == "by-hand"
        [unknown] = stage.record.wait(events.UnknownJobsSeen)
        assert unknown.jobs == ("None", "other.job")
        assert stage.is_running
    assert stage.client.agents.list() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_handler_may_fork_while_leases_are_renewed_and_its_children_may_enqueue(tmp_path: Path) -> None:
    """All connections of the agent are closed before each fork: none may be in the middle of a renewal then."""
    fork = multiprocessing.get_context("fork")
    store = TaskStore(SqliteEngine(str(tmp_path / "tasks.db")))

    @job("test.child")
    def child(ctx: Context, payload: None) -> None: ...

    @job("test.job")
    def work(ctx: Context, payload: None) -> int:
        ended = 0
        for _ in range(8):
            one = fork.Process(target=stage.client.enqueue, args=(child, None))
            one.start()
            one.join(LONG_S)
            ended += one.exitcode == 0
        return ended

    with serving(work, child, store=store, lease_s=30.0, heartbeat_s=0.05) as stage:
        tasks = [stage.client.enqueue(work, None) for _ in range(2)]
        ended = [stage.end_of(task) for task in tasks]
        assert [(task.result, task.fence, task.crash_count) for task in ended] == [(8, 1, 0)] * 2
        stage.record.wait(events.TaskSucceeded, 18)
        assert len(list(stage.client.list(status="SUCCESS", limit=None))) == 18
        assert not stage.record.of(events.LeaseLost)
