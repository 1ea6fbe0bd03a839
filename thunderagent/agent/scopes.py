"""What surrounds each handler: the trace of its task, its log lines, the `around` hooks. Composed once for an agent.

A part that raises becomes a `HookFailed`, and the handler runs. Only a required hook that raises ends the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, Final

from thunderagent.agent.threads import BackgroundThread
from thunderagent.jobs.extension import extension
from thunderagent.jobs.hooks import EventHook, Hook, JobRun, RunHook
from thunderagent.jobs.outcome import Returned, in_words, outcome_of, raised
from thunderagent.jobs.running import OnFailure, Running, Scope, no_scope
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.fleet_events import HookFailed
from thunderagent.model.redaction import Redactor
from thunderagent.settings import Settings
from thunderagent.stores import fixed
from thunderagent.telemetry import traces
from thunderagent.telemetry.traces import carrying, run_spans

HOOKS_END_S: Final = 2.0
"""How long the end of an agent waits for hooks that have events left."""

HOOK_AGAIN_S: Final = 60.0
"""Shortest time between two events about one failing hook."""

MOST_WAITING: Final = 10_000
"""Events that may wait for hooks; more are dropped and counted."""


def scope_of(
    logs: Scope, *, hooks: Sequence[RunHook] = (), spans_of_runs: Scope | None = None, on_failure: OnFailure
) -> Scope:
    """The scope of an agent: spans outside, then log lines, then hooks in their order in the registry.

    Args:
        logs: names the task in log lines.
        hooks: those of the user around runs.
        spans_of_runs: makes a span of each run; None: the trace of a task is only passed on.
        on_failure: called for a part that raises.
    """
    outer = spans_of_runs or carrying
    if not hooks and spans_of_runs is None:

        def plain(running: Running) -> AbstractContextManager[Any]:
            """Adds nothing for tasks without a trace."""
            return (
                logs(running)
                if running.lease.task.traceparent is None
                else HookScope(running, (outer, logs), (), on_failure)
            )

        return plain
    scopes = (outer,) if logs is no_scope else (outer, logs)
    return lambda running: HookScope(running, scopes, hooks, on_failure)


def pushing(scope: Scope, settings: Settings) -> Scope:
    """A scope in which `ctx.push` works, if the settings name a WebSocket API."""
    if settings.push_endpoint is None or settings.push_connections is None:
        return scope
    place = settings.push_endpoint, fixed(settings.push_connections)
    push = extension("push")(*place).push

    def with_push(running: Running) -> AbstractContextManager[Any]:
        running.context.use_push(push, place)
        return scope(running)

    return with_push


class HookFailures:
    """Emits `HookFailed`: at once, and once a minute for a hook that goes on failing, with how often it did.

    Args:
        bus: gets `HookFailed`.
        monotonic: the clock.
    """

    def __init__(self, bus: EventBus, *, monotonic: Callable[[], float] = since_boot) -> None:
        self._bus = bus
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._reported_at: dict[str, float] = {}
        self._more: dict[str, tuple[int, str]] = {}

    def report(self, hook: str, error: str) -> None:
        """Report that a hook failed."""
        with self._guard:
            if self._monotonic() - self._reported_at.get(hook, -HOOK_AGAIN_S) < HOOK_AGAIN_S:
                number, _ = self._more.get(hook, (0, ""))
                self._more[hook] = (number + 1, error)
                return
            number, _ = self._more.pop(hook, (0, ""))
            self._reported_at[hook] = self._monotonic()
        self._emit(hook, error, number)

    def look(self, *, at_the_end: bool = False) -> None:
        """Emit failures that were held back for a minute; all of them at the end."""
        if not self._more:
            return
        with self._guard:
            now = self._monotonic()
            due = [hook for hook in self._more if at_the_end or now - self._reported_at[hook] >= HOOK_AGAIN_S]
            rest = [(hook, *self._more.pop(hook)) for hook in due]
            self._reported_at.update(dict.fromkeys(due, now))
        for hook, number, error in rest:
            self._emit(hook, error, number - 1)

    def _emit(self, hook: str, error: str, more: int) -> None:
        self._bus.emit(HookFailed(hook=hook, error=f"{error} (and {more} times before)" if more else error))


class HookDispatcher:
    """A thread of the agent: takes its events and calls the hooks.

    Args:
        hooks: those that want events.
        bus: where the events come from.
        failures: gets hooks that fail.
        most: events that may wait.
        last: called at the end, beside the last hooks; bounded by itself.
    """

    name = "hooks"

    def __init__(
        self,
        hooks: Sequence[EventHook],
        bus: EventBus,
        failures: HookFailures,
        *,
        most: int = MOST_WAITING,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._hooks = hooks
        self._bus = bus
        self._failures = failures
        self._most = most
        self._last = last
        self._inbox: SimpleQueue[Event | None] = SimpleQueue()
        self._wanted: dict[type[Event], bool] = {}
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._busy_with: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
        self._unsubscribe = self._unsubscribe or self._bus.subscribe(self._listen)

    def close(self) -> None:
        """Call hooks with the events that wait, for at most `HOOKS_END_S`; a hook that hangs is left behind."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        last = threading.Thread(target=self._last, name="last-spans", daemon=True)
        last.start()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(HOOKS_END_S)
            left = max(0, self._inbox.qsize() - 1)  # without the None
            if left or self._thread.is_alive():
                self._failures.report(self._busy_with or self.name, f"the agent ended before it had {left} events more")
        self._failures.look(at_the_end=True)
        last.join(HOOKS_END_S)

    def _listen(self, event: Event) -> None:
        kind = type(event)
        wanted = self._wanted.get(kind)
        if wanted is None:
            wanted = self._wanted[kind] = any(issubclass(kind, hook.kinds) for hook in self._hooks)
        if not wanted or not any(hook.wants(event) for hook in self._hooks):
            return
        if self._inbox.qsize() >= self._most:
            self._failures.report(
                self._busy_with or self.name, f"it does not keep up: an event was dropped, as {self._most} wait"
            )
            return
        self._inbox.put(event)

    def _serve(self) -> None:
        while True:
            try:
                event = self._inbox.get(timeout=HOOK_AGAIN_S)
            except Empty:
                self._failures.look()
                continue
            if event is None:
                return
            for hook in self._hooks:
                if hook.wants(event):
                    self._call(hook, event)
            self._failures.look()

    def _call(self, hook: EventHook, event: Event) -> None:
        self._busy_with = hook.name
        try:
            hook.function(event)
        except BaseException as error:  # SystemExit too: the other hooks get the event
            self._failures.report(hook.name, raised(error).error)
        self._busy_with = None


class HandlerScope:
    """What an agent has around its handlers, and the threads that this needs.

    Args:
        settings: whether spans are made, and where pushes go.
        logs: names the task in log lines.
        hooks: those of the user.
        bus: has the events for hooks, and gets their failures.

    Raises:
        ConfigurationError: OpenTelemetry is not installed for `traces`, or pushes go nowhere.
    """

    def __init__(self, settings: Settings, logs: Scope, hooks: Sequence[Hook], bus: EventBus) -> None:
        failures = HookFailures(bus)
        around = [hook for hook in hooks if isinstance(hook, RunHook)]
        on_events = [hook for hook in hooks if isinstance(hook, EventHook)]
        self.threads: list[BackgroundThread] = []
        """Started before all others and closed after the last event, so that hooks get all events."""
        run_span = None
        if settings.traces:
            traces.start()
            run_span = run_spans(Redactor(settings.log_redact).text)
        if hooks or settings.traces:
            self.threads.append(HookDispatcher(on_events, bus, failures, last=traces.flush))
        scope = scope_of(logs, hooks=around, spans_of_runs=run_span, on_failure=failures.report)
        self.scope = pushing(scope, settings)


class HookScope:
    """The scope of one run. It raises what the handler raised, and what a required hook raised before the run."""

    __slots__ = ("_ends", "_hooks", "_in_child", "_on_failure", "_run", "_running", "_scopes")

    def __init__(
        self,
        running: Running,
        scopes: Sequence[Scope],
        hooks: Sequence[RunHook],
        on_failure: OnFailure,
        *,
        in_child: bool = False,
    ) -> None:
        self._running = running
        self._scopes = scopes
        self._hooks = hooks
        self._on_failure = running.on_failure = on_failure
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
                self._on_failure(name, raised(error).error)
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
            self._on_failure(hook.name, raised(error).error)
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
                self._on_failure(name, raised(error).error)
                if is_required and (running.outcome is None or isinstance(running.outcome, Returned)):
                    running.outcome = outcome_of(error, running.job, running.context)


def _finish(steps: Generator[Any, Any, Any]) -> None:
    """Run a hook to its end; the outcome of the handler is in its `JobRun` and is not thrown into it."""
    try:
        next(steps)
    except StopIteration:
        return
    steps.close()
    raise RuntimeError("it has more than one `yield`")
