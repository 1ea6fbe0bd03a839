"""Where handlers run: threads, the event loop, child processes.

A `Running` is one task in one slot. Its executor calls `done(running, outcome)` exactly once, when the handler has
really ended: until then the slot is taken, even if the lease is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from thunderagent.agent.executors.loop import LoopExecutor
from thunderagent.agent.executors.process import ProcessExecutor
from thunderagent.agent.executors.threads import Done, Executor, ThreadExecutor
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Running, Scope
from thunderagent.settings import Settings
from thunderagent.streams.connection.governor import Governor


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """The executors of an agent by kind of handler; a kind without jobs has none."""

    threads: Executor
    loop: LoopExecutor | None
    processes: Executor | None

    def start(self, running: Running) -> None:
        """Run the handler where its job belongs; answers at once."""
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


def make_executors(
    jobs: Registry,
    settings: Settings,
    done: Done,
    scope: Scope,
    *,
    slots: int,
    agents: Callable[[], int],
    monotonic: Callable[[], float],
) -> Executors:
    """An executor for each kind of handler that the jobs have.

    Args:
        jobs: what is run.
        settings: limits of the event loop and its connections.
        done: told how each handler ended.
        scope: what surrounds each handler.
        slots: threads and child processes at most.
        agents: how many agents share the rate of connections.
        monotonic: the clock of the event loop's health.
    """
    loop = None
    if any(job.is_async for job in jobs.values()):
        governor = Governor(concurrency=settings.connect_concurrency, rate=settings.connect_rate, fleet=agents)
        loop = LoopExecutor(done, scope, governor=governor, new_loop=_loop_maker(settings), monotonic=monotonic)
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
