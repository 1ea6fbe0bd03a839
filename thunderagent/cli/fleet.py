"""Commands on agents and queues: run, agents, stats."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape

from thunderagent.agent import Agent
from thunderagent.cli.output import (
    JsonOption,
    StoreOption,
    errors,
    find_here,
    make_table,
    moment,
    notes,
    opened,
    out,
    tell,
)
from thunderagent.doorbells.opening import open_doorbell
from thunderagent.errors import ConfigurationError
from thunderagent.events import EventBus
from thunderagent.pauses import Pause, PauseKind, names_of
from thunderagent.registry import Registry
from thunderagent.settings import load_settings
from thunderagent.stores.opening import open_store
from thunderagent.telemetry import Telemetry, configure_logging, task_scope
from thunderagent.waiting import pause_text


def run(
    jobs: Annotated[str, typer.Argument(help="Package whose modules hold the jobs, for example: jobs")],
    store: StoreOption = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue", "-q", metavar="NAME[:SLOTS]", help="Queue to serve with its slots; may be given several times."
        ),
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Slots of a queue without a number.", show_default=False)] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a log line.")] = False,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", show_default=False)] = None,
) -> None:
    """Run an agent until SIGTERM or Ctrl-C; it then drains. A second signal hurries."""
    with errors():
        settings = load_settings(
            store=store, slots=slots, log_json=log_json or None, log_level=log_level, queues=_queues(queue, slots)
        )
        configure_logging(settings.log_level, as_json=settings.log_json)
        find_here()
        bus = EventBus()
        Telemetry(bus)
        registry = Registry.from_package(jobs)
        store_of_agent, doorbell = open_store(settings, for_agent=True), open_doorbell(settings)
        agent = Agent(store_of_agent, registry, settings, bus=bus, doorbell=doorbell, scope=task_scope)
        stuck = agent.run()
    if stuck:  # handlers that ignore every request to stop: their tasks are released, so this process must end now
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def agents(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the agents that are alive."""
    with errors(), opened(store) as client:
        found = client.agents()
        if as_json:
            tell(
                [{"name": one.name, "started_at": one.started_at, "seen_at": one.seen_at, **one.info} for one in found],
                True,
            )
            return
        paused = {pause.name for pause in client.pauses() if pause.kind is PauseKind.AGENT}
        names = [one.name for one in found]
        has_streams = any(isinstance(one.info.get("streams"), dict) for one in found)
        wide = out.width >= 120
        streams = ("streams",) if has_streams else ()
        table = make_table("agent", *(("since", "seen") if wide else ()), "slots in use", *streams, "health", ids=names)
        for one in found:
            running, health = one.info.get("running", {}), one.info.get("health", {})
            slots = ", ".join(f"{name} {running.get(name, 0)}/{number}" for name, number in one.info["queues"].items())
            fine = health.get("heartbeat_alive") and health.get("store_answers")
            state = "ok" if fine else "[red]not well[/red]"
            if health.get("draining"):
                state = "draining"
            elif fine and (health.get("paused") or not paused.isdisjoint(names_of(one.name))):
                state = "[yellow]paused[/yellow]"
            held = (_streams(one.info.get("streams")),) if has_streams else ()
            times = (moment(one.started_at), moment(one.seen_at)) if wide else ()
            table.add_row(escape(one.name), *times, escape(slots), *held, state)
        out.print(table if found else "no agents")


def stats(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show each queue in numbers."""
    with errors(), opened(store) as client:
        found, now = client.stats(), client.store.clock.now()
        paused = {pause.name: pause for pause in client.pauses() if pause.kind is PauseKind.QUEUE}
        if as_json:
            tell([{**asdict(one), "paused": _paused(paused.get(one.queue))} for one in found], True)
            return
        table = make_table("queue", "ready", "delayed", "running", "blocked", "failed", "oldest ready", "agents")
        for one in found:
            age = "" if one.oldest_ready_s is None else f"{one.oldest_ready_s:.0f} s"
            numbers = (one.ready, one.delayed, one.running, one.blocked, one.failed)
            table.add_row(one.queue, *map(str, numbers), age, str(one.agents))
        out.print(table if found else "no tasks and no agents")
        for name, pause in paused.items():
            notes.print(escape(f"queue {name} is {pause_text(pause, now)}"), style="yellow", soft_wrap=True)
        for one in found:
            if one.unknown_jobs:
                notes.print(f"queue {one.queue}: no agent has the jobs {', '.join(one.unknown_jobs)}", style="yellow")
            elif one.ready and not one.agents:
                notes.print(f"queue {one.queue}: no agent serves it", style="yellow")


def _paused(pause: Pause | None) -> dict[str, Any] | None:
    return None if pause is None else pause.entry()


def _streams(told: Any) -> str:
    """What an agent tells of its streams; older agents tell nothing."""
    if not isinstance(told, dict):
        return ""
    return f"{told.get('held', 0)}/{told.get('max', 0)}, {told.get('connections', 0)} connected"


def _queues(given: list[str] | None, slots: int | None) -> dict[str, int] | None:
    queues = {}
    for one in given or ():
        name, mark, number = one.partition(":")
        if mark and not number.isdecimal():
            raise ConfigurationError(f"--queue {one}: write NAME or NAME:SLOTS, for example reports:4")
        queues[name] = int(number) if mark else slots or load_settings(slots=slots).slots
    return queues or None
