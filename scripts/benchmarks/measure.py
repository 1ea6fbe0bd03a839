"""One measurement: fill a store, let warm agents drain it, ask the idle agents for more."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from benchmarks import naive
from benchmarks.measurement import TASK_UNITS, Load, Measurement, drained_by
from benchmarks.nojobs import Number, nothing
from benchmarks.places import Place
from benchmarks.processes import BenchFailed, Fleet, fleet
from benchmarks.tally import total
from benchmarks.units import verb_units
from thunderagent.client import Client
from thunderagent.settings import load_settings
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.opening import open_store

GAPS_S: Final = (0.15, 0.55)
"""Pauses between the tasks that idle agents get: uneven, so that polls are met at every phase."""


def measure(place: Place, agents: int, load: Load) -> Measurement:
    """Measure so many agents."""
    url = place.fresh()
    client = _client(url, load)
    engine = client.store.engine
    consumed = engine.consumed if isinstance(engine, DynamoEngine) else None
    if consumed:
        consumed.enabled = True
    overrides = {
        "store": url,
        "queues": {place.queue: load.slots},
        "batch_page": load.page,
        "poll_min_s": load.poll_s,
        "poll_max_s": load.poll_s,
        "poll_idle_s": load.poll_s,
        "log_level": load.log_level,
    }
    folder = Path(place.folder) / f"agents-{time.monotonic_ns()}"
    try:
        engine.check()
        before = round(os.getloadavg()[0], 2)
        single_s, bulk_s = _fill(client, place.queue, load)
        put_units = consumed.write_units + consumed.refused if consumed else 0.0
        put_requests = consumed.requests if consumed else 0
        with fleet("benchmarks.launcher", agents, folder, json.dumps(overrides)) as started:
            started.go()
            tallies = started.await_ended(load.tasks, load.deadline_s)
            drained = drained_by(agents, load.tasks, tallies, load.single / single_s, load.tasks - load.single, bulk_s)
            drained.load_before = before
            if load.latency:
                _ask(drained, client, place.queue, started, load)
            started.stop()
            every = Counter(task_id for task_id, _ in started.runs())
            drained.run_twice = sum(count - 1 for count in every.values())
            drained.not_succeeded = sum(one.otherwise for one in started.tallies())
        if consumed:
            counted = total(tallies)
            drained.requests = (counted.requests + put_requests) / load.tasks
            drained.write_units = (counted.write_units + counted.refused + put_units) / load.tasks
            drained.read_units = counted.read_units / load.tasks
            drained.verbs, drained.verbs_told, drained.row_bytes = verb_units(client, f"{place.queue}-units")
            lasting = sum(units for verb, units in drained.verbs.items() if verb != "heartbeat")
            drained.write_units_billed = lasting + drained.failed_claims
        return drained
    finally:
        if place.given:
            client.purge("SUCCESS", queue=place.queue)
        client.close()


def measure_naive(place: Place, agents: int, load: Load) -> Measurement:
    """Measure so many naive loops."""
    url = place.fresh().replace("/tasks-", "/naive-")
    before = round(os.getloadavg()[0], 2)
    single_s, bulk_s = naive.fill(url, load.single, load.tasks - load.single, load.deadline_s)
    folder = Path(place.folder) / f"naive-{time.monotonic_ns()}"
    with fleet("benchmarks.naive", agents, folder, json.dumps({"store": url})) as started:
        started.go()
        tallies = started.await_exit(load.deadline_s)
        every = Counter(task_id for task_id, _ in started.runs())
    drained = drained_by(agents, load.tasks, tallies, load.single / single_s, load.tasks - load.single, bulk_s)
    drained.load_before = before
    drained.run_twice = sum(count - 1 for count in every.values())
    drained.not_succeeded = load.tasks - len(every)
    if not url.startswith("sqlite"):
        counted = total(tallies)
        drained.write_units_billed = TASK_UNITS + drained.failed_claims
        drained.requests = 1 + counted.requests / load.tasks
        drained.write_units = 2 + (counted.write_units + counted.refused) / load.tasks
        drained.read_units = counted.read_units / load.tasks
    return drained


def _client(url: str, load: Load) -> Client:
    settings = load_settings(store=url, slots=load.slots)
    return Client(open_store(settings), settings)


def _fill(client: Client, queue: str, load: Load) -> tuple[float, float]:
    """Enqueue one by one, then many; seconds that each took."""
    began = time.perf_counter()

    def in_time(_: int = 0) -> None:
        if time.perf_counter() - began > load.deadline_s:
            raise BenchFailed(f"the tasks could not be enqueued in {load.deadline_s:g} s")

    for number in range(load.single):
        in_time()
        client.enqueue(nothing, Number(n=number), queue=queue)
    between = time.perf_counter()
    payloads = (Number(n=number) for number in range(load.single, load.tasks))
    answers = client.enqueue_many(nothing, payloads, queue=queue, on_progress=in_time)
    ended = time.perf_counter()
    for answer in answers:
        if answer.error:
            raise answer.error
    return between - began, ended - between


def _ask(drained: Measurement, client: Client, queue: str, started: Fleet, load: Load) -> None:
    """Give idle agents a task now and then: how long until each is started."""
    rng = random.Random(1)
    time.sleep(load.poll_s * 2)
    sent: dict[str, float] = {}
    for number in range(load.latency):
        now = time.monotonic()
        sent[client.enqueue(nothing, Number(n=number), queue=queue).task_id] = now
        time.sleep(rng.uniform(*GAPS_S))
    started.await_ended(load.tasks + load.latency, load.deadline_s)
    waits = sorted((at - sent[task_id]) * 1000 for task_id, at in started.runs() if task_id in sent)
    drained.latency_p50_ms = median(waits)
    drained.latency_p99_ms = quantiles(waits, n=100, method="inclusive")[98] if len(waits) > 1 else waits[0]
