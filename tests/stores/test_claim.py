"""Claim: one agent gets a task that is due, and the traps of a naive queue."""

from __future__ import annotations

import pytest

from tests.support.stands import Stand, seen
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import Candidate, Status, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Doubt, Wanted


def test_a_fresh_task_without_lock_time_can_be_claimed(stand: Stand) -> None:
    task = stand.enqueue()
    before = stand.store.monotonic()
    [lease] = stand.store.claim([Wanted(seen(task), 120.0)], owner="agent-1")
    assert (lease.owner, lease.fence, lease.lease_s) == ("agent-1", 1, 120.0)
    assert before <= lease.held_from <= stand.store.monotonic()
    now = stand.now()
    assert now == lease.task
    assert (now.status, now.lease_owner, now.fence, now.hb) == (Status.RUNNING, "agent-1", 1, 0)
    assert (now.lease_sec, now.last_agent, now.attempt) == (120.0, "agent-1", 1)
    assert now.lock_time is not None
    assert abs(now.lock_time - stand.store.clock.now() - 120.0) < 5
    assert now.payload == {"month": "2026-07"}


def test_a_claim_that_came_second_is_lost_without_an_error(stand: Stand) -> None:
    task = stand.enqueue()
    assert stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-2") == []
    assert (stand.now().lease_owner, stand.now().fence) == ("agent-1", 1)


def test_of_a_batch_of_candidates_only_those_won_have_a_lease(stand: Stand) -> None:
    tasks = [stand.enqueue(name) for name in "abc"]
    assert stand.store.claim([Wanted(seen(tasks[1]), 60.0)], owner="agent-2")
    gone = Candidate(stand.id("gone"), tasks[0].status_value, tasks[0].created_at, "report.build")
    wanted = [Wanted(seen(task), 60.0) for task in tasks] + [Wanted(gone, 60.0)]
    leases = stand.store.claim(wanted, owner="agent-1")
    assert [lease.task_id for lease in leases] == [stand.id("a"), stand.id("c")]
    assert stand.store.get([stand.id("gone")]) == {}, "a claim of a deleted task made a ghost"


def test_a_retried_task_can_be_claimed_again(stand: Stand) -> None:
    lease = stand.lease()
    now = stand.store.clock.now()
    [settled] = stand.store.settle([writes.retry(lease, due=now, error="boom", now=now)])
    assert settled.accepted
    [again] = stand.store.claim([Wanted(seen(stand.now()), 60.0)], owner="agent-2")
    assert (again.fence, again.task.attempt, again.task.retry_count) == (2, 2, 1)


def test_a_stale_page_cannot_claim_a_task_that_went_back_for_later(stand: Stand) -> None:
    lease = stand.lease()
    stale = seen(lease.task)._replace(status_value=stand.lane.value(Status.PENDING))
    now = stand.store.clock.now()
    assert stand.store.settle([writes.retry(lease, due=now + 600, error="boom", now=now)])[0].accepted
    assert stand.store.claim([Wanted(stale, 60.0)], owner="agent-2") == []
    assert stand.now().status is Status.PENDING


@pytest.mark.parametrize("status", [Status.RUNNING, Status.BLOCKED, Status.SUCCESS, Status.FAILED, Status.DONE])
def test_only_a_pending_task_can_be_claimed(stand: Stand, status: Status) -> None:
    task = stand.enqueue(status=status)
    claimed_as_pending = seen(task)._replace(status_value=stand.lane.value(Status.PENDING))
    assert stand.store.claim([Wanted(claimed_as_pending, 60.0)], owner="agent-1") == []
    assert stand.now().status is status


def test_a_pending_row_with_a_live_lock_time_is_left_alone_until_it_is_over(stand: Stand) -> None:
    now = stand.store.clock.now()
    task = stand.enqueue(lock_time=timestamp(now + 100))
    early = writes.claim(seen(task), owner="agent-1", lease_s=60.0, now=now + 99, until=now + 99 + 60.0)
    late = writes.claim(seen(task), owner="agent-1", lease_s=60.0, now=now + 101, until=now + 101 + 60.0)
    assert stand.store.write_tasks([early]) == [None]
    [claimed] = stand.store.write_tasks([late])
    assert claimed is not None
    assert claimed.status is Status.RUNNING


def test_ten_waiting_tasks_at_the_head_hide_nothing(stand: Stand) -> None:
    now = stand.store.clock.now()
    for number in range(10):
        waiting = {"status": Status.BLOCKED, "waiting_for": frozenset({"p"})} if number % 2 else {}
        due = now - 1000 + number if waiting else now + 500 + number
        stand.enqueue(f"w{number}", created_at=timestamp(due), submitted_at=timestamp(now - 1000), **waiting)
    for number in range(5):
        stand.enqueue(f"ready{number}")
    ids = {stand.id(f"ready{number}") for number in range(5)}
    page = stand.ready(5, limit=10)
    assert {entry.task_id for entry in page} == ids
    assert len(stand.store.claim([Wanted(entry, 60.0) for entry in page], owner="agent-1")) == 5


def test_a_running_row_has_all_of_the_lease_and_every_other_row_nothing_of_it(stand: Stand) -> None:
    lease = stand.lease()
    engine, task_id = stand.store.engine, stand.id("a")
    assert set(LEASE_ATTRIBUTES) <= engine.get([task_id])[task_id].keys()
    now = stand.store.clock.now()
    assert stand.store.settle([writes.snooze(lease, due=now, now=now)])[0].accepted
    assert not set(LEASE_ATTRIBUTES) & engine.get([task_id])[task_id].keys()


def test_a_claim_without_an_answer_is_resolved_by_a_look_at_the_row(stand: Stand) -> None:
    lease = stand.lease(owner="agent-1")
    pending = stand.enqueue("other")
    sent = lease.held_from
    doubts = [Doubt(Wanted(seen(lease.task), 300.0), sent), Doubt(Wanted(seen(pending), 300.0), sent)]
    assert stand.store.resolve(doubts, owner="agent-1") == [lease]
    assert stand.store.resolve(doubts, owner="agent-2") == []


def test_a_task_that_is_claimed_twice_in_one_exchange_is_one_lease(stand: Stand) -> None:
    """The refusal of the second shows the row as the first left it, which is what a lost reply looks like."""
    task = stand.enqueue()
    leases = stand.store.claim([Wanted(seen(task), 60.0)] * 2, owner="agent-1")
    assert [(lease.task_id, lease.fence) for lease in leases] == [(task.task_id, 1)]
