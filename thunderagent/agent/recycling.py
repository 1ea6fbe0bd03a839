"""Recycling: an agent that has run for long enough drains, and its supervisor starts a fresh one.

A fresh process mends memory that is not given back, and threads that a handler left behind. Nothing is done for each
task but to count it; the numbers are looked at every few seconds, beside the loop.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from thunderagent.agent.heartbeat import STUCK_WAIT_S
from thunderagent.agent.threads import RepeatingThread
from thunderagent.model import events, fleet_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.memory import resident_mib
from thunderagent.settings import PREFIX, Settings

COUNTED: Final[Mapping[type[Event], str]] = {
    events.TaskStarted: "claimed",
    events.TaskSucceeded: "succeeded",
    events.TaskFailed: "failed",
    events.TaskClosed: "closed",
    events.TaskRetried: "retried",
    events.TaskTakenOver: "taken_over",
    events.LeaseLost: "leases_lost",
}
"""Counters by the event that they count. A task that was taken over was claimed as well."""


class Tally:
    """What an agent has done since its start, in numbers. Called in the thread of each event."""

    def __init__(self, bus: EventBus) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self._retires: str | None = None
        self.unsubscribe: Callable[[], None] = bus.subscribe(self.listen)
        """Ends the counting."""

    def listen(self, event: Event) -> None:
        name = COUNTED.get(type(event))
        if name is not None:
            with self._guard:
                self._counts[name] += 1
                if isinstance(event, events.TaskStarted):
                    self._jobs[event.job] += 1
        elif isinstance(event, fleet_events.AgentRetires):
            self._retires = event.reason
        elif isinstance(event, events.Polled) and event.tried > event.won:
            with self._guard:
                self._counts["claims_lost"] += event.tried - event.won

    @property
    def claimed(self) -> int:
        return self._counts["claimed"]

    def counts(self) -> dict[str, int]:
        with self._guard:
            return dict(self._counts)

    def facts(self, skew_s: float | None) -> dict[str, Any]:
        """Facts beside the counters: how far the host's clock is off, why the agent drains."""
        facts = {"skew_s": None if skew_s is None else round(skew_s, 2), "retires": self._retires}
        return {name: value for name, value in facts.items() if value is not None}

    def take_jobs(self) -> dict[str, int]:
        """How many tasks of which jobs have begun to run here since the last call."""
        with self._guard:
            jobs, self._jobs = self._jobs, Counter()
        return dict(jobs)


def units_of(engine: object) -> dict[str, float]:
    """Units of DynamoDB that an engine has used since its start, with those of refused writes."""
    consumed: Any = getattr(engine, "consumed", None)
    if consumed is None:
        return {}
    return {"read_units": round(consumed.read_units, 1), "write_units": round(consumed.billed_write_units, 1)}


JITTER: Final = 0.1
"""Largest share that is added to `recycle_tasks`, so that a fleet does not end together."""

LOOK_S: Final = 5.0
"""Time between two looks."""

NAMED: Final = 3
"""Most jobs that a reason names."""


@dataclass(frozen=True, slots=True)
class Held:
    """A task that is held: its job, and for how long its handler has ignored a request to stop."""

    job: str
    overrun_s: float = 0.0


class Recycling:
    """Looks whether it is time for a fresh agent; counts from its making on.

    Args:
        settings: `recycle_tasks`, `recycle_mib`, `recycle_threads`.
        retire: drains the agent, with the reason.
        memory_mib: the resident memory of this process.
    """

    def __init__(
        self,
        settings: Settings,
        bus: EventBus,
        *,
        retire: Callable[[str], None],
        held: Callable[[], Collection[Held]] = tuple,
        memory_mib: Callable[[], float] = resident_mib,
        rng: random.Random | None = None,
    ) -> None:
        self._bus = bus
        self._retire = retire
        self._held = held
        self._memory_mib = memory_mib
        self._tasks = round(settings.recycle_tasks * (1 + JITTER * (rng or random.Random()).random()))
        self._mib = float(settings.recycle_mib)
        self._threads = settings.recycle_threads
        self._tally = Tally(bus) if self._tasks or self._mib else None
        self._before = self._first = memory_mib() if self._mib else 0.0
        self._grown: dict[str, float] = {}
        self._was_held: Collection[str] = ()
        self._is_done = False

    @property
    def is_needed(self) -> bool:
        return bool(self._tasks or self._mib or self._threads)

    def thread(self) -> RepeatingThread:
        return RepeatingThread("recycling", LOOK_S, self.look)

    def look(self) -> None:
        """Retire the agent if there is a reason, once."""
        if self._is_done:
            return
        held = self._held()
        reason = self._of_threads(held) or self._of_tasks() or self._of_memory(held)
        if reason is not None:
            self._is_done = True
            if self._tally is not None:
                self._tally.unsubscribe()
            self._retire(reason)

    def _of_tasks(self) -> str | None:
        if not self._tasks or self._tally is None or self._tally.claimed < self._tasks:
            return None
        return f"it has run {self._tally.claimed} tasks ({PREFIX}RECYCLE_TASKS)"

    def _of_threads(self, held: Collection[Held]) -> str | None:
        leaked = [one for one in held if one.overrun_s >= STUCK_WAIT_S]
        if not self._threads or len(leaked) < self._threads:
            return None
        return (
            f"{len(leaked)} handlers go on {STUCK_WAIT_S:.0f} s and more after they were told to stop, each in a slot "
            f"({PREFIX}RECYCLE_THREADS): {_named(Counter(one.job for one in leaked))}"
        )

    def _of_memory(self, held: Collection[Held]) -> str | None:
        if not self._mib or self._tally is None:
            return None
        mib, running = self._memory_mib(), Counter(one.job for one in held)
        self._attribute(mib, self._tally.take_jobs(), running)
        if mib < self._mib:
            return None
        if self._first >= self._mib or not self._tally.claimed:  # a fresh process would be no smaller
            self._bus.emit(fleet_events.RecyclingOff(resident_mib=round(mib), recycle_mib=round(self._mib)))
            self._mib = 0.0
            return None
        grown = {name: mib for name, mib in self._grown.items() if mib >= 1.0}
        most = f", most of it while these ran: {_named(grown, unit=' MiB')}" if grown else ""
        now = f"; running now: {_named(running)}" if running else ""
        return (
            f"{mib:.0f} MiB of memory are resident, over {self._mib:.0f} ({PREFIX}RECYCLE_MIB); "
            f"they were {self._first:.0f} at its start{most}{now}"
        )

    def _attribute(self, mib: float, begun: Mapping[str, int], running: Collection[str]) -> None:
        """Share the growth of the memory since the last look among the jobs that ran meanwhile."""
        shares = Counter(begun)
        shares.update(self._was_held)
        grown, self._before, self._was_held = mib - self._before, mib, list(running)
        if grown > 0 and (number := shares.total()):
            for name, part in shares.items():
                self._grown[name] = self._grown.get(name, 0.0) + grown * part / number


def _named(numbers: Mapping[str, float], *, unit: str = "") -> str:
    first = sorted(numbers.items(), key=lambda one: (-one[1], one[0]))
    more = f" and {len(first) - NAMED} more" if len(first) > NAMED else ""
    return ", ".join(f"{name} {number:.0f}{unit}" for name, number in first[:NAMED]) + more
