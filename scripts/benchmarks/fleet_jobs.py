"""The job of the measurement of telemetry: it does nothing but read the CPU time of its process, now and then."""

from __future__ import annotations

import threading
import time
from typing import Final

from benchmarks.nojobs import Number
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job

EVERY: Final = 100
"""Handlers between two readings."""

_guard: Final = threading.Lock()
_ran = 0
READINGS: Final[dict[int, float]] = {}
"""Seconds of CPU after so many handlers."""


@job("bench.metered")
def metered(ctx: Context, payload: Number) -> None:
    """Count."""
    global _ran
    with _guard:
        _ran += 1
        if _ran % EVERY == 0:
            READINGS[_ran] = time.process_time()
