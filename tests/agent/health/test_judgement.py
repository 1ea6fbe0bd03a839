"""The judgement of an agent's health: what is wrong, and what only looks like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thunderagent.agent.health.judgement import Facts, Health, Limits, QueueFacts, judge

LIMITS = Limits(progress_s=60.0, pause_s=10.0, wedged_s=300.0)
BUSY = QueueFacts(queue="reports", slots=4, free=0)
FREE = QueueFacts(queue="reports", slots=4, free=3)


def judged(**seen: Any) -> Health:
    return judge(Facts(**seen), LIMITS)


def names(health: Health) -> list[str]:
    return [reason.name for reason in health.reasons]


def test_an_agent_that_makes_progress_is_healthy_and_says_nothing() -> None:
    health = judged(loop_s=9.0, answered_s=31.0, round_s=1.0, tick_s=0.5, held=3, queues=(BUSY, FREE), doorbell=True)
    assert health == Health(healthy=True, alive=True)
    assert health.entry() == {"healthy": True, "alive": True, "state": "ok", "reasons": [], "notes": []}


@pytest.mark.parametrize("facts", [{"answered_s": 75.0}, {"answered_s": 75.0, "outage_s": 70.0}])
def test_a_store_that_does_not_answer_is_no_reason_to_start_afresh(facts: dict[str, float]) -> None:
    health = judged(store_error="no answer to Query", **facts)
    assert names(health) == ["store"]
    assert not health.healthy
    assert health.alive, "a watchdog would restart the whole fleet because DynamoDB is away"
    [text] = health.entry()["reasons"]
    assert text.startswith("the store has not answered for 75 s (last error: no answer to Query): look at")


def test_an_outage_of_a_moment_is_waited_out() -> None:
    assert judged(answered_s=59.0, outage_s=58.0, store_error="throttled").healthy


def test_a_store_that_answers_everything_but_the_work_is_reported_as_that() -> None:
    starved = replace(FREE, refused_s=75.0, oldest_s=80.0)
    health = judged(answered_s=3.0, outage_s=75.0, store_error="not allowed: dynamodb:Query", queues=(starved,))
    assert names(health) == ["work"]
    assert "claimed or settled for 75 s (last error: not allowed: dynamodb:Query), although" in str(health.reasons[0])
    assert health.alive


def test_a_loop_that_waits_for_the_store_is_reported_once() -> None:
    assert names(judged(loop_s=100.0, answered_s=101.0, outage_s=100.0)) == ["store"]
    assert names(judged(loop_s=100.0, answered_s=101.0, loop_asks=True)) == ["store"]
    assert names(judged(loop_s=100.0, answered_s=101.0)) == ["loop"], "nobody knows that the store fails"
    forgotten = replace(FREE, unlooked_s=100.0)
    assert names(judged(loop_s=100.0, answered_s=101.0, queues=(forgotten,))) == ["loop"]
    assert names(judged(loop_s=100.0, answered_s=10.0, loop_at="work (jobs/a.py:7)")) == ["loop"]
    assert "has not come round for 100 s; it is in work (jobs/a.py:7)" in str(
        judged(loop_s=100.0, loop_at="work (jobs/a.py:7)").reasons[0]
    )


@pytest.mark.parametrize(
    ("facts", "name"),
    [({"loop_s": 301.0}, "loop"), ({"round_s": 301.0}, "heartbeat"), ({"tick_s": 301.0}, "event-loop")],
)
def test_a_thread_that_never_gets_on_again_is_not_alive(facts: dict[str, float], name: str) -> None:
    assert names(judged(**facts)) == [name]
    assert not judged(**facts).alive
    assert names(judged(**facts, draining=True)) == [name], "a drain that hangs is no drain"
    less = dict.fromkeys(facts, 100.0)
    assert names(judged(**less)) == [name]
    assert judged(**less).alive
    assert judged(**less, draining=True).healthy


def test_the_loop_may_wedge_while_the_store_is_away_and_that_is_not_hidden() -> None:
    health = judged(loop_s=400.0, answered_s=450.0, outage_s=420.0)
    assert names(health) == ["store", "loop"]
    assert not health.alive


def test_renewals_that_fail_count_only_while_leases_are_held() -> None:
    assert names(judged(beats_fail_s=61.0, held=2, beat_error="timeout")) == ["beats"]
    assert judged(beats_fail_s=61.0, held=0).healthy
    assert judged(beats_fail_s=59.0, held=2).healthy


def test_the_cause_is_named_before_its_consequences_and_a_silence_is_no_fault_of_a_queue() -> None:
    assert names(judged(beats_fail_s=61.0, held=2, answered_s=59.0)) == ["store", "beats"]
    assert names(judged(beats_fail_s=61.0, held=2, answered_s=15.0)) == ["beats"], "the loop has its answers"
    assert names(judged(round_s=61.0, held=2, answered_s=59.0)) == ["store", "heartbeat"], "it waits for its answer"
    assert names(judged(round_s=61.0, held=2, answered_s=15.0)) == ["heartbeat"]
    dead = judged(dead=("monitor",), answered_s=61.0)
    assert names(dead) == ["store", "thread"]
    unlooked = replace(FREE, unlooked_s=100.0)
    assert judged(queues=(unlooked,), answered_s=59.0).healthy, "it was looked at while the store answered"
    assert names(judged(queues=(unlooked,), answered_s=20.0)) == ["unlooked:reports"]


def test_a_dead_thread_is_named() -> None:
    health = judged(dead=("lease-watch", "http"))
    assert [str(reason).split(" has died")[0] for reason in health.reasons] == [
        "the thread lease-watch",
        "the thread http",
    ]
    assert health.alive, "the loop starts it again; a loop that does not come round is told by itself"


def test_an_agent_that_sees_work_and_gets_none_is_not_healthy() -> None:
    starved = replace(FREE, refused_s=61.0, refused_task="a-1", oldest_s=80.0)
    health = judged(queues=(starved,), store_error="throttled")
    assert names(health) == ["starved:reports"]
    said = str(health.reasons[0])
    assert (
        "3 of 4 slots are free, and no claim was won for 61 s (last error: throttled); a-1 has been due for 80 s"
        in said
    )
    assert health.alive


@pytest.mark.parametrize(
    "queue",
    [
        replace(FREE, refused_s=59.0, oldest_s=80.0),
        replace(FREE, refused_s=500.0, oldest_s=2.0),
        replace(BUSY, refused_s=61.0, oldest_s=80.0),
        replace(BUSY, unlooked_s=5000.0),
        replace(FREE, unlooked_s=69.0),
    ],
    ids=["not for long", "others were quicker: all are fresh", "no slot is free", "busy", "an idle pause"],
)
def test_an_agent_that_others_are_ahead_of_is_healthy(queue: QueueFacts) -> None:
    assert judged(queues=(queue,)).healthy


def test_a_queue_that_is_not_looked_at_any_more_is_reported() -> None:
    assert names(judged(queues=(replace(FREE, unlooked_s=71.0),))) == ["unlooked:reports"]
    assert names(judged(queues=(replace(FREE, unlooked_s=71.0),), answered_s=61.0)) == ["store"]


def test_paused_and_draining_are_healthy_and_said() -> None:
    starved = replace(FREE, refused_s=500.0, oldest_s=500.0, unlooked_s=500.0)
    paused = judged(queues=(starved,), paused=True)
    assert (paused.healthy, paused.state) == (True, "paused")
    assert paused.notes == ("paused: it claims nothing: thunderagent pauses tells why",)
    draining = judged(queues=(starved,), draining=True, held=2, answered_s=500.0)
    assert (draining.healthy, draining.state) == (True, "draining")
    assert draining.notes == ("draining: 2 tasks are still held",)
    assert judged(draining=True, held=1).notes == ("draining: 1 task is still held",)
    assert judged(paused=True, answered_s=500.0).state == "not healthy", "a pause does not hide an outage"


def test_slots_that_handlers_do_not_give_back_are_reported_when_none_is_left() -> None:
    three = replace(BUSY, leaked_s=(70.0, 80.0, 90.0), leaked_jobs=("report.build",) * 3)
    assert judged(queues=(three,)).healthy
    four = replace(BUSY, leaked_s=(70.0, 80.0, 90.0, 61.0), leaked_jobs=("report.build", "report.send") * 2)
    [reason] = judged(queues=(four,)).reasons
    assert reason.name == "leaked:reports"
    assert "all 4 slots of the queue reports are held by handlers that were told to stop at least 61 s ago" in str(
        reason
    )
    assert "(report.build, report.send)" in str(reason)
    assert judged(queues=(replace(four, leaked_s=(70.0, 80.0, 90.0, 1.0)),)).healthy


def test_a_doorbell_that_does_not_work_is_worth_a_note() -> None:
    health = judged(doorbell=False)
    assert health.healthy
    [note] = health.notes
    assert note.startswith("the doorbell does not work: tasks may start up to a poll later; the agent's log says why")
    assert judged(doorbell=None).notes == ()


def test_handlers_that_go_on_after_they_were_asked_to_stop_are_worth_a_note() -> None:
    one = replace(BUSY, leaked_s=(6.0, 4.0), leaked_jobs=("report.build", "report.send"))
    [note] = judged(queues=(one,)).notes
    assert note.startswith("1 handler goes on although it was told to stop (report.build): ")
    two = replace(one, queue="mail", leaked_s=(9.0, 70.0), leaked_jobs=("mail.send", "mail.send"))
    health = judged(queues=(one, two))
    assert health.healthy
    [note] = health.notes
    assert note.startswith("3 handlers go on although they were told to stop (mail.send, report.build): each keeps")
    full = replace(one, leaked_s=(70.0,) * 4, leaked_jobs=("report.build",) * 4)
    assert judged(queues=(full,)).notes == (), "that is a reason then, and said once"
    assert judged(queues=(replace(one, leaked_s=(5.0, 0.1)),)).notes == ()
