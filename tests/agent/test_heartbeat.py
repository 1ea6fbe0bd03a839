"""Leases are kept alive, and given up in time, whatever the store and the handlers do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, Stage, a_job, claimed, put, running, serving
from tests.support.stands import eventually
from thunderagent.agent.heartbeat import HEARTBEAT_RETRY_S, STUCK_WAIT_S, Heartbeat
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Returned
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import AgentDraining, LeaseLost, StoreUnavailable, TaskCancelled, TimeLimitExceeded
from thunderagent.model.task import Lane, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.engine import Applied
from thunderagent.stores.sqlite import schema as sqlite_schema
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import Beat, Renewal, TaskStore
from thunderagent.testing import FakeClock, memory_store


class Spy(TaskStore):
    """Counts heartbeats, and answers in another way when told to."""

    def __init__(self, store: TaskStore) -> None:
        super().__init__(store.engine, monotonic=store.monotonic)
        self.sent: list[Sequence[Beat]] = []
        self.instead: Callable[[Sequence[Beat]], list[Renewal]] | None = None

    def renew(self, beats: Sequence[Beat]) -> list[Renewal]:
        self.sent.append(beats)
        return self.instead(beats) if self.instead else super().renew(beats)


class Setting:
    """A heartbeat of which each round is called by the test, on a clock set by the test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = Spy(memory_store(self.clock))
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.heart = Heartbeat(self.store, self.bus, tick_s=1.0, monotonic=self.clock.monotonic)

    def holding(self, name: str = "a", *, lease_s: float = 300.0, beat_s: float = 60.0, **options: Any) -> Running:
        lease = claimed(self.store, name, lease_s=lease_s)
        one = running(lease, a_job(**options), beat_s=beat_s, started=self.clock.monotonic())
        self.heart.watch(one)
        return one

    def rounds(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass with a round in each step."""
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.heart.round()

    def row(self, name: str = "a") -> Any:
        return self.store.get([name])[name]


@pytest.fixture
def at() -> Setting:
    return Setting()


# Renewals


def test_a_lease_is_renewed_when_it_is_due_and_not_before(at: Setting) -> None:
    at.holding()
    at.rounds(59)
    assert at.store.sent == []
    at.rounds(1)
    assert len(at.store.sent) == 1
    at.rounds(59)
    assert len(at.store.sent) == 1
    at.rounds(1)
    assert len(at.store.sent) == 2
    assert at.row().hb == 2


def test_all_leases_that_are_due_are_renewed_in_one_call(at: Setting) -> None:
    held = [at.holding(name) for name in "abc"]
    at.rounds(30)
    at.holding("late")
    at.rounds(30)
    [beats] = at.store.sent
    assert [beat.lease.task_id for beat in beats] == [one.lease.task_id for one in held]


def test_a_renewal_moves_the_expiry_and_the_deadline(at: Setting) -> None:
    one = at.holding()
    before = one.deadline
    at.rounds(60)
    assert one.deadline == before + 60
    assert at.row().lock_time == pytest.approx(at.clock.now() + 300, abs=0.01)


def test_the_deadline_counts_from_before_the_renewal_was_sent(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    one = at.holding()
    at.clock.advance(60)
    sent = at.clock.monotonic()
    real = at.store.engine.apply

    def slow(batch: Sequence[Write]) -> list[Applied]:
        answers = real(batch)
        at.clock.advance(25)
        return answers

    monkeypatch.setattr(at.store.engine, "apply", slow)
    at.heart.round()
    assert one.lease.held_from == sent
    assert one.deadline == sent + 300 * 0.8
    assert one.next_beat == sent + 60


def test_a_lease_that_is_over_is_not_renewed_although_its_task_is_ours_still(at: Setting) -> None:
    one = at.holding()
    at.clock.advance(301)  # the machine slept
    at.heart.renew_due()
    assert at.store.sent == []
    at.heart.judge_all()
    assert isinstance(one.context.stop_reason, LeaseLost)


def test_the_lease_of_an_outcome_that_waits_is_renewed_although_its_time_was_over(at: Setting) -> None:
    one = at.holding()
    one.settling = True
    at.clock.advance(301)
    at.heart.round()
    assert at.row().hb == 1
    assert one.context.stop_reason is None


def test_a_task_that_is_forgotten_is_renewed_no_more(at: Setting) -> None:
    one = at.holding()
    at.heart.forget(one)
    at.rounds(600, 60)
    assert at.store.sent == []
    assert one.context.stop_reason is None


def test_progress_rides_on_the_next_beat_and_only_once(at: Setting) -> None:
    one = at.holding()
    one.context.progress({"done": 1})
    one.context.progress({"done": 2})
    at.rounds(60)
    assert at.row().progress == {"done": 2}
    at.rounds(60)
    assert [beats[0].progress for beats in at.store.sent] == ['{"done":2}', None]
    assert at.row().progress == {"done": 2}


# No answer


def test_no_answer_is_tried_again_soon_and_is_not_a_loss(at: Setting) -> None:
    one = at.holding()
    at.store.instead = lambda beats: [Renewal() for _ in beats]
    at.rounds(60)
    at.rounds(5)
    assert len(at.store.sent) == 1 + 5 / HEARTBEAT_RETRY_S
    assert one.context.stop_reason is None
    at.store.instead = None
    at.rounds(1)
    assert at.row().hb == 1
    assert one.deadline == at.clock.monotonic() + 240
    at.rounds(240)
    assert one.context.stop_reason is None


def test_a_store_that_raises_is_no_loss_and_is_told(at: Setting) -> None:
    one = at.holding()

    def away(beats: Sequence[Beat]) -> list[Renewal]:
        raise StoreUnavailable("the network is away")

    at.store.instead = away
    at.rounds(61)
    assert one.context.stop_reason is None
    assert [event.during for event in at.record.of(events.StoreFailed)] == ["heartbeat"] * 2


def test_without_an_answer_the_holder_stops_a_fifth_before_the_end_of_the_lease(at: Setting) -> None:
    one = at.holding()
    at.store.instead = lambda beats: [Renewal() for _ in beats]
    at.rounds(239)
    assert one.context.stop_reason is None
    at.rounds(1)
    assert isinstance(one.context.stop_reason, LeaseLost)
    assert "could not be renewed within 300 s" in str(one.context.stop_reason)
    assert one.lost
    [event] = at.record.of(events.LeaseLost)
    assert event.task_id == "a"
    assert at.clock.now() < at.row().lock_time - 50


def test_after_a_loss_nothing_is_sent_any_more_even_when_the_store_is_back(at: Setting) -> None:
    at.holding()
    at.store.instead = lambda beats: [Renewal() for _ in beats]
    at.rounds(240)
    at.store.instead = None
    number, row = len(at.store.sent), at.row()
    at.rounds(600)
    assert len(at.store.sent) == number
    assert at.row() == row
    assert len(at.record.of(events.LeaseLost)) == 1


def test_a_machine_that_slept_past_its_lease_stops_before_it_does_anything(at: Setting) -> None:
    one = at.holding()
    taken = at.row()
    at.clock.advance(400)
    [_] = at.store.take_over([(taken, 300.0)], owner="other").leases
    at.heart.round()
    assert isinstance(one.context.stop_reason, LeaseLost)
    assert at.row().lease_owner == "other"


# A loss


def test_a_lease_that_another_holds_is_lost_at_once(at: Setting) -> None:
    one = at.holding()
    [_] = at.store.take_over([(at.row(), 300.0)], owner="other-agent").leases
    at.rounds(60)
    assert isinstance(one.context.stop_reason, LeaseLost)
    assert "it is held by other-agent" in str(one.context.stop_reason)
    assert at.row().hb == 0
    at.rounds(120)
    assert len(at.store.sent) == 1


def test_a_lease_of_a_task_that_is_gone_is_lost(at: Setting) -> None:
    one = at.holding()
    at.store.engine.delete([at.row().to_row()])
    at.rounds(60)
    assert "no agent holds it" in str(one.context.stop_reason)


def test_one_lost_lease_does_not_hurt_the_others(at: Setting) -> None:
    first, second = at.holding("a"), at.holding("b")
    [_] = at.store.take_over([(at.row("a"), 300.0)], owner="other").leases
    at.rounds(60)
    assert first.lost
    assert second.context.stop_reason is None
    assert at.row("b").hb == 1


def test_a_settlement_that_overtakes_the_beat_is_no_loss(at: Setting) -> None:
    one = at.holding()
    one.settling = True
    [answer] = at.store.settle([writes.succeed(one.lease, now=at.clock.now(), expire_at=at.clock.now() + 9)])
    assert answer.accepted
    at.rounds(60)
    assert not one.lost
    assert one.context.stop_reason is None
    assert at.record.of(events.LeaseLost) == []


def test_while_an_outcome_waits_to_be_written_its_lease_is_kept(at: Setting) -> None:
    one = at.holding()
    one.settling = True
    at.rounds(600)
    assert at.row().hb == 10
    assert not one.lost


# Requests to stop


def test_a_cancel_arrives_with_the_reply_to_a_beat(at: Setting) -> None:
    one = at.holding()
    at.store.write_tasks([writes.request_cancel(at.row(), now=at.clock.now())])
    at.rounds(59)
    assert one.context.stop_reason is None
    at.rounds(1)
    assert isinstance(one.context.stop_reason, TaskCancelled)
    assert not one.lost
    at.rounds(60)
    assert at.row().hb == 2


def test_the_time_limit_stops_a_handler_and_keeps_its_lease(at: Setting) -> None:
    one = at.holding(timeout_s=100)
    at.rounds(99)
    assert one.context.stop_reason is None
    at.rounds(1)
    assert isinstance(one.context.stop_reason, TimeLimitExceeded)
    assert "the time limit of 100 s is over" in str(one.context.stop_reason)
    at.rounds(60)
    assert not one.lost
    assert at.row().hb == 2


def test_a_handler_that_goes_on_is_told_of_from_time_to_time(at: Setting) -> None:
    at.holding(timeout_s=100)
    at.rounds(100)
    assert at.record.of(events.TaskOverran) == []
    at.rounds(STUCK_WAIT_S * 2)
    assert [round(event.seconds) for event in at.record.of(events.TaskOverran)] == [160, 220]


def test_a_handler_that_ends_long_after_its_time_limit_is_told_of_once(at: Setting) -> None:
    one = at.holding(timeout_s=100)
    at.rounds(103)
    assert at.record.of(events.TaskOverran) == []
    at.heart.ended(one)
    [event] = at.record.of(events.TaskOverran)
    assert (round(event.seconds), event.reason) == (103, "the time limit of 100 s is over")
    at.rounds(STUCK_WAIT_S * 2)
    assert len(at.record.of(events.TaskOverran)) == 1
    assert one.settling


@pytest.mark.parametrize("rounds", [99, 100, 101])
def test_a_handler_that_ends_with_its_time_limit_is_not_told_of(at: Setting, rounds: int) -> None:
    one = at.holding(timeout_s=100)
    at.rounds(rounds)
    at.heart.ended(one)
    assert at.record.of(events.TaskOverran) == []


def test_a_handler_that_was_told_of_while_it_went_on_is_not_told_of_again_at_its_end(at: Setting) -> None:
    one = at.holding(timeout_s=100)
    at.rounds(100 + STUCK_WAIT_S)
    at.heart.ended(one)
    assert len(at.record.of(events.TaskOverran)) == 1


def test_a_handler_that_takes_its_time_after_a_cancel_is_not_told_of_at_its_end(at: Setting) -> None:
    one = at.holding()
    one.context.stop(TaskCancelled("cancelled"))
    at.rounds(30)
    at.heart.ended(one)
    assert at.record.of(events.TaskOverran) == []


def test_the_first_reason_to_stop_is_the_one_that_counts(at: Setting) -> None:
    one = at.holding(timeout_s=100)
    one.context.stop(AgentDraining())
    at.rounds(200)
    assert isinstance(one.context.stop_reason, AgentDraining)


# Lateness


def test_rounds_that_come_late_are_told(at: Setting) -> None:
    at.holding()
    at.rounds(60)
    assert at.record.of(events.HeartbeatLate) == []
    at.clock.advance(130)
    at.heart.round()
    [event] = at.record.of(events.HeartbeatLate)
    assert event.seconds == pytest.approx(70)


# In an agent


def steal(stage: Stage, task: Task) -> None:
    """Another agent takes the task over; a beat may come in between, then it tries again."""
    eventually(lambda: stage.store.take_over([(stage.client.get(task), 60.0)], owner="other-agent").leases)


def test_a_late_result_after_a_lost_lease_is_ignored() -> None:
    entered, go_on = threading.Event(), threading.Event()

    @job("test.late", lease_s=3, heartbeat_s=0.2)
    def late(ctx: Context, payload: dict[str, Any]) -> str:
        entered.set()
        assert go_on.wait(LONG_S)
        return "too late"

    with serving(late) as stage:
        task = stage.client.enqueue(late, {})
        assert entered.wait(LONG_S)
        steal(stage, task)
        stage.record.wait(events.LeaseLost)
        go_on.set()
        other = stage.client.enqueue("test.late", {})
        stage.record.wait(events.TaskSucceeded, where=lambda event: event.task_id == other.id)
        after = stage.client.get(task)
        assert (after.status, after.lease_owner, after.result) == (Status.RUNNING, "other-agent", None)
        assert after.fence == 2
        eventually(lambda: stage.agent.running == 0)


def test_a_lost_lease_cancels_a_coroutine_and_nothing_more_is_written() -> None:
    entered, cancelled = threading.Event(), threading.Event()

    @job("test.lost", lease_s=3, heartbeat_s=0.2)
    async def lost(ctx: Context, payload: dict[str, Any]) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with serving(lost) as stage:
        task = stage.client.enqueue(lost, {})
        assert entered.wait(LONG_S)
        steal(stage, task)
        assert cancelled.wait(LONG_S)
        stage.record.wait(events.LeaseLost)
    after = stage.store.get([task.id])
    assert after == {} or after[task.id].lease_owner == "other-agent"


@pytest.mark.slow
def test_an_event_loop_that_is_blocked_does_not_stop_the_beats() -> None:
    entered, go_on = threading.Event(), threading.Event()

    @job("test.blocks", lease_s=0.9, heartbeat_s=0.1)
    async def blocks(ctx: Context, payload: dict[str, Any]) -> str:
        entered.set()
        assert go_on.wait(LONG_S)  # blocks the loop itself, as time.sleep would
        return "done"

    with serving(blocks) as stage:
        task = stage.client.enqueue(blocks, {})
        assert entered.wait(LONG_S)
        before = stage.client.get(task)
        now = eventually(lambda: one if ((one := stage.client.get(task)).hb or 0) >= 12 else None)
        assert (now.lease_owner, now.fence) == (before.lease_owner, before.fence)
        assert now.lock_time is not None
        assert before.lock_time is not None
        assert now.lock_time > before.lock_time + 0.9
        go_on.set()
        assert stage.end_of(task).result == "done"
        assert stage.record.of(events.LeaseLost) == []


def test_a_heartbeat_that_died_is_started_again_by_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    broken = threading.Event()

    @job("test.long", lease_s=3, heartbeat_s=0.1)
    def long(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.wait(LONG_S)

    with serving(long) as stage:
        task = stage.client.enqueue(long, {})
        stage.record.wait(events.TaskStarted)
        real = Heartbeat.renew_due

        def die_once(heart: Heartbeat) -> None:
            monkeypatch.setattr(Heartbeat, "renew_due", real)
            broken.set()
            raise RuntimeError("a bug")

        monkeypatch.setattr(Heartbeat, "renew_due", die_once)
        assert broken.wait(LONG_S)
        [event] = stage.record.wait(events.ThreadDied)
        assert (event.thread, event.restarted) == ("heartbeat", True)
        assert stage.agent.vitals.entry()["heartbeat_alive"]
        stage.client.cancel(task)
        assert stage.end_of(task).status is Status.SUCCESS
        assert stage.record.of(events.LeaseLost) == []


def test_a_lease_ends_in_time_although_a_heartbeat_hangs(at: Setting) -> None:
    hung, go_on = threading.Event(), threading.Event()

    def hang(beats: Sequence[Beat]) -> list[Renewal]:
        hung.set()
        go_on.wait(LONG_S)
        return [Renewal() for _ in beats]

    at.store.instead = hang
    heart = Heartbeat(at.store, at.bus, tick_s=0.01, monotonic=at.clock.monotonic)
    one = running(claimed(at.store, "a", lease_s=3.0), a_job(), beat_s=1.0, started=at.clock.monotonic())
    heart.watch(one)
    heart.start()
    try:
        at.clock.advance(1.0)
        assert hung.wait(LONG_S)
        at.clock.advance(1.5)
        at.record.wait(events.LeaseLost)
        assert isinstance(one.context.stop_reason, LeaseLost)
    finally:
        go_on.set()
        heart.stop()


def test_progress_that_could_not_be_sent_rides_on_the_next_beat(at: Setting) -> None:
    one = at.holding()
    one.context.progress({"at": 1})
    at.store.instead = lambda beats: [Renewal(error=StoreUnavailable()) for _ in beats]
    at.rounds(60)
    at.store.instead = None
    at.rounds(2)
    assert at.row().progress == {"at": 1}


def test_a_heartbeat_is_alive_between_its_start_and_its_stop() -> None:
    heart = Heartbeat(memory_store(), EventBus(), tick_s=0.01)
    assert not heart.is_alive
    heart.start()
    assert heart.is_alive
    heart.stop()
    assert not heart.is_alive


def test_a_running_task_is_watched_from_the_moment_of_its_claim(at: Setting) -> None:
    lease = replace(claimed(at.store), held_from=at.clock.monotonic() - 100)
    one = running(lease, beat_s=60)
    at.heart.watch(one)
    assert one.next_beat == at.clock.monotonic() - 40
    at.heart.round()
    assert at.row().hb == 1


def test_a_result_that_comes_twice_settles_once() -> None:
    with serving(a_job()) as stage:
        stage.agent._in_flight._inbox.done(
            running(claimed(stage.store, "not-ours", owner="other", lane=Lane("elsewhere"))), Returned("stray")
        )
        task = put(stage.store, "b")
        stage.agent.wake()
        assert stage.end_of(task).status is Status.SUCCESS
        assert stage.client.get("not-ours").status is Status.RUNNING


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_that_dies_in_each_round_comes_to_the_end_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    heart = Heartbeat(memory_store(clock), EventBus(), tick_s=0.001, monotonic=clock.monotonic)
    monkeypatch.setattr(Heartbeat, "renew_due", lambda heart: 1 / 0)
    clock.advance(100.0)
    heart.start()
    began = heart.last_round
    assert began == clock.monotonic()
    for _ in range(3):
        eventually(lambda: "heartbeat" in heart.dead)
        clock.advance(10.0)
        heart.start()
    assert heart.last_round == began, "its health shows that no lease is renewed, however often it begins"
    heart.stop()


def test_the_connection_of_the_heartbeat_is_open_before_newer_code_changes_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TaskStore(SqliteEngine(str(tmp_path / "tasks.db")))
    claimed(store)
    beside = store.sibling()
    heart = Heartbeat(beside, EventBus(), tick_s=60.0)
    heart.start()
    with monkeypatch.context() as newer:
        newer.setattr(sqlite_schema, "MIGRATIONS", (*sqlite_schema.MIGRATIONS, ("CREATE TABLE newer (a)",)))
        other = SqliteEngine(str(tmp_path / "tasks.db"))
        other.check()
        other.close()
    assert beside.engine.get(["a"])["a"]["status"] == "RUNNING"
    heart.stop()
    beside.engine.close()
    store.engine.close()
