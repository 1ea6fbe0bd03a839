"""Payloads and results are JSON data, as text with one spelling for each value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_jsonable_python

NOT_STORED: Final = "the result was not stored: "
"""The begin of the note in the row of a task that is SUCCESS and whose result is lost."""


@dataclass(frozen=True, slots=True)
class Unstorable:
    """For the engine: stands for a value of a handler that cannot be JSON data; `why` tells."""

    why: str


def dump_json(value: Any, what: str, error: type[Exception] = ValueError) -> str:
    """Plain data as canonical JSON text: sorted keys, no spaces, no NaN.

    Raises:
        error: the value holds something that is not JSON data; `what` names it.
    """
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if not text.isascii():
            text.encode()  # half a surrogate pair is no text: no engine can keep it
        return text
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(
            f"{what} is not JSON data: {problem}; use str, int, finite float, bool, None, list and dict "
            "(a typed payload converts dates, decimals and the like)"
        ) from problem


def dump_result(value: Any) -> str | None:
    """What a handler returned as JSON text; None stays None.

    Models, dataclasses, dates, decimals, UUIDs, paths and sets are converted as pydantic converts them, and mappings of
    other kinds as dicts.

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
