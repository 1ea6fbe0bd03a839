"""The writes of streams on every engine: cursors, stops and starts, handoffs, journals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.stands import Stand, seen
from thunderagent.model.conditions import Write
from thunderagent.model.task import Desired, Handoff, Lease, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.streams.journal import Journal, keep_journals, read_journals
from thunderagent.testing.faulty_engine import Fault, FaultyEngine

CURSOR = {"seq": 7, "epoch": "e", "token": "t"}


def now(stand: Stand) -> float:
    return stand.store.clock.now()


def apply(stand: Stand, write: Write) -> Task | None:
    [after] = stand.store.write_tasks([write])
    return after


def stream_lease(stand: Stand, name: str = "a", **changes: Any) -> Lease:
    return stand.lease(name, kind="stream", **changes)


def successor(stand: Stand, owner: str = "agent-2") -> Lease:
    [lease] = stand.store.claim([Wanted(seen(stand.now()), 20.0)], owner=owner)
    return lease


def offered(stand: Stand, *, lasts_s: float = 15.0) -> Lease:
    """A stream that its holder handles on, though it is in its queue."""
    lease = stream_lease(stand)
    moment = now(stand)
    write = writes.with_cursor(writes.offer(lease, now=moment, until=moment + lasts_s), CURSOR)
    assert stand.store.settle([write])[0].accepted
    return lease


# The cursor


def test_a_beat_carries_the_cursor_and_forgives(stand: Stand) -> None:
    lease = stream_lease(stand, retry_count=2, crash_count=1)
    [renewal] = stand.store.renew([Beat(lease, last_seq=CURSOR)])
    assert renewal.lease is not None
    assert (renewal.lease.task.last_seq, renewal.lease.task.retry_count) == (CURSOR, 2)
    stand.store.renew([Beat(lease, forgive=True)])
    row = stand.now()
    assert (row.last_seq, row.retry_count, row.crash_count) == (CURSOR, 0, 0)


def test_the_beat_of_somebody_else_moves_no_cursor(stand: Stand) -> None:
    lease = stream_lease(stand)
    stand.store.take_over([(stand.now(), 20.0)], owner="agent-2")
    [renewal] = stand.store.renew([Beat(lease, last_seq=CURSOR, forgive=True)])
    assert renewal.lost
    assert stand.now().last_seq is None
    assert stand.now().crash_count == 1


ENDS = {
    "release": lambda lease, now: writes.release(lease, now=now),
    "retry": lambda lease, now: writes.retry(lease, due=now, error="e", now=now),
    "fail": lambda lease, now: writes.fail(lease, error="e", now=now, expire_at=now + 60),
    "close": lambda lease, now: writes.close(lease, reason="r", now=now, expire_at=now + 60),
    "stop": lambda lease, now: writes.stop(lease, now=now, expire_at=now + 60),
    "offer": lambda lease, now: writes.offer(lease, now=now, until=now + 15),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ENDS)
def test_the_write_that_ends_a_run_takes_the_cursor_with_it_or_nothing_happens(stand: Stand, verb: str) -> None:
    lease = stream_lease(stand)
    write = writes.with_cursor(ENDS[verb](lease, now(stand)), CURSOR)
    assert write.verb == verb
    late = replace(lease, fence=lease.fence + 1)
    assert not stand.store.settle([writes.with_cursor(ENDS[verb](late, now(stand)), {"seq": 1})])[0].accepted
    assert stand.now().status is Status.RUNNING
    assert stand.store.settle([write])[0].accepted
    row = stand.now()
    assert row.last_seq == CURSOR
    assert (row.lease_owner, row.lock_time, row.hb) == (None, None, None)
    assert stand.store.settle([write])[0].accepted, "a repetition is recognised"
    assert writes.with_cursor(write, None) is write


def test_the_claim_of_a_stream_that_was_enqueued_by_name_says_what_it_is(stand: Stand) -> None:
    task = stand.enqueue()
    assert task.kind == "batch"
    [lease] = stand.store.claim([Wanted(seen(task)._replace(kind="stream"), 20.0)], owner="agent-1")
    assert lease.task.kind == stand.now().kind == "stream"


# Stop and start


def test_a_stopped_stream_keeps_its_cursor_through_its_next_start(stand: Stand) -> None:
    lease = stream_lease(stand)
    asked = apply(stand, writes.request_stop(stand.now(), now=now(stand)))
    assert asked is not None
    assert asked.desired_state == Desired.STOPPED
    [renewal] = stand.store.renew([Beat(lease)])
    assert renewal.lease is not None
    assert renewal.lease.task.desired_state == Desired.STOPPED
    moment = now(stand)
    end = writes.with_cursor(writes.stop(lease, now=moment, expire_at=moment + 60), CURSOR)
    assert stand.store.settle([end])[0].accepted
    row = stand.now()
    assert (row.status, row.done_reason, row.last_seq) == (Status.DONE, "stopped", CURSOR)
    again = apply(stand, writes.revive(row, now=now(stand)))
    assert again is not None
    assert (again.status, again.desired_state, again.last_seq) == (Status.PENDING, Desired.STARTED, CURSOR)
    assert (again.done_reason, again.expire_at) == (None, None)


def test_a_waiting_stream_is_stopped_and_a_lost_race_changes_nothing(stand: Stand) -> None:
    task = stand.enqueue(kind="stream")
    stop = writes.stop_waiting(task, now=now(stand), expire_at=now(stand) + 60)
    lease = successor(stand)
    assert apply(stand, stop) is None
    assert stand.store.settle([writes.release(lease, now=now(stand))])[0].accepted
    again = apply(stand, writes.stop_waiting(stand.now(), now=now(stand), expire_at=now(stand) + 60))
    assert again is not None
    assert (again.status, again.desired_state, again.done_reason) == (Status.DONE, Desired.STOPPED, "stopped")


def test_a_request_to_stop_is_taken_back_only_where_it_was_seen(stand: Stand) -> None:
    task = stand.enqueue(kind="stream", desired_state=Desired.STOPPED)
    back = apply(stand, writes.request_start(task, now=now(stand)))
    assert back is not None
    assert (back.status, back.desired_state) == (Status.PENDING, Desired.STARTED)
    write = writes.request_start(back, now=now(stand))
    successor(stand)
    assert apply(stand, write) is None


def test_a_request_to_stop_misses_a_run_that_has_ended(stand: Stand) -> None:
    lease = stream_lease(stand)
    write = writes.request_stop(stand.now(), now=now(stand))
    assert stand.store.settle([writes.release(lease, now=now(stand))])[0].accepted
    assert apply(stand, write) is None
    assert stand.now().desired_state is None


# Handoffs


@pytest.mark.slow
def test_a_handoff_goes_from_the_offer_to_the_last_place(stand: Stand) -> None:
    offered(stand)
    row = stand.now()
    assert (row.status, row.handoff_state, row.handoff_owner) == (Status.PENDING, Handoff.OFFERED, "agent-1")
    assert row.handoff_until == pytest.approx(now(stand) + 15, abs=5)
    lease = successor(stand)
    assert (lease.fence, lease.task.handoff_owner, lease.task.last_seq) == (2, "agent-1", CURSOR)
    after = apply(stand, writes.ready(lease, now=now(stand)))
    assert after is not None
    assert after.handoff_state == Handoff.READY
    last = {"seq": 9, "epoch": "e"}
    done = writes.hand_over(lease.task_id, owner="agent-1", last_seq=last, now=now(stand))
    after = apply(stand, done)
    assert after is not None
    assert (after.handoff_state, after.last_seq, after.status) == (Handoff.DONE, last, Status.RUNNING)
    assert apply(stand, done) is not None, "a repetition is recognised"
    assert apply(stand, writes.ready(lease, now=now(stand))) is None, "it is over"
    assert stand.store.renew([Beat(lease)])[0].lease is not None


def test_the_word_of_the_one_who_offered_comes_too_late_when_the_successor_has_gone_on(stand: Stand) -> None:
    offered(stand)
    lease = successor(stand)
    ended = apply(stand, writes.end_handoff(lease, now=now(stand)))
    assert ended is not None
    assert (ended.handoff_state, ended.last_seq) == (Handoff.DONE, CURSOR)
    stand.store.renew([Beat(lease, last_seq={"seq": 50})])
    late = writes.hand_over(lease.task_id, owner="agent-1", last_seq={"seq": 9}, now=now(stand))
    assert apply(stand, late) is None
    assert stand.now().last_seq == {"seq": 50}


def test_it_is_too_late_for_the_successor_to_end_what_has_ended(stand: Stand) -> None:
    offered(stand)
    lease = successor(stand)
    apply(stand, writes.hand_over(lease.task_id, owner="agent-1", last_seq={"seq": 9}, now=now(stand)))
    assert apply(stand, writes.end_handoff(lease, now=now(stand) + 1.0)) is None
    assert stand.now().last_seq == {"seq": 9}


def test_only_who_offered_last_hands_over(stand: Stand) -> None:
    offered(stand)
    lease = successor(stand)
    moment = now(stand)
    assert stand.store.settle([writes.offer(lease, now=moment, until=moment + 15)])[0].accepted
    old = writes.hand_over(lease.task_id, owner="agent-1", last_seq={"seq": 1}, now=now(stand))
    assert apply(stand, old) is None
    assert stand.now().handoff_owner == "agent-2"
    stranger = replace(lease, owner="agent-3")
    assert apply(stand, writes.ready(stranger, now=now(stand))) is None
    assert apply(stand, writes.end_handoff(stranger, now=now(stand))) is None


def test_without_a_cursor_a_handoff_leaves_the_one_that_is_there(stand: Stand) -> None:
    offered(stand)
    after = apply(stand, writes.hand_over(stand.id("a"), owner="agent-1", last_seq=None, now=now(stand)))
    assert after is not None
    assert after.last_seq == CURSOR


def test_a_handoff_of_which_replies_are_lost_is_done_once(stand: Stand) -> None:
    lease = stream_lease(stand)
    faulty = FaultyEngine(stand.store.engine)
    store = TaskStore(faulty)
    moment = now(stand)
    faulty.fail("offer", Fault.REPEATED)
    assert store.settle([writes.offer(lease, now=moment, until=moment + 15)])[0].accepted
    after = successor(stand)
    for verb, write in (
        ("ready", writes.ready(after, now=moment)),
        ("hand over", writes.hand_over(after.task_id, owner="agent-1", last_seq=CURSOR, now=moment)),
    ):
        faulty.fail(verb, Fault.REPEATED)
        assert store.write_tasks([write]) != [None]
    assert stand.now().handoff_state == Handoff.DONE


# Journals


def test_the_journal_of_a_run_is_a_row_that_is_no_task(stand: Stand) -> None:
    task = stand.enqueue(kind="stream")
    lease = successor(stand)
    journal = Journal(task.task_id, lease.fence, "agent-2")
    for number in range(3):
        journal.moved(now(stand), "live", f"number {number}")
        info = journal.take(0.0, connects=number)
        assert info is not None
        keep_journals(stand.store, {journal.journal_id: info}, keep_s=600)
    [run] = read_journals(stand.store, stand.now(), runs=5)
    assert [move.reason for move in run.moves] == ["number 0", "number 1", "number 2"]
    assert (run.fence, run.agent, run.connects) == (1, "agent-2", 2)
    assert stand.store.get([journal.journal_id]) == {}
