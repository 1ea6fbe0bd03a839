"""The agent that is measured, as `thunderagent run` starts it, and its jobs, which do nothing.

    python -m benchmarks.agent '{"settings": {"store": "sqlite:///tasks.db", "queues": {"default": 10}}}'

It says hello when everything is imported and connected, and begins at the request `go`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from pydantic import BaseModel

from benchmarks.measured import COUNTS, raise_open_files, serve
from thunderagent.agent.loop import Agent
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import Event, EventBus
from thunderagent.queue.doorbell import open_doorbell
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.stores.dynamo.engine import DynamoEngine
from thunderagent.stores.tasks import Beat, Renewal, TaskStore
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope

BEAT_S: Final = 5.0
LEASE_S: Final = 20.0


class Number(BaseModel):
    """A small payload, as most are."""

    n: int = 0


class Source(BaseModel):
    """Where to connect."""

    url: str


@job("bench.nothing")
def nothing(ctx: Context, payload: Number) -> None:
    """Do nothing: what is left is the cost of the queue."""


@job("bench.note")
def note(ctx: Context, payload: Number) -> None:
    """Note when it began."""
    COUNTS.first(ctx.task_id)


@job("bench.timer", lease_s=LEASE_S, heartbeat_s=BEAT_S)
async def timer(ctx: Context, payload: Number) -> None:
    """Find out how late the event loop is."""
    await COUNTS.tick()


@stream("bench.stream", lease_s=LEASE_S, heartbeat_s=BEAT_S)
async def follow(ctx: StreamContext, payload: Source) -> None:
    """Count the messages of a feed: what is left is the cost of holding connections."""
    is_first = True
    async for message in ctx.connect(payload.url):
        COUNTS.handled += 1
        if is_first:
            COUNTS.first(ctx.task_id)
            is_first = False
        if COUNTS.mode != "raw":
            value = json.loads(message)
            if COUNTS.mode == "checkpoint":
                ctx.checkpoint(seq=value["seq"])


class WatchedStore(TaskStore):
    """The store of the agent, which notes when heartbeats of streams had their answers."""

    last_sent: Final[dict[str, float]] = {}
    """Moment of the last acknowledged beat, by the id of its task. The next one is due an interval later."""

    def sibling(self) -> TaskStore:
        return WatchedStore(self.engine.sibling(), blobs=self.large_texts.blobs, monotonic=self.monotonic)

    def renew(self, beats: Sequence[Beat]) -> list[Renewal]:
        renewals = super().renew(beats)
        now = time.monotonic()
        for beat, renewal in zip(beats, renewals, strict=True):
            if renewal.lease is not None and beat.lease.task.job == follow.name:
                COUNTS.beats += 1
                COUNTS.beat_late_s = max(COUNTS.beat_late_s, now - beat.lease.held_from - BEAT_S)
                self.last_sent[beat.lease.task_id] = renewal.lease.held_from
        return renewals


def count(event: Event, live: set[str]) -> None:
    """Count an event of the agent; `live` has the streams with a connection."""
    match event:
        case events.TaskStarted():
            COUNTS.start(event.task_id)
        case events.TaskSucceeded():
            COUNTS.succeed()
        case events.Polled():
            COUNTS.polled += 1
            COUNTS.tried += event.tried
            COUNTS.won += event.won
        case events.StreamConnected():
            live.add(event.task_id)
            COUNTS.live, COUNTS.last_live = len(live), time.monotonic()
        case events.StreamDisconnected():
            live.discard(event.task_id)
            COUNTS.live = len(live)
        case events.TaskFailed() | events.TaskRetried() | events.TaskGivenUp():
            COUNTS.failed += 1
        case events.LeaseLost() | events.SettleRefused():
            COUNTS.lost += 1
        case events.TaskReleased() | events.TaskTakenOver():
            COUNTS.given_back += 1


def main(overrides: dict[str, Any], *, doorbell: bool = False) -> int:
    """Run the agent until SIGTERM."""
    raise_open_files()
    settings = load_settings(**overrides)
    configure_logging(settings.log_level)
    plain = open_store(settings, for_agent=True)
    store = WatchedStore(plain.engine, blobs=plain.large_texts.blobs, monotonic=plain.monotonic)
    consumed = store.engine.consumed if isinstance(store.engine, DynamoEngine) else None
    bus = EventBus()
    Telemetry(bus)
    bus.subscribe(partial(count, live=set()))
    agent = Agent(
        store,
        Registry(nothing, note, timer, follow),
        settings,
        bus=bus,
        scope=task_scope,
        first_poll_s=0.0,
        doorbell=open_doorbell(settings) if doorbell else None,
    )
    store.engine.check()

    def answer(do: str, **arguments: Any) -> dict[str, Any]:
        if consumed:
            COUNTS.requests, COUNTS.refused = consumed.requests, consumed.refused
            COUNTS.write_units, COUNTS.read_units = consumed.write_units, consumed.read_units
        oldest = min(list(WatchedStore.last_sent.values()), default=None)
        if oldest is not None:  # a beat without an answer is late too
            COUNTS.beat_late_s = max(COUNTS.beat_late_s, time.monotonic() - oldest - BEAT_S)
        return COUNTS.answer(do, **arguments)

    serve({}, answer)
    COUNTS.await_go()
    stuck = agent.run()
    sys.stderr.flush()
    os._exit(1 if stuck else 0)


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    sys.exit(main(given["settings"], doorbell=given.get("doorbell", False)))
