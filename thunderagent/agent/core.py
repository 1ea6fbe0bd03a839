"""What all parts of one agent share."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from thunderagent.jobs.outcome import Outcome
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running
from thunderagent.model.bus import EventBus
from thunderagent.model.fleet_events import AgentRetires
from thunderagent.regions.gate import Gate
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore


class Inbox:
    """What the agent's loop sleeps on, so that an outcome, a signal or a local enqueue wakes it."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Running, Outcome] | None] = SimpleQueue()

    def done(self, running: Running, outcome: Outcome) -> None:
        """Report how a handler ended. Safe in any thread."""
        self.queue.put((running, outcome))

    def wake(self) -> None:
        """Wake the loop. A SimpleQueue may be put to in a signal handler, at any point of the main thread."""
        self.queue.put(None)


class StopRequests:
    """Requests that the agent stops. Safe in any thread and in a signal handler.

    Args:
        bus: gets `AgentRetires`.
        wake: wakes the agent's loop.
    """

    def __init__(self, bus: EventBus, wake: Callable[[], None]) -> None:
        self._bus = bus
        self._wake = wake
        self._number, self._patience = 0, 1
        self._retires = threading.Lock()  # acquired for good by the first request to retire

    @property
    def is_made(self) -> bool:
        """Whether the agent is to stop."""
        return self._number > 0

    @property
    def is_urgent(self) -> bool:
        """Whether a signal came again, so that the drain is to be short."""
        return self._number > self._patience

    def make(self) -> None:
        """Ask the agent to stop; a second request makes it hurry."""
        self._number += 1
        self._wake()

    def retire(self, reason: str) -> None:
        """Ask for a drain, once, for a reason that is logged; the supervisor starts a fresh agent."""
        if not self._number and self._retires.acquire(blocking=False):
            self._patience = 2  # the first signal that comes then is no second one, and does not hurry
            self._bus.emit(AgentRetires(reason=reason))
            self.make()


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What all parts of one agent share."""

    name: str
    """Unique per process start: the `leaseOwner` of everything that the agent holds."""
    store: TaskStore
    jobs: Registry
    settings: Settings
    bus: EventBus
    rng: random.Random
    """Source of jitter and shuffling."""
    gate: Gate
    """What the agent may write, by the grant of its region."""
    inbox: Inbox
    stop: StopRequests
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts for the agent's row, by name."""

    def lease_s(self, job: str) -> float:
        """Length of the lease of a task with this job."""
        return self.jobs.by_value[job].lease_s or self.settings.lease_s
