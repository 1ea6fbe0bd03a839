"""A clock, stores, a recorder of events, an agent that runs until idle and a stream that runs until a condition."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.job import Job
from thunderagent.model import events, queue_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.clock import SharedClock, since_boot
from thunderagent.model.errors import ConfigurationError, StreamStopped, WaitTimeout
from thunderagent.model.jsondata import dump_json
from thunderagent.model.task import Lane, Lease, Status, Task
from thunderagent.ops.waiting import NO_AGENT, why
from thunderagent.queue.limits.waitlist import open_waitlists, waitlist_value
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.testing.faulty_engine import FaultyEngine
from thunderagent.testing.time_travel import Travel, serves

E = TypeVar("E", bound=Event)

MOST_RUNS: Final = 1000
"""Runs of one task after which it counts as endless."""

_TRAVEL_S = 0.02
"""Real seconds between two polls of an agent while the time of its store is moved."""

_NAMED = 3
"""Open tasks that an error names."""

_ENDS = (events.TaskEvent, queue_events.ChildDoomed)

_ON_THE_WAY = (Status.BLOCKED, Status.PENDING, Status.RUNNING) + 2 * (Status.PENDING, Status.BLOCKED, Status.RUNNING)
"""Status values in the order in which a task moves, so that no task slips by while its neighbours are counted."""


class FakeClock:
    """A shared clock and a monotonic one that move only by hand."""

    is_usable = True

    def __init__(self, now: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._now = now
        self._monotonic = monotonic

    def now(self) -> float:
        return self._now

    earliest = latest = now

    @property
    def leases(self) -> SharedClock:
        """Itself: `jump` moves leases too, as when the clock of a service is set."""
        return self

    def monotonic(self) -> float:
        """Seconds of the monotonic clock; pass this method as `monotonic`."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Set the shared clock forward or back; no time passes."""
        self._now += seconds


class Recorder:
    """Keeps every event of a bus and waits for later ones."""

    def __init__(self, bus: EventBus) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self.close = bus.subscribe(self._listen)
        """Stop listening."""

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind so far."""
        with self._changed:
            return [event for event in self._events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], predicate: Callable[[E], bool] | None = None, timeout_s: float = 10.0) -> E:
        """The first event of a kind for which the predicate holds, past or to come.

        Raises:
            WaitTimeout: it did not come.
        """
        __tracebackhide__ = True

        def found() -> E | None:
            return next(
                (one for one in self._events if isinstance(one, kind) and (not predicate or predicate(one))), None
            )

        with self._changed:
            event = self._changed.wait_for(found, timeout_s)
            if event is None:
                last = "".join(f"\n  {one}" for one in self._events[-5:]) or " none"
                raise WaitTimeout(f"no {kind.__name__} came within {timeout_s:g} s; the last events were:{last}")
            return event

    def _listen(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()


def memory_store(clock: FakeClock | None = None) -> TaskStore:
    """A store in memory, on a clock that moves by hand if one is given."""
    monotonic = clock.monotonic if clock else since_boot
    return TaskStore(SqliteEngine(MEMORY, clock=clock), monotonic=monotonic)


def memory_client(clock: FakeClock | None = None, **settings: Any) -> Client:
    """A client with a store in memory; an `Agent` with its `store` and `settings` runs its tasks."""
    return Client(memory_store(clock), load_settings(store=f"sqlite://{MEMORY}", **settings))


def make_lease(job: Job[Any] | str = "test", payload: Any = None, *, lease_s: float = 300.0, **fields: Any) -> Lease:
    """A lease of a running task that is in no store, to call a handler with `Context(make_lease(...))`.

    Args:
        job: the job, which checks the payload, or its name.
        fields: further fields of the `Task`, such as `task_id` or `retry_count`.
    """
    __tracebackhide__ = True
    now = time.time()
    known = None if isinstance(job, str) else job
    values: dict[str, Any] = {
        "task_id": "task-1",
        "status": Status.RUNNING,
        "lane": Lane(known.queue) if known else Lane(),
        "created_at": now,
        "submitted_at": now,
        "started_at": now,
        "job": known.name if known else job,
        "version": known.version if known else 1,
        "payload_text": known.dump_payload(payload) if known else dump_json(payload, "the payload"),
        "fence": 1,
        "lock_time": now + lease_s,
        "lease_owner": "agent-1",
        "lease_sec": lease_s,
        "hb": 0,
        "last_agent": "agent-1",
    }
    task = Task(**(values | fields))
    return Lease(task=task, owner=task.lease_owner or "", fence=task.fence, lease_s=lease_s, held_from=since_boot())


async def run_stream(
    job: Job[Any],
    payload: Any,
    *,
    until: Callable[[StreamContext], object],
    timeout_s: float = 10.0,
    push: Callable[[str, Any], int] | None = None,
    **fields: Any,
) -> StreamContext:
    """Run the handler of a stream in this event loop until a condition holds, then stop it as an agent does.

    Args:
        until: the condition, tested every 20 ms: `lambda ctx: ctx.cursor and ctx.cursor.seq == 3`.
        push: what `ctx.push_async` calls, with the user and the message.
        fields: further fields of the `Task`, such as `last_seq={"seq": 7}` to start from a cursor.

    Returns:
        the context, with the cursor and the journal of the end.

    Raises:
        WaitTimeout: it did not hold in time.
        Exception: what the handler raised.
    """
    __tracebackhide__ = True
    context = StreamContext(make_lease(job, payload, lease_s=timeout_s * 10, **fields))
    if push is not None:
        context.use_push(push)
    handler = asyncio.ensure_future(job.handler(context, job.load_payload(context.lease.task.payload_text)))
    try:
        async with asyncio.timeout(timeout_s):
            while not until(context) and not handler.done():
                await asyncio.wait((handler,), timeout=0.02)
    except TimeoutError:
        raise WaitTimeout(f"it did not hold within {timeout_s:g} s; the cursor is {context.cursor}") from None
    finally:
        if not context.ends_softly(StreamStopped()):
            handler.cancel()
        await asyncio.wait((handler,), timeout=timeout_s)
        await context.close()
    await handler
    return context


def run_until_idle(
    agent: Agent,
    client: Client,
    timeout_s: float = 30.0,
    *,
    advance: bool = False,
    for_s: float | None = None,
    most_runs: int = MOST_RUNS,
) -> Recorder:
    """Run an agent in a thread until no task is open (queued, delayed, running or blocked), then stop it.

    Ticks of periodic jobs that are due when it starts are put and run too.

    Args:
        agent: the only one of the store.
        timeout_s: longest wait, in real time.
        advance: move the store's `FakeClock` to the next due moment whenever nothing runs, so that delays, retries and
            snoozes take no real time.
        for_s: let so many seconds pass instead, with all ticks in them, whatever is open then.
        most_runs: runs of one task after which it counts as endless; not counted with `for_s`.

    Returns:
        the events of the agent.

    Raises:
        WaitTimeout: tasks are still open after `timeout_s`, can never run, or ran `most_runs` times; it says why.
        ConfigurationError: the store has no clock that can be moved.
        Exception: what ended the agent.
    """
    __tracebackhide__ = True
    behind, travel = _behind(client), None
    if advance or for_s is not None:
        clock = client.store.clock
        if not isinstance(clock, FakeClock):
            raise ConfigurationError(
                "only time of a FakeClock can be moved: make the store with memory_store(FakeClock())"
            )
        travel = Travel(agent, behind, clock.advance, for_s=for_s)
    recorder, moved, failures = Recorder(agent.bus), threading.Event(), list[BaseException]()
    has_begun, runs, endless = threading.Event(), Counter[str](), list[events.TaskStarted]()

    def listen(event: Event) -> None:
        if isinstance(event, events.TaskStarted) and for_s is None:
            runs[event.task_id] += 1
            if runs[event.task_id] > most_runs:
                endless.append(event)
                moved.set()
        if isinstance(event, events.AgentStarted):
            has_begun.set()
            agent.wake()
        if isinstance(event, (events.AgentStarted, *_ENDS)):
            moved.set()
        if travel is not None:
            travel.listen(event)

    def is_idle() -> bool:
        return travel.is_over if travel is not None and for_s is not None else not _open(behind)

    def run() -> None:
        try:
            agent.run()
        except BaseException as error:
            failures.append(error)
        finally:
            moved.set()

    unsubscribe = agent.bus.subscribe(listen)
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    until = time.monotonic() + timeout_s
    try:
        while not failures and (not has_begun.is_set() or not is_idle()):
            if endless:
                raise WaitTimeout(_endless(endless[0], most_runs, behind))
            if travel is not None and travel.is_hopeless:
                raise WaitTimeout(
                    f"nothing will run any more, however much time passes{_open_ones(agent, behind, runs)}"
                )
            if (left := until - time.monotonic()) <= 0:
                raise WaitTimeout(f"tasks are still open after {timeout_s:g} s{_open_ones(agent, behind, runs)}")
            moved.wait(min(left, 0.5 if travel is None else _TRAVEL_S))
            moved.clear()
            if travel is not None:
                agent.wake()
    finally:
        agent.stop()
        _join(thread, client, timeout_s)
        unsubscribe()
        recorder.close()
    if failures:
        raise failures[0]
    return recorder


def _behind(client: Client) -> Client:
    """A client without the faults: they are for the agent, not for this observer."""
    engine = client.store.engine
    if not isinstance(engine, FaultyEngine):
        return client
    return Client(TaskStore(engine.behind, monotonic=client.store.monotonic), client.settings)


def _join(thread: threading.Thread, client: Client, timeout_s: float) -> None:
    """Wait for the end of a stopped agent; a drain on a `FakeClock` needs its time moved."""
    until = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_TRAVEL_S)
        if thread.is_alive() and isinstance(client.store.clock, FakeClock):
            client.store.clock.advance(0.1)


def _endless(event: events.TaskStarted, runs: int, client: Client) -> str:
    task = client.store.peek([event.task_id]).get(event.task_id)
    tried = f", with {task.retry_count} retries, the last after {task.error!r}" if task and task.error else ""
    return (
        f"{event.task_id} of {event.job} has run {runs} times and is still open{tried}: it snoozes or is tried again "
        "for ever, or give run_until_idle a larger most_runs"
    )


def _open_ones(agent: Agent, client: Client, runs: Counter[str]) -> str:
    """The first open tasks, each with the reason why it does not run."""
    tasks = itertools.chain.from_iterable(client.list(status=one, limit=_NAMED) for one in _ON_THE_WAY[:3])
    lines = ""
    for task in itertools.islice(tasks, _NAMED):
        reasons = [one for one in why(client.store, task) if one != NO_AGENT] or ["it runs, or is about to"]
        if task.job_value not in agent.jobs.by_value:
            reasons = [f"the agent has no job {task.job_value!r}"]
        elif not serves(agent, task):
            reasons = [f"the agent does not look into the queue {task.queue!r}"]
        if runs[task.task_id] > 1:
            reasons.append(f"it has run {runs[task.task_id]} times")
        lines += f"\n  {task.task_id} of {task.job_value} is {task.status}: {'; '.join(reasons)}"
    return lines


def _open(client: Client) -> int:
    engine = client.store.engine

    def values(status: Status) -> Iterator[str]:
        for lane in engine.lanes():
            yield lane.value(status)
            if status is Status.BLOCKED:
                yield from (waitlist_value(lane, key) for key in open_waitlists(client.store))

    return sum(engine.count(value) for status in _ON_THE_WAY for value in values(status))
