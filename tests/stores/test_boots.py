"""Clocks of one machine that are set, and machines that start again: leases in a SQLite file count from its start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.support.engine import put, seen, settings
from thunderagent.agent.sweep import LostLeases
from thunderagent.client import Client
from thunderagent.model.clock import BootClock, HostClock, boot_id, on_host, since_boot
from thunderagent.model.errors import StoreUnavailable
from thunderagent.model.task import Lane, Lease, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.ops.explain import explain
from thunderagent.ops.waiting import why
from thunderagent.queue.unique import UniqueKeys
from thunderagent.stores.sqlite import boots
from thunderagent.stores.sqlite.engine import LOST_S, SqliteEngine
from thunderagent.stores.tasks import Beat, Enqueued, TaskStore, Wanted
from thunderagent.testing import FakeClock, memory_store

LEASE_S: Final = 60.0
GUARD_S: Final = 2.0
STEPS: Final = pytest.mark.parametrize("hours", [-48.0, -1.0, 1.0, 48.0])


class Machine:
    """A machine with a file: its clock is set by the test, and it starts again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = FakeClock()
        self.boot_id: str | None = "first"
        self._stores: list[TaskStore] = []

    def process(self, boot_id: str | None = "") -> TaskStore:
        """The store of a new process; None: of a release that knows only the clock of its host."""
        name = self.boot_id if boot_id == "" else boot_id
        clock = HostClock(self.time.now, boot=self.time.monotonic, boot_id=name)
        self._stores.append(TaskStore(SqliteEngine(str(self.path), clock=clock), monotonic=self.time.monotonic))
        return self._stores[-1]

    def start_again(self, boot_id: str, *, after_s: float = 30.0, off_s: float = 0.0) -> None:
        """Everything that ran is gone; seconds count from zero, and its clock may be wrong."""
        self.time = FakeClock(self.time.now() + after_s + off_s, 5.0)
        self.boot_id = boot_id

    def close(self) -> None:
        for store in self._stores:
            store.engine.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "tasks.db")
    yield machine
    machine.close()


def claimed(store: TaskStore, name: str, owner: str = "one") -> Lease:
    """A task that an announced agent runs."""
    store.announce(owner, {"queues": {}}, lives_s=45.0)
    [lease] = store.claim([Wanted(seen(put(store, name)), LEASE_S)], owner=owner)
    return lease


def lost(store: TaskStore) -> list[str]:
    """What an agent that has just started would take over."""
    sweep = LostLeases(store, guard_s=GUARD_S)
    return sorted(task.task_id for task in sweep.find([Lane()]))


def row_of(store: TaskStore, name: str) -> Task:
    return store.peek([name])[name]


# The clock is set


@STEPS
def test_a_live_task_is_not_taken_over_when_the_clock_is_set(machine: Machine, hours: float) -> None:
    holder = machine.process()
    leases = [claimed(holder, f"t{number}") for number in range(4)]
    machine.time.jump(hours * 3600)
    assert lost(machine.process()) == []
    machine.time.advance(LEASE_S - 1)
    assert lost(machine.process()) == []
    assert all(one.lease for one in holder.renew([Beat(lease) for lease in leases]))
    machine.time.jump(-2 * hours * 3600)
    machine.time.advance(LEASE_S - 1)
    assert lost(machine.process()) == []


@STEPS
def test_the_first_write_of_a_process_after_a_step_has_the_right_time(machine: Machine, hours: float) -> None:
    first = machine.process()
    task = put(first, "a")
    machine.time.jump(hours * 3600)
    [lease] = machine.process().claim([Wanted(seen(task), LEASE_S)], owner="one")
    assert lease.task.lock_time == pytest.approx(first.clock.leases.now() + LEASE_S, abs=0.01)
    assert lost(machine.process()) == []


@STEPS
def test_a_dead_agents_task_is_found_in_time_although_the_clock_is_set(machine: Machine, hours: float) -> None:
    claimed(machine.process(), "a")
    machine.time.jump(hours * 3600)
    machine.time.advance(LEASE_S + GUARD_S + 0.1)
    heir = machine.process()
    assert lost(heir) == ["a"]
    [lease] = heir.take_over([(row_of(heir, "a"), LEASE_S)], owner="heir").leases
    assert lost(machine.process()) == []
    machine.time.advance(LEASE_S + GUARD_S + 0.1)
    assert lost(machine.process()) == [lease.task_id]


@STEPS
def test_agents_and_turns_live_on_when_the_clock_is_set(machine: Machine, hours: float) -> None:
    store = machine.process()
    store.announce("one", {"queues": {}}, lives_s=45.0)
    assert store.take_turn("sweep", owner="one", lasts_s=15.0)
    machine.time.jump(hours * 3600)
    other = machine.process()
    other.engine.expire(other.clock.now())
    assert [(one.name, one.is_lost) for one in other.agents(lost=True)] == [("one", False)]
    assert not other.take_turn("sweep", owner="other", lasts_s=15.0)
    machine.time.advance(16.0)
    assert other.take_turn("sweep", owner="other", lasts_s=15.0)
    machine.time.advance(45.0)
    assert [(one.name, one.is_lost) for one in other.agents(lost=True)] == [("one", True)]
    machine.time.advance(LOST_S)
    other.engine.expire(other.clock.now())
    assert other.agents(lost=True) == [] or hours < 0, "on a clock that was set back it stays for as much longer"


@pytest.mark.parametrize("how", ["expire", "purge"])
def test_the_key_of_a_task_that_is_just_put_stays_when_the_clock_is_set(machine: Machine, how: str) -> None:
    """An ended task of the same id goes between the key and the task."""
    store, other = machine.process(), machine.process()
    keys, task = UniqueKeys(store), put(store, unique_key="k", unique_scope="until_done")
    now = store.clock.now()
    assert store.write_tasks([writes.cancel_waiting(task, reason="", now=now, expire_at=now + 60.0)]) != [None]

    def putting(task: Task) -> Enqueued:
        machine.time.jump(3600.0)
        if how == "expire":
            assert other.engine.expire(other.clock.now()) == 1
        else:
            assert Client(other, settings()).purge("DONE") == 1
        return store.enqueue([task])[0]

    assert keys.put(task, putting, own_id=True, shards=1).status is Status.PENDING
    assert keys.put(replace(task, task_id="b"), putting, own_id=False, shards=1).task_id == "a"


def test_the_wall_clock_says_when_a_task_is_due(machine: Machine) -> None:
    store = machine.process()
    put(store, "a", created_at=machine.time.now() + 1800.0)
    assert store.ready(Lane(), limit=10).entries == ()
    machine.time.jump(3600.0)
    assert [one.task_id for one in store.ready(Lane(), limit=10).entries] == ["a"]
    machine.time.jump(-7200.0)
    assert store.ready(Lane(), limit=10).entries == ()


@STEPS
def test_people_read_the_end_of_a_lease_on_their_own_clock(machine: Machine, hours: float) -> None:
    claimed(store := machine.process(), "a")
    machine.time.jump(hours * 3600)
    machine.time.advance(20.0)
    task = row_of(machine.process(), "a")
    told = explain(store, task)
    assert told.holding is not None
    assert told.holding.ends == pytest.approx(machine.time.now() + LEASE_S - 20.0, abs=0.01)
    assert not told.holding.is_over
    assert not [text for text in why(store, task) if "is over" in text or "ended" in text]
    assert on_host(store.clock, store.clock.leases.now()) == pytest.approx(store.clock.now())


# The place on the epoch


def test_processes_that_start_on_both_sides_of_a_step_count_from_the_same_second(machine: Machine) -> None:
    early, late = machine.process(), machine.process()
    early.clock.leases.now()  # it has found no place, chosen one, and has written nothing
    machine.time.jump(3600.0)
    claimed(late, "a")
    with pytest.raises(StoreUnavailable, match="was set while the first agents"):
        early.announce("early", {"queues": {}}, lives_s=45.0)
    assert early.engine.get(["agent:early"]) == {}, "what has a wrong time is not written"
    early.announce("early", {"queues": {}}, lives_s=45.0)
    assert early.clock.leases.now() == late.clock.leases.now()
    assert [one.is_lost for one in early.agents(lost=True)] == [False, False]
    assert lost(early) == []


def test_a_process_that_only_reads_writes_nothing(machine: Machine) -> None:
    claimed(machine.process(), "a")
    machine.start_again("second")
    reader = machine.process()
    before = reader.engine.get([boots.ROW_ID])
    reader.get(["a"])
    lost(reader)
    assert reader.agents(lost=True) != []
    assert reader.engine.get([boots.ROW_ID]) == before


def test_a_row_that_cannot_be_read_is_made_anew(machine: Machine) -> None:
    put(machine.process(), "a")
    with sqlite3.connect(machine.path) as connection:
        connection.execute('UPDATE tasks SET "info" = \'[\' WHERE "taskId" = ?', (boots.ROW_ID,))
    claimed(machine.process(), "b")
    assert lost(machine.process()) == []
    assert machine.process().engine.get([boots.ROW_ID])[boots.ROW_ID]["info"]["id"] == "first"


@pytest.mark.parametrize("spoilt", [f"'{'[' * 100_000}'", "CAST(x'ff5b' AS TEXT)", "x'ff'", "'[5]'", "NULL"])
@pytest.mark.parametrize("first_write", ["enqueue", "delete"])
def test_a_row_of_an_agent_that_cannot_be_read_keeps_nobody_from_writing(
    machine: Machine, spoilt: str, first_write: str
) -> None:
    before = machine.process()
    claimed(before, "a")
    ended = put(before, "b", status=Status.SUCCESS)
    with sqlite3.connect(machine.path) as connection:
        connection.execute(f'UPDATE tasks SET "info" = {spoilt} WHERE "taskId" IN (?, ?)', ("agent:one", boots.ROW_ID))
    machine.start_again("second")
    store = machine.process()
    if first_write == "delete":
        assert store.engine.delete([ended.to_row()]) == [True]
    else:
        put(store, "c")
    assert store.clock.leases.now() == machine.process().clock.leases.now()


def test_the_row_is_no_task(machine: Machine) -> None:
    store = machine.process()
    put(store, "a")
    assert store.peek([boots.ROW_ID]) == {}
    assert store.engine.lanes() == [Lane()]


# The machine starts again


@pytest.mark.parametrize("off_s", [-7200.0, -40.0, 0.0, 7200.0])
def test_leases_of_another_start_of_the_machine_are_over(machine: Machine, off_s: float) -> None:
    """Also in a file that was copied to another machine."""
    store = machine.process()
    claimed(store, "a")
    assert store.take_turn("sweep", owner="one", lasts_s=15.0)
    machine.start_again("second", after_s=1.0, off_s=off_s)
    heir = machine.process()
    claimed(heir, "b", owner="heir")
    machine.time.advance(0.01)
    assert {one.name: one.is_lost for one in heir.agents(lost=True)} == {"one": True, "heir": False}
    assert heir.take_turn("sweep", owner="heir", lasts_s=15.0) or off_s == 0.0
    machine.time.advance(GUARD_S + 0.1)
    assert lost(heir) == ["a"]
    assert lost(machine.process()) == ["a"]


def test_an_agent_of_a_release_before_keeps_its_lease(machine: Machine) -> None:
    """It runs beside us: after a way back, a start of the machine, and another upgrade."""
    claimed(machine.process(), "before")
    machine.start_again("second")
    older = machine.process(boot_id=None)
    lease = claimed(older, "older", owner="older")
    machine.time.advance(10.0)
    claimed(machine.process(), "newer", owner="newer")
    machine.time.advance(GUARD_S + 0.1)
    assert lost(machine.process()) == ["before"]
    assert older.renew([Beat(lease)])[0].lease is not None
    assert lost(older) == ["before"]


def test_a_file_of_a_release_before_is_taken_as_it_is(machine: Machine) -> None:
    claimed(machine.process(boot_id=None), "older", owner="older")
    claimed(machine.process(), "newer")
    assert lost(machine.process()) == []
    machine.time.advance(LEASE_S + GUARD_S + 0.1)
    assert lost(machine.process()) == ["newer", "older"]


# This machine


def test_a_store_in_a_file_counts_its_leases_from_the_start_of_this_machine(tmp_path: Path) -> None:
    engine = SqliteEngine(str(tmp_path / "tasks.db"))
    leases = engine.clock.leases
    if boot_id() is None:
        assert leases is engine.clock
        return
    assert isinstance(leases, BootClock)
    assert leases.boot_id == boot_id()
    put(TaskStore(engine), "a")
    assert leases.is_placed
    assert leases.now() == pytest.approx(since_boot() + leases.zero, abs=1.0)
    assert isinstance(engine.sibling().clock.leases, BootClock)
    engine.close()


def test_other_clocks_are_those_of_their_leases() -> None:
    clock = HostClock(lambda: 42.0)
    assert clock.leases is clock
    assert memory_store(FakeClock()).clock.leases is not None
    assert Status.RUNNING < f"{Status.RUNNING}#lane" < f"{Status.RUNNING}~", "the range in which leases are looked for"


def test_the_first_write_to_a_file_enters_no_other_connection_in_the_middle_of_it(machine: Machine) -> None:
    """A fork would wait for the one connection and hold the other, as the clock asks the one that was made last."""
    store = machine.process()
    clock = store.clock.leases
    assert isinstance(clock, BootClock)
    asked: list[bool] = []
    clock.find = lambda: asked.append(True)
    [answer] = store.engine.put([{"taskId": "a", "status": "PENDING", "createdAt": 1.0, "job": "j", "fence": 0}])
    assert answer.won
    assert clock.is_placed
    assert asked == []
