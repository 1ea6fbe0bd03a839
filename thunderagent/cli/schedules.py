"""Commands on periodic jobs: list, next, run-now, pause, resume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.markup import escape

from thunderagent.cli.output import (
    JsonOption,
    StoreOption,
    as_dict,
    errors,
    make_table,
    moment,
    notes,
    opened,
    out,
    tell,
)
from thunderagent.cli.pauses import LastsOption, ReasonOption, duration
from thunderagent.model.clock import span_text
from thunderagent.model.schedules import tick_text
from thunderagent.queue.schedules.commands import ScheduleInfo

schedules_app = typer.Typer(
    help="See the schedules of periodic jobs, run one now, pause and resume.", no_args_is_help=True
)

WIDE: Final = 150
MIDDLING: Final = 100

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the periodic job.")]


@schedules_app.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the periodic jobs and when each is due; on a wide terminal also their policy for missed ticks."""
    with errors(), opened(store) as client:
        found = client.schedules.list()
        if as_json:
            tell([asdict(one) for one in found], True)
            return
        if not found:
            out.print("no periodic jobs: an agent that has one puts its schedule when it starts")
            return
        wide, middling = out.width >= WIDE, out.width >= MIDDLING
        last = ("last",) if middling else ()
        titles = ("job", "schedule", "next", *last, *(("catch up", "overlap", "queue", "left out") if wide else ()))
        table = make_table(*titles, ids=[one.job for one in found])
        for one in found:
            rest = (one.catch_up, one.overlap, one.queue, str(one.skipped)) if wide else ()
            cells = (one.job, one.spec, _next_text(one), *((moment(one.last),) if middling else ()), *rest)
            table.add_row(*map(escape, cells))
        out.print(table)


@schedules_app.command("next")
def next_(
    job: JobArgument,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=100, help="How many.")] = 5,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show when a periodic job is due next, in UTC and in how long."""
    with errors(), opened(store) as client:
        one, now = client.schedules.get(job), client.store.clock.now()
        ticks = client.schedules.next_ticks(job, number=number)
        if as_json:
            tell([tick_text(tick) for tick in ticks], True)
            return
        out.print(escape(f"{one.job}: {one.spec}" + (f", {_pause_text(one)}" if one.paused else "")), soft_wrap=True)
        for tick in ticks:
            out.print(f"{moment(tick)}  in {span_text(tick - now)}")
        if not ticks:
            out.print(escape(f"no ticks until: thunderagent schedule resume {job}"), soft_wrap=True)


@schedules_app.command("run-now")
def run_now(job: JobArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Put a task of a periodic job at once, paused or not; prints its id. Its ticks come as before."""
    with errors(), opened(store) as client:
        task = client.schedules.run_now(job)
        tell(as_dict(task) if as_json else task.task_id, as_json)
        if client.schedules.get(job).paused is not None:
            notes.print(escape(f"{job} is paused; this task runs all the same"), style="yellow", soft_wrap=True)


@schedules_app.command()
def pause(
    job: JobArgument,
    lasts: LastsOption = None,
    reason: ReasonOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put no ticks of a periodic job; those of the pause are skipped for good.

    Its existing tasks run; to hold these too: thunderagent pause job NAME.
    """
    with errors(), opened(store) as client:
        for_s = None if lasts is None else duration("--for", lasts)
        _show(client.schedules.pause(job, for_s=for_s, reason=reason), as_json)


@schedules_app.command()
def resume(job: JobArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """End a pause: the next tick from now on is put. Resuming what is not paused changes nothing."""
    with errors(), opened(store) as client:
        _show(client.schedules.resume(job), as_json)


def _show(one: ScheduleInfo, as_json: bool) -> None:
    if as_json:
        tell(asdict(one), True)
    elif one.paused is not None:
        tell(f"{one.job} is {_pause_text(one)}", False)
    else:
        tell(f"{one.job} is due next at {_next_text(one)}", False)


def _next_text(one: ScheduleInfo) -> str:
    if one.paused is not None and one.paused_until is None:
        return "paused"
    return moment(one.next) + (" after a pause" if one.paused is not None else "")


def _pause_text(one: ScheduleInfo) -> str:
    text = f"paused since {moment(one.paused)}"
    text += f" until {moment(one.paused_until)}" if one.paused_until is not None else ""
    return text + (f": {one.reason}" if one.reason else "")
