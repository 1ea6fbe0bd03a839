"""Where handlers run: threads, the event loop, child processes.

A `Running` is one task in one slot. Its executor calls `done(running, outcome)` exactly once, when the handler has
really ended: until then the slot is taken, even if the lease is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from thunderagent.agent.core import Core
from thunderagent.agent.executors.loop import LoopExecutor
from thunderagent.agent.executors.process import ProcessExecutor
from thunderagent.agent.executors.threads import Executor, ThreadExecutor
from thunderagent.jobs.running import Running, Scope
from thunderagent.settings import Settings
from thunderagent.streams.connection.governor import Governor


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """The executors of an agent by kind of handler; a kind without jobs has none."""

    threads: Executor
    loop: LoopExecutor | None
    processes: Executor | None

    @property
    def is_dead(self) -> bool:
        """True when the thread of the event loop has ended."""
        return self.loop is not None and self.loop.is_dead

    def open(self) -> None:
        """Begin; before the first `start`."""
        if self.loop is not None:
            self.loop.open()

    def call(self, do: Callable[[], object]) -> None:
        """Call something in the thread of the event loop; returns at once."""
        if self.loop is None:
            raise LookupError("no event loop runs")
        self.loop.call(do)

    def start(self, running: Running) -> None:
        """Run the handler where its job belongs; returns at once."""
        executor: Executor | None = self.threads
        if running.job.isolation == "process":
            executor = self.processes
        elif running.job.is_async:
            executor = self.loop
        if executor is None:
            raise LookupError(f"no executor for {running.job.name}")
        executor.start(running)

    def close(self) -> None:
        """Take no more; idle threads end."""
        for executor in (self.threads, self.processes, self.loop):
            if executor is not None:
                executor.close()


def make_executors(core: Core, scope: Scope, *, slots: int, agents: Callable[[], int]) -> Executors:
    """An executor for each kind of handler that the jobs have.

    Args:
        core: of the agent; its inbox gets the outcome of each handler.
        scope: what surrounds each handler.
        slots: threads and child processes at most.
        agents: how many agents share the rate of connections.
    """
    jobs, settings, done = core.jobs, core.settings, core.inbox.done
    loop = None
    if any(job.is_async for job in jobs.values()):
        governor = Governor(concurrency=settings.connect_concurrency, rate=settings.connect_rate, fleet=agents)
        new_loop, monotonic = _loop_maker(settings), core.store.monotonic
        loop = LoopExecutor(done, scope, governor=governor, new_loop=new_loop, monotonic=monotonic)
    isolates = any(job.isolation == "process" for job in jobs.values())
    return Executors(
        threads=ThreadExecutor(slots, done, scope),
        loop=loop,
        processes=ProcessExecutor(slots, done, scope, traces=settings.traces, jobs=jobs) if isolates else None,
    )


def _loop_maker(settings: Settings) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loop; uvloop is an extra."""
    if settings.event_loop == "uvloop":
        return import_module("uvloop").new_event_loop  # type: ignore[no-any-return]
    return asyncio.new_event_loop
