"""What a poller remembers of tasks that it never gets."""

from __future__ import annotations

from thunderagent.agent.refusals import REMEMBERED, Refusals
from thunderagent.model.task import Candidate


def one(name: str, created_at: float = 1.0) -> Candidate:
    return Candidate(name, "PENDING", created_at, "test.job", "batch")


def test_a_task_that_stays_where_it_is_is_refused_for_ever_longer() -> None:
    refusals = Refusals()
    for now in (10.0, 40.0, 75.0):
        refusals.tried([one(f"fresh-{now}"), one("a")], now)
    assert refusals.longest(0.0) == (one("a"), 65.0)
    assert refusals.longest(76.0) is None, "it is not tried any more"
    refusals.over()
    assert refusals.longest(0.0) is None


def test_claims_that_others_won_are_never_the_same_task_twice() -> None:
    refusals = Refusals()
    for now in range(10, 200):
        refusals.tried([one(f"task-{now}")], float(now))
        assert refusals.longest(0.0) == (one(f"task-{now}"), 0.0)


def test_a_task_that_came_back_to_its_queue_is_a_new_one() -> None:
    refusals = Refusals()
    refusals.tried([one("a", 1.0)], 10.0)
    refusals.tried([one("a", 70.0)], 80.0)
    assert refusals.longest(0.0) == (one("a", 70.0), 0.0)
    refusals.tried([one("a", 70.0)], 90.0)
    assert refusals.longest(0.0) == (one("a", 70.0), 10.0)


def test_what_is_remembered_has_a_limit() -> None:
    refusals = Refusals()
    for now in range(REMEMBERED + 10):
        refusals.tried([one(str(now))], float(now))
    assert len(refusals._first) == REMEMBERED
