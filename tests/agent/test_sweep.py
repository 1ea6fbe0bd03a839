"""The tasks of lost agents are found in time, never too early, and cheaply; what a crash left undone is healed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Final

import pytest

from tests.support.engine import Recorder, Rejecting, claimed, put, seen
from thunderagent.agent.sweep import RECHECKED, LostLeases, Rescuer
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import DateClock, SharedClock, process_start
from thunderagent.model.conditions import Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Lane, Lease, Row, Status, Task
from thunderagent.model.writes import tasks as writes
from thunderagent.model.writes.limits import limit_row
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.limits.permits import holders_of
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import Beat, Doubt, TaskStore, Wanted
from thunderagent.testing import FakeClock

GUARD = 2.0
LANES = (Lane(),)


class Counting(SqliteEngine):
    """Counts the reads of rows."""

    reads = 0

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        self.reads += len(task_ids)
        return super().get(task_ids)


class Unusable(FakeClock):
    """A shared clock of which nothing is known."""

    is_usable = False

    def now(self) -> float:
        raise AssertionError("nobody may judge a lease by this clock")

    earliest = latest = now


class Setting:
    """One agent that holds leases, and another that looks for lost ones, on a clock set by the test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = Counting(MEMORY, clock=self.clock)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.lost = self.observer(self.store)
        self.rescuer = self.a_rescuer("rescuer")

    def observer(self, store: TaskStore) -> LostLeases:
        return LostLeases(store, guard_s=GUARD)

    def a_rescuer(self, owner: str, max_crashes: int = 3) -> Rescuer:
        dependents = Dependents(self.store, self.bus, keep_success_s=1000, keep_failed_s=2000)
        return Rescuer(
            self.store,
            self.bus,
            dependents,
            LostLeases(self.store, owner=owner, guard_s=GUARD),
            owner=owner,
            max_crashes=max_crashes,
            sweep_s=15,
        )

    def find(self, lost: LostLeases | None = None) -> list[str]:
        return [task.task_id for task in (lost or self.lost).find(LANES)]

    def row(self, name: str = "a") -> Task:
        return self.store.get([name])[name]

    def beat(self, lease: Lease) -> Lease:
        [renewal] = self.store.renew([Beat(lease)])
        assert renewal.lease is not None
        return renewal.lease

    def elsewhere(self, clock: SharedClock) -> TaskStore:
        """The same rows, seen by a host with another clock."""
        engine = Counting(MEMORY, clock=clock)
        engine._link = self.engine._link
        return TaskStore(engine, monotonic=self.clock.monotonic)


@pytest.fixture
def at() -> Setting:
    return Setting()


# By the shared clock


def test_a_lease_is_lost_when_its_expiry_and_the_guard_are_past(at: Setting) -> None:
    claimed(at.store, lease_s=300)
    at.clock.advance(300)
    assert at.find() == []
    at.clock.advance(GUARD)
    assert at.find() == []
    at.clock.advance(0.01)
    assert at.find() == ["a"]


def test_a_lease_that_is_renewed_is_never_lost(at: Setting) -> None:
    lease = claimed(at.store, lease_s=300)
    for _ in range(100):
        at.clock.advance(60)
        lease = at.beat(lease)
        assert at.find() == []
    at.clock.advance(302.1)
    assert at.find() == ["a"]


def test_a_holder_has_stopped_long_before_anybody_may_take_its_task(at: Setting) -> None:
    lease = claimed(at.store, lease_s=300)
    assert at.row().lock_time is not None
    stops_in = lease.deadline(0.2) - at.clock.monotonic()
    at.clock.advance(stops_in)
    assert at.find() == []
    at.clock.advance(60 + GUARD)
    assert at.find() == []


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_host_whose_clock_is_wrong_takes_nothing_early_and_nothing_late(at: Setting, minutes: int) -> None:
    clock = DateClock(monotonic=at.clock.monotonic, host=lambda: at.clock.now() + minutes * 60)
    lost = at.observer(at.elsewhere(clock))
    lease = claimed(at.store, lease_s=300)
    assert not clock.is_usable
    assert at.find(lost) == []
    for _ in range(10):
        at.clock.advance(60.3)
        moment = at.clock.monotonic()
        clock.observe(formatdate(at.clock.now(), usegmt=True), sent=moment - 0.05, received=moment)
        lease = at.beat(lease)
        assert at.find(lost) == []
    at.clock.advance(300 + GUARD - 0.1)
    assert at.find(lost) == []
    at.clock.advance(1.2)
    assert at.find(lost) == ["a"]


def test_an_expiry_that_was_written_too_late_is_caught_by_standing_still(at: Setting) -> None:
    claimed(at.store, lease_s=300)
    slow = at.elsewhere(FakeClock(at.clock.now() - 600))
    lost = at.observer(slow)
    assert at.find(lost) == []
    at.clock.advance(300 + GUARD)
    assert at.find(lost) == []
    at.clock.advance(0.1)
    assert at.find(lost) == ["a"]


# Without a usable clock


def test_without_a_usable_clock_only_standing_still_for_a_whole_lease_counts(at: Setting) -> None:
    claimed(at.store, lease_s=300)
    lost = at.observer(at.elsewhere(Unusable()))
    at.clock.advance(10_000)
    assert at.find(lost) == []
    at.clock.advance(300 + GUARD)
    assert at.find(lost) == []
    at.clock.advance(0.1)
    assert at.find(lost) == ["a"]


def test_without_a_usable_clock_every_beat_starts_the_wait_again(at: Setting) -> None:
    lease = claimed(at.store, lease_s=300)
    lost = at.observer(at.elsewhere(Unusable()))
    for _ in range(5):
        assert at.find(lost) == []
        at.clock.advance(299)
        lease = at.beat(lease)
    at.clock.advance(10)
    assert at.find(lost) == []
    at.clock.advance(300)
    assert at.find(lost) == []
    at.clock.advance(GUARD + 300)
    assert at.find(lost) == ["a"]


def test_a_new_fence_is_a_new_holder_that_gets_a_whole_lease(at: Setting) -> None:
    claimed(at.store, lease_s=300)
    lost = at.observer(at.elsewhere(Unusable()))
    assert at.find(lost) == []
    at.clock.advance(290)
    [_] = at.store.take_over([(at.row(), 300.0)], owner="second").leases
    at.clock.advance(50)
    assert at.find(lost) == []
    at.clock.advance(260)
    assert at.find(lost) == []
    at.clock.advance(43)
    assert at.find(lost) == ["a"]


# Cost


def test_rows_are_read_when_they_are_new_and_then_not_before_they_should_have_expired(at: Setting) -> None:
    lease = claimed(at.store, lease_s=300)
    at.engine.reads = 0
    for _ in range(20):
        at.clock.advance(15)
        at.find()
    assert at.engine.reads == 1
    lease = at.beat(lease)
    at.clock.advance(3)
    assert at.find() == []
    assert at.engine.reads == 2
    for _ in range(19):
        at.clock.advance(15)
        at.find()
    assert at.engine.reads == 2


def test_a_sweep_of_many_running_tasks_reads_each_row_once_a_lease(at: Setting) -> None:
    leases = [claimed(at.store, f"t{number:03}", lease_s=300) for number in range(250)]
    at.engine.reads = 0
    for _ in range(4):
        for _ in range(4):
            at.clock.advance(15)
            assert at.find() == []
        leases = [at.beat(lease) for lease in leases]
    assert at.engine.reads == 250


def test_what_is_no_longer_running_is_forgotten(at: Setting) -> None:
    lease = claimed(at.store)
    at.find()
    assert set(at.lost._sightings) == {"a"}
    at.store.settle([writes.succeed(lease, now=at.clock.now(), expire_at=at.clock.now() + 9)])
    assert at.find() == []
    assert at.lost._sightings == {}


def test_other_lanes_are_not_looked_at(at: Setting) -> None:
    claimed(at.store, lane=Lane("reports", 2))
    at.clock.advance(1000)
    assert at.find() == []
    assert [task.task_id for task in at.lost.find([Lane("reports", 2)])] == ["a"]


# Long lanes

LIVES: Final = 1_800_000_000.0


def many_running(at: Setting, number: int, *, lock_time: float = LIVES + 9e6) -> None:
    """Put so many tasks that run under leases of others, in the order of their names."""
    now = at.clock.now()
    task = Task(
        task_id="",
        status=Status.RUNNING,
        created_at=now,
        submitted_at=now,
        job="test.job",
        fence=1,
        hb=0,
        lock_time=lock_time,
        lease_owner="another",
        lease_sec=300.0,
    )
    at.engine.put([replace(task, task_id=f"r{one:05}", created_at=now + one / 1000).to_row() for one in range(number)])


def observer(at: Setting, **options: Any) -> LostLeases:
    return LostLeases(at.store, guard_s=GUARD, **options)


@pytest.mark.slow
def test_a_lost_lease_behind_ten_thousand_others_is_found(at: Setting) -> None:
    many_running(at, 10_150)
    at.clock.advance(60.0)
    claimed(at.store, "lost", lease_s=300)
    at.clock.advance(303)
    assert [at.find(), at.find(), at.find(), at.find()] == [[], ["lost"], [], ["lost"]]
    assert len(at.lost._sightings) == 10_151


def test_a_part_of_a_lane_forgets_nothing_of_the_other_parts(at: Setting) -> None:
    many_running(at, 10)
    lost = observer(at, most=3)
    for _ in range(4):
        at.find(lost)
    assert len(lost._sightings) == 10
    at.engine.reads = 0
    for _ in range(9):
        at.find(lost)
    assert at.engine.reads == 0
    at.engine.delete([{"taskId": f"r{one:05}", "status": "RUNNING", "fence": 1} for one in range(5)])
    for _ in range(5):
        at.find(lost)
    assert sorted(lost._sightings) == [f"r{one:05}" for one in range(5, 10)]


def test_the_memory_of_beats_has_a_bound_and_each_has_its_turn_in_it(at: Setting) -> None:
    """Without a shared clock the beats alone tell: what lives makes room for what may be lost."""
    many_running(at, 6, lock_time=LIVES)
    lost = LostLeases(at.elsewhere(Unusable()), guard_s=GUARD, remembered=2)
    found = set[str]()
    for _ in range(20):
        at.clock.advance(310.0)
        found |= set(at.find(lost))
        assert len(lost._sightings) <= 2
        now = at.clock.now()
        for name in ("r00000", "r00001", "r00002"):  # these live
            lease = Lease(task=at.row(name), owner="another", fence=1, lease_s=300.0, held_from=0.0)
            at.engine.apply([writes.renew(lease, now=now, until=now + 300.0)])
        for name in found & {"r00003", "r00004"}:
            at.store.take_over([(at.row(name), 300.0)], owner="rescuer")
            lease = Lease(task=at.row(name), owner="rescuer", fence=2, lease_s=300.0, held_from=0.0)
            at.engine.apply([writes.release(lease, now=now)])
    assert found == {"r00003", "r00004", "r00005"}


def test_leases_that_no_agent_can_take_over_do_not_keep_the_others_from_being_looked_at(at: Setting) -> None:
    many_running(at, RECHECKED + 100, lock_time=LIVES)
    assert len(at.find()) == 0
    at.clock.advance(303.0)
    seen = {task.task_id for _ in range(2) for task in at.lost.recheck()}
    assert len(seen) == RECHECKED + 100


# Takeover


def anything(task: Task) -> float | None:
    return 120.0


def test_a_lost_agents_task_is_taken_over_and_stays_running(at: Setting) -> None:
    first = claimed(at.store, lease_s=300, owner="lost-agent")
    at.clock.advance(303)
    [lease] = at.rescuer.take_over(LANES, anything)
    assert (lease.owner, lease.fence, lease.lease_s) == ("rescuer", first.fence + 1, 120.0)
    row = at.row()
    assert (row.status, row.crash_count, row.retry_count, row.hb) == (Status.RUNNING, 1, 0, 0)
    assert row.lock_time == pytest.approx(at.clock.now() + 120, abs=0.01)
    assert row.errors[-1]["error"] == "agent lost-agent was lost"
    [event] = at.record.of(events.TaskTakenOver)
    assert (event.task_id, event.lost_agent, event.attempt, event.fence) == ("a", "lost-agent", 2, 2)


def test_an_agent_taken_for_lost_cannot_write_any_more(at: Setting) -> None:
    first = claimed(at.store, lease_s=300, owner="only-slow")
    at.clock.advance(303)
    [_] = at.rescuer.take_over(LANES, anything)
    now = at.clock.now()
    late = [
        writes.succeed(first, now=now, expire_at=now, result="1"),
        writes.retry(first, due=now, error="e", now=now),
        writes.snooze(first, due=now, now=now),
        writes.release(first, now=now),
        writes.fail(first, error="e", now=now, expire_at=now),
        writes.close(first, reason="r", now=now, expire_at=now),
    ]
    row = at.row()
    assert [answer.accepted for answer in at.store.settle(late)] == [False] * 6
    [renewal] = at.store.renew([Beat(first)])
    assert (renewal.lost, renewal.taken_by) == (True, "rescuer")
    assert at.row() == row


def test_a_task_without_a_job_or_a_slot_for_it_is_left_to_another_agent(at: Setting) -> None:
    claimed(at.store, owner="lost-agent")
    at.clock.advance(303)
    row = at.row()
    assert at.rescuer.take_over(LANES, lambda task: None) == []
    assert at.row() == row
    assert [lease.task_id for lease in at.a_rescuer("other").take_over(LANES, anything)] == ["a"]


def test_of_two_agents_that_see_a_lost_task_one_gets_it(at: Setting) -> None:
    claimed(at.store, owner="lost-agent")
    at.clock.advance(303)
    seen = at.row()
    won = [at.store.take_over([(seen, 120.0)], owner=owner).leases for owner in ("one", "two")]
    assert [len(leases) for leases in won] == [1, 0]
    assert at.row().crash_count == 1


def test_a_beat_that_comes_between_look_and_takeover_saves_its_lease(at: Setting) -> None:
    lease = claimed(at.store, owner="slow")
    at.clock.advance(303)
    seen = at.row()
    at.beat(lease)
    assert at.store.take_over([(seen, 120.0)], owner="rescuer").leases == []
    assert at.row().lease_owner == "slow"


def lose(at: Setting, number: int, *, is_alone: bool = True) -> list[Lease]:
    """The agent is lost that holds the task, and the next takes it over; alone or beside others."""
    at.clock.advance(303)
    leases = at.a_rescuer(f"agent-{number}").take_over(LANES, anything)
    if leases and is_alone:
        assert at.store.write_tasks([writes.set_apart(leases[0], is_alone=True, now=at.clock.now())]) != [None]
    return leases


def test_a_task_survives_as_many_lost_agents_as_it_may_and_then_fails(at: Setting) -> None:
    claimed(at.store, owner="agent-0")
    for number in range(1, 4):
        [lease] = lose(at, number)
        assert lease.task.crash_count == number
    assert lose(at, 4) == []
    row = at.row()
    assert (row.status, row.crash_count, row.lease_owner) == (Status.FAILED, 4, None)
    assert row.error is not None
    assert row.error.startswith(
        "4 agents were lost while they ran it (max_crashes is 3), at last with nothing beside it; the last was "
        "agent-3: look for 'Out of memory' in the kernel log of its host, as the job test.job may need more memory"
    )
    assert [entry["error"] for entry in row.errors] == [
        "agent agent-0 was lost",
        "agent agent-1 was lost, which ran only this task",
        "agent agent-2 was lost, which ran only this task",
        row.error,
    ]
    assert row.expire_at == pytest.approx(at.clock.now() + 2000, abs=1)
    [event] = at.record.of(events.TaskGivenUp)
    assert event.lost_agent == "agent-3"
    at.clock.advance(1000)
    assert at.find() == []


def test_a_task_that_was_never_alone_when_its_agents_were_lost_survives_five_times_as_many(at: Setting) -> None:
    claimed(at.store, owner="agent-0")
    claimed(at.store, "beside", owner="agent-0")
    for number in range(1, 16):
        assert {lease.task.crash_count for lease in lose(at, number, is_alone=False)} == {number}
    assert at.row().errors[-1] == {
        "at": pytest.approx(at.clock.now(), abs=0.01),
        "attempt": 15,
        "error": "agent agent-14 was lost, with 1 other task",
        "agent": "agent-14",
        "beside": 1,
    }
    assert lose(at, 16, is_alone=False) == []
    row = at.row()
    assert (row.status, row.crash_count, at.row("beside").status) == (Status.FAILED, 16, Status.FAILED)
    assert row.error is not None
    assert row.error.startswith("16 agents were lost while they ran it (max_crashes is 3), always beside others; ")


def test_a_run_alone_is_no_evidence_against_a_later_run_beside_others(at: Setting) -> None:
    claimed(at.store, owner="agent-0")
    for number in range(1, 4):
        [lease] = lose(at, number)
    now = at.clock.now()
    at.store.settle([writes.release(lease, now=now)])
    [again] = at.store.claim([Wanted(seen(at.row()), 300.0)], owner="agent-4")
    assert [one.task.crash_count for one in lose(at, 5)] == [4]
    at.store.write_tasks(
        [writes.set_apart(replace(again, owner="agent-5", fence=again.fence + 1), is_alone=False, now=now)]
    )
    assert [one.task.crash_count for one in lose(at, 6, is_alone=False)] == [5]


def test_where_no_agent_may_be_lost_the_first_loss_is_the_last_whatever_ran_beside_it(at: Setting) -> None:
    claimed(at.store, owner="agent-0")
    claimed(at.store, "beside", owner="agent-0")
    at.clock.advance(303)
    assert at.a_rescuer("agent-1", max_crashes=0).take_over(LANES, anything) == []
    assert {at.row(name).status for name in ("a", "beside")} == {Status.FAILED}


def test_a_lease_that_ran_out_while_its_agent_lives_is_reported_as_such(at: Setting) -> None:
    """A handler that holds the interpreter keeps the heartbeat from being sent, and the agent is still there."""
    claimed(at.store, owner="agent-0")
    for number in range(4):
        at.clock.advance(302)
        at.store.announce(f"agent-{number}", {"queues": {}}, lives_s=60.0)
        lose(at, number + 1)
    row = at.row()
    assert [entry["error"] for entry in row.errors[:2]] == [
        "the lease ran out although agent agent-0 lives",
        "the lease ran out although agent agent-1 lives, which ran only this task",
    ]
    assert row.error == (
        "its lease ran out 4 times while it ran (max_crashes is 3), at last with nothing beside it, and 4 of its "
        "agents were alive afterwards; the last was agent-3: the job test.job may hold the interpreter, or its process "
        "may have stood still, for longer than the lease of 120 s; give it isolation='process' or a longer lease_s"
    )


@pytest.mark.slow
def test_an_agent_on_this_host_is_known_by_its_process(at: Setting) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pids = {"lives": os.getpid(), "killed": child.pid, "another": os.getpid()}
    started = {name: process_start(pid) for name, pid in pids.items()}
    started["another"] = started["killed"]  # had our pid, in another container or before us
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its pid is still taken
    names = {name: f"{socket.gethostname()}:{pid}:{name}" for name, pid in pids.items()}
    for name, owner in names.items():
        at.store.announce(owner, {"process": started[name]}, lives_s=60.0)
        claimed(at.store, name, owner=owner)
    at.clock.advance(303)
    at.rescuer.take_over(LANES, anything)
    assert at.row("lives").errors[-1]["error"] == f"the lease ran out although agent {names['lives']} lives"
    for name in ("killed", "another"):
        assert at.row(name).errors[-1]["error"] == f"agent {names[name]} was lost"
    child.communicate()


def test_children_of_a_task_that_is_given_up_are_notified(at: Setting) -> None:
    claimed(at.store, "parent", owner="agent-0", crash_count=15)
    child = put(
        at.store,
        "child",
        status=Status.BLOCKED,
        depends_on=("parent",),
        waiting_for=frozenset({"parent"}),
        on_parent_failure="fail",
    )
    at.store.write_tasks([writes.register_dependent(at.row("parent"), child.task_id)])
    at.clock.advance(303)
    at.rescuer.take_over(LANES, anything)
    assert at.row("child").status is Status.FAILED
    assert at.row("child").error == "parent parent ended as FAILED"
    assert [event.task_id for event in at.record.of(queue_events.ChildDoomed)] == ["child"]


def test_giving_up_needs_neither_job_nor_slot(at: Setting) -> None:
    claimed(at.store, owner="agent-0", crash_count=15)
    at.clock.advance(303)
    at.rescuer.take_over(LANES, lambda task: None)
    assert at.row().status is Status.FAILED


# Healing


def many_blocked(at: Setting, number: int) -> None:
    """Put so many tasks that wait for a parent which knows them all."""
    names = [f"c{one:05}" for one in range(number)]
    put(at.store, "open", dependents=frozenset(names))
    now = at.clock.now()
    task = Task(
        task_id="",
        status=Status.BLOCKED,
        created_at=0.0,
        submitted_at=now,
        job="test.job",
        depends_on=("open",),
        waiting_for=frozenset({"open"}),
    )
    at.engine.put([replace(task, task_id=name, created_at=one / 1000).to_row() for one, name in enumerate(names)])


@pytest.mark.slow
def test_a_child_behind_ten_thousand_others_is_notified_whichever_agent_has_the_turn(at: Setting) -> None:
    many_blocked(at, 10_150)
    put(at.store, "child", status=Status.BLOCKED, depends_on=("gone",), waiting_for=frozenset({"gone"}))
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.BLOCKED
    at.clock.advance(15)
    at.a_rescuer("another").heal(LANES)
    assert at.row("child").status is Status.FAILED
    assert "info" not in at.engine.get(["turn:blocked"])["turn:blocked"]


@pytest.mark.parametrize(
    "place", ["x", 5, [1], {"no": "place"}, [[], {}], None, [10**400, "a"], [1.0, "\ud800"], [{}, "a"]]
)
def test_a_place_that_is_none_is_forgotten(at: Setting, place: object) -> None:
    many_blocked(at, 5)
    blocked(at, "gone")
    at.store.insert_row(
        {"taskId": "turn:blocked", "leaseOwner": "x", "lockTime": 1.0, "info": {"BLOCKED": place, "y": 1}}
    )
    for _ in range(2):
        with suppress(StoreError):
            at.rescuer.heal(LANES)
        at.clock.advance(15)
    assert at.row("child").status is Status.FAILED


def blocked(at: Setting, *parents: str, name: str = "child") -> Task:
    return put(
        at.store, name, status=Status.BLOCKED, depends_on=parents, waiting_for=frozenset(parents), created_at=1.0
    )


def test_a_child_that_missed_its_parents_end_is_notified_by_the_sweep(at: Setting) -> None:
    parent = claimed(at.store, "parent")
    blocked(at, "parent")
    now = at.clock.now()
    at.store.settle([writes.succeed(parent, now=now, expire_at=now + 99)])
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.PENDING
    assert at.row("child").created_at >= now - 0.001
    assert len(at.record.of(queue_events.ChildUnparked)) == 1


def test_a_child_that_its_parent_does_not_know_is_introduced_by_the_sweep(at: Setting) -> None:
    put(at.store, "parent")
    blocked(at, "parent")
    at.rescuer.heal(LANES)
    assert at.row("parent").dependents == frozenset({"child"})
    assert at.row("child").status is Status.BLOCKED


def test_a_child_whose_parent_is_gone_fails(at: Setting) -> None:
    blocked(at, "gone")
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.FAILED
    assert at.row("child").error == "parent gone no longer exists"


def test_a_child_that_waits_for_no_parent_is_unparked(at: Setting) -> None:
    put(at.store, "child", status=Status.BLOCKED, depends_on=("p",))
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.PENDING


def test_a_whole_family_is_healed_in_one_sweep(at: Setting) -> None:
    for number in range(150):
        blocked(at, "gone", name=f"child-{number:03}")
    blocked(at, "child-000", name="grandchild")
    at.store.write_tasks([writes.register_dependent(at.row("child-000"), "grandchild")])
    at.rescuer.heal(LANES)
    assert {at.row(f"child-{number:03}").status for number in range(150)} == {Status.FAILED}
    assert at.row("grandchild").status is Status.FAILED


def test_one_agent_heals_in_each_turn(at: Setting) -> None:
    others = [at.a_rescuer(f"agent-{number}") for number in range(5)]
    at.engine.reads = 0
    blocked(at, "gone")
    for rescuer in others:
        rescuer.heal(LANES)
    assert len(at.record.of(queue_events.ChildDoomed)) == 1
    blocked(at, "gone", name="second")
    at.clock.advance(5)
    for rescuer in others:
        rescuer.heal(LANES)
    assert at.row("second").status is Status.BLOCKED
    at.clock.advance(10)
    others[3].heal(LANES)
    assert at.row("second").status is Status.FAILED


def test_a_turn_ends_by_itself_when_its_agent_is_lost(at: Setting) -> None:
    assert at.store.take_turn("blocked", owner="lost", lasts_s=13.5)
    blocked(at, "gone")
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.BLOCKED
    at.clock.advance(13.6)
    at.rescuer.heal(LANES)
    assert at.row("child").status is Status.FAILED


def test_a_task_that_ended_meanwhile_is_not_given_up(at: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = claimed(at.store, owner="agent-0", crash_count=15)
    at.clock.advance(303)
    real = at.rescuer.lost.find

    def find(lanes: Sequence[Lane]) -> list[Task]:
        found = real(lanes)
        at.store.settle([writes.succeed(lease, now=at.clock.now(), expire_at=at.clock.now() + 9)])
        return found

    monkeypatch.setattr(at.rescuer.lost, "find", find)
    at.rescuer.take_over(LANES, anything)
    assert at.row().status is Status.SUCCESS
    assert at.record.of(events.TaskGivenUp) == []


def test_while_no_task_waits_a_sweep_writes_nothing(at: Setting) -> None:
    """A turn is a write of every agent in every sweep; to see that the line is empty is a read."""
    at.rescuer.heal(LANES)
    assert at.store.engine.get(["turn:blocked"]) == {}


def test_a_task_that_is_given_up_leaves_no_slot_of_its_limit_taken(at: Setting) -> None:
    claimed(at.store, owner="agent-0", crash_count=15, limit_key="api", limit_max=1)
    at.store.insert_row(limit_row("api", number=1, now=at.clock.now(), holders=["a#1", "b#1"]))
    at.clock.advance(303)
    at.rescuer.take_over(LANES, anything)
    assert at.row().status is Status.FAILED
    assert holders_of(at.store.engine.get(["limit:api"])["limit:api"]) == {"b#1"}, "at once, before any sweep"


# Rows of which the store takes no more


def lost_leases(setting: Setting, *names: str) -> None:
    """Leases of an agent that is gone."""
    for name in names:
        claimed(setting.store, name, owner="lost", lease_s=60.0)
    setting.clock.advance(60.0 + 2 * GUARD)


def rejecting(setting: Setting, never: Callable[[Write], bool]) -> Rejecting:
    engine = Rejecting(setting.engine, never)
    setting.store.engine = engine
    return engine


def test_a_task_that_the_store_does_not_take_for_another_agent_is_given_up_and_its_neighbours_go_on() -> None:
    setting = Setting()
    lost_leases(setting, "a", "large", "z")
    rejecting(setting, lambda write: write.task_id == "large" and write.verb == "take over")
    doubts = list[Doubt]()
    leases = setting.rescuer.take_over(LANES, lambda task: 60.0, doubts.extend)
    assert ({lease.task_id for lease in leases}, doubts) == ({"a", "z"}, [])
    after = setting.row("large")
    assert after.status is Status.FAILED
    assert after.error == "the store does not take it for another agent: take over of large is too large"


def test_what_is_given_up_is_given_up_barely_when_the_store_takes_no_more() -> None:
    setting = Setting()
    lost_leases(setting, "large")
    engine = rejecting(setting, lambda write: write.verb == "give up" and "errors" in write.set)
    setting.a_rescuer("rescuer", max_crashes=0).take_over(LANES, lambda task: 60.0)
    after = setting.row("large")
    assert (after.status, after.crash_count, after.errors, after.lease_owner) == (Status.FAILED, 1, (), None)
    assert after.error is not None and len(after.error.encode()) <= 300
    assert engine.rejected == [("give up", "large")]


def test_a_row_that_can_not_even_be_given_up_is_named_and_does_not_stop_the_sweep() -> None:
    setting = Setting()
    lost_leases(setting, "a", "large", "z")
    rejecting(setting, lambda write: write.task_id == "large")
    setting.a_rescuer("rescuer", max_crashes=0).take_over(LANES, lambda task: 60.0)
    assert [setting.row(name).status for name in ("a", "large", "z")] == [Status.FAILED, Status.RUNNING, Status.FAILED]
    [rejected] = setting.record.of(queue_events.WriteRejected)
    assert (rejected.task_id, rejected.verb) == ("large", "give up")


def test_a_child_that_the_store_does_not_change_holds_up_none_of_the_others() -> None:
    setting = Setting()
    parent = claimed(setting.store, "parent")
    for name in ("c1", "c2", "c3"):
        put(setting.store, name, status=Status.BLOCKED, depends_on=("parent",), waiting_for=frozenset({"parent"}))
    now = setting.clock.now()
    setting.store.settle([writes.succeed(parent, now=now, expire_at=now + 100)])
    rejecting(setting, lambda write: write.task_id == "c2")
    setting.rescuer.heal(LANES)
    assert [setting.row(name).status for name in ("c1", "c2", "c3")] == [
        Status.PENDING,
        Status.BLOCKED,
        Status.PENDING,
    ]
    assert [one.task_id for one in setting.record.of(queue_events.WriteRejected)] == ["c2"]
