"""The first part of the demo: fourteen tasks with dependencies on two agents."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from demonstration.stage import DemoFailed, console
from jobs.import_weather import ImportPayload, import_weather
from jobs.report import ReportPayload, build_report
from jobs.source import sample_file
from jobs.summary import SummaryPayload, build_summary
from thunderagent.client import Client
from thunderagent.model.task import Status, Task

YEAR: Final = 2012
LIMIT_S: Final = 80.0
COLOURS: Final = {Status.SUCCESS: "green", Status.RUNNING: "cyan", Status.FAILED: "red", Status.DONE: "yellow"}
FIRST_POLL_S: Final = 3.0
"""An agent polls for the first time up to so long after its start."""


def enqueue(client: Client, folder: Path) -> list[str]:
    """Import, then a report for each month, then a summary of them; the ids of the tasks."""
    weather = client.enqueue(
        import_weather,
        ImportPayload(source=str(sample_file()), folder=folder),
        task_id="import-weather",
        delay_s=FIRST_POLL_S,
    )
    reports = [
        client.enqueue(
            build_report,
            ReportPayload(month=f"{YEAR}-{month:02}", folder=folder),
            task_id=f"report-{YEAR}-{month:02}",
            depends_on=[weather],
        )
        for month in range(1, 13)
    ]
    summary = client.enqueue(
        build_summary,
        SummaryPayload(title=f"Seattle's weather in {YEAR}", folder=folder),
        task_id=f"summary-{YEAR}",
        depends_on=reports,
    )
    return [task.task_id for task in (weather, *reports, summary)]


def follow(client: Client, ids: Sequence[str], supervisor: subprocess.Popen[bytes]) -> list[Task]:
    """Show the tasks until all have ended."""
    began, seen = time.monotonic(), dict[str, str]()
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while True:
            tasks = [client.get(task_id) for task_id in ids]
            if console.is_terminal:
                live.update(table(tasks))
            else:
                tell_changes(tasks, seen, time.monotonic() - began, live.console.print)
            if all(task.status.is_terminal for task in tasks):
                break
            if supervisor.poll() is not None:
                raise DemoFailed(f"supervisor ended with exit code {supervisor.returncode}")
            if time.monotonic() - began > LIMIT_S:
                raise DemoFailed(f"the tasks did not end within {LIMIT_S:g} s")
            time.sleep(0.2)
    console.print(table(tasks))
    return tasks


def tell_changes(tasks: Sequence[Task], seen: dict[str, str], at: float, tell: Callable[[str], None]) -> None:
    """A line for each task whose status is another than before."""
    for task in tasks:
        if seen.get(task.task_id) != task.status:
            seen[task.task_id] = task.status
            by = f" by {task.last_agent}" if task.status is not Status.PENDING and task.last_agent else ""
            tell(escape(f"{at:5.1f} s  {task.task_id:<16}{task.status}{by}"))


def table(tasks: Sequence[Task]) -> Table:
    """The tasks as a table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "job", "status", "agent"):
        shown.add_column(name)
    for name in ("attempts", "seconds"):
        shown.add_column(name, justify="right")
    for task in tasks:
        colour = COLOURS.get(task.status, "dim")
        begun = task.started_at is not None
        shown.add_row(
            escape(task.task_id),
            task.job,
            f"[{colour}]{task.status}[/{colour}]",
            escape(task.last_agent or ""),
            str(task.attempt) if begun else "",
            f"{(task.finished_at or time.time()) - (task.started_at or 0.0):.2f}" if begun else "",
        )
    return shown


def check(tasks: Sequence[Task]) -> None:
    """Believe nothing: every task is SUCCESS, and every file that a result names is there.

    Raises:
        DemoFailed: something is not as it should be.
    """
    for task in tasks:
        if task.status is not Status.SUCCESS:
            raise DemoFailed(f"{task.task_id} is {task.status}: {task.error or task.done_reason}")
    results: list[Mapping[str, Any]] = [task.result for task in tasks[1:]]
    for result in results:
        if not Path(result["path"]).is_file():
            raise DemoFailed(f"the file {result['path']} is missing")
    if results[-1]["days"] != 366:
        raise DemoFailed(f"the summary is over {results[-1]['days']} days and not over 366")
