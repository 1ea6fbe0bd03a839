"""Backoff and the pace of polls."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from thunderagent.model.pacing import Backoff, PollPace, first_poll, jittered, outage_delays, wait_delays

seeds = st.integers(min_value=0, max_value=2**32).map(random.Random)


class Full(random.Random):
    """Always the upper end: no jitter."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        return b


@given(retries=st.integers(min_value=0, max_value=10_000), rng=seeds)
def test_a_backoff_is_between_nothing_and_its_cap_however_many_retries_there_were(
    retries: int, rng: random.Random
) -> None:
    delay = Backoff().delay(retries, rng)
    assert 0.0 <= delay <= min(300.0, 2.0 * 2.0 ** min(retries, 62))


@given(
    base=st.floats(min_value=0, max_value=86400),
    cap=st.floats(min_value=0, max_value=604800),
    retries=st.integers(min_value=0, max_value=1000),
    rng=seeds,
)
def test_a_backoff_of_any_numbers_stays_in_its_bounds(
    base: float, cap: float, retries: int, rng: random.Random
) -> None:
    assert 0.0 <= Backoff(base_s=base, cap_s=cap).delay(retries, rng) <= cap


def test_the_upper_ends_of_the_backoff_are_those_of_its_docstring() -> None:
    ends = [Backoff().delay(retries, Full()) for retries in range(10)]
    assert ends == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_the_jitter_of_the_backoff_is_full() -> None:
    rng = random.Random(3)
    delays = [Backoff().delay(4, rng) for _ in range(2000)]
    assert min(delays) < 1
    assert max(delays) > 31
    assert abs(sum(delays) / len(delays) - 16) < 1


def test_an_empty_queue_is_asked_ever_more_rarely() -> None:
    pace = PollPace(1.0, 5.0, 10.0)
    waits = [pace.after(0, more=False, rng=Full()) for _ in range(80)]
    assert waits[:6] == [1.0, 1.5, 2.25, 3.375, 5.0, 5.0]
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
    assert 300 <= sum(wait for wait in waits if wait < 10) < 310


def test_work_brings_the_pace_back() -> None:
    pace = PollPace(1.0, 5.0, 10.0)
    for _ in range(100):
        pace.after(0, more=False, rng=Full())
    assert pace.after(3, more=False, rng=Full()) == 1.0
    assert pace.after(0, more=False, rng=Full()) == 1.5


def test_work_and_room_mean_at_once() -> None:
    assert PollPace(1.0, 5.0, 10.0).after(1, more=True, rng=random.Random(1)) == 0.0


@given(
    polls=st.lists(st.tuples(st.integers(min_value=0, max_value=50), st.booleans()), max_size=300),
    rng=seeds,
)
def test_no_pause_is_longer_than_the_idle_one(polls: list[tuple[int, bool]], rng: random.Random) -> None:
    pace = PollPace(1.0, 5.0, 10.0)
    for found, more in polls:
        wait = pace.after(found, more=more, rng=rng)
        assert 0.0 <= wait <= 10.0
        assert wait >= 0.75 or (found and more)


@given(seconds=st.floats(min_value=0, max_value=1e6), rng=seeds)
def test_jitter_takes_away_up_to_a_quarter_and_never_adds(seconds: float, rng: random.Random) -> None:
    assert 0.75 * seconds <= jittered(seconds, rng) <= seconds


@given(rng=seeds)
def test_the_first_poll_is_spread_over_two_seconds(rng: random.Random) -> None:
    assert 1.0 <= first_poll(rng, 1.0) <= 3.0
    assert 1.0 <= first_poll(rng, 30.0) <= 3.0, "whoever polls seldom begins no later"


@given(rng=seeds)
def test_agents_that_poll_more_often_begin_sooner(rng: random.Random) -> None:
    assert 0.05 <= first_poll(rng, 0.05) <= 0.1501


def test_an_outage_is_waited_out_with_doubling_pauses() -> None:
    assert list(itertools.islice(outage_delays(Full()), 9)) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_waiting_client_looks_soon_and_then_less_often() -> None:
    delays = list(itertools.islice(wait_delays(), 30))
    assert delays[0] == 0.05
    assert delays == sorted(delays)
    assert delays[-1] == 2.0
