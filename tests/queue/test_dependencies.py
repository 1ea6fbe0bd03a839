"""`depends_on` from end to end: an agent in a thread, and no sweep unless the test is about it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine import LONG_S, Stage, put, seen, serving, settings
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.client import Client
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import job
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.dependencies import MOST_LINKED, linked_bytes
from thunderagent.model.errors import NotAllowed, ParentNotFound, StoreUnavailable, TooManyDependents
from thunderagent.model.task import Lane, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.queue.dependents import Dependents, Ended
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.testing import memory_store
from thunderagent.testing.faulty_engine import Fault, FaultyEngine

Payload = dict[str, Any]
NO_SWEEP_S = 600.0
DELAY_S = 0.2
"""Time for a test to put the children of a task before it runs."""


@job("test.number")
def number(ctx: Context, payload: Payload) -> int:
    return int(payload["n"])


@job("test.sum")
def add(ctx: Context, payload: Payload) -> int:
    return sum(value or 0 for value in ctx.parent_results().values())


@job("test.results")
def results(ctx: Context, payload: Payload) -> dict[str, Any]:
    return dict(ctx.parent_results())


@job("test.fails")
def fails(ctx: Context, payload: Payload) -> Fail:
    return Fail("no")


@job("test.closes")
def closes(ctx: Context, payload: Payload) -> Cancel:
    return Cancel("not today")


class Switch:
    """A job that fails until it is told not to."""

    def __init__(self) -> None:
        self.works = threading.Event()

        @job("test.switch")
        def switched(ctx: Context, payload: Payload) -> int | Fail:
            return 1 if self.works.is_set() else Fail("not yet")

        self.job = switched


SWITCH = Switch()
JOBS = (number, add, results, fails, closes, SWITCH.job)


@pytest.fixture
def stage() -> Iterator[Stage]:
    SWITCH.works.clear()
    with serving(*JOBS, sweep_s=NO_SWEEP_S) as stage:
        yield stage


def test_a_parent_must_exist(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 1})
    with pytest.raises(ParentNotFound, match="nobody, nowhere"):
        stage.client.enqueue(add, {}, task_id="child", depends_on=["nobody", parent, "nowhere"])
    assert stage.store.get(["child"]) == {}


def test_a_child_runs_as_soon_as_its_parent_has_succeeded(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 41}, delay_s=DELAY_S)
    child = stage.client.enqueue(results, {}, depends_on=[parent])
    assert (child.status, child.waiting_for) == (Status.BLOCKED, frozenset({parent.task_id}))
    ended = stage.end_of(child)
    assert (ended.status, ended.result) == (Status.SUCCESS, {parent.task_id: 41})
    assert ended.waiting_for == frozenset()
    started = stage.client.get(parent).finished_at, ended.started_at
    assert started[0] is not None
    assert started[1] is not None
    assert started[0] <= started[1]
    [unparked] = stage.record.of(queue_events.ChildUnparked)
    assert (unparked.task_id, unparked.parent_id) == (child.task_id, parent.task_id)


def test_a_child_of_a_task_that_has_succeeded_does_not_wait(stage: Stage) -> None:
    parent = stage.end_of(stage.client.enqueue(number, {"n": 5}))
    child = stage.client.enqueue(results, {}, depends_on=[parent])
    assert child.status is Status.PENDING
    assert stage.end_of(child).result == {parent.task_id: 5}


@pytest.mark.slow
def test_a_child_keeps_a_delay_of_its_own(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 1}, delay_s=DELAY_S)
    child = stage.client.enqueue(results, {}, depends_on=[parent], delay_s=2 * DELAY_S)
    ended = stage.end_of(child)
    assert ended.started_at is not None
    assert ended.started_at >= ended.submitted_at + 2 * DELAY_S


@pytest.mark.slow
def test_a_parent_that_snoozes_and_fails_once_still_holds_its_child_back(stage: Stage) -> None:
    order: list[str] = []

    @job("test.number", max_retry=1)
    def slow(ctx: Context, payload: Payload) -> int | Snooze:
        order.append(f"parent {ctx.fence}")
        if ctx.fence == 1:
            return Snooze(0.05)
        if ctx.fence == 2:
            raise RuntimeError("boom")
        return 3

    @job("test.child")
    def child_job(ctx: Context, payload: Payload) -> None:
        order.append("child")

    with serving(slow, child_job, sweep_s=NO_SWEEP_S) as own:
        parent = own.client.enqueue(slow, {}, delay_s=DELAY_S)
        own.end_of(own.client.enqueue(child_job, {}, depends_on=[parent]))
    assert order == ["parent 1", "parent 2", "parent 3", "child"]


def test_results_of_parents_are_read_by_id_in_the_order_of_depends_on(stage: Stage) -> None:
    parents = [stage.client.enqueue(number, {"n": n}, task_id=f"p{n}") for n in (3, 1, 2)]
    failed = stage.end_of(stage.client.enqueue(fails, {}, task_id="p9"))
    child = stage.client.enqueue(results, {}, depends_on=[failed, *parents], on_parent_failure="run")
    assert stage.end_of(child).result == {"p1": 1, "p2": 2, "p3": 3, "p9": None}


@pytest.mark.slow
def test_three_hundred_children_of_one_parent_all_run(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 7}, delay_s=4.0)
    children = [stage.client.enqueue(add, {}, depends_on=[parent]) for _ in range(300)]
    assert len(stage.client.get(parent).dependents) == 300
    stage.record.wait(events.TaskSucceeded, 301)
    ended = stage.store.get(child.task_id for child in children)
    assert {(task.status, task.result, task.fence) for task in ended.values()} == {(Status.SUCCESS, 7, 1)}


@pytest.mark.slow
def test_a_child_of_three_hundred_parents_runs_once_after_the_last(stage: Stage) -> None:
    parents = [one.task for one in stage.client.enqueue_many(number, [{"n": n} for n in range(300)], delay_s=4.0)]
    child = stage.client.enqueue(add, {}, depends_on=parents)
    assert len(child.waiting_for) == 300
    ended = stage.end_of(child)
    assert (ended.status, ended.result, ended.fence) == (Status.SUCCESS, sum(range(300)), 1)
    last = max(task.finished_at or 0.0 for task in stage.store.get(parent.task_id for parent in parents).values())
    assert ended.started_at is not None
    assert last <= ended.started_at


ENDS = {
    "failed": ("test.fails", Status.FAILED),
    "closed": ("test.closes", Status.DONE),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("policy", "status"), [("fail", Status.FAILED), ("cancel", Status.DONE)])
def test_three_generations_end_with_their_ancestor(stage: Stage, end: str, policy: str, status: Status) -> None:
    name, parent_status = ENDS[end]
    family = [stage.client.enqueue(name, {}, task_id="parent", delay_s=DELAY_S)]
    for generation in ("child", "grandchild", "great-grandchild"):
        family.append(
            stage.client.enqueue(add, {}, task_id=generation, depends_on=[family[-1]], on_parent_failure=policy)
        )
    ended = [stage.end_of(task) for task in family]
    assert [task.status for task in ended] == [parent_status, status, status, status]
    reasons = [task.error if status is Status.FAILED else task.done_reason for task in ended[1:]]
    assert reasons == [
        f"parent parent ended as {parent_status}",
        f"parent child ended as {status}",
        f"parent grandchild ended as {status}",
    ]
    assert [(task.fence, task.waiting_for, task.expire_at is not None) for task in ended[1:]] == [
        (0, frozenset(), True)
    ] * 3
    doomed = {one.task_id for one in stage.record.wait(queue_events.ChildDoomed, 3)}
    assert doomed == {task.task_id for task in family[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_children_that_run_all_the_same_stop_the_fall(stage: Stage, end: str) -> None:
    parent = stage.client.enqueue(ENDS[end][0], {}, delay_s=DELAY_S)
    child = stage.client.enqueue(add, {}, depends_on=[parent], on_parent_failure="run")
    grandchild = stage.client.enqueue(results, {}, depends_on=[child])
    great_grandchild = stage.client.enqueue(results, {}, depends_on=[grandchild])
    assert stage.end_of(child).result == 0
    assert stage.end_of(grandchild).result == {child.task_id: 0}
    assert stage.end_of(great_grandchild).result == {grandchild.task_id: {child.task_id: 0}}


@pytest.mark.slow
def test_a_child_that_runs_all_the_same_waits_for_its_other_parents(stage: Stage) -> None:
    failed = stage.client.enqueue(fails, {}, delay_s=DELAY_S)
    late = stage.client.enqueue(number, {"n": 8}, delay_s=3 * DELAY_S)
    child = stage.client.enqueue(add, {}, depends_on=[failed, late], on_parent_failure="run")
    assert stage.end_of(child).result == 8


@pytest.mark.parametrize(("policy", "status"), [("fail", Status.FAILED), ("cancel", Status.DONE)])
def test_a_parent_that_is_cancelled_while_it_waits_ends_its_children_at_once(
    stage: Stage, policy: str, status: Status
) -> None:
    parent = stage.client.enqueue(number, {"n": 1}, delay_s=600.0)
    child = stage.client.enqueue(add, {}, depends_on=[parent], on_parent_failure=policy)
    grandchild = stage.client.enqueue(add, {}, depends_on=[child], on_parent_failure=policy)
    assert stage.client.cancel(parent).status is Status.DONE
    assert [stage.client.get(task).status for task in (child, grandchild)] == [status, status]


@pytest.mark.parametrize("policy", ["fail", "cancel", "run"])
def test_a_child_that_is_put_after_its_parent_failed_is_judged_at_once(stage: Stage, policy: str) -> None:
    parent = stage.end_of(stage.client.enqueue(fails, {}))
    child = stage.client.enqueue(add, {}, depends_on=[parent], on_parent_failure=policy)
    if policy == "run":
        assert child.status in (Status.PENDING, Status.RUNNING), "the agent may be faster than the answer"
        assert stage.end_of(child).status is Status.SUCCESS
    else:
        assert child.status is {"fail": Status.FAILED, "cancel": Status.DONE}[policy]
        assert stage.end_of(child).status is child.status


@pytest.mark.slow
def test_a_blocked_child_that_is_cancelled_is_left_alone_by_its_parent(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 1}, delay_s=2 * DELAY_S)
    child = stage.client.enqueue(add, {}, depends_on=[parent])
    grandchild = stage.client.enqueue(add, {}, depends_on=[child])
    assert stage.client.cancel(child).done_reason == "cancelled"
    assert stage.client.get(grandchild).error == f"parent {child.task_id} ended as DONE"
    assert stage.end_of(parent).status is Status.SUCCESS
    assert stage.client.get(child).fence == 0


def test_the_same_child_twice_is_one_task(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 1}, delay_s=DELAY_S)
    child, again = (stage.client.enqueue(add, {}, task_id="child", depends_on=[parent]) for _ in range(2))
    assert (child.task_id, child.submitted_at) == (again.task_id, again.submitted_at)
    assert stage.client.get(parent).dependents == {"child"}
    assert stage.end_of(child).fence == 1


# Others who come between two writes


class Interrupted(FaultyEngine):
    """An engine before whose next request of a verb somebody else does something."""

    def __init__(self) -> None:
        super().__init__(SqliteEngine(MEMORY))
        self.between: dict[str, Callable[[], object]] = {}

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        self._interrupt(["put"])
        return super().put(rows, fresh=fresh)

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self._interrupt([write.verb for write in batch])
        return super().apply(batch)

    def _interrupt(self, verbs: Sequence[str]) -> None:
        for come_between in [self.between.pop(verb) for verb in verbs if verb in self.between]:
            come_between()


@pytest.mark.parametrize("window", ["put", "register dependent"])
@pytest.mark.parametrize(
    ("end", "policy", "expected"),
    [
        (Status.SUCCESS, "fail", Status.PENDING),
        (Status.DONE, "run", Status.PENDING),
        (Status.DONE, "fail", Status.FAILED),
        (Status.DONE, "cancel", Status.DONE),
        (None, "fail", Status.FAILED),
    ],
)
def test_a_parent_that_ends_while_its_child_is_put_is_seen_by_who_puts_it(
    window: str, end: Status | None, policy: str, expected: Status
) -> None:
    """Without any agent, and so without a sweep that would find it later."""
    engine = Interrupted()
    store = TaskStore(engine)
    client = Client(store, settings())
    parent = client.enqueue(number, {"n": 1}, task_id="parent")

    def end_parent() -> None:
        if end is Status.SUCCESS:
            [lease] = store.claim([Wanted(seen(parent), 60.0)], owner="agent")
            store.settle([writes.succeed(lease, now=store.clock.now(), expire_at=store.clock.now() + 60)])
        else:
            client.cancel(parent)
        if end is None:
            engine.delete(list(engine.get(["parent"]).values()))

    engine.between[window] = end_parent
    child = client.enqueue(add, {}, task_id="child", depends_on=[parent], on_parent_failure=policy)
    assert not engine.between
    assert child.status is expected
    engine.close()


# Many children of one parent


class CountingEngine(FaultyEngine):
    """Counts the writes of each verb."""

    def __init__(self) -> None:
        super().__init__(SqliteEngine(MEMORY))
        self.written = Counter[str]()

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        self.written.update(write.verb for write in batch)
        return super().apply(batch)


@pytest.mark.slow
def test_a_parent_learns_of_a_batch_of_children_in_one_write() -> None:
    """Each write of its row writes the whole of it: one for each child is the square of their number."""
    engine = CountingEngine()
    client = Client(TaskStore(engine), settings())
    parents = [client.enqueue(number, {"n": one}, task_id=f"p{one}") for one in range(2)]
    outcomes = client.enqueue_many(add, [{}] * 2_001, depends_on=parents, on_parent_failure="run")
    assert engine.written["register dependent"] == 2 * 5
    names = {one.task.task_id for one in outcomes}
    for parent in parents:
        assert client.get(parent).dependents == names
    assert all(one.error is None and one.created for one in outcomes)
    assert {(one.task.status, one.task.on_parent_failure) for one in outcomes} == {(Status.BLOCKED, "run")}
    engine.close()


def test_the_sweep_makes_a_page_of_children_known_in_one_write() -> None:
    engine = CountingEngine()
    store = TaskStore(engine)
    client = Client(store, settings())
    parent = client.enqueue(number, {"n": 1}, task_id="p")
    engine.fail("register dependent", Fault.LOST_REQUEST)
    outcomes = client.enqueue_many(add, [{}] * 250, depends_on=[parent])
    assert {type(one.error) for one in outcomes} == {StoreUnavailable}
    assert client.get(parent).dependents == frozenset()
    engine.written.clear()
    dependents = Dependents(store, EventBus(), keep_success_s=9.0, keep_failed_s=9.0)
    lost = LostLeases(store, guard_s=2.0)
    rescuer = Rescuer(store, EventBus(), dependents, lost, owner="me", max_crashes=3, sweep_s=15.0)
    rescuer.heal([Lane()])
    assert engine.written["register dependent"] == 3
    assert client.get(parent).dependents == {one.task.task_id for one in outcomes}
    engine.close()


@pytest.mark.parametrize(("end", "status"), [("test.number", Status.PENDING), ("test.fails", Status.FAILED)])
def test_a_batch_of_children_whose_parent_ends_while_they_are_put_is_told(end: str, status: Status) -> None:
    engine = Interrupted()
    client = Client(TaskStore(engine), settings())
    parent, other = client.enqueue(end, {"n": 1}, task_id="p"), client.enqueue(number, {"n": 1}, task_id="other")

    def end_parent() -> None:
        now = client.store.clock.now()
        [lease] = client.store.claim([Wanted(seen(parent), 60.0)], owner="somebody")
        if status is Status.FAILED:
            client.store.settle([writes.fail(lease, error="no", now=now, expire_at=now + 99)])
        else:
            client.store.settle([writes.succeed(lease, now=now, expire_at=now + 99)])

    engine.between["register dependent"] = end_parent
    outcomes = client.enqueue_many(add, [{}] * 3, depends_on=["p"])
    assert not engine.between
    assert [one.task.status for one in outcomes] == [status] * 3
    assert [one.task.status for one in client.enqueue_many(add, [{}], depends_on=["p", other])] == [
        Status.FAILED if status is Status.FAILED else Status.BLOCKED
    ]
    engine.close()


def test_a_batch_whose_parent_does_not_exist_puts_nothing() -> None:
    client = Client(TaskStore(SqliteEngine(MEMORY)), settings())
    outcomes = client.enqueue_many(add, [{}, {}], depends_on=["gone"])
    assert {type(one.error) for one in outcomes} == {ParentNotFound}
    assert list(client.list()) == []
    client.close()


# Crashes between two writes


def healing(faulty: FaultyEngine) -> Any:
    return serving(*JOBS, store=TaskStore(faulty), sweep_s=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["test.number", "test.fails"])
def test_a_child_whose_parent_was_never_told_of_it_is_found_by_the_sweep(end: str) -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    with healing(faulty) as stage:
        parent = stage.client.enqueue(end, {"n": 2}, task_id="parent", delay_s=1.0)
        faulty.fail("register dependent", Fault.LOST_REQUEST)
        with pytest.raises(StoreUnavailable):
            stage.client.enqueue(add, {}, task_id="child", depends_on=[parent])
        assert stage.client.get("child").status is Status.BLOCKED
        ended = stage.end_of("child")
        assert (ended.status, ended.result) == ((Status.SUCCESS, 2) if end == "test.number" else (Status.FAILED, None))
        assert stage.client.get("parent").dependents == {"child"}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["parent done", "unpark"])
def test_a_child_that_was_not_told_of_the_end_is_found_by_the_sweep(verb: str) -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    with healing(faulty) as stage:
        parent = stage.client.enqueue(number, {"n": 2}, delay_s=DELAY_S)
        child = stage.client.enqueue(add, {}, depends_on=[parent])
        faulty.fail(verb, Fault.LOST_REQUEST)
        assert stage.end_of(child).result == 2
        stage.record.wait(events.StoreFailed, where=lambda event: event.during == "telling dependents")


@pytest.mark.slow
def test_a_child_that_was_not_told_of_a_failure_is_found_by_the_sweep() -> None:
    faulty = FaultyEngine(SqliteEngine(MEMORY))
    with healing(faulty) as stage:
        parent = stage.client.enqueue(fails, {}, delay_s=DELAY_S)
        child = stage.client.enqueue(add, {}, depends_on=[parent])
        grandchild = stage.client.enqueue(add, {}, depends_on=[child])
        faulty.fail("doom", Fault.LOST_REQUEST)
        assert stage.end_of(grandchild).error == f"parent {child.task_id} ended as FAILED"


# A graph that is retried by hand


def graph(stage: Stage, policy: str = "fail") -> list[Task]:
    """Three generations whose first fails."""
    family = [stage.client.enqueue(SWITCH.job, {}, delay_s=DELAY_S)]
    for _ in range(2):
        family.append(stage.client.enqueue(add, {}, depends_on=[family[-1]], on_parent_failure=policy))
    assert all(stage.end_of(task).status is not Status.SUCCESS for task in family)
    return family


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "cancel"])
def test_a_graph_that_failed_is_retried_from_its_root(stage: Stage, policy: str) -> None:
    family = graph(stage, policy)
    SWITCH.works.set()
    for task in family:
        stage.client.retry(task)
    ended = [stage.end_of(task) for task in family]
    assert [(task.status, task.result, task.error, task.done_reason) for task in ended] == [
        (Status.SUCCESS, 1, None, None)
    ] * 3


def test_a_child_is_not_retried_before_its_parent(stage: Stage) -> None:
    parent, child, _ = graph(stage)
    with pytest.raises(NotAllowed, match=f"depends on {parent.task_id!r}, which is FAILED: retry that first"):
        stage.client.retry(child)
    assert stage.client.get(child).status is Status.FAILED


@pytest.mark.slow
def test_a_graph_that_is_retried_and_fails_again_ends_again(stage: Stage) -> None:
    family = graph(stage)
    stage.agent.stop()
    stage.join()
    waiting = [stage.client.retry(task) for task in family]
    assert [task.status for task in waiting] == [Status.PENDING, Status.BLOCKED, Status.BLOCKED]
    with serving(*JOBS, store=stage.store, sweep_s=NO_SWEEP_S) as next_agent:
        ended = [next_agent.end_of(task) for task in family]
    assert [task.status for task in ended] == [Status.FAILED] * 3
    assert [len(task.errors) for task in ended] == [2, 0, 0]


@pytest.mark.slow
def test_a_retry_waits_for_open_parents_even_if_their_failure_would_not_matter(stage: Stage) -> None:
    parent = stage.client.enqueue(number, {"n": 6}, delay_s=2 * DELAY_S)
    child = stage.client.enqueue(results, {}, depends_on=[parent], on_parent_failure="run")
    stage.client.cancel(child)
    assert stage.client.retry(child).status is Status.BLOCKED
    assert stage.end_of(child).result == {parent.task_id: 6}


def test_the_end_of_a_parent_wakes_the_agent_for_its_children() -> None:
    with serving(*JOBS, sweep_s=NO_SWEEP_S, poll_min_s=30.0, poll_max_s=30.0, poll_idle_s=30.0) as stage:
        parent = stage.client.enqueue(number, {"n": 1}, delay_s=0.0)
        child = stage.client.enqueue(add, {}, depends_on=[parent])
        assert stage.client.wait(child, timeout_s=LONG_S).status is Status.SUCCESS


# How many tasks may wait for one


def a_full_parent(client: Client, *, left: int) -> Task:
    """A task whose row has room for so many more bytes of children."""
    ids = frozenset(f"{number:0511}" for number in range(732))
    rest = MOST_LINKED - linked_bytes(ids) - left - 1
    return put(client.store, "parent", created_at=client.store.clock.now() + 600, dependents=ids | {"r" * rest})


def test_children_for_whom_their_parent_has_no_room_are_refused_before_they_are_put() -> None:
    client = Client(memory_store(), settings())
    parent = a_full_parent(client, left=101)
    client.enqueue("test.number", {}, task_id="a" * 100, depends_on=[parent])
    with pytest.raises(TooManyDependents, match=r"734 tasks wait for 'parent'.*no room for 1 more \(375,000 bytes"):
        client.enqueue("test.number", {}, task_id="b", depends_on=[parent])
    many = client.enqueue_many("test.number", [{}, {}], task_ids=["c", "d"], depends_on=[parent])
    assert [type(one.error) for one in many] == [TooManyDependents] * 2
    assert client.store.peek(["b", "c", "d"]) == {}
    row = client.store.peek(["parent"])["parent"]
    assert linked_bytes(row.dependents) == MOST_LINKED
    client.enqueue("test.number", {}, task_id="a" * 100, depends_on=[parent])  # the same child has its room already


def test_of_two_who_saw_the_last_room_of_a_parent_one_has_it_and_the_other_is_told_by_the_sweep() -> None:
    engine = Interrupted()
    store = TaskStore(engine)
    client = Client(store, settings())
    parent = a_full_parent(client, left=101)

    def come_first() -> None:
        client.enqueue("test.number", {}, task_id="a" * 100, depends_on=[parent])

    engine.between["register dependent"] = come_first
    late = client.enqueue("test.number", {}, task_id="b" * 100, depends_on=[parent])
    row = store.peek(["parent"])["parent"]
    assert "a" * 100 in row.dependents and late.task_id not in row.dependents
    assert linked_bytes(row.dependents) <= MOST_LINKED
    assert store.peek([late.task_id])[late.task_id].status is Status.BLOCKED


def test_a_task_that_waits_for_more_than_its_row_has_room_for_is_refused() -> None:
    client = Client(memory_store(), settings())
    ids = [f"{number:0511}" for number in range(400)]
    for name in ids:
        put(client.store, name)
    with pytest.raises(TooManyDependents, match=r"depends_on names 400 tasks, more than a row has room for"):
        client.enqueue("test.number", {}, task_id="child", depends_on=ids)
    assert client.enqueue("test.number", {}, task_id="child", depends_on=ids[:360]).status is Status.BLOCKED


def test_the_largest_row_of_a_task_stays_under_what_dynamodb_takes() -> None:
    store = memory_store()
    full = a_full_parent(Client(store, settings()), left=0)
    history = tuple({"at": 1800000000.123, "attempt": 9, "error": "x" * 1024, "agent": "h" * 80} for _ in range(10))
    texts: dict[str, Any] = {
        "error": "e" * 1024,
        "done_reason": "d" * 1024,
        "progress_text": "p" * 1024,
        "payload_text": "y" * 512,
    }
    largest = replace(full, errors=history, result_text="r" * 512, unique_key="u" * 512, limit_key="l" * 512, **texts)
    item = expressions.encode_row(largest.to_row())
    assert MOST_LINKED < len(json.dumps(item, separators=(",", ":"))) < 400 * 1024


# What a child is told of parents that did not give it a result


@job("test.not_finite")
def not_finite(ctx: Context, payload: Payload) -> float:
    return float("nan")


@job("test.why")
def why_failed(ctx: Context, payload: Payload) -> Any:
    failed = {name: (one.status, one.reason) for name, one in ctx.failed_parents().items()}
    return {"failed": failed, "results": dict(ctx.parent_results())}


def test_a_child_that_runs_after_failures_is_told_which_and_why() -> None:
    with serving(number, fails, closes, why_failed) as stage:
        put = [(number, {"n": 3}), (fails, {}), (closes, {})]
        good, bad, closed = (stage.client.enqueue(one, payload, delay_s=DELAY_S) for one, payload in put)
        child = stage.client.enqueue(why_failed, {}, depends_on=[good, bad, closed], on_parent_failure="run")
        result = stage.client.wait(child, timeout_s=LONG_S).result
    assert result["failed"] == {bad.id: ["FAILED", "no"], closed.id: ["DONE", "not today"]}
    assert result["results"] == {good.id: 3, bad.id: None, closed.id: None}


def test_a_result_that_was_not_stored_is_never_handed_on_as_none() -> None:
    with serving(not_finite, results) as stage:
        parent = stage.client.enqueue(not_finite, {}, task_id="the-parent", delay_s=DELAY_S)
        child = stage.client.enqueue(results, {}, depends_on=[parent], max_retry=0)
        stage.record.wait(events.TaskFailed)
        done = stage.client.get(child)
    assert done.status is Status.FAILED
    assert done.error is not None
    assert done.error.startswith(
        "ParentResultLost: the-parent of test.not_finite succeeded, and the result was not stored"
    )


@pytest.mark.parametrize("policy", ["fail", "cancel", "run"])
def test_a_late_word_of_a_parent_that_was_retried_meanwhile_changes_nothing(policy: str) -> None:
    store = memory_store()
    client = Client(store, settings())
    parent = client.enqueue("test.number", {})
    child = client.enqueue("test.sum", {}, depends_on=[parent], on_parent_failure=policy)
    [lease] = store.claim([Wanted(seen(client.get(parent)), 60.0)], owner="agent-0")
    now = store.clock.now()
    [ended] = store.settle([writes.fail(lease, error="no", now=now, expire_at=now + 60)])
    asleep = Ended(parent.id, Status.FAILED, ended.dependents)
    client.retry(parent)
    dependents = Dependents(store, EventBus(), keep_success_s=60.0, keep_failed_s=60.0)
    dependents.tell([asleep])
    assert client.get(child).status is Status.BLOCKED, "its parent is open again"
    [lease] = store.claim([Wanted(seen(client.get(parent)), 60.0)], owner="agent-0")
    [ended] = store.settle([writes.succeed(lease, now=now, expire_at=now + 60, result="1")])
    dependents.tell([asleep, Ended(parent.id, Status.SUCCESS, ended.dependents)])
    assert client.get(child).status is Status.PENDING, "the last word counts"
