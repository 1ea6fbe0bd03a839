"""Tables of the documentation that are made from the code; `python -m tests.docs.test_reference` writes them again."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.program import program
from tests.test_house import INSIDE
from thunderagent.cli.examples import EXAMPLES
from thunderagent.settings import PREFIX, Settings
from thunderagent.stores.purposes import RequestPurpose
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.telemetry.dashboard import ALARMS
from thunderagent.telemetry.logs import LEVELS
from thunderagent.telemetry.metrics import METRICS, Group, Kind
from thunderagent.telemetry.prices import METRIC_DOLLARS, PUT_DOLLARS

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"


def table(*rows: tuple[str, ...]) -> str:
    """A table whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join((lines[0], "|---" * len(rows[0]) + "|", *lines[1:]))


def shown(value: Any) -> str:
    """A default, or nothing where there is none."""
    if value is None or value is False or value in ("", {}, []):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def texts_of(kind: type) -> dict[str, str]:
    """The text below each field of a class."""
    [shape] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(shape, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in pairwise(shape.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


# Settings


def settings_table() -> str:
    """Every setting with its default."""
    meanings = texts_of(Settings)
    rows = [
        (f"`{PREFIX}{name.upper()}`", shown(field.get_default(call_default_factory=True)), meanings[name])
        for name, field in Settings.model_fields.items()
    ]
    return table(("variable", "default", "meaning"), *rows)


# Commands

COMMON: Final = {"--store", "--json", "--help", "--arbiter", "--scope"}
"""Options that the page explains once."""


@cache
def commands() -> dict[str, Any]:
    """Every command that does something, by its words."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        below = getattr(command, "commands", {})
        if words and (not below or command.invoke_without_command):
            yield " ".join(words), command
        for name, one in below.items():
            yield from walk(one, (*words, name))

    return dict(walk(program(), ()))


def usage(words: str, command: Any) -> str:
    """`thunderagent WORDS ARGUMENTS`."""
    arguments = []
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
            arguments.append(name if one.required or name.startswith("[") else f"[{name}]")
    return " ".join(("thunderagent", words, *arguments))


def coded(text: str) -> str:
    """The text with its options as code, but for those that are already."""
    parts = text.split("`")
    parts[::2] = (re.sub(r"(?<!\w)--[a-z][a-z-]*", r"`\g<0>`", part) for part in parts[::2])
    return "`".join(parts)


def option(parameter: Any) -> tuple[str, str]:
    """The row of an option or an argument."""
    text = coded(str(parameter.help).replace("|", r"\|"))
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`", text
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    default = shown(parameter.default)
    names = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names, f"{text} Default: {default}." if default else text


def commands_list() -> str:
    """A section for each command: what it does, its options, an example."""
    parts = []
    for words, command in commands().items():
        rows = [option(one) for one in command.params if not one.hidden and not COMMON & set(one.opts)]
        rows += [(f"`{line}`", "an example") for line in EXAMPLES[words]]
        text = coded("\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n")))
        parts.append(f"## {words}\n\n{text}\n\n{table((f'`{usage(words, command)}`', ''), *rows)}")
    return "\n\n".join(parts)


# Options of streams


def options_table() -> str:
    """The text below each field of the class of options."""
    texts = texts_of(StreamOptions)
    rows = []
    for one in fields(StreamOptions):
        default = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
        rows.append((f"`{one.name}`", f"`{default}`", texts[one.name]))
    return table(("option", "default", "meaning"), *rows)


# Rooms


def floors_tables() -> str:
    """The floors inside of rooms, from bottom to top."""
    rows = [
        (f"`{room}/`", str(floor), ", ".join(f"`{module}`" for module in modules.split()))
        for room, floors in INSIDE.items()
        for floor, modules in enumerate(floors, 1)
    ]
    return table(("room", "floor", "modules"), *rows)


# Metrics


def metrics_tables() -> str:
    """A table for each group of metrics."""
    parts = []
    for group in Group:
        rows = [
            (
                f"`{metric.cloudwatch}`<br>`{metric.prometheus}`",
                f"{metric.kind}" + (", s" if metric.unit == "Seconds" else ""),
                ", ".join(f"`{dimension}`" for dimension in metric.dimensions),
                metric.help,
            )
            for metric in METRICS
            if metric.group is group
        ]
        parts.append(f"### {group}\n\n{table(('CloudWatch, Prometheus', 'kind', 'by', 'meaning'), *rows)}")
    return "\n\n".join(parts)


def purposes_table() -> str:
    """What units are counted under."""
    return table(("purpose", "what for"), *((f"`{purpose}`", purpose.meaning) for purpose in RequestPurpose))


def alarms_table() -> str:
    """Where to begin with alarms."""
    rows = [(f"`{one.metric.cloudwatch}`", one.text, one.why) for one in ALARMS]
    return table(("metric", "alarm when", "what it means, where to look"), *rows)


def cost_table() -> str:
    """What CloudWatch asks for in a month, for the agents, queues and jobs of some fleets."""
    rows = []
    for agents, queues, jobs in ((1, 1, 3), (4, 3, 10), (50, 10, 40)):
        number = metrics_sent(queues, jobs)
        requests = agents * 30.42 * 24 * 60 / 1000 * PUT_DOLLARS
        rows.append(
            (str(agents), str(queues), str(jobs), str(number), f"{number * METRIC_DOLLARS:.0f}", f"{requests:.2f}")
        )
    return table(("agents", "queues", "jobs", "metrics, at most", "metrics, $", "requests, $"), *rows)


def metrics_sent(queues: int, jobs: int) -> int:
    """Different metrics if all have something to say in every hour; three reasons of throttles, and no canary."""
    numbers = {"Queue": queues, "Job": jobs, "Purpose": len(RequestPurpose), "Reason": 3, "Target": 0}
    return sum(1 if metric.dimension is None else numbers[metric.dimension] for metric in METRICS)


PARTS: Final[dict[tuple[str, str], Callable[[], str]]] = {
    ("reference/settings.md", "settings"): settings_table,
    ("reference/commands.md", "commands"): commands_list,
    ("guides/streams.md", "options"): options_table,
    ("inside/architecture.md", "floors"): floors_tables,
    ("reference/metrics.md", "metrics"): metrics_tables,
    ("reference/metrics.md", "purposes"): purposes_table,
    ("reference/metrics.md", "alarms"): alarms_table,
    ("reference/metrics.md", "cost"): cost_table,
}
"""What stands between the comments `<!-- NAME: … -->` and `<!-- end of NAME -->` of a page."""


def part(page: str, name: str) -> re.Match[str]:
    """The part of the page as it is."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"(?<=<!-- {name}: made from the code -->\n)(.*?)(?=\n<!-- end of {name} -->)", text, re.DOTALL)
    assert found, f"{page} has no part {name}"
    return found


@pytest.mark.parametrize(("page", "name"), PARTS, ids="#".join)
def test_tables_are_those_of_the_code(page: str, name: str) -> None:
    made = PARTS[page, name]()
    assert part(page, name).group() == made, "not up to date: run python -m tests.docs.test_reference"


ALARMING: Final = sorted({message for level, message in LEVELS.values() if level in ("WARNING", "ERROR")})


@pytest.mark.parametrize("message", ALARMING)
def test_every_warning_and_error_is_explained(message: str) -> None:
    page = (DOCS / "reference" / "log-lines.md").read_text(encoding="utf-8")
    assert f"`{message.partition(':')[0].partition(';')[0]}" in page


def test_a_fleet_without_streams_sends_fewer_metrics_than_the_page_says() -> None:
    assert metrics_sent(1, 1) < metrics_sent(2, 1) < metrics_sent(2, 2)
    assert {metric.kind for metric in METRICS} == set(Kind)


def write() -> None:
    """Write all parts again."""
    for (page, name), make in PARTS.items():
        found = part(page, name)
        text = found.string
        (DOCS / page).write_text(text[: found.start()] + make() + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    write()
