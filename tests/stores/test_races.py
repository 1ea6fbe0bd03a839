"""Races, staged: everybody has read the same state before anybody writes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.stands import Stand, seen, together
from thunderagent.model.conditions import Present, Write
from thunderagent.model.task import Lease, Status
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import TaskStore, Wanted

pytestmark = pytest.mark.slow


def test_the_stand_itself_is_atomic(atomic_stand: Stand) -> None:
    """Else every other test of this module would mean nothing."""
    atomic_stand.enqueue()
    add = Write(verb="add", task_id=atomic_stand.id("a"), increase={"crashCount": 1}, require=(Present("taskId"),))
    stores = [atomic_stand.open() for _ in range(8)]
    for rounds in range(1, 11):
        answers = together(*(partial(store.engine.apply, [add]) for store in stores))
        assert all(answer[0].won for answer in answers)
        assert atomic_stand.now().crash_count == 8 * rounds


def test_of_two_agents_with_the_same_page_exactly_one_wins_each_task(atomic_stand: Stand) -> None:
    stores = [atomic_stand.store, atomic_stand.open()]
    for number in range(40):
        wanted = [Wanted(seen(atomic_stand.enqueue(f"n{number}")), 60.0)]
        won = together(*(partial(store.claim, wanted, owner=f"agent-{n}") for n, store in enumerate(stores)))
        [lease] = [lease for leases in won for lease in leases]
        assert lease.task == atomic_stand.now(f"n{number}")
        assert (lease.fence, lease.owner) == (1, f"agent-{0 if won[0] else 1}")


def test_two_agents_that_work_through_the_same_page_share_it(atomic_stand: Stand) -> None:
    stores = [atomic_stand.store, atomic_stand.open()]
    tasks = [atomic_stand.enqueue(f"n{number}") for number in range(30)]
    page = [Wanted(seen(task), 60.0) for task in tasks]

    def claim(store: TaskStore, owner: str) -> list[Lease]:
        return [lease for one in page for lease in store.claim([one], owner=owner)]

    won = together(*(partial(claim, store, f"agent-{number}") for number, store in enumerate(stores)))
    leases = [lease for one in won for lease in one]
    assert sorted(lease.task_id for lease in leases) == sorted(task.task_id for task in tasks)
    assert {lease.fence for lease in leases} == {1}
    rows = atomic_stand.store.get(lease.task_id for lease in leases)
    assert all(rows[lease.task_id].lease_owner == lease.owner for lease in leases)


def test_of_four_agents_that_saw_the_same_dead_one_exactly_one_takes_over(atomic_stand: Stand) -> None:
    stores = [atomic_stand.open() for _ in range(4)]
    for rounds in range(8):
        atomic_stand.lease(f"t{rounds}")
        looked = atomic_stand.now(f"t{rounds}")
        won = together(
            *(partial(store.take_over, [(looked, 60.0)], owner=f"agent-{n}") for n, store in enumerate(stores))
        )
        [lease] = [lease for exchanged in won for lease in exchanged.leases]
        assert atomic_stand.now(f"t{rounds}") == lease.task
        assert (lease.fence, lease.task.crash_count) == (2, 1)


def test_success_and_takeover_never_both_happen(atomic_stand: Stand) -> None:
    other = atomic_stand.open()
    for rounds in range(10):
        lease = atomic_stand.lease(f"t{rounds}")
        looked = atomic_stand.now(f"t{rounds}")
        now = atomic_stand.store.clock.now()
        done = writes.succeed(lease, now=now, expire_at=now + 100)
        accepted, taken = together(
            lambda done=done: atomic_stand.store.settle([done])[0].accepted,  # type: ignore[misc]
            lambda looked=looked: bool(other.take_over([(looked, 60.0)], owner="agent-2").leases),  # type: ignore[misc]
        )
        assert accepted != taken
        assert atomic_stand.now(f"t{rounds}").status is (Status.SUCCESS if accepted else Status.RUNNING)


def test_a_child_is_told_by_its_parent_or_knows_that_it_came_too_late(atomic_stand: Stand) -> None:
    other = atomic_stand.open()
    for rounds in range(10):
        lease = atomic_stand.lease(f"t{rounds}")
        now = atomic_stand.store.clock.now()
        done = writes.succeed(lease, now=now, expire_at=now + 100)
        register = writes.register_dependent(lease.task, "child")
        told, registered = together(
            lambda done=done: bool(atomic_stand.store.settle([done])[0].dependents),  # type: ignore[misc]
            lambda register=register: other.write_tasks([register])[0] is not None,  # type: ignore[misc]
        )
        assert told == registered


def test_an_id_enqueued_eight_times_at_once_is_one_task(atomic_stand: Stand) -> None:
    stores = [atomic_stand.open() for _ in range(8)]
    tasks = [atomic_stand.task() for _ in stores]
    answers = together(*(partial(store.enqueue, [task]) for store, task in zip(stores, tasks, strict=True)))
    assert sum(answer[0].created for answer in answers) == 1
    assert all(answer[0].error is None for answer in answers)
    assert len({answer[0].task.submitted_at for answer in answers}) == 1


def test_one_of_eight_agents_gets_the_first_turn(atomic_stand: Stand) -> None:
    stores = [atomic_stand.open() for _ in range(8)]
    name = atomic_stand.id("sweep")
    turns = together(
        *(partial(store.take_turn, name, owner=f"agent-{n}", lasts_s=300.0) for n, store in enumerate(stores))
    )
    assert sum(turn is not None for turn in turns) == 1
