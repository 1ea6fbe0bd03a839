"""Lets the time of a test pass: from one moment at which something is due to the next, while nothing runs.

It stands in the agent's own loop, at the end of a look for work. There the agent holds nothing and has nothing in
doubt, so no lease can be lost by a leap, and no step of a task is skipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from thunderagent import events
from thunderagent.agent import Agent
from thunderagent.client import Client
from thunderagent.events import Event
from thunderagent.task import Status, Task

QUIET_POLLS: Final = 5
"""After so many looks at each queue that found nothing to do, nothing is on its way any more."""

FIRST_STEP_S: Final = 0.01
LONGEST_STEP_S: Final = 60.0
"""Steps of the clock while something is open for which no moment is known: a job that nobody has, a slot of a limit."""

LOOKED_AT: Final = 100
"""Tasks of each lane and status whose moments are looked at."""


class Travel:
    """Moves the clock of one agent's store.

    Args:
        agent: runs on that clock, alone.
        client: of the same store; none of the faults of the agent's store may be in its way.
        advance: lets time pass, in seconds.
        for_s: how much time is to pass in all; None: as much as it takes until no task is open.
    """

    def __init__(
        self, agent: Agent, client: Client, advance: Callable[[float], None], *, for_s: float | None = None
    ) -> None:
        self._agent = agent
        self._client = client
        self._advance = advance
        self._until = math.inf if for_s is None else client.store.clock.now() + for_s
        self._quiet = Counter[str]()
        self._step = FIRST_STEP_S
        self.is_over = False
        """True when all the time has passed that was to, and what was due in it has been done."""

    def listen(self, event: Event) -> None:
        """Take an event of the agent, in whatever thread it comes."""
        match event:
            case events.Polled(queue=queue, tried=tried):
                if tried or not self._agent._workload.is_empty:
                    self._rest()
                else:
                    self._quiet[queue] += 1
                    if self._go():
                        self._agent.wake()
            case events.StoreFailed(during="polling", next_try_s=seconds):
                self._move(seconds)
                self._agent.wake()
            case events.TaskEvent():
                self._rest()

    def _rest(self) -> None:
        """Something happens: no time need pass."""
        self._quiet.clear()
        self._step = FIRST_STEP_S

    def _go(self) -> bool:
        """Let time pass if nothing is to be done before; whether the agent is to look again at once."""
        now = self._client.store.clock.now()
        moments = list(self._moments())
        is_quiet = min(self._quiet.values()) >= QUIET_POLLS
        later = min((at for at in moments if at > now), default=math.inf)
        if now >= self._until:
            self.is_over = self.is_over or is_quiet
        elif any(at <= now for at in moments) or later == self._until == math.inf:
            if is_quiet:  # in the pace of whoever wakes the agent: what it waits for may take real time
                self._move(min(self._step, later - now))
                self._step = min(2 * self._step, LONGEST_STEP_S)
        else:
            self._move(later - now)
            self._quiet.clear()
            return True
        return not is_quiet

    def _move(self, seconds: float) -> None:
        now = self._client.store.clock.now()
        if (left := min(seconds, self._until - now)) > 0:
            self._advance(left)

    def _moments(self) -> Iterator[float]:
        """When something is due: tasks, ticks, and the ends of pauses and of leases that nobody extends."""
        store = self._client.store
        for lane in store.engine.lanes():
            pending = store.engine.page(lane.value(Status.PENDING), limit=LOOKED_AT).entries
            yield from (one.created_at for one in pending)
            running = store.engine.page(lane.value(Status.RUNNING), limit=LOOKED_AT).entries
            leases = store.peek(one.task_id for one in running).values() if running else ()
            yield from (self._end(task) for task in leases if task.lock_time is not None)
        yield from (one.next for one in self._client.schedules() if one.next is not None)
        yield from (one.until for one in self._client.pauses() if one.until is not None)

    def _end(self, task: Task) -> float:
        return (task.lock_time or 0.0) + self._agent.settings.clock_guard_s + FIRST_STEP_S
