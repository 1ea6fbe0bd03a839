"""How long from an enqueue to the handler: with the doorbell, and with polls alone.

Tasks are enqueued one at a time, by this process; one agent runs them, a process of its own. Both read the monotonic
clock of the machine: before the enqueue, and in the first statement of the handler.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from botocore.config import Config

from benchmarks.cronfree_figures import DOORBELL, Latency
from benchmarks.cronfree_jobs import Nothing, note
from benchmarks.places import HOST, Place
from benchmarks.processes import BenchFailed
from benchmarks.sections import Line, number_text
from benchmarks.streams_children import Child, children
from thunderagent.client import Client
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.settings import load_settings
from thunderagent.stores.dynamo.connection import LOCAL_REGION, build, new_session
from thunderagent.stores.opening import open_store

WAIT_S: Final = 120.0
"""Longest wait for one task: twice that of an agent which relies on its doorbell."""

DOORBELL_MS: Final = {"sqlite": (5.0, None), "ministack": (20.0, 150.0)}
"""Median and 99th percentile to reach."""

SETTLE_S: Final = 1.0
"""After the first task, which makes the connections; it is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """One way in which tasks are found."""

    name: str
    doorbell: bool
    gaps_s: tuple[float, float]
    """Pauses between two tasks: uneven, so that polls are met at every phase."""
    share: float = 1.0
    """Of the tasks."""
    settings: dict[str, Any] = field(default_factory=dict)


WAYS: Final = (
    How(name=DOORBELL, doorbell=True, gaps_s=(0.15, 0.55)),
    How(
        name="polls, 1 s",
        doorbell=False,
        gaps_s=(0.15, 0.55),
        settings={"poll_min_s": 1.0, "poll_max_s": 1.0, "poll_idle_s": 1.0},
    ),
    How(name="polls, default", doorbell=False, gaps_s=(2.0, 7.0), share=0.1),
)
"""By default an agent that finds nothing looks again after 1 s, then less and less often: its tasks come so far apart
that it gets there."""


def measure_latency(place: Place, tasks: int, deadline_s: float, progress: Callable[[str], None]) -> Iterator[Latency]:
    """Each way on one store.

    Raises:
        BenchFailed: tasks did not run in time.
    """
    for how in WAYS:
        number = max(1, round(tasks * how.share))
        progress(f"latency on {place.name}, {how.name}: {number} tasks")
        yield _measure(place, how, number, min(deadline_s, WAIT_S))


def _measure(place: Place, how: How, number: int, deadline_s: float) -> Latency:
    before = round(os.getloadavg()[0], 2)
    overrides = {"store": place.fresh(), "queues": {place.queue: 10}, **how.settings}
    folder = Path(place.folder) / f"latency-{time.monotonic_ns()}"
    folder.mkdir()
    with children(folder) as started, wake_queue(place, how) as more:
        settings = load_settings(**overrides, **more)
        client = Client(open_store(settings), settings, doorbell=open_doorbell(settings) if how.doorbell else None)
        try:
            client.store.engine.check()
            given = {"doorbell": how.doorbell, "settings": {**overrides, **more}}
            agent = started.start("benchmarks.cronfree_launcher", given)
            agent.until("polling", lambda state: state["polled"] >= 1, deadline_s)
            waits, calls = _ask(client, agent, place.queue, how, number, deadline_s)
        finally:
            client.close()
        agent.end(politely=True)
    return Latency(
        store=place.name,
        how=how.name,
        tasks=number,
        p50_ms=median(waits),
        p99_ms=quantiles(waits, n=100, method="inclusive")[98] if number > 1 else waits[0],
        worst_ms=waits[-1],
        enqueue_p50_ms=median(calls),
        load_before=before,
    )


def _ask(
    client: Client, agent: Child, queue: str, how: How, number: int, deadline_s: float
) -> tuple[list[float], list[float]]:
    """Milliseconds that each task waited, and that each call took, in order."""
    rng = random.Random(1)
    client.enqueue(note, Nothing(), queue=queue)
    agent.until("warm", lambda state: state["number"] >= 1, deadline_s)
    time.sleep(SETTLE_S)
    sent: dict[str, float] = {}
    calls: list[float] = []
    for index in range(number):
        if index:
            time.sleep(rng.uniform(*how.gaps_s))
        now = time.monotonic()
        sent[client.enqueue(note, Nothing(n=index), queue=queue).task_id] = now
        calls.append((time.monotonic() - now) * 1000.0)
    state = agent.until("done", lambda state: state["number"] > number, deadline_s)
    if state["failed"]:
        raise BenchFailed(f"{agent.name} had {state['failed']} failures:\n{agent.tail()}")
    began = agent.ask("started")["started"]
    return sorted((began[task_id] - at) * 1000.0 for task_id, at in sent.items()), sorted(calls)


@contextmanager
def wake_queue(place: Place, how: How) -> Iterator[dict[str, str]]:
    """The setting of a new queue on the same local engine, which goes with the block; nothing where none is needed."""
    if not how.doorbell or not place.endpoint:
        yield {}
        return
    sqs = build(
        lambda: new_session(local=True).client(
            "sqs",
            region_name=LOCAL_REGION,
            endpoint_url=place.endpoint,
            config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
        )
    )
    url: str = sqs.create_queue(QueueName=f"wake-{time.monotonic_ns()}")["QueueUrl"]
    if f"//{HOST}:" not in url and "//localhost:" not in url:
        raise BenchFailed(f"the local engine has its queue elsewhere: {url}")
    try:
        yield {"wake_queue_url": url}
    finally:
        sqs.delete_queue(QueueUrl=url)
        sqs.close()


def waited(one: Latency) -> Iterator[Line]:
    """The lines of the report."""
    goals = DOORBELL_MS.get(one.store, (None, None)) if one.how == DOORBELL else (None, None)
    name = f"{one.store}, {one.how}, {one.tasks} tasks"
    for told, value, goal in zip(("p50", "p99"), (one.p50_ms, one.p99_ms), goals, strict=True):
        shown, met = (f"≤ {goal:g} ms", value <= goal) if goal is not None else ("", None)
        yield Line(f"{name}: {told}, ms", number_text(value), "", shown, met)
    if one.how == DOORBELL:
        yield Line("  of that the call of enqueue: p50, ms", number_text(one.enqueue_p50_ms))
