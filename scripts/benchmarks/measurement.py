"""What is asked of a measurement, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.tally import Tally, total

LARGEST_SINGLE: Final = 1000
TASK_UNITS: Final = 8.0
"""Write units of a task: two to put it, and three for each of two changes of its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is done, and with which settings."""

    tasks: int
    slots: int
    page: int
    latency: int
    poll_s: float
    log_level: str
    deadline_s: float
    naive: bool

    @property
    def single(self) -> int:
        """Tasks that are enqueued one by one; the rest goes in batches."""
        return max(1, min(LARGEST_SINGLE, self.tasks // 10))


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What was measured on one side; rates are tasks a second, costs are for each task."""

    agents: int
    tasks: int
    load_before: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))
    load_after: float = 0.0
    enqueue_single: float
    enqueue_bulk: float
    drain: float
    cpu_ms: float
    failed_claims: float
    run_twice: int
    not_succeeded: int
    peak_mib: float
    growth_mib: float | None
    requests: float | None = None
    write_units: float | None = None
    """Enqueue, claim and end of a task as the engine tells; a refused write counts as one unit."""
    read_units: float | None = None
    write_units_billed: float | None = None
    """The same by DynamoDB's rules; a refused write is one unit."""
    verbs: Mapping[str, float] | None = None
    """Write units of each verb by itself, by DynamoDB's rules."""
    verbs_told: Mapping[str, float] | None = None
    """The same as the engine tells."""
    row_bytes: int | None = None
    """Largest size of the row of a task."""
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None


def drained_by(
    agents: int, tasks: int, tallies: Sequence[Tally], single: float, bulk: int, bulk_s: float
) -> Measurement:
    counted = total(tallies)
    growths = [one.growth_kib for one in tallies if one.growth_kib is not None]
    return Measurement(
        agents=agents,
        tasks=tasks,
        load_after=round(os.getloadavg()[0], 2),
        enqueue_single=single,
        enqueue_bulk=bulk / bulk_s,
        drain=counted.ended / (counted.last_ended - counted.first_started),
        cpu_ms=counted.cpu_s * 1000 / counted.ended,
        failed_claims=(counted.tried - counted.won) / counted.ended,
        run_twice=0,
        not_succeeded=0,
        peak_mib=counted.peak_kib / 1024,
        growth_mib=max(growths) / 1024 if growths else None,
    )
