from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from thunderagent.jobs.context import Context
from thunderagent.jobs.versions import Upcaster, bring_up, version_problems
from thunderagent.model.arguments import MOST_RETRIES, SHORTEST_S, choice_problem, seconds_problem, shown, whole_problem
from thunderagent.model.errors import ConfigurationError, PayloadInvalid
from thunderagent.model.jsondata import dump_json
from thunderagent.model.names import has_version, job_name_problem, job_value, key_problem
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import DEFAULT_QUEUE, STREAM, Lane
from thunderagent.settings import lease_problems

if TYPE_CHECKING:  # a process that only enqueues needs no calendar
    from thunderagent.model.schedules import Schedule

P = TypeVar("P")

MOST_AT_ONCE: Final = 1000
"""Highest limit: its row has an entry for each task that runs, and each of its writes is billed on the whole row."""


Handler = Callable[[Context, P], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job(Generic[P]):
    """A registered handler. Make one with `@job`; call it like the function it wraps."""

    name: str
    handler: Handler[P]
    payload: TypeAdapter[P]
    dumper: TypeAdapter[list[P]]
    """For a list, as a model's own configuration does not reach through it: NaN must stay NaN and not become null."""
    queue: str = DEFAULT_QUEUE
    max_retry: int | None = None
    timeout_s: float | None = None
    fatal: tuple[type[BaseException], ...] = ()
    isolation: Literal["thread", "process"] = "thread"
    grace_s: float | None = None
    """How long its child process may go on after a request to stop; None: `KILL_GRACE_S`."""
    on_bad_result: Literal["note", "fail"] = "note"
    """What becomes of a task whose result cannot be stored."""
    lease_s: float | None = None
    heartbeat_s: float | None = None
    backoff: Backoff | None = None
    kind: str = "batch"
    exclusive: bool = True
    """Of a stream: never two connections at one moment, not even in a handoff."""
    limit: int | None = None
    """How many of its tasks run at once in the whole fleet."""
    limit_key: str | None = None
    """Jobs with the same key share one limit; None: the name of the job."""
    schedule: Schedule | None = None
    """When agents put its tasks; see `periodic`."""
    keep_s: float | None = None
    """How long the rows of its tasks stay after their end; None: as the settings say."""
    version: int = 1
    """Of the payload type: tasks that this code puts carry it."""
    upcasters: Mapping[int, Upcaster] = field(default_factory=dict)
    """For each older version that is still taken: what brings its payload up to the next."""

    @property
    def job_value(self) -> str:
        """The attribute `job` of tasks that this code puts."""
        return job_value(self.name, self.version)

    @property
    def job_values(self) -> tuple[str, ...]:
        """The values of the attribute `job` that this code takes, oldest version first."""
        oldest = min(self.upcasters, default=self.version)
        return tuple(job_value(self.name, one) for one in range(oldest, self.version + 1))

    @property
    def is_stream(self) -> bool:
        return self.kind == STREAM

    def __call__(self, ctx: Context, payload: P) -> Any:
        """Run the handler as a plain function, for tests."""
        return self.handler(ctx, payload)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)

    @property
    def where(self) -> str:
        return f"{self.handler.__module__}.{self.handler.__qualname__}"

    def dump_payload(self, payload: P) -> str:
        """The payload as JSON text.

        Raises:
            PayloadInvalid: it does not fit the payload type, or holds what JSON cannot.
        """
        try:
            value = self.payload.validate_python(payload)
            [data] = self.dumper.dump_python([value], mode="json", by_alias=True, warnings=False)
            text = dump_json(data, f"the payload of {self.name!r}", PayloadInvalid)
            self.payload.validate_json(text)  # as the agent will: not every model comes back from its own text
        except ValidationError as error:
            raise self._misfit(error) from None
        except (PydanticSerializationError, UnicodeDecodeError) as error:
            raise PayloadInvalid(f"the payload of {self.name!r} is not JSON data: {error}") from None
        return text

    def load_payload(self, text: str, version: int | None = None) -> P:
        """The payload of a task, brought up to this version of the job.

        Args:
            text: the payload as JSON.
            version: of the code that put the task; None: this one.

        Raises:
            PayloadInvalid: the text does not fit the payload type, or an upcaster failed.
        """
        if version is not None and version != self.version:
            text = bring_up(text, self.name, since=version, version=self.version, upcasters=self.upcasters)
        try:
            return self.payload.validate_json(text)
        except ValidationError as error:
            raise self._misfit(error) from None

    def _misfit(self, error: ValidationError) -> PayloadInvalid:
        """What pydantic found, without the values: they may be secrets, and the message goes to logs and rows."""
        found = error.errors(include_url=False, include_input=False, include_context=False)
        listing = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'payload'}: {one['msg']}" for one in found)
        return PayloadInvalid(f"the payload does not fit the job {self.name!r}: {listing}")


def job(
    name: str,
    *,
    queue: str = DEFAULT_QUEUE,
    max_retry: int | None = None,
    timeout_s: float | None = None,
    fatal: tuple[type[BaseException], ...] = (),
    isolation: Literal["thread", "process"] = "thread",
    grace_s: float | None = None,
    on_bad_result: Literal["note", "fail"] = "note",
    lease_s: float | None = None,
    heartbeat_s: float | None = None,
    backoff: Backoff | None = None,
    limit: int | None = None,
    limit_key: str | None = None,
    version: int = 1,
    upcasters: Mapping[int, Upcaster] | None = None,
) -> Callable[[Handler[P]], Job[P]]:
    """Make a handler `(ctx, payload)` a job that tasks can name.

    Args:
        name: what tasks carry; never change it while tasks with it exist.
        queue: the queue its tasks go to unless `enqueue` says otherwise.
        max_retry: retries after errors of the handler; None takes the setting.
        timeout_s: seconds after which the handler is asked to stop. A plain function that goes on cannot be ended: its
          result counts, and the row says how long it ran.
        fatal: exceptions after which a retry makes no sense.
        isolation: "thread" for a thread of the agent (or its event loop, for a coroutine function), "process" for a
          fresh process per task, which a lost lease, a cancel and the time limit can kill. Processes that its handler
          has started end with it, except those in a session of their own.
        grace_s: with `isolation="process"`, seconds from the request to stop to the kill; None: 5. A lost lease kills
          at once.
        on_bad_result: for a result that cannot be stored (NaN, too large, no JSON data): "note" keeps the task SUCCESS,
          without a result and with a note; "fail" makes it FAILED, with no retry.
        lease_s: length of the lease; None takes the setting.
        heartbeat_s: time between renewals, at most a third of the lease; None takes the setting, or a third of
            `lease_s`.
        backoff: delay before retries; None takes the settings.
        limit: how many tasks of this job run at once in the whole fleet; None: no limit.
        limit_key: jobs and tasks with the same key share one limit; None takes the name of the job.
        version: of the payload type. Raise it when older code could not run the new tasks: they wait for an agent that
          has this version.
        upcasters: for each older version that this code still takes, a function that makes the payload of the next
          version of it, as JSON data: `{1: from_1_to_2}`. Tasks of other versions wait for an older agent.

    Raises:
        ConfigurationError: the options cannot work; all problems are listed.
    """

    return partial(
        make_job,
        name,
        queue=queue,
        max_retry=max_retry,
        timeout_s=timeout_s,
        fatal=fatal,
        isolation=isolation,
        grace_s=grace_s,
        on_bad_result=on_bad_result,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
        backoff=backoff,
        limit=limit,
        limit_key=limit_key,
        version=version,
        upcasters=upcasters,
    )


def make_job(
    name: str,
    handler: Callable[[Any, P], Any],
    *,
    kind: str = "batch",
    queue: str = DEFAULT_QUEUE,
    max_retry: int | None = None,
    timeout_s: float | None = None,
    fatal: tuple[type[BaseException], ...] = (),
    isolation: Literal["thread", "process"] = "thread",
    grace_s: float | None = None,
    on_bad_result: Literal["note", "fail"] = "note",
    lease_s: float | None = None,
    heartbeat_s: float | None = None,
    backoff: Backoff | None = None,
    exclusive: bool = True,
    limit: int | None = None,
    limit_key: str | None = None,
    version: int = 1,
    upcasters: Mapping[int, Upcaster] | None = None,
) -> Job[P]:
    """The job of a handler, for `@job` and `@stream`."""
    problems = [*_option_problems(name, queue, max_retry, isolation, handler, fatal)]
    problems += _ending_problems(isolation, grace_s, on_bad_result)
    problems += limit_problems(limit, limit_key)
    problems += version_problems(version, upcasters or {})
    if kind == STREAM and not inspect.iscoroutinefunction(handler):
        problems.append("the handler of a stream must be a coroutine function: write `async def`")
    times = {"timeout_s": timeout_s, "lease_s": lease_s, "heartbeat_s": heartbeat_s}
    wrong = [seconds_problem(name, value, least=SHORTEST_S) for name, value in times.items() if value is not None]
    problems += filter(None, wrong)
    if not isinstance(exclusive, bool):
        problems.append(f"exclusive is {shown(exclusive)}; use True or False")
    if backoff is not None and not isinstance(backoff, Backoff):
        problems.append(f"backoff is {shown(backoff)}; use Backoff(base_s=2, cap_s=300)")
    if lease_s is not None and heartbeat_s is not None and not any(wrong):
        problems += lease_problems(lease_s, heartbeat_s, "lease_s", "heartbeat_s")
    if problems:
        raise ConfigurationError(f"the job {shown(name)} cannot work:\n" + "\n".join(f"  - {one}" for one in problems))
    beat = heartbeat_s if heartbeat_s is not None or lease_s is None else lease_s / 3
    hint = _payload_type(handler, name)
    several: Any = GenericAlias(list, (hint,))
    try:
        payload: TypeAdapter[P] = TypeAdapter(hint)
        dumper: TypeAdapter[list[P]] = TypeAdapter(several, config=ConfigDict(ser_json_inf_nan="constants"))
    except PydanticUserError:
        raise ConfigurationError(
            f"the payload type {_named(hint)} of the job {name!r} is none that pydantic can check: use a model, a "
            "dataclass, a TypedDict or plain JSON types"
        ) from None
    return Job(
        name=name,
        handler=handler,
        payload=payload,
        dumper=dumper,
        queue=queue,
        max_retry=max_retry,
        timeout_s=timeout_s,
        fatal=tuple(fatal) if isinstance(fatal, (tuple, list)) else (fatal,),
        isolation=isolation,
        grace_s=grace_s,
        on_bad_result=on_bad_result,
        lease_s=lease_s,
        heartbeat_s=beat,
        backoff=backoff,
        kind=kind,
        exclusive=exclusive,
        limit=limit,
        limit_key=limit_key,
        version=version,
        upcasters=dict(upcasters or {}),
    )


class Limit(NamedTuple):
    """At most `number` tasks with this key at once."""

    key: str
    number: int


def limit_problems(limit: int | None, limit_key: str | None) -> list[str]:
    problems = []
    if limit is not None and not (type(limit) is int and 1 <= limit <= MOST_AT_ONCE):
        problems.append(f"limit is {shown(limit)}; use 1 to {MOST_AT_ONCE}, the tasks that may run at once")
    if limit_key is not None and limit is None:
        problems.append(f"limit_key is {shown(limit_key)} and limit is missing: say how many may run at once")
    if limit_key is not None and (problem := key_problem("limit_key", limit_key)):
        problems.append(problem)
    return problems


def _option_problems(
    name: str,
    queue: str,
    max_retry: int | None,
    isolation: str,
    handler: Callable[[Any, P], Any],
    fatal: object,
) -> Iterator[str]:
    if problem := job_name_problem(name):
        yield problem
    elif has_version(name):
        yield f"the name {name!r} must not end in a version: write version={name.rpartition('@')[2]}"
    try:
        Lane(queue)
    except ConfigurationError as error:
        yield str(error)
    if max_retry is not None and (problem := whole_problem("max_retry", max_retry, least=0, most=MOST_RETRIES)):
        yield problem
    if problem := choice_problem("isolation", isolation, ("thread", "process")):
        yield problem
    kinds = fatal if isinstance(fatal, (tuple, list)) else (fatal,)
    if wrong := [one for one in kinds if not (isinstance(one, type) and issubclass(one, BaseException))]:
        yield f"fatal has {shown(wrong[0])}; use a tuple of exception types"
    if isolation == "process" and inspect.iscoroutinefunction(handler):
        yield 'isolation="process" needs a plain function; call asyncio.run() in it'
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        yield "the handler must return, not yield"
    if isolation == "process" and (handler.__module__ == "__main__" or "<locals>" in handler.__qualname__):
        yield 'isolation="process" needs a handler at the top level of a module that a child process can import'


def _ending_problems(isolation: str, grace_s: float | None, on_bad_result: str) -> Iterator[str]:
    if grace_s is not None and (problem := seconds_problem("grace_s", grace_s)):
        yield problem
    if grace_s is not None and isolation != "process":
        yield 'grace_s needs isolation="process": a thread cannot be killed'
    if problem := choice_problem("on_bad_result", on_bad_result, ("note", "fail")):
        yield problem


def _payload_type(handler: Callable[[Any, P], Any], name: str) -> Any:
    signature = inspect.signature(handler)
    parameters = list(signature.parameters)
    try:
        signature.bind(None, None)
        takes_two = len(parameters) == 2
    except TypeError:
        takes_two = False
    if not takes_two:
        raise _bad_parameters(name, parameters, {})
    try:
        hints = typing.get_type_hints(handler, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {name!r} cannot be resolved ({error}); define its types at the top of the module"
        ) from error
    first, second = (hints.get(one) for one in parameters)
    if _is_context(second) or not (first is None or _may_be_context(first)):
        raise _bad_parameters(name, parameters, hints)
    if parameters[1] not in hints:
        raise ConfigurationError(f"annotate the parameter {parameters[1]!r} of {name!r} with its payload type")
    return hints[parameters[1]]


def _bad_parameters(name: str, parameters: Iterable[str], hints: Mapping[str, Any]) -> ConfigurationError:
    shown = ", ".join(f"{one}: {_named(hints[one])}" if one in hints else one for one in parameters)
    return ConfigurationError(
        f"the handler of {name!r} must take (ctx, payload), not ({shown}): first its Context, then one parameter, "
        "annotated with the payload type"
    )


def _is_context(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Context)


def _may_be_context(hint: Any) -> bool:
    """False for the type of a parameter that cannot take a context; what is no plain class may be one."""
    kind = typing.get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return issubclass(kind, Context) or issubclass(Context, kind)


def _named(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)
