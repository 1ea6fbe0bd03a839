"""What an agent's settings ask for to measure it: a meter, and the threads that send and count for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from thunderagent.agent.threads import BackgroundThread, RepeatingThread
from thunderagent.model.outlet import dropped_lines
from thunderagent.settings import Settings
from thunderagent.telemetry import metrics
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.metrics import Metric
from thunderagent.telemetry.prometheus import is_installed
from thunderagent.telemetry.queue_gauges import MEASURE_S, QueueMeasure

if TYPE_CHECKING:
    from thunderagent.agent.loop import Agent


def make_meter(agent: Agent) -> Meter | None:
    """The meter of an agent; None when its settings let nobody read it."""
    settings = agent.settings
    if not (settings.cloudwatch_namespace or (settings.http_port and is_installed())):
        return None
    meter = Meter(agent.bus, monotonic=agent.store.monotonic)
    meter.add_source(partial(_gauges, agent))
    consumed = getattr(agent.store.engine, "consumed", None)
    if consumed is not None:
        meter.add_source(partial(_units, consumed))
    return meter


def measuring_threads(agent: Agent, meter: Meter) -> list[BackgroundThread]:
    """The threads that count the queues, and that send everything to CloudWatch if a namespace is set."""
    queues = QueueMeasure(agent.store, agent.bus, owner=agent.name, gate=agent.gate)
    threads: list[BackgroundThread] = [RepeatingThread("measure", MEASURE_S, queues.look)]
    if agent.settings.cloudwatch_namespace:
        # boto3 is slow to import, and an embedded store does not need it
        from thunderagent.telemetry.cloudwatch import HALF_MINUTE_S, CloudWatch, Export

        where = cloudwatch_place(agent.settings)
        to = CloudWatch(agent.settings.cloudwatch_namespace, now=agent.store.clock.now, **where)
        export = Export(meter, to, agent.bus)
        threads.append(RepeatingThread("cloudwatch", HALF_MINUTE_S, export.turn, last=export.last))
    return threads


def cloudwatch_place(settings: Settings) -> dict[str, str | None]:
    """Region and endpoint of CloudWatch: those of the table, but no endpoint other than a local engine's."""
    from thunderagent.stores.aws import is_loopback

    query = dict(parse_qsl(urlsplit(settings.store).query)) if settings.store.startswith("dynamodb://") else {}
    endpoint = query.get("endpoint")
    return {"region": query.get("region"), "endpoint": endpoint if is_loopback(endpoint) else None}


def _gauges(agent: Agent) -> Iterator[tuple[Metric, str, float]]:
    """What can be looked up at any moment, so that also a page in the first minute of an agent has it."""
    yield metrics.SLOTS_USED, "", float(agent.running)
    yield metrics.SLOTS, "", float(agent.vitals.slots)
    yield metrics.LINES_DROPPED, "", float(dropped_lines())
    skew_s = getattr(agent.store.clock, "skew", None)
    if skew_s is not None:
        yield metrics.CLOCK_SKEW, "", skew_s


def _units(consumed: Any) -> Iterator[tuple[Metric, str, float]]:
    """What the store has counted: requests, units by purpose, throttles by reason."""
    yield metrics.STORE_REQUESTS, "", consumed.requests
    for purpose, spent in consumed.by_purpose().items():
        if spent.read_units:
            yield metrics.READ_UNITS, purpose, spent.read_units
        if spent.billed_write_units:
            yield metrics.WRITE_UNITS, purpose, spent.billed_write_units
    for reason, number in consumed.throttles().items():
        yield metrics.THROTTLES, reason, float(number)
