"""The command line `thunderagent`.

Exit codes: 0 done, 1 refused (a state that does not permit it, a task that failed), 2 wrong input or configuration,
3 the store cannot be used.
"""

from __future__ import annotations

from typing import Annotated

import typer

from thunderagent.cli import (
    agents,
    canary,
    doctor,
    engine,
    explain,
    fleet,
    health,
    iam,
    metrics,
    pauses,
    regions,
    schedules,
    streams,
    tasks,
    top,
    wsapi,
)
from thunderagent.cli.examples import with_examples
from thunderagent.cli.output import out
from thunderagent.model.version import __version__

app = typer.Typer(
    name="thunderagent",
    help="A task-queue agent on Amazon DynamoDB, or on one SQLite file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(fleet.run)
app.command()(tasks.enqueue)
app.command("list")(tasks.list_)
app.command()(tasks.show)
app.command("explain")(explain.explain_)
app.command()(tasks.retry)
app.command()(tasks.cancel)
app.command()(tasks.purge)
app.command()(pauses.pause)
app.command()(pauses.resume)
app.command()(pauses.pauses)
app.command()(fleet.stats)
app.command()(health.health)
app.command()(top.top)
app.command()(doctor.doctor)
app.command()(canary.canary)
app.command()(metrics.metrics)
app.command()(metrics.dashboard)
app.command()(iam.iam)
app.command()(engine.local)
app.add_typer(agents.agents_app, name="agents")
app.add_typer(streams.streams_app, name="streams")
app.add_typer(schedules.schedules_app, name="schedule")
app.add_typer(regions.regions_app, name="region")
app.add_typer(engine.table_app, name="table")
app.add_typer(wsapi.wsapi_app, name="wsapi")


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"thunderagent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """A task-queue agent on Amazon DynamoDB, or on one SQLite file."""


with_examples(app)


def main() -> None:
    """The entry point."""
    app()
