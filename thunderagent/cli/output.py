"""What the commands share: options, errors, and how things are shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from thunderagent.model.clock import at_text
from thunderagent.model.errors import (
    ConfigurationError,
    JobImportError,
    NotAllowed,
    ParentNotFound,
    PayloadError,
    StoreError,
    TaskNotFound,
    ThunderAgentError,
    UnknownJob,
    WaitTimeout,
)
from thunderagent.model.task import Handoff, Status, Task

if TYPE_CHECKING:  # commands that need no store begin sooner without
    from thunderagent.client import Client
    from thunderagent.streams.journal import Link

REFUSED: Final = 1
WRONG: Final = 2
STORE: Final = 3

out = Console(highlight=False, emoji=False)
notes = Console(stderr=True, highlight=False, emoji=False)

StoreOption = Annotated[
    str | None,
    typer.Option("--store", "-s", metavar="URL", help="Store, instead of THUNDERAGENT_STORE.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
QueueOption = Annotated[str | None, typer.Option("--queue", "-q", help="Only this queue.", show_default=False)]


@contextmanager
def errors() -> Iterator[None]:
    """A message and an exit code instead of a traceback."""
    try:
        yield
    except ThunderAgentError as error:
        notes.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(_code(error)) from error
    except BrokenPipeError:
        os._exit(0)


def _code(error: ThunderAgentError) -> int:
    match error:
        case ConfigurationError() | JobImportError() | PayloadError() | UnknownJob() | ParentNotFound():
            return WRONG
        case NotAllowed() | TaskNotFound() | WaitTimeout():
            return REFUSED
        case StoreError():
            return STORE
        case _:
            return REFUSED


@contextmanager
def opened(store: str | None) -> Iterator[Client]:
    from thunderagent.client import Client

    client = Client.from_settings(store=store)
    client.store.unread.listener = lambda one: notes.print(f"[yellow]left out:[/yellow] {escape(str(one))}")
    try:
        client.store.engine.check()
        yield client
    finally:
        client.close()


def find_here() -> None:
    """Let packages of the current folder be imported, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigurationError(f"{option} is {value!r}; use one of {', '.join(allowed)}")
    return value


def tell(what: Any, as_json: bool) -> None:
    typer.echo(json.dumps(what, indent=2, default=str) if as_json else what)


def as_dict(task: Task) -> dict[str, Any]:
    row = {**task.to_row(), "queue": task.queue, "attempt": task.attempt, "status": str(task.status)}
    errors = {"payload": task.payload_error, "result": task.result_error}
    for name in ("payload", "result", "progress"):
        if name in row:
            with suppress(ValueError):  # of a row made by hand: the text as it is
                row[name] = getattr(task, name) if errors.get(name) is None else None
    row |= {f"{name}Error": str(error) for name, error in errors.items() if error is not None}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in row.items()}


def link_data(link: Link | None) -> dict[str, Any]:
    """Whether a stream is connected, as JSON data; empty where no record says so."""
    return {} if link is None else {"connection": asdict(link)}


def cursor_text(last_seq: Any) -> str:
    """The cursor of a stream for people, empty for none. A row made by hand may hold anything there."""
    if not last_seq:
        return ""
    if not isinstance(last_seq, Mapping):
        return f"{last_seq!r}, which is no cursor"
    others = last_seq.get("others")
    places = [(last_seq.get("key"), last_seq), *(sorted(others.items()) if isinstance(others, Mapping) else ())]
    return ", ".join(_place_text(key, place) for key, place in places)


def _place_text(key: str | None, place: Any) -> str:
    values = place if isinstance(place, Mapping) else {"seq": place}
    sequence, epoch = "" if key is None else f"{key} ", values.get("epoch")
    return f"{sequence}{values.get('seq', '?')}" + ("" if epoch is None else f" (epoch {epoch})")


def handoff_text(task: Task, now: float) -> str:
    """The agent that still handles the messages of a stream during a handoff; empty for none."""
    if task.handoff_state not in (Handoff.OFFERED, Handoff.READY) or (task.handoff_until or 0.0) <= now:
        return ""
    return f"handoff: {task.handoff_owner} handles on"


def least_width(column: str) -> int:
    """Least width of a column of `make_table`."""
    return _LEAST.get(column, 0)


def make_table(*columns: str, ids: Iterable[str] = ()) -> Table:
    """A table whose first column is wide enough for all `ids`."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    longest = {columns[0]: max(map(len, ids), default=0)}
    for name in columns:
        justify: JustifyMethod = "right" if name in _NUMBERS else "left"
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify=justify,
            min_width=max(_LEAST.get(name, 0), longest.get(name, 0)),
        )
    return table


_NUMBERS: Final = frozenset(
    {
        "attempt",
        "seconds",
        "ready",
        "delayed",
        "running",
        "blocked",
        "failed",
        "claimed",
        "skew",
        "oldest ready",
        "lost",
        "retries",
    }
)
_LEAST: Final = {"task": 36, "status": 7, "job": 12, "queue": 8, "due": 20, "next": 20, "last": 20, "health": 8}
_COLOURS: Final[Mapping[str, str]] = {
    Status.SUCCESS: "green",
    Status.FAILED: "red",
    Status.RUNNING: "cyan",
    Status.BLOCKED: "yellow",
    Status.DONE: "dim",
    Status.PENDING: "default",
}


def colour(status: str) -> str:
    return f"[{_COLOURS.get(status, 'red')}]{status}[/]"


def meaning(status: str) -> str:
    """What a status means, where its word does not say so."""
    return " (closed on purpose)" if status == Status.DONE else ""


def moment(at: float | None) -> str:
    return "" if at is None else at_text(at)


def seconds(task: Task) -> str:
    if task.started_at is None or task.finished_at is None:
        return ""
    return f"{task.finished_at - task.started_at:.2f}"
