"""Commands on agents: agents, agents drain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from thunderagent.cli.output import JsonOption, StoreOption, errors, make_table, moment, opened, out, tell
from thunderagent.errors import ConfigurationError
from thunderagent.pauses import PauseKind, names_of
from thunderagent.store import AgentInfo

agents_app = typer.Typer(help="List the agents that are alive, or have one drain.", no_args_is_help=False)

WIDE: Final = 120
"""Columns of a terminal from which on more is shown of each agent."""


@agents_app.callback(invoke_without_command=True)
def agents(context: typer.Context, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the agents that are alive, with what they have claimed and failed since their start; or have one drain."""
    if context.invoked_subcommand is not None:
        context.obj = (store, as_json)
        return
    with errors(), opened(store) as client:
        found = client.agents()
        if as_json:
            tell(
                [{"name": one.name, "started_at": one.started_at, "seen_at": one.seen_at, **one.info} for one in found],
                True,
            )
            return
        if not found:
            out.print("no agents")
            return
        paused = {pause.name for pause in client.pauses() if pause.kind is PauseKind.AGENT}
        _show(found, paused)


@agents_app.command()
def drain(
    context: typer.Context,
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Its name, or the beginning of it; with --all-of-host, a host.")
    ],
    all_of_host: Annotated[bool, typer.Option("--all-of-host", help="All agents of the host AGENT.")] = False,
    wait: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Wait until they are gone.", show_default=False)
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Told in the log of the agent.", show_default=False)] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have an agent finish or give back what it holds, and end; its supervisor starts a fresh one.

    It sees that within a second when it looks for work, and within 15 s when all of its slots are taken. It then ends
    within its THUNDERAGENT_DRAIN_S with exit code 0; no attempt of a task is used up.
    """
    of_group = context.obj if isinstance(context.obj, tuple) else (None, False)
    store, as_json = store or of_group[0], as_json or of_group[1]
    with errors(), opened(store) as client:
        if wait is not None and not 0 < wait <= 86400:
            raise ConfigurationError(f"--wait is {wait:g}; give seconds, over 0 and at most a day")
        asked = client.drain(agent, all_of_host=all_of_host, reason=reason)
        if wait is not None:
            client.wait_gone(asked, timeout_s=wait)
        names = [one.name for one in asked]
        if as_json:
            tell({"drains": names, "gone": wait is not None}, True)
            return
        for name in names:
            tell(f"{name} is gone" if wait is not None else f"{name} is asked to drain", False)


def _show(found: Collection[AgentInfo], paused: Collection[str]) -> None:
    wide = out.width >= WIDE
    streams = ("streams",) if any(isinstance(one.info.get("streams"), dict) for one in found) else ()
    counted = ("claimed", "failed") if any(_map(one.info.get("counts")) for one in found) else ()
    skewed = ("skew",) if wide and any("skew_s" in one.info for one in found) else ()
    head = ("since", "seen", "version") if wide else ()
    columns = ("agent", *head, "slots in use", *counted, *skewed, *streams, "health")
    table = make_table(*columns, ids=[one.name for one in found])
    for one in found:
        info, counts = one.info, _map(one.info.get("counts"))
        running = _map(info.get("running"))
        slots = ", ".join(f"{name} {running.get(name, 0)}/{number}" for name, number in info["queues"].items())
        cells = [moment(one.started_at), moment(one.seen_at), escape(str(info.get("version", "")))] if wide else []
        cells.append(escape(slots))
        cells += [str(counts.get(name, 0) if counts else "") for name in counted]
        if skewed:
            cells.append(_skew(info.get("skew_s")))
        if streams:
            cells.append(_streams(info.get("streams")))
        table.add_row(escape(one.name), *cells, _state(one, paused))
    out.print(table)
    for one in found:
        if why := _why(one):
            out.print(f"[dim]{escape(one.name)}[/dim] {escape(why)}", soft_wrap=True)


def _state(one: AgentInfo, paused: Collection[str]) -> str:
    """How an agent is, in a word or two: its own judgement, or of an older version what its facts say."""
    health = _map(one.info.get("health"))
    fine = health.get("heartbeat_alive") and health.get("store_answers") and health.get("healthy", True)
    if health.get("draining"):
        return "draining"
    if fine and (health.get("paused") or not set(paused).isdisjoint(names_of(one.name))):
        return "[yellow]paused[/yellow]"
    return "ok" if fine else "[red]not well[/red]"


def _why(one: AgentInfo) -> str:
    """Why an agent drains, or what is wrong with it."""
    health = _map(one.info.get("health"))
    reasons = health.get("reasons")
    told = [str(reason) for reason in reasons] if isinstance(reasons, (list, tuple)) else []
    if isinstance(retires := one.info.get("retires"), str):
        told.insert(0, f"drains: {retires}")
    return "; ".join(told)


def _skew(seconds: Any) -> str:
    return f"{seconds:+.2f} s" if isinstance(seconds, (int, float)) else ""


def _streams(told: Any) -> str:
    """What an agent tells of its streams; older agents tell nothing."""
    if not isinstance(told, dict):
        return ""
    return f"{told.get('held', 0)}/{told.get('max', 0)}, {told.get('connections', 0)} connected"


def _map(value: Any) -> Mapping[str, Any]:
    """A map, or nothing: rows may be of another version."""
    return value if isinstance(value, Mapping) else {}
