"""Measures ThunderAgent beside what it is compared with: see `scripts/bench --help`."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.cronfree_figures import STORES, Latency
from benchmarks.cronfree_latency import measure_latency, waited
from benchmarks.measure import measure, measure_naive
from benchmarks.measurement import Load
from benchmarks.places import opened
from benchmarks.processes import BenchFailed
from benchmarks.reconnects import CLIENTS, comparison
from benchmarks.report import Pair, as_json, tell
from benchmarks.sections import goals, section_table
from benchmarks.streams_figures import PHASES, Plan
from benchmarks.streams_measure import measure_streams
from benchmarks.streams_report import as_json as streams_as_json
from benchmarks.streams_report import table
from rich.console import Console
from rich.table import Table

from thunderagent.model.errors import ThunderAgentError

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
        json_file.write_text(json.dumps(as_json(pairs, load, store, _machine()), indent=1), encoding="utf-8")


@app.command()
def streams(
    store: Annotated[str, typer.Option(help="sqlite, ministack, or the URL of a store.")] = "sqlite",
    connections: Annotated[
        list[int] | None,
        typer.Option(min=1, max=20_000, help="Connections of one process; may be given several times."),
    ] = None,
    tls: Annotated[bool, typer.Option(help="Measure with TLS too.")] = False,
    loop: Annotated[list[str] | None, typer.Option(help="asyncio or uvloop; may be given several times.")] = None,
    rounds: Annotated[int, typer.Option(min=0, max=1000, help="How often an agent gets SIGTERM.")] = 20,
    kills: Annotated[int, typer.Option(min=0, max=1000, help="How often an agent is killed; each takes a lease.")] = 5,
    number: Annotated[int, typer.Option("--streams", min=1, max=500, help="Streams of an agent that is ended.")] = 30,
    only: Annotated[str, typer.Option(help="What to measure, with commas between.")] = ",".join(PHASES),
    settle: Annotated[float, typer.Option(min=0.1, max=600.0, help="Pause before memory is read, seconds.")] = 6.0,
    idle: Annotated[float, typer.Option(min=0.5, max=600.0, help="Time of the idle CPU, seconds.")] = 20.0,
    push: Annotated[float, typer.Option(min=0.5, max=600.0, help="Time of each flood of messages, seconds.")] = 8.0,
    rate: Annotated[float, typer.Option(min=20.0, max=1e6, help="Messages a second in a flood.")] = 20_000.0,
    flap: Annotated[float, typer.Option(min=1.0, max=600.0, help="Time with a server that flaps, seconds.")] = 60.0,
    naive: Annotated[bool, typer.Option(help="Measure the naive loop too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Measure agents that hold WebSocket streams, beside `async for socket in websockets.connect(url)`.

    A feed on 127.0.0.1, the agents and the naive loop are processes of their own. Times, rates and shares depend on
    this machine and on what else it does; memory, attempts and units travel.
    """
    plan = Plan(
        connections=tuple(connections or [700]),
        tls=(False, True) if tls else (False,),
        loops=_loops(loop or ["asyncio"]),
        only=_parts(only, PHASES),
        rounds=rounds,
        kills=kills,
        streams=number,
        settle_s=settle,
        idle_s=idle,
        push_s=push,
        rate=rate,
        flap_s=flap,
        naive=naive,
    )

    with tempfile.TemporaryDirectory(prefix="thunderagent-bench-") as folder:
        try:
            with opened(store, Path(folder), None) as place:
                figures = measure_streams(place, plan, _progress)
        except (BenchFailed, ThunderAgentError) as problem:
            notes.print(f"[red]{type(problem).__name__}:[/red]", end=" ")
            notes.print(str(problem), markup=False)
            raise typer.Exit(1) from None
    console.print(table(figures, plan, store))
    if json_file:
        told = streams_as_json(figures, plan, store, _machine())
        json_file.write_text(json.dumps(told, indent=1), encoding="utf-8")


@app.command()
def latency(
    store: Annotated[list[str] | None, typer.Option(help="sqlite or ministack; both if none is named.")] = None,
    tasks: Annotated[int, typer.Option(min=2, max=100_000, help="Tasks, each way.")] = 300,
    deadline: Annotated[float, typer.Option(min=1.0, max=7200.0, help="Longest wait for one task, seconds.")] = 120.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Measure the time from an enqueue to the handler: with the doorbell, and with polls.

    The agent is a process of its own. Latencies depend on this machine and on what else it does.
    """
    figures: list[Latency] = []
    for name in _known(store or list(STORES), STORES, "--store"):
        with tempfile.TemporaryDirectory(prefix="thunderagent-bench-") as folder:
            try:
                with opened(name, Path(folder), None) as place:
                    figures += measure_latency(place, tasks, deadline, _progress)
            except (BenchFailed, ThunderAgentError) as problem:
                notes.print(f"[red]{type(problem).__name__}:[/red]", end=" ")
                notes.print(str(problem), markup=False)
                raise typer.Exit(1) from None
    sections = [("from the enqueue to the handler", [line for one in figures for line in waited(one)])]
    console.print(section_table("latency", sections))
    if json_file:
        told = {**_machine(), "latencies": [asdict(one) for one in figures], "goals": goals(sections)}
        json_file.write_text(json.dumps(told, indent=1), encoding="utf-8")


def _progress(text: str) -> None:
    notes.print(f"{text}, load {os.getloadavg()[0]:.2f} …", style="dim", markup=False)


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
        "packages": {name: version(name) for name in ("websockets", "uvloop") if find_spec(name)},
    }


@app.command()
def reconnects(
    clients: Annotated[
        list[int] | None, typer.Option(min=1, max=1_000_000, help="Clients; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Simulate clients of the WebSocket API that lose their region at one moment: 500 connects a second are taken."""
    kinds = {number: comparison(number, seed) for number in clients or [CLIENTS]}
    shown = Table("clients", "kind", "all back, s", "half, s", "attempts", "refused", "in the busiest second")
    for outcomes in kinds.values():
        for name, one in outcomes.items():
            figures = (one.clients, name, f"{one.seconds:.1f}", f"{one.half_s:.1f}", one.attempts, one.refused)
            shown.add_row(*map(str, (*figures, one.busiest)))
    console.print(shown)
    if json_file is not None:
        told = [{"kind": name, **asdict(one)} for outcomes in kinds.values() for name, one in outcomes.items()]
        json_file.write_text(json.dumps({"seed": seed, "runs": told}, indent=2) + "\n", encoding="utf-8")


def _loops(given: list[str]) -> tuple[str, ...]:
    for name in given:
        if name not in ("asyncio", "uvloop"):
            raise typer.BadParameter(f"{name!r}: use asyncio or uvloop", param_hint="--loop")
        if name == "uvloop" and not find_spec("uvloop"):
            raise typer.BadParameter("uvloop is not installed: pip install uvloop", param_hint="--loop")
    return tuple(dict.fromkeys(given))


def _parts(given: str, known: Sequence[str]) -> frozenset[str]:
    parts = [name for one in given.split(",") if (name := one.strip())]
    return frozenset(_known(parts, known, "--only"))


def _known(given: list[str], known: Sequence[str], option: str) -> tuple[str, ...]:
    if unknown := set(given) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {','.join(known)}", param_hint=option)
    if not given:
        raise typer.BadParameter(f"use one or more of {','.join(known)}", param_hint=option)
    return tuple(dict.fromkeys(given))


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
