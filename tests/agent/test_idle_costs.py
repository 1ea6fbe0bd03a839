"""What an agent without a task asks of DynamoDB and of SQS in a month, and what a pause costs: by the rules of AWS."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from math import ceil
from types import SimpleNamespace
from typing import Any, Final, Self

import pytest
import schedule

from tests.support.billing import PROJECTED, size, write_units
from tests.support.engine import LONG_S, a_job
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model.conditions import Write
from thunderagent.model.task import Lane, Page, Row
from thunderagent.queue.doorbell.sqs import SqsDoorbell
from thunderagent.settings import load_settings
from thunderagent.stores.dynamo.expressions import encode_row
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry.prices import MONTH_S, SQS_DOLLARS, SQS_FREE, store_dollars
from thunderagent.testing import FakeClock
from thunderagent.testing.faulty_engine import FaultyEngine

IDLE_S: Final = 1800.0
LEAST_S: Final = 0.001
"""Time that one round of the agent's loop takes at least."""


class Billed(FaultyEngine):
    """An engine that adds up the units that DynamoDB would bill."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._real = engine
        self.read_units = self.write_units = 0.0

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        rows = super().get(task_ids)
        self.read_units += sum(_reads(size(encode_row(rows[name])) if name in rows else 0) for name in task_ids)
        return rows

    def page(self, status_value: str, **options: Any) -> Page:
        page = super().page(status_value, **options)
        items = map(encode_row, self._real.get([entry.task_id for entry in page.entries]).values())
        entries = [{name: item[name] for name in PROJECTED if name in item} for item in items]
        self.read_units += _reads(sum(map(size, entries))) / 2
        return page

    def lanes(self, strange: Callable[[str], None] = lambda suffix: None) -> list[Lane]:
        self.read_units += 1
        return super().lanes(strange)

    def put(self, rows: Sequence[Row], *, fresh: bool = False) -> list[Applied]:
        return self._billed([row["taskId"] for row in rows], lambda: super(Billed, self).put(rows, fresh=fresh))

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        return self._billed([write.task_id for write in batch], lambda: super(Billed, self).apply(batch))

    def sibling(self) -> Any:
        return self

    def _billed(self, ids: Sequence[str], write: Callable[[], list[Applied]]) -> list[Applied]:
        before = self._real.get(list(dict.fromkeys(ids)))
        answers = write()
        for name, answer in zip(ids, answers, strict=True):
            old = encode_row(before[name]) if name in before else None
            self.write_units += write_units(old, encode_row(answer.row))[0] if answer.won and answer.row else 1
        return answers


def _reads(of_bytes: int) -> int:
    return max(1, ceil(of_bytes / 4096))


class SilentQueue:
    """A client of SQS whose queue is empty. It waits as long as it is asked to, in simulated time."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._until: float | None = None
        self._is_closed = False
        self.requests = 0

    def receive_message(self, *, WaitTimeSeconds: int, **_: Any) -> dict[str, Any]:
        with self._changed:
            self.requests += 1
            self._until = self._clock.monotonic() + WaitTimeSeconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._until is None or self._is_closed)
        return {}

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
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _await_listener(self) -> None:
        assert self._changed.wait_for(lambda: self._until is not None or self._is_closed, LONG_S)


class Month:
    """An idle agent's requests, of half an hour of simulated time, in a month of 730 hours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, doorbell: bool, fleet: int = 1) -> None:
        clock = FakeClock()
        engine, silent = Billed(SqliteEngine(MEMORY, clock=clock)), SilentQueue(clock)
        store = TaskStore(engine, monotonic=clock.monotonic)
        url = "https://sqs.us-east-1.amazonaws.com/000000000000/wake"
        bell = SqsDoorbell(url, make_client=lambda url, config: silent, monotonic=clock.monotonic, now=clock.now)
        agent = Agent(
            store,
            Registry(a_job()),
            load_settings(store=f"sqlite://{MEMORY}"),
            rng=random.Random(1),
            first_poll_s=0.0,
            doorbell=bell if doorbell else None,
        )
        for number in range(fleet - 1):
            info = {"queues": {"default": 10}, "jobs": ["test.job"], "health": dict(agent.vitals.entry())}
            store.announce(f"host-{number}:1:00000000", info, lives_s=2 * IDLE_S)
        engine.read_units = engine.write_units = 0.0
        end, counted = clock.now() + IDLE_S, list[float]()

        def gather(pause: float) -> None:
            """What the agent's loop does instead of waiting."""
            if counted or not doorbell:
                clock.advance(max(LEAST_S, pause))
            else:
                silent.advance(pause)
            if clock.now() >= end and not counted:
                counted.extend([engine.read_units, engine.write_units, silent.requests])
                agent.stop()

        class Simulated(datetime):
            """The agent's housekeeping goes by the host's clock, through its library."""

            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Self:
                return cls.fromtimestamp(clock.now(), UTC).replace(tzinfo=tz)

        monkeypatch.setattr(schedule, "datetime", SimpleNamespace(datetime=Simulated, timedelta=timedelta))
        monkeypatch.setattr(agent._in_flight, "gather", gather)
        agent.run()
        self.read_units, self.write_units, self.sqs_requests = (number * MONTH_S / IDLE_S for number in counted)


@pytest.mark.slow
def test_an_idle_agent_with_a_doorbell_reads_for_less_than_ten_cents_a_month(monkeypatch: pytest.MonkeyPatch) -> None:
    polls = Month(monkeypatch, doorbell=False)
    bell = Month(monkeypatch, doorbell=True)
    fleet = Month(monkeypatch, doorbell=True, fleet=5)
    assert store_dollars(read_units=bell.read_units) <= 0.10
    assert bell.read_units < 0.8 * polls.read_units, "it polls less"
    assert bell.write_units == pytest.approx(polls.write_units, rel=0.05)
    assert store_dollars(write_units=bell.write_units) <= 0.12
    assert fleet.read_units > bell.read_units, "it reads the rows of the others"
    assert polls.sqs_requests == 0
    assert bell.sqs_requests == pytest.approx(MONTH_S / 20, rel=0.05), "one long poll after the other"
    assert bell.sqs_requests < SQS_FREE
    assert bell.sqs_requests * SQS_DOLLARS / 1e6 < 0.06, "where none is free any more"


def test_a_pause_and_its_end_cost_two_write_units() -> None:
    engine = Billed(SqliteEngine(MEMORY))
    client = Client(TaskStore(engine), load_settings(store=f"sqlite://{MEMORY}"))
    client.pauses.pause(queue="reports", reason="measured")  # puts the row
    client.pauses.resume(queue="reports")
    engine.write_units = 0.0
    client.pauses.pause(queue="reports", reason="measured")
    client.pauses.resume(queue="reports")
    assert engine.write_units == 2
