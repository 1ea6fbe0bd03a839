"""Many agents that put the ticks of one periodic job: whether each tick has one task, and what that takes.

Each agent has the code that deals with ticks, a thread, and a connection of its own to one SQLite file. Time is
simulated: it goes from one moment to the next at which an agent wants to look, and stands still while those whose
moment it is look, all at once. The machine decides who is first.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cronfree_figures import Race
from benchmarks.cronfree_jobs import INTERVAL_S, SPEC, ticked
from benchmarks.cronfree_ledger import Cost, Ledger, LedgerEngine, total
from benchmarks.processes import BenchFailed
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.schedules import State, schedule_id, tick_id
from thunderagent.model.task import Lane, Status
from thunderagent.queue.schedules.scheduler import Periodic
from thunderagent.settings import load_settings
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import AgentInfo, TaskStore

SKEW_S: Final = 2.0
TOGETHER_S: Final = 0.05
"""Agents whose moments are so close to each other look at the same one."""

METERED: Final = 200
BEGIN: Final = 1_800_000_000.0 + INTERVAL_S / 2
"""Between two ticks, by all clocks."""
SHORTEST_S: Final = 0.001
"""Time goes on by so much at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """How the agents of a race stand to each other."""

    name: str
    skew_s: float
    """Their clocks differ by up to so much from the true time."""
    are_known: bool
    """They know of each other, so that one of them is first at each tick."""


FIELDS: Final = (
    Field(name=f"clocks up to {SKEW_S:g} s wrong", skew_s=SKEW_S, are_known=True),
    Field(name="all at the same moment, strangers", skew_s=0.0, are_known=False),
)
"""As agents are, and the worst that can happen: all wake at once and none leaves a tick to another."""


class Moment:
    """The true time, which moves when it is told to."""

    def __init__(self, now: float = BEGIN) -> None:
        self.now = now

    def read(self) -> float:
        """Seconds that nobody sets."""
        return self.now


class Clock:
    """The clock of one agent, which does not know how wrong it is."""

    is_usable = True

    def __init__(self, moment: Moment, skew_s: float = 0.0) -> None:
        self._moment = moment
        self._skew_s = skew_s

    def now(self) -> float:
        return self._moment.now + self._skew_s

    earliest = latest = now

    @property
    def leases(self) -> Clock:
        return self


def measure_race(folder: Path, agents: int, ticks: int, deadline_s: float) -> Iterator[Race]:
    """Races for so many ticks.

    Raises:
        BenchFailed: a race did not come to its end in time.
    """
    for number, field in enumerate(FIELDS):
        before = round(os.getloadavg()[0], 2)
        metered = min(ticks, METERED)
        with _file(folder / f"race-{number}-metered") as path:
            ledger = Ledger()
            _Race(field, path, agents, ledger).run(metered, deadline_s)
            costs = ledger.take()
        with _file(folder / f"race-{number}") as path:
            race = _Race(field, path, agents, None)
            began = time.perf_counter()
            race.run(ticks, deadline_s)
            seconds = time.perf_counter() - began
            put, missing, strange = race.judged()
        yield Race(
            how=field.name,
            agents=agents,
            ticks=ticks,
            tasks=put,
            missing=missing,
            strange=strange,
            looks=race.looks / ticks,
            lost_decisions=_refused(costs, "decide ticks", "ticks put") / metered,
            lost_puts=_refused(costs, "put task") / metered,
            write_units=total(costs).write_units / metered,
            read_units=total(costs).read_units / metered,
            tick_ms=seconds * 1000.0 / ticks,
            metered=metered,
            load_before=before,
        )


class _Race:
    def __init__(self, field: Field, path: Path, agents: int, ledger: Ledger | None) -> None:
        rng = random.Random(1)
        self.looks = 0
        self._moment = Moment()
        self._stores: list[TaskStore] = []
        self._runners: list[Periodic] = []
        self._next: list[float] = []
        self._found: set[str] = set()
        self._end = 0.0
        settings = load_settings(store=f"sqlite:///{path}")
        names = [f"host-{index:02}:1:00000000" for index in range(agents)]
        told = [AgentInfo(name, BEGIN, BEGIN, {"jobs": [ticked.name]}) for name in names]
        for name in names:
            clock = Clock(self._moment, rng.uniform(-field.skew_s, field.skew_s))
            engine: Engine = SqliteEngine(str(path), clock=clock)
            store = TaskStore(LedgerEngine(engine, ledger) if ledger else engine, monotonic=self._moment.read)
            own = random.Random(name)
            runner = Periodic(
                store, Registry(ticked), settings, EventBus(), owner=name, cancel=lambda task_id: None, rng=own
            )
            if field.are_known:
                runner.learn(told)
            self._stores.append(store)
            self._runners.append(runner)
            self._next.append(self._moment.now)
        # The first agent registers the job, and all see it, before the race begins.
        self._runners[0].look()
        row_id = schedule_id(ticked.name)
        self._last = State.of(self._stores[0].engine.get([row_id])[row_id]).last
        for runner in self._runners[1:]:
            runner.look()
        if ledger:
            ledger.take()

    def run(self, ticks: int, deadline_s: float) -> None:
        """Let so many ticks pass.

        Raises:
            BenchFailed: that takes longer than `deadline_s`.
        """
        self._end = SPEC.next(self._last) + (ticks - 0.5) * INTERVAL_S  # all clocks are between two ticks then
        until = time.monotonic() + deadline_s
        try:
            with ThreadPoolExecutor(len(self._runners)) as pool:
                while (now := min(self._next)) < self._end:
                    if time.monotonic() > until:
                        gone = int(now - self._last) // INTERVAL_S
                        raise BenchFailed(f"the race had {gone} of {ticks} ticks behind it after {deadline_s:g} s")
                    self._moment.now = max(now, self._moment.now)
                    turn = [index for index, at in enumerate(self._next) if at <= now + TOGETHER_S]
                    self.looks += len(turn)
                    if len(turn) == 1:
                        self._look(turn[0])
                    else:
                        list(pool.map(self._look, turn))
        finally:
            self._found = self._ids()
            for store in self._stores:
                store.engine.close()

    def judged(self) -> tuple[int, int, int]:
        """Tasks that were put, ticks without one, and tasks that are no tick's."""
        wanted, tick = set[str](), SPEC.next(self._last)
        while tick < self._end:
            wanted.add(tick_id(ticked.name, tick))
            tick = SPEC.next(tick)
        return len(self._found), len(wanted - self._found), len(self._found - wanted)

    def _look(self, index: int) -> None:
        runner = self._runners[index]
        runner.look()
        self._next[index] = self._moment.now + max(SHORTEST_S, runner.wait_s())

    def _ids(self) -> set[str]:
        """Every task in the store."""
        engine, found, after = self._stores[0].engine, set[str](), None
        while True:
            page = engine.page(Lane().value(Status.PENDING), limit=1000, after=after)
            found.update(entry.task_id for entry in page.entries)
            after = page.after
            if after is None:
                return found


@contextmanager
def _file(folder: Path) -> Iterator[Path]:
    """A new database, which goes with the block."""
    folder.mkdir()
    try:
        yield folder / "tasks.db"
    finally:
        shutil.rmtree(folder)


def _refused(costs: Mapping[str, Cost], *kinds: str) -> int:
    return sum(costs[kind].refused for kind in kinds if kind in costs)
