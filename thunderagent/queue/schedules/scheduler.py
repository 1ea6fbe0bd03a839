"""Puts the tasks of periodic jobs when they are due. Every agent does so; there is no leader.

An agent decides on the due ticks, writes the decision into the row of the schedule under the fence that it read, puts
the tasks, and removes the decision from the row. The fence lets one agent decide for each interval. A decision that
stays in the row is carried out by another agent: after a crash between any two statements no tick is lost or doubled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from zlib import crc32

from thunderagent.jobs.job import Job
from thunderagent.jobs.registry import Registry
from thunderagent.model import queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.conditions import Write
from thunderagent.model.errors import (
    ConfigurationError,
    DuplicateTask,
    NotAllowed,
    StoreError,
    TaskNotFound,
    TaskUnreadable,
)
from thunderagent.model.names import plain_job
from thunderagent.model.pacing import jittered
from thunderagent.model.rows import Unreadable
from thunderagent.model.schedules import (
    LATE_S,
    SET_BACK_S,
    Plan,
    Schedule,
    State,
    counts_from,
    expires_at,
    plan,
    schedule_id,
    tick_id,
    tick_task,
)
from thunderagent.model.task import Row, Task
from thunderagent.model.ticks import newest
from thunderagent.model.writes.schedules import SCHEDULE_STATUS, change_schedule, schedule_row
from thunderagent.settings import Settings
from thunderagent.stores.tasks import AgentInfo, TaskStore

TICK_LOOK_S: Final = 5.0
"""Longest pause between two looks at the clock for ticks of periodic jobs; no row is read for it."""

SCHEDULE_LOOK_S: Final = 900.0
"""Longest time between two readings of the row of a schedule of which no tick is due."""

STOPPING_LOOK_S: Final = 2.0
"""Time between two looks whether a cancelled task has ended for whose end a tick waits."""

TICK_OTHERS_S: Final = (0.5, 1.0)
"""How long a tick is left to the agent whose turn it is, so that a fleet does not race for it."""

TICK_RESUME_S: Final = 3.0
"""How long ticks that another agent has decided may take to be put, before we put them."""


KEPT_S: Final = 90 * 86400.0
"""Lifetime of the row of a schedule whose job no agent has any more."""

EXTENDED_S: Final = 60 * 86400.0
"""Rest of that lifetime below which an agent that has the job extends it."""


@dataclass(slots=True)
class _Watch:
    """What an agent knows of a schedule, so that it reads the row only when something is due."""

    job: Job[Any]
    own: Schedule
    due: float = -math.inf
    """Second of the shared clock at which the next tick is dealt with."""
    look_by: float = -math.inf
    """Monotonic second at which the row is read in any case."""
    last: int = 0
    is_greeted: bool = False
    """True once the row had the schedule of our code; from then on we follow the row."""
    has_followed: bool = False
    pending: tuple[Any, float] | None = None
    """Fence of a decision of another agent, and the monotonic second at which we first read it."""
    unreadable: Any = None
    """Fence of the row that was reported as unreadable."""


@dataclass(frozen=True, slots=True)
class _Deal:
    """A change of a row that one look makes."""

    watch: _Watch
    row: Row
    state: State
    verb: str
    plan: Plan | None = None
    before: str | None = None


class TickScheduler:
    """Puts the ticks of one agent's jobs. Called in the agent's loop. Nothing is read before `look`.

    Args:
        jobs: of the agent; those with a schedule count.
        cancel: cancels the task with an id, as `Client.cancel` does.
        rng: source of the wait behind the agent whose turn it is.
    """

    def __init__(
        self,
        store: TaskStore,
        jobs: Registry,
        settings: Settings,
        bus: EventBus,
        *,
        owner: str,
        cancel: Callable[[str], object],
        on_put: Callable[[Sequence[Task]], None] = lambda tasks: None,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._shards = settings.shards
        self._bus = bus
        self._owner = owner
        self._cancel = cancel
        self._on_put = on_put
        self._rng = rng or random.Random()
        self._watches = [_Watch(job, job.schedule) for job in jobs.values() if job.schedule is not None]
        self._others: dict[str, list[str]] = {}
        self._rests_until = -math.inf

    def learn(self, agents: Iterable[AgentInfo]) -> None:
        """Learn which agents have our jobs, so that one of them deals with a tick and the others wait a little."""
        known = [(agent.name, set(map(plain_job, agent.info.get("jobs", ())))) for agent in agents]
        self._others = {
            watch.job.name: sorted({self._owner, *(name for name, jobs in known if watch.job.name in jobs)})
            for watch in self._watches
        }

    def wait_s(self) -> float:
        """Seconds until the next `look`, at most `TICK_LOOK_S`: clocks may be set meanwhile."""
        now, monotonic = self._store.clock.now(), self._store.monotonic()
        waits = (0.0 if self._is_due(one, now, monotonic) else self._left(one, now, monotonic) for one in self._watches)
        return max(self._rests_until - monotonic, min(TICK_LOOK_S, min(waits, default=TICK_LOOK_S)))

    def look(self) -> None:
        """Deal with every due tick; reads no row if none is due.

        Raises:
            StoreError: the store did not answer; the rest is done at the next look, or by another agent.
        """
        now, monotonic = self._store.clock.now(), self._store.monotonic()
        if monotonic < self._rests_until:
            return
        due = [watch for watch in self._watches if self._is_due(watch, now, monotonic)]
        try:
            self._deal(due)
        except StoreError:
            self._rests_until = monotonic + jittered(TICK_LOOK_S, self._rng)
            raise

    def _deal(self, due: Sequence[_Watch]) -> None:
        if not due:
            return
        rows = self._store.engine.get([schedule_id(watch.job.name) for watch in due])
        deals, ready = list[_Deal](), list[_Deal]()
        for watch in due:
            row = rows.get(schedule_id(watch.job.name)) or self._register(watch)
            deal = self._decide(watch, row) if row is not None else None
            if deal is not None:
                (deals if deal.verb else ready).append(deal)
        ready += [deal for deal in self._write(deals) if deal.state.ticks]
        self._carry_out(ready)

    # The row

    def _register(self, watch: _Watch) -> Row | None:
        """Insert the row of a job that has none; the answer is the row of an agent that was faster."""
        now = self._store.clock.now()
        state = State(schedule=watch.own, last=math.floor(now))
        row_id = schedule_id(watch.job.name)
        row = schedule_row(row_id, state.to_info(), owner=self._owner, now=now, expire_at=now + KEPT_S)
        is_ours, row = self._store.insert_row(row)
        if not is_ours:
            return row
        self._bus.emit(queue_events.ScheduleSet(job=watch.job.name, spec=str(watch.own.spec), before=None))
        watch.is_greeted = True
        self._sleep(watch, state)
        return None

    def _decide(self, watch: _Watch, row: Row) -> _Deal | None:
        """What to do with a row; None: nothing before the next look, whose time is set."""
        clock, name = self._store.clock, watch.job.name
        now = clock.now()
        fresh = State(schedule=watch.own, last=math.floor(now))
        try:
            state = State.of(row)
        except ConfigurationError as error:
            return self._unreadable(watch, row, fresh, error)
        if expires_at(row) < clock.earliest():  # as good as gone: no agent has had the job for long
            return _Deal(watch, row, fresh, "set schedule", before="an old one")
        if state.ticks:
            return self._resume(watch, row, state)
        if not watch.is_greeted:
            if state.schedule.is_same(watch.own):
                watch.is_greeted = True
            elif watch.has_followed or not _has_fresh_tick(state, now):
                last = state.last if state.schedule.spec == watch.own.spec else fresh.last
                state, before = replace(state, schedule=watch.own, last=last), str(state.schedule.spec)
                return _Deal(watch, row, state, "set schedule", before=before)
            watch.has_followed = True
        decided = plan(name, state, now, partial(is_open, self._store), partial(is_stopping, self._store))
        if decided is not None and decided.must_wait:
            self._read_again(watch, jittered(STOPPING_LOOK_S, self._rng))
            return None
        if decided is not None:
            return _Deal(watch, row, decided.state, "decide ticks", plan=decided)
        if not now + EXTENDED_S <= expires_at(row) < math.inf:
            return _Deal(watch, row, state, "keep schedule")
        self._sleep(watch, state)
        return None

    def _unreadable(self, watch: _Watch, row: Row, fresh: State, error: ConfigurationError) -> _Deal | None:
        """At the start our schedule takes its place; later the row is of a newer version and is left alone."""
        if not watch.is_greeted and isinstance(row.get("fence"), int) and row.get("status") == SCHEDULE_STATUS:
            return _Deal(watch, row, fresh, "set schedule", before="one that cannot be read")
        if watch.unreadable != row.get("fence", ""):
            self._bus.emit(queue_events.ScheduleUnreadable(job=watch.job.name, error=str(error)))
        watch.unreadable = row.get("fence", "")
        self._read_again(watch, SCHEDULE_LOOK_S)
        return None

    def _resume(self, watch: _Watch, row: Row, state: State) -> _Deal | None:
        """Carry out a decision: our own at once, that of another agent after `TICK_RESUME_S`."""
        monotonic = self._store.monotonic()
        fence, since = (
            watch.pending if watch.pending and watch.pending[0] == row["fence"] else (row["fence"], monotonic)
        )
        watch.pending = fence, since
        if row.get("lastAgent") == self._owner or monotonic - since >= TICK_RESUME_S:
            return _Deal(watch, row, state, "")
        self._read_again(watch, since + TICK_RESUME_S - monotonic)
        return None

    def _write(self, deals: Sequence[_Deal]) -> list[_Deal]:
        """Write decisions into their rows; the answer is the accepted ones, with their rows."""
        answers = self._store.write_rows([self._change(deal) for deal in deals])
        won = []
        for deal, (is_done, row) in zip(deals, answers, strict=True):
            watch, name = deal.watch, deal.watch.job.name
            if not is_done or row is None:
                self._look_soon(watch)
                continue
            won.append(replace(deal, row=row))
            if deal.verb == "set schedule":
                watch.is_greeted = True
                spec = str(deal.state.schedule.spec)
                self._bus.emit(queue_events.ScheduleSet(job=name, spec=spec, before=deal.before))
            for reason, number in deal.plan.skipped if deal.plan else ():
                self._bus.emit(queue_events.TicksSkipped(job=name, number=number, reason=reason))
            if deal.plan and deal.plan.set_back_s:
                self._bus.emit(queue_events.ScheduleSetBack(job=name, seconds=deal.plan.set_back_s))
            if deal.state.ticks:
                watch.due = -math.inf  # until they are put
            else:
                self._sleep(watch, deal.state)
        return won

    def _change(self, deal: _Deal) -> Write:
        now, row = self._store.clock.now(), deal.row
        expires = expires_at(row)
        expire_at = expires if EXTENDED_S <= expires - now <= KEPT_S else now + KEPT_S
        return change_schedule(
            deal.verb or "ticks put", row, deal.state.to_info(), owner=self._owner, now=now, expire_at=expire_at
        )

    # The tasks

    def _carry_out(self, deals: Sequence[_Deal]) -> None:
        """Put the tasks of decided ticks, and remove the decisions from the rows."""
        if not deals:
            return
        for deal in deals:
            if deal.state.cancels is not None:
                self._cancel_one(deal.state.cancels)
        now = self._store.clock.now()
        tasks = [
            (index, tick, tick_task(deal.watch.job.name, deal.state.schedule, tick, shards=self._shards, now=now))
            for index, deal in enumerate(deals)
            for tick in deal.state.ticks
        ]
        answers = self._store.enqueue([task for _, _, task in tasks])
        errors: dict[int, Exception] = {}
        put: list[Task] = []
        for (index, tick, task), answer in zip(tasks, answers, strict=True):
            if answer.error is not None and not isinstance(answer.error, (DuplicateTask, TaskUnreadable)):
                errors[index] = answer.error
            elif answer.created:
                put.append(answer.task)
                self._bus.emit(queue_events.TickPut(job=task.job, task_id=task.task_id, late_s=max(0.0, now - tick)))
        if put:
            self._on_put(put)
        done = [deal for index, deal in enumerate(deals) if index not in errors]
        self._confirm(done)
        for error in errors.values():
            raise error

    def _confirm(self, deals: Sequence[_Deal]) -> None:
        states = [replace(deal.state, ticks=(), cancels=None) for deal in deals]
        writes = [self._change(replace(deal, state=state, verb="")) for deal, state in zip(deals, states, strict=True)]
        for deal, state, (is_done, _) in zip(deals, states, self._store.write_rows(writes), strict=True):
            if is_done:
                self._sleep(deal.watch, state)
            else:
                self._look_soon(deal.watch)

    def _cancel_one(self, task_id: str) -> None:
        with suppress(NotAllowed, TaskNotFound):  # it has ended
            self._cancel(task_id)

    # Time

    def _is_due(self, watch: _Watch, now: float, monotonic: float) -> bool:
        return now >= watch.due or monotonic >= watch.look_by or watch.last > now + SET_BACK_S

    def _left(self, watch: _Watch, now: float, monotonic: float) -> float:
        return min(watch.due - now, watch.look_by - monotonic)

    def _sleep(self, watch: _Watch, state: State) -> None:
        """Look again when the next tick is due; a little later if it is the turn of another agent."""
        now = self._store.clock.now()
        # A paused schedule too is read at each tick: it may have been resumed.
        tick = state.schedule.spec.next(math.floor(now) if state.is_paused(now) else counts_from(state))
        later = 0.0 if self._is_first(watch.job.name, tick) else self._rng.uniform(*TICK_OTHERS_S)
        watch.due = tick + later if watch.is_greeted else -math.inf
        watch.last, watch.pending = state.last, None
        watch.look_by = self._store.monotonic() + jittered(SCHEDULE_LOOK_S, self._rng)

    def _look_soon(self, watch: _Watch) -> None:
        """Read the row again soon: another agent has changed it."""
        self._read_again(watch, self._rng.uniform(*TICK_OTHERS_S))

    def _read_again(self, watch: _Watch, seconds: float) -> None:
        """Read the row after so many seconds, whatever its ticks are."""
        watch.due, watch.last, watch.look_by = math.inf, 0, self._store.monotonic() + seconds

    def _is_first(self, job: str, tick: int) -> bool:
        agents = self._others.get(job) or [self._owner]
        return agents[crc32(tick_id(job, tick).encode()) % len(agents)] == self._owner


def is_open(store: TaskStore, task_id: str) -> bool:
    """True while the task with this id has not ended, or cannot be read."""
    task = store.read([task_id]).get(task_id)
    return isinstance(task, Unreadable) or (task is not None and not task.status.is_terminal)


def is_stopping(store: TaskStore, task_id: str) -> bool:
    """True while the task with this id was asked to stop and has not ended."""
    task = store.peek([task_id]).get(task_id)
    return task is not None and task.is_stopping


def _has_fresh_tick(state: State, now: float) -> bool:
    """True when the row has a tick in time, which is dealt with before our code's other spec takes its place."""
    begin = max(counts_from(state), math.floor(now) - LATE_S)
    return not state.is_paused(now) and newest(state.schedule.spec, begin, now) is not None
