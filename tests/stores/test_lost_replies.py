"""A write that was done and whose reply was lost is repeated by the SDK: no orphan, no duplicate, no false loss."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError

from tests.support.stands import Stand, only, seen
from tests.support.wire import carried_out, lost_replies, on_the_wire
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.task import Status, new_task_id
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Beat, TaskStore, Wanted

pytestmark = pytest.mark.slow


def test_a_claim_is_still_a_win(wire_stand: Stand) -> None:
    task = wire_stand.enqueue()
    with lost_replies(wire_stand.dynamo, "UpdateItem") as lost:
        [lease] = wire_stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
    assert lost.met == 1
    assert (lease.fence, lease.owner, lease.task) == (1, "agent-1", wire_stand.now())


def test_a_claim_that_really_was_lost_is_still_a_loss(wire_stand: Stand) -> None:
    task = wire_stand.enqueue()
    assert wire_stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-2")
    assert wire_stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1") == []


def test_a_claim_without_any_answer_is_found_again(wire_stand: Stand) -> None:
    task = wire_stand.enqueue()
    engine = wire_stand.dynamo.sibling()
    store = TaskStore(engine)
    with lost_replies(engine, "UpdateItem", times=100) as lost:
        exchanged = store.exchange([], [Wanted(seen(task), 60.0)], owner="agent-1")
    assert lost.met == 2, "a lease client makes two attempts"
    assert (exchanged.leases, exchanged.lost) == ([], [])
    assert isinstance(exchanged.error, StoreUnavailable)
    [lease] = store.resolve(exchanged.doubts, owner="agent-1")
    assert (lease.fence, lease.task) == (1, wire_stand.now())
    engine.close()


def test_a_heartbeat_goes_on(wire_stand: Stand) -> None:
    lease = wire_stand.lease()
    with lost_replies(wire_stand.dynamo, "UpdateItem") as lost:
        [renewal] = wire_stand.store.renew([Beat(lease)])
    assert lost.met == 1
    assert not renewal.lost
    assert renewal.lease is not None
    assert (renewal.lease.task, renewal.lease.fence) == (wire_stand.now(), 1)


def test_a_success_is_accepted(wire_stand: Stand) -> None:
    lease = wire_stand.lease()
    now = wire_stand.store.clock.now()
    with lost_replies(wire_stand.dynamo, "UpdateItem") as lost:
        [settled] = wire_stand.store.settle([writes.succeed(lease, now=now, expire_at=now + 100, result="1")])
    assert lost.met == 1
    assert settled.accepted
    assert wire_stand.now().status is Status.SUCCESS


def test_a_retry_is_counted_once(wire_stand: Stand) -> None:
    lease = wire_stand.lease()
    now = wire_stand.store.clock.now()
    with lost_replies(wire_stand.dynamo, "UpdateItem"):
        [settled] = wire_stand.store.settle([writes.retry(lease, due=now, error="boom", now=now)])
    assert settled.accepted
    assert (wire_stand.now().retry_count, len(wire_stand.now().errors)) == (1, 1)


def test_an_enqueue_is_one_task_and_says_that_it_was_created(wire_stand: Stand) -> None:
    task = wire_stand.task()
    with lost_replies(wire_stand.dynamo, "PutItem") as lost:
        answer = only(wire_stand.store.enqueue([task]))
    assert lost.met == 1
    assert (answer.created, answer.error, answer.task) == (True, None, task)


def test_a_take_over_is_a_win_and_counts_one_crash(wire_stand: Stand) -> None:
    wire_stand.lease()
    looked = wire_stand.now()
    with lost_replies(wire_stand.dynamo, "UpdateItem") as lost:
        [lease] = wire_stand.store.take_over([(looked, 60.0)], owner="agent-2").leases
    assert lost.met == 1
    assert (lease.fence, lease.task.crash_count, lease.task) == (2, 1, wire_stand.now())


def test_a_batch_of_fresh_tasks_does_not_reset_those_that_run_by_now(wire_stand: Stand) -> None:
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(3)]
    agent = wire_stand.open()
    wire_stand.store.enqueue([wire_stand.task(task_id=new_task_id()) for _ in range(2)], fresh=True)

    def claim() -> None:
        assert agent.claim([Wanted(seen(tasks[0]), 60.0)], owner="agent-1")

    with lost_replies(wire_stand.dynamo, "BatchExecuteStatement", then=claim) as lost:
        answers = wire_stand.store.enqueue(tasks, fresh=True)
    assert lost.met == 1
    assert [(answer.created, answer.error) for answer in answers] == [(True, None)] * 3
    rows = wire_stand.store.get(task.task_id for task in tasks)
    assert [rows[task.task_id].status for task in tasks] == [Status.RUNNING, Status.PENDING, Status.PENDING]
    assert rows[tasks[0].task_id].lease_owner == "agent-1"


@pytest.mark.parametrize("number", [1, 3])
def test_an_enqueue_that_is_carried_out_late_resets_nothing(wire_stand: Stand, number: int) -> None:
    tasks = [wire_stand.task(task_id=new_task_id()) for _ in range(number)]
    wire_stand.store.enqueue([wire_stand.task(task_id=new_task_id()) for _ in range(2)], fresh=True)
    late = list[Any]()

    def hold(request: Any) -> Any:
        late.append(request)
        return ConnectionClosedError(endpoint_url=request.url)

    with ExitStack() as stack:
        for action in ("PutItem", "BatchWriteItem", "BatchExecuteStatement"):
            stack.enter_context(on_the_wire(wire_stand.dynamo, action, hold))
        assert all(answer.created for answer in wire_stand.store.enqueue(tasks, fresh=True))
    leases = wire_stand.store.claim([Wanted(seen(task), 60.0) for task in tasks], owner="agent-1")
    now = wire_stand.store.clock.now()
    wire_stand.store.settle([writes.succeed(lease, now=now, expire_at=now + 100) for lease in leases])
    ran = wire_stand.store.get(task.task_id for task in tasks)
    carried_out(late[0])
    assert wire_stand.store.get(ran) == ran
    assert {task.status for task in ran.values()} == {Status.SUCCESS}


def test_a_turn_is_not_lost(wire_stand: Stand) -> None:
    name = wire_stand.id("sweep")
    assert wire_stand.store.take_turn(name, owner="agent-1", lasts_s=-10)
    with lost_replies(wire_stand.dynamo, "UpdateItem") as lost:
        assert wire_stand.store.take_turn(name, owner="agent-2", lasts_s=300)
    assert lost.met == 1
