"""Threads beside the loop of an agent: looked after, started again, ended with it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support.engine import LONG_S, Stage, a_job
from tests.support.stands import eventually
from thunderagent.agent import threads
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.loop import Agent
from thunderagent.agent.threads import RESTART_AFTER_S, BackgroundThreads, RepeatingThread
from thunderagent.agent.view import AgentView
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.testing import FakeClock, Recorder


def died(one: RepeatingThread) -> bool:
    return not one.is_alive


def test_work_is_repeated_until_the_end_and_the_last_piece_is_done_then() -> None:
    rounds, last = threading.Semaphore(0), threading.Event()
    one = RepeatingThread("test", 0.001, rounds.release, last=last.set)
    assert not one.is_alive
    one.start()
    for _ in range(3):
        assert rounds.acquire(timeout=LONG_S)
    assert not last.is_set()
    one.close()
    assert last.is_set()
    assert not one.is_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_dies_is_reported_and_started_again_but_not_all_the_time() -> None:
    clock, bus = FakeClock(), EventBus()
    record = Recorder(bus)
    rounds: list[int] = []

    def broken() -> None:
        rounds.append(1)
        raise LookupError("nobody expected this")

    one = RepeatingThread("test", 0.001, broken)
    beside = BackgroundThreads([one], bus, monotonic=clock.monotonic)
    beside.start()
    eventually(lambda: died(one))
    beside.look_after()
    assert record.of(events.ThreadDied) == [], "a thread that dies at once would be started all the time"
    clock.advance(RESTART_AFTER_S)
    beside.look_after()
    assert record.of(events.ThreadDied) == [events.ThreadDied(thread="test", restarted=True)]
    eventually(lambda: died(one))
    beside.look_after()
    assert len(rounds) == 2
    beside.close()


@pytest.mark.slow
def test_several_that_hang_cost_no_more_time_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "END_S", 0.3)
    stuck = threading.Event()
    hanging = [RepeatingThread(f"test-{number}", 60.0, lambda: None, last=stuck.wait) for number in range(20)]
    beside = BackgroundThreads(hanging, EventBus())
    beside.start()
    began = time.monotonic()
    beside.close()
    assert time.monotonic() - began < LONG_S
    stuck.set()


def test_an_agent_ends_in_time_although_its_heartbeat_waits_for_a_reply_and_says_so_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thunderagent.agent.heartbeat.HEARTBEAT_JOIN_S", 0.1)
    asked, answered, closed = threading.Event(), threading.Event(), list[str]()

    def waits(_: Heartbeat) -> None:
        asked.set()
        answered.wait(LONG_S)

    monkeypatch.setattr(Heartbeat, "renew_due", waits)
    last = RepeatingThread("test", 60.0, lambda: None, last=lambda: closed.append("test"))
    stage = Stage(())
    record = Recorder(stage.bus)
    agent = Agent(
        stage.store, Registry(), stage.settings, bus=stage.bus, threads=lambda agent: [last], first_poll_s=0.0
    )
    monkeypatch.setattr(agent._heartbeat.store.engine, "close", lambda: closed.append("engine"))
    try:
        agent._heartbeat.start()
        assert asked.wait(LONG_S)
        agent.stop()
        assert agent.run() == 1, "its process must not wait for the reply at its end"
        assert closed == ["test"], "the engine of the heartbeat is in use"
        assert record.of(Event)[-1] == events.AgentStopped(stuck=0)
    finally:
        answered.set()


def test_an_agent_starts_looks_after_and_ends_its_threads() -> None:
    alive = threading.Event()
    one = RepeatingThread("test", 60.0, alive.set)
    stage = Stage(())

    def threads(agent: AgentView) -> list[RepeatingThread]:
        assert agent.vitals.entry()["draining"] is False, "made before its threads"
        return [one]

    agent = Agent(stage.store, Registry(), stage.settings, bus=stage.bus, threads=threads, first_poll_s=0.0)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    assert alive.wait(LONG_S)
    agent.retire("somebody asked it to")
    agent.retire("twice is once")
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert not one.is_alive
    assert [event.reason for event in stage.record.of(fleet_events.AgentRetires)] == ["somebody asked it to"]


class Refused(RepeatingThread):
    """A thread that cannot begin again."""

    is_refused = False

    def start(self) -> None:
        if self.is_refused:
            raise OSError("the port is another's now")
        super().start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_cannot_begin_again_is_reported_and_tried_later() -> None:
    clock, bus = FakeClock(), EventBus()
    record = Recorder(bus)
    one = Refused("test", 0.001, lambda: 1 / 0)
    beside = BackgroundThreads([one], bus, monotonic=clock.monotonic)
    beside.start()
    eventually(lambda: died(one))
    one.is_refused = True
    clock.advance(RESTART_AFTER_S)
    beside.look_after()
    beside.look_after()
    assert record.of(events.ThreadDied) == [events.ThreadDied(thread="test", restarted=False)]
    assert beside.dead == ("test",)
    one.is_refused = False
    clock.advance(RESTART_AFTER_S)
    beside.look_after()
    assert record.of(events.ThreadDied)[1:] == [events.ThreadDied(thread="test", restarted=True)]
    beside.close()


@pytest.mark.slow
def test_an_agent_from_settings_has_beside_it_what_they_ask_for(tmp_path: Path) -> None:
    agent = Agent.from_settings(Registry(a_job()), store=f"sqlite:///{tmp_path}/tasks.db", health_folder=str(tmp_path))
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    eventually(lambda: list(tmp_path.glob("*.json")))
    agent.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()
