"""What the reports of several benchmarks have in common: sections of lines, with the goals that were reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Line:
    """One number of ours, beside the naive one if there is one."""

    name: str
    ours: str
    naive: str = ""
    goal: str = ""
    met: bool | None = None


Section = tuple[str, Sequence[Line]]
"""A title and its lines."""


def section_table(title: str, sections: Iterable[Section], *, naive: bool = False) -> Table:
    """Everything in one table; `naive`: with what the naive way came to."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in ("ours", "naive", "goal") if naive else ("measured", "goal"):
        shown.add_column(name, justify="right")
    shown.add_column("met", justify="center")
    for heading, lines in sections:
        shown.add_section()
        shown.add_row(f"[bold]{heading}[/]")
        for line in lines:
            mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}[line.met]
            shown.add_row(line.name, line.ours, *((line.naive,) if naive else ()), line.goal, mark)
    return shown


def goals(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """The goals as JSON data, with what was got."""
    return [
        {"name": line.name, "of": title, "wanted": line.goal, "got": line.ours, "met": line.met}
        for title, lines in sections
        for line in lines
        if line.met is not None
    ]


def number_text(value: float | None) -> str:
    """A number for people; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.2f}"
