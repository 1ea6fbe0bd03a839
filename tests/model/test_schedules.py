"""What is decided about ticks: which are put, which are left out, and what the row of a schedule says then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from thunderagent import Context, Tick, cron, every, job, periodic, stream
from thunderagent.jobs.job import Job
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.schedules import (
    AT_ONCE,
    COUNTED,
    LATE_S,
    MISSED,
    OPEN,
    OVERTAKEN,
    PAUSED,
    PAYLOAD_BYTES,
    SET_BACK_S,
    Plan,
    Schedule,
    State,
    plan,
    tick_id,
    tick_task,
)
from thunderagent.model.ticks import Spec, between
from thunderagent.streams.context import StreamContext

NOON = int(datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp())
TEN_MINUTES = Schedule(spec=every(10).minutes)


def closed(task_id: str) -> bool:
    return False


def is_open(task_id: str) -> bool:
    return True


def decide(state: State, now: float, look: Callable[[str], bool] = closed) -> Plan | None:
    return plan("report", state, now, look)


def state(last: float = NOON, schedule: Schedule = TEN_MINUTES, **changes: Any) -> State:
    return State(schedule=schedule, last=int(last), **changes)


def put(found: Plan | None) -> list[int]:
    return list(found.ticks) if found else []


# Ticks that are in time, and those that were missed


def test_nothing_is_decided_before_a_tick_is_due() -> None:
    assert decide(state(), NOON + 599.9) is None


def test_a_tick_that_is_due_is_put() -> None:
    found = decide(state(), NOON + 600.0)
    assert found is not None
    assert found.ticks == (NOON + 600,)
    assert found.state.last == NOON + 600
    assert found.state.previous == "report@2026-11-29T12:10:00Z"
    assert decide(replace(found.state, ticks=()), NOON + 600.5) is None


@pytest.mark.parametrize("policy", ["none", "last", "all"])
def test_every_tick_that_is_in_time_is_put_under_each_policy(policy: str) -> None:
    schedule = Schedule(spec=every(10).seconds, catch_up=policy)
    assert put(decide(state(schedule=schedule), NOON + 59)) == [NOON + late for late in (10, 20, 30, 40, 50)]


@pytest.mark.parametrize(
    ("policy", "late_s", "expected", "left_out"),
    [
        # Two hours asleep: of the twelve ticks the newest is in time, or five minutes late.
        ("none", 0, [7200], 11),
        ("none", LATE_S - 1, [7200], 11),
        ("none", LATE_S, [], 12),
        ("none", 300, [], 12),
        ("last", 0, [7200], 11),
        ("last", LATE_S, [7200], 11),
        ("last", 300, [7200], 11),
        ("all", 0, list(range(600, 7201, 600)), 0),
        ("all", 300, list(range(600, 7201, 600)), 0),
    ],
)
def test_two_hours_asleep_give_what_the_policy_promises(
    policy: str, late_s: int, expected: list[int], left_out: int
) -> None:
    schedule = replace(TEN_MINUTES, catch_up=policy)
    found = decide(state(schedule=schedule), NOON + 7200 + late_s)
    assert found is not None
    assert put(found) == [NOON + seconds for seconds in expected]
    assert found.skipped == (((MISSED, left_out),) if left_out else ())
    assert (found.state.last, found.state.skipped) == (NOON + 7200, left_out)
    assert decide(replace(found.state, ticks=()), NOON + 7200 + late_s) is None


def test_all_ticks_come_a_hundred_at_a_time_and_in_their_order() -> None:
    now, every_second = NOON + 250, Schedule(spec=every().second, catch_up="all")
    row, seen = state(schedule=every_second), list[int]()
    while found := decide(row, now):
        assert len(found.ticks) <= AT_ONCE
        seen += found.ticks
        row = replace(found.state, ticks=())
    assert seen == list(range(NOON + 1, NOON + 251))


def test_very_many_missed_ticks_are_counted_up_to_a_bound() -> None:
    found = decide(state(schedule=Schedule(spec=every().second)), NOON + 90 * 86400)
    assert found is not None
    assert found.skipped == ((MISSED, COUNTED),)
    assert len(found.ticks) == LATE_S


# The clock


def test_a_clock_that_is_set_back_puts_nothing_until_it_has_caught_up() -> None:
    row = state(NOON + 600)
    for ago in range(90, -1, -10):
        assert decide(row, NOON + 600 - ago) is None
    assert put(decide(row, NOON + 1200)) == [NOON + 1200]


def test_a_row_from_a_clock_that_was_far_ahead_is_set_back_to_now() -> None:
    row = state(NOON + 86400)
    found = decide(row, NOON + 5.5)
    assert found is not None
    assert (found.ticks, found.state.last) == ((), NOON + 5)
    assert found.set_back_s == pytest.approx(86394.5)
    assert put(decide(found.state, NOON + 600)) == [NOON + 600]
    assert decide(state(NOON + SET_BACK_S), NOON) is None
    assert decide(state(NOON + SET_BACK_S + 1), NOON) is not None


# Overlap

SKIP = replace(TEN_MINUTES, overlap="skip")
CANCEL = replace(TEN_MINUTES, overlap="cancel_previous")
BEFORE = tick_id("report", NOON)


def test_whether_the_task_before_is_open_is_asked_only_when_it_matters() -> None:
    def never(task_id: str) -> bool:
        raise AssertionError(task_id)

    assert put(decide(state(previous=BEFORE), NOON + 600, never))
    assert put(decide(state(schedule=SKIP), NOON + 600, never))
    assert decide(state(schedule=SKIP, previous=BEFORE), NOON + 599, never) is None


def test_skip_leaves_a_tick_out_while_the_task_before_is_open() -> None:
    row = state(schedule=SKIP, previous=BEFORE)
    found = decide(row, NOON + 600, is_open)
    assert found is not None
    assert (found.ticks, found.skipped) == ((), ((OPEN, 1),))
    assert (found.state.last, found.state.previous, found.state.skipped) == (NOON + 600, BEFORE, 1)
    after = decide(found.state, NOON + 1200, closed)
    assert after is not None
    assert (after.ticks, after.state.skipped) == ((NOON + 1200,), 1)


def test_skip_puts_one_of_several_ticks() -> None:
    schedule = replace(SKIP, catch_up="all")
    found = decide(state(schedule=schedule, previous=BEFORE), NOON + 1800)
    assert found is not None
    assert (found.ticks, found.skipped) == ((NOON + 600,), ((OPEN, 2),))


def test_cancel_previous_names_the_task_before_and_puts_the_newest() -> None:
    row = state(schedule=replace(CANCEL, catch_up="all"), previous=BEFORE)
    found = decide(row, NOON + 1800, is_open)
    assert found is not None
    assert (found.ticks, found.state.cancels, found.skipped) == ((NOON + 1800,), BEFORE, ((OVERTAKEN, 2),))
    assert found.state.previous == tick_id("report", NOON + 1800)


def test_cancel_previous_cancels_nothing_that_has_ended() -> None:
    found = decide(state(schedule=CANCEL, previous=BEFORE), NOON + 600, closed)
    assert found is not None
    assert (found.ticks, found.state.cancels) == ((NOON + 600,), None)


@pytest.mark.parametrize("schedule", [SKIP, CANCEL])
def test_a_task_of_the_same_second_or_of_a_later_one_is_not_in_the_way(schedule: Schedule) -> None:
    for seconds in (600, 3600):
        row = state(schedule=schedule, previous=tick_id("report", NOON + seconds))
        found = decide(row, NOON + 600, is_open)
        assert found is not None
        assert (found.ticks, found.state.cancels) == ((NOON + 600,), None)


# Pauses


def test_nothing_is_put_while_paused_and_nothing_is_caught_up_behind_its_end() -> None:
    schedule = replace(TEN_MINUTES, catch_up="all")
    row = state(schedule=schedule, paused=NOON + 1.0, paused_until=NOON + 3601.0, reason="moving")
    for seconds in (600, 1800, 3600, 3600.9):
        assert decide(row, NOON + seconds) is None
    found = decide(row, NOON + 4200)
    assert found is not None
    assert (found.ticks, found.skipped) == ((NOON + 4200,), ((PAUSED, 6),))
    assert (found.state.paused, found.state.paused_until, found.state.reason) == (None, None, None)


def test_a_pause_without_an_end_lasts() -> None:
    assert decide(state(paused=NOON + 1.0), NOON + 10**8) is None


# Data

schedules = st.builds(
    lambda catch_up, overlap, jitter_s, queue, payload: Schedule(
        spec=every().day, catch_up=catch_up, overlap=overlap, jitter_s=jitter_s, queue=queue, payload=payload
    ),
    st.sampled_from(["none", "last", "all"]),
    st.sampled_from(["allow", "skip", "cancel_previous"]),
    st.sampled_from([0.0, 0.5, 60, 3600]),
    st.sampled_from(["default", "reports"]),
    st.none() | st.sampled_from(["null", '{"month":"2026-07"}']),
)
states = st.builds(
    State,
    schedule=schedules,
    last=st.integers(0, 10**10),
    ticks=st.lists(st.integers(0, 10**10), max_size=4).map(tuple),
    cancels=st.none() | st.just(BEFORE),
    previous=st.none() | st.just(BEFORE),
    skipped=st.integers(0, 1000),
    paused=st.none() | st.just(1000.5),
    paused_until=st.none() | st.just(2000.0),
    reason=st.none() | st.just("moving"),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(states)
def test_a_state_goes_through_json_and_comes_back_the_same(one: State) -> None:
    info = json.loads(json.dumps(one.to_info()))
    assert State.of({"taskId": "schedule:report", "status": "SCHEDULE", "fence": 3, "info": info}) == one


@pytest.mark.parametrize(
    "info",
    [
        None,
        "text",
        {},
        {**state().to_info(), "last": None},
        {**state().to_info(), "last": "soon"},
        {**state().to_info(), "last": -1},
        {**state().to_info(), "last": 1.5},
        {**state().to_info(), "ticks": ["x"]},
        {**state().to_info(), "ticks": 5},
        {**state().to_info(), "ticks": None},
        {**state().to_info(), "skipped": "many"},
        {**state().to_info(), "paused": "yes"},
        {**state().to_info(), "paused": 1e300},
        {**state().to_info(), "paused_until": -1},
        {**state().to_info(), "paused_until": []},
        {**state().to_info(), "previous": 5},
        {**state().to_info(), "spec": "daily"},
        {**state().to_info(), "spec": {"moon": "full"}},
        {**state().to_info(), "spec": {"every": 1, "unit": "days", "zone": "Mars/Olympus"}},
        {**state().to_info(), "overlap": "queue"},
        {**state().to_info(), "catch_up": ["last"]},
        {**state().to_info(), "jitter_s": "long"},
        {**state().to_info(), "queue": "#"},
        {**state().to_info(), "queue": None},
        {**state().to_info(), "payload": 5},
    ],
)
def test_a_row_that_no_version_of_ours_wrote_is_refused_and_breaks_nothing(info: Any) -> None:
    with pytest.raises(ConfigurationError):
        State.of({"taskId": "schedule:report", "status": "SCHEDULE", "fence": 3, "info": info})


def test_a_row_without_a_fence_cannot_be_changed_and_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fence"):
        State.of({"taskId": "schedule:report", "status": "SCHEDULE", "info": state().to_info()})


# Tasks


def test_the_task_of_a_tick_is_the_same_whoever_makes_it() -> None:
    schedule = Schedule(spec=every().day, queue="reports", jitter_s=60)
    mine, theirs = (tick_task("report", schedule, NOON, shards=4, now=now) for now in (NOON + 1.0, NOON - 2.0))
    assert mine == replace(theirs, submitted_at=mine.submitted_at)
    assert mine.task_id == "report@2026-11-29T12:00:00Z"
    assert mine.queue == "reports"
    assert json.loads(mine.payload_text) == {"at": "2026-11-29T12:00:00Z"}
    assert mine.max_retry is None


def test_a_schedule_is_the_same_whatever_the_order_of_the_keys_in_its_payload() -> None:
    one = Schedule(spec=every().hour, payload='{"b":1,"a":2}')
    assert one.is_same(replace(one, payload='{"a":2,"b":1}')), "as rows were written before"
    assert not one.is_same(replace(one, payload='{"a":2}'))
    assert not one.is_same(replace(one, payload=None))
    assert not one.is_same(replace(one, queue="other"))


def test_jitter_spreads_tasks_over_its_time_and_not_beyond() -> None:
    schedule = Schedule(spec=every(10).minutes, jitter_s=60)
    ticks = between(schedule.spec, NOON, NOON + 1000 * 600, most=1000)
    late = [tick_task("report", schedule, tick, shards=1, now=NOON).created_at - tick for tick in ticks]
    assert all(0 <= one < 60 for one in late)
    for tenth in range(10):
        assert 60 <= sum(tenth * 6 <= one < tenth * 6 + 6 for one in late) <= 140


def test_a_tick_is_a_moment_in_utc_whatever_zone_it_is_given_in() -> None:
    berlin = datetime(2026, 11, 29, 13, tzinfo=timezone(timedelta(hours=1)))
    tick = Tick(at=berlin)
    assert tick.at.isoformat() == "2026-11-29T12:00:00+00:00"
    assert tick == Tick.model_validate_json('{"at": "2026-11-29T12:00:00Z"}')
    with pytest.raises(ValueError, match="timezone"):
        Tick(at=datetime(2026, 11, 29, 12))


# The decorator


class Month(BaseModel):
    month: str


def ticking(ctx: Context, payload: Tick) -> None: ...


def monthly(ctx: Context, payload: Month) -> None: ...


def bare(ctx: Context, payload: None) -> None: ...


def test_a_job_becomes_periodic_and_stays_the_same_otherwise() -> None:
    plain = job("report.nightly", queue="reports", max_retry=7)(ticking)
    nightly = periodic(every().day.at("02:00"), catch_up="none", overlap="skip", jitter_s=60)(plain)
    assert nightly.schedule == Schedule(
        spec=every().day.at("02:00"), catch_up="none", overlap="skip", jitter_s=60, queue="reports"
    )
    assert plain.schedule is None
    assert (nightly.name, nightly.handler, nightly.max_retry) == (plain.name, plain.handler, 7)


def test_a_payload_of_its_own_is_kept_as_text() -> None:
    schedule = periodic(cron("0 2 1 * *"), payload=Month(month="2026-07"))(job("report")(monthly)).schedule
    assert schedule is not None
    assert schedule.payload == '{"month":"2026-07"}'
    empty = periodic(cron("0 2 1 * *"), payload=None)(job("report")(bare)).schedule
    assert empty is not None
    assert empty.payload == "null"


@pytest.mark.parametrize("hint", [Tick, dict[str, Any], dict[str, str]])
def test_any_type_that_takes_the_data_of_a_tick_will_do(hint: Any) -> None:
    def handler(ctx: Context, payload: Any) -> None: ...

    handler.__annotations__["payload"] = hint
    assert periodic(every().day)(job("report")(handler)).schedule is not None


loosely: Any = periodic
"""For what the type checker would refuse."""


def streaming() -> Job[Any]:
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None: ...

    return stream("follow")(follow)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loosely(every().day)(ticking), "must stand above @job"),
        (lambda: loosely(every(10))(job("report")(ticking)), r"every\(10\).minutes"),
        (lambda: loosely("daily")(job("report")(ticking)), "is no spec"),
        (lambda: loosely(job("report")(ticking)), "of 'report' says no spec"),
        (lambda: periodic(cron("*/5 * * * *"), jitter_s=60)(job("report")(ticking)), "must be under the 60 s"),
        (lambda: periodic(cron("5 * * * *"), jitter_s=1800)(job("report")(ticking)), "must be under the 1800 s"),
        (lambda: periodic(cron("* 0 7 * * *"), jitter_s=1)(job("report")(ticking)), "must be under the 1 s"),
        (lambda: periodic(every().day)(streaming()), "it is a stream"),
        (lambda: periodic(every().day)(periodic(every().hour)(job("report")(ticking))), "has a schedule already"),
        (lambda: periodic(every().day)(job("report")(monthly)), "annotate it with Tick, or give @periodic a payload"),
        (lambda: loosely(every().day, payload=5)(job("report")(monthly)), "does not fit the job"),
        (lambda: periodic(every().day)(job("report#1")(ticking)), "no '#'"),
        (lambda: periodic(every().day)(job("limit:x")(ticking)), "must not begin with"),
        (lambda: periodic(every().day)(job("ü\u200b")(ticking)), "must have no"),
        (lambda: periodic(every().day)(job("🌩" * 128)(ticking)), "over 512"),
        (lambda: loosely(every().day, catch_up="some")(job("report")(ticking)), "catch_up is 'some'"),
        (lambda: loosely(every().day, overlap="queue")(job("report")(ticking)), "overlap is 'queue'"),
        (lambda: periodic(every().day, jitter_s=-1)(job("report")(ticking)), "jitter_s is -1"),
        (lambda: periodic(every(10).seconds, jitter_s=10)(job("report")(ticking)), "must be under the 10 s"),
        (
            lambda: periodic(every().day, payload=Month(month="x" * PAYLOAD_BYTES))(job("report")(monthly)),
            "pass a reference",
        ),
    ],
)
def test_what_cannot_be_periodic_is_refused_with_the_remedy(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_daily_cron_expression_may_be_spread_over_minutes() -> None:
    made = periodic(cron("0 7 * * MON-FRI", "America/New_York"), jitter_s=300)(job("report")(ticking))
    assert made.schedule is not None
    assert made.schedule.jitter_s == 300


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        periodic(every().day)(periodic(every().hour, payload={})(job("limit:x")(lambda ctx, payload: None)))
    assert "annotate" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        loosely("daily")(job("a#b")(monthly))
    assert str(caught.value).count("\n  - ") == 3


# A policy is a promise over any sequence of looks


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([every(10).minutes, every(7).seconds, cron("*/5 * * * *"), every().hour.at(":15")]),
    st.sampled_from(["none", "last", "all"]),
    st.lists(st.floats(0.1, 4000), min_size=1, max_size=12),
)
def test_whatever_the_looks_each_tick_is_put_once_or_left_out_once(
    spec: Spec, policy: str, pauses: list[float]
) -> None:
    row, now, seen, left_out = state(schedule=Schedule(spec=spec, catch_up=policy)), float(NOON), list[int](), 0
    for pause in pauses:
        now += pause
        for _ in range(1000):
            found = decide(row, now)
            if found is None:
                break
            seen += found.ticks
            left_out += sum(number for _, number in found.skipped)
            row = replace(found.state, ticks=())
        else:
            raise AssertionError("it does not come to an end")
    due = between(spec, NOON, now, most=100_000)
    assert seen == sorted(set(seen))
    assert set(seen) <= set(due)
    assert len(seen) + left_out == len(due)
    if policy == "all":
        assert seen == due
    if policy == "last" and due:
        assert due[-1] in seen
