"""What only the holder of a lease may do: renew it, and end it in exactly one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.support.stands import Stand, seen
from thunderagent.model.conditions import Write
from thunderagent.model.rows import LEASE_ATTRIBUTES
from thunderagent.model.task import Lease, Status, timestamp
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.engine import Applied
from thunderagent.stores.tasks import Beat, Wanted

END: dict[str, tuple[Callable[[Lease, float], Write], Status]] = {
    "succeed": (lambda lease, now: writes.succeed(lease, now=now, expire_at=now + 100, result="1"), Status.SUCCESS),
    "retry": (lambda lease, now: writes.retry(lease, due=now + 5, error="boom", now=now), Status.PENDING),
    "snooze": (lambda lease, now: writes.snooze(lease, due=now + 5, now=now), Status.PENDING),
    "release": (lambda lease, now: writes.release(lease, now=now), Status.PENDING),
    "fail": (lambda lease, now: writes.fail(lease, error="boom", now=now, expire_at=now + 100), Status.FAILED),
    "close": (lambda lease, now: writes.close(lease, reason="cancelled", now=now, expire_at=now + 100), Status.DONE),
}
verbs = pytest.mark.parametrize("verb", END)


@verbs
def test_the_holder_ends_its_lease(stand: Stand, verb: str) -> None:
    lease = stand.lease()
    build, status = END[verb]
    [settled] = stand.store.settle([build(lease, stand.store.clock.now())])
    assert settled.accepted
    row = stand.store.engine.get([lease.task_id])[lease.task_id]
    assert row["status"] == stand.lane.value(status)
    assert not set(LEASE_ATTRIBUTES) & row.keys()
    assert row["fence"] == 1
    assert ("finishedAt" in row, "expireAt" in row) == (status.is_terminal, status.is_terminal)


@verbs
def test_a_lease_ends_only_once(stand: Stand, verb: str) -> None:
    lease = stand.lease()
    now = stand.store.clock.now()
    assert stand.store.settle([writes.close(lease, reason="first", now=now, expire_at=now + 100)])[0].accepted
    before = stand.now()
    [settled] = stand.store.settle([END[verb][0](lease, now + 1)])
    assert (settled.accepted, settled.error) == (False, None)
    assert stand.now() == before


@pytest.mark.slow
@verbs
def test_a_late_owner_cannot_overwrite_the_new_one(stand: Stand, verb: str) -> None:
    late = stand.lease(owner="agent-1")
    [new] = stand.store.take_over([(stand.now(), 300.0)], owner="agent-2").leases
    [settled] = stand.store.settle([END[verb][0](late, stand.store.clock.now())])
    assert not settled.accepted
    assert stand.now() == new.task


@pytest.mark.slow
@verbs
def test_a_late_owner_cannot_end_its_own_next_lease_with_the_old_one(stand: Stand, verb: str) -> None:
    old = stand.lease(owner="agent-1")
    now = stand.store.clock.now()
    assert stand.store.settle([writes.release(old, now=now)])[0].accepted
    [new] = stand.store.claim([Wanted(seen(stand.now()), 300.0)], owner="agent-1")
    assert not stand.store.settle([END[verb][0](old, now + 1)])[0].accepted
    assert stand.now() == new.task


@verbs
def test_ending_the_lease_of_a_deleted_task_makes_no_ghost(stand: Stand, verb: str) -> None:
    lease = stand.lease()
    assert stand.store.engine.delete([{"taskId": lease.task_id, "status": lease.task.status_value, "fence": 1}]) == [
        True
    ]
    assert not stand.store.settle([END[verb][0](lease, stand.store.clock.now())])[0].accepted
    assert stand.store.get([lease.task_id]) == {}


def test_a_heartbeat_extends_the_lease_and_brings_the_row(stand: Stand) -> None:
    lease = stand.lease(lease_s=1.0)
    [renewal] = stand.store.renew(
        [Beat(replace(lease, lease_s=500.0), progress='"half"', last_seq={"n": 7, "s": [1.5]})]
    )
    assert renewal.lease is not None
    task = renewal.lease.task
    assert task == stand.now()
    assert (task.hb, task.fence, task.progress, task.last_seq) == (1, 1, "half", {"n": 7, "s": [1.5]})
    assert task.lock_time is not None
    assert lease.task.lock_time is not None
    assert task.lock_time > lease.task.lock_time + 400
    assert renewal.lease.held_from > lease.held_from


def test_a_heartbeat_without_news_keeps_progress_and_cursor(stand: Stand) -> None:
    lease = stand.lease()
    stand.store.renew([Beat(lease, progress="1", last_seq={"n": 1})])
    [renewal] = stand.store.renew([Beat(lease)])
    assert renewal.lease is not None
    assert (renewal.lease.task.progress, renewal.lease.task.last_seq, renewal.lease.task.hb) == (1, {"n": 1}, 2)


@pytest.mark.parametrize(
    "change", [{"fence": 2}, {"fence": 0}, {"owner": "agent-2"}], ids=["newer fence", "older fence", "wrong owner"]
)
def test_a_heartbeat_of_somebody_else_is_lost(stand: Stand, change: dict[str, object]) -> None:
    lease = stand.lease()
    [renewal] = stand.store.renew([Beat(replace(lease, **change))])  # type: ignore[arg-type]
    assert (renewal.lost, renewal.lease, renewal.taken_by) == (True, None, "agent-1")
    assert stand.now().hb == 0


def test_a_heartbeat_after_the_end_is_lost_and_after_a_deletion_too(stand: Stand) -> None:
    lease, gone = stand.lease("a"), stand.lease("b")
    now = stand.store.clock.now()
    stand.store.settle([writes.release(lease, now=now)])
    stand.store.engine.delete([{"taskId": gone.task_id, "status": gone.task.status_value, "fence": 1}])
    answers = stand.store.renew([Beat(lease), Beat(gone)])
    assert [answer.lost for answer in answers] == [True, True]
    assert stand.store.get([gone.task_id]) == {}


def test_retry_snooze_and_release_count_as_they_should(stand: Stand) -> None:
    now = stand.store.clock.now()
    for verb, retries in (("retry", 1), ("snooze", 0), ("release", 0)):
        lease = stand.lease(verb)
        stand.store.settle([END[verb][0](lease, now)])
        task = stand.now(verb)
        assert (task.retry_count, task.crash_count) == (retries, 0)
        assert task.created_at == timestamp(now + (0 if verb == "release" else 5))
        assert task.submitted_at == lease.task.submitted_at


@pytest.mark.slow
def test_errors_keep_the_last_ten_attempts_cut_to_a_kilobyte(stand: Stand) -> None:
    task = stand.enqueue()
    for number in range(12):
        [lease] = stand.store.claim([Wanted(seen(task), 60.0)], owner="agent-1")
        now = stand.store.clock.now()
        error = f"{number} " + "ü" * 2000
        assert stand.store.settle([writes.retry(lease, due=now, error=error, now=now)])[0].accepted
        task = stand.now()
    assert [entry["attempt"] for entry in task.errors] == list(range(3, 13))
    assert all(len(entry["error"].encode()) <= 1024 for entry in task.errors)
    assert task.errors[-1]["error"].startswith("11 ü")
    assert task.error == task.errors[-1]["error"]
    assert task.retry_count == 12


def test_success_keeps_result_and_note_and_tells_who_waits(stand: Stand) -> None:
    lease = stand.lease()
    assert stand.store.write_tasks([writes.register_dependent(stand.now(), "child-1")])[0] is not None
    now = stand.store.clock.now()
    success = writes.succeed(lease, now=now, expire_at=now + 9.7, result='{"path":"/x"}', note="late")
    [settled] = stand.store.settle([success])
    assert settled.dependents == frozenset({"child-1"})
    task = stand.now()
    assert (task.result, task.error, task.expire_at) == ({"path": "/x"}, "late", int(now + 9.7))


@pytest.mark.slow
def test_settling_and_claiming_go_together_and_each_has_its_answer(stand: Stand) -> None:
    lease = stand.lease("a")
    following, lost = stand.enqueue("b"), stand.lease("c", owner="agent-2")
    now = stand.store.clock.now()
    stale = seen(lost.task)._replace(status_value=stand.lane.value(Status.PENDING))
    done = writes.succeed(lease, now=now, expire_at=now + 100)
    exchanged = stand.store.exchange([done], [Wanted(seen(following), 60.0), Wanted(stale, 60.0)], owner="agent-1")
    assert [answer.accepted for answer in exchanged.settled] == [True]
    assert [one.task_id for one in exchanged.leases] == [following.task_id]
    assert (exchanged.lost, exchanged.doubts, exchanged.error) == ([stale], [], None)


def test_an_exchange_is_one_call_to_the_engine_and_nothing_to_write_is_none(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, following = stand.lease("a"), stand.enqueue("b")
    engine, batches = stand.store.engine, list[list[str]]()
    apply = engine.apply

    def watched(batch: Sequence[Write]) -> list[Applied]:
        batches.append([write.verb for write in batch])
        return apply(batch)

    monkeypatch.setattr(engine, "apply", watched)
    success = writes.succeed(lease, now=(now := stand.store.clock.now()), expire_at=now + 100)
    assert stand.store.exchange([success], [Wanted(seen(following), 60.0)], owner="agent-1").leases
    assert batches == [["succeed", "claim"]]
    assert stand.store.write_rows([]) == []
    assert stand.store.settle([]) == []
    assert len(batches) == 1
