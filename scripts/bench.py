"""Measures ThunderAgent beside the naive loop: `scripts/bench agent --help`."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.fleet import BenchFailed
from benchmarks.measure import measure, measure_naive
from benchmarks.measurement import Load
from benchmarks.places import opened
from benchmarks.report import Pair, as_json, tell
from rich.console import Console

from thunderagent.errors import ThunderAgentError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
notes = Console(stderr=True, highlight=False)


@app.callback()
def main() -> None:
    """Measures ThunderAgent on this machine, beside what it is compared with."""


@app.command()
def agent(
    store: Annotated[str, typer.Option(help="sqlite, ministack, dynalite, or the URL of a store.")] = "sqlite",
    tasks: Annotated[int, typer.Option(min=20, max=1_000_000, help="Tasks for each number of agents.")] = 20_000,
    agents: Annotated[
        list[str] | None, typer.Option(metavar="N|A..B", help="Numbers of agents; may be given several times.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1000, help="Slots of each agent.")] = 10,
    page: Annotated[int, typer.Option(min=1, max=1000, help="Index entries that one poll reads.")] = 50,
    latency: Annotated[int, typer.Option(min=0, max=1000, help="Tasks for the idle latency; 0: none.")] = 100,
    poll: Annotated[float, typer.Option(min=0.01, max=10.0, help="Poll interval of idle agents, seconds.")] = 1.0,
    log_level: Annotated[str, typer.Option(help="Log level of the agents, whose lines go to a file.")] = "INFO",
    deadline: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Longest wait for one drain, seconds.")] = 300.0,
    naive: Annotated[bool, typer.Option(help="Measure the naive loop too.")] = True,
    dynalite: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with dynalite in node_modules.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Measure agents that run tasks of a job that does nothing.

    The rates depend on this machine and on what else it does; the ratios to the naive loop travel.
    """
    load = Load(
        tasks=tasks,
        slots=slots,
        page=page,
        latency=latency,
        poll_s=poll,
        log_level=log_level,
        deadline_s=deadline,
        naive=naive,
    )
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="thunderagent-bench-") as folder:
        try:
            with opened(store, Path(folder), dynalite) as place:
                for number in _numbers(agents or ["1"]):
                    notes.print(f"{number} agent(s), load {os.getloadavg()[0]:.2f} …", style="dim")
                    ours = measure(place, number, load)
                    pairs.append(Pair(ours, measure_naive(place, number, load) if naive and place.naive else None))
        except (BenchFailed, ThunderAgentError) as problem:
            notes.print(f"[red]{type(problem).__name__}:[/red]", end=" ")
            notes.print(str(problem), markup=False)
            raise typer.Exit(1) from None
    tell(pairs, load, store, console.print)
    if json_file:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        }
        json_file.write_text(json.dumps(as_json(pairs, load, store, machine), indent=1), encoding="utf-8")


def _numbers(given: list[str]) -> list[int]:
    """Numbers of agents from texts such as `2` and `1..4`."""
    numbers: list[int] = []
    for text in given:
        first, _, last = text.partition("..")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise typer.BadParameter(f"{text!r} is neither a number nor a range such as 1..4", param_hint="--agents")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or not all(1 <= number <= 32 for number in numbers):
        raise typer.BadParameter("1 to 32 agents can be measured", param_hint="--agents")
    return numbers


if __name__ == "__main__":
    app()
