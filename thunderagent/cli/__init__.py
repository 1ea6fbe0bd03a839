"""The command line `thunderagent`.

Exit codes: 0 done, 1 refused (a state that does not permit it, a task that failed), 2 wrong input or configuration,
3 the store cannot be used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from thunderagent.cli.examples import EXAMPLES, add_examples, example_text
from thunderagent.model.version import __version__

COMMANDS: Final = {
    "run": ("fleet.run", "Run an agent until SIGTERM or Ctrl-C; it then drains. A second signal hurries it."),
    "enqueue": ("tasks.enqueue", "Put a task into its queue and print its id; after --wait also its end and result."),
    "list": ("tasks.list_", "List tasks; DONE means closed on purpose: cancelled, or stopped."),
    "show": ("tasks.show", "Show a task: state, times, dependencies, errors, result, and why it does not run."),
    "explain": ("explain.explain_", "Say why a task does not run, or what happened to it, and what can be done."),
    "retry": ("tasks.retry", "Put a FAILED or DONE (closed on purpose) task back into its queue."),
    "cancel": ("tasks.cancel", "Close a waiting task, or ask the agent of a running one to stop it."),
    "purge": ("tasks.purge", "Delete ended tasks for good."),
    "pause": ("pauses.pause", "Let no task start of a queue, of a job or in an agent; what runs goes on."),
    "resume": ("pauses.resume", "End a pause. Resuming what is not paused changes nothing."),
    "pauses": ("pauses.pauses", "List what is paused: since when, until when, and why."),
    "stats": ("fleet.stats", "Show each queue in numbers."),
    "health": ("health.health", "Show whether agents are healthy: exit code 0 if all are, else 1, also without any."),
    "top": ("top.top", "Watch queues, agents, streams and cost in a live view; Ctrl-C ends it."),
    "doctor": ("doctor.doctor", "Check settings, store, permissions, clock and supervisor, with remedies."),
    "canary": ("canary.canary", "Try WebSocket APIs once: connect, authenticate, ping, setState, getState, close."),
    "metrics": ("fleet.metrics", "List the metrics of agents: meaning, unit, names in CloudWatch and Prometheus."),
    "dashboard": ("fleet.dashboard", "Print a CloudWatch dashboard of the metrics, with alarm thresholds as lines."),
    "iam": ("engine.iam", "Print the least AWS policy for a role, as JSON, for the resources of the settings."),
    "local": ("engine.local", "Start a local DynamoDB in the background and print the line to use it."),
    "agents": ("agents.agents_app", "List the agents that are alive, or have one drain."),
    "streams": ("streams.streams_app", "See, stop and start streams, and ask why they did what they did."),
    "schedule": ("schedules.schedules_app", "See the schedules of periodic jobs, run one now, pause and resume."),
    "region": ("regions.regions_app", "Show and move the grant of regions that share a global table."),
    "table": ("engine.table_app", "Create, check or delete the table of a DynamoDB store."),
    "wsapi": ("wsapi.wsapi_app", "The WebSocket API with durable state, on this machine."),
}
"""Commands and groups: module and function of each, and the first sentence of its help."""


class LazyGroup(TyperGroup):
    """Imports a command when it is called; the help of the program needs only names and sentences."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else command(name), rest


def command(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(".")
    found = getattr(import_module(f"thunderagent.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        made: Any = get_group(found)
        made.name = name
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        made = get_command(alone)
    add_examples(made, name)
    return made


app = typer.Typer(
    name="thunderagent",
    cls=LazyGroup,
    help="A task-queue agent on Amazon DynamoDB, or on one SQLite file.",
    epilog=example_text(*EXAMPLES[""]),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thunderagent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """A task-queue agent on Amazon DynamoDB, or on one SQLite file."""


for _name, (_, _sentence) in COMMANDS.items():
    app.command(_name, help=_sentence)(lambda: None)


def main() -> None:
    app()
