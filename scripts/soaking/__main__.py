"""The command line of `scripts/soak`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from soaking.ledger import SHOWN
from soaking.play import Found, Plan, SoakFailed, play
from thunderagent.model.errors import ThunderAgentError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Store(StrEnum):
    """Where it is played."""

    SQLITE = "sqlite"
    MINISTACK = "ministack"


TASKS: Final = {Store.SQLITE: 200_000, Store.MINISTACK: 5_000}
KILL_EVERY_S: Final = {Store.SQLITE: 2.0, Store.MINISTACK: 10.0}


@app.command()
def soak(
    store: Annotated[
        list[Store] | None, typer.Option(help="Only here; may be given twice. Both if not given.", show_default=False)
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=100, max=2_000_000, help="Tasks; 200,000 and 5,000.", show_default=False)
    ] = None,
    agents: Annotated[int, typer.Option(min=1, max=32, help="Agents.")] = 4,
    kill_every: Annotated[
        float | None, typer.Option(min=0.2, help="Seconds between two kills; 2 and 10.", show_default=False)
    ] = None,
    loss: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of requests that are lost, late or reset (ministack).")
    ] = 0.02,
    within: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds after which it gives up.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of kills and of the network.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures and violations here.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder, and say where it is.")] = False,
) -> None:
    """Run many tasks of all kinds while agents are killed and requests fail; say whether a promise was broken.

    On a SQLite file agents are killed with SIGKILL; on ministack requests go through a network that loses, delays and
    resets some of them as well. Handlers write a ledger of their own, and the rows are read without this package.
    Only the loopback address is used. Exit codes: 0 no violation, 1 a violation or no verdict, 2 wrong options.

    Example: scripts/soak --store sqlite --tasks 20000 --json soak.json
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{str(json_file)!r} cannot be written: no such folder", param_hint="--json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, soft_wrap=True)
    told = []
    for one in store or list(Store):
        number = tasks or TASKS[one]
        plan = Plan(
            store=str(one),
            tasks=number,
            agents=agents,
            kill_every_s=kill_every or KILL_EVERY_S[one],
            loss=loss,
            within_s=within or 300.0 + number / (100 if one is Store.SQLITE else 5),
            seed=seed,
        )
        folder = Path(tempfile.mkdtemp(prefix="thunderagent-soak-"))
        console.print(f"{one}: {number:,} tasks, {agents} agents, one killed every {plan.kill_every_s:g} s")
        try:
            found = play(plan, folder / "soak", console.print)
        except (SoakFailed, ThunderAgentError) as problem:
            console.print(f"[red]no verdict:[/red] {escape(str(problem))}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            console.print("stopped")
            raise typer.Exit(128 + signal.SIGINT) from None
        finally:
            if keep:
                console.print(f"folder  {escape(str(folder))}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        _show(console, found)
        told.append(found)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(one) for one in told], indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(1 if any(one.violations for one in told) else 0)


def _show(console: Console, found: Found) -> None:
    for name, figure in found.figures.items():
        console.print(f"  {name:24} {figure:>12,}")
    for promise, number in Counter(one.promise for one in found.violations).items():
        console.print(f"[red]{number:,} x {promise}[/red]")
        for one in [one for one in found.violations if one.promise == promise][:SHOWN]:
            console.print(f"    {escape(one.task_id)}  {escape(one.text)}")
    if not found.violations:
        console.print("[green]no violation[/green]")


if __name__ == "__main__":
    app(prog_name="scripts/soak")
