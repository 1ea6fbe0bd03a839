"""Explains a task: its state, why, what happened, and what comes next.

It reads at most `LISTED` parents, as many children, and the reads of `waiting.why`.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from thunderagent.model.clock import at_text, span_text
from thunderagent.model.dependencies import OnParentFailure
from thunderagent.model.rows import as_number
from thunderagent.model.task import Desired, Status, Task
from thunderagent.model.traceparent import trace_id
from thunderagent.model.writes.tasks import ERRORS_KEPT
from thunderagent.ops.waiting import LISTED, on_the_clock, status_text, why
from thunderagent.queue.pauses import Pause, PauseKind, read_pauses
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.journal import Run, read_journals

LOOKED_THROUGH: Final = 200
"""Entries of each status that are searched for ids like one that was not found."""

_PAGES: Final = 24
_SHORTEST: Final = 4
_ALIKE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, at epoch seconds."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Holding:
    """The lease of a running task; times in epoch seconds of the shared clock."""

    owner: str
    since: float | None
    last_beat: float | None
    beats: int
    ends: float | None
    is_over: bool


@dataclass(frozen=True, slots=True)
class Relative:
    """A parent or a child. `status` is None without a row, and UNREADABLE for a row that cannot be read here."""

    task_id: str
    status: str | None
    is_waited_for: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What comes next, or what can be done, with its command if there is one."""

    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A task at the moment `now` of the shared clock."""

    task: Task
    now: float
    summary: str
    why: tuple[str, ...]
    holding: Holding | None
    happened: tuple[Happened, ...]
    parents: tuple[Relative, ...]
    children: tuple[Relative, ...]
    children_left_out: int
    trace_id: str | None
    run: Run | None
    """The last run of a stream."""
    next: tuple[Advice, ...]


def explain(store: TaskStore, task: Task) -> Explanation:
    """Explain a task that was just read.

    Raises:
        StoreError: the store did not answer.
    """
    now = store.clock.now()
    reasons = tuple(why(store, task))
    task = on_the_clock(store, task)
    children = sorted(task.dependents)
    run = next(iter(read_journals(store, task, runs=1)), None) if task.is_stream and task.fence else None
    return Explanation(
        task=task,
        now=now,
        summary=_summary(task, now),
        why=reasons,
        holding=_holding(task, now),
        happened=tuple(_happened(task)),
        parents=tuple(_relatives(store, task.depends_on[:LISTED], task.waiting_for)),
        children=tuple(_relatives(store, children[:LISTED], frozenset())),
        children_left_out=max(0, len(children) - LISTED),
        trace_id=trace_id(task.traceparent),
        run=run,
        next=tuple(_next(store, task, now)),
    )


# How it is


def _summary(task: Task, now: float) -> str:
    version = f" (version {task.version})" if task.version != 1 else ""
    what = f"{'the stream' if task.is_stream else 'a task'} of the job {task.job}{version} in the queue {task.queue}"
    match task.status:
        case Status.RUNNING:
            since = f" for {span_text(now - task.started_at)}" if task.started_at is not None else ""
            state = f"it runs{since}, attempt {task.attempt}"
            state += ", and was asked to stop" if task.cancel_requested or _is_to_stop(task) else ""
        case Status.PENDING:
            state = f"it waits to run, attempt {task.attempt}"
        case Status.BLOCKED:
            state = f"it is held back, attempt {task.attempt}"
        case Status.SUCCESS:
            state = f"it succeeded{_ago(task, now)}"
        case Status.FAILED:
            state = f"it failed for good{_ago(task, now)}"
        case Status.DONE:
            state = f"it was closed{_ago(task, now)}: {task.done_reason or 'no reason was given'}"
    return f"{task.task_id} is {what}: {state}"


def _is_to_stop(task: Task) -> bool:
    return task.desired_state == Desired.STOPPED


def _ago(task: Task, now: float) -> str:
    return "" if task.finished_at is None else f" {span_text(now - task.finished_at)} ago"


def _holding(task: Task, now: float) -> Holding | None:
    if task.status is not Status.RUNNING or task.lease_owner is None:
        return None
    ends = task.lock_time
    last_beat = None if ends is None or task.lease_sec is None else ends - task.lease_sec
    is_over = ends is not None and ends < now
    return Holding(task.lease_owner, task.started_at, last_beat, task.hb or 0, ends, is_over)


def _relatives(store: TaskStore, names: Sequence[str], waiting_for: frozenset[str]) -> Iterator[Relative]:
    rows = store.read(names) if names else {}
    for name in names:
        yield Relative(name, status_text(rows[name]) if name in rows else None, name in waiting_for)


# What happened


def _happened(task: Task) -> list[Happened]:
    """Events in the order of time. The row keeps the last ten errors and the last run."""
    found = [Happened(task.submitted_at, f"it was enqueued for the queue {task.queue}")]
    for entry in task.errors:
        agent = f" on {entry['agent']}" if entry.get("agent") else ""
        first = str(entry.get("error", "")).strip().splitlines() or ["no message"]
        text = f"attempt {entry.get('attempt', '?')}{agent}: {_message(first)}"
        found.append(Happened(as_number(entry.get("at")), text))
    who = task.lease_owner or task.last_agent
    if task.started_at is not None:
        found.append(Happened(task.started_at, f"it started{f' on {who}' if who else ''}, run {task.fence}"))
    if task.finished_at is not None:
        took = "" if task.started_at is None else f" after {_seconds(task.finished_at - task.started_at)}"
        found.append(Happened(task.finished_at, f"it ended as {task.status}{took}{_ending(task)}"))
    found.sort(key=lambda one: one.at)
    if number := _given_back(task):
        times = "once" if number == 1 else f"{number} times"
        text = f"{times} it went back to its queue without an error (snoozed, or its agent stopped); not an attempt"
        found.insert(1, Happened(task.submitted_at, text))
    return found


def _message(lines: Sequence[str]) -> str:
    """The first line, or the last line of a traceback, which has the error."""
    return lines[0] if len(lines) == 1 or not lines[0].startswith("Traceback") else lines[-1]


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.2f} s" if seconds < 60 else span_text(seconds)


def _ending(task: Task) -> str:
    text = task.error if task.status is Status.FAILED else task.done_reason if task.status is Status.DONE else None
    return f": {_message(text.strip().splitlines() or [''])}" if text else ""


def _given_back(task: Task) -> int:
    """Runs that ended with neither an error nor an end: the fence counts them, the errors do not."""
    if task.is_stream or len(task.errors) >= ERRORS_KEPT or task.status is Status.DONE:
        return 0
    now_or_last = 1 if task.status in (Status.RUNNING, Status.SUCCESS) else 0
    return max(0, task.fence - len(task.errors) - now_or_last)


# What comes next


def _next(store: TaskStore, task: Task, now: float) -> Iterator[Advice]:
    name = _quoted(task.task_id)
    match task.status:
        case Status.SUCCESS:
            yield from _deleted(task, now)
        case Status.FAILED | Status.DONE:
            yield from _children_of_ended(task)
            if task.is_stream:
                yield Advice("it stays as it is; to let it go on where it was", f"thunderagent streams start {name}")
            else:
                yield Advice("it stays as it is; to run it again with fresh retries", f"thunderagent retry {name}")
            yield from _deleted(task, now)
        case Status.RUNNING:
            yield from _of_running(task, now, name)
        case Status.PENDING | Status.BLOCKED:
            yield from _of_waiting(store, task, now, name)
            verb = "streams stop" if task.is_stream else "cancel"
            yield Advice("to keep it from running", f"thunderagent {verb} {name}")
    if task.is_stream:
        yield Advice("why it connected when it did, and what it missed", f"thunderagent streams explain {name}")


def _deleted(task: Task, now: float) -> Iterator[Advice]:
    if task.expire_at is not None:
        yield Advice(f"its row is deleted at {at_text(task.expire_at)} (in {span_text(task.expire_at - now)})")


def _children_of_ended(task: Task) -> Iterator[Advice]:
    if task.dependents:
        number = len(task.dependents)
        depend = "1 task depends" if number == 1 else f"{number} tasks depend"
        yield Advice(f"{depend} on it: those that failed with it are retried after it")


def _of_running(task: Task, now: float, name: str) -> Iterator[Advice]:
    if task.lock_time is not None and task.lock_time < now:
        yield Advice("an agent that has the job takes it over, if one has a free slot", "thunderagent agents")
        return
    if task.cancel_requested or _is_to_stop(task):
        within = "" if task.lease_sec is None else f", within {task.lease_sec / 3:.0f} s"
        yield Advice(f"its agent learns that with the next heartbeat{within}; a handler may need more time to stop")
        return
    if task.lock_time is not None:
        left = span_text(task.lock_time - now)
        yield Advice(f"if its agent is lost, another takes it over when the lease ends, in {left}")
    verb = "streams stop" if task.is_stream else "cancel"
    yield Advice("to have its agent stop it", f"thunderagent {verb} {name}")


def _of_waiting(store: TaskStore, task: Task, now: float, name: str) -> Iterator[Advice]:
    for pause in _pauses(store, task):
        until = "it waits until that is resumed" if pause.until is None else f"until {at_text(pause.until)} it waits"
        yield Advice(f"the {pause.kind} is paused: {until}", f"thunderagent resume {pause.kind} {_quoted(pause.name)}")
    if task.waiting_for:
        first = _quoted(min(task.waiting_for))
        match task.on_parent_failure or OnParentFailure.FAIL:
            case OnParentFailure.RUN:
                then = "whatever the end of what it waits for, it runs then"
            case OnParentFailure.CANCEL:
                then = "it runs when all that it waits for have succeeded; if one does not, it is closed"
            case _:
                then = "it runs when all that it waits for have succeeded; if one does not, it fails too"
        yield Advice(then, f"thunderagent explain {first}")
    agents = store.agents()
    able = [one for one in agents if task.queue in one.info["queues"] and task.job_value in one.info.get("jobs", ())]
    if not able:
        yield Advice(
            "it waits until an agent serves its queue and has its job",
            f"thunderagent run JOBS --queue {task.queue}" if agents else "thunderagent run JOBS",
        )
    elif task.status is Status.PENDING and task.created_at > now:
        yield Advice(f"it runs at {at_text(task.created_at)}, or a little later when slots are taken")
    elif task.status is Status.PENDING:
        yield Advice("an agent takes it as soon as it is its turn and a slot is free", "thunderagent top --once")
    elif task.waitlist is not None:
        yield Advice("it runs when a permit of the limit is free and its turn has come", f"thunderagent explain {name}")


def _pauses(store: TaskStore, task: Task) -> list[Pause]:
    found = read_pauses(store)
    wanted = (f"{PauseKind.QUEUE}:{task.queue}", f"{PauseKind.JOB}:{task.job}")
    return [found[key] for key in wanted if key in found]


def _quoted(name: str) -> str:
    return shlex.quote(name)


# Ids that are not there


def similar_ids(store: TaskStore, name: str, *, number: int = 3) -> list[str]:
    """Ids of tasks like a name that no task has: they begin with it, or differ in a letter or two.

    Reads the newest `LOOKED_THROUGH` entries of each status, of the first lanes.
    """
    known = list(dict.fromkeys(islice(_newest(store), _PAGES * LOOKED_THROUGH)))
    begins = [one for one in known if len(name) >= _SHORTEST and one.startswith(name)]
    return [*begins[:number], *difflib.get_close_matches(name, known, n=number, cutoff=_ALIKE)][:number]


def _newest(store: TaskStore) -> Iterable[str]:
    values = (lane.value(status) for lane in store.engine.lanes() for status in Status)
    for value in islice(values, _PAGES):
        page = store.engine.page(value, limit=LOOKED_THROUGH, newest_first=True)
        yield from (entry.task_id for entry in page.entries)
