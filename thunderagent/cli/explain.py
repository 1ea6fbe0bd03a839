"""The command explain: a task in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thunderagent.cli.output import JsonOption, StoreOption, as_dict, colour, errors, opened, out, tell
from thunderagent.cli.stream_story import show_head
from thunderagent.client import Client
from thunderagent.model.clock import at_text, span_text
from thunderagent.model.errors import TaskNotFound
from thunderagent.model.task import RESERVED, Task
from thunderagent.ops.explain import Advice, Explanation, Relative, explain, similar_ids


def explain_(
    task_id: Annotated[str, typer.Argument(metavar="TASK_ID", help="Id of the task.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a task does not run, or what happened to it, and what can be done.

    Shown are what holds the task back, the owner of its lease and since when, the failed attempts that its row keeps,
    its parents and children, and the next command. DONE means closed on purpose.
    """
    with errors(), opened(store) as client:
        found = explain(client.store, _get(client, task_id))
        if as_json:
            tell(_data(found), True)
        else:
            _show(found)


def _get(client: Client, task_id: str) -> Task:
    try:
        return client.get(task_id)
    except TaskNotFound as error:
        if task_id.startswith(RESERVED):
            hint = "; such ids are of ThunderAgent's own rows"
        elif close := similar_ids(client.store, task_id):
            hint = f"; did you mean {' or '.join(close)}?"
        else:
            hint = "; it may have expired, or be in another store"
        raise TaskNotFound(f"{error}{hint}") from None


def _data(found: Explanation) -> dict[str, Any]:
    holding = None
    if (held := found.holding) is not None:
        ends_in_s = None if held.ends is None else held.ends - found.now
        holding = {**asdict(held), "ends_in_s": ends_in_s}
    return {
        "task": as_dict(found.task),
        "now": found.now,
        "summary": found.summary,
        "why": found.why,
        "lease": holding,
        "happened": [asdict(one) for one in found.happened],
        "parents": [asdict(one) for one in found.parents],
        "children": [asdict(one) for one in found.children],
        "children_left_out": found.children_left_out,
        "trace_id": found.trace_id,
        "run": None if found.run is None else asdict(found.run),
        "next": [asdict(one) for one in found.next],
    }


def _show(found: Explanation) -> None:
    task = found.task
    out.print(f"{escape(found.summary)}.", soft_wrap=False)
    if found.why:
        _section("why", map(escape, found.why))
    if found.holding is not None:
        _section("lease", [escape(_lease_text(found))])
    if found.run is not None:
        out.print()
        show_head(task, found.now, found.run)
    out.print("\n[bold]what happened[/bold] (UTC)")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found.happened:
        table.add_row(f"  [dim]{at_text(one.at)}[/dim]", escape(one.text))
    out.print(table)
    for title, relatives in (("depends on", found.parents), ("is waited for by", found.children)):
        if relatives:
            _section(title, _relatives(relatives))
    if found.children_left_out:
        out.print(f"  and {found.children_left_out} more")
    if found.trace_id:
        _section("trace", [found.trace_id])
    if found.next:
        _section("what comes next", (line for one in found.next for line in _advice(one)))


def _section(title: str, lines: Iterator[str] | Sequence[str] | map[str]) -> None:
    out.print(f"\n[bold]{title}[/bold]")
    table = Table.grid(padding=(0, 0))
    table.add_column(width=2)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("", line)
    out.print(table)


def _lease_text(found: Explanation) -> str:
    held = found.holding
    assert held is not None
    parts = [f"held by {held.owner}"]
    if held.since is not None:
        parts.append(f"for {span_text(found.now - held.since)}")
    if not held.beats:
        parts.append("not renewed yet")
    elif held.last_beat is not None:
        parts.append(f"last renewed {span_text(found.now - held.last_beat)} ago (beat {held.beats})")
    if held.ends is not None:
        left = held.ends - found.now
        parts.append(f"over for {span_text(-left)}" if held.is_over else f"ends in {span_text(left)}")
    return ", ".join(parts)


def _relatives(relatives: Sequence[Relative]) -> Iterator[str]:
    for one in relatives:
        state = "gone" if one.status is None else colour(one.status)
        yield f"{escape(one.task_id)}  {state}" + ("  [yellow]still waited for[/yellow]" if one.is_waited_for else "")


def _advice(one: Advice) -> Iterator[str]:
    yield escape(one.text) + (":" if one.command else "")
    if one.command:
        yield f"  [cyan]{escape(one.command)}[/cyan]"
