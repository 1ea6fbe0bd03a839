"""What is paused starts no task: seen within a poll, at no read for each task, whoever else pauses what else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from schedule import CancelJob

from tests.support import stands
from tests.support.engine import LONG_S, Recorder, Stage, a_job, claimed, put, settings
from tests.support.stands import Stand, together
from tests.support.streams import FeedThread, Log, Watched, fleet, follower
from thunderagent.agent.loop import Agent
from thunderagent.agent.stream_balance import Fleet, is_paused
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.outcome import Returned
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.errors import ConfigurationError, NotAllowed, StoreUnavailable
from thunderagent.model.task import Lane, Row, Status
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.queue.doorbell.message import DoorbellMessage
from thunderagent.queue.pause_commands import MOST_PAUSES, doubt
from thunderagent.queue.pauses import Pause, PauseKind, pauses_of
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import AgentInfo, TaskStore
from thunderagent.testing import FakeClock, memory_client, memory_store
from thunderagent.testing.faulty_engine import Fault

OTHER: Final = "test.other"
BULK: Final = Lane("bulk")
EVERY_S: Final = 1.0
"""`poll_min_s` of the agents here that are led step by step."""


class Counting(Watched):
    """An engine that counts how often the row of pauses is read, and lets such reads fail."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.is_down = False
        self.reads = 0

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        if CONTROL_ID in task_ids:
            self.reads += 1
            if self.is_down:
                raise StoreUnavailable("the row of pauses cannot be read")
        return super().get(task_ids)


class Steps:
    """An agent whose rounds and time are led by the test. What it claims stays in its slots."""

    def __init__(self, *jobs: Job[Any], **changes: Any) -> None:
        self.clock = FakeClock()
        store = memory_store(self.clock)
        self.engine = Counting(store.engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.client = Client(store, settings())
        values = {"poll_min_s": EVERY_S, "poll_max_s": 5.0, "poll_idle_s": 10.0, "sweep_s": 15.0, **changes}
        self.agent = Agent(
            self.store,
            Registry(*(jobs or (a_job(), a_job(OTHER), a_job("test.bulk", queue="bulk")))),
            settings(lease_s=30.0, heartbeat_s=5.0, **values),
            rng=random.Random(7),
            first_poll_s=0.0,
        )
        self.record = Recorder(self.agent.bus)

    def round(self) -> set[str]:
        """One round; ids of the tasks that it started."""
        before = set(self.agent._in_flight.held)
        self.agent._in_flight.commit(claim=True)
        return set(self.agent._in_flight.held) - before

    def rounds(self, seconds: float, step_s: float = 0.25) -> set[str]:
        """Rounds for so long; ids of the tasks that they started."""
        started = set[str]()
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            started |= self.round()
        return started

    def sweep(self) -> set[str]:
        """Look for tasks of lost agents; ids of those that were taken over."""
        before = set(self.agent._in_flight.held)
        self.agent._housekeeping._sweep()
        return set(self.agent._in_flight.held) - before

    @property
    def names(self) -> list[dict[str, Any]]:
        """Each way to pause what the agent would do with `test.job` in the plain queue."""
        host = self.agent.name.partition(":")[0]
        return [{"queue": "default"}, {"job": "test.job"}, {"agent": self.agent.name}, {"agent": host}]


@pytest.fixture
def at() -> Steps:
    return Steps()


WAYS: Final = pytest.mark.parametrize("way", range(4), ids=["queue", "job", "agent", "host"])


# Seen within a poll, and nothing starts then


@WAYS
def test_what_is_paused_starts_no_task_once_a_second_is_over(at: Steps, way: int) -> None:
    put(at.store, "before")
    assert at.round() == {"before"}
    at.client.pauses.pause(**at.names[way])
    at.clock.advance(EVERY_S)
    for number in range(3):
        put(at.store, f"t{number}")
    assert at.round() == set()
    assert at.rounds(60) == set()


@WAYS
def test_what_is_resumed_goes_on_with_the_next_poll(at: Steps, way: int) -> None:
    at.client.pauses.pause(**at.names[way])
    put(at.store, "a")
    assert at.rounds(60) == set()
    at.client.pauses.resume(**at.names[way])
    assert at.rounds(10.25) == {"a"}, "the longest pause between two polls is 10 s"


@WAYS
def test_a_pause_ends_by_itself_at_its_time_and_not_before(at: Steps, way: int) -> None:
    at.client.pauses.pause(**at.names[way], for_s=100)
    put(at.store, "a")
    assert at.rounds(99.75) == set()
    assert at.rounds(0.25) == {"a"}, "the moment is known: nobody waits for a poll"


def test_of_two_pauses_the_longer_one_counts(at: Steps) -> None:
    at.client.pauses.pause(queue="default", for_s=20)
    at.client.pauses.pause(agent=at.agent.name, for_s=50)
    put(at.store, "a")
    assert at.rounds(49.75) == set()
    assert at.rounds(0.25) == {"a"}


def test_other_queues_and_other_jobs_go_on(at: Steps) -> None:
    at.client.pauses.pause(queue="bulk")
    at.client.pauses.pause(job="test.job")
    put(at.store, "queue paused", lane=BULK, job="test.bulk")
    put(at.store, "both paused", lane=BULK)
    put(at.store, "job paused")
    put(at.store, "free", job=OTHER)
    assert at.rounds(60) == {"free"}


def test_another_agent_s_pause_is_not_ours(at: Steps) -> None:
    at.client.pauses.pause(agent="elsewhere")
    at.client.pauses.pause(agent=f"{at.agent.name}0")
    put(at.store, "a")
    assert at.round() == {"a"}


def test_an_agent_that_starts_into_a_pause_starts_nothing(at: Steps) -> None:
    put(at.store, "a")
    at.client.pauses.pause(queue="default")
    assert at.round() == set()


def test_someone_who_is_woken_looks_whether_the_queue_was_resumed_meanwhile(at: Steps) -> None:
    at.client.pauses.pause(queue="default")
    put(at.store, "a")
    assert at.rounds(400) == set()  # polls are ten seconds apart by now
    while at.agent._pollers["default", "batch"].due > at.clock.monotonic():
        at.clock.advance(0.01)
    at.round()
    at.client.pauses.resume(queue="default")
    at.agent.wake()
    at.round()
    assert at.rounds(EVERY_S + 0.1, step_s=0.1) == {"a"}


@WAYS
def test_where_a_doorbell_stretches_the_polls_no_end_of_a_pause_is_missed(at: Steps, way: int) -> None:
    for poller in at.agent._pollers.values():
        poller.stretch(60.0)
    at.client.pauses.pause(**at.names[way])
    put(at.store, "a")
    assert at.rounds(300) == set()
    at.client.pauses.resume(**at.names[way])
    at.agent.wake()  # as a ring does
    at.clock.advance(0.1)
    assert at.rounds(EVERY_S + 0.25) == {"a"}
    at.client.pauses.pause(**at.names[way], for_s=200)
    at.clock.advance(EVERY_S)
    put(at.store, "b")
    at.agent.wake()
    assert at.rounds(198.75) == set()
    assert at.rounds(0.5) == {"b"}


def test_five_hundred_tasks_of_a_paused_job_hide_no_other(at: Steps) -> None:
    for number in range(500):
        put(at.store, f"t{number:03}", created_at=at.store.clock.now() - 1000 + number)
    put(at.store, "other", job=OTHER)
    at.client.pauses.pause(job="test.job")
    started, poller = set[str](), at.agent._pollers["default", "batch"]
    for _ in range(10):
        started |= at.round()
        if poller.due > at.clock.monotonic():
            break
    assert started == {"other"}, "all of one poll: no time has passed"
    assert not at.record.of(events.UnknownJobsSeen), "a paused job is not unknown"
    assert at.rounds(20) == set()


def test_a_slot_of_a_limit_that_becomes_free_starts_nothing_that_is_paused(at: Steps) -> None:
    for number in range(2):
        at.client.enqueue("test.job", {}, task_id=f"t{number}", limit_key="api", limit=1)
        at.round()
    assert at.client.get("t1").waitlist == "api"
    at.agent._housekeeping._learn_lanes()
    at.client.pauses.pause(job="test.job")
    at.clock.advance(EVERY_S)
    [running] = at.agent._in_flight.held.values()
    at.agent._in_flight.end(running, Returned(None))
    assert at.rounds(30) == set()
    at.client.pauses.resume(job="test.job")
    at.clock.advance(60)
    at.agent._in_flight.admission.sweep(at.agent.name)
    assert at.rounds(10.25) == {"t1"}


@WAYS
def test_a_ring_starts_nothing_that_is_paused(at: Steps, way: int) -> None:
    at.client.pauses.pause(**at.names[way])
    task = put(at.store, "a")
    at.agent._in_flight.selector.inbox.receive(DoorbellMessage.task(task))
    assert at.rounds(30) == set()


# What a pause leaves alone


def test_what_runs_when_its_queue_is_paused_ends_and_is_settled() -> None:
    may_end, runs = threading.Event(), threading.Event()

    @job("test.slow")
    def slow(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
        runs.set()
        assert may_end.wait(LONG_S)
        return {"done": True}

    @job("test.again", max_retry=3)
    def again(ctx: Context, payload: dict[str, Any]) -> None:
        assert may_end.wait(LONG_S)
        raise ValueError("no luck")

    stage = Stage((slow, again))
    stage.start()
    try:
        first, second = stage.client.enqueue(slow, {}), stage.client.enqueue(again, {})
        assert runs.wait(LONG_S)
        stage.record.wait(events.TaskStarted, 2)
        stage.client.pauses.pause(queue="default", reason="a test")
        [noticed] = stage.record.wait(events.Paused)
        assert (noticed.kind, noticed.name, noticed.until, noticed.reason) == ("queue", "default", None, "a test")
        third = stage.client.enqueue(slow, {})
        may_end.set()
        assert stage.end_of(first).result == {"done": True}
        stage.record.wait(events.TaskRetried)
        assert stage.client.get(second).status is Status.PENDING
        polls = len(stage.record.of(events.TaskStarted))
        assert polls == 2
        assert stage.client.get(third).status is Status.PENDING
        stage.client.pauses.resume(queue="default")
        stage.record.wait(events.Resumed)
        assert stage.end_of(third).status is Status.SUCCESS
        assert stage.end_of(second).status is Status.FAILED
    finally:
        may_end.set()
        stage.stop()
        stage.store.engine.close()


@WAYS
def test_a_lost_agent_s_task_is_taken_over_only_when_its_pause_is_over(at: Steps, way: int) -> None:
    claimed(at.store, "lost", owner="gone", lease_s=10.0)
    at.client.pauses.pause(**at.names[way])
    at.sweep()
    for _ in range(20):
        at.clock.advance(15)
        assert at.sweep() == set()
    at.client.pauses.resume(**at.names[way])
    at.clock.advance(15)
    assert at.sweep() == {"lost"}
    assert at.client.get("lost").crash_count == 1


def test_a_takeover_asks_for_pauses_though_no_poller_has_looked(at: Steps) -> None:
    claimed(at.store, "lost", owner="gone", lease_s=10.0)
    at.sweep()
    at.clock.advance(100)
    at.client.pauses.pause(queue="default")
    assert at.sweep() == set()


@pytest.mark.slow
def test_streams_of_a_paused_queue_go_on_and_new_ones_wait(tmp_path: Path) -> None:
    log = Log()
    follow = follower(log)
    with FeedThread() as feed, fleet(tmp_path) as agents:
        stage = agents.add(follow)
        task = agents.client.enqueue(follow, {"url": feed.url}, task_id="s")
        feed.publish(3)
        log.until(3)
        agents.client.pauses.pause(queue="streams")
        agents.client.pauses.pause(job="test.stream")
        agents.client.pauses.pause(agent=stage.agent.name)
        stage.record.wait(events.Paused, 3)
        agents.client.enqueue(follow, {"url": feed.url}, task_id="s2")
        beats = agents.row(task).hb or 0
        feed.publish(3)
        log.until(6)
        stands.eventually(lambda: (agents.row(task).hb or 0) > beats + 2)
        assert [fence for fence, _ in log.runs] == [1]
        assert agents.row("s2").status is Status.PENDING


@pytest.mark.slow
def test_streams_of_a_paused_queue_are_not_handed_off_for_the_balance(tmp_path: Path) -> None:
    log = Log()
    follow = follower(log)
    with FeedThread() as feed, fleet(tmp_path) as agents:
        stage = agents.add(follow, rebalance_s=3600.0)
        for number in range(8):
            agents.client.enqueue(follow, {"url": feed.url}, task_id=f"s{number}")
        stands.eventually(lambda: len(log.contexts) == 8 and all(one.is_connected for one in log.contexts))
        house, done = stage.agent._housekeeping, threading.Event()

        def rebalance() -> type[CancelJob]:  # once, in the agent's loop, as if there were another agent without any
            stage.agent._parts.fleet._others = {"another": (0, 700)}
            house._streams.rebalance()
            done.set()
            return CancelJob

        def balance() -> None:
            done.clear()
            house._scheduler.every(0.01).seconds.do(rebalance)  # type: ignore[arg-type] # fractions work
            stage.agent.wake()
            assert done.wait(LONG_S)

        agents.client.pauses.pause(queue="streams")
        stage.record.wait(events.Paused)
        balance()
        assert not stage.record.of(events.StreamHandedOff)
        agents.client.pauses.resume(queue="streams")
        stage.record.wait(events.Resumed)
        balance()
        stage.record.wait(events.StreamHandedOff)


# What it costs


@pytest.mark.slow
def test_under_load_the_row_is_read_once_a_second_and_never_for_a_task(at: Steps) -> None:
    for number in range(1000):
        put(at.store, f"t{number:03}")
    started = 0
    for _ in range(100):  # five seconds, in which everything that starts ends at once
        held = list(at.agent._in_flight.held.values())
        for running in held:
            at.agent._in_flight.end(running, Returned(None))
        started += len(at.round())
        at.clock.advance(0.05)
    assert started == 1000
    assert 4 <= at.engine.reads <= 5


def test_while_idle_the_row_is_read_once_a_poll(at: Steps) -> None:
    at.rounds(60, step_s=0.05)  # the pauses between polls grow
    before, polls = at.engine.reads, len(at.record.of(events.Polled))
    at.rounds(300, step_s=0.05)
    reads, polls = at.engine.reads - before, len(at.record.of(events.Polled)) - polls
    assert 50 < polls < 200
    assert 50 < reads <= polls


def test_a_full_agent_does_not_read_the_row(at: Steps) -> None:
    for number in range(60):
        put(at.store, f"t{number:03}", lane=BULK if number % 2 else Lane(), job="test.bulk" if number % 2 else OTHER)
    assert len(at.round()) == 20
    before = at.engine.reads
    for _ in range(60):
        at.agent.wake()  # as each enqueue in the same process does
        at.rounds(1)
    assert at.engine.reads == before


def test_a_paused_queue_is_not_even_looked_at(at: Steps) -> None:
    at.client.pauses.pause(queue="default")
    put(at.store, "a")
    at.round()
    at.engine.pages.clear()
    assert at.rounds(60) == set()
    assert "PENDING" not in at.engine.pages
    assert "PENDING#bulk" in at.engine.pages


def test_a_running_agent_reads_the_row_at_its_pace_and_not_at_that_of_its_tasks() -> None:
    store = memory_store()
    engine = Counting(store.engine)
    quick = a_job("test.quick")
    stage = Stage((quick,), store=TaskStore(engine), poll_min_s=0.5, poll_max_s=0.5, poll_idle_s=0.5)
    stage.client.enqueue_many(quick, [{}] * 1000)
    begun = store.monotonic()
    stage.start()
    try:
        stage.record.wait(events.TaskSucceeded, 1000)
        assert engine.reads <= 1 + (store.monotonic() - begun) / 0.5
    finally:
        stage.stop()
        stage.store.engine.close()


# What an agent tells


def test_an_agent_tells_once_that_it_noticed_a_pause_and_its_end(at: Steps) -> None:
    at.round()
    at.client.pauses.pause(queue="default", for_s=20)
    at.client.pauses.pause(job=OTHER, reason="slow today")
    at.client.pauses.pause(queue="elsewhere")
    at.rounds(60)
    found = [(one.kind, one.name, one.reason) for one in at.record.of(events.Paused)]
    assert found == [("job", OTHER, "slow today"), ("queue", "default", None)]
    assert [(one.kind, one.name) for one in at.record.of(events.Resumed)] == [("queue", "default")]
    at.client.pauses.resume(job=OTHER)
    at.rounds(20)
    assert [(one.kind, one.name) for one in at.record.of(events.Resumed)] == [("queue", "default"), ("job", OTHER)]


def test_a_paused_agent_says_so_in_its_row(at: Steps) -> None:
    assert at.agent.vitals.entry()["paused"] is False
    at.client.pauses.pause(agent=at.agent.name)
    at.rounds(2)
    assert at.agent.vitals.entry()["paused"] is True
    at.agent._housekeeping._announce()
    [told] = at.client.agents.list()
    assert is_paused(told)
    at.client.pauses.resume(agent=at.agent.name)
    at.rounds(12)
    assert at.agent.vitals.entry()["paused"] is False


def told(name: str, held: int, **health: Any) -> AgentInfo:
    info = {"streams": {"held": held, "max": 700}, "health": health, "jobs": ["j"], "queues": {"default": 10}}
    return AgentInfo(name, 0.0, 0.0, info)


def test_nobody_counts_on_a_paused_agent() -> None:
    made = Fleet(memory_store(), owner="a", max_streams=700)
    made.learn([told("a", 10), told("b", 0, paused=True), told("c", 20, paused=False)])
    assert (made.size, made.mean) == (2, 10.0)
    assert made.surplus() == 0
    assert any(made.is_ours(f"s{number}") for number in range(20))
    alone = Fleet(memory_store(), owner="a", max_streams=700)
    alone.learn([told("a", 10), told("b", 0, paused=True)])
    assert all(alone.is_ours(f"s{number}") for number in range(20))


def test_the_tasks_of_a_queue_are_not_shared_with_an_agent_that_is_paused(at: Steps) -> None:
    info = {"queues": {"default": 10}, "jobs": ["test.job"]}
    at.store.announce("zzz", {**info, "health": {"paused": True}}, lives_s=60.0)
    at.agent._housekeeping._learn_shares()
    assert at.agent._pollers["default", "batch"].share == (0, 1)
    at.store.announce("zzz", {**info, "health": {"paused": False}}, lives_s=60.0)
    at.agent._housekeeping._learn_shares()
    assert at.agent._pollers["default", "batch"].share == (0, 2)


# When the row cannot be read, or understood


def test_without_an_answer_what_is_known_stays(at: Steps) -> None:
    at.client.pauses.pause(queue="default")
    put(at.store, "a")
    put(at.store, "b", lane=BULK, job="test.bulk")
    assert at.round() == {"b"}
    at.engine.is_down = True
    at.client.pauses.resume(queue="default")
    at.client.pauses.pause(queue="bulk")
    put(at.store, "c", lane=BULK, job="test.bulk")
    assert at.rounds(60) == {"c"}
    at.engine.is_down = False
    put(at.store, "d", lane=BULK, job="test.bulk")
    assert at.rounds(11) == {"a"}
    failed = [one for one in at.record.of(events.StoreFailed) if one.during == "reading pauses"]
    assert len(failed) == 1, "told once, not at every poll"
    assert len([one for one in at.record.of(events.StoreRecovered) if one.during == "reading pauses"]) == 1


def test_an_agent_that_never_could_read_the_row_works_all_the_same(at: Steps) -> None:
    at.engine.is_down = True
    put(at.store, "a")
    assert at.round() == {"a"}


def test_a_pause_ends_by_itself_though_the_store_does_not_answer(at: Steps) -> None:
    at.client.pauses.pause(queue="default", for_s=30)
    put(at.store, "a")
    at.round()
    at.engine.is_down = True
    assert at.rounds(29.75) == set()
    assert at.rounds(0.25) == {"a"}


def test_an_outage_is_over_for_an_agent_of_which_everything_is_paused(at: Steps) -> None:
    at.round()
    at.engine.outage()
    at.clock.advance(60)
    at.agent._commit(claim=True)
    assert at.agent.vitals.entry()["store_answers"] is False
    at.engine.outage(False)
    at.client.pauses.pause(agent=at.agent.name)
    at.clock.advance(60)
    at.agent._commit(claim=True)
    assert at.agent.vitals.entry()["store_answers"] is True


GARBAGE: Final[dict[str, Any]] = {
    "text": "queue:default",
    "list": ["queue:default"],
    "no maps": {"queue:default": True, "job:test.job": "yes", "agent:": {}, "queue:": {}, "": {}, ":": None},
    "other kinds": {"tenant:default": {"since": 1}, "QUEUE:default": {}, "default": {"until": None}},
    "ended": {"queue:default": {"since": "then", "until": 5, "reason": ["x"]}},
    "ended long ago": {"queue:default": {"until": -1e100}},
}


@pytest.mark.parametrize("info", GARBAGE.values(), ids=GARBAGE)
def test_a_row_that_pauses_nothing_in_an_odd_way_stops_nobody(at: Steps, info: Any) -> None:
    at.store.insert_row({"taskId": CONTROL_ID, "info": info})
    put(at.store, "a")
    assert at.round() == {"a"}
    at.client.pauses.pause(queue="default")
    assert [pause.key for pause in at.client.pauses.list()] == ["queue:default"]
    at.clock.advance(EVERY_S)
    put(at.store, "b")
    assert at.rounds(20) == set()
    assert at.client.pauses.resume(queue="default") is not None
    assert at.rounds(11) == {"b"}


@pytest.mark.parametrize("until", ["never", True, [], float("inf"), float("nan"), {"at": 5}])
def test_an_end_that_is_none_is_no_end(until: Any) -> None:
    entry = {"since": until, "until": until, "reason": until if until != "never" else 7}
    [pause] = pauses_of({"info": {"queue:default": entry}}).values()
    assert pause == Pause(kind=PauseKind.QUEUE, name="default")
    assert not pause.is_over(1e12)


@pytest.mark.parametrize("fence", [None, "x", 7, 2.5])
def test_a_row_without_a_proper_fence_can_be_changed(at: Steps, fence: Any) -> None:
    row = {"taskId": CONTROL_ID, "info": {}, "fence": fence}
    at.store.insert_row({name: value for name, value in row.items() if value is not None})
    at.client.pauses.pause(queue="default")
    at.client.pauses.pause(job="test.job")
    assert [pause.key for pause in at.client.pauses.list()] == ["job:test.job", "queue:default"]
    assert isinstance(at.store.engine.get([CONTROL_ID])[CONTROL_ID]["fence"], (int, float))


def test_what_a_newer_version_wrote_is_left_as_it_is(at: Steps) -> None:
    unknown = {"tenant:acme": {"since": 1, "quota": [1, 2]}, "future": 3, "queue:odd": "yes"}
    known = {"since": 5, "until": None, "reason": "old", "by": "zoe"}
    at.store.insert_row({"taskId": CONTROL_ID, "info": {**unknown, "queue:default": known}, "fence": 3})
    put(at.store, "a")
    put(at.store, "b", lane=BULK, job="test.bulk")
    assert at.round() == {"b"}
    at.client.pauses.pause(job=OTHER)
    at.client.pauses.pause(queue="default", reason="new")
    at.client.pauses.resume(job=OTHER)
    info = at.store.engine.get([CONTROL_ID])[CONTROL_ID]["info"]
    assert info == {**unknown, "queue:default": {**known, "reason": "new"}}


# Those who pause


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.ministack] * (name == "ministack")) for name in stands.ATOMIC]
)
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    """Engines on which several may race."""
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as made:
        yield made


class Meeting(Watched):
    """An engine whose first reader of the row waits until others have read it too."""

    def __init__(self, engine: Engine, barrier: threading.Barrier) -> None:
        super().__init__(engine)
        self._barrier: threading.Barrier | None = barrier

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        found = super().get(task_ids)
        if CONTROL_ID in task_ids and (barrier := self._barrier):
            self._barrier = None
            barrier.wait(LONG_S)
        return found


def clients(stand: Stand, number: int) -> list[Client]:
    """Clients that all read what is paused before one of them writes."""
    barrier = threading.Barrier(number)
    return [Client(TaskStore(Meeting(stand.open().engine, barrier)), settings()) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["no row", "a row"])
def test_of_operators_who_pause_different_things_at_once_all_win(stand: Stand, begin: str) -> None:
    reader = Client(stand.store, settings())
    if begin == "a row":
        reader.pauses.pause(queue="earlier")
    several = clients(stand, 4)
    calls: list[Callable[[], object]] = [
        lambda: several[0].pauses.pause(queue="reports", reason="one"),
        lambda: several[1].pauses.pause(job="report.build", for_s=3600),
        lambda: several[2].pauses.pause(agent="host-1:4711:0a1b2c3d"),
        lambda: several[3].pauses.pause(queue="bulk"),
    ]
    together(*calls)
    found = {pause.key: pause for pause in reader.pauses.list()}
    expected = {"queue:reports", "job:report.build", "agent:host-1:4711:0a1b2c3d", "queue:bulk"}
    assert found.keys() - {"queue:earlier"} == expected
    assert ("queue:earlier" in found) == (begin == "a row")
    assert (found["queue:reports"].reason, found["queue:reports"].until) == ("one", None)
    until, since = found["job:report.build"].until, found["job:report.build"].since
    assert until is not None and since is not None
    assert until - since == pytest.approx(3600)


def test_one_pauses_and_another_resumes_something_else_at_once(stand: Stand) -> None:
    reader = Client(stand.store, settings())
    reader.pauses.pause(queue="old")
    one, other = clients(stand, 2)
    _, ended = together(lambda: one.pauses.pause(queue="new"), lambda: other.pauses.resume(queue="old"))
    assert ended is not None and ended.name == "old"
    assert [pause.name for pause in reader.pauses.list()] == ["new"]


def test_pausing_twice_and_resuming_what_is_not_paused_are_harmless(stand: Stand) -> None:
    client = Client(stand.store, settings())
    assert client.pauses.resume(queue="reports") is None
    assert client.pauses.list() == []
    first = client.pauses.pause(queue="reports", reason="why")
    again = client.pauses.pause(queue="reports")
    assert again == first
    later = client.pauses.pause(queue="reports", for_s=60, reason="because")
    assert (later.since, later.reason) == (first.since, "because")
    assert later.until is not None
    assert client.pauses.list() == [later]
    assert client.pauses.pause(queue="reports").until is None, "the last word counts"
    assert client.pauses.resume(queue="reports") is not None
    client.pauses.pause(queue="x")
    assert client.pauses.resume(queue="reports") is None
    assert [pause.name for pause in client.pauses.list()] == ["x"]


def test_the_row_survives_each_engine_with_all_that_stands_in_it(stand: Stand) -> None:
    client = Client(stand.store, settings())
    made = client.pauses.pause(job="report.build", for_s=90.5, reason='Ä "quoted" → #1')
    assert client.pauses.list() == [made]
    assert made.reason == 'Ä "quoted" → #1'
    assert client.pauses.resume(job="report.build") == made


def test_a_row_of_wrong_types_can_be_changed_on_any_engine(stand: Stand) -> None:
    client = Client(stand.store, settings())
    if stand.name.startswith("sqlite"):
        stand.store.insert_row({"taskId": CONTROL_ID, "info": "queue:reports", "fence": "x"})
    else:
        item = {"taskId": {"S": CONTROL_ID}, "info": {"S": "queue:reports"}, "fence": {"S": "x"}}
        stand.dynamo.connection.call("PutItem", TableName=stand.dynamo.table, Item=item)
    assert client.pauses.list() == []
    client.pauses.pause(queue="reports")
    client.pauses.pause(queue="bulk")
    assert [pause.name for pause in client.pauses.list()] == ["bulk", "reports"]


def test_a_pause_that_has_ended_is_not_listed_and_goes_with_the_next_change(at: Steps) -> None:
    at.client.pauses.pause(queue="default", for_s=10)
    at.clock.advance(10)
    assert at.client.pauses.list() == []
    at.client.pauses.pause(queue="bulk", for_s=10)
    assert at.store.engine.get([CONTROL_ID])[CONTROL_ID]["info"].keys() == {"queue:bulk"}
    at.clock.advance(10)
    fresh = at.client.pauses.pause(queue="bulk", for_s=10)
    assert fresh.since == at.store.clock.now(), "it is another pause"
    at.clock.advance(10)
    assert at.client.pauses.resume(queue="bulk") is None


def test_there_is_a_limit_to_what_every_agent_has_to_read(at: Steps) -> None:
    for number in range(MOST_PAUSES):
        at.client.pauses.pause(job=f"job-{number}", for_s=10)
    with pytest.raises(NotAllowed, match="resume some"):
        at.client.pauses.pause(job="one too many")
    at.client.pauses.pause(job="job-5", reason="which is no further one")
    at.clock.advance(10)
    at.client.pauses.pause(job="one more")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "name one queue"),
        ({"queue": "a", "job": "b"}, "name one queue"),
        ({"queue": "no spaces"}, "name of a queue"),
        ({"job": ""}, "name of a job"),
        ({"agent": "x\n"}, "name of an agent"),
        ({"agent": "x" * 257}, "name of an agent"),
        ({"queue": "a", "for_s": 0}, "for_s"),
        ({"queue": "a", "for_s": -5}, "for_s"),
        ({"queue": "a", "for_s": float("nan")}, "for_s"),
        ({"queue": "a", "for_s": float("inf")}, "for_s"),
        ({"queue": "a", "reason": "x" * 201}, "reason"),
        ({"queue": "a", "reason": "two\nlines"}, "reason"),
    ],
)
def test_what_cannot_be_paused_is_refused_with_a_reason(at: Steps, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        at.client.pauses.pause(**options)
    assert at.client.pauses.list() == []


def test_a_job_may_be_given_itself(at: Steps) -> None:
    one = a_job("test.given")
    assert at.client.pauses.pause(job=one).name == "test.given"
    assert at.client.pauses.resume(job=one) is not None


class Bell:
    """A doorbell that keeps what was rung."""

    is_local = False
    is_healthy = True

    def __init__(self) -> None:
        self.rung: list[str] = []

    def ring(self, rings: Sequence[DoorbellMessage]) -> None:
        self.rung += [f"{ring.verb} {ring.queue}" for ring in rings]

    def listen(self, timeout_s: float, accepts: object) -> list[DoorbellMessage]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_the_agents_that_are_concerned_are_rung_for_and_a_failure_fails_nothing(at: Steps) -> None:
    bell = Bell()
    client = Client(at.store, settings(), doorbell=bell)
    for name, queues, jobs in (
        ("a:1", ["default", "bulk"], ["one"]),
        ("b:1", ["bulk"], ["two"]),
        ("b:2", ["bulk"], ["two"]),
    ):
        info = {"queues": dict.fromkeys(queues, 1), "jobs": jobs}
        at.store.announce(name, info, lives_s=60.0)
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({"queue": "bulk"}, ["look bulk"] * 3),
        ({"job": "one"}, ["look bulk", "look default"]),
        ({"job": "nobody's"}, []),
        ({"agent": "b"}, ["look bulk"] * 2),
        ({"agent": "a:1"}, ["look bulk", "look default"]),
    ]
    for names, rings in expected:
        for change in (client.pauses.pause, client.pauses.resume):
            bell.rung.clear()
            change(**names)
            assert sorted(bell.rung) == rings
    at.engine.fail("page", Fault.LOST_REQUEST)
    assert client.pauses.pause(queue="bulk").name == "bulk"
    assert at.engine.hits == [("page", Fault.LOST_REQUEST)]


def test_names_that_nobody_knows_are_doubted(at: Steps) -> None:
    def doubts(**name: Any) -> str | None:
        return doubt(at.store, at.client.pauses.pause(**name))

    assert "no task was ever" in (doubts(queue="repots") or "")
    assert "no live agent has the job" in (doubts(job="test.job") or "")
    assert "the name or the host" in (doubts(agent="nobody") or "")
    at.agent._housekeeping._announce()
    put(at.store, "a", lane=Lane("reports"))
    for name in ({"queue": "reports"}, {"queue": "bulk"}, {"job": "test.job"}, {"agent": at.agent.name}):
        assert doubts(**name) is None
    assert doubts(agent=at.agent.name.partition(":")[0]) is None


@pytest.mark.parametrize("for_s", ["2h", 0, -1, float("nan"), float("inf")])
def test_a_pause_that_lasts_no_number_of_seconds_is_refused(for_s: Any) -> None:
    client = memory_client()
    with pytest.raises(ConfigurationError, match="use a number of seconds"):
        client.pauses.pause(queue="reports", for_s=for_s)
    assert not client.pauses.list()
