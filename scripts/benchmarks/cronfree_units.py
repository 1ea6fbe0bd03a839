"""What a unique key, a limit, a tick and a pause cost on DynamoDB, by its rules, beyond a plain task.

A real agent runs a number of tasks on a store in memory, and a ledger notes every write of it and of the client. What
an agent does beside its tasks is told apart by its names and left out: see the part on idle agents.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from benchmarks.cronfree_figures import Unit
from benchmarks.cronfree_jobs import GATE, SPEC, STARTED, Nothing, hold, note, ticked
from benchmarks.cronfree_ledger import Cost, Ledger, LedgerEngine
from benchmarks.cronfree_race import Clock, Moment
from benchmarks.processes import BenchFailed
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event
from thunderagent.queue.schedules.scheduler import Periodic
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore

NUMBER: Final = 40
SLOTS: Final = 10
PAST_S: Final = 100_000.0
TICK: Final = "a tick of a periodic job"
BESIDE: Final = frozenset({"announce", "put agent", "delete agent", "take turn", "put turn"})
"""What agents write beside their tasks."""

READS_BESIDE: Final = frozenset({"get agent", "query AGENT rows", "get lanes", "query RUNNING", "query LINE rows"})


class Bench:
    """A store in memory with a ledger, a client, and agents for as long as they are needed."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.settings = load_settings(
            store=f"sqlite://{MEMORY}",
            queues={"default": SLOTS},
            sweep_s=3600.0,
            poll_min_s=0.05,
            poll_max_s=0.05,
            poll_idle_s=0.05,
        )
        engine = SqliteEngine(MEMORY)
        self.store = TaskStore(LedgerEngine(engine, self.ledger))
        self.moment = Moment(self.store.clock.now() - PAST_S)
        """A time in the past at which ticks are put, so that their tasks are due."""
        past = TaskStore(LedgerEngine(engine, self.ledger, clock=Clock(self.moment)), monotonic=self.moment.read)
        self.periodic = Periodic(
            past, Registry(ticked), self.settings, EventBus(), owner="bench", cancel=lambda task_id: None
        )
        self._agent: Agent | None = None
        self._ended = 0
        self._problem: Exception | None = None
        self._changed = threading.Condition()
        self.client = Client(self.store, self.settings, on_enqueue=self._wake)

    @contextmanager
    def agent(self) -> Iterator[None]:
        """An agent serves the store within the block."""
        jobs = Registry(note, hold, replace(ticked, schedule=None))
        agent = Agent(self.store, jobs, self.settings, first_poll_s=0.0)
        agent.bus.subscribe(self._listen)
        thread = threading.Thread(target=self._run, args=(agent,), name="agent", daemon=True)
        self._agent = agent
        thread.start()
        try:
            yield
        finally:
            self._agent = None
            agent.stop()
            thread.join(30.0)

    def await_started(self, task_id: str, deadline_s: float) -> None:
        """Wait until the handler of a task has begun.

        Raises:
            BenchFailed: it has not in time.
        """
        self._await(lambda: task_id in STARTED, deadline_s, f"{task_id} did not start")

    def await_ended(self, number: int, deadline_s: float) -> None:
        """Wait until so many tasks have succeeded since the last time.

        Raises:
            BenchFailed: they have not in time.
        """
        self._await(lambda: self._ended >= number, deadline_s, f"{number} tasks did not end")
        with self._changed:
            self._ended -= number

    def _await(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._problem is not None or done(), deadline_s):
                raise BenchFailed(f"{what} in {deadline_s:g} s")
            if self._problem is not None:
                raise BenchFailed(f"{what}, as the agent has ended: {self._problem!r}") from self._problem

    def _run(self, agent: Agent) -> None:
        try:
            agent.run()
        except Exception as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()

    def _listen(self, event: Event) -> None:
        with self._changed:
            self._ended += isinstance(event, events.TaskSucceeded)
            self._changed.notify_all()

    def _wake(self) -> None:
        if self._agent is not None:
            self._agent.wake()


Scenario = Callable[[Bench, int, float], int]
"""Does so many of something, and answers how many tasks that were."""


def plain(bench: Bench, number: int, deadline_s: float) -> int:
    """Tasks with nothing special."""
    for _ in range(number):
        bench.client.enqueue(note, Nothing())
    return _run(bench, number, deadline_s)


def unique(bench: Bench, number: int, deadline_s: float) -> int:
    """Tasks with a unique key each."""
    for index in range(number):
        bench.client.enqueue(note, Nothing(), unique_key=f"customer-{index}")
    return _run(bench, number, deadline_s)


def free_slot(bench: Bench, number: int, deadline_s: float) -> int:
    """Tasks with a limit that always has a free slot: it is counted as free only after the next claim."""
    for _ in range(number):
        bench.client.enqueue(note, Nothing(), limit_key="wide", limit=2 * SLOTS)
    return _run(bench, number, deadline_s)


def in_line(bench: Bench, number: int, deadline_s: float) -> int:
    """Tasks that are put while another one has the only slot; that one counts too."""
    GATE.clear()
    with bench.agent():
        first = bench.client.enqueue(hold, Nothing(), limit_key="narrow", limit=1)
        bench.await_started(first.task_id, deadline_s)
        for _ in range(number):
            bench.client.enqueue(note, Nothing(), limit_key="narrow", limit=1)
        GATE.set()
        bench.await_ended(number + 1, deadline_s)
    return number + 1


def refused(bench: Bench, number: int, deadline_s: float) -> int:
    """Tasks that are put while the only slot is free, so that all but the first are claimed in vain."""
    for _ in range(number):
        bench.client.enqueue(note, Nothing(), limit_key="late", limit=1)
    return _run(bench, number, deadline_s)


def tick(bench: Bench, number: int, deadline_s: float) -> int:
    """Ticks of a periodic job."""
    bench.periodic.look()
    for _ in range(number):
        bench.moment.now = SPEC.next(math.floor(bench.moment.now))
        bench.periodic.look()
    return _run(bench, number, deadline_s)


def pauses(bench: Bench, number: int, deadline_s: float) -> int:
    """Pauses of a queue, each with its end."""
    for _ in range(number):
        bench.client.pause(queue="reports", reason="measured")
        bench.client.resume(queue="reports")
    return number


def _run(bench: Bench, number: int, deadline_s: float) -> int:
    with bench.agent():
        bench.await_ended(number, deadline_s)
    return number


SCENARIOS: Final[Mapping[str, tuple[Scenario, bool]]] = {
    "a plain task": (plain, False),
    "a task with a unique key": (unique, True),
    "with a limit, a slot is free": (free_slot, True),
    "with a limit, put into the line": (in_line, True),
    "with a limit, claimed and refused first": (refused, True),
    TICK: (tick, True),
    "a pause and its end": (pauses, False),
}
"""What is done, and whether it is compared with a plain task."""


def measure_units(deadline_s: float) -> list[Unit]:
    """What each costs, once its rows are there.

    Raises:
        BenchFailed: tasks did not end in time.
    """
    units: list[Unit] = []
    for name, (scenario, is_compared) in SCENARIOS.items():
        bench = Bench()
        scenario(bench, 3, deadline_s)  # makes the rows of limits, pauses and agents
        bench.ledger.take()
        number = scenario(bench, NUMBER, deadline_s)
        unit = unit_of(name, number, bench.ledger.take())
        if is_compared:
            unit.extra = round(unit.write_units - units[0].write_units, 6)
            unit.is_judged = name != TICK
        units.append(unit)
    return units


def unit_of(name: str, number: int, costs: Mapping[str, Cost]) -> Unit:
    """The costs of each of so many."""
    verbs = {kind: cost.write_units / number for kind, cost in costs.items() if cost.write_units and kind not in BESIDE}
    reads = {
        kind: cost.read_units / number for kind, cost in costs.items() if cost.read_units and kind not in READS_BESIDE
    }
    return Unit(
        name=name,
        number=number,
        write_units=round(sum(verbs.values()), 6),
        read_units=round(sum(reads.values()), 6),
        verbs=verbs,
        reads=reads,
    )
