"""The tree of exceptions."""

from __future__ import annotations

import inspect
import re

import pytest

from thunderagent.model import errors
from thunderagent.model.errors import ThunderAgentError

CLASSES = [
    one
    for _, one in inspect.getmembers(errors, inspect.isclass)
    if issubclass(one, ThunderAgentError) and one.__module__ == errors.__name__
]


def drawn() -> dict[str, str | None]:
    """Class to parent, as the docstring of the module draws them."""
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^( {4}[│├└─ ]*)([A-Z]\w+)(?: {2,}\S|$)", line)
        if found:
            depth = (len(found[1]) - 4) // 4
            del path[depth:]
            tree[found[2]] = path[-1] if path else None
            path.append(found[2])
    return tree


def test_the_tree_that_is_drawn_is_the_tree_that_is_there() -> None:
    real = {one.__name__: next((b.__name__ for b in one.__bases__ if b in CLASSES), None) for one in CLASSES}
    assert drawn() == real


@pytest.mark.parametrize("kind", CLASSES)
def test_the_docstring_is_the_default_message(kind: type[ThunderAgentError]) -> None:
    assert str(kind()) == inspect.cleandoc(kind.__doc__ or "")
    assert kind.__doc__ != (kind.__base__.__doc__ if kind.__base__ else None)
    assert str(kind()).endswith((".", "create", "region status"))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_message_replaces_the_default(kind: type[ThunderAgentError]) -> None:
    assert str(kind("what happened here")) == "what happened here"


def test_an_error_without_a_reason_still_says_something() -> None:
    assert str(errors.LeaseLost("")) == str(errors.LeaseLost())
