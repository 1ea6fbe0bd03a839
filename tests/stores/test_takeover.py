"""Take over: the tasks of lost agents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.stands import Stand, eventually
from thunderagent.model.task import Status
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Beat


def test_a_crashed_running_task_is_found_in_the_index_and_taken_over(stand: Stand) -> None:
    dead = stand.lease(owner="agent-1", lease_s=1.0)
    running = stand.lane.value(Status.RUNNING)
    [entry] = eventually(lambda: stand.store.engine.page(running, limit=10).entries)
    assert entry.task_id == dead.task_id
    [lease] = stand.store.take_over([(stand.now(), 200.0)], owner="agent-2").leases
    assert (lease.owner, lease.fence, lease.lease_s) == ("agent-2", 2, 200.0)
    task = stand.now()
    assert task == lease.task
    assert (task.status, task.crash_count, task.retry_count, task.hb) == (Status.RUNNING, 1, 0, 0)
    assert task.errors[-1]["error"] == "agent agent-1 was lost"
    assert task.started_at == dead.task.started_at


def test_a_beat_since_the_look_saves_the_task_of_a_living_agent(stand: Stand) -> None:
    lease = stand.lease(owner="agent-1")
    looked = stand.now()
    assert stand.store.renew([Beat(lease)])[0].lease is not None
    assert stand.store.take_over([(looked, 200.0)], owner="agent-2").leases == []
    assert stand.now().lease_owner == "agent-1"


@pytest.mark.slow
def test_of_two_that_looked_only_the_first_takes_over(stand: Stand) -> None:
    stand.lease()
    looked = stand.now()
    assert len(stand.store.take_over([(looked, 200.0)], owner="agent-2").leases) == 1
    assert stand.store.take_over([(looked, 200.0)], owner="agent-3").leases == []
    assert (stand.now().lease_owner, stand.now().crash_count) == ("agent-2", 1)


def test_a_task_that_ended_meanwhile_is_not_taken_over(stand: Stand) -> None:
    lease = stand.lease()
    looked = stand.now()
    now = stand.store.clock.now()
    stand.store.settle([writes.succeed(lease, now=now, expire_at=now + 100)])
    assert stand.store.take_over([(looked, 200.0)], owner="agent-2").leases == []
    assert stand.now().status is Status.SUCCESS


def test_one_crash_too_many_fails_the_task(stand: Stand) -> None:
    stand.lease()
    looked = stand.now()
    now = stand.store.clock.now()
    give_up = writes.give_up(looked, error="lost 4 agents", now=now, expire_at=now + 100)
    [task] = stand.store.write_tasks([give_up])
    assert task is not None
    assert (task.status, task.crash_count, task.error) == (Status.FAILED, 1, "lost 4 agents")
    assert (task.lease_owner, task.lock_time, task.hb) == (None, None, None)
    assert stand.now() == task


@pytest.mark.parametrize("change", [{"fence": 5}, {"hb": 5}], ids=["other fence", "other beat"])
def test_giving_up_needs_the_row_as_it_was_seen(stand: Stand, change: dict[str, int]) -> None:
    stand.lease()
    now = stand.store.clock.now()
    looked = replace(stand.now(), **change)  # type: ignore[arg-type]
    assert stand.store.write_tasks([writes.give_up(looked, error="x", now=now, expire_at=now)]) == [None]
    assert stand.now().status is Status.RUNNING


def test_the_cursor_of_a_stream_survives_its_agent(stand: Stand) -> None:
    lease = stand.lease(kind="stream", desired_state="STARTED")
    stand.store.renew([Beat(lease, last_seq={"seq": 41, "part": "eu"})])
    [taken] = stand.store.take_over([(stand.now(), 20.0)], owner="agent-2").leases
    assert taken.task.last_seq == {"seq": 41, "part": "eu"}
