"""What runs beside the loop of an agent, as its settings ask for it. `thunderagent run` uses it, and nothing hidden."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from thunderagent.agent.ec2 import Metadata, Notices
from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.monitor import Monitor, Systemd
from thunderagent.agent.health.probes import Metrics, Probes
from thunderagent.agent.instruments import make_meter, measuring_threads
from thunderagent.agent.recycling import Recycling
from thunderagent.agent.region_parts import region_watch
from thunderagent.agent.threads import BackgroundThread
from thunderagent.jobs.extension import extension
from thunderagent.regions.arbiter import Wellness
from thunderagent.telemetry.prometheus import is_installed, prometheus_text

if TYPE_CHECKING:
    from thunderagent.agent.loop import Agent


def equip(agent: Agent, *, metrics: Metrics | None = None) -> list[BackgroundThread]:
    """The threads of an agent, for `Agent(..., threads=equip)`.

    Args:
        agent: the one that they run beside.
        metrics: what `/metrics` answers, in the text format of Prometheus; None: those of a meter.

    Raises:
        ConfigurationError: the folder of `health_folder` or the ports of `http_port` are not to be had.
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
        agent.told["http"] = probes.url
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
        http=agent.told.get("http"),
        wake=agent.vitals.wake,
    )
    well: Wellness | None = None
    if settings.canary_targets:
        canary = extension("canary.watch")(
            settings,
            agent.bus,
            who=agent.name,
            told=agent.told,
            now=agent.store.clock.now,
            monotonic=agent.store.monotonic,
        )
        threads.insert(0, canary)
        well = canary if canary.has_own_target else None
    return [*region_watch(agent, well), *threads, monitor.thread()]
