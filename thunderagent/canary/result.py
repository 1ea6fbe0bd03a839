"""What one attempt of a canary found: the time of each step, and which step failed and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """The steps of a probe in their order; the metric of latencies tells them apart."""

    TOKEN = "token"  # noqa: S105 - a step
    CONNECT = "connect"
    AUTH = "auth"
    PING = "ping"
    SET = "setState"
    GET = "getState"
    CLOSE = "close"
    RUN = "run"
    """Of the queue: from the moment its task was put to the moment it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One attempt at one target."""

    target: str
    steps: Mapping[Step, float] = field(default_factory=dict)
    """Seconds of each step that was done, in their order; of the one that failed too."""
    failed: Step | None = None
    """The step that did not do; None: all did."""
    reason: str = ""
    """Why it did not, and what to look at; never a secret."""
    region: str | None = None
    """The region that answered, as it told."""
    version: int = 0
    """Of the canary's state after it, so that the next attempt need not ask for it."""

    @property
    def ok(self) -> bool:
        """True when every step did."""
        return self.failed is None

    @property
    def seconds(self) -> float:
        """The time of all steps together."""
        return sum(self.steps.values())

    def told(self) -> dict[str, Any]:
        """As plain data, for rows, replies and `--json`."""
        told: dict[str, Any] = {
            "target": self.target,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "steps": {str(step): round(seconds, 3) for step, seconds in self.steps.items()},
        }
        more = {"step": self.failed and str(self.failed), "reason": self.reason, "region": self.region}
        return told | {name: value for name, value in more.items() if value}
