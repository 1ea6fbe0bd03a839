"""What is asked of a measurement of cron-free work, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.telemetry.prices import MONTH_S, SQS_DOLLARS, SQS_FREE, store_dollars

PARTS: Final = ("latency", "idle", "race", "units")
STORES: Final = ("sqlite", "ministack")
DOORBELL: Final = "with the doorbell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how much of it."""

    only: frozenset[str]
    stores: tuple[str, ...]
    """Where the latency is measured."""
    tasks: int
    """Tasks of the latency; where only polls of the default settings find them, a tenth of it."""
    agents: int
    """Agents that race, and of the fleet in which one is idle."""
    ticks: int
    idle_h: float
    """Hours of an idle agent, simulated."""
    deadline_s: float
    """Longest wait for one part."""


@dataclass(slots=True, kw_only=True)
class Latency:
    """From the moment before the enqueue to the first statement of the handler, in milliseconds."""

    store: str
    how: str
    """What finds the tasks: the doorbell, or polls."""
    tasks: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    enqueue_p50_ms: float
    """Of that, the call of `enqueue`, which ends when the rings have been sent."""
    load_before: float


@dataclass(slots=True, kw_only=True)
class Idle:
    """One agent without a task, over some hours."""

    how: str
    hours: float
    costs: dict[str, dict[str, float]]
    """Requests, refused writes and units of each kind of request."""
    sqs_requests: int

    def sum(self, name: str) -> float:
        """Of all kinds, in a month of 730 hours."""
        return sum(cost[name] for cost in self.costs.values()) * MONTH_S / (self.hours * 3600.0)

    @property
    def read_dollars(self) -> float:
        """A month's."""
        return store_dollars(read_units=self.sum("read_units"))

    @property
    def write_dollars(self) -> float:
        """A month's."""
        return store_dollars(write_units=self.sum("write_units"))

    @property
    def sqs_requests_month(self) -> float:
        """Requests to SQS in a month."""
        return self.sqs_requests * MONTH_S / (self.hours * 3600.0)

    def sqs_dollars(self, free: float = SQS_FREE) -> float:
        """A month's; `free` requests cost nothing."""
        return max(0.0, self.sqs_requests_month - free) * SQS_DOLLARS / 1e6

    def more(self) -> dict[str, float]:
        """What follows from the rest, for JSON."""
        return {
            "requests_month": self.sum("requests"),
            "read_units_month": self.sum("read_units"),
            "write_units_month": self.sum("write_units"),
            "read_dollars_month": self.read_dollars,
            "write_dollars_month": self.write_dollars,
            "sqs_requests_month": self.sqs_requests_month,
            "sqs_dollars_month": self.sqs_dollars(),
            "sqs_dollars_month_none_free": self.sqs_dollars(0.0),
        }


@dataclass(slots=True, kw_only=True)
class Race:
    """Agents that put the ticks of one periodic job."""

    how: str
    """How their clocks are, and whether they know each other."""
    agents: int
    ticks: int
    tasks: int
    """Tasks that were put."""
    missing: int
    """Ticks without a task."""
    strange: int
    """Tasks that are no tick's."""
    looks: float
    """How often an agent looked whether something is due, for each tick, and the next two."""
    lost_decisions: float
    """Refused writes of the row of the schedule."""
    lost_puts: float
    """Refused puts of a task, as another agent had put it."""
    write_units: float
    """The task's two included."""
    read_units: float
    tick_ms: float
    """Time that all agents together took for each tick."""
    metered: int
    """Ticks of another race like it, by which units and lost writes were counted."""
    load_before: float


@dataclass(slots=True, kw_only=True)
class Unit:
    """What one thing costs in units."""

    name: str
    number: int
    """How many of it were done."""
    write_units: float
    """For each, all of its life included."""
    read_units: float
    extra: float | None = None
    """Write units beyond those of a plain task."""
    is_judged: bool = False
    """There is a goal for `extra`."""
    verbs: dict[str, float] = field(default_factory=dict)
    """Write units by what was written."""
    reads: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Figures:
    """Everything that was measured."""

    latencies: list[Latency] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)


def as_data(costs: Any) -> dict[str, dict[str, float]]:
    """A ledger as JSON data."""
    return {
        kind: {
            "requests": cost.requests,
            "refused": cost.refused,
            "read_units": cost.read_units,
            "write_units": cost.write_units,
        }
        for kind, cost in sorted(costs.items())
    }
