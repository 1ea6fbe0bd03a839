"""Payloads and results as JSON text that keeps the order of their keys. Only comparisons sort them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_jsonable_python

NOT_STORED: Final = "the result was not stored: "
"""Begin of the note in the row of a task that is SUCCESS and whose result is lost."""


@dataclass(frozen=True, slots=True)
class Unstorable:
    """Stands for a handler's value that cannot be JSON data; `why` says why."""

    why: str


_AS_GIVEN: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)
_SORTED: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def dump_json(value: Any, what: str, error: type[Exception] = ValueError) -> str:
    """Plain data as JSON text: keys in their order, no spaces, no NaN.

    Raises:
        error: the value holds something that is not JSON data; `what` names it.
    """
    try:
        text = _AS_GIVEN.encode(value)
        _SORTED.encode(value)  # refuses 1 beside "1", which would be one key in the text
        if not text.isascii():
            text.encode()  # no engine can keep half a surrogate pair
        return text
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(
            f"{what} is not JSON data: {problem}; use str, int, finite float, bool, None, list and dict "
            "(a typed payload converts dates, decimals and the like)"
        ) from problem


def sorted_json(text: str) -> str:
    """JSON text with its keys sorted, the same for equal data. Text that is not JSON stays as it is."""
    try:
        return _SORTED.encode(json.loads(text))
    except (ValueError, RecursionError):
        return text


def is_same_json(one: str | None, other: str | None) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return sorted_json(one) == sorted_json(other)


def dump_result(value: Any) -> str | None:
    """What a handler returned as JSON text; None stays None.

    Pydantic converts models, dataclasses, dates, decimals, UUIDs, paths, sets and mappings of other kinds.

    Raises:
        ValueError: the value cannot be JSON data.
    """
    if value is None:
        return None
    if isinstance(value, Unstorable):
        raise ValueError(value.why)
    try:
        data = to_jsonable_python(value, inf_nan_mode="constants", fallback=_plain)
    except Exception as problem:  # the value may run code of its own: a serializer, a generator
        raise ValueError(f"the result is not JSON data: {problem}") from problem
    return dump_json(data, "the result")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be JSON data")
