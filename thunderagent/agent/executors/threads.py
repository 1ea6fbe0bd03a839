"""Runs plain functions in threads of the agent."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job
from thunderagent.jobs.outcome import Outcome, Raised, Ran, Returned, outcome_of
from thunderagent.jobs.running import Running, Scope, no_scope
from thunderagent.model.errors import PayloadInvalid

Done = Callable[[Running, Outcome], None]


class Executor(Protocol):
    """Runs handlers of one kind."""

    def start(self, running: Running) -> None:
        """Run the handler; returns at once."""

    def close(self) -> None:
        """Take no more; idle threads end."""


def run_handler(job: Job[Any], context: Context) -> Ran:
    """Run a plain handler in this thread; an exception becomes an outcome."""
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


class ThreadExecutor:
    """Runs plain functions in threads, one for each slot, started as they are needed.

    The pool of the standard library joins its threads when the interpreter exits: a handler that never ends would keep
    an agent alive past its drain. It also makes a future for each task, which nothing reads.
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
            except BaseException as error:  # of the scope: the slot goes on
                running.outcome = running.outcome_of_scope(error)
            self._done(running, running.outcome)
            del running  # an idle slot keeps nothing of its last task

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)
