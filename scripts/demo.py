"""The demo that `scripts/demo` runs: two agents under supervisor, fourteen tasks with dependencies, and a stream."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack

from demonstration.reports import check, enqueue, follow
from demonstration.stage import ROOT, DemoFailed, agents, await_agents, console, open_demo_store, tell_logs
from demonstration.takeover import show_takeover
from rich.markup import escape

from thunderagent.client import Client
from thunderagent.model.errors import ThunderAgentError
from thunderagent.settings import PREFIX


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
            console.print("[bold]Tasks with dependencies[/bold]")
            tasks = follow(client, enqueue(client, folder), supervisor)
            check(tasks)
            console.print("\n[bold]A stream that outlives its agent[/bold]")
            stream = show_takeover(client, supervisor, folder, logs)
    except (DemoFailed, ThunderAgentError) as problem:
        console.print(f"[red]The demo failed:[/red] {escape(str(problem))}")
        tell_logs(logs)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 128 + signal.SIGINT
    console.print(
        f"\n[green]All {len(tasks)} tasks succeeded.[/green] Open the summary in a browser:\n"
        f"{escape(tasks[-1].result['path'])}\n"
        f"\n[green]The stream moved to another agent {stream.takeover_s:.1f} s after kill -9:[/green] "
        f"{stream.ticks} ticks, {stream.first} to {stream.last}, "
        f"gaps {stream.gaps}, duplicates {stream.duplicates}.\n{escape(str(stream.folder))}",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
