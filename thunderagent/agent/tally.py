"""What an agent has done since its start, in numbers: told in its row, and what its recycling goes by."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from thunderagent.model import events, fleet_events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event

COUNTED: Final[Mapping[type[Event], str]] = {
    events.TaskStarted: "claimed",
    events.TaskSucceeded: "succeeded",
    events.TaskFailed: "failed",
    events.TaskClosed: "closed",
    events.TaskRetried: "retried",
    events.TaskTakenOver: "taken_over",
    events.LeaseLost: "leases_lost",
}
"""The counters by the event that they count. A task that was taken over was claimed as well."""


class Tally:
    """Counts the events of one agent, each by its job where that is asked for. Called in the thread of each event."""

    def __init__(self, bus: EventBus) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self._retires: str | None = None
        self.unsubscribe: Callable[[], None] = bus.subscribe(self.listen)
        """Ends the counting."""

    def listen(self, event: Event) -> None:
        """Count an event, if it is one that counts."""
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
        """Tasks that have begun to run here."""
        return self._counts["claimed"]

    def counts(self) -> dict[str, int]:
        """All counters that are not 0."""
        with self._guard:
            return dict(self._counts)

    def told(self, skew_s: float | None) -> dict[str, Any]:
        """What there is to tell beside the counters: how far the host's clock is off, why the agent drains."""
        facts = {"skew_s": None if skew_s is None else round(skew_s, 2), "retires": self._retires}
        return {name: value for name, value in facts.items() if value is not None}

    def take_jobs(self) -> dict[str, int]:
        """How many tasks of which jobs have begun to run here since the last call."""
        with self._guard:
            jobs, self._jobs = self._jobs, Counter()
        return dict(jobs)


def units_of(engine: object) -> dict[str, float]:
    """Units of DynamoDB that an engine has used since its start, refused writes included; nothing for one without."""
    consumed: Any = getattr(engine, "consumed", None)
    if consumed is None:
        return {}
    return {"read_units": round(consumed.read_units, 1), "write_units": round(consumed.billed_write_units, 1)}
