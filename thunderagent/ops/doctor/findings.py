"""What an examination found: one finding a check, with the remedy for what is not as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check went.

    * `OK`: as it should be.
    * `WARNING`: agents work, but somebody should look at it.
    * `WRONG`: agents cannot work like this, or lose something.
    * `UNKNOWN`: it cannot be told, as a permission or an answer is missing.
    * `SKIPPED`: it could not be checked, or there is nothing to check.
    """

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, in words; `remedy` says what to do, and is empty where there is nothing to do."""

    check: str
    state: State
    found: str
    remedy: str = ""


Findings = Iterable[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at; `work` makes the findings."""

    name: str
    work: Callable[[], Findings]


def worst(findings: Sequence[Finding]) -> State:
    """The state of all together: what is skipped says nothing."""
    states = {one.state for one in findings}
    return next((state for state in (State.WRONG, State.WARNING, State.UNKNOWN) if state in states), State.OK)
