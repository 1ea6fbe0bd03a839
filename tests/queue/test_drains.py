"""Agents that are asked to drain: who is meant, when it is seen, what is left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import stands
from tests.support.engine import LONG_S, Recorder, Writing, a_core, a_job, put, serving, settings
from tests.support.stands import Stand, together
from thunderagent.agent.loop import Agent
from thunderagent.agent.pauses import PAUSES_LOOK_S, PauseWatcher
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, fleet_events
from thunderagent.model.errors import ConfigurationError, NotAllowed, WaitTimeout
from thunderagent.model.task import Row, Status
from thunderagent.model.writes.pauses import CONTROL_ID, control_row
from thunderagent.queue.pause_commands import FORGOTTEN_S, MOST_DRAINS
from thunderagent.queue.pauses import OLD_S, drain_asked, drains_of
from thunderagent.stores.engine import Engine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock, memory_client, memory_store
from thunderagent.testing.faulty_engine import FaultyEngine


class Counting(FaultyEngine):
    """Counts how often the row of pauses is read."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.reads = 0

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        self.reads += CONTROL_ID in task_ids
        return super().get(task_ids)


class At:
    """An agent whose rounds and time are led by the test, and a client."""

    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        store = memory_store(self.clock)
        self.engine = Counting(store.engine)
        self.store = TaskStore(self.engine, monotonic=self.clock.monotonic)
        self.client = Client(store, settings())
        values = {"poll_min_s": 1.0, "poll_max_s": 5.0, "poll_idle_s": 10.0, "lease_s": 30.0, "heartbeat_s": 5.0}
        self.agent = Agent(
            self.store,
            Registry(a_job()),
            settings(**{**values, "sweep_s": 15.0, "slots": 1, **changes}),
            rng=random.Random(7),
            first_poll_s=0.0,
        )
        self.record = Recorder(self.agent.bus)
        self.announce()

    def announce(self) -> None:
        self.agent._housekeeping._announce()

    def round(self) -> set[str]:
        before = set(self.agent._in_flight.held)
        self.agent._in_flight.commit(claim=not self.agent._stop.is_made)
        return set(self.agent._in_flight.held) - before

    @property
    def retired(self) -> list[str]:
        return [event.reason for event in self.record.of(fleet_events.AgentRetires)]


@pytest.fixture
def at() -> At:
    return At()


def introduce(store: TaskStore, *names: str, lives_s: float = 60.0, running: int = 0) -> None:
    for name in names:
        store.announce(name, {"queues": {"default": 2}, "running": {"default": running}, "jobs": []}, lives_s=lives_s)


def entries(client: Client) -> set[str]:
    return set(client.store.engine.get([CONTROL_ID])[CONTROL_ID]["info"])


# The agent


def test_an_agent_that_is_asked_drains_with_its_next_look_and_claims_nothing_more(at: At) -> None:
    [asked] = at.client.agents.drain(at.agent.name, reason="the host goes")
    assert asked.name == at.agent.name
    put(at.store, "a")
    assert at.round() == set()
    assert at.retired == ["asked to drain: the host goes"]
    assert at.agent.vitals.entry()["draining"]
    at.clock.advance(60)
    assert at.round() == set()
    assert len(at.retired) == 1


def test_what_concerns_another_agent_is_not_ours(at: At) -> None:
    introduce(at.store, f"{at.agent.name}0", "host-2:1:aa")
    at.client.agents.drain(f"{at.agent.name}0")
    at.client.agents.drain("host-2")
    put(at.store, "a")
    assert at.round() == {"a"}
    assert at.retired == []


def test_an_agent_whose_slots_are_all_taken_sees_it_too(at: At) -> None:
    put(at.store, "a")
    assert at.round() == {"a"}
    at.client.agents.drain(at.agent.name)
    for _ in range(100):
        at.clock.advance(0.5)
        at.round()
    assert at.retired == [], "with no free slot it does not look for work"
    reads = at.engine.reads
    at.agent._housekeeping._look_at_pauses()
    assert at.retired == ["asked to drain"]
    assert at.engine.reads == reads + 1


def test_an_agent_with_a_free_slot_reads_the_row_no_more_often_than_before(at: At) -> None:
    at.round()
    reads = at.engine.reads
    at.clock.advance(100)
    at.agent._housekeeping._look_at_pauses()
    assert at.engine.reads == reads, "its next poll does"


def test_a_look_reads_the_row_only_when_it_was_not_read_for_a_while(at: At) -> None:
    at.round()
    reads = at.engine.reads
    at.clock.advance(PAUSES_LOOK_S - 0.5)
    at.agent.pauses.look()
    assert at.engine.reads == reads
    at.clock.advance(0.5)
    for _ in range(10):
        at.agent.pauses.look()
    assert at.engine.reads == reads + 1


def test_a_busy_agent_ends_its_task_and_then_itself_with_nothing_lost() -> None:
    go = threading.Event()

    @job("test.slow")
    def slow(ctx: Context, payload: dict[str, Any]) -> str:
        assert go.wait(LONG_S)
        return "done"

    with serving(slow) as stage:
        tasks = [stage.client.enqueue(slow, {}) for _ in range(3)]
        stage.record.wait(events.TaskStarted, 3)
        [name] = [one.name for one in stage.client.agents.list()]
        stage.client.agents.drain(name[:-3], reason="an upgrade")
        stage.record.wait(events.AgentDraining)
        assert stands.eventually(lambda: "retires" in stage.client.agents.list()[0].info), "its tasks may take a while"
        [row] = stage.client.agents.list()
        assert (row.info["health"]["draining"], row.info["retires"]) == (True, "asked to drain: an upgrade")
        waiting = stage.client.enqueue(slow, {})
        with pytest.raises(WaitTimeout, match=rf"not gone within 0.05 s: {name} \(3 tasks\)"):
            stage.client.agents.wait_gone([name], timeout_s=0.05)
        go.set()
        stage.client.agents.wait_gone([name], timeout_s=LONG_S)
        stage.join()
        assert stage.stuck == 0
        found = [stage.client.get(task.task_id) for task in tasks]
        assert {(task.status, task.attempt, task.crash_count) for task in found} == {(Status.SUCCESS, 1, 0)}
        assert stage.client.get(waiting.task_id).status is Status.PENDING
        assert drains_of(stage.store.engine.get([CONTROL_ID])[CONTROL_ID]) == {}, "who waits cleans up"


def test_an_agent_takes_the_request_away_when_it_ends_though_nobody_waits_for_it() -> None:
    with serving(a_job()) as stage:
        [name] = stands.eventually(lambda: [one.name for one in stage.client.agents.list()])
        introduce(stage.store, "b:1:b")
        stage.client.agents.drain("b:1:b")
        stage.client.agents.drain(name)
        stage.join()
        assert entries(stage.client) == {"drain:b:1:b"}, "that of another stays"
        assert [one.name for one in stage.client.agents.list()] == ["b:1:b"]


@pytest.mark.parametrize("name", ["sqlite-memory", "moto"])
def test_the_request_is_taken_away_with_one_write_if_there_is_one(name: str, tmp_path: Path) -> None:
    with stands.open_stand(name, tmp_path) as stand:
        engine = Writing(stand.store.engine)
        clock = FakeClock()
        client = Client(stand.store, settings())
        introduce(stand.store, "a:1:a", "b:1:b")

        def watcher() -> PauseWatcher:
            store = TaskStore(engine, monotonic=clock.monotonic)
            return PauseWatcher(a_core(store, name="a:1:a"), queues=())

        not_asked = watcher()
        not_asked.is_paused("default", "a")
        not_asked.end()
        assert engine.verbs == []
        client.agents.drain("a:1:a")
        asked = watcher()
        assert asked.is_paused("default", "a")
        client.pauses.pause(queue="default")  # the row has changed since it was read
        asked.end()
        assert entries(client) == {"queue:default"}
        assert engine.verbs == ["set controls"] * 2
        engine.verbs.clear()
        asked.end()
        assert entries(client) == {"queue:default"}
        client.agents.drain("a:1:a")
        asked = watcher()
        assert asked.is_paused("default", "a")
        engine.verbs.clear()
        asked.end()
        assert (entries(client), engine.verbs) == ({"queue:default"}, ["set controls"])


@pytest.mark.parametrize("entry", [None, "yes", 5, {"reason": 7}, {"reason": ""}, {}])
def test_an_entry_of_whatever_content_asks(entry: Any) -> None:
    row = control_row({"drain:a": entry}, now=1.0)
    assert drain_asked(row, "a") == ""
    assert drain_asked(row, "b") is None
    assert drains_of(row) == {"a": 0.0}
    assert drain_asked(None, "a") is None


# The command


def test_a_name_may_be_cut_where_it_is_still_the_only_one() -> None:
    client = memory_client()
    introduce(client.store, "host-1:10:aa", "host-1:11:bb", "host-2:10:cc", "host-2:10:cccc")
    assert [one.name for one in client.agents.drain("host-1:10")] == ["host-1:10:aa"]
    assert [one.name for one in client.agents.drain("host-2:10:cc")] == ["host-2:10:cc"], "a whole name is no beginning"
    with pytest.raises(ConfigurationError, match="'host-1' is the beginning of 2 agents: host-1:10:aa, host-1:11:bb"):
        client.agents.drain("host-1")
    with pytest.raises(NotAllowed, match="no live agent is called 'host-3', or begins so; alive are host-1:10:aa, "):
        client.agents.drain("host-3")
    with pytest.raises(NotAllowed, match="no live agent is called ''"):
        client.agents.drain("")


def test_all_agents_of_a_host_are_asked_at_once() -> None:
    client = memory_client()
    introduce(client.store, "host-1:10:aa", "host-1:11:bb", "host-10:10:cc")
    assert [one.name for one in client.agents.drain("host-1", all_of_host=True)] == ["host-1:10:aa", "host-1:11:bb"]
    with pytest.raises(NotAllowed, match="no agent is alive on the host 'host'; there are some on host-1, host-10"):
        client.agents.drain("host", all_of_host=True)


def test_without_any_agent_that_is_said() -> None:
    with pytest.raises(NotAllowed, match="no agent is alive, so none is called 'host-1'"):
        memory_client().agents.drain("host-1")


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines"])
def test_a_reason_is_one_short_line(reason: str) -> None:
    with pytest.raises(ConfigurationError, match="one line of at most 200"):
        memory_client().agents.drain("host-1", reason=reason)


def test_pauses_are_kept_and_entries_of_agents_that_are_gone_are_cleaned_away() -> None:
    clock = FakeClock()
    client = Client(memory_store(clock), settings())
    introduce(client.store, "a:1:a", "b:1:b", lives_s=1e6)
    client.pauses.pause(queue="default")
    client.agents.drain("a:1:a")
    client.store.sign_off("a:1:a")
    clock.advance(FORGOTTEN_S)
    client.agents.drain("b:1:b")
    assert entries(client) == {"queue:default", "drain:a:1:a", "drain:b:1:b"}, "its row may be on its way"
    clock.advance(1.0)
    client.agents.drain("b:1:b")
    row = client.store.engine.get([CONTROL_ID])[CONTROL_ID]
    assert set(row["info"]) == {"queue:default", "drain:b:1:b"}
    client.pauses.resume(queue="default")
    assert set(client.store.engine.get([CONTROL_ID])[CONTROL_ID]["info"]) == {"drain:b:1:b"}, (
        "nor does a pause clean it"
    )


def test_every_change_of_the_row_forgets_requests_that_are_a_day_old() -> None:
    clock = FakeClock()
    client = Client(memory_store(clock), settings())
    introduce(client.store, "a:1:a", "b:1:b", lives_s=1e6)
    client.agents.drain("a:1:a")
    clock.advance(60.0)
    client.agents.drain("b:1:b")
    clock.advance(OLD_S - 30.0)
    client.pauses.pause(queue="default")
    assert entries(client) == {"queue:default", "drain:b:1:b"}
    clock.advance(60.0)
    client.pauses.resume(queue="default")
    assert entries(client) == set()


def test_who_asks_an_agent_again_after_a_day_is_heard() -> None:
    clock = FakeClock()
    client = Client(memory_store(clock), settings())
    introduce(client.store, "a:1:a", "a:2:b", lives_s=1e6)
    client.agents.drain("a:1:a")
    clock.advance(OLD_S + 1.0)
    client.agents.drain("a", all_of_host=True)
    assert entries(client) == {"drain:a:1:a", "drain:a:2:b"}


def test_an_entry_without_a_time_is_kept_when_old_ones_are_forgotten() -> None:
    client = memory_client()
    client.store.insert_row(control_row({"drain:a:1:a": {"of": "another version"}}, now=client.store.clock.now()))
    client.pauses.pause(queue="default")
    assert entries(client) == {"drain:a:1:a", "queue:default"}


def test_the_row_that_every_agent_reads_stays_small() -> None:
    client = memory_client()
    introduce(client.store, *(f"host:{number}:x" for number in range(MOST_DRAINS + 1)))
    with pytest.raises(NotAllowed, match="100 agents are asked to drain already"):
        client.agents.drain("host", all_of_host=True)
    assert CONTROL_ID not in client.store.engine.get([CONTROL_ID])
    client.agents.drain("host:0:x")


def test_an_agent_that_died_is_gone_when_it_is_overdue() -> None:
    clock = FakeClock()
    client = Client(memory_store(clock), settings())
    introduce(client.store, "a:1:a", running=2)
    with pytest.raises(WaitTimeout, match=r"a:1:a \(2 tasks\); the agents end within"):
        client.agents.wait_gone(["a:1:a"], timeout_s=0.01)
    clock.advance(61)
    client.agents.wait_gone(["a:1:a", "b:1:b"], timeout_s=0.01)


@pytest.fixture(params=[pytest.param("ministack", marks=pytest.mark.ministack), "sqlite-file"])
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    endpoint = request.getfixturevalue("ministack_endpoint") if request.param == "ministack" else ""
    with stands.open_stand(request.param, tmp_path, endpoint) as stand:
        yield stand


@pytest.mark.slow
def test_of_many_who_ask_for_different_agents_at_once_none_is_forgotten(stand: Stand) -> None:
    names = [f"{stand.mark}:{number}:x" for number in range(8)]
    introduce(stand.store, *names)
    assert stands.eventually(lambda: len({one.name for one in stand.store.agents()} & set(names)) == 8)
    clients = [Client(stand.open(), settings()) for _ in names]
    pairs = list(zip(clients, names, strict=True))
    together(*(partial(client.agents.drain, name) for client, name in pairs))
    row = stand.store.engine.get([CONTROL_ID])[CONTROL_ID]
    assert set(names) <= set(drains_of(row))
    for name in names:
        stand.store.sign_off(name)
    together(*(partial(client.agents.wait_gone, [name], timeout_s=LONG_S) for client, name in pairs))
    assert not set(names) & set(drains_of(stand.store.engine.get([CONTROL_ID])[CONTROL_ID]))
    for client in clients:
        client.close()
