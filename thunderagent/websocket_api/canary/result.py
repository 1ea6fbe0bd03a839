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


class Unjudged(StrEnum):
    """Why an attempt that did not succeed says nothing about its target, whose last judgement stays."""

    THROTTLED = "throttled"
    """The peer takes no more for now: it is there. Clients that move to another region take their flood along."""
    TOKEN = "token"  # noqa: S105 - a reason
    """The canary has no token that counts."""


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
    unjudged: Unjudged | None = None
    """Why a failure does not count; None: it does."""
    refused: bool = False
    """The peer did not take the token, and the token does not say that it is over."""
    days_left: float | None = None
    """Days until the token is over; None: unknown, or something replaces it in time."""
    region: str | None = None
    """The region that answered, as it told."""
    version: int = 0
    """Of the canary's state after it, so that the next attempt need not ask for it."""

    @property
    def ok(self) -> bool:
        """True when every step did."""
        return self.failed is None

    @property
    def counts(self) -> bool | None:
        """For the target, or against it; None: neither."""
        return None if self.unjudged else self.ok

    @property
    def was_let_in(self) -> bool:
        """Whether the peer took the token."""
        return self.ok or self.failed in (Step.PING, Step.SET, Step.GET, Step.CLOSE)

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
        more = {
            "step": self.failed and str(self.failed),
            "reason": self.reason,
            "unjudged": self.unjudged and str(self.unjudged),
            "region": self.region,
        }
        return told | {name: value for name, value in more.items() if value}
