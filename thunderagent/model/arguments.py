"""Checks of what a caller gives: each `…_problem` answers with a sentence that names the value and the remedy, or None.

`True` is no number here, and a text is no number: a value that is taken for another is worse than an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError

MOST_RETRIES: Final = 1_000_000
SHORTEST_S: Final = 0.001
"""Least time where zero makes no sense; the table keeps milliseconds."""

LONGEST_S: Final = 10 * 365 * 86400.0
"""Ten years: a longer time was given in other units."""


def check(*problems: str | None) -> None:
    """Raise all problems at once, as a ConfigurationError."""
    if found := [problem for problem in problems if problem]:
        raise ConfigurationError("; ".join(found))


def iterated(name: str, values: Any) -> Iterable[Any]:
    """The same values, checked to be many: a text or a mapping would give its letters or keys."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{name} is {shown(values)}; use a list or another iterable")
    return values


def is_storable(text: str) -> bool:
    """False for a text with half a surrogate pair, which no engine can keep."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """The `repr` of a value for an error, cut short."""
    try:
        text = repr(value)
    except Exception as problem:
        text = f"a {type(value).__name__} without a text ({type(problem).__name__})"
    return text if len(text) <= 80 else f"{text[:79]}…"


def seconds_problem(name: str, value: object, *, least: float = 0.0, most: float = LONGEST_S) -> str | None:
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and least <= value <= most  # NaN never is
        and (isinstance(value, float) or value <= sys.float_info.max)
    ):
        return None
    limits = f"of at least {least:.12g}" if most == math.inf else f"from {least:.12g} to {most:.0f}"
    return f"{name} is {shown(value)}; use a number of seconds {limits}"


def whole_problem(name: str, value: object, *, least: int, most: int) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return None
    return f"{name} is {shown(value)}; use a whole number from {least} to {most}"


def text_problem(name: str, value: object, *, least: int = 0, most: int) -> str | None:
    """The problem of a text that is not one line of `least` to `most` letters."""
    if isinstance(value, str) and least <= len(value) <= most and value.isprintable():
        return None
    length = f"{least} to {most}" if least else f"at most {most}"
    return f"{name} is {shown(value)}; use one line of {length} letters"


def choice_problem(name: str, value: object, choices: Iterable[str]) -> str | None:
    words = tuple(choices)
    if isinstance(value, str) and value in words:
        return None
    *most, last = (repr(str(one)) for one in words)
    return f"{name} is {shown(value)}; use {', '.join(most)} or {last}"
