"""The task: ids, lanes, rows and the table of transitions."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.conditions import Is, OneOf, Write
from thunderagent.model.errors import ConfigurationError, TaskUnreadable
from thunderagent.model.rows import ATTRIBUTES, LEASE_ATTRIBUTES, Unreadable
from thunderagent.model.task import (
    TERMINAL,
    TRANSITIONS,
    Candidate,
    Lane,
    Lease,
    Status,
    Task,
    new_task_id,
    read_task,
    timestamp,
)
from thunderagent.model.writes import tasks as writes

NOW = 1_800_000_000.0

queues = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
lanes = st.builds(Lane, queue=queues, shard=st.integers(min_value=0, max_value=63))
times = st.floats(min_value=0, max_value=4e9).map(timestamp)
words = st.text(max_size=30)
ids = st.text(min_size=1, max_size=20)
flat = st.dictionaries(words, st.one_of(words, st.integers(), st.none()), max_size=3)

tasks = st.builds(
    Task,
    task_id=ids,
    status=st.sampled_from(Status),
    lane=lanes,
    created_at=times,
    submitted_at=times,
    started_at=st.none() | times,
    finished_at=st.none() | times,
    updated_at=st.none() | times,
    job=ids,
    kind=st.sampled_from(["batch", "stream"]),
    payload_text=words,
    payload_ref=st.none() | ids,
    retry_count=st.integers(min_value=0, max_value=1000),
    max_retry=st.none() | st.integers(min_value=0, max_value=1000),
    crash_count=st.integers(min_value=0, max_value=1000),
    fence=st.integers(min_value=0, max_value=2**40),
    lock_time=st.none() | times,
    lease_owner=st.none() | ids,
    lease_sec=st.none() | times,
    hb=st.none() | st.integers(min_value=0, max_value=2**40),
    last_agent=st.none() | ids,
    depends_on=st.lists(ids, max_size=3).map(tuple),
    waiting_for=st.frozensets(ids, max_size=3),
    dependents=st.frozensets(ids, max_size=3),
    on_parent_failure=st.none() | st.sampled_from(["fail", "cancel", "run"]),
    desired_state=st.none() | st.sampled_from(["STARTED", "STOPPED"]),
    last_seq=st.none() | flat,
    cancel_requested=st.booleans(),
    progress_text=st.none() | words,
    result_text=st.none() | words,
    result_ref=st.none() | ids,
    error=st.none() | words,
    errors=st.lists(flat, max_size=3).map(tuple),
    done_reason=st.none() | words,
    expire_at=st.none() | times,
)


def a_task(**changes: Any) -> Task:
    return replace(
        Task(task_id="a", status=Status.PENDING, created_at=NOW, submitted_at=NOW, job="report.build"), **changes
    )


# Ids


def test_an_id_is_a_uuid_of_version_7() -> None:
    for _ in range(100):
        made = uuid.UUID(new_task_id())
        assert (made.version, made.variant) == (7, uuid.RFC_4122)


@given(st.lists(st.integers(min_value=0, max_value=2**47), min_size=2, max_size=10, unique=True))
def test_ids_sort_by_the_time_they_were_made(milliseconds: list[int]) -> None:
    made = [(one, new_task_id(one / 1000)) for one in milliseconds]
    by_id = [uuid.UUID(name).int >> 80 for _, name in sorted(made, key=lambda pair: pair[1])]
    assert by_id == sorted(by_id)
    assert by_id == [int(one / 1000 * 1000) for one in sorted(milliseconds)]


def test_ids_of_one_millisecond_differ() -> None:
    assert len({new_task_id(NOW) for _ in range(1000)}) == 1000


# Lanes


@pytest.mark.slow
@given(lanes, st.sampled_from(Status))
def test_a_lane_survives_the_trip_through_the_status_attribute(lane: Lane, status: Status) -> None:
    value = lane.value(status)
    plain, mark, suffix = value.partition("#")
    assert plain == status
    assert Lane.parse(mark + suffix) == lane


@pytest.mark.parametrize(
    ("lane", "suffix"),
    [
        (Lane(), ""),
        (Lane("reports"), "#reports"),
        (Lane("reports", 3), "#reports.3"),
        (Lane("default", 3), "#default.3"),
    ],
)
def test_the_suffix_of_a_lane_is_the_one_of_the_design(lane: Lane, suffix: str) -> None:
    assert lane.suffix == suffix
    assert lane.value(Status.PENDING) == f"PENDING{suffix}"


@pytest.mark.parametrize("name", ["", "a.b", "a#b", "a b", "ä", "x" * 65, "a\n"])
def test_a_name_that_would_break_the_suffix_cannot_be_a_queue(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a queue"):
        Lane(name)


@given(ids, st.integers(min_value=1, max_value=64))
def test_the_shard_of_a_task_is_always_the_same_and_below_their_number(name: str, shards: int) -> None:
    lane = Lane.of(name, "reports", shards)
    assert lane == Lane.of(name, "reports", shards)
    assert 0 <= lane.shard < shards


def test_tasks_spread_over_all_shards() -> None:
    assert {Lane.of(new_task_id(), "reports", 8).shard for _ in range(500)} == set(range(8))


# Rows


@pytest.mark.slow
@given(tasks)
def test_a_task_survives_the_trip_through_its_row(task: Task) -> None:
    assert Task.from_row(task.to_row()) == task


@pytest.mark.slow
@given(tasks)
def test_a_row_holds_known_attributes_and_nothing_empty(task: Task) -> None:
    row = task.to_row()
    assert set(row) <= set(ATTRIBUTES)
    for name, value in row.items():
        assert value is not None
        assert ATTRIBUTES[name] not in ("SS", "L") or value
    assert row["status"].partition("#")[0] == task.status


def test_fence_0_is_kept_as_every_condition_needs_it() -> None:
    row = a_task(hb=0).to_row()
    assert row["fence"] == 0
    assert row["hb"] == 0
    assert row["retryCount"] == 0
    assert row["crashCount"] == 0


def test_an_attribute_of_a_later_version_is_ignored() -> None:
    row = {**a_task().to_row(), "somethingNew": 1}
    assert Task.from_row(row) == a_task()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "AGENT"}, "status is 'AGENT'"),
        ({"status": "PENDING#a.b.c"}, "status is 'PENDING#a.b.c'"),
        ({"status": "PENDING#reports.-1"}, "status is 'PENDING#reports.-1'"),
        ({"status": "PENDING#default"}, "status is 'PENDING#default'"),
        ({"status": "PENDING@api"}, "status is 'PENDING@api'"),
        ({"lockTime": "noon"}, "lockTime is 'noon'"),
        ({"createdAt": float("nan")}, "createdAt is nan"),
        ({"retryCount": 1.5}, "retryCount is 1.5"),
        ({"fence": -1}, "fence is -1"),
        ({"fence": 10**40}, "fence is 1000"),
        ({"crashCount": True}, "crashCount is True"),
        ({"onParentFailure": "ask"}, "onParentFailure is 'ask'"),
        ({"uniqueScope": "for_ever"}, "uniqueScope is 'for_ever'"),
        ({"desiredState": "PAUSED"}, "desiredState is 'PAUSED'"),
        ({"handoffState": "HALF"}, "handoffState is 'HALF'"),
        ({"kind": "oracle"}, "kind is 'oracle'"),
        ({"errors": "it broke"}, "errors is a text"),
        ({"errors": ["it broke"]}, "errors is a list"),
        ({"errors": [{"at": frozenset("a")}]}, "errors is a list"),
        ({"dependsOn": [1]}, "dependsOn is a list"),
        ({"waitingFor": ["a"]}, "waitingFor is a list"),
        ({"payload": 7}, "payload is a number;"),
        ({"leaseOwner": None}, "leaseOwner is NULL"),
    ],
)
def test_a_row_that_cannot_be_read_is_a_value_with_what_is_wrong_and_what_to_do(
    change: dict[str, Any], problem: str
) -> None:
    row = {**a_task().to_row(), **change}
    found = read_task(row)
    assert isinstance(found, Unreadable)
    assert f"the row 'a' cannot be read: {problem}" in str(found)
    assert "upgrade this installation" in str(found)
    with pytest.raises(TaskUnreadable, match="cannot be read"):
        Task.from_row(row)


def test_payload_result_and_progress_are_read_as_json() -> None:
    task = a_task(payload_text='{"a":1}', result_text="[2]", progress_text='"half"')
    assert (task.payload, task.result, task.progress) == ({"a": 1}, [2], "half")
    assert a_task().payload is None
    assert a_task().result is None
    assert a_task().progress is None


def test_an_attempt_counts_errors_and_lost_agents() -> None:
    assert a_task().attempt == 1
    assert a_task(retry_count=2, crash_count=1).attempt == 4


@given(st.floats(min_value=0, max_value=4e9))
def test_a_time_is_cut_to_milliseconds_and_never_rounded_into_the_future(seconds: float) -> None:
    kept = timestamp(seconds)
    assert kept <= seconds
    assert seconds - kept < 0.00101
    assert json.loads(json.dumps(kept)) == kept
    assert timestamp(kept) in (kept, pytest.approx(kept, abs=0.00101))


# Transitions


def test_the_terminal_states_are_those_that_no_agent_leaves() -> None:
    assert {status for status in Status if status.is_terminal} == TERMINAL == {"SUCCESS", "FAILED", "DONE"}
    assert set(TRANSITIONS) == set(Status)
    assert TRANSITIONS[Status.SUCCESS] == frozenset()
    for status in TERMINAL:
        assert not TRANSITIONS[status] & (TERMINAL | {Status.RUNNING})


def held(**changes: Any) -> Lease:
    task = a_task(status=Status.RUNNING, fence=3, lease_owner="me", lock_time=NOW + 9, lease_sec=9.0, hb=2, **changes)
    return Lease(task=task, owner="me", fence=3, lease_s=9.0, held_from=0.0)


def every_write() -> list[Write]:
    lease = held()
    end: dict[str, Any] = {"now": NOW, "expire_at": NOW + 9}
    blocked = a_task(status=Status.BLOCKED, waiting_for=frozenset({"p"}))
    seen = Candidate("a", "PENDING#reports.3", NOW, "report.build")
    return [
        writes.claim(seen, owner="me", lease_s=9, now=NOW, until=NOW + 9),
        writes.renew(lease, now=NOW, until=NOW + 9),
        writes.take_over(lease.task, owner="you", lease_s=9, now=NOW, until=NOW + 9),
        writes.give_up(lease.task, error="e", **end),
        writes.succeed(lease, **end),
        writes.retry(lease, due=NOW, error="e", now=NOW),
        writes.snooze(lease, due=NOW, now=NOW),
        writes.release(lease, now=NOW),
        writes.wait_for_permit(lease, limit_key="api", now=NOW),
        writes.put_back(lease, due=NOW + 2, now=NOW),
        writes.claim(Candidate("a", "BLOCKED@api", NOW, "j"), owner="me", lease_s=9, now=NOW, until=NOW + 9),
        writes.leave_waitlist(Candidate("a", "BLOCKED@api", NOW, "j"), now=NOW),
        writes.join_waitlist(Candidate("a", "PENDING", NOW, "j"), limit_key="api", now=NOW),
        writes.fail(lease, error="e", **end),
        writes.close(lease, reason="r", **end),
        writes.cancel_waiting(a_task(), reason="r", **end),
        writes.cancel_waiting(blocked, reason="r", **end),
        writes.request_cancel(lease.task, now=NOW),
        *(
            writes.revive(a_task(status=status, finished_at=NOW), now=NOW, waiting_for=waiting_for)
            for status in (Status.FAILED, Status.DONE)
            for waiting_for in (frozenset[str](), frozenset({"p"}))
        ),
        writes.register_dependent(a_task(), "child"),
        writes.parent_done(blocked, "p"),
        writes.unpark(blocked, now=NOW),
        writes.doom(blocked, status=Status.FAILED, reason="r", **end),
        writes.doom(blocked, status=Status.DONE, reason="r", **end),
    ]


def before(write: Write) -> set[Status]:
    """The states in which the condition lets a write happen."""
    for condition in write.require:
        if isinstance(condition, Is) and condition.name == "status":
            return {Status(str(condition.value).partition("@")[0].partition("#")[0])}
        if isinstance(condition, OneOf) and condition.name == "status":
            return {Status(value.partition("@")[0].partition("#")[0]) for value in condition.values}
    raise AssertionError(f"{write.verb} is not conditioned on the status")


@pytest.mark.parametrize("write", every_write(), ids=lambda write: write.verb)
def test_every_verb_is_conditioned_on_a_status_from_which_the_table_allows_it(write: Write) -> None:
    if "status" in write.set:
        after = Status(write.set["status"].partition("@")[0].partition("#")[0])
        assert all(after in TRANSITIONS[status] for status in before(write)), write
    else:
        assert before(write)


def test_every_transition_of_the_table_has_a_verb() -> None:
    made = {
        (status, Status(write.set["status"].partition("@")[0].partition("#")[0]))
        for write in every_write()
        if "status" in write.set
        for status in before(write)
    }
    made.add((Status.RUNNING, Status.RUNNING))  # a takeover leaves the status alone
    assert made == {(status, after) for status, several in TRANSITIONS.items() for after in several}


@pytest.mark.parametrize("write", every_write(), ids=lambda write: write.verb)
def test_who_leaves_running_leaves_no_lease_behind(write: Write) -> None:
    leaves = "status" in write.set and before(write) == {Status.RUNNING}
    assert leaves == (tuple(write.remove)[: len(LEASE_ATTRIBUTES)] == LEASE_ATTRIBUTES)


def test_the_deadline_of_a_lease_is_counted_from_before_it_was_sent() -> None:
    lease = replace(held(), held_from=100.0, lease_s=300.0)
    assert lease.deadline(0.2) == 340.0
