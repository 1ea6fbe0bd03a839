"""What an agent without a task asks of DynamoDB and of SQS, in time that is simulated.

It is a whole agent, on a store in memory with a ledger; only its clocks are ours, and instead of waiting it lets them
go on. So a day takes seconds, and every request of that day is counted. With the doorbell it listens to SQS through the
real adapter, whose client answers nothing after the time that it was asked to wait.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any, Final, Self

import schedule

from benchmarks.cronfree_figures import DOORBELL, Idle, as_data
from benchmarks.cronfree_jobs import note
from benchmarks.cronfree_ledger import Ledger, LedgerEngine
from benchmarks.processes import BenchFailed
from thunderagent.agent.loop import Agent
from thunderagent.jobs.registry import Registry
from thunderagent.queue.doorbell.sqs import SqsDoorbell
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.testing import FakeClock

URL: Final = "https://sqs.us-east-1.amazonaws.com/000000000000/wake"
LEAST_S: Final = 0.001
"""The agent's loop takes so long at least, in simulated time."""

HANDSHAKE_S: Final = 10.0
"""Longest wait, in real time, for the listener to ask SQS again."""


class SilentQueue:
    """A client of SQS whose queue is empty. It waits as long as it is asked to, in simulated time."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._until: float | None = None
        self._closed = False
        self.receives = 0
        self.others = 0

    def receive_message(self, *, WaitTimeSeconds: int, **_: Any) -> dict[str, Any]:
        """Nothing, in time."""
        with self._changed:
            self.receives += 1
            self._until = self._clock.monotonic() + WaitTimeSeconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._until is None or self._closed)
        return {}

    def __getattr__(self, name: str) -> Any:
        def other(**_: Any) -> dict[str, Any]:
            self.others += 1
            return {}

        return other

    def advance(self, seconds: float) -> None:
        """Let time go on, at most to the end of the wait; the listener asks again before this returns."""
        with self._changed:
            self._await_listener()
            if self._until is not None:
                seconds = min(seconds, max(0.0, self._until - self._clock.monotonic()))
            self._clock.advance(max(LEAST_S, seconds))
            if self._until is not None and self._clock.monotonic() >= self._until:
                self._until = None
                self._changed.notify_all()
                self._await_listener()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _await_listener(self) -> None:
        if not self._changed.wait_for(lambda: self._until is not None or self._closed, HANDSHAKE_S):
            raise BenchFailed("the agent does not listen at its doorbell")


def measure_idle(hours: float, agents: int, deadline_s: float) -> Iterator[Idle]:
    """An agent that polls, one that has a doorbell, and one of a fleet whose others are rows that it reads.

    Raises:
        BenchFailed: an agent did not come to the end of its time.
    """
    for how, doorbell, fleet in (
        ("polls alone", False, 1),
        (DOORBELL, True, 1),
        (f"{DOORBELL}, one of {agents} agents", True, agents),
    ):
        yield _measure(how, hours, doorbell=doorbell, fleet=fleet, deadline_s=deadline_s)


def _measure(how: str, hours: float, *, doorbell: bool, fleet: int, deadline_s: float) -> Idle:
    clock, ledger = FakeClock(), Ledger()
    store = TaskStore(LedgerEngine(SqliteEngine(MEMORY, clock=clock), ledger), monotonic=clock.monotonic)
    settings = load_settings(store=f"sqlite://{MEMORY}", queues={"default": 10})
    silent = SilentQueue(clock)
    bell = SqsDoorbell(URL, make_client=lambda url, config: silent, monotonic=clock.monotonic, now=clock.now)
    agent = Agent(
        store, Registry(note), settings, rng=random.Random(1), first_poll_s=0.0, doorbell=bell if doorbell else None
    )
    for index in range(fleet - 1):
        info = {"queues": {"default": 10}, "jobs": [note.name], "health": dict(agent.health())}
        store.announce(f"host-{index}:1:00000000", info, lives_s=hours * 7200.0)
    ledger.take()
    end, until = clock.now() + hours * 3600.0, time.monotonic() + deadline_s
    counted: list[Idle] = []

    def gather(pause: float) -> None:
        """What the agent's loop does instead of waiting."""
        if counted or not doorbell:
            clock.advance(max(LEAST_S, pause))
        else:
            silent.advance(pause)
        if time.monotonic() > until:
            raise BenchFailed(f"{end - clock.now():.0f} of {hours * 3600:.0f} idle seconds were left")
        if clock.now() >= end and not counted:
            requests = silent.receives + silent.others
            counted.append(Idle(how=how, hours=hours, costs=as_data(ledger.take()), sqs_requests=requests))
            agent.stop()

    agent._workload.gather = gather  # type: ignore[method-assign]
    with _simulated(clock):
        agent.run()
    return counted[0]


@contextmanager
def _simulated(clock: FakeClock) -> Iterator[None]:
    """The agent's housekeeping goes by the host's clock, through its library."""

    class Simulated(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(clock.now(), UTC).replace(tzinfo=tz)

    real = schedule.datetime  # type: ignore[attr-defined] # the module, as it is imported there
    schedule.datetime = SimpleNamespace(datetime=Simulated, timedelta=timedelta)  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        schedule.datetime = real  # type: ignore[attr-defined]
