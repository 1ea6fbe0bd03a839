"""How long from an enqueue to its handler: with the doorbell, and with polls alone.

Tasks are enqueued one at a time, by this process; agents run them, each a process of its own. All read the monotonic
clock of the machine: before the enqueue, and in the first statement of the handler.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Final

from benchmarks import harness
from benchmarks.agent import Number, note
from benchmarks.harness import Numbers, Place, Plan, Progress, Section
from thunderagent.client import Client
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.stores.aws import LOCAL_REGION, build, new_session

WAIT_S: Final = 120.0
"""Longest wait for one task: twice that of an agent which relies on its doorbell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way in which agents find tasks."""

    name: str
    doorbell: bool = False
    gaps_s: tuple[float, float] = (0.15, 0.55)
    """Pauses between two tasks: uneven, so that polls are met at every phase."""
    share: float = 1.0
    """Of the tasks."""
    settings: Mapping[str, float] = field(default_factory=dict)


DOORBELL: Final = Way(name="doorbell", doorbell=True)
WAYS: Final = (
    DOORBELL,
    Way(name="polls, 1 s", settings={"poll_min_s": 1.0, "poll_max_s": 1.0, "poll_idle_s": 1.0}),
    Way(name="polls, default", gaps_s=(2.0, 7.0), share=0.1),
)
"""By default an agent that finds nothing looks again after 1 s, then less and less often: its tasks come so far apart
that it gets there."""

GOALS: Final[Mapping[tuple[str, str], Mapping[str, float]]] = {
    ("sqlite", "doorbell"): {"p50, ms": 5.0},
    ("ministack", "doorbell"): {"p50, ms": 20.0, "p99, ms": 150.0},
    ("sqlite", "polls, 1 s"): {"p99, ms": 1500.0},
    ("ministack", "polls, 1 s"): {"p99, ms": 1500.0},
}
"""The most that is wanted, by store and way."""


def measure_latency(place: Place, plan: Plan, progress: Progress) -> list[Section]:
    """Each way with each number of agents. The doorbell needs SQLite or the SQS of ministack.

    Raises:
        BenchFailed: tasks did not run in time.
    """
    sections = []
    for agents in plan.agents:
        for way in WAYS:
            if way.doorbell and place.name not in ("sqlite", "ministack"):
                continue
            number = max(1, round(plan.samples * way.share))
            progress(f"latency, {way.name}, tasks: {number}")
            goals = {name: (-math.inf, most) for name, most in GOALS.get((place.name, way.name), {}).items()}
            title = (
                f"from the enqueue to the handler, {place.name}, {way.name}, {number} task{'s' if number > 1 else ''}"
            )
            title += f", {agents} agents" if agents > 1 else ""
            sections.append(harness.section(title, _measure(place, plan, way, agents, number), goals=goals))
    return sections


def _measure(place: Place, plan: Plan, way: Way, agents: int, number: int) -> Numbers:
    before, rng = harness.load_now(), random.Random(1)
    sent: dict[str, float] = {}
    calls: list[float] = []
    with wake_queue(place, way) as more, harness.children(place.folder) as start:
        overrides = {"store": place.fresh(), **way.settings, **more}
        settings = load_settings(**overrides)
        client = Client(open_store(settings), settings, doorbell=open_doorbell(settings) if way.doorbell else None)
        client.store.engine.check()
        started = [start("agent", {"settings": overrides, "doorbell": way.doorbell}) for _ in range(agents)]
        for agent in started:
            agent.ask("go")
        harness.until(started, "polling", lambda states: all(one["polled"] for one in states), WAIT_S)

        def send(index: int) -> None:
            now = time.monotonic()
            sent[client.enqueue(note, Number(n=index)).task_id] = now
            calls.append((time.monotonic() - now) * 1000.0)

        def await_begun() -> None:
            states = harness.until(
                started, "done", lambda states: sum(one["begun"] for one in states) >= len(sent), WAIT_S
            )
            if any(one["failed"] for one in states):
                raise started[0].failure("or another agent had tasks that failed")

        try:
            send(0)  # makes the connections, and is not counted
            await_begun()
            time.sleep(min(1.0, plan.settle_s))
            for index in range(number):
                time.sleep(rng.uniform(*way.gaps_s) if index else 0.0)
                send(index)
            await_begun()
        finally:
            client.close()
        began = {name: at for agent in started for name, at in agent.ask("first")["first"].items()}
    waits = sorted((began[task_id] - at) * 1000.0 for task_id, at in list(sent.items())[1:])
    return {
        "p50, ms": median(waits),
        "p99, ms": quantiles(waits, n=100, method="inclusive")[98] if number > 1 else waits[0],
        "worst, ms": waits[-1],
        "of that the call of enqueue, p50, ms": median(calls[1:]),
        "load of the machine before": before,
    }


@contextmanager
def wake_queue(place: Place, way: Way) -> Iterator[dict[str, str]]:
    """The setting of a new queue on the same local engine, which goes with the block; nothing where none is needed."""
    if not way.doorbell or not place.endpoint:
        yield {}
        return
    session = new_session(local=True)
    sqs = build(lambda: session.client("sqs", region_name=LOCAL_REGION, endpoint_url=place.endpoint))
    url: str = sqs.create_queue(QueueName=f"wake-{time.monotonic_ns()}")["QueueUrl"]
    try:
        yield {"wake_queue_url": url}
    finally:
        sqs.delete_queue(QueueUrl=url)
        sqs.close()
