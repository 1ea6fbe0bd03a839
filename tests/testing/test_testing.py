"""The tools for tests that ship with the package."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.periodic import periodic
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import (
    ConfigurationError,
    PayloadInvalid,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    WaitTimeout,
)
from thunderagent.model.schedules import Tick
from thunderagent.model.task import Candidate, Lane, Lease, Status
from thunderagent.model.ticks import every
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import limit_row
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.testing import (
    ANY,
    FakeClock,
    Fault,
    FaultyEngine,
    Recorder,
    make_lease,
    memory_client,
    memory_store,
    run_until_idle,
)
from thunderagent.testing.time_travel import Travel

QUICK: dict[str, Any] = {"poll_min_s": 0.01, "poll_max_s": 0.05, "poll_idle_s": 0.05, "sweep_s": 0.5}


@job("test.add", queue="sums")
def add(ctx: Context, payload: dict[str, int]) -> int:
    results: Iterable[int] = ctx.parent_results().values()
    return sum(payload.values()) + sum(results)


def agent_for(client: Client, **options: Any) -> Agent:
    return Agent(client.store, Registry(add), client.settings, rng=random.Random(1), **options)


# Time


def test_both_clocks_advance_and_only_the_shared_one_jumps() -> None:
    clock = FakeClock(now=100.0, monotonic=5.0)
    clock.advance(2.5)
    clock.jump(-600.0)
    assert (clock.now(), clock.earliest(), clock.latest(), clock.monotonic()) == (-497.5, -497.5, -497.5, 7.5)
    assert clock.is_usable


def test_a_store_in_memory_lives_on_the_clock_that_is_given() -> None:
    clock = FakeClock()
    client = memory_client(clock)
    task = client.enqueue("any", {}, delay_s=60.0)
    assert task.created_at == clock.now() + 60.0
    assert client.store.ready(Lane(), limit=5).entries == ()
    clock.advance(60.0)
    [entry] = client.store.ready(Lane(), limit=5).entries
    [lease] = client.store.claim([Wanted(entry, 30.0)], owner="me")
    assert (lease.held_from, lease.task.lock_time) == (clock.monotonic(), clock.now() + 30.0)


def test_two_stores_in_memory_share_nothing() -> None:
    one, other = memory_client(max_retry=7), memory_client()
    one.enqueue(add, {"a": 1}, task_id="a")
    assert one.get("a").max_retry == 7
    assert other.store.get(["a"]) == {}


def test_every_moment_at_which_something_is_due_is_known() -> None:
    clock = FakeClock()
    client, now = memory_client(clock), clock.now()
    client.enqueue(add, {"a": 1}, delay_s=600.0)
    client.pauses.pause(job=add, for_s=900.0)
    client.pauses.pause(queue="sums")
    task = client.enqueue(add, {"a": 2}, queue="other")
    [entry] = client.store.ready(task.lane, limit=5).entries
    client.store.claim([Wanted(entry, 300.0)], owner="gone")
    moments = Travel(agent_for(client), client, clock.advance)._moments()
    assert sorted(round(at - now) for at in moments) == [302, 600, 900]


def test_no_tick_is_leapt_over_however_many_queues_the_agent_looks_into() -> None:
    minutely = periodic(every(1).minute)(job("minutely", queue="minutes")(note_tick))
    client = memory_client(FakeClock())
    recorder = run_until_idle(Agent(client.store, Registry(minutely), client.settings), client, for_s=200.0)
    assert [round(one.late_s) for one in recorder.of(queue_events.TickPut)] == [0, 0, 0]
    assert recorder.of(queue_events.TicksSkipped) == []


def note_tick(ctx: Context, payload: Tick) -> None:
    """A handler that does nothing."""


def test_real_time_cannot_be_moved() -> None:
    client = memory_client()
    with pytest.raises(ConfigurationError, match="only time of a FakeClock can be moved"):
        run_until_idle(agent_for(client), client, advance=True)


# Leases for handlers


def test_a_handler_can_be_called_with_a_lease_that_is_in_no_store() -> None:
    context = Context(make_lease(add, {"a": 1}, task_id="t", retry_count=2, fence=9))
    assert (context.idempotency_key, context.attempt, context.lease.task.queue) == ("t:9", 3, "sums")
    assert add(context, {"a": 1, "b": 2}) == 3


def test_a_lease_is_whole_and_its_payload_is_checked() -> None:
    lease = make_lease("test.named", {"x": 1}, lease_s=30.0, lease_owner="me")
    assert (lease.task.status, lease.owner, lease.task.lease_sec, lease.task.payload) == (
        Status.RUNNING,
        "me",
        30.0,
        {"x": 1},
    )
    with pytest.raises(PayloadInvalid):
        make_lease(add, {"a": "one"})


# Faults


@pytest.fixture
def faulty() -> FaultyEngine:
    return FaultyEngine(SqliteEngine(MEMORY), seed=3)


def lease_of(store: TaskStore, name: str = "a") -> Lease:
    task = Client(store, memory_client().settings).enqueue("job", {}, task_id=name)
    candidate = Candidate(name, task.status_value, task.created_at, task.job)
    [lease] = store.claim([Wanted(candidate, 60.0)], owner="me")
    return lease


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        (Fault.LOST_REQUEST, StoreUnavailable, False),
        (Fault.THROTTLED, StoreThrottled, False),
        (Fault.LOST_REPLY, StoreUnavailable, True),
    ],
)
def test_a_write_with_a_fault_has_no_answer_and_its_neighbours_have_theirs(
    faulty: FaultyEngine, fault: Fault, error: type[StoreError], done: bool
) -> None:
    store = TaskStore(faulty)
    leases = [lease_of(store, name) for name in ("a", "b", "c")]
    batch = [writes.release(lease, now=1.0) for lease in leases]
    faulty.fail("release", fault)
    first, *others = faulty.apply(batch)
    assert isinstance(first.error, error)
    assert all(answer.won and answer.error is None for answer in others)
    assert (store.get(["a"])["a"].status is Status.PENDING) == done
    assert faulty.hits == [("release", fault)]


def test_a_repeated_write_answers_with_the_second(faulty: FaultyEngine) -> None:
    store = TaskStore(faulty)
    lease = lease_of(store)
    faulty.fail("renew", Fault.REPEATED)
    [renewal] = store.renew([Beat(lease)])
    assert renewal.lease is not None
    assert renewal.lease.task.hb == 2
    faulty.fail("release", Fault.REPEATED)
    [answer] = faulty.apply([writes.release(lease, now=1.0)])
    assert (answer.won, answer.error, answer.row and answer.row["status"]) == (False, None, "PENDING")


def test_a_broken_call_is_done_and_raises(faulty: FaultyEngine) -> None:
    store = TaskStore(faulty)
    lease = lease_of(store)
    faulty.fail("release", Fault.BROKEN_CALL)
    with pytest.raises(StoreUnavailable, match="broken call of release"):
        faulty.apply([writes.release(lease, now=1.0)])
    assert store.get(["a"])["a"].status is Status.PENDING


@pytest.mark.parametrize("done", [False, True])
def test_a_put_may_be_lost_before_and_after_it_is_done(faulty: FaultyEngine, done: bool) -> None:
    client = Client(TaskStore(faulty), memory_client().settings)
    faulty.fail("put", Fault.LOST_REPLY if done else Fault.LOST_REQUEST)
    with pytest.raises(StoreUnavailable):
        client.enqueue("job", {}, task_id="a")
    assert ("a" in client.store.get(["a"])) == done


CALLS: dict[str, Callable[[Engine], Any]] = {
    "get": lambda engine: engine.get(["a"]),
    "page": lambda engine: engine.page("PENDING", limit=5),
    "count": lambda engine: engine.count("PENDING"),
    "lanes": lambda engine: engine.lanes(),
    "delete": lambda engine: engine.delete([{"taskId": "a", "status": "PENDING", "fence": 0}]),
    "expire": lambda engine: engine.expire(0.0),
    "get_texts": lambda engine: engine.get_texts(["a"]),
    "check": lambda engine: engine.check(),
}


@pytest.mark.parametrize("verb", CALLS)
def test_every_other_call_raises_when_it_has_a_fault(faulty: FaultyEngine, verb: str) -> None:
    for fault in (Fault.LOST_REQUEST, Fault.LOST_REPLY):
        faulty.fail(verb, fault)
        with pytest.raises(StoreUnavailable, match=f"{fault} of {verb}"):
            CALLS[verb](faulty)
    CALLS[verb](faulty)


def test_in_an_outage_nothing_answers_and_nothing_is_done(faulty: FaultyEngine) -> None:
    store = TaskStore(faulty)
    lease = lease_of(store)
    faulty.outage()
    for call in CALLS.values():
        with pytest.raises(StoreUnavailable):
            call(faulty)
    [answer] = faulty.apply([writes.release(lease, now=1.0)])
    assert answer.error
    with pytest.raises(StoreUnavailable):
        faulty.put_texts({"a": "text"}, expire_at=1.0)
    faulty.outage(False)
    assert store.get(["a"])["a"].status is Status.RUNNING


def test_a_stale_page_shows_the_index_as_it_was(faulty: FaultyEngine) -> None:
    client = Client(TaskStore(faulty), memory_client().settings)
    client.enqueue("job", {}, task_id="a")
    before = faulty.page("PENDING", limit=5)
    client.enqueue("job", {}, task_id="b")
    faulty.fail("page", Fault.STALE)
    assert faulty.page("PENDING", limit=5) == before
    assert [entry.task_id for entry in faulty.page("PENDING", limit=5).entries] == ["a", "b"]


def test_the_same_seed_gives_the_same_faults() -> None:
    def hits(seed: int) -> list[tuple[str, Fault]]:
        faulty = FaultyEngine(SqliteEngine(MEMORY), seed=seed)
        faulty.chance(ANY, Fault.THROTTLED, 0.3)
        for _ in range(50):
            try:
                faulty.count("PENDING")
                faulty.hits.append(("count", Fault.STALE))  # stands for an answer
            except StoreThrottled:
                pass
        return faulty.hits

    assert hits(1) == hits(1) != hits(2)
    assert 5 < hits(1).count(("count", Fault.THROTTLED)) < 30


def test_after_calm_everything_answers(faulty: FaultyEngine) -> None:
    faulty.chance(ANY, Fault.LOST_REQUEST, 1.0)
    faulty.fail("count", Fault.LOST_REQUEST)
    faulty.outage()
    faulty.calm()
    assert faulty.count("PENDING") == 0


def test_a_sibling_has_the_same_faults(faulty: FaultyEngine, tmp_path: Any) -> None:
    assert faulty.sibling() is faulty, "a database in memory has one connection"
    on_file = FaultyEngine(SqliteEngine(str(tmp_path / "tasks.db")))
    sibling = on_file.sibling()
    assert sibling is not on_file
    on_file.outage()
    with pytest.raises(StoreUnavailable):
        sibling.count("PENDING")
    sibling.close()
    on_file.close()


# Events


def test_a_recorder_finds_what_has_come_and_waits_for_what_comes() -> None:
    bus = EventBus()
    recorder = Recorder(bus)
    bus.emit(queue_events.ChildUnparked(task_id="a", parent_id="p"))
    assert recorder.wait_for(queue_events.ChildUnparked).task_id == "a"
    later = threading.Thread(target=lambda: bus.emit(queue_events.ChildUnparked(task_id="b", parent_id="p")))
    later.start()
    assert recorder.wait_for(queue_events.ChildUnparked, lambda event: event.task_id == "b").task_id == "b"
    later.join()
    recorder.close()
    bus.emit(queue_events.ChildUnparked(task_id="c", parent_id="p"))
    assert [event.task_id for event in recorder.of(queue_events.ChildUnparked)] == ["a", "b"]


def test_a_recorder_says_what_came_instead() -> None:
    bus = EventBus()
    recorder = Recorder(bus)
    with pytest.raises(WaitTimeout, match=r"no ThreadDied came within 0.01 s; the last events were: none"):
        recorder.wait_for(events.ThreadDied, timeout_s=0.01)
    bus.emit(events.AgentStopped(stuck=0))
    with pytest.raises(WaitTimeout, match=r"AgentStopped\(stuck=0\)"):
        recorder.wait_for(events.ThreadDied, timeout_s=0.01)


# An agent that runs dry


def test_an_agent_runs_everything_and_stops() -> None:
    client = memory_client(**QUICK)
    first = client.enqueue(add, {"a": 1})
    second = client.enqueue(add, {"b": 2}, depends_on=[first])
    third = client.enqueue(add, {"c": 3}, depends_on=[first, second], delay_s=0.2)
    agent = agent_for(client)
    recorder = run_until_idle(agent, client)
    assert [client.get(task).result for task in (first, second, third)] == [1, 3, 7]
    assert len(recorder.of(events.TaskSucceeded)) == 3
    assert recorder.of(events.AgentStopped) == [events.AgentStopped(stuck=0)]
    assert agent.running == 0


def test_an_agent_without_tasks_stops_at_once() -> None:
    client = memory_client(**QUICK)
    recorder = run_until_idle(agent_for(client), client)
    assert recorder.of(events.TaskStarted) == []


def test_a_task_that_nobody_can_run_is_reported() -> None:
    client = memory_client(**QUICK)
    client.enqueue("test.unknown", {})
    with pytest.raises(WaitTimeout, match=r"tasks are still open after 0.2 s"):
        run_until_idle(agent_for(client), client, timeout_s=0.2)


def test_a_task_in_the_line_of_a_limit_is_open() -> None:
    client = memory_client(**QUICK)
    taken = limit_row("api", number=1, now=client.store.clock.now(), holders=["another#1"])
    assert client.store.insert_row(taken)[0]
    assert client.enqueue("test.unknown", {}, limit_key="api", limit=1).status is Status.BLOCKED
    with pytest.raises(WaitTimeout, match=r"tasks are still open after 0.2 s"):
        run_until_idle(agent_for(client), client, timeout_s=0.2)


def test_what_ends_the_agent_is_raised() -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    client = Client(TaskStore(faulty), memory_client(**QUICK).settings)
    client.enqueue(add, {})
    faulty.fail("check", Fault.LOST_REQUEST)
    with pytest.raises(StoreUnavailable, match="lost request of check"):
        run_until_idle(agent_for(client), client)


def test_a_memory_store_can_be_given_to_an_engine_test() -> None:
    assert memory_store().engine.url == f"sqlite://{MEMORY}"
