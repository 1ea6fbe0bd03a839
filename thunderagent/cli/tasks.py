"""Commands on tasks: enqueue, list, show, retry, cancel, purge."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from thunderagent.agent.settle import RAN_OVER
from thunderagent.cli.output import (
    REFUSED,
    JsonOption,
    QueueOption,
    StoreOption,
    as_dict,
    choice,
    colour,
    cursor_text,
    errors,
    find_here,
    link_data,
    make_table,
    meaning,
    moment,
    notes,
    opened,
    out,
    seconds,
    tell,
)
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import PayloadInvalid, StoreError, TaskUnreadable
from thunderagent.model.jsondata import NOT_STORED
from thunderagent.model.names import meant, plain_job
from thunderagent.model.rows import is_set
from thunderagent.model.task import Desired, Handoff, Row, Status, Task
from thunderagent.model.traceparent import trace_id
from thunderagent.ops.waiting import link_text, on_the_clock, status_text, why
from thunderagent.stores.tasks import AgentInfo, TaskStore
from thunderagent.streams.journal import read_links

WIDE: Final = 120
"""Columns of a terminal with room for the queue and the times of each task."""

ERROR_SHOWN: Final = 100
"""Letters of an error that a list shows."""

READ: Final = 100
"""Agents whose rows are read; of a larger fleet it is not known which jobs it has."""

TaskArgument = Annotated[str, typer.Argument(metavar="TASK_ID", help="Id of the task.")]


def enqueue(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job, for example: report.build")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="Payload as JSON, or - to read it from standard input.")
    ] = "null",
    store: StoreOption = None,
    task_id: Annotated[str | None, typer.Option(help="Idempotency id.", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option("--queue", "-q", help="Queue, instead of the job's.")] = None,
    delay_s: Annotated[float, typer.Option(help="Seconds until the task may run.")] = 0.0,
    depends_on: Annotated[list[str] | None, typer.Option(help="Id of a task to wait for; several times.")] = None,
    on_parent_failure: Annotated[str, typer.Option(help="fail, cancel or run.")] = "fail",
    max_retry: Annotated[int | None, typer.Option(help="Retries, instead of the job's.", show_default=False)] = None,
    unique_key: Annotated[
        str | None,
        typer.Option(
            help="At most one task of this job with this key is open; an open one is returned.", show_default=False
        ),
    ] = None,
    unique_scope: Annotated[str, typer.Option(help="until_done, or until_start.")] = "until_done",
    limit: Annotated[
        int | None,
        typer.Option(help="Tasks that run at once in the fleet, instead of the job's.", show_default=False),
    ] = None,
    limit_key: Annotated[
        str | None, typer.Option(help="Tasks with this key share the limit.", show_default=False)
    ] = None,
    jobs: Annotated[
        str | None,
        typer.Option(help="Package of the jobs: checks the payload and knows the queue.", show_default=False),
    ] = None,
    wait_s: Annotated[float | None, typer.Option("--wait", help="Seconds to wait for its end.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Put a task into its queue and print its id; after --wait also its end and result.

    Without --jobs and --queue it goes to the queue `default`; a stream needs --queue streams. A note says when no live
    agent has this job, or none with it serves that queue.
    """
    with errors(), opened(store) as client:
        text = sys.stdin.read() if payload == "-" else payload
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PayloadInvalid(f"the payload is not JSON ({error}): {text[:200]}") from error
        options: dict[str, Any] = {
            "task_id": task_id,
            "queue": queue,
            "delay_s": delay_s,
            "depends_on": depends_on or (),
            "on_parent_failure": choice("--on-parent-failure", on_parent_failure, ("fail", "cancel", "run")),
            "max_retry": max_retry,
            "unique_key": unique_key,
            "unique_scope": choice("--unique-scope", unique_scope, ("until_done", "until_start")),
            "limit": limit,
            "limit_key": limit_key,
        }
        if jobs:
            find_here()
            known = Registry.from_package(jobs)[job]
            task = client.enqueue(known, known.load_payload(text), **options)
        else:
            task = client.enqueue(job, data, **options)
            for sentence in doubts(client.store, task):
                notes.print(escape(sentence), style="yellow", soft_wrap=True)
        if not as_json:
            tell(task.task_id, False)  # before the wait, which may be interrupted
        if wait_s is not None:
            task = client.wait(task, timeout_s=wait_s)
        if as_json:
            tell(as_dict(task), True)
        elif wait_s is not None:
            tell(_end(task), False)
        if task.status in (Status.FAILED, Status.DONE):
            raise typer.Exit(REFUSED)


def _end(task: Task) -> str:
    """How a task ended, for people, and where to read on if it did not succeed."""
    if task.status is Status.SUCCESS:
        unread = f"(its result cannot be read: {task.result_error})" if task.result_error else None
        return f"{task.status} {unread or task.result_text or 'null'}"
    why = _first_line(task)
    what = f"{task.status}{meaning(task.status)}{': ' * bool(why)}{why}"
    return f"{what}\nsee: thunderagent explain {shlex.quote(task.task_id)}"


def _first_line(task: Task) -> str:
    return (task.error or task.done_reason or "").partition("\n")[0]


def list_(
    status: Annotated[str | None, typer.Option(help="Only this status, such as failed.", show_default=False)] = None,
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Most tasks.")] = 50,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Not newest first.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks; DONE means closed on purpose: cancelled, or stopped."""
    with errors(), opened(store) as client:
        wanted = choice("--status", status.upper(), tuple(Status)) if status else None
        tasks = list(client.list(status=wanted, queue=queue, newest_first=not oldest_first, limit=limit))
        if as_json:
            tell([as_dict(task) for task in tasks], True)
            return
        columns = ("task", "status", *(("queue", "due", "seconds") if out.width >= WIDE else ()))
        table = make_table(*columns, ids=[task.task_id for task in tasks])
        table.add_column("job, and its error below", ratio=1, overflow="fold")
        for task in tasks:
            error = _first_line(task)
            error = error if len(error) <= ERROR_SHOWN else error[: ERROR_SHOWN - 1] + "…"
            more = (task.queue, moment(task.created_at), seconds(task)) if out.width >= WIDE else ()
            what = "\n".join(filter(None, (escape(task.job_value), f"[dim]{escape(error)}[/dim]" if error else "")))
            table.add_row(escape(task.task_id), colour(task.status), *more, what)
        out.print(table if tasks else "no tasks")


def show(task_id: TaskArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show a task: state, times, dependencies, errors, result, and why it does not run.

    An unreadable row is shown as raw attributes.
    """
    with errors(), opened(store) as client:
        try:
            task = client.get(task_id)
        except TaskUnreadable:
            _show_attributes(client.store.engine.get([task_id]).get(task_id, {}), as_json)
            raise
        reasons, link = why(client.store, task), read_links(client.store, [task]).get(task.task_id)
        if as_json:
            tell({**as_dict(task), "why": reasons, **link_data(link)}, True)
            return
        related = client.store.read([*task.depends_on, *task.dependents])
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in details(on_the_clock(client.store, task)):
            table.add_row(f"[dim]{name}[/dim]", value)
        if link is not None:
            table.add_row("[dim]connection[/dim]", escape(link_text(link, client.store.clock.now())))
        for number, sentence in enumerate(reasons):
            table.add_row("" if number else "[dim]why[/dim]", escape(sentence))
        for title, names in (("depends on", task.depends_on), ("waited for by", sorted(task.dependents))):
            for name in names:
                state = colour(status_text(related[name])) if name in related else "gone"
                table.add_row(f"[dim]{title}[/dim]", f"{escape(name)}  {state}")
        for entry in task.errors:
            when = moment(entry.get("at"))
            table.add_row(f"[dim]attempt {entry.get('attempt')}[/dim]", escape(f"{when}  {entry.get('error')}"))
        out.print(table)


def _show_attributes(row: Row, as_json: bool) -> None:
    """Show the attributes of an unreadable row, so that they can be repaired by hand."""
    values = {name: sorted(value) if is_set(value) else value for name, value in row.items()}
    if as_json:
        tell(values, True)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(f"[dim]{escape(name)}[/dim]", escape(json.dumps(value, default=repr)))
    out.print(table)


def cancel(task_id: TaskArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Close a waiting task, or ask the agent of a running one to stop it."""
    _change(store, as_json, lambda client: client.cancel(task_id))


def retry(task_id: TaskArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Put a FAILED or DONE (closed on purpose) task back into its queue."""
    _change(store, as_json, lambda client: client.retry(task_id))


def purge(
    status: Annotated[str, typer.Argument(help="SUCCESS, FAILED or DONE (closed on purpose).")],
    queue: QueueOption = None,
    older_than_days: Annotated[float, typer.Option(min=0.0, help="Least days since their end.")] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete ended tasks for good."""
    with errors(), opened(store) as client:
        wanted = choice("STATUS", status.upper(), tuple(Status))
        if not yes:
            where = f"of queue {queue} " if queue else ""
            typer.confirm(f"Delete all {wanted} tasks {where}in {client.store.engine.url}?", abort=True, err=as_json)
        deleted = client.purge(wanted, queue=queue, older_than_s=older_than_days * 86400)
        tell({"deleted": deleted} if as_json else f"{deleted} {'task' if deleted == 1 else 'tasks'} deleted", as_json)


def _change(store: str | None, as_json: bool, change: Callable[[Client], Task]) -> None:
    with errors(), opened(store) as client:
        task = change(client)
        asked = " (its agent was asked to stop it)" if task.cancel_requested else ""
        tell(as_dict(task) if as_json else f"{task.task_id} is {task.status}{meaning(task.status)}{asked}", as_json)


def details(task: Task) -> Iterator[tuple[str, str]]:
    yield "task", escape(task.task_id)
    yield (
        "status",
        colour(task.status) + meaning(task.status) + (" (cancel requested)" if task.cancel_requested else ""),
    )
    yield "job", escape(task.job_value)
    yield "queue", task.lane.suffix.removeprefix("#") or task.queue
    yield "attempt", f"{task.attempt} (retries {task.retry_count} of {_allowed(task)}, lost agents {task.crash_count})"
    yield "fence", str(task.fence)
    if task.lease_owner:
        yield "leased by", f"{escape(task.lease_owner)} until {moment(task.lock_time)}, beats {task.hb}"
    elif task.last_agent:
        yield "last agent", escape(task.last_agent)
    yield "submitted", moment(task.submitted_at)
    yield "due", moment(task.created_at)
    for name, at in (("started", task.started_at), ("finished", task.finished_at)):
        if at is not None:
            yield name, moment(at)
    if task.started_at and task.finished_at:
        yield "seconds", seconds(task)
    yield "payload", escape(_text(task.payload_text, task.payload_error))
    if task.unique_key is not None:
        yield "unique key", escape(f"{task.unique_key} ({task.unique_scope})")
    if task.limit_key is not None:
        number = "as many at once as its job says" if task.limit_max is None else f"{task.limit_max} at once"
        yield "limit", escape(f"{task.limit_key}, {number}")
    if trace := trace_id(task.traceparent):
        yield "trace", trace
    if task.is_stream:
        yield from _stream_details(task)
    if task.progress_text:
        yield "progress", escape(task.progress_text)
    if task.result_text is not None or task.result_error is not None:
        yield "result", escape(_text(task.result_text or "", task.result_error))
    if task.error:
        is_note = task.status is Status.SUCCESS and task.error.startswith((NOT_STORED, RAN_OVER))
        yield "note" if is_note else "error", escape(task.error)
    if task.done_reason:
        yield "reason", escape(task.done_reason)


def _text(text: str, error: Exception | None) -> str:
    return text[:2000] if error is None else f"cannot be read: {error}"


def _stream_details(task: Task) -> Iterator[tuple[str, str]]:
    yield "wanted", task.desired_state or Desired.STARTED
    token = task.last_seq.get("token") if isinstance(task.last_seq, Mapping) else None
    yield "cursor", escape((cursor_text(task.last_seq) or "none yet") + (f", token {token}" if token else ""))
    if task.handoff_state:
        until = f" until {moment(task.handoff_until)} at the latest" if task.handoff_state != Handoff.DONE else ""
        yield "handoff", escape(f"{task.handoff_state} by {task.handoff_owner}{until}")
    yield "history", escape(f"thunderagent streams explain {task.task_id}")


def _allowed(task: Task) -> str:
    return "the job's" if task.max_retry is None else str(task.max_retry)


def doubts(store: TaskStore, task: Task) -> list[str]:
    """Reasons why no agent may take a new task of a job that was given by name.

    Empty when an agent can, when none is alive, and when the caller may not list the agents.
    """
    if task.status not in (Status.PENDING, Status.BLOCKED):
        return []
    try:
        agents = store.agents(most=READ)
    except StoreError:
        return []
    if not agents or len(agents) >= READ or not all(_jobs(agent) for agent in agents):
        return []
    able = [agent for agent in agents if task.job_value in _jobs(agent)]
    queues = {queue for agent in able for queue in agent.info["queues"]}
    if task.queue in queues:
        return []
    if able:
        options = " or ".join(f"--queue {queue}" for queue in sorted(queues))
        return [
            f"no live agent that has the job {task.job_value!r} serves the queue {task.queue}: "
            f"give {options}, or --jobs PACKAGE, which knows the queue of each job"
        ]
    known = {name for agent in agents for name in _jobs(agent)}
    others = sorted(name for name in known if plain_job(name) == task.job)
    hint = f"; they have {' and '.join(map(repr, others))}" if others else meant(task.job, map(plain_job, known))
    end = "" if hint.endswith("?") else "."
    return [f"no live agent has the job {task.job_value!r}{hint}{end} It waits in the queue {task.queue}"]


def _jobs(agent: AgentInfo) -> tuple[str, ...]:
    jobs = agent.info.get("jobs")
    return tuple(map(str, jobs)) if isinstance(jobs, (list, tuple)) else ()
