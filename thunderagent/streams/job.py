"""`@stream`: makes a coroutine function a job that holds a connection until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from thunderagent.jobs.job import Job, make_job
from thunderagent.jobs.versions import Upcaster
from thunderagent.model.errors import StreamFailed
from thunderagent.model.pacing import Backoff
from thunderagent.model.task import STREAM
from thunderagent.streams.context import StreamContext

P = TypeVar("P")

STREAMS: str = "streams"
"""Default queue of streams: in a queue with batch tasks, an agent reads past those to find the streams."""


def stream(
    name: str,
    *,
    queue: str = STREAMS,
    lease_s: float = 20.0,
    heartbeat_s: float = 5.0,
    max_retry: int | None = None,
    fatal: tuple[type[BaseException], ...] = (),
    backoff: Backoff | None = None,
    exclusive: bool = True,
    limit: int | None = None,
    limit_key: str | None = None,
    version: int = 1,
    upcasters: Mapping[int, Upcaster] | None = None,
) -> Callable[[Callable[[StreamContext, P], Any]], Job[P]]:
    """Make a coroutine function `(ctx, payload)` a job that holds a connection for as long as it is wanted.

    Args:
        name: what tasks carry; never change it while tasks with it exist.
        queue: the queue of its tasks.
        lease_s: length of the lease: so long the stream stays with an agent that is silent.
        heartbeat_s: time between renewals, at most a third of the lease; each saves the cursor.
        max_retry: retries after errors in a row, without progress in between; None takes the setting.
        fatal: exceptions after which a retry makes no sense.
        backoff: delay before retries; None takes the settings.
        exclusive: an agent disconnects before the next one connects. False: the next one connects and buffers first, so
            that nothing is missed; it needs positions.
        limit: how many streams of this job are held at once in the whole fleet; None: no limit.
        limit_key, version, upcasters: as for `job`.

    Raises:
        ConfigurationError: the options cannot work; all problems are listed.
    """

    def decorate(handler: Callable[[StreamContext, P], Any]) -> Job[P]:
        return make_job(
            name,
            handler,
            kind=STREAM,
            queue=queue,
            max_retry=max_retry,
            fatal=(*(fatal if isinstance(fatal, (tuple, list)) else (fatal,)), StreamFailed),
            lease_s=lease_s,
            heartbeat_s=heartbeat_s,
            backoff=backoff,
            exclusive=exclusive,
            limit=limit,
            limit_key=limit_key,
            version=version,
            upcasters=upcasters,
        )

    return decorate
