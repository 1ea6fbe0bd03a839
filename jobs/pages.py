"""HTML pages that need nothing but themselves: no network, no script, the style inside.

Every argument is plain text and is escaped here, except a `Markup`, which is HTML that this package made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Cell = str | float
_STYLE = Path(__file__).with_name("page.css")


def page(title: str, subtitle: str, parts: Iterable[Markup], footer: str) -> str:
    """A whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_html(title)}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header><h1>{_html(title)}</h1><p>{_html(subtitle)}</p></header>
{"".join(parts)}<footer>{_html(footer)}</footer>
</main>
</body>
</html>
"""


def figures(items: Iterable[tuple[str, str, str]]) -> Markup:
    """Key figures: a name, a value and a remark for each."""
    box = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>\n"
    return Markup(f"<dl>\n{''.join(box.format(*map(_html, item)) for item in items)}</dl>\n")


def chart(heading: str, svg: str) -> Markup:
    """A section with a chart, which scrolls on a narrow screen rather than becoming unreadable."""
    return _section(heading, "scroll chart", svg)


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """A section with a table, whose rows are named by their first cell; only the last column is text."""
    head = "".join(f'<th scope="col">{_html(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{_html(name)}</th>{"".join(f"<td>{_html(cell)}</td>" for cell in cells)}</tr>\n'
        for name, *cells in rows
    )
    inner = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    return _section(heading, "scroll", inner)


def link(target: str, text: str) -> Markup:
    """A link to another page."""
    return Markup(f'<a href="{escape(target)}">{escape(text)}</a>')


def _section(heading: str, style: str, inner: str) -> Markup:
    # What scrolls must take the focus, or a keyboard cannot scroll it.
    box = f'<div class="{style}" tabindex="0" role="region" aria-label="{_html(heading)}">{inner}</div>'
    return Markup(f"<section>\n<h2>{_html(heading)}</h2>\n{box}\n</section>\n")


def _html(text: Cell) -> str:
    if isinstance(text, Markup):
        return text
    return escape(text) if isinstance(text, str) else f"{text:.1f}"
