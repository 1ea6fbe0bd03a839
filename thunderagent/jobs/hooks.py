"""Hooks: functions of the user that are told what happens in an agent, or that surround the runs of its jobs.

They stand in the jobs package beside the jobs and are found as these are. A hook never fails, delays or loses a task,
unless it is required: what goes wrong in it is told as `HookFailed`. How they are called is in `delivery` and `scopes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, overload

from thunderagent.jobs.context import Context
from thunderagent.model.arguments import shown
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.events import Event


@dataclass(slots=True, eq=False, kw_only=True)
class JobRun:
    """One run of a job as an `around` hook sees it: before its `yield` what is to run, after it what came of it."""

    job: str
    queue: str
    context: Context
    """What the handler is given: task id, attempt, fence, payload (`context.lease.task.payload`)."""
    outcome: str | None = None
    """None until the handler has ended; then `returned`, `snoozed`, `cancelled` or `failed` (it answered so), `raised`,
    or `stopped` (it was told to end). What becomes of the task is decided later: see the events."""
    error: str | None = None
    """Of a handler that raised: type, message and innermost lines. Of one that was stopped, or answered so: why."""

    @property
    def task_id(self) -> str:
        """Id of the task."""
        return self.context.task_id

    @property
    def attempt(self) -> int:
        """Number of this run, from 1."""
        return self.context.attempt


@dataclass(frozen=True, eq=False, kw_only=True)
class Hook:
    """A function that `@on` or `@around` has marked; call it like the function itself."""

    function: Callable[[Any], Any]
    jobs: frozenset[str] | None = None
    """Names of the jobs that it is about; None: all, and events that are about no job."""

    @property
    def name(self) -> str:
        """Module and name of the function."""
        function = getattr(self.function, "func", self.function)  # of a `partial`
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    def __call__(self, about: Any) -> Any:
        """Call the function, for tests."""
        return self.function(about)


@dataclass(frozen=True, eq=False, kw_only=True)
class EventHook(Hook):
    """Made by `@on`."""

    kinds: tuple[type[Event], ...]

    def wants(self, event: Event) -> bool:
        """True for an event of its kinds about one of its jobs."""
        return isinstance(event, self.kinds) and (self.jobs is None or getattr(event, "job", None) in self.jobs)


@dataclass(frozen=True, eq=False, kw_only=True)
class RunHook(Hook):
    """Made by `@around`."""

    function: Callable[[JobRun], Generator[Any, Any, Any]]
    required: bool = False
    """No handler runs without it, and none succeeds whose hook fails at its end."""
    in_child: bool = False
    """Around the handler of an isolated job in its child process, not around that process."""

    def surrounds(self, job: str, isolation: str, *, in_child: bool) -> bool:
        """True where it surrounds the runs of a job: in the agent, or in the child process of an isolated one."""
        return (self.jobs is None or job in self.jobs) and in_child == (self.in_child and isolation == "process")


def on(*kinds: type[Event], jobs: tuple[str, ...] | None = None) -> Callable[[Callable[[Any], object]], EventHook]:
    """Tell a function `(event) -> None` each event of these kinds, in a thread of its own and in order.

    Args:
        kinds: classes of `thunderagent.model.events` and `thunderagent.model.fleet_events`; a class such as `TaskEvent`
            stands for all that are derived from it.
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

    What stands before its one `yield` runs before the handler, the rest after the handler has ended.

    It should be quick, and around coroutine functions it must not block.

    Args:
        function: the function, when the decorator is written without parentheses.
        jobs: only runs of these jobs; None: all.
        required: the handler does not run when the hook raises before its `yield`, and does not succeed when it raises
            after it: either is an error of the task. For a tenant, a transaction. Otherwise such an error is only told.
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
    except ValueError:  # of a function that does not tell
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
