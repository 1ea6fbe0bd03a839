"""The command line of `scripts/bench`."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from benchmarks.harness import FULL, QUICK, BenchFailed, Plan, Section, opened, table
from benchmarks.latency import measure_latency
from benchmarks.reconnects import measure_reconnects
from benchmarks.streams import PHASES, measure_streams
from benchmarks.throughput import measure_throughput
from benchmarks.units import measure_units
from thunderagent.model.errors import ThunderAgentError
from thunderagent.model.names import meant

PLACED: Final = {"throughput": measure_throughput, "latency": measure_latency, "streams": measure_streams}
"""Measurements that need a store."""
NAMES: Final = (*PLACED, "units", "reconnects")
DEFAULT: Final = ("throughput", "latency", "units", "reconnects")
LOOPS: Final = ("asyncio", "uvloop")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
notes = Console(stderr=True, highlight=False)


def _option(panel: str, text: str, default: object, **more: Any) -> Any:
    """An option whose default depends on `--quick`."""
    text = f"{text} (default: {default})."
    return typer.Option(help=text, rich_help_panel=panel, show_default=False, **{"metavar": "N", **more})


_tasks = partial(_option, "Throughput and latency")
_streams = partial(_option, "Streams")
_clients = partial(_option, "Reconnects")


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="What to measure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small numbers, to see that everything works.")] = False,
    store: Annotated[
        str, typer.Option(metavar="STORE", help="sqlite, ministack, or http://127.0.0.1:PORT of a local DynamoDB.")
    ] = FULL.store,
    naive: Annotated[bool, typer.Option(help="Measure the naive loops too.")] = True,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
    tasks: Annotated[int | None, _tasks("Tasks that are drained", FULL.tasks, min=20)] = None,
    samples: Annotated[int | None, _tasks("Tasks of the latency, each way", FULL.samples, min=2)] = None,
    agents: Annotated[list[int] | None, _tasks("Agents at once; repeatable", 1, min=1, max=32)] = None,
    connections: Annotated[
        list[int] | None, _streams("Connections of one process; repeatable", 700, min=1, max=20_000)
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Measure with TLS too.", rich_help_panel="Streams")] = False,
    loop: Annotated[list[str] | None, _streams("asyncio or uvloop; repeatable", "asyncio", metavar="LOOP")] = None,
    only: Annotated[str, _streams("Phases, with commas between", ",".join(PHASES), metavar="PHASES")] = ",".join(
        PHASES
    ),
    clients: Annotated[list[int] | None, _clients("Clients that come back; repeatable", 30_000, min=1)] = None,
) -> None:
    """Measure ThunderAgent on this machine, beside what it is compared with.

    * **throughput**: tasks a second, CPU, memory and requests of agents, beside a naive loop
    * **latency**: from an enqueue to its handler, with the doorbell and with polls
    * **streams**: memory, CPU, reconnects and takeovers of WebSocket streams, beside a naive loop
    * **units**: write and read units of a task and of a stream, by the rules of DynamoDB
    * **reconnects**: clients of the WebSocket API that lose their region at one moment, a simulation

    Without a name: all but streams, which takes nine minutes. Rates and times depend on this machine and on what else
    it does; ratios, counts and units travel. Exit codes: 0 measured, though a goal may be missed; 1 something could
    not be measured; 2 wrong options.

    Example: scripts/bench throughput latency --store ministack --tasks 800 --agents 1 --agents 4 --json bench.json
    """
    wanted = _known(names or DEFAULT, NAMES, "NAME")
    changes: dict[str, Any] = {
        "store": store,
        "naive": naive,
        "tasks": tasks,
        "samples": samples,
        "agents": tuple(agents or ()),
        "connections": tuple(connections or ()),
        "tls": (False, True) if tls else (False,),
        "loops": _known(loop or LOOPS[:1], LOOPS, "--loop"),
        "phases": _known([name.strip() for name in only.split(",")], PHASES, "--only"),
        "clients": tuple(clients or ()),
    }
    plan = replace(QUICK if quick else FULL, **{name: one for name, one in changes.items() if one not in (None, ())})
    reports: dict[str, list[Section]] = {}
    try:
        with ExitStack() as stack:
            if PLACED.keys() & set(wanted):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="thunderagent-bench-"))
                place = stack.enter_context(opened(plan.store, Path(folder)))
            for name in wanted:
                if name in PLACED:
                    reports[name] = PLACED[name](place, plan, _progress)
                else:
                    reports[name] = measure_units() if name == "units" else measure_reconnects(plan)
                console.print(table(name, reports[name]))
    except (BenchFailed, ThunderAgentError) as problem:
        notes.print(f"[red]{type(problem).__name__}:[/red]", end=" ")
        notes.print(str(problem), markup=False)
        raise typer.Exit(1) from None
    if file:
        file.write_text(json.dumps(_data(plan, reports), indent=1) + "\n", encoding="utf-8")


def _progress(text: str) -> None:
    notes.print(f"{text}, load {os.getloadavg()[0]:.2f} …", style="dim", markup=False)


def _data(plan: Plan, reports: Mapping[str, Sequence[Section]]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
        "packages": {name: version(name) for name in ("websockets", "uvloop") if find_spec(name)},
        "plan": asdict(plan),
        "reports": {
            name: {title: {line.name: line.data() for line in lines} for title, lines in sections}
            for name, sections in reports.items()
        },
    }


def _known(given: Sequence[str], known: Sequence[str], option: str) -> tuple[str, ...]:
    for name in given:
        if name not in known:
            text = f"{name!r} is not known{meant(name, known) or ';'} Known: {', '.join(known)}"
            raise typer.BadParameter(text, param_hint=option)
    return tuple(dict.fromkeys(given))


if __name__ == "__main__":
    app(prog_name="scripts/bench")
