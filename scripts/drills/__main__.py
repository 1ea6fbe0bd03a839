"""The command line of `scripts/drill`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from drills.crowd import CrowdFailed
from drills.findings import MACHINE_S, Found, Strain
from drills.ledger import silently_twice
from drills.pace import MOST, Pace, hasten
from drills.regionloss import DrillFailed, RegionLoss
from drills.world import PRIMARY
from thunderagent.model.errors import ThunderAgentError
from thunderagent.settings import PREFIX

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
LEASE_S: Final = 30.0
"""Length of a grant."""
STRAINED: Final = 0.25
"""A thread that waited for a core for so much of a grant's length may have lost the grant by that alone."""


class Without(StrEnum):
    """A mechanism that is left out."""

    GATE = "gate"
    RESUBMIT = "resubmit"


@app.callback()
def drill() -> None:
    """Drills for bad days, on this machine alone: nothing is sent to AWS, and whatever is started is ended."""


@app.command("region-loss")
def region_loss(
    scale: Annotated[float, typer.Option(help="Time runs so many times faster: all lengths are divided by it.")] = 20.0,
    clients: Annotated[int, typer.Option(min=0, max=2000, help="Clients of the WebSocket API.")] = 200,
    streams: Annotated[int, typer.Option(min=1, max=500, help="Streams that agents hold.")] = 50,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was found here.")] = None,
    without: Annotated[
        Without | None,
        typer.Option(
            help="Leave a mechanism out and see what it is for: the gate (the lost region's agents do not stop), "
            "or that clients send again what the other region lost."
        ),
    ] = None,
    no_failback: Annotated[bool, typer.Option("--no-failback", help="End when the other region works.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder of the drill, and say where it is.")] = False,
) -> None:
    """Lose a region, work in the other, and go back; tell what happened when, and what was promised.

    Two regions with agents, a WebSocket API and tables that replicate with half a second of lag, an arbiter in a third,
    clients, streams, a steady load of orders, and a stand-in for DNS. The primary is cut off while its agents go on.
    Times are told as they would be with the defaults, and as they were here. Exit codes: 0 all goals are reached,
    1 one is not, or the drill could not be played, 2 wrong options.

    Example: scripts/drill region-loss --scale 10 --json drill.json
    """
    if not 1.0 <= scale <= MOST:
        raise typer.BadParameter(f"use 1 to {MOST:g}; beyond it two cores cannot keep up", param_hint="--scale")
    if json_file is not None and (json_file.is_dir() or not os.access(json_file.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"{str(json_file)!r} cannot be written", param_hint="--json")
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # it is about the defaults
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, soft_wrap=True)
    pace, folder = Pace(scale), Path(tempfile.mkdtemp(prefix="thunderagent-drill-"))
    hasten(pace)
    strain = Strain()
    strain.start()
    begun = time.monotonic()
    try:
        console.print(
            "The loss of a region, " + (f"{scale:g} times faster than with" if scale > 1 else "with") + " the defaults"
        )
        played = RegionLoss(
            pace=pace,
            clients=clients,
            streams=streams,
            folder=folder,
            console=console,
            without=without and str(without),
            goes_back=not no_failback,
        )
        found = played.play()
    except (DrillFailed, CrowdFailed, ThunderAgentError, TimeoutError) as problem:
        console.print(f"[red]The drill could not be played:[/red] {escape(str(problem))}")
        if json_file is not None:
            _write(json_file, {"ok": False, "problem": str(problem), **_strain(strain, pace)})
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        strain.close()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    told = _told(found, strain, time.monotonic() - begun)
    if json_file is not None:
        _write(json_file, told)
    if keep:
        (folder / "found.json").write_text(json.dumps({**told, "report": found.report}), encoding="utf-8")
        console.print(f"\nfolder  {escape(str(folder))}")
    _show(console, found, told)
    raise typer.Exit(0 if told["ok"] else 1)


def _told(found: Found, strain: Strain, took_s: float) -> dict[str, Any]:
    goals = found.goals()
    timelines = [one for one in (found.loss, found.back) if one is not None]
    return {
        "ok": all(goal.ok for goal in goals),
        "scale": found.pace.scale,
        "clients": found.clients,
        "streams": found.streams,
        "took_s": round(took_s, 1),
        **_strain(strain, found.pace),
        "goals": {goal.name: {"ok": goal.ok, "told": goal.told} for goal in goals},
        "timelines": {one.title: one.as_json() for one in timelines},
        "changes": {
            "acknowledged": found.changes,
            "sent_again": found.again,
            "checked": found.checked,
            "lost": found.lost_changes,
            "collided": found.collided,
        },
        "late_writes": {"landed": found.late, "reasserted": found.reasserted, "overwritten": found.overwritten},
        "epoch": found.epoch,
        "silently_twice": {
            name: [asdict(run) for run in found.runs if run.task_id == name]
            for name in silently_twice(list(found.runs))[:20]
        },
    }


def _strain(strain: Strain, pace: Pace) -> dict[str, Any]:
    return {
        "is_strained": strain.worst_s > pace.s(LEASE_S) * STRAINED,
        "worst_stall_s": round(strain.worst_s, 3),
    }


def _write(path: Path, told: dict[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _show(console: Console, found: Found, told: dict[str, Any]) -> None:
    for one in (found.loss, found.back):
        if one is not None:
            console.print()
            console.print(one.table())
    changes, late = told["changes"], told["late_writes"]
    console.print(
        f"\n{changes['acknowledged']} changes of state were acknowledged; clients sent {changes['sent_again']} again "
        f"that the other region did not have, and {changes['checked']} to be sure. {late['overwritten']} writes of "
        f"{PRIMARY} were overwritten by later ones, {late['reasserted']} late ones were written over.\n"
    )
    for name, goal in told["goals"].items():
        console.print(
            f"{'[green]reached[/green]' if goal['ok'] else '[red]MISSED [/red]'}  {name}: {escape(goal['told'])}"
        )
    if told["is_strained"]:
        console.print(
            f"[yellow]This machine stood still for {told['worst_stall_s']:.2f} s: that alone can lose a grant at this "
            "scale. Use a smaller --scale.[/yellow]"
        )
    console.print(
        f"\n{told['took_s']:.0f} s here; limits have {MACHINE_S:g} real seconds beside for the machine.\n"
        + (
            "[bold green]All goals are reached.[/bold green]"
            if told["ok"]
            else "[bold red]Not all goals are reached.[/bold red]"
        )
    )


if __name__ == "__main__":
    app(prog_name="scripts/drill")
