"""The parts of an agent, and what runs beside its loop, as its settings ask for them."""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from thunderagent.agent.core import Core, Inbox, StopRequests
from thunderagent.agent.doorbell import DoorbellListener
from thunderagent.agent.ec2 import Metadata, Notices
from thunderagent.agent.executors import make_executors
from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.monitor import Monitor, Systemd
from thunderagent.agent.health.outage import Marks, Outage
from thunderagent.agent.health.probes import Metrics, Probes
from thunderagent.agent.health.vitals import Vitals
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.housekeeping import Housekeeping
from thunderagent.agent.in_flight import InFlight
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.poller import QueuePoller, Served
from thunderagent.agent.queues import check_leases, make_pollers, policy_of, tick_s
from thunderagent.agent.recycling import Recycling
from thunderagent.agent.regions import Gatekeeper, gated, region_watch
from thunderagent.agent.scopes import HandlerScope
from thunderagent.agent.stream_balance import Fleet
from thunderagent.agent.sweep import LostLeases, Rescuer
from thunderagent.agent.threads import BackgroundThread, BackgroundThreads, RepeatingThread
from thunderagent.agent.view import AgentView
from thunderagent.jobs.extension import extension
from thunderagent.jobs.registry import Registry
from thunderagent.jobs.running import Scope
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.outlet import dropped_lines
from thunderagent.model.task import BATCH
from thunderagent.queue.commands import Commands
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.schedules.scheduler import TickScheduler
from thunderagent.regions.arbiter import Wellness
from thunderagent.regions.gate import Gate
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore
from thunderagent.telemetry import metrics as names
from thunderagent.telemetry.meter import Meter
from thunderagent.telemetry.metrics import Metric
from thunderagent.telemetry.prometheus import is_installed, prometheus_text
from thunderagent.telemetry.queue_gauges import MEASURE_S, QueueMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one agent beside its loop."""

    pollers: Mapping[Served, QueuePoller]
    fleet: Fleet
    pauses: PauseWatcher
    heartbeat: Heartbeat
    in_flight: InFlight
    marks: Marks
    outage: Outage
    housekeeping: Housekeeping
    listener: DoorbellListener
    gatekeeper: Gatekeeper
    threads: BackgroundThreads
    vitals: Vitals


def make_core(
    store: TaskStore,
    jobs: Registry,
    settings: Settings,
    *,
    bus: EventBus,
    doorbell: Doorbell | None,
    rng: random.Random,
) -> Core:
    """What all parts of an agent share.

    Raises:
        ConfigurationError: the leases, limits or hooks of some jobs cannot work.
    """
    name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    gate = Gate(settings.region if settings.region_arbiter else None, monotonic=store.monotonic)
    store = gated(store, gate)
    store.unread.listener = lambda one: bus.emit(events.RowUnreadable.of(one))
    if settings.canary_targets:
        jobs = jobs.plus(extension("canary.jobs")(settings, store, bus, who=name, doorbell=doorbell))
    check_leases(jobs, settings)
    inbox = Inbox()
    stop = StopRequests(bus, inbox.wake)
    return Core(
        name=name, store=store, jobs=jobs, settings=settings, bus=bus, rng=rng, gate=gate, inbox=inbox, stop=stop
    )


def make_parts(core: Core, *, doorbell: Doorbell | None, scope: Scope) -> Parts:
    """The parts of an agent; nothing runs yet.

    Args:
        core: what they share.
        doorbell: what the agent listens to; None: it only polls.
        scope: names the task of a handler in log lines.
    """
    store, jobs, settings, bus, monotonic = core.store, core.jobs, core.settings, core.bus, core.store.monotonic
    around = HandlerScope(settings, scope, jobs.hooks, bus)
    marks = Marks(monotonic)
    policy = policy_of(settings)
    dependents = Dependents(store, bus, keep_success_s=policy.keep_success_s, keep_failed_s=policy.keep_failed_s)
    streams = {name for name, job in jobs.by_value.items() if job.is_stream}
    most = settings.max_streams if streams else 0
    fleet = Fleet(store, owner=core.name, max_streams=most, jobs=streams, monotonic=monotonic)
    pollers = make_pollers(core, fleet)
    pauses = PauseWatcher(core, queues={queue for queue, _ in pollers})
    heartbeat = Heartbeat(store.sibling(), bus, tick_s=tick_s(jobs, settings), monotonic=monotonic, gate=core.gate)
    slots = sum(poller.slots for poller in pollers.values() if poller.kind == BATCH)
    in_flight = InFlight(
        core,
        make_executors(core, around.scope, slots=slots, agents=lambda: fleet.size),
        pollers=pollers,
        heartbeat=heartbeat,
        dependents=dependents,
        fleet=fleet,
        pauses=pauses,
    )
    outage = Outage(core, in_flight.selector, marks)
    lost = LostLeases(
        store,
        owner=core.name,
        guard_s=settings.clock_guard_s,
        is_held=in_flight.is_here,
        epoch=lambda: core.gate.epoch,
        is_stray=in_flight.is_stray,
    )
    rescuer = Rescuer(
        store,
        bus,
        dependents,
        lost,
        owner=core.name,
        max_crashes=settings.max_crashes,
        sweep_s=settings.sweep_s,
        limit=in_flight.admission.limit_of,
        freed=in_flight.admission.freed.note,
    )
    ticks = TickScheduler(
        store,
        jobs,
        settings,
        bus,
        owner=core.name,
        cancel=Commands(store, settings, DoorbellSender(doorbell)).cancel,
        on_put=DoorbellSender(doorbell).tasks,
        rng=core.rng,
    )
    listener = DoorbellListener(core, doorbell, in_flight.selector.inbox, heartbeat)
    threads = BackgroundThreads((), bus, hooks=around.threads)
    vitals = Vitals(
        core,
        marks,
        pollers=pollers,
        in_flight=in_flight,
        heartbeat=heartbeat,
        listener=listener,
        pauses=pauses,
        threads=threads,
    )
    return Parts(
        pollers=pollers,
        fleet=fleet,
        pauses=pauses,
        heartbeat=heartbeat,
        in_flight=in_flight,
        marks=marks,
        outage=outage,
        housekeeping=Housekeeping(
            core,
            pollers=pollers,
            in_flight=in_flight,
            rescuer=rescuer,
            ticks=ticks,
            vitals=vitals,
            marks=marks,
            outage=outage,
        ),
        listener=listener,
        gatekeeper=Gatekeeper(core, pauses, in_flight),
        threads=threads,
        vitals=vitals,
    )


def equip(agent: AgentView, *, metrics: Metrics | None = None) -> list[BackgroundThread]:
    """The background threads that the settings of an agent ask for: `Agent(..., threads=equip)`.

    Args:
        agent: the one that they run beside.
        metrics: the answer of `/metrics`, in the text format of Prometheus; None: that of a meter.

    Raises:
        ConfigurationError: the folder of `health_folder` or the port of `http_port` cannot be used.
    """
    settings, threads = agent.settings, list[BackgroundThread]()
    meter = make_meter(agent)
    if meter is not None:
        metrics = metrics or (partial(prometheus_text, meter) if is_installed() else None)
        threads += measuring_threads(agent, meter)
    if settings.ec2_notices:
        threads.append(Notices(Metadata(), agent.bus, retire=agent.retire, hold=agent.pauses.hold))
    if settings.http_port:
        probes = Probes(
            settings.http_host, settings.http_port, agent=agent.name, health=agent.vitals.health, metrics=metrics
        )
        agent.facts["http"] = probes.url
        threads.append(probes)
    recycling = Recycling(settings, agent.bus, retire=agent.retire, held=agent.vitals.held)
    if recycling.is_needed:
        threads.append(recycling.thread())
    file = HealthFile(settings.health_folder, now=time.time) if settings.health_folder else None
    monitor = Monitor(
        agent.name,
        agent.vitals,
        agent.bus,
        file=file,
        systemd=Systemd(),
        http=agent.facts.get("http"),
        wake=agent.vitals.wake,
    )
    well: Wellness | None = None
    if settings.canary_targets:
        canary = extension("canary.watch")(
            settings,
            agent.bus,
            who=agent.name,
            facts=agent.facts,
            now=agent.store.clock.now,
            monotonic=agent.store.monotonic,
        )
        threads.insert(0, canary)
        well = canary if canary.has_own_target else None
    return [*region_watch(agent, well), *threads, monitor.thread()]


def make_meter(agent: AgentView) -> Meter | None:
    """The meter of an agent; None if nothing reads it."""
    settings = agent.settings
    if not (settings.cloudwatch_namespace or (settings.http_port and is_installed())):
        return None
    meter = Meter(agent.bus, monotonic=agent.store.monotonic)
    meter.add_source(partial(_gauges, agent))
    consumed = getattr(agent.store.engine, "consumed", None)
    if consumed is not None:
        meter.add_source(partial(_units, consumed))
    return meter


def measuring_threads(agent: AgentView, meter: Meter) -> list[BackgroundThread]:
    """The threads that count the queues, and that send metrics to CloudWatch if a namespace is set."""
    queues = QueueMeasure(agent.store, agent.bus, owner=agent.name, gate=agent.gate)
    threads: list[BackgroundThread] = [RepeatingThread("measure", MEASURE_S, queues.look)]
    if agent.settings.cloudwatch_namespace:
        # boto3 is slow to import, and an embedded store does not need it
        from thunderagent.telemetry.cloudwatch import HALF_MINUTE_S, CloudWatch, Export, cloudwatch_place

        where = cloudwatch_place(agent.settings.store)
        to = CloudWatch(agent.settings.cloudwatch_namespace, now=agent.store.clock.now, **where)
        export = Export(meter, to, agent.bus)
        threads.append(RepeatingThread("cloudwatch", HALF_MINUTE_S, export.turn, last=export.last))
    return threads


def _gauges(agent: AgentView) -> Iterator[tuple[Metric, str, float]]:
    """Metrics that are read at any moment, so that a page in the first minute of an agent has them."""
    yield names.SLOTS_USED, "", float(agent.running)
    yield names.SLOTS, "", float(agent.vitals.slots)
    yield names.LINES_DROPPED, "", float(dropped_lines())
    skew_s = getattr(agent.store.clock, "skew", None)
    if skew_s is not None:
        yield names.CLOCK_SKEW, "", skew_s


def _units(consumed: Any) -> Iterator[tuple[Metric, str, float]]:
    """Requests to the store, units by purpose, throttles by reason."""
    yield names.STORE_REQUESTS, "", consumed.requests
    for purpose, spent in consumed.by_purpose().items():
        if spent.read_units:
            yield names.READ_UNITS, purpose, spent.read_units
        if spent.billed_write_units:
            yield names.WRITE_UNITS, purpose, spent.billed_write_units
    for reason, number in consumed.throttles().items():
        yield names.THROTTLES, reason, float(number)
