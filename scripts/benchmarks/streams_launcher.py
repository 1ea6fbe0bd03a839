"""One agent as `thunderagent run` starts it, which can also be asked how it is.

python -m benchmarks.streams_launcher '{"store": "sqlite:///tasks.db", "queues": {"bench": 10}}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.streams_children import raise_open_files, say, serve
from benchmarks.streams_jobs import BEAT_S, STREAM
from benchmarks.streams_probe import PROBE
from thunderagent.agent.loop import Agent
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event
from thunderagent.settings import load_settings
from thunderagent.stores.opening import open_store
from thunderagent.stores.tasks import Beat, Renewal, TaskStore
from thunderagent.telemetry.logs import Telemetry, configure_logging, task_scope

JOBS: Final = "benchmarks.streams_jobs"


class Beats:
    """How late heartbeats of streams were acknowledged; a beat is due one interval after the last good one was sent."""

    def __init__(self) -> None:
        self.number = 0
        self._sent: dict[str, float] = {}
        self._latest_s = 0.0

    def acknowledged(self, beats: Sequence[Beat], renewals: Sequence[Renewal]) -> None:
        """These had an answer now."""
        now = time.monotonic()
        for beat, renewal in zip(beats, renewals, strict=True):
            if renewal.lease is not None and beat.lease.task.job == STREAM:
                self.number += 1
                self._latest_s = max(self._latest_s, now - beat.lease.held_from - BEAT_S)
                self._sent[beat.lease.task_id] = renewal.lease.held_from

    def latest_s(self) -> float:
        """The largest lateness since the last mark, of beats that still have no answer too."""
        oldest = min(list(self._sent.values()), default=None)
        open_s = 0.0 if oldest is None else time.monotonic() - oldest - BEAT_S
        return max(self._latest_s, open_s)

    def mark(self) -> None:
        """Count afresh."""
        self._latest_s = 0.0


class WatchedStore(TaskStore):
    """The store of the agent, which notes when heartbeats had their answers."""

    beats = Beats()

    def sibling(self) -> TaskStore:
        return WatchedStore(self.engine.sibling(), blobs=self.large_texts.blobs, monotonic=self.monotonic)

    def renew(self, beats: Sequence[Beat]) -> list[Renewal]:
        renewals = super().renew(beats)
        self.beats.acknowledged(beats, renewals)
        return renewals


class Listener:
    """Counts what the agent tells of its streams."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.last_live = 0.0
        self.polled = 0
        self.failed = 0
        self.lost = 0
        self.late_told = 0

    def listen(self, event: Event) -> None:
        """Count an event."""
        match event:
            case events.StreamConnected():
                self.live.add(event.task_id)
                self.last_live = time.monotonic()
            case events.StreamDisconnected():
                self.live.discard(event.task_id)
            case events.Polled():
                self.polled += 1
            case events.TaskFailed() | events.TaskRetried() | events.TaskGivenUp():
                self.failed += 1
            case events.LeaseLost() | events.SettleRefused():
                self.lost += 1
            case events.HeartbeatLate():
                self.late_told += 1


def main(overrides: dict[str, Any]) -> int:
    """Run the agent until SIGTERM."""
    raise_open_files()
    settings = load_settings(**overrides)
    configure_logging(settings.log_level)
    plain = open_store(settings, for_agent=True)
    store = WatchedStore(plain.engine, blobs=plain.large_texts.blobs, monotonic=plain.monotonic)
    bus, listener, beats = EventBus(), Listener(), WatchedStore.beats
    Telemetry(bus)
    bus.subscribe(listener.listen)
    agent = Agent(store, Registry.from_package(JOBS), settings, bus=bus, scope=task_scope)

    def more() -> dict[str, Any]:
        return {
            "live": len(listener.live),
            "last_live": listener.last_live,
            "polled": listener.polled,
            "failed": listener.failed,
            "lost": listener.lost,
            "late_told": listener.late_told,
            "beats": beats.number,
            "beat_latest_s": beats.latest_s(),
        }

    def answer(do: str, **arguments: Any) -> dict[str, Any]:
        if do == "mark":
            beats.mark()
        return PROBE.answer(do, more, **arguments)

    say({"pid": os.getpid()})
    serve(answer)
    stuck = agent.run()
    sys.stderr.flush()
    os._exit(1 if stuck else 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
