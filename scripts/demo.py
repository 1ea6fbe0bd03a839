"""The demo that `scripts/demo` runs: two agents under supervisor, fourteen tasks with dependencies, one summary."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from jobs.import_weather import ImportPayload, import_weather
from jobs.report import ReportPayload, build_report
from jobs.source import sample_file
from jobs.summary import SummaryPayload, build_summary
from thunderagent import local
from thunderagent.client import Client
from thunderagent.errors import ThunderAgentError
from thunderagent.settings import PREFIX
from thunderagent.stores import open_engine
from thunderagent.stores.dynamo import DynamoEngine
from thunderagent.stores.table import create_table
from thunderagent.task import Status, Task

ROOT: Final = Path(__file__).resolve().parents[1]
YEAR: Final = 2012
AGENTS: Final = 2
START_S: Final = 30.0
LIMIT_S: Final = 80.0
STOP_S: Final = 60.0
"""Longer than `stopwaitsecs` in systemd/supervisord.conf."""
COLOURS: Final = {Status.SUCCESS: "green", Status.RUNNING: "cyan", Status.FAILED: "red", Status.DONE: "yellow"}

SETTINGS: Final = {"SLOTS": "1", "POLL_MIN_S": "0.1", "POLL_MAX_S": "0.2"}
"""One slot and short pauses, so that both agents get a share of so little work."""
FIRST_POLL_S: Final = 3.0
"""An agent polls for the first time up to so long after its start."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class DemoFailed(Exception):
    """The demo did not do what it shows."""


def main(store: str) -> int:
    """Run the demo on a store, `sqlite` or `dynamodb-local`; 0 if all went well."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # it is about the defaults, and must not touch a real table
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = ROOT / "demo-output" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    logs = folder / "logs"
    logs.mkdir(parents=True)
    try:
        with ExitStack() as started:
            url = open_demo_store(store, folder, started)
            console.print(f"store   {escape(url)}\nfolder  {escape(str(folder))}\n")
            supervisor = started.enter_context(agents(url, logs))
            client = Client.from_settings(store=url)
            started.callback(client.close)
            await_agents(client, supervisor)
            tasks = follow(client, enqueue(client, folder), supervisor)
            check(tasks)
    except (DemoFailed, ThunderAgentError) as problem:
        console.print(f"[red]The demo failed:[/red] {escape(str(problem))}")
        tell_logs(logs)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 128 + signal.SIGINT
    summary = tasks[-1].result["path"]
    console.print(
        f"\n[green]All {len(tasks)} tasks succeeded.[/green] Open the summary in a browser:\n{escape(summary)}"
    )
    return 0


def open_demo_store(store: str, folder: Path, started: ExitStack) -> str:
    """The URL of an empty store."""
    if store == "sqlite":
        return f"sqlite:///{folder / 'tasks.db'}"
    home = folder / "dynamodb"
    started.callback(local.stop, home)
    url = local.start(home).url
    engine = open_engine(url)
    assert isinstance(engine, DynamoEngine)
    create_table(engine)
    engine.close()
    return url


@contextmanager
def agents(url: str, logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Agents under supervisor with the configuration of production, until the end of the block."""
    binaries = Path(sys.executable).parent
    # Short, whatever the folder of the project is: the path of a socket has at most about a hundred characters.
    run = Path(tempfile.mkdtemp(prefix="thunderagent-"))
    environment = {
        "AGENT_HOME": str(ROOT),
        "AGENT_JOBS": "jobs",
        "AGENT_BIN": str(binaries),
        "AGENT_PROCESSES": str(AGENTS),
        "AGENT_RUN": str(run),
        "AGENT_LOGS": str(logs),
        f"{PREFIX}STORE": url,
        **{f"{PREFIX}{name}": value for name, value in SETTINGS.items()},
    }
    with (logs / "supervisord.out").open("wb") as output:
        supervisor = subprocess.Popen(
            [str(binaries / "supervisord"), "-n", "-c", str(ROOT / "systemd" / "supervisord.conf")],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C comes to us alone, and we stop things in order
        )
    try:
        yield supervisor
    finally:
        supervisor.terminate()
        try:
            supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            console.print(f"[red]supervisor (pid {supervisor.pid}) did not stop in {STOP_S:g} s and is killed[/red]")
            supervisor.kill()
            supervisor.wait()
        shutil.rmtree(run)


def await_agents(client: Client, supervisor: subprocess.Popen[bytes]) -> None:
    """Wait until all agents have registered, or one would have done all the work before the other is up."""
    until = time.monotonic() + START_S
    while len(client.agents()) < AGENTS:
        if time.monotonic() > until or supervisor.poll() is not None:
            raise DemoFailed(f"the agents did not start within {START_S:g} s")
        time.sleep(0.1)


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


def tell_logs(logs: Path) -> None:
    """The ends of all logs; supervisor's own is the same as what it printed."""
    for path in sorted(path for path in logs.iterdir() if path.name != "supervisord.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        console.print(f"\n[bold]{escape(str(path))}[/bold]")
        console.print(escape("\n".join(lines[-20:])), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
