"""What of the settings and of the jobs is allowed, and hardly meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thunderagent.jobs.job import Job
from thunderagent.jobs.registry import Registry
from thunderagent.ops.doctor.findings import Finding, State
from thunderagent.settings import PREFIX, Settings


def doubts_about_settings(settings: Settings) -> Iterator[Finding]:
    """Settings that can work, but hardly as they were meant."""
    if settings.traces and find_spec("opentelemetry") is None:
        remedy = "pip install 'thunderagent[traces]'"
        yield Finding("settings", State.WRONG, f"{PREFIX}TRACES is on and OpenTelemetry is not installed", remedy)
    if settings.http_port and settings.http_host not in ("127.0.0.1", "localhost", "::1"):
        what = f"{PREFIX}HTTP_HOST is {settings.http_host}: whoever reaches it may read the metrics"
        yield Finding("settings", State.WARNING, what, "let a security group allow only who scrapes them")
    folder = settings.health_folder
    if folder and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        what = f"{PREFIX}HEALTH_FOLDER {folder} is no folder that this user can write to"
        yield Finding("settings", State.WARNING, what, f"mkdir -p {folder}, and chown it to the user of the agents")
    if settings.wake_queue_url and settings.store.startswith("sqlite"):
        what = f"{PREFIX}WAKE_QUEUE_URL is set, and an embedded store does not use it"
        yield Finding("settings", State.WARNING, what, "take it away, or name a dynamodb:// store")


def doubts_about_jobs(jobs: Registry, settings: Settings) -> Iterator[Finding]:
    """Jobs and settings that do not know each other."""
    for queue in sorted(set(settings.queues) - set(jobs.queues)):
        what = f"{PREFIX}QUEUES serves the queue {queue}, to which none of these jobs goes"
        yield Finding("jobs", State.WARNING, what, "only tasks put there by name run in its slots: is it misspelt?")
    for queue in sorted(set(jobs.queues) - set(settings.queues)) if settings.queues else ():
        named = ", ".join(sorted(one.name for one in jobs.values() if one.queue == queue))
        what = f"the jobs {named} go to the queue {queue}, which {PREFIX}QUEUES does not serve"
        yield Finding("jobs", State.WARNING, what, f"add it to {PREFIX}QUEUES, or let other agents serve it")
    streams: list[Job[Any]] = [one for one in jobs.values() if one.is_stream]
    if streams and not settings.max_streams:
        what = f"{PREFIX}MAX_STREAMS is 0 and {', '.join(sorted(one.name for one in streams))} are streams"
        yield Finding("jobs", State.WARNING, what, "let other agents hold them, or raise it")
