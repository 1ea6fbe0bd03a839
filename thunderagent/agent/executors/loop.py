"""Runs coroutine functions on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from thunderagent.agent.executors.threads import Done
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Raised, Returned, Stopped, outcome_of
from thunderagent.jobs.running import Running, Scope, no_scope
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import LeaseLost, PayloadInvalid, TaskStopped
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.context import StreamContext

LOOP_JOIN_S: Final = 1.0
"""Longest wait for the event loop to end; with `HURRY_S` it is under the 5 s that a supervisor adds to a drain."""

LOOP_TICK_S: Final = 0.5
"""Time between two ticks of an event loop."""


class _Handler:
    """Stops a handler that runs in a task. Called in the thread of the loop."""

    __slots__ = ("_context", "_loop", "_task", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, task: asyncio.Task[Any] | None) -> None:
        self._loop = loop
        self._context = context
        self._task = task
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, why: TaskStopped) -> None:
        """Let a stream end by itself for a while; cancel any other handler."""
        if self._task is None:
            return
        if self._timer is None and self._context.ends_softly(why):  # a second request leaves no time
            self._timer = self._loop.call_later(self._context.grace_s, self._task.cancel)
            return
        if isinstance(self._context, StreamContext) and isinstance(why, LeaseLost):
            self._context.abort()  # even if it ignores the cancel: another agent may connect now
        self._task.cancel()

    def ended(self) -> None:
        """Cancel nothing any more: the handler has ended."""
        self._task = None
        if self._timer is not None:
            self._timer.cancel()


class LoopExecutor:
    """Runs coroutine functions on one event loop in a thread of its own.

    A handler that blocks the loop blocks the other coroutines, never a heartbeat.

    Args:
        done: called with each outcome.
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
        """Monotonic second of the last tick of the loop."""
        self._new_loop = new_loop
        self._loop: asyncio.AbstractEventLoop
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None  # made in the process that runs it: a fork ends those made before

    def open(self) -> None:
        """Begin; before the first `start`."""
        self.last_tick = self._monotonic()
        self._loop = self._new_loop()
        thread = threading.Thread(target=self._serve, name="event-loop", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def is_open(self) -> bool:
        """Whether it has begun."""
        return self._thread is not None

    @property
    def is_dead(self) -> bool:
        """True when the thread of the loop has ended."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def thread_id(self) -> int | None:
        """Id of the thread of the loop."""
        return self._thread.ident if self._thread else None

    def call(self, do: Callable[[], object]) -> None:
        """Call something in the thread of the loop; returns at once. A loop that has ended ignores it."""
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
        except BaseException as error:  # of the scope: the slot goes on
            running.outcome = running.outcome_of_scope(error)
        self._done(running, running.outcome)

    async def _outcome(self, job: Job[Any], context: Context) -> Outcome:
        """Run the handler in this task: a second task would take 2 KiB for each of hundreds of streams."""
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
        """Cancel the handlers and end the loop; a handler that blocks the loop is left behind."""
        if self._thread is None or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(LOOP_JOIN_S)
