"""Runs handlers: plain functions in a pool of threads, coroutine functions on one event loop, others in children.

A `Running` is one task in one slot. Its executor calls `done(running, outcome)` exactly once, when the handler has
really ended: until then the slot is taken, whatever became of the lease.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Raised, Ran, Returned, Stopped, raised
from thunderagent.jobs.running import Running, Scope, no_scope
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import LeaseLost, PayloadInvalid, TaskStopped
from thunderagent.model.pacing import LOOP_JOIN_S, LOOP_TICK_S
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.context import StreamContext

Done = Callable[[Running, Outcome], None]


class Executor(Protocol):
    """Runs handlers of one kind."""

    def start(self, running: Running) -> None:
        """Run the handler; answers at once."""

    def close(self) -> None:
        """Take no more; idle threads end."""


def run_handler(job: Job[Any], context: Context) -> Ran:
    """Run a plain handler here and now; whatever it raises becomes an outcome."""
    try:
        payload = job.load_payload(context.lease.task.payload_text, context.lease.task.version)
    except PayloadInvalid as error:
        return Raised(str(error), fatal=True)
    try:
        value = job.handler(context, payload)
        if inspect.iscoroutine(value):
            value.close()
            return Raised(f"{job.where} answered with a coroutine: make the job an `async def` itself", fatal=True)
        return Returned(value)
    except BaseException as error:
        return outcome_of(error, job, context)


def outcome_of(error: BaseException, job: Job[Any], context: Context) -> Ran:
    """What an exception of a handler means: stopped, if it had been asked to stop, else an error."""
    if context.stop_reason is not None and not isinstance(error, job.fatal):
        return Stopped(context.stop_reason, progressed=context.has_progressed)
    if isinstance(error, LeaseLost):  # a stream found out by itself, before the heartbeat did
        return Stopped(error)
    return raised(error, job.fatal, progressed=context.has_progressed)


def outcome_of_scope(error: BaseException, running: Running) -> Outcome:
    """What an exception out of a scope means: what the handler did counts, and without a run it is the error."""
    return running.outcome or outcome_of(error, running.job, running.context)


class ThreadExecutor:
    """Plain functions in threads, one for each slot, started as they are needed.

    Not the pool of the standard library: that one joins its threads when the interpreter exits, so that a handler that
    never ends would keep an agent alive past its drain. And it makes a future for each task, which nobody reads.
    """

    def __init__(self, slots: int, done: Done, scope: Scope = no_scope) -> None:
        self._slots = slots
        self._done = done
        self._scope = scope
        self._inbox: SimpleQueue[Running | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, running: Running) -> None:
        if len(self._threads) < self._slots:
            thread = threading.Thread(target=self._serve, name=f"slot-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._inbox.put(running)

    def _serve(self) -> None:
        while (running := self._inbox.get()) is not None:
            try:
                with self._scope(running):
                    running.outcome = run_handler(running.job, running.context)
            except BaseException as error:  # of the scope: a slot must not die of it
                running.outcome = outcome_of_scope(error, running)
            self._done(running, running.outcome)
            del running  # an idle slot keeps nothing of its last task

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)


class _Handler:
    """A handler that runs in a task, and how it is stopped. All in the thread of the loop."""

    __slots__ = ("_context", "_loop", "_task", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, task: asyncio.Task[Any] | None) -> None:
        self._loop = loop
        self._context = context
        self._task = task
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, why: TaskStopped) -> None:
        """Let a stream come to its end by itself, for a while; cancel anything else."""
        if self._task is None:
            return
        if self._timer is None and self._context.ends_softly(why):  # asked again, it has no time left
            self._timer = self._loop.call_later(self._context.grace_s, self._task.cancel)
            return
        if isinstance(self._context, StreamContext) and isinstance(why, LeaseLost):
            self._context.abort()  # whether it lets itself be cancelled or not: another agent may connect now
        self._task.cancel()

    def ended(self) -> None:
        """What comes after the handler is not to be cancelled."""
        self._task = None
        if self._timer is not None:
            self._timer.cancel()


class LoopExecutor:
    """Coroutine functions on one event loop in a thread of its own.

    A handler that blocks the loop blocks the other coroutines, never a heartbeat.

    Args:
        done: told of each outcome.
        scope: what surrounds each handler.
        governor: gives turns to connect to all streams of this loop.
        new_loop: makes the loop.
        monotonic: the clock of `last_tick`.
    """

    def __init__(
        self,
        done: Done,
        scope: Scope = no_scope,
        *,
        governor: Governor | None = None,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self.governor = governor or Governor()
        self._done = done
        self._scope = scope
        self._monotonic = monotonic
        self.last_tick = monotonic()
        """Monotonic second at which the loop last showed that it runs."""
        self._loop = new_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="event-loop", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False when the thread of the loop has ended."""
        return self._thread.is_alive()

    @property
    def thread_id(self) -> int | None:
        """Of the thread of the loop."""
        return self._thread.ident

    def call(self, do: Callable[[], object]) -> None:
        """Do something in the thread of the loop; answers at once. A loop that has ended does nothing any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do)

    def start(self, running: Running) -> None:
        if isinstance(running.context, StreamContext):
            running.context.attach(self.governor, lambda: self.last_tick)
        self.call(lambda: self._launch(running))

    def _launch(self, running: Running) -> None:
        task = self._loop.create_task(self._run(running), name=running.lease.task_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, running: Running) -> None:
        try:
            with self._scope(running):
                running.outcome = await self._outcome(running.job, running.context)
        except BaseException as error:  # of the scope: a slot must not be lost by it
            running.outcome = outcome_of_scope(error, running)
        self._done(running, running.outcome)

    async def _outcome(self, job: Job[Any], context: Context) -> Outcome:
        """Run the handler in this task: one more for each of hundreds of streams would be 2 KiB for each."""
        try:
            payload = job.load_payload(context.lease.task.payload_text, context.lease.task.version)
        except PayloadInvalid as error:
            return Raised(str(error), fatal=True)
        if context.stop_reason is not None:  # before its first step
            return Stopped(context.stop_reason)
        handler = _Handler(self._loop, context, asyncio.current_task())
        context.when_stopped(lambda why: self.call(lambda: handler.stop(why)))
        try:
            value = await job.handler(context, payload)
        except BaseException as error:  # SystemExit too, which would end the loop
            outcome = outcome_of(error, job, context)
        else:
            outcome = Stopped(context.ended_by) if context.ended_by is not None else Returned(value)
        handler.ended()
        if isinstance(context, StreamContext):
            if isinstance(outcome, Stopped) and isinstance(outcome.why, LeaseLost):
                context.abort()
            await context.close()
        return outcome

    def _tick(self) -> None:
        self.last_tick = self._monotonic()
        self._loop.call_later(LOOP_TICK_S, self._tick)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._tick)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _finish(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End what still runs and the loop; a handler that blocks the loop is left behind."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(LOOP_JOIN_S)


class Executors:
    """The executors of an agent by kind of handler; a kind without jobs has none."""

    def __init__(self, *, threads: Executor, loop: LoopExecutor | None, processes: Executor | None) -> None:
        self._threads = threads
        self.loop = loop
        self._processes = processes

    def start(self, running: Running) -> None:
        """Run the handler where its job belongs; answers at once."""
        executor: Executor | None = self._threads
        if running.job.isolation == "process":
            executor = self._processes
        elif running.job.is_async:
            executor = self.loop
        if executor is None:
            raise LookupError(f"no executor for {running.job.name}")
        executor.start(running)

    def close(self) -> None:
        """Take no more; idle threads end."""
        for executor in (self._threads, self._processes, self.loop):
            if executor is not None:
                executor.close()
