"""Enqueue: put unless the id is taken."""

from __future__ import annotations

import pytest

from tests.support.stands import Stand, only
from thunderagent.model.errors import DuplicateTask
from thunderagent.model.task import Status, new_task_id


def test_a_new_task_is_kept_with_all_that_it_says(stand: Stand) -> None:
    task = stand.task(
        max_retry=7,
        depends_on=("p1", "p2"),
        waiting_for=frozenset({"p1", "p2"}),
        status=Status.BLOCKED,
        on_parent_failure="run",
        desired_state="STARTED",
        kind="stream",
    )
    answer = only(stand.store.enqueue([task]))
    assert answer.created
    assert stand.now() == task


def test_times_come_back_with_their_three_decimals(stand: Stand) -> None:
    for number, moment in enumerate((1760000000.001, 1760000000.999, 1760000000.12, 1760000000.0)):
        stand.enqueue(f"t{number}", created_at=moment, submitted_at=moment)
        assert stand.now(f"t{number}").created_at == moment


def test_the_same_id_with_the_same_payload_answers_with_the_task_that_has_it(stand: Stand) -> None:
    first = stand.enqueue(submitted_at=1760000000.5)
    again = only(stand.store.enqueue([stand.task()]))
    assert (again.created, again.error) == (False, None)
    assert again.task == first


def _in_order(names: str, size: int) -> str:
    return "{" + ",".join(f'"{name}":"{name * size}"' for name in names.split()) + "}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5000])
@pytest.mark.parametrize("before", ["a b", "b a"], ids=["sorted, as rows were once written", "as it was given"])
def test_the_same_payload_in_another_order_is_the_same(stand: Stand, before: str, size: int) -> None:
    first = stand.enqueue(payload_text=_in_order(before, size), submitted_at=1760000000.5)
    for order in ("b a", "a b"):
        again = only(stand.store.enqueue([stand.task(payload_text=_in_order(order, size))]))
        assert (again.created, again.error, again.task.task_id) == (False, None, first.task_id)
    other = only(stand.store.enqueue([stand.task(payload_text=_in_order("a b c", size))]))
    assert isinstance(other.error, DuplicateTask)


@pytest.mark.parametrize("size", [1, 5000])
def test_the_keys_of_a_payload_keep_their_order(stand: Stand, size: int) -> None:
    stand.enqueue(payload_text=_in_order("b c a", size))
    assert list(stand.now().payload) == ["b", "c", "a"]


def test_the_same_id_with_another_payload_is_refused_and_changes_nothing(stand: Stand) -> None:
    first = stand.enqueue()
    answer = only(stand.store.enqueue([stand.task(payload_text='{"month":"2026-08"}')]))
    assert isinstance(answer.error, DuplicateTask)
    assert "another payload" in str(answer.error)
    assert stand.now() == first


def test_the_same_id_with_another_job_is_refused(stand: Stand) -> None:
    stand.enqueue()
    answer = only(stand.store.enqueue([stand.task(job="report.send")]))
    assert isinstance(answer.error, DuplicateTask)
    assert "report.build" in str(answer.error)


def test_a_task_that_ran_already_is_not_started_anew_by_its_id(stand: Stand) -> None:
    lease = stand.lease()
    again = only(stand.store.enqueue([stand.task()]))
    assert not again.created
    assert again.task.status is Status.RUNNING
    assert stand.now().fence == lease.fence


def test_in_a_batch_each_task_has_its_own_answer(stand: Stand) -> None:
    stand.enqueue("taken", submitted_at=1760000000.5)
    batch = [stand.task("x"), stand.task("taken", payload_text="1"), stand.task("y"), stand.task("taken")]
    answers = stand.store.enqueue(batch)
    assert [answer.created for answer in answers] == [True, False, True, False]
    assert [type(answer.error) for answer in answers] == [type(None), DuplicateTask, type(None), type(None)]
    assert len(stand.store.get([stand.id("x"), stand.id("y")])) == 2


def test_sixty_fresh_tasks_are_put_together(stand: Stand) -> None:
    tasks = [stand.task(task_id=new_task_id()) for _ in range(60)]
    answers = stand.store.enqueue(tasks, fresh=True)
    assert all(answer.created for answer in answers)
    assert list(stand.store.get(task.task_id for task in tasks).values()) == tasks


def test_a_fresh_batch_that_names_an_id_twice_keeps_one_task(stand: Stand) -> None:
    twice = stand.task("twice")
    answers = stand.store.enqueue([stand.task("x"), twice, twice], fresh=True)
    assert all(answer.error is None for answer in answers)
    assert stand.now("twice") == twice
    assert stand.now("x").status is Status.PENDING


def test_ids_without_a_task_are_left_out_and_twice_asked_is_once_answered(stand: Stand) -> None:
    stand.enqueue()
    found = stand.store.engine.get([stand.id("a"), stand.id("nobody"), stand.id("a")])
    assert list(found) == [stand.id("a")]


def test_a_delayed_task_is_not_ready_before_its_time(stand: Stand) -> None:
    later = stand.store.clock.latest() + 60
    stand.enqueue("later", created_at=later)
    stand.enqueue("due")
    assert [entry.task_id for entry in stand.ready(1)] == [stand.id("due")]
