"""What surrounds each handler: the trace of its task, its log lines, the `around` hooks; composed once for an agent.

Each part is guarded: one that raises, before or after, is told as `HookFailed`, and the handler runs all the same; only
a required hook that raises is the end of its run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from thunderagent.agent.delivery import Complaints, Delivery
from thunderagent.agent.threads import BackgroundThread
from thunderagent.jobs.extension import extension
from thunderagent.jobs.hooks import EventHook, Hook, JobRun, RunHook
from thunderagent.jobs.outcome import Returned, in_words, outcome_of, raised
from thunderagent.jobs.running import Failed, Running, Scope, no_scope
from thunderagent.model.bus import EventBus
from thunderagent.model.redaction import Redactor
from thunderagent.settings import Settings
from thunderagent.stores import fixed
from thunderagent.telemetry import traces
from thunderagent.telemetry.traces import carrying, run_spans


def scope_of(
    logs: Scope, *, hooks: Sequence[RunHook] = (), spans_of_runs: Scope | None = None, failed: Failed
) -> Scope:
    """The scope of an agent: spans outside, then log lines, then hooks in the order in which they were found.

    Args:
        logs: names the task in log lines.
        hooks: what the user wants around runs.
        spans_of_runs: makes a span of each run; None: only the trace that a task has is passed on.
        failed: told of parts that raise.
    """
    outer = spans_of_runs or carrying
    if not hooks and spans_of_runs is None:

        def plain(running: Running) -> AbstractContextManager[Any]:
            """Most agents have no more: nothing is added for tasks without a trace."""
            return (
                logs(running)
                if running.lease.task.traceparent is None
                else HookScope(running, (outer, logs), (), failed)
            )

        return plain
    scopes = (outer,) if logs is no_scope else (outer, logs)
    return lambda running: HookScope(running, scopes, hooks, failed)


def pushing(scope: Scope, settings: Settings) -> Scope:
    """The scope, in which `ctx.push` works if the settings name a WebSocket API."""
    if settings.push_endpoint is None or settings.push_connections is None:
        return scope
    place = settings.push_endpoint, fixed(settings.push_connections)
    push = extension("push")(*place).push

    def with_push(running: Running) -> AbstractContextManager[Any]:
        running.context.use_push(push, place)
        return scope(running)

    return with_push


class Surroundings:
    """What an agent has around its handlers, and the threads that this needs.

    Args:
        settings: whether spans are made.
        logs: names the task in log lines.
        hooks: those of the user.
        bus: events for hooks, and complaints about them.

    Raises:
        ConfigurationError: there are to be traces, and OpenTelemetry is not installed; or pushes go nowhere.
    """

    def __init__(self, settings: Settings, logs: Scope, hooks: Sequence[Hook], bus: EventBus) -> None:
        complaints = Complaints(bus)
        around = [hook for hook in hooks if isinstance(hook, RunHook)]
        told = [hook for hook in hooks if isinstance(hook, EventHook)]
        self.threads: list[BackgroundThread] = []
        """To be started before all others and closed when the agent has stopped: all events between are for hooks."""
        run_span = None
        if settings.traces:
            traces.start()
            run_span = run_spans(Redactor(settings.log_redact).text)
        if hooks or settings.traces:
            self.threads.append(Delivery(told, bus, complaints, last=traces.flush))
        scope = scope_of(logs, hooks=around, spans_of_runs=run_span, failed=complaints.tell)
        self.scope = pushing(scope, settings)


class HookScope:
    """One run's scope. Nothing leaves it but what was raised inside, and what a required hook raised before the run."""

    __slots__ = ("_ends", "_failed", "_hooks", "_in_child", "_run", "_running", "_scopes")

    def __init__(
        self,
        running: Running,
        scopes: Sequence[Scope],
        hooks: Sequence[RunHook],
        failed: Failed,
        *,
        in_child: bool = False,
    ) -> None:
        self._running = running
        self._scopes = scopes
        self._hooks = hooks
        self._failed = running.failed = failed
        self._in_child = in_child
        self._run: JobRun | None = None
        self._ends: list[tuple[str, bool, Callable[[], object]]] = []

    def __enter__(self) -> None:
        running, task = self._running, self._running.lease.task
        for scope in self._scopes:
            name = getattr(scope, "__name__", "scope")
            try:
                manager = scope(running)
                manager.__enter__()
            except BaseException as error:
                self._failed(name, raised(error).error)
            else:
                self._ends.append((name, False, lambda manager=manager: manager.__exit__(None, None, None)))  # type: ignore[misc]
        for hook in self._hooks:
            if hook.surrounds(task.job, running.job.isolation, in_child=self._in_child):
                self._run = self._run or JobRun(job=task.job, queue=task.queue, context=running.context)
                self._begin(hook, self._run)

    def _begin(self, hook: RunHook, run: JobRun) -> None:
        try:
            steps = hook.function(run)
            if next(steps, self) is self:
                raise RuntimeError("it ended without a `yield`")
        except BaseException as error:
            self._failed(hook.name, raised(error).error)
            if hook.required:
                self._running.outcome = outcome_of(error, self._running.job, self._running.context)
                self.__exit__()
                raise
        else:
            self._ends.append((hook.name, hook.required, lambda: _finish(steps)))

    def __exit__(self, *_: object) -> None:
        running, run = self._running, self._run
        for name, is_required, end in reversed(self._ends):
            if run is not None:
                run.outcome, run.error = in_words(running.outcome)
            try:
                end()
            except BaseException as error:
                self._failed(name, raised(error).error)
                if is_required and (running.outcome is None or isinstance(running.outcome, Returned)):
                    running.outcome = outcome_of(error, running.job, running.context)


def _finish(steps: Generator[Any, Any, Any]) -> None:
    """Run a hook to its end; what came of the handler is in its `JobRun` and is not thrown into it."""
    try:
        next(steps)
    except StopIteration:
        return
    steps.close()
    raise RuntimeError("it has more than one `yield`")
