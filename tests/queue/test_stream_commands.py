"""What a client can do with a stream: stop it, start it, retry it, and ask what happened to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, a_job, claimed, put, settings
from tests.support.stands import eventually
from tests.support.streams import STRICT, FeedThread, Fleet, Log, Watched, fleet, follower, watched_memory
from thunderagent.client import Client
from thunderagent.model import events
from thunderagent.model.conditions import Write
from thunderagent.model.errors import NotAllowed, TaskNotFound
from thunderagent.model.task import Candidate, Desired, Lane, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import TaskStore, Wanted
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.testing.chaos import Refuse


@pytest.fixture
def feed() -> Iterator[FeedThread]:
    with FeedThread() as made:
        yield made


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path) as made:
        yield made


class Desk:
    """A client without agents; the test plays the agent."""

    def __init__(self) -> None:
        self.store, self.engine = watched_memory()
        self.client = Client(self.store, settings())

    def put(self, **changes: Any) -> Task:
        return put(self.store, **{"kind": "stream", "lane": Lane("streams"), **changes})

    def before(self, verb: str, do: Callable[[], object]) -> None:
        """Do this right before the first write of a verb."""

        def hook(batch: Sequence[Write]) -> None:
            if any(write.verb == verb for write in batch):
                self.engine.before.remove(hook)
                do()

        self.engine.before.append(hook)

    @property
    def row(self) -> Task:
        return self.client.get("a")


@pytest.fixture
def desk() -> Desk:
    return Desk()


# With an agent


@pytest.mark.slow
def test_a_running_stream_hears_of_its_stop_in_the_reply_to_its_heartbeat(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = follower(log)
    stage = agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(3)
    log.until(3)
    engine: Watched = stage.store.engine  # type: ignore[assignment]
    reads = sum(task.id in names for names in engine.gets)
    agents.client.streams.stop(task)
    row = agents.client.wait(task, timeout_s=LONG_S)
    assert (row.status, row.done_reason, row.desired_state) == (Status.DONE, "stopped", Desired.STOPPED)
    assert row.last_seq == {"seq": 3, "epoch": "epoch-1"}
    assert row.expire_at is not None
    assert row.expire_at - (row.finished_at or 0) > 80 * 86400, "it is kept as long as a failed one"
    assert sum(task.id in names for names in engine.gets) == reads
    feed.until(lambda: feed.server.open == 0)
    [closed] = stage.record.wait(events.TaskClosed)
    assert closed.reason == "stopped"


@pytest.mark.slow
def test_a_stopped_stream_goes_on_where_it_was_when_it_is_started(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = follower(log)
    agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(3)
    log.until(3)
    agents.client.streams.stop(task)
    assert agents.client.wait(task, timeout_s=LONG_S).status is Status.DONE
    feed.publish(2)
    started = agents.client.streams.start(task)
    assert started.desired_state == Desired.STARTED
    log.until(5, fence=2)
    assert log.seqs == [1, 2, 3, 4, 5]
    assert log.runs[1] == (2, Cursor(3, "epoch-1"))
    assert agents.row(task).status is Status.RUNNING


@pytest.mark.slow
def test_a_start_waits_for_the_stop_before_it(feed: FeedThread, agents: Fleet) -> None:
    log, middle, go_on = Log(), threading.Event(), threading.Event()

    async def each(ctx: StreamContext, message: Any) -> None:
        middle.set()
        if ctx.fence == 1:
            await asyncio.to_thread(go_on.wait, LONG_S)

    follow = follower(log, each=each)
    agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(1)
    assert middle.wait(LONG_S)
    agents.client.streams.stop(task)
    with pytest.raises(NotAllowed, match=r"still runs after 0\.2 s"):
        agents.client.streams.start(task, timeout_s=0.2)
    assert agents.row(task).desired_state == Desired.STOPPED
    threading.Timer(0.2, go_on.set).start()
    agents.client.streams.start(task, timeout_s=LONG_S)
    log.wait(lambda: len(log.runs) == 2)
    assert agents.row(task).desired_state == Desired.STARTED


@pytest.mark.slow
def test_a_failed_stream_can_be_started(agents: Fleet) -> None:
    log = Log()
    with FeedThread(Refuse(status=404)) as feed:
        follow = follower(log, options=STRICT)
        stage = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url})
        assert stage.end_of(task).status is Status.FAILED
        feed.do(lambda: feed.server.script())
        agents.client.streams.start(task)
        feed.publish(1)
        log.until(1)


@pytest.mark.slow
def test_a_stream_that_was_enqueued_and_stopped_by_name_runs_when_it_is_started(
    feed: FeedThread, agents: Fleet
) -> None:
    log = Log()
    follow = follower(log)
    task = agents.client.enqueue(follow.name, {"url": feed.url})
    assert agents.client.streams.stop(task).status is Status.DONE
    assert agents.client.streams.start(task).desired_state == Desired.STARTED
    agents.add(follow)
    feed.publish(1)
    log.until(1)
    row = agents.row(task)
    assert (row.status, row.kind) == (Status.RUNNING, "stream")
    assert agents.client.streams.stop(task).status is Status.RUNNING
    assert agents.client.wait(task, timeout_s=LONG_S).done_reason == "stopped"


# Stop, by status


def test_a_waiting_stream_is_closed_at_once(desk: Desk) -> None:
    desk.put(last_seq={"seq": 3})
    row = desk.client.streams.stop("a")
    assert (row.status, row.desired_state, row.done_reason) == (Status.DONE, Desired.STOPPED, "stopped")
    assert row.last_seq == {"seq": 3}


def test_a_blocked_stream_is_closed_and_unblocked_by_no_parent(desk: Desk) -> None:
    put(desk.store, "parent")
    desk.put(status=Status.BLOCKED, depends_on=("parent",), waiting_for=frozenset({"parent"}))
    assert desk.client.streams.stop("a").status is Status.DONE
    row = desk.client.streams.start("a")
    assert (row.status, row.waiting_for) == (Status.BLOCKED, frozenset({"parent"}))
    assert row.desired_state == Desired.STARTED


def test_stopping_twice_is_harmless(desk: Desk) -> None:
    desk.put()
    first = desk.client.streams.stop("a")
    assert desk.client.streams.stop("a") == first
    claimed(desk.store, "b", kind="stream")
    running = desk.client.streams.stop("b")
    assert desk.client.streams.stop("b") == running
    assert desk.engine.verbs_of("b") == ["claim", "request stop"]


@pytest.mark.parametrize("status", [Status.FAILED, Status.SUCCESS, Status.DONE])
def test_a_stream_that_has_ended_otherwise_cannot_be_stopped(desk: Desk, status: Status) -> None:
    desk.put(status=status, finished_at=1.0)
    with pytest.raises(NotAllowed, match=f"has ended as {status}"):
        desk.client.streams.stop("a")


def test_a_task_that_is_known_to_be_no_stream_is_not_stopped_nor_started(desk: Desk) -> None:
    claimed(desk.store, "a")
    with pytest.raises(NotAllowed, match="no stream: cancel it"):
        desk.client.streams.stop("a")
    with pytest.raises(NotAllowed, match="no stream: use retry"):
        desk.client.streams.start("a")
    with pytest.raises(TaskNotFound):
        desk.client.streams.stop("nobody")
    with pytest.raises(TaskNotFound):
        desk.client.streams.start("nobody")


def test_children_of_a_stream_that_is_stopped_hear_of_it(desk: Desk) -> None:
    parent = desk.put()
    child = desk.client.enqueue(a_job(), {}, depends_on=[parent])
    desk.client.streams.stop("a")
    assert desk.client.get(child).status is Status.FAILED


# Start, by status


@pytest.mark.parametrize("status", [Status.PENDING, Status.BLOCKED, Status.SUCCESS])
def test_a_start_leaves_alone_what_is_queued_or_has_ended_well(desk: Desk, status: Status) -> None:
    before = desk.put(status=status, waiting_for=frozenset({"p"}) if status is Status.BLOCKED else frozenset())
    assert desk.client.streams.start("a") == before


def test_a_running_stream_is_left_running(desk: Desk) -> None:
    claimed(desk.store, kind="stream")
    assert desk.client.streams.start("a").status is Status.RUNNING
    assert desk.engine.verbs_of("a") == ["claim"]


def test_a_start_takes_back_a_stop_that_nobody_has_heard(desk: Desk) -> None:
    """The agent gave the stream back between the request to stop and its next heartbeat."""
    lease = claimed(desk.store, kind="stream", lane=Lane("streams"))
    desk.client.streams.stop("a")
    assert desk.store.settle([writes.release(lease, now=desk.store.clock.now())])[0].accepted
    assert (desk.row.status, desk.row.desired_state) == (Status.PENDING, Desired.STOPPED)
    assert desk.client.streams.start("a").desired_state == Desired.STARTED
    assert desk.row.status is Status.PENDING


def test_a_retry_of_a_stopped_stream_wants_it_to_run(desk: Desk) -> None:
    desk.put()
    desk.client.streams.stop("a")
    assert desk.client.retry("a").desired_state == Desired.STARTED


# Lost races


def test_a_stop_that_meets_a_claim_asks_the_agent(desk: Desk) -> None:
    desk.put()

    def claim() -> None:
        row = desk.row
        seen = Candidate("a", row.status_value, row.created_at, row.job, "stream")
        assert desk.store.claim([Wanted(seen, 60.0)], owner="me")

    desk.before("stop waiting", claim)
    row = desk.client.streams.stop("a")
    assert (row.status, row.desired_state) == (Status.RUNNING, Desired.STOPPED)


def test_a_stop_that_meets_a_release_closes_it_at_once(desk: Desk) -> None:
    lease = claimed(desk.store, kind="stream", lane=Lane("streams"))
    desk.before("request stop", lambda: desk.store.settle([writes.release(lease, now=desk.store.clock.now())]))
    assert desk.client.streams.stop("a").status is Status.DONE


def test_a_stop_that_meets_a_failure_says_so(desk: Desk) -> None:
    lease = claimed(desk.store, kind="stream", lane=Lane("streams"))
    fail = writes.fail(lease, error="boom", now=desk.store.clock.now(), expire_at=9e9)
    desk.before("request stop", lambda: desk.store.settle([fail]))
    with pytest.raises(NotAllowed, match="has ended as FAILED"):
        desk.client.streams.stop("a")


def test_two_starts_at_once_are_one(desk: Desk) -> None:
    desk.put()
    desk.client.streams.stop("a")
    desk.before("revive", lambda: desk.client.streams.start("a"))
    assert desk.client.streams.start("a").status is Status.PENDING
    assert desk.engine.verbs_of("a").count("revive") == 2


def test_a_start_that_meets_the_end_of_the_stop_revives_it(desk: Desk) -> None:
    lease = claimed(desk.store, kind="stream", lane=Lane("streams"))
    desk.client.streams.stop("a")

    thread = threading.Timer(
        0.2, lambda: desk.store.settle([writes.stop(lease, now=desk.store.clock.now(), expire_at=9e9)])
    )
    thread.start()
    assert desk.client.streams.start("a", timeout_s=LONG_S).status is Status.PENDING
    thread.join()


def test_a_task_that_changes_all_the_time_is_given_up(desk: Desk) -> None:
    claimed(desk.store, kind="stream")
    other = TaskStore(desk.engine._engine)

    def hook(batch: Sequence[Write]) -> None:
        if any(write.verb == "request stop" for write in batch):
            assert other.take_over([(other.get(["a"])["a"], 60.0)], owner="thief").leases

    desk.engine.before.append(hook)
    with pytest.raises(NotAllowed, match="changes all the time"):
        desk.client.streams.stop("a")


# What happened


@pytest.mark.slow
def test_the_runs_of_a_stream_tell_its_moves(feed: FeedThread, agents: Fleet) -> None:
    log = Log()
    follow = follower(log)
    stage = agents.add(follow)
    task = agents.client.enqueue(follow, {"url": feed.url})
    feed.publish(3)
    log.until(3)
    stage.stop()
    second = agents.add(follow)
    log.wait(lambda: len(log.runs) == 2)
    second.stop()
    eventually(lambda: len(agents.client.streams.runs(task)) == 2)
    runs = agents.client.streams.runs(task)
    assert [run.fence for run in runs] == [1, 2]
    assert [run.agent for run in runs] == [stage.agent.name, second.agent.name]
    assert [move.state for move in runs[0].moves] == [
        "leased",
        "live",
        "closed",
        "release",
    ]
    assert runs[0].moves[-1].reason == "the agent is stopping"
    assert (runs[0].connects, runs[0].handled, runs[0].duplicates) == (1, 3, 0)
    assert [run.fence for run in agents.client.streams.runs(task, number=1)] == [2]
    with pytest.raises(TaskNotFound):
        agents.client.streams.runs("nobody")
