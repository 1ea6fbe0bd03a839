"""What is wrong with an input, as field paths and messages, without its values, which may be secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

MOST: Final = 20
"""Problems that are listed; of the others only their number."""

_LONGEST: Final = 120
"""Longest part of a field path: the sender chooses names of unknown fields."""

_OF_VALIDATORS: Final = frozenset({"value_error", "assertion_error"})
_OF_PYDANTIC: Final = frozenset(get_args(ErrorType)) - _OF_VALIDATORS
"""Kinds of problems whose messages are pydantic's own and, with one exception, do not quote the input."""


def problems_of(error: ValidationError, root: str) -> list[dict[str, str]]:
    """Each problem as its field path below `root` and pydantic's message, without values.

    The message of a validator is kept unless it quotes a value.
    """
    found = error.errors(include_url=False)
    listed = [
        {"field": ".".join([root, *(str(part)[:_LONGEST] for part in one["loc"])]), "message": _message(one)}
        for one in found[:MOST]
    ]
    if len(found) > MOST:
        listed.append({"field": root, "message": f"and {len(found) - MOST} more"})
    return listed


def listing(problems: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(f"{one['field']}: {one['message']}" for one in problems)


def _message(one: Mapping[str, Any]) -> str:
    message, kind = str(one["msg"]), str(one["type"])
    if kind == "union_tag_invalid":  # quotes the tag that came
        return f"The tag {one['ctx']['discriminator']} must be one of {one['ctx']['expected_tags']}"
    if kind in _OF_PYDANTIC or not any(_is_quoted(value, message) for value in _values(one.get("input"))):
        return message
    return f"Not acceptable ({kind})"


def _is_quoted(value: str, message: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None


def _values(given: Any) -> Iterator[str]:
    """The texts of the first values in an input."""
    queue = [given]
    for _ in range(200):
        if not queue:
            return
        value = queue.pop(0)
        if isinstance(value, Mapping):
            queue.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            queue.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            queue.extend(vars(value).values())  # a model whose own check failed
        elif value is not None and str(value).strip():
            yield str(value).strip()
