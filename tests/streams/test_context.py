"""Streams: what a handler can rely on, what restarts cost, how many an agent takes, and how they end with it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, put, serving
from tests.support.stands import eventually, patience
from tests.support.streams import (
    PROMPT,
    STRICT,
    FeedThread,
    Fleet,
    Handled,
    Log,
    a_loop,
    fleet,
    follower,
    lease_of,
    plain_stream,
    watched_memory,
)
from thunderagent.agent.stream_balance import AT_ONCE
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.outcome import Stopped
from thunderagent.jobs.running import Running
from thunderagent.model import events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.errors import (
    AgentDraining,
    ConfigurationError,
    LeaseLost,
    StreamFailed,
    StreamHandedOff,
    StreamStopped,
    StreamWedged,
    TaskCancelled,
)
from thunderagent.model.task import Desired, Lane, Status
from thunderagent.settings import LEASE_MARGIN
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor, Span
from thunderagent.streams.job import stream
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.chaos import Close, Feed, Refuse, Silence
from thunderagent.testing.faulty_engine import FaultyEngine

ENDLESS = StreamOptions(proxy=False, stable_after_messages=2, backoff_base_s=0.05, backoff_cap_s=0.1)


@pytest.fixture
def feed() -> Iterator[FeedThread]:
    with FeedThread() as made:
        yield made


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path) as made:
        yield made


@stream("test.quiet", lease_s=6, heartbeat_s=0.1)
async def quiet(ctx: StreamContext, payload: dict[str, Any]) -> None:
    """Holds no connection, and ends when it is told to."""
    await asyncio.Event().wait()


# The decorator


def test_a_stream_has_short_leases_a_queue_of_its_own_and_no_time_limit() -> None:
    @stream("ticker.follow")
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None: ...

    assert (follow.lease_s, follow.heartbeat_s, follow.queue, follow.timeout_s) == (20.0, 5.0, "streams", None)
    assert (follow.kind, follow.is_stream, follow.is_async, follow.exclusive) == ("stream", True, True, True)
    assert follow.fatal == (StreamFailed,)
    assert follow.max_retry is None


def test_what_fails_for_good_is_added_to_the_fatal_errors_of_the_job() -> None:
    @stream("x", fatal=(KeyError,), max_retry=7, exclusive=False)
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None: ...

    assert follow.fatal == (KeyError, StreamFailed)
    assert (follow.max_retry, follow.exclusive) == (7, False)


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        stream("with space", queue="no#queue", lease_s=10, heartbeat_s=5, max_retry=-1)(plain_stream)
    text = str(caught.value)
    for part in ("no space", "no#queue", "three heartbeats", "max_retry is -1", "coroutine function"):
        assert part in text


# The context


def context_of(clock: FakeClock | None = None, **options: Any) -> StreamContext:
    monotonic = (clock or FakeClock()).monotonic
    return StreamContext(lease_of(), monotonic=monotonic, **options)


def test_the_cursor_of_the_row_is_where_the_handler_begins() -> None:
    context = StreamContext(lease_of(last_seq={"seq": 7, "epoch": "e", "token": "t"}))
    assert context.cursor == Cursor(7, "e", "t")
    assert context.unsaved_cursor() is None
    assert context_of().cursor is None


def test_the_cursor_never_goes_back_within_an_epoch() -> None:
    context = context_of()
    context.checkpoint(seq=5, epoch="e")
    context.checkpoint(seq=4, epoch="e")
    assert context.cursor == Cursor(5, "e")
    context.checkpoint(seq=5, epoch="e", token="new")
    assert context.cursor == Cursor(5, "e", "new")
    context.checkpoint(seq=1, epoch="f")
    assert context.cursor == Cursor(1, "f")
    with pytest.raises(ValueError, match="whole number"):
        context.checkpoint(seq="x")  # type: ignore[arg-type]
    assert context.cursor == Cursor(1, "f")


def test_each_sequence_has_a_cursor_that_never_goes_back() -> None:
    context = context_of()
    for seq, key in ((5, "BTC"), (900, "ETH"), (4, "BTC"), (7, "BTC")):
        context.checkpoint(seq=seq, key=key)
    cursor = context.cursor
    assert cursor is not None
    assert {place.key: place.seq for place in cursor.places} == {"BTC": 7, "ETH": 900}
    kept = context.unsaved_cursor()
    assert kept == {"seq": 7, "key": "BTC", "others": {"ETH": 900}}
    context.cursor_saved(kept)
    assert context.unsaved_cursor() is None
    again = StreamContext(lease_of(last_seq=kept))
    assert again.cursor == cursor
    assert again.unsaved_cursor() is None


def test_the_cursor_goes_back_once_in_a_sequence_that_began_afresh() -> None:
    context = context_of()
    for key in ("BTC", "ETH"):
        context.checkpoint(seq=900, key=key)
    context.goes_back("BTC")
    for seq in (1, 2, 1):
        context.checkpoint(seq=seq, key="BTC")
    context.checkpoint(seq=1, key="ETH")
    cursor = context.cursor
    assert cursor is not None
    assert {place.key: place.seq for place in cursor.places} == {"BTC": 2, "ETH": 900}


def test_a_checkpoint_of_more_keys_than_a_row_holds_is_refused_and_the_cursor_stays() -> None:
    context = context_of()
    with pytest.raises(ValueError, match=r"keys has .* bytes, at most 400 are kept: give each part of the keys a task"):
        for number in range(100):
            before = context.cursor
            context.checkpoint(seq=number, key=f"SYMBOL-{number}")
    assert context.cursor == before


def test_the_cursor_does_not_go_back_when_threads_tell_it_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of()
    context.checkpoint(seq=1)
    real, others = Cursor.is_behind, list[threading.Thread]()

    def meanwhile(self: Cursor, other: Cursor) -> bool:
        answer = real(self, other)
        if self.seq == 5 and not others:
            others.append(threading.Thread(target=context.checkpoint, kwargs={"seq": 9}, daemon=True))
            others[0].start()
            others[0].join(0.2)  # either it is done, and is overwritten now, or it waits for its turn
        return answer

    monkeypatch.setattr(Cursor, "is_behind", meanwhile)
    context.checkpoint(seq=5)
    others[0].join(LONG_S)
    assert context.cursor == Cursor(9)


def test_past_the_deadline_nothing_may_be_handed_out() -> None:
    clock = FakeClock()
    context = context_of(clock)
    clock.advance(15.9)
    context.guard()
    clock.advance(0.2)
    with pytest.raises(LeaseLost):
        context.guard()
    context.extended(clock.monotonic() + 16)
    context.guard()


@pytest.mark.parametrize("why", [AgentDraining(), StreamHandedOff(), StreamStopped(), TaskCancelled()], ids=type)
def test_a_request_to_end_does_not_fall_upon_the_handler_between_two_messages(why: Any) -> None:
    context = context_of()
    context.stop(why)
    context.guard()


@pytest.mark.parametrize("why", [LeaseLost(), StreamWedged()], ids=type)
def test_a_hard_end_does(why: Any) -> None:
    context = context_of()
    context.stop(why)
    with pytest.raises(type(why)):
        context.guard()


def in_a_loop(context: StreamContext, check: Any) -> None:
    async def main() -> None:
        await check(context)
        await context.close()

    asyncio.run(main())


def test_a_feed_that_is_opened_after_the_request_to_end_hands_nothing_out() -> None:
    async def check(context: StreamContext) -> None:
        first = context.connect("ws://127.0.0.1:9/")
        context.stop(AgentDraining())
        assert context.ends_softly(AgentDraining())
        async with asyncio.timeout(5):
            assert [message async for message in context.connect("ws://127.0.0.1:9/")] == []
            assert [message async for message in first] == []

    in_a_loop(context_of(), check)


def test_a_handler_that_was_to_end_before_it_connected_is_cancelled() -> None:
    assert not context_of().ends_softly(AgentDraining())


def test_it_is_ready_when_all_its_feeds_are_connected() -> None:
    async def check(context: StreamContext) -> None:
        assert not context.is_ready
        feeds = [context.connect("ws://127.0.0.1:9/") for _ in range(2)]
        feeds[0]._pump.connection = object()  # type: ignore[assignment]
        assert context.is_connected
        assert not context.is_ready
        feeds[1]._pump.connection = object()  # type: ignore[assignment]
        assert context.is_ready
        for feed in feeds:
            feed._pump.connection = None

    in_a_loop(context_of(), check)


def test_a_feed_that_has_failed_is_forgotten_when_the_handler_opens_another() -> None:
    clock = FakeClock()

    async def check(context: StreamContext) -> None:
        for _ in range(5):
            feed = context.connect("http://no-websocket/")
            with pytest.raises(StreamFailed):
                async for _ in feed:
                    pass
            assert feed.state is State.FAILED
        assert len(context._feeds) == 1
        clock.advance(61)
        assert context.wedged(clock.monotonic()) is not None, "it was told the end a minute ago, and has not ended"
        context.connect("ws://127.0.0.1:9/")
        assert len(context._feeds) == 1
        assert context.wedged(clock.monotonic()) is None

    in_a_loop(context_of(clock), check)


def test_a_successor_is_released_once_and_goes_on_where_the_other_has_stopped() -> None:
    context = StreamContext(lease_of(last_seq={"seq": 3}), on_hold=True)
    assert context.is_on_hold
    context.release(Cursor(8))
    context.checkpoint(seq=1, epoch="new")
    context.release(Cursor(8))
    assert context.cursor == Cursor(1, "new")
    assert not context.is_on_hold


def test_what_looks_wrong_is_told_and_in_the_journal() -> None:
    told = list[Event]()
    bus = EventBus()
    bus.subscribe(told.append)
    context = context_of(bus=bus)
    feed = context.connect("ws://127.0.0.1:9/")
    context.warned(feed, "50 of 60 messages were dropped as duplicates")
    [event] = told
    assert isinstance(event, events.StreamDoubted)
    assert event.reason == "50 of 60 messages were dropped as duplicates"
    taken = context.journal.take(0.0)
    assert taken is not None
    assert [reason for _, _, reason in taken["moves"]] == [event.reason]


# Rows that were made by hand


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept",
    [
        {"seq": "x"},
        {"no": "seq"},
        {"seq": None},
        [5],
        {"seq": 1, "epoch": "x" * 300},
        {"seq": 1, "key": ""},
        {"seq": 1, "others": [2]},
        {"seq": 1, "others": {"ETH": "x"}},
    ],
)
def test_a_cursor_that_makes_no_sense_fails_its_stream_and_harms_no_agent(
    kept: Any, feed: FeedThread, agents: Fleet
) -> None:
    log = Log()
    follow = follower(log)
    put(agents.store, "odd", job=follow.name, kind="stream", lane=Lane("streams"), last_seq=kept)
    stage = agents.add(follow)
    row = stage.end_of("odd")
    assert row.status is Status.FAILED
    assert "lastSeq of the row is no cursor" in (row.error or "")
    assert row.last_seq == kept
    agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(1)
    log.until(1)


# The cursor in the row


def market_follower(log: Log, *, exclusive: bool = True) -> Job[Any]:
    """A stream of two symbols, each with its numbers, that asks its peer for nothing."""

    @stream("test.market", lease_s=6.0, heartbeat_s=0.1, exclusive=exclusive)
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None:
        log.began(ctx)

        def place(message: Any) -> Span:
            return Span(first=message["data"]["U"], last=message["data"]["u"], key=message["data"]["s"])

        feed = ctx.connect(payload["url"], decode=json.loads, position=place, options=PROMPT)
        async for message in feed:
            data = message["data"]
            log.add(Handled(ctx.fence, data["u"], data["s"]))
            ctx.checkpoint(seq=data["u"], key=data["s"])

    return follow


@pytest.mark.slow
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_failover_goes_on_exactly_where_each_key_was(agents: Fleet, exclusive: bool) -> None:
    """The peer sends everything again to each connection, so that only the cursors tell what was handled."""
    log = Log()
    job = market_follower(log, exclusive=exclusive)
    with FeedThread(auto_subscribe=True, from_start=True) as feed:

        def publish(key: str, first: int, last: int) -> None:
            feed.do(lambda: feed.server.publish({"s": key, "U": first, "u": last}))

        old = agents.add(job)
        task = agents.client.enqueue(job, {"url": feed.url})
        for one in (("BTC", 1001, 1004), ("ETH", 1, 1), ("BTC", 1005, 1005), ("ETH", 2, 7)):
            publish(*one)
        log.until(7)
        agents.add(job).record.wait(events.AgentStarted)
        old.stop()
        for one in (("ETH", 8, 8), ("BTC", 1006, 1009), ("ETH", 9, 9)):
            publish(*one)
        log.until(9, fence=2)
        handled = {key: [one.seq for one in log.handled if one.task == key] for key in ("BTC", "ETH")}
        assert handled == {"BTC": [1004, 1005, 1009], "ETH": [1, 7, 8, 9]}
        cursor = log.contexts[1].cursor
        assert cursor is not None
        assert {place.key: place.seq for place in cursor.places} == {"BTC": 1009, "ETH": 9}
        assert not [gap for run in agents.client.streams.runs(task) for gap in run.gaps]


def two_more_of(writes_of: Callable[[str], list[Any]], task_id: str, number: int) -> None:
    """Wait until two more writes than `number` were done."""
    eventually(lambda: len(writes_of(task_id)) > number + 1)


@pytest.mark.slow
def test_a_run_costs_a_claim_its_heartbeats_and_its_end_and_nothing_for_its_cursor(feed: FeedThread) -> None:
    store, engine = watched_memory()
    log = Log()
    follow = follower(log)
    with serving(follow, store=store) as stage:
        task = stage.client.enqueue(follow, {"url": feed.url})
        for _ in range(5):
            log.until(feed.publish(10))
            number = len(engine.writes_of(task.id))
            two_more_of(engine.writes_of, task.id, number)
        assert stage.client.get(task).last_seq == {"seq": 50, "epoch": "epoch-1"}
        stage.stop()
        verbs = engine.verbs_of(task.id)
        assert verbs == ["claim", *["renew"] * (len(verbs) - 2), "release"]


class Frozen(FaultyEngine):
    """No heartbeat is done, so that only the write at the end can save a cursor."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.written: list[Any] = []

    def apply(self, batch: Any) -> Any:
        self.written += [write for write in batch if write.verb != "renew"]
        return super().apply(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "verb", "status"),
    [
        ("drain", "release", Status.PENDING),
        ("stop", "stop", Status.DONE),
        ("cancel", "close", Status.DONE),
        ("raise", "retry", Status.PENDING),
        ("fail", "fail", Status.FAILED),
        ("return", "succeed", Status.SUCCESS),
    ],
)
def test_the_cursor_is_in_the_very_write_that_ends_a_run(feed: FeedThread, end: str, verb: str, status: Status) -> None:
    log = Log()
    over = threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        if message["seq"] == 4:
            if end == "raise":
                raise RuntimeError("boom")
            if end == "fail":
                raise StreamFailed("it is over")
            if end == "return":
                raise Enough

    inner = follower(log, each=each)

    @stream("test.ends", lease_s=6, heartbeat_s=2.0, max_retry=5, backoff=None)
    async def ends(ctx: StreamContext, payload: dict[str, Any]) -> None:
        try:
            await inner.handler(ctx, payload)
        except Enough:
            return

    engine = Frozen(memory_store().engine)
    with serving(ends, store=TaskStore(engine), backoff_base_s=100.0, backoff_cap_s=100.0) as stage:
        task = stage.client.enqueue(ends, {"url": feed.url})
        feed.publish(3)
        log.until(3)
        stage.client.store.engine.expire(0.0)
        if end in ("raise", "fail", "return"):
            feed.publish(1)
        elif end == "drain":
            stage.agent.stop()
        else:
            {"stop": stage.client.streams.stop, "cancel": stage.client.cancel}[end](task)
        eventually(lambda: stage.client.get(task).status is status)
        row = stage.client.get(task)
        assert row.last_seq == {"seq": 3, "epoch": "epoch-1"}
        last = [write for write in engine.written if write.task_id == task.id][-1]
        assert last.verb == verb
        over.set()


class Enough(Exception):
    """The handler ends by itself."""


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_ends_in_the_middle_leaves_no_connection_behind(
    feed: FeedThread, agents: Fleet, raises: bool
) -> None:
    log = Log()

    async def each(ctx: StreamContext, message: Any) -> None:
        if ctx.fence == 1:
            raise RuntimeError("boom") if raises else Enough

    inner = follower(log, each=each)

    @stream("test.ends", lease_s=6, heartbeat_s=0.1)
    async def ends(ctx: StreamContext, payload: dict[str, Any]) -> None:
        try:
            await inner.handler(ctx, payload)
        except Enough:
            return

    stage = agents.add(ends)
    task = agents.client.enqueue(ends, {"url": feed.url})
    feed.publish(1)
    if raises:
        log.until(1, fence=2)
        assert feed.server.most_open == {task.id: 1}
    else:
        assert stage.end_of(task).status is Status.SUCCESS
        assert feed.do(lambda: feed.server.open) == 0


@pytest.mark.slow
def test_after_a_takeover_the_handler_begins_where_the_last_beat_left_the_cursor(
    feed: FeedThread, agents: Fleet
) -> None:
    log = Log()
    follow = follower(log, lease_s=1.5)
    first = agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(5)
    log.until(5)
    eventually(lambda: agents.row(task).last_seq == {"seq": 5, "epoch": "epoch-1"})
    first.store.engine.outage()  # type: ignore[attr-defined] # a Watched
    agents.add(follow)
    log.wait(lambda: (2, Cursor(5, "epoch-1")) in log.runs)
    feed.publish(1)
    log.until(6, fence=2)
    assert agents.row(task).crash_count == 1


# What restarts cost


@pytest.mark.slow
def test_drains_use_nothing_up(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = follower(log, max_retry=0)
    task = agents.client.enqueue(follow, {"url": feed.url})
    for fence in range(1, 5):
        stage = agents.add(follow, max_crashes=0)
        log.until(feed.publish(1), fence=fence)
        stage.stop()
    row = agents.row(task)
    assert (row.status, row.retry_count, row.crash_count, row.errors) == (Status.PENDING, 0, 0, ())
    assert log.seqs == [1, 2, 3, 4]


def failing(log: Log, *, after: int, **options: Any) -> Job[Any]:
    """A stream of which every run fails after so many messages."""
    handled: dict[int, int] = {}

    async def each(ctx: StreamContext, message: Any) -> None:
        handled[ctx.fence] = handled.get(ctx.fence, 0) + 1
        if handled[ctx.fence] > after:
            raise RuntimeError(f"boom {ctx.fence}")

    return follower(log, each=each, options=ENDLESS, **options)


@pytest.mark.slow
def test_errors_after_progress_count_from_zero(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = failing(log, after=3, max_retry=1)
    agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(100)
    log.wait(lambda: len(log.runs) >= 6)
    assert agents.row(task).status in (Status.RUNNING, Status.PENDING)
    assert agents.row(task).retry_count <= 1


@pytest.mark.slow
def test_errors_without_progress_end_it_as_failed_with_the_reason(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = failing(log, after=0, max_retry=2)
    stage = agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(10)
    row = stage.end_of(task)
    assert (row.status, len(log.runs)) == (Status.FAILED, 3)
    assert "boom 3" in (row.error or "")


@pytest.mark.slow
def test_a_peer_that_refuses_for_good_fails_the_stream_with_its_reason(agents: Fleet) -> None:
    log = Log()
    with FeedThread(Refuse(status=404)) as feed:
        follow = follower(log, options=STRICT)
        stage = agents.add(follow)
        row = stage.end_of(agents.client.enqueue(follow, {"url": feed.url}))
        assert row.status is Status.FAILED
        assert "StreamFailed: http 404" in (row.error or "")
        assert len(log.runs) == 1


@pytest.mark.slow
def test_lost_agents_without_progress_end_it_as_failed_with_the_reason(agents: Fleet) -> None:
    errors = ({"error": "agent zero was lost", "beside": 0},)
    put(agents.store, "s", job=quiet.name, kind="stream", lane=Lane("streams"), crash_count=2, errors=errors)
    first = agents.add(quiet, max_crashes=2)
    first.record.wait(events.TaskStarted)
    agents.store.engine.apply([])
    first.store.engine.outage()  # type: ignore[attr-defined] # a Watched
    row = agents.row("s")
    second = agents.add(quiet, max_crashes=2, start=False)
    clock = FakeClock(now=row.lock_time + 10)  # type: ignore[operator]
    judge = SqliteEngine(str(agents._path), clock=clock)
    second.agent._housekeeping._rescuer.lost._store = TaskStore(judge, monotonic=clock.monotonic)
    second.start()
    row = agents.client.wait("s", timeout_s=LONG_S)
    judge.close()
    assert row.status is Status.FAILED
    assert "3 agents were lost" in (row.error or "")


# How many


def test_streams_take_no_slots_and_batch_tasks_take_no_streams(agents: Fleet) -> None:
    release = threading.Event()

    @job("test.batch")
    def batch(ctx: Context, payload: int) -> int:
        return payload

    @job("test.block", queue="block")
    def block(ctx: Context, payload: int) -> None:
        release.wait(LONG_S)

    stage = agents.add(quiet, batch, block, max_streams=2, slots=1)
    held = [agents.client.enqueue(quiet, {}, task_id=f"s{number}") for number in range(4)]
    stage.record.wait(events.TaskStarted, 2)
    assert stage.end_of(agents.client.enqueue(batch, 7)).result == 7
    blocked = agents.client.enqueue(block, 1)
    stage.record.wait(events.TaskStarted, where=lambda event: event.task_id == blocked.id)
    agents.client.streams.stop(next(one for one in held if agents.row(one).status is Status.RUNNING))
    stage.record.wait(events.TaskStarted, 3, where=lambda event: event.job == "test.quiet")
    statuses = sorted(agents.row(one).status for one in held)
    assert statuses == [Status.DONE, Status.PENDING, Status.RUNNING, Status.RUNNING]
    release.set()


def test_an_agent_with_room_for_no_stream_takes_none(agents: Fleet) -> None:
    @job("test.batch", queue="streams")
    def batch(ctx: Context, payload: int) -> int:
        return payload

    stage = agents.add(quiet, batch, max_streams=0)
    task = agents.client.enqueue(quiet, {})
    for number in range(3):
        stage.end_of(agents.client.enqueue(batch, number))
    assert agents.row(task).status is Status.PENDING
    assert stage.store.agents()[0].info["streams"] == {"held": 0, "max": 0, "connections": 0}


def test_queues_that_share_the_room_for_streams_do_not_promise_it_twice(agents: Fleet) -> None:
    @stream("test.other", queue="others", lease_s=6, heartbeat_s=0.1)
    async def other(ctx: StreamContext, payload: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    for number in range(4):  # of either queue all have room, but not of both
        agents.client.enqueue(quiet, {}, task_id=f"q{number}")
        agents.client.enqueue(other, {}, task_id=f"o{number}")
    stage = agents.add(quiet, other, max_streams=6)
    stage.record.wait(events.TaskStarted, 6)
    stage.record.wait(events.Polled, len(stage.record.of(events.Polled)) + 3)
    assert stage.agent.running == 6


def test_a_look_claims_at_most_fifty_streams_so_that_batch_tasks_do_not_wait_for_hundreds(agents: Fleet) -> None:
    agents.client.enqueue_many(quiet, [{} for _ in range(130)])
    stage = agents.add(quiet)
    stage.record.wait(events.TaskStarted, 130)
    claims = [sum(write.verb == "claim" for write in batch) for batch in agents.engines[0].batches]
    assert sum(claims) == 130
    assert max(claims) == AT_ONCE


def test_hundreds_of_batch_tasks_do_not_hide_a_stream_that_was_enqueued_by_name(agents: Fleet) -> None:
    release = threading.Event()

    @job("test.batch")
    def batch(ctx: Context, payload: int) -> None:
        release.wait(LONG_S)

    agents.client.enqueue_many(batch, range(1500))
    task = agents.client.enqueue("test.quiet", {})
    assert (task.kind, task.queue) == ("batch", "default")
    try:
        stage = agents.add(quiet, batch, slots=1)
        stage.record.wait(events.TaskStarted, where=lambda event: event.task_id == task.id)
        row = agents.row(task)
        assert (row.status, row.kind) == (Status.RUNNING, "stream")
        assert stage.agent._parts.fleet.held == 1
    finally:
        release.set()


# The end of the agent


@pytest.mark.slow
def test_all_streams_are_asked_at_once_though_the_store_hangs_and_go_back_in_one_exchange(tmp_path: Path) -> None:
    log, ended = Log(), threading.Event()
    with FeedThread() as feed, fleet(tmp_path) as agents:
        follow = follower(log)
        stage = agents.add(follow, drain_s=30.0)
        engine = agents.engines[0]
        tasks = [agents.client.enqueue(follow, {"url": feed.url}, task_id=f"s{number}") for number in range(20)]
        feed.publish(1)
        log.wait(lambda: len(log.handled) == 20)
        number = len(engine.batches)

        def hang(batch: Any) -> None:
            if any(write.verb == "announce" for write in batch):
                feed.until(lambda: feed.server.open == 0)
                inbox = stage.agent._in_flight._inbox.queue
                eventually(lambda: inbox.qsize() == 20)
                ended.set()

        engine.before.append(hang)
        stage.stop()
        assert ended.is_set()
        exchanges = [batch for batch in engine.batches[number:] if any(write.verb == "release" for write in batch)]
        assert [len(batch) for batch in exchanges] == [20]
        rows = [agents.row(task) for task in tasks]
        assert {(row.status, row.crash_count, row.retry_count) for row in rows} == {(Status.PENDING, 0, 0)}
        assert all(row.last_seq == {"seq": 1, "epoch": "epoch-1"} for row in rows)


@pytest.mark.slow
def test_a_handler_in_the_middle_of_a_message_may_finish_it_and_what_stands_behind_its_loop(agents: Fleet) -> None:
    log, middle, go_on, behind = Log(), threading.Event(), threading.Event(), threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        middle.set()
        await asyncio.to_thread(go_on.wait, LONG_S)

    inner = follower(log, each=each)

    @stream("test.flush", lease_s=6, heartbeat_s=0.1)
    async def flush(ctx: StreamContext, payload: dict[str, Any]) -> None:
        await inner.handler(ctx, payload)
        behind.set()

    with FeedThread() as feed:
        stage = agents.add(flush)
        task = agents.client.enqueue(flush, {"url": feed.url})
        feed.publish(3)
        assert middle.wait(LONG_S)
        stage.agent.stop()
        feed.until(lambda: feed.server.open == 0)
        assert stage.is_running
        go_on.set()
        stage.join()
        assert behind.is_set()
        assert log.seqs == [1]
        assert agents.row(task).last_seq == {"seq": 1, "epoch": "epoch-1"}


@pytest.mark.slow
def test_a_mute_peer_delays_no_release_beyond_the_time_for_closing(agents: Fleet) -> None:
    log = Log()
    mute = Feed(ending=Silence(after_messages=1))
    with FeedThread(mute) as feed:
        follow = follower(log, options=StreamOptions(proxy=False, close_timeout_s=0.5))
        stage = agents.add(follow, drain_s=30.0)
        tasks = [agents.client.enqueue(follow, {"url": feed.url}, task_id=f"s{number}") for number in range(10)]
        feed.publish(1)
        log.wait(lambda: len(log.handled) == 10)
        before = agents.store.monotonic()
        stage.stop()
        assert agents.store.monotonic() - before < 5.0 * patience()
        assert {agents.row(task).status for task in tasks} == {Status.PENDING}


@pytest.mark.slow
def test_batch_tasks_have_the_whole_drain_while_streams_leave_at_once(feed: FeedThread, agents: Fleet) -> None:
    log, release = Log(), threading.Event()

    @job("test.batch")
    def batch(ctx: Context, payload: int) -> int:
        release.wait(LONG_S)
        assert not ctx.cancelled
        return payload

    follow = follower(log)
    stage = agents.add(follow, batch, drain_s=10.0)
    task = agents.client.enqueue(follow, {"url": feed.url})
    slow = agents.client.enqueue(batch, 7)
    feed.publish(1)
    log.until(1)
    stage.record.wait(events.TaskStarted, 2)
    stage.agent.stop()
    [released] = stage.record.wait(events.TaskReleased)
    assert released.task_id == task.id
    assert stage.is_running
    release.set()
    stage.join()
    assert agents.row(slow).result == 7


@pytest.mark.slow
@pytest.mark.parametrize("exclusive", [True, False])
def test_an_outage_of_the_store_keeps_no_stream_connected_in_a_drain(
    feed: FeedThread, agents: Fleet, exclusive: bool
) -> None:
    log = Log()
    follow = follower(log, exclusive=exclusive)
    stage = agents.add(follow, drain_s=30.0)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(1)
    log.until(1)
    stage.store.engine.outage()  # type: ignore[attr-defined] # a Watched
    stage.record.wait(events.StoreFailed, where=lambda event: event.during == "polling")
    stage.agent.stop()
    feed.until(lambda: feed.server.open == 0)
    assert stage.is_running, "long before the time is over"
    stage.store.engine.calm()  # type: ignore[attr-defined] # a Watched
    stage.join()
    assert (agents.row(task).status, agents.row(task).crash_count) == (Status.PENDING, 0)
    assert agents.row(task).last_seq == {"seq": 1, "epoch": "epoch-1"}


@pytest.mark.slow
def test_a_loop_that_has_died_does_not_keep_the_agent_from_giving_its_streams_back(agents: Fleet) -> None:
    running = threading.Event()

    @stream("test.runs", lease_s=6, heartbeat_s=0.1)
    async def runs(ctx: StreamContext, payload: dict[str, Any]) -> None:
        running.set()
        await asyncio.Event().wait()

    stage = agents.add(runs)
    task = agents.client.enqueue(runs, {})
    assert running.wait(LONG_S)
    executors = stage.agent._in_flight.executors
    assert executors is not None
    assert executors.loop is not None
    loop = executors.loop
    loop.call(loop._loop.stop)
    stage.record.wait(events.ThreadDied)
    stage.agent.stop()
    stage.join()
    assert agents.row(task).status is Status.PENDING


# Wanted, or not


@pytest.mark.parametrize("by_name", [False, True])
def test_a_stream_that_was_stopped_before_it_ran_is_closed_without_being_run(agents: Fleet, by_name: bool) -> None:
    put(
        agents.store,
        "s",
        job=quiet.name,
        kind="batch" if by_name else "stream",
        lane=Lane("streams"),
        desired_state=Desired.STOPPED,
        last_seq={"seq": 3},
    )
    stage = agents.add(quiet)
    row = stage.end_of("s")
    assert (row.status, row.done_reason, row.last_seq) == (Status.DONE, "stopped", {"seq": 3})
    assert not stage.record.of(events.TaskStarted)


@pytest.mark.slow
def test_an_agent_with_uvloop_holds_streams_too(agents: Fleet) -> None:
    pytest.importorskip("uvloop")
    log = Log()
    with FeedThread(Feed(ending=Close(after_messages=1)), Feed()) as feed:
        follow = follower(log)
        stage = agents.add(follow, event_loop="uvloop")
        task = agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(2)
        log.until(2)
        executors = stage.agent._in_flight.executors
        assert executors is not None
        assert executors.loop is not None
        assert type(executors.loop._loop).__module__.startswith("uvloop")
        stage.stop()
        assert agents.row(task).last_seq == {"seq": 2, "epoch": "epoch-1"}


@pytest.mark.slow
def test_a_run_asks_its_peer_for_what_comes_behind_the_cursor_of_the_row(feed: FeedThread) -> None:
    log = Log()
    lease = lease_of(last_seq={"seq": 2, "epoch": "epoch-1"}, payload_text=f'{{"url": "{feed.url}"}}')
    feed.publish(4)
    with a_loop() as loop:
        context = StreamContext(replace(lease, held_from=memory_store().monotonic()))
        loop.executor.start(Running(lease, follower(log), context, LEASE_MARGIN, 5.0))
        log.until(4)
        assert log.seqs == [3, 4]
        context.stop(StreamStopped())
        outcome = loop.outcome()
        assert isinstance(outcome, Stopped)
        assert isinstance(outcome.why, StreamStopped)
