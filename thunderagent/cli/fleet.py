"""Commands that run an agent and show its numbers: run, stats, metrics, dashboard."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.markup import escape

from thunderagent.agent.assembly import equip
from thunderagent.agent.executors.child_end import end_descendants
from thunderagent.agent.loop import Agent
from thunderagent.cli.output import (
    REFUSED,
    JsonOption,
    StoreOption,
    errors,
    find_here,
    make_table,
    notes,
    opened,
    out,
    tell,
)
from thunderagent.jobs.registry import Registry
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import ConfigurationError, ThunderAgentError
from thunderagent.model.names import meant
from thunderagent.model.outlet import end_lines, open_outlets
from thunderagent.model.task import DEFAULT_QUEUE
from thunderagent.ops.waiting import pause_text
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.queue.pauses import Pause, PauseKind
from thunderagent.queue.stats import overdue_text
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.telemetry.dashboard import dashboard as make_dashboard
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope, warn
from thunderagent.telemetry.metrics import METRICS

NARROW: Final = 80
"""Columns of a terminal below which delayed and blocked tasks are left out."""

WIDE: Final = 120
"""Columns of a terminal with room for kind, unit and dimension of a metric."""


def run(
    jobs: Annotated[str, typer.Argument(help="Package whose modules hold the jobs, for example: jobs")],
    store: StoreOption = None,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", metavar="NAME[:SLOTS]", help="Queue to serve with its slots; several times."),
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Slots of a queue without a number.", show_default=False)] = None,
    log_json: Annotated[bool, typer.Option("--log-json", "--json", help="One JSON object a log line.")] = False,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", show_default=False)] = None,
) -> None:
    """Run an agent until SIGTERM or Ctrl-C; it then drains. A second signal hurries it."""
    with errors():
        settings = load_settings(
            store=store, slots=slots, log_json=log_json or None, log_level=log_level, queues=_queues(queue, slots)
        )
        open_outlets()
        configure_logging(settings.log_level, as_json=settings.log_json, redact=settings.log_redact)
        find_here()
        bus = EventBus()
        Telemetry(bus)
        registry = Registry.from_package(jobs)
        store_of_agent, doorbell = open_store(settings, for_agent=True), open_doorbell(settings)
        agent = Agent(store_of_agent, registry, settings, bus=bus, doorbell=doorbell, scope=task_scope, threads=equip)
        for sentence in idle_queues(settings.queues, registry):
            warn(sentence)
        stuck = _served(agent)
    if stuck:  # handlers run on: their tasks are released, so nothing may delay the end of the process
        _end(0)
    end_descendants()


def _served(agent: Agent) -> int:
    """Run the agent. An unexpected error ends the process at once, whatever threads run on.

    Its tasks are released, or taken over when the leases expire; the supervisor starts a fresh agent.
    """
    try:
        return agent.run()
    except ThunderAgentError:
        raise
    except Exception as error:
        traceback.print_exc()
        notes.print(f"[red]error:[/red] the agent ended by {escape(repr(error))}: report it", soft_wrap=True)
        _end(REFUSED)


def _end(code: int) -> NoReturn:
    end_descendants()
    end_lines()
    os._exit(code)


def stats(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show each queue in numbers."""
    with errors(), opened(store) as client:
        found, now = client.stats(), client.store.clock.now()
        paused = {pause.name: pause for pause in client.pauses.list() if pause.kind is PauseKind.QUEUE}
        if overdue := overdue_text(client.store):
            notes.print(overdue, style="yellow", soft_wrap=True)
        if as_json:
            tell(
                [
                    {**asdict(one), "is_capped": one.is_capped, "paused": _paused(paused.get(one.queue))}
                    for one in found
                ],
                True,
            )
            return
        is_narrow = out.width < NARROW
        names = ("ready", "running", "failed") if is_narrow else ("ready", "delayed", "running", "blocked", "failed")
        table = make_table("queue", *names, "oldest ready", "agents")
        for one in found:
            age = "" if one.oldest_ready_s is None else f"{one.oldest_ready_s:.0f} s"
            lost = {"running"} if one.running and not one.agents else set()
            numbers = (f"[red]{one.text(name)}[/red]" if name in lost else one.text(name) for name in names)
            table.add_row(one.queue, *numbers, age, str(one.agents))
        out.print(table if found else "no tasks and no agents")
        for name, pause in paused.items():
            notes.print(escape(f"queue {name} is {pause_text(pause, now)}"), style="yellow", soft_wrap=True)
        for one in found:
            if one.unknown_jobs:
                notes.print(f"queue {one.queue}: no agent has the jobs {', '.join(one.unknown_jobs)}", style="yellow")
            elif (one.ready or one.running) and not one.agents:
                note = f": {one.text('running')} running there under the leases of lost agents"
                held = note if one.running else ""
                notes.print(f"queue {one.queue}: no agent serves it{held}", style="yellow", soft_wrap=True)


def metrics(as_json: JsonOption = False) -> None:
    """List the metrics of agents: meaning, unit, names in CloudWatch and Prometheus."""
    if as_json:
        listed = [
            {
                "name": metric.name,
                "kind": str(metric.kind),
                "unit": str(metric.unit),
                "dimension": None if metric.dimension is None else str(metric.dimension),
                "dimensions": [str(dimension) for dimension in metric.dimensions],
                "cloudwatch": metric.cloudwatch,
                "prometheus": metric.prometheus,
                "of_fleet": metric.of_fleet,
                "meaning": metric.help,
            }
            for metric in METRICS
        ]
        tell(listed, True)
        return
    facts = ("kind", "unit", "by") if out.width >= WIDE else ()
    table = make_table("CloudWatch, Prometheus", *facts, ids=[one.prometheus for one in METRICS])
    table.add_column("meaning", ratio=1)
    for metric in METRICS:
        by = ", ".join(metric.dimensions).lower()
        cells = (metric.kind, metric.unit.lower(), by) if facts else ()
        short = "" if facts else f" [dim]({metric.kind}{' by ' * bool(by)}{by})[/dim]"
        table.add_row(f"{metric.cloudwatch}\n[dim]{metric.prometheus}[/dim]", *cells, escape(metric.help) + short)
    out.print(table)


def dashboard(
    namespace: Annotated[
        str | None,
        typer.Option(help="Of the metrics, instead of THUNDERAGENT_CLOUDWATCH_NAMESPACE.", show_default=False),
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="AWS region of the metrics, instead of the store's.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a CloudWatch dashboard of the metrics, with alarm thresholds as lines.

    It is JSON, indented without --json. Give it to `aws cloudwatch put-dashboard --dashboard-body file://FILE`.
    """
    with errors():
        settings = load_settings(cloudwatch_namespace=namespace)
        if settings.cloudwatch_namespace is None:
            raise ConfigurationError(
                "no namespace is set: give --namespace, for example ThunderAgent, or THUNDERAGENT_CLOUDWATCH_NAMESPACE"
            )
        from thunderagent.telemetry.cloudwatch import cloudwatch_place  # boto3 is slow to import

        where = region or cloudwatch_place(settings.store)["region"] or os.environ.get("AWS_DEFAULT_REGION")
        if where is None:
            raise ConfigurationError("no region is known: give --region, for example eu-central-1")
        typer.echo(json.dumps(make_dashboard(settings.cloudwatch_namespace, where), indent=None if as_json else 2))


def _paused(pause: Pause | None) -> dict[str, Any] | None:
    return None if pause is None else pause.entry()


def _queues(given: list[str] | None, slots: int | None) -> dict[str, int] | None:
    queues = {}
    for one in given or ():
        name, mark, number = one.partition(":")
        if mark and not number.isdecimal():
            raise ConfigurationError(f"--queue {one}: write NAME or NAME:SLOTS, for example reports:4")
        queues[name] = int(number) if mark else slots or load_settings(slots=slots).slots
    return queues or None


def idle_queues(wanted: Mapping[str, int], jobs: Registry) -> Iterator[str]:
    """A sentence for each served queue that no job names, except the default queue of tasks enqueued by name."""
    for queue in wanted:
        if queue != DEFAULT_QUEUE and queue not in jobs.queues:
            hint = meant(queue, jobs.queues) or "."
            yield f"no job goes to the queue {queue!r}{hint} It is served for tasks that name it"
