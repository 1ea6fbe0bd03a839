"""Every outcome of a handler means exactly one transition."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import pytest
from pydantic import BaseModel

from thunderagent.agent.settle import Policy, Settlement, settle
from thunderagent.jobs.context import Cancel, Context, Fail, Snooze
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped, about
from thunderagent.model import errors, events
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    PayloadTooLarge,
    StoreUnavailable,
    TaskStopped,
    TimeLimitExceeded,
)
from thunderagent.model.jsondata import Unstorable
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import Lease, Status, Task

NOW = 1_800_000_000.0
DAY = 86400.0
POLICY = Policy(backoff=Backoff(), max_retry=3, keep_success_s=14 * DAY, keep_failed_s=90 * DAY)


class BadMonth(ValueError):
    """A retry makes no sense."""


def plain(ctx: Context, payload: dict[str, Any]) -> None: ...


def inline(key: str, text: str, expire_at: float) -> str | None:
    return None


def a_lease(**changes: Any) -> Lease:
    task = Task(task_id="a", status=Status.RUNNING, created_at=NOW, submitted_at=NOW, job="test.job", fence=3, hb=2)
    return Lease(task=replace(task, **changes), owner="me", fence=3, lease_s=9.0, held_from=0.0)


def settled(
    outcome: Outcome, *, lease: Lease | None = None, one: Job[Any] | None = None, keep: Any = inline
) -> Settlement | None:
    return settle(
        lease or a_lease(),
        one or job("test.job")(plain),
        outcome,
        policy=POLICY,
        now=NOW,
        seconds=1.5,
        rng=random.Random(1),
        keep=keep,
    )


def written(outcome: Outcome, **options: Any) -> Write:
    settlement = settled(outcome, **options)
    assert settlement is not None
    return settlement.write


# Which transition


@pytest.mark.parametrize(
    ("outcome", "verb", "status", "event"),
    [
        (Returned(None), "succeed", "SUCCESS", events.TaskSucceeded),
        (Returned({"a": 1}), "succeed", "SUCCESS", events.TaskSucceeded),
        (Returned(False), "succeed", "SUCCESS", events.TaskSucceeded),
        (Returned(Snooze(60)), "snooze", "PENDING", events.TaskSnoozed),
        (Returned(Cancel()), "close", "DONE", events.TaskClosed),
        (Returned(Fail("no")), "fail", "FAILED", events.TaskFailed),
        (Raised("ValueError: x"), "retry", "PENDING", events.TaskRetried),
        (Raised("ValueError: x", fatal=True), "fail", "FAILED", events.TaskFailed),
        (Stopped(errors.AgentDraining()), "release", "PENDING", events.TaskReleased),
        (Stopped(errors.TaskCancelled("by hand")), "close", "DONE", events.TaskClosed),
        (Stopped(TimeLimitExceeded("too long")), "retry", "PENDING", events.TaskRetried),
        (Stopped(TaskStopped("why")), "retry", "PENDING", events.TaskRetried),
    ],
    ids=str,
)
def test_an_outcome_means_one_transition(
    outcome: Outcome, verb: str, status: str, event: type[events.TaskEvent]
) -> None:
    settlement = settled(outcome)
    assert settlement is not None
    assert settlement.write.verb == verb
    assert settlement.write.set["status"] == status
    assert type(settlement.event) is event
    assert settlement.event == replace(settlement.event, **about(a_lease()))


def test_a_lost_lease_means_no_write() -> None:
    assert settled(Stopped(errors.LeaseLost("gone"))) is None


def test_a_transition_stays_in_the_lane_of_the_task() -> None:
    lease = a_lease()
    lane = replace(lease.task.lane, queue="reports", shard=3)
    lease = replace(lease, task=replace(lease.task, lane=lane))
    assert written(Returned(1), lease=lease).set["status"] == "SUCCESS#reports.3"
    assert written(Raised("e"), lease=lease).set["status"] == "PENDING#reports.3"


# Retries


@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_retry_comes_after_a_backoff_that_knows_how_many_there_were(used: int) -> None:
    settlement = settled(Raised("e"), lease=a_lease(retry_count=used))
    assert settlement is not None
    assert isinstance(settlement.event, events.TaskRetried)
    assert 0 <= settlement.event.delay_s <= 2.0 * 2**used
    assert settlement.write.set["createdAt"] == pytest.approx(NOW + settlement.event.delay_s, abs=0.002)
    assert settlement.write.set["retryCount"] == used + 1


def test_when_retries_are_used_up_the_task_fails() -> None:
    write = written(Raised("the last error"), lease=a_lease(retry_count=3))
    assert write.verb == "fail"
    assert write.set["error"] == "the last error"
    assert write.set["expireAt"] == int(NOW + 90 * DAY)


def test_the_task_knows_its_retries_better_than_the_job_and_the_job_better_than_the_settings() -> None:
    one = job("test.job", max_retry=1)(plain)
    assert written(Raised("e"), lease=a_lease(retry_count=1), one=one).verb == "fail"
    assert written(Raised("e"), lease=a_lease(retry_count=1, max_retry=2), one=one).verb == "retry"
    assert written(Raised("e"), lease=a_lease(retry_count=0, max_retry=0), one=one).verb == "fail"
    assert written(Raised("e"), lease=a_lease(retry_count=2)).verb == "retry"


def test_a_job_may_have_a_backoff_of_its_own() -> None:
    one = job("test.job", backoff=Backoff(base_s=0, cap_s=0))(plain)
    assert written(Raised("e"), one=one).set["createdAt"] == NOW


def test_lost_agents_do_not_use_up_retries() -> None:
    assert written(Raised("e"), lease=a_lease(crash_count=9)).verb == "retry"


def test_a_time_limit_is_fatal_for_a_job_that_says_so() -> None:
    one = job("test.job", fatal=(errors.TimeLimitExceeded,))(plain)
    assert written(Stopped(TimeLimitExceeded("too long")), one=one).verb == "fail"
    assert "TimeLimitExceeded: too long" in written(Stopped(TimeLimitExceeded("too long"))).set["error"]


# Snooze, Cancel, Fail


def test_a_snooze_uses_up_nothing_and_is_never_due_in_the_past() -> None:
    write = written(Returned(Snooze(60)), lease=a_lease(retry_count=3))
    assert write.set["createdAt"] == NOW + 60
    assert "retryCount" not in write.set
    assert written(Returned(Snooze(-60))).set["createdAt"] == NOW


def test_a_reason_of_a_handler_is_kept() -> None:
    assert written(Returned(Cancel("no longer wanted"))).set["doneReason"] == "no longer wanted"
    assert written(Returned(Cancel())).set["doneReason"] == "cancelled by its handler"
    assert written(Returned(Fail("no such month"))).set["error"] == "no such month"


def test_who_was_cancelled_and_yet_came_to_its_end_has_succeeded() -> None:
    assert written(Returned("done")).verb == "succeed"


# Results


class Model(BaseModel):
    path: PurePosixPath
    total: Decimal


@dataclass
class Data:
    at: datetime


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("ü", '"ü"'),
        ({"b": 1, "a": [True, None]}, '{"b":1,"a":[true,null]}'),
        (Decimal("1.10"), '"1.10"'),
        (datetime(2026, 7, 1, 12, tzinfo=UTC), '"2026-07-01T12:00:00Z"'),
        (b"text", '"text"'),
        ({3}, "[3]"),
        (frozenset({"x"}), '["x"]'),
        ((1, 2), "[1,2]"),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Model(path=PurePosixPath("/a"), total=Decimal("2.5")), '{"path":"/a","total":"2.5"}'),
        ([Data(datetime(2026, 7, 1, tzinfo=UTC))], '[{"at":"2026-07-01T00:00:00Z"}]'),
        ({1: "a"}, '{"1":"a"}'),
        (Status.DONE, '"DONE"'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_result_is_kept_as_json(value: Any, text: str) -> None:
    write = written(Returned(value))
    assert write.set["result"] == text
    assert "error" not in write.set


def test_no_result_is_no_attribute() -> None:
    assert "result" not in written(Returned(None)).set


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


def exploding() -> Any:
    yield 1
    raise KeyError("inside")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [float("inf")],
        object(),
        Broken(),
        b"\xff\xfe",
        "\ud800",
        exploding(),
        Unstorable("it was too strange"),
        lambda: None,
        ValueError("an exception is no result"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_cannot_be_stored_is_a_note_on_a_success(value: Any) -> None:
    settlement = settled(Returned(value))
    assert settlement is not None
    assert settlement.write.set["status"] == "SUCCESS"
    assert not {"result", "resultRef"} & set(settlement.write.set)
    assert settlement.write.set["error"].startswith("the result was not stored: ")
    assert isinstance(settlement.event, events.TaskSucceeded)
    assert settlement.event.note == settlement.write.set["error"]


@pytest.mark.parametrize("value", [float("nan"), object(), b"\xff\xfe", Unstorable("it was too strange")])
def test_a_job_may_fail_for_a_result_that_cannot_be_stored(value: Any) -> None:
    settlement = settled(Returned(value), one=job("test.job", max_retry=3, on_bad_result="fail")(plain))
    assert settlement is not None
    assert settlement.write.set["status"] == "FAILED", "the work is done: to do it again gives the same result"
    assert settlement.write.set["error"].startswith("the result was not stored: ")
    assert isinstance(settlement.event, events.TaskFailed)


def test_a_result_that_can_be_stored_is_a_success_whatever_the_job_says_of_others() -> None:
    write = written(Returned({"a": 1}), one=job("test.job", on_bad_result="fail")(plain))
    assert (write.set["status"], write.set["result"]) == ("SUCCESS", '{"a":1}')


@pytest.mark.parametrize(
    ("value", "timeout_s", "note"),
    [
        (1, 1.0, "it ran for 1.5 s, over its time limit of 1 s"),
        (1, 1.5, None),
        (1, None, None),
        (float("nan"), 1.0, "; it ran for 1.5 s, over its time limit of 1 s"),
    ],
)
def test_a_success_that_came_after_the_time_limit_says_so(
    value: Any, timeout_s: float | None, note: str | None
) -> None:
    write = written(Returned(value), one=job("test.job", timeout_s=timeout_s)(plain))
    assert write.set["status"] == "SUCCESS"
    found = write.set.get("error")
    assert found is None if note is None else str(found).endswith(note)


def test_a_result_that_contains_itself_is_a_note_too() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert "not stored" in written(Returned(circle)).set["error"]


@pytest.mark.parametrize("error", [PayloadTooLarge("too large"), ConfigurationError("no bucket"), AccessDenied("no")])
def test_a_result_that_no_place_takes_for_good_is_a_note(error: Exception) -> None:
    def keep(key: str, text: str, expire_at: float) -> str | None:
        raise error

    write = written(Returned("x" * 10), keep=keep)
    assert write.set["status"] == "SUCCESS"
    assert str(error) in write.set["error"]


def test_a_store_that_is_away_for_a_moment_is_asked_again_instead() -> None:
    def keep(key: str, text: str, expire_at: float) -> str | None:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        settled(Returned("x"), keep=keep)


def test_a_large_result_is_kept_apart_under_the_name_of_its_task() -> None:
    asked = []

    def keep(key: str, text: str, expire_at: float) -> str | None:
        asked.append((key, text, expire_at))
        return f"item:{key}"

    write = written(Returned("x"), keep=keep)
    [(key, text, expire_at)] = asked
    assert (text, expire_at) == ('"x"', NOW + 14 * DAY)
    assert write.set["resultRef"] == f"item:{key}"
    assert "result" not in write.set


def test_the_results_of_two_tasks_that_had_one_id_after_each_other_are_kept_apart() -> None:
    """The fences of the second begin afresh, and a late purge of the first deletes its result alone."""
    first, asked = a_lease(), list[str]()

    def keep(key: str, text: str, expire_at: float) -> str | None:
        asked.append(key)
        return f"item:{key}"

    second = replace(first, task=replace(first.task, submitted_at=first.task.submitted_at + 0.001))
    for one in (first, second, first):
        written(Returned("x"), lease=one, keep=keep)
    assert asked[0] == asked[2] != asked[1]


# Streams


@pytest.mark.parametrize("why", [errors.StreamHandedOff(), errors.AgentDraining()], ids=type)
def test_a_stream_that_goes_to_another_agent_uses_nothing_up(why: TaskStopped) -> None:
    one = settled(Stopped(why), lease=a_lease(retry_count=2, crash_count=1))
    assert one is not None
    assert (one.write.verb, one.write.set["status"]) == ("release", "PENDING")
    assert not {"retryCount", "crashCount", "errors"} & set(one.write.set)
    assert isinstance(one.event, events.TaskReleased)


def test_a_stream_that_was_stopped_is_kept_as_long_as_a_failed_one() -> None:
    one = settled(Stopped(errors.StreamStopped()))
    assert one is not None
    assert (one.write.verb, one.write.set["doneReason"]) == ("stop", "stopped")
    assert one.write.set["expireAt"] == int(NOW + 90 * DAY)
    assert isinstance(one.event, events.TaskClosed)


def test_after_progress_errors_are_counted_from_zero_and_a_wedge_too() -> None:
    tired = a_lease(retry_count=3)
    for outcome in (Raised("boom", progressed=True), Stopped(errors.StreamWedged(), progressed=True)):
        one = settled(outcome, lease=tired)
        assert one is not None
        assert (one.write.verb, one.write.set["retryCount"]) == ("retry", 1)
        assert 0.0 <= one.write.set["createdAt"] - NOW <= 2.0, "the backoff starts afresh as well"
    for outcome in (Raised("boom"), Stopped(errors.StreamWedged())):
        one = settled(outcome, lease=tired)
        assert one is not None
        assert one.write.verb == "fail"
    one = settled(Stopped(errors.StreamWedged("no message for 60 s")), lease=tired)
    assert one is not None
    assert one.write.set["error"] == "StreamWedged: no message for 60 s"
    fatal = settled(Raised("StreamFailed: gone", fatal=True, progressed=True))
    assert fatal is not None
    assert fatal.write.verb == "fail"
