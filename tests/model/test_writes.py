"""Writes as data: conditions, lost replies, and the size of what is kept of errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.conditions import Absent, Is, OneOf, Present, Write
from thunderagent.model.task import Candidate, Lease, Status, Task
from thunderagent.model.writes import agents as agent_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.tasks import ERROR_BYTES, ERRORS_KEPT, cut, error_history

NOW = 1_800_000_000.0

words = st.text(alphabet=st.characters(exclude_categories=()), max_size=600)
"""Texts with anything in them, halves of surrogate pairs included."""


def a_task(**changes: Any) -> Task:
    task = Task(
        task_id="a",
        status=Status.RUNNING,
        created_at=NOW,
        submitted_at=NOW,
        job="report.build",
        fence=3,
        lock_time=NOW + 9,
        lease_owner="me",
        lease_sec=9.0,
        hb=2,
        last_agent="me",
    )
    return replace(task, **changes)


def a_lease(**changes: Any) -> Lease:
    return Lease(task=a_task(**changes), owner="me", fence=3, lease_s=9.0, held_from=0.0)


def a_candidate(status_value: str = "PENDING") -> Candidate:
    return Candidate("a", status_value, NOW, "report.build")


SEEN = a_candidate()


# Conditions


def test_a_write_without_a_condition_does_not_construct() -> None:
    with pytest.raises(ValueError, match="'ghost' has no condition"):
        Write(verb="ghost", task_id="a", set={"x": 1}, require=())


def test_only_what_is_pending_can_be_claimed() -> None:
    with pytest.raises(ValueError, match="only PENDING can be claimed"):
        writes.claim(a_candidate("RUNNING"), owner="me", lease_s=9, now=NOW, until=NOW)


def test_a_claim_requires_the_place_in_the_queue_that_was_seen() -> None:
    write = writes.claim(SEEN, owner="me", lease_s=9, now=NOW, until=NOW + 9)
    assert Is("createdAt", NOW) in write.require
    assert Is("status", "PENDING") in write.require
    assert write.increase == {"fence": 1}


def test_a_claim_stays_in_its_lane() -> None:
    seen = a_candidate("PENDING#reports.3")
    assert writes.claim(seen, owner="me", lease_s=9, now=NOW, until=NOW + 9).set["status"] == "RUNNING#reports.3"


@pytest.mark.parametrize(
    "write",
    [
        writes.succeed(a_lease(), now=NOW, expire_at=NOW),
        writes.retry(a_lease(), due=NOW, error="e", now=NOW),
        writes.snooze(a_lease(), due=NOW, now=NOW),
        writes.release(a_lease(), now=NOW),
        writes.fail(a_lease(), error="e", now=NOW, expire_at=NOW),
        writes.close(a_lease(), reason="r", now=NOW, expire_at=NOW),
        writes.renew(a_lease(), now=NOW, until=NOW),
        writes.stop(a_lease(), now=NOW, expire_at=NOW),
        writes.offer(a_lease(), now=NOW, until=NOW),
        writes.with_cursor(writes.release(a_lease(), now=NOW), {"seq": 1}),
    ],
    ids=lambda write: write.verb,
)
def test_every_write_of_a_holder_is_fenced_and_sets_nothing_that_belongs_to_the_claim(write: Write) -> None:
    assert Is("fence", 3) in write.require
    assert Is("status", "RUNNING") in write.require
    assert "fence" not in write.set
    assert "fence" not in write.increase


def test_a_takeover_requires_that_not_even_a_beat_has_come() -> None:
    write = writes.take_over(a_task(), owner="you", lease_s=9, now=NOW, until=NOW + 9)
    assert {Is("fence", 3), Is("hb", 2), Is("status", "RUNNING")} <= set(write.require)
    assert write.set["crashCount"] == 1


def test_a_revival_is_conditioned_on_the_very_end_that_was_seen() -> None:
    seen = a_task(status=Status.FAILED, finished_at=NOW + 1, retry_count=4, crash_count=2)
    write = writes.revive(seen, now=NOW)
    assert Is("finishedAt", NOW + 1) in write.require
    assert (write.set["retryCount"], write.set["crashCount"]) == (0, 0)
    assert "errors" not in write.remove
    with pytest.raises(ValueError, match="only FAILED and DONE"):
        writes.revive(a_task(), now=NOW)


def test_a_row_that_was_deleted_is_not_brought_back_by_housekeeping() -> None:
    write = agent_writes.take_turn("turn:x", owner="me", now=NOW, until=NOW + 9)
    assert Present("taskId") in write.require


def test_a_handoff_is_for_the_successor_and_the_one_who_offered_alone() -> None:
    lease = a_lease()
    for write in (writes.ready(lease, now=NOW), writes.end_handoff(lease, now=NOW)):
        assert {Is("fence", 3), Is("leaseOwner", "me")} <= set(write.require)
        assert any(isinstance(one, OneOf) and one.name == "handoffState" for one in write.require)
        assert not {"lastSeq", "handoffOwner", "handoffUntil"} & set(write.set)
    write = writes.hand_over("a", owner="me", last_seq={"seq": 5}, now=NOW)
    assert Is("handoffOwner", "me") in write.require
    assert (write.set["lastSeq"], write.set["handoffState"]) == ({"seq": 5}, "DONE")
    assert not {"status", "leaseOwner", "lockTime"} & {*write.set, *write.remove}


def test_a_revival_wants_a_stream_to_run_also_one_that_nobody_knew_to_be_one() -> None:
    for seen in (a_task(kind="stream"), a_task(desired_state="STOPPED")):
        done = replace(seen, status=Status.DONE, finished_at=NOW)
        assert writes.revive(done, now=NOW).set["desiredState"] == "STARTED"
    plain = writes.revive(a_task(status=Status.DONE, finished_at=NOW, last_seq={"seq": 1}), now=NOW)
    assert "desiredState" not in plain.set
    assert "lastSeq" not in {*plain.set, *plain.remove}


# What each verb counts


def test_a_retry_uses_up_one_and_a_snooze_or_a_release_none() -> None:
    lease = a_lease(retry_count=2, crash_count=1)
    assert writes.retry(lease, due=NOW, error="e", now=NOW).set["retryCount"] == 3
    for write in (writes.snooze(lease, due=NOW, now=NOW), writes.release(lease, now=NOW)):
        assert not {"retryCount", "crashCount", "errors", "error"} & set(write.set)
    assert "crashCount" not in writes.retry(lease, due=NOW, error="e", now=NOW).set


def test_a_child_that_is_due_later_stays_due_later() -> None:
    child = a_task(status=Status.BLOCKED)
    assert writes.unpark(child, now=NOW, due=NOW + 60).set["createdAt"] == NOW + 60
    assert writes.unpark(child, now=NOW, due=NOW - 60).set["createdAt"] == NOW
    assert writes.unpark(child, now=NOW).set["createdAt"] == NOW


def test_a_row_that_ends_gets_a_time_to_live_in_whole_seconds() -> None:
    write = writes.succeed(a_lease(), now=NOW, expire_at=NOW + 9.7)
    assert write.set["expireAt"] == int(NOW + 9.7)
    assert isinstance(write.set["expireAt"], int)


# A lost reply


def left_by(write: Write, task: Task) -> dict[str, Any]:
    """The row after a write."""
    row = {**task.to_row(), **write.set}
    for name, step in write.increase.items():
        row[name] = row.get(name, 0) + step
    for name in write.remove:
        row.pop(name, None)
    return row


SETTLEMENTS = [
    writes.succeed(a_lease(), now=NOW + 5, expire_at=NOW, result="1"),
    writes.retry(a_lease(), due=NOW + 20, error="e", now=NOW + 5),
    writes.snooze(a_lease(), due=NOW + 20, now=NOW + 5),
    writes.release(a_lease(), now=NOW + 5),
    writes.fail(a_lease(), error="e", now=NOW + 5, expire_at=NOW),
    writes.close(a_lease(), reason="r", now=NOW + 5, expire_at=NOW),
    writes.stop(a_lease(), now=NOW + 5, expire_at=NOW),
    writes.offer(a_lease(), now=NOW + 5, until=NOW + 20),
    writes.with_cursor(writes.release(a_lease(), now=NOW + 5), {"seq": 1}),
]


@pytest.mark.parametrize("write", SETTLEMENTS, ids=lambda write: write.verb)
def test_a_settlement_knows_the_row_that_it_left(write: Write) -> None:
    assert write.landed_on(left_by(write, a_task()))


@pytest.mark.parametrize("write", SETTLEMENTS, ids=lambda write: write.verb)
def test_a_settlement_does_not_know_the_row_of_another_holder(write: Write) -> None:
    row = left_by(write, a_task())
    assert not write.landed_on({**row, "fence": 4})
    assert not write.landed_on({**row, "updatedAt": NOW + 6})
    assert not write.landed_on({**row, "leaseOwner": "you"})
    assert not write.landed_on(a_task().to_row())


def test_a_claim_knows_its_own_row_and_no_other() -> None:
    write = writes.claim(SEEN, owner="me", lease_s=9, now=NOW, until=NOW + 9)
    row = left_by(write, a_task(status=Status.PENDING, lock_time=None, lease_owner=None, lease_sec=None, hb=None))
    assert write.landed_on(row)
    assert not write.landed_on({**row, "leaseOwner": "you"})
    assert not write.landed_on({**row, "hb": 1})


def test_a_takeover_knows_its_own_row_and_no_other() -> None:
    write = writes.take_over(a_task(), owner="you", lease_s=9, now=NOW, until=NOW + 9)
    row = left_by(write, a_task())
    assert write.landed_on(row)
    assert not write.landed_on({**row, "leaseOwner": "they"})
    assert not write.landed_on(a_task().to_row())


def test_a_write_that_sets_nothing_is_never_taken_for_landed() -> None:
    child = a_task(status=Status.BLOCKED, waiting_for=frozenset({"p"}))
    assert not writes.parent_done(child, "p").landed_on(child.to_row())
    assert Absent("waitingFor") in writes.unpark(child, now=NOW).require


# Errors


def test_the_history_keeps_the_last_ten_attempts() -> None:
    task = a_task()
    for number in range(25):
        history = error_history(task, f"error {number}", agent="me", now=NOW + number)
        task = replace(task, errors=tuple(history), retry_count=number + 1)
    assert [entry["error"] for entry in task.errors] == [f"error {number}" for number in range(15, 25)]
    assert [entry["attempt"] for entry in task.errors] == list(range(16, 26))
    assert {entry["agent"] for entry in task.errors} == {"me"}
    assert len(task.errors) == ERRORS_KEPT


@given(st.lists(words.map(lambda text: text * 5), min_size=1, max_size=12))
def test_ten_kilobytes_hold_every_history(messages: list[str]) -> None:
    task = a_task()
    for message in messages:
        task = replace(task, errors=tuple(error_history(task, message, agent="me", now=NOW)))
    assert sum(len(entry["error"].encode()) for entry in task.errors) <= ERRORS_KEPT * ERROR_BYTES


def test_the_history_does_not_change_the_task_it_was_made_from() -> None:
    old = {"at": NOW, "attempt": 1, "error": "first"}
    task = a_task(errors=(old,))
    error_history(task, "second", agent=None, now=NOW)[0]["error"] = "changed"
    assert old["error"] == "first"


@given(words, st.integers(min_value=3, max_value=400))
def test_a_text_is_cut_within_its_bytes_and_stays_a_text(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert len(short.encode()) <= limit
    assert short.encode().decode() == short


@given(st.text(max_size=100))
def test_a_text_that_fits_is_left_alone(text: str) -> None:
    assert cut(text, 400) == text


def test_a_cut_does_not_split_a_letter() -> None:
    assert cut("ééééé", 10) == "ééééé"
    assert cut("éééééé", 10) == "ééé…"
    assert cut("ab" + "😀" * 5, 12) == "ab😀…"
