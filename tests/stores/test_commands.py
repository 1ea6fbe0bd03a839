"""Writes on tasks that nobody holds: cancel, retry by hand, dependencies, turns and agents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.stands import Stand, eventually
from thunderagent.model.conditions import Write
from thunderagent.model.task import Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Beat


@pytest.mark.parametrize("status", [Status.PENDING, Status.BLOCKED])
def test_a_queued_task_is_cancelled_at_once(stand: Stand, status: Status) -> None:
    waiting_for = frozenset({"p"} if status is Status.BLOCKED else ())
    task = stand.enqueue(status=status, waiting_for=waiting_for)
    now = stand.store.clock.now()
    [after] = stand.store.write_tasks([writes.cancel_waiting(task, reason="cancelled", now=now, expire_at=now + 100)])
    assert after is not None
    assert (after.status, after.done_reason, after.waiting_for) == (Status.DONE, "cancelled", frozenset())
    assert stand.now() == after


def test_a_task_that_was_claimed_meanwhile_is_not_cancelled_under_its_holder(stand: Stand) -> None:
    pending = replace(stand.lease().task, status=Status.PENDING, fence=0)
    now = stand.store.clock.now()
    assert stand.store.write_tasks([writes.cancel_waiting(pending, reason="x", now=now, expire_at=now)]) == [None]
    assert stand.now().status is Status.RUNNING


@pytest.mark.slow
def test_the_holder_learns_of_a_cancel_with_its_next_heartbeat(stand: Stand) -> None:
    lease = stand.lease()
    [after] = stand.store.write_tasks([writes.request_cancel(stand.now(), now=stand.store.clock.now())])
    assert after is not None
    assert after.cancel_requested
    [renewal] = stand.store.renew([Beat(lease)])
    assert renewal.lease is not None
    assert renewal.lease.task.cancel_requested is True


def test_a_cancel_for_an_older_lease_does_not_reach_the_new_one(stand: Stand) -> None:
    stand.lease()
    old = stand.now()
    stand.store.take_over([(old, 60.0)], owner="agent-2")
    assert stand.store.write_tasks([writes.request_cancel(old, now=stand.store.clock.now())]) == [None]
    assert not stand.now().cancel_requested


def _failed(stand: Stand) -> Task:
    lease = stand.lease()
    now = stand.store.clock.now()
    assert stand.store.settle([writes.fail(lease, error="boom", now=now, expire_at=now + 100)])[0].accepted
    return stand.now()


def test_a_failed_task_is_retried_by_hand_with_fresh_budgets(stand: Stand) -> None:
    failed = _failed(stand)
    now = stand.store.clock.now()
    [after] = stand.store.write_tasks([writes.revive(failed, now=now)])
    assert after is not None
    assert (after.status, after.retry_count, after.crash_count, after.fence) == (Status.PENDING, 0, 0, 1)
    assert (after.error, after.finished_at, after.expire_at) == (None, None, None)
    assert [entry["error"] for entry in after.errors] == ["boom"]


def test_two_retries_by_hand_of_one_failure_are_one(stand: Stand) -> None:
    failed = _failed(stand)
    now = stand.store.clock.now()
    assert stand.store.write_tasks([writes.revive(failed, now=now)])[0] is not None
    assert stand.store.write_tasks([writes.revive(failed, now=now + 1)]) == [None]


def test_a_retry_by_hand_can_wait_for_parents_again(stand: Stand) -> None:
    failed = _failed(stand)
    [after] = stand.store.write_tasks(
        [writes.revive(failed, now=stand.store.clock.now(), waiting_for=frozenset({"p"}))]
    )
    assert after is not None
    assert (after.status, after.waiting_for) == (Status.BLOCKED, frozenset({"p"}))


def test_children_register_with_an_open_parent_each_once(stand: Stand) -> None:
    parent = stand.enqueue()
    for child in ("c1", "c2", "c1"):
        assert stand.store.write_tasks([writes.register_dependent(parent, child)])[0] is not None
    assert stand.now().dependents == frozenset({"c1", "c2"})


def test_many_children_register_in_one_write(stand: Stand) -> None:
    parent = stand.enqueue()
    names = [",", "[", 'say "a"', "a\\", "ä", *(f"c{number}" for number in range(200))]
    for children in (names[:3], names[:1], names, names[2:4], ['"']):
        write = writes.register_dependent(parent, *children)
        [(won, row)] = stand.store.write_rows([write])
        assert won
        assert row is not None
        assert set(children) <= row["dependents"]
    assert stand.now().dependents == {*names, '"'}


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.FAILED, Status.DONE])
def test_an_ended_parent_takes_no_children(stand: Stand, status: Status) -> None:
    parent = stand.enqueue(status=status)
    assert stand.store.write_tasks([writes.register_dependent(parent, "c1")]) == [None]
    assert stand.now().dependents == frozenset()


def test_a_missing_parent_is_not_made_by_its_child(stand: Stand) -> None:
    assert stand.store.write_tasks([writes.register_dependent(stand.task(), "c1")]) == [None]
    assert stand.store.get([stand.id("a")]) == {}


def test_parents_are_taken_off_one_by_one_and_the_last_frees_the_child(stand: Stand) -> None:
    child = stand.enqueue(status=Status.BLOCKED, waiting_for=frozenset({"p1", "p2"}))
    now = stand.store.clock.now()
    [after] = stand.store.write_tasks([writes.parent_done(child, "p1")])
    assert after is not None
    assert after.waiting_for == frozenset({"p2"})
    assert stand.store.write_tasks([writes.unpark(child, now=now)]) == [None], "one parent is still open"
    [repeated] = stand.store.write_tasks([writes.parent_done(child, "p1")])
    assert repeated is not None
    assert repeated.waiting_for == frozenset({"p2"})
    [last] = stand.store.write_tasks([writes.parent_done(child, "p2")])
    assert last is not None
    assert last.waiting_for == frozenset()
    [free] = stand.store.write_tasks([writes.unpark(child, now=now, due=now + 60)])
    assert free is not None
    assert free.status is Status.PENDING
    assert free.created_at > now + 59
    assert stand.store.write_tasks([writes.unpark(child, now=now + 1)]) == [None], "it was freed already"


@pytest.mark.parametrize("status", [Status.FAILED, Status.DONE])
def test_a_child_of_a_failed_parent_ends_without_running(stand: Stand, status: Status) -> None:
    child = stand.enqueue(status=Status.BLOCKED, waiting_for=frozenset({"p"}))
    now = stand.store.clock.now()
    doom = writes.doom(child, status=status, reason="p failed", now=now, expire_at=now + 100)
    [after] = stand.store.write_tasks([doom])
    assert after is not None
    assert (after.status, after.error or after.done_reason, after.waiting_for) == (status, "p failed", frozenset())
    assert stand.store.write_tasks([replace(doom, set={**doom.set, "updatedAt": now + 5})]) == [None]


def test_a_child_that_was_revived_meanwhile_is_not_ended_by_a_late_word_of_its_former_life(stand: Stand) -> None:
    child = stand.enqueue(status=Status.BLOCKED, waiting_for=frozenset({"p"}))
    now = stand.store.clock.now()
    late = writes.doom(child, status=Status.FAILED, reason="p failed", now=now + 5, expire_at=now + 100)
    [ended] = stand.store.write_tasks([writes.cancel_waiting(child, reason="by hand", now=now, expire_at=now + 100)])
    assert ended is not None
    [revived] = stand.store.write_tasks([writes.revive(ended, now=now + 1, waiting_for=frozenset({"p"}))])
    assert revived is not None
    assert stand.store.write_tasks([late]) == [None]
    assert stand.store.peek([child.task_id])[child.task_id] == revived


def test_a_batch_of_writes_answers_each_in_its_order(stand: Stand) -> None:
    tasks = [stand.enqueue(f"n{number}") for number in range(20)]
    now = stand.store.clock.now()
    batch: list[Write] = []
    for number, task in enumerate(tasks):
        shown = task if number % 3 else replace(task, fence=9)
        batch.append(writes.cancel_waiting(shown, reason=str(number), now=now, expire_at=now + 100))
    answers = stand.store.write_tasks(batch)
    assert [task.done_reason if task else None for task in answers] == [
        str(number) if number % 3 else None for number in range(20)
    ]


def test_one_agent_gets_the_turn_until_it_is_over(stand: Stand) -> None:
    name = stand.id("sweep")
    assert stand.store.take_turn(name, owner="agent-1", lasts_s=300)
    assert not stand.store.take_turn(name, owner="agent-2", lasts_s=300)
    assert not stand.store.take_turn(name, owner="agent-1", lasts_s=301)
    assert stand.store.take_turn(stand.id("other"), owner="agent-2", lasts_s=-10)
    assert stand.store.take_turn(stand.id("other"), owner="agent-1", lasts_s=300), "the turn before was over"


def test_agents_announce_themselves_and_sign_off(stand: Stand) -> None:
    name = stand.id("agent")
    stand.store.announce(name, {"host": "h", "running": 1, "queues": {"default": 10}}, lives_s=300)
    stand.store.announce(name, {"host": "h", "running": 2, "queues": {"default": 10}}, lives_s=300)
    stand.store.announce(stand.id("overdue"), {}, lives_s=-300)
    rows = stand.store.engine.get([f"agent:{name}"])
    info = {name: value for name, value in rows[f"agent:{name}"]["info"].items() if name != "boot"}  # of files alone
    assert info == {"host": "h", "running": 2, "queues": {"default": 10}}
    [agent] = eventually(lambda: [one for one in stand.store.agents() if stand.mark in one.name])
    assert (agent.name, agent.info["running"]) == (name, 2)
    stand.store.sign_off(name)
    assert stand.store.engine.get([f"agent:{name}"]) == {}
