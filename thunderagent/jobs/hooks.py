"""Hooks: functions of the user that hear what happens in an agent, or that surround the runs of its jobs.

They stand in the jobs package and are found like jobs. A hook never fails, delays or loses a task, unless it is
required: its errors are `HookFailed`. How they are called is in `agent/scopes.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, overload

from thunderagent.jobs.context import Context
from thunderagent.model.arguments import shown
from thunderagent.model.bus import Event
from thunderagent.model.errors import ConfigurationError


@dataclass(slots=True, eq=False, kw_only=True)
class JobRun:
    """One run of a job as an `around` hook sees it: before its `yield` what is to run, after it the outcome."""

    job: str
    queue: str
    context: Context
    """What the handler is given: task id, attempt, fence, payload (`context.lease.task.payload`)."""
    outcome: str | None = None
    """None until the handler has ended; then `returned`, `snoozed`, `cancelled`, `failed`, `raised` or `stopped`.
    The events say what becomes of the task."""
    error: str | None = None
    """Type, message and innermost lines of what a handler raised; else why it was stopped or answered so."""

    @property
    def task_id(self) -> str:
        return self.context.task_id

    @property
    def attempt(self) -> int:
        return self.context.attempt


@dataclass(frozen=True, eq=False, kw_only=True)
class Hook:
    """A function that `@on` or `@around` has marked; call it like the function itself."""

    function: Callable[[Any], Any]
    jobs: frozenset[str] | None = None
    """Names of its jobs; None: all, and events that are about no job."""

    @property
    def name(self) -> str:
        function = getattr(self.function, "func", self.function)  # a `partial`
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    def __call__(self, about: Any) -> Any:
        return self.function(about)


@dataclass(frozen=True, eq=False, kw_only=True)
class EventHook(Hook):
    kinds: tuple[type[Event], ...]

    def wants(self, event: Event) -> bool:
        """Whether an event is of its kinds and about one of its jobs."""
        return isinstance(event, self.kinds) and (self.jobs is None or getattr(event, "job", None) in self.jobs)


@dataclass(frozen=True, eq=False, kw_only=True)
class RunHook(Hook):
    function: Callable[[JobRun], Generator[Any, Any, Any]]
    required: bool = False
    """No handler runs without it, and none succeeds whose hook fails at its end."""
    in_child: bool = False
    """Around the handler of an isolated job in its child process, not around that process."""

    def surrounds(self, job: str, isolation: str, *, in_child: bool) -> bool:
        """Whether it surrounds the runs of a job: in the agent, or in the child process of an isolated one."""
        return (self.jobs is None or job in self.jobs) and in_child == (self.in_child and isolation == "process")


def on(*kinds: type[Event], jobs: tuple[str, ...] | None = None) -> Callable[[Callable[[Any], object]], EventHook]:
    """Call a function `(event) -> None` for each event of these kinds, in a thread of its own and in order.

    Args:
        kinds: classes of `events`, `queue_events` and `fleet_events` in `thunderagent.model`; a class such as
            `TaskEvent` stands for all its subclasses.
        jobs: only events about these jobs; None: all.

    Raises:
        ConfigurationError: there is no event, one is none, or the function cannot be called with an event alone.
    """
    problems = [
        f"{shown(kind)} is no event" for kind in kinds if not (isinstance(kind, type) and issubclass(kind, Event))
    ]
    if not kinds:
        problems.append("name at least one event, for example @on(TaskFailed)")

    def decorate(function: Callable[[Any], object]) -> EventHook:
        found = [*problems, *_problems(function, "event")]
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            found.append("it must be a plain function")
        _check("on", function, found)
        return EventHook(function=function, kinds=kinds, jobs=_names(jobs))

    return decorate


RunFunction = Callable[[JobRun], Iterator[None]]


@overload
def around(function: RunFunction) -> RunHook: ...


@overload
def around(
    *, jobs: tuple[str, ...] | None = None, required: bool = False, in_child: bool = False
) -> Callable[[RunFunction], RunHook]: ...


def around(
    function: RunFunction | None = None,
    *,
    jobs: tuple[str, ...] | None = None,
    required: bool = False,
    in_child: bool = False,
) -> RunHook | Callable[[RunFunction], RunHook]:
    """Run a generator function `(run) -> Iterator[None]` around the handler of each task, in its thread or event loop.

    What stands before its one `yield` runs before the handler, the rest after the handler has ended. It should be
    quick,
    and around coroutine functions it must not block.

    Args:
        function: the function, when the decorator is written without parentheses.
        jobs: only runs of these jobs; None: all.
        required: the handler does not run when the hook raises before its `yield`, and does not succeed when it raises
          after it: either is an error of the task. For a tenant, a transaction. Other errors of hooks are only logged.
        in_child: of a job with `isolation="process"`, run in the child process around the handler; otherwise it runs in
          the agent, around the child process.

    Raises:
        ConfigurationError: the function is no generator function that can be called with a run alone.
    """

    def decorate(function: RunFunction) -> RunHook:
        found = list(_problems(function, "run"))
        if not inspect.isgeneratorfunction(function):
            found.append("it must be a plain generator function with one `yield`")
        if in_child and "<locals>" in getattr(function, "__qualname__", ""):
            found.append("with in_child it must stand at the top level of a module that a child process can import")
        _check("around", function, found)
        return RunHook(function=function, jobs=_names(jobs), required=required, in_child=in_child)  # type: ignore[arg-type] # it is a generator function

    return decorate if function is None else decorate(function)


def _problems(function: Callable[..., Any], argument: str) -> Iterator[str]:
    if not callable(function):
        yield "it must be a function"
        return
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a function without a signature
        return
    except TypeError:
        yield f"it must take one argument, the {argument}"


def _check(decorator: str, function: Callable[..., Any], problems: list[str]) -> None:
    if problems:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(f"@{decorator} cannot be written above {name}: {'; '.join(problems)}")


def _names(jobs: tuple[str, ...] | str | None) -> frozenset[str] | None:
    if jobs is None:
        return None
    return frozenset((jobs,) if isinstance(jobs, str) else jobs)  # a text is a sequence of letters
