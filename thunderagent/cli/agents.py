"""Commands on agents: agents, agents drain."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.text import Text

from thunderagent.cli.output import JsonOption, StoreOption, errors, least_width, make_table, moment, opened, out, tell
from thunderagent.model.clock import span_text
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.names import names_of
from thunderagent.model.rows import as_map, as_number, is_number
from thunderagent.queue.pauses import PauseKind
from thunderagent.stores.tasks import AgentInfo

agents_app = typer.Typer(help="List the agents that are alive, or have one drain.", no_args_is_help=False)

WIDE: Final = 120
"""Columns of a terminal with room for every number of an agent."""

LEAST_NAME: Final = 12
"""Least columns of a name, which may take several lines."""

LEAST: Final = ("slots", "health")
"""Columns that every terminal shows."""


@agents_app.callback(invoke_without_command=True)
def agents(
    context: typer.Context,
    lost: Annotated[
        bool,
        typer.Option("--all", help="Also lost agents: killed, or cut off from the store, until their rows expire."),
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the agents that are alive, with what they claimed and failed since their start; or have one drain.

    On a narrow terminal numbers are left out: --json has all.
    """
    if context.invoked_subcommand is not None:
        context.obj = (store, as_json)
        return
    with errors(), opened(store) as client:
        found = client.store.agents(lost=lost)
        if as_json:
            tell([_data(one) for one in found], True)
            return
        if not found:
            out.print("no agents" if lost else "no agents (thunderagent agents --all: also those that were lost)")
            return
        paused = {pause.name for pause in client.pauses.list() if pause.kind is PauseKind.AGENT}
        _show(found, paused, client.store.clock.now())


@agents_app.command()
def drain(
    context: typer.Context,
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="Its name, or the beginning of it; with --all-of-host a host.")
    ],
    all_of_host: Annotated[bool, typer.Option("--all-of-host", help="All agents of the host AGENT.")] = False,
    wait: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Wait until they are gone.", show_default=False)
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Shown in the log of the agent.", show_default=False)] = None,
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
        asked = client.agents.drain(agent, all_of_host=all_of_host, reason=reason)
        if wait is not None:
            client.agents.wait_gone(asked, timeout_s=wait)
        names = [one.name for one in asked]
        if as_json:
            tell({"drains": names, "gone": wait is not None}, True)
            return
        for name in names:
            tell(f"{name} is gone" if wait is not None else f"{name} is asked to drain", False)


def _data(one: AgentInfo) -> dict[str, Any]:
    times = {"started_at": one.started_at, "seen_at": one.seen_at}
    return {"name": one.name, **times, **one.info, "lost": one.is_lost}


def _show(found: Collection[AgentInfo], paused: Collection[str], now: float) -> None:
    cells = [_cells(one, paused) for one in found]
    names = [one.name for one in found]
    columns = next(
        (columns for columns in _layouts(found) if _width(cells, columns, max(map(len, names))) <= out.width), LEAST
    )
    room = max(LEAST_NAME, out.width - _width(cells, columns, 0) + len("agent"))
    table = make_table("agent", *map(_title, columns), ids=[name[:room] for name in names])
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # a cut name is of no use
    for name, row in zip(names, cells, strict=True):
        table.add_row(escape(name), *(row[column] for column in columns))
    out.print(table)
    for one in found:
        if why := _why(one, now):
            out.print(f"[dim]{escape(one.name)}[/dim] {escape(why)}", soft_wrap=True)


def _layouts(found: Collection[AgentInfo]) -> Iterator[tuple[str, ...]]:
    """Sets of columns, widest first: the first that fits is shown."""
    streams = any(isinstance(one.info.get("streams"), dict) for one in found)
    counted = ("claimed", "failed") if any(as_map(one.info.get("counts")) for one in found) else ()
    skewed = ("skew",) if any("skew_s" in one.info for one in found) else ()
    whole, short = (("streams",), ("held",)) if streams else ((), ())
    if out.width >= WIDE:
        for head in (("since", "seen", "version"), ("since", "version"), ("version",)):
            yield (*head, "slots in use", *counted, *skewed, *whole, "health")
    for slots in ("slots in use", "slots"):
        yield (slots, *counted, *whole, "health")
        yield (slots, *counted, *short, "health")
        yield (slots, *counted, "health")
    yield ("slots", "health")


def _title(column: str) -> str:
    return "streams" if column == "held" else column


def _width(cells: Collection[Mapping[str, str]], columns: Collection[str], name: int) -> int:
    """Width of a table with names of this length."""
    texts = (
        (_title(column), " " * least_width(_title(column)), *(Text.from_markup(row[column]).plain for row in cells))
        for column in columns
    )
    widths = [max(map(len, text)) for text in texts]
    widths[-1] = max(widths[-1], len("not well"))  # the health
    return max(name, len("agent")) + sum(widths) + 2 * (len(widths) + 1)


def _cells(one: AgentInfo, paused: Collection[str]) -> Mapping[str, str]:
    info, counts, running = one.info, as_map(one.info.get("counts")), as_map(one.info.get("running"))
    slots = ", ".join(f"{name} {running.get(name, 0)}/{number}" for name, number in info["queues"].items())
    streams = as_map(info.get("streams"))
    return {
        "since": moment(one.started_at),
        "seen": moment(one.seen_at),
        "version": escape(str(info.get("version", ""))),
        "slots in use": escape(slots),
        "slots": f"{_sum(running)}/{_sum(info['queues'])}",
        "claimed": escape(str(counts.get("claimed", 0) if counts else "")),
        "failed": escape(str(counts.get("failed", 0) if counts else "")),
        "skew": _skew(info.get("skew_s")),
        "streams": escape(_streams(info.get("streams"))),
        "held": escape(f"{streams.get('held', 0)}/{streams.get('max', 0)}" if streams else ""),
        "health": _state(one, paused),
    }


def _sum(numbers: Mapping[str, Any]) -> int:
    return sum(int(as_number(number)) for number in numbers.values())


def _state(one: AgentInfo, paused: Collection[str]) -> str:
    """State of an agent: its own judgement, or for an older version what its facts say."""
    if one.is_lost:
        return "[red]lost[/red]"
    health = as_map(one.info.get("health"))
    fine = health.get("heartbeat_alive") and health.get("store_answers") and health.get("healthy", True)
    if health.get("draining"):
        return "draining"
    if fine and as_map(one.info.get("region")).get("state") == "passive":
        return "[cyan]passive[/cyan]"
    if fine and (health.get("paused") or not set(paused).isdisjoint(names_of(one.name))):
        return "[yellow]paused[/yellow]"
    return "ok" if fine else "[red]not well[/red]"


def _why(one: AgentInfo, now: float) -> str:
    """Why an agent drains, or what is wrong with it."""
    if one.is_lost:
        return f"was last seen {span_text(now - one.seen_at)} ago: it was killed, or does not reach the store"
    health = as_map(one.info.get("health"))
    reasons = health.get("reasons")
    texts = [str(reason) for reason in reasons] if isinstance(reasons, (list, tuple)) else []
    if isinstance(retires := one.info.get("retires"), str):
        texts.insert(0, retires if retires.startswith("asked to drain") else f"drains: {retires}")
    texts += _canary(as_map(one.info.get("canary")))
    return "; ".join(texts)


def _canary(targets: Mapping[str, Any]) -> Iterator[str]:
    """Targets that are down for the canary of an agent, or that it cannot judge."""
    for name, found in targets.items():
        seen = as_map(found)
        if seen.get("state") == "down":
            yield f"canary: {name} is down, {seen.get('step', 'it did last time')}: {seen.get('reason', '')}"
        elif "unjudged" in seen:
            yield f"canary: {name} cannot be judged ({seen['unjudged']}): {seen.get('reason', '')}"


def _skew(seconds: Any) -> str:
    return f"{seconds:+.2f} s" if is_number(seconds) else ""


def _streams(streams: Any) -> str:
    """The streams of an agent; empty for older agents."""
    if not isinstance(streams, dict):
        return ""
    return f"{streams.get('held', 0)}/{streams.get('max', 0)}, {streams.get('connections', 0)} connected"
