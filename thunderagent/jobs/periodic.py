"""The decorator `periodic`: gives a job a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar, overload

from thunderagent.jobs.job import Job
from thunderagent.model.arguments import shown
from thunderagent.model.errors import ConfigurationError, PayloadError
from thunderagent.model.schedules import CatchUp, Overlap, Schedule, tick_id, tick_payload
from thunderagent.model.task import RESERVED
from thunderagent.model.ticks import Cron, Every, Spec

P = TypeVar("P")

_TICK: Final[Any] = object()
_LONGEST_ID: Final = 512


@overload
def periodic(
    spec: Spec, *, catch_up: CatchUp = "last", overlap: Overlap = "allow", jitter_s: float = 0.0
) -> Callable[[Job[P]], Job[P]]: ...


@overload
def periodic(
    spec: Spec, *, catch_up: CatchUp = "last", overlap: Overlap = "allow", jitter_s: float = 0.0, payload: P
) -> Callable[[Job[P]], Job[P]]: ...


def periodic(
    spec: Spec,
    *,
    catch_up: CatchUp = "last",
    overlap: Overlap = "allow",
    jitter_s: float = 0.0,
    payload: Any = _TICK,
) -> Callable[[Job[P]], Job[P]]:
    """Let the agents that have a job put a task for each tick. Write it above `@job`.

    The id of the task is that of its tick (`job@2026-11-29T02:00:00Z`): any number of agents puts one task for a tick.

    Args:
        spec: `every(10).minutes`, `every().day.at("02:00", "Europe/Berlin")`, `cron("0 2 * * MON-FRI")`.
        catch_up: what becomes of ticks that no agent put for a minute or longer: "none" leaves them out, "last" puts
            the
          newest of them unless a tick after it is in time, "all" puts each.
        overlap: what happens while the task of the previous tick is open: "allow" puts the next all the same, "skip"
          leaves it out, "cancel_previous" cancels the previous one, as `client.cancel` does.
        jitter_s: each task is due up to so many seconds after its tick, the same in every agent.
        payload: the input of the handler; without one it is given a `Tick`.

    Raises:
        ConfigurationError: the job cannot be periodic so; all problems are listed.
    """

    if isinstance(spec, Job):
        raise ConfigurationError(
            f"@periodic of {spec.name!r} says no spec: write for example @periodic(every(10).minutes)"
        )

    def decorate(job: Job[P]) -> Job[P]:
        if not isinstance(job, Job):
            name = getattr(job, "__name__", repr(job))
            raise ConfigurationError(f"@periodic of {name} must stand above @job: it needs the job that @job makes")
        problems = _problems(job, spec)
        text: str | None = None
        try:
            if payload is not _TICK:
                text = job.dump_payload(payload)
            elif not job.is_stream:
                job.load_payload(tick_payload(0))
        except PayloadError as error:
            hint = "" if payload is not _TICK else ": annotate it with Tick, or give @periodic a payload"
            problems.append(f"{error}{hint}")
        try:
            if not problems:
                schedule = Schedule(
                    spec=spec,
                    catch_up=catch_up,
                    overlap=overlap,
                    jitter_s=jitter_s,
                    queue=job.queue,
                    payload=text,
                    version=job.version,
                )
                return replace(job, schedule=schedule)
        except ConfigurationError as error:
            problems.append(str(error))
        listing = "\n".join(f"  - {one}" for one in problems)
        raise ConfigurationError(f"the job {job.name!r} cannot be periodic:\n{listing}")

    return decorate


def _problems(job: Job[Any], spec: object) -> list[str]:
    problems = []
    if not isinstance(spec, (Every, Cron)):
        problems.append(f"{shown(spec)} is no spec: say of what, for example every(10).minutes, or cron('0 2 * * *')")
    if job.is_stream:
        problems.append("it is a stream, which runs all the time: enqueue it once")
    if job.schedule is not None:
        problems.append("it has a schedule already: make a second job with a name of its own")
    task_id = tick_id(job.name, 0)
    if "#" in task_id or task_id.startswith(RESERVED) or not task_id.isprintable():
        problems.append(
            f"the ids of its tasks begin with its name, which must have no '#' and must not begin with "
            f"{', '.join(RESERVED)}"
        )
    elif (size := len(task_id.encode(errors="replace"))) > _LONGEST_ID:
        problems.append(f"the ids of its tasks would have {size} bytes, over {_LONGEST_ID}: give it a shorter name")
    return problems
