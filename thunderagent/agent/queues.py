"""What an agent serves: its queues, with a poller for each and for each kind of task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thunderagent.agent.core import Core
from thunderagent.agent.poller import QueuePoller, Served, SlotPool
from thunderagent.agent.settle import Policy
from thunderagent.agent.stream_balance import Fleet, StreamPoller
from thunderagent.jobs.registry import Registry
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.pacing import PollPace
from thunderagent.model.task import BATCH, DEFAULT_QUEUE, STREAM
from thunderagent.queue.limits.permits import conflicts
from thunderagent.settings import Settings, lease_problems

STREAM_POLL_S: Final = 1.0
"""Longest pause between polls for streams: one that was handed off is claimed within about a second."""

BUILT_IN_QUEUE: Final = "thunderagent"
"""The queue of built-in jobs, served by every agent that has them."""
BUILT_IN_SLOTS: Final = 2
"""The canary needs one for itself, and one for the task that it puts."""

KINDS: Final = (BATCH, STREAM)


def make_pollers(core: Core, fleet: Fleet) -> dict[Served, QueuePoller]:
    """A poller for each queue and kind: streams share one pool beside the slots of the queues."""
    store, jobs, settings = core.store, core.jobs, core.settings
    streams = SlotPool(settings.max_streams)
    names = {
        kind: {name: core.lease_s(name) for name, job in jobs.by_value.items() if job.kind == kind} for kind in KINDS
    }
    queues = {kind: {job.queue for job in jobs.values() if job.kind == kind} | set(settings.queues) for kind in KINDS}
    slow = PollPace(settings.poll_min_s, settings.poll_max_s, settings.poll_idle_s)
    seconds = min(STREAM_POLL_S, settings.poll_max_s)
    common: dict[str, Any] = {"known": jobs.by_value, "page": settings.batch_page, "bus": core.bus, "rng": core.rng}
    pollers: dict[Served, QueuePoller] = {}
    for name, slots in _queues(jobs, settings).items():
        if name in queues[BATCH] or name == DEFAULT_QUEUE:
            pace = PollPace(slow.min_s, slow.max_s, slow.idle_s)
            pollers[name, BATCH] = QueuePoller(name, SlotPool(slots), store, jobs=names[BATCH], pace=pace, **common)
        if names[STREAM] and settings.max_streams:
            often = name in queues[STREAM]  # so that a stream that was handed off is claimed at once
            pace = PollPace(seconds, seconds, seconds) if often else PollPace(slow.min_s, slow.max_s, slow.idle_s)
            pollers[name, STREAM] = StreamPoller(
                name, streams, store, jobs=names[STREAM], pace=pace, fleet=fleet, **common
            )
    return pollers


def policy_of(settings: Settings) -> Policy:
    """The numbers that settling needs."""
    return Policy(
        backoff=settings.backoff,
        max_retry=settings.max_retry,
        keep_success_s=settings.keep_success_days * 86400,
        keep_failed_s=settings.keep_failed_days * 86400,
    )


def summary_of(pollers: Mapping[Served, QueuePoller]) -> str:
    """The queues with their slots: `default:10, feeds:700 streams`."""
    return ", ".join(f"{one.queue}:{one.slots}{' streams' * (one.kind == STREAM)}" for one in pollers.values())


def slots_of(pollers: Mapping[Served, QueuePoller]) -> int:
    """Tasks that can be held at once; a shared pool counts once."""
    return sum(pool.slots for pool in {one.pool for one in pollers.values()})


def check_leases(jobs: Registry, settings: Settings) -> None:
    """Check jobs against the settings.

    Raises:
        ConfigurationError: lease and heartbeat of a job do not fit together, jobs that share a limit have different
            numbers, or a hook names an unknown job.
    """
    jobs.check_hooks()
    problems = []
    for job in jobs.values():
        lease_s, beat_s = job.lease_s or settings.lease_s, job.heartbeat_s or settings.heartbeat_s
        problems += lease_problems(lease_s, beat_s, f"the lease_s of {job.name!r}", f"the heartbeat_s of {job.name!r}")
    problems += conflicts(jobs.values())
    if problems:
        raise ConfigurationError("these jobs cannot work:\n" + "\n".join(f"  - {one}" for one in problems))


def tick_s(jobs: Registry, settings: Settings) -> float:
    """Pause of the heartbeat between two rounds: a quarter of its shortest interval, at most a second."""
    intervals = [job.heartbeat_s or settings.heartbeat_s for job in jobs.values()]
    intervals += [job.timeout_s for job in jobs.values() if job.timeout_s]
    return min(1.0, settings.heartbeat_s / 4, *(interval / 4 for interval in intervals))


def _queues(jobs: Registry, settings: Settings) -> Mapping[str, int]:
    """Queues to serve with slots: of the settings, else of the jobs and the default queue; and of built-in ones."""
    queues = settings.queues or dict.fromkeys((*jobs.queues, DEFAULT_QUEUE), settings.slots)
    return {**queues, BUILT_IN_QUEUE: BUILT_IN_SLOTS} if BUILT_IN_QUEUE in jobs.queues else queues
