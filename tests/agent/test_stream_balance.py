"""A fleet shares its streams evenly, and finds those of a lost agent in time, without anybody who decides."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, claimed, put
from tests.support.stands import eventually
from tests.support.streams import FeedThread, Log, Watched, fleet, follower
from thunderagent.agent.poller import PAGES_A_LOOK, SlotPool
from thunderagent.agent.stream_balance import ABOVE_MEAN, AT_ONCE, OTHERS_S, PAGE, Fleet, StreamPoller
from thunderagent.agent.streams import AWAY_BYTES
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model import events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.pacing import PollPace
from thunderagent.model.task import Lane, Status, Task
from thunderagent.ops.overview import overview
from thunderagent.queue.dependents import Dependents
from thunderagent.stores.tasks import AgentInfo, Beat, TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.streams.journal import Link
from thunderagent.testing import FakeClock, memory_store
from thunderagent.testing.chaos import Refuse

IDS = [f"stream-{number}" for number in range(1000)]


@stream("test.quiet", lease_s=1.5, heartbeat_s=0.1)
async def quiet(ctx: StreamContext, payload: dict[str, Any]) -> None:
    """Holds no connection, and ends when it is told to."""
    await asyncio.Event().wait()


def told(name: str, held: int = 0, most: int = 700, *, seen_at: float = 0.0, **info: Any) -> AgentInfo:
    values = {"streams": {"held": held, "max": most}, "health": {"draining": False}, "jobs": ["j"], **info}
    return AgentInfo(name, 0.0, seen_at, values)


def a_fleet(name: str, agents: Sequence[AgentInfo], **options: Any) -> Fleet:
    """What one of these agents knows."""
    me = next(agent for agent in agents if agent.name == name)
    made = Fleet(memory_store(), owner=name, max_streams=me.info["streams"]["max"], **options)
    made.held = me.info["streams"]["held"]
    made.learn(agents)
    return made


def takers(agents: Sequence[AgentInfo]) -> dict[str, list[str]]:
    """Who takes each stream, as each of the agents sees it."""
    fleets = {agent.name: a_fleet(agent.name, agents) for agent in agents}
    return {one: [name for name, made in fleets.items() if made.is_ours(one)] for one in IDS}


# Whose a stream is


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_agents_that_know_the_same_agree_whose_each_stream_is_and_share_evenly(number: int) -> None:
    found = takers([told(f"agent-{one}") for one in range(number)])
    assert {len(names) for names in found.values()} == {1}
    shares = Counter(name for [name] in found.values())
    assert len(shares) == number
    assert max(shares.values()) < 1.4 * len(IDS) / number


@pytest.mark.slow
@pytest.mark.parametrize(
    "out",
    [
        told("out", health={"draining": True}),
        told("out", 700),
        told("out", most=0),
        told("out", 300),
    ],
    ids=["draining", "full", "takes none", "has many more"],
)
def test_an_agent_that_can_or_should_take_none_is_left_out(out: AgentInfo) -> None:
    found = takers([told("a", 10), told("b", 12), out])
    assert {name for names in found.values() for name in names} <= {"a", "b", "out"}
    shares = Counter(name for names in found.values() for name in names if name != "out")
    assert min(shares["a"], shares["b"]) > 400
    assert all(len([name for name in names if name != "out"]) == 1 for names in found.values())


@pytest.mark.parametrize(
    "row",
    [
        {"streams": None},
        {"streams": {}},
        {"streams": {"held": "many", "max": "x"}},
        {"streams": {"held": 1, "max": 5}, "health": "good"},
        {"streams": {"held": 1, "max": 5}, "health": None, "jobs": None},
    ],
)
def test_the_row_of_another_version_or_made_by_hand_stops_no_agent(row: dict[str, Any]) -> None:
    made = a_fleet("a", [told("a"), told("odd", **row)], jobs={"j"})
    assert made.size == 1
    assert made.is_ours("s")


def test_what_an_agent_has_got_since_the_rows_were_written_does_not_change_whose_a_stream_is() -> None:
    made = a_fleet("a", [told("a"), told("b")])
    before = [made.is_ours(one) for one in IDS]
    made.held = 300  # the other has got as many, which its row does not tell yet
    assert [made.is_ours(one) for one in IDS] == before
    assert any(before)


def test_agents_of_another_region_are_none_of_our_fleet_as_one_region_works_at_a_time() -> None:
    here, there = ({"name": name, "state": "granted", "epoch": 1} for name in ("eu-west-1", "eu-central-1"))
    made = a_fleet("a", [told("a", region=here), told("lost", 40, region=there), told("odd", region="?")])
    assert made.size == 1
    assert all(made.is_ours(one) for one in IDS)


def test_agents_without_one_of_our_streams_are_none_of_our_fleet() -> None:
    made = a_fleet("a", [told("a", 100), told("b", jobs=["other"])], jobs={"j"})
    assert (made.size, made.surplus()) == (1, 0)
    assert a_fleet("a", [told("a"), told("b", jobs=["other", "j"])], jobs={"j"}).size == 2


def test_when_no_agent_should_any_may() -> None:
    full = [told("a", 5, 5), told("b", 5, 5)]
    assert all(names == [] for names in takers(full).values())
    made = a_fleet("a", full)
    made.held = 4  # one has ended since its row was written
    assert all(made.is_ours(one) for one in IDS)


def test_a_lost_agent_is_left_out_until_its_row_tells_of_it_again() -> None:
    agents = [told("a"), told("b", seen_at=100.0)]
    made = a_fleet("a", agents)
    assert made.size == 2
    made.lost("b", 105.0)
    assert made.size == 1
    made.learn(agents)
    assert made.size == 1, "its row is as old as before"
    made.learn([told("a"), told("b", seen_at=106.0)])
    assert made.size == 2, "it has only lost one lease"
    made.lost("b", 105.0)
    assert made.size == 2, "the same lease again"
    made.lost("gone", 1.0)
    made.learn([told("a")])
    assert made._lost == {}


def test_an_agent_that_takes_back_what_it_let_go_itself_is_not_lost() -> None:
    agents = [told("a", held=3), told("b", held=3)]
    made = a_fleet("a", agents)
    made.held = 0
    made.lost("a", 1e9)
    made.learn(agents)
    assert (made.size, made._announced) == (2, 3), "what its row tells counts, as the others see it"


def test_the_others_are_asked_at_most_once_a_second() -> None:
    clock = FakeClock()
    engine = Watched(memory_store(clock).engine)
    made = Fleet(TaskStore(engine), owner="a", max_streams=5, monotonic=clock.monotonic)
    for _ in range(10):
        made.refresh()
    assert len(engine.pages) == 1
    clock.advance(1.0)
    made.refresh()
    assert len(engine.pages) == 2
    engine.outage()
    clock.advance(1.0)
    with pytest.raises(StoreUnavailable):
        made.refresh()


# The surplus


@pytest.mark.parametrize(
    ("held", "others", "surplus"),
    [
        (100, [], 0),
        (4, [0], 2),
        (3, [0], 0),
        (100, [0], 50),
        (100, [100], 0),
        (110, [100], 0),
        (150, [100], 0),
        (152, [100], 26),
        (100, [100, 100, 0], 25),
        (10, [100], 0),
        (121, [100, 100, 100], 0),
    ],
)
def test_what_is_far_above_the_mean_is_surplus(held: int, others: list[int], surplus: int) -> None:
    made = a_fleet("me", [told("me", held), *(told(f"o{number}", one) for number, one in enumerate(others))])
    assert made.surplus() == surplus
    assert not surplus or held > made.mean * ABOVE_MEAN


# The poller


class At:
    """A poller for streams of which each look is called by the test, beside another agent."""

    def __init__(self, slots: int = 700) -> None:
        self.clock = FakeClock()
        self.engine = Watched(memory_store(self.clock).engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.fleet = Fleet(self.store, owner="me", max_streams=slots, monotonic=self.clock.monotonic)
        self.pool = SlotPool(slots)
        self.poller = StreamPoller(
            "default",
            self.pool,
            self.store,
            jobs={"test.stream": 20.0},
            known={"test.job"},
            page=50,
            pace=PollPace(1.0, 1.0, 1.0),
            bus=EventBus(),
            rng=random.Random(1),
            fleet=self.fleet,
        )

    def meet(self, name: str = "other") -> None:
        info = {"queues": {"default": 1}, "jobs": ["test.stream"], "streams": {"held": 0, "max": 700}}
        self.store.announce(name, info, lives_s=6000)

    def look(self) -> list[str]:
        """A look of which every claim is lost."""
        wanted = self.poller.look()
        self.poller.took([], [], wanted)
        return [one.candidate.task_id for one in wanted]


def test_a_stream_is_left_to_the_agent_whose_it_is_and_after_two_seconds_to_no_agent() -> None:
    at = At()
    at.meet()
    for one in IDS[:40]:
        put(at.store, one, job="test.stream", kind="stream")
    first = at.look()
    assert 10 < len(first) < 30
    at.clock.advance(OTHERS_S - 0.1)
    assert at.look() == first
    at.clock.advance(0.2)
    assert sorted(at.look()) == sorted(IDS[:40])


def test_what_was_handed_off_for_the_balance_is_taken_back_only_when_no_agent_has_wanted_it() -> None:
    at = At()
    at.meet()
    put(at.store, "s", job="test.stream", kind="stream")
    at.fleet.gave("s")
    for _ in range(9):
        assert at.look() == []
        at.clock.advance(1.0)
    at.clock.advance(1.1)
    assert at.look() == ["s"]
    at.fleet.gave("t")
    assert set(at.fleet._given) == {"t"}


def test_two_agents_take_different_streams() -> None:
    at = At()
    rows = [told("me"), told("other")]
    mine, theirs = ({one for one in IDS if a_fleet(name, rows).is_ours(one)} for name in ("me", "other"))
    assert mine | theirs == set(IDS)
    assert not mine & theirs
    assert at.look() == []


def test_a_look_takes_the_oldest_fifty_and_comes_again_at_once() -> None:
    at = At()
    for number, one in enumerate(IDS[:120]):
        put(at.store, one, job="test.stream", created_at=at.clock.now() - 500 + number)
    wanted = at.poller.look()
    assert [one.candidate.task_id for one in wanted] == IDS[:AT_ONCE]
    assert {one.candidate.kind for one in wanted} == {"stream"}
    at.poller.took(IDS[:AT_ONCE], [], wanted)
    assert at.poller.due == at.clock.monotonic()


def test_an_agent_that_is_nearly_full_takes_what_it_has_room_for() -> None:
    at = At(slots=3)
    for one in IDS[:10]:
        put(at.store, one, job="test.stream", kind="stream")
    assert len(at.look()) == 3
    for _ in range(3):
        at.poller.began()
    assert at.look() == []
    at.poller.freed()
    assert at.poller.due == at.clock.monotonic()


def test_a_long_queue_of_batch_tasks_is_read_past_a_thousand_a_second() -> None:
    at = At()
    now = at.clock.now()
    rows = [
        Task(task_id=f"b{number:05}", status=Status.PENDING, created_at=now - 5, submitted_at=now, job="test.job")
        for number in range(2500)
    ]
    at.store.enqueue(rows)
    put(at.store, "the-stream", job="test.stream")
    looks = []
    for _ in range(3):
        looks.append(at.look())
        assert at.poller.due <= at.clock.monotonic() + 1.0
        at.clock.advance(1.0)
    assert looks == [[], [], ["the-stream"]]
    assert len(at.engine.pages) <= 3 * PAGES_A_LOOK + 3
    assert PAGE * PAGES_A_LOOK == 1000
    assert at.poller.due > at.clock.monotonic() - 1.0, "it does not read on as fast as it can"


def test_behind_pages_of_nothing_it_waits_its_pace() -> None:
    at = At()
    now = at.clock.now()
    rows = [
        Task(task_id=f"b{number:05}", status=Status.PENDING, created_at=now - 5, submitted_at=now, job="test.job")
        for number in range(1200)
    ]
    at.store.enqueue(rows)
    assert at.look() == []
    assert 0.7 < at.poller.due - at.clock.monotonic() <= 1.0


# Takeovers in time


class Judge:
    """A rescuer on a clock that is set by the test."""

    def __init__(self, *, epoch: int = 0) -> None:
        self.clock = FakeClock()
        self.engine = Watched(memory_store(self.clock).engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        keep = {"keep_success_s": 60.0, "keep_failed_s": 60.0}
        self.rescuer = Rescuer(
            self.store,
            self.bus,
            Dependents(self.store, self.bus, **keep),
            LostLeases(self.store, owner="me", guard_s=2.0, epoch=lambda: epoch),
            owner="me",
            max_crashes=3,
            sweep_s=15.0,
        )


def test_a_lost_stream_is_found_within_a_second_of_the_end_of_its_lease_without_reading_the_index() -> None:
    at = Judge()
    lease = claimed(at.store, lease_s=20.0, kind="stream", owner="other")
    assert at.rescuer.lost.find([Lane()]) == []
    pages = len(at.engine.pages)
    for _ in range(10):
        at.clock.advance(1.0)
        assert at.rescuer.lost.recheck() == []
    [renewal] = at.store.renew([Beat(lease)])
    assert renewal.lease is not None
    found = None
    for second in range(1, 30):
        at.clock.advance(1.0)
        if at.rescuer.lost.recheck():
            found = second
            break
    assert found == 23, "20 s of the lease, 2 s of the guard, and the next look"
    assert len(at.engine.pages) == pages


def test_a_row_is_read_again_only_when_its_lease_should_be_over() -> None:
    at = Judge()
    claimed(at.store, lease_s=20.0, kind="stream", owner="other")
    at.rescuer.lost.find([Lane()])
    gets = len(at.engine.gets)
    for _ in range(21):
        at.clock.advance(1.0)
        at.rescuer.lost.recheck()
    assert len(at.engine.gets) == gets
    at.clock.advance(1.5)
    assert len(at.rescuer.lost.recheck()) == 1
    assert len(at.engine.gets) == gets + 1


def test_a_stream_of_a_lost_region_that_is_left_to_another_agent_is_found_again_without_reading_the_index() -> None:
    at = Judge(epoch=2)
    lease = claimed(at.store, lease_s=20.0, kind="stream", owner="other")
    at.store.engine.apply(
        [Write(verb="mark", task_id=lease.task_id, set={"regionEpoch": 1}, require=(Present("taskId"),))]
    )
    assert len(at.rescuer.lost.find([Lane()])) == 1
    pages = len(at.engine.pages)
    for _ in range(3):
        assert len(at.rescuer.lost.recheck()) == 1, "its time to be left to another counts from one look to the next"
    assert len(at.engine.pages) == pages


def test_a_late_write_of_a_lost_region_over_a_live_holder_is_left_to_it_for_the_time_of_a_lease() -> None:
    at = Judge(epoch=2)
    lease = claimed(at.store, lease_s=20.0, kind="stream", owner="other")

    def mark(**changes: Any) -> None:
        write = Write(verb="mark", task_id=lease.task_id, set=changes, require=(Present("taskId"),))
        [answer] = at.store.engine.apply([write])
        assert answer.won

    mark(regionEpoch=2, fence=5)
    assert at.rescuer.lost.find([Lane()]) == []
    mark(regionEpoch=1, fence=4)
    at.clock.advance(21.9)  # it should be over by the lease that we saw, and is not: the row is another
    assert at.rescuer.lost.recheck() == []
    mark(regionEpoch=2, fence=5, hb=7, lockTime=at.clock.now() + 20.0)  # the holder's heartbeat
    assert at.rescuer.lost.recheck() == []
    mark(regionEpoch=1, fence=4)
    at.clock.advance(22.1)
    assert at.rescuer.lost.recheck() == []
    at.clock.advance(22.1)
    assert len(at.rescuer.lost.recheck()) == 1, "nobody has written it again"


def test_what_has_ended_or_gone_is_not_rechecked_for_ever() -> None:
    at = Judge()
    claimed(at.store, lease_s=20.0, owner="other")
    at.rescuer.lost.find([Lane()])
    at.engine.delete(list(at.engine.get(["a"]).values()))
    at.clock.advance(30.0)
    assert at.rescuer.lost.recheck() == []
    assert at.rescuer.lost._sightings == {}


@pytest.mark.slow
def test_a_dead_agent_is_shared_out_among_those_that_are_left(tmp_path: Path) -> None:
    with fleet(tmp_path) as agents:
        dead = agents.add(quiet)
        tasks = [agents.client.enqueue(quiet, {}, task_id=one) for one in IDS[:40]]
        dead.record.wait(events.TaskStarted, 40)
        left = [agents.add(quiet) for _ in range(2)]
        for stage in left:
            stage.record.wait(events.AgentStarted)
        eventually(lambda: all(stage.agent._parts.fleet.size == 3 for stage in left))
        dead.store.engine.outage()  # type: ignore[attr-defined] # a Watched
        for stage in left:
            stage.record.wait(events.TaskTakenOver)
        eventually(lambda: sum(len(stage.record.of(events.TaskTakenOver)) for stage in left) == 40)
        assert min(len(stage.record.of(events.TaskTakenOver)) for stage in left) >= 10
        assert {agents.row(task).fence for task in tasks} == {2}


@pytest.mark.slow
def test_what_is_the_share_of_another_is_left_to_it_for_two_seconds_and_then_taken(tmp_path: Path) -> None:
    with fleet(tmp_path) as agents:
        dead = agents.add(quiet)
        for one in IDS[:40]:
            agents.client.enqueue(quiet, {}, task_id=one)
        dead.record.wait(events.TaskStarted, 40)
        info = {"queues": {"streams": 1}, "jobs": ["test.quiet"], "streams": {"held": 0, "max": 700}}
        agents.store.announce("does-nothing", info, lives_s=6000)
        stage = agents.add(quiet, start=False)
        times: list[float] = []

        def listen(event: Event) -> None:
            if isinstance(event, events.TaskTakenOver):
                times.append(agents.store.monotonic())

        stage.bus.subscribe(listen)
        stage.start()
        eventually(lambda: stage.agent._parts.fleet.size == 3)
        dead.store.engine.outage()  # type: ignore[attr-defined] # a Watched
        stage.record.wait(events.TaskTakenOver, 40)
        at_once = sum(moment < times[0] + OTHERS_S / 2 for moment in times)
        assert 10 <= at_once <= 30


# Rebalancing


@pytest.mark.slow
def test_a_new_agent_gets_some_of_the_streams_and_they_stay_there(tmp_path: Path) -> None:
    log = Log()
    with FeedThread() as feed, fleet(tmp_path) as agents:
        follow = follower(log)
        options: dict[str, Any] = {
            "rebalance_s": 4.5,
            "rebalance_streams": 6,
            "sweep_s": 0.2,
        }  # rows are written each second
        old = agents.add(follow, **options)
        tasks = [agents.client.enqueue(follow, {"url": feed.url}, task_id=one) for one in IDS[:12]]
        feed.publish(1)
        log.wait(lambda: len(log.handled) == 12)
        new = agents.add(follow, **options)
        new.record.wait(events.TaskStarted, 6)
        eventually(lambda: (old.agent.running, new.agent.running) == (6, 6))
        assert len(old.record.of(events.StreamHandedOff)) == 6
        ticks = [len(stage.record.of(events.Polled)) for stage in (old, new)]
        for stage, ticked in zip((old, new), ticks, strict=True):
            stage.record.wait(events.Polled, ticked + 32)  # some five seconds, so that there was a next time
        assert len(old.record.of(events.StreamHandedOff)) == 6
        assert new.record.of(events.StreamHandedOff) == [], "no ping-pong"
        assert {agents.row(task).retry_count for task in tasks} == {0}
        feed.publish(1)
        log.wait(lambda: len({one.task for one in log.handled if one.seq == 2}) == 12)


@pytest.mark.slow
def test_at_most_so_many_leave_at_a_time_and_none_that_is_not_connected(tmp_path: Path) -> None:
    log = Log()
    with FeedThread() as feed, fleet(tmp_path) as agents:
        follow = follower(log)
        stage = agents.add(follow, rebalance_streams=2, rebalance_s=3600)
        for one in IDS[:8]:
            agents.client.enqueue(follow, {"url": feed.url}, task_id=one)
        feed.publish(1)
        log.wait(lambda: len(log.handled) == 8)
        streams = stage.agent._housekeeping._streams
        asked: list[str] = []
        stage.agent._in_flight.handoffs.leave = (  # type: ignore[method-assign]
            lambda leaving, why, **_: asked.extend(one.lease.task_id for one in leaving)
        )
        streams.rebalance()
        assert asked == [], "alone"
        stage.agent._parts.fleet.learn([told("new", jobs=[follow.name])])
        streams.rebalance()
        assert len(asked) == 2
        asked.clear()
        for context in log.contexts:
            context._on_hold = True
        streams.rebalance()
        assert asked == []
        for context in log.contexts:
            context._on_hold = False
        feed.do(feed.server.stop_listening)
        from thunderagent.testing.chaos import Cut

        feed.do(lambda: feed.server.drop_all(Cut()))
        eventually(lambda: streams.connections == 0)
        streams.rebalance()
        assert asked == []


@pytest.mark.slow
def test_the_row_of_an_agent_tells_of_its_streams_and_a_batch_agent_takes_none(tmp_path: Path) -> None:
    @job("test.batch")
    def batch(ctx: Context, payload: int) -> int:
        return payload

    log = Log()
    with FeedThread() as feed, fleet(tmp_path) as agents:
        follow = follower(log)
        stage = agents.add(follow, max_streams=7)
        agents.add(batch).record.wait(events.AgentStarted)
        agents.client.enqueue(follow, {"url": feed.url})
        feed.publish(1)
        log.until(1)
        agents.introduce()
        rows = {one.name: one.info["streams"] for one in agents.store.agents()}
        assert rows[stage.agent.name] == {"held": 1, "max": 7, "connections": 1}
        assert rows[agents.stages[1].agent.name] == {"held": 0, "max": 0, "connections": 0}
        assert stage.agent._parts.fleet.size == 1
        stage.agent._housekeeping._streams.gauge()
        begun, gauge = stage.record.of(events.ActiveConnections)
        assert (begun.connections, begun.streams) == (0, 0)
        assert (gauge.connections, gauge.streams) == (1, 1)


@pytest.mark.slow
def test_the_row_of_an_agent_names_streams_that_are_not_connected(tmp_path: Path) -> None:
    with FeedThread(Refuse(status=503, retry_after=3600)) as feed, fleet(tmp_path) as agents:
        follow = follower(Log())
        agents.add(follow)
        for number in range(4):
            agents.client.enqueue(follow, {"url": feed.url}, task_id=f"s-{number}")
        feed.until(lambda: len(feed.server.attempts) == 4)

        def away() -> list[tuple[str, Link]]:
            agents.introduce()
            [agent] = overview(agents.store).agents
            return [one for one in agent.streams_away if one[1].next_at is not None]

        eventually(lambda: len(away()) == 3)
        for name, link in away():
            assert name.startswith("s-") and not link.is_connected
            assert "http 503" in link.reason and len(link.reason.encode()) <= AWAY_BYTES
            assert link.next_at is not None and link.next_at > link.since + 3590


def test_an_agent_that_drains_says_so_and_gets_no_more(tmp_path: Path) -> None:
    release = threading.Event()

    @job("test.batch")
    def batch(ctx: Context, payload: int) -> None:
        release.wait(LONG_S)

    with fleet(tmp_path) as agents:
        try:
            stage = agents.add(quiet, batch)
            agents.client.enqueue(batch, 1)
            stage.record.wait(events.TaskStarted)
            stage.agent.stop()
            eventually(lambda: agents.store.agents()[0].info["health"]["draining"])
            assert a_fleet("me", [told("me"), *agents.store.agents()]).size == 1
        finally:
            release.set()
