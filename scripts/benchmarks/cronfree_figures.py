"""What a measurement of the latency answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STORES: Final = ("sqlite", "ministack")
DOORBELL: Final = "with the doorbell"


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
