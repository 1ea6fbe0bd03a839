"""Agents whose tasks have payloads and results apart from their rows, some of which cannot be read."""

from __future__ import annotations

import math
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine import LONG_S, Stage, put, seen, serving
from tests.support.stands import eventually
from thunderagent.agent.admission import ARRIVES_TIMES, Admission
from thunderagent.agent.sweep import LostLeases, Rescuer, TextSweep
from thunderagent.client import Client
from thunderagent.jobs.context import Context, Fail, Snooze
from thunderagent.jobs.job import Job, Limit, job
from thunderagent.jobs.outcome import Outcome, Raised, Undecided
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    NotAllowed,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TextGone,
)
from thunderagent.model.task import Lane, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.limits.waitlist import keep_waitlist_open
from thunderagent.regions.grant import Grant
from thunderagent.settings import Settings
from thunderagent.stores.engine import MAX_TEXT_BYTES, KeptText
from thunderagent.stores.large_texts import DAY_S
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import Fault, FaultyEngine

LARGE = "x" * MAX_TEXT_BYTES


class Bucket:
    """A bucket in memory; what is in `broken` cannot be read."""

    def __init__(self) -> None:
        self.large_texts: dict[str, str] = {}
        self.broken: dict[str, Exception] = {}
        self.reads = Counter[str]()
        self.puts = Counter[str]()

    def put(self, key: str, text: str) -> str:
        ref = f"s3://bucket/{key}"
        self.puts[key.partition("#")[0]] += 1
        if ref.partition("#")[0] in self.broken:
            raise self.broken[ref.partition("#")[0]]
        self.large_texts[ref] = text
        return ref

    def get(self, ref: str) -> KeptText:
        task = ref.removeprefix("s3://bucket/").partition("#")[0]
        self.reads[task] += 1
        if task in self.broken:
            raise self.broken[task]
        if ref not in self.large_texts:
            raise TextGone(f"{ref} is gone")
        return KeptText(self.large_texts[ref])


class Apart(FaultyEngine):
    """An engine that keeps texts over 64 bytes apart from their rows, as DynamoDB does with larger ones."""

    inline_bytes = 64

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__(SqliteEngine(MEMORY, clock=clock))
        self.large_texts: dict[str, KeptText] = {}
        self.writes = 0

    def put_texts(self, texts: Mapping[str, str], *, expire_at: float) -> None:
        self._once("put_texts", lambda: self._put_texts(texts, expire_at))

    def _put_texts(self, texts: Mapping[str, str], expire_at: float) -> None:
        self.writes += 1
        self.large_texts |= {key: KeptText(text, expire_at) for key, text in texts.items()}

    def until(self, task: Task) -> float:
        """When the payload of a task is deleted."""
        [kept] = [text for key, text in self.large_texts.items() if key.startswith(f"{task.id}#payload.")]
        assert kept.expire_at is not None
        return kept.expire_at

    def get_texts(self, keys: Sequence[str]) -> dict[str, KeptText]:
        now = self.clock.now()
        self.large_texts = {key: text for key, text in self.large_texts.items() if (text.expire_at or now) >= now}
        return self._once("get_texts", lambda: {key: self.large_texts[key] for key in keys if key in self.large_texts})


class Blind(FaultyEngine):
    """An engine that cannot read the rows of some tasks."""

    def __init__(self) -> None:
        super().__init__(SqliteEngine(MEMORY))
        self.unreadable: set[str] = set()

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        if self.unreadable & set(task_ids):
            raise StoreUnavailable("injected: no row of these can be read")
        return super().get(task_ids)


class Work:
    """A job that counts its runs and knows what it was given."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.given: dict[str, Any] = {}

    def job(self, answer: Any = "done", **options: Any) -> Job[dict[str, str]]:
        def handler(ctx: Context, payload: dict[str, str]) -> Any:
            self.runs[ctx.task_id] += 1
            self.given[ctx.task_id] = payload
            return answer

        return job("test.job", **options)(handler)


def _store(bucket: Bucket) -> TaskStore:
    return TaskStore(SqliteEngine(MEMORY), blobs=bucket)


def _batch(client: Client, names: Sequence[str]) -> list[Task]:
    payloads = [{"text": LARGE + name} for name in names]
    put = client.enqueue_many("test.job", payloads, task_ids=names)
    assert [one.error for one in put] == [None] * len(names)
    return [one.task for one in put]


def test_a_payload_that_is_missing_in_one_region_may_be_on_its_way_from_another() -> None:
    """Rows and texts are replicated item by item: it is read again for some minutes, and gone after that."""
    task = Task(task_id="a", status=Status.RUNNING, created_at=0.0, submitted_at=0.0, job="test.job")
    lease = Lease(task=replace(task, payload_error=TextGone("gone")), owner="me", fence=1, lease_s=60.0, held_from=0.0)

    def outcomes(**regions: Any) -> list[type[Outcome]]:
        store = _store(Bucket())
        admission = Admission(store, Registry(Work().job()), Settings(**regions), EventBus(), rng=random.Random(1))
        return [type(admission.refusals([lease])["a"]) for _ in range(ARRIVES_TIMES + 1)]

    assert outcomes(region="eu-west-1", region_arbiter="sqlite:///a") == [Undecided] * ARRIVES_TIMES + [Raised]
    assert set(outcomes()) == {Raised}


FOR_GOOD = {
    "denied": AccessDenied("not allowed: s3:GetObject, or there is no such object"),
    "gone": TextGone("the text is gone"),
    "no bucket": ConfigurationError("the bucket does not exist"),
    "broken bucket": ZeroDivisionError("a bucket of somebody else"),
}
FOR_NOW = {"no answer": StoreUnavailable("503 Slow Down"), "throttled": StoreThrottled("too much")}


@pytest.mark.parametrize("why", FOR_GOOD)
def test_a_payload_that_cannot_be_read_fails_its_task_alone(why: str) -> None:
    bucket, work = Bucket(), Work()
    client = Client(store := _store(bucket), Settings())
    tasks = _batch(client, ["a", "bad", "c", "d"])
    bucket.broken["bad"] = FOR_GOOD[why]
    with serving(work.job(max_retry=0), store=store, slots=8) as stage:
        ended = {task.id: stage.end_of(task) for task in tasks}
        assert stage.record.of(events.TaskTakenOver) == []
    assert {name: task.status for name, task in ended.items()} == {
        **dict.fromkeys("acd", Status.SUCCESS),
        "bad": Status.FAILED,
    }
    assert f"the payload could not be read: {FOR_GOOD[why]}" in str(ended["bad"].error) or why == "broken bucket"
    assert (ended["bad"].crash_count, dict(work.runs)) == (0, {"a": 1, "c": 1, "d": 1})


@pytest.mark.slow
@pytest.mark.parametrize("why", FOR_NOW)
def test_a_payload_that_cannot_be_read_now_waits_alone_and_loses_nothing(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = list[int]()

    def noted(times: int, rng: object) -> float:
        delays.append(times)
        return 0.05

    monkeypatch.setattr("thunderagent.agent.admission.unread_delay", noted)
    bucket, work = Bucket(), Work()
    client = Client(store := _store(bucket), Settings())
    tasks = _batch(client, ["a", "bad", "c", "d"])
    bucket.broken["bad"] = FOR_NOW[why]
    with serving(work.job(max_retry=0), store=store, slots=8, max_crashes=0) as stage:
        for name in "acd":
            assert stage.end_of(next(task for task in tasks if task.id == name)).status is Status.SUCCESS
        eventually(lambda: bucket.reads["bad"] >= 3)
        told = stage.record.wait(events.StoreFailed, where=lambda one: one.during == "reading a payload")
        assert str(FOR_NOW[why]) in told[0].error
        assert "bad" in told[0].error
        bucket.broken.clear()
        ended = stage.end_of(tasks[1])
    assert (ended.status, ended.retry_count, ended.crash_count) == (Status.SUCCESS, 0, 0)
    assert delays[:3] == [1, 2, 3], "it waits longer each time"
    assert (work.runs["bad"], work.given["bad"]) == (1, {"text": LARGE + "bad"})


def test_texts_that_cannot_be_read_hold_up_no_task_whose_payload_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.agent.admission.unread_delay", lambda times, rng: 0.05)
    engine, work = Apart(), Work()
    client = Client(store := TaskStore(engine), Settings())
    large = client.enqueue("test.job", {"text": "y" * 100}, task_id="large")
    small = client.enqueue("test.job", {"text": "y"}, task_id="small")
    engine.chance("get_texts", Fault.THROTTLED, 1.0)
    with serving(work.job(), store=store, slots=4) as stage:
        eventually(lambda: work.runs["small"])
        eventually(lambda: ("get_texts", Fault.THROTTLED) in engine.hits)
        engine.calm()
        assert stage.end_of(large).crash_count == stage.end_of(small).crash_count == 0
    assert dict(work.runs) == {"large": 1, "small": 1}


def test_a_payload_that_is_gone_says_how_to_bring_it_back_and_does_so() -> None:
    engine, work = Apart(), Work()
    payload = {"text": "y" * 100}
    client = Client(store := TaskStore(engine), Settings())
    task = client.enqueue("test.job", payload, task_id="a")
    engine.large_texts.clear()
    with serving(work.job(max_retry=0), store=store) as stage:
        ended = stage.end_of(task)
        assert ended.status is Status.FAILED
        assert "is gone" in str(ended.error)
        assert "enqueue its task once more with the same task_id and payload, then retry it" in str(ended.error)
        with pytest.raises(NotAllowed, match=r"'a' cannot be retried now: .* is gone.*enqueue its task once more"):
            client.retry("a")
        assert client.enqueue("test.job", payload, task_id="a").status is Status.FAILED
        client.retry("a")
        assert stage.end_of(task).status is Status.SUCCESS
    assert work.given["a"] == payload


@pytest.mark.parametrize("why", [*FOR_GOOD, *FOR_NOW])
def test_one_that_cannot_be_read_hides_no_others_from_a_client(why: str) -> None:
    bucket, error = Bucket(), {**FOR_GOOD, **FOR_NOW}[why]
    client = Client(_store(bucket), Settings())
    _batch(client, ["a", "bad", "c"])
    bucket.broken["bad"] = error
    listed = {task.id: task for task in client.list()}
    assert {name for name, task in listed.items() if task.payload_error is None} == {"a", "c"}
    assert listed["a"].payload == {"text": LARGE + "a"}
    for bad in (listed["bad"], client.get("bad"), client.store.get(["bad", "a"])["bad"]):
        with pytest.raises(StoreError):
            _ = bad.payload
    assert client.enqueue("test.job", {"text": LARGE + "bad"}, task_id="bad").id == "bad"
    assert client.cancel("bad").status is Status.DONE
    assert client.wait("bad").status is Status.DONE


def test_one_payload_that_cannot_be_kept_hides_no_others_of_its_batch() -> None:
    bucket = Bucket()
    client = Client(_store(bucket), Settings())
    bucket.broken["s3://bucket/bad"] = StoreUnavailable("503 Slow Down")
    outcomes = client.enqueue_many(
        "test.job", [{"text": LARGE + name} for name in ("a", "bad", "c")], task_ids=["a", "bad", "c"]
    )
    assert [str(one.error) for one in outcomes] == ["None", "503 Slow Down", "None"]
    assert {task.id for task in client.list()} == {"a", "c"}


def test_a_unique_key_is_found_taken_although_its_tasks_payload_cannot_be_read() -> None:
    bucket = Bucket()
    client = Client(_store(bucket), Settings())
    first = client.enqueue("test.job", {"text": LARGE}, unique_key="k")
    bucket.broken[first.id] = AccessDenied("not allowed")
    again = client.enqueue("test.job", {"text": LARGE}, unique_key="k")
    assert (again.id, again.payload_error) == (first.id, bucket.broken[first.id])


@job("test.child", isolation="process", max_retry=0)
def child_in_a_process(ctx: Context, payload: dict[str, str]) -> list[str]:
    return _results_of(ctx)


@job("test.child", max_retry=0)
def child_in_a_thread(ctx: Context, payload: dict[str, str]) -> list[str]:
    return _results_of(ctx)


def _results_of(ctx: Context) -> list[str]:
    results = ctx.parent_results()
    assert sorted(results) == ["a", "bad"]
    try:
        return [results["a"][-1], results["bad"]]
    except StoreError as error:
        return [results["a"][-1], str(error)]


@pytest.mark.slow
@pytest.mark.parametrize("child", [child_in_a_thread, child_in_a_process], ids=["thread", "process"])
def test_a_parents_result_that_cannot_be_read_hides_not_those_of_others(child: Job[dict[str, str]]) -> None:
    bucket = Bucket()

    @job("test.parent")
    def parent(ctx: Context, payload: dict[str, str]) -> str:
        return LARGE + ctx.task_id

    with serving(parent, child, store=_store(bucket)) as stage:
        for name in ("a", "bad"):
            stage.end_of(stage.client.enqueue(parent, {}, task_id=name))
        bucket.broken["bad"] = AccessDenied("not allowed")
        ended = stage.end_of(stage.client.enqueue(child, {}, depends_on=["a", "bad"]))
        assert ended.result == ["a", "not allowed"]


# A payload lives as long as its task

LONG = {"text": "y" * 100}


def test_the_payload_of_a_task_that_is_put_off_for_long_lives_until_then() -> None:
    engine, work = Apart(), Work()
    with serving(work.job(answer=Snooze(400 * DAY_S)), store=TaskStore(engine)) as stage:
        task = stage.client.enqueue("test.job", LONG)
        stage.record.wait(events.TaskSnoozed)
        row = stage.client.get(task)
        assert row.created_at > stage.store.clock.now() + 399 * DAY_S
        assert engine.until(task) >= row.created_at + 100 * DAY_S


@pytest.mark.parametrize(("keep_days", "writes"), [(90, 1), (1000, 2)])
def test_a_payload_lives_until_the_row_of_its_ended_task_is_deleted(keep_days: float, writes: int) -> None:
    engine = Apart()
    with serving(Work().job(answer=Fail("no")), store=TaskStore(engine), keep_failed_days=keep_days) as stage:
        task = stage.client.enqueue("test.job", LONG)
        ended = stage.end_of(task)
        assert engine.until(task) >= (ended.expire_at or math.inf)
        assert engine.writes == writes, "the usual case costs nothing"


def test_a_payload_lives_on_whoever_ends_its_task() -> None:
    clock = FakeClock()
    engine = Apart(clock)
    store = TaskStore(engine, monotonic=clock.monotonic)
    client = Client(store, Settings(keep_failed_days=1000, keep_success_days=1000))
    parent = client.enqueue("test.job", LONG, task_id="parent")
    child = client.enqueue("test.job", LONG, task_id="child", depends_on=[parent])
    client.cancel(parent)
    given_up = client.enqueue("test.job", LONG, task_id="lost")
    store.claim([Wanted(seen(given_up), 300.0)], owner="lost:1")
    clock.advance(400.0)
    rescuer = Rescuer(
        store,
        EventBus(),
        Dependents(store, EventBus(), keep_success_s=1000 * DAY_S, keep_failed_s=1000 * DAY_S),
        LostLeases(store, owner="me", guard_s=0.0),
        owner="me",
        max_crashes=0,
        sweep_s=15.0,
    )
    assert rescuer.take_over([Lane()], lambda task: None) == []
    for task in (parent, child, given_up):
        ended = client.get(task)
        assert ended.status.is_terminal
        assert engine.until(task) >= (ended.expire_at or math.inf)


def test_a_retry_by_hand_late_in_the_life_of_a_row_has_its_payload() -> None:
    clock = FakeClock()
    engine = Apart(clock)
    client = Client(TaskStore(engine, monotonic=clock.monotonic), Settings(keep_success_days=1000))
    task = client.enqueue("test.job", LONG)
    client.cancel(task)
    clock.advance(990 * DAY_S)
    assert client.get(task).payload == LONG
    again = client.retry(task)
    assert engine.until(task) >= again.created_at + 100 * DAY_S


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["in its queue", "for its parent", "for a slot", "in an agent"])
def test_the_payload_of_a_task_that_waits_for_years_is_there(waits: str) -> None:
    clock = FakeClock()
    engine = Apart(clock)
    store = TaskStore(engine, monotonic=clock.monotonic)
    client = Client(store, Settings())
    is_limited = waits == "for a slot"
    task = client.enqueue("test.job", LONG, limit_key="key" if is_limited else None, limit=1 if is_limited else None)
    if waits == "for its parent":
        task = client.enqueue("test.job", LONG, depends_on=[task])
    elif waits == "for a slot":
        [lease] = store.claim([Wanted(seen(task), 300.0)], owner="me")
        keep_waitlist_open(store, Limit("key", 1), None)
        assert store.settle([writes.wait_for_permit(lease, limit_key="key", now=clock.now())])[0].accepted
    elif waits == "in an agent":
        store.claim([Wanted(seen(task), 300.0)], owner="me")
    sweeps = [TextSweep(store, owner=f"agent-{number}") for number in range(2)]
    written = engine.writes
    for _ in range(365 * 5):
        clock.advance(DAY_S)
        for sweep in sweeps:
            sweep.look(store.engine.lanes())
    assert client.get(task).payload == LONG
    number = 2 if waits == "for its parent" else 1  # its parent waits too
    assert engine.writes - written <= number * 5 * 2, "at most twice a year"


def test_a_sweep_of_payloads_goes_on_where_its_last_look_ended() -> None:
    clock = FakeClock()
    engine = Apart(clock)
    store = TaskStore(engine, monotonic=clock.monotonic)
    Client(store, Settings()).enqueue_many("test.job", [{"text": f"{number:100}"} for number in range(1200)])
    clock.advance(200 * DAY_S)
    sweep = TextSweep(store, owner="me")
    written = list[int]()
    for _ in range(4):
        before = engine.writes
        sweep.look([Lane()])
        written.append(engine.writes - before)
    assert written == [500, 500, 200, 0]


# Claims in doubt


@pytest.mark.slow
def test_a_doubt_that_cannot_be_resolved_holds_up_no_claims() -> None:
    engine, work = Blind(), Work()
    client = Client(store := TaskStore(engine), Settings())
    doubtful = client.enqueue("test.job", {}, task_id="doubtful")
    engine.fail("claim", Fault.LOST_REPLY)
    engine.unreadable.add("doubtful")
    with serving(work.job(), store=store, slots=2) as stage:
        eventually(lambda: stage.agent._in_flight.doubts.ids)
        for number in range(5):
            put(TaskStore(engine.behind), f"other-{number}")
            stage.agent.wake()
        eventually(lambda: sum(work.runs.values()) == 5)
        assert stage.agent._in_flight.doubts.ids
        [pool] = {poller.pool for poller in stage.agent._pollers.values()}
        eventually(lambda: (pool.running, pool.slots) == (1, 2))  # the doubt keeps its slot
        engine.unreadable.clear()
        ended = stage.end_of(doubtful)
        assert (ended.status, ended.fence, ended.crash_count, ended.errors) == (Status.SUCCESS, 1, 0, ())
        eventually(lambda: pool.running == 0)
    assert work.runs["doubtful"] == 1


@pytest.mark.slow
def test_a_doubt_ends_with_its_lease() -> None:
    """What came of it then is for the sweep; the slot is free."""
    engine, work = Blind(), Work()
    client = Client(store := TaskStore(engine), Settings())
    client.enqueue("test.job", {}, task_id="doubtful")
    engine.fail("claim", Fault.LOST_REQUEST)
    engine.unreadable.add("doubtful")
    with serving(work.job(lease_s=1.0), store=store, slots=1, sweep_s=30.0) as stage:
        eventually(lambda: stage.agent._in_flight.doubts.ids)
        [pool] = {poller.pool for poller in stage.agent._pollers.values()}
        assert pool.free == 0
        eventually(lambda: work.runs["doubtful"])
    assert work.runs["doubtful"] == 1


# Claims that are carried out late


def _claim_late(stage: Stage, task: Task, *, owner: str | None = None, lease_s: float = 3600.0) -> int:
    """A request of the agent from before, which the table carries out now; the answer is the fence."""
    [lease] = TaskStore(stage.store.engine).claim([Wanted(seen(task), lease_s)], owner=owner or stage.agent.name)
    return lease.fence


def test_a_claim_that_is_carried_out_late_costs_neither_a_lease_nor_a_crash() -> None:
    work = Work()
    with serving(work.job(max_retry=0), max_crashes=0, sweep_s=0.2) as stage:
        stage.client.pauses.pause(queue="default")
        stage.record.wait(events.Paused)
        task = stage.client.enqueue("test.job", {})
        fence = _claim_late(stage, task)
        [released] = stage.record.wait(events.TaskReleased)
        assert (released.task_id, released.fence) == (task.id, fence)
        row = stage.client.get(task)
        assert (row.status, row.crash_count, row.errors) == (Status.PENDING, 0, ())
        stage.client.pauses.resume(queue="default")
        ended = stage.end_of(task)
        assert (ended.status, ended.crash_count, ended.fence) == (Status.SUCCESS, 0, fence + 1)
        assert stage.record.of(events.TaskTakenOver) == []
    assert work.runs[task.id] == 1


def test_the_claim_of_another_agent_is_left_alone() -> None:
    with serving(Work().job(), sweep_s=0.1) as stage:
        stage.client.pauses.pause(queue="default")
        stage.record.wait(events.Paused)
        task = stage.client.enqueue("test.job", {})
        _claim_late(stage, task, owner="another:1")
        own = stage.client.enqueue("test.job", {})
        _claim_late(stage, own)
        stage.record.wait(events.TaskReleased)
        assert stage.client.get(task).status is Status.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize("is_takeover_lost", [False, True])
def test_a_task_that_ran_here_and_lost_its_lease_is_no_late_claim(is_takeover_lost: bool) -> None:
    """It has run: the next run shows as a lost agent's, after its lease, and is never under the same fence. Where the
    request of a takeover is lost the row says RUNNING by us, as it did before."""
    engine, started, go = FaultyEngine(SqliteEngine(MEMORY)), threading.Semaphore(0), threading.Event()
    fences: list[int] = []

    @job("test.job", lease_s=1.5, heartbeat_s=0.3)
    def handler(ctx: Context, payload: dict[str, str]) -> None:
        fences.append(ctx.fence)
        started.release()
        while not go.is_set():
            ctx.wait(0.01)
            ctx.check()

    with serving(handler, store=TaskStore(engine), sweep_s=0.2, max_crashes=3) as stage:
        task = stage.client.enqueue(handler, {})
        assert started.acquire(timeout=LONG_S)
        engine.chance("renew", Fault.LOST_REQUEST, 1.0)
        if is_takeover_lost:
            engine.fail("take over", Fault.LOST_REQUEST)
        stage.record.wait(events.LeaseLost)
        eventually(lambda: not is_takeover_lost or ("take over", Fault.LOST_REQUEST) in engine.hits)
        engine.calm()
        assert started.acquire(timeout=LONG_S)
        go.set()
        ended = stage.end_of(task)
        assert (ended.crash_count, len(ended.errors), fences) == (1, 1, [1, 2])
        assert stage.record.of(events.TaskReleased) == []


class Returning:
    """A job whose handlers end when they may, with a large result of their own; the bucket takes none of `bad`."""

    def __init__(self, error: Exception, *, size: int = MAX_TEXT_BYTES) -> None:
        self.may_end = threading.Event()
        self.runs = Counter[str]()
        self.size = size
        self.bucket = Bucket()
        self.bucket.broken["s3://bucket/bad"] = error
        self.store = TaskStore(SqliteEngine(MEMORY), blobs=self.bucket)

    def job(self, **options: Any) -> Job[dict[str, str]]:
        def handler(ctx: Context, payload: dict[str, str]) -> str:
            self.runs[ctx.task_id] += 1
            assert self.may_end.wait(LONG_S)
            return self.result(ctx.task_id)

        return job("test.job", max_retry=0, **options)(handler)

    def result(self, task_id: str) -> str:
        return "r" * self.size + task_id

    def begin(self, stage: Stage, *names: str) -> None:
        """Put tasks and wait until they run."""
        for name in names:
            stage.client.enqueue("test.job", {}, task_id=name)
        eventually(lambda: all(self.runs[name] for name in names))

    def end(self, stage: Stage, *names: str) -> None:
        """Have the handlers end and wait until the store has these outcomes."""
        self.may_end.set()
        for name in names:
            task = stage.end_of(name)
            assert (task.status, task.result) == (Status.SUCCESS, self.result(name))


def _text_pauses(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Have each pause before the next attempt to write a text be so long; the answer is filled with their numbers."""
    pauses = list[int]()

    def noted(times: int, rng: object) -> float:
        pauses.append(times)
        return seconds

    monkeypatch.setattr("thunderagent.agent.in_flight.text_delay", noted, raising=False)
    return pauses


@pytest.mark.parametrize("why", FOR_NOW)
def test_a_result_that_cannot_be_written_now_waits_alone_and_is_stored_later(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = _text_pauses(monkeypatch, 0.05)
    work = Returning(FOR_NOW[why])
    with serving(work.job(), store=work.store, slots=3, lease_s=1.5) as stage:
        work.begin(stage, "bad", "a", "c")
        work.end(stage, "a", "c")
        work.begin(stage, "d", "e")
        work.end(stage, "d", "e")
        assert stage.client.get("bad").status is Status.RUNNING
        eventually(lambda: work.bucket.puts["bad"] >= 3)
        [told] = stage.record.wait(events.StoreFailed, where=lambda one: one.during == "writing a large text")
        assert str(FOR_NOW[why]) in told.error
        assert "bad" in told.error
        work.bucket.broken.clear()
        work.end(stage, "bad")
        stage.stop()
    assert pauses[:3] == [1, 2, 3], "it waits longer each time"
    assert dict(work.runs) == dict.fromkeys(["bad", "a", "c", "d", "e"], 1)
    assert stage.record.of(events.LeaseLost) == []


def test_a_result_that_waits_to_be_written_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    _text_pauses(monkeypatch, 0.02)
    work = Returning(FOR_NOW["no answer"])
    with serving(work.job(), store=work.store, slots=1) as stage:
        work.begin(stage, "bad")
        work.may_end.set()
        eventually(lambda: work.bucket.puts["bad"])
        stage.client.enqueue("test.job", {}, task_id="next")
        tries = work.bucket.puts["bad"]
        eventually(lambda: work.bucket.puts["bad"] >= tries + 3)
        assert stage.client.get("next").status is Status.PENDING
        work.bucket.broken.clear()
        work.end(stage, "bad", "next")


@pytest.mark.slow
def test_no_text_is_tried_before_its_time_whatever_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    _text_pauses(monkeypatch, 3600.0)
    monkeypatch.setattr("thunderagent.agent.in_flight.TEXT_WAITS_CLOSING_S", 3600.0, raising=False)
    work = Returning(FOR_NOW["no answer"])
    with serving(work.job(), store=work.store, slots=2, drain_s=0.2) as stage:
        work.begin(stage, "bad")
        work.may_end.set()
        eventually(lambda: work.bucket.puts["bad"])
        for name in map(str, range(5)):
            stage.agent.wake()
            work.begin(stage, name)
            work.end(stage, name)
        assert work.bucket.puts["bad"] == 1
        stage.stop()
    assert work.bucket.puts["bad"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("on_bad_result", "status"), [("note", Status.SUCCESS), ("fail", Status.FAILED)])
@pytest.mark.parametrize("ends", ["drain", "time", "grant"])
def test_a_result_that_cannot_be_written_for_long_is_noted_as_not_stored(
    ends: str, on_bad_result: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    _text_pauses(monkeypatch, 0.02)
    if ends == "time":
        monkeypatch.setattr("thunderagent.agent.in_flight.TEXT_WAITS_S", 0.1, raising=False)
    work = Returning(FOR_NOW["no answer"])
    region: dict[str, Any] = (
        {"region": "eu-west-1", "region_arbiter": "sqlite:///arbiter.db"} if ends == "grant" else {}
    )
    with serving(work.job(on_bad_result=on_bad_result), store=work.store, slots=2, drain_s=0.2, **region) as stage:
        grant = Grant(epoch=1, valid_until=since_boot() + 3600.0, reason="a test")
        stage.agent.gate.grant = grant if region else stage.agent.gate.grant
        work.begin(stage, "bad")
        work.may_end.set()
        eventually(lambda: work.bucket.puts["bad"] >= 2)
        if ends == "drain":
            stage.stop()
        elif ends == "grant":
            stage.agent.gate.grant = replace(grant, is_draining=True)
        ended = stage.end_of("bad")
    assert (ended.status, work.runs["bad"]) == (status, 1)
    assert "the result was not stored: 503 Slow Down" in str(ended.error)


@pytest.mark.slow
def test_a_drain_stores_what_can_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _text_pauses(monkeypatch, 3600.0)
    monkeypatch.setattr("thunderagent.agent.in_flight.TEXT_WAITS_CLOSING_S", 0.02, raising=False)
    work = Returning(FOR_NOW["no answer"])
    with serving(work.job(), store=work.store) as stage:
        work.begin(stage, "bad")
        work.may_end.set()
        eventually(lambda: work.bucket.puts["bad"])
        work.bucket.broken.clear()
        stage.stop()
        work.end(stage, "bad")


def test_texts_that_take_long_to_fail_hold_up_one_turn_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _text_pauses(monkeypatch, 0.2)
    monkeypatch.setattr("thunderagent.agent.in_flight.TEXTS_FAIL_S", 0.0, raising=False)
    work = Returning(FOR_NOW["no answer"])
    work.bucket.broken["s3://bucket/worse"] = FOR_NOW["no answer"]
    with serving(work.job(), store=work.store, slots=3) as stage:
        work.begin(stage, "bad", "worse")
        work.may_end.set()
        stage.record.wait(events.StoreFailed, where=lambda one: "it was not begun, as others" in one.error)
        work.bucket.broken.clear()
        work.end(stage, "bad", "worse")


def test_a_bucket_that_raises_anything_costs_one_result() -> None:
    work = Returning(RuntimeError("a bucket of somebody else"))
    with serving(work.job(), store=work.store, slots=2) as stage:
        work.begin(stage, "bad", "a")
        work.end(stage, "a")
        ended = stage.end_of("bad")
    assert ended.status is Status.SUCCESS
    assert re.search(
        r"the result was not stored: bad#result\.1\S* could not be written: RuntimeError", str(ended.error)
    )


def test_a_payload_that_cannot_be_written_again_holds_up_its_own_outcome_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _text_pauses(monkeypatch, 0.02)
    engine = Apart()
    client = Client(store := TaskStore(engine), Settings())
    large = client.enqueue("test.job", LONG, task_id="large")
    small = client.enqueue("test.job", {}, task_id="small")
    engine.chance("put_texts", Fault.THROTTLED, 1.0)
    with serving(Work().job(answer=Fail("no")), store=store, slots=2, keep_failed_days=1000) as stage:
        assert stage.end_of(small).status is Status.FAILED
        eventually(lambda: engine.hits.count(("put_texts", Fault.THROTTLED)) >= 3)
        assert stage.client.get(large).status is Status.RUNNING
        engine.calm()
        ended = stage.end_of(large)
    assert (ended.status, ended.crash_count) == (Status.FAILED, 0)
    assert engine.until(large) >= (ended.expire_at or math.inf)
