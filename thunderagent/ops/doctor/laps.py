"""Takes the time of a few reads and writes of a store, on a row of its own that is gone afterwards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from thunderagent.model.conditions import Present, Write
from thunderagent.model.errors import StoreError
from thunderagent.model.task import Row
from thunderagent.stores.engine import Applied, Engine

LAPS: Final = 5
"""Reads, and writes, whose time is taken."""

PROBE_LIVES_S: Final = 3600
"""A row that could not be deleted goes when its time to live is over."""


def probe_row(now: float) -> Row:
    """A row of nobody: no task, in no index, and gone by itself if it is left behind."""
    return {"taskId": f"control:doctor:{secrets.token_hex(8)}", "fence": 0, "expireAt": int(now + PROBE_LIVES_S)}


def run_laps(engine: Engine) -> tuple[list[float], list[float]]:
    """Seconds of some reads, and of some writes.

    Raises:
        StoreError: the store did not answer, or refused.
    """
    row = probe_row(engine.clock.now())
    name = row["taskId"]
    touch = Write(verb="probe", task_id=name, increase={"fence": 1}, require=[Present("taskId")])
    forget = Write(verb="forget probe", task_id=name, delete=True, require=[Present("taskId")])
    try:
        _answered(engine.put([row]))
        reads = [_timed(lambda: engine.get([name])) for _ in range(LAPS)]
        writes = [_timed(lambda: _answered(engine.apply([touch]))) for _ in range(LAPS)]
    finally:
        with suppress(StoreError):
            engine.apply([forget])
    return reads, writes


def _answered(answers: Iterable[Applied]) -> None:
    for answer in answers:
        if answer.error:
            raise answer.error


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
