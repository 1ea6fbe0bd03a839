"""An agent that has run for long enough makes room for a fresh one, says why, and loses nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LONG_S, Recorder, a_job, a_lease, running, settings
from tests.support.stands import eventually
from thunderagent.agent.assembly import equip
from thunderagent.agent.loop import Agent
from thunderagent.agent.recycling import JITTER, Held, Recycling
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import about
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.memory import kernel_kills, peak_mib, resident_mib
from thunderagent.model.task import Status
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import memory_store


class At:
    """Recycling whose facts are set by the test."""

    def __init__(self, *, seed: int = 7, mib: float = 100.0, **changes: Any) -> None:
        self.bus = EventBus()
        self.record = Recorder(self.bus)
        self.mib = mib
        self.held: list[Held] = []
        self.reasons: list[str] = []
        values = {"recycle_threads": 0, **changes}
        self.recycling = Recycling(
            settings(**values),
            self.bus,
            retire=self.reasons.append,
            held=lambda: self.held,
            memory_mib=lambda: self.mib,
            rng=random.Random(seed),
        )

    def run(self, number: int = 1, job: str = "test.job") -> None:
        for _ in range(number):
            self.bus.emit(events.TaskStarted(**{**about(a_lease()), "job": job}, waited_s=0.0))

    def look(self, *, mib: float | None = None) -> list[str]:
        self.mib = self.mib if mib is None else mib
        self.recycling.look()
        return self.reasons


@pytest.mark.slow
def test_without_settings_nothing_is_counted_and_nothing_looks() -> None:
    at = At()
    assert not at.recycling.is_needed
    assert at.recycling._tally is None
    at.run(100_000)
    assert at.look(mib=1e6) == []
    assert At(recycle_threads=1).recycling.is_needed


# Tasks


def test_after_so_many_tasks_it_is_time_once() -> None:
    at = At(recycle_tasks=100)
    at.run(99)
    assert at.look() == []
    at.run(12)
    assert at.look() == ["it has run 111 tasks (THUNDERAGENT_RECYCLE_TASKS)"]
    at.run(1)
    assert len(at.look()) == 1


def test_a_fleet_that_started_together_does_not_end_together() -> None:
    limits = [At(seed=seed, recycle_tasks=10_000).recycling._tasks for seed in range(20)]
    assert all(10_000 <= one <= 10_000 * (1 + JITTER) for one in limits)
    assert len(set(limits)) > 15
    assert max(limits) - min(limits) > 500
    assert At(recycle_tasks=1).recycling._tasks == 1


# Memory


def test_above_its_memory_it_names_what_ran_while_it_grew_and_what_runs_now() -> None:
    at = At(recycle_mib=300)
    at.run(2, "report.build")
    at.run(1, "mail.send")
    assert at.look(mib=190) == []
    at.run(1, "mail.send")
    at.held = [Held("mail.send"), Held("mail.send")]
    assert at.look(mib=180) == [], "what is given back is nobody's"
    at.held = [Held("report.build"), Held("mail.send"), Held("a.b"), Held("c.d")]
    assert at.look(mib=310) == [
        "310 MiB of memory are resident, over 300 (THUNDERAGENT_RECYCLE_MIB); they were 100 at its start, most of it "
        "while these ran: mail.send 160 MiB, report.build 60 MiB; running now: a.b 1, c.d 1, mail.send 1 and 1 more"
    ]


def test_an_agent_that_is_too_large_from_its_start_says_so_once_and_goes_on() -> None:
    at = At(mib=400, recycle_mib=300)
    for _ in range(3):
        at.look()
        at.run(10)
    assert at.reasons == []
    assert at.record.of(fleet_events.RecyclingOff) == [fleet_events.RecyclingOff(resident_mib=400, recycle_mib=300)]


def test_one_that_grew_before_it_ran_a_task_goes_on_too() -> None:
    at = At(mib=200, recycle_mib=300)
    assert at.look(mib=350) == []
    assert len(at.record.of(fleet_events.RecyclingOff)) == 1


def test_tasks_still_count_where_memory_does_not() -> None:
    at = At(mib=400, recycle_mib=300, recycle_tasks=10)
    at.look()
    at.run(11)
    assert at.look() == ["it has run 11 tasks (THUNDERAGENT_RECYCLE_TASKS)"]


def test_the_memory_of_this_process_comes_from_the_kernel(tmp_path: Path) -> None:
    before = resident_mib()
    ballast = bytearray(64 * 1024 * 1024)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert before + 50 < resident_mib() < before + 120
    assert peak_mib() >= resident_mib() - 1
    del ballast
    assert peak_mib() > resident_mib() + 50
    assert resident_mib(tmp_path) >= before, "without /proc the peak is told"
    assert peak_mib(tmp_path) >= before


@pytest.mark.parametrize(
    ("group", "text", "kills"),
    [
        ("0::/system.slice/agents.service\n", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n", 2),
        ("12:memory:/old\n0::/system.slice/agents.service\n", "oom_kill 0\n", 0),
        ("0::/system.slice/agents.service\n", "low 0\n", None),
        ("0::/elsewhere\n", "oom_kill 2\n", None),
        ("12:memory:/old\n", "oom_kill 2\n", None),
        ("0::/system.slice/agents.service\n", "no numbers here\n", None),
    ],
)
def test_what_the_kernel_killed_in_our_control_group(tmp_path: Path, group: str, text: str, kills: int | None) -> None:
    (tmp_path / "cgroup").write_text(group)
    folder = tmp_path / "fs" / "system.slice" / "agents.service"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text(text)
    assert kernel_kills(tmp_path, tmp_path / "fs") == kills


# Threads


def test_handlers_that_go_on_for_a_minute_after_they_were_asked_to_stop_are_counted() -> None:
    at = At(recycle_threads=2)
    at.held = [Held("report.build", 61.0), Held("report.build", 59.9), Held("mail.send")]
    assert at.look() == []
    at.held = [Held("report.build", 61.0), Held("report.build", 75.0), Held("mail.send")]
    assert at.look() == [
        "2 handlers go on 60 s and more after they were told to stop, each in a slot (THUNDERAGENT_RECYCLE_THREADS): "
        "report.build 2"
    ]


def test_the_agent_knows_which_handlers_go_on() -> None:
    store = memory_store()
    agent = Agent(store, Registry(a_job()), settings())
    deaf = running(a_lease(), a_job())
    deaf.stop_seen_at = store.monotonic() - 70.0
    quick = running(a_lease(task_id="b"), a_job("test.quick"))
    over = running(a_lease(task_id="c"), a_job())
    over.settling = True
    agent._in_flight.held.update(a=deaf, b=quick, c=over)
    first, second = agent.vitals.held()
    assert (first.job, second) == ("test.job", Held("test.quick"))
    assert 70.0 <= first.overrun_s < 100.0


# Together


class Fresh:
    """Agents in threads, one after the other, as a supervisor would start them on one file."""

    def __init__(self, folder: Path, jobs: Registry, **changes: Any) -> None:
        self.path = str(folder / "tasks.db")
        self.client = Client(TaskStore(SqliteEngine(self.path)), settings())
        self.reasons: list[str] = []
        self._jobs = jobs
        self._changes = changes

    def serve(self, until: Callable[[], bool]) -> None:
        """Run one agent until it retires, or until this is true."""
        store = TaskStore(SqliteEngine(self.path))
        agent = Agent(store, self._jobs, settings(**self._changes), threads=equip, first_poll_s=0.0)
        record, codes = Recorder(agent.bus), list[int]()
        thread = threading.Thread(target=lambda: codes.append(agent.run()), daemon=True)
        thread.start()
        eventually(lambda: not thread.is_alive() or until() or record.of(fleet_events.AgentRetires), LONG_S)
        agent.stop()
        thread.join(LONG_S)
        assert codes == [0]
        self.reasons += [event.reason for event in record.of(fleet_events.AgentRetires)]
        store.engine.close()


@pytest.mark.slow
def test_agents_recycle_one_after_the_other_and_nothing_is_lost_nor_an_attempt_burned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thunderagent.agent.recycling.LOOK_S", 0.01)
    fences: list[int] = []

    @job("test.count")
    def count(ctx: Context, payload: dict[str, Any]) -> None:
        ctx.wait(0.01)
        fences.append(ctx.fence)

    fresh = Fresh(tmp_path, Registry(count), recycle_tasks=50)
    tasks = [one.task.task_id for one in fresh.client.enqueue_many(count, [{}] * 300)]
    for _ in range(10):
        fresh.serve(lambda: fresh.client.store.engine.count("SUCCESS") == 300)
        if fresh.client.store.engine.count("SUCCESS") == 300:
            break
    assert len(fresh.reasons) >= 2
    assert all("THUNDERAGENT_RECYCLE_TASKS" in reason for reason in fresh.reasons)
    found = fresh.client.store.get(tasks).values()
    assert {(one.status, one.retry_count, one.crash_count) for one in found} == {(Status.SUCCESS, 0, 0)}
    assert len(found) == len(fences) == 300
    assert list(fresh.client.agents.list()) == []
    fresh.client.close()


@pytest.mark.slow
def test_leaked_threads_end_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thunderagent.agent.recycling.LOOK_S", 0.01)
    monkeypatch.setattr("thunderagent.agent.recycling.STUCK_WAIT_S", 0.1)
    go = threading.Event()

    @job("test.deaf", timeout_s=0.1, max_retry=0)
    def deaf(ctx: Context, payload: dict[str, Any]) -> None:
        assert go.wait(LONG_S)

    store = TaskStore(SqliteEngine(str(tmp_path / "tasks.db")))
    client = Client(store, settings())
    agent = Agent(store, Registry(deaf), settings(recycle_threads=2, drain_s=0.0), threads=equip, first_poll_s=0.0)
    record, codes = Recorder(agent.bus), list[int]()
    for _ in range(2):
        client.enqueue(deaf, {})
    thread = threading.Thread(target=lambda: codes.append(agent.run()), daemon=True)
    thread.start()
    [retires] = record.wait(fleet_events.AgentRetires)
    assert retires.reason.startswith("2 handlers go on ")
    assert retires.reason.endswith("test.deaf 2")
    thread.join(LONG_S)
    assert codes == [2], "so many still run: the process ends at once"
    go.set()
    client.close()
