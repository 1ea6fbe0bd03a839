"""Commands on periodic jobs: list their schedules, run one now, pause and resume."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from thunderagent.jobs.job import Job
from thunderagent.model.arguments import check, whole_problem
from thunderagent.model.errors import ConfigurationError, NotAllowed, TaskNotFound
from thunderagent.model.names import job_name_problem
from thunderagent.model.rows import Unreadable
from thunderagent.model.schedules import State, counts_from, expires_at, schedule_id, tick_id, tick_task
from thunderagent.model.task import Row, Task, timestamp
from thunderagent.model.ticks import between
from thunderagent.model.writes.schedules import SCHEDULE_STATUS, change_schedule
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.pauses import check_pause
from thunderagent.queue.schedules.scheduler import KEPT_S, is_open
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore

MOST_TICKS: Final = 10_000
"""Largest `number` of `next_ticks`."""

TRIES: Final = 10
"""Attempts to change a row while agents change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """The schedule of a periodic job as its row has it; moments are epoch seconds."""

    job: str
    spec: str
    queue: str
    catch_up: str
    overlap: str
    jitter_s: float
    last: int
    """The last tick that was dealt with, or the moment from which ticks count."""
    next: int | None
    """The next tick; None while it is paused without an end."""
    previous: str | None
    """Id of the last task."""
    skipped: int
    """Ticks that were skipped so far."""
    paused: float | None
    """Begin of the pause; None: it is not paused."""
    paused_until: float | None
    reason: str | None


class ScheduleCommands:
    """What `client.schedules` does.

    It needs the row of the schedule and not the code of the job. An agent that has the job puts the row when it
    starts.

    Args:
        sender: announces the task of `run_now`.
        cancel: closes the task before, where the schedule does not overlap.
    """

    def __init__(
        self, store: TaskStore, settings: Settings, sender: DoorbellSender, cancel: Callable[[str], Task]
    ) -> None:
        self._store = store
        self._settings = settings
        self._sender = sender
        self._cancel = cancel

    def list(self) -> Sequence[ScheduleInfo]:
        """The schedules of all periodic jobs, by name. A row that this version cannot read is left out.

        Raises:
            StoreError: the store did not answer.
        """
        now, engine = self._store.clock.now(), self._store.engine
        rows: dict[str, Row] = {}
        after = None
        while True:
            page = engine.page(SCHEDULE_STATUS, limit=100, after=after)
            rows |= engine.get([entry.task_id for entry in page.entries])
            after = page.after
            if after is None:
                break
        found = []
        for row_id, row in sorted(rows.items()):
            if expires_at(row) >= self._store.clock.earliest():
                try:
                    found.append(_info(row_id.removeprefix(schedule_id("")), State.of(row), now))
                except ConfigurationError as error:
                    self._store.unread.note(Unreadable(row_id, "info", str(error)))
        return found

    def get(self, job: Job[Any] | str) -> ScheduleInfo:
        """The schedule of one periodic job.

        Raises:
            TaskNotFound: no agent that has this job as a periodic one ever started here.
            ConfigurationError: the row was written by a version that knows more.
        """
        name, _, state = self._schedule(job)
        return _info(name, state, self._store.clock.now())

    def next_ticks(self, job: Job[Any] | str, *, number: int = 5) -> Sequence[int]:
        """The next ticks of a periodic job in epoch seconds; none of a pause, and none at all without its end.

        Raises:
            TaskNotFound: no agent that has this job as a periodic one ever started here.
        """
        check(whole_problem("number", number, least=0, most=MOST_TICKS))
        _, _, state = self._schedule(job)
        return _next(state, self._store.clock.now(), number)

    def run_now(self, job: Job[Any] | str) -> Task:
        """Put a task of a periodic job at once, whether it is paused or not; its ticks come as before.

        Returns:
            the task, whose id is that of a tick of this second.

        Raises:
            NotAllowed: its schedule skips a tick while the task before is open, and that is open.
            TaskNotFound: no agent that has this job as a periodic one ever started here.
            StoreError: the store did not take it.
        """
        name, _, state = self._schedule(job)
        now = math.floor(self._store.clock.now())
        task_id, before = tick_id(name, now), state.previous
        if state.schedule.overlap != "allow":
            if before is not None and before != task_id and is_open(self._store, before):
                if state.schedule.overlap == "skip":
                    raise NotAllowed(f"the task {before!r} is still open: wait for its end, or cancel it")
                with suppress(NotAllowed, TaskNotFound):  # it has ended
                    self._cancel(before)
            self._change_schedule(name, "set schedule", lambda seen: replace(seen, previous=task_id))
        schedule = replace(state.schedule, jitter_s=0.0)
        task = tick_task(name, schedule, now, shards=self._settings.shards, now=self._store.clock.now())
        [answer] = self._store.enqueue([task])
        if answer.error is not None:
            raise answer.error
        self._sender.tasks([answer.task])
        return answer.task

    def pause(self, job: Job[Any] | str, *, for_s: float | None = None, reason: str | None = None) -> ScheduleInfo:
        """Put no ticks of a periodic job; those of the pause are left out for good. Its tasks that are there run.

        Args:
            for_s: seconds after which it ends by itself; None: only `resume` ends it.

        Raises:
            ConfigurationError: the time or the reason makes no sense.
            TaskNotFound: no agent that has this job as a periodic one ever started here.
            NotAllowed: the row changes all the time.
        """
        check_pause(for_s, reason)

        def paused(seen: State) -> State:
            now = self._store.clock.now()
            is_new = not seen.is_paused(now)
            return replace(
                seen,
                last=counts_from(seen) if is_new else seen.last,
                paused=timestamp(now) if is_new else seen.paused,
                paused_until=None if for_s is None else timestamp(now + for_s),
                reason=reason or (None if is_new else seen.reason),
            )

        return self._changed(job, "pause schedule", paused)

    def resume(self, job: Job[Any] | str) -> ScheduleInfo:
        """End a pause before its time: the next tick from now on is put. Resuming what is not paused changes nothing.

        Raises:
            TaskNotFound: no agent that has this job as a periodic one ever started here.
            NotAllowed: the row changes all the time.
        """

        def resumed(seen: State) -> State:
            now = self._store.clock.now()
            if not seen.is_paused(now):
                return seen
            return replace(seen, last=max(seen.last, math.floor(now)), paused=None, paused_until=None, reason=None)

        return self._changed(job, "resume schedule", resumed)

    # Inside

    def _schedule(self, job: Job[Any] | str) -> tuple[str, Row, State]:
        name = job.name if isinstance(job, Job) else job
        check(job_name_problem(name))
        row_id = schedule_id(name)
        row = self._store.engine.get([row_id]).get(row_id)
        if row is None or expires_at(row) < self._store.clock.earliest():
            raise TaskNotFound(
                f"there is no schedule of {name!r} in {self._store.engine.url}: an agent that has it as a periodic job "
                "puts it when it starts; thunderagent schedule list has those there are"
            )
        return name, row, State.of(row)

    def _changed(self, job: Job[Any] | str, verb: str, change: Callable[[State], State]) -> ScheduleInfo:
        name, state = self._change_schedule(job, verb, change)
        return _info(name, state, self._store.clock.now())

    def _change_schedule(self, job: Job[Any] | str, verb: str, change: Callable[[State], State]) -> tuple[str, State]:
        """Change the row as it is; a decision of an agent in it stays to be carried out."""
        owner = f"{socket.gethostname()}:{os.getpid()}"
        for _ in range(TRIES):
            name, row, seen = self._schedule(job)
            state, now = change(seen), self._store.clock.now()
            if state == seen:
                return name, seen
            expire_at = min(expires_at(row), now + KEPT_S)
            write = change_schedule(verb, row, state.to_info(), owner=owner, now=now, expire_at=expire_at)
            [(is_done, _)] = self._store.write_rows([write])
            if is_done:
                return name, state
        raise NotAllowed(f"the schedule of {name!r} is changed by others all the time: try again")


def _next(state: State, now: float, number: int) -> list[int]:
    if state.is_paused(now) and state.paused_until is None:
        return []
    return between(state.schedule.spec, max(counts_from(state), math.floor(now)), math.inf, most=number)


def _info(name: str, state: State, now: float) -> ScheduleInfo:
    schedule, is_paused = state.schedule, state.is_paused(now)
    return ScheduleInfo(
        job=name,
        spec=str(schedule.spec),
        queue=schedule.queue,
        catch_up=schedule.catch_up,
        overlap=schedule.overlap,
        jitter_s=schedule.jitter_s,
        last=state.last,
        next=next(iter(_next(state, now, 1)), None),
        previous=state.previous,
        skipped=state.skipped,
        paused=state.paused if is_paused else None,
        paused_until=state.paused_until if is_paused else None,
        reason=state.reason if is_paused else None,
    )
