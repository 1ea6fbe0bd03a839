"""What runs beside the loop of an agent, as its settings ask for it. `thunderagent run` uses it, and nothing hidden."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from thunderagent.agent.ec2 import Notices
from thunderagent.agent.health.file import HealthFile
from thunderagent.agent.health.monitor import Monitor
from thunderagent.agent.health.probes import Metrics, Probes
from thunderagent.agent.health.systemd import Systemd
from thunderagent.agent.instruments import make_meter, measuring_companions
from thunderagent.agent.metadata import Metadata
from thunderagent.agent.recycling import Recycling
from thunderagent.agent.region_parts import region_watch
from thunderagent.agent.threads import Companion
from thunderagent.telemetry.prometheus import is_installed, prometheus_text
from thunderagent.websocket_api.canary.making import make_watch

if TYPE_CHECKING:
    from thunderagent.agent.loop import Agent


def equip(agent: Agent, *, metrics: Metrics | None = None) -> list[Companion]:
    """The companions of an agent, for `Agent(..., companions=equip)`.

    Args:
        agent: the one that they run beside.
        metrics: what `/metrics` answers, in the text format of Prometheus; None: those of a meter.

    Raises:
        ConfigurationError: the folder of `health_folder` or the ports of `http_port` are not to be had.
    """
    settings, companions = agent.settings, list[Companion]()
    meter = make_meter(agent)
    if meter is not None:
        metrics = metrics or (partial(prometheus_text, meter) if is_installed() else None)
        companions += measuring_companions(agent, meter)
    if settings.ec2_notices:
        companions.append(Notices(Metadata(), agent.bus, retire=agent.retire, hold=agent.controls.hold))
    if settings.http_port:
        probes = Probes(
            settings.http_host, settings.http_port, agent=agent.name, health=agent.vitals.health, metrics=metrics
        )
        agent.told["http"] = probes.url
        companions.append(probes)
    recycling = Recycling(settings, agent.bus, retire=agent.retire, held=agent.vitals.held)
    if recycling.is_needed:
        companions.append(recycling.companion())
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
    canary = make_watch(
        settings,
        agent.bus,
        who=agent.name,
        told=agent.told,
        now=agent.store.clock.now,
        monotonic=agent.store.monotonic,
    )
    if canary is not None:
        companions.insert(0, canary)
    well = canary if canary is not None and canary.has_own_target else None
    return [*region_watch(agent, well), *companions, monitor.companion()]
