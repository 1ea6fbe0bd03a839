"""What a handler can ask of its agent."""

from __future__ import annotations

import threading

import pytest

from tests.support.engine import a_lease
from thunderagent.jobs.context import PROGRESS_BYTES, Context, ParentResults
from thunderagent.model.errors import LeaseLost, ParentResultLost, TaskCancelled, TaskStopped, TimeLimitExceeded


def test_a_context_knows_its_task_and_its_run() -> None:
    context = Context(a_lease(retry_count=2))
    assert (context.task_id, context.attempt, context.fence) == ("a", 3, 1)
    assert context.idempotency_key == "a:1"


def test_the_fence_and_the_key_of_a_run_grow_with_the_epoch_where_regions_share_a_table() -> None:
    ours, theirs = Context(a_lease(region_epoch=1, fence=7)), Context(a_lease(region_epoch=2, fence=7))
    assert 7 < ours.fence < theirs.fence < 2**53
    assert ours.idempotency_key != theirs.idempotency_key


def test_nothing_stops_a_task_that_nobody_stopped() -> None:
    context = Context(a_lease())
    context.check()
    assert not context.cancelled
    assert context.stop_reason is None
    assert not context.wait(0)


def test_a_task_that_is_stopped_learns_why_at_its_next_check() -> None:
    context = Context(a_lease())
    context.stop(TaskCancelled("by hand"))
    assert context.cancelled
    with pytest.raises(TaskCancelled, match="by hand"):
        context.check()


def test_the_first_reason_stays() -> None:
    context = Context(a_lease())
    first = LeaseLost("held by another")
    assert context.stop(first)
    assert not context.stop(TimeLimitExceeded("too late"))
    assert context.stop_reason is first


def test_a_request_to_stop_ends_a_wait_at_once() -> None:
    context = Context(a_lease())
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(context.wait(60)))
    thread.start()
    context.stop(TaskCancelled())
    thread.join(10)
    assert answers == [True]


def test_who_asks_to_be_told_is_told_once_whenever_it_comes() -> None:
    told: list[TaskStopped] = []
    early, late = Context(a_lease()), Context(a_lease())
    early.when_stopped(told.append)
    assert told == []
    reason = TaskCancelled()
    early.stop(reason)
    early.stop(TaskCancelled("again"))
    late.stop(reason)
    late.when_stopped(told.append)
    assert told == [reason, reason]


def test_the_last_progress_is_taken_once() -> None:
    context = Context(a_lease())
    assert context.take_progress() is None
    context.progress(0.5)
    context.progress({"done": 2, "of": 3})
    assert context.take_progress() == '{"done":2,"of":3}'
    assert context.take_progress() is None


def test_progress_of_exactly_the_limit_is_kept_and_one_byte_more_is_not() -> None:
    context = Context(a_lease())
    context.progress("x" * (PROGRESS_BYTES - 2))
    with pytest.raises(ValueError, match=f"has {PROGRESS_BYTES + 1} bytes, at most {PROGRESS_BYTES}"):
        context.progress("x" * (PROGRESS_BYTES - 1))
    with pytest.raises(ValueError, match="bytes, at most"):
        context.progress("ü" * (PROGRESS_BYTES // 2))
    assert context.take_progress() == '"' + "x" * (PROGRESS_BYTES - 2) + '"'


@pytest.mark.parametrize("value", [pytest.param(object(), id="object"), float("nan"), b"x", "\ud800"], ids=repr)
def test_progress_must_be_json(value: object) -> None:
    with pytest.raises(ValueError, match="the progress is not JSON data"):
        Context(a_lease()).progress(value)


def test_results_of_parents_are_read_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def parents() -> dict[str, int]:
        asked.append(1)
        return {"p": 7}

    context = Context(a_lease(), parents)
    assert asked == []
    assert context.parent_results() == {"p": 7}
    assert Context(a_lease()).parent_results() == {}


def test_a_parent_whose_result_is_lost_is_there_and_only_its_result_raises() -> None:
    results = ParentResults({"a": 1}, {"b": ParentResultLost("it was not stored")})
    assert ("a" in results, "b" in results, "c" in results) == (True, True, False)
    assert list(results) == ["a", "b"]
    with pytest.raises(ParentResultLost, match="not stored"):
        results.get("b")
