"""Four equal agents under load claim equally much."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.engine import LONG_S, Recorder, a_job, settings
from tests.support.stands import eventually
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.outcome import Returned
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock, memory_store

pytestmark = pytest.mark.slow

AGENTS: Final = 4
APART: Final = 0.05
"""How far the largest count may be over the smallest one, as a share of the mean."""
APART_IN_THREADS: Final = 0.15
"""The same where the machine decides which thread runs."""


def apart(counts: Counter[str]) -> float:
    """How far the agents are apart."""
    assert len(counts) == AGENTS, counts
    return (max(counts.values()) - min(counts.values())) / (counts.total() / AGENTS)


class Steps:
    """Agents on one store whose rounds are led by the test: who is quicker, and how long a task takes, is set."""

    def __init__(self, *, seed: int, slots: int, number: int = AGENTS) -> None:
        self.clock = FakeClock()
        self.store = memory_store(self.clock)
        self.client = Client(self.store, settings())
        self.claimed: Counter[str] = Counter()
        self.begun: dict[str, int] = {}
        self.number = 0
        self.rng = random.Random(seed)
        self.agents = [
            Agent(
                TaskStore(self.store.engine, monotonic=self.clock.monotonic),
                Registry(a_job()),
                settings(
                    lease_s=300.0, heartbeat_s=60.0, poll_min_s=1.0, poll_max_s=5.0, poll_idle_s=10.0, slots=slots
                ),
                rng=random.Random(seed * 10 + place),
                first_poll_s=0.0,
            )
            for place in range(number)
        ]
        for agent in self.agents:
            agent._housekeeping._announce()
        for agent in self.agents:
            agent._housekeeping._learn_shares()

    def enqueue(self, tasks: int) -> None:
        """Tasks with ids that are the same in every run: an agent's share of them goes by their ids and its name."""
        for number in range(tasks):
            self.client.enqueue("test.job", {}, task_id=f"task-{number}")

    def round(self, *, lasts: int) -> None:
        """A round of each agent, in any order; what it claimed so many rounds ago has ended before."""
        self.number += 1
        for agent in self.rng.sample(self.agents, len(self.agents)):
            for one in list(agent._in_flight.held.values()):
                if not one.settling and self.number - self.begun[one.lease.task_id] >= lasts:
                    agent._in_flight.end(one, Returned(None))
            before = set(agent._in_flight.held)
            agent._in_flight.commit(claim=True)
            claimed = set(agent._in_flight.held) - before
            self.begun.update(dict.fromkeys(claimed, self.number))
            self.claimed[agent.name] += len(claimed)

    def finish(self, tasks: int, *, lasts: int = 1) -> int:
        """Rounds until every task was claimed; their number."""
        rounds = 0
        while self.claimed.total() < tasks:
            rounds += 1
            assert rounds < 100 * tasks
            self.round(lasts=lasts)
            self.clock.advance(0.25)
        return rounds


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents whose names sort in the order in which they are made."""
    numbers = itertools.count()
    monkeypatch.setattr("thunderagent.agent.assembly.secrets.token_hex", lambda size: f"{next(numbers):08x}")


@pytest.fixture(params=[1, 2])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("lasts", [1, 2, 7])
@pytest.mark.parametrize("slots", [1, 10])
def test_agents_with_as_many_rounds_claim_as_much(seed: int, slots: int, lasts: int) -> None:
    tasks = 2000 if slots == 10 else 800
    at = Steps(seed=seed, slots=slots)
    at.enqueue(tasks)
    at.finish(tasks, lasts=lasts)
    assert apart(at.claimed) <= APART, at.claimed


def test_no_agent_waits_while_there_is_work_for_it(seed: int) -> None:
    """Equal counts are no use if they come of agents that stand idle."""
    at = Steps(seed=seed, slots=10)
    at.client.enqueue_many("test.job", [{}] * 2000)
    assert at.finish(2000) <= 1.1 * 2000 / (AGENTS * 10)


def test_four_agents_with_threads_of_their_own_claim_equally_much(tmp_path: Path) -> None:
    """Their slots are the limit: with tasks that take no time it would be who gets the processor and the file."""
    path = str(tmp_path / "tasks.db")
    tasks = 2000

    @job("test.short")
    async def short(ctx: Context, payload: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)

    agents, records, threads = [], [], []
    for place in range(AGENTS):
        agent = Agent(
            TaskStore(SqliteEngine(path)),
            Registry(short),
            settings(poll_min_s=0.05, poll_max_s=0.1, poll_idle_s=0.1, sweep_s=1.0),
            rng=random.Random(place),
            first_poll_s=0.0,
        )
        agents.append(agent)
        records.append(Recorder(agent.bus))
        threads.append(threading.Thread(target=agent.run, daemon=True))
        threads[-1].start()
    client = Client(TaskStore(SqliteEngine(path)), settings())
    try:
        eventually(lambda: len(client.agents.list()) == AGENTS, LONG_S)
        for agent in agents:
            agent._housekeeping._learn_shares()
        client.enqueue_many(short, [{}] * tasks)
        eventually(lambda: client.store.engine.count("SUCCESS") == tasks, 4 * LONG_S)
    finally:
        for agent in agents:
            agent.stop()
        for thread in threads:
            thread.join(LONG_S)
        client.close()
    claimed = Counter({agent.name: len(one.of(events.TaskStarted)) for agent, one in zip(agents, records, strict=True)})
    assert claimed.total() == tasks
    assert apart(claimed) <= APART_IN_THREADS, claimed
