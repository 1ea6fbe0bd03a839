"""Hysteresis flips on runs of results, and on nothing else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.errors import ConfigurationError
from thunderagent.regions.hysteresis import Hysteresis

RESULTS = st.lists(st.booleans(), max_size=60)
NUMBERS = st.integers(min_value=1, max_value=6)
JUDGES = st.builds(Hysteresis, down=NUMBERS, up=NUMBERS, first=NUMBERS, is_up=st.sampled_from([None, True, False]))


def judged(start: Hysteresis, results: list[bool]) -> Hysteresis:
    return reduce(Hysteresis.after, results, start)


def run_of(results: list[bool], value: bool) -> int:
    """How many results at the end have this value."""
    return next((number for number, one in enumerate(reversed(results)) if one is not value), len(results))


@given(JUDGES, RESULTS)
def test_it_falls_only_on_so_many_failures_in_a_row_and_rises_only_on_so_many_successes(
    start: Hysteresis, results: list[bool]
) -> None:
    now = start
    for number, ok in enumerate(results, start=1):
        before, now = now, now.after(ok)
        if now.is_up is before.is_up:
            continue
        needed = start.first if before.is_up is None else start.up if now.is_up else start.down
        assert now.is_up is ok
        assert run_of(results[:number], ok) >= needed


@given(JUDGES, RESULTS)
def test_a_run_that_is_long_enough_always_decides(start: Hysteresis, results: list[bool]) -> None:
    after = judged(start, results)
    assert judged(after, [True] * max(start.up, start.first)).is_up is True
    assert judged(after, [False] * max(start.down, start.first)).is_up is False


@given(JUDGES, RESULTS)
def test_the_counts_are_the_runs_at_the_end(start: Hysteresis, results: list[bool]) -> None:
    after = judged(start, results)
    assert (after.successes, after.failures) == (run_of(results, True), run_of(results, False))


@given(st.sampled_from([None, True, False]), st.booleans(), st.integers(min_value=0, max_value=200))
def test_results_that_alternate_never_change_the_judgement(is_up: bool | None, ok: bool, number: int) -> None:
    start = Hysteresis(is_up=is_up)
    assert judged(start, [ok ^ bool(one % 2) for one in range(number)]).is_up is is_up


@given(JUDGES, RESULTS, RESULTS)
def test_what_was_before_the_last_flip_does_not_matter(
    start: Hysteresis, before: list[bool], later: list[bool]
) -> None:
    now, flipped = start, None
    for ok in before:
        now, last = now.after(ok), now
        flipped = now if now.is_up is not last.is_up else flipped
    if flipped is not None:
        fresh = replace(start, is_up=flipped.is_up, successes=0, failures=0)
        for _ in range(max(flipped.successes, flipped.failures)):  # the run that flipped it is all that it knows
            fresh = fresh.after(bool(flipped.is_up))
        assert judged(fresh, later) == judged(flipped, later)


@given(JUDGES, RESULTS, st.booleans())
def test_a_result_gives_a_new_value_and_leaves_the_old_as_it_was(
    start: Hysteresis, results: list[bool], ok: bool
) -> None:
    now = judged(start, results)
    again = judged(start, results)
    now.after(ok)
    assert now == again
    with pytest.raises(FrozenInstanceError):
        now.is_up = True  # type: ignore[misc]


def test_by_default_two_failures_are_down_and_five_successes_up_again() -> None:
    one = judged(Hysteresis(), [True, True])
    assert one.is_up is True
    assert [judged(one, [False] * number).is_up for number in (1, 2)] == [True, False]
    down = judged(one, [False] * 2)
    assert [judged(down, [True] * number).is_up for number in (4, 5)] == [False, True]


def test_at_first_nothing_is_known_and_that_is_not_up() -> None:
    assert not Hysteresis().is_up
    assert [judged(Hysteresis(), results).is_up for results in ([True], [True, False], [True] * 2, [False] * 2)] == [
        None,
        None,
        True,
        False,
    ]


@given(RESULTS.filter(bool))
def test_the_metric_shows_a_first_failure_at_once_and_a_return_late(results: list[bool]) -> None:
    after = judged(Hysteresis(), results)
    assert after.is_fine == (results[-1] and after.is_up is not False)
    fallen = judged(Hysteresis(is_up=True), [False, False])
    assert [judged(fallen, [True] * number).is_fine for number in range(6)] == [False] * 5 + [True]
    assert Hysteresis().is_fine  # nothing speaks against it


def test_an_attempt_that_says_nothing_changes_nothing() -> None:
    for one in (Hysteresis(), judged(Hysteresis(), [True]), judged(Hysteresis(is_up=True), [False] * 2)):
        assert one.after(None) == one


@pytest.mark.parametrize("name", ["down", "up", "first"])
def test_a_number_under_one_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is 0"):
        replace(Hysteresis(), **{name: 0})  # type: ignore[arg-type] # a name for each
