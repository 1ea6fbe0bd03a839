"""Makes the parts of the canary from settings: the prober, the thread that watches, the jobs of each minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from thunderagent.jobs.job import Job
from thunderagent.model.bus import EventBus
from thunderagent.queue.dependents import Dependents
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.queue.doorbell.sender import DoorbellSender
from thunderagent.queue.enqueue import Enqueuer
from thunderagent.settings import Settings
from thunderagent.stores.tasks import TaskStore
from thunderagent.websocket_api.canary.probe import Prober
from thunderagent.websocket_api.canary.tokens import Tokens
from thunderagent.websocket_api.canary.watch import CanaryWatch
from thunderagent.websocket_api.canary.work import CanaryWork


def observer_of(settings: Settings) -> str:
    """The observer: the region of the settings, of the table or of the environment, else `local`."""
    query = dict(parse_qsl(urlsplit(settings.store).query)) if settings.store.startswith("dynamodb://") else {}
    names = (settings.region, query.get("region"), os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION"))
    return next((name for name in names if name), "local")


def make_prober(settings: Settings, who: str) -> Prober:
    """A prober with the token of the settings.

    Raises:
        ConfigurationError: the settings name no source of a token.
    """
    return Prober(observer_of(settings), Tokens(settings.canary_token_from), who=who)


def make_watch(
    settings: Settings,
    bus: EventBus,
    *,
    who: str,
    facts: dict[str, Any] | None = None,
    now: Callable[[], float],
    monotonic: Callable[[], float],
) -> CanaryWatch:
    """The extension `canary.watch`: watches the targets of the settings."""
    return CanaryWatch(
        settings.canary_targets,
        make_prober(settings, who),
        bus,
        own=observer_of(settings),
        every_s=settings.canary_s,
        facts=facts,
        now=now,
        monotonic=monotonic,
    )


def canary_jobs(
    settings: Settings, store: TaskStore, bus: EventBus, *, who: str, doorbell: Doorbell | None
) -> list[Job[Any]]:
    """The extension `canary.jobs`."""
    keep = {"keep_success_s": settings.keep_success_days * 86400, "keep_failed_s": settings.keep_failed_days * 86400}
    work = CanaryWork(
        settings.canary_targets,
        make_prober(settings, f"{who} job"),
        store=store,
        enqueuer=Enqueuer(store, settings, Dependents(store, bus, **keep)),
        bus=bus,
        sender=DoorbellSender(doorbell),
    )
    return work.jobs()
