"""Ticks of periodic jobs: one task for each, whatever the agents, their clocks and their store do."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pytest

from tests.support import stands
from tests.support.billing import write_units
from tests.support.engine import EPOCH, LONG_S, Recorder, claimed, serving, settings
from tests.support.stands import eventually, together
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job, job
from thunderagent.jobs.periodic import periodic
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Is, Write
from thunderagent.model.errors import ConfigurationError, NotAllowed, StoreUnavailable, TaskNotFound
from thunderagent.model.schedules import SET_BACK_S, State, Tick, schedule_id, tick_id
from thunderagent.model.task import Candidate, Row, Status, Task
from thunderagent.model.ticks import Spec, every
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.schedules import SCHEDULE_STATUS
from thunderagent.queue.schedules.scheduler import (
    EXTENDED_S,
    KEPT_S,
    SCHEDULE_LOOK_S,
    TICK_LOOK_S,
    TICK_OTHERS_S,
    TICK_RESUME_S,
    TickScheduler,
)
from thunderagent.stores.dynamo import expressions
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import AgentInfo, TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_client, run_until_idle
from thunderagent.testing.faulty_engine import FaultyEngine

NAME: Final = "report.nightly"
TEN_MINUTES: Final = 600


def ticking(ctx: Context, payload: Tick) -> None:
    """A handler that does nothing."""


def a_job(spec: Spec | None = None, **options: Any) -> Job[Tick]:
    decorate: Callable[[Job[Tick]], Job[Tick]] = periodic(spec or every(10).minutes, **options)
    return decorate(job(NAME)(ticking))


T = TypeVar("T")


class Killed(BaseException):
    """The process is gone; nothing of it catches this."""


class Wire:
    """An engine as one agent sees it: with the clock of that agent, and a fault at one of its calls.

    The clock may differ from agent to agent, as those of hosts do.
    """

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        self._engine = engine
        self.clock = clock
        self.calls = 0
        self.fault_at: int | None = None
        self.fault = ""
        self.between: Callable[[], None] = lambda: None
        """Called after each reading, before the agent acts on it."""

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        rows = self._call(lambda: self._engine.get(task_ids))
        self.between()
        return rows

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._write(lambda: self._engine.put(rows, fresh=fresh))

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._write(lambda: self._engine.apply(batch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _write(self, call: Callable[[], list[Applied]]) -> list[Applied]:
        is_hit = self.calls == self.fault_at
        answers = self._call(call)
        if is_hit and self.fault == "no answers":
            return [Applied(won=False, error=StoreUnavailable("injected: no answer"))] * len(answers)
        if is_hit and self.fault == "repeated by the SDK":
            return call()
        return answers

    def _call(self, call: Callable[[], T]) -> T:
        is_hit, self.calls = self.calls == self.fault_at, self.calls + 1
        if is_hit and self.fault == "killed before":
            raise Killed
        if is_hit and self.fault == "lost request":
            raise StoreUnavailable("injected: lost request")
        answer = call()
        if is_hit and self.fault == "killed after":
            raise Killed
        if is_hit and self.fault == "lost reply":
            raise StoreUnavailable("injected: lost reply")
        return answer


class Host:
    """The tick code of one agent, with a store and a clock of its own."""

    def __init__(self, engine: Engine, name: str, one: Job[Any], *, skew_s: float = 0.0, at: float = 0.0) -> None:
        self.name = name
        self.clock = FakeClock(EPOCH + at + skew_s, 1000.0 + at)
        self.wire = Wire(engine, self.clock)
        self.store = TaskStore(cast(Engine, self.wire), monotonic=self.clock.monotonic)
        self.client = Client(self.store, settings())
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.put: list[Task] = []
        self.ticks = TickScheduler(
            self.store,
            Registry(one),
            settings(),
            self.bus,
            owner=name,
            cancel=self.client.cancel,
            on_put=self.put.extend,
            rng=random.Random(name),
        )

    def look(self, after: float = 0.0) -> None:
        self.clock.advance(after)
        self.ticks.look()

    def go_on(self, seconds: float, step_s: float = 0.5) -> None:
        """Look again and again; a store that does not answer is asked again."""
        until = self.clock.monotonic() + seconds
        while (left := until - self.clock.monotonic()) > 0:
            self.clock.advance(min(left, step_s))
            with suppress(StoreUnavailable):
                self.ticks.look()


class World:
    """What is in the store of all hosts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def host(self, name: str = "a", one: Job[Any] | None = None, **options: Any) -> Host:
        return Host(self.engine, name, one or a_job(), **options)

    @property
    def row(self) -> Row:
        return self.engine.get([schedule_id(NAME)])[schedule_id(NAME)]

    @property
    def state(self) -> State:
        return State.of(self.row)

    def status(self, seconds: float) -> Status | None:
        """Of the task of a tick so many seconds after the begin."""
        task_id = tick_id(NAME, int(EPOCH + seconds))
        row = self.engine.get([task_id]).get(task_id)
        return None if row is None else Task.from_row(row).status

    def put(self, until: int = 40, period: int = TEN_MINUTES) -> dict[int, Status]:
        """The tasks of ticks that are there, by their number."""
        ids = {tick_id(NAME, int(EPOCH) + number * period): number for number in range(-3, until)}
        rows = self.engine.get(list(ids))
        return {ids[name]: Task.from_row(row).status for name, row in rows.items()}

    def end(self, seconds: float, status: Status = Status.SUCCESS) -> None:
        """Claim and settle the task of a tick."""
        store = TaskStore(cast(Engine, Wire(self.engine, FakeClock(EPOCH + 10**6))))
        task_id = tick_id(NAME, int(EPOCH + seconds))
        lease = hold(store, store.peek([task_id])[task_id])
        now = store.clock.now()
        [settled] = store.settle([writes.succeed(lease, now=now, expire_at=now + 10**6)])
        assert settled.accepted


def hold(store: TaskStore, task: Task) -> Any:
    candidate = Candidate(task.task_id, task.status_value, task.created_at, task.job, task.kind)
    [lease] = store.claim([Wanted(candidate, 300.0)], owner="runner")
    return lease


@pytest.fixture
def world() -> World:
    return World(SqliteEngine(MEMORY))


@pytest.fixture(params=["sqlite-file", pytest.param("ministack", marks=pytest.mark.ministack)])
def any_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """On each engine."""
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as stand:
        yield World(stand.store.engine)


# The row


def test_the_first_agent_puts_the_row_and_no_tick_of_the_past(any_world: World) -> None:
    host = any_world.host()
    host.look()
    row, state = any_world.row, any_world.state
    assert (row["status"], row["fence"]) == (SCHEDULE_STATUS, 0)
    assert (state.last, state.ticks, state.schedule) == (int(EPOCH), (), a_job().schedule)
    assert any_world.put() == {}
    assert any_world.engine.page(SCHEDULE_STATUS, limit=10).entries[0].task_id == schedule_id(NAME)
    any_world.host("b").look()
    assert any_world.row == row


def test_a_tick_is_put_when_it_is_due_and_the_row_says_so(any_world: World) -> None:
    host = any_world.host()
    host.look()
    host.look(599.9)
    assert any_world.put() == {}
    host.look(0.1)
    assert any_world.put() == {1: Status.PENDING}
    assert (any_world.state.last, any_world.state.ticks) == (int(EPOCH) + 600, ())
    assert any_world.state.previous == tick_id(NAME, int(EPOCH) + 600)
    assert [task.task_id for task in host.put] == [any_world.state.previous]
    [event] = host.record.of(queue_events.TickPut)
    assert (event.job, event.task_id, event.late_s) == (NAME, any_world.state.previous, 0.0)
    host.look(600)
    assert any_world.put() == {1: Status.PENDING, 2: Status.PENDING}


def test_the_task_of_a_tick_carries_its_moment(any_world: World) -> None:
    host = any_world.host()
    host.look()
    host.look(601.5)
    [task] = host.client.list()
    assert task.created_at == EPOCH + 600
    assert Tick.model_validate(task.payload).at == datetime.fromtimestamp(EPOCH + 600, UTC)
    assert (task.job, task.queue, task.max_retry) == (NAME, "default", None)


def test_no_row_is_read_before_a_tick_is_due_but_for_once_in_a_while(world: World) -> None:
    host = world.host(one=a_job(every().day))
    host.look()
    host.look()
    calls = host.wire.calls
    for _ in range(100):
        host.look(SCHEDULE_LOOK_S / 200)
    assert host.wire.calls == calls
    host.look(SCHEDULE_LOOK_S)
    assert host.wire.calls == calls + 1
    assert host.ticks.wait_s() <= TICK_LOOK_S


def test_the_piece_comes_again_when_the_tick_is_due(world: World) -> None:
    host = world.host()
    host.look()
    host.look()
    host.clock.advance(597.5)
    assert host.ticks.wait_s() == pytest.approx(2.5)
    host.clock.advance(2.5)
    assert host.ticks.wait_s() == 0.0


def test_a_tick_costs_four_write_units_and_every_other_agent_one_reading(world: World) -> None:
    units: list[int] = []
    host, other = world.host(), world.host("other")
    for one in (host, other):
        one.look()
        one.look()
    put, apply = host.wire.put, host.wire.apply

    def billed(ids: Sequence[str], write: Callable[[], list[Applied]]) -> list[Applied]:
        before = world.engine.get(ids)
        answers = write()
        for name, row in world.engine.get(ids).items():
            old = expressions.encode_row(before[name]) if name in before else None
            units.append(write_units(old, expressions.encode_row(row))[0])
        return answers

    host.wire.put = lambda rows, *, fresh=False: billed(  # type: ignore[method-assign]
        [row["taskId"] for row in rows], lambda: put(rows, fresh=fresh)
    )
    host.wire.apply = lambda batch: billed(  # type: ignore[method-assign]
        [write.task_id for write in batch], lambda: apply(batch)
    )
    host.look(600.0)
    assert units == [1, 2, 1]  # the decision, the task, the confirmation: changes of the row touch no index
    calls = other.wire.calls
    other.look(601.1)
    assert other.wire.calls == calls + 1


def test_an_agent_without_periodic_jobs_reads_nothing(world: World) -> None:
    host = world.host(one=job(NAME)(ticking))
    assert host.ticks.wait_s() == TICK_LOOK_S
    host.look(10**6)
    assert host.wire.calls == 0


def test_one_agent_has_the_turn_of_a_tick_and_the_others_look_a_little_later(world: World) -> None:
    hosts = [world.host(name) for name in "abcde"]
    agents = [AgentInfo(name, 0.0, 0.0, {"jobs": [NAME]}) for name in "abcde"]
    agents.append(AgentInfo("f", 0.0, 0.0, {"jobs": ["another"]}))
    first = Counter[str]()
    for host in hosts:
        host.ticks.learn(agents)
        host.look()
    for number in range(1, 101):
        for host in hosts:
            host.look(600 - 1.1 if number > 1 else 598.9)
        due = [host.ticks.wait_s() for host in hosts]
        begin = 1.1
        turns = [host.name for host, wait in zip(hosts, due, strict=True) if wait <= begin + 0.01]
        assert all(begin + TICK_OTHERS_S[0] <= wait <= begin + TICK_OTHERS_S[1] for wait in due if wait > begin + 0.01)
        assert len(turns) == 1
        first[turns[0]] += 1
        for host in hosts:
            host.look(1.1)
        for host in hosts:
            host.clock.advance(1.1)
            host.look()
            host.clock.advance(-1.1)
    assert set(first) == set("abcde")
    assert max(first.values()) < 45


# Many agents and their clocks


class Swarm:
    """Twenty agents, each with a clock that is up to two seconds off."""

    def __init__(self, world: World, one: Job[Any], *, seed: int, agents: int = 20) -> None:
        self.rng = random.Random(seed)
        self.hosts = [
            world.host(f"agent-{number}", one, skew_s=self.rng.uniform(-2.0, 2.0)) for number in range(agents)
        ]
        told = [AgentInfo(host.name, 0.0, 0.0, {"jobs": [NAME]}) for host in self.hosts]
        self.at = 0.0
        self._nested = False
        for host in self.hosts:
            host.ticks.learn(told)
            host.wire.between = self._between

    def go_on(self, seconds: float, looks: int) -> None:
        """So many agents look at random moments within this time."""
        begin = self.at
        for moment in sorted(self.rng.random() for _ in range(looks)):
            self._look(self.rng.choice(self.hosts), begin + moment * seconds)
        self.at = begin + seconds

    def finish(self) -> None:
        for host in self.hosts:
            self._look(host, self.at)
            self._look(host, self.at + 10.0)
            self._look(host, self.at + 20.0)
            self.at += 20.0

    def _look(self, host: Host, at: float) -> None:
        self.at = at
        host.look(at - (host.clock.monotonic() - 1000.0))

    def _between(self) -> None:
        """Another agent comes between the reading and the writing of one: its row is stale then."""
        if not self._nested and self.rng.random() < 0.2:
            self._nested = True
            try:
                self._look(self.rng.choice(self.hosts), self.at)
            finally:
                self._nested = False


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["last", "none"])
def test_twenty_agents_with_skewed_clocks_give_one_task_for_each_of_ten_thousand_ticks(
    world: World, policy: str
) -> None:
    number = 10_000 if policy == "last" else 1_000
    swarm = Swarm(world, a_job(every(10).seconds, catch_up=policy), seed=3)
    puts: Counter[str] = Counter()
    engine_put = world.engine.put

    def put(rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = engine_put(rows, fresh=fresh)
        puts.update(row["taskId"] for row, answer in zip(rows, answers, strict=True) if answer.won)
        return answers

    world.engine.put = put  # type: ignore[method-assign]
    for host in swarm.hosts:
        host.look()
    for _ in range(number):
        swarm.go_on(10.0, looks=12)
    swarm.finish()
    state = world.state
    first = (int(EPOCH - 2) // 10 + 1) * 10
    expected = {tick_id(NAME, tick) for tick in range(first, state.last + 1, 10)}
    del puts[schedule_id(NAME)]
    assert {name for name in puts if name < tick_id(NAME, int(EPOCH))} <= {tick_id(NAME, first)}
    assert expected - puts.keys() <= {tick_id(NAME, first)}  # of the moment at which the row was put
    assert puts.keys() <= expected
    assert set(puts.values()) == {1}
    assert len(puts) >= number
    assert (state.skipped, state.ticks) == (0, ())


@pytest.mark.slow
def test_agents_that_read_the_same_row_put_one_task_between_them(any_world: World) -> None:
    """All read before any writes; then all write at once."""
    hosts = [any_world.host(f"agent-{number}") for number in range(4)]
    for host in hosts:
        host.look()
    for number in range(1, 6):
        for host in hosts:
            host.clock.advance(600 + 1.1)
        barrier = threading.Barrier(len(hosts))
        for host in hosts:
            host.wire.between = partial(_meet, barrier)
        together(*(partial(_once, host) for host in hosts))
        for host in hosts:
            host.wire.between = lambda: None
            host.go_on(5.0)
        assert set(any_world.put()) == set(range(1, number + 1))
    assert any_world.state.ticks == ()
    put = [event.task_id for host in hosts for event in host.record.of(queue_events.TickPut)]
    assert len(put) == len(set(put)) == 5


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait(LONG_S)


def _once(host: Host) -> None:
    """Look; only the first reading is at the same time as those of others."""
    between = host.wire.between

    def first() -> None:
        host.wire.between = lambda: None
        between()

    host.wire.between = first
    host.ticks.look()


# Clocks that are set, and hosts that sleep


def test_a_clock_that_is_set_back_by_ninety_seconds_doubles_nothing_and_loses_nothing(world: World) -> None:
    host = world.host(one=a_job(every(10).seconds))
    host.look()
    host.go_on(100.0)
    before = set(world.put(period=10))
    assert before == set(range(1, 11))
    host.clock.jump(-90.0)
    host.go_on(89.0)
    assert set(world.put(period=10)) == before
    host.go_on(101.0)
    assert set(world.put(period=10)) == set(range(1, 21))
    assert host.record.of(queue_events.ScheduleSetBack) == []


def test_a_clock_that_was_far_ahead_and_is_set_right_goes_on_at_once(world: World) -> None:
    host = world.host(one=a_job(every(10).seconds))
    host.look()
    host.go_on(30.0)
    host.clock.jump(86400.0)
    host.go_on(30.0)
    host.clock.jump(-86400.0)
    host.go_on(TICK_LOOK_S)
    assert world.state.last <= EPOCH + 70
    [event] = host.record.of(queue_events.ScheduleSetBack)
    assert event.seconds > SET_BACK_S
    host.go_on(60.0)
    found = set(world.put(until=13, period=10))
    assert {1, 2, 3, 7, 8, 9, 10, 11, 12} <= found


@pytest.mark.parametrize(
    ("policy", "late_s", "numbers"),
    [
        ("none", 0.0, [12]),
        ("none", 120.0, []),
        ("last", 0.0, [12]),
        ("last", 120.0, [12]),
        ("all", 0.0, list(range(1, 13))),
        ("all", 120.0, list(range(1, 13))),
    ],
)
def test_two_hours_asleep_give_exactly_the_ticks_that_the_policy_promises(
    world: World, policy: str, late_s: float, numbers: list[int]
) -> None:
    host = world.host(one=a_job(catch_up=policy))
    host.look()
    host.look()
    host.look(7200 + late_s)
    host.go_on(10.0)
    assert sorted(world.put()) == numbers
    assert world.state.skipped == 12 - len(numbers)
    assert sum(event.number for event in host.record.of(queue_events.TicksSkipped)) == 12 - len(numbers)
    host.look(600 - late_s)
    assert sorted(world.put()) == [*numbers, 13]


def test_all_missed_ticks_come_though_they_are_more_than_one_look_puts(world: World) -> None:
    host = world.host(one=a_job(every(10).seconds, catch_up="all"))
    host.look()
    host.look(3000.0)
    host.look()
    host.look()
    assert host.ticks.wait_s() > 0
    assert set(world.put(until=310, period=10)) == set(range(1, 301))


# Overlap


@pytest.mark.slow
def test_skip_leaves_ticks_out_until_the_task_before_has_ended(any_world: World) -> None:
    host = any_world.host(one=a_job(overlap="skip"))
    host.look()
    host.look(600)
    lease = hold(host.store, next(iter(host.client.list())))
    host.look(600)
    host.look(600)
    assert any_world.put() == {1: Status.RUNNING}
    assert any_world.state.skipped == 2
    skipped = [event.reason for event in host.record.of(queue_events.TicksSkipped)]
    assert skipped == ["the task before it is still open"] * 2
    now = host.clock.now()
    host.store.settle([writes.succeed(lease, now=now, expire_at=now + 10**6)])
    host.look(600)
    assert any_world.put() == {1: Status.SUCCESS, 4: Status.PENDING}


def test_skip_waits_for_the_end_of_a_task_that_was_cancelled_and_leaves_no_tick_out(any_world: World) -> None:
    host = any_world.host(one=a_job(overlap="skip"))
    host.look()
    host.look(600)
    lease = hold(host.store, next(iter(host.client.list())))
    host.client.cancel(lease.task_id)
    host.look(600)
    host.go_on(10)
    assert any_world.put() == {1: Status.RUNNING}
    assert any_world.state.skipped == 0
    now = host.clock.now()
    host.store.settle([writes.close(lease, reason="cancelled", now=now, expire_at=now + 10**6)])
    host.go_on(5)
    assert any_world.put() == {1: Status.DONE, 2: Status.PENDING}
    assert host.record.of(queue_events.TicksSkipped) == []


def test_cancel_previous_asks_a_task_that_runs_to_stop_and_puts_the_next(any_world: World) -> None:
    host = any_world.host(one=a_job(overlap="cancel_previous"))
    host.look()
    host.look(600)
    hold(host.store, next(iter(host.client.list())))
    host.look(600)
    first, second = host.client.list(newest_first=False)
    assert sorted([(first.status, first.cancel_requested), (second.status, second.cancel_requested)]) == [
        (Status.PENDING, False),
        (Status.RUNNING, True),
    ]
    host.look(600)  # the second waits in its queue: it is closed
    assert any_world.put() == {1: Status.RUNNING, 2: Status.DONE, 3: Status.PENDING}
    assert any_world.state.cancels is None


def test_a_previous_task_that_was_purged_is_in_nobodys_way(world: World) -> None:
    host = world.host(one=a_job(overlap="skip"))
    host.look()
    host.look(600)
    host.client.cancel(tick_id(NAME, int(EPOCH) + 600))
    host.client.purge(Status.DONE)
    host.look(600)
    assert world.put() == {2: Status.PENDING}


# Crashes and lost replies: at each call of the tick code

FAULTS = ("killed before", "killed after", "lost request", "lost reply", "no answers", "repeated by the SDK")
OVERLAPS = ("allow", "skip", "cancel_previous")
CATCH_UPS = ("none", "last", "all")
AFTER_MISSED: Final[dict[str, set[int]]] = {"none": set(), "last": {4}, "all": {2, 3, 4}}
"""Of the three that were missed."""


def after_a_fault(
    engine: Engine, overlap: str, catch_up: str, *, fault: str, at: int | None, late: bool, ends: bool
) -> tuple[dict[int, Status], State, Counter[str], bool]:
    """What is in the store when an agent met a fault at a call and another goes on; and whether it met it at all."""
    world, puts = World(engine), Counter[str]()
    one = a_job(overlap=overlap, catch_up=catch_up)
    engine_put = engine.put

    def put(rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        answers = engine_put(rows, fresh=fresh)
        puts.update(row["taskId"] for row, answer in zip(rows, answers, strict=True) if answer.won)
        return answers

    victim, other = world.host("victim", one), world.host("other", one)
    engine.put = put  # type: ignore[method-assign]
    try:
        for host in (victim, other):
            host.look()
            host.look(600.0)
        if ends:
            world.end(600)
        # One tick is due, or three with those that were missed for over a minute.
        seconds = 1800.0 + 61.0 if late else 600.0
        victim.clock.advance(seconds)
        victim.wire.calls, victim.wire.fault_at, victim.wire.fault = 0, at, fault
        is_alive = True
        try:
            victim.ticks.look()
        except Killed:
            is_alive = False
        except StoreUnavailable:
            pass
        met = at is not None and victim.wire.calls > at
        victim.wire.fault_at = None
        if is_alive:
            victim.go_on(20.0)
        other.clock.advance(seconds + (20.0 if is_alive else 0.0))
        other.go_on(20.0)
        other.go_on(600.0, 20.0)
    finally:
        engine.put = engine_put  # type: ignore[method-assign]
    return world.put(), world.state, puts, met


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("catch_up", CATCH_UPS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_fault_between_any_two_statements_loses_no_tick_and_doubles_none(
    overlap: str, catch_up: str, fault: str
) -> None:
    for late in (False, True):
        for ends in (False, True):
            wanted, state, _, _ = after_a_fault(
                SqliteEngine(MEMORY), overlap, catch_up, fault="", at=None, late=late, ends=ends
            )
            assert state.ticks == ()
            if overlap == "allow":
                assert set(wanted) == ({1, 5} | AFTER_MISSED[catch_up] if late else {1, 2, 3})
            calls = 0
            while True:
                found, row, puts, met = after_a_fault(
                    SqliteEngine(MEMORY), overlap, catch_up, fault=fault, at=calls, late=late, ends=ends
                )
                where = f"call {calls}, late {late}, ends {ends}"
                assert found == wanted, where
                assert replace(row, schedule=state.schedule) == state, where
                assert set(puts.values()) == {1}, where
                if not met:
                    break
                calls += 1
            assert calls >= (4 if overlap == "allow" and catch_up != "none" else 2)  # read, decide, put, confirm


@pytest.mark.slow
@pytest.mark.ministack
@pytest.mark.parametrize("fault", ["killed after", "no answers", "repeated by the SDK"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_fault_between_any_two_statements_is_survived_on_dynamodb(
    overlap: str, fault: str, ministack_endpoint: str, tmp_path: Path
) -> None:
    wanted, state, _, _ = after_a_fault(
        SqliteEngine(MEMORY), overlap, "last", fault="", at=None, late=False, ends=overlap == "skip"
    )
    for calls in range(8):
        with stands.open_stand("ministack", tmp_path, ministack_endpoint) as stand:
            found, row, puts, met = after_a_fault(
                stand.store.engine, overlap, "last", fault=fault, at=calls, late=False, ends=overlap == "skip"
            )
        assert (found, row, set(puts.values())) == (wanted, state, {1}), f"call {calls}"
        if not met:
            break
    assert calls >= 4


def test_a_decision_of_an_agent_that_died_is_carried_out_by_another_within_seconds(world: World) -> None:
    victim, other = world.host("victim"), world.host("other")
    for host in (victim, other):
        host.look()
    victim.clock.advance(600)
    victim.wire.calls, victim.wire.fault_at, victim.wire.fault = 0, 1, "killed after"
    with pytest.raises(Killed):
        victim.ticks.look()
    assert (world.put(), world.state.ticks) == ({}, (int(EPOCH) + 600,))
    other.look(600)
    assert world.put() == {}  # it may be about to put it
    other.go_on(TICK_RESUME_S + 0.5)
    assert world.put() == {1: Status.PENDING}
    assert world.state.ticks == ()


def test_an_agent_that_comes_late_with_its_decision_does_no_harm(world: World) -> None:
    """It stops after its decision for so long that another has carried it out and the task has ended."""
    slow, other = world.host("slow"), world.host("other")
    for host in (slow, other):
        host.look()

    def meanwhile() -> None:
        other.look(600)
        other.go_on(TICK_RESUME_S + 0.5)
        world.end(600)
        other.look(600)

    put = slow.wire.put

    def late(rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        meanwhile()
        return put(rows, fresh=fresh)

    slow.wire.put = late  # type: ignore[method-assign]
    slow.look(600)
    assert world.put() == {1: Status.SUCCESS, 2: Status.PENDING}
    assert slow.record.of(queue_events.TickPut) == []
    assert slow.put == []


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("fault", ["lost request", "lost reply", "no answers"])
def test_an_agent_that_is_alone_goes_on_with_its_own_decision_after_seconds(
    world: World, fault: str, call: int
) -> None:
    host = world.host()
    host.look()
    host.clock.advance(600)
    host.wire.calls, host.wire.fault_at, host.wire.fault = 0, call, fault
    with pytest.raises(StoreUnavailable):
        host.ticks.look()
    host.go_on(TICK_LOOK_S + 1.0)
    assert world.put() == {1: Status.PENDING}
    assert (world.state.ticks, world.state.last) == ((), int(EPOCH) + 600)


def test_a_store_that_does_not_answer_is_asked_again_a_few_seconds_later(world: World) -> None:
    host = world.host()
    host.look()
    host.clock.advance(600)
    host.wire.fault = "lost request"
    for _ in range(3):
        host.wire.fault_at = host.wire.calls
        with pytest.raises(StoreUnavailable):
            host.ticks.look()
        calls = host.wire.calls
        assert 0 < host.ticks.wait_s() <= TICK_LOOK_S
        host.ticks.look()
        assert host.wire.calls == calls  # not before
        host.clock.advance(TICK_LOOK_S)
    host.ticks.look()
    assert world.put() == {1: Status.PENDING}


# Several versions of the code


def test_a_new_version_writes_its_schedule_and_an_old_one_follows(any_world: World) -> None:
    old, new = any_world.host("old"), any_world.host("new", a_job(every(1).hours, catch_up="none"))
    old.look()
    old.go_on(700.0, 50.0)
    new.clock.advance(700.0)
    new.look()
    assert any_world.state.schedule == a_job(every(1).hours, catch_up="none").schedule
    [event] = new.record.of(queue_events.ScheduleSet)
    assert (event.spec, event.before) == ("every hour", "every 10 minutes")
    old.go_on(2300.0, 50.0)
    assert set(any_world.put()) == {1}
    old.go_on(3700.0, 50.0)
    assert set(any_world.put()) == {1, 6}  # full hours
    assert any_world.state.schedule == a_job(every(1).hours, catch_up="none").schedule


def test_a_rollback_writes_the_old_schedule_again(world: World) -> None:
    world.host("old").look()
    world.host("new", a_job(every(1).hours), at=10.0).look()
    again = world.host("old-again", at=20.0)
    again.look()
    assert world.state.schedule == a_job().schedule
    assert world.state.last == int(EPOCH) + 20
    again.look(580.0)
    assert set(world.put()) == {1}


def test_a_policy_that_changes_loses_no_tick(world: World) -> None:
    world.host("old").look()
    new = world.host("new", a_job(overlap="skip", catch_up="all"), at=1800.0 + 120.0)
    new.go_on(5.0)
    assert world.state.schedule == a_job(overlap="skip", catch_up="all").schedule
    assert set(world.put()) == {1}  # the first of three is open, so that the others are left out


def test_a_tick_of_the_old_schedule_that_is_in_time_is_put_before_it_is_replaced(world: World) -> None:
    world.host("old").look()
    new = world.host("new", a_job(every(1).hours), at=600.0 + 5.0)
    new.go_on(2.0)
    assert set(world.put()) == {1}
    assert world.state.schedule == a_job(every(1).hours).schedule


def test_a_job_that_comes_back_with_another_schedule_does_not_catch_up_with_the_old_one(world: World) -> None:
    world.host("old", a_job(catch_up="all")).look()
    new = world.host("new", a_job(every(1).hours, catch_up="all"), at=20 * 86400.0 + 300.0)
    new.go_on(2.0)
    assert list(new.client.list()) == []
    assert world.state.schedule.spec == every(1).hours


def test_a_schedule_of_every_second_is_replaced_all_the_same(world: World) -> None:
    world.host("old", a_job(every().second)).look()
    new = world.host("new", a_job(), at=30.0)
    new.go_on(5.0, 1.0)  # each time a tick is due
    assert world.state.schedule == a_job().schedule


def test_a_row_of_a_later_version_is_left_alone_under_way_and_replaced_at_the_start(any_world: World) -> None:
    host = any_world.host()
    host.look()
    row = any_world.row
    later = {**row["info"], "spec": {"moon": "full"}}
    host.store.write_rows(
        [
            Write(
                verb="later",
                task_id=row["taskId"],
                set={"info": later},
                increase={"fence": 1},
                require=(Is("fence", row["fence"]),),
            )
        ]
    )
    host.go_on(1300.0, 100.0)
    assert any_world.row["info"] == later
    assert any_world.put() == {}
    [event] = host.record.of(queue_events.ScheduleUnreadable)
    assert "upgrade" in event.error
    host.clock.jump(-3600.0)
    assert host.ticks.wait_s() > 0  # nothing that it knows is ahead of the clock
    any_world.host("next", at=1300.0).look()
    assert any_world.state.schedule == a_job().schedule


# The life of a row


def test_the_row_is_extended_while_an_agent_has_the_job(any_world: World) -> None:
    host = any_world.host(one=a_job(every(400).days))
    host.look()
    first = any_world.row["expireAt"]
    assert first == int(EPOCH + KEPT_S)
    host.look(KEPT_S - EXTENDED_S - 3600)
    assert any_world.row["expireAt"] == first
    host.look(7200.0)
    assert any_world.row["expireAt"] > first
    assert any_world.row["createdAt"] == EPOCH


def test_a_row_that_has_expired_and_is_still_there_begins_afresh(any_world: World) -> None:
    any_world.host(one=a_job(catch_up="all")).look()
    host = any_world.host("later", a_job(catch_up="all"), at=KEPT_S + 100.0)
    host.look()
    assert any_world.state.last == int(EPOCH + KEPT_S + 100)
    assert list(host.client.list()) == []
    assert any_world.row["expireAt"] > EPOCH + 2 * KEPT_S
    host.look(600)
    assert len(list(host.client.list())) == 1


def test_a_row_that_was_taken_away_is_put_again(world: World) -> None:
    host = world.host()
    host.look()
    host.look(600)
    world.engine.delete([world.row])
    host.go_on(1000.0, 5.0)
    host.look(600)
    assert world.state.last > EPOCH + 1500
    assert 3 in world.put() or 2 in world.put()


# Commands


def test_the_schedules_are_told_without_the_code_of_their_jobs(any_world: World) -> None:
    host = any_world.host(one=a_job(jitter_s=30, overlap="skip"))
    assert host.client.schedules.list() == []
    host.look()
    host.look(600)
    [one] = host.client.schedules.list()
    assert one == host.client.schedules.get(NAME) == host.client.schedules.get(a_job())
    assert (one.job, one.spec, one.overlap, one.jitter_s) == (NAME, "every 10 minutes", "skip", 30)
    assert (one.last, one.next, one.previous) == (
        int(EPOCH) + 600,
        int(EPOCH) + 1200,
        tick_id(NAME, int(EPOCH) + 600),
    )
    assert host.client.schedules.next_ticks(NAME, number=3) == [int(EPOCH) + 600 * number for number in (2, 3, 4)]
    with pytest.raises(TaskNotFound, match="an agent that has it as a periodic job puts it"):
        host.client.schedules.get("another")


def test_a_pause_leaves_its_ticks_out_and_the_next_one_after_it_comes(any_world: World) -> None:
    host = any_world.host(one=a_job(catch_up="all"))
    host.look()
    paused = host.client.schedules.pause(NAME, reason="moving house")
    assert (paused.paused, paused.next, paused.reason) == (EPOCH, None, "moving house")
    host.go_on(1500.0, 50.0)
    assert any_world.put() == {}
    assert host.client.schedules.resume(NAME).paused is None
    host.go_on(301.0, 50.0)
    assert set(any_world.put()) == {3}


def test_a_pause_ends_by_itself(any_world: World) -> None:
    host = any_world.host(one=a_job(catch_up="all"))
    host.look()
    paused = host.client.schedules.pause(NAME, for_s=1300)
    assert (paused.paused_until, paused.next) == (EPOCH + 1300, int(EPOCH) + 1800)
    host.go_on(1790.0, 50.0)
    assert any_world.put() == {}
    host.go_on(20.0, 5.0)
    assert set(any_world.put()) == {3}
    assert host.client.schedules.get(NAME).paused is None
    assert any_world.state.paused is None


def test_a_pause_that_is_changed_keeps_its_begin_and_its_reason(world: World) -> None:
    host = world.host()
    host.look()
    host.client.schedules.pause(NAME, reason="moving house")
    host.clock.advance(100)
    again = host.client.schedules.pause(NAME, for_s=60)
    assert (again.paused, again.paused_until, again.reason) == (EPOCH, EPOCH + 160, "moving house")
    host.clock.advance(100)
    anew = host.client.schedules.pause(NAME)
    assert (anew.paused, anew.reason) == (EPOCH + 200, None)
    assert host.client.schedules.resume(NAME) == host.client.schedules.resume(NAME)


def test_a_pause_does_not_stop_a_tick_that_is_decided(world: World) -> None:
    victim, other = world.host("victim"), world.host("other")
    for host in (victim, other):
        host.look()
    victim.clock.advance(600)
    victim.wire.calls, victim.wire.fault_at, victim.wire.fault = 0, 1, "killed after"
    with pytest.raises(Killed):
        victim.ticks.look()
    other.clock.advance(600)
    other.client.schedules.pause(NAME)
    other.go_on(10.0)
    assert set(world.put()) == {1}
    assert (world.state.ticks, world.state.paused) == ((), EPOCH + 600)


@pytest.mark.parametrize("for_s", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_pause_of_no_time_is_refused(world: World, for_s: float) -> None:
    host = world.host()
    host.look()
    with pytest.raises(ConfigurationError, match="for_s"):
        host.client.schedules.pause(NAME, for_s=for_s)
    with pytest.raises(ConfigurationError, match="reason"):
        host.client.schedules.pause(NAME, reason="two\nlines")


def test_run_now_puts_a_task_at_once_and_leaves_the_ticks_alone(any_world: World) -> None:
    host = any_world.host(one=a_job(jitter_s=60))
    host.look()
    host.clock.advance(33.4)
    host.client.schedules.pause(NAME)
    task = host.client.schedules.run_now(NAME)
    assert (task.task_id, task.created_at) == (tick_id(NAME, int(EPOCH) + 33), EPOCH + 33)
    assert Tick.model_validate(task.payload).at == datetime.fromtimestamp(EPOCH + 33, UTC)
    assert host.client.schedules.run_now(NAME).task_id == task.task_id
    host.client.schedules.resume(NAME)
    host.look(600 - 33.4)
    assert set(any_world.put()) == {1}


def test_run_now_in_the_second_of_a_tick_is_that_tick(world: World) -> None:
    for overlap in OVERLAPS:
        host = World(SqliteEngine(MEMORY)).host(one=a_job(overlap=overlap))
        host.look()
        host.clock.advance(600)
        task = host.client.schedules.run_now(NAME)
        host.look()
        host.go_on(10.0)
        assert [one.task_id for one in host.client.list(status=Status.PENDING)] == [task.task_id]


def test_run_now_keeps_to_the_policy_of_overlap(world: World) -> None:
    host = world.host(one=a_job(overlap="skip"))
    host.look()
    host.look(600)
    host.clock.advance(5)
    with pytest.raises(NotAllowed, match="still open"):
        host.client.schedules.run_now(NAME)
    host.client.cancel(tick_id(NAME, int(EPOCH) + 600))
    host.client.schedules.run_now(NAME)
    host.look(595)
    assert set(world.put()) == {1}  # that of the hand is still open
    other = World(SqliteEngine(MEMORY)).host(one=a_job(overlap="cancel_previous"))
    other.look()
    other.look(600)
    other.clock.advance(5)
    task = other.client.schedules.run_now(NAME)
    assert [one.task_id for one in other.client.list(status=Status.PENDING)] == [task.task_id]


def test_a_command_that_races_with_agents_is_tried_again(world: World) -> None:
    host, other = world.host(), world.host("other")
    host.look()
    other.look()

    def meanwhile() -> None:
        host.wire.between = lambda: None
        other.look(600)

    host.clock.advance(600)
    host.wire.between = meanwhile
    host.client.schedules.pause(NAME)
    assert world.state.paused is not None
    assert world.state.last == int(EPOCH) + 600
    assert set(world.put()) == {1}


# A whole agent


@pytest.mark.slow
def test_an_agent_runs_the_handler_of_a_tick_with_its_moment() -> None:
    seen: list[Tick] = []

    @periodic(every().second)
    @job("test.each")
    def each(ctx: Context, payload: Tick) -> None:
        assert ctx.task_id == f"test.each@{payload.at:%Y-%m-%dT%H:%M:%SZ}"
        seen.append(payload)

    with serving(each) as stage:
        eventually(lambda: len(seen) >= 3, LONG_S)
        put = stage.record.of(queue_events.TickPut)
    moments = [tick.at for tick in seen]
    assert len(set(moments)) == len(moments)
    assert all(moment.microsecond == 0 and moment.tzinfo is not None for moment in moments)
    assert {event.job for event in put} == {"test.each"}
    assert all(event.late_s < 5 for event in put)


def test_a_day_passes_in_a_test_without_waiting() -> None:
    seen: list[Tick] = []

    @periodic(every().day.at("02:00", "Europe/Berlin"))
    @job("test.nightly")
    def nightly(ctx: Context, payload: Tick) -> None:
        seen.append(payload)

    clock = FakeClock(datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp())
    client = memory_client(clock)
    for _ in range(3):
        run_until_idle(Agent(client.store, Registry(nightly), client.settings, first_poll_s=0.0), client)
        clock.advance(86400)
    assert [tick.at.isoformat() for tick in seen] == ["2026-03-29T01:00:00+00:00", "2026-03-30T00:00:00+00:00"]


@pytest.mark.slow
def test_a_host_whose_own_clock_is_set_back_puts_its_ticks_in_time() -> None:
    """The library that runs the pieces of housekeeping goes by that clock, so that they come late."""
    ran = threading.Semaphore(0)

    @periodic(every().second)
    @job("test.each")
    def each(ctx: Context, payload: Tick) -> None:
        ran.release()

    with serving(each) as stage:
        assert ran.acquire(timeout=LONG_S)
        for piece in stage.agent._housekeeping._scheduler.get_jobs():
            assert piece.next_run is not None
            piece.next_run += timedelta(seconds=90)
        for _ in range(3):
            assert ran.acquire(timeout=LONG_S)
        assert all(event.late_s < LONG_S for event in stage.record.of(queue_events.TickPut))


@pytest.mark.slow
def test_two_agents_of_one_file_run_each_tick_once(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    guard = threading.Lock()

    @periodic(every().second, catch_up="all")
    @job("test.each")
    def each(ctx: Context, payload: Tick) -> None:
        with guard:
            seen[ctx.task_id] += 1

    path = str(tmp_path / "tasks.db")
    with (
        serving(each, store=TaskStore(SqliteEngine(path))) as one,
        serving(each, store=TaskStore(SqliteEngine(path))) as two,
    ):
        eventually(lambda: len(seen) >= 4, LONG_S)
        assert one.is_running and two.is_running
    assert set(seen.values()) == {1}
    names = sorted(seen)
    first, last = (datetime.fromisoformat(name.partition("@")[2]) for name in (names[0], names[-1]))
    assert len(names) == (last - first).total_seconds() + 1


@pytest.mark.slow
def test_a_dead_store_does_not_end_the_ticks_of_an_agent(tmp_path: Path) -> None:
    ran = threading.Semaphore(0)

    @periodic(every().second)
    @job("test.each")
    def each(ctx: Context, payload: Tick) -> None:
        ran.release()

    faulty = FaultyEngine(SqliteEngine(MEMORY))
    with serving(each, store=TaskStore(faulty)) as stage:
        assert ran.acquire(timeout=LONG_S)
        faulty.outage()
        stage.record.wait(events.StoreFailed)
        faulty.calm()
        while ran.acquire(blocking=False):
            pass
        assert ran.acquire(timeout=LONG_S)
        assert ran.acquire(timeout=LONG_S)


def test_claimed_tasks_of_other_jobs_are_not_touched(world: World) -> None:
    host = world.host(one=a_job(overlap="cancel_previous"))
    lease = claimed(host.store, "another")
    host.look()
    host.look(600)
    host.look(600)
    assert host.client.get("another").lease_owner == lease.owner
