"""The tree of exceptions."""

from __future__ import annotations

import inspect

import pytest

from thunderagent.model import errors
from thunderagent.model.errors import ThunderAgentError

CLASSES = [
    one
    for _, one in inspect.getmembers(errors, inspect.isclass)
    if issubclass(one, ThunderAgentError) and one.__module__ == errors.__name__
]


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
