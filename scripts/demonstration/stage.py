"""Where the demo plays: a store, agents under supervisor, their logs, and a terminal to tell it on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from thunderagent.client import Client
from thunderagent.ops import local_engine as local
from thunderagent.settings import PREFIX
from thunderagent.stores import open_engine
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.dynamo.table import create_table

ROOT: Final = Path(__file__).resolve().parents[2]
AGENTS: Final = 2
START_S: Final = 30.0
STOP_S: Final = 60.0
"""Longer than `stopwaitsecs` in systemd/supervisord.conf."""

SETTINGS: Final = {"SLOTS": "1", "POLL_MIN_S": "0.1", "POLL_MAX_S": "0.2"}
"""One slot and short pauses, so that both agents get a share of so little work."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class DemoFailed(Exception):
    """The demo did not do what it shows."""


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
        end(supervisor, STOP_S)
        shutil.rmtree(run)


def await_agents(client: Client, supervisor: subprocess.Popen[bytes]) -> None:
    """Wait until all agents have registered, or one would have done all the work before the other is up."""
    until = time.monotonic() + START_S
    while len(client.agents.list()) < AGENTS:
        if time.monotonic() > until or supervisor.poll() is not None:
            raise DemoFailed(f"the agents did not start within {START_S:g} s")
        time.sleep(0.1)


@contextmanager
def script(name: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script of this folder in a process of its own, until the end of the block; it ends on SIGTERM."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(name)), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, STOP_S)


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Ask a process of ours to end, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        console.print(f"[red]{escape(str(process.args))} did not stop in {within_s:g} s and is killed[/red]")
        process.kill()
        process.wait()


def tell_logs(logs: Path) -> None:
    """The ends of all logs; supervisor's own is the same as what it printed."""
    for path in sorted(path for path in logs.iterdir() if path.name != "supervisord.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        console.print(f"\n[bold]{escape(str(path))}[/bold]")
        console.print(escape("\n".join(lines[-20:])), soft_wrap=True)
