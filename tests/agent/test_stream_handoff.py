"""A live stream goes from agent to agent: nothing is missed, nothing is handled by two, whatever fails on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Stage
from tests.support.stands import eventually, patience
from tests.support.streams import PROMPT, FeedThread, Fleet, Log, fleet, follower, subscribe
from thunderagent.jobs.job import Job
from thunderagent.model import events
from thunderagent.model.bus import Event
from thunderagent.model.conditions import Write
from thunderagent.model.task import Handoff, Status, Task
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.job import stream
from thunderagent.testing.chaos import Feed, Unanswered
from thunderagent.testing.faulty_engine import Fault

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"drain_s": 8.0}
"""With this drain an offer lasts 3 s, of which the one who offers uses 1.4 at most."""


LONG: dict[str, Any] = {"drain_s": 20.0}
"""With this one it lasts 15 s, of which the one who offers uses 11."""


class Show:
    """A feed, a fleet, and what was handled."""

    def __init__(self, feed: FeedThread, agents: Fleet, log: Log) -> None:
        self.feed = feed
        self.agents = agents
        self.log = log
        self.published = 0

    def publish(self, count: int) -> int:
        self.published = self.feed.publish(count)
        return self.published

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Messages come all the time."""
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.005):
                self.publish(1)

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(LONG_S)

    def begin(self, job: Job[Any], task_id: str = "s") -> Task:
        task = self.agents.client.enqueue(job, {"url": self.feed.url}, task_id=task_id)
        self.publish(3)
        self.log.until(3)
        return task

    def check(self, *, exactly_once: bool = True) -> None:
        """Every message was handled, by one fence after the other."""
        self.log.until(self.published)
        assert self.log.fences == sorted(self.log.fences)
        assert set(self.log.seqs) == set(range(1, self.published + 1))
        if exactly_once:
            assert self.log.seqs == list(range(1, self.published + 1))


@contextmanager
def a_show(folder: Path, *behaviours: Any) -> Iterator[Show]:
    with FeedThread(*behaviours) as feed, fleet(folder) as agents:
        yield Show(feed, agents, Log())


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Show]:
    with a_show(tmp_path) as made:
        yield made


def ghost(agents: Fleet, job: Job[Any]) -> None:
    """The row of an agent that takes nothing."""
    info = {
        "host": "ghost",
        "queues": {"streams": 10},
        "running": {},
        "jobs": [job.name],
        "streams": {"held": 0, "max": 10, "connections": 0},
        "health": {"draining": False},
    }
    agents.store.announce("ghost", info, lives_s=600)


def cut_off(stage: Stage) -> None:
    """No store for this agent from now on."""
    stage.store.engine.outage()  # type: ignore[attr-defined] # a Watched


def when(stage: Stage, verb: str, do: Any) -> None:
    """Do this before the first write of a verb."""
    engine: Any = stage.store.engine

    def hook(batch: Sequence[Write]) -> None:
        if any(write.verb == verb for write in batch):
            engine.before.remove(hook)
            do()

    engine.before.append(hook)


# With a break


def test_an_exclusive_stream_never_has_two_connections_through_many_handoffs(show: Show) -> None:
    job = follower(show.log)
    old = show.agents.add(job)
    task = show.begin(job)
    with show.publishing():
        for fence in range(2, 6):
            new = show.agents.add(job)
            new.record.wait(events.AgentStarted)
            old.stop()
            seq = show.published + 1
            show.log.until(seq, fence=fence)
            old = new
    show.check()
    assert show.feed.server.most_open == {task.id: 1}
    assert show.agents.row(task).crash_count == show.agents.row(task).retry_count == 0


def test_the_only_agent_simply_releases_what_it_has(show: Show) -> None:
    job = follower(show.log, exclusive=False)
    stage = show.agents.add(job)
    task = show.begin(job)
    stage.stop()
    [event] = stage.record.of(events.StreamHandedOff)
    assert not event.overlap
    row = show.agents.row(task)
    assert (row.status, row.last_seq, row.handoff_state) == (Status.PENDING, {"seq": 3, "epoch": "epoch-1"}, None)
    assert show.agents.stages[0].stuck == 0


# Without a break


def test_a_stream_goes_over_without_a_gap_a_duplicate_or_a_break(show: Show) -> None:
    job = follower(show.log, exclusive=False)
    old = show.agents.add(job, **LONG)
    task = show.begin(job)
    new = show.agents.add(job)
    new.record.wait(events.AgentStarted)
    with show.publishing():
        seq = show.published + 20
        show.log.until(seq)
        told = show.agents.store.monotonic()
        old.stop()
        assert show.agents.store.monotonic() - told < 8.0 * patience(), "it need not wait for the end of its offer"
        show.log.until(show.published + 20, fence=2)
    show.check()
    [off] = old.record.of(events.StreamHandedOff)
    assert off.overlap
    [over] = old.record.of(events.StreamHandedOver)
    last = max(one.seq for one in show.log.handled if one.fence == 1)
    assert f"'seq': {last}" in over.cursor
    assert show.feed.server.most_open[task.id] == 2, "the successor was connected before the other left"
    assert show.agents.row(task).handoff_state == Handoff.DONE
    assert old.stuck == 0
    assert (show.agents.row(task).crash_count, show.agents.row(task).retry_count) == (0, 0)


def test_many_handoffs_in_a_row_keep_the_order(show: Show) -> None:
    job = follower(show.log, exclusive=False)
    old = show.agents.add(job)
    show.begin(job)
    with show.publishing():
        for fence in range(2, 6):
            new = show.agents.add(job)
            new.record.wait(events.AgentStarted)
            old.stop()
            assert [one.overlap for one in old.record.of(events.StreamHandedOff)] == [True]
            show.log.until(show.published + 1, fence=fence)
            old = new
    show.check()


def test_an_agent_that_stops_begins_no_connection_for_a_stream_that_waits_for_its_turn(tmp_path: Path) -> None:
    log, told = Log(), list[str]()
    job = follower(log)
    with a_show(tmp_path, Unanswered()) as show:
        stage = show.agents.add(job, connect_concurrency=1)
        show.agents.client.enqueue(job, {"url": show.feed.url}, task_id="connecting")
        show.feed.until(lambda: show.feed.server.attempts)
        show.agents.client.enqueue(job, {"url": show.feed.url}, task_id="waiting")
        log.wait(lambda: len(log.contexts) == 2)
        rooms = log.contexts[0]._governor._rooms  # type: ignore[union-attr]
        eventually(lambda: any(room._waiters for room in rooms.values()))

        def after_each(event: Event) -> None:
            if isinstance(event, events.StreamHandedOff):
                told.append(event.task_id)
                if len(told) == 1:
                    return
                (context,) = (one for one in log.contexts if one.task_id == told[0])
                eventually(lambda: context.ended_by and all(feed.state is State.CLOSED for feed in context._feeds))

        stage.bus.subscribe(after_each)
        stage.stop()
        assert sorted(told) == ["connecting", "waiting"]
        moves = [move.state for move in show.agents.client.streams.runs("waiting")[-1].moves]
        assert moves[-3:] == ["resolving", "closed", "release"]


def test_a_successor_hands_nothing_out_before_the_other_has_stopped(show: Show) -> None:
    go_on = threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        if message["seq"] == 4 and ctx.fence == 1:
            await asyncio.to_thread(go_on.wait, LONG_S)

    job = follower(show.log, exclusive=False, each=each)
    old = show.agents.add(job)
    task = show.begin(job)
    show.agents.add(job).record.wait(events.AgentStarted)
    show.publish(10)
    show.feed.until(lambda: show.feed.server.open_of(task.id) == 1)
    old.agent.stop()
    eventually(lambda: show.agents.row(task).handoff_state == Handoff.READY)
    show.feed.until(lambda: show.feed.server.open_of(task.id) == 1)  # ours is closed, though the handler goes on
    assert set(show.log.fences) == {1}
    go_on.set()
    show.check()
    old.join()


def test_when_the_successor_cannot_connect_the_offer_ends_by_itself(tmp_path: Path) -> None:
    options = StreamOptions(
        proxy=False, open_timeout_s=2.0, close_timeout_s=0.2, backoff_base_s=0.05, backoff_cap_s=0.1
    )
    with a_show(tmp_path, Feed(), Unanswered(), Feed()) as show:
        job = follower(show.log, exclusive=False, options=options)
        old = show.agents.add(job, **SHORT)
        task = show.begin(job)
        show.agents.add(job).record.wait(events.AgentStarted)
        with show.publishing():
            old.stop()
            assert old.record.of(events.StreamHandedOver)
            [run] = [run for run in show.agents.client.streams.runs(task) if run.fence == 1]
            assert (run.moves[-1].state, run.moves[-1].reason) == ("handed over", "the handler returned")
            assert show.agents.row(task).handoff_state == Handoff.DONE
            show.log.until(show.published + 1, fence=2)
        show.check()


def test_a_handler_that_outlasts_the_offer_is_stopped_before_the_successor_begins(show: Show) -> None:
    ends: list[str] = []

    async def each(ctx: StreamContext, message: Any) -> None:
        if message["seq"] == 4:
            try:
                if ctx.fence == 1:
                    await asyncio.Event().wait()
            finally:
                ends.append(f"fence {ctx.fence}")

    job = follower(show.log, exclusive=False, each=each)
    old = show.agents.add(job, **SHORT)
    show.begin(job)
    show.agents.add(job).record.wait(events.AgentStarted)
    show.publish(3)
    old.stop()
    show.check()
    assert ends == ["fence 1", "fence 2"]
    assert old.stuck == 0


def test_a_handler_that_fails_during_the_offer_lets_the_successor_go_on(show: Show) -> None:
    async def each(ctx: StreamContext, message: Any) -> None:
        if message["seq"] == 5 and ctx.fence == 1:
            raise RuntimeError("boom")

    job = follower(show.log, exclusive=False, each=each)
    old = show.agents.add(job)
    task = show.begin(job)
    ghost(show.agents, job)
    old.agent.stop()
    old.record.wait(events.StreamHandedOff)
    show.publish(4)
    old.join()
    show.log.until(4, fence=1)
    assert show.agents.row(task).last_seq == {"seq": 4, "epoch": "epoch-1"}
    show.agents.add(job)
    show.check()


def test_a_successor_that_dies_before_it_is_ready_is_a_lost_agent_like_any_other(show: Show) -> None:
    job = follower(show.log, exclusive=False, lease_s=1.5)
    old = show.agents.add(job, drain_s=11.0)
    task = show.begin(job)
    weak = show.agents.add(job)
    weak.record.wait(events.AgentStarted)
    when(weak, "ready", lambda: cut_off(weak))
    with show.publishing():
        old.stop()
        assert show.agents.row(task).fence == 2
        third = show.agents.add(job)
        [event] = third.record.wait(events.TaskTakenOver)
        assert event.lost_agent == weak.agent.name
        show.log.until(show.published + 1, fence=3)
    show.check()


def test_the_agent_that_offered_may_die_and_its_late_word_does_not_set_the_cursor_back(show: Show) -> None:
    job = follower(show.log, exclusive=False)
    old = show.agents.add(job, **SHORT)
    task = show.begin(job)
    show.agents.add(job).record.wait(events.AgentStarted)

    def die(event: Event) -> None:
        if isinstance(event, events.StreamHandedOff):
            cut_off(old)

    old.bus.subscribe(die)
    with show.publishing():
        old.agent.stop()
        show.log.wait(lambda: 2 in show.log.fences)  # which message is its first depends on what the offer has saved
        seq = show.published
        eventually(lambda: (show.agents.row(task).last_seq or {}).get("seq", 0) >= seq)
        old.store.engine.calm()  # type: ignore[attr-defined] # a Watched
        old.join()
        assert (show.agents.row(task).last_seq or {})["seq"] >= seq
        assert "hand over" in old.store.engine.verbs_of(task.id)  # type: ignore[attr-defined]
    show.check(exactly_once=False)
    assert max(one.seq for one in show.log.handled if one.fence == 1) > 3, "it has gone on for its time"


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.THROTTLED])
def test_an_offer_without_an_answer_is_a_handoff_with_a_break(show: Show, fault: Fault) -> None:
    job = follower(show.log, exclusive=False)
    old = show.agents.add(job, **SHORT)
    show.begin(job)
    show.agents.add(job).record.wait(events.AgentStarted)
    old.store.engine.fail("offer", fault)  # type: ignore[attr-defined] # a Watched
    old.stop()
    failed = old.record.of(events.StoreFailed)
    assert [event.during for event in failed] == ["handoff"]
    show.publish(3)
    show.log.until(show.published, fence=2)
    show.check(exactly_once=False)
    assert old.stuck == 0


def test_an_offer_that_is_refused_is_a_lost_lease(show: Show) -> None:
    job = follower(show.log, exclusive=False)
    old = show.agents.add(job)
    task = show.begin(job)
    ghost(show.agents, job)

    def steal() -> None:
        assert show.agents.store.take_over([(show.agents.row(task), 60.0)], owner="thief").leases

    when(old, "offer", steal)
    old.stop()
    assert not old.record.of(events.StreamHandedOver)
    row = show.agents.row(task)
    assert (row.lease_owner, row.fence, row.handoff_state) == ("thief", 2, None)


# Commands and further drains meanwhile


def test_a_stream_that_is_stopped_while_it_is_offered_ends_where_it_was_handled_last(show: Show) -> None:
    job = follower(show.log, exclusive=False, heartbeat_s=2.0)
    old = show.agents.add(job, **LONG)
    task = show.begin(job)
    ghost(show.agents, job)
    old.agent.stop()
    old.record.wait(events.StreamHandedOff)
    assert show.agents.row(task).last_seq == {"seq": 3, "epoch": "epoch-1"}, "the offer has the cursor with it"
    show.publish(2)
    show.log.until(5)
    assert show.agents.client.streams.stop(task).status is Status.DONE
    told = show.agents.store.monotonic()
    old.join()
    assert show.agents.store.monotonic() - told < 6.0 * patience(), (
        "it does not go on for the eleven seconds of its offer"
    )
    row = show.agents.row(task)
    assert (row.status, row.done_reason, row.last_seq) == (Status.DONE, "stopped", {"seq": 5, "epoch": "epoch-1"})
    show.agents.client.streams.start(task)
    show.agents.add(job)
    show.publish(1)
    show.check()


def slow_to_subscribe(log: Log) -> Job[Any]:
    """A stream of which the second run never gets so far as to be subscribed."""
    import json

    from tests.support.streams import Handled, position

    @stream("test.slow", lease_s=6, heartbeat_s=0.1, exclusive=False)
    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None:
        log.began(ctx)

        async def on_open(connection: Connection, cursor: Cursor | None) -> None:
            if ctx.fence == 2:
                await asyncio.Event().wait()
            await subscribe(connection, cursor)

        url = f"{payload['url']}?stream={ctx.task_id}"
        async for message in ctx.connect(url, decode=json.loads, on_open=on_open, position=position, options=PROMPT):
            log.add(Handled(ctx.fence, message["seq"], ctx.task_id))
            ctx.checkpoint(seq=message["seq"], epoch=message["epoch"])

    return follow


@pytest.mark.parametrize("command", ["stop", "cancel"])
def test_a_command_reaches_the_successor_and_the_agent_that_offered(show: Show, command: str) -> None:
    job = slow_to_subscribe(show.log)
    old = show.agents.add(job, **LONG)
    task = show.begin(job)
    show.agents.add(job).record.wait(events.AgentStarted)
    old.agent.stop()
    [off] = old.record.wait(events.StreamHandedOff)
    assert off.overlap, old.record.events
    show.log.wait(lambda: len(show.log.runs) == 2)
    show.publish(1)
    show.log.until(4, fence=1)
    client = show.agents.client
    (client.streams.stop if command == "stop" else client.cancel)(task)
    row = show.agents.client.wait(task, timeout_s=LONG_S)
    assert row.status is Status.DONE
    told = show.agents.store.monotonic()
    old.join()
    assert show.agents.store.monotonic() - told < 6.0 * patience()
    assert old.record.of(events.StreamHandedOver)
    assert show.agents.row(task).last_seq == {"seq": 4, "epoch": "epoch-1"}
    assert set(show.log.fences) == {1}


def test_a_successor_that_drains_while_it_is_on_hold_gives_the_stream_to_a_third(show: Show) -> None:
    job = slow_to_subscribe(show.log)
    old = show.agents.add(job)
    task = show.begin(job)
    second = show.agents.add(job)
    second.record.wait(events.AgentStarted)
    with show.publishing():
        old.agent.stop()
        show.log.wait(lambda: len(show.log.runs) == 2)
        show.agents.add(job).record.wait(events.AgentStarted)
        second.stop()
        show.log.wait(lambda: 3 in show.log.fences)
    show.check()
    assert 2 not in show.log.fences
    old.join()
    assert show.agents.row(task).retry_count == 0
