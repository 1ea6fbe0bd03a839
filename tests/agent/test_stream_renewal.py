"""A lease of a stream is renewed only while the stream makes progress, and nothing is handled after its end."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, claimed
from tests.support.streams import FeedThread, Log, Watched, a_loop, fleet, follower
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.jobs.outcome import Stopped
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import AgentDraining, LeaseLost, StoreUnavailable, StreamWedged
from thunderagent.model.task import Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.settings import LEASE_MARGIN
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import LOOP_LATE_S, StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.chaos import Feed, Silence
from thunderagent.testing.faulty_engine import Fault

STUCK_SOON = StreamOptions(proxy=False, handler_timeout_s=0.3, close_timeout_s=0.2)


async def nothing(ctx: StreamContext, payload: dict[str, Any]) -> None: ...


class At:
    """A heartbeat of which the test calls each round, and streams that nobody runs."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = Watched(memory_store(self.clock).engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.heart = Heartbeat(self.store, self.bus, tick_s=1.0, monotonic=self.clock.monotonic)
        self.ticked = math.inf

    def holding(self, name: str = "a", **row: Any) -> tuple[Running, StreamContext]:
        lease = claimed(self.store, name, lease_s=20.0, kind="stream", **row)
        context = StreamContext(lease, monotonic=self.clock.monotonic)
        context.attach(Governor(), lambda: min(self.ticked, self.clock.monotonic()))
        job = stream("test.job")(nothing)
        one = Running(lease, job, context, LEASE_MARGIN, 5.0, started=self.clock.monotonic())
        self.heart.watch(one)
        return one, context

    def rounds(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.heart.round()

    def row(self, name: str = "a") -> Task:
        return self.store.get([name])[name]


@pytest.fixture
def at() -> At:
    return At()


# What a beat carries


def test_the_cursor_rides_on_the_beat_and_only_when_it_has_moved(at: At) -> None:
    _, context = at.holding()
    context.checkpoint(seq=7, epoch="e", token="t")
    at.rounds(6)
    assert at.row().last_seq == {"seq": 7, "epoch": "e", "token": "t"}
    at.rounds(10)
    beats = [write for write in at.engine.writes_of("a") if write.verb == "renew"]
    assert len(beats) >= 3
    assert ["lastSeq" in write.set for write in beats] == [True] + [False] * (len(beats) - 1)
    assert at.engine.verbs_of("a") == ["claim"] + ["renew"] * len(beats)


@pytest.mark.parametrize("fault", ["lost request", "lost reply"])
def test_a_cursor_whose_beat_had_no_answer_is_sent_again(at: At, fault: str) -> None:
    _, context = at.holding()
    context.checkpoint(seq=7)
    at.engine.fail("renew", Fault(fault))
    at.rounds(6)
    context.checkpoint(seq=8)
    at.rounds(1.5)
    beats = [write for write in at.engine.writes_of("a") if write.verb == "renew"]
    assert [write.set.get("lastSeq", {}).get("seq") for write in beats[:2]] in ([7, 7], [7, 8])
    assert at.row().last_seq == {"seq": 8} or context.unsaved_cursor() is not None
    at.rounds(6)
    assert at.row().last_seq == {"seq": 8}
    assert context.unsaved_cursor() is None


def test_a_cursor_that_moves_while_its_beat_is_under_way_is_not_taken_for_saved(at: At) -> None:
    _, context = at.holding()
    context.checkpoint(seq=1)
    at.engine.before.append(lambda batch: context.checkpoint(seq=2))
    at.rounds(5.5)
    assert at.row().last_seq == {"seq": 1}
    assert context.unsaved_cursor() == {"seq": 2}


def test_a_stream_that_does_well_is_forgiven_its_past_with_the_next_beat(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    at.holding(retry_count=2, crash_count=3)
    at.rounds(6)
    assert (at.row().retry_count, at.row().crash_count) == (2, 3)
    monkeypatch.setattr(StreamContext, "has_progressed", True)
    at.rounds(5)
    assert (at.row().retry_count, at.row().crash_count) == (0, 0)
    at.rounds(10)
    beats = [write for write in at.engine.writes_of("a") if write.verb == "renew"]
    assert sum("crashCount" in write.set for write in beats) == 1


def test_first_beats_of_streams_that_were_claimed_together_are_spread(at: At) -> None:
    first = {at.holding(f"n{number}")[0].next_beat - at.clock.monotonic() for number in range(50)}
    assert len(first) > 40
    assert 2.5 <= min(first) < 3.0
    assert 4.5 < max(first) <= 5.0


# An event loop that stands still


def test_while_the_loop_stands_still_for_over_five_seconds_no_stream_is_renewed(at: At) -> None:
    one, _ = at.holding()
    at.rounds(6)
    at.ticked = at.clock.monotonic()
    number = at.engine.verbs_of("a").count("renew")
    at.rounds(LOOP_LATE_S)
    assert at.engine.verbs_of("a").count("renew") == number + 1, "for five seconds it goes on"
    at.rounds(8)
    assert at.engine.verbs_of("a").count("renew") == number + 1
    [event] = at.record.of(events.StreamWedged)
    assert "the event loop has stood still for" in event.reason
    at.ticked = math.inf
    at.rounds(1)
    assert at.engine.verbs_of("a").count("renew") == number + 2
    assert one.context.stop_reason is None
    at.ticked = at.clock.monotonic()
    at.rounds(12)
    assert len(at.record.of(events.StreamWedged)) == 2, "each time is told once"


def test_a_loop_that_never_comes_back_loses_its_leases_in_time(at: At) -> None:
    one, _ = at.holding()
    at.ticked = at.clock.monotonic()
    at.rounds(5)
    before = one.deadline
    at.rounds(17)
    assert one.lost
    [event] = at.record.of(events.LeaseLost)
    assert "within 20 s" in event.reason
    assert before < at.row().lock_time - 1_800_000_000 + 1000  # type: ignore[operator] # both clocks began together
    assert len(at.record.of(events.StreamWedged)) == 1


@pytest.mark.slow
def test_the_executor_tells_when_its_loop_last_ticked() -> None:
    clock = FakeClock()
    with a_loop(monotonic=clock.monotonic) as loop:
        block, blocked = threading.Event(), threading.Event()

        def stand_still() -> None:
            blocked.set()
            block.wait(LONG_S)

        loop.executor.call(stand_still)
        assert blocked.wait(LONG_S)
        before = loop.executor.last_tick
        clock.advance(60)
        assert loop.executor.last_tick == before
        block.set()
        ticked = threading.Event()
        loop.executor.call(lambda: loop.executor._loop.call_later(0.6, ticked.set))
        assert ticked.wait(LONG_S)
        assert loop.executor.last_tick == before + 60


# Handlers that make no progress


def test_a_handler_that_neither_connects_nor_tells_is_stopped_after_a_minute(at: At) -> None:
    one, context = at.holding()
    at.rounds(59)
    context.progress({"still": "here"})
    at.rounds(59)
    assert one.context.stop_reason is None
    at.rounds(2)
    assert isinstance(one.context.stop_reason, StreamWedged)
    assert "neither connected" in str(one.context.stop_reason)
    number = at.engine.verbs_of("a").count("renew")
    at.rounds(10)
    assert at.engine.verbs_of("a").count("renew") == number
    assert len(at.record.of(events.StreamWedged)) == 1


@pytest.mark.slow
def test_a_deadlocked_handler_is_stopped_and_another_agent_goes_on(tmp_path: Path) -> None:
    log = Log()

    async def each(ctx: StreamContext, message: Any) -> None:
        if ctx.fence == 1 and message["seq"] == 3:
            await asyncio.Event().wait()

    with FeedThread() as feed, fleet(tmp_path) as agents:
        job = follower(log, each=each, options=STUCK_SOON)
        first = agents.add(job)
        task = agents.client.enqueue(job, {"url": feed.url})
        feed.publish(5)
        log.until(2)
        agents.add(job)
        [event] = first.record.wait(events.StreamWedged)
        assert "over 0.3 s for one message" in event.reason
        log.until(5, fence=2)
        assert log.seqs == [1, 2, 3, 4, 5]
        assert agents.row(task).retry_count == 1
        assert "StreamWedged" in agents.row(task).errors[0]["error"]
        assert len(first.record.of(events.StreamWedged)) == 1


@pytest.mark.slow
def test_a_wedged_stream_that_ignores_its_cancellation_is_taken_over_with_its_connection_cut(tmp_path: Path) -> None:
    log, over = Log(), threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        while ctx.fence == 1 and message["seq"] == 3 and not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    try:
        with FeedThread() as feed, fleet(tmp_path) as agents:
            job = follower(log, each=each, options=STUCK_SOON, lease_s=1.5)
            first = agents.add(job)
            task = agents.client.enqueue(job, {"url": feed.url})
            feed.publish(5)
            log.until(2)
            second = agents.add(job)
            [event] = second.record.wait(events.TaskTakenOver)
            assert event.lost_agent == first.agent.name
            log.until(5, fence=2)
            assert len(first.record.of(events.StreamWedged)) == 1
            assert feed.server.most_open[task.id] == 1, "the one that hangs holds no connection any more"
            over.set()
            refused = first.record.wait(events.SettleRefused)
            assert refused[0].verb == "retry"
            assert agents.row(task).fence == 2
    finally:
        over.set()


@pytest.mark.slow
def test_a_handler_that_swallows_its_cancellation_has_not_succeeded(tmp_path: Path) -> None:
    log = Log()

    async def each(ctx: StreamContext, message: Any) -> None:
        if ctx.fence == 1:
            await asyncio.Event().wait()

    job = follower(log, each=each, options=STUCK_SOON)

    async def tidy(ctx: StreamContext, payload: dict[str, Any]) -> None:
        try:
            await job.handler(ctx, payload)
        except asyncio.CancelledError:
            return

    with FeedThread() as feed, fleet(tmp_path) as agents:
        tidied = stream("test.tidy", lease_s=6, heartbeat_s=0.1)(tidy)
        agents.add(tidied)
        task = agents.client.enqueue(tidied, {"url": feed.url})
        feed.publish(1)
        log.until(1, fence=2)
        assert agents.row(task).status is Status.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize(("what", "fence"), [("Connection.read", 1), ("Feed._run", 2)])
def test_a_task_that_was_killed_is_replaced_or_its_stream_begins_anew(tmp_path: Path, what: str, fence: int) -> None:
    log = Log()
    old = StreamOptions(proxy=False, max_connection_age_s=3600, backoff_base_s=0.05, backoff_cap_s=0.1)
    with FeedThread() as feed, fleet(tmp_path) as agents:
        job = follower(log, options=old)
        stage = agents.add(job)
        task = agents.client.enqueue(job, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        executors = stage.agent._in_flight.executors
        assert executors is not None
        assert executors.loop is not None
        loop = executors.loop

        def kill() -> None:
            killed = [one for one in asyncio.all_tasks(loop._loop) if what in repr(one.get_coro())]
            assert killed
            for one in killed:
                one.cancel()

        loop.call(kill)
        feed.until(lambda: len(feed.server.attempts) == 2)
        feed.publish(2)
        log.until(3)
        assert log.seqs == [1, 2, 3]
        assert agents.row(task).fence == fence


# The end of the right to handle


@pytest.mark.slow
def test_after_our_own_deadline_no_message_is_handed_out_whatever_the_heartbeat_knows() -> None:
    clock, log = FakeClock(), Log()
    job = follower(log)
    lease = replace(claimed(memory_store(clock), kind="stream"), lease_s=20.0)
    with FeedThread() as feed, a_loop() as loop:
        text = f'{{"url": "{feed.url}"}}'
        lease = replace(lease, task=replace(lease.task, payload_text=text))
        context = StreamContext(lease, monotonic=clock.monotonic)
        loop.executor.start(Running(lease, job, context, LEASE_MARGIN, 5.0))
        feed.publish(2)
        log.until(2)
        clock.advance(15.9)
        feed.publish(1)
        log.until(3)
        clock.advance(0.2)
        feed.publish(1)
        outcome = loop.outcome()
        assert isinstance(outcome, Stopped)
        assert isinstance(outcome.why, LeaseLost)
        assert log.seqs == [1, 2, 3]
        feed.until(lambda: feed.server.open == 0)


@pytest.mark.slow
def test_a_lease_that_is_lost_ends_a_handler_that_was_to_end_by_itself() -> None:
    log, middle, cancelled = Log(), threading.Event(), threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        middle.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    clock = FakeClock()
    lease = claimed(memory_store(clock), kind="stream")
    job = follower(log, each=each)
    with FeedThread(Feed(answers_close=False)) as feed, a_loop() as loop:
        lease = replace(lease, task=replace(lease.task, payload_text=f'{{"url": "{feed.url}"}}'))
        context = StreamContext(lease, monotonic=clock.monotonic, grace_s=600)
        loop.executor.start(Running(lease, job, context, LEASE_MARGIN, 5.0))
        feed.publish(1)
        assert middle.wait(LONG_S)
        assert context.stop(AgentDraining())
        loop.do(lambda: None)
        assert not cancelled.is_set(), "it may finish its message"
        assert not context.stop(LeaseLost())
        assert cancelled.wait(LONG_S)
        assert isinstance(loop.outcome(), Stopped)


@pytest.mark.parametrize("ending", ["forgotten", "offered", "offered and claimed"])
def test_the_answer_to_a_beat_that_was_overtaken_changes_nothing(at: At, ending: str) -> None:
    one, context = at.holding()
    began, go_on = threading.Event(), threading.Event()

    def wait(batch: Any) -> None:
        if batch[0].verb == "renew":
            began.set()
            assert go_on.wait(LONG_S)

    at.engine.before.append(wait)
    at.clock.advance(5)
    beat = threading.Thread(target=at.heart.renew_due, daemon=True)
    beat.start()
    assert began.wait(LONG_S)
    at.heart.forget(one)
    if ending != "forgotten":
        at.heart.watch_until(one, at.clock.monotonic() + 2)
    if ending == "offered and claimed":
        offer = writes.offer(one.lease, now=at.clock.now(), until=at.clock.now() + 15)
        assert at.store.settle([offer])[0].accepted
    deadline = one.deadline
    go_on.set()
    beat.join(LONG_S)
    assert one.deadline == deadline
    assert not one.lost
    assert context.stop_reason is None


def test_a_stream_that_is_watched_to_its_end_is_renewed_no_more_and_stopped_in_time(at: At) -> None:
    one, context = at.holding()
    at.heart.forget(one)
    at.heart.watch_until(one, at.clock.monotonic() + 12)
    context.guard()
    at.rounds(11.5)
    assert at.engine.verbs_of("a") == ["claim"]
    assert context.stop_reason is None
    at.rounds(1)
    assert isinstance(context.stop_reason, LeaseLost)
    assert "another agent is to go on" in str(context.stop_reason)
    with pytest.raises(LeaseLost):
        context.guard()


def test_no_answer_is_no_loss_for_a_stream_either_until_its_deadline(at: At) -> None:
    one, _ = at.holding()

    def away(batch: Any) -> None:
        raise StoreUnavailable("away")

    at.engine.before.append(away)
    at.rounds(15.5)
    assert not one.lost
    at.rounds(0.5)
    assert one.lost


@pytest.mark.slow
def test_a_peer_that_falls_silent_is_no_reason_to_let_the_lease_go(tmp_path: Path) -> None:
    log = Log()
    quick = StreamOptions(proxy=False, ping_interval_s=0.2, close_timeout_s=0.2, backoff_base_s=0.05, backoff_cap_s=0.1)
    with FeedThread(Feed(ending=Silence(after_messages=1)), Feed()) as feed, fleet(tmp_path) as agents:
        job = follower(log, options=quick)
        agents.add(job)
        task = agents.client.enqueue(job, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        feed.publish(1)
        log.until(2)
        assert agents.row(task).fence == 1
