"""The findings of an examination, each with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The result of a check.

    * `OK`: as it should be.
    * `WARNING`: agents work, but an operator should look at it.
    * `WRONG`: agents cannot work like this, or lose something.
    * `UNKNOWN`: a permission or an answer is missing.
    * `SKIPPED`: it could not be checked, or there is nothing to check.
    """

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; `remedy` is empty where there is nothing to do."""

    check: str
    state: State
    found: str
    remedy: str = ""


Findings = Iterable[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    work: Callable[[], Findings]


def allow_line(action: str, resource: str, **more: object) -> str:
    """The remedy for a denied action: the missing statement of a policy."""
    statement = json.dumps({"Effect": "Allow", "Action": action, "Resource": resource, **more})
    return f"add to the policy, which `thunderagent iam agent` prints whole: {statement}"


def worst(findings: Sequence[Finding]) -> State:
    """The worst state; skipped checks say nothing."""
    states = {one.state for one in findings}
    return next((state for state in (State.WRONG, State.WARNING, State.UNKNOWN) if state in states), State.OK)
