"""Jobs: the handlers that tasks name, what they are given and what they may answer."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import threading
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from thunderagent.errors import ConfigurationError, JobImportError, PayloadInvalid, TaskStopped, UnknownJob
from thunderagent.pacing import Backoff
from thunderagent.settings import lease_problems
from thunderagent.task import DEFAULT_QUEUE, Lane, Lease

P = TypeVar("P")

PROGRESS_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Snooze:
    """A handler's answer: run me again after `seconds`; no retry is used up.

    >>> Snooze(60)
    Snooze(seconds=60)
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """A handler's answer: close the task as DONE, on purpose; dependents follow `on_parent_failure`."""

    reason: str = "cancelled by its handler"


@dataclass(frozen=True, slots=True)
class Fail:
    """A handler's answer: FAILED at once, whatever retries are left."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unstorable:
    """For the engine: stands for a value of a handler that cannot be JSON data; `why` tells."""

    why: str


class Context:
    """What a handler knows of its task and can ask of its agent.

    One context belongs to one run under one fence. All methods may be called from any thread.
    """

    __slots__ = ("_guard", "_parents", "_progress", "_stop", "_stopped", "_told", "lease")

    def __init__(self, lease: Lease, parents: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.lease = lease
        self._parents = parents
        self._stopped = threading.Event()
        self._stop: TaskStopped | None = None
        self._told: Callable[[TaskStopped], None] | None = None
        self._progress: str | None = None
        self._guard = threading.Lock()

    @property
    def task_id(self) -> str:
        """Id of the task: the same in every attempt, so a good name for what the handler writes."""
        return self.lease.task_id

    @property
    def attempt(self) -> int:
        """Number of this run, from 1."""
        return self.lease.task.attempt

    @property
    def fence(self) -> int:
        """A number that grows with each run; a resource that remembers the largest can refuse a run that is over."""
        return self.lease.fence

    @property
    def idempotency_key(self) -> str:
        """Task id and fence: the same only within this run."""
        return f"{self.task_id}:{self.fence}"

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop: cancelled, lease lost, time over, or the agent is stopping."""
        return self._stop is not None

    @property
    def stop_reason(self) -> TaskStopped | None:
        """Why the handler should stop, or None."""
        return self._stop

    def check(self) -> None:
        """Stop here if the task should stop; call it between steps of long work.

        Raises:
            TaskStopped: one of its subclasses says why.
        """
        if self._stop is not None:
            raise self._stop

    def wait(self, seconds: float) -> bool:
        """Sleep, but not past a request to stop.

        Returns:
            True when the task should stop.
        """
        return self._stopped.wait(seconds)

    def progress(self, value: Any) -> None:
        """Tell how far the work is: JSON data up to 1 KB. It rides on the next heartbeat and costs no extra write.

        Raises:
            ValueError: the value is not JSON data or too large.
        """
        text = dump_json(value, "the progress")
        if len(text.encode()) > PROGRESS_BYTES:
            raise ValueError(f"the progress has {len(text.encode())} bytes, at most {PROGRESS_BYTES} can be kept")
        with self._guard:
            self._progress = text

    def parent_results(self) -> Mapping[str, Any]:
        """Results of the tasks this one depends on, by task id; None for a parent that left no result."""
        return self._parents() if self._parents else {}

    def take_progress(self) -> str | None:
        """For the engine: the progress told since the last call."""
        with self._guard:
            text, self._progress = self._progress, None
        return text

    def stop(self, why: TaskStopped) -> bool:
        """For the engine: ask the handler to stop. The first reason stays; True if this was it."""
        with self._guard:
            if self._stop is not None:
                return False
            self._stop = why
            told = self._told
        self._stopped.set()
        if told:
            told(why)
        return True

    def when_stopped(self, call: Callable[[TaskStopped], None]) -> None:
        """For the engine: call this with the reason as soon as the handler should stop."""
        with self._guard:
            self._told = call
            why = self._stop
        if why is not None:
            call(why)


Handler = Callable[[Context, P], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job(Generic[P]):
    """A registered handler. Make one with `@job`; call it like the function it wraps."""

    name: str
    handler: Handler[P]
    payload: TypeAdapter[P]
    queue: str = DEFAULT_QUEUE
    max_retry: int | None = None
    timeout_s: float | None = None
    fatal: tuple[type[BaseException], ...] = ()
    isolation: Literal["thread", "process"] = "thread"
    lease_s: float | None = None
    heartbeat_s: float | None = None
    backoff: Backoff | None = None
    kind: str = "batch"

    def __call__(self, ctx: Context, payload: P) -> Any:
        """Run the handler as a plain function, for tests."""
        return self.handler(ctx, payload)

    @property
    def is_async(self) -> bool:
        """True for a coroutine function."""
        return inspect.iscoroutinefunction(self.handler)

    @property
    def where(self) -> str:
        """Module and name of the handler."""
        return f"{self.handler.__module__}.{self.handler.__qualname__}"

    def dump_payload(self, payload: P) -> str:
        """The payload as JSON text.

        Raises:
            PayloadInvalid: it does not fit the payload type, or holds what JSON cannot.
        """
        try:
            value = self.payload.validate_python(payload)
            data = self.payload.dump_python(value, mode="json", warnings=False)
        except (ValidationError, PydanticSerializationError) as error:
            raise PayloadInvalid(f"the payload does not fit the job {self.name!r}: {error}") from error
        return dump_json(data, f"the payload of {self.name!r}", PayloadInvalid)

    def load_payload(self, text: str) -> P:
        """The payload of a task.

        Raises:
            PayloadInvalid: the text does not fit the payload type of this version of the job.
        """
        try:
            return self.payload.validate_json(text)
        except ValidationError as error:
            raise PayloadInvalid(f"the payload does not fit the job {self.name!r}: {error}") from error


def job(
    name: str,
    *,
    queue: str = DEFAULT_QUEUE,
    max_retry: int | None = None,
    timeout_s: float | None = None,
    fatal: tuple[type[BaseException], ...] = (),
    isolation: Literal["thread", "process"] = "thread",
    lease_s: float | None = None,
    heartbeat_s: float | None = None,
    backoff: Backoff | None = None,
) -> Callable[[Handler[P]], Job[P]]:
    """Make a handler `(ctx, payload)` a job that tasks can name.

    Args:
        name: what tasks carry; never change it while tasks with it exist.
        queue: the queue its tasks go to unless `enqueue` says otherwise.
        max_retry: retries after errors of the handler; None takes the setting.
        timeout_s: seconds after which the handler is asked to stop, and with `isolation="process"` killed.
        fatal: exceptions after which a retry makes no sense.
        isolation: "thread" for a thread of the agent (or its event loop, for a coroutine function), "process" for a
            fresh process per task, which a lost lease, a cancel and the time limit can kill.
        lease_s: length of the lease; None takes the setting.
        heartbeat_s: time between renewals, at most a third of the lease; None takes the setting, or a third of
            `lease_s`.
        backoff: delay before retries; None takes the settings.

    Raises:
        ConfigurationError: the options cannot work; all problems are listed.
    """

    def decorate(handler: Handler[P]) -> Job[P]:
        beat = heartbeat_s if heartbeat_s is not None or lease_s is None else lease_s / 3
        problems = [*_option_problems(name, queue, max_retry, timeout_s, isolation, handler)]
        if lease_s is not None and beat is not None:
            problems += lease_problems(lease_s, beat, "lease_s", "heartbeat_s")
        if problems:
            raise ConfigurationError(f"the job {name!r} cannot work:\n" + "\n".join(f"  - {one}" for one in problems))
        return Job(
            name=name,
            handler=handler,
            payload=TypeAdapter(_payload_type(handler, name)),
            queue=queue,
            max_retry=max_retry,
            timeout_s=timeout_s,
            fatal=fatal,
            isolation=isolation,
            lease_s=lease_s,
            heartbeat_s=beat,
            backoff=backoff,
        )

    return decorate


def _option_problems(
    name: str, queue: str, max_retry: int | None, timeout_s: float | None, isolation: str, handler: Handler[P]
) -> Iterator[str]:
    if not name or len(name) > 128 or any(letter.isspace() for letter in name):
        yield f"the name {name!r} must have 1 to 128 characters and no space"
    try:
        Lane(queue)
    except ConfigurationError as error:
        yield str(error)
    if max_retry is not None and max_retry < 0:
        yield f"max_retry is {max_retry}; it must not be negative"
    if timeout_s is not None and timeout_s <= 0:
        yield f"timeout_s is {timeout_s:g}; it must be over 0"
    if isolation not in ("thread", "process"):
        yield f"isolation is {isolation!r}; use 'thread' or 'process'"
    if isolation == "process" and (handler.__module__ == "__main__" or "<locals>" in handler.__qualname__):
        yield 'isolation="process" needs a handler at the top level of a module that a child process can import'


def _payload_type(handler: Handler[P], name: str) -> Any:
    parameters = list(inspect.signature(handler).parameters)
    if len(parameters) != 2:
        raise ConfigurationError(f"the handler of {name!r} must take (ctx, payload), not ({', '.join(parameters)})")
    try:
        hints = typing.get_type_hints(handler)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {name!r} cannot be resolved ({error}); define its types at the top of the module"
        ) from error
    if parameters[1] not in hints:
        raise ConfigurationError(f"annotate the parameter {parameters[1]!r} of {name!r} with its payload type")
    return hints[parameters[1]]


class Registry(Mapping[str, "Job[Any]"]):
    """The jobs that an agent can run, by name."""

    def __init__(self, *jobs: Job[Any]) -> None:
        self._jobs: dict[str, Job[Any]] = {}
        for one in jobs:
            self.add(one)

    def add(self, one: Job[Any]) -> None:
        """Add a job.

        Raises:
            ConfigurationError: another job has this name.
        """
        other = self._jobs.setdefault(one.name, one)
        if other is not one:
            raise ConfigurationError(f"two jobs are named {one.name!r}: {other.where} and {one.where}; rename one")

    def __getitem__(self, name: str) -> Job[Any]:
        try:
            return self._jobs[name]
        except KeyError:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownJob(f"no job is named {name!r}; known are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, name: object) -> bool:
        return name in self._jobs

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of the queues that the jobs go to, without repetition."""
        return tuple(dict.fromkeys(one.queue for one in self._jobs.values()))

    @classmethod
    def from_package(cls, package: str) -> Registry:
        """Import every module of a package (or one module) and collect the jobs found there.

        Raises:
            JobImportError: the package does not exist, a module does not import (with file and line), or no
                job is there.
            ConfigurationError: two jobs have one name, or a job's options cannot work.
        """
        registry = cls()
        for module in _modules(package):
            for value in vars(module).values():
                if isinstance(value, Job):
                    registry.add(value)
        if not registry:
            raise JobImportError(f"there is no job in {package!r}: decorate a handler with @job")
        return registry


def _modules(package: str) -> Iterator[ModuleType]:
    root = _import(package)
    yield root
    for found in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."):
        if found.name.rpartition(".")[2] != "__main__":
            yield _import(found.name)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigurationError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise JobImportError(
                f"there is no package {name!r}: run the command in the folder that holds it, or install it"
            ) from error
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}"
        raise JobImportError(f"{name} does not import: {type(error).__name__}: {error} ({place})") from error


def dump_json(value: Any, what: str, error: type[Exception] = ValueError) -> str:
    """Plain data as canonical JSON text: sorted keys, no spaces, no NaN.

    Raises:
        error: the value holds something that is not JSON data; `what` names it.
    """
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(
            f"{what} is not JSON data: {problem}; use str, int, finite float, bool, None, list and dict "
            "(a typed payload converts dates, decimals and the like)"
        ) from problem


def dump_result(value: Any) -> str | None:
    """What a handler returned as JSON text; None stays None.

    Models, dataclasses, dates, decimals, UUIDs, paths and sets are converted as pydantic converts them.

    Raises:
        ValueError: the value cannot be JSON data.
    """
    if value is None:
        return None
    if isinstance(value, Unstorable):
        raise ValueError(value.why)
    try:
        data = to_jsonable_python(value, inf_nan_mode="constants")
    except (PydanticSerializationError, UnicodeDecodeError) as problem:
        raise ValueError(f"the result is not JSON data: {problem}") from problem
    return dump_json(data, "the result")
