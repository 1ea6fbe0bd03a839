"""The stacks in the order in which they are made: what one tells, a later one may want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deployment.errors import WrongOption

ROOT: Final = Path(__file__).resolve().parents[2]
INFRA: Final = ROOT / "infra"
LARGEST_TEMPLATE: Final = 51_200
"""Bytes of a template that CloudFormation takes in a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One template."""

    name: str
    purpose: str

    @property
    def path(self) -> Path:
        """The file of the template."""
        return INFRA / f"{self.name}.yaml"

    @property
    def template(self) -> str:
        """The text of the template."""
        return self.path.read_text(encoding="utf-8")


STACKS: Final = (
    Stack(name="control", purpose="the arbiter that says which region works"),
    Stack(name="table", purpose="the table of the tasks, with its alarms"),
    Stack(name="doorbell", purpose="the wake queue, and the function that makes tasks of events"),
    Stack(name="wsapi", purpose="the WebSocket API with its state"),
    Stack(name="failover", purpose="the canary, and the DNS records that follow it"),
    Stack(name="agents", purpose="the machines with the agents"),
    Stack(name="containers", purpose="containers with agents, beside machines or in place of them"),
)
"""In the order of deploying; they are destroyed the other way round."""


def chosen(names: Sequence[str]) -> list[Stack]:
    """The stacks of these names in the order of deploying; all if there are none.

    Raises:
        WrongOption: there is no such stack.
    """
    known = {stack.name for stack in STACKS}
    for name in names:
        if name not in known:
            raise WrongOption(f"there is no stack {name!r}; there are {', '.join(one.name for one in STACKS)}")
    return [stack for stack in STACKS if not names or stack.name in names]
