"""The gate: what an agent does with and without the grant of its region, and what late writes of a lost region do."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from tests.support.engine import LONG_S, serving
from tests.support.stands import eventually, patience
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import RegionPassive
from thunderagent.model.task import Candidate, Lease, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.regions.gate import Gate, GatedEngine
from thunderagent.regions.grant import Grant, no_grant
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import Beat, TaskStore, Wanted
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.telemetry.queue_gauges import QueueMeasure
from thunderagent.testing import FakeClock, FaultyEngine, Recorder, memory_store
from thunderagent.testing.faulty_engine import Fault

HERE = "eu-central-1"


def grant(clock: FakeClock, epoch: int = 1, *, for_s: float = 24.0, draining: bool = False) -> Grant:
    return Grant(epoch=epoch, valid_until=clock.monotonic() + for_s, is_draining=draining, reason="a test")


class Region:
    """One region's way to a table that two share: as replication would bring it, only at once."""

    def __init__(self, engine: Engine, clock: FakeClock, name: str = HERE) -> None:
        self.gate = Gate(name, monotonic=clock.monotonic)
        self.store = TaskStore(cast(Engine, GatedEngine(engine, self.gate)), monotonic=clock.monotonic)

    def claim(self, task: Task, owner: str) -> list[Lease]:
        seen = Candidate(task.task_id, task.status_value, task.created_at, task.job)
        return self.store.claim([Wanted(seen, 300.0)], owner=owner)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def engine(clock: FakeClock) -> SqliteEngine:
    return SqliteEngine(":memory:", clock=clock)


@pytest.fixture
def task(engine: SqliteEngine, clock: FakeClock) -> Task:
    now = clock.now()
    one = Task(task_id="t", status=Status.PENDING, created_at=now, submitted_at=now, job="j")
    TaskStore(engine).enqueue([one])
    return one


def test_without_a_grant_every_write_is_refused_with_the_reason_and_reads_go_on(
    engine: SqliteEngine, clock: FakeClock, task: Task
) -> None:
    region = Region(engine, clock)
    region.gate.grant = no_grant("the region eu-west-1 has the grant, epoch 7")
    with pytest.raises(RegionPassive, match=r"eu-central-1 holds no grant.*eu-west-1 has the grant.*region status"):
        region.claim(task, "a")
    with pytest.raises(RegionPassive):
        region.store.enqueue([task])
    with pytest.raises(RegionPassive):
        region.store.engine.delete([{"taskId": "t", "status": "PENDING", "fence": 0}])
    with pytest.raises(RegionPassive):
        region.store.engine.expire(clock.now())
    with pytest.raises(RegionPassive):
        region.store.engine.put_texts({"t#payload": "1"}, expire_at=clock.now())
    assert region.store.get(["t"])["t"].status is Status.PENDING
    assert region.store.get(["t"])["t"].fence == 0


def test_an_agent_says_that_it_is_there_also_without_a_grant(engine: SqliteEngine, clock: FakeClock) -> None:
    region = Region(engine, clock)
    region.store.announce("a", {"queues": {}}, lives_s=60.0)
    region.store.announce("a", {"queues": {}, "more": 1}, lives_s=60.0)
    assert [one.info["more"] for one in region.store.agents()] == [1]
    region.store.sign_off("a")
    assert region.store.agents() == []


def test_each_region_measures_its_queues_so_that_one_hears_of_a_fleet_that_stands_still_in_all(
    engine: SqliteEngine, clock: FakeClock, task: Task
) -> None:
    here, there, bus = Region(engine, clock), Region(engine, clock, "eu-west-1"), EventBus()
    told = Recorder(bus)
    clock.advance(600.0)
    there.gate.grant = grant(clock)
    for region, name in ((here, "a"), (here, "b"), (there, "c")):
        QueueMeasure(region.store, bus, owner=name, gate=region.gate).look()
    assert [one.oldest_ready_s for one in told.of(fleet_events.QueueMeasured)] == [600.0, 600.0], "once for each region"
    assert [one.ready for one in told.of(fleet_events.BacklogMeasured)] == [0, 1], "no machine is asked for in vain"
    with pytest.raises(RegionPassive):
        here.store.insert_row({"taskId": "turn:measure:eu-west-1"})


def test_a_claim_writes_the_epoch_and_what_the_holder_writes_needs_it(
    engine: SqliteEngine, clock: FakeClock, task: Task
) -> None:
    region = Region(engine, clock)
    region.gate.grant = grant(clock, 3)
    [lease] = region.claim(task, "a")
    assert lease.task.region_epoch == 3
    region.gate.grant = grant(clock, 4)  # it lost the grant, and has it again: its old leases are over
    [renewal] = region.store.renew([Beat(lease)])
    assert renewal.lost
    [settled] = region.store.settle([writes.succeed(lease, now=clock.now(), expire_at=1.0)])
    assert not settled.accepted
    assert region.store.get(["t"])["t"].status is Status.RUNNING


def test_a_grant_that_ends_between_two_writes_of_a_batch_stops_the_rest(engine: SqliteEngine, clock: FakeClock) -> None:
    region = Region(engine, clock)
    region.gate.grant = grant(clock)
    rows = [
        Task(task_id=f"t{n}", status=Status.PENDING, created_at=clock.now(), submitted_at=clock.now(), job="j")
        for n in range(50)
    ]
    TaskStore(engine).enqueue(rows)
    real = engine.apply

    def slow(batch: Any) -> Any:
        clock.advance(20.0)  # a table that answers late
        return real(batch)

    engine.apply = slow  # type: ignore[method-assign]
    wanted = [Wanted(Candidate(one.task_id, "PENDING", one.created_at, "j"), 300.0) for one in rows]
    exchanged = region.store.exchange((), wanted, owner="a")
    assert len(exchanged.leases) == 16 and len(exchanged.doubts) == 34
    assert isinstance(exchanged.error, RegionPassive)


def test_a_late_write_of_the_lost_region_does_not_touch_what_the_other_has_claimed(
    engine: SqliteEngine, clock: FakeClock, task: Task
) -> None:
    lost, other = Region(engine, clock), Region(engine, clock, "eu-west-1")
    lost.gate.grant = grant(clock, 1, for_s=1e9)  # frozen between its look at the grant and the write
    [old] = lost.claim(task, "a")
    other.gate.grant = grant(clock, 2)
    seen = other.store.get(["t"])["t"]
    [new] = other.store.take_over([(seen, 300.0)], owner="b").leases
    before = engine.get(["t"])
    for write in (
        writes.succeed(old, now=clock.now(), expire_at=1.0),
        writes.retry(old, due=clock.now(), error="x", now=clock.now()),
        writes.release(old, now=clock.now()),
        writes.fail(old, error="x", now=clock.now(), expire_at=1.0),
    ):
        assert not lost.store.settle([write])[0].accepted
    assert lost.store.renew([Beat(old)])[0].lost
    assert lost.store.take_over([(other.store.get(["t"])["t"], 300.0)], owner="c").leases == []
    assert lost.store.write_tasks([writes.request_cancel(other.store.get(["t"])["t"], now=clock.now())]) == [None]
    assert engine.get(["t"]) == before
    assert other.store.settle([writes.succeed(new, now=clock.now(), expire_at=1.0)])[0].accepted


@pytest.mark.parametrize("how", ["renew", "settle"])
def test_the_holder_writes_over_a_late_image_that_replication_brought_afterwards(
    engine: SqliteEngine, clock: FakeClock, task: Task, how: str
) -> None:
    lost, other = Region(engine, clock), Region(engine, clock, "eu-west-1")
    lost.gate.grant = grant(clock, 1, for_s=1e9)
    [old] = lost.claim(task, "a")
    image = engine.get(["t"])["t"]
    other.gate.grant = grant(clock, 2)
    [new] = other.store.take_over([(other.store.get(["t"])["t"], 300.0)], owner="b").leases
    # The replica of the lost region took its write; the last writer wins, so the whole row is theirs now.
    engine.delete(list(engine.get(["t"]).values()))
    late = {name: value for name, value in image.items() if name not in ("lockTime", "leaseOwner", "leaseSec", "hb")}
    engine.put([late | {"status": "SUCCESS", "finishedAt": clock.now(), "result": '"theirs"'}])
    assert old.fence != new.fence
    if how == "renew":
        [renewal] = other.store.renew([Beat(new)])
        assert renewal.lease is not None
        row = other.store.get(["t"])["t"]
        assert (row.status, row.lease_owner, row.fence, row.region_epoch) == (Status.RUNNING, "b", new.fence, 2)
        assert row.finished_at is None and row.result is None
        assert other.store.renew([Beat(renewal.lease)])[0].lease is not None
    [settled] = other.store.settle([writes.succeed(new, now=clock.now(), expire_at=1.0, result='"ours"')])
    assert settled.accepted
    row = other.store.get(["t"])["t"]
    assert (row.status, row.result, row.fence, row.region_epoch) == (Status.SUCCESS, "ours", new.fence, 2)
    assert row.lease_owner is None and row.lock_time is None


OPEN_S = 1e6
REGIONAL: dict[str, Any] = {"region": HERE, "region_arbiter": "sqlite:///arbiter.db"}
"""Settings of an agent whose gate nobody but the test opens."""


def opened(epoch: int = 1, *, draining: bool = False, for_s: float = OPEN_S) -> Grant:
    """A grant on the clock of this machine."""
    return Grant(epoch=epoch, valid_until=time.monotonic() + for_s, is_draining=draining, reason="to eu-west-1")


@job("quick")
def quick(ctx: Context, payload: None) -> int:
    return ctx.fence


def test_an_agent_claims_nothing_before_its_region_has_the_grant_and_at_once_when_it_has() -> None:
    with serving(quick, **REGIONAL) as stage:
        task = stage.client.enqueue(quick, None)
        [held] = stage.record.wait(events.Paused)
        assert "was not asked yet" in (held.reason or "")
        assert stage.client.get(task.id).status is Status.PENDING
        stage.agent.gate.grant = opened(4)
        stage.agent.wake()
        ended = stage.end_of(task)
        assert (ended.status, ended.region_epoch) == (Status.SUCCESS, 4)
        assert stage.record.of(fleet_events.GrantBegan) == [fleet_events.GrantBegan(region=HERE, epoch=4)]


def test_handlers_stop_when_the_grant_ends_and_nothing_is_written_until_there_is_one_again() -> None:
    started, stopped = threading.Event(), threading.Event()

    @job("long")
    def long(ctx: Context, payload: None) -> None:
        started.set()
        try:
            while True:
                ctx.wait(0.01)
                ctx.check()
        finally:
            stopped.set()

    with serving(long, quick, **REGIONAL) as stage:
        stage.agent.gate.grant = opened()
        task = stage.client.enqueue(long, None)
        assert started.wait(LONG_S)
        row = stage.client.get(task.id)
        stage.agent.gate.grant = no_grant("the region eu-west-1 has the grant, epoch 2", 2)
        assert stopped.wait(LONG_S)
        [lost] = stage.record.wait(events.LeaseLost)
        assert "eu-west-1 has the grant" in lost.reason
        stage.agent.wake()
        [ended] = stage.record.wait(fleet_events.GrantEnded)
        assert ended.epoch == 1
        assert not stage.record.of(events.StoreFailed)
        after = stage.client.get(task.id)
        assert (after.status, after.fence, after.lease_owner) == (Status.RUNNING, row.fence, row.lease_owner)
        other = stage.client.enqueue(quick, None)
        stage.agent.gate.grant = opened(3)
        stage.agent.wake()
        assert stage.end_of(other).region_epoch == 3


@pytest.mark.slow
def test_an_agent_without_a_grant_is_seen_and_costs_no_processor() -> None:
    with serving(quick, **REGIONAL) as stage:
        stage.record.wait(events.Paused)
        [one] = stage.store.agents()
        assert one.info["health"]["paused"] is True
        assert any("the arbiter was not asked yet" in note for note in stage.agent.vitals.health().notes)
        turns = 0
        gather = stage.agent._in_flight.gather

        def counted(pause: float) -> None:
            nonlocal turns
            turns += 1
            gather(pause)

        stage.agent._in_flight.gather = counted  # type: ignore[method-assign]
        begun = time.monotonic()
        stage.record.wait(fleet_events.GrantBegan, 0)
        eventually(lambda: time.monotonic() - begun > 1.0)
        assert 0 < turns < 100 * (time.monotonic() - begun), "its pollers come by every 38 to 50 ms"


def test_a_grant_that_is_to_go_gives_streams_back_at_once_and_batch_tasks_in_time() -> None:
    followed, worked, go = threading.Event(), threading.Event(), threading.Event()

    @stream("follow", lease_s=3, heartbeat_s=0.5)
    async def follow(ctx: StreamContext, payload: None) -> None:
        followed.set()
        await asyncio.Event().wait()

    @job("work")
    def work(ctx: Context, payload: None) -> str:
        worked.set()
        assert go.wait(LONG_S)
        return "done"

    with serving(follow, work, **REGIONAL) as stage:
        stage.agent.gate.grant = opened()
        batch, held = stage.client.enqueue(work, None), stage.client.enqueue(follow, None)
        assert followed.wait(LONG_S) and worked.wait(LONG_S)
        stage.agent.gate.grant = opened(draining=True)
        stage.agent.wake()
        [released] = stage.record.wait(events.TaskReleased)
        assert released.task_id == held.id
        assert stage.client.get(held.id).status is Status.PENDING
        assert stage.client.get(batch.id).status is Status.RUNNING
        go.set()
        assert stage.end_of(batch).result == "done"
        [drains] = stage.record.of(fleet_events.GrantDrains)
        assert drains.reason == "to eu-west-1"
        assert stage.client.get(held.id).status is Status.PENDING  # it was not claimed again


@pytest.mark.slow
def test_a_batch_task_that_does_not_end_is_given_back_when_the_time_to_drain_is_over() -> None:
    started = threading.Event()

    @job("long")
    def long(ctx: Context, payload: None) -> None:
        started.set()
        while True:
            ctx.wait(0.01)
            ctx.check()

    with serving(long, drain_s=0.3, **REGIONAL) as stage:
        stage.agent.gate.grant = opened()
        task = stage.client.enqueue(long, None)
        assert started.wait(LONG_S)
        stage.agent.gate.grant = opened(draining=True)
        stage.agent.wake()
        stage.record.wait(events.TaskReleased)
        row = stage.client.get(task.id)
        assert (row.status, row.retry_count, row.crash_count) == (Status.PENDING, 0, 0)


def test_a_task_of_an_earlier_epoch_is_taken_at_once_and_loses_no_life() -> None:
    store = memory_store()
    with serving(quick, store=store, max_crashes=0, **REGIONAL) as stage:
        task = stage.client.enqueue(quick, None)
        gate = Gate("eu-west-1")
        gate.grant = opened(1)
        lost = TaskStore(cast(Engine, GatedEngine(store.engine, gate)))
        [lease] = lost.claim([Wanted(Candidate(task.id, "PENDING", task.created_at, "quick"), 3600.0)], owner="lost:1")
        stage.agent.gate.grant = opened(2)
        stage.agent.wake()
        ended = stage.end_of(task)
        assert ended.status is Status.SUCCESS
        assert (ended.crash_count, ended.region_epoch, ended.fence) == (0, 2, lease.fence + 1)
        [taken] = stage.record.of(events.TaskTakenOver)
        assert taken.lost_agent == "lost:1"


def test_a_drain_without_a_grant_ends_at_once() -> None:
    with serving(quick, **REGIONAL) as stage:
        stage.record.wait(events.Paused)
        begun = time.monotonic()
        stage.stop()
        assert time.monotonic() - begun < 5.0 * patience()
        assert stage.stuck == 0
        assert stage.store.agents() == []


@pytest.mark.slow
def test_a_claim_in_doubt_when_the_grant_ended_is_not_begun_in_a_later_epoch() -> None:
    ran = list[int]()

    @job("once")
    def once(ctx: Context, payload: None) -> None:
        ran.append(ctx.lease.fence)

    faulty = FaultyEngine(memory_store().engine)
    with serving(once, store=TaskStore(faulty), **REGIONAL) as stage:
        stage.agent.gate.grant = opened(1)
        faulty.fail("claim", Fault.LOST_REPLY)
        faulty.fail("get", *[Fault.LOST_REQUEST] * 3)  # nor can it look whether the claim happened
        task = stage.client.enqueue(once, None)
        eventually(lambda: stage.agent._in_flight.doubts.ids)
        stage.agent.gate.grant = no_grant("cut off", 1)
        stage.agent.wake()
        eventually(lambda: not stage.agent._in_flight.doubts.ids)
        faulty.calm()
        stage.agent.gate.grant = opened(3)
        stage.agent.wake()
        ended = stage.end_of(task)
        assert (ended.status, ended.region_epoch) == (Status.SUCCESS, 3)
    assert ran == [2], "taken over under the new epoch, and run once"


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 3])
def test_what_was_done_as_the_grant_ended_waits_in_silence_for_the_next(later: int) -> None:
    started, go, ends = threading.Event(), threading.Event(), threading.Event()

    @job("work")
    def work(ctx: Context, payload: None) -> int:
        started.set()
        assert go.wait(LONG_S)  # it does not look whether it is to stop
        return ctx.lease.fence

    with serving(work, **REGIONAL) as stage:
        in_flight, gather = stage.agent._in_flight, stage.agent._in_flight.gather

        def gathers(pause: float) -> None:
            gather(pause)
            if in_flight._backlog and not ends.is_set():  # between the end of a handler and the write of what it did
                stage.agent.gate.grant = no_grant("cut off", 1)
                ends.set()

        in_flight.gather = gathers  # type: ignore[method-assign]
        stage.agent.wake()
        stage.agent.gate.grant = opened(1)
        task = stage.client.enqueue(work, None)
        assert started.wait(LONG_S)
        go.set()
        assert ends.wait(LONG_S)
        stage.record.wait(fleet_events.GrantEnded)
        beats = stage.agent._heartbeat.last_round
        eventually(lambda: stage.agent._heartbeat.last_round > beats + 1.0)  # its lease is due five times meanwhile
        assert not stage.record.of(events.StoreFailed)
        assert stage.agent.vitals.entry()["store_answers"] is True
        assert stage.client.get(task.id).status is Status.RUNNING
        if later > 1:
            stage.agent.gate.grant = no_grant("the region eu-west-1 has the grant", 2)
            stage.agent.wake()
            stage.record.wait(events.SettleRefused)
            eventually(lambda: not stage.agent.running)
        stage.agent.gate.grant = opened(later)
        stage.agent.wake()
        if later == 1:
            assert stage.end_of(task).result == 1, "it was not run again"
        else:
            assert stage.end_of(task).result == 2


@pytest.mark.slow
def test_a_drain_without_a_grant_does_not_wait_for_what_cannot_be_written() -> None:
    started, go = threading.Event(), threading.Event()

    @job("work")
    def work(ctx: Context, payload: None) -> int:
        started.set()
        assert go.wait(LONG_S)
        return 1

    with serving(work, **REGIONAL) as stage:
        stage.agent.gate.grant = opened()
        stage.client.enqueue(work, None)
        assert started.wait(LONG_S)
        stage.agent.gate.grant = no_grant("cut off", 1)
        stage.agent.wake()
        stage.record.wait(fleet_events.GrantEnded)
        go.set()
        eventually(lambda: stage.agent._in_flight._backlog)
        begun = time.monotonic()
        stage.stop()
        assert time.monotonic() - begun < 5.0 * patience(), "drain_s is 10"
        assert not stage.record.of(events.StoreFailed)


def test_tasks_that_a_pause_of_the_grant_stopped_are_gone_on_with_at_once_when_it_is_back() -> None:
    started: list[int] = []

    @job("long")
    def long(ctx: Context, payload: None) -> None:
        started.append(ctx.lease.fence)
        while len(started) < 2:
            ctx.wait(0.01)
            ctx.check()

    with serving(long, lease_s=600.0, max_crashes=0, **REGIONAL) as stage:
        stage.agent.gate.grant = opened(3)
        task = stage.client.enqueue(long, None)
        eventually(lambda: started)
        stage.agent.gate.grant = no_grant("the canary failed", 3)
        stage.record.wait(events.LeaseLost)
        eventually(lambda: not stage.agent.running)
        stage.agent.gate.grant = opened(3)
        stage.agent.wake()
        ended = stage.end_of(task)
    assert (ended.status, ended.crash_count) == (Status.SUCCESS, 0)
    assert started == [1, 2]
