"""The command top: the fleet in a live view that fits the terminal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thunderagent.cli.output import JsonOption, StoreOption, errors, opened, out, tell
from thunderagent.client import Client
from thunderagent.model.clock import at_text, span_text
from thunderagent.model.errors import StoreError, StoreUnavailable
from thunderagent.ops.overview import AgentView, Overview, overview
from thunderagent.ops.waiting import link_text
from thunderagent.queue.stats import QueueStats

LEAST_EVERY_S: Final = 1.0
WIDE: Final = 110
NARROW: Final = 72
COMPLAINTS: Final = 3
"""Lines on unhealthy agents and disconnected streams; one less in a low window."""
LOW: Final = 20

_OTHER_LINES: Final = 12
"""Lines of a frame beside queues, agents and the error of the store."""

_COLOURS: Final = {"ok": "green", "paused": "yellow", "passive": "cyan", "draining": "cyan", "not well": "red"}


def top(
    every_s: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=LEAST_EVERY_S, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch queues, agents, streams and cost in a live view; Ctrl-C ends it.

    A look reads the numbers of each queue and the rows of the agents. On DynamoDB numbers stop at 10,000: a look costs
    about ten read units for a small fleet, and 500 (0.00006 dollars) for a queue with 10,000 tasks in each of five
    states. --json prints one frame as JSON.
    """
    with errors():
        if as_json or once or not out.is_terminal:
            with opened(store) as client:
                found = overview(client.store)
            if as_json:
                tell(frame_data(found), True)
            else:
                out.print(Group(*draw(found, None, out.width, None)))
            return
        client = Client.from_settings(store=store)
        try:
            with suppress(StoreUnavailable):  # the view shows that, and the store may come back
                client.store.engine.check()
            watch(lambda: overview(client.store), client.store.engine.url, every_s)
        finally:
            client.close()


def watch(
    look: Callable[[], Overview],
    url: str,
    every_s: float,
    *,
    console: Console = out,
    stop: threading.Event | None = None,
) -> None:
    """Draw frames on the alternate screen until `stop`, SIGTERM or Ctrl-C; the terminal is left as it was.

    While the store does not answer, that is shown with the last frame.
    """
    ended = stop or threading.Event()
    last: Overview | None = None
    with _stopping(), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        live.update(Text(f"looking at {url}"), refresh=True)
        while not ended.is_set():
            begin, error = time.monotonic(), None
            try:
                last = look()
            except StoreError as failure:
                error = str(failure)
            lines = console.height
            live.update(Group(*draw(last, error, console.width, lines, url=url, every_s=every_s)), refresh=True)
            ended.wait(max(LEAST_EVERY_S if error else 0.0, every_s - (time.monotonic() - begin)))


@contextmanager
def _stopping() -> Iterator[None]:
    """End on Ctrl-C and SIGTERM, also while the store does not answer.

    The handler only raises: to set an event would block for ever, as the interrupted thread may hold its lock.
    """
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise _Ended if len(asked) == 1 else KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(BaseException):
    """The user, or a signal, ends the view."""


# A frame


def frame_data(found: Overview) -> dict[str, Any]:
    cost = None if found.cost is None else {**asdict(found.cost), "dollars_per_1000": found.cost.dollars_per_1000}
    return {**asdict(found), "cost": cost}


def draw(
    found: Overview | None,
    error: str | None,
    width: int,
    height: int | None,
    *,
    url: str = "",
    every_s: float | None = None,
) -> Iterator[RenderableType]:
    """A frame within a width and, unless it is None, a height; of what does not fit the number is shown."""
    at = "" if found is None else at_text(found.at)
    every = "" if every_s is None else f"  every {every_s:g} s, Ctrl-C ends"
    yield Text.from_markup(
        f"[bold]ThunderAgent[/bold]  {escape(url or (found.store if found else ''))}", overflow="fold"
    )
    yield Text.from_markup(f"[dim]{at}{every}[/dim]")
    if error is not None:
        yield Text.from_markup(f"[red]the store does not answer:[/red] {escape(error)}", overflow="fold")
    if found is None:
        return
    yield Text.from_markup(_totals(found))
    said = 0 if error is None else len(error) // width + 2
    complaints = _complaints(found, COMPLAINTS - (height is not None and height < LOW))
    room = None if height is None else max(4, height - _OTHER_LINES - said - len(complaints))
    most_queues = len(found.queues) if room is None else max(2, room - min(len(found.agents), room // 2))
    most_agents = None if room is None else max(2, room - min(len(found.queues), most_queues))
    yield Text("")
    yield _queues(found, width, most_queues)
    yield Text("")
    yield _agents(found, width, most_agents)
    yield from complaints
    yield Text("")
    yield Text.from_markup(cost_text(found))


def _totals(found: Overview) -> str:
    states = [one.state for one in found.agents]
    counted = ", ".join(
        f"[{_COLOURS[state]}]{states.count(state)} {state}[/]" for state in _COLOURS if states.count(state)
    )
    held, connected = (
        sum(getattr(one, name) for one in found.agents) for name in ("streams_held", "streams_connected")
    )
    most = sum(one.streams_most for one in found.agents)
    streams = f"   streams {held} of {most} held, {connected} connected" if most else ""
    return f"agents {len(states)}" + (f" ({counted})" if counted else "") + streams


def _queues(found: Overview, width: int, most: int) -> RenderableType:
    if not found.queues:
        return Text("no queues", style="dim")
    names = ["ready", "oldest", "running", *(("delayed", "blocked") if width >= NARROW else ()), "failed", "agents"]
    table = _table("queue", names)
    paused = {pause.name for pause in found.paused if pause.kind == "queue"}
    ordered = (
        sorted(found.queues, key=lambda one: -(one.oldest_ready_s or 0.0)) if len(found.queues) > most else found.queues
    )
    for one in ordered[:most]:
        mark = " [yellow]paused[/yellow]" if one.queue in paused else ""
        table.add_row(escape(one.queue) + mark, *(_cell(one, name) for name in names))
    return _with_rest(table, len(found.queues) - most, "queues", len(names))


def _cell(one: QueueStats, name: str) -> str:
    match name:
        case "oldest":
            return "" if one.oldest_ready_s is None else span_text(one.oldest_ready_s)
        case "agents":
            return f"[red]{one.agents}[/red]" if (one.ready or one.running) and not one.agents else str(one.agents)
        case "running" if one.running and not one.agents:  # of lost agents
            return f"[red]{one.text(name)} lost[/red]"
        case "failed" if one.failed:
            return f"[red]{one.text(name)}[/red]"
        case _:
            return one.text(name)


def _agents(found: Overview, width: int, most: int | None) -> RenderableType:
    if not found.agents:
        return Text("no agents", style="yellow")
    has_streams = any(one.streams_most for one in found.agents)
    columns = ["slots", *(("streams",) if has_streams and width >= NARROW else ()), "health"]
    columns += ["up", "version"] if width >= WIDE else []
    ill_first = sorted(found.agents, key=lambda one: (one.state != "not well", one.name))
    number = len(ill_first) if most is None else most
    rows = [
        [Text.from_markup(_agent_cell(one, name, found.at, width)) for name in columns] for one in ill_first[:number]
    ]
    # Where names do not fit, slots and health matter more.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rest = sum(max(have, len(name)) + 2 for have, name in zip(widths, columns, strict=True))
    room = max(12, width - rest - 2)
    names = [one.name for one in ill_first[:number]]
    if max(map(len, names)) > room:
        names = [_short(name) for name in names]
    table = _table("agent", columns, justify="left", first_width=min(room, max(map(len, names))))
    for name, row in zip(names, rows, strict=True):
        table.add_row(escape(name), *row)
    return _with_rest(table, len(ill_first) - number, "agents", len(columns))


def _short(name: str) -> str:
    """Host, without its domain, and process in the name of an agent."""
    host, _, rest = name.partition(":")
    return f"{host.partition('.')[0]}:{rest.partition(':')[0]}"


def _complaints(found: Overview, most: int) -> list[Text]:
    """Why agents are unhealthy, then disconnected streams, the longest first."""
    reasons = [(one.name, reason) for one in found.agents if one.state == "not well" for reason in one.reasons][:most]
    texts = [
        Text.from_markup(f"[red]{escape(_short(name))}[/red] {escape(why)}", overflow="ellipsis")
        for name, why in reasons
    ]
    away = sorted((one for agent in found.agents for one in agent.streams_away), key=lambda one: one[1].since)
    for name, link in away[: most - len(texts)]:
        text = Text.from_markup(f"[yellow]{escape(name)}[/yellow] {escape(link_text(link, found.at))}")
        text.no_wrap, text.overflow = True, "ellipsis"  # a reason may be long
        texts.append(text)
    return texts


def _agent_cell(one: AgentView, name: str, now: float, width: int) -> str:
    match name:
        case "slots":
            if width < WIDE:
                return f"{sum(part.running for part in one.slots)}/{sum(part.slots for part in one.slots)}"
            return escape(", ".join(f"{part.queue} {part.running}/{part.slots}" for part in one.slots))
        case "streams":
            return f"{one.streams_connected}/{one.streams_held}" if one.streams_most else ""
        case "health":
            return f"[{_COLOURS[one.state]}]{one.state}[/]"
        case "up":
            return span_text(now - one.since)
        case _:
            return escape(one.version)


def _table(
    first: str, others: Sequence[str], *, justify: JustifyMethod = "right", first_width: int | None = None
) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), expand=False)
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=8, width=first_width)
    for name in others:
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify=justify)
    return table


def _with_rest(table: Table, rest: int, what: str, columns: int) -> RenderableType:
    if rest > 0:
        table.add_row(f"[dim]and {rest} more {what}[/dim]", *[""] * columns)
    return table


def cost_text(found: Overview) -> str:
    cost = found.cost
    if cost is None:
        what = (
            "nothing, the store is a file"
            if found.store.startswith("sqlite")
            else "unknown: these agents do not report it"
        )
        return f"[dim]cost: {what}[/dim]"
    units = f"{cost.read_units:,.0f} read and {cost.write_units:,.0f} write units"
    each = cost.dollars_per_1000
    per = "" if each is None else f", [bold]${each:.4f}[/bold] for 1,000 tasks"
    return f"cost: {units} for {cost.tasks:,} tasks since these agents started{per}"
