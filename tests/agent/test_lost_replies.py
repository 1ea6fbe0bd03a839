"""An agent in a thread whose store loses replies and requests, throttles, is away for a while, and refuses for good."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, Rejecting, Stage, serving, settings
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import Event
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.task import Status, Task
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine

pytestmark = pytest.mark.slow

Payload = dict[str, Any]
LOSSES = pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.REPEATED], ids=["unanswered", "repeated by the SDK"])


class Work:
    """A job whose runs are counted and which may be held up."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.fences: dict[str, int] = {}
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def job(self, name: str = "test.job", answer: Any = "done", **options: Any) -> Job[Payload]:
        def handler(ctx: Context, payload: Payload) -> Any:
            self.runs[ctx.task_id] += 1
            self.fences[ctx.task_id] = ctx.fence
            self.started.release()
            assert self.go_on.wait(LONG_S)
            return answer

        return job(name, **options)(handler)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.go_on.set()


@pytest.fixture
def faulty() -> FaultyEngine:
    return FaultyEngine(SqliteEngine(MEMORY), seed=11)


def ran_once(stage: Stage, work: Work, task: Task) -> Task:
    """The task has succeeded in its first and only run."""
    ended = stage.end_of(task)
    assert (ended.status, ended.crash_count, ended.retry_count, ended.fence) == (Status.SUCCESS, 0, 0, 1)
    assert work.runs[task.task_id] == 1
    return ended


@LOSSES
def test_a_claim_whose_reply_is_lost_is_a_claim(faulty: FaultyEngine, work: Work, fault: Fault) -> None:
    faulty.fail("claim", fault)
    with serving(work.job(), store=TaskStore(faulty)) as stage:
        ran_once(stage, work, stage.client.enqueue("test.job", {}))
        assert ("claim", fault) in faulty.hits


def test_claims_whose_replies_are_lost_among_others_leave_nothing_orphaned(faulty: FaultyEngine, work: Work) -> None:
    faulty.fail("claim", *[Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.REPEATED] * 5)
    with serving(work.job(), store=TaskStore(faulty), slots=4) as stage:
        for one in stage.client.enqueue_many("test.job", [{"n": n} for n in range(30)]):
            ran_once(stage, work, one.task)
        assert stage.record.of(events.TaskTakenOver) == []


@LOSSES
def test_a_heartbeat_whose_reply_is_lost_loses_no_lease(faulty: FaultyEngine, work: Work, fault: Fault) -> None:
    work.go_on.clear()
    with serving(work.job(), store=TaskStore(faulty)) as stage:
        faulty.fail("renew", fault)
        task = stage.client.enqueue("test.job", {})
        assert work.started.acquire(timeout=LONG_S)
        assert _when(lambda: (stage.client.get(task).hb or 0) >= 3)
        row = stage.client.get(task)
        assert (row.status, row.fence, row.lease_owner) == (Status.RUNNING, 1, stage.agent.name)
        assert ("renew", fault) in faulty.hits
        work.go_on.set()
        ran_once(stage, work, task)
        assert stage.record.of(events.LeaseLost) == []


@LOSSES
def test_an_end_whose_reply_is_lost_is_accepted_and_told(faulty: FaultyEngine, work: Work, fault: Fault) -> None:
    faulty.fail("succeed", fault)
    with serving(work.job(), store=TaskStore(faulty)) as stage:
        parent = stage.client.enqueue("test.job", {}, delay_s=0.1)
        child = stage.client.enqueue("test.job", {}, depends_on=[parent])
        assert ran_once(stage, work, parent).result == "done"
        ran_once(stage, work, child)
        [unparked] = stage.record.wait(queue_events.ChildUnparked)
        assert (unparked.task_id, unparked.parent_id) == (child.task_id, parent.task_id)
        assert stage.record.of(events.SettleRefused) == []
        assert len(stage.record.wait(events.TaskSucceeded, 2)) == 2


@LOSSES
def test_a_retry_whose_reply_is_lost_is_counted_once(faulty: FaultyEngine, work: Work, fault: Fault) -> None:
    faulty.fail("retry", fault)
    attempts: list[int] = []

    @job("test.fails", max_retry=1)
    def fails(ctx: Context, payload: Payload) -> None:
        attempts.append(ctx.attempt)
        raise RuntimeError("boom")

    with serving(fails, store=TaskStore(faulty), backoff_base_s=0.5) as stage:
        ended = stage.end_of(stage.client.enqueue(fails, {}))
        assert (ended.status, ended.retry_count, attempts) == (Status.FAILED, 1, [1, 2])
        assert len(ended.errors) == 2


def test_a_failure_whose_reply_is_lost_dooms_the_children(faulty: FaultyEngine, work: Work) -> None:
    faulty.fail("fail", Fault.LOST_REPLY)
    with serving(work.job("test.fails", answer=Fail("no")), work.job(), store=TaskStore(faulty), sweep_s=60.0) as stage:
        parent = stage.client.enqueue("test.fails", {}, delay_s=0.1)
        child = stage.client.enqueue("test.job", {}, depends_on=[parent])
        assert stage.end_of(parent).status is Status.FAILED
        assert stage.end_of(child).error == f"parent {parent.task_id} ended as FAILED"
        assert dict(work.runs) == {parent.task_id: 1}


def test_an_enqueue_tried_again_after_a_lost_reply_makes_one_task(faulty: FaultyEngine, work: Work) -> None:
    with serving(work.job(), store=TaskStore(faulty)) as stage:
        faulty.fail("put", Fault.LOST_REPLY)
        with pytest.raises(StoreUnavailable, match="lost reply of put"):
            stage.client.enqueue("test.job", {"n": 1}, task_id="once")
        ran_once(stage, work, stage.client.enqueue("test.job", {"n": 1}, task_id="once"))
        assert dict(work.runs) == {"once": 1}


def test_an_enqueue_that_the_sdk_repeats_makes_one_task(faulty: FaultyEngine, work: Work) -> None:
    with serving(work.job(), store=TaskStore(faulty)) as stage:
        faulty.fail("put", Fault.REPEATED)
        ran_once(stage, work, stage.client.enqueue("test.job", {}))
        assert len(work.runs) == 1


def test_tasks_that_run_during_an_outage_are_settled_after_it(faulty: FaultyEngine, work: Work) -> None:
    work.go_on.clear()
    with serving(work.job(), store=TaskStore(faulty), slots=3) as stage:
        tasks = [stage.client.enqueue("test.job", {"n": n}) for n in range(3)]
        later = stage.client.enqueue("test.job", {"n": 3})
        for _ in range(3):
            assert work.started.acquire(timeout=LONG_S)
        running = {task.task_id for task in tasks} | {later.task_id}
        running = {name for name in running if work.runs[name]}
        faulty.outage()
        stage.record.wait(events.StoreFailed, where=lambda event: event.during == "heartbeat")
        beats = faulty.hits.count(("renew", Fault.LOST_REQUEST))
        assert _when(lambda: faulty.hits.count(("renew", Fault.LOST_REQUEST)) >= beats + 3), "heartbeats go on trying"
        work.go_on.set()
        stage.record.wait(events.StoreFailed, where=lambda event: event.during == "polling")
        assert stage.agent.running == 3, "what is not written is kept"
        assert stage.agent.vitals.entry()["store_answers"] is False
        faulty.outage(False)
        stage.record.wait(events.StoreRecovered)
        for task in (*tasks, later):
            ran_once(stage, work, task)
        assert len(running) == 3
        assert stage.record.of(events.LeaseLost) == []


def test_an_outage_longer_than_the_lease_stops_the_handler_and_the_task_runs_again(
    faulty: FaultyEngine, work: Work
) -> None:
    reasons: list[str] = []

    @job("test.patient", lease_s=0.6, heartbeat_s=0.1)
    def patient(ctx: Context, payload: Payload) -> str:
        work.runs[ctx.task_id] += 1
        if ctx.fence == 1:
            faulty.outage()
            assert ctx.wait(LONG_S)
            reasons.append(type(ctx.stop_reason).__name__)
            faulty.outage(False)
            ctx.check()
        return "again"

    with serving(patient, store=TaskStore(faulty), clock_guard_s=0.1) as stage:
        task = stage.client.enqueue(patient, {})
        [taken] = stage.record.wait(events.TaskTakenOver)
        assert taken.fence == 2
        stage.record.wait(events.TaskSucceeded)
        ended = stage.client.get(task)
        assert (ended.result, ended.fence, ended.crash_count) == ("again", 2, 1)
        assert (reasons, work.runs[task.task_id]) == (["LeaseLost"], 2)


def test_throttles_on_a_third_of_the_calls_slow_the_agent_and_lose_nothing(faulty: FaultyEngine, work: Work) -> None:
    with serving(work.job(), store=TaskStore(faulty), slots=4) as stage:
        made = stage.client.enqueue_many("test.job", [{"n": n} for n in range(20)])
        faulty.chance(ANY, Fault.THROTTLED, 0.3)
        stage.record.wait(events.TaskSucceeded, 3)
        faulty.calm()
        for one in made:
            ran_once(stage, work, one.task)
        assert stage.record.of(events.LeaseLost) == []
        assert stage.record.of(events.TaskTakenOver) == []


class Capped(FaultyEngine):
    """The store with a cap on its write units a second: it throttles above, and has those of one second in hand."""

    def __init__(self, engine: Engine, writes_s: float) -> None:
        super().__init__(engine)
        self._writes_s, self._left, self._at = writes_s, writes_s, time.monotonic()

    def _next(self, verb: str) -> Fault | None:
        with self._guard:
            if verb in ("claim", "renew", "succeed"):
                now = time.monotonic()
                self._left = min(self._writes_s, self._left + (now - self._at) * self._writes_s)
                self._at = now
                if self._left < 1.0:
                    self._script[verb].append(Fault.THROTTLED)
                else:
                    self._left -= 1.0
            return super()._next(verb)


def test_a_cap_below_the_demand_sets_the_pace_of_the_agent_and_loses_nothing(work: Work) -> None:
    capped = Capped(SqliteEngine(MEMORY), writes_s=20.0)
    began = time.monotonic()
    with serving(work.job(lease_s=2.0, heartbeat_s=0.2), store=TaskStore(capped), slots=4) as stage:
        for one in stage.client.enqueue_many("test.job", [{"n": n} for n in range(30)]):
            ran_once(stage, work, one.task)
        assert stage.record.of(events.LeaseLost) == []
    assert time.monotonic() - began >= (60 - 20) / 20.0  # a claim and a success each, and what was in hand
    assert 0 < capped.hits.count(("succeed", Fault.THROTTLED)) + capped.hits.count(("claim", Fault.THROTTLED)) < 180


def test_stale_pages_cost_claims_and_bring_no_task_twice(faulty: FaultyEngine, work: Work) -> None:
    faulty.chance("page", Fault.STALE, 0.5)
    with serving(work.job(), store=TaskStore(faulty), slots=2) as stage:
        for one in stage.client.enqueue_many("test.job", [{"n": n} for n in range(20)]):
            ran_once(stage, work, one.task)
        assert ("page", Fault.STALE) in faulty.hits


def _when(holds: Any) -> bool:
    """True once it holds: asked again and again, as no event tells of it."""
    never, left = threading.Event(), LONG_S
    while not holds() and left > 0:
        never.wait(0.02)
        left -= 0.02
    return bool(holds())


class Sleeper(FaultyEngine):
    """The store of a machine that sleeps while the reply to a claim is on its way."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine)
        self._time = clock
        self.sleeps_s = 0.0

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        answers = super().apply(batch)
        if any(write.verb == "claim" for write in batch):
            self._time.advance(self.sleeps_s)
            self.sleeps_s = 0.0
        return answers


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_machine_that_sleeps_over_the_reply_to_its_claim_begins_nothing(is_taken: bool) -> None:
    clock, runs = FakeClock(), list[str]()

    @job("test.job")
    def handler(ctx: Context, payload: Payload) -> None:
        runs.append(ctx.task_id)

    store = memory_store(clock)
    client, engine = Client(store, settings()), Sleeper(store.engine, clock)
    agent = Agent(
        TaskStore(engine, monotonic=clock.monotonic), Registry(handler), settings(lease_s=30.0), first_poll_s=0.0
    )
    record, in_flight = Recorder(agent.bus), agent._in_flight
    in_flight.executors = SimpleNamespace(start=lambda running: runs.append(running.lease.task_id))  # type: ignore[assignment]
    client.enqueue(handler, {}, task_id="a")
    engine.sleeps_s = 29.0
    in_flight.commit(claim=True)
    assert runs == []
    if is_taken:
        clock.advance(30.0)
        [_] = store.take_over([(store.peek(["a"])["a"], 300.0)], owner="other").leases
    in_flight.gather(0.0)
    in_flight.commit(claim=False)
    task = store.peek(["a"])["a"]
    if is_taken:
        assert (task.lease_owner, len(record.of(events.SettleRefused))) == ("other", 1)
        return
    assert (task.status, task.crash_count, task.retry_count) == (Status.PENDING, 0, 0), "it goes back, nothing used up"


class Asked(FaultyEngine):
    """Notes when the loop tries to write an outcome or to claim."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.at = list[float]()

    def _next(self, verb: str) -> Fault | None:
        if verb in ("succeed", "claim") and self._down.is_set():
            self.at.append(time.monotonic())
        return super()._next(verb)


def test_nothing_wakes_an_outcome_before_its_next_attempt(work: Work) -> None:
    engine = Asked(SqliteEngine(MEMORY))
    work.go_on.clear()
    with serving(work.job(), store=TaskStore(engine), slots=2) as stage:
        told = list[tuple[float, float]]()
        task = stage.client.enqueue("test.job", {})
        assert work.started.acquire(timeout=LONG_S)

        def note(event: Event) -> None:
            if isinstance(event, events.StoreFailed) and event.during == "polling":
                told.append((time.monotonic(), event.next_try_s))

        stage.bus.subscribe(note)
        with engine.outage():
            work.go_on.set()
            assert _when(lambda: told and told[0])
            number, until = 0, told[0][0] + 3.0
            while time.monotonic() < until:
                stage.agent._in_flight.selector.inbox.receive(DoorbellMessage.look("default"))
                stage.agent.wake()
                number += 1
                time.sleep(0.002)
        ran_once(stage, work, task)
        assert number > 20, "it was rung for often enough"
        for failed_at, delay_s in told:
            early = [at - failed_at for at in engine.at if failed_at < at < failed_at + delay_s - 0.05]
            assert early == [], f"it was to be asked after {delay_s} s"
        assert [delay_s for _, delay_s in told[:3]] == sorted(delay_s for _, delay_s in told[:3])


# Refused for good


OUTCOMES = {"succeed", "retry", "fail", "close", "snooze"}


def rejecting(never: Any) -> tuple[TaskStore, Rejecting]:
    engine = Rejecting(SqliteEngine(MEMORY), never)
    return TaskStore(engine), engine


@pytest.mark.parametrize("answer", ["done", Snooze(60), Cancel("enough")], ids=["succeed", "snooze", "close"])
def test_an_outcome_that_the_store_never_takes_fails_its_task_alone(work: Work, answer: Any) -> None:
    store, engine = rejecting(lambda write: write.task_id == "large" and write.verb in ("succeed", "snooze", "close"))
    with serving(work.job(answer=answer), work.job("test.other"), store=store) as stage:
        stage.client.enqueue("test.job", {}, task_id="large")
        child = stage.client.enqueue("test.other", {}, depends_on=["large"])
        other = stage.client.enqueue("test.other", {})
        ended = stage.end_of("large")
        assert (ended.status, ended.fence, ended.result, ended.progress) == (Status.FAILED, 1, None, None)
        assert ended.error is not None and "the store does not take its outcome" in ended.error
        assert "is too large" in ended.error
        assert stage.end_of(child).status is Status.FAILED, "its children are told"
        assert stage.end_of(other).status is Status.SUCCESS, "claims go on"
        assert len(engine.rejected) == 1, "it is not sent again"
        assert stage.record.of(events.StoreFailed) == []
        assert len(stage.record.wait(events.TaskFailed)) == 1


def test_a_task_of_which_the_store_takes_nothing_is_let_go_and_the_agent_goes_on(work: Work) -> None:
    store, _ = rejecting(lambda write: write.task_id == "large" and write.verb in OUTCOMES)
    with serving(work.job(), store=store, slots=1) as stage:
        stage.client.enqueue("test.job", {}, task_id="large")
        [rejected] = stage.record.wait(events.OutcomeRejected)
        assert (rejected.task_id, rejected.verb, rejected.fence) == ("large", "fail", 1)
        other = stage.client.enqueue("test.job", {})
        assert stage.end_of(other).status is Status.SUCCESS
        assert stage.agent.running == 0, "its lease is not kept alive"
        assert not stage.agent._in_flight.is_stray(stage.client.get("large")), "it ran: no claim that came late"
        assert stage.record.of(events.StoreFailed) == []


def test_an_agent_stops_in_time_with_an_outcome_that_the_store_never_takes(work: Work) -> None:
    work.go_on.clear()
    store, _ = rejecting(lambda write: write.verb in OUTCOMES)
    with serving(work.job(), store=store) as stage:
        stage.client.enqueue("test.job", {}, task_id="large")
        assert work.started.acquire(timeout=LONG_S)
        stage.agent.stop()
        work.go_on.set()
        stage.join()
        assert (stage.stuck, stage.agent.running) == (0, 0)
        assert len(stage.record.of(events.OutcomeRejected)) == 1


def test_progress_that_the_store_never_takes_loses_no_lease(work: Work) -> None:
    store, engine = rejecting(lambda write: "progress" in write.set)

    @job("test.tells")
    def tells(ctx: Context, payload: Payload) -> str:
        ctx.progress({"rows": 1})
        work.started.release()
        assert work.go_on.wait(LONG_S)
        return "done"

    work.go_on.clear()
    with serving(tells, store=store) as stage:
        task = stage.client.enqueue(tells, {})
        assert work.started.acquire(timeout=LONG_S)
        [rejected] = stage.record.wait(queue_events.WriteRejected)
        assert (rejected.task_id, rejected.verb) == (task.task_id, "renew")
        assert _when(lambda: (stage.client.get(task).hb or 0) >= 3)
        assert engine.rejected == [("renew", task.task_id)], "it is dropped, and not tried again"
        work.go_on.set()
        ended = stage.end_of(task)
        assert (ended.status, ended.fence, ended.result) == (Status.SUCCESS, 1, "done")
        assert not stage.record.of(events.LeaseLost) and not stage.record.of(events.StoreFailed)


def test_a_task_that_the_store_never_lets_claim_is_named_and_holds_nobody_up(work: Work) -> None:
    store, _ = rejecting(lambda write: write.task_id == "large")
    with serving(work.job(), store=store, slots=1) as stage:
        stage.client.enqueue("test.job", {}, task_id="large")
        others = [stage.client.enqueue("test.job", {}) for _ in range(3)]
        assert all(stage.end_of(task).status is Status.SUCCESS for task in others)
        [rejected] = stage.record.wait(queue_events.WriteRejected)
        assert (rejected.task_id, rejected.verb) == ("large", "claim")
        assert stage.client.get("large").status is Status.PENDING
        assert stage.record.of(events.StoreFailed) == []
