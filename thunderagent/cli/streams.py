"""Commands on streams: list, stop, start, explain."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

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
    link_data,
    make_table,
    moment,
    notes,
    opened,
    out,
    tell,
)
from thunderagent.cli.stream_story import (
    at_text,
    begin_of,
    cut,
    now_of,
    short,
    show_gaps,
    show_head,
    show_runs,
    since_of,
    summed,
)
from thunderagent.client import Client
from thunderagent.model.errors import ConfigurationError, NotAllowed, TaskNotFound, WaitTimeout
from thunderagent.model.task import STREAM, Candidate, Desired, Status, Task
from thunderagent.ops.waiting import link_text, on_the_clock
from thunderagent.streams.journal import read_links

streams_app = typer.Typer(help="See, stop and start streams, and ask why they did what they did.", no_args_is_help=True)

ORDER: Final = (Status.RUNNING, Status.PENDING, Status.BLOCKED, Status.FAILED, Status.DONE, Status.SUCCESS)
"""Running streams first; SUCCESS last, as a table may hold very many such tasks."""

RUNS: Final = 5
MOST_RUNS: Final = 100
WIDE: Final = 120

StreamsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the streams.")]


@streams_app.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="Only this status, such as running.", show_default=False)] = None,
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Most streams.")] = 50,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List streams: running, then waiting, then ended; DONE means closed on purpose.

    With very many ended tasks, --queue or --status makes it quick.
    """
    with errors(), opened(store) as client:
        wanted = (Status(choice("--status", status.upper(), tuple(Status))),) if status else ORDER
        found = list(itertools.islice(_streams(client, wanted, queue), limit))
        links = read_links(client.store, found)
        if as_json:
            tell([{**as_dict(task), **link_data(links.get(task.task_id))} for task in found], True)
            return
        if not found:
            out.print("no streams")
            return
        wide, now = out.width >= WIDE, client.store.clock.now()
        titles = ["stream", "status", *(("job",) if wide else ()), "cursor"]
        titles += ["since", "lost", "retries", "now"] if wide else ["now"]
        rows = []
        for task in found:
            row = [task.task_id, str(task.status), *((task.job_value,) if wide else ())]
            row.append(short(cursor_text(task.last_seq), 40 if wide else 20))
            if wide:
                row += [moment(since_of(task)), str(task.crash_count), str(task.retry_count)]
            parts = [now_of(on_the_clock(client.store, task), now)]
            if (link := links.get(task.task_id)) is not None:
                parts.insert(0, link_text(link, now))
            rows.append([*row, "; ".join(parts)])
        widths = [
            max(len(title), *map(len, column)) for title, column in zip(titles, zip(*rows, strict=True), strict=True)
        ]
        room = max(12, out.width - sum(widths[:-1]) - 2 * len(titles))
        table = make_table(*titles, ids=[task.task_id for task in found])
        for task, (_, _, *middle, what) in zip(found, rows, strict=True):
            table.add_row(escape(task.task_id), colour(task.status), *map(escape, middle), escape(short(what, room)))
        out.print(table)


@streams_app.command()
def stop(
    ids: StreamsArgument,
    wait_s: Annotated[
        float | None, typer.Option("--wait", min=0.0, metavar="SECONDS", help="Wait until they have stopped.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop streams: each saves its cursor and is DONE, closed on purpose, until it is started again."""
    with errors(), opened(store) as client:
        each = _Each(as_json)
        asked: list[str] = []
        for name in dict.fromkeys(ids):
            with each.of(name):
                before, after = client.get(name), client.streams.stop(name)
                each.tell(after, _stopping(client, before, after))
                if after.status is Status.RUNNING:
                    asked.append(name)
        until = time.monotonic() + (wait_s or 0.0)
        for name in asked if wait_s is not None else ():
            with each.of(name):
                task = client.wait(name, timeout_s=max(0.0, until - time.monotonic()))
                each.tell(task, f"is {_end(task)}")
                if task.status is not Status.DONE:
                    raise NotAllowed(f"the stream {name!r} was not stopped: it has ended as {task.status}")
        each.end()


@streams_app.command()
def start(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of the streams.")] = None,
    all_failed: Annotated[bool, typer.Option("--all-failed", help="All FAILED streams, instead of ids.")] = False,
    queue: Annotated[str | None, typer.Option("--queue", "-q", help="With --all-failed: only this queue.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start stopped or FAILED streams at their cursors.

    If an agent is stopping one, the command waits at most 30 seconds for that.
    """
    with errors(), opened(store) as client:
        if bool(ids) == all_failed or (queue is not None and not all_failed):
            raise ConfigurationError("give the ids of streams, or --all-failed, to which --queue belongs")
        each = _Each(as_json)
        if all_failed:
            ids = [task.task_id for task in _streams(client, (Status.FAILED,), queue)]
            if not ids and not as_json:
                out.print("no stream is FAILED")
        for name in dict.fromkeys(ids or ()):
            with each.of(name):
                before = client.get(name)
                if before.status is Status.RUNNING and before.desired_state == Desired.STOPPED:
                    notes.print(f"waiting for {name}: {before.lease_owner} is stopping it", soft_wrap=True)
                after = client.streams.start(name)
                if after.status is Status.SUCCESS:
                    raise NotAllowed(f"the stream {name!r} has ended by itself: enqueue it again")
                each.tell(after, _starting(before, after))
        each.end()


@streams_app.command()
def explain(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the stream.")],
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RUNS,
            help=f"Last runs to show: {RUNS}, or {MOST_RUNS} with --gaps or --since.",
            show_default=False,
        ),
    ] = None,
    gaps: Annotated[bool, typer.Option("--gaps", help="Only missed messages, with a sum.")] = False,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only from this time on: 03:12, or 2026-11-29T03:12.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the runs of a stream: why it connected again, and what it missed. Times are local."""
    with errors(), opened(store) as client:
        task, now = client.get(task_id), client.store.clock.now()
        if not task.is_stream:
            hint = "" if task.fence else "; one that was enqueued by name is known as a stream once an agent has it"
            raise NotAllowed(f"the task {task_id!r} is no stream{hint}: see `thunderagent show {task_id}`")
        begin = None if since is None else begin_of(since, now)
        number = runs or (MOST_RUNS if gaps or since else RUNS)
        found = client.streams.runs(task_id, number=number)
        shown = [run for run in (cut(run, begin) for run in found) if run.gaps or (run.moves and not gaps)]
        if as_json:
            missed = asdict(summed([gap for run in shown for gap in run.gaps]))
            tell({"task": as_dict(task), "runs": [asdict(run) for run in shown], "missed": missed}, True)
            return
        show_head(on_the_clock(client.store, task), now, next((run for run in found if run.fence == task.fence), None))
        if gaps:
            show_gaps(shown)
            return
        if not task.fence:
            out.print("\nIt has not run yet.")
        elif found and not shown:
            out.print(f"\nNothing happened since {at_text(begin)}.")
        first = max(1, task.fence - number + 1)
        if first > 1 and begin is None:
            out.print(f"\n[dim]{first - 1} earlier runs: --runs shows up to {MOST_RUNS}[/dim]")
        show_runs(task, shown, {run.fence for run in found}, first if begin is None else task.fence)


# The list


def _streams(client: Client, wanted: Sequence[Status], queue: str | None) -> Iterator[Task]:
    """Streams by status, newest first. The index marks streams: no other task is read."""
    lanes = [lane for lane in client.store.engine.lanes() if queue in (None, lane.queue)]
    for status in wanted:
        merged = heapq.merge(
            *(_entries(client, lane.value(status)) for lane in lanes), key=lambda one: one.created_at, reverse=True
        )
        while batch := list(itertools.islice(merged, 100)):
            tasks = client.store.get(entry.task_id for entry in batch)
            yield from (
                tasks[entry.task_id]
                for entry in batch
                if entry.task_id in tasks and tasks[entry.task_id].status is status
            )


def _entries(client: Client, status_value: str) -> Iterator[Candidate]:
    after = None
    while True:
        page = client.store.engine.page(status_value, limit=1000, after=after, newest_first=True)
        yield from (entry for entry in page.entries if entry.kind == STREAM)
        after = page.after
        if after is None:
            return


# Several ids


class _Each:
    """Outcomes of several streams: the command goes on when one is refused."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._told: dict[str, dict[str, Any]] = {}
        self._refused = False

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (NotAllowed, TaskNotFound, WaitTimeout) as error:
            self._refused = True
            self._told.setdefault(name, {"taskId": name})["refused"] = str(error)
            notes.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)

    def tell(self, task: Task, text: str) -> None:
        self._told[task.task_id] = as_dict(task)
        if not self._as_json:
            out.print(escape(f"{task.task_id} {text}"), soft_wrap=True)

    def end(self) -> None:
        if self._as_json:
            tell(list(self._told.values()), True)
        if self._refused:
            raise typer.Exit(REFUSED)


def _stopping(client: Client, before: Task, after: Task) -> str:
    if after.status is not Status.RUNNING:
        already = "already " if before.status is Status.DONE else ""
        return f"is {already}{_end(after)}"
    again = " (it was asked before)" if before.desired_state == Desired.STOPPED else ""
    if after.lock_time is not None and after.lock_time < client.store.clock.leases.now():
        return f"stops when another agent has taken it over: the lease of {after.lease_owner} is over{again}"
    # The row does not hold the interval of the heartbeats; three fit into every lease.
    within = f", within {(after.lease_sec or 0.0) / 3:.0f} s" if after.lease_sec else ""
    return f"stops with the next heartbeat of {after.lease_owner}{within}{again}"


def _starting(before: Task, after: Task) -> str:
    cursor = cursor_text(after.last_seq)
    where = f"goes on behind {cursor}" if cursor else "begins at its beginning"
    match after.status:
        case Status.RUNNING:
            return f"runs already, held by {after.lease_owner}"
        case Status.BLOCKED:
            return f"waits for {', '.join(sorted(after.waiting_for))}; then it {where}"
        case Status.PENDING if before.status is Status.PENDING:
            return f"is in its queue already and {where}"
        case _:
            return f"is in its queue and {where}"


def _end(task: Task) -> str:
    cursor = cursor_text(task.last_seq)
    what = task.done_reason or str(task.status) if task.status is Status.DONE else str(task.status)
    return f"{what}, its cursor is {cursor}" if cursor else what
