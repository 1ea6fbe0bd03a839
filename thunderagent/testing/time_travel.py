"""Moves the time of a test from one due moment to the next while nothing runs.

It acts in the agent's own loop, at the end of a poll: there the agent holds nothing and has no claim in doubt, so a
leap loses no lease and skips no step of a task.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.model import events
from thunderagent.model.bus import Event
from thunderagent.model.task import Status, Task
from thunderagent.queue.limits.waitlist import open_waitlists

QUIET_POLLS: Final = 5
"""Empty polls of each queue after which nothing is on its way any more."""

FIRST_STEP_S: Final = 0.01
LONGEST_STEP_S: Final = 60.0
"""Longest step of the clock for an open task without a known moment: an unknown job, a permit of a limit."""

LOOKED_AT: Final = 100
"""Tasks of each lane and status whose moments count."""

STEPS_IN_VAIN: Final = 20
"""Steps of the clock after which nothing will run, if the agent can run none of the open tasks."""

STEPS_BEFORE_TICK: Final = 200
"""As `STEPS_IN_VAIN`, while a tick is still to come, which may put or cancel something."""

VAIN_S: Final = 2.0
"""Real seconds of steps in vain after which nothing will run, whatever the tasks wait for."""

VAIN_SWEEPS: Final = 3
"""Sweeps of the agent, which come in real time, within these seconds."""


class Travel:
    """Moves the clock of one agent's store.

    Args:
        client: of the same store, without the faults of the agent's engine.
        for_s: seconds that pass in all; None: until no task is open.
    """

    def __init__(
        self,
        agent: Agent,
        client: Client,
        advance: Callable[[float], None],
        *,
        for_s: float | None = None,
        real: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._client = client
        self._advance = advance
        self._until = math.inf if for_s is None else client.store.clock.now() + for_s
        self._quiet = Counter[str]()
        self._moved_by: str | None = None
        self._step = FIRST_STEP_S
        self.is_over = False
        """True when `for_s` seconds have passed and what was due in them is done."""
        self.is_hopeless = False
        """True when no open task will ever run."""
        self._real = real
        self._foreign_steps = 0
        self._vain_from: float | None = None

    def listen(self, event: Event) -> None:
        """Take an event of the agent, in any thread."""
        match event:
            case events.Polled(queue=queue, tried=tried):
                if tried or not self._agent._in_flight.is_empty:
                    self._rest()
                else:
                    self._quiet[queue] += 1
                    if self._go(queue):
                        self._agent.wake()
            case events.StoreFailed(during="polling", next_try_s=seconds):
                self._move(seconds)
                self._agent.wake()
            case events.TaskEvent():
                self._rest()

    def _rest(self) -> None:
        """Begin again: something happens, so no time need pass."""
        self._quiet.clear()
        self._step = FIRST_STEP_S
        self._vain_from = None

    def _go(self, queue: str) -> bool:
        """Let time pass if nothing is to be done before; True when the agent is to poll again at once.

        At most once in each round of polls: what is due at the new moment, such as a tick, comes after the round.
        """
        now = self._client.store.clock.now()
        moments = list(self._moments())
        is_quiet = min(self._quiet.values()) >= QUIET_POLLS
        later = min((at for at in moments if at > now), default=math.inf)
        if now >= self._until:
            self.is_over = self.is_over or is_quiet
        elif any(at <= now for at in moments) or later == self._until == math.inf:
            if is_quiet:  # at the pace of the polls: what the agent waits for may take real time
                if self._until == math.inf:
                    self._count_in_vain(is_tick_due=later < math.inf)
                self._move(min(self._step, later - now))
                self._step = min(2 * self._step, LONGEST_STEP_S)
        elif self._moved_by in (None, queue) or self._quiet[queue] > 1:
            self._move(later - now)
            self._quiet.clear()
            self._moved_by = queue
            return True
        return not is_quiet

    def _count_in_vain(self, *, is_tick_due: bool) -> None:
        """Count steps in vain. A task that is held comes free: the agent takes it over in time."""
        store, is_whole = self._client.store, True
        waiting, held = list[Task](), list[Task]()
        for lane in store.engine.lanes():
            for status, found in ((Status.PENDING, waiting), (Status.RUNNING, held)):
                page = store.engine.page(lane.value(status), limit=LOOKED_AT)
                is_whole = is_whole and page.after is None and len(page.entries) < LOOKED_AT
                found += store.peek(one.task_id for one in page.entries).values()
        if not is_whole or any(serves(self._agent, task) for task in held):
            self._foreign_steps, self._vain_from = 0, None
            return
        is_blocked = any(store.engine.count(lane.value(Status.BLOCKED)) for lane in store.engine.lanes())
        can_run = is_blocked or any(open_waitlists(store)) or any(serves(self._agent, task) for task in waiting)
        self._foreign_steps = 0 if can_run or not (waiting or held) else self._foreign_steps + 1
        if self._vain_from is None:
            self._vain_from = self._real()
        vain_s = self._real() - self._vain_from
        sweeps_s = VAIN_SWEEPS * self._agent.settings.sweep_s
        self.is_hopeless = self._foreign_steps >= (STEPS_BEFORE_TICK if is_tick_due else STEPS_IN_VAIN) or (
            self._step >= LONGEST_STEP_S and vain_s >= max(VAIN_S, sweeps_s)
        )

    def _move(self, seconds: float) -> None:
        now = self._client.store.clock.now()
        if (left := min(seconds, self._until - now)) > 0:
            self._advance(left)

    def _moments(self) -> Iterator[float]:
        """Due moments: of tasks, ticks, and the ends of pauses and of abandoned leases."""
        store = self._client.store
        for lane in store.engine.lanes():
            pending = store.engine.page(lane.value(Status.PENDING), limit=LOOKED_AT).entries
            yield from (one.created_at for one in pending)
            running = store.engine.page(lane.value(Status.RUNNING), limit=LOOKED_AT).entries
            leases = store.peek(one.task_id for one in running).values() if running else ()
            yield from (self._end(task) for task in leases if task.lock_time is not None)
        yield from (one.next for one in self._client.schedules.list() if one.next is not None)
        yield from (one.until for one in self._client.pauses.list() if one.until is not None)

    def _end(self, task: Task) -> float:
        return (task.lock_time or 0.0) + self._agent.settings.clock_guard_s + FIRST_STEP_S


def serves(agent: Agent, task: Task) -> bool:
    """True when an agent has the job of a task and polls its queue."""
    return task.job_value in agent.jobs.by_value and any(queue == task.queue for queue, _ in agent._pollers)
